"""What goes wrong while training: steps that give no number, memory, workers, the disk. One line each, and a way on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moco.contrast.collectives import gather_rows
from moco.errors import TrainingError, UserError
from moco.train.checkpoints import with_patience, write_atomically
from moco.train.guard import NotFinite
from moco.train.heartbeat import is_loss
from moco.train.job import Job
from moco.train.optim import learning_rate

MOST_IN_A_ROW = 10
"""Bad steps one after the other that are passed over before the training stops all the same."""
NAMED = 8


class BadSteps:
    """What to do about steps whose loss or gradient is no number (setting on_nan)."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last, self._in_a_row = -2, 0

    def handle(self, fault: NotFinite) -> None:
        """Stop with a report (TrainingError), pass the step over, or go back to the last checkpoint first."""
        job, step = self._job, fault.step
        self._in_a_row = self._in_a_row + 1 if step == self._last + 1 else 1
        self._last = step
        what = self._report(step)
        job.optimizer.zero_grad(set_to_none=True)
        job.guard.clear()
        if job.settings.on_nan == "stop":
            raise TrainingError(
                f"{what}; the weights are as before this step: try a lower --learning-rate, --warmup-epochs 5, "
                "--clip-gradient 1 or --on-nan skip"
            )
        if self._in_a_row >= MOST_IN_A_ROW:
            raise TrainingError(f"{what}, and so were the {MOST_IN_A_ROW - 1} before: lower --learning-rate")
        if job.settings.on_nan == "rollback":
            job.saver.close()
            if not job.run.checkpoints():
                raise TrainingError(f"{what}, and there is no checkpoint yet to go back to: lower --learning-rate")
            state = job.run.load()
            job.load(state)
            what += f"; back to the weights of step {state['step']}"
        job.model.skip_step(step)
        job.say(f"warning: {what}; going on behind it")
        if job.processes.main:
            with_patience(lambda: job.run.warn(step + 1, what), job.say)

    def _report(self, step: int) -> str:
        """Write down what is known about the step, and say it in short."""
        job = self._job
        rate = learning_rate(step, job.stream.steps_per_epoch, job.settings)
        norms = {
            name.removeprefix("query_encoder."): float(parameter.grad.norm())
            for name, parameter in job.model.named_parameters()
            if parameter.grad is not None
        }
        ids = job.stream.ids(step).tolist()
        names = [_name(job, number) for number in ids[:NAMED]]
        text = f"the loss or gradient is no finite number at step {step + 1} (learning rate {rate:.3g}"
        if not job.processes.main:
            return text + ")"
        report = {"step": step + 1, "learning_rate": rate, "gradient_norms": norms, "ids": ids, "first_names": names}
        path = job.run.path / f"not-finite-step-{step + 1}.json"
        try:
            # NaN and infinity are written as words: JSON has no such numbers.
            plain = json.loads(json.dumps(report), parse_constant=str)
            write_atomically(path, (json.dumps(plain, indent=2) + "\n").encode())
        except OSError:
            return text + ")"
        return f"{text}; gradient norms and pictures of the step: {path})"


def check_same_start(job: Job) -> None:
    """Raise UserError unless all processes go on at the same step."""
    steps = gather_rows(torch.tensor([job.first_step], device=job.processes.device)).tolist()
    if len(set(steps)) > 1:
        raise UserError(
            f"the processes found different checkpoints of {job.run.path} (steps {', '.join(map(str, steps))}): all "
            "machines must see the same run folder"
        )


def check_same_queue(job: Job) -> None:
    """Raise TrainingError if the queues of the processes differ: they would train different models."""
    parts = job.model.remembered()
    if job.processes.world == 1 or not parts:
        return
    sums = torch.stack([_checksum(part) for part in parts])
    if not torch.equal(gather_rows(sums[None]), sums.expand(job.processes.world, len(sums))):
        raise TrainingError(
            f"the queues of the processes differ; go on from the last checkpoint: moco resume {job.run.path}"
        )


def _checksum(part: torch.Tensor) -> torch.Tensor:
    """A number (float64) that another order of the rows changes as well."""
    rows = part.reshape(len(part), -1).sum(1, dtype=torch.float64) if part.ndim else part.double()[None]
    return rows @ torch.arange(1, len(rows) + 1, dtype=torch.float64, device=part.device)


def _name(job: Job, number: int) -> str:
    try:
        return job.stream.source[number].name
    except OSError as error:
        return str(error.filename or number)


@contextmanager
def translated(job: Job) -> Iterator[None]:
    """Turn faults of the machine into one line (TrainingError) that says what to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(job) from error
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if job.processes.world > 1 and is_loss(error):
            raise _lost(job, text) from error
        if "DataLoader worker" in text:
            raise TrainingError(
                f"a data worker died ({text[:120]}): probably the memory did not suffice; lower --workers "
                f"(now {job.settings.workers}) or --batch-size, then go on with: moco resume {job.run.path}"
            ) from error
        if "allocate memory" in text or "out of memory" in text.lower():
            raise _out_of_memory(job) from error
        raise
    except OSError as error:
        if not job.run.path.exists():
            raise TrainingError(f"the run folder {job.run.path} is gone: somebody removed or renamed it") from error
        raise TrainingError(f"{error.filename or job.run.path}: {error.strerror or error}") from error


def _lost(job: Job, text: str) -> TrainingError:
    own = job.processes
    otherwise = (
        f"another process is gone, or has not answered for {job.settings.timeout:g} minutes (process {own.rank} of "
        f"{own.world}: {text[:120]})"
    )
    advice = f"go on with: moco resume {job.run.path}"
    return TrainingError(f"{otherwise}; {advice}") if own.heartbeat is None else own.heartbeat.error(otherwise, advice)


def _out_of_memory(job: Job) -> TrainingError:
    settings = job.settings
    return TrainingError(
        f"out of memory on {job.processes.device} with batch_size {settings.batch_size}, image_size "
        f"{settings.image_size}: compute the batch in pieces (--accumulate {settings.accumulate * 2}), or lower "
        "--batch-size, --image-size or --queue-size"
    )
