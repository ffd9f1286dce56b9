"""Average precision of boxes and masks, as COCO counts it (pycocotools, by torchmetrics)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moco.data.reading import Unreadable
from moco.detection.batches import Target, example
from moco.detection.marked import MarkedSet
from moco.evaluate.features import AUTOCAST, Precision

BOXES = {"map": "AP", "map_50": "AP50", "map_75": "AP75"}
MASK = 0.5
"""Probability from which a pixel belongs to an object."""


def average_precision(pairs: Iterable[tuple[Target, Target]], *, masks: bool) -> dict[str, float]:
    """AP (mean over the overlaps 0.5, 0.55 … 0.95), AP50 and AP75 of boxes, and `mask AP` … of masks, from 0 to 1.

    pairs: for each picture what was found (boxes, labels, scores, and masks (n, H, W) bool) and what is there (boxes,
    labels, iscrowd, and masks). The mean is over classes of which there are objects. 100 objects a picture count.
    """
    with warnings.catch_warnings(action="ignore"):  # its own optional parts
        from torchmetrics.detection import MeanAveragePrecision

    kinds: Any = ("bbox", "segm") if masks else ("bbox",)
    metric = MeanAveragePrecision(iou_type=kinds, backend="pycocotools")
    metric.warn_on_many_detections = False
    for found, there in pairs:
        metric.update([found], [there])
    result = metric.compute()
    figures = {}
    for kind in kinds:
        prefix = "mask " if kind == "segm" else ""
        for name, label in BOXES.items():
            value = float(result[f"{kind}_{name}" if len(kinds) > 1 else name])
            figures[prefix + label] = max(value, 0.0)  # −1 where there is nothing to find
    return figures


def score(
    network: nn.Module,
    data: MarkedSet,
    *,
    channels: int,
    masks: bool,
    device: torch.device,
    precision: Precision = "fp32",
    say: Callable[[int], object] = lambda pictures: None,
) -> tuple[dict[str, float], dict[str, str]]:
    """The figures of a detector on marked pictures, and (name, reason) of pictures that could not be read."""
    unreadable: dict[str, str] = {}
    network.to(device).eval()

    def pairs() -> Iterable[tuple[Target, Target]]:
        for marked in data.pictures:
            say(1)
            try:
                one = example(marked, channels, masks=False)
            except Unreadable as error:
                unreadable[error.name] = error.reason
                continue
            there = one.target | {"iscrowd": torch.from_numpy(marked.aside.astype(np.int64))}
            if masks:
                there["masks"] = torch.from_numpy(marked.masks()).bool()
            yield _found(network, one.picture, masks, device, precision), there

    return average_precision(pairs(), masks=masks), unreadable


@torch.no_grad()
def _found(network: nn.Module, picture: Tensor, masks: bool, device: torch.device, precision: Precision) -> Target:
    with torch.autocast(device.type, dtype=AUTOCAST.get(precision), enabled=precision != "fp32"):
        (found,) = network([picture.to(device).float() / 255])
    kept = {name: found[name].cpu() for name in ("boxes", "labels", "scores")}
    kept |= {name: kept[name].float() for name in ("boxes", "scores")}
    if masks:
        kept["masks"] = (found["masks"][:, 0] > MASK).cpu()
    return kept
