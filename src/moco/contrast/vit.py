"""What keeps a vision transformer stable in contrastive training ([v3] sections 4.2 and 5)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from moco.errors import UserError

WAVELENGTHS = 10_000.0
FEWEST_PATCHES = 16  # seen while training; of fewer, attention has next to nothing to compare


def positions(rows: int, columns: int, width: int) -> Tensor:
    """Fixed 2-D sine and cosine positions of patches, row by row: (rows · columns, width).

    With ω_i = 10000^(−4i/width), i = 0 … width/4 − 1, a patch at (x, y) has sin(xω), cos(xω), sin(yω), cos(yω).
    Raises UserError for a width that 4 does not divide.
    """
    if width % 4:
        raise UserError(f"sine-cosine positions need a width that 4 divides, not {width}")
    frequencies = WAVELENGTHS ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [place.flatten()[:, None] * frequencies for place in (x, y)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()


@torch.no_grad()
def stabilise(model: Any) -> None:
    """Change a timm vision transformer in place: fixed positions, a frozen random patch projection, and Xavier weights.

    The projection of patches to tokens stays as it is drawn, since its gradients are where instability begins; queries,
    keys and values of attention are drawn as three layers, not as the one that holds them. Raises UserError for
    transformers with another kind of positions or patches.
    """
    projection = getattr(getattr(model, "patch_embed", None), "proj", None)
    if not isinstance(projection, nn.Conv2d) or getattr(model, "pos_embed", None) is None:
        raise UserError("vit_rules v3 need a plain vision transformer: patches by one convolution, absolute positions")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            outputs = layer.out_features // 3 if name.endswith("qkv") else layer.out_features
            bound = math.sqrt(6 / (outputs + layer.in_features))
            layer.weight.uniform_(-bound, bound)
            if layer.bias is not None:
                layer.bias.zero_()
    fan_in = projection.in_channels * math.prod(projection.kernel_size)
    bound = math.sqrt(6 / (fan_in + projection.out_channels))
    projection.weight.uniform_(-bound, bound)
    if projection.bias is not None:
        projection.bias.zero_()
    projection.requires_grad_(False)
    if getattr(model, "cls_token", None) is not None:
        model.cls_token.normal_(std=1e-6)
    rows, columns = model.patch_embed.grid_size
    table = positions(rows, columns, model.embed_dim)
    before = model.pos_embed.shape[1] - len(table)  # the class token has no position
    model.pos_embed.copy_(torch.cat([torch.zeros(before, model.embed_dim), table])[None])
    model.pos_embed.requires_grad_(False)


def few_patches(model: Any, name: str, image_size: int, keep_tokens: float = 1.0) -> str | None:
    """What to say of a vision transformer, a model of timm, that sees too few patches to learn from; None of others.

    keep_tokens: part of the patches that it sees while training.
    """
    patches = getattr(model, "patch_embed", None)
    grid, size = getattr(patches, "grid_size", None), getattr(patches, "patch_size", None)
    if not isinstance(grid, tuple) or not isinstance(size, tuple) or math.prod(grid) * keep_tokens >= FEWEST_PATCHES:
        return None
    kept = f", of which {keep_tokens:.0%} are kept while training" if keep_tokens < 1 else ""
    return (
        f"{name} sees {image_size} pixels as {' × '.join(map(str, grid))} patches of {size[0]}{kept}: too few to learn "
        f"from; set --image-size {8 * size[0]} or larger (smaller pictures are enlarged), or --backbone resnet18"
    )
