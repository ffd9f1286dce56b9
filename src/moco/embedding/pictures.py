"""Pictures on their way to the encoder: batches that say which of them could not be read; what data it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from moco.data import per_image
from moco.data.decode import DecodeError, decode
from moco.data.loader import central_box, evaluation_batches, worker_loader
from moco.data.reading import Unreadable, read
from moco.data.sources import ArraySource, Source
from moco.data.sources.folder import FileSource
from moco.evaluate.pictures import data_fingerprint

Array = np.ndarray[Any, Any]

BATCH = 256
"""Pictures that are encoded at a time. A part of an embedding is whole batches, so that it does not matter where one
ends: rounding in a network may depend on the size of the batch."""

PROBED = 64
"""Pictures by whose content data is known again where it cannot be told otherwise."""


@dataclass
class PictureBatch:
    """Pictures of a batch.

    pictures: uint8 (n, C, S, S) as `evaluation_batches` gives them, mid-grey where one could not be read. names: n
    paths or names. unreadable: position in the batch → reason.
    """

    pictures: torch.Tensor
    names: list[str]
    unreadable: dict[int, str]


def picture_batches(
    source: Source, indices: Array, *, size: int, channels: int, workers: int, first: int = 0
) -> Iterator[PictureBatch]:
    """The pictures `indices` of a source by batches of `BATCH`, from batch number `first` on, in order."""
    batches = _Batches(source, indices, size, channels)
    rest = range(first, len(batches))
    if workers == 0 or not rest:
        return (batches[number] for number in rest)
    return iter(worker_loader(batches, rest, min(workers, len(rest))))


class _Batches(Dataset[PictureBatch]):
    def __init__(self, source: Source, indices: Array, size: int, channels: int) -> None:
        self.source, self.indices, self.size, self.channels = source, indices, size, channels

    def __len__(self) -> int:
        return -(-len(self.indices) // BATCH)

    def __getitem__(self, number: int) -> PictureBatch:
        ids = self.indices[number * BATCH : (number + 1) * BATCH]
        if isinstance(self.source, ArraySource):
            batches = evaluation_batches(self.source, ids, size=self.size, channels=self.channels, batch_size=BATCH)
            return PictureBatch(next(batches), [f"{self.source.name}[{index}]" for index in ids], {})
        views = np.full((len(ids), self.size, self.size, self.channels), 128, np.uint8)
        names, unreadable = [], {}
        for row, index in enumerate(ids):
            name, reason = self._read_into(views[row], int(index))
            names.append(name)
            if reason:
                unreadable[row] = reason
        return PictureBatch(torch.from_numpy(views).permute(0, 3, 1, 2), names, unreadable)

    def _read_into(self, view: Array, index: int) -> tuple[str, str]:
        """Put the central square of a picture into `view`; its name, and why it could not be read or ""."""
        try:
            sample = read(self.source, index)
        except Unreadable as error:
            return error.name, error.reason
        name = path_of(self.source, sample.name)
        try:
            pixels = decode(sample.image, self.channels)
        except DecodeError as error:
            return name, error.reason
        height, width = pixels.shape[:2]
        view[:] = per_image.crop_resize(pixels, *central_box(height, width, self.size), self.size)
        return name, ""


def path_of(source: Source, name: str) -> str:
    """What a picture is called in an embedding: its path as it opens from the folder the command runs in, or its name
    where it is no file of its own."""
    return str(source.root / name) if isinstance(source, FileSource) else name


def source_identity(source: Source) -> str:
    """A hash by which a later run knows whether it has the same pictures.

    Arrays: their content; files: paths, sizes and times (`data_fingerprint`); anything else, and files of which one is
    gone: how many there are, and names and content of 64 of them, evenly spaced.
    """
    whole = data_fingerprint(source)
    if whole is not None:
        return whole
    found = hashlib.sha256(f"{type(source).__name__} {len(source)}".encode())
    for index in np.unique(np.linspace(0, len(source) - 1, PROBED).astype(int)):
        try:
            sample = read(source, int(index))
        except Unreadable as error:
            found.update(f"{error.name}: {error.reason}\n".encode("utf-8", "surrogatepass"))
            continue
        image = sample.image if isinstance(sample.image, bytes) else np.ascontiguousarray(sample.image).tobytes()
        found.update(f"{sample.name} {len(image)}\n".encode("utf-8", "surrogatepass") + image)
    return found.hexdigest()


def row_labels(source: Source, indices: Array) -> Array:
    """Labels of the pictures `indices`: int64, −1 where there is none."""
    if source.labels is None:
        return np.full(len(indices), -1, np.int64)
    return np.asarray(source.labels[indices], np.int64)
