"""Parquet files with a column of image files."""

from __future__ import annotations

import errno
import json
import shutil
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from moco.data.sources.base import Array, PackedNames, Pictures, one_line
from moco.data.sources.cache import Cache, digest, locked, written_whole
from moco.data.sources.labels import LABEL_NAMES, LabelTexts, number_names, number_texts
from moco.data.sources.ranges import LocalFile
from moco.data.sources.shards import ShardIndex, ShardSource, load_index, save_index
from moco.errors import UserError, counted

IMAGE_NAMES = ("image", "images", "img", "picture", "photo", "jpg", "png", "image_bytes", "bytes")
"""What a column of images is called, the likeliest first."""

DIRECT_BYTES = 16 * 2**20
"""Row groups up to this size are read for one picture; files with larger ones are copied to the cache first."""

MOST_GROUPS = 4


@dataclass(frozen=True)
class _Layout:
    """What a Parquet file holds: the column to read, rows per row group, bytes of the largest group and of all."""

    column: str
    label: str | None
    classes: list[str] | None
    groups: list[int]
    largest: int
    total: int


def open_parquet(files: Sequence[Path], cache: Cache) -> Pictures:
    """The pictures in Parquet files, one file after the other.

    The images are in a struct column with `bytes`, as Hugging Face writes them, or in a binary column; labels in a
    column called label or the like. Raises UserError for files without images, or that cannot be read.
    """
    layouts = [_layout(file) for file in files]
    source: Pictures
    if max(layout.largest for layout in layouts) <= DIRECT_BYTES:
        source = ParquetSource(files, [layout.column for layout in layouts], [layout.groups for layout in layouts])
    else:
        source = _copied(files, layouts, cache)
    if len(source) == 0:
        raise UserError(f"no images in {files[0]}: it has no rows")
    if all(layout.label is not None for layout in layouts):
        columns = [_read_labels(file, layout) for file, layout in zip(files, layouts, strict=True)]
        source.labels, source.classes = label_column(columns, layouts[0].classes)
    return source


class ParquetSource(Pictures):
    """Parquet files whose row groups are small: for a picture its row group is read, and the last four are kept.

    Args:
        files: the files. columns: of each, the one with the bytes. groups: of each, the rows in every row group.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str], groups: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._files, self._columns = list(files), list(columns)
        self._starts = list(accumulate(map(sum, groups), initial=0))
        self._group_starts = [list(accumulate(rows, initial=0)) for rows in groups]
        self._kept: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, index: int) -> tuple[bytes, str]:
        """Bytes and name of a picture."""
        number = bisect_right(self._starts, index) - 1
        row = index - self._starts[number]
        group = bisect_right(self._group_starts[number], row) - 1
        name = f"{self._files[number].name}[{row}]"
        values = self._kept.pop((number, group), None)
        if values is None:
            values = self._read_group(number, group)
        self._kept[number, group] = values
        if len(self._kept) > MOST_GROUPS:
            self._kept.popitem(last=False)
        return image_bytes(values[row - self._group_starts[number][group]].as_py()), name

    def _read_group(self, number: int, group: int) -> Any:
        import pyarrow as pa

        try:
            with _parquet_file(self._files[number]) as file:
                return file.read_row_group(group, columns=[self._columns[number]], use_threads=False).column(0)
        except (OSError, pa.ArrowException) as error:
            raise OSError(errno.EIO, one_line(error), str(self._files[number])) from error


def image_bytes(value: Any) -> bytes:
    """The bytes in a cell: bytes, or a mapping with `bytes`. b"" where there are none: that cannot be decoded."""
    return (value.get("bytes") if isinstance(value, dict) else value) or b""


def label_column(columns: Sequence[Any], classes: list[str] | None) -> tuple[Array | None, list[str] | None]:
    """Labels and class names from Arrow columns of integers or strings; none for columns of anything else."""
    import pyarrow as pa

    if all(pa.types.is_integer(column.type) for column in columns):
        labels = [np.asarray(column.cast(pa.int64()).fill_null(-1)) for column in columns]
        return np.concatenate(labels), classes
    if not all(pa.types.is_string(column.type) or pa.types.is_large_string(column.type) for column in columns):
        return None, None
    texts = LabelTexts()
    for column in columns:
        for chunk in column.chunks:
            for value in chunk:
                texts.add(value.as_py())
    if classes is not None:
        return number_names(texts.codes, texts.texts)
    return number_texts(texts.codes, texts.texts)


def needs(package: str, what: str) -> UserError:
    """What to say where a package of an extra is missing."""
    return UserError(f"{what} needs the package {package}: pip install 'momentum-contrast[datasets]'")


def _parquet_file(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise needs("pyarrow", str(path)) from error
    return parquet.ParquetFile(path, memory_map=True)


def _layout(path: Path) -> _Layout:
    try:
        with _parquet_file(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except UserError:
        raise
    except Exception as error:  # of Arrow, whose classes are not known before it is imported
        raise UserError(f"{path} is not a readable Parquet file: {one_line(error)}") from error
    features = _features(schema)
    column = _image_column(schema, features, path)
    inner = ".bytes" if not _is_binary(schema.field(column).type) else ""
    place = next(at for at in range(metadata.num_columns) if metadata.schema.column(at).path == column + inner)
    sizes = [metadata.row_group(at).column(place).total_uncompressed_size for at in range(metadata.num_row_groups)]
    label = next((name for name in LABEL_NAMES if name in schema.names), None)
    described = features.get(label) if label else None
    classes = described.get("names") if isinstance(described, dict) else None
    if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        classes = None
    groups = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
    return _Layout(column + inner, label, classes, groups, max(sizes, default=0), sum(sizes))


def _features(schema: Any) -> dict[str, Any]:
    """What Hugging Face wrote about the columns, if it did."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _image_column(schema: Any, features: dict[str, Any], path: Path) -> str:
    """The column with the images, by its type. Raises UserError if there is none, or no telling which."""
    import pyarrow as pa

    found = [
        field.name
        for field in schema
        if _is_binary(field.type)
        or (
            pa.types.is_struct(field.type)
            and any(part.name == "bytes" and _is_binary(part.type) for part in field.type)
        )
    ]
    if not found:
        held = ", ".join(f"{field.name} ({field.type})"[:80] for field in schema)
        raise UserError(f"{path} has no column of images, binary or with bytes; it holds {held}"[:1000])
    described = [
        name for name in found if isinstance(features.get(name), dict) and features[name].get("_type") == "Image"
    ]
    for choice in (described, [name for name in IMAGE_NAMES if name in found], found):
        if len(choice) == 1 or (choice and choice is not found):
            return choice[0]
    raise UserError(f"{path} has several columns of bytes: {', '.join(found)}; call the one with the images image")


def _read_labels(path: Path, layout: _Layout) -> Any:
    with _parquet_file(path) as file:
        return file.read(columns=[layout.label], use_threads=False).column(0)


def _copied(files: Sequence[Path], layouts: Sequence[_Layout], cache: Cache) -> ShardSource:
    """The pictures of files with large row groups, copied once to the cache, where each can be reached."""
    if cache.folder is None:
        raise UserError(f"{files[0]} has large row groups: name a folder (cache) where its images can be copied to")
    folder = cache.folder / "parquet"
    try:
        with locked(folder / "lock"):  # of several processes the first one copies
            parts = [_copy(file, layout, folder) for file, layout in zip(files, layouts, strict=True)]
    except OSError as error:
        raise UserError(f"cannot copy the images of {files[0]} to {folder}: {one_line(error)}") from error
    source = ShardSource([blob for blob, _ in parts], [index for _, index in parts], "{}[{}]")
    size = sum(blob.size for blob, _ in parts)
    source.notices.append(
        f"{files[0]}: reading one image would mean reading a whole row group of up to "
        f"{max(layout.largest for layout in layouts) / 1e6:,.0f} MB, so the images of {counted(len(files), 'file')} "
        f"are kept in {folder} as well ({size / 1e9:,.2f} GB)"
    )
    return source


def _copy(path: Path, layout: _Layout, folder: Path) -> tuple[LocalFile, ShardIndex]:
    """The images of a file one after the other in another file, and where they are. Raises OSError."""
    original = LocalFile(path)
    target = folder / f"{digest(original.path)}.bin"
    kept = target.with_suffix(".npz")
    found = None
    with suppress(OSError):
        blob = LocalFile(target)
        found = load_index(kept, f"{original.identity} {blob.size}", blob.size)
    if found is None:
        if (free := shutil.disk_usage(folder).free) < layout.total + 2**30:
            raise OSError(errno.ENOSPC, f"{layout.total / 1e9:,.1f} GB are needed, {free / 1e9:,.1f} GB are free")
        sizes = array("q")
        with _parquet_file(path) as file, written_whole(target) as out:
            for batch in file.iter_batches(batch_size=16, columns=[layout.column], use_threads=False):
                for value in batch.column(0):
                    sizes.append(out.write(image_bytes(value.as_py())))
        blob = LocalFile(target)
        lengths = np.frombuffer(sizes, np.int64) if sizes else np.zeros(0, np.int64)
        names = PackedNames.of(map(str, range(len(lengths))))
        none = np.full(len(lengths), -1, np.int32)  # labels come from their own column
        found = ShardIndex(names, np.cumsum(lengths) - lengths, lengths.copy(), none, [], [])
        save_index(kept, f"{original.identity} {blob.size}", found)
    blob.name = str(path)
    return blob, found
