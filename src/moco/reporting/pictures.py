"""The pictures of a report: small copies, features before and after training, neighbours, groups, view pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moco.data.device import place
from moco.data.loader import ViewStream, evaluation_batches, small_in_memory
from moco.data.reading import Unreadable, read, read_pixels
from moco.errors import UserError, counted
from moco.evaluate.contrast_probe import ViewPairs
from moco.evaluate.features import encode
from moco.evaluate.knn import knn_predict, usable_k
from moco.evaluate.pictures import Part
from moco.evaluate.subject import Subject
from moco.report import layout
from moco.report.thumbnails import as_seen, scaled
from moco.settings import RunSettings

Array = np.ndarray[Any, Any]

BATCH = 256
THUMBNAIL = 64
"""Side in pixels up to which small copies are kept."""
VIEW = 96
NEIGHBOURS = 8
VOTES = 20
"""Neighbours that vote on the class of a picture, as in the check after an epoch."""
FEWEST = 5
"""Pictures below which there is no map."""
CLUSTERS = 10
GREY = 128  # what stands in for a picture that cannot be read


@dataclass(frozen=True)
class Album:
    """What is known of the pictures on the page, row by row.

    thumbnails: (N, s, s, 3) uint8. names: of the pictures. before, after: features (N, D) of the network as it was
    born and as it is. labels: (N,) or None, of `classes`. clusters: (N,), groups of `after`. near_before, near: (N, 8)
    rows of the nearest others. votes_before, votes: (N,) the class that the neighbours vote for, or None.
    unreadable: (name, reason) of pictures that are left out.
    """

    part: Part
    thumbnails: Array
    names: list[str]
    before: Tensor
    after: Tensor
    labels: Tensor | None
    classes: list[str]
    clusters: Array
    near_before: Tensor
    near: Tensor
    votes_before: Tensor | None
    votes: Tensor | None
    unreadable: list[tuple[str, str]]

    def __len__(self) -> int:
        return len(self.names)


class _Both(nn.Module):
    """Two networks side by side, so that pictures are read once: (n, C, S, S) → (n, 2·D)."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, pictures: Tensor) -> Tensor:
        return torch.cat([self.first(pictures), self.second(pictures)], dim=1)


def look(subject: Subject, part: Part, *, device: torch.device, precision: Any, workers: int, seed: int) -> Album:
    """Read and encode the pictures of a part. Raises UserError for fewer than FEWEST, and for broken weights."""
    assert subject.untrained is not None
    both = _Both(subject.untrained(None), subject.backbone).to(device).to(memory_format=torch.channels_last)
    kept: list[Array] = []
    batches = evaluation_batches(
        part.source, part.indices, size=subject.size, channels=subject.channels, batch_size=BATCH, workers=workers
    )
    features = encode(
        both, _keeping(batches, kept), mean=subject.mean, std=subject.std, device=device, precision=precision
    )
    thumbnails = np.concatenate(kept)
    readable, names, unreadable = _names(part, thumbnails, subject.channels)
    if len(readable) < FEWEST:
        raise UserError(f"{part.name} has {counted(len(readable), 'readable picture')}: {FEWEST} or more are needed")
    part, thumbnails = part.rows(readable), thumbnails[readable]
    before, after = (half.contiguous() for half in features[torch.from_numpy(readable)].chunk(2, dim=1))
    if not after.isfinite().all():
        raise UserError("the features are no numbers: the weights are broken")
    classes = [str(name) for name in part.classes]
    if all(name.isdecimal() for name in classes):
        classes = [f"class {name}" for name in classes]
    votes_before, votes = (_votes(half, part) for half in (before, after))
    count = min(max(len(part.classes), 2), 12) if part.labels is not None else CLUSTERS
    return Album(
        part, thumbnails, names, before, after, part.labels, classes,
        layout.clusters(after, count, seed), layout.neighbours(before, NEIGHBOURS),
        layout.neighbours(after, NEIGHBOURS), votes_before, votes, unreadable,
    )  # fmt: skip


def _keeping(batches: Iterator[Tensor], kept: list[Array]) -> Iterator[Tensor]:
    """The batches as they are; small copies of their pictures go into `kept`."""
    for batch in batches:
        pictures = as_seen(batch.permute(0, 2, 3, 1).numpy())
        kept.append(scaled(pictures, min(pictures.shape[1], THUMBNAIL)))
        yield batch


def _names(part: Part, thumbnails: Array, channels: int) -> tuple[Array, list[str], list[tuple[str, str]]]:
    """Rows of the pictures that can be read, their names; name and reason of the others."""
    rows, names, unreadable = [], [], []
    for row, index in enumerate(part.indices):
        try:
            sample = read(part.source, int(index))
            if (thumbnails[row] == GREY).all():
                read_pixels(part.source, int(index), channels)
        except Unreadable as error:
            unreadable.append((error.name, error.reason))
            continue
        rows.append(row)
        names.append(sample.name)
    return np.asarray(rows, dtype=np.int64), names, unreadable


def _votes(features: Tensor, part: Part) -> Tensor | None:
    if part.labels is None:
        return None
    k = usable_k(VOTES, len(features), exclude_self=True)
    return knn_predict(features, part.labels, features, k=k, classes=len(part.classes), exclude_self=True)


def view_pairs(part: Part, settings: RunSettings, *, most: int, device: torch.device, seed: int) -> ViewPairs:
    """Two views of up to `most` pictures each, made as in training, in two batches or more; ids are rows of the part.

    Raises UserError for fewer than four pictures.
    """
    source = part.as_source()
    rows = min(settings.batch_size // settings.accumulate, BATCH, len(source) // 2, most // 2)
    if rows < 2:
        raise UserError(f"{part.name} has {counted(len(source), 'picture')}: four or more are needed")
    stream = ViewStream(
        source, query=settings.query_views, key=settings.key_views, size=settings.image_size,
        channels=settings.channels, batch_size=rows, seed=seed, workers=0,
        way="batch" if small_in_memory(source) else "image", device=device,
    )  # fmt: skip
    steps = max(min(stream.steps_per_epoch, most // rows), 2)
    batches = [place(batch, torch.device("cpu")) for batch in stream.run(0, steps)]
    return ViewPairs(
        [batch.query for batch in batches],
        [batch.key for batch in batches],
        [batch.ids for batch in batches],
        settings.mean,
        settings.std,
    )


@dataclass(frozen=True)
class Shown:
    """A picture and its two views, each (s, s, 3)."""

    name: str
    picture: Array
    query: Array
    key: Array


def shown_pairs(pairs: ViewPairs, part: Part, count: int) -> list[Shown]:
    """The first view pairs with the pictures that they were made from; part: that of the view pairs."""
    ids = torch.cat(list(pairs.ids))[:count].numpy()
    size, channels = pairs.query[0].shape[2], pairs.query[0].shape[1]
    (pictures,) = evaluation_batches(part.source, part.indices[ids], size=size, channels=channels, batch_size=count)
    columns = [pictures, torch.cat(list(pairs.query))[:count], torch.cat(list(pairs.key))[:count]]
    looks = [scaled(as_seen(_bytes(column)), min(size, VIEW)) for column in columns]
    names = [part.source[int(part.indices[number])].name for number in ids]
    return [Shown(name, *several) for name, *several in zip(names, *looks, strict=True)]


def _bytes(views: Tensor) -> Array:
    """Views (N, C, S, S) as uint8 (N, S, S, C), whichever way they were made."""
    if views.is_floating_point():
        views = (views * 255).round().clamp(0, 255).to(torch.uint8)
    return views.permute(0, 2, 3, 1).numpy()
