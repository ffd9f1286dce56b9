"""The check after an epoch: kNN where there are labels, label-free figures where there are none, and is it healthy?

Several processes share the encoding, in the same chunks as one would: the features, and so the figures, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from moco.contrast.collectives import buffers_of_the_first, gather_shares, own_share, rank
from moco.contrast.method import Method
from moco.data.device import place
from moco.data.loader import ViewStream, evaluation_batches
from moco.data.sources import Source
from moco.evaluate.features import encode, evaluating
from moco.evaluate.knn import knn_accuracy
from moco.evaluate.label_free import (
    alignment,
    dead_dimensions,
    effective_rank,
    feature_spread,
    random_cosine,
    retrieval,
    uniformity,
)
from moco.evaluate.live import make_probes
from moco.settings import RunSettings

BATCH = 256
RETRIEVAL_IMAGES = 2_000
RANK_IMAGES = 1_000
"""Pictures that tell how many directions are in use, where there are more: more of them take long, and say the same."""

Check = Callable[[Method], dict[str, float]]


def make_monitor(
    source: Source, settings: RunSettings, device: torch.device, stream: ViewStream | None = None
) -> Check | None:
    """What resolved settings ask for: a function from the model to names and values, or None.

    stream: that of the training, to look for leaks of batch norm and for stale keys as well. All processes call the
    function at the same place. The first one gets the figures, of its own model; the others get none. Nothing changes.
    """
    if settings.monitor == "none":
        return None
    look = (_knn if settings.monitor == "knn" else _retrieval)(source, settings, device)

    def check(method: Method) -> dict[str, float]:
        figures = look(method)
        probes = make_probes(method, settings, stream, device) if stream is not None and rank() == 0 else None
        return figures if probes is None else figures | probes.figures(method)

    return check


def _health(method: Method, features: Tensor, settings: RunSettings, device: torch.device) -> dict[str, float]:
    """Is all of the space in use? Rank and dead dimensions of backbone features (N, D), and spread behind the head."""
    some = features[:: -(-len(features) // RANK_IMAGES)]
    found = {"effective_rank": effective_rank(some), "dead_dimensions": dead_dimensions(some)}
    if settings.method == "cpc":  # whose head sees patches only
        return found
    head = method.query_encoder.get_submodule("head")
    with evaluating(head), torch.no_grad():
        projected = head(some.to(device)).float().cpu()
    return found | {"spread": feature_spread(projected), "random_cosine": random_cosine(projected)}


def _knn(source: Source, settings: RunSettings, device: torch.device) -> Check:
    """Leave-one-out kNN (k = 20) over at most `monitor_images` pictures, the same ones every time."""
    assert source.labels is not None
    labelled = np.flatnonzero(source.labels >= 0)  # a negative label is the usual mark of a picture without one
    chosen = np.sort(np.random.default_rng(settings.seed).permutation(labelled)[: settings.monitor_images])
    labels = torch.from_numpy(source.labels[chosen])

    def check(method: Method) -> dict[str, float]:
        chunks = own_share(-(-len(chosen) // BATCH))
        batches = evaluation_batches(
            source,
            chosen[chunks.start * BATCH : chunks.stop * BATCH],
            size=settings.image_size,
            channels=settings.channels,
            batch_size=BATCH,
            workers=settings.workers,
        )
        features = _encode(method.backbone, batches, len(chunks), settings, device)
        if rank() > 0:
            return {}
        accuracy = knn_accuracy(features, labels, features, labels, k=20, exclude_self=True)
        return {"knn_accuracy": accuracy} | _health(method, features, settings, device)

    return check


def _retrieval(source: Source, settings: RunSettings, device: torch.device) -> Check:
    """Do two views of a picture find each other among the views of all pictures? The same views every time."""
    count = min(len(source), settings.monitor_images, RETRIEVAL_IMAGES)
    views = ViewStream(
        source, query=settings.query_views, key=settings.query_views, size=settings.image_size,
        channels=settings.channels, batch_size=min(count, BATCH), seed=settings.seed + 1, workers=0,
        way="image" if settings.views == "custom" else settings.views, device=device,
    )  # fmt: skip

    def check(method: Method) -> dict[str, float]:
        chunks = own_share(max(count // BATCH, 1))
        pairs = [place(views.batch(step), device) for step in chunks]
        first = _encode(method.backbone, (pair.query for pair in pairs), len(chunks), settings, device)
        second = _encode(method.backbone, (pair.key for pair in pairs), len(chunks), settings, device)
        if rank() > 0:
            return {}
        return {
            "retrieval": retrieval(first, second),
            "alignment": alignment(first, second),
            "uniformity": uniformity(first),
        } | _health(method, first, settings, device)

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
