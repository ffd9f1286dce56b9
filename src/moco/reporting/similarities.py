"""How similar queries are to their positives and negatives: before training and at the checkpoints that are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moco.building import build_model
from moco.contrast.losses import own_pairs
from moco.contrast.moco import MomentumContrast
from moco.errors import UserError
from moco.evaluate.contrast_probe import Negatives, ViewPairs, encode_pairs, negatives
from moco.report.histograms import Similarities
from moco.settings import RunSettings
from moco.train.checkpoints import read

MOST_CHECKPOINTS = 4
MOST_NEGATIVES = 4096
"""Keys that a histogram looks at: with hundreds of queries that makes millions of similarities."""
KEPT = 100_000
"""Similarities that are drawn: a histogram of more looks the same."""


def over_time(
    settings: RunSettings, checkpoints: Sequence[Path], images: int, pairs: ViewPairs, device: torch.device, seed: int
) -> Iterator[Similarities]:
    """Similarities of the view pairs with the network as it was born, then at up to four of the checkpoints.

    images: pictures of the run's data; where these are the view pairs' too, the pairs have the ids that the run gave
    them. Before training the queue holds random vectors, which say nothing; there the
    keys of the other pictures are the negatives.
    """
    model = _model(settings, images)
    if model is None:
        return
    yield _similarities(model.to(device), settings, pairs, seed, "before training", others=True)
    count = len(checkpoints)
    chosen = sorted({round(place * (count - 1) / (MOST_CHECKPOINTS - 1)) for place in range(MOST_CHECKPOINTS)})
    for number in chosen if count else ():
        state = read(checkpoints[number])
        if state is None or not isinstance(state.get("model"), dict):
            continue
        try:
            model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(f"{checkpoints[number]} does not fit its settings") from error
        epoch = state["step"] / max(images // settings.batch_size, 1)
        label = f"step {state['step']:,}, epoch {epoch:.3g}"
        yield _similarities(model, settings, pairs, seed, label, others=False)


def _model(settings: RunSettings, images: int) -> MomentumContrast | None:
    """The model as it was born, or None for a method that does not compare keys."""
    with torch.random.fork_rng(devices=[]):
        model: Any = build_model(settings, images)
    return model if isinstance(model, MomentumContrast) else None


def _similarities(
    model: MomentumContrast, settings: RunSettings, pairs: ViewPairs, seed: int, label: str, *, others: bool
) -> Similarities:
    shuffled = settings.shuffle_bn and settings.bn_groups > 1
    encoded = encode_pairs(model, pairs, groups=settings.bn_groups, shuffled=shuffled, seed=seed)
    found = Negatives(encoded.as_trained, encoded.ids) if others else negatives(model, encoded)
    step = -(-len(found.keys) // MOST_NEGATIVES)
    keys, key_ids = found.keys[::step].float(), found.ids[::step]
    similarity = encoded.query @ keys.T
    positive = (encoded.query * encoded.as_trained).sum(1)
    there = torch.ones_like(similarity, dtype=torch.bool)
    there[own_pairs(encoded.ids, key_ids)] = False
    above = float((similarity > positive[:, None])[there].float().mean())
    note = "negatives: keys of the other pictures" if others else ""
    return Similarities(label, positive.numpy(), _some(similarity[there], seed), above, note)


def _some(values: Tensor, seed: int) -> Any:
    rows = np.random.default_rng(seed).integers(0, len(values), min(len(values), KEPT))
    return values.numpy()[rows]
