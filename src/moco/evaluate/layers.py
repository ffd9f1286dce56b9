"""Features of an earlier layer, or of several places in the picture, instead of the pooled ones behind the last."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.errors import UserError, counted


class LayerFeatures(nn.Module):
    """The map of one layer of a timm model, averaged in grid × grid parts: (n, C, S, S) → (n, channels · grid²).

    layer: as timm counts them (`forward_intermediates`): of a ResNet 0 the stem and 1 to 4 its stages, of a
    transformer its blocks from 0. None: the last. The weights are those of `backbone`, not copies.
    """

    def __init__(self, backbone: nn.Module, layer: int | None, grid: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.layer, self.grid = layer, grid

    def forward(self, pictures: Tensor) -> Tensor:
        """The features of a batch."""
        backbone: Any = self.backbone
        wanted = 1 if self.layer is None else [self.layer]  # timm: a number is how many of the last ones
        (found,) = backbone.forward_intermediates(pictures, indices=wanted, intermediates_only=True, output_fmt="NCHW")
        return F.adaptive_avg_pool2d(found, self.grid).flatten(1)


def at_layer(backbone: nn.Module, layer: int | None, grid: int, *, channels: int, size: int) -> nn.Module:
    """The backbone with the features of a layer; itself, where the last one's pooled features are asked for.

    channels, size: of its pictures. Raises UserError for a network that has no such layers, a layer that is not there,
    and a grid finer than the map.
    """
    if layer is None and grid == 1:
        return backbone
    given: Any = backbone
    if not hasattr(given, "forward_intermediates"):
        raise UserError(f"--layer and --grid need a timm model that shows its layers, which {_name(given)} does not")
    mode = backbone.training
    try:
        with torch.no_grad():
            maps = given.eval().forward_intermediates(
                torch.zeros(1, channels, size, size, device=next(backbone.parameters()).device),
                intermediates_only=True,
                output_fmt="NCHW",
            )
    finally:
        backbone.train(mode)
    last = len(maps) - 1
    if layer is not None and layer > last:
        raise UserError(f"--layer {layer} is not there: {_name(given)} has {counted(last + 1, 'layer')}, 0 to {last}")
    sides = tuple(maps[last if layer is None else layer].shape[-2:])
    if grid > min(sides):
        raise UserError(f"--grid {grid} is finer than the map of that layer, which has {sides[0]} × {sides[1]} places")
    return LayerFeatures(backbone, layer, grid)


def _name(backbone: nn.Module) -> str:
    return type(backbone).__name__
