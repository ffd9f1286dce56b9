"""Momentum Contrast ([v1] algorithm 1): encode queries, let the key encoder follow, encode keys, look up, enqueue."""

from __future__ import annotations

import copy
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.batchnorm import encode_in_groups, has_batchnorm, shuffle
from moco.contrast.collectives import gather_rows, world_size
from moco.contrast.dictionary import Dictionary, InBatch, MemoryBank, Queue
from moco.contrast.method import Method, cosine_momentum, feature_spread, follow
from moco.contrast.method import StepOutput as StepOutput


class MomentumContrast(Method):
    """A query encoder that learns, keys to compare its queries with, and a dictionary that they come from.

    encoder: any module that maps a batch to features (N, D). head: maps them to (N, C); none for the features
    themselves. dictionary: where keys come from, with the same C.

    | | dictionary | key_encoder | |
    |---|---|---|---|
    | MoCo v1, v2 | `Queue` | "momentum": θ_k ← m·θ_k + (1−m)·θ_q ([v1] equation 2) | |
    | MoCo v3 | `InBatch` | "momentum", m rising to 1 (momentum_schedule "cosine") | predictor, symmetric, scaled |
    | end-to-end | `InBatch` | "learned": an encoder of its own, or "shared": the query encoder; both by gradient | |
    | memory bank | `MemoryBank` | none: keys are the bank's vectors, key_encoder does not matter | |

    key_encoder may also be a module of another kind, which maps the second view to (N, C) and learns by gradient:
    pictures as queries and captions as keys, say. Views need not be pictures: whatever the encoders take.

    predictor: a module behind the head, on the query's side only. temperature: τ. symmetric: each view is query and
    key in turn, and the two losses are averaged. scaled: each term times 2τ, and the two terms of the symmetric loss
    summed ([v3] section 3), so that the rate does not depend on τ. bn_groups: parts in which a batch is normalised;
    shuffle_bn: shuffle the keys across those parts and across processes (see moco.contrast.batchnorm). seed: of the
    shuffles.

    The parts have the same names in both encoders: `query_encoder.backbone`, `query_encoder.head`. Train with

    >>> model.begin_step()                            # once per optimiser step: the key encoder follows
    >>> output = model(view_a, view_b, ids)           # any number of times (gradient accumulation)
    >>> output.loss.backward()
    >>> optimizer.step(); optimizer.zero_grad()
    >>> model.end_step()                              # the new keys enter the queue

    and use `model.backbone` afterwards. Raises ValueError for a momentum outside [0, 1), a temperature that is not
    positive, parts that do not go together, and shuffling that could change nothing.
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module | None = None,
        *,
        dictionary: Dictionary,
        key_encoder: Literal["momentum", "learned", "shared"] | nn.Module = "momentum",
        predictor: nn.Module | None = None,
        momentum: float = 0.999,
        momentum_schedule: Literal["constant", "cosine"] = "constant",
        temperature: float = 0.07,
        symmetric: bool = False,
        scaled: bool = False,
        bn_groups: int = 1,
        shuffle_bn: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(encoder, head, seed=seed)
        _check(self.query_encoder, momentum, temperature, bn_groups, shuffle_bn)
        if momentum_schedule not in ("constant", "cosine"):
            raise ValueError(f"momentum_schedule must be constant or cosine, not {momentum_schedule!r}")
        self.two_kinds = isinstance(key_encoder, nn.Module)
        if isinstance(key_encoder, nn.Module):
            if not isinstance(dictionary, InBatch):
                raise ValueError("a key encoder of another kind learns by gradient, and so needs an InBatch dictionary")
            if symmetric and predictor is not None:
                raise ValueError("symmetric with two kinds of encoders: a predictor would be behind queries and keys")
            self.keys_from = "learned"
            self.key_encoder = key_encoder
        elif key_encoder in ("momentum", "learned", "shared"):
            if key_encoder != "momentum" and isinstance(dictionary, Queue):
                raise ValueError(f"key_encoder {key_encoder} needs an InBatch dictionary: no gradient reaches old keys")
            self.keys_from = "bank" if isinstance(dictionary, MemoryBank) else key_encoder
            if self.keys_from in ("momentum", "learned"):
                self.key_encoder = copy.deepcopy(self.query_encoder).requires_grad_(self.keys_from == "learned")
        else:
            raise ValueError(f"key_encoder must be momentum, learned, shared or a module, not {key_encoder!r}")
        self.predictor = predictor
        self.dictionary = dictionary
        self.momentum, self.momentum_schedule = momentum, momentum_schedule
        self.temperature = temperature
        self.symmetric = symmetric
        self.scale = 2 * temperature * (1 + symmetric) if scaled else 1.0
        self.bn_groups = bn_groups
        self.shuffle_bn = shuffle_bn
        self._pending: list[tuple[Tensor, Tensor | None]] = []

    def begin_step(self, progress: float = 0.0) -> None:
        """Let the key encoder follow the query encoder: once per optimiser step, before its first `forward`."""
        self.end_step()
        super().begin_step(progress)
        if self.keys_from == "momentum":
            rising = self.momentum_schedule == "cosine"
            momentum = cosine_momentum(self.momentum, progress) if rising else self.momentum
            follow(self.key_encoder, self.query_encoder, momentum)
        if isinstance(self.dictionary, MemoryBank):
            self.dictionary.draw(self.step)
        elif isinstance(self.dictionary, Queue):
            self.dictionary.draw(self.step, progress)

    def forward(self, view_a: Tensor, view_b: Tensor, ids: Tensor | None = None) -> StepOutput:
        """Loss of a batch of view pairs (N, …) against the dictionary as it was before the step.

        ids: (N,) sample ids, to keep a picture's older keys out of its negatives. In training mode the keys are
        kept aside for `end_step`; in evaluation mode nothing is changed.
        """
        query, key = self._queries(view_a), self._keys(view_b, ids)
        contrast = self.dictionary.lookup(query, key, self.temperature, ids)
        loss, kept = contrast.loss, [query if self.keys_from == "bank" else key]
        if self.symmetric:
            if self.two_kinds:  # each view has an encoder of its own: only the roles change
                query_b, key_a = key, query
            else:
                query_b, key_a = self._queries(view_b), self._keys(view_a, ids)
            loss = (loss + self.dictionary.lookup(query_b, key_a, self.temperature, ids).loss) / 2
            kept.append(query_b if self.keys_from == "bank" else key_a)
        if self.training:
            self._pending += [(rows.detach(), ids) for rows in kept]
        return StepOutput(
            self.scale * loss,
            {
                "contrast_accuracy": contrast.accuracy,
                "positive_similarity": contrast.positive_similarity,
                "negative_similarity": contrast.negative_similarity,
                "hardest_similarity": contrast.hardest_similarity,
                "feature_spread": feature_spread(query),
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
        super().end_step()

    def skip_step(self, step: int) -> None:
        """Forget the keys of a step that went wrong, and count it: the next one is `step` + 1."""
        self._pending.clear()
        super().skip_step(step)

    def remembered(self) -> list[Tensor]:
        """The dictionary."""
        return list(self.dictionary.buffers())

    def _queries(self, view: Tensor) -> Tensor:
        return self._encode(self.query_network, view)

    def _keys(self, view: Tensor, ids: Tensor | None) -> Tensor:
        if isinstance(self.dictionary, MemoryBank):
            if ids is None:
                raise ValueError("a memory bank needs the ids of the pictures")
            return self.dictionary.vectors(ids)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.keys_from != "momentum"):
            if not (self.shuffle_bn and self.training):
                return self._encode(self.key_network, view)
            shuffled, restore = shuffle(view, self._generator)
            return restore(self._encode(self.key_network, shuffled))

    def _encode(self, network: nn.Module, view: Tensor) -> Tensor:
        in_groups = self.training and self.bn_groups > 1
        features = encode_in_groups(network, view, self.bn_groups) if in_groups else network(view)
        return F.normalize(features.float(), dim=1)

    @property
    def query_network(self) -> nn.Module:
        """What makes queries, before they are normalised: (N, …) → (N, C)."""
        return self.query_encoder if self.predictor is None else nn.Sequential(self.query_encoder, self.predictor)

    @property
    def key_network(self) -> nn.Module:
        """What makes keys from pictures, before they are normalised (of a memory bank: what its vectors follow)."""
        return self.key_encoder if self.keys_from in ("momentum", "learned") else self.query_encoder

    @property
    def chance_loss(self) -> float:
        """The loss of features that know nothing: ln(K + 1), times the factor of a scaled loss."""
        return self.scale * math.log(len(self.dictionary) + 1)


def _check(encoder: nn.Module, momentum: float, temperature: float, bn_groups: int, shuffle_bn: bool) -> None:
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), not {momentum}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if bn_groups < 1:
        raise ValueError(f"bn_groups must be at least 1, not {bn_groups}")
    if shuffle_bn and not has_batchnorm(encoder):
        raise ValueError("shuffle_bn: this encoder has no batch norm, so there is nothing that could leak")
    if shuffle_bn and bn_groups == 1 and world_size() == 1:
        raise ValueError("shuffle_bn changes nothing where a batch is normalised as a whole: set bn_groups")
