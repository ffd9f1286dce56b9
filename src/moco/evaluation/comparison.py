"""The networks that an evaluation sets side by side, its pictures, and their features, each computed once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from moco import __version__
from moco.data.loader import evaluation_batches
from moco.evaluate.cache import FeatureCache, weights_fingerprint
from moco.evaluate.features import encode
from moco.evaluate.layers import at_layer
from moco.evaluate.pictures import Part, data_fingerprint
from moco.evaluate.subject import Subject, Where
from moco.evaluation_settings import EvaluationSettings

BATCH = 256
RAW_VALUES = 3 * 64 * 64
"""Pictures up to so many values are compared pixel by pixel as well."""


@dataclass(frozen=True)
class Side:
    """One row of the table. label: its name. network: (n, C, S, S) → (n, D). trains: whether it has weights."""

    label: str
    network: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    trains: bool = True


@dataclass
class Comparison:
    """What the tasks of `moco eval` work with.

    where: of the subject. unlabelled: further pictures in memory, for fine-tuning. notes: lines for the reader of the
    table.
    """

    settings: EvaluationSettings
    where: Where
    subject: Subject
    train: Part
    test: Part
    device: torch.device
    cache: FeatureCache
    console: Console | None
    unlabelled: Any = None
    notes: list[str] = field(default_factory=list)
    _data: dict[int, str | None] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.train.classes)

    def sides(self) -> Iterator[Side]:
        """The subject, and unless they are not wanted the untrained network and the pixels of small pictures."""
        subject = self.subject
        yield self.side(subject.label, subject.backbone)
        if not self.settings.baseline:
            return
        if subject.untrained is not None:
            yield self.side("untrained", subject.untrained(None))
        if subject.channels * subject.size**2 <= RAW_VALUES:
            yield Side("raw pixels", nn.Flatten(), (0.0,) * subject.channels, (1.0,) * subject.channels, trains=False)

    def side(self, label: str, network: nn.Module) -> Side:
        """A row for a network of the subject's kind, with the features that are asked for. Raises UserError."""
        placed = network.to(self.device).to(memory_format=torch.channels_last)
        subject, asked = self.subject, self.settings
        shown = at_layer(placed, asked.layer, asked.grid, channels=subject.channels, size=subject.size)
        return Side(label, shown, subject.mean, subject.std)

    def features(self, side: Side, part: Part) -> Tensor:
        """The features of the pictures of a part, (N, D) float32 on the CPU, from the cache where they are there."""
        depends = self._depends(side, part)
        found = self.cache.get(depends, len(part)) if side.trains else None
        if found is None:
            found = encode(
                side.network,
                self._shown(self.batches(part), len(part), side.label),
                mean=side.mean,
                std=side.std,
                device=self.device,
                precision=self.settings.precision,
            )
            if side.trains:
                self.cache.put(depends, found)
        return found

    def batches(self, part: Part) -> Iterator[Tensor]:
        """The pictures as an evaluator wants them, see `evaluation_batches`."""
        return evaluation_batches(
            part.source,
            part.indices,
            size=self.subject.size,
            channels=self.subject.channels,
            batch_size=BATCH,
            workers=self.settings.workers,
        )

    def _depends(self, side: Side, part: Part) -> dict[str, Any]:
        key = id(part.source)
        if self.cache.folder is not None and key not in self._data:
            self._data[key] = data_fingerprint(part.source)
        return {
            "moco": __version__,
            "torch": torch.__version__,
            "weights": weights_fingerprint(side.network),
            "data": self._data.get(key),
            "pictures": hashlib.sha256(part.indices.tobytes()).hexdigest(),
            "size": self.subject.size,
            "channels": self.subject.channels,
            "mean": side.mean,
            "std": side.std,
            "precision": self.settings.precision,
            "device": self.device.type,
            "layer": "last" if self.settings.layer is None else self.settings.layer,
            "grid": self.settings.grid,
        }

    def _shown(self, batches: Iterator[Tensor], count: int, label: str) -> Iterator[Tensor]:
        with self.bar(f"encoding · {label}", count) as advance:
            for batch in batches:
                yield batch
                advance(len(batch))

    def bar(self, what: str, total: int) -> _Bar:
        """A progress bar on a terminal; gone when it is done."""
        return _Bar(self.console, what, total)


class _Bar:
    def __init__(self, console: Console | None, what: str, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = console is None or not console.is_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task = self._progress.add_task(what, total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, count: int) -> None:
        self._progress.advance(self._task, count)
