"""`--init`: weights to start from, and how their pictures were prepared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import timm
from torch import nn

from moco.contrast.method import Method
from moco.errors import UserError
from moco.evaluate.subject import MEAN, STD, published_weights
from moco.interop.loading import LoadReport, load_backbone
from moco.interop.reading import ForeignWeights, read_weights
from moco.settings import PretrainSettings
from moco.train.run import Run, query_backbone_weights


@dataclass(frozen=True)
class Start:
    """Weights of a backbone found but not loaded. mean, std: per channel, of the pictures that made them."""

    weights: ForeignWeights
    mean: tuple[float, ...]
    std: tuple[float, ...]


def find_start(settings: PretrainSettings) -> Start | None:
    """What `init` names: timm's published weights of the backbone, a run, or a file; None where it names nothing.

    Raises UserError where it is not there, or cannot be read.
    """
    if not settings.init:
        return None
    if settings.init == "timm":
        config = timm.models.get_pretrained_cfg(settings.backbone)
        if config is None or not config.has_weights:
            raise UserError(f"timm has no published weights for {settings.backbone}: leave --init away, or name a file")
        file = published_weights(settings.backbone, config)
        return Start(read_weights(file), tuple(config.mean), tuple(config.std))
    path = Path(settings.init).expanduser()
    if path.is_dir():
        run = Run(path)
        stored = run.settings
        held = query_backbone_weights(run.load()["model"])
        return Start(ForeignWeights(path, "plain", held), stored.mean, stored.std)
    # Files of other tools say nothing about that; nearly all of them were made with ImageNet's.
    return Start(read_weights(path, trust_pickle=settings.trust_pickle), MEAN, STD)


def start_from(model: Method, start: Start, settings: PretrainSettings) -> LoadReport:
    """Put the weights into both encoders of a model that has not been trained yet.

    Raises UserError, where they do not fit, or only in part and that was not allowed.
    """
    report = load_backbone(model.backbone, start.weights, allow_partial=settings.allow_partial)
    follower: nn.Module | None = getattr(model, "key_encoder", None)
    if follower is not None:
        follower.get_submodule("backbone").load_state_dict(model.backbone.state_dict())
    return report
