"""Functions of the user that a training calls: after each step, and after each epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moco.train.run import Run

NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Progress:
    """Where a training is, as `on_step` and `on_epoch` are told.

    run: the run folder. step: optimiser steps done, of `steps`; epoch: passes over the data done, of `epochs`.
    metrics: what was written into metrics.jsonl at this step, by name; after an epoch with the check in it. Empty for
    the steps between two lines (`log_every`): their figures are still on the device, and nobody waits for them.
    """

    run: Run
    step: int
    steps: int
    epoch: float
    epochs: int
    metrics: Mapping[str, float]


Callback = Callable[[Progress], object]


class Callbacks:
    """Calls the functions of the user, and keeps what they raise until the step is finished and saved.

    StopIteration ends the training well, at this step; any other exception ends it too, and comes out of `leave`.
    What they return is not looked at.
    """

    def __init__(self, on_step: Callback | None = None, on_epoch: Callback | None = None) -> None:
        self._on_step, self._on_epoch = on_step, on_epoch
        self._raised: Exception | None = None

    @property
    def stopping(self) -> bool:
        """Whether one of them asked for the end."""
        return self._raised is not None

    def step(self, progress: Progress) -> None:
        """A step is done."""
        self._call(self._on_step, progress)

    def epoch(self, progress: Progress) -> None:
        """An epoch is done, and its check."""
        self._call(self._on_epoch, progress)

    def leave(self) -> None:
        """At the end of the training. Raises what a function raised, unless it only asked for the end."""
        if self._raised is not None and not isinstance(self._raised, StopIteration):
            raise self._raised

    def _call(self, function: Callback | None, progress: Progress) -> None:
        if function is None:
            return
        try:
            function(progress)
        except Exception as error:  # it is the user's, who gets it when everything is saved
            self._raised = self._raised or error
