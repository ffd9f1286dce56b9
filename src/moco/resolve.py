"""What every `auto` means for this data and this machine, and whether settings, data and machine fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import nn

from moco.contrast.batchnorm import has_batchnorm
from moco.contrast.encoders import build_backbone, feature_width, resolve_stem
from moco.contrast.own import is_own
from moco.data.loader import cores, readable, small_in_memory
from moco.data.sources import ArraySource, Source
from moco.data.statistics import measure_statistics
from moco.errors import UserError, counted
from moco.settings import PretrainSettings, RunSettings, explain
from moco.train.parallel import Processes, best_precision

FOLLOWED = 5
"""Times that a key encoder forgets its beginning in a training, at least: of 1/(1 − m) steps each."""
WARMUP = {"sgd": (0.0, 0.0), "lars": (0.1, 10.0), "adamw": (2 / 15, 40.0)}
"""Share of the epochs, and epochs at most: [v1] and [v2] have none, [v3] 10 of 100 and 40 of 300."""


def resolve(
    settings: PretrainSettings,
    source: Source,
    own: Processes,
    trained_by: int | None = None,
    *,
    prepared: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> RunSettings:
    """Replace every `auto`. Raises UserError, before anything is written, where something does not fit.

    trained_by: of a run that is continued, the number of processes before; where there are more or fewer now, batch
    norm keeps its groups as well as it can. prepared: mean and deviation of the pictures that made the weights to start
    from, per channel.
    """
    _check_batch(settings, source, own)
    if settings.method == "cpc" and settings.compile:
        raise UserError("compile does nothing for method cpc, which encodes by the backbone alone: leave --compile out")
    channels = source.channels or 3 if settings.channels == "auto" else settings.channels
    readable(source, 0, channels)  # a data set of which nothing can be read is better refused now
    network = build_backbone(
        settings.backbone,
        channels=channels,
        stem=settings.stem,
        base_width=settings.base_width,
        image_size=settings.image_size,
        vit_rules=settings.vit_rules,
        keep_tokens=settings.keep_tokens,
    )
    width = feature_width(network, channels, settings.image_size)
    if settings.small_crops:
        _check_small_crops(settings, network, channels)
    values = {
        # A run can be continued from any folder.
        "data": absolute(settings.data),
        "cache": absolute(settings.cache),
        "init": settings.init if settings.init == "timm" else absolute(settings.init),
        "channels": channels,
        # The number of a CUDA device differs from process to process; it is kept only where it was asked for.
        "device": settings.device if ":" in settings.device else own.device.type,
        "stem": "imagenet" if is_own(settings.backbone) else resolve_stem(settings.stem, network, settings.image_size),
        "precision": _precision(settings, own.device),
        "monitor": _monitor(settings, source),
        "queue_size": _queue_size(settings, len(source)),
        "small_crop_size": settings.small_size if settings.small_crops else settings.small_crop_size,
        "head_width": width if settings.head_width == "auto" else settings.head_width,
        **_statistics(settings, source, channels, prepared),
        **_pace(settings, len(source)),
        **_batchnorm(settings, network, own, trained_by),
        "processes": own.world,
        **_work(settings, source, own),
    }
    try:
        return RunSettings(**(settings.model_dump() | values))
    except ValidationError as error:
        raise UserError(explain(error)) from error


def absolute(data: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Paths that mean the same from any folder; what is no path stays as it is."""
    if not isinstance(data, str):
        return tuple(str(absolute(item)) for item in data)
    if not data or "://" in data or data.startswith("hf:"):
        return data
    return str(Path(data).expanduser().absolute())


def _check_batch(settings: PretrainSettings, source: Source, own: Processes) -> None:
    rows = settings.batch_size // own.world // settings.accumulate
    if rows < 2:
        raise UserError(
            f"batch_size {settings.batch_size} over {counted(own.world, 'process', 'processes')} × accumulate "
            f"{settings.accumulate} is one picture at a time: two or more are needed for batch statistics"
        )
    if len(source) * settings.repeat < 2:
        raise UserError(f"{settings.data_name} has 1 image: there is no other to tell it from; add more")
    if len(source) * settings.repeat < settings.batch_size:
        raise UserError(
            f"{settings.data_name} has {counted(len(source), 'image')}, fewer than one batch of {settings.batch_size}: "
            f"set --batch-size {len(source) * settings.repeat} or lower, or --repeat "
            f"{-(-settings.batch_size // len(source))} for as many views of each"
        )
    pieces = own.world * settings.accumulate
    if settings.batch_size % pieces:
        raise UserError(
            f"batch_size {settings.batch_size} does not divide into {counted(own.world, 'process', 'processes')} × "
            f"accumulate {settings.accumulate}: set --batch-size {settings.batch_size // pieces * pieces or pieces}"
        )


def _check_small_crops(settings: PretrainSettings, network: nn.Module, channels: int) -> None:
    try:
        feature_width(network, channels, settings.small_size)
    except UserError as error:
        raise UserError(
            f"small_crops: {error}; set another --small-crop-size, another --backbone, or --small-crops 0"
        ) from error


def _precision(settings: PretrainSettings, device: torch.device) -> str:
    precision = best_precision(device) if settings.precision == "auto" else settings.precision
    if precision == "fp16" and device.type != "cuda":
        raise UserError(f"precision fp16 needs a CUDA device, not {device.type}; use bf16 or fp32")
    return precision


def _monitor(settings: PretrainSettings, source: Source) -> str:
    labels = source.labels
    useful = labels is not None and len(np.unique(labels[labels >= 0])) > 1
    if settings.monitor == "auto":
        return "knn" if useful else "retrieval"
    if settings.monitor == "knn" and not useful:
        raise UserError(
            "monitor knn needs labels of two classes or more: sub-folders, y in the .npz, --labels FILE.npy (in Python "
            "labels=ARRAY); or --monitor retrieval"
        )
    return settings.monitor


def _queue_size(settings: PretrainSettings, images: int) -> int:
    if settings.queue_size != "auto":
        return settings.queue_size
    # The papers' 65,536 where there are enough images; else the power of two below half of them, so that a key is
    # not usually followed around the queue by older keys of its own image.
    return min(65_536, 1 << max((images // 2).bit_length() - 1, 0))


def _pace(settings: PretrainSettings, images: int) -> dict[str, Any]:
    """Momentum and warm-up, by the number of steps."""
    steps = settings.epochs * (images * settings.repeat // settings.batch_size)
    momentum, warmup = settings.momentum, settings.warmup_epochs
    if momentum == "auto":
        momentum = min(0.999, round(1 - FOLLOWED / max(steps, 2 * FOLLOWED), 4))
    if warmup == "auto":
        share, most = WARMUP[settings.optimizer]
        warmup = min(round(share * settings.epochs, 2), most)
    return {"momentum": momentum, "warmup_epochs": warmup}


def _statistics(
    settings: PretrainSettings,
    source: Source,
    channels: int,
    prepared: tuple[tuple[float, ...], tuple[float, ...]] | None,
) -> dict[str, Any]:
    mean, std = settings.mean, settings.std
    if mean == std == "auto" and prepared is not None and len(prepared[0]) == channels:
        mean, std = prepared
    if mean == "auto" or std == "auto":
        found = measure_statistics(source, channels)
        mean = tuple(round(value, 4) for value in found[0]) if mean == "auto" else mean
        std = tuple(round(value, 4) for value in found[1]) if std == "auto" else std
    for name, value in (("mean", mean), ("std", std)):
        if len(value) != channels:
            held = counted(channels, "channel")
            raise UserError(f"{name} has {counted(len(value), 'value')}, but the images have {held}")
    return {"mean": mean, "std": std}


def _batchnorm(
    settings: PretrainSettings, network: nn.Module, own: Processes, trained_by: int | None
) -> dict[str, Any]:
    """How batch norm is kept from leaking: groups in one process, shuffling between groups and processes."""
    if settings.method != "moco":
        return _batchnorm_of_rivals(settings)
    rows = settings.batch_size // own.world // settings.accumulate
    normalised = has_batchnorm(network)
    if normalised and trained_by not in (None, own.world):
        settings = _regrouped(settings, trained_by or 1, own.world)
    # auto: the authors' 8 groups, if each keeps 16 images or more. Several processes are groups already.
    usual = max(1, min(8, rows // 16)) if normalised and own.world == 1 else 1
    groups = usual if settings.bn_groups == "auto" else settings.bn_groups
    if groups > 1 and groups * 2 > rows:
        raise UserError(
            f"bn_groups {groups} leaves fewer than 2 of {rows} images in a group: set --bn-groups {max(rows // 2, 1)}"
        )
    useful = normalised and (groups > 1 or own.world > 1)
    if settings.shuffle_bn is True and not useful:
        why = "one group on one process: set --bn-groups 2 or more" if normalised else "the backbone has no batch norm"
        raise UserError(f"shuffle_bn changes nothing here ({why}, or --shuffle-bn false)")
    return {"bn_groups": groups, "shuffle_bn": useful if settings.shuffle_bn == "auto" else settings.shuffle_bn}


def _regrouped(settings: PretrainSettings, before: int, now: int) -> PretrainSettings:
    """For `now` processes, as many groups in all as `before` had, or as near to it as there can be.

    The groups are then the same pictures, shuffled by the same numbers: the training is the same to rounding.
    """
    groups = before * (1 if settings.bn_groups == "auto" else settings.bn_groups)
    shuffle = settings.shuffle_bn if groups > 1 else "auto"
    return settings.model_copy(update={"bn_groups": max(1, round(groups / now)), "shuffle_bn": shuffle})


def statistics_change(before: RunSettings, now: RunSettings) -> str | None:
    """What a continued run's batch norm sees differently from before, in words, or None for nothing."""
    counts = [(one.processes or 0, one.bn_groups) for one in (before, now)]
    (old, old_groups), (new, new_groups) = counts
    if old == 0 or now.sync_bn or old * old_groups == new * new_groups:
        return None
    sizes = [now.batch_size / (now.accumulate * count * groups) for count, groups in counts]
    return (
        f"batch norm: {sizes[1]:g} pictures are normalised together from here on, {sizes[0]:g} before ({new} processes "
        f"× {new_groups} groups cannot be the {old} × {old_groups} there were)"
    )


def _batchnorm_of_rivals(settings: PretrainSettings) -> dict[str, Any]:
    """Their batches are normalised as a whole."""
    if settings.shuffle_bn is True or settings.bn_groups not in ("auto", 1):
        name = "shuffle_bn" if settings.shuffle_bn is True else "bn_groups"
        raise UserError(
            f"{name} is for method moco: {settings.method} normalises a process's batch as a whole; leave it out"
        )
    return {"bn_groups": 1, "shuffle_bn": False}


def _work(settings: PretrainSettings, source: Source, own: Processes) -> dict[str, Any]:
    """Who makes the views, with how many processes, and how many threads train."""
    if settings.views == "batch" and not isinstance(source, ArraySource):
        raise UserError("views batch needs images held in memory as one array (.npy, .npz); use --views image")
    views: str = settings.views
    if views == "auto":
        on_cpu = own.device.type == "cpu"
        views = "batch" if small_in_memory(source) else "image" if on_cpu else "split"
    share = max(cores() // own.world, 1)
    workers = settings.workers
    if workers == "auto":
        # On a CPU, training needs the same cores; a GPU wants to be fed.
        most = 2 if own.device.type == "cpu" else 16
        workers = 0 if views == "batch" else min(share, most)
    return {
        "views": views,
        "workers": workers,
        "threads": share if settings.threads == "auto" else settings.threads,
    }
