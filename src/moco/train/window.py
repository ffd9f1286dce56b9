"""The figures of the steps since the last written line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moco.contrast.collectives import gather_rows


class Window:
    """Sums of figures over steps, kept on the device until a line is asked for.

    batch_size: pictures per step over all processes. chance_loss: the loss of features that know nothing,
    where there is such a level.
    """

    def __init__(self, batch_size: int, chance_loss: float | None) -> None:
        self._batch_size, self._chance_loss = batch_size, chance_loss
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps, self._waited, self._seconds = 0, 0.0, 0.0

    def add(self, metrics: dict[str, Tensor], waited: float, seconds: float) -> None:
        """Count a step that took `seconds`, `waited` of them for its batch."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0) + value
        self._steps, self._waited, self._seconds = self._steps + 1, self._waited + waited, self._seconds + seconds

    def line(self, step: int, epoch: float, rate: float) -> dict[str, float]:
        """The means since the last line, averaged over all processes, and start anew. Waits for the device."""
        names = sorted(self._sums)
        line: dict[str, float] = {"step": step, "epoch": round(epoch, 4)}
        if names:
            values = torch.stack([self._sums[name].float() for name in names]) / self._steps
            means = dict(zip(names, gather_rows(values[None]).mean(0).tolist(), strict=True))
            chance = {} if self._chance_loss is None else {"chance_loss": self._chance_loss}
            line |= {"loss": means.pop("loss"), **chance, **means}
        line |= {
            "learning_rate": rate,
            "images_per_second": self._batch_size * self._steps / max(self._seconds, 1e-9),
            "data_wait": self._waited / max(self._seconds, 1e-9),
        }
        self._clear()
        return line

    def state_dict(self) -> dict[str, Any]:
        """What has been counted, for a checkpoint between two lines."""
        return {"sums": dict(self._sums), "steps": self._steps, "waited": self._waited, "seconds": self._seconds}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on counting where a checkpoint was written."""
        self._sums = {name: value.to(device) for name, value in state["sums"].items()}
        self._steps, self._waited, self._seconds = state["steps"], state["waited"], state["seconds"]


class Waiting:
    """How long the training waits for data.

    On CUDA steps are handed over and go on by themselves: there, time counts only if the device had nothing left to do
    when the batch came.
    """

    def __init__(self, device: torch.device) -> None:
        self._last_step = torch.cuda.Event() if device.type == "cuda" else None

    def handed_over(self) -> None:
        """A step is on its way."""
        if self._last_step is not None:
            self._last_step.record()

    def counted(self, seconds: float) -> float:
        """Of the seconds until the batch came, those that held the training up. Does not wait for the device."""
        return seconds if self._last_step is None or self._last_step.query() else 0.0
