"""A minute's measurement on the user's own data and machine: where does a training's time go, and what helps?

The job as a story: settings as `moco pretrain` has them → the parts, one after the other → figures → table and words.

>>> found = moco.bench.measure("photos/", backbone="resnet18", seconds=60)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moco.bench import parts
from moco.bench.advice import table, words
from moco.bench.figures import Figures
from moco.data.loader import cores
from moco.data.sources import ArraySource, Source
from moco.errors import UserError
from moco.pretraining import named, open_data
from moco.recipes import pretrain_settings
from moco.resolve import resolve
from moco.settings import RunSettings
from moco.train.parallel import Processes, best_precision, find_device

SECONDS, FEWEST_SECONDS, MOST_SECONDS = 60.0, 5, 3600
# What each part gets of the time; where one does not apply, the others share its part.
SHARES = {"reading": 0.05, "decoding": 0.07, "one worker": 0.15, "all workers": 0.2, "step": 0.2, "job": 0.33}


def benchmark(data: str | Path = "", *, seconds: float = SECONDS, **given: Any) -> Figures:
    """Measure and show a table and at most six lines of words. Otherwise as `measure`."""
    console = Console(soft_wrap=True)
    found = measure(data, seconds=seconds, console=console, **given)
    console.print(table(found))
    for line in words(found):
        console.print(line, highlight=False, markup=False)
    return found


def measure(
    data: Any = "",
    *,
    config: str | Path | None = None,
    seconds: float = SECONDS,
    console: Console | None = None,
    **given: Any,
) -> Figures:
    """Measure each part of a training, in about `seconds` after start-up, and write nothing.

    data, config, given: as for `moco.pretrain`; what concerns only the run folder is not looked at. console: shows the
    progress if it is a terminal. Raises UserError for what `moco.pretrain` would refuse, for memory that does not
    suffice, and for more than one process; TrainingError for a loss that is no number.
    """
    if not FEWEST_SECONDS <= seconds <= MOST_SECONDS:
        raise UserError(f"seconds {seconds:g}: a measurement takes from {FEWEST_SECONDS} to {MOST_SECONDS} seconds")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("bench measures one process: run it without torchrun; N GPUs need N times the pictures")
    asked = pretrain_settings(config, **given, **named(data=data))
    own = Processes(0, 1, find_device(asked.device))
    source = open_data(asked, data)
    settings = resolve(asked, source, own)
    torch.set_num_threads(settings.threads)
    budget = _budget(settings, source, seconds)
    with parts.plain_faults(settings, own.device), _progress(list(budget), console) as announce:
        return _measure_parts(settings, source, own, budget, announce)


def _budget(settings: RunSettings, source: Source, seconds: float) -> dict[str, float]:
    """Seconds of each part that applies."""
    without = {"reading", "decoding"} if isinstance(source, ArraySource) else set()
    if settings.views == "batch":
        without |= {"one worker"}
    shares = {name: share for name, share in SHARES.items() if name not in without}
    return {name: seconds * share / sum(shares.values()) for name, share in shares.items()}


@contextmanager
def _progress(names: list[str], console: Console | None) -> Iterator[Callable[[str], None]]:
    """Shows which part is being measured, on a terminal. Yields a function to say so."""
    columns = (TextColumn("measuring"), BarColumn(None), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = console is None or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=len(names))
        yield lambda part: progress.update(task, description=part, completed=names.index(part))


def _measure_parts(
    settings: RunSettings, source: Source, own: Processes, budget: dict[str, float], announce: Callable[[str], None]
) -> Figures:
    reading, reading_bytes, decoding, side, one_worker = None, None, None, None, None
    shares: list[float] = []
    if "reading" in budget:
        announce("reading")
        reading, reading_bytes, held = parts.read_files(source, settings.seed, budget["reading"])
        announce("decoding")
        with parts.core_share(shares):
            decoding, side = parts.decode_pictures(held, settings.channels, budget["decoding"])
    if "one worker" in budget:
        announce("one worker")
        one_worker = parts.one_worker(settings, source, own, budget["one worker"])
    announce("all workers")
    views = parts.all_workers(settings, source, own, one_worker, budget["all workers"])
    announce("step")
    possible = parts.measurable(settings, source, own, views, budget["step"], budget["job"])
    job = parts.build_job(possible, source, own)
    with parts.core_share(shares) if own.device.type == "cpu" else nullcontext():
        step = parts.step_rate(job, budget["step"])
    announce("job")
    rate, waiting = parts.whole_job(job, budget["job"], step)
    cuda = own.device.type == "cuda"
    return Figures(
        settings=settings,
        images=len(source),
        cores=cores(),
        device=torch.cuda.get_device_name(own.device) if cuda else own.device.type,
        best_precision=best_precision(own.device),
        reading=reading,
        reading_bytes=reading_bytes,
        decoding=decoding,
        side=side,
        one_worker=one_worker,
        views=views,
        step=step,
        step_batch=job.settings.batch_size,
        memory=torch.cuda.max_memory_allocated(own.device) if cuda else None,
        device_memory=torch.cuda.get_device_properties(own.device).total_memory if cuda else None,
        job=rate,
        waiting=waiting,
        undisturbed=min(shares, default=1.0),
    )
