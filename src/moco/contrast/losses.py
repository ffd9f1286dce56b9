"""InfoNCE ([v1] equation 1) without its logits: streamed over the keys, value and gradient in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096


@dataclass(frozen=True)
class Contrast:
    """What a look-up gives. All are scalars (0-dimensional tensors); only `loss` carries a gradient."""

    loss: Tensor
    accuracy: Tensor
    """Share of queries that are closer to their positive than to every other key."""
    positive_similarity: Tensor
    """Mean cosine of query and positive."""
    negative_similarity: Tensor
    """Mean cosine of query and negatives."""
    hardest_similarity: Tensor
    """Mean over the queries of the cosine with the closest negative."""


def info_nce(
    q: Tensor,
    k: Tensor,
    keys: Tensor,
    temperature: float = 0.07,
    *,
    ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    chunk: int = CHUNK,
) -> Contrast:
    """InfoNCE of queries against their positives `k` and the negatives `keys`.

    q, k: (N, C), keys: (K, C), all of unit norm. `ids` (N,) and `key_ids` (K,), if both are given, name the samples
    that the vectors come from: a key of the query's own sample is left out of its negatives. Gradients flow to q
    and k; `keys` are constants. Equal to cross-entropy over [q·k, q·keys] / temperature, but memory does not grow
    with K beyond (N, chunk). Keys may be bfloat16; everything else is computed in float32 (float64 for float64 q).

    >>> info_nce(q, k, queue.keys, temperature=0.2).loss.backward()

    Raises ValueError for shapes that do not fit together or a temperature that is not positive.
    """
    if q.ndim != 2 or q.shape != k.shape or keys.ndim != 2 or keys.shape[1] != q.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, keys {tuple(keys.shape)}: must be N×C, N×C, K×C")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if len(keys) == 0:
        raise ValueError("keys must be at least one: there is nothing to compare with")
    if (ids is not None and len(ids) != len(q)) or (key_ids is not None and len(key_ids) != len(keys)):
        raise ValueError("ids and key_ids must be one for each query and one for each key")
    # The loss is computed in full precision whatever the encoders use.
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows, columns = own_pairs(ids, key_ids)
        values = _StreamingInfoNCE.apply(q.to(dtype), k.to(dtype), keys.detach(), temperature, rows, columns, chunk)
    return Contrast(*values)


def own_pairs(ids: Tensor | None, key_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where a key comes from the query's own sample: (P,) query rows and (P,) key columns, columns rising."""
    if ids is None or key_ids is None:
        empty = torch.empty(0, dtype=torch.int64, device=None if ids is None else ids.device)
        return empty, empty
    # Few keys belong to a sample of this batch: find those first, so that no N × K comparison is made.
    candidates = torch.isin(key_ids, ids).nonzero().squeeze(1)
    position, rows = (key_ids[candidates, None] == ids).nonzero(as_tuple=True)
    return rows, candidates[position]


class _StreamingInfoNCE(torch.autograd.Function):
    """Keys pass by in chunks, with a running maximum and sums relative to it, as in an online softmax.

    With L = log Σ exp(q·keyⱼ/τ) and the positive p = q·k/τ, the loss of a query is softplus(L − p) and its gradient
    sigmoid(L − p) · (Σ softmaxⱼ keyⱼ − k) / τ: both are exact at either end, where the positive wins or loses by far.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, keys: Tensor, temperature: float, rows: Tensor, columns: Tensor, chunk: int
    ) -> tuple[Tensor, ...]:
        scaled = (q / temperature).to(keys.dtype if keys.dtype in (torch.bfloat16, torch.float16) else q.dtype)
        maximum = q.new_full((len(q), 1), -torch.inf)
        total = q.new_zeros(len(q), 1)
        weighted = torch.zeros_like(q)  # Σ exp(logit − maximum) · key
        masked_sum = q.new_zeros(())
        starts = list(range(0, len(keys), chunk))
        bounds = torch.searchsorted(columns, torch.tensor([*starts, len(keys)], device=columns.device)).tolist()
        for start, first, last in zip(starts, bounds[:-1], bounds[1:], strict=True):
            part = keys[start : start + chunk].to(scaled.dtype)
            logits = (scaled @ part.T).to(q.dtype)
            if last > first:
                where = (rows[first:last], columns[first:last] - start)
                masked_sum += logits[where].sum()
                logits[where] = -torch.inf
            higher = torch.maximum(maximum, logits.amax(1, keepdim=True))
            reference = higher.masked_fill(higher == -torch.inf, 0)  # all masked so far: exp(−∞ − 0) = 0, not NaN
            shrink = (maximum - reference).exp_()
            weights = logits.sub_(reference).exp_()
            total = total * shrink + weights.sum(1, keepdim=True)
            weighted = weighted.mul_(shrink).add_((weights.to(part.dtype) @ part).to(q.dtype))
            maximum = higher
        positive = (q * k).sum(1, keepdim=True) / temperature
        margin = maximum + total.log() - positive
        loss = F.softplus(margin).mean()
        center = weighted / total.clamp_min(torch.finfo(q.dtype).tiny)
        wrong = margin.sigmoid() / (temperature * len(q))
        ctx.save_for_backward(wrong * (center - k), -wrong * q)

        count = max(len(q) * len(keys) - len(rows), 1)
        negatives = (scaled @ keys.sum(0, dtype=torch.float32).to(scaled.dtype)).sum().to(q.dtype) - masked_sum
        byproducts = (
            (positive > maximum).to(q.dtype).mean(),
            positive.mean() * temperature,
            negatives * temperature / count,
            maximum.mean() * temperature,
        )
        ctx.mark_non_differentiable(*byproducts)
        return loss, *byproducts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_q, of_k = ctx.saved_tensors
        return gradients[0] * of_q, gradients[0] * of_k, None, None, None, None, None
