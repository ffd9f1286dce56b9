"""The finite guard: what is no finite number never reaches the weights, and watching for it never stops the device."""

from __future__ import annotations

import torch
from torch import Tensor

from moco.contrast.collectives import gather_rows


class NotFinite(Exception):
    """The loss or the gradient of a step is no finite number; the weights are as before that step."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class FiniteGuard:
    """Notes the first step whose loss is not finite, and keeps the optimiser from using it.

    On CUDA the note stays on the device: reading it there at every step would make the host wait for the device. The
    fused optimiser skips its work where it is told so on the device itself, by the means that gradient scaling uses;
    so the weights are those of before the bad step, however many steps later the host comes to look.

    optimizer: whose steps are guarded. fused: whether it is a fused one. every_step: look at each step at once, before
    the optimiser: elsewhere than on CUDA that costs nothing, and who is not fused has no other way.
    """

    def __init__(
        self, device: torch.device, optimizer: torch.optim.Optimizer, *, fused: bool, every_step: bool = False
    ) -> None:
        self._optimizer, self._device, self._fused = optimizer, device, fused
        self.every_step = every_step or not fused
        self.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self._skip = torch.zeros((), device=self._device)  # 1 from the first bad step on
        self._first = torch.full((), -1, device=self._device)

    def note(self, figures: Tensor, step: int) -> None:
        """Take down whether the figures of `step` (loss, gradient norm) are finite in every process.

        Raises NotFinite at once where each step is looked at.
        """
        # A bad gradient would reach all of them, so all of them stop.
        bad = gather_rows(~torch.isfinite(figures.detach()).all()[None]).any()
        self._first = torch.where(bad & (self._skip == 0), step, self._first)
        self._skip = torch.maximum(self._skip, bad.to(self._skip.dtype))
        if self._fused:
            self._optimizer.found_inf = self._skip  # type: ignore[attr-defined]
        if self.every_step:
            self.check()

    def check(self) -> None:
        """Raise NotFinite if a step was not. Waits for the device."""
        step = int(self._first.item())
        if step >= 0:
            raise NotFinite(step)
