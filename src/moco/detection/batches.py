"""Batches for a detector, in a seeded order, from any iteration on: pure functions of seed and iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moco.data.loader import permutation
from moco.data.reading import Unreadable, stand_ins
from moco.detection.marked import Marked, MarkedSet
from moco.errors import UserError

Target = dict[str, Tensor]

_FLIPS = 0x666C6970
"""Keeps the flips apart from everybody else who starts from the same seed."""


@dataclass
class Example:
    """A picture (C, H, W) uint8 with its target, as torchvision wants it. skipped: (name, reason) of pictures that
    could not be read, in whose place it stands."""

    picture: Tensor
    target: Target
    skipped: list[tuple[str, str]]


def example(marked: Marked, channels: int, *, masks: bool, flip: bool = False) -> Example:
    """A picture with its objects. flip: seen in a mirror. Raises Unreadable."""
    pixels, boxes = marked.pixels(channels), marked.boxes.copy()
    shown = marked.masks() if masks else None
    if flip:
        pixels = pixels[:, ::-1]
        boxes[:, [0, 2]] = marked.width - boxes[:, [2, 0]]
        shown = None if shown is None else shown[:, :, ::-1]
    # Class 0 is the background.
    target = {"boxes": torch.from_numpy(boxes), "labels": torch.from_numpy(marked.labels) + 1}
    if shown is not None:
        target["masks"] = torch.from_numpy(np.ascontiguousarray(shown))
    return Example(torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), target, [])


class BatchStream(Dataset[Example]):
    """The batches of a training, by iteration: each picture once in a pass, half of them in a mirror.

    Args:
        data: the pictures, without objects that are set aside.
        channels: of a picture. masks: targets have masks.
        batch_size: pictures per iteration. seed: together with the iteration it decides everything.
        workers: processes that decode; 0 decodes in this one.
    """

    def __init__(
        self, data: MarkedSet, *, channels: int, masks: bool, batch_size: int, seed: int, workers: int = 0
    ) -> None:
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self._channels, self._masks, self._workers = channels, masks, workers

    def __getitem__(self, position: int) -> Example:
        """The example at a position in the endless order of all passes. Raises UserError where nothing can be read."""
        count = len(self.data)
        order = permutation(self.seed, position // count, count)
        flips = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(_FLIPS, position)))
        skipped: list[tuple[str, str]] = []
        for number in stand_ins(int(order[position % count]), count):
            try:
                found = example(
                    self.data.pictures[number], self._channels, masks=self._masks, flip=bool(flips.integers(2))
                )
            except Unreadable as error:
                skipped.append((error.name, error.reason))
            else:
                found.skipped = skipped
                return found
        raise UserError(f"none of the {count} pictures of {self.data.name} can be read; the first: {skipped[0][1]}")

    def run(self, first: int, end: int) -> Iterator[list[Example]]:
        """The batches of iterations `first` … `end` − 1."""
        size = self.batch_size
        positions = [list(range(step * size, (step + 1) * size)) for step in range(first, end)]
        loader: DataLoader[Any] = DataLoader(
            self, batch_sampler=positions, num_workers=self._workers, collate_fn=list, generator=torch.Generator()
        )
        yield from loader
