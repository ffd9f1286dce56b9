"""Bytes or arrays to pixels: always uint8, height × width × channels, upright, on white where it was transparent."""

from __future__ import annotations

import functools
import io
import warnings
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageOps

from moco.data import tiff
from moco.data.header import Header, png_pixels, read_header, read_png_header
from moco.errors import counted

# Every failure becomes a DecodeError; OpenCV's own warnings would tear the progress bar. (The name moved in 5.0.)
(getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel)(0)

Array = np.ndarray[Any, Any]

MAX_PIXELS = 178_956_970
"""Larger pictures (13,377 × 13,377) are refused before memory is taken for them. It is the limit at which Pillow speaks
of a decompression bomb; OpenCV's own is six times as high."""

REDUCTIONS = (8, 4)
"""By what a JPEG is reduced while it is decoded where less will do. 2 is possible, but saves less than it costs to crop
between the pixels afterwards (measured at 1,500 × 1,000)."""

# RGB since 4.11; before, the channels are swapped afterwards.
_COLOUR = getattr(cv2, "IMREAD_COLOR_RGB", cv2.IMREAD_COLOR)
_REDUCED = {
    1: 0,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
}  # flags beside the kind of colour
_REFUSED = frozenset({"EPS"})  # Pillow hands it to Ghostscript, a program that runs what is in the file
_USUAL_RANGES = {"f": (1.0, 255.0, 65535.0), "u": (65535.0,), "i": (65535.0,)}


class DecodeError(Exception):
    """A picture that cannot be used. `reason` is one line; `channels` says how many it has, if that is the reason."""

    def __init__(self, reason: str, channels: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.channels = reason, channels


def decode(image: bytes | Array, channels: int, reduction: int = 1, header: Header | None = None) -> Array:
    """Pixels of a picture: uint8, (height, width, channels), contiguous, RGB order.

    Args:
        image: the bytes of an image file, or pixels (height × width, or height × width × any number of channels).
        channels: 1 (luminance), 3 (RGB), or exactly as many as the picture has: 2 and 4 keep transparency as it is,
            any other number takes arrays, and TIFF files with so many samples, planes or pages.
        reduction: 1, 2, 4 or 8: an RGB or gray JPEG that OpenCV reads comes with its sides divided by it, rounded up.
            Anything else comes in full.
        header: of the JPEG, where it was read before.

    EXIF orientation is applied, transparency is laid on white, and of an animation the first frame counts. Deeper
    pixels become 8 bits: scaled by their depth (16 bits: 65,535 becomes 255), by the range that the file states, or
    else by the smallest usual range that they fill (0…1, 0…255, 0…65,535), or else by the range they have. CMYK is
    inverted where Adobe's marker says so, and only there. A truncated file is an error, not a half-grey picture.

    Raises DecodeError, and nothing else, for whatever cannot be read, has more than MAX_PIXELS, or has another number
    of channels.
    """
    if isinstance(image, np.ndarray):
        return _arrange(_eight_bits(image), channels)
    try:
        return _read(bytes(image), channels, reduction, header)
    except MemoryError as error:
        raise DecodeError("there is not enough memory for it") from error


def _read(data: bytes, channels: int, reduction: int, header: Header | None) -> Array:
    """The pixels in an image file."""
    if not data:
        raise DecodeError("the file is empty")
    if data[:3] == b"\xff\xd8\xff":
        pixels = _read_jpeg(data, channels, reduction, header or read_header(data))
    elif tiff.is_tiff(data):
        return _read_tiff(data, channels)
    elif (png := read_png_header(data)) is not None:
        _check_size(*png[:2])
        # OpenCV turns a picture by its EXIF only if it may drop transparency and depth; of transparent colours it knows
        # some. Two and four channels: it gives a gray PNG with transparency four.
        first_pillow = channels not in (1, 3) or _with_exif(data) or data.find(b"tRNS", 0, data.find(b"IDAT")) >= 0
        bare = None if first_pillow else png_pixels(data)
        pixels = None if bare is None else _read_opencv(bare)
    else:
        with opened(data) as file:  # looked at for its size; nothing is decoded yet
            _check_size(file.height, file.width)
            # OpenCV drops transparency of GIF, and does not look at the range that PPM states.
            first_pillow = file.format in ("GIF", "PPM") or channels not in (1, 3) or _with_exif(data)
        pixels = None if first_pillow else _read_opencv(data)
    return _arrange(_eight_bits(_read_pillow(data) if pixels is None else pixels), channels)


def _read_jpeg(data: bytes, channels: int, reduction: int, header: Header | None) -> Array | None:
    """Pixels of a JPEG, or None where OpenCV cannot read it."""
    if header is not None:
        _check_size(header.height, header.width)
        if header.components == 4:
            return _read_pillow(data, inverted=not header.adobe)
    # The only format where these flags lose nothing, and they turn the picture.
    return _read_opencv(data, (cv2.IMREAD_GRAYSCALE if channels == 1 else _COLOUR) | _REDUCED[reduction])


def _read_opencv(data: bytes, flags: int = cv2.IMREAD_UNCHANGED) -> Array | None:
    """Pixels by OpenCV, or None where it cannot."""
    swapped = flags == cv2.IMREAD_UNCHANGED or cv2.IMREAD_COLOR == _COLOUR
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except (cv2.error, MemoryError):
        return None
    if pixels is None or pixels.ndim == 2 or not swapped:
        return pixels
    if pixels.shape[2] == 3:
        return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    return cv2.cvtColor(pixels, cv2.COLOR_BGRA2RGBA) if pixels.shape[2] == 4 else pixels


def _with_exif(data: bytes) -> bool:
    return b"eXIf" in data or b"EXIF" in data


@functools.cache
def _formats() -> list[str]:
    Image.init()
    return [name for name in Image.ID if name not in _REFUSED]


def opened(data: bytes) -> Image.Image:
    """The picture as Pillow opens it, before anything is decoded. Raises DecodeError."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return Image.open(io.BytesIO(data), formats=_formats())
    except Exception as error:  # Pillow's plug-ins raise whatever their parsers meet
        raise DecodeError(_one_line(error)) from error


def _read_pillow(data: bytes, inverted: bool = False) -> Array:
    """Pixels by Pillow. inverted: CMYK is meant the other way round than Pillow reads it. Raises DecodeError."""
    try:
        with warnings.catch_warnings(action="ignore"), opened(data) as file:
            return pillow_pixels(file, inverted)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(_one_line(error)) from error


def pillow_pixels(file: Image.Image, inverted: bool = False) -> Array:
    """Pixels of a Pillow picture, upright, at its own depth, with its transparency: what `decode` takes.

    inverted: CMYK is meant the other way round than Pillow reads it. Raises whatever Pillow's plug-ins meet.
    """
    picture: Image.Image = ImageOps.exif_transpose(file)
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        values, key = np.asarray(picture), picture.info.get("transparency")
        return np.where(values == key, 65535, values).astype(values.dtype) if isinstance(key, int) else values
    if picture.mode in ("LA", "La"):
        return np.asarray(picture.convert("LA"))
    if picture.mode in ("RGBA", "PA", "RGBa") or "transparency" in picture.info:
        return np.asarray(picture.convert("RGBA"))
    if picture.mode == "CMYK" and inverted:
        picture = Image.fromarray(255 - np.asarray(picture), "CMYK")
    return np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))


def _read_tiff(data: bytes, channels: int) -> Array:
    """Pixels of a TIFF file: of its first page, or of all pages where each holds some of the channels."""
    try:
        found = tiff.pages(data)
        first = found[0]
        alike = [page for page in found if (page.height, page.width) == (first.height, first.width)]
        total = sum(page.samples for page in alike)
        paged = len(alike) > 1 and first.samples != channels == total and (channels != 3 or first.samples == 1)
        chosen = alike if paged and all(map(tiff.readable, alike)) else [first]
        _check_size(first.height, first.width * -(-sum(page.samples for page in chosen) // 4))
        if len(chosen) == 1 and len(found) > 1 and channels not in (1, 3, first.samples):
            pages = f"{len(found)} pages of {counted(first.samples, 'channel')}"
            raise DecodeError(f"the file has {pages}, and {channels} channels are wanted", first.samples)
        usual = first.samples in (1, 3) or first.alpha or (first.samples == 4 and first.photometric == 2)
        plain = first.depth == 8 and usual and channels in (1, 3)  # what Pillow reads as it is meant
        if all(map(tiff.readable, chosen)) and not (len(chosen) == 1 and plain):
            values = [_eight_bits(tiff.read(data, page), page.low, page.high) for page in chosen]
            alpha = first.alpha or (channels in (1, 3) and first.samples == 4 and first.photometric == 2)
            pixels = np.concatenate(values, axis=2)
            if alpha and not first.alpha:  # RGB and something that is not transparency
                pixels, alpha = pixels[:, :, :3], False
            return _arrange(pixels, channels, alpha=alpha)
    except ValueError:
        pass  # damaged, or of another kind
    try:
        return _arrange(_eight_bits(_read_pillow(data)), channels)
    except DecodeError:
        pixels_ = _read_opencv(data)
        if pixels_ is None:
            raise
        return _arrange(_eight_bits(pixels_), channels)


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DecodeError(f"{width:,} × {height:,} pixels are more than the {MAX_PIXELS:,} that are read")


def _one_line(error: Exception) -> str:
    if isinstance(error, DecodeError):
        return error.reason
    text = " ".join(str(error).split())
    if isinstance(error, Image.DecompressionBombError):
        return f"it has more than the {MAX_PIXELS:,} pixels that are read"
    if "cannot identify image file" in text:
        return "not an image, or a damaged one"
    return text[:200] or type(error).__name__


def _eight_bits(pixels: Array, low: float | None = None, high: float | None = None) -> Array:
    """Pixels as uint8, scaled by the range low…high, or by the one that their type or their content says."""
    if pixels.size == 0:
        raise DecodeError("the picture has no pixels")
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == bool:
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype.kind not in "iuf":
        raise DecodeError(f"pixels of type {pixels.dtype} cannot be shown")
    if low is None or high is None or not np.isfinite((low, high)).all() or low >= high:
        low, high = _range(pixels)
    wide = np.dtype(np.float32 if pixels.dtype.itemsize <= 4 and max(abs(low), abs(high)) < 1e30 else np.float64)
    scaled = (pixels.astype(wide) - wide.type(low)) * wide.type(255 / (high - low))
    if pixels.dtype.kind == "f":
        scaled = np.nan_to_num(scaled, copy=False, nan=0.0, posinf=255.0, neginf=0.0)
    made: Array = np.rint(scaled).clip(0, 255).astype(np.uint8)
    return made


def _range(pixels: Array) -> tuple[float, float]:
    """The values that stand for black and white."""
    if pixels.dtype.kind == "u" and pixels.dtype.itemsize == 2:
        return 0.0, 65535.0
    if pixels.dtype.kind == "f":
        finite = pixels[np.isfinite(pixels)]
        if finite.size == 0:
            raise DecodeError("none of its pixels is a number")
        low, high = float(finite.min()), float(finite.max())
    else:
        low, high = float(pixels.min()), float(pixels.max())
    # No depth to go by: the smallest usual range that holds the values, or else what they span; as they do where floats
    # would take up less than a sixteenth of the range.
    usual = next((limit for limit in _USUAL_RANGES[pixels.dtype.kind] if 0 <= low <= high <= limit), None)
    if usual is not None and pixels.dtype.kind == "f" and 1 < high < usual / 16:
        usual = None
    return (low, max(high, np.nextafter(low, np.inf))) if usual is None else (0.0, usual)


def _arrange(pixels: Array, channels: int, alpha: bool = True) -> Array:
    """uint8 pixels with the wanted number of channels; transparency (the last of 2 or 4 channels) on white."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] == 0:
        raise DecodeError(f"pixels of shape {pixels.shape} are not height × width × channels")
    count = pixels.shape[2]
    if count == channels:
        return np.ascontiguousarray(pixels)
    if channels not in (1, 3) or count > 4 or (count in (2, 4) and not alpha):
        raise DecodeError(f"it has {counted(count, 'channel')}, and {channels} are wanted", count)
    if count in (2, 4):
        opacity = pixels[:, :, -1:].astype(np.uint16)
        blend = pixels[:, :, :-1] * opacity + np.uint16(255) * (255 - opacity)
        pixels = ((blend + np.uint16(127)) // np.uint16(255)).astype(np.uint8)
    if channels == 3 and pixels.shape[2] == 1:
        pixels = np.repeat(pixels, 3, axis=2)
    elif channels == 1 and pixels.shape[2] == 3:
        pixels = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)[:, :, None]
    return np.ascontiguousarray(pixels)
