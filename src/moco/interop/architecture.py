"""Which network is this? Told from the shapes of its weights, since most files do not say."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from moco.contrast.encoders import build_backbone
from moco.errors import UserError
from moco.interop.loading import backbone_weights
from moco.interop.reading import ForeignWeights

# Blocks per stage, whether they are bottlenecks, and how much wider than the stem their 3×3 convolutions are.
RESNETS: dict[tuple[tuple[int, ...], bool, int], str] = {
    ((2, 2, 2, 2), False, 1): "resnet18",
    ((3, 4, 6, 3), False, 1): "resnet34",
    ((3, 4, 6, 3), True, 1): "resnet50",
    ((3, 4, 23, 3), True, 1): "resnet101",
    ((3, 8, 36, 3), True, 1): "resnet152",
    ((3, 4, 6, 3), True, 2): "wide_resnet50_2",
    ((3, 4, 23, 3), True, 2): "wide_resnet101_2",
}
VITS = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large"}
IMAGENET_SIZE, SMALL_SIZE = 224, 32


@dataclass(frozen=True)
class Architecture:
    """A backbone, in the words of the settings. base_width: None for the usual 64, and for what is no ResNet."""

    backbone: str
    channels: int
    stem: str = "imagenet"
    base_width: int | None = None
    image_size: int = IMAGENET_SIZE
    vit_rules: str = "timm"

    @property
    def is_resnet(self) -> bool:
        """Whether stem and base_width mean anything."""
        return "resnet" in self.backbone or "resnext" in self.backbone

    def build(self) -> nn.Module:
        """The network, untrained. Raises UserError where timm does not have it."""
        return build_backbone(
            self.backbone,
            channels=self.channels,
            stem=self.stem,
            base_width=self.base_width,
            image_size=self.image_size,
            vit_rules=self.vit_rules,
        )


@dataclass(frozen=True)
class Head:
    """A projection head, in the words of the settings. hidden: width between its layers; None for a linear one."""

    kind: str
    layers: int
    hidden: int | None
    feature_size: int
    last_norm: bool = False


def architecture_of(found: ForeignWeights, name: str | None = None) -> Architecture:
    """The backbone in a file. name: its timm name, where it was given. Raises UserError where it cannot be told."""
    weights = backbone_weights(found)
    if "conv1.weight" in weights and "layer4.0.conv1.weight" in weights:
        return _resnet(found, weights, name)
    if "patch_embed.proj.weight" in weights and "blocks.0.norm1.weight" in weights:
        return _vit(found, weights, name)
    name = name or str(found.meta.get("architecture") or found.meta.get("arch") or "")
    if not name:
        raise UserError(f"{found.path} does not say what network it holds: name it with --backbone NAME (of timm)")
    first = next((value for value in weights.values() if value.ndim == 4), None)
    return Architecture(name, 3 if first is None else int(first.shape[1]))


def _resnet(found: ForeignWeights, weights: Mapping[str, Tensor], name: str | None) -> Architecture:
    stem = weights["conv1.weight"]
    width, channels, kernel = int(stem.shape[0]), int(stem.shape[1]), int(stem.shape[2])
    blocks = tuple(_count(weights, rf"layer{stage}\.(\d+)\.") for stage in range(1, 5))
    bottleneck = "layer1.0.conv3.weight" in weights
    inner = weights["layer1.0.conv2.weight"]
    groups = int(inner.shape[0] // inner.shape[1])
    known = RESNETS.get((blocks, bottleneck, int(inner.shape[0] // width))) if groups == 1 else None
    name = name or known or _arch(found)
    if name is None:
        raise UserError(
            f"{found.path} holds a ResNet with {'-'.join(map(str, blocks))} blocks, none that is known by its shape: "
            "name it with --backbone NAME (of timm)"
        )
    small = kernel == 3
    return Architecture(
        name,
        channels,
        "small" if small else "imagenet",
        None if width == 64 else width,
        SMALL_SIZE if small else IMAGENET_SIZE,
    )


def _vit(found: ForeignWeights, weights: Mapping[str, Tensor], name: str | None) -> Architecture:
    projection, table = weights["patch_embed.proj.weight"], weights.get("pos_embed")
    width, channels, patch = int(projection.shape[0]), int(projection.shape[1]), int(projection.shape[2])
    size = IMAGENET_SIZE
    if table is not None:
        tokens = int(table.shape[-2]) - ("cls_token" in weights)
        size = math.isqrt(tokens) * patch
    kind = VITS.get((width, _count(weights, r"blocks\.(\d+)\.")))
    if name is None and kind is None:
        raise UserError(
            f"{found.path} holds a vision transformer of width {width} that is not known by its shape: name it with "
            "--backbone NAME (of timm)"
        )
    # The small one of v3 has 12 heads of attention, which its weights do not show.
    of_v3 = found.layout == "moco-v3" or any(part.startswith("predictor.") for part in found.state)
    return Architecture(
        name or f"vit_{kind}_patch{patch}_224", channels, image_size=size, vit_rules="v3" if of_v3 else "timm"
    )


def _arch(found: ForeignWeights) -> str | None:
    arch = found.meta.get("arch")
    return arch if isinstance(arch, str) else None


def _count(weights: Mapping[str, Tensor], pattern: str) -> int:
    return len({match[1] for name in weights if (match := re.match(pattern, name))})


def described_head(weights: Mapping[str, Tensor]) -> Head | None:
    """What the weights of a head say about it, or None where no setting describes it."""
    linear = [value for name, value in weights.items() if name.endswith("weight") and value.ndim == 2]
    if not linear:
        return None
    feature_size, layers = int(linear[-1].shape[0]), len(linear)
    if set(weights) == {"weight", "bias"}:
        return Head("linear", 1, None, feature_size)
    hidden = {int(value.shape[0]) for value in linear[:-1]}
    normed = any(name.endswith("running_mean") for name in weights)
    step = 3 if normed else 2
    biased = any(name == f"{number * step}.bias" for number in range(layers) for name in weights)
    if len(hidden) != 1 or biased == normed or f"{(layers - 1) * step}.weight" not in weights:
        return None
    last = f"{(layers - 1) * step + 1}.running_mean" in weights
    return Head("mlp-bn" if normed else "mlp", layers, hidden.pop(), feature_size, last)
