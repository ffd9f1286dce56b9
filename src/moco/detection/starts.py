"""What a detector starts from: the run's backbone, the same network with random weights, supervised weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
from torch import nn

from moco.detection.network import Norm
from moco.errors import UserError
from moco.evaluate.subject import MEAN, STD, Subject, published_weights
from moco.evaluation_settings import DetectSettings
from moco.interop.loading import load_backbone
from moco.train.run import backbone_of

PRE_TRAINED, RANDOM, SUPERVISED = "pre-trained", "random initialisation", "supervised"


@dataclass(frozen=True)
class Start:
    """A row of the comparison. make: from the seed to a backbone of its own. mean, std: of its pictures."""

    label: str
    make: Callable[[int], nn.Module]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    norm: Norm


def starts(settings: DetectSettings, subject: Subject) -> list[Start]:
    """What is compared, the subject first. Raises UserError where supervised weights cannot be had.

    From random weights batch norm always learns: statistics that were never taken cannot be frozen.
    """
    found = [Start(PRE_TRAINED, lambda seed: copy.deepcopy(subject.backbone), subject.mean, subject.std, settings.norm)]
    untrained = subject.untrained
    if settings.baseline and untrained is not None:
        found.append(Start(RANDOM, untrained, subject.mean, subject.std, "sync"))
    if settings.supervised:
        backbone = _supervised(settings, subject)
        mean, std = (MEAN, STD) if subject.channels == len(MEAN) else (subject.mean, subject.std)
        found.append(Start(SUPERVISED, lambda seed: copy.deepcopy(backbone), mean, std, settings.norm))
    return found


def _supervised(settings: DetectSettings, subject: Subject) -> nn.Module:
    """The run's network with the weights that `supervised` names."""
    assert subject.settings is not None
    backbone = backbone_of(subject.settings)
    file = Path(settings.supervised).expanduser()
    if settings.supervised == "timm":
        name = subject.settings.backbone
        config = timm.models.get_pretrained_cfg(name)
        if config is None or not config.has_weights:
            raise UserError(f"timm has no published weights for {name}: name a file with --supervised FILE")
        file = published_weights(name, config)
    load_backbone(backbone, file, trust_pickle=settings.trust_pickle)
    return backbone.eval()
