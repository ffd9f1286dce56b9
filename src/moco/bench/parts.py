"""The parts of a training, measured one by one: reading, decoding, views, the model step, and everything together."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch

from moco.building import build_model
from moco.data.decode import DecodeError, decode
from moco.data.device import place, prefetch
from moco.data.loader import Batch, ViewStream, cores, permutation
from moco.data.sources import Source
from moco.errors import TrainingError, UserError
from moco.pretraining import build_stream
from moco.settings import RunSettings
from moco.train.compiling import compile_encoders
from moco.train.guard import NotFinite
from moco.train.job import Job
from moco.train.loop import optimise
from moco.train.parallel import Processes
from moco.train.run import NoRun

HELD_BYTES = 128 * 2**20  # encoded pictures kept to be decoded again and again
CHUNK_SECONDS = 0.25  # of a worker's time for a batch, where only the workers are measured
PROBE, PICTURES = 16, 64  # images of the first, smallest step; different pictures in the batch of a measured step
LEAST_STEPS = 3
MANY_STEPS = 1_000_000
STILL = 0.0  # the learning rate: the weights stay as they are, so that no repetition can spoil them

clock = time.perf_counter


def _rate(
    work: Iterable[int], seconds: float, device: torch.device | None = None, *, least: int = 1, whole: int = 1
) -> float:
    """Pictures per second of `work`, which yields how many it has just done: all pictures by all the time.

    Stops after `seconds`, at least `least` turns and a multiple of `whole` turns, and then waits for `device`.
    """
    began, done = clock(), 0
    for turn, count in enumerate(work, start=1):
        done += count
        if turn >= least and turn % whole == 0 and clock() - began >= seconds:
            break
    _settle(device)
    return done / (clock() - began)


def _settle(device: torch.device | None) -> None:
    """Wait until a GPU has done what it was given."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device is not None and device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def core_share(shares: list[float]) -> Iterator[None]:
    """Add to `shares` what part of the time this thread had a core, 0 to 1, while it only computes.

    More threads than cores take turns, which is nobody else's doing: then the time of all of them counts.
    """
    began = clock(), time.thread_time(), time.process_time()
    yield
    passed, thread, process = clock() - began[0], time.thread_time() - began[1], time.process_time() - began[2]
    shares.append(min(1.0, max(thread / passed, process / passed / cores())))


def read_files(source: Source, seed: int, seconds: float) -> tuple[float, float, list[Any]]:
    """Files and bytes per second, no file twice, and some of the contents."""
    held: list[Any] = []
    sizes: list[int] = []

    def files() -> Iterator[int]:
        for index in permutation(seed, 0, len(source)):
            with suppress(OSError):  # training passes over a file that is gone
                image = source[int(index)].image
                sizes.append(image.nbytes if isinstance(image, np.ndarray) else len(image))
                if sum(sizes) <= HELD_BYTES or not held:
                    held.append(image)
                yield 1

    rate = _rate(files(), seconds)
    if not held:
        raise UserError(f"none of the {len(source)} images can be read")
    return rate, rate * sum(sizes) / len(sizes), held


def decode_pictures(held: list[Any], channels: int, seconds: float) -> tuple[float, float | None]:
    """Pictures per second of one core in full size, and the median of their shorter sides."""
    sides: list[int] = []

    def pictures() -> Iterator[int]:
        for image in itertools.cycle(held):
            with suppress(DecodeError):
                sides.append(min(decode(image, channels).shape[:2]))
            yield 1

    with _like_a_worker():
        rate = _rate(pictures(), seconds)
    return rate, median(sides) if sides else None


@contextmanager
def _like_a_worker() -> Iterator[None]:
    """One thread, as the workers of the loader have."""
    before = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        cv2.setNumThreads(before[1])


def _stream(settings: RunSettings, source: Source, own: Processes, batch_size: int, workers: int) -> ViewStream:
    return build_stream(settings.model_copy(update={"batch_size": batch_size, "workers": workers}), source, own)


def one_worker(settings: RunSettings, source: Source, own: Processes, seconds: float) -> float:
    """Pictures per second that one worker can make, measured in this process."""
    stream = _stream(settings, source, own, min(settings.batch_size, 8), workers=0)
    # From another epoch on: other pictures than those that were just read, as far as there are any.
    work = (len(stream.batch(step).ids) for step in itertools.count(stream.steps_per_epoch))
    with _like_a_worker():
        next(work)
        return _rate(work, seconds)


def all_workers(settings: RunSettings, source: Source, own: Processes, each: float | None, seconds: float) -> float:
    """Pictures per second of the loader as training uses it, once it runs evenly, without a model.

    each: pictures per second of one worker. Batches are small where workers make them, so that they soon come evenly.
    """
    size, turns = settings.batch_size, max(settings.workers, 1)
    if each is not None:
        size = min(size, max(1, round(each * CHUNK_SECONDS)))
    stream = _stream(settings, source, own, size, settings.workers)
    first = 2 * stream.steps_per_epoch
    batches = prefetch(stream.run(first, first + MANY_STEPS), own.device)
    for _ in range(2 * turns):  # the workers start, and fill what is prefetched
        next(batches)
    _settle(own.device)
    # Workers that started together finish together: only whole rounds are counted.
    return _rate((len(batch.ids) for batch in batches), seconds, own.device, whole=turns)


def shortened(settings: RunSettings, images: int) -> RunSettings:
    """The settings with a batch of at most about `images`, cut along its pieces and its batch norm groups."""
    if images >= settings.batch_size:
        return settings
    piece = settings.batch_size // settings.accumulate
    if images >= piece:
        pieces = images // piece
        return settings.model_copy(update={"batch_size": pieces * piece, "accumulate": pieces})
    group = piece // settings.bn_groups
    groups = min(max(images // group, 1), settings.bn_groups)
    rows = groups * min(group, max(images, 2))
    shuffle = settings.shuffle_bn and groups > 1
    return settings.model_copy(update={"batch_size": rows, "accumulate": 1, "bn_groups": groups, "shuffle_bn": shuffle})


def measurable(
    settings: RunSettings, source: Source, own: Processes, views: float, step_seconds: float, job_seconds: float
) -> RunSettings:
    """The settings, with a smaller batch where whole ones would take more than the time there is."""
    if own.device.type == "cuda" or settings.compile:  # fast enough; or another size would be compiled anew
        return settings
    per_picture = 1 / step_rate(build_job(shortened(settings, PROBE), source, own), seconds=0, least=1)
    rounds = max(settings.workers, 1)
    steps = rounds + math.ceil(LEAST_STEPS / rounds) * rounds  # as `whole_job` does them
    in_step = step_seconds / (1 + LEAST_STEPS) / per_picture
    in_job = job_seconds / steps / (per_picture + 1 / views)
    images = int(min(in_step, in_job))
    return settings if images > 0.7 * settings.batch_size else shortened(settings, images)


def build_job(settings: RunSettings, source: Source, own: Processes) -> Job:
    """A training that writes nothing. A GPU's peak of memory is counted from here on."""
    if own.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(own.device)
    model = build_model(settings, len(source))
    job = Job(settings, model, build_stream(settings, source, own), NoRun(), own, None, None)
    job.model.train()
    if settings.compile:
        compile_encoders(job.model, own.device, None)
    return job


def step_rate(job: Job, seconds: float, least: int = LEAST_STEPS) -> float:
    """Pictures per second of the model step alone: the median of `least` or more stretches, for all are alike."""
    settings, device, rows = job.settings, job.processes.device, job.settings.batch_size
    stream = job.stream
    if settings.views != "batch":  # a few pictures, repeated, are made sooner
        stream = _stream(settings, stream.source, job.processes, min(rows, PICTURES), workers=0)
    made = place(stream.batch(0), device)
    again = torch.arange(rows, device=device) % len(made.ids)
    query, key, *small = (views[again] for views in made.views)

    def steps() -> Iterator[int]:
        for step in itertools.count():
            ids = torch.arange(rows, device=device) + step * rows  # new ones, or the queue would hold no negatives
            optimise(job, job.model, Batch(query, key, ids, [], small=tuple(small)), step, STILL)
            yield rows

    work = steps()
    for _ in range(2 if device.type == "cuda" or settings.compile else 1):
        next(work)
    _settle(device)
    rates: list[float] = []
    began = clock()
    while len(rates) < least or clock() - began < seconds:
        rates.append(_rate(work, seconds / 20, device))
    return median(rates)


def whole_job(job: Job, seconds: float, alone: float) -> tuple[float, float]:
    """Pictures per second of stream and step together, and the share of the time in which the device waits.

    alone: pictures per second of the step alone.
    """
    device, rounds = job.processes.device, max(job.stream.workers, 1)
    first = 3 * job.stream.steps_per_epoch
    batches = prefetch(job.stream.run(first, first + MANY_STEPS), device)
    waits: list[float] = []

    def steps() -> Iterator[int]:
        for step in itertools.count(first):
            began = clock()
            batch = next(batches)
            waits.append(clock() - began)
            optimise(job, job.model, batch, step, STILL)
            yield len(batch.ids)

    work = steps()
    for _ in range(rounds):
        next(work)
    _settle(device)
    waits.clear()
    began = clock()
    # Totals, not medians: of a round of workers one batch is waited for, and the others are there.
    rate = _rate(work, seconds, device, least=LEAST_STEPS, whole=rounds)
    waiting = sum(waits) / (clock() - began)
    if device.type != "cpu":  # the host waits while the GPU still works: it is idle only as long as the job is slower
        waiting = min(waiting, max(0.0, 1 - rate / alone))
    return rate, waiting


@contextmanager
def plain_faults(settings: RunSettings, device: torch.device) -> Iterator[None]:
    """Turn what goes wrong while measuring into one line: UserError for lack of memory, TrainingError for the rest."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a batch of {settings.batch_size} in {_pieces(settings)} does not fit into the memory of {device}: set a "
            "lower --batch-size or a higher --accumulate"
        ) from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            "a worker died, probably for lack of memory: set fewer --workers or a lower --batch-size"
        ) from error
    except NotFinite as error:
        raise TrainingError("the loss of the untrained model is no finite number: try --precision fp32") from error


def _pieces(settings: RunSettings) -> str:
    return "one piece" if settings.accumulate == 1 else f"{settings.accumulate} pieces"
