"""What there is to know about one picture: what kind of file it is, whether it decodes, and what it looks like."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np

from moco.data import tiff
from moco.data.decode import DecodeError, decode, opened
from moco.data.header import read_header, read_png_header
from moco.data.reading import Unreadable, read
from moco.data.sources import Source

Array = np.ndarray[Any, Any]

THUMBNAIL = (8, 9)
"""Height and width of the picture by which near duplicates are found: its horizontal differences are 64 bits."""

KEY_BYTES = 16
_REDUCED_SIDE = 32  # a reduced JPEG has at least so many pixels a side
_FORMAT_OF = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "JPEG"),
    **dict.fromkeys(("tif", "tiff"), "TIFF"),
    "png": "PNG",
    "gif": "GIF",
    "bmp": "BMP",
    "webp": "WEBP",
}


@dataclass(frozen=True)
class Kind:
    """What a file says about itself: its format, mode (as Pillow names them), bits per channel, size and pages."""

    format: str
    mode: str
    bits: int
    height: int
    width: int
    pages: int = 1


@dataclass
class Findings:
    """What was found out about some pictures, in the order of `ids`; of unreadable ones there is only the reason.

    Attributes:
        ids: (n,) int64, numbers of the readable pictures.
        kinds: of each.
        channels: (n,) int64 of each as it is decoded, 3 for most; colourless: (n,) bool, RGB whose channels are equal.
        keys: (n, KEY_BYTES) uint8: equal for equal pixels (of large JPEGs, for equal files).
        thumbnails: (n, 8, 9) uint8, gray.
        bad: (number, name, reason) of those that cannot be read.
        misnamed: (name, format) of files that are not what their name says.
    """

    ids: Array
    kinds: list[Kind] = field(default_factory=list)
    channels: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    colourless: Array = field(default_factory=lambda: np.zeros(0, bool))
    keys: Array = field(default_factory=lambda: np.zeros((0, KEY_BYTES), np.uint8))
    thumbnails: Array = field(default_factory=lambda: np.zeros((0, *THUMBNAIL), np.uint8))
    bad: list[tuple[int, str, str]] = field(default_factory=list)
    misnamed: list[tuple[str, str]] = field(default_factory=list)


def examine(source: Source, ids: range) -> Findings:
    """Read and decode some pictures of a source."""
    found = Findings(np.zeros(0, np.int64))
    good, channels, colourless, keys, thumbnails = [], [], [], [], []
    for index in ids:
        name = str(index)
        try:
            sample = read(source, index)
            name = sample.name
            kind, pixels, key = _look(sample.image, source.channels or 3)
        except Unreadable as error:
            found.bad.append((index, error.name, error.reason))
            continue
        except DecodeError as error:
            found.bad.append((index, name, error.reason))
            continue
        except Exception as error:  # a source made of somebody's own code may raise anything
            found.bad.append((index, name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
            continue
        good.append(index)
        found.kinds.append(kind)
        channels.append(pixels.shape[2])
        colourless.append(pixels.shape[2] == 1 or (pixels.shape[2] == 3 and _is_colourless(pixels)))
        keys.append(np.frombuffer(key, np.uint8))
        thumbnails.append(thumbnail(pixels))
        meant = _FORMAT_OF.get(name.rpartition(".")[2].lower()) if isinstance(sample.image, bytes) else None
        if meant is not None and meant != kind.format:
            found.misnamed.append((name, kind.format))
    if good:
        found.ids, found.channels, found.colourless = np.array(good), np.array(channels), np.array(colourless)
        found.keys, found.thumbnails = np.stack(keys), np.stack(thumbnails)
    return found


def _look(image: bytes | Array, channels: int) -> tuple[Kind, Array, bytes]:
    """Kind, pixels (of large JPEGs at a reduced size) and key of a picture. Raises DecodeError."""
    if isinstance(image, np.ndarray):
        pixels = _decoded(image, channels, 1)
        height, width = pixels.shape[:2]
        mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(count := pixels.shape[2], f"{count} channels")
        return Kind("array", mode, image.dtype.itemsize * 8, height, width), pixels, _key(pixels, pixels.shape)
    reduction = 1
    if (header := read_header(image)) is not None:
        side = min(header.height, header.width)
        if header.components != 4:
            reduction = next((number for number in (8, 4) if side >= number * _REDUCED_SIDE), 1)
        mode = {1: "L", 4: "CMYK"}.get(header.components, "RGB")
        kind = Kind("JPEG", mode, header.depth, header.height, header.width)
    pixels = _decoded(image, channels, reduction)
    if header is None:
        kind = kind_of(image, *pixels.shape[:2])
    whole = reduction == 1 and kind.pages == 1
    return kind, pixels, _key(pixels, pixels.shape) if whole else _key(image, ())


def _decoded(image: bytes | Array, channels: int, reduction: int) -> Array:
    """Pixels with as many channels as are wanted, or else as many as there are."""
    try:
        return decode(image, channels, reduction)
    except DecodeError as error:
        if error.channels is None:
            raise
        return decode(image, error.channels, reduction)


def kind_of(data: bytes, height: int, width: int) -> Kind:
    """What the header of a readable file says that is no plain JPEG; its size is known."""
    if (png := read_png_header(data)) is not None:
        mode = {0: "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}.get(png[3], "?")
        return Kind("PNG", mode, png[2], height, width)
    if tiff.is_tiff(data):
        try:
            pages = tiff.pages(data)
        except ValueError:
            return Kind("TIFF", "?", 8, height, width)
        first = pages[0]
        names = {0: "L", 1: "L", 2: "RGB", 3: "P", 5: "CMYK", 6: "YCbCr", 8: "LAB"}
        usual = {"L": 1, "P": 1, "CMYK": 4}.get(name := names.get(first.photometric, "?"), 3)
        more = first.samples - usual
        mode = name if more <= 0 else f"{name}A" if more == 1 and first.alpha else f"{first.samples} channels"
        return Kind("TIFF", mode + (" float" if first.kind == "f" else ""), first.depth, height, width, len(pages))
    with opened(data) as file:
        bits = {"1": 1, "F": 32}.get(file.mode, 16 if file.mode.startswith("I") else 8)
        return Kind(file.format or "?", file.mode, bits, height, width)


def _key(content: bytes | Array, shape: tuple[int, ...]) -> bytes:
    hashed = hashlib.blake2b(np.array(shape, np.int64).tobytes(), digest_size=KEY_BYTES)
    hashed.update(content if isinstance(content, bytes) else content.data)
    return hashed.digest()


def _is_colourless(pixels: Array) -> bool:
    for side in (8, 64):  # most pictures with colour show it in a few places
        some = pixels[:: max(1, pixels.shape[0] // side), :: max(1, pixels.shape[1] // side)].astype(np.int16)
        red, green, blue = (some[:, :, channel] for channel in range(3))
        if max(np.abs(red - green).max(), np.abs(green - blue).max()) > 2:
            return False
    return True


def thumbnail(pixels: Array) -> Array:
    """A tiny gray picture, uint8 THUMBNAIL. `pixels`: uint8 (H, W, C)."""
    count = pixels.shape[2]
    if count == 3:
        gray = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    else:
        gray = pixels[:, :, 0] if count == 1 else pixels.mean(axis=2).astype(np.uint8)
    return cv2.resize(gray, THUMBNAIL[::-1], interpolation=cv2.INTER_AREA)
