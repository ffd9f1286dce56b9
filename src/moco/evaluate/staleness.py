"""How far queued keys have drifted from what the key encoder would make of the same views now."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.batchnorm import encode_in_groups
from moco.contrast.dictionary import Queue
from moco.contrast.moco import MomentumContrast
from moco.data.loader import Batch
from moco.data.views import normalize


@dataclass(frozen=True)
class Drift:
    """Keys of one step. age: steps since then. similarity: mean cosine of key and re-encoding. keys: how many."""

    age: int
    similarity: float
    keys: int


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
        similarity = (made[len(made) - count :] * F.normalize(keys[rows], dim=1)).sum(1)
        found.append(Drift(model.step - step, float(similarity.mean()), count))
    return found


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
