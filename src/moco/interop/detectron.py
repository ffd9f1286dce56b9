"""Export for detectron2: a ResNet's weights under its names, as the authors' conversion writes them (facts only)."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moco.errors import UserError
from moco.interop.network import SELF_CONTAINED, Network

FILE = "model.pkl"
DEPTHS = {"resnet18": 18, "resnet34": 34, "resnet50": 50, "resnet101": 101, "resnet152": 152}


def write_detectron2(network: Network, folder: Path) -> list[str]:
    """A pickled file of arrays, which detectron2 matches with its model. Raises UserError for what it cannot make."""
    settings = network.settings
    plain = settings.stem == "imagenet" and settings.base_width in (None, 64) and settings.channels == 3
    if not network.is_resnet or network.name not in DEPTHS or not plain or network.head is not None:
        raise UserError(
            f"detectron2 makes ResNets ({', '.join(DEPTHS)}) with the usual first layers for 3 channels, and no head: "
            f"this is something else; {SELF_CONTAINED}"
        )
    arrays = {
        detectron2_name(name): value.numpy() for name, value in network.backbone.state_dict().items() if _kept(name)
    }
    content = {"model": arrays, "__author__": "MOCO", "matching_heuristics": True}
    with (folder / FILE).open("wb") as file:
        pickle.dump(content, file)
    mean, std = ([round(255 * value, 4) for value in values] for values in (settings.mean, settings.std))
    return [
        "from detectron2.config import get_cfg",
        "cfg = get_cfg()",
        f'cfg.MODEL.WEIGHTS = str(here / "{FILE}")',
        f"cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.STRIDE_IN_1X1 = {DEPTHS[network.name]}, False",
        'cfg.MODEL.RESNETS.NORM = "SyncBN"  # on one GPU: "BN"; the authors fine-tune it, so nothing is frozen:',
        "cfg.MODEL.BACKBONE.FREEZE_AT = 0",
        f'cfg.INPUT.FORMAT, cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD = "RGB", {mean}, {std}',
    ]


def detectron2_name(name: str) -> str:
    """timm's name of a ResNet's tensor in detectron2's words."""
    name = re.sub(r"^layer(\d)", lambda match: f"res{int(match[1]) + 1}", name)
    if not name.startswith("res"):
        name = f"stem.{name}"
    name = name.replace("downsample.0.", "shortcut.").replace("downsample.1.", "shortcut.norm.")
    return re.sub(r"\bbn(\d)\.", r"conv\1.norm.", name)


def timm_name(name: str) -> str:
    """The way back."""
    name = re.sub(r"^res(\d)", lambda match: f"layer{int(match[1]) - 1}", name).removeprefix("stem.")
    name = name.replace("shortcut.norm.", "downsample.1.").replace("shortcut.", "downsample.0.")
    return re.sub(r"\bconv(\d)\.norm\.", r"bn\1.", name)


def read_back(folder: Path) -> dict[str, Tensor]:
    """The weights in a file that was written just now, under timm's names."""
    with (folder / FILE).open("rb") as file:
        content: Mapping[str, Any] = pickle.load(file)
    return {timm_name(name): torch.from_numpy(np.asarray(array)) for name, array in content["model"].items()}


def _kept(name: str) -> bool:
    return not name.endswith("num_batches_tracked")
