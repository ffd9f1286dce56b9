"""Bytes or arrays to pixels: always uint8, height × width × channels, upright, on white where it was transparent."""

from __future__ import annotations

import io
import warnings
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageOps

# Every failure becomes a DecodeError; OpenCV's own warnings would tear the progress bar. (The name moved in 5.0.)
(getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel)(0)

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


class DecodeError(Exception):
    """A picture that cannot be used. `reason` is one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode(image: bytes | np.ndarray[Any, Any], channels: int, reduction: int = 1) -> np.ndarray[Any, Any]:
    """Pixels of a picture: uint8, (height, width, channels), contiguous, RGB order.

    Args:
        image: the bytes of an image file, or pixels (height × width, or height × width × 1…4).
        channels: 1 (luminance) or 3 (RGB).
        reduction: 1, 2, 4 or 8: a JPEG that OpenCV reads comes with its sides divided by it, rounded up.
            Anything else comes in full.

    EXIF orientation is applied, transparency is laid on white, deeper pixels are scaled by their depth (16 bits:
    65,535 becomes 255), and of an animation the first frame counts. A truncated file is an error, not a half-grey
    picture. Raises DecodeError, and nothing else, for whatever cannot be read.
    """
    pixels = image if isinstance(image, np.ndarray) else _read(bytes(image), channels, reduction)
    return _arrange(_eight_bits(pixels), channels)


def _read(data: bytes, channels: int, reduction: int) -> np.ndarray[Any, Any]:
    """The pixels in an image file, at the file's own depth and channel count."""
    if not data:
        raise DecodeError("the file is empty")
    # TIFF and GIF: OpenCV hands over CMYK as if it were RGBA, and drops some transparency. EXIF outside JPEG:
    # OpenCV turns the picture only if it may drop transparency and depth.
    first_pillow = data[:4] in (b"II*\0", b"MM\0*", b"GIF8") or (
        data[:3] != b"\xff\xd8\xff" and (b"eXIf" in data or b"EXIF" in data)
    )
    if not first_pillow:
        pixels = _read_opencv(data, channels, reduction)
        return pixels if pixels is not None else _read_pillow(data)
    try:
        return _read_pillow(data)
    except DecodeError:
        pixels = _read_opencv(data, channels)  # such as TIFF with 3 × 16 bits
        if pixels is None:
            raise
        return pixels


def _read_opencv(data: bytes, channels: int, reduction: int = 1) -> np.ndarray[Any, Any] | None:
    """Pixels by OpenCV, or None where it cannot."""
    flags, swapped = cv2.IMREAD_UNCHANGED, True
    if data[:3] == b"\xff\xd8\xff":  # JPEG: the only case where these flags lose nothing, and they turn the picture
        flags = (cv2.IMREAD_GRAYSCALE if channels == 1 else _COLOUR) | _REDUCED[reduction]
        swapped = cv2.IMREAD_COLOR == _COLOUR
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except (cv2.error, MemoryError):
        return None
    if pixels is None or pixels.ndim == 2 or not swapped:
        return pixels
    if pixels.shape[2] == 3:
        return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    return cv2.cvtColor(pixels, cv2.COLOR_BGRA2RGBA) if pixels.shape[2] == 4 else pixels


def _read_pillow(data: bytes) -> np.ndarray[Any, Any]:
    """Pixels by Pillow. Raises DecodeError."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as file:
            picture: Image.Image = ImageOps.exif_transpose(file)
            if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
                return np.asarray(picture)
            if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
                return np.asarray(picture.convert("RGBA"))
            return np.asarray(picture.convert("L" if picture.mode in ("1", "L") else "RGB"))
    except Exception as error:  # Pillow's plug-ins raise whatever their parsers meet
        raise DecodeError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "cannot identify image file" in text:
        return "not an image, or a damaged one"
    return text[:200] or type(error).__name__


def _eight_bits(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pixels as uint8, scaled by the range that their type or their content says."""
    if pixels.size == 0:
        raise DecodeError("the picture has no pixels")
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == bool:
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype.kind not in "iuf":
        raise DecodeError(f"pixels of type {pixels.dtype} cannot be shown")
    if pixels.dtype.kind == "u" and pixels.dtype.itemsize == 2:
        full = 65535.0
    else:
        # No depth to go by: the smallest usual range that holds the values.
        low, high = float(pixels.min()), float(pixels.max())
        ranges = (1.0, 255.0, 65535.0) if pixels.dtype.kind == "f" else (65535.0,)
        if not 0 <= low <= high <= ranges[-1]:
            raise DecodeError(f"pixel values from {low:g} to {high:g} are outside 0…{ranges[-1]:g}")
        full = next(limit for limit in ranges if high <= limit)
    scaled: np.ndarray[Any, Any] = np.rint(pixels.astype(np.float32) * np.float32(255 / full))
    return scaled.astype(np.uint8)


def _arrange(pixels: np.ndarray[Any, Any], channels: int) -> np.ndarray[Any, Any]:
    """uint8 pixels with the wanted number of channels; transparency (2 or 4 channels) on white."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 2, 3, 4):
        raise DecodeError(f"pixels of shape {pixels.shape} are not height × width × channels")
    if pixels.shape[2] in (2, 4):
        alpha = pixels[:, :, -1:].astype(np.uint16)
        blend = pixels[:, :, :-1] * alpha + np.uint16(255) * (255 - alpha)
        pixels = ((blend + np.uint16(127)) // np.uint16(255)).astype(np.uint8)
    if channels == 3 and pixels.shape[2] == 1:
        pixels = np.repeat(pixels, 3, axis=2)
    elif channels == 1 and pixels.shape[2] == 3:
        pixels = cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)[:, :, None]
    return np.ascontiguousarray(pixels)
