"""Encode a data set once; every evaluator then works on the cached features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from moco.data.views import normalize
from moco.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]
AUTOCAST: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def encode(
    backbone: nn.Module,
    batches: Iterable[Tensor],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    precision: Precision = "fp32",
) -> Tensor:
    """The features of all pictures of `batches`, in order: (N, D) float32 on the CPU.

    backbone: maps (n, C, S, S) to (n, D) and lives on `device`. It runs in eval mode without gradients, and is
        left as it was found: no parameter or buffer changes, and each module gets its own train or eval mode back.
    batches: uint8 0 to 255, or floats 0 to 1, each (n, C, S, S).
    mean, std: one number per channel, on the scale 0 to 1; a picture becomes (picture − mean) / std.
    precision: arithmetic of the backbone: fp32, or bf16 or fp16 by autocast.

    Raises UserError for no pictures, for a wrong number of channels, and for a backbone that gives no (n, D).
    """
    if precision != "fp32" and precision not in AUTOCAST:
        raise UserError(f"unknown precision {precision!r}; use fp32, bf16 or fp16")
    where = torch.device(device)
    autocast = torch.autocast(where.type, dtype=AUTOCAST.get(precision), enabled=precision != "fp32")
    found: list[Tensor] = []
    with evaluating(backbone), torch.no_grad():
        for batch in batches:
            if batch.ndim != 4 or batch.shape[1] != len(mean):
                raise UserError(f"expected pictures (n, {len(mean)}, S, S) to encode, got {tuple(batch.shape)}")
            pictures = normalize(batch.to(where, non_blocking=True), mean, std)
            with autocast:  # the backbone only: whatever makes the batches keeps its own arithmetic
                features = backbone(pictures.contiguous(memory_format=torch.channels_last))
            if not isinstance(features, Tensor) or features.ndim != 2:
                shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
                raise UserError(f"the backbone must give one vector per picture, (n, D), not {shape}")
            found.append(features.float().cpu())
    if not found:
        raise UserError("there are no pictures to encode")
    return torch.cat(found)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module has its own earlier mode again, also where they differed."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode  # not .train(mode), which models override to keep parts frozen


def checked_features(features: Tensor, name: str = "features") -> Tensor:
    """`features` as float32 (N, D). Raises UserError unless it is that, is not empty and is finite throughout."""
    if features.ndim != 2 or 0 in features.shape:
        raise UserError(f"{name} must have the shape (N, D) and at least one row, not {tuple(features.shape)}")
    features = features.detach().float()
    if not torch.isfinite(features).all():
        raise UserError(f"{name} hold values that are not finite (NaN or infinity)")
    return features


def checked_labels(labels: Tensor, rows: int | None, name: str = "labels") -> Tensor:
    """`labels` as int64 (N,). Raises UserError unless they are whole, not negative and one per row."""
    if labels.ndim != 1 or (rows is not None and len(labels) != rows):
        wanted = "(N,)" if rows is None else f"({rows},), one per row of the features"
        raise UserError(f"{name} must have the shape {wanted}, not {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UserError(f"{name} must be whole numbers, not {labels.dtype}")
    labels = labels.detach().long()
    if len(labels) and int(labels.min()) < 0:
        raise UserError(f"{name} must not be negative (found {int(labels.min())})")
    return labels
