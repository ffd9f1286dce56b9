"""Pictures with objects marked in them: what the readers of COCO and VOC make of files, and a detector learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from moco.data.decode import DecodeError, decode
from moco.data.reading import Unreadable
from moco.detection.outlines import Outline, mask_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Marked:
    """A picture and the objects in it.

    path: its file. width, height: in pixels. boxes: (n, 4) float32, left, top, right and bottom edge in pixels from the
    picture's upper left corner. labels: (n,) int64, positions in the classes. aside: (n,) bool, objects that are not
    learned and neither right nor wrong where found: crowds of COCO, difficult ones of VOC. outlines: n masks, run
    length encoded; None for an object without one.
    """

    path: Path
    width: int
    height: int
    boxes: Array
    labels: Array
    aside: Array
    outlines: tuple[Outline | None, ...]

    def learned(self) -> Marked:
        """The picture without the objects that are set aside."""
        kept = np.flatnonzero(~self.aside)
        return replace(
            self,
            boxes=self.boxes[kept],
            labels=self.labels[kept],
            aside=self.aside[kept],
            outlines=tuple(self.outlines[int(place)] for place in kept),
        )

    def pixels(self, channels: int) -> Array:
        """The picture itself, (height, width, channels) uint8. Raises Unreadable."""
        try:
            found = decode(self.path.read_bytes(), channels)
        except OSError as error:
            raise Unreadable(str(self.path), error.strerror or str(error)) from error
        except DecodeError as error:
            raise Unreadable(str(self.path), error.reason) from error
        if found.shape[:2] != (self.height, self.width):
            size = f"{found.shape[1]} × {found.shape[0]} pixels, marked as {self.width} × {self.height}"
            raise Unreadable(str(self.path), size)
        return found

    def masks(self) -> Array:
        """(n, height, width) uint8, 1 where an object is; the whole box of one without an outline."""
        found = np.zeros((len(self.outlines), self.height, self.width), np.uint8)
        for place, outline in enumerate(self.outlines):
            if outline is not None:
                found[place] = mask_of(outline)
            else:
                left, top, right, bottom = (round(float(edge)) for edge in self.boxes[place])
                found[place, top:bottom, left:right] = 1
        return found


@dataclass
class LeftOut:
    """What could not be used: how often, and where first, by the reason."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Note one more."""
        count, first = self.found.get(reason, (0, where))
        self.found[reason] = (count + 1, first)

    def lines(self, name: str) -> list[str]:
        """A line for each reason."""
        return [
            f"{name}: {count} left out, {reason} (the first: {where})" for reason, (count, where) in self.found.items()
        ]


@dataclass(frozen=True)
class MarkedSet:
    """A data set. classes: names of the labels, in their order. notes: a line for each kind of thing left out."""

    name: str
    classes: tuple[str, ...]
    pictures: tuple[Marked, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pictures)

    def has_outlines(self) -> bool:
        """Whether every object that is not set aside has an outline."""
        return all(
            outline is not None or aside
            for picture in self.pictures
            for outline, aside in zip(picture.outlines, picture.aside, strict=True)
        )

    def objects(self) -> int:
        """How many objects there are, without those set aside."""
        return sum(int((~picture.aside).sum()) for picture in self.pictures)

    def rows(self, rows: Sequence[int] | Array) -> MarkedSet:
        """Those of the pictures at the positions `rows`, in that order."""
        return replace(self, pictures=tuple(self.pictures[int(row)] for row in rows))

    def to_learn(self, *, empty: bool) -> MarkedSet:
        """Without objects that are set aside; `empty` keeps pictures in which none is left."""
        pictures = [picture.learned() for picture in self.pictures]
        return replace(self, pictures=tuple(picture for picture in pictures if empty or len(picture.boxes)))

    def named(self, classes: tuple[str, ...]) -> MarkedSet:
        """The same with labels that are positions in another list of classes, which has all names of this one."""
        table = np.array([classes.index(name) for name in self.classes], np.int64)
        pictures = tuple(replace(picture, labels=table[picture.labels]) for picture in self.pictures)
        return replace(self, classes=classes, pictures=pictures)


def joined(parts: Sequence[MarkedSet]) -> MarkedSet:
    """Several data sets as one, their classes matched by name."""
    classes = common_classes(*parts)
    pictures = tuple(picture for part in parts for picture in part.named(classes).pictures)
    notes = tuple(note for part in parts for note in part.notes)
    return MarkedSet(", ".join(part.name for part in parts), classes, pictures, notes)


def common_classes(*parts: MarkedSet) -> tuple[str, ...]:
    """The names of all classes, each once, in the order in which they come."""
    return tuple(dict.fromkeys(name for part in parts for name in part.classes))


class Marks:
    """Collects the objects of one picture; what is wrong with them is noted in `left_out`.

    Args:
        path: the file of the picture; width, height: in pixels.
        left_out: where to note objects that cannot be used.
    """

    def __init__(self, path: Path, width: int, height: int, left_out: LeftOut) -> None:
        self._path, self._width, self._height, self._left_out = path, width, height, left_out
        self._boxes: list[tuple[float, float, float, float]] = []
        self._labels: list[int] = []
        self._aside: list[bool] = []
        self._outlines: list[Outline | None] = []

    def add(
        self, box: Sequence[float], label: int, where: str, *, aside: bool = False, outline: Outline | None = None
    ) -> None:
        """Add an object with its edges in pixels. A box that reaches over the edge of the picture is cut there."""
        left, top, right, bottom = box
        if not np.isfinite(box).all() or right <= left or bottom <= top:
            self._left_out.add("boxes without an area", where)
            return
        left, top = max(left, 0.0), max(top, 0.0)
        right, bottom = min(right, float(self._width)), min(bottom, float(self._height))
        if right <= left or bottom <= top:
            self._left_out.add("boxes outside of their picture", where)
            return
        self._boxes.append((left, top, right, bottom))
        self._labels.append(label)
        self._aside.append(aside)
        self._outlines.append(outline)

    def done(self) -> Marked:
        """The picture with its objects."""
        return Marked(
            self._path,
            self._width,
            self._height,
            np.array(self._boxes, np.float32).reshape(-1, 4),
            np.array(self._labels, np.int64),
            np.array(self._aside, bool),
            tuple(self._outlines),
        )
