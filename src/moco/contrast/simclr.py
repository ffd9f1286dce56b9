"""SimCLR (arXiv 2002.05709): each of the 2N views of a batch must find the other view of its picture among the rest."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.collectives import rank
from moco.contrast.dictionary import InBatch
from moco.contrast.method import Method, StepOutput, feature_spread


class SimCLR(Method):
    """One encoder for queries and keys, and NT-Xent ("normalised temperature-scaled cross-entropy", equation 1).

    The loss of view i with the other view j of its picture is −ln( exp(zᵢ·zⱼ/τ) / Σ_{k≠i} exp(zᵢ·z_k/τ) ): 2N − 2
    negatives, those of all processes, and gradient to queries and keys alike. It is the mean over all 2N views.

    encoder: maps a batch to features (N, D). head: maps them to (N, C); the paper's has 2 layers. batch_size: N, the
    pictures of a step over all processes (of a piece, where gradients are accumulated: a view meets those of its own
    piece). temperature: τ (the paper's: 0.1 on ImageNet, 0.5 on CIFAR-10). The two views are encoded as one batch, and
    so normalised together. Raises ValueError for a batch below 2 and a temperature that is not positive.
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module | None = None,
        *,
        batch_size: int,
        temperature: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(encoder, head, seed=seed)
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {temperature}")
        if batch_size < 2:
            raise ValueError(f"a view needs those of other pictures: a batch of 2 or more, not {batch_size}")
        self.temperature = temperature
        self.views = InBatch(2 * batch_size)

    def forward(self, view_a: Tensor, view_b: Tensor, ids: Tensor | None = None) -> StepOutput:
        """NT-Xent of a batch of view pairs (N, …). ids: (N,), different for different pictures, over all processes."""
        count = len(view_a)
        if ids is None:
            ids = torch.arange(count, device=view_a.device) + rank() * count
        views = F.normalize(self.query_encoder(torch.cat([view_a, view_b])).float(), dim=1)
        # Both views of a picture have its id: a view meets neither itself nor its positive among the negatives.
        contrast = self.views.lookup(views, views.roll(count, 0), self.temperature, ids.repeat(2))
        return StepOutput(
            contrast.loss,
            {
                "contrast_accuracy": contrast.accuracy,
                "positive_similarity": contrast.positive_similarity,
                "negative_similarity": contrast.negative_similarity,
                "hardest_similarity": contrast.hardest_similarity,
                "feature_spread": feature_spread(views),
            },
        )

    @property
    def chance_loss(self) -> float:
        """The loss of features that know nothing: ln(2N − 1), a positive and 2N − 2 negatives."""
        return math.log(len(self.views))
