"""How far queued keys have drifted from what the key encoder would make of the same views now, and what that hides."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.batchnorm import encode_in_groups
from moco.contrast.dictionary import Queue
from moco.contrast.losses import own_pairs
from moco.contrast.moco import MomentumContrast
from moco.data.loader import Batch
from moco.data.views import normalize


@dataclass(frozen=True)
class Drift:
    """Keys of one step, n of them. age: steps since then.

    queued, anew: (n, C) of unit norm, as they wait in the queue, and as the key encoder makes them now. ids: (n,).
    """

    age: int
    queued: Tensor
    anew: Tensor
    ids: Tensor

    @property
    def similarity(self) -> float:
        """Mean cosine of a key with its re-encoding."""
        return float((self.queued * self.anew).sum(1).mean())


def key_drift(
    model: MomentumContrast,
    batch_of: Callable[[int], Batch],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    accumulate: int = 1,
    steps: int = 8,
    world: int = 1,
) -> list[Drift]:
    """Compare queued keys with their re-encodings, for up to `steps` steps from the oldest to the newest in the queue.

    batch_of: the batch of a training step, as it was (`ViewStream.batch`), of all processes. world: how many of them
    trained; here this one does the work of all, and tells the others nothing. The views are made anew, encoded with the
    present key encoder in the same groups and the same shuffle, and compared by cosine. Steps whose pictures are not
    those noted in the queue are left out: the data must be what it was. None for other dictionaries, which keep no old
    keys. The model does not change.
    """
    queue = model.dictionary
    if not isinstance(queue, Queue):
        return []
    order = ((queue.pointer + torch.arange(len(queue), device=queue.keys.device)) % len(queue)).cpu()
    births, ids, keys = queue.births.cpu()[order], queue.ids.cpu()[order], queue.keys.cpu().float()[order]
    there = births[births >= 0].unique()
    if not len(there):
        return []
    chosen = there[torch.linspace(0, len(there) - 1, min(steps, len(there))).round().long().unique()]
    encoder = copy.deepcopy(model.key_network).train()  # running statistics move in the copy
    found = []
    for step in chosen.tolist():
        rows = births == step
        made, made_ids = _encode_again(model, encoder, batch_of(step), step, mean, std, accumulate, world)
        count = int(rows.sum())
        # Of the oldest step, the first keys may have been overwritten.
        if count > len(made_ids) or not torch.equal(made_ids[len(made_ids) - count :], ids[rows]):
            continue
        queued = F.normalize(keys[rows], dim=1)
        found.append(Drift(model.step - step, queued, made[len(made) - count :], ids[rows]))
    return found


def age_gap(
    drift: Sequence[Drift], query: Tensor, positive: Tensor, ids: Tensor, *, temperature: float, keys: int
) -> float:
    """By how many nats the loss would rise if the key encoder made all keys of the queue anew: what their age hides.

    An encoder that moves leaves its old keys behind. Queries then lie far from all of them, whatever they show, and
    find their positive the more easily. The keys in `drift` stand for the queue's `keys` real ones. query, positive:
    (N, C) of unit norm. ids: (N,); a query does not meet keys of its own picture.
    """
    key_ids = torch.cat([step.ids for step in drift])
    rows, columns = own_pairs(ids, key_ids)
    q, own = query.double(), (query.double() * positive.double()).sum(1) / temperature

    def loss(negatives: Tensor) -> Tensor:
        logits = q @ negatives.double().T / temperature
        logits[rows, columns] = -torch.inf
        return F.softplus(logits.logsumexp(1) + math.log(keys / len(negatives)) - own)

    anew, queued = (torch.cat(made) for made in zip(*((step.anew, step.queued) for step in drift), strict=True))
    return float((loss(anew) - loss(queued)).mean())


@torch.no_grad()
def _encode_again(
    model: MomentumContrast,
    encoder: nn.Module,
    batch: Batch,
    step: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    accumulate: int,
    world: int,
) -> tuple[Tensor, Tensor]:
    """The keys of a step and their ids, in the order in which they entered the queue."""
    generator = torch.Generator().manual_seed((model.seed * 1_000_003 + step) % 2**63)
    made, ids = [], []
    sides = (batch.key, batch.query) if model.symmetric else (batch.key,)
    pieces = [_pieces(view, accumulate, world) for view in sides]
    device = next(encoder.parameters()).device
    for number, own_ids in enumerate(_pieces(batch.ids, accumulate, world)):
        for views in pieces:
            view = normalize(views[number].to(device), mean, std).contiguous(memory_format=torch.channels_last)
            order = torch.arange(len(view))
            if model.shuffle_bn:
                order = torch.randperm(len(view), generator=generator)
            parts = view[order.to(device)].chunk(world)
            features = torch.cat([encode_in_groups(encoder, part, model.bn_groups) for part in parts]).float().cpu()
            made.append(F.normalize(features[order.argsort()], dim=1))
            ids.append(own_ids.cpu())
    return torch.cat(made), torch.cat(ids)


def _pieces(rows: Tensor, accumulate: int, world: int) -> list[Tensor]:
    """The rows of each piece of a step: of all processes, each of which cuts its share into pieces."""
    shares = [share.chunk(accumulate) for share in rows.chunk(world)]
    return [torch.cat(piece) for piece in zip(*shares, strict=True)]
