"""The training loop, explicit: wait for a batch, begin the step, forward, backward, optimiser, enqueue, write down."""

from __future__ import annotations

import contextlib
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moco.contrast.collectives import gather_rows
from moco.data.device import prefetch
from moco.data.loader import Batch
from moco.data.views import normalize
from moco.errors import Interrupted
from moco.settings import RunSettings
from moco.train.alarms import Alarms
from moco.train.callbacks import NOTHING, Progress
from moco.train.checkpoints import with_patience
from moco.train.faults import BadSteps, check_same_queue, check_same_start, translated
from moco.train.guard import NotFinite
from moco.train.job import Job
from moco.train.optim import learning_rate
from moco.train.progress import ProgressDisplay
from moco.train.stopping import stop_on_signal
from moco.train.window import Waiting

GO_ON, ASKED, SIGNALLED = range(3)
"""Whether to stop: no, because a callback asked for it, or after a signal."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_STEPS_TO_STOP = 10
"""With several processes, steps between Ctrl-C and the stop at most."""


def train(job: Job) -> None:
    """Train from `job.first_step` to the end of the last epoch, or until a callback asks for the end.

    Raises Interrupted after Ctrl-C or SIGTERM, and what a callback raised, once the step is finished and saved;
    TrainingError where it cannot go on: a loss or gradient that is no number (before that step touches the weights),
    memory that does not suffice, a worker that died, a disk that stays full.
    """
    settings, stream = job.settings, job.stream
    steps, per_epoch = job.steps, stream.steps_per_epoch
    check_same_start(job)
    forward = _wrapped(job)
    batches = prefetch(stream.run(job.first_step, steps), job.processes.device)
    display = ProgressDisplay(
        job.console, first_step=job.first_step, steps=steps, steps_per_epoch=per_epoch, epochs=settings.epochs
    )
    alarms = Alarms(steps=steps, queue_steps=_queue_steps(settings), shuffled=settings.shuffle_bn)
    bad_steps, clock, waiting = BadSteps(job), SaveClock(settings, per_epoch), Waiting(job.processes.device)
    done, stopping = job.first_step, GO_ON
    job.model.train()
    with stop_on_signal() as stop, display, translated(job), contextlib.closing(job.saver), contextlib.closing(batches):
        for step in range(job.first_step, steps):
            began = time.monotonic()
            job.processes.at(f"waiting for the pictures of step {step + 1}")
            batch = next(batches)
            job.processes.at(f"in step {step + 1}")
            waited = waiting.counted(time.monotonic() - began)
            _note_skipped(job, batch, step + 1)
            rate = learning_rate(step, per_epoch, settings)
            done, line = step + 1, None
            end_of_epoch = done % per_epoch == 0
            writing = done % settings.log_every == 0 or end_of_epoch
            try:
                metrics = optimise(job, forward, batch, step, rate)
                waiting.handed_over()
                if writing:
                    job.guard.check()
            except NotFinite as fault:
                bad_steps.handle(fault)
            else:
                job.window.add(metrics, waited, time.monotonic() - began)

            if writing or clock.by_steps(done):
                check_same_queue(job)
            if writing:
                line = job.window.line(done, done / per_epoch, rate)
                _write_line(job, line)
                _warn(job, alarms, line)
            display.step(done, line)
            _call(job.callbacks.step, job, done, line or NOTHING)
            best = False
            if end_of_epoch and line is not None:
                checks = _check(job, alarms, done // per_epoch, done)
                best = job.run.is_best(checks) if checks else False
                display.epoch(done // per_epoch, line, checks)
                _call(job.callbacks.epoch, job, done, {**line, **checks})
            stopping = _stopping(job, stop.received, done) if done < steps else GO_ON
            if job.processes.main and (clock.due(done) or stopping or best):
                job.save(done, best=best)
            if job.lock is not None:
                job.lock.beat()
            if stopping:
                break
    _leave(job, stopping, done, stop.received)


def _leave(job: Job, stopping: int, done: int, received: int | None) -> None:
    """At the end of a training: raise or say why it is one, where not all steps are done."""
    job.callbacks.leave()
    where = f"stopped after step {done} of {job.steps}"
    if stopping == SIGNALLED:
        raise Interrupted(
            f"{where}; continue with: moco resume {job.run.path}", 143 if received == signal.SIGTERM else 130
        )
    if stopping == ASKED:
        job.say(f"{where}, as a callback asked")


def _call(callback: Callable[[Progress], None], job: Job, done: int, metrics: Mapping[str, float]) -> None:
    if job.processes.main:
        epoch = done / job.stream.steps_per_epoch
        callback(Progress(job.run, done, job.steps, epoch, job.settings.epochs, MappingProxyType(dict(metrics))))


def _queue_steps(settings: RunSettings) -> int:
    """Steps until every key of the dictionary is a real one."""
    queue = settings.method == "moco" and settings.dictionary == "queue"
    return -(-settings.queue_size // settings.batch_size) if queue else 1


def optimise(job: Job, forward: nn.Module, batch: Batch, step: int, rate: float) -> dict[str, Tensor]:
    """One optimiser step over a batch, in `accumulate` pieces. Returns the figures of the step, averaged."""
    settings, model, device = job.settings, job.model, job.processes.device
    dtype = DTYPES[settings.precision]
    for group in job.optimizer.param_groups:
        group["lr"] = rate
    # What an encoder itself draws (dropout) is a function of the step as well.
    torch.manual_seed((settings.seed * 1_000_003 + step * 97 + job.processes.rank) % 2**63)
    model.begin_step(step / job.steps)
    pieces = settings.accumulate
    totals: dict[str, Tensor] = {}
    for piece, (ids, *views) in enumerate(_pieces(batch, pieces)):
        view_a, view_b, *small = (_on_device(view, settings, device) for view in views)
        further = {"small": small} if small else {}  # only methods that ask for small views know of them
        with _exchange(forward, last=piece == pieces - 1):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                output = forward(view_a, view_b, ids.to(device), **further)
            job.scaler.scale(output.loss / pieces).backward()
        for name, value in {"loss": output.loss.detach(), **output.metrics}.items():
            totals[name] = totals.get(name, 0) + value / pieces
    job.scaler.unscale_(job.optimizer)
    totals |= _gradient_figures(model, settings)
    # Not the gradient under a scaler, which expects overflows and deals with them.
    watched = [totals["loss"]] if job.scaler.is_enabled() else [totals["loss"], totals["gradient_norm"]]
    job.guard.note(torch.stack(watched), step)
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    model.end_step()
    return totals


def _pieces(batch: Batch, count: int) -> Iterator[tuple[Tensor, ...]]:
    """(ids, query, key, small views …) of each piece."""
    return zip(*(tensor.chunk(count) for tensor in (batch.ids, *batch.views)), strict=True)


def _on_device(view: Tensor, settings: RunSettings, device: torch.device) -> Tensor:
    # Pictures travel as uint8, a quarter of the bytes; they become numbers where they are used.
    moved = view.to(device, non_blocking=True)
    return normalize(moved, settings.mean, settings.std).contiguous(memory_format=torch.channels_last)


def _gradient_figures(model: nn.Module, settings: RunSettings) -> dict[str, Tensor]:
    """The norm of the whole gradient, clipped where asked, and of each layer's where asked (before clipping)."""
    figures: dict[str, Tensor] = {}
    learned = {
        name.removeprefix("query_encoder."): p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    if settings.log_gradient_norms:
        figures = {f"gradient_norm/{name}": gradient.norm() for name, gradient in learned.items()}
    if settings.clip_gradient is not None:
        figures["gradient_norm"] = nn.utils.clip_grad_norm_(model.parameters(), settings.clip_gradient)
    else:
        figures["gradient_norm"] = nn.utils.get_total_norm(learned.values())
    return figures


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


def _stopping(job: Job, received: int | None, done: int) -> int:
    """Whether to stop after `done` steps, and why: because this process was asked to, or one of the others."""
    why = SIGNALLED if received is not None else ASKED if job.callbacks.stopping else GO_ON
    if job.processes.world == 1:
        return why
    # All must agree, and an answer from the devices stops them: not at every step.
    if done % min(job.settings.log_every, MOST_STEPS_TO_STOP) != 0:
        return GO_ON
    return int(gather_rows(torch.tensor([why], device=job.processes.device)).max())


def _note_skipped(job: Job, batch: Batch, done: int) -> None:
    """Write pictures down that could not be read. Raises UserError where there are too many."""
    for name, reason in job.bad_files.add(batch.skipped):
        with_patience(partial(job.run.skip, name, reason), job.say)
    if batch.skipped:
        job.bad_files.check(seen=done * job.settings.batch_size // job.processes.world)


def _write_line(job: Job, line: dict[str, float]) -> None:
    if not job.processes.main:
        return
    with_patience(lambda: job.run.log(line), job.say)
    _write_curves(job, line)


def _write_curves(job: Job, line: dict[str, float]) -> None:
    if job.writer is not None:
        for name, value in line.items():
            if name not in ("step", "epoch"):
                job.writer.add_scalar(name, value, int(line["step"]))
        job.writer.flush()


def _warn(job: Job, alarms: Alarms, line: dict[str, float]) -> None:
    if "loss" in line and job.processes.main:
        _say_and_note(job, int(line["step"]), alarms.check(line))


def _say_and_note(job: Job, step: int, warnings: list[str]) -> None:
    for warning in warnings:
        job.say(f"warning: {warning}")
        with_patience(partial(job.run.warn, step, warning), job.say)


def _check(job: Job, alarms: Alarms, epoch: int, step: int) -> dict[str, float]:
    last = epoch == job.settings.epochs
    due = last or epoch % job.settings.monitor_every == 0
    if job.monitor is None or not due:
        return {}
    job.processes.at(f"in the check after step {step}")
    checks = job.monitor(job.model)
    if checks:
        _write_line(job, {"step": step, "epoch": float(epoch), **checks})
        _say_and_note(job, step, alarms.check_epoch(checks))
    return checks


class SaveClock:
    """When a checkpoint is due: at ends of epochs, and every so many steps or minutes in between."""

    def __init__(self, settings: RunSettings, per_epoch: int) -> None:
        self._settings, self._per_epoch = settings, per_epoch
        self._saved = time.monotonic()

    def due(self, done: int) -> bool:
        """Whether to save after `done` steps."""
        minutes = self._settings.save_minutes
        due = self.by_steps(done) or (minutes is not None and time.monotonic() - self._saved >= 60 * minutes)
        if due:
            self._saved = time.monotonic()
        return due

    def by_steps(self, done: int) -> bool:
        """Whether to save after `done` steps whatever the clock says: the same on all processes."""
        epoch, within = divmod(done, self._per_epoch)
        at_end = within == 0 and (epoch % self._settings.checkpoint_every == 0 or epoch == self._settings.epochs)
        every = self._settings.save_steps
        return at_end or (every is not None and done % every == 0)
