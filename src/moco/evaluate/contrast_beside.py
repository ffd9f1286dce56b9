"""The contrastive loss of a run, learned beside labels on the same pictures and on further ones without labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moco.contrast.dictionary import Queue
from moco.contrast.method import Method
from moco.data.device import prefetch
from moco.data.loader import Batch
from moco.evaluate.finetune import Preparation
from moco.evaluate.pictures import Part
from moco.settings import ViewSettings


@dataclass
class ContrastBeside:
    """Adds `weight` times the loss of `model` on two views of the pictures that the labels are learned from.

    model: of the run, with its queue; its backbone is the very module that the labels train. train: the labelled
    pictures; in each step those of the task. unlabelled: further pictures, as many a step again. query, key: how the
    two views are made. Ids: labelled pictures 0 … n − 1, unlabelled ones from n on.
    """

    model: Method
    weight: float
    train: Part
    query: ViewSettings
    key: ViewSettings
    pictures: Preparation
    unlabelled: Part | None = None
    seed: int = 0
    losses: list[Tensor] = field(default_factory=list)
    _batches: list[Iterator[Batch]] = field(default_factory=list)

    def parameters(self) -> Sequence[nn.Parameter]:
        """The projection head's: what learns besides the backbone."""
        backbone = {id(parameter) for parameter in self.model.backbone.parameters()}
        return [p for p in self.model.parameters() if p.requires_grad and id(p) not in backbone]

    def start(self, steps: int, batch_size: int) -> None:
        """Open the views. Keys that wait in the queue are of a numbering of their own: they belong to nobody here."""
        self.model.to(self.pictures.device).to(memory_format=torch.channels_last).train()
        for part in self.model.modules():
            if isinstance(part, Queue):
                part.ids.fill_(-1)
        parts = [self.train] if self.unlabelled is None else [self.train, self.unlabelled]
        self._batches = [
            prefetch(
                self.pictures.stream(part, self.query, self.key, min(batch_size, len(part)), self.seed).run(0, steps),
                self.pictures.device,
            )
            for part in parts
        ]

    def begin_step(self, progress: float) -> None:
        """The key encoder follows."""
        self.model.begin_step(progress)

    def loss(self, autocast: torch.autocast) -> Tensor:
        """`weight` times the contrastive loss of this step."""
        found = [next(batches) for batches in self._batches]
        query, key = (
            self.pictures.normalized(torch.cat([getattr(batch, side) for batch in found])) for side in ("query", "key")
        )
        ids = torch.cat([batch.ids + first for batch, first in zip(found, (0, len(self.train)), strict=False)])
        with autocast:
            loss: Tensor = self.model(query, key, ids).loss
        self.losses.append(loss.detach())
        return loss * self.weight

    def end_step(self) -> None:
        """The keys enter the queue."""
        self.model.end_step()

    def mean_losses(self, steps: Iterable[int]) -> dict[int, float]:
        """The mean contrastive loss, unweighted, from one of the (ascending) steps to the next."""
        found, first = {}, 0
        for step in steps:
            found[step] = float(torch.stack(self.losses[first:step]).mean())
            first = step
        return found
