"""From resolved settings to the model: encoder, head, dictionary and method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from moco.contrast.byol import BYOL
from moco.contrast.cpc import CPC
from moco.contrast.dictionary import Dictionary, InBatch, MemoryBank, Queue
from moco.contrast.encoders import feature_width, projection_head
from moco.contrast.hard import HardNegatives
from moco.contrast.method import Method
from moco.contrast.moco import MomentumContrast
from moco.contrast.simclr import SimCLR
from moco.contrast.swav import SwAV
from moco.errors import UserError
from moco.settings import RunSettings
from moco.train.loop import DTYPES
from moco.train.run import backbone_of


def build_model(settings: RunSettings, images: int | None = None) -> Method:
    """The model that resolved settings describe, from their seed.

    images: pictures of the data, which a memory bank needs to know.
    """
    if settings.method == "moco":
        return build_moco(settings, images)
    torch.manual_seed(settings.seed)
    network = backbone_of(settings)
    return _RIVALS[settings.method](settings, network)


def build_moco(settings: RunSettings, images: int | None = None) -> MomentumContrast:
    """The same where settings.method is moco."""
    torch.manual_seed(settings.seed)
    network = backbone_of(settings)
    head = _head(settings, network)
    return MomentumContrast(
        network,
        head,
        dictionary=_build_dictionary(settings, images),
        key_encoder=settings.key_encoder,
        predictor=_predictor(settings) if settings.predictor_layers else None,
        momentum=settings.momentum,
        momentum_schedule=settings.momentum_schedule,
        temperature=settings.temperature,
        symmetric=settings.symmetric,
        scaled=settings.scale_loss,
        bn_groups=settings.bn_groups,
        shuffle_bn=settings.shuffle_bn,
        seed=settings.seed,
    )


def _simclr(settings: RunSettings, network: nn.Module) -> SimCLR:
    return SimCLR(
        network, _head(settings, network), batch_size=settings.batch_size // settings.accumulate,
        temperature=settings.temperature, seed=settings.seed,
    )  # fmt: skip


def _byol(settings: RunSettings, network: nn.Module) -> BYOL:
    if not settings.predictor_layers:
        raise UserError("method byol collapses without a predictor: set --predictor-layers 2")
    return BYOL(
        network, _head(settings, network), predictor=_predictor(settings), momentum=settings.momentum,
        momentum_schedule=settings.momentum_schedule, seed=settings.seed,
    )  # fmt: skip


def _swav(settings: RunSettings, network: nn.Module) -> SwAV:
    return SwAV(
        network, _head(settings, network), prototypes=settings.prototypes, dim=settings.feature_size,
        temperature=settings.temperature, epsilon=settings.sinkhorn_epsilon, queue_size=settings.queue_size,
        frozen=settings.freeze_prototypes / settings.epochs, queue_from=settings.queue_from / settings.epochs,
        seed=settings.seed,
    )  # fmt: skip


def _cpc(settings: RunSettings, network: nn.Module) -> CPC:
    side = max(round(settings.patch_share * settings.image_size), 1)
    try:
        width = feature_width(network, settings.channels, side)
    except UserError as error:
        raise UserError(f"method cpc encodes patches of {side} pixels: {error}") from error
    return CPC(
        network, _head(settings, network), width=width, dim=settings.feature_size, patch_size=side,
        image_size=settings.image_size, batch_size=settings.batch_size // settings.accumulate,
        temperature=settings.temperature, seed=settings.seed,
    )  # fmt: skip


_RIVALS: dict[str, Callable[[RunSettings, nn.Module], Method]] = {
    "simclr": _simclr,
    "byol": _byol,
    "swav": _swav,
    "cpc": _cpc,
}


def _head(settings: RunSettings, network: nn.Module) -> nn.Module:
    return projection_head(
        settings.head, feature_width(network, settings.channels, settings.image_size), settings.feature_size,
        layers=settings.head_layers, hidden=settings.hidden_width, last_norm=settings.head_last_norm,
    )  # fmt: skip


def _predictor(settings: RunSettings) -> nn.Module:
    return projection_head(
        "mlp-bn", settings.feature_size, settings.feature_size, layers=settings.predictor_layers,
        hidden=settings.hidden_width, last_norm=settings.predictor_last_norm,
    )  # fmt: skip


def _build_dictionary(settings: RunSettings, images: int | None) -> Dictionary:
    if settings.dictionary == "in-batch":
        return InBatch(settings.batch_size // settings.accumulate)
    if settings.dictionary == "memory-bank":
        if images is None:
            raise UserError("a memory bank has a vector for each picture: the number of pictures is needed")
        return MemoryBank(
            images, settings.queue_size, settings.feature_size, momentum=settings.bank_momentum, seed=settings.seed,
            folder=Path(settings.out) if settings.bank_on_disk else None,
        )  # fmt: skip
    hard = HardNegatives(
        settings.hard_negatives, settings.mixed_pairs, settings.mixed_with_query, settings.hard_weight,
        start=settings.hard_from / settings.epochs,
    )  # fmt: skip
    dtype = DTYPES[settings.queue_precision]
    return Queue(settings.queue_size, settings.feature_size, seed=settings.seed, dtype=dtype, hard=hard)
