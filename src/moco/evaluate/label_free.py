"""Figures of a representation that need no labels: do the views of a picture agree, and are the features spread?

All take raw features (N, D) and work in float32 unless they say otherwise. A pair a, b holds two views of the same
N pictures, row by row. They raise UserError for shapes that do not fit and for values that are not finite.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moco.errors import UserError
from moco.evaluate.features import checked_features

# Similarities that are held at once: 128 MiB of float32.
HELD_AT_ONCE = 2**25


def retrieval(features_a: Tensor, features_b: Tensor) -> float:
    """The share (0 to 1) of pictures whose nearest neighbour among the other views is their own other view.

    Cosine similarity, averaged over both directions, a among b and b among a. Chance is 1 / N.
    """
    a, b = _unit_pair(features_a, features_b)
    return (_found(a, b) + _found(b, a)) / 2


def _found(queries: Tensor, bank: Tensor) -> float:
    chunk = max(1, HELD_AT_ONCE // len(bank))
    hits = 0
    for start in range(0, len(queries), chunk):
        nearest = (queries[start : start + chunk] @ bank.T).argmax(dim=1)
        own = torch.arange(start, start + len(nearest), device=nearest.device)
        hits += int((nearest == own).sum())
    return hits / len(queries)


def alignment(features_a: Tensor, features_b: Tensor) -> float:
    """Mean squared distance of the two normalised views of a picture (Wang & Isola, arXiv 2005.10242, α = 2).

    0: the views fall on the same point. 2: they have nothing in common. 4: they are opposite.
    """
    a, b = _unit_pair(features_a, features_b)
    return float((a - b).square().sum(dim=1).double().mean())


def uniformity(features: Tensor, t: float = 2) -> float:
    """log of the mean of exp(−t d²) over all pairs of different rows, d their distance after normalising.

    Wang & Isola, arXiv 2005.10242. 0: all features are one point. About −2 t: spread over the whole sphere (lower is
    more uniform). Needs two rows or more, and t > 0.
    """
    if not t > 0:
        raise UserError(f"t must be above 0, not {t:g}")
    unit = F.normalize(checked_features(features), dim=1)
    rows = len(unit)
    if rows < 2:
        raise UserError("uniformity compares pairs: it needs at least two rows of features")
    chunk = max(1, HELD_AT_ONCE // rows)
    parts = []
    for start in range(0, rows, chunk):
        exponent = (2 * t) * (unit[start : start + chunk] @ unit.T - 1)  # d² = 2 − 2 s
        own = torch.arange(len(exponent), device=unit.device)
        exponent[own, start + own] = -torch.inf  # a row is no pair with itself
        parts.append(exponent.logsumexp(dim=1).double().logsumexp(dim=0))
    return float(torch.stack(parts).logsumexp(dim=0)) - math.log(rows * (rows - 1))


def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the singular values, taken as shares of their sum (Roy & Vetterli, EUSIPCO 2007).

    Between 1 (all rows on one line through the origin) and min(N, D) (all directions equally strong); 0 where every
    feature is zero. The features are neither centred nor normalised. Computed in float64.
    """
    singular = torch.linalg.svdvals(checked_features(features).double())
    total = singular.sum()
    if total == 0:
        return 0.0
    share = singular / total
    return float(torch.special.entr(share).sum().exp())


def feature_spread(features: Tensor) -> float:
    """Mean standard deviation per dimension of the normalised features, times √D.

    About 1 for features spread over the sphere, 0 for features that have collapsed to one point (SimSiam,
    arXiv 2011.10566, section 4.1).
    """
    unit = F.normalize(checked_features(features), dim=1)
    return float(unit.std(dim=0, correction=0).mean()) * math.sqrt(unit.shape[1])


def random_cosine(features: Tensor) -> float:
    """Mean cosine over all pairs of different rows: 0 for features all over the sphere, 1 for those of one point.

    Raises UserError for fewer than two rows.
    """
    unit = F.normalize(checked_features(features), dim=1).double()
    count = len(unit)
    if count < 2:
        raise UserError("the cosine of random pairs needs at least two rows of features")
    # ‖Σ u‖² is the sum over all pairs, each row with itself included.
    return float((unit.sum(dim=0).square().sum() - unit.square().sum()) / (count * (count - 1)))


def dead_dimensions(features: Tensor) -> float:
    """Share (0 to 1) of the dimensions that hardly differ from row to row.

    That is, whose standard deviation is below a hundredth of the mean one; all of them where no dimension varies.
    """
    deviation = checked_features(features).std(dim=0, correction=0)
    return float((deviation <= 0.01 * deviation.mean()).double().mean())


def _unit_pair(features_a: Tensor, features_b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = checked_features(features_a, "features of view a"), checked_features(features_b, "features of view b")
    if a.shape != b.shape:
        raise UserError(f"the two views must be of the same pictures: {tuple(a.shape)} is not {tuple(b.shape)}")
    return F.normalize(a, dim=1), F.normalize(b, dim=1)
