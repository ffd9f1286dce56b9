"""What all sources share: the sample, the protocol, and names that take little memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Array = np.ndarray[Any, Any]

EXTENSIONS = frozenset(
    f".{name}"
    for name in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "avif", "jp2", "j2k", "tif", "tiff", "gif"),
        *("bmp", "dib", "tga", "ico", "ppm", "pgm", "pbm", "pnm"),
    )
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture: file bytes or pixels (height × width × channels), its name, its label if it has one."""

    image: bytes | Array
    name: str
    label: int | None


@runtime_checkable
class Source(Protocol):
    """Pictures by number, always in the same order.

    Attributes:
        labels: (N,) int64, −1 for a picture without one; or None.
        classes: the names of the labels 0, 1, …, or None.
        channels: of the pictures, or None where only decoding tells.
        notices: lines for the user, such as what was left out. Whoever opens the source shows them once.
    """

    labels: Array | None
    classes: list[str] | None
    channels: int | None
    notices: list[str]

    def __len__(self) -> int:
        """How many pictures there are."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Picture number `index`. Raises IndexError, or OSError where the picture cannot be read any more."""
        ...


class Pictures(ABC):
    """A Source but for `__len__` and `read`: the range check, and the label that belongs to a picture."""

    def __init__(self) -> None:
        self.labels: Array | None = None
        self.classes: list[str] | None = None
        self.channels: int | None = None
        self.notices: list[str] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> tuple[bytes | Array, str]:
        """Content and name of picture `index`, which is in range. Raises OSError where it cannot be read."""

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        image, name = self.read(int(index))
        return Sample(image, name, None if self.labels is None else int(self.labels[index]))


class PackedNames:
    """Strings in one block of bytes: a million paths take tens of megabytes, and forked workers share them.

    Args:
        blob: uint8, the strings one after the other, in UTF-8 (lone surrogates allowed: names that are no UTF-8).
        ends: (N,) int64, where each of them ends in `blob`.
    """

    def __init__(self, blob: Array, ends: Array) -> None:
        self.blob, self.ends = blob, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> PackedNames:
        """Pack names as they come."""
        blob, ends = bytearray(), array("q")
        for name in names:
            blob += name.encode("utf-8", "surrogatepass")
            ends.append(len(blob))
        return cls(np.frombuffer(blob, np.uint8), np.frombuffer(ends, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[PackedNames]) -> PackedNames:
        """The names of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0] + [len(part.blob) for part in parts])
        ends = [part.ends + start for part, start in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([np.zeros(0, np.uint8), *(part.blob for part in parts)]),
            np.concatenate([np.zeros(0, np.int64), *ends]),
        )

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self.ends):
            raise IndexError(index)
        start = self.ends[index - 1] if index else 0
        return _decoded(self.blob[start : self.ends[index]].tobytes())

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), 4096):  # in pieces: fast, and never all of them as Python strings
            ends = self.ends[first : first + 4096].tolist()
            start = origin = int(self.ends[first - 1]) if first else 0
            piece = self.blob[start : ends[-1]].tobytes()
            for end in ends:
                yield _decoded(piece[start - origin : end - origin])
                start = end


def _decoded(name: bytes) -> str:
    try:
        return name.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # not from here, but from a damaged file
        return name.decode("utf-8", "replace")


def shape_text(values: Array) -> str:
    """The shape of an array as messages show it."""
    return " × ".join(map(str, values.shape)) or "a single value"


def one_line(error: BaseException, limit: int = 300) -> str:
    """What an exception says, on one line."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return text[:limit] or type(error).__name__
