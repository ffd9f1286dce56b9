"""The network that pictures go through on their way into an embedding, and how they are prepared for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moco.building import build_model
from moco.errors import UserError
from moco.evaluate.cache import weights_fingerprint
from moco.evaluate.subject import Where, checkpoint_of, load_run, load_timm

QUERY_ENCODER = "query_encoder."


@dataclass(frozen=True)
class Encoder:
    """network: (n, channels, size, size) → (n, D), in eval mode.

    mean, std: per channel, on the scale 0 to 1. weights: fingerprint of all parameters and buffers. name: the run, file
    or timm model. step: optimiser steps of its training, or None.
    """

    network: nn.Module
    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weights: str
    name: str
    step: int | None

    def preparation(self) -> dict[str, Any]:
        """What two encoders must share, besides the weights, to give the same features, as JSON keeps it."""
        return {"size": self.size, "channels": self.channels, "mean": list(self.mean), "std": list(self.std)}


def open_encoder(
    where: Where,
    *,
    head: bool,
    channels: int | None = None,
    picture_side: int | None = None,
    image_size: int | None = None,
    pretrained: bool = False,
    seed: int = 0,
    notes: list[str] | None = None,
) -> Encoder:
    """The query backbone of a run, with `head` the projection head behind it; or a timm model, as `load_timm` does.

    notes: gets a line where newer checkpoints are damaged (without it that is a warning of Python) or a timm model has
    random weights.
    Raises UserError for weights that cannot be read, and for what a run or a timm model does not have.
    """
    if where.run is None:
        if head:
            raise UserError(f"--head: {where.name} is a timm model, which has no projection head")
        subject = load_timm(
            where,
            channels=channels,
            picture_side=picture_side,
            image_size=image_size,
            pretrained=pretrained,
            seed=seed,
            notes=[] if notes is None else notes,
        )
    elif pretrained or image_size is not None:
        raise UserError("--pretrained and --image-size are for timm names: a run has its own weights and size")
    else:
        subject = load_run(where, notes)
    network = _with_head(where, notes) if head else subject.backbone
    weights = weights_fingerprint(network)
    return Encoder(
        network.eval(), subject.size, subject.channels, subject.mean, subject.std, weights, where.name, subject.step
    )


def _with_head(where: Where, notes: list[str] | None) -> nn.Module:
    """The query encoder of a run: backbone and projection head."""
    assert where.run is not None
    held = checkpoint_of(where, notes)["model"]
    assert isinstance(held, Mapping)
    settings = where.run.settings.model_copy(update={"dictionary": "in-batch"})  # the only one that holds nothing
    with torch.random.fork_rng(devices=[]):
        encoder: nn.Module = build_model(settings).query_encoder
    weights = {
        name.removeprefix(QUERY_ENCODER): value for name, value in held.items() if name.startswith(QUERY_ENCODER)
    }
    try:
        encoder.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{where.name} does not fit its settings: {str(error).splitlines()[0]}") from error
    return encoder
