"""Batches of views, in a seeded order, from any step on. A batch is a pure function of its step."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from moco.data import batched, per_image
from moco.data.by_image import make_views
from moco.data.own_views import MISSING, OwnView, check_own_view, make_own_views
from moco.data.reading import Unreadable, read_pixels
from moco.data.reading import readable as readable  # part of what this module offers
from moco.data.sources import ArraySource, Source
from moco.data.views import ViewParameters, apply_batch, draw, parameters
from moco.errors import UserError, counted
from moco.settings import ViewSettings

Array = np.ndarray[Any, Any]

RESIDENT_BYTES = 2 * 2**30
"""Arrays up to this size move to the training device as a whole."""

TINY = 2048
"""Up to so many values a view is made faster by whole-batch operations on a CPU than by itself (gray 45 × 45)."""

SMALL = 96
"""Side in pixels up to which pictures in memory are handled a batch at a time."""

GRACE = 20
"""Seconds that a worker works on after SIGTERM, for the main process to finish its step."""

_ORDER_STREAM = 0x6F726472  # keeps the order apart from everybody else who starts from the same seed


@dataclass
class Batch:
    """Two views of each picture of a batch, on this process.

    Attributes:
        query, key: (n, C, S, S), uint8 on the CPU, or float32 in [0, 1] on the device (way "batch", see there).
        ids: (n,) int64 on the CPU: numbers of the pictures in the source.
        skipped: (name, reason) of pictures that could not be decoded; others (`reading.stand_ins`) are in their places.
        rest: what is left to do to query, key and small (`views.recolour`), or None if they are done.
        small: further views, each (n, C, s, s) of another size.
    """

    query: torch.Tensor
    key: torch.Tensor
    ids: torch.Tensor
    skipped: list[tuple[str, str]]
    rest: tuple[ViewParameters, ...] | None = None
    small: tuple[torch.Tensor, ...] = ()

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """All of them: query, key, and the small ones."""
        return (self.query, self.key, *self.small)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory. Called by torch's loader."""
        query, key, *small = (view.pin_memory() for view in self.views)
        return Batch(query, key, self.ids.pin_memory(), self.skipped, self.rest, tuple(small))


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def small_in_memory(source: Source) -> bool:
    """Whether the views of a batch are made many times faster at once than one by one: small pictures in memory."""
    return isinstance(source, ArraySource) and max(source.images.shape[1:3]) <= SMALL


def permutation(seed: int, epoch: int, n: int) -> Array:
    """The order of `n` pictures in an epoch: (n,) int64, a pure function."""
    sequence = np.random.SeedSequence(seed, spawn_key=(_ORDER_STREAM, epoch))
    return np.random.default_rng(sequence).permutation(n)


class ViewStream:
    """The batches of a training, by step.

    Args:
        source: where the pictures are.
        query, key: how the two views are made.
        size: side of a view in pixels; channels: 1, 3, or as many as the pictures have.
        batch_size: pictures per step over all processes.
        seed: together with epoch and step it decides everything.
        workers: processes that make batches; 0 makes them in this process. Way "batch" needs none.
        way: "image" decodes and makes views one by one on the CPU; "split" leaves those at crop and resize, for
            `views.recolour` to do the rest to whole batches elsewhere; "batch" takes an ArraySource and makes all
            views of a batch at once on `device`, without workers (on a CPU only tiny views: larger ones are made as
            in "image", which is faster there); "custom" lets `own_view` make them, and query and key are not used.
        small: how further views are made, of `small_size` pixels; not with way "custom".
        repeat: how often each picture occurs in an epoch: so many orders, one behind the other.
        rank, world: this process takes rows rank·b … (rank + 1)·b of every batch, b = batch_size / world.

    Raises UserError for fewer pictures than a batch, and for a batch size that `world` does not divide.
    """

    def __init__(
        self,
        source: Source,
        *,
        query: ViewSettings,
        key: ViewSettings,
        size: int,
        channels: int,
        batch_size: int,
        seed: int,
        workers: int,
        way: Literal["image", "batch", "split", "custom"],
        device: torch.device,
        own_view: OwnView | None = None,
        small: Sequence[ViewSettings] = (),
        small_size: int = 0,
        repeat: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if len(source) * repeat < batch_size:
            count = len(source) * repeat
            raise UserError(
                f"{count} images are fewer than one batch of {batch_size}; set batch_size to {count} or less"
            )
        if batch_size % world:
            raise UserError(f"batch_size {batch_size} does not divide over {world} processes")
        if way == "batch" and not isinstance(source, ArraySource):
            raise UserError("views of whole batches need the images in one array; set views to image")
        if way == "custom":
            if own_view is None:
                raise UserError(MISSING)
            check_own_view(own_view, workers)
        self.source = source
        self.own_view = own_view
        self.settings = (query, key, *small)
        self.sizes = (size, size, *(small_size for _ in small))
        self.channels = channels
        self.batch_size = batch_size
        self.seed = seed
        self.way = way
        self.workers = 0 if way == "batch" else workers
        self.device = device
        self.rows = slice(rank * (batch_size // world), (rank + 1) * (batch_size // world))
        self.repeat = repeat
        self.steps_per_epoch = len(source) * repeat // batch_size
        self._order: tuple[int, Array] | None = None
        at_once = way == "batch" and (device.type != "cpu" or channels * size**2 <= TINY)
        self._resident = resident(source, device) if at_once and isinstance(source, ArraySource) else None
        self._loader: DataLoader[Batch | UserError] | None = None
        self._steps = _Steps()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loader": None}  # what a copy, and so a spawned worker, receives

    def whole(self) -> ViewStream:
        """The same stream with the rows of all processes, made in this one; pictures in memory are shared."""
        copied = copy.copy(self)
        copied.rows, copied._loader, copied._steps = slice(0, self.batch_size), None, _Steps()
        return copied

    def ids(self, step: int) -> Array:
        """Numbers of the pictures of this process in a step, (n,) int64."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            rounds = range(epoch * self.repeat, (epoch + 1) * self.repeat)
            orders = [permutation(self.seed, number, len(self.source)) for number in rounds]
            self._order = epoch, np.concatenate(orders)
        return self._order[1][within * self.batch_size : (within + 1) * self.batch_size][self.rows]

    def batch(self, step: int) -> Batch:
        """The batch of a global step: the same for the same (seed, step), wherever and whenever it is made."""
        ids = self.ids(step)
        if self.way == "custom":
            return self._own_batch(step, ids)
        table = draw(self.seed, step // self.steps_per_epoch, step, self.batch_size, len(self.sizes) - 2)[self.rows]
        if self._resident is not None:
            return self._batch_at_once(ids, table)
        return self._batch_by_image(ids, table)

    def _batch_at_once(self, ids: Array, table: Array) -> Batch:
        assert self._resident is not None
        images = take(self._resident, ids, self.channels, self.device)
        height, width = images.shape[2:]
        query, key, *small = (
            apply_batch(images, parameters(table[:, view], height, width, how), size)
            for view, (how, size) in enumerate(zip(self.settings, self.sizes, strict=True))
        )
        return Batch(query, key, torch.from_numpy(ids.copy()), [], small=tuple(small))

    def _own_batch(self, step: int, ids: Array) -> Batch:
        assert self.own_view is not None
        views, used, skipped = make_own_views(
            self.source, ids, self.own_view, seed=self.seed, step=step, first_row=self.rows.start, size=self.sizes[0],
            channels=self.channels,
        )  # fmt: skip
        query, key = torch.from_numpy(views).permute(0, 1, 4, 2, 3)
        return Batch(query, key, torch.from_numpy(used), skipped)

    def _batch_by_image(self, ids: Array, table: Array) -> Batch:
        finish = self.way != "split"
        made = make_views(
            self.source, ids, table, self.settings, sizes=self.sizes, channels=self.channels, finish=finish
        )
        # Channels stay last in memory, which is the layout that the encoders want.
        query, key, *small = (torch.from_numpy(views).permute(0, 3, 1, 2) for views in made.views)
        rest = None if finish else made.drawn
        return Batch(query, key, torch.from_numpy(made.ids), made.skipped, rest, tuple(small))

    def run(self, first_step: int, last_step: int) -> Iterator[Batch]:
        """The batches of the global steps first_step … last_step − 1."""
        if self.workers == 0:
            for step in range(first_step, last_step):
                yield self.batch(step)
            return
        self._steps.range = range(first_step, last_step)
        if self._loader is None:
            # A copy, so that stream and loader form no cycle: the workers end when the stream is let go.
            dataset = _Batches(copy.copy(self))
            self._loader = worker_loader(dataset, self._steps, self.workers, self.device.type == "cuda")
        failure = None
        for made in self._loader:
            if isinstance(made, UserError):
                failure = made
                break
            yield made
        if failure is not None:
            # Let the workers go first: held by the traceback of the error, they would end late and slowly.
            self._loader = None
            raise failure

    def close(self) -> None:
        """End the workers, once nobody goes through batches of `run` any more."""
        self._loader = None


class _Steps:
    """The sampler of the loader: which steps come next. It outlives one run, because the workers do."""

    range = range(0)

    def __iter__(self) -> Iterator[int]:
        return iter(self.range)

    def __len__(self) -> int:
        return len(self.range)


class _Batches(Dataset["Batch | UserError"]):
    """A stream as torch's loader wants it: item `step` is a whole batch.

    A UserError travels as an item, because torch would wrap its one line in the worker's traceback.
    """

    def __init__(self, stream: ViewStream) -> None:
        self.stream = stream

    def __getitem__(self, step: int) -> Batch | UserError:
        try:
            return self.stream.batch(step)
        except UserError as error:
            return error


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    # Ctrl-C and SIGTERM reach the whole group of processes; they are for the main one, which ends the workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):  # a worker that nobody ends does so itself
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))


def worker_loader(dataset: Dataset[Any], steps: Any, workers: int, pin: bool = False) -> DataLoader[Any]:
    """torch's loader for a data set whose items are whole batches: item `step` for each of `steps`, in order."""
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        worker_init_fn=_start_worker,
        persistent_workers=True,
        prefetch_factor=2,
        pin_memory=pin,
        generator=torch.Generator(),  # nothing here is random, but torch would draw from the global numbers
    )


def resident(source: ArraySource, device: torch.device) -> torch.Tensor:
    """All images of a source as one uint8 tensor (N, H, W, C): on `device` if it is small enough, else where it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes here
        images = torch.from_numpy(source.images)
    return images.to(device) if images.numel() <= RESIDENT_BYTES else images


def take(images: torch.Tensor, ids: Array, channels: int, device: torch.device) -> torch.Tensor:
    """Some of the images (N, H, W, C), on `device` as uint8 (n, channels, H, W).

    Raises UserError where one number of channels does not become the other (`decode` says which do).
    """
    rows = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(images.device)
    taken = images[rows].to(device).permute(0, 3, 1, 2)
    count = taken.shape[1]
    if count == channels:
        return taken
    if channels not in (1, 3) or count > 4:
        held = counted(count, "channel")
        raise UserError(f"the images have {held}, and {channels} are wanted: set channels to {count}")
    if count in (2, 4):  # transparency, on white
        opacity = taken[:, -1:].to(torch.int32)
        taken = ((taken[:, :-1] * opacity + 255 * (255 - opacity) + 127) // 255).to(torch.uint8)
    if taken.shape[1] == channels:
        return taken
    if channels == 3:
        return taken.expand(-1, 3, -1, -1)
    weights = torch.tensor([0.299, 0.587, 0.114], device=device).view(1, 3, 1, 1)
    return (taken * weights).sum(dim=1, keepdim=True).add_(0.5).to(torch.uint8)


def central_box(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of the deterministic view for evaluation.

    Small views (up to 96 pixels) show the central square; larger ones 224/256 of its side, as is usual on ImageNet.
    """
    shorter = min(height, width)
    side = shorter if size <= 96 else max(1, round(shorter * 224 / 256))
    return (height - side) // 2, (width - side) // 2, side, side


def evaluation_batches(
    source: Source, indices: Sequence[int] | Array, *, size: int, channels: int, batch_size: int, workers: int = 0
) -> Iterator[torch.Tensor]:
    """Pictures as an evaluator wants them, always the same: uint8 (n, channels, size, size) on the CPU, in order.

    The central square of the picture, resized with antialiasing. A picture that cannot be read is mid-grey, so that
    the rows keep their places.
    """
    chunks = _EvaluationBatches(source, np.asarray(indices, dtype=np.int64), size, channels, batch_size)
    if workers == 0 or isinstance(source, ArraySource):
        return (chunks[number] for number in range(len(chunks)))
    return iter(worker_loader(chunks, range(len(chunks)), workers))


class _EvaluationBatches(Dataset[torch.Tensor]):
    def __init__(self, source: Source, indices: Array, size: int, channels: int, batch_size: int) -> None:
        self.source, self.indices, self.size, self.channels, self.batch_size = (
            source,
            indices,
            size,
            channels,
            batch_size,
        )

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __getitem__(self, number: int) -> torch.Tensor:
        ids = self.indices[number * self.batch_size : (number + 1) * self.batch_size]
        if isinstance(self.source, ArraySource):
            return self._at_once(self.source, ids)
        views = np.full((len(ids), self.size, self.size, self.channels), 128, np.uint8)
        for row, index in enumerate(ids):
            try:
                pixels = read_pixels(self.source, int(index), self.channels)
            except Unreadable:
                continue
            height, width = pixels.shape[:2]
            views[row] = per_image.crop_resize(pixels, *central_box(height, width, self.size), self.size)
        return torch.from_numpy(views).permute(0, 3, 1, 2)

    def _at_once(self, source: ArraySource, ids: Array) -> torch.Tensor:
        device = torch.device("cpu")
        images = take(resident(source, device), ids, self.channels, device)
        box = central_box(images.shape[2], images.shape[3], self.size)
        top, left, height, width = (np.full(len(ids), number) for number in box)
        views = batched.crop_resize(images, top, left, height, width, np.zeros(len(ids), dtype=bool), self.size)
        return views.mul_(255).add_(0.5).to(torch.uint8)
