"""BYOL (arXiv 2006.07733): predict what a slowly following network says of the other view; no negatives at all."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.method import Method, StepOutput, cosine_momentum, feature_spread, follow


class BYOL(Method):
    """An online network with a predictor behind it, and a target network that follows (section 3.1).

    The loss is ‖p − z'‖² = 2 − 2 p·z' (equation 2) of the unit vectors p (predictor of the online projection of a view)
    and z' (target projection of the other view), summed over both ways round. Gradient reaches the online network and
    the predictor; the target follows by θ' ← m·θ' + (1−m)·θ, m rising to 1 by half a cosine (section 3.3).

    encoder: maps a batch to features (N, D). head: maps them to (N, C). predictor: (N, C) → (N, C). momentum: m at the
    start (the paper's: 0.996 for 1,000 epochs, 0.99 for 300 and fewer). Each view is normalised by itself, in both
    networks with the statistics of the batch. Raises ValueError for a momentum outside [0, 1).
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module | None = None,
        *,
        predictor: nn.Module,
        momentum: float = 0.996,
        momentum_schedule: str = "cosine",
        seed: int = 0,
    ) -> None:
        super().__init__(encoder, head, seed=seed)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        if momentum_schedule not in ("constant", "cosine"):
            raise ValueError(f"momentum_schedule must be constant or cosine, not {momentum_schedule!r}")
        self.key_encoder = copy.deepcopy(self.query_encoder).requires_grad_(False)
        self.predictor = predictor
        self.momentum, self.momentum_schedule = momentum, momentum_schedule

    def begin_step(self, progress: float = 0.0) -> None:
        """Let the target network follow the online network: once per optimiser step, before its first `forward`."""
        super().begin_step(progress)
        rising = self.momentum_schedule == "cosine"
        follow(
            self.key_encoder, self.query_encoder, cosine_momentum(self.momentum, progress) if rising else self.momentum
        )

    def forward(self, view_a: Tensor, view_b: Tensor, ids: Tensor | None = None) -> StepOutput:
        """Loss of a batch of view pairs (N, …), between 0 and 8. ids: not needed."""
        projected = [self.query_encoder(view) for view in (view_a, view_b)]
        predicted = [_unit(self.predictor(projection)) for projection in projected]
        with torch.no_grad():
            targets = [_unit(self.key_encoder(view)) for view in (view_b, view_a)]
        likeness = [(guess * target).sum(1).mean() for guess, target in zip(predicted, targets, strict=True)]
        return StepOutput(
            (2 - 2 * likeness[0]) + (2 - 2 * likeness[1]),
            {
                "positive_similarity": (likeness[0] + likeness[1]).detach() / 2,
                "feature_spread": feature_spread(_unit(projected[0])),
            },
        )


def _unit(rows: Tensor) -> Tensor:
    return F.normalize(rows.float(), dim=1)
