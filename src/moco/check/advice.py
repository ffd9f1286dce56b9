"""Settings that fit a data set, each with its reason."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moco.errors import counted

Array = np.ndarray[Any, Any]

IMAGE_SIZES = (32, 64, 96, 128, 160, 224)
SMALL_STEM = 64  # up to this size the 3 × 3 stem of CIFAR networks; above, ImageNet's
FEW = 1000
_STEPS_WANTED = 200_000  # an encoder that starts from nothing keeps gaining for about so many steps
_EPOCHS = (100, 200, 400, 800)
_STEPS_AN_EPOCH = 16
_BATCHES = (256, 128, 64, 32)  # below 32, batch norm is noise
_MANY = 50_000  # pictures from which a backbone of the papers' size can learn


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
        _backbone(small, images),
        _channels(channels, colourless, pages),
    ]
    return [*found, *_pace(images, small)]


def _pace(images: int, small: bool) -> list[Suggestion]:
    """Batch, queue, and how long; the pictures are small or not."""
    most = max(1 << max(images.bit_length() - 1, 0), 2)  # a batch cannot be larger than the data
    batch = next((size for size in _BATCHES if size * _STEPS_AN_EPOCH <= images), min(most, _BATCHES[-1]))
    repeat = max(-(-_STEPS_AN_EPOCH * batch // max(images, 1)), 1)
    an_epoch = images * repeat // batch
    epochs = next(one for one in _EPOCHS if one * an_epoch >= _STEPS_WANTED or one * repeat >= _EPOCHS[-1])
    queue = min(65_536, 1 << max((images // 2).bit_length() - 1, 0))
    queue = min(queue, 4096) if small else queue
    why = "less than half of the pictures, so that a key seldom meets older keys of its own picture"
    if queue == 65_536:
        why = "as in the papers"
    elif small and queue == 4096:
        why = "more gains nothing on small pictures"
    fewer = "" if batch == 256 else "; smaller than the usual 256, for more steps with few pictures"
    often = f"views of each picture in an epoch, which would be {counted(images // batch, 'step')} long"
    return [
        Suggestion("batch_size", batch, f"{counted(an_epoch, 'step')} an epoch{fewer}"),
        *([Suggestion("repeat", repeat, often)] if repeat > 1 else []),
        Suggestion("queue_size", queue, f"K: {why}"),
        Suggestion(
            "epochs", epochs, f"{epochs * an_epoch:,} steps; what is learned from nothing gains up to {_STEPS_WANTED:,}"
        ),
    ]


def _backbone(small: bool, images: int) -> Suggestion:
    if small or images < _MANY:
        why = "small pictures" if small else f"fewer than {_MANY:,} pictures"
        return Suggestion("backbone", "resnet18", f"{why} gain little from a larger one, at three times the cost")
    return Suggestion("backbone", "resnet50", "as in the papers")


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


def command(data: str, settings: Sequence[Suggestion], *, labels: str, images: int, bad: int, usual: int) -> str:
    """The command line that trains on `data` with suggested settings, to copy; nothing where it would not be one line.

    labels: as they were asked for. bad: of the images, those that a training with these settings cannot use; usual: as
    many of them as it passes over without being told.
    """
    words = ["moco", "pretrain", data]
    for item in settings:
        words += [f"--{item.setting.replace('_', '-')}", str(item.value)]
    if labels != "auto":
        words += ["--labels", labels]
    if bad > usual:
        words += ["--max-bad", f"{min(math.floor(100 * bad / images) + 1, 100) / 100:g}"]
    text = shlex.join(words)
    return text if text.isprintable() else ""
