"""Mean and standard deviation of a data set's pixels, for normalising."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from moco.data.loader import permutation
from moco.data.reading import Unreadable, read_pixels, readable
from moco.data.sources import Source

Array = np.ndarray[Any, Any]


def measure_statistics(
    source: Source, channels: int, count: int = 1000, seed: int = 0
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the pixels per channel, in units of [0, 1], over `count` random pictures.

    Each picture has the same weight, whatever its size. A standard deviation is at least 1/255, so that one can
    divide by it. Raises UserError if no picture can be read.
    """
    moments = []
    for index in permutation(seed, 0, len(source))[:count]:
        try:
            moments.append(_moments(read_pixels(source, int(index), channels)))
        except Unreadable:
            continue
    if not moments:
        moments.append(_moments(readable(source, 0, channels)[0]))
    means, deviations = np.stack(moments).transpose(1, 0, 2)
    mean = means.mean(axis=0)
    variance = (deviations**2 + means**2).mean(axis=0) - mean**2
    return (mean / 255).tolist(), (np.sqrt(variance.clip(min=1)) / 255).tolist()


def _moments(pixels: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each channel, (C,)."""
    if pixels.shape[2] > 4:  # more than OpenCV takes
        return pixels.mean(axis=(0, 1)), pixels.std(axis=(0, 1))
    mean, deviation = cv2.meanStdDev(pixels)
    return mean[:, 0], deviation[:, 0]
