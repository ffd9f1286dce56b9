"""TIFF files as measurements: any number of channels, as samples, planes or pages, of 8 to 64 bits.

Pillow and OpenCV read the TIFF files that are pictures; those with five channels, with 16 bits in three channels, or
with one channel a page they drop, cut down or refuse. This reads them, with Pillow's libtiff to decompress.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]

MOST_PAGES = 1024
_FORMATS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 11: "f", 12: "d", 13: "I", 16: "Q", 17: "q", 18: "Q"}
_DEFLATE = (8, 32946)
_BY_PILLOW = (5, 32773, 34925, 50000)  # LZW, PackBits, LZMA, Zstandard


@dataclass(frozen=True)
class Page:
    """One picture in a TIFF file, as its tags describe it.

    Attributes:
        height, width: in pixels, before turning. samples: values per pixel.
        depth: bits per value; kind: "u", "i" or "f" as NumPy has them.
        photometric: 0 white is zero, 1 black is zero, 2 RGB; others are left to Pillow.
        alpha: whether the last sample is transparency.
        orientation: 1…8 as in EXIF.
        low, high: the range of values that the file states, or None.
        separate: whether each sample has a plane of its own.
        block: height and width of the strips or tiles; offsets, counts: where they are.
    """

    height: int
    width: int
    samples: int
    depth: int
    kind: str
    photometric: int
    alpha: bool
    orientation: int
    low: float | None
    high: float | None
    separate: bool
    compression: int
    predictor: int
    block: tuple[int, int]
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    order: str


def is_tiff(data: bytes) -> bool:
    """Whether the bytes begin as a TIFF or BigTIFF file does."""
    return data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def pages(data: bytes) -> list[Page]:
    """The pictures in a TIFF file in full size, at most MOST_PAGES. Raises ValueError for a damaged file."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    (place,) = _unpack(data, order, "Q" if big else "I", 8 if big else 4)
    found: list[Page] = []
    seen: set[int] = set()
    while place and place not in seen and len(found) < MOST_PAGES:
        seen.add(place)
        tags, place = _directory(data, order, place, big)
        if not tags.get(254, (0,))[0] & 0b101:  # a thumbnail, or a mask of transparency
            found.append(_page(tags, order))
    if not found:
        raise ValueError("a TIFF file without pictures")
    return found


def _unpack(data: bytes, order: str, kind: str, place: int, count: int = 1) -> tuple[Any, ...]:
    try:
        return struct.unpack_from(f"{order}{count}{kind}", data, place)
    except (struct.error, OverflowError) as error:  # places beyond the file, or beyond any file
        raise ValueError("the TIFF file is cut off") from error


def _directory(data: bytes, order: str, place: int, big: bool) -> tuple[dict[int, tuple[Any, ...]], int]:
    """The tags at `place` with their values, and where the next ones are."""
    head, entry, inline = (8, 20, 8) if big else (2, 12, 4)
    (count,) = _unpack(data, order, "Q" if big else "H", place)
    if count > 4096:
        raise ValueError("the TIFF file is damaged")
    tags = {}
    for at in range(place + head, place + head + count * entry, entry):
        tag, kind = _unpack(data, order, "H", at, 2)
        (length,) = _unpack(data, order, "Q" if big else "I", at + 4)
        letter, value = _FORMATS.get(kind), at + entry - inline
        if letter is None or length == 0 or length > len(data):
            continue
        if struct.calcsize(letter) * length > inline:
            (value,) = _unpack(data, order, "Q" if big else "I", value)
        tags[tag] = _unpack(data, order, letter, value, length)
    (following,) = _unpack(data, order, "Q" if big else "I", place + head + count * entry)
    return tags, following


def _page(tags: dict[int, tuple[Any, ...]], order: str) -> Page:
    def one(tag: int, default: int = 0) -> int:
        return int(tags.get(tag, (default,))[0])

    def edge(tags_: tuple[int, int], choose: Any) -> float | None:
        return next((float(choose(tags[tag])) for tag in tags_ if tag in tags), None)

    height, width, samples = one(257), one(256), one(277, 1)
    depths, kinds = set(tags.get(258, (1,))), set(tags.get(339, (1,)))
    if min(height, width, samples) < 1 or len(depths) > 1 or len(kinds) > 1:
        raise ValueError("a TIFF file of a kind that is not read")
    tiled = 322 in tags
    return Page(
        height=height,
        width=width,
        samples=samples,
        depth=depths.pop(),
        kind={1: "u", 2: "i", 3: "f", 4: "u"}.get(kinds.pop(), "?"),
        photometric=one(262, 1),
        alpha=tags.get(338, (0,))[-1] in (1, 2),
        orientation=one(274, 1),
        low=edge((340, 280), min),
        high=edge((341, 281), max),
        separate=one(284, 1) == 2 and samples > 1,
        compression=one(259, 1),
        predictor=one(317, 1),
        block=(one(323), one(322)) if tiled else (min(one(278, height), height), width),
        offsets=tags.get(324 if tiled else 273, ()),
        counts=tags.get(325 if tiled else 279, ()),
        order=order,
    )


def readable(page: Page) -> bool:
    """Whether `read` reads such a page."""
    return (
        page.photometric in (0, 1, 2)
        and (page.kind in "ui" and page.depth in (8, 16, 32)) | (page.kind == "f" and page.depth in (16, 32, 64))
        and page.compression in (1, *_DEFLATE, *_BY_PILLOW)
        and page.predictor in (1, 2, 3)
    )


def read(data: bytes, page: Page) -> Array:
    """Values of a page at their own depth, (height, width, samples), upright. Raises ValueError for a damaged file."""
    if not readable(page):
        raise ValueError("a TIFF file of a kind that is not read")
    rows, columns = page.block
    if min(rows, columns) < 1:
        raise ValueError("the TIFF file is damaged")
    down, across = -(-page.height // rows), -(-page.width // columns)
    planes, deep = (page.samples, 1) if page.separate else (1, page.samples)
    if len(page.offsets) < planes * down * across or len(page.counts) < planes * down * across:
        raise ValueError("the TIFF file is damaged")
    made = np.empty((page.height, page.width, page.samples), np.dtype(f"{page.kind}{page.depth // 8}"))
    for number in range(planes * down * across):
        plane, place = divmod(number, down * across)
        top, left = place // across * rows, place % across * columns
        # A strip may be lower than the others, a tile is padded.
        height = min(rows, page.height - top) if columns == page.width else rows
        values = _block(data, page, number, height, columns, deep)
        samples = slice(plane, plane + 1) if page.separate else slice(None)
        part = made[top : top + rows, left : left + columns, samples]
        part[...] = values[: part.shape[0], : part.shape[1]]
    if page.photometric == 0 and page.kind == "u":
        np.invert(made, out=made)
    return _upright(made, page.orientation)


def _block(data: bytes, page: Page, number: int, height: int, width: int, deep: int) -> Array:
    """The values of one strip or tile, (height, width, deep)."""
    size = page.depth // 8
    length = height * width * deep * size
    packed = data[page.offsets[number] : page.offsets[number] + page.counts[number]]
    if page.compression == 1:
        content = packed
    elif page.compression in _DEFLATE:
        try:
            content = zlib.decompressobj().decompress(packed, length)
        except zlib.error as error:
            raise ValueError("the TIFF file is damaged") from error
    else:
        content = _unpacked(packed, page.compression, height, width * deep * size)
    content = content[:length]  # where there is less, it will not take the shape
    if page.predictor == 3:  # differences of bytes, the highest bytes of a row first
        sums = np.frombuffer(content, np.uint8).reshape(height, -1, deep).cumsum(axis=1, dtype=np.uint8)
        values = sums.reshape(height, size, width * deep).transpose(0, 2, 1)
        return np.ascontiguousarray(values).view(f">{page.kind}{size}").reshape(height, width, deep)
    native = f"{page.kind}{size}"
    found = np.frombuffer(content, f"{page.order}{native}").astype(native).reshape(height, width, deep)
    if page.predictor == 2:
        whole = f"u{size}"
        return found.view(whole).cumsum(axis=1, dtype=whole).view(native)
    return found


def _unpacked(packed: bytes, compression: int, height: int, width: int) -> bytes:
    """Compressed bytes, by libtiff: as if they were a gray picture of `height` rows of `width` bytes."""
    entries = [
        (256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, compression), (262, 3, 1),
        (273, 4, 8 + 2 + 9 * 12 + 4), (277, 3, 1), (278, 4, height), (279, 4, len(packed)),
    ]  # fmt: skip
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    head += b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries) + bytes(4)
    try:
        with Image.open(io.BytesIO(head + packed), formats=["TIFF"]) as picture:
            return picture.tobytes()
    except Exception as error:  # Pillow raises whatever its parsers meet
        raise ValueError(f"the TIFF file is damaged: {error}") from error


def _upright(pixels: Array, orientation: int) -> Array:
    """Pixels turned as the orientation of EXIF says."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    down = orientation in (3, 4, 7, 8)
    across = orientation in (2, 3, 6, 7)
    return np.ascontiguousarray(pixels[:: -1 if down else 1, :: -1 if across else 1])
