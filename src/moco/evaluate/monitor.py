"""The check after an epoch: kNN where there are labels, label-free figures where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from moco.data.device import place
from moco.data.loader import Batch, ViewStream, evaluation_batches
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
    """What resolved settings ask for: a function from the backbone to names and values, or None."""
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
        batches = evaluation_batches(
            source,
            chosen,
            size=settings.image_size,
            channels=settings.channels,
            batch_size=BATCH,
            workers=settings.workers,
        )
        features = _encode(backbone, batches, settings, device)
        return {"knn_accuracy": knn_accuracy(features, labels, features, labels, k=20, exclude_self=True)}

    return check


def _retrieval(source: Source, settings: RunSettings, device: torch.device) -> Callable[[nn.Module], dict[str, float]]:
    """Do two views of a picture find each other among the views of all pictures? The same views every time."""
    count = min(len(source), settings.monitor_images, RETRIEVAL_IMAGES)
    views = ViewStream(
        source, query=settings.query_views, key=settings.query_views, size=settings.image_size,
        channels=settings.channels, batch_size=min(count, BATCH), seed=settings.seed + 1, workers=0, way=settings.views,
        device=device,
    )  # fmt: skip

    def batches() -> Iterator[Batch]:
        return (place(views.batch(step), device) for step in range(max(count // BATCH, 1)))

    def check(backbone: nn.Module) -> dict[str, float]:
        pairs = [(batch.query, batch.key) for batch in batches()]
        first = _encode(backbone, (query for query, _ in pairs), settings, device)
        second = _encode(backbone, (key for _, key in pairs), settings, device)
        return {
            "retrieval": retrieval(first, second),
            "alignment": alignment(first, second),
            "uniformity": uniformity(first),
            "effective_rank": effective_rank(first),
        }

    return check


def _encode(backbone: nn.Module, batches: Iterator[Tensor], settings: RunSettings, device: torch.device) -> Tensor:
    return encode(backbone, batches, mean=settings.mean, std=settings.std, device=device, precision=settings.precision)
