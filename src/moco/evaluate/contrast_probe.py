"""Queries and keys of a trained model on fresh batches, encoded as in training or otherwise; the model stays as it is.

Everything works on a copy of the encoders: running statistics, queue and step of the model never move.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.batchnorm import encode_in_groups, has_batchnorm
from moco.contrast.dictionary import InBatch, MemoryBank, Queue
from moco.contrast.losses import own_pairs
from moco.contrast.moco import MomentumContrast
from moco.data.views import normalize
from moco.errors import UserError

FRESH_DRAWS = 3
"""How often strangers are drawn as batch mates: each draw is noisy, their mean less so."""


@dataclass(frozen=True)
class ViewPairs:
    """Two views of the pictures of some batches, batch by batch.

    query, key: (n, C, S, S) each, uint8 or floats 0 to 1. ids: (n,) each, numbers of the pictures. mean, std: how the
    encoders want them.
    """

    query: Sequence[Tensor]
    key: Sequence[Tensor]
    ids: Sequence[Tensor]
    mean: Sequence[float]
    std: Sequence[float]


@dataclass(frozen=True)
class Encoded:
    """Unit vectors (N, C) of all batches: queries as in training; keys in four ways; ids (N,).

    fresh is (draws, N, C). running: None where it was not asked for. sizes: pictures of each batch.
    """

    query: Tensor
    as_trained: Tensor
    shared: Tensor
    fresh: Tensor
    running: Tensor | None
    ids: Tensor
    sizes: tuple[int, ...]


def encode_pairs(
    model: MomentumContrast,
    pairs: ViewPairs,
    *,
    groups: int,
    shuffled: bool,
    seed: int = 0,
    draws: int = FRESH_DRAWS,
    running: bool = True,
) -> Encoded:
    """Encode view pairs with batch statistics as in training, and the keys in three more ways.

    groups: parts in which a batch is normalised; shuffled: whether keys are shuffled between them. `shared` keys have
    the same mates in their group as their query; `fresh` ones get mates from all other batches, `draws` times;
    `running` ones are normalised with the running statistics. Raises UserError for fewer than two batches: no mates to
    exchange.
    """
    if len(pairs.key) < 2:
        raise UserError("two batches or more are needed to tell what keys know of their batch")
    query_encoder, key_encoder = (copy.deepcopy(net).train() for net in (model.query_network, model.key_network))
    generator = torch.Generator().manual_seed(seed)

    def encode(encoder: nn.Module, view: Tensor, groups: int = groups) -> Tensor:
        device = next(encoder.parameters()).device
        pictures = normalize(view.to(device), pairs.mean, pairs.std).contiguous(memory_format=torch.channels_last)
        made = encode_in_groups(encoder, pictures, groups) if groups > 1 else encoder(pictures)
        return F.normalize(made.float(), dim=1).cpu()

    with torch.no_grad():
        query = torch.cat([encode(query_encoder, view) for view in pairs.query])
        shared = torch.cat([encode(key_encoder, view) for view in pairs.key])
        trained = shared
        if shuffled:
            orders = [torch.randperm(len(view), generator=generator) for view in pairs.key]
            trained = torch.cat(
                [
                    encode(key_encoder, view[order.to(view.device)])[order.argsort()]
                    for view, order in zip(pairs.key, orders, strict=True)
                ]
            )
        views, sizes = torch.cat(list(pairs.key)), tuple(len(view) for view in pairs.key)
        fresh = []
        for _ in range(draws):
            mixed = _dealt_out(sizes, generator)
            made = [encode(key_encoder, views[rows.to(views.device)]) for rows in mixed.split(sizes)]
            fresh.append(torch.cat(made)[mixed.argsort()])
        still = None
        if running:
            evaluated = copy.deepcopy(model.key_network).eval()
            still = torch.cat([encode(evaluated, view, 1) for view in pairs.key])
    return Encoded(query, trained, shared, torch.stack(fresh), still, torch.cat(list(pairs.ids)).cpu(), sizes)


def _dealt_out(sizes: Sequence[int], generator: torch.Generator) -> Tensor:
    """The rows of all batches in an order in which neighbours come from different batches: (Σ sizes,)."""
    starts = torch.tensor([0, *sizes]).cumsum(0)
    inside = [torch.randperm(size, generator=generator) for size in sizes]
    batch = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    place = torch.cat([torch.arange(size) for size in sizes])
    rows = torch.cat([order + starts[number] for number, order in enumerate(inside)])
    return rows[(place * len(sizes) + batch).argsort()]


@dataclass(frozen=True)
class Negatives:
    """Keys that queries are compared with, (K, C) on the CPU, and the numbers of their pictures, (K,)."""

    keys: Tensor
    ids: Tensor


def negatives(model: MomentumContrast, encoded: Encoded) -> Negatives:
    """What queries of a run meet: its queue, the vectors its memory bank draws, or the keys of the same pictures."""
    dictionary = model.dictionary
    if isinstance(dictionary, Queue):
        return Negatives(dictionary.keys.cpu(), dictionary.ids.cpu())
    if isinstance(dictionary, MemoryBank):
        return Negatives(dictionary.keys[dictionary.drawn].cpu(), dictionary.drawn.cpu())
    return Negatives(encoded.as_trained, encoded.ids)


@dataclass(frozen=True)
class Leak:
    """What keys know of their batch. Accuracies are contrast accuracies, 0 to 1, against what queries meet.

    gap: mean over the queries of loss(fresh) − loss(as trained): what a key's batch mates give away, in nats.
    error: standard error of the gap. most: the same gap, where a key has all its mates in common with its query.
    loss: as trained, in nats. running: None where keys were not made with running statistics.
    """

    as_trained: float
    fresh: float
    running: float | None
    gap: float
    error: float
    most: float
    loss: float


def batch_leak(model: MomentumContrast, encoded: Encoded) -> Leak:
    """Contrast accuracy with keys as in training, with fresh batch mates, and with running statistics."""

    def loss_and_found(keys: Tensor) -> Tensor:
        figures = compare(model, encoded, keys)
        return torch.stack([figures.loss, (figures.above == 0).double()])

    trained = loss_and_found(encoded.as_trained)
    shared = trained if encoded.shared is encoded.as_trained else loss_and_found(encoded.shared)
    fresh = torch.stack([loss_and_found(keys) for keys in encoded.fresh]).mean(0)
    gap = fresh[0] - trained[0]
    return Leak(
        as_trained=float(trained[1].mean()),
        fresh=float(fresh[1].mean()),
        running=None if encoded.running is None else float(loss_and_found(encoded.running)[1].mean()),
        gap=float(gap.mean()),
        error=float(gap.std() / len(gap) ** 0.5),
        most=float((fresh[0] - shared[0]).mean()),
        loss=float(trained[0].mean()),
    )


@dataclass(frozen=True)
class QueryFigures:
    """For each query (N,): loss; share of negatives above the positive; share of the gradient on its hardest 1 %."""

    loss: Tensor
    above: Tensor
    hardest: Tensor
    own: Tensor
    """How many keys of its own picture were left out."""


def query_figures(
    query: Tensor,
    key: Tensor,
    keys: Tensor,
    temperature: float,
    ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    chunk: int = 256,
) -> QueryFigures:
    """InfoNCE query by query ([v1] equation 1), in float64, with what the mean hides.

    query, key: (N, C) and keys: (K, C), of unit norm. ids (N,), key_ids (K,): a query never meets a key of its own
    picture (ids of −1 in the queue belong to none).
    """
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    hardest = max(1, round(0.01 * len(keys)))
    for start in range(0, len(query), chunk):
        q = query[start : start + chunk].double()
        positive = (q * key[start : start + chunk].double()).sum(1) / temperature
        logits = q @ keys.double().T / temperature
        own = torch.zeros(len(q))
        if ids is not None and key_ids is not None:
            rows, columns = own_pairs(ids[start : start + chunk], key_ids)
            logits[rows, columns] = -torch.inf
            own = torch.bincount(rows, minlength=len(q)).float()
        there = (len(keys) - own).clamp(min=1)
        weights = logits.softmax(1)
        parts.append(
            (
                torch.logaddexp(logits.logsumexp(1), positive) - positive,
                (logits > positive[:, None]).sum(1) / there,
                weights.topk(hardest, dim=1).values.sum(1),
                own,
            )
        )
    return QueryFigures(*(torch.cat(column) for column in zip(*parts, strict=True)))


def compare(model: MomentumContrast, encoded: Encoded, keys: Tensor) -> QueryFigures:
    """Queries with `keys` (N, C) as their positives, against what they meet in training.

    That is the queue as it is, the vectors that a memory bank draws, or the other keys of their own batch.
    """
    if not isinstance(model.dictionary, InBatch):
        others = negatives(model, encoded)
        return query_figures(encoded.query, keys, others.keys, model.temperature, encoded.ids, others.ids)
    batches = zip(*(rows.split(encoded.sizes) for rows in (encoded.query, keys, encoded.ids)), strict=True)
    parts = [query_figures(q, k, k, model.temperature, ids, ids) for q, k, ids in batches]
    return QueryFigures(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(QueryFigures)))


def negative_count(model: MomentumContrast, encoded: Encoded) -> int:
    """How many negatives a query meets in `compare`."""
    return encoded.sizes[0] - 1 if isinstance(model.dictionary, InBatch) else len(model.dictionary)


def normalises_batches(model: MomentumContrast) -> bool:
    """Whether anything in the encoders looks at the whole batch."""
    return has_batchnorm(model.query_encoder)
