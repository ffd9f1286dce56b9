"""The pictures of an evaluation: which ones, their labels under common names, what is set aside for testing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moco.data.sources import ArraySource, Source, open_source
from moco.data.sources.base import Pictures
from moco.data.sources.folder import FileSource
from moco.errors import UserError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Part:
    """Some pictures of a source.

    source: where they are. indices: (N,) their numbers there. labels: (N,) int64, positions in `classes`, or None.
    classes: the names of the labels. name: what messages call it.
    """

    source: Source
    indices: Array
    labels: Tensor | None
    classes: Sequence[str]
    name: str

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, rows: Array | Tensor) -> Part:
        """Those of the pictures at the positions `rows`."""
        rows = np.asarray(rows)
        labels = None if self.labels is None else self.labels[torch.from_numpy(rows)]
        return replace(self, indices=self.indices[rows], labels=labels)

    def known(self) -> Tensor:
        """The labels. Raises UserError where there are none."""
        if self.labels is None:
            raise UserError(f"{self.name} has no labels: {LABELS_HINT}")
        return self.labels

    def as_source(self) -> Source:
        """The pictures as a source of their own, with the same numbers as the rows here."""
        if isinstance(self.source, ArraySource):
            return ArraySource(self.source.images[self.indices], name=self.source.name)
        return _Subset(self.source, self.indices)


LABELS_HINT = "put each class into a folder of its own, y into the .npz, or name --labels FILE.npy (labels=ARRAY)"


class _Subset(Pictures):
    """Some pictures of another source."""

    def __init__(self, source: Source, indices: Array) -> None:
        super().__init__()
        self._source, self._indices, self.channels = source, indices, source.channels

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> tuple[bytes | Array, str]:
        sample = self._source[int(self._indices[index])]
        return sample.image, sample.name


def open_part(data: Any, labels: Any, *, needed: bool, most: int | None = None, seed: int = 0) -> Part:
    """The pictures in `data`, whatever `open_source` takes, at most `most` of them, drawn with `seed`.

    needed: labels are; pictures without one (−1) are left out, and UserError is raised where nothing is left.
    """
    if isinstance(labels, (list, tuple)):
        labels = np.asarray(labels)
    source = open_source(data, labels)
    what = str(data) if isinstance(data, (str, Path)) else "the array"
    indices = np.arange(len(source))
    if needed and source.labels is None:
        _refuse_one_class(source, what)
        raise UserError(f"{what} has no labels: {LABELS_HINT}")
    if needed and source.labels is not None:
        indices = np.flatnonzero(source.labels >= 0)
        if not len(indices):
            raise UserError(f"{what}: none of its {len(source)} pictures has a label")
    if most is not None and most < len(indices):
        indices = np.sort(np.random.default_rng(seed).permutation(indices)[:most])
    if source.labels is None or (source.labels[indices] < 0).any():
        return Part(source, indices, None, [], what)
    names = _names(source)
    numbers, labels_of = np.unique(source.labels[indices], return_inverse=True)
    return Part(source, indices, torch.from_numpy(labels_of), [names(int(number)) for number in numbers], what)


def _refuse_one_class(source: Source, what: str) -> None:
    """Raise UserError for a folder whose pictures all lie in one folder: they have a label, though no other."""
    names = source.names if isinstance(source, FileSource) else ()
    folders = {name.rpartition("/")[0] for name in names}
    first = {folder.partition("/")[0] for folder in folders}
    if len(first) != 1 or "" in first:
        return
    only = first.pop()
    inside = f"; name {os.path.join(what, only)} if its folders are the classes" if folders != {only} else ""
    raise UserError(f"{what} has one class only, {only}: two or more are needed, each a folder of its own{inside}")


def _names(source: Source) -> Any:
    classes = source.classes
    return (lambda number: classes[number]) if classes is not None else str


def same_classes(train: Part, test: Part) -> tuple[Part, Part]:
    """Both parts with one list of classes, matched by name; numbers in the order of numbers."""
    names = set(train.classes) | set(test.classes)
    numbers = all(name.lstrip("-").isdecimal() for name in names)
    classes = sorted(names, key=int) if numbers else sorted(names)
    place = {name: number for number, name in enumerate(classes)}
    found = []
    for part in (train, test):
        table = torch.tensor([place[name] for name in part.classes], dtype=torch.int64)
        found.append(replace(part, labels=table[part.known()], classes=classes))
    return found[0], found[1]


def split(part: Part, share: float, seed: int) -> tuple[Part, Part]:
    """Set a share of each class aside for testing (of all pictures where there are no labels), drawn with `seed`.

    A class keeps at least one picture to learn from, and where it has two or more sets at least one aside.
    Raises UserError where nothing could be set aside.
    """
    labels = torch.zeros(len(part), dtype=torch.int64) if part.labels is None else part.labels
    generator = np.random.default_rng(seed)
    aside = []
    for label in labels.unique().tolist():
        rows = np.flatnonzero(labels.numpy() == label)
        count = min(max(round(share * len(rows)), 1), len(rows) - 1)
        aside.append(generator.permutation(rows)[:count])
    chosen = np.zeros(len(part), dtype=bool)
    chosen[np.concatenate(aside)] = True
    if not chosen.any():
        raise UserError(f"{part.name} has one picture of each class: nothing can be set aside; name --test DATA")
    return part.rows(np.flatnonzero(~chosen)), part.rows(np.flatnonzero(chosen))


def data_fingerprint(source: Source) -> str | None:
    """A hash of what a source holds, or None where that cannot be told without reading all of it.

    Arrays: their content. Files: their paths, sizes and times of change.
    """
    found = hashlib.sha256(type(source).__name__.encode())
    if isinstance(source, ArraySource):
        file = source._file
        if file is None:
            found.update(f"{source.images.shape}".encode())
            found.update(np.ascontiguousarray(source.images).data)
        else:
            _add_file(found, str(file.absolute()))
        return found.hexdigest()
    if isinstance(source, FileSource):
        try:
            for name in source.names:
                _add_file(found, os.path.join(os.path.abspath(source.root), name))
        except (OSError, ValueError):  # one is not there any more: whatever was kept is not of these
            return None
        return found.hexdigest()
    return None


def _add_file(found: Any, path: str) -> None:
    status = os.stat(path)
    found.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
