"""The random numbers of a view, and what they mean: crop box, factors, order. Knows sizes, but no pixels."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from moco.settings import ViewSettings

Array = np.ndarray[Any, Any]

TRIES = 10  # torchvision's RandomResizedCrop gives up after ten boxes that do not fit
_AREA, _RATIO = slice(0, TRIES), slice(TRIES, 2 * TRIES)
(
    _TOP, _LEFT, _FLIP, _JITTER, _BRIGHTNESS, _CONTRAST, _SATURATION, _HUE, _ORDER, _GRAYSCALE, _BLUR, _SIGMA, _SOLARIZE
) = range(2 * TRIES, 2 * TRIES + 13)  # fmt: skip
_NOISE = 2 * TRIES + 13
MOST_CHANNELS = 64
_GAIN = slice(_NOISE + 1, _NOISE + 1 + MOST_CHANNELS)
DRAWS = _GAIN.stop
"""Uniform numbers per view. A new kind of draw goes at the end, so that the old ones stay what they are."""

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
ORDERS = np.array(list(itertools.permutations(range(4))), dtype=np.int8)
LUMINANCE = (0.2989, 0.587, 0.114)  # torchvision's weights, those of ITU-R BT.601
SOLARIZE_FROM = 128
BLUR_REACH = 3  # standard deviations; torchvision's fixed kernel of 23 differs by less than a grey level

# These keep the numbers apart from everybody else's who starts from the same seed.
_STREAM = 0x76696577
_SMALL_STREAM = 0x736D616C


def draw(seed: int, epoch: int, step: int, count: int, small: int = 0) -> Array:
    """Uniform numbers in [0, 1) for views of `count` pictures: float64, (count, 2 + small, DRAWS). A pure function.

    small: views beside the two usual ones, whose numbers are the same with and without them.
    """
    # Drawn column by column, so that a column added at the end leaves the others as they are.
    streams = ((_STREAM, 2), (_SMALL_STREAM, small)) if small else ((_STREAM, 2),)
    tables = [
        np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, epoch, step))).random(
            (DRAWS, count, views)
        )
        for stream, views in streams
    ]
    return (np.concatenate(tables, axis=2) if small else tables[0]).transpose(1, 2, 0)


@dataclass
class ViewParameters:
    """What is done to each of n pictures. Arrays with leading dimension n; lengths in pixels of the source picture.

    Brightness and contrast are for pictures of any number of channels, saturation, hue and grayscale for RGB.

    Attributes:
        top, left, height, width: the crop box, int64.
        flip: left-right flip, bool.
        jitter: whether the colours are changed at all, bool. The next four say how, in the order of `order`.
        brightness, contrast, saturation: factors around 1.
        hue: turn of the hue circle, −0.5…0.5.
        order: (n, 4) int8, a permutation of BRIGHTNESS, CONTRAST, SATURATION, HUE.
        grayscale_before, grayscale_after: colours dropped before or after the jitter, bool.
        blur: whether to blur, bool; sigma: its standard deviation in pixels of the view.
        solarize: whether bright pixels are inverted, bool.
        gain: (n, MOST_CHANNELS) factors around 1, of each channel; (n, 0) for none.
        noise: standard deviation of the noise on every value, as a share of the full range.
        noise_key: int64 below 2⁵³, from which all of a view's noise follows (`noise.py`).
    """

    top: Array
    left: Array
    height: Array
    width: Array
    flip: Array
    jitter: Array
    brightness: Array
    contrast: Array
    saturation: Array
    hue: Array
    order: Array
    grayscale_before: Array
    grayscale_after: Array
    blur: Array
    sigma: Array
    solarize: Array
    gain: Array
    noise: Array
    noise_key: Array

    def __len__(self) -> int:
        return len(self.top)

    def __getitem__(self, rows: slice | Array) -> ViewParameters:
        """The parameters of some of the pictures."""
        return ViewParameters(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def parameters(table: Array, heights: int | Array, widths: int | Array, settings: ViewSettings) -> ViewParameters:
    """What the rows of a table of uniform numbers do to pictures of these sizes.

    Args:
        table: (n, DRAWS), one view of each picture.
        heights, widths: sizes of the pictures, one for all or (n,).
        settings: the distribution of the views.
    """
    top, left, height, width = crop_boxes(table, heights, widths, settings)
    grayscale = table[:, _GRAYSCALE] < settings.grayscale_probability
    never = np.zeros(len(table), dtype=bool)
    return ViewParameters(
        top=top,
        left=left,
        height=height,
        width=width,
        flip=table[:, _FLIP] < settings.flip_probability,
        jitter=table[:, _JITTER] < settings.jitter_probability,
        brightness=1 + settings.brightness * (2 * table[:, _BRIGHTNESS] - 1),
        contrast=1 + settings.contrast * (2 * table[:, _CONTRAST] - 1),
        saturation=1 + settings.saturation * (2 * table[:, _SATURATION] - 1),
        hue=settings.hue * (2 * table[:, _HUE] - 1),
        order=ORDERS[(table[:, _ORDER] * len(ORDERS)).astype(np.int64)],
        grayscale_before=grayscale if settings.grayscale_first else never,
        grayscale_after=never if settings.grayscale_first else grayscale,
        blur=table[:, _BLUR] < settings.blur_probability,
        sigma=_between(settings.blur_sigma, table[:, _SIGMA]),
        solarize=table[:, _SOLARIZE] < settings.solarize_probability,
        gain=1 + settings.gain * (2 * table[:, _GAIN] - 1) if settings.gain else np.ones((len(table), 0)),
        noise=np.full(len(table), settings.noise),
        noise_key=(table[:, _NOISE] * 2**53).astype(np.int64),
    )


def _between(limits: tuple[float, float], uniform: Array) -> Array:
    low, high = limits
    return low + (high - low) * uniform


def crop_boxes(
    table: Array, heights: int | Array, widths: int | Array, settings: ViewSettings
) -> tuple[Array, Array, Array, Array]:
    """Top, left, height and width of random crops, each (n,) int64, as torchvision's RandomResizedCrop draws them."""
    tall = np.broadcast_to(np.asarray(heights, dtype=np.int64), len(table))
    wide = np.broadcast_to(np.asarray(widths, dtype=np.int64), len(table))
    low, high = settings.crop_ratio
    area = (tall * wide)[:, None] * _between(settings.crop_scale, table[:, _AREA])
    ratio = np.exp(_between((np.log(low), np.log(high)), table[:, _RATIO]))
    width = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    height = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (width > 0) & (width <= wide[:, None]) & (height > 0) & (height <= tall[:, None])
    first = np.arange(len(table)), fits.argmax(axis=1)
    width, height = width[first], height[first]
    # Where no try fits: the largest central box within the limits of the ratio.
    shape = wide / tall
    central_width = np.where(shape > high, np.rint(tall * high), wide).astype(np.int64).clip(1, wide)
    central_height = np.where(shape < low, np.rint(wide / low), tall).astype(np.int64).clip(1, tall)
    found = fits.any(axis=1)
    width, height = np.where(found, width, central_width), np.where(found, height, central_height)
    room_below, room_right = tall - height, wide - width
    top = np.where(found, np.floor(table[:, _TOP] * (room_below + 1)).astype(np.int64), room_below // 2)
    left = np.where(found, np.floor(table[:, _LEFT] * (room_right + 1)).astype(np.int64), room_right // 2)
    return top, left, height, width
