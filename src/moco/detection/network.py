"""Faster R-CNN and Mask R-CNN with a feature pyramid on a ResNet that has learned, or not.

torchvision's detectors (arXiv 1506.01497, 1703.06870, 1612.03144) with what [v1] section 4.2 asks for: batch norm that
learns in the backbone and in the pyramid, and no frozen layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.models.resnet import ResNet
from torch import nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign

from moco.errors import UserError

Norm = Literal["sync", "frozen"]

STAGES = ("layer1", "layer2", "layer3", "layer4")
PYRAMID, HIDDEN, WIDTH = 256, 1024, 64
"""Channels of the pyramid and of the box head for a ResNet whose first stage has `WIDTH` filters, as published."""
ANCHOR = 8
"""Side of the anchors of a level in steps of that level: 32 at stride 4, as published."""
RATIOS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Level:
    """One stage of a backbone. stride: pixels of the picture from one position to the next."""

    name: str
    channels: int
    stride: int


@dataclass(frozen=True)
class Plan:
    """What a detector is made for.

    classes: how many, without the background. masks: Mask R-CNN instead of Faster R-CNN. norm: "sync", batch norm
    that learns, over all processes there are, in the pyramid too; "frozen", the backbone's running statistics for
    good, and none in the pyramid. mean, std: per channel, on the scale 0 to 1. sizes: shorter side of a picture in
    pixels, drawn in training; the last one counts in testing. longest: bound of the longer side. rois: proposals of a
    picture that the heads learn from in a step.
    """

    classes: int
    masks: bool
    norm: Norm
    mean: Sequence[float]
    std: Sequence[float]
    sizes: Sequence[int]
    longest: int
    rois: int = 512


def build_detector(backbone: nn.Module, plan: Plan, *, seed: int) -> FasterRCNN:
    """A detector on `backbone`, which becomes part of it; everything new is drawn from `seed`.

    In train mode it takes pictures (C, H, W) in [0, 1] and targets and gives losses by name, in eval mode it takes
    pictures and gives boxes, labels (from 1), scores and masks. Raises UserError for a backbone that is no ResNet.
    """
    levels = pyramid_levels(backbone, len(plan.mean))
    width = _first_width(backbone)
    channels, hidden = max(PYRAMID * width // WIDTH, 16), max(HIDDEN * width // WIDTH, 64)
    names = [str(place) for place in range(len(levels))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = BackboneWithFPN(
            freeze_batch_norm(backbone) if plan.norm == "frozen" else nn.SyncBatchNorm.convert_sync_batchnorm(backbone),
            {level.name: name for level, name in zip(levels, names, strict=True)},
            [level.channels for level in levels],
            channels,
            norm_layer=None if plan.norm == "frozen" else nn.SyncBatchNorm,
        )
        strides = [*(level.stride for level in levels), 2 * levels[-1].stride]
        anchors = AnchorGenerator(tuple((ANCHOR * stride,) for stride in strides), (RATIOS,) * len(strides))
        parts: dict[str, Any] = {
            "rpn_anchor_generator": anchors,
            "rpn_head": RPNHead(channels, len(RATIOS)),
            "box_roi_pool": MultiScaleRoIAlign(names, output_size=7, sampling_ratio=2),
            "box_head": TwoMLPHead(channels * 7 * 7, hidden),
            "box_predictor": FastRCNNPredictor(hidden, plan.classes + 1),
        }
        if plan.masks:
            parts |= {
                "mask_roi_pool": MultiScaleRoIAlign(names, output_size=14, sampling_ratio=2),
                "mask_head": MaskRCNNHeads(channels, (channels,) * 4, dilation=1),
                "mask_predictor": MaskRCNNPredictor(channels, channels, plan.classes + 1),
            }
        made: FasterRCNN = (MaskRCNN if plan.masks else FasterRCNN)(
            body, min_size=tuple(plan.sizes), max_size=plan.longest, image_mean=list(plan.mean),
            image_std=list(plan.std), box_batch_size_per_image=plan.rois, **parts,
        )  # fmt: skip
    return made


def pyramid_levels(backbone: nn.Module, channels: int) -> list[Level]:
    """The stages of a ResNet that a pyramid stands on, found by encoding one black picture.

    A stage with a position for each pixel, as behind the stem for small pictures, is left out: it costs more than all
    others together, and sees little. Raises UserError for another kind of network.
    """
    if not isinstance(backbone, ResNet):
        raise UserError(f"moco eval detect takes a run of a ResNet, whose stages are known, not {_kind(backbone)}")
    side = 128
    was_training = backbone.training
    with torch.no_grad():
        maps: Any = backbone.eval().forward_intermediates(
            torch.zeros(1, channels, side, side), indices=list(range(1, len(STAGES) + 1)), intermediates_only=True
        )
    backbone.train(was_training)
    found = [
        Level(name, int(stage.shape[1]), side // int(stage.shape[2])) for name, stage in zip(STAGES, maps, strict=True)
    ]
    return [level for level in found if level.stride > 1]


def freeze_batch_norm(module: nn.Module) -> nn.Module:
    """Put frozen layers with the same statistics, scales and shifts in the place of batch norm, in `module` itself."""
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:
            frozen = FrozenBatchNorm2d(child.num_features, eps=child.eps)
            held = child.state_dict()
            held.pop("num_batches_tracked", None)
            frozen.load_state_dict(held)
            setattr(module, name, frozen)
        elif isinstance(child, nn.modules.batchnorm._BatchNorm):
            raise UserError(f"--norm frozen does not know {type(child).__name__}: use --norm sync")
        else:
            freeze_batch_norm(child)
    return module


def _first_width(backbone: nn.Module) -> int:
    first: Any = next(module for module in backbone.get_submodule("layer1").modules() if isinstance(module, nn.Conv2d))
    return int(first.out_channels)


def _kind(backbone: nn.Module) -> str:
    return type(backbone).__name__
