"""Harder negatives out of those there are: mixed from the hardest keys of a query (MoCHi), or given more weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class HardNegatives:
    """What is made of the negatives of a query; off as it stands.

    hardest: N, the keys closest to a query, to mix from. pairs: s, mixtures of two of them. with_query: s', mixtures
    of one of them with the query itself (MoCHi, arXiv 2010.01028, sections 4.1 and 4.2; for instance 1,024, 1,024 and
    128 for a queue of 16,384). sharpness: β, negatives count by exp(β · logit), scaled to a mean of 1 (arXiv
    2010.04592, section 3, without its correction for false negatives). start: part of the training, 0 to 1, before
    which negatives are left as they are (MoCHi waits 10 to 15 epochs).

    Raises ValueError for numbers below 0, and for mixtures without keys to mix.
    """

    hardest: int = 0
    pairs: int = 0
    with_query: int = 0
    sharpness: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        if min(self.hardest, self.pairs, self.with_query, self.sharpness, self.start) < 0:
            raise ValueError(f"hard negatives: nothing may be below 0, not {self}")
        if (self.hardest > 0) != (self.pairs + self.with_query > 0):
            raise ValueError(f"hard negatives: mixtures need keys to mix, and keys to mix are for mixtures, not {self}")


@dataclass(frozen=True)
class Mixing:
    """Which of the N hardest keys of each query are mixed, and how: random choices, made before they are needed.

    first: (Q, s + s') places among the hardest. second: (Q, s) places of their partners. share: (Q, s + s') what
    part the partner has, the query itself for the last s'.
    """

    hardest: int
    first: Tensor
    second: Tensor
    share: Tensor

    @classmethod
    def draw(cls, queries: int, hard: HardNegatives, keys: int, generator: torch.Generator) -> Mixing:
        """Choices for `queries` queries that have `keys` keys. generator: on the CPU, so that all devices choose alike.

        The partner's part is uniform in 0 to 1, that of the query in 0 to ½: it may not become its own negative.
        """
        hardest = min(hard.hardest, keys)
        made = hard.pairs + hard.with_query
        first = torch.randint(hardest, (queries, made), generator=generator)
        second = torch.randint(hardest, (queries, hard.pairs), generator=generator)
        share = torch.rand(queries, made, generator=generator)
        share[:, hard.pairs :] /= 2
        return cls(hardest, first, second, share)

    def to(self, device: torch.device) -> Mixing:
        """The same choices on another device."""
        moved = (each.to(device, non_blocking=True) for each in (self.first, self.second, self.share))
        return Mixing(self.hardest, *moved)

    def mix(self, q: Tensor, keys: Tensor, places: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
        """The mixtures of each query, (Q, s + s', C) of unit norm, and whether they count, (Q, s + s').

        q: (Q, C), keys: (K, C), places: (Q, N) numbers of the hardest keys, usable: (Q, N) whether they are negatives
        at all. Those made of the query's own keys do not count.
        """
        pairs = self.second.shape[1]
        one = keys[places.gather(1, self.first)].to(q.dtype)
        other = torch.cat(
            [
                keys[places.gather(1, self.second)].to(q.dtype),
                q[:, None].expand(-1, self.first.shape[1] - pairs, -1),
            ],
            dim=1,
        )
        mixed = F.normalize(torch.lerp(one, other, self.share.to(q.dtype)[..., None]), dim=2)
        counts = usable.gather(1, self.first)
        counts[:, :pairs] &= usable.gather(1, self.second)
        return mixed, counts


class Hardest:
    """The N closest keys of each query, the closest first, found while the keys pass by in chunks."""

    def __init__(self, hardest: int) -> None:
        self._hardest = hardest
        self._seen: list[Tensor] = []

    def see(self, logits: Tensor, start: int) -> None:
        """Take note of a chunk (c, Q) of logits, of the keys from `start` on; −∞ for a query's own. Changes nothing."""
        found, places = logits.topk(min(self._hardest, len(logits)), dim=0)
        places += start
        if self._seen:
            found, places = torch.cat([self._seen[0], found]), torch.cat([self._seen[1], places])
            found, order = found.topk(min(self._hardest, len(found)), dim=0)
            places = places.gather(0, order)
        self._seen = [found, places]

    @property
    def logits(self) -> Tensor:
        """Those of the keys found, (Q, N)."""
        return self._seen[0].T

    @property
    def places(self) -> Tensor:
        """The numbers of the keys found, (Q, N)."""
        return self._seen[1].T
