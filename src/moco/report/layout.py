"""Where features stand on a flat map, which of them belong together, and who is whose neighbour."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Array = np.ndarray[Any, Any]

COMPONENTS = 50
"""Principal components that t-SNE looks at: the rest is mostly noise (van der Maaten and Hinton 2008, section 4)."""
PERPLEXITY = 30.0
CHUNK = 2048


def principal(features: Tensor, components: int = 2) -> Array:
    """The first principal components of features (N, D) of unit length: (N, components) float32."""
    unit = F.normalize(features.float(), dim=1)
    centred = unit - unit.mean(0)
    found = min(components, *centred.shape)
    _, vectors = torch.linalg.eigh((centred.T @ centred).double())  # (D, D), the largest last
    places = centred @ vectors[:, -found:].flip(1).float()
    # Signs are free: the larger excursion of each axis is made positive, so that the same features give the same map.
    flip = torch.where(places.amax(0) >= -places.amin(0), 1.0, -1.0)
    return F.pad(places * flip, (0, components - found)).numpy()


def t_sne(features: Tensor, seed: int) -> Array:
    """A map (N, 2) that keeps neighbours together: t-SNE by cosine, begun at the principal components.

    N must be 5 or more. Source: van der Maaten and Hinton, JMLR 2008; initialised as in Kobak and Berens 2019.
    """
    from sklearn.manifold import TSNE

    places = principal(features, min(COMPONENTS, len(features)))
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    found: Array = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(places)
    return found


def clusters(features: Tensor, count: int, seed: int) -> Array:
    """The group of each row of features (N, D): (N,) from 0, the largest group first. K-means on unit vectors."""
    from sklearn.cluster import KMeans

    unit = F.normalize(features.float(), dim=1).numpy()
    found = KMeans(min(count, len(unit)), n_init=4, random_state=seed).fit_predict(unit)
    order = np.argsort(-np.bincount(found), kind="stable")
    places: Array = np.argsort(order)[found]
    return places


def neighbours(features: Tensor, count: int) -> Tensor:
    """The nearest others of each row by cosine, nearest first: (N, min(count, N − 1)) int64."""
    unit = F.normalize(features.float(), dim=1)
    most = min(count, len(unit) - 1)
    found = []
    for start in range(0, len(unit), CHUNK):
        similarity = unit[start : start + CHUNK] @ unit.T
        rows = torch.arange(len(similarity))
        similarity[rows, start + rows] = -torch.inf  # not itself
        found.append(similarity.topk(most, dim=1).indices)
    return torch.cat(found)


def on_grid(places: Array, size: int = 10_000) -> Array:
    """Places (N, 2) as whole numbers 0 … size, the shape of the map kept: (N, 2) int64."""
    low, high = places.min(0), places.max(0)
    span = float((high - low).max()) or 1.0
    margin = (span - (high - low)) / 2
    found: Array = np.rint((places - low + margin) / span * size).astype(np.int64)
    return found
