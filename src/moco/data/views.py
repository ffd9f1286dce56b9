"""Random views of pictures: draw the numbers first, apply them later.

`draw` gives a table of uniform numbers, a pure function of (seed, epoch, step). `parameters` turns its rows into
what will be done to each picture. `apply_image` does it to one picture on the CPU, `apply_batch` to many at once on
any device; both give the same picture for the same row, within rounding. `recolour` is all of it but the crop.

The operations, in this order, are those of torchvision with the same names: crop-resize (antialiased), grayscale
(v1), colour jitter in random order, grayscale (v2), Gaussian blur, solarise, left-right flip. Before the colours comes
a gain of each channel by itself, at the end Gaussian noise, where they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moco.data.batched import apply_batch, recolour
from moco.data.drawing import DRAWS, ViewParameters, crop_boxes, draw, parameters
from moco.data.per_image import apply_image

__all__ = [
    "DRAWS",
    "ViewParameters",
    "apply_batch",
    "apply_image",
    "crop_boxes",
    "draw",
    "normalize",
    "parameters",
    "recolour",
]


def normalize(batch: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """(batch − mean) / std per channel: float32, on the device of `batch`.

    Args:
        batch: (N, C, H, W), uint8 (0…255) or float in [0, 1].
        mean, std: C numbers in units of [0, 1].
    """
    scale = 1 / torch.tensor(std, dtype=torch.float32)
    offset = -torch.tensor(mean, dtype=torch.float32) * scale
    if batch.dtype == torch.uint8:
        scale = scale / 255
    count, channels, height, width = batch.shape
    if batch.is_contiguous(memory_format=torch.channels_last):
        # Rows of a picture as they lie in memory, with the numbers repeated along them: whole vectors at a time.
        rows = batch.permute(0, 2, 3, 1).reshape(count, height, width * channels).to(torch.float32)
        scale, offset = scale.repeat(width).to(batch.device), offset.repeat(width).to(batch.device)
        # Said where to, the operation is ten times as fast on a CPU; a copy that `to` made may be written over.
        into = torch.empty_like(rows) if batch.dtype == torch.float32 else rows
        torch.addcmul(offset, rows, scale, out=into)
        return into.view(count, height, width, channels).permute(0, 3, 1, 2)
    shape = (1, -1, 1, 1)
    scale, offset = scale.view(shape).to(batch.device), offset.view(shape).to(batch.device)
    return torch.addcmul(offset, batch.to(torch.float32), scale)
