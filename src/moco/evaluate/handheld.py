"""Test pictures as a hand would have taken them: a little off centre, a little nearer or farther, a little askew.

Made for asking whether features survive what every photograph has; pixels compared one by one do not.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
from numpy.typing import NDArray

from moco.errors import UserError

SHIFT = 0.10  # of the side, in each direction, either way
ZOOM = (0.85, 1.15)  # below 1 the object is smaller
TILT = 12.0  # degrees, either way


def handheld(images: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    """Each picture shifted (up to ±10 % of its side), zoomed (0.85 to 1.15) and tilted (up to ±12°).

    images: (N, H, W, C) or (N, H, W) uint8; they are not changed. Returns new pictures of the same shape.
    seed: picture i is moved by numbers drawn from (seed, i) only, so it is moved alike in any larger set.

    The four numbers are drawn evenly from their ranges. The picture turns and zooms about its centre, is sampled
    bilinearly, and the border pixels are repeated outwards. Raises UserError for any other type or shape.
    """
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape[1:]:
        raise UserError(f"expected uint8 pictures (N, H, W, C) or (N, H, W), got {images.dtype} {images.shape}")
    height, width = images.shape[1:3]
    # One row per picture, so that the first rows do not depend on how many follow.
    drawn = np.random.default_rng(seed).uniform(
        (-SHIFT, -SHIFT, ZOOM[0], -TILT), (SHIFT, SHIFT, ZOOM[1], TILT), size=(len(images), 4)
    )
    moved = np.empty_like(images)
    for index, (right, down, zoom, tilt) in enumerate(drawn):
        moved[index] = _move(images[index], right * width, down * height, zoom, tilt)
    return moved


def _move(picture: NDArray[np.uint8], right: float, down: float, zoom: float, tilt: float) -> NDArray[np.uint8]:
    """`picture` (H, W) or (H, W, C), moved `right` and `down` pixels, zoomed and tilted (degrees) about its centre."""
    height, width = picture.shape[:2]
    centre = np.array([(width - 1) / 2, (height - 1) / 2])  # pixel centres are at whole numbers
    cosine, sine = zoom * math.cos(math.radians(tilt)), zoom * math.sin(math.radians(tilt))
    turn = np.array([[cosine, sine], [-sine, cosine]])
    offset = centre + np.array([right, down]) - turn @ centre
    matrix = np.column_stack([turn, offset])
    # OpenCV warps at most four channels at a time.
    layers = [picture] if picture.ndim == 2 else [picture[..., c : c + 4] for c in range(0, picture.shape[2], 4)]
    warped = [
        cv2.warpAffine(
            np.ascontiguousarray(layer),
            matrix,
            (width, height),
            flags=cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_REPLICATE,
        ).reshape(layer.shape)  # OpenCV drops a last axis of length one
        for layer in layers
    ]
    return np.asarray(warped[0] if len(warped) == 1 else np.concatenate(warped, axis=2), dtype=np.uint8)
