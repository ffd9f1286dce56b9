"""The package lightly (MIT licence) on the same task: its building blocks put together as its documentation shows.

Used by `speed_whole_job.py`. Written from lightly's public interface; not a part of moco, and moco does not need it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms.moco_transform import MoCoV2Transform
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchvision.models.resnet import BasicBlock, ResNet

MOMENTUM = 0.996


class Pictures(Dataset[Any]):
    """An array of gray pictures as lightly's datasets give theirs: views, target, name."""

    def __init__(self, images: np.ndarray, transform: Callable[[Image.Image], Any], channels: int) -> None:
        self.images, self.transform, self.mode = images, transform, "L" if channels == 1 else "RGB"

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int, str]:
        return self.transform(Image.fromarray(self.images[index]).convert(self.mode)), 0, str(index)


def resnet18(channels: int, base_width: int, small_stem: bool) -> ResNet:
    """torchvision's ResNet-18 without classifier, with another stem and width where asked."""
    network = ResNet(BasicBlock, [2, 2, 2, 2])
    if small_stem or base_width != 64 or channels != 3:
        kernel, stride = (3, 1) if small_stem else (7, 2)
        network.conv1 = nn.Conv2d(channels, base_width, kernel, stride, kernel // 2, bias=False)
        network.bn1 = nn.BatchNorm2d(base_width)
        network.inplanes = base_width
        for stage in range(4):
            layer = network._make_layer(BasicBlock, base_width * 2**stage, 2, stride=1 if stage == 0 else 2)
            setattr(network, f"layer{stage + 1}", layer)
        if small_stem:
            network.maxpool = nn.Identity()
    network.fc = nn.Identity()
    return network


def views(size: int, channels: int) -> MoCoV2Transform:
    """Two v2 views of a Pillow picture, with the values of the paper, which are also moco's."""
    normalize = {"mean": [0.449], "std": [0.226]} if channels == 1 else None
    return MoCoV2Transform(
        input_size=size,
        cj_prob=0.8,
        cj_bright=0.4,
        cj_contrast=0.4,
        cj_sat=0.4,
        cj_hue=0.1,
        min_scale=0.2,
        random_gray_scale=0.2,
        gaussian_blur=0.5,
        sigmas=(0.1, 2),
        **({"normalize": normalize} if normalize else {}),
    )


def train(
    data: Path | np.ndarray,
    *,
    size: int,
    channels: int,
    batch_size: int,
    base_width: int,
    small_stem: bool,
    queue_size: int,
    workers: int,
    steps: int,
    tick: Callable[[], object],
) -> None:
    """Train for so many steps on a folder or an array of gray pictures. `tick` is called as each batch arrives."""
    transform = views(size, channels)
    dataset = (
        Pictures(data, transform, channels)
        if isinstance(data, np.ndarray)
        else LightlyDataset(str(data), transform=transform)
    )
    # As one long epoch, so that the workers are not started anew in between.
    epochs = -(-steps * batch_size // len(dataset)) + 1
    loader = DataLoader(
        ConcatDataset([dataset] * epochs), batch_size, shuffle=True, drop_last=True, num_workers=workers
    )
    backbone, head = resnet18(channels, base_width, small_stem), MoCoProjectionHead(base_width * 8, base_width * 8, 128)
    backbone_momentum, head_momentum = copy.deepcopy(backbone), copy.deepcopy(head)
    deactivate_requires_grad(backbone_momentum)
    deactivate_requires_grad(head_momentum)
    criterion = NTXentLoss(temperature=0.2, memory_bank_size=(queue_size, 128))
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.06)
    total = 0.0
    for step, batch in enumerate(loader):
        tick()
        if step == steps:
            return
        view_q, view_k = batch[0]
        update_momentum(backbone, backbone_momentum, m=MOMENTUM)
        update_momentum(head, head_momentum, m=MOMENTUM)
        query = head(backbone(view_q).flatten(start_dim=1))
        key = head_momentum(backbone_momentum(view_k).flatten(start_dim=1)).detach()
        loss = criterion(query, key)
        total += loss.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
