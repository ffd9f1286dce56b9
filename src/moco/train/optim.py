"""Parameter groups, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.optim.lars import Lars
from torch import nn

from moco.settings import PretrainSettings, RunSettings


def make_optimizer(module: nn.Module, settings: PretrainSettings) -> torch.optim.Optimizer:
    """The optimiser over the parameters of `module` that learn: SGD, LARS (timm's) or AdamW.

    Norm layers and biases are left undecayed where asked; under LARS always, and they are spared its trust ratio as
    well ([v3] appendix A). Fused where PyTorch has it so: one pass over all parameters instead of several over each.
    """
    learning = [p for p in module.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": learning, "weight_decay": settings.weight_decay}]
    if settings.optimizer == "lars" or not settings.decay_norm_and_bias:
        groups = [
            {"params": [p for p in learning if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in learning if p.ndim <= 1], "weight_decay": 0.0},
        ]
    rate, fused = settings.learning_rate, all(p.device.type in ("cpu", "cuda") for p in learning)
    if settings.optimizer == "lars":
        # timm goes by the weight decay unless told: without any, all would be plain SGD at a rate meant for LARS.
        for group, adapted in zip(groups, (True, False), strict=True):
            group["always_adapt"] = adapted
        found: torch.optim.Optimizer = Lars(groups, lr=rate, momentum=settings.sgd_momentum)
        return found
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, fused=fused)
    return torch.optim.SGD(groups, lr=rate, momentum=settings.sgd_momentum, fused=fused)


def learning_rate(step: int, steps_per_epoch: int, settings: RunSettings) -> float:
    """The rate of optimiser step `step`: linear in the global batch, warmed up, then falling by the schedule.

    cosine: half a cosine over all steps ([v2]). step: divided by ten at each milestone ([v1]).
    """
    peak = settings.learning_rate * settings.batch_size / 256
    warmup = settings.warmup_epochs * steps_per_epoch
    if step < warmup:
        return peak * (step + 1) / warmup
    total = settings.epochs * steps_per_epoch
    if settings.schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))
    return peak * 0.1 ** sum(step >= milestone * total for milestone in settings.milestones)
