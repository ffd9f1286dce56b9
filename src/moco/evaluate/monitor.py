"""The check after an epoch: kNN where there are labels, label-free figures where there are none.

Several processes share the encoding, in the same chunks as one would: the features, and so the figures, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from moco.contrast.collectives import buffers_of_the_first, gather_shares, own_share, rank
from moco.data.device import place
from moco.data.loader import ViewStream, evaluation_batches
from moco.data.sources import Source
from moco.evaluate.features import encode
from moco.evaluate.knn import knn_accuracy
from moco.evaluate.label_free import alignment, effective_rank, retrieval, uniformity
from moco.settings import RunSettings

BATCH = 256
RETRIEVAL_IMAGES = 2_000


def make_monitor(
    source: Source, settings: RunSettings, device: torch.device
) -> Callable[[nn.Module], dict[str, float]] | None:
    """What resolved settings ask for: a function from the backbone to names and values, or None.

    All processes call it at the same place. The first one gets the figures, of its own backbone; the others get none.
    """
    if settings.monitor == "none":
        return None
    return (_knn if settings.monitor == "knn" else _retrieval)(source, settings, device)


def _knn(source: Source, settings: RunSettings, device: torch.device) -> Callable[[nn.Module], dict[str, float]]:
    """Leave-one-out kNN (k = 20) over at most `monitor_images` pictures, the same ones every time."""
    assert source.labels is not None
    labelled = np.flatnonzero(source.labels >= 0)  # a negative label is the usual mark of a picture without one
    chosen = np.sort(np.random.default_rng(settings.seed).permutation(labelled)[: settings.monitor_images])
    labels = torch.from_numpy(source.labels[chosen])

    def check(backbone: nn.Module) -> dict[str, float]:
        chunks = own_share(-(-len(chosen) // BATCH))
        batches = evaluation_batches(
            source,
            chosen[chunks.start * BATCH : chunks.stop * BATCH],
            size=settings.image_size,
            channels=settings.channels,
            batch_size=BATCH,
            workers=settings.workers,
        )
        features = _encode(backbone, batches, len(chunks), settings, device)
        if rank() > 0:
            return {}
        return {"knn_accuracy": knn_accuracy(features, labels, features, labels, k=20, exclude_self=True)}

    return check


def _retrieval(source: Source, settings: RunSettings, device: torch.device) -> Callable[[nn.Module], dict[str, float]]:
    """Do two views of a picture find each other among the views of all pictures? The same views every time."""
    count = min(len(source), settings.monitor_images, RETRIEVAL_IMAGES)
    views = ViewStream(
        source, query=settings.query_views, key=settings.query_views, size=settings.image_size,
        channels=settings.channels, batch_size=min(count, BATCH), seed=settings.seed + 1, workers=0,
        way="image" if settings.views == "custom" else settings.views, device=device,
    )  # fmt: skip

    def check(backbone: nn.Module) -> dict[str, float]:
        chunks = own_share(max(count // BATCH, 1))
        pairs = [place(views.batch(step), device) for step in chunks]
        first = _encode(backbone, (pair.query for pair in pairs), len(chunks), settings, device)
        second = _encode(backbone, (pair.key for pair in pairs), len(chunks), settings, device)
        if rank() > 0:
            return {}
        return {
            "retrieval": retrieval(first, second),
            "alignment": alignment(first, second),
            "uniformity": uniformity(first),
            "effective_rank": effective_rank(first),
        }

    return check


def _encode(
    backbone: nn.Module, batches: Iterator[Tensor], chunks: int, settings: RunSettings, device: torch.device
) -> Tensor:
    """The features of all pictures, in order, of which this process encodes the `chunks` batches it is given."""
    own = torch.empty(0, 0)
    with buffers_of_the_first(backbone):
        if chunks:
            own = encode(
                backbone, batches, mean=settings.mean, std=settings.std, device=device, precision=settings.precision
            )
    return gather_shares(own.to(device)).cpu()
