"""Backbones (timm), the small-image stem, and projection heads."""

from __future__ import annotations

import itertools
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.resnet import ResNet, downsample_conv
from torch import Tensor, nn

from moco.contrast.own import build as build_own
from moco.contrast.own import is_own
from moco.contrast.vit import stabilise
from moco.errors import UserError
from moco.settings import check_names

NARROW = 16
"""Channels below which oneDNN is not trusted with strided 1×1 convolutions: its block on AVX-512 (AVX2: 8)."""


def build_backbone(
    name: str,
    *,
    channels: int = 3,
    stem: str = "auto",
    base_width: int | None = None,
    image_size: int = 224,
    vit_rules: str = "timm",
    keep_tokens: float = 1.0,
) -> nn.Module:
    """A timm model without classifier, or one of the user (`own`): (N, channels, S, S) → (N, `num_features`).

    stem: "small" puts a 3×3 stride-1 convolution without pooling at the front of a ResNet, for images of about 32
    pixels; "imagenet" keeps the model as it is; "auto" takes "small" for ResNets up to 64 pixels. base_width: channels
    of a ResNet's first stage, with the later stages in proportion (64-128-256-512 for 64). vit_rules: "v3" gives a
    vision transformer what [v3] found it needs (`vit.stabilise`), and the small one 12 heads. keep_tokens: part of its
    patches that it sees while training.

    Raises UserError for an unknown name, for stem or base_width where the model is no ResNet, and for vit_rules v3 or
    keep_tokens where it is no vision transformer.
    """
    if is_own(name):
        if stem == "small" or base_width is not None or vit_rules == "v3" or keep_tokens < 1:
            raise UserError(f"stem small, base_width, vit_rules and keep_tokens change timm models, not {name}")
        return build_own(name)
    check_names([name], timm.list_models(), "backbone")
    options: dict[str, Any] = {"in_chans": channels, "num_classes": 0}
    if timm.models.get_pretrained_cfg_value(name, "fixed_input_size"):
        options["img_size"] = image_size
    family = timm.models.model_entrypoint(name).__module__
    is_resnet, is_vit = family == "timm.models.resnet", family == "timm.models.vision_transformer"
    if not is_vit and (vit_rules == "v3" or keep_tokens < 1):
        raise UserError(f"vit_rules v3 and keep_tokens are for vision transformers (vit_…), not for {name}")
    if is_vit:
        options |= {"img_size": image_size, "patch_drop_rate": 1 - keep_tokens}
        if vit_rules == "v3" and name.startswith("vit_small"):
            options["num_heads"] = 12  # [v3] section 4: more of them, and narrower, than in other papers
    if is_resnet:
        options["zero_init_last"] = False  # as the authors' ResNet, which is torchvision's
        options["channels"] = tuple((base_width or 64) * 2**stage for stage in range(4))
    try:
        model: nn.Module = timm.create_model(name, **options)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"backbone {name} cannot be built for {image_size} pixels: {' '.join(str(error).split())}"
        ) from error
    if vit_rules == "v3":
        stabilise(model)
    if not isinstance(model, ResNet):
        if stem == "small" or base_width is not None:
            raise UserError(f"stem small and base_width are for ResNets, not for {name}")
    elif resolve_stem(stem, model, image_size) == "small" or base_width is not None:
        _refit_stem(model, channels, base_width or 64, small=resolve_stem(stem, model, image_size) == "small")
    _replace_narrow(model)
    return model


def feature_width(backbone: nn.Module, channels: int, image_size: int) -> int:
    """Length of the features of a backbone, found by encoding one black picture (timm's own figure is not always it).

    Raises UserError where pictures of this size do not go through, or do not give one vector each.
    """
    was_training = backbone.training
    try:
        with torch.no_grad():
            features = backbone.eval()(torch.zeros(1, channels, image_size, image_size))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(f"the backbone cannot take {image_size} pixels: {' '.join(str(error).split())}") from error
    finally:
        backbone.train(was_training)
    if features.ndim != 2:
        raise UserError(f"the backbone must give one vector per picture, not {tuple(features.shape)}")
    return int(features.shape[1])


def resolve_stem(stem: str, model: nn.Module, image_size: int) -> str:
    """What `stem` "auto" means for this model and image size."""
    if stem != "auto":
        return stem
    return "small" if isinstance(model, ResNet) and image_size <= 64 else "imagenet"


def _refit_stem(model: Any, channels: int, width: int, *, small: bool) -> None:
    """Replace the first convolution by one of `width` channels, and the block behind it to fit."""
    kernel, stride = (3, 1) if small else (7, 2)
    model.conv1 = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.bn1 = nn.BatchNorm2d(width)
    if small:
        model.maxpool = nn.Identity()
    stage = model.layer1
    block = type(stage[0])
    if stage[0].conv1.in_channels != width:
        # timm fixes the width behind a plain stem at 64; a net of another width needs its first block anew.
        outputs = width * block.expansion
        downsample = downsample_conv(width, outputs, kernel_size=1) if width != outputs else None
        stage[0] = block(width, width, downsample=downsample)
        stage[0].apply(_initialise)
    model.feature_info[0]["num_chs"] = width


class _Subsampled(nn.Conv2d):
    """A strided 1×1 convolution that leaves the pixels out before, not while, it multiplies: the same values."""

    def forward(self, input: Tensor) -> Tensor:
        rows, columns = self.stride
        return F.conv2d(input[..., ::rows, ::columns], self.weight, self.bias, groups=self.groups)


def _replace_narrow(model: nn.Module) -> None:
    """Keep oneDNN from writing past its memory in the backward pass of narrow networks (--base-width 4).

    With channels last and fewer input channels than its block, its strided 1×1 convolution does that on processors
    with AVX2: the process ends, hangs, or learns from wrong gradients (oneDNN issue 6035; PyTorch 2.14 has it too).
    Parameters, their names and their values stay.
    """
    for parent in list(model.modules()):
        for name, old in list(parent.named_children()):
            if not isinstance(old, nn.Conv2d) or old.in_channels // old.groups >= NARROW:
                continue
            if old.kernel_size == (1, 1) and old.padding == (0, 0) and old.stride != (1, 1):
                new = _Subsampled(
                    old.in_channels, old.out_channels, 1, (old.stride[0], old.stride[1]), groups=old.groups,
                    bias=old.bias is not None, device="meta",
                )  # fmt: skip
                new.weight, new.bias = old.weight, old.bias
                setattr(parent, name, new)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def projection_head(
    kind: str, width: int, feature_size: int, *, layers: int = 2, hidden: int | None = None, last_norm: bool = True
) -> nn.Module:
    """The head that is thrown away after pre-training: (N, width) → (N, feature_size). The predictor is one, too.

    kind: "linear" ([v1]: one layer); "mlp" ([v2]: `layers` layers with ReLU between them); "mlp-bn" ([v3], SimCLR,
    BYOL: the same without biases and with batch norm before each ReLU, and with `last_norm` behind the last layer,
    there without scale and shift). hidden: width of the layers between; by default that of the features.
    """
    if kind not in ("linear", "mlp", "mlp-bn"):
        raise UserError(f"head must be linear, mlp or mlp-bn, not {kind!r}")
    if kind == "linear":
        return nn.Linear(width, feature_size)
    norm = kind == "mlp-bn"
    widths = [width, *[hidden or width] * (layers - 1), feature_size]
    parts: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
        parts.append(nn.Linear(inputs, outputs, bias=not norm))
        if number < layers:
            parts += [*([nn.BatchNorm1d(outputs)] if norm else []), nn.ReLU(inplace=True)]
    if norm and last_norm:
        parts.append(nn.BatchNorm1d(feature_size, affine=False))
    return nn.Sequential(*parts)
