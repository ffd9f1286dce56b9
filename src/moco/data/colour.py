"""Gain, grayscale and colour jitter as a few matrices, hue turns as shifts. Plain numbers for both ways to apply views.

Gain, brightness, contrast and saturation are matrices on the channels plus a share of the picture's mean luminance,
with values clamped to the range of a pixel after each. One with a factor of at most 1 mixes colours that are in range,
so that nothing is clamped and the next one can be multiplied onto it: the result is the same, with fewer passes.

What is neither gray nor RGB has no luminance: contrast works on each channel around its own mean, and saturation, hue
and grayscale are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moco.data.drawing import BRIGHTNESS, CONTRAST, HUE, LUMINANCE, SATURATION, ViewParameters
from moco.settings import ViewSettings

Array = np.ndarray[Any, Any]

NOTHING, MATRIX, TURN = range(3)
STEPS = 5
"""Most steps of a picture: four operations of the jitter, and grayscale before or after. Gain is one more."""


@dataclass
class ColourSteps:
    """The colour operations of n pictures as steps, each followed by clamping.

    Attributes:
        kind: (n, STEPS) int8, or STEPS + 1 with gain. MATRIX: the channels become matrix · channels. TURN: the hue
            moves. NOTHING: the picture is finished.
        matrix: (n, STEPS, C, C + 1). The last column belongs to the mean luminance of the picture before the step
            (to each channel's own mean, if there are neither 1 nor 3 channels), and holds C times the same number.
        roll, shift: (n,) the hue turn: first the channels roll by −2…2 places, then the hue moves by `shift`
            sixths of the circle, −1…1.
    """

    kind: Array
    matrix: Array
    roll: Array
    shift: Array

    def __getitem__(self, rows: slice) -> ColourSteps:
        """The steps of some of the pictures."""
        return ColourSteps(self.kind[rows], self.matrix[rows], self.roll[rows], self.shift[rows])


def colour_steps(view: ViewParameters, channels: int) -> ColourSteps:
    """The colour operations of a view in the order in which they come, merged where that changes nothing."""
    count = len(view)
    rows = np.arange(count)
    gained = int(view.gain.shape[1] > 0)
    most = STEPS + gained
    steps = ColourSteps(
        kind=np.zeros((count, most), np.int8),
        matrix=np.tile(np.eye(channels, channels + 1), (count, most, 1, 1)),
        roll=np.rint(3 * view.hue).astype(np.int64),
        shift=6 * view.hue - 2 * np.rint(3 * view.hue),
    )
    luminance = np.array(LUMINANCE)
    at = np.zeros(count, np.int64)  # the step that is being put together
    clamps = np.zeros(count, bool)  # whether it can leave the range
    if gained:  # comes first and by itself, since it changes the mean in its own way
        steps.kind[:, 0] = MATRIX
        steps.matrix[:, 0, range(channels), range(channels)] = view.gain[:, :channels]
        clamps[:] = True
    mean = np.ones(count)  # mean luminance so far, in units of that before the step
    for operation, factor, chosen in _operations(view, channels):
        turns = chosen & (operation == HUE)
        mixes = chosen & ~turns
        present = steps.kind[rows, at]
        new = (mixes & (clamps | (present == TURN))) | (turns & (present != NOTHING))
        at += new
        clamps &= ~new
        mean[new] = 1
        steps.kind[rows[mixes], at[mixes]] = MATRIX
        steps.kind[rows[turns], at[turns]] = TURN
        factor = np.where(mixes, factor, 1.0)
        gray = np.where(operation == SATURATION, 1 - factor, 0.0)
        matrix = steps.matrix[rows, at]
        changed = factor[:, None, None] * matrix
        if channels == 3:
            changed += gray[:, None, None] * (luminance @ matrix)[:, None, :]
        changed[:, :, -1] += np.where(operation == CONTRAST, (1 - factor) * mean, 0.0)[:, None]
        steps.matrix[rows, at] = changed
        kept = factor + gray * luminance.sum()  # what happens to the mean
        mean = np.where(operation == CONTRAST, mean, kept * mean)
        clamps |= factor > 1
    return steps


def _operations(view: ViewParameters, channels: int) -> list[tuple[Array, Array, Array]]:
    """(operation, factor, whether) of each place in the order, each (n,)."""
    count = len(view)
    factors = np.stack([view.brightness, view.contrast, view.saturation, np.ones(count)], axis=1)
    gray = np.full(count, SATURATION, np.int8), np.zeros(count)
    places = [(*gray, view.grayscale_before)] if channels == 3 and view.grayscale_before.any() else []
    for operation in view.order.T:
        chosen = view.jitter & ((operation != HUE) | ((view.hue != 0) & ~view.grayscale_before))
        if channels != 3:
            chosen &= (operation == BRIGHTNESS) | (operation == CONTRAST)
        factor = np.take_along_axis(factors, operation[:, None].astype(np.int64), axis=1)[:, 0]
        places.append((operation, factor, chosen))
    if channels == 3 and view.grayscale_after.any():
        places.append((*gray, view.grayscale_after))
    return places


def without_meaning(views: ViewSettings, channels: int) -> tuple[str, ...]:
    """The operations among these that pictures of so many channels know nothing of: they are left out."""
    if channels == 3:
        return ()
    asked = {
        "saturation": views.jitter_probability * views.saturation,
        "hue": views.jitter_probability * views.hue,
        "grayscale": views.grayscale_probability,
    }
    return tuple(name for name, strength in asked.items() if strength > 0)
