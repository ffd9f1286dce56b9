"""The main job as a story: settings → data → model → loop → run folder.

The module is not called `pretrain`, so that `moco.pretrain` is always the function.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from pydantic import ValidationError
from rich.console import Console
from torch import nn

from moco.contrast.batchnorm import has_batchnorm, split_batchnorm
from moco.contrast.dictionary import Queue
from moco.contrast.encoders import projection_head, resolve_stem
from moco.contrast.moco import MomentumContrast
from moco.data.loader import ViewStream, measure_statistics
from moco.data.sources import ArraySource, Source, open_source
from moco.errors import UserError
from moco.evaluate.monitor import make_monitor
from moco.report.curves import draw_curves
from moco.settings import PretrainSettings, check_names, explain, pretrain_settings
from moco.train.loop import Job, train
from moco.train.parallel import Processes, best_precision, processes
from moco.train.run import SETTINGS, Run, backbone_of, check_new

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# What may differ when a run is continued; everything else would make it another run.
HARMLESS = {
    "data", "out", "epochs", "device", "workers", "threads", "monitor", "monitor_every", "monitor_images", "log_every",
    "checkpoint_every", "keep_checkpoints", "tensorboard",
}  # fmt: skip


def pretrain(
    data: str | Path | np.ndarray | torch.Tensor,
    *,
    config: str | Path | None = None,
    labels: str | np.ndarray | None = None,
    quiet: bool = False,
    **given: Any,
) -> Run:
    """Pre-train an encoder on images without labels and return its run.

    data: a folder of images at any depth, a .npz or .npy file, or uint8 images (N, H, W) or (N, H, W, C) in memory.
    config: a YAML file. given: any field of `moco.PretrainSettings`; see `moco pretrain --help`. labels: for the
    monitor only, never for training; a (N,) array besides what the setting takes. quiet: print nothing.

    Raises UserError for anything wrong with data or settings, before anything is written, and Interrupted after
    Ctrl-C, once the current step is finished and saved.
    """
    if isinstance(data, (str, Path)) and str(data):
        given["data"] = str(data)
    if isinstance(labels, str):
        given["labels"] = labels
    settings = pretrain_settings(config, **given)
    in_memory = isinstance(data, (np.ndarray, torch.Tensor))
    if not in_memory and not settings.data:
        raise UserError("no data: name a folder of images, a .npz or a .npy file (see moco pretrain --help)")
    if not settings.out:
        name = Path(settings.data).stem if settings.data else "array"
        settings = settings.model_copy(update={"out": f"runs/{settings.recipe}-{name}"})
    check_new(settings.out)
    with processes(settings.device) as own:
        images = data if in_memory else settings.data
        source = open_source(images, settings.labels if labels is None or isinstance(labels, str) else labels)
        resolved = resolve(settings, source, own)
        model = build_model(resolved)
        console = _console(own, quiet)
        _show_resolved(console, settings, resolved, source)
        if own.main:
            Run.create(resolved.out, resolved)
        _wait_for_main()
        return _train(resolved, source, own, model, console)


def resume(
    run: str | Path, *, data: np.ndarray | torch.Tensor | str | Path | None = None, quiet: bool = False, **given: Any
) -> Run:
    """Continue a run from its newest checkpoint, or from the start where it has none.

    given: settings that may change (epochs, device, workers, monitor …). data: where the pictures are now, if they
    moved or were given as an array. Raises UserError for a change that would make it another run.
    """
    stored = Run(run).settings
    if isinstance(data, (str, Path)):
        given["data"] = str(data)
    check_names(given, PretrainSettings.model_fields, "setting")
    try:
        settings = PretrainSettings(**(stored.model_dump() | given | {"out": str(run)}))
    except ValidationError as error:
        raise UserError(explain(error)) from error
    for name in given:
        before, now = getattr(stored, name), getattr(settings, name)
        if before != now and name not in HARMLESS:
            raise UserError(f"cannot resume {run} with {name} {now}: the run has {before}; start a new run with another --out")
    with processes(settings.device) as own:
        in_memory = isinstance(data, (np.ndarray, torch.Tensor))
        source = open_source(data if in_memory else settings.data, settings.labels)
        settings = resolve(settings, source, own)
        model = build_model(settings)
        if own.main:
            Run(run).update(settings)
        return _train(settings, source, own, model, _console(own, quiet))


def backbone(run: str | Path) -> nn.Module:
    """The pre-trained query backbone of a run folder: a timm module in eval mode, (N, C, S, S) → (N, num_features)."""
    return Run(run).backbone()


def _train(settings: PretrainSettings, source: Source, own: Processes, model: MomentumContrast, console: Console | None) -> Run:
    assert settings.threads != "auto"
    torch.set_num_threads(settings.threads)
    run = Run(settings.out)
    monitor = make_monitor(source, settings, own.device)
    job = Job(settings, model, build_stream(settings, source, own), run, own, monitor, console)
    if run.checkpoints():
        job.restore(run.load(own.device))
    if own.main:
        run.rewind(job.first_step)
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            job.writer = SummaryWriter(run.path / "tensorboard", purge_step=job.first_step + 1)
    train(job)
    if own.main:
        picture = draw_curves(run)
        if console is not None:
            console.print(f"done: {run.path} (curves: {picture})", highlight=False)
    return run


def resolve(settings: PretrainSettings, source: Source, own: Processes) -> PretrainSettings:
    """Replace every `auto` by what it means for this data and machine. Raises UserError where things do not fit."""
    _check_batch(settings, source, own)
    channels = settings.channels if settings.channels != "auto" else source.channels or 3
    values: dict[str, Any] = {"channels": channels, "device": str(own.device)}
    network = backbone_of(settings.model_copy(update=values))
    values["stem"] = resolve_stem(settings.stem, network, settings.image_size)
    values |= _statistics(settings, source, channels)
    values |= _batchnorm(settings, has_batchnorm(network), own)
    values["queue_size"] = settings.queue_size
    if settings.queue_size == "auto":
        # The papers' 65,536 where there are enough images; else at most half of them, so that a key is not usually
        # followed around the queue by older keys of its own image.
        values["queue_size"] = min(65_536, 2 ** max((len(source) // 2).bit_length() - 1, 0))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = max(cores // own.world, 1)
    batched = settings.views == "batch" or (settings.views == "auto" and _worth_batching(source, own.device))
    if batched and not isinstance(source, ArraySource):
        raise UserError("views batch needs images held in memory as one array (.npy, .npz); use --views image")
    values["views"] = "batch" if batched else "image"
    if settings.workers == "auto":
        on_cpu = min(2, cores)  # training needs the same cores
        values["workers"] = 0 if batched else on_cpu if own.device.type == "cpu" else min(cores, 16)
    values["threads"] = cores if settings.threads == "auto" else settings.threads
    values["precision"] = best_precision(own.device) if settings.precision == "auto" else settings.precision
    if values["precision"] == "fp16" and own.device.type != "cuda":
        raise UserError(f"precision fp16 needs a CUDA device, not {own.device.type}; use bf16 or fp32")
    values["monitor"] = settings.monitor
    if settings.monitor == "auto":
        values["monitor"] = "knn" if source.labels is not None else "retrieval"
    if values["monitor"] == "knn" and source.labels is None:
        raise UserError("monitor knn needs labels: sub-folders, y in the .npz, or --labels FILE.npy; or --monitor retrieval")
    return settings.model_copy(update=values)


def _check_batch(settings: PretrainSettings, source: Source, own: Processes) -> None:
    if len(source) < settings.batch_size:
        raise UserError(
            f"{settings.data or 'the data'} has {len(source)} images, fewer than one batch of {settings.batch_size}: "
            f"set --batch-size {len(source)} or lower"
        )
    pieces = own.world * settings.accumulate
    if settings.batch_size % pieces:
        raise UserError(
            f"batch_size {settings.batch_size} does not divide into {own.world} processes × accumulate "
            f"{settings.accumulate}: set --batch-size {settings.batch_size // pieces * pieces or pieces}"
        )


def _statistics(settings: PretrainSettings, source: Source, channels: int) -> dict[str, Any]:
    mean, std = settings.mean, settings.std
    if "auto" in (mean, std):
        found = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else measure_statistics(source, channels)
        mean = tuple(round(float(value), 4) for value in found[0]) if mean == "auto" else mean
        std = tuple(max(round(float(value), 4), 1e-3) for value in found[1]) if std == "auto" else std
    for name, value in (("mean", mean), ("std", std)):
        if len(value) != channels:
            raise UserError(f"{name} has {len(value)} values, but the images have {channels} channels")
    return {"mean": mean, "std": std}


def _batchnorm(settings: PretrainSettings, normalised: bool, own: Processes) -> dict[str, Any]:
    """How batch norm is kept from leaking: groups in one process, shuffling between groups and processes."""
    rows = settings.batch_size // own.world // settings.accumulate
    groups = settings.bn_groups
    if groups == "auto":
        # The authors' 8 groups, if each keeps 16 images or more. Several processes are groups already.
        groups = max(1, min(8, rows // 16)) if normalised and own.world == 1 else 1
    if groups > 1 and groups * 2 > rows:
        raise UserError(f"bn_groups {groups} leaves fewer than 2 of {rows} images in a group: set --bn-groups {max(rows // 2, 1)}")
    shuffle = settings.shuffle_bn
    useful = normalised and (groups > 1 or own.world > 1)
    if shuffle is True and not useful:
        why = "one group on one process: set --bn-groups 2 or more" if normalised else "the backbone has no batch norm"
        raise UserError(f"shuffle_bn changes nothing here ({why}, or --shuffle-bn false)")
    return {"bn_groups": groups, "shuffle_bn": useful if shuffle == "auto" else shuffle}


def _worth_batching(source: Source, device: torch.device) -> bool:
    if not isinstance(source, ArraySource) or max(source.images.shape[1:3]) > 96:
        return False
    # On a CPU, colour operations on a whole batch of floats cost more than on one picture of bytes at a time.
    return device.type != "cpu" or source.images.shape[3] == 1


def build_model(settings: PretrainSettings) -> MomentumContrast:
    """The model that resolved settings describe, from their seed."""
    assert settings.queue_size != "auto"
    assert settings.bn_groups != "auto"
    assert settings.shuffle_bn != "auto"
    torch.manual_seed(settings.seed)
    network = backbone_of(settings)
    head = projection_head(settings.head, int(network.num_features), settings.feature_size)
    if settings.bn_groups > 1:
        split_batchnorm(network, settings.bn_groups)
    return MomentumContrast(
        network,
        head,
        dictionary=Queue(settings.queue_size, settings.feature_size, seed=settings.seed),
        momentum=settings.momentum,
        temperature=settings.temperature,
        symmetric=settings.symmetric,
        shuffle_bn=settings.shuffle_bn,
        seed=settings.seed,
    )


def build_stream(settings: PretrainSettings, source: Source, own: Processes) -> ViewStream:
    """The stream of view pairs that resolved settings describe, this process's share of it."""
    assert settings.channels != "auto"
    assert settings.workers != "auto"
    assert settings.views != "auto"
    return ViewStream(
        source,
        query=settings.query_views,
        key=settings.key_views,
        size=settings.image_size,
        channels=settings.channels,
        batch_size=settings.batch_size,
        seed=settings.seed,
        workers=settings.workers,
        way=settings.views,
        device=own.device,
        rank=own.rank,
        world=own.world,
    )


def _console(own: Processes, quiet: bool) -> Console | None:
    return Console(soft_wrap=True) if own.main and not quiet else None


def _show_resolved(console: Console | None, asked: PretrainSettings, found: PretrainSettings, source: Source) -> None:
    if console is None:
        return
    before: Mapping[str, Any] = asked.model_dump()
    chosen = [f"{name} {_short(value)}" for name, value in found.model_dump().items() if before[name] == "auto" != value]
    console.print(f"{len(source):,} images · auto settings: {', '.join(chosen)}", highlight=False, markup=False)
    console.print(f"run folder: {found.out} (all values in {SETTINGS})", highlight=False, markup=False)


def _short(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...") if not isinstance(value, tuple) else "/".join(map(str, value))


def _wait_for_main() -> None:
    if dist.is_initialized():
        dist.barrier()
