"""One picture of a source: read, decode, and look for another one where that fails."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from moco.data.decode import DecodeError, decode
from moco.data.sources import Sample, Source
from moco.errors import UserError, counted

Array = np.ndarray[Any, Any]


class Unreadable(Exception):
    """A picture that is gone or damaged: its name, and why in one line."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason


def read(source: Source, index: int) -> Sample:
    """Picture `index` as the source has it. Raises Unreadable for a file that is gone."""
    try:
        return source[index]
    except OSError as error:
        raise Unreadable(str(error.filename or index), error.strerror or str(error)) from error


def read_pixels(source: Source, index: int, channels: int) -> Array:
    """Pixels of picture `index`, (H, W, channels). Raises Unreadable for a file that is gone or damaged."""
    sample = read(source, index)
    try:
        return decode(sample.image, channels)
    except DecodeError as error:
        raise Unreadable(sample.name, error.reason) from error


def stand_ins(index: int, count: int) -> Iterator[int]:
    """Picture `index` of `count`, then all others once, in an order that follows from the two.

    Far from each other: damaged files often lie side by side, and should not all be replaced by the same neighbour.
    """
    stride = round(count * (math.sqrt(5) - 1) / 2) or 1
    while math.gcd(stride, count) > 1:
        stride -= 1
    return ((index + ahead * stride) % count for ahead in range(count))


def readable(source: Source, index: int, channels: int) -> tuple[Array, int, list[tuple[str, str]]]:
    """Pixels of picture `index`, or of the first of its `stand_ins` that can be read; its number; (name, reason) of
    those passed over.

    Raises UserError if there is none.
    """
    skipped: list[tuple[str, str]] = []
    for number in stand_ins(index, len(source)):
        try:
            return read_pixels(source, number, channels), number, skipped
        except Unreadable as error:
            skipped.append((error.name, error.reason))
    name, reason = skipped[0]
    raise UserError(f"none of the {counted(len(source), 'image')} can be read; the first: {name}: {reason}")
