"""How large a picture is, where the annotations do not say so."""

from __future__ import annotations

from pathlib import Path

from moco.data.decode import DecodeError, decode


def size_of(path: Path) -> tuple[int, int] | None:
    """Width and height in pixels as it is shown, or None where it cannot be read."""
    try:
        pixels = decode(path.read_bytes(), 3)
    except (OSError, DecodeError):
        return None
    return int(pixels.shape[1]), int(pixels.shape[0])
