"""CPC v2 (arXiv 1905.09272): predict patches further down in a picture from those above them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.collectives import gather_learning_rows, rank
from moco.contrast.losses import Contrast, info_nce
from moco.contrast.method import Method, StepOutput, feature_spread

OFFSETS = (2, 3)
"""Rows ahead that are predicted. The next row overlaps the last one that was seen: it would be too easy."""
BLOCKS = 5


def patches(pictures: Tensor, size: int) -> Tensor:
    """The patches of pictures on a grid, each overlapping its neighbours by half: (N, C, S, S) → (N, R, R, C, P, P)."""
    stride = max(size // 2, 1)
    return pictures.unfold(2, size, stride).unfold(3, size, stride).permute(0, 2, 3, 1, 4, 5)


class CPC(Method):
    """Each patch encoded by itself, a context network that sees rows from above only, and InfoNCE.

    From the context of row i, a linear map for each offset o predicts the projections of the patches in row i + o; the
    positive is the one in the same column, negatives are all other patches of all pictures of the batch and of all
    processes. The loss is the mean over the offsets. Gradient reaches guesses and targets.

    encoder: maps patches to features (N, width). head: maps them to targets (N, C). width, dim: D and C. patch_size: P
    in pixels; patches lie half of it apart. image_size: S. batch_size: pictures N of a step (of a piece) over all
    processes. temperature: τ. Of each pair of views it needs the first only. Smaller than the paper and different from
    it: one direction instead of four; the encoder's own norm layers instead of layer norm (batch norm can leak from
    patch to patch, the paper warns); one augmentation of the picture instead of one for each patch; cosines with a
    temperature instead of plain products. Raises ValueError for a grid of fewer than 3 rows.
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module,
        *,
        width: int,
        dim: int,
        patch_size: int,
        image_size: int,
        batch_size: int,
        temperature: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(encoder, head, seed=seed)
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {temperature}")
        self.rows = (image_size - patch_size) // max(patch_size // 2, 1) + 1 if patch_size <= image_size else 0
        if self.rows <= OFFSETS[0]:
            raise ValueError(f"patches of {patch_size} pixels make {self.rows} rows of {image_size}: 3 are needed")
        self.offsets = [offset for offset in OFFSETS if offset < self.rows]
        self.context = nn.Sequential(*[RowsAbove(width) for _ in range(BLOCKS)], nn.ReLU())
        self.predictors = nn.ModuleList(nn.Conv2d(width, dim, 1) for _ in self.offsets)
        self.patch_size, self.batch_size, self.temperature = patch_size, batch_size, temperature

    def forward(self, view_a: Tensor, view_b: Tensor, ids: Tensor | None = None) -> StepOutput:
        """Loss of the first views of a batch, (N, …). view_b, ids: not needed."""
        grid = patches(view_a, self.patch_size)
        count, rows, columns = grid.shape[:3]
        parts = grid.flatten(0, 2).contiguous(memory_format=torch.channels_last)
        features = self.backbone(parts)
        targets = F.normalize(self.query_encoder.get_submodule("head")(features).float(), dim=1)
        context = self.context(features.view(count, rows, columns, -1).permute(0, 3, 1, 2))
        numbers = torch.arange(len(targets), device=targets.device)
        found = []
        everybody = gather_learning_rows(targets)
        for offset, predictor in zip(self.offsets, self.predictors, strict=True):
            guesses = predictor(context[:, :, :-offset]).permute(0, 2, 3, 1).flatten(0, 2)
            places = numbers.view(count, rows, columns)[:, offset:].flatten()
            found.append(self._contrast(guesses, targets, places, everybody))
        return StepOutput(
            torch.stack([contrast.loss for contrast in found]).mean(),
            {
                "contrast_accuracy": torch.stack([contrast.accuracy for contrast in found]).mean(),
                "positive_similarity": torch.stack([contrast.positive_similarity for contrast in found]).mean(),
                "negative_similarity": torch.stack([contrast.negative_similarity for contrast in found]).mean(),
                "hardest_similarity": torch.stack([contrast.hardest_similarity for contrast in found]).mean(),
                "feature_spread": feature_spread(targets),
            },
        )

    def _contrast(self, guesses: Tensor, targets: Tensor, places: Tensor, everybody: Tensor) -> Contrast:
        """InfoNCE of guesses (M, C) about targets (P, C) at `places` (M,), with the targets of all processes."""
        guesses = F.normalize(guesses.float(), dim=1)
        own = places + rank() * len(targets)  # so that a guess does not meet its positive among the negatives
        numbers = torch.arange(len(everybody), device=targets.device)
        return info_nce(guesses, targets[places], everybody, self.temperature, ids=own, key_ids=numbers)

    @property
    def chance_loss(self) -> float:
        """The loss of features that know nothing: ln of the number of patches, a positive and the negatives."""
        return math.log(self.batch_size * self.rows**2)


class RowsAbove(nn.Module):
    """A residual block that sees its own row and the one above: (N, C, R, R) → the same (as in the appendix)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = min(width, 256)
        self.layers = nn.Sequential(
            nn.Conv2d(width, inner, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, (1, 3), padding=(0, 1)),
            nn.ZeroPad2d((0, 0, 1, 0)),  # a row of zeros on top, so that the next layer sees nothing below
            nn.Conv2d(inner, inner, (2, 1)),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """What was known, and what the row above adds."""
        seen: Tensor = x + self.layers(x)
        return seen
