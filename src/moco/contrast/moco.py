"""Momentum Contrast ([v1] algorithm 1): encode queries, let the key encoder follow, encode keys, look up, enqueue."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.batchnorm import encode_in_groups, has_batchnorm, shuffle
from moco.contrast.collectives import gather_rows, world_size
from moco.contrast.dictionary import Queue


@dataclass(frozen=True)
class StepOutput:
    """The loss to differentiate, and figures to watch (0-dimensional tensors without gradient)."""

    loss: Tensor
    metrics: dict[str, Tensor]


class MomentumContrast(nn.Module):
    """A query encoder that learns, a key encoder that follows it slowly, and a dictionary of keys.

    encoder: any module that maps a batch to features (N, D). head: maps them to (N, C); none for the features
    themselves. dictionary: the queue, with the same C. momentum: m of θ_k ← m·θ_k + (1−m)·θ_q ([v1] equation 2).
    temperature: τ. symmetric: each view is query and key in turn, and the two losses are averaged. bn_groups: parts in
    which a batch is normalised; shuffle_bn: shuffle the keys across those parts and across processes (see
    moco.contrast.batchnorm). seed: of the shuffles.

    The parts have the same names in both encoders: `query_encoder.backbone`, `query_encoder.head`. Train with

    >>> model.begin_step()                            # once per optimiser step: the key encoder follows
    >>> output = model(view_a, view_b, ids)           # any number of times (gradient accumulation)
    >>> output.loss.backward()
    >>> optimizer.step(); optimizer.zero_grad()
    >>> model.end_step()                              # the new keys enter the queue

    and use `model.backbone` afterwards. Raises ValueError for a momentum outside [0, 1), a temperature
    that is not positive, and shuffling that could change nothing.
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module | None = None,
        *,
        dictionary: Queue,
        momentum: float = 0.999,
        temperature: float = 0.07,
        symmetric: bool = False,
        bn_groups: int = 1,
        shuffle_bn: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {temperature}")
        if bn_groups < 1:
            raise ValueError(f"bn_groups must be at least 1, not {bn_groups}")
        self.query_encoder = nn.Sequential()
        self.query_encoder.add_module("backbone", encoder)
        self.query_encoder.add_module("head", head if head is not None else nn.Identity())
        if shuffle_bn and not has_batchnorm(self.query_encoder):
            raise ValueError("shuffle_bn: this encoder has no batch norm, so there is nothing that could leak")
        if shuffle_bn and bn_groups == 1 and world_size() == 1:
            raise ValueError("shuffle_bn changes nothing where a batch is normalised as a whole: set bn_groups")
        self.key_encoder = copy.deepcopy(self.query_encoder).requires_grad_(False)
        self.dictionary = dictionary
        self.momentum = momentum
        self.temperature = temperature
        self.symmetric = symmetric
        self.bn_groups = bn_groups
        self.shuffle_bn = shuffle_bn
        self.seed = seed
        self.step = 0
        self._generator = torch.Generator()
        self._pending: list[tuple[Tensor, Tensor | None]] = []

    @torch.no_grad()
    def begin_step(self) -> None:
        """Let the key encoder follow the query encoder: once per optimiser step, before its first `forward`.

        Parameters only; the running statistics of batch norm are each encoder's own, as in the authors' code.
        """
        self.end_step()
        self._generator.manual_seed((self.seed * 1_000_003 + self.step) % 2**63)
        slow, fast = ([p.data for p in encoder.parameters()] for encoder in (self.key_encoder, self.query_encoder))
        torch._foreach_lerp_(slow, fast, 1 - self.momentum)

    def forward(self, view_a: Tensor, view_b: Tensor, ids: Tensor | None = None) -> StepOutput:
        """Loss of a batch of view pairs (N, …) against the dictionary as it was before the step.

        ids: (N,) sample ids, to keep a picture's older keys out of its negatives. In training mode the keys are
        kept aside for `end_step`; in evaluation mode nothing is changed.
        """
        query, key = self._queries(view_a), self._keys(view_b)
        contrast = self.dictionary.lookup(query, key, self.temperature, ids)
        loss, pairs = contrast.loss, [(key, ids)]
        if self.symmetric:
            query_b, key_a = self._queries(view_b), self._keys(view_a)
            loss = (loss + self.dictionary.lookup(query_b, key_a, self.temperature, ids).loss) / 2
            pairs.append((key_a, ids))
        if self.training:
            self._pending += pairs
        spread = query.detach().std(0, correction=0).mean() * query.shape[1] ** 0.5
        return StepOutput(
            loss,
            {
                "contrast_accuracy": contrast.accuracy,
                "positive_similarity": contrast.positive_similarity,
                "negative_similarity": contrast.negative_similarity,
                "hardest_similarity": contrast.hardest_similarity,
                "feature_spread": spread,
            },
        )

    def end_step(self) -> None:
        """Put the keys of this step's batches into the dictionary, those of all processes, and count the step.

        Call it after the optimiser; `begin_step` makes up for it where it was forgotten.
        """
        if not self._pending:
            return
        for key, ids in self._pending:
            self.dictionary.enqueue(gather_rows(key), None if ids is None else gather_rows(ids), self.step)
        self._pending.clear()
        self.step += 1

    def skip_step(self, step: int) -> None:
        """Forget the keys of a step that went wrong, and count it: the next one is `step` + 1."""
        self._pending.clear()
        self.step = step + 1

    def _queries(self, view: Tensor) -> Tensor:
        return self._encode(self.query_encoder, view)

    @torch.no_grad()
    def _keys(self, view: Tensor) -> Tensor:
        if not (self.shuffle_bn and self.training):
            return self._encode(self.key_encoder, view)
        shuffled, restore = shuffle(view, self._generator)
        return restore(self._encode(self.key_encoder, shuffled))

    def _encode(self, encoder: nn.Module, view: Tensor) -> Tensor:
        in_groups = self.training and self.bn_groups > 1
        features = encode_in_groups(encoder, view, self.bn_groups) if in_groups else encoder(view)
        return F.normalize(features.float(), dim=1)

    @property
    def backbone(self) -> nn.Module:
        """The query encoder without its head: what pre-training is for."""
        return self.query_encoder.get_submodule("backbone")

    @property
    def chance_loss(self) -> float:
        """The loss of features that know nothing: ln(K + 1)."""
        return math.log(len(self.dictionary) + 1)

    def get_extra_state(self) -> int:
        """The step count is part of the state."""
        return self.step

    def set_extra_state(self, state: int) -> None:
        """Restore the step count."""
        self.step = int(state)
