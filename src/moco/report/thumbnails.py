"""Pictures for a page: shown as people see them, as data URIs, and thousands of them on a few sheets."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

Array = np.ndarray[Any, Any]

PER_SHEET = 1024
"""Pictures on a sheet: decoded it takes 10 MB at 48 pixels a side."""
COLUMNS = 32
LADDER = ((64, 75), (48, 75), (48, 60), (40, 55), (32, 55), (32, 40), (24, 40), (16, 30))
"""Sides in pixels and WebP qualities that are tried, the best first, until all sheets fit into their bytes."""
TRIED = 256
"""Pictures that are encoded to tell how many bytes all of them would take."""
LOSSLESS_SIDE = 40
"""Single pictures up to this side are kept as they are: blocks would show when they are enlarged."""


@dataclass(frozen=True)
class Sheets:
    """Many small pictures: number i is on sheet i // PER_SHEET, row by row, COLUMNS in a row, `side` pixels each."""

    uris: tuple[str, ...]
    side: int


def as_seen(pictures: Array) -> Array:
    """Pictures (N, S, S, C) uint8 of any number of channels as colours a screen has: (N, S, S, 3).

    One channel is grey, two are grey and transparency, four are colours and transparency (on white); of more, the
    first three are shown.
    """
    channels = pictures.shape[3]
    if channels in (2, 4):
        opacity = pictures[..., -1:].astype(np.uint16)
        pictures = ((pictures[..., :-1] * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)
    return pictures.repeat(3, axis=3) if pictures.shape[3] == 1 else pictures[..., :3]


def scaled(pictures: Array, side: int) -> Array:
    """Square pictures (N, S, S, 3) at another side, (N, side, side, 3); smaller ones by area, larger ones as blocks."""
    if pictures.shape[1] == side:
        return pictures
    way = cv2.INTER_AREA if side < pictures.shape[1] else cv2.INTER_NEAREST
    return np.stack(
        [cv2.resize(np.ascontiguousarray(picture), (side, side), interpolation=way) for picture in pictures]
    )


def uri(picture: Array, quality: int = 82) -> str:
    """One picture (H, W, 3) as a data URI; small ones without loss."""
    return _webp(picture, 101 if max(picture.shape[:2]) <= LOSSLESS_SIDE else quality)


def sheets(pictures: Array, most_bytes: int) -> Sheets:
    """All pictures (N, S, S, 3) on sheets, as large and good as they can be in about `most_bytes` of the page."""
    own = pictures.shape[1]
    sample = pictures[:: max(len(pictures) // TRIED, 1)][:TRIED]
    # Nothing is gained by more pixels than there are.
    for side, quality in dict.fromkeys((min(side, own), quality) for side, quality in LADDER):
        taken = len(_webp(_laid_out(scaled(sample, side)), quality)) * len(pictures) / len(sample)
        if taken <= most_bytes:
            break
    small = scaled(pictures, side)
    return Sheets(tuple(_webp(_laid_out(part), quality) for part in _parts(small)), side)


def _parts(pictures: Array) -> Iterator[Array]:
    return (pictures[start : start + PER_SHEET] for start in range(0, len(pictures), PER_SHEET))


def _laid_out(pictures: Array) -> Array:
    """(N, S, S, 3) as one picture of COLUMNS beside each other."""
    count, side = pictures.shape[:2]
    rows = -(-count // COLUMNS)
    full = np.zeros((rows * COLUMNS, side, side, 3), np.uint8)
    full[:count] = pictures
    return full.reshape(rows, COLUMNS, side, side, 3).swapaxes(1, 2).reshape(rows * side, COLUMNS * side, 3)


def _webp(picture: Array, quality: int) -> str:
    """quality: 1 to 100; above, without loss."""
    done, content = cv2.imencode(".webp", np.ascontiguousarray(picture[..., ::-1]), [cv2.IMWRITE_WEBP_QUALITY, quality])
    if not done:
        raise OSError("this OpenCV writes no WebP")
    return "data:image/webp;base64," + base64.b64encode(content.tobytes()).decode()
