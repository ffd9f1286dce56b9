"""The training loop, explicit: wait for a batch, begin the step, forward, backward, optimiser, enqueue, write down."""

from __future__ import annotations

import contextlib
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moco.contrast.collectives import gather_rows
from moco.contrast.moco import MomentumContrast
from moco.data.loader import Batch, ViewStream
from moco.data.views import normalize
from moco.errors import Interrupted, TrainingError, UserError
from moco.settings import RunSettings
from moco.train.optim import learning_rate, sgd
from moco.train.parallel import Processes
from moco.train.progress import ProgressDisplay
from moco.train.run import Run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Monitor = Callable[[nn.Module], dict[str, float]]


class Writer(Protocol):
    """What is used of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, value: float, step: int) -> object:
        """Add a point to a curve."""

    def flush(self) -> object:
        """Write to disk."""


@dataclass
class Job:
    """What a training run works with."""

    settings: RunSettings
    model: MomentumContrast
    stream: ViewStream
    run: Run
    processes: Processes
    monitor: Monitor | None
    """Checks the query backbone after an epoch: names and values to write down. Called on the main process."""
    console: Console | None
    writer: Writer | None = None
    first_step: int = 0
    skipped: set[str] = field(default_factory=set)
    optimizer: torch.optim.SGD = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)

    def __post_init__(self) -> None:
        self.model.to(self.processes.device).to(memory_format=torch.channels_last)
        self.optimizer = sgd(self.model, self.settings)
        fp16 = self.settings.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.processes.device.type, enabled=fp16)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written. Raises UserError if it is not of this job."""
        images, done = len(self.stream.source), state["step"] // self.stream.steps_per_epoch
        if state["images"] != images:
            raise UserError(
                f"{self.run.path} was trained on {state['images']} images, but there are {images} now: "
                "give it the data it had, or start a new run"
            )
        if done > self.settings.epochs:
            raise UserError(f"{self.run.path} has done {done} epochs already: set --epochs {done} or more")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.first_step = state["step"]

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps. Main process only."""
        state = {
            "format": 1,
            "step": step,
            "images": len(self.stream.source),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        self.run.save(state, self.settings.keep_checkpoints)


def train(job: Job) -> None:
    """Train from `job.first_step` to the end of the last epoch.

    Raises Interrupted after Ctrl-C, once the step is finished and saved, and TrainingError if the loss is no number
    (before that step touches the weights).
    """
    settings, stream = job.settings, job.stream
    steps, per_epoch = settings.epochs * stream.steps_per_epoch, stream.steps_per_epoch
    forward = _wrapped(job)
    window = Window(settings.batch_size, job.model.chance_loss)
    batches = stream.run(job.first_step, steps)
    display = ProgressDisplay(
        job.console, first_step=job.first_step, steps=steps, steps_per_epoch=per_epoch, epochs=settings.epochs
    )
    job.model.train()
    with stop_on_interrupt() as stop, display:
        for step in range(job.first_step, steps):
            began = time.monotonic()
            batch = next(batches)
            waited = time.monotonic() - began
            _note_skipped(job, batch)
            rate = learning_rate(step, per_epoch, settings)
            metrics = optimise(job, forward, batch, step, rate)
            window.add(metrics, waited, time.monotonic() - began)

            done, line = step + 1, None
            end_of_epoch = done % per_epoch == 0
            stopping = _any_process(stop.is_set and done < steps, job.processes.device)
            if done % settings.log_every == 0 or end_of_epoch or stopping:
                line = window.line(done, done / per_epoch, rate)
                _write_line(job, line)
            display.step(done, line)
            if end_of_epoch and line is not None:
                epoch = done // per_epoch
                checks = _check(job, epoch, done)
                display.epoch(epoch, line, checks)
            if job.processes.main and (stopping or _checkpoint_due(done, per_epoch, settings)):
                job.save(done)
            if stopping:
                path = job.run.path
                raise Interrupted(f"stopped after step {done} of {steps}; continue with: moco pretrain --resume {path}")


def optimise(job: Job, forward: nn.Module, batch: Batch, step: int, rate: float) -> dict[str, Tensor]:
    """One optimiser step over a batch, in `accumulate` pieces. Returns the figures of the step, averaged."""
    settings, model, device = job.settings, job.model, job.processes.device
    dtype = DTYPES[settings.precision]
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    model.begin_step()
    pieces = settings.accumulate
    totals: dict[str, Tensor] = {}
    for piece, (view_a, view_b, ids) in enumerate(_pieces(batch, pieces)):
        view_a, view_b = (_on_device(view, settings, device) for view in (view_a, view_b))
        with _exchange(forward, last=piece == pieces - 1):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                output = forward(view_a, view_b, ids.to(device))
            _refuse_non_finite(output.loss, step, rate)
            job.scaler.scale(output.loss / pieces).backward()
        for name, value in {"loss": output.loss.detach(), **output.metrics}.items():
            totals[name] = totals.get(name, 0) + value / pieces
    job.scaler.unscale_(job.optimizer)
    totals |= _gradient_figures(model.query_encoder, settings)
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    model.end_step()
    return totals


def _pieces(batch: Batch, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return zip(batch.query.chunk(count), batch.key.chunk(count), batch.ids.chunk(count), strict=True)


def _on_device(view: Tensor, settings: RunSettings, device: torch.device) -> Tensor:
    # Pictures travel as uint8, a quarter of the bytes; they become numbers where they are used.
    moved = view.to(device, non_blocking=True)
    return normalize(moved, settings.mean, settings.std).contiguous(memory_format=torch.channels_last)


def _refuse_non_finite(loss: Tensor, step: int, rate: float) -> None:
    value = loss.detach().item()
    if not math.isfinite(value):
        raise TrainingError(
            f"the loss is {value} at step {step + 1} (learning rate {rate:.3g}); the weights are as before this "
            "step: try a lower --learning-rate, --warmup-epochs 5 or --clip-gradient 1"
        )


def _gradient_figures(encoder: nn.Module, settings: RunSettings) -> dict[str, Tensor]:
    """Clip, and measure what was asked for: the norm of the whole gradient and of each layer's."""
    figures: dict[str, Tensor] = {}
    if settings.log_gradient_norms:
        for name, parameter in encoder.named_parameters():
            if parameter.grad is not None:
                figures[f"gradient_norm/{name}"] = parameter.grad.norm()
    if settings.clip_gradient is not None:
        figures["gradient_norm"] = nn.utils.clip_grad_norm_(encoder.parameters(), settings.clip_gradient)
    elif settings.log_gradient_norms:
        figures["gradient_norm"] = torch.stack(list(figures.values())).norm()
    return figures


class Window:
    """Sums of the steps since the last written line."""

    def __init__(self, batch_size: int, chance_loss: float) -> None:
        self._batch_size, self._chance_loss = batch_size, chance_loss
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps, self._waited, self._seconds = 0, 0.0, 0.0

    def add(self, metrics: dict[str, Tensor], waited: float, seconds: float) -> None:
        """Count a step that took `seconds`, `waited` of them for its batch."""
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0) + value
        self._steps, self._waited, self._seconds = self._steps + 1, self._waited + waited, self._seconds + seconds

    def line(self, step: int, epoch: float, rate: float) -> dict[str, float]:
        """The means since the last line, averaged over all processes, and start anew."""
        names = sorted(self._sums)
        values = torch.stack([self._sums[name].float() for name in names]) / self._steps
        means = dict(zip(names, gather_rows(values[None]).mean(0).tolist(), strict=True))
        line = {
            "step": step,
            "epoch": round(epoch, 4),
            "loss": means.pop("loss"),
            "chance_loss": self._chance_loss,
            **means,
            "learning_rate": rate,
            "images_per_second": self._batch_size * self._steps / self._seconds,
            "data_wait": self._waited / self._seconds,
        }
        self._clear()
        return line


class stop_on_interrupt:
    """While active, the first Ctrl-C only sets `is_set`; the second one stops at once as usual."""

    def __init__(self) -> None:
        self.is_set = False
        self._previous: Any = None

    def __enter__(self) -> stop_on_interrupt:
        with contextlib.suppress(ValueError):  # only the main thread may; elsewhere Ctrl-C is not ours
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)


def _wrapped(job: Job) -> nn.Module:
    if job.processes.world == 1:
        return job.model
    # Buffers stay each process's own: the queues are equal by construction, batch statistics are meant to differ.
    with warnings.catch_warnings():  # newer releases call the option deprecated and offer nothing in its place
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(job.model, broadcast_buffers=False)


def _exchange(forward: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Gradients are exchanged between processes once per step, with the last piece."""
    if isinstance(forward, DistributedDataParallel) and not last:
        quiet: contextlib.AbstractContextManager[None] = forward.no_sync()
        return quiet
    return contextlib.nullcontext()


def _any_process(flag: bool, device: torch.device) -> bool:
    return bool(gather_rows(torch.tensor([flag], device=device)).any())


def _note_skipped(job: Job, batch: Batch) -> None:
    for name, reason in batch.skipped:
        if name not in job.skipped:
            job.skipped.add(name)
            job.run.skip(name, reason)


def _write_line(job: Job, line: dict[str, float]) -> None:
    if not job.processes.main:
        return
    job.run.log(line)
    _write_curves(job, line)


def _write_curves(job: Job, line: dict[str, float]) -> None:
    if job.writer is not None:
        for name, value in line.items():
            if name not in ("step", "epoch"):
                job.writer.add_scalar(name, value, int(line["step"]))
        job.writer.flush()


def _check(job: Job, epoch: int, step: int) -> dict[str, float]:
    last = epoch == job.settings.epochs
    due = last or epoch % job.settings.monitor_every == 0
    if job.monitor is None or not due or not job.processes.main:
        return {}
    checks = job.monitor(job.model.backbone)
    _write_line(job, {"step": step, "epoch": float(epoch), **checks})
    return checks


def _checkpoint_due(done: int, per_epoch: int, settings: RunSettings) -> bool:
    epoch, rest = divmod(done, per_epoch)
    return rest == 0 and (epoch % settings.checkpoint_every == 0 or epoch == settings.epochs)
