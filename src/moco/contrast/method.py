"""What the training loop asks of a method: MoCo's, and those it is compared with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StepOutput:
    """The loss to differentiate, and figures to watch (0-dimensional tensors without gradient)."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Method(nn.Module, ABC):
    """A module that turns two views of a batch into a loss.

    query_encoder: the encoder that learns, with the parts `backbone` and `head`; what is trained beside it (a
    predictor, prototypes) are other parts of the module. A step is

    >>> method.begin_step(progress)                   # once per optimiser step
    >>> output = method(view_a, view_b, ids)          # any number of times (gradient accumulation)
    >>> output.loss.backward()
    >>> optimizer.step(); optimizer.zero_grad()
    >>> method.end_step()

    Every method gives the figure `feature_spread`; those with negatives `contrast_accuracy` and the similarities too.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module | None, *, seed: int = 0) -> None:
        super().__init__()
        self.query_encoder = nn.Sequential()
        self.query_encoder.add_module("backbone", encoder)
        self.query_encoder.add_module("head", head if head is not None else nn.Identity())
        self.seed = seed
        self.step = 0
        self._generator = torch.Generator()

    def begin_step(self, progress: float = 0.0) -> None:
        """Before the first `forward` of an optimiser step. progress: part of the training that is done, 0 to 1."""
        self._generator.manual_seed((self.seed * 1_000_003 + self.step) % 2**63)

    @abstractmethod
    def forward(self, view_a: Tensor, view_b: Tensor, ids: Tensor | None = None) -> StepOutput:
        """Loss of a batch of view pairs (N, …). ids: (N,) numbers of the pictures."""

    def end_step(self) -> None:
        """After the optimiser: count the step."""
        self.step += 1

    def skip_step(self, step: int) -> None:
        """Forget a step that went wrong, and count it: the next one is `step` + 1."""
        self.step = step + 1

    def remembered(self) -> list[Tensor]:
        """What is kept from earlier steps beside the weights, such as a queue: equal on all processes."""
        return []

    @property
    def backbone(self) -> nn.Module:
        """The query encoder without its head: what pre-training is for."""
        return self.query_encoder.get_submodule("backbone")

    @property
    def chance_loss(self) -> float | None:
        """The loss of features that know nothing, or None where the method has no such level."""
        return None

    def get_extra_state(self) -> int:
        """The step count is part of the state."""
        return self.step

    def set_extra_state(self, state: int) -> None:
        """Restore the step count."""
        self.step = int(state)


def feature_spread(unit: Tensor) -> Tensor:
    """Mean standard deviation per dimension of unit vectors (N, C), times √C: about 1 if spread, 0 if collapsed."""
    spread: Tensor = unit.detach().std(0, correction=0).mean() * float(unit.shape[1]) ** 0.5
    return spread


def cosine_momentum(start: float, progress: float) -> float:
    """m at a part 0 to 1 of the training: from `start` to 1 by half a cosine ([v3] section 4.1; BYOL, section 3.3)."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, momentum: float) -> None:
    """θ_slow ← m·θ_slow + (1−m)·θ_fast ([v1] equation 2).

    Parameters only; the running statistics of batch norm are each encoder's own, as in the authors' code.
    """
    slowly, fast_ones = ([parameter.data for parameter in encoder.parameters()] for encoder in (slow, fast))
    torch._foreach_lerp_(slowly, fast_ones, 1 - momentum)
