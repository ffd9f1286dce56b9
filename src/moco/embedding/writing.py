"""Embeddings into files: one Parquet file, or .npy with .csv and .json beside it. Whole files or none."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moco.data.sources import PackedNames
from moco.errors import UserError
from moco.train.checkpoints import rename, to_disk, write_atomically

Array = np.ndarray[Any, Any]
Rows = tuple[Array, PackedNames, Array, Array]
"""Some rows: numbers in the data (n,), names (n), labels (n,) with −1 for none, features (n, D)."""

SUFFIXES = (".parquet", ".npy")
COLUMNS = ("index", "path", "label", "class_name")


def arrow(path: object) -> Any:
    """The package pyarrow with its Parquet part. Raises UserError where it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{path}: Parquet files need the package pyarrow: pip install 'momentum-contrast[parquet]', or name an "
            ".npy file, which needs nothing more"
        ) from error
    return pyarrow


def safe_text(text: str) -> str:
    r"""A name as UTF-8 can hold it: bytes of a path that are no UTF-8 become \udc…"""
    return text.encode("utf-8", "backslashreplace").decode()


def write_parquet(path: Path, about: Mapping[str, Any], parts: Iterable[Rows], classes: Sequence[str] | None) -> None:
    """Write rows into a Parquet file, a row group for each part, `about` as JSON in the schema under `moco`.

    Columns: index, path, label, class_name (null where there is none), feature as a list of fixed size. Raises OSError.
    """
    pa = arrow(path)
    numbers = pa.float16() if about["dtype"] == "float16" else pa.float32()
    schema = pa.schema(
        [
            pa.field("index", pa.int64(), nullable=False),
            pa.field("path", pa.string(), nullable=False),
            pa.field("label", pa.int64()),
            pa.field("class_name", pa.string()),
            pa.field("feature", pa.list_(numbers, about["dimensions"]), nullable=False),
        ],
        metadata={"moco": json.dumps(about)},
    )
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        options = {"use_dictionary": ["class_name"], "write_page_checksum": True}
        # Features hardly become smaller, and reading them is what a search does.
        squeezed = dict.fromkeys(("index", "path", "label", "class_name"), "snappy") | {"feature.list.element": "none"}
        try:
            with pa.parquet.ParquetWriter(file, schema, compression=squeezed, **options) as writer:
                for part in parts:
                    writer.write_table(_table(pa, schema, part, classes))
        except pa.ArrowNotImplementedError as error:
            raise UserError(
                f"{path}: this pyarrow cannot write float16: update it (15 or later), or use --dtype float32"
            ) from error
        to_disk(file)
    rename(partial, path)


def _table(pa: Any, schema: Any, part: Rows, classes: Sequence[str] | None) -> Any:
    index, names, labels, features = part
    known = labels < 0
    columns = [
        pa.array(index),
        pa.array([safe_text(name) for name in names], pa.string()),
        pa.array(labels, mask=known),
        pa.array(_class_names(labels, classes), pa.string()),
        pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), features.shape[1]),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _class_names(labels: Array, classes: Sequence[str] | None) -> list[str | None]:
    known = len(classes) if classes is not None else 0
    return [safe_text(classes[label]) if classes is not None and 0 <= label < known else None for label in labels]


def write_npy(path: Path, about: Mapping[str, Any], parts: Iterable[Rows], classes: Sequence[str] | None) -> None:
    """Write features into FILE.npy, (N, D), the other columns into FILE.csv, and `about` into FILE.json.

    FILE.npy appears last: where it is, the others are. Raises OSError.
    """
    partial, table = path.with_name(path.name + ".partial"), path.with_suffix(".csv")
    half_table = table.with_name(table.name + ".partial")
    shape = (about["rows"], about["dimensions"])
    with partial.open("wb") as file, half_table.open("w", encoding="utf-8", newline="") as text:
        header = {"descr": np.dtype(about["dtype"]).newbyteorder("<").str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for index, names, labels, features in parts:
            file.write(np.ascontiguousarray(features, np.dtype(about["dtype"]).newbyteorder("<")).data)
            shown = (label if label >= 0 else "" for label in labels.tolist())
            of_class = (name or "" for name in _class_names(labels, classes))
            writer.writerows(zip(index.tolist(), map(safe_text, names), shown, of_class, strict=True))
        to_disk(file)
    rename(half_table, table)
    write_atomically(path.with_suffix(".json"), json.dumps(about, indent=2).encode())
    rename(partial, path)


def write_skipped(path: Path, skipped: Iterable[tuple[str, str]]) -> None:
    """Write the pictures that were left out, with reasons; no file where there are none. Raises OSError."""
    partial, count = path.with_name(path.name + ".partial"), 0
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        file.write("path,reason\n")
        for name, reason in skipped:
            writer.writerow((safe_text(name), safe_text(reason)))
            count += 1
    if count:
        rename(partial, path)
    else:
        partial.unlink()
        path.unlink(missing_ok=True)
