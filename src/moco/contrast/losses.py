"""InfoNCE ([v1] equation 1) without its logits: streamed over the keys, value and gradient in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moco.contrast.hard import Hardest, Mixing

CHUNK = 4096
"""Keys at a time: few enough for the cache of a processor, enough to keep a GPU busy."""


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
    mixing: Mixing | None = None,
    sharpness: float = 0.0,
    chunk: int = CHUNK,
) -> Contrast:
    """InfoNCE of queries against their positives `k` and the negatives `keys`.

    q, k: (N, C), keys: (K, C), all of unit norm. `ids` (N,) and `key_ids` (K,), if both are given, name the samples
    that the vectors come from: a key of the query's own sample is left out of its negatives. Gradients flow to q, to
    k, and to `keys` where they ask for one (keys of the same batch; those of a queue do not). Equal to cross-entropy
    over [q·k, q·keys] / temperature, but memory does not grow with K beyond (N, chunk). Keys may be bfloat16, which
    makes the products faster; everything else is computed in float32 (float64 for float64 q).

    mixing: mixtures of the hardest keys that join the negatives; they are constants, no gradient flows into what they
    are made of. sharpness: β of `hard.HardNegatives`. Figures other than the loss are of the keys as they are.

    >>> info_nce(q, k, queue.keys, temperature=0.2).loss.backward()

    Raises ValueError for shapes that do not fit together, a temperature that is not positive, and hard negatives among
    keys that learn.
    """
    if q.ndim != 2 or q.shape != k.shape or keys.ndim != 2 or keys.shape[1] != q.shape[1]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, keys {tuple(keys.shape)}: must be N×C, N×C, K×C")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if len(keys) == 0:
        raise ValueError("keys must be at least one: there is nothing to compare with")
    if (ids is not None and len(ids) != len(q)) or (key_ids is not None and len(key_ids) != len(keys)):
        raise ValueError("ids and key_ids must be one for each query and one for each key")
    if (mixing is not None or sharpness) and keys.requires_grad:
        raise ValueError("hard negatives are for keys that do not learn, such as those of a queue")
    if ids is None or key_ids is None:
        ids = key_ids = None
    # The loss is computed in full precision whatever the encoders use.
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        own = _OwnKeys(ids, key_ids, chunk)
        values = _StreamingInfoNCE.apply(q.to(dtype), k.to(dtype), keys, temperature, own, mixing, sharpness)
    return Contrast(*values)


def own_pairs(ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where a key comes from the query's own sample: (P,) query rows and (P,) key columns, columns rising."""
    # Few keys belong to a sample of this batch: find those first, so that no N × K comparison is made.
    candidates = torch.isin(key_ids, ids).nonzero().squeeze(1)
    position, rows = (key_ids[candidates, None] == ids).nonzero(as_tuple=True)
    return rows, candidates[position]


class _OwnKeys:
    """Which keys are of a query's own sample, chunk by chunk, and how to take them out of the logits.

    A processor looks the few pairs up once; there, comparing K × N ids would cost a tenth of everything else.
    Elsewhere (and under torch.compile) reading the pairs back would stop the device, and comparing costs nothing.
    """

    def __init__(self, ids: Tensor | None, key_ids: Tensor | None, chunk: int) -> None:
        self.ids, self.key_ids, self.chunk = ids, key_ids, chunk
        self.pairs: tuple[Tensor, Tensor] | None = None
        if ids is not None and key_ids is not None and ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self.pairs = own_pairs(ids, key_ids)
            starts = torch.arange(0, len(key_ids) + chunk, chunk)
            self.bounds: list[int] = torch.searchsorted(self.pairs[1], starts).tolist()

    def take_out(self, logits: Tensor, start: int) -> tuple[Tensor | float, Tensor | int]:
        """Put −∞ in their places (c, N). Returns the sum and the number of what was there."""
        if self.pairs is not None:
            some = slice(*self.bounds[start // self.chunk : start // self.chunk + 2])
            if some.start == some.stop:
                return 0.0, 0
            places = self.pairs[1][some] - start, self.pairs[0][some]
            total = logits[places].sum()
            logits[places] = -torch.inf
            return total, some.stop - some.start
        if self.ids is None or self.key_ids is None:
            return 0.0, 0
        own = self.key_ids[start : start + self.chunk, None] == self.ids
        total = logits.masked_fill(~own, 0).sum()
        logits.masked_fill_(own, -torch.inf)
        return total, own.sum()


class _Products:
    """The products of the keys of a chunk with the queries and back, in the type of the keys.

    All chunks use the same memory: fresh pages for each would cost as much as the products.
    """

    def __init__(self, scaled: Tensor, keys: Tensor, chunk: int, dtype: torch.dtype) -> None:
        self.scaled, self.keys, self.chunk, self.dtype = scaled, keys, chunk, dtype
        size = (min(chunk, len(keys)), len(scaled))
        self.room = scaled.new_empty(size)
        self.precise = self.room if dtype == scaled.dtype else scaled.new_empty(size, dtype=dtype)

    def logits(self, start: int) -> Tensor:
        """(c, N) in the precise type, for the keys from `start` on. Overwrites those of the chunk before."""
        self.part = self.keys[start : start + self.chunk].to(self.scaled.dtype)
        if torch.compiler.is_compiling():  # a compiler plans the memory by itself
            return (self.part @ self.scaled.T).to(self.dtype)
        # Keys first: processors multiply that way around up to 1.5 times as fast.
        product = torch.mm(self.part, self.scaled.T, out=self.room[: len(self.part)])
        return product if self.precise is self.room else self.precise[: len(self.part)].copy_(product)

    def with_keys(self, weights: Tensor) -> Tensor:
        """Σ over the chunk of weight · key: (c, N) → (N, C), precise. Overwrites the room, not the weights."""
        if torch.compiler.is_compiling() or self.precise is self.room:
            weights = weights.to(self.scaled.dtype)
        else:
            weights = self.room[: len(weights)].copy_(weights)
        return (weights.T @ self.part).to(self.dtype)


class _Sum:
    """Σⱼ 2^logitⱼ and Σⱼ 2^logitⱼ · keyⱼ for each query, relative to a running maximum, as in an online softmax."""

    def __init__(self, q: Tensor) -> None:
        self.maximum = q.new_full((len(q),), -torch.inf)
        self.total = q.new_zeros(len(q))
        self.weighted = torch.zeros_like(q)

    def add(self, logits: Tensor, with_keys: Callable[[Tensor], Tensor]) -> None:
        """Add a chunk (c, N), which is overwritten. with_keys: weights (c, N) → Σ of weight · key (N, C)."""
        higher = torch.maximum(self.maximum, logits.amax(0))
        reference = higher.masked_fill(higher == -torch.inf, 0)  # all masked so far: 2^(−∞ − 0) = 0, not NaN
        shrink = (self.maximum - reference).exp2_()
        weights = logits.sub_(reference).exp2_()
        self.total = self.total * shrink + weights.sum(0)
        self.weighted = self.weighted.mul_(shrink[:, None]).add_(with_keys(weights))
        self.maximum = higher

    @property
    def level(self) -> Tensor:
        """log₂ of the sum, (N,): L."""
        return self.maximum + self.total.log2()

    @property
    def center(self) -> Tensor:
        """The mean of the keys under the weights, (N, C)."""
        return self.weighted / self.total.clamp_min(torch.finfo(self.total.dtype).tiny)[:, None]


class _SharpSum:
    """The same where negatives count by w = 2^(β · logit) over the mean of w: two sums, one over the other.

    L = log₂ Σ 2^((1+β) logit) − log₂ Σ 2^(β logit) + log₂ n, with the centre that its gradient has.
    """

    def __init__(self, q: Tensor, sharpness: float) -> None:
        self.sharpness = sharpness
        self.steep, self.flat = _Sum(q), _Sum(q)
        self.count = q.new_zeros(len(q))

    def add(self, logits: Tensor, with_keys: Callable[[Tensor], Tensor]) -> None:
        """Add a chunk (c, N), which is overwritten."""
        self.count = self.count + (logits > -torch.inf).sum(0)
        self.steep.add(logits * (1 + self.sharpness), with_keys)
        self.flat.add(logits.mul_(self.sharpness), with_keys)

    @property
    def maximum(self) -> Tensor:
        """The largest logit, (N,)."""
        return self.steep.maximum / (1 + self.sharpness)

    @property
    def level(self) -> Tensor:
        """L, (N,)."""
        level = self.steep.level - self.flat.level + self.count.log2()
        return level.masked_fill(self.count == 0, -torch.inf)

    @property
    def center(self) -> Tensor:
        """The gradient of L by the query, times τ, (N, C)."""
        return torch.lerp(self.flat.center, self.steep.center, 1 + self.sharpness)


class _StreamingInfoNCE(torch.autograd.Function):
    """Keys pass by in chunks, with a running maximum and sums relative to it, as in an online softmax.

    With L = log Σ exp(q·keyⱼ/τ) and the positive p = q·k/τ, the loss of a query is softplus(L − p) and its gradient
    sigmoid(L − p) · (Σ softmaxⱼ keyⱼ − k) / τ: both are exact at either end, where the positive wins or loses by far.
    That of a key is Σ over the queries of sigmoid(L − p) softmaxⱼ q / τ: it needs L, and so a second pass.

    Logits, L and p are logarithms to base 2 in here: exp2 is three times as fast as exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        keys: Tensor,
        temperature: float,
        own: _OwnKeys,
        mixing: Mixing | None,
        sharpness: float,
    ) -> tuple[Tensor, ...]:
        unit = temperature * math.log(2)  # a similarity of this is a logit of 1
        scaled = (q / unit).to(keys.dtype if keys.dtype in (torch.bfloat16, torch.float16) else q.dtype)
        products = _Products(scaled, keys, own.chunk, q.dtype)
        sums = _SharpSum(q, sharpness) if sharpness else _Sum(q)
        hardest = None if mixing is None else Hardest(mixing.hardest)
        seen = q.new_zeros(())
        count: Tensor | int = len(q) * len(keys)
        for start in range(0, len(keys), own.chunk):
            logits = products.logits(start)
            seen = seen + logits.sum()
            own_sum, own_count = own.take_out(logits, start)
            seen, count = seen - own_sum, count - own_count
            if hardest is not None:
                hardest.see(logits, start)
            sums.add(logits, products.with_keys)
        maximum = sums.maximum  # of the keys as they are
        if mixing is not None and hardest is not None:
            mixed, counts = mixing.mix(q, keys, hardest.places, hardest.logits > -torch.inf)
            logits = torch.einsum("nsc,nc->sn", mixed, q / unit).masked_fill_(~counts.T, -torch.inf)
            sums.add(logits, lambda weights: torch.einsum("sn,nsc->nc", weights, mixed))
        positive = (q * k).sum(1) / unit
        level = sums.level  # L
        margin = (level - positive) * math.log(2)
        wrong = (margin.sigmoid() / (temperature * len(q)))[:, None]
        ctx.own = own
        # A queue will have changed by the time of the backward pass; keys that learn are kept for it.
        again = (scaled, q, keys, level, wrong) if ctx.needs_input_grad[2] else ()
        ctx.save_for_backward(wrong * (sums.center - k), -wrong * q, *again)

        byproducts = (
            (positive > maximum).to(q.dtype).mean(),
            positive.mean() * unit,
            seen * unit / torch.as_tensor(count).clamp(min=1),
            maximum.mean() * unit,
        )
        ctx.mark_non_differentiable(*byproducts)
        return F.softplus(margin).mean(), *byproducts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_q, of_k, *again = ctx.saved_tensors
        of_keys = gradients[0] * _gradient_of_keys(ctx.own, *again) if again else None
        return gradients[0] * of_q, gradients[0] * of_k, of_keys, None, None, None, None


def _gradient_of_keys(own: _OwnKeys, scaled: Tensor, q: Tensor, keys: Tensor, level: Tensor, wrong: Tensor) -> Tensor:
    gradient = torch.empty_like(keys)
    level = level.masked_fill(level == -torch.inf, 0)  # every key of the query was its own
    products = _Products(scaled, keys, own.chunk, q.dtype)
    for start in range(0, len(keys), own.chunk):
        logits = products.logits(start)
        own.take_out(logits, start)
        shares = logits.sub_(level).exp2_().mul_(wrong.T)
        gradient[start : start + own.chunk] = shares @ q
    return gradient
