"""Settings that fit a data set, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

IMAGE_SIZES = (32, 64, 96, 128, 160, 224)
SMALL_STEM = 64  # up to this size the 3 × 3 stem of CIFAR networks; above, ImageNet's
FEW = 1000
_STEPS_WANTED = 200_000  # an encoder that starts from nothing keeps gaining for about so many steps
_EPOCHS = (100, 200, 400, 800)


@dataclass(frozen=True)
class Suggestion:
    """A setting of `moco pretrain`, a value for it, and why."""

    setting: str
    value: Any
    reason: str


def suggestions(*, sides: Array, channels: Array, colourless: float, pages: int, images: int) -> list[Suggestion]:
    """Settings for a data set; none if nothing in it can be read.

    Args:
        sides: shorter sides of the pictures in pixels, (n,).
        channels: of the pictures, (n,).
        colourless: share of the pictures without colour.
        pages: of most of the gray files.
        images: readable pictures, without repetitions.
    """
    if len(sides) == 0:
        return []
    side = float(np.median(sides))
    size = min((size for size in IMAGE_SIZES if size >= 0.9 * side), default=IMAGE_SIZES[-1])
    small = size <= SMALL_STEM
    found = [
        Suggestion(
            "recipe", "small" if size <= 40 else "v2", f"half of the pictures have a shorter side of {side:.0f}"
        ),
        Suggestion("image_size", size, f"the usual size nearest to a shorter side of {side:.0f}, at most 224"),
        Suggestion(
            "stem",
            "small" if small else "imagenet",
            f"at {size} pixels ImageNet's stem would leave {size // 32} × {size // 32} places of the last stage"
            if small
            else f"at {size} pixels ImageNet's stem leaves enough, and the small one costs 16 times as much",
        ),
        _channels(channels, colourless, pages),
    ]
    batch = next(size for size in (256, 128, 64, 32, 16, 8, 4, 2) if size * 16 <= images or size == 2)
    queue = min(65_536, 1 << max((images // 2).bit_length() - 1, 0))
    queue = min(queue, 4096) if small else queue
    epochs = next((epochs for epochs in _EPOCHS if epochs * images / batch >= _STEPS_WANTED), _EPOCHS[-1])
    steps = epochs * (images // batch)
    why = "less than half of the pictures, so that a key seldom meets older keys of its own picture"
    if queue == 65_536:
        why = "as in the papers"
    elif small and queue == 4096:
        why = "more gains nothing on small pictures"
    fewer = "" if batch == 256 else f"; smaller than the usual 256, so that an epoch of {images:,} has steps enough"
    return [
        *found,
        Suggestion("batch_size", batch, f"{images // batch:,} steps an epoch{fewer}"),
        Suggestion("queue_size", queue, f"K: {why}"),
        Suggestion("epochs", epochs, f"{steps:,} steps; what is learned from nothing needs about {_STEPS_WANTED:,}"),
    ]


def _channels(channels: Array, colourless: float, pages: int) -> Suggestion:
    counts = np.bincount(channels)
    most = int(counts.argmax())
    if pages > 1:
        return Suggestion("channels", pages, f"most files have {pages} gray pages: one channel each")
    if most > 4 or (most in (2, 4) and counts[most] == len(channels)):
        plain = "; 3 lays transparency on white" if most == 4 else ""
        return Suggestion("channels", most, f"{counts[most] / len(channels):.0%} of the pictures have so many{plain}")
    if colourless > 0.99:
        return Suggestion("channels", 1, f"{colourless:.1%} of the pictures have no colour")
    return Suggestion(
        "channels", 3, "RGB" + (f"; {colourless:.0%} of the pictures have no colour" if colourless else "")
    )
