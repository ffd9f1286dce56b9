"""Embeddings from files, a piece at a time: what `search` and `cluster` read."""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moco.data.sources import PackedNames
from moco.data.sources.base import one_line
from moco.embedding.writing import COLUMNS, SUFFIXES, arrow
from moco.errors import UserError

Array = np.ndarray[Any, Any]

FORMAT = 1
"""Version of what is in an embedding file; written as `format`."""
CHUNK = 8192
"""Rows of features in memory at a time."""


@dataclass(frozen=True)
class Entries:
    """What the rows of an embedding are.

    index: (N,) int64, numbers in the data. paths: N paths or names. labels: (N,) int64, −1 for none; None where no row
    has one. classes: names of the labels 0, 1, …, or None.
    """

    index: Array
    paths: PackedNames
    labels: Array | None
    classes: list[str] | None

    def label(self, row: int) -> int | None:
        """The label of a row, or None."""
        found = -1 if self.labels is None else int(self.labels[row])
        return found if found >= 0 else None

    def class_name(self, row: int) -> str | None:
        """What the label of a row is called, or None."""
        label = self.label(row)
        return self.classes[label] if label is not None and self.classes and label < len(self.classes) else None


class Embeddings(ABC):
    """An embedding file. path: where it is. about: how it was made. len(…): its rows."""

    def __init__(self, path: Path, about: Any) -> None:
        wanted = {"format": int, "rows": int, "dimensions": int, "weights": str, "dtype": str}
        if not isinstance(about, dict) or not all(isinstance(about.get(name), kind) for name, kind in wanted.items()):
            raise UserError(f"{path} does not say how it was made: name a file as moco embed wrote it")
        if about["format"] > FORMAT:
            raise UserError(f"{path} was written by a later version of moco ({about.get('moco')}): update moco")
        self.path, self.about = path, about
        self.dimensions: int = about["dimensions"]

    def __len__(self) -> int:
        return int(self.about["rows"])

    @abstractmethod
    def chunks(self) -> Iterator[Array]:
        """The features in order, (n, D) float32, at most `CHUNK` rows at a time. Raises UserError."""

    @abstractmethod
    def entries(self) -> Entries:
        """What the rows are. Raises UserError."""

    def features(self) -> Array:
        """All features, (N, D), in the type of the file."""
        found = np.empty((len(self), self.dimensions), self.about["dtype"])
        start = 0
        for chunk in self.chunks():
            found[start : start + len(chunk)] = chunk
            start += len(chunk)
        return found

    def unit_chunks(self) -> Iterator[Array]:
        """The features in order, each row of length 1; a row of zeros stays one."""
        for chunk in self.chunks():
            yield unit(chunk)

    def damaged(self, reason: object) -> UserError:
        """What to say of a file that does not hold what it should."""
        return UserError(f"{self.path} is damaged ({reason}): make it anew with moco embed")


def unit(features: Array) -> Array:
    """Rows of length 1, (n, D) float32; a row of zeros stays one."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    made: Array = np.asarray(features / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)
    return made


def open_embeddings(path: str | Path) -> Embeddings:
    """The embedding in a .parquet or .npy file. Raises UserError with one line where it is none."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"no embedding file {path}: make it with moco embed RUN DATA --out {path}")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path} is no embedding: name the .parquet or .npy file that moco embed wrote")
    return ParquetEmbeddings(path) if path.suffix.lower() == ".parquet" else NpyEmbeddings(path)


class ParquetEmbeddings(Embeddings):
    """An embedding in a Parquet file."""

    def __init__(self, path: Path) -> None:
        pa = arrow(path)
        try:
            with self._file(path) as file:
                rows, metadata = file.metadata.num_rows, (file.schema_arrow.metadata or {}).get(b"moco", b"null")
                names = file.schema_arrow.names
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} is not a readable Parquet file: {one_line(error)}") from error
        try:
            about = json.loads(metadata)
        except ValueError:
            about = None
        super().__init__(path, about)
        if rows != len(self) or not {*COLUMNS, "feature"} <= set(names):
            raise self.damaged(f"{rows} rows of {', '.join(names)}"[:200])

    def _file(self, path: Path) -> Any:
        # Without the buffer ahead, which would hold the whole column.
        return arrow(path).parquet.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)

    def chunks(self) -> Iterator[Array]:
        """The features in order, (n, D) float32."""
        pa, count = arrow(self.path), 0
        try:
            with self._file(self.path) as file:
                for batch in file.iter_batches(CHUNK, columns=["feature"], use_threads=False):
                    values = batch.column(0).flatten().to_numpy(zero_copy_only=False)
                    yield np.asarray(values.reshape(batch.num_rows, self.dimensions), np.float32)
                    count += batch.num_rows
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self.damaged(one_line(error)) from error

    def entries(self) -> Entries:
        """What the rows are."""
        pa = arrow(self.path)
        try:
            with self._file(self.path) as file:
                index = file.read(columns=["index"]).column(0).to_numpy()
                labels = file.read(columns=["label"]).column(0).fill_null(-1).to_numpy()
                batches = file.iter_batches(CHUNK, columns=["path"], use_threads=False)
                paths = PackedNames.of(name for batch in batches for name in batch.column(0).to_pylist())
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self.damaged(one_line(error)) from error
        return Entries(index, paths, labels if (labels >= 0).any() else None, self.about.get("classes"))


class NpyEmbeddings(Embeddings):
    """An embedding in a .npy file, with .csv and .json beside it."""

    def __init__(self, path: Path) -> None:
        beside = path.with_suffix(".json")
        try:
            about = json.loads(beside.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"{path} needs {beside.name} beside it: {error.strerror}") from error
        except ValueError as error:
            raise UserError(f"{beside} is damaged: make {path.name} anew with moco embed") from error
        super().__init__(path, about)
        try:
            self.mapped: Array = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise self.damaged(one_line(error)) from error
        if self.mapped.shape != (len(self), self.dimensions) or self.mapped.dtype != about["dtype"]:
            raise self.damaged(f"{self.mapped.dtype} of shape {self.mapped.shape}")

    def chunks(self) -> Iterator[Array]:
        """The features in order, (n, D) float32."""
        for start in range(0, len(self), CHUNK):
            yield np.asarray(self.mapped[start : start + CHUNK], np.float32)

    def features(self) -> Array:
        """All features, (N, D), mapped from the file: read as they are needed."""
        return self.mapped

    def entries(self) -> Entries:
        """What the rows are."""
        path, rows = self.path.with_suffix(".csv"), len(self)
        index, labels = np.empty(rows, np.int64), np.full(rows, -1, np.int64)

        def names(lines: Iterator[list[str]]) -> Iterator[str]:
            for row, (number, name, label, _) in enumerate(lines):
                index[row] = int(number)
                labels[row] = int(label) if label else -1
                yield name

        try:
            with path.open(encoding="utf-8", newline="") as file:
                lines = csv.reader(file)
                next(lines, None)
                paths = PackedNames.of(names(lines))
        except OSError as error:
            raise UserError(f"{self.path} needs {path.name} beside it: {error.strerror}") from error
        except (ValueError, IndexError, csv.Error) as error:
            raise UserError(f"{path} is damaged: make {self.path.name} anew with moco embed") from error
        if len(paths) != rows:
            raise UserError(f"{path} has {len(paths)} rows, and {self.path.name} {rows}: they do not belong together")
        return Entries(index, paths, labels if (labels >= 0).any() else None, self.about.get("classes"))
