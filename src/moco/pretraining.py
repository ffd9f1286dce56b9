"""The main job as a story: settings → data → model → loop → run folder.

The module is not called `pretrain`, so that `moco.pretrain` is always the function.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from pydantic import ValidationError
from rich.console import Console
from torch import nn

from moco.building import build_model
from moco.contrast.batchnorm import has_batchnorm, synchronise
from moco.contrast.method import Method
from moco.contrast.own import know
from moco.contrast.vit import few_patches
from moco.data.colour import without_meaning
from moco.data.loader import ViewStream
from moco.data.own_views import MISSING, OwnView
from moco.data.sources import Source, open_source
from moco.data.sources.opening import KINDS
from moco.errors import UserError, counted
from moco.evaluate.monitor import make_monitor
from moco.recipes import ONLY_FOR, pretrain_settings
from moco.report.curves import draw_curves
from moco.resolve import absolute, resolve, statistics_change
from moco.settings import PretrainSettings, RunSettings, check_names, explain
from moco.starting import find_start, start_from
from moco.train.callbacks import Callback, Callbacks
from moco.train.checkpoints import with_patience
from moco.train.compiling import compile_encoders
from moco.train.job import Job, Writer
from moco.train.lock import RunLock
from moco.train.loop import train
from moco.train.parallel import Processes, processes, restarted
from moco.train.run import SETTINGS, Run, check_new
from moco.train.trackers import Several, TensorBoard, open_trackers, wanted

Array = np.ndarray[Any, Any]

MOST_NAMES = 64
"""Paths that are kept among the settings; a longer list is data in memory."""

# What may differ when a run is continued; everything else would make it another run.
HARMLESS = {
    "data", "labels", "cache", "cache_gigabytes", "out", "epochs", "device", "precision", "workers", "threads",
    "compile", "monitor", "monitor_every", "monitor_images", "log_every", "checkpoint_every", "save_every",
    "keep_checkpoints", "on_nan", "timeout", "tensorboard",
    "wandb", "mlflow",
}  # fmt: skip


def pretrain(
    data: Any,
    *,
    config: str | Path | None = None,
    labels: str | Path | Array | None = None,
    quiet: bool = False,
    on_step: Callback | None = None,
    on_epoch: Callback | None = None,
    **given: Any,
) -> Run:
    """Pre-train an encoder on images without labels and return its run.

    data: a folder of images at any depth, or whatever else `moco.data.sources.open_source` takes: lists, shards,
    tables, files of arrays, uint8 images (N, H, W) or (N, H, W, C) in memory, a sequence or torch data set of images.
    config: a YAML file. given: any field of `moco.PretrainSettings`; see `moco pretrain --help`. backbone may also be a
    function that makes a module, or a module (N, C, S, S) → (N, D), and views a function (picture uint8 (H, W, C),
    numpy.random.Generator) → view uint8 (S, S, C), which a resume must be handed again. labels: for the
    monitor only, never for training; a (N,) array besides what the setting takes. quiet: print nothing.
    on_step, on_epoch: called after each step and each epoch with a `moco.Progress`, on the main process. StopIteration
    out of them ends the training well.

    Raises UserError for anything wrong with data or settings, before anything is written; and once the current step is
    finished and saved, Interrupted after Ctrl-C, and whatever else comes out of on_step and on_epoch.
    """
    view = _own_code(given)
    settings = pretrain_settings(config, **given, **named(data=data, labels=labels))
    if not settings.out:
        first = settings.data if isinstance(settings.data, str) else settings.data[0]
        name = re.sub(r"[^\w.-]+", "-", Path(first).stem).strip("-") if first else "array"
        settings = settings.model_copy(update={"out": f"runs/{settings.recipe}-{name}"})
    if restarted() and (Path(settings.out) / SETTINGS).exists():  # the run is this one's own: go on with it
        views = {} if view is None else {"views": view}
        return resume(settings.out, data=data, labels=labels, quiet=quiet, on_step=on_step, on_epoch=on_epoch, **views)
    wanted(settings)
    _check_views(settings, view)
    check_new(settings.out)  # before the processes meet below: after that, the first may make the folder
    with processes(settings.device, settings.timeout) as own:
        source = open_data(settings, data, labels)
        start = find_start(settings)
        resolved = resolve(settings, source, own, prepared=(start.mean, start.std) if start is not None else None)
        model = build_model(resolved, len(source))
        started = start_from(model, start, settings) if start is not None else None
        if own.main:
            Run.create(resolved.out, resolved)
        _wait_for_main()
        console = _console(own, quiet)
        _show_resolved(console, settings, resolved, source, model)
        if started is not None and console is not None:
            console.print(f"starting from {settings.init}: {started}", highlight=False, markup=False)
        return _train(resolved, source, own, model, console, Callbacks(on_step, on_epoch), view)


def resume(
    run: str | Path,
    *,
    data: Any = None,
    labels: str | Path | Array | None = None,
    quiet: bool = False,
    on_step: Callback | None = None,
    on_epoch: Callback | None = None,
    **given: Any,
) -> Run:
    """Continue a run from its newest checkpoint, or from the start where it has none.

    given: settings that may change (epochs, device, workers, monitor …). data, labels: where they are now, if they
    moved or were given as arrays. on_step, on_epoch: as for `pretrain`. Raises UserError for a change that would make
    it another run.
    """
    stored = Run(run).settings
    view = _own_code(given)
    given |= named(data=data, labels=labels)
    check_names(given, PretrainSettings.model_fields, "setting")
    try:
        settings = PretrainSettings(**(stored.model_dump(exclude={"processes"}) | given | {"out": str(run)}))
    except ValidationError as error:
        raise UserError(explain(error)) from error
    for name in given:
        before, now = getattr(stored, name), getattr(settings, name)
        if before != now and name not in HARMLESS:
            raise UserError(
                f"cannot resume {run} with {name} {now}: the run has {before}; start a new run with another --out"
            )
    wanted(settings)
    _check_views(settings, view)
    if data is None and not settings.data:
        raise UserError(f"{run} was trained on an array in memory: moco.resume({str(run)!r}, data=ARRAY)")
    with processes(settings.device, settings.timeout) as own:
        source = open_data(settings, data, labels)
        resolved = resolve(settings, source, own, trained_by=stored.processes)
        model = build_model(resolved, len(source))
        console = _console(own, quiet)
        change = statistics_change(stored, resolved) if has_batchnorm(model) else None
        if console is not None and change is not None:
            console.print(change, highlight=False, markup=False)
        return _train(resolved, source, own, model, console, Callbacks(on_step, on_epoch), view)


def _own_code(given: dict[str, Any]) -> OwnView | None:
    """Put names in the place of functions of the user among the settings; returns the one that makes views."""
    if not isinstance(given.get("backbone", ""), str):
        given["backbone"] = know(given["backbone"])
    view = given.get("views")
    if not callable(view):
        return None
    given["views"] = "custom"
    made: OwnView = view
    return made


def _check_views(settings: PretrainSettings, view: OwnView | None) -> None:
    if settings.views == "custom" and view is None:
        raise UserError(MISSING)


def named(**values: object) -> dict[str, Any]:
    """Those of the values that name files or folders: they are settings. What is in memory is not."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        several = isinstance(value, (list, tuple)) and all(isinstance(item, (str, Path)) for item in value)
        if isinstance(value, (str, Path)) and str(value):
            found[name] = str(value)
        elif several and isinstance(value, (list, tuple)) and 0 < len(value) <= MOST_NAMES:
            found[name] = str(value[0]) if len(value) == 1 else tuple(map(str, value))
    return found


def open_data(settings: PretrainSettings, data: object, labels: object = None) -> Source:
    """The pictures: `data` where it is in memory, else those that the settings name.

    Raises UserError where there are none.
    """
    in_memory = not (data is None or named(data=data) or (isinstance(data, str) and not data))
    if not in_memory and not settings.data:
        raise UserError(f"no data: name {KINDS} (see moco pretrain --help)")
    given = settings.labels if labels is None or isinstance(labels, (str, Path)) else np.asarray(labels)
    # The names of pictures from several places begin with the place: after a resume they must be the same.
    named_data = settings.data if isinstance(settings.data, str) else absolute(settings.data)
    return open_source(
        data if in_memory else named_data,
        given,
        cache=settings.cache or None,
        cache_bytes=int(settings.cache_gigabytes * 2**30),
    )


def backbone(run: str | Path, *, backbone: Any = None) -> nn.Module:
    """The pre-trained query backbone of a run folder: a timm module in eval mode, (N, C, S, S) → (N, num_features).

    backbone: what the run was trained with, where that was a function or module of your own. From then on this process
    knows it, so that `moco.embed` and the evaluations work as well. Raises UserError where it is another.
    """
    opened = Run(run)
    if backbone is not None:
        name, stored = know(backbone), opened.settings.backbone
        if name != stored:
            raise UserError(f"{opened.path} was trained with backbone {stored}, not {name}")
    return opened.backbone()


def _train(
    settings: RunSettings,
    source: Source,
    own: Processes,
    model: Method,
    console: Console | None,
    callbacks: Callbacks,
    view: OwnView | None,
) -> Run:
    torch.set_num_threads(settings.threads)
    if settings.sync_bn and own.world > 1 and not synchronise(model, own.device) and console is not None:
        console.print("sync_bn: on CUDA devices only; here each process normalises its own part of a batch")
    run = Run(settings.out)
    stream = build_stream(settings, source, own, view)
    monitor = make_monitor(source, settings, own.device, stream)
    job = Job(settings, model, stream, run, own, monitor, console, callbacks=callbacks)
    with contextlib.closing(stream), _alone(run) if own.main else contextlib.nullcontext() as job.lock:
        if run.checkpoints():
            job.restore(run.load())
        if job.first_step:
            job.say(f"{run.path}: going on after step {job.first_step} of {job.steps}")
        if job.first_step == job.steps:
            job.say(f"{run.path} is finished ({counted(settings.epochs, 'epoch')}); more with --epochs")
        with _records(job):
            if settings.compile:
                compile_encoders(model, own.device, console)
            train(job)
        if own.main:
            job.say(f"done: {run.path} (curves: {draw_curves(run)})")
    return run


@contextlib.contextmanager
def _alone(run: Run) -> Iterator[RunLock]:
    lock = RunLock(run.path)
    lock.take()
    try:
        yield lock
    finally:
        lock.release()


@contextlib.contextmanager
def _records(job: Job) -> Iterator[None]:
    """What a run writes down from here on, put back to where the training goes on. Main process only."""
    if not job.processes.main:
        yield
        return
    with_patience(lambda: job.run.update(job.settings), job.say)
    with_patience(lambda: job.run.rewind(job.first_step), job.say)
    with contextlib.ExitStack() as stack:
        writers: list[Writer] = []
        if job.settings.tensorboard:
            curves = TensorBoard(job.run, job.first_step, job.say)
            writers.append(stack.enter_context(contextlib.closing(curves)))
        writers += stack.enter_context(open_trackers(job.run, job.settings, job.say))
        job.writer = Several(writers)
        yield


def build_stream(settings: RunSettings, source: Source, own: Processes, view: OwnView | None = None) -> ViewStream:
    """The stream of view pairs that resolved settings describe, this process's share of it.

    view: the function that makes them, where the settings say custom.
    """
    return ViewStream(
        source,
        query=settings.query_views,
        key=settings.key_views,
        size=settings.image_size,
        small=settings.small_views,
        small_size=settings.small_size,
        channels=settings.channels,
        batch_size=settings.batch_size,
        repeat=settings.repeat,
        seed=settings.seed,
        workers=settings.workers,
        way=settings.views,
        own_view=view,
        device=own.device,
        rank=own.rank,
        world=own.world,
    )


def _console(own: Processes, quiet: bool) -> Console | None:
    return Console(soft_wrap=True) if own.main and not quiet else None


def _show_resolved(
    console: Console | None, asked: PretrainSettings, found: RunSettings, source: Source, model: Method
) -> None:
    if console is None:
        return
    before: Mapping[str, Any] = asked.model_dump()
    chosen = [
        f"{name} {_short(value)}"
        for name, value in found.model_dump().items()
        if before.get(name) == "auto" != value and found.method in ONLY_FOR.get(name, (found.method,))
    ]
    few = few_patches(model.backbone, found.backbone, found.image_size, found.keep_tokens)
    for notice in filter(None, (*source.notices, few, _left_out(found))):
        console.print(notice, highlight=False, markup=False)
    steps, left = divmod(len(source) * found.repeat, found.batch_size)
    if left:
        console.print(
            f"{counted(steps, 'step')} of {found.batch_size} in an epoch; {counted(left, 'image')} left over, not "
            "enough for a batch: others each time",
            highlight=False,
        )
    images = counted(len(source), "image")
    console.print(f"{images} · auto settings: {', '.join(chosen)}", highlight=False, markup=False)
    console.print(f"run folder: {found.out} (all values in {SETTINGS})", highlight=False, markup=False)


def _left_out(found: RunSettings) -> str | None:
    """What to say of colour operations that have no meaning for these pictures."""
    views = [] if found.views == "custom" else [found.query_views, found.key_views]
    names = list(dict.fromkeys(name for view in views for name in without_meaning(view, found.channels)))
    if not names:
        return None
    return (
        f"pictures of {counted(found.channels, 'channel')} have no colours: {', '.join(names)} left out; --gain and "
        "--noise vary intensities"
    )


def _short(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...")
        if not isinstance(value, tuple)
        else "/".join(map(str, value))
    )


def _wait_for_main() -> None:
    if dist.is_initialized():
        dist.barrier()
