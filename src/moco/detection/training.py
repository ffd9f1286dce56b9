"""The training of a detector: SGD, a linear warm-up, a rate that falls in steps; it can be killed and continued.

Continued from a checkpoint it ends with the same bits as one that was left alone, on a CPU: pictures, flips, sizes and
the sampling inside the detector depend on the seed and the iteration, and nothing else is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moco.detection.batches import BatchStream, Example
from moco.errors import TrainingError
from moco.evaluate.features import AUTOCAST, Precision
from moco.train.checkpoints import FORMAT, Checkpoints, read, with_patience

MOMENTUM = 0.9

_STEPS = 0x73746570
"""Keeps what is drawn inside the detector apart from everybody else who starts from the same seed."""


@dataclass(frozen=True)
class Schedule:
    """How a detector is trained.

    iterations: optimiser steps. learning_rate: after the warm-up. warmup: iterations in which it rises from 1/1000 of
    that in a straight line. drops: iterations from which on it is a tenth of what it was. weight_decay: none on scales
    and shifts of batch norm ([code], by Detectron2's defaults).
    """

    iterations: int
    learning_rate: float
    warmup: int
    drops: tuple[int, ...]
    weight_decay: float = 1e-4

    def rate(self, step: int) -> float:
        """The learning rate of an iteration, from 0."""
        rising = 1.0
        if step < self.warmup:
            rising = 0.001 + 0.999 * step / self.warmup
        return self.learning_rate * rising * 0.1 ** sum(step >= drop for drop in self.drops)


@dataclass
class Course:
    """A training under way.

    folder: its checkpoints; one is kept. save_every: iterations between two. stopping: asked after every iteration;
    where it says yes, a checkpoint is written and the training ends before its time. say: told of iterations done.
    skipped: pictures that could not be read, with the reason. losses: mean loss between two looks, by iteration.
    """

    schedule: Schedule
    folder: Path
    device: torch.device
    precision: Precision = "fp32"
    save_every: int = 500
    stopping: Callable[[], bool] = lambda: False
    say: Callable[[int], object] = lambda iterations: None
    tell: Callable[[str], None] = lambda line: None
    skipped: dict[str, str] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


def train_detector(network: nn.Module, stream: BatchStream, course: Course) -> bool:
    """Train `network`, in place, from the newest whole checkpoint in `course.folder` on, where there is one.

    Returns whether all iterations are done. Raises TrainingError where the loss is no number, or a checkpoint cannot
    be written.
    """
    schedule, device = course.schedule, course.device
    network.to(device).train()
    solver = torch.optim.SGD(parameter_groups(network, schedule.weight_decay), lr=0.0, momentum=MOMENTUM)
    scaler = torch.amp.GradScaler(device.type, enabled=course.precision == "fp16")
    saver = _Saver(network, solver, scaler, course)
    first = saver.restore()
    course.say(first)
    total, since = 0.0, first
    with _own_randomness(device):
        for step, batch in enumerate(stream.run(first, schedule.iterations), start=first):
            torch.manual_seed(_step_seed(stream.seed, step))
            for group in solver.param_groups:
                group["lr"] = schedule.rate(step)
            losses = _losses(network, batch, course)
            loss = torch.stack(list(losses.values())).sum()
            value = float(loss.detach())
            if not math.isfinite(value):
                parts = ", ".join(f"{name} {float(part.detach()):.3g}" for name, part in losses.items())
                raise TrainingError(
                    f"the loss of the detector is no number at iteration {step} ({parts}): lower --lr, or lengthen "
                    "--warmup"
                )
            scaler.scale(loss).backward()
            scaler.step(solver)
            scaler.update()
            solver.zero_grad(set_to_none=True)
            total += value
            done = step + 1
            course.say(1)
            stop = done < schedule.iterations and course.stopping()
            if stop or done % course.save_every == 0 or done == schedule.iterations:
                course.losses[done], total, since = total / (done - since), 0.0, done
                saver.save(done)
            if stop:
                return False
    return True


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """All that learns, in two groups: with weight decay, and the scales and shifts of batch norm without."""
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    bare = {id(parameter) for module in norms for parameter in module.parameters(recurse=False)}
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in learning if id(one) not in bare], "weight_decay": weight_decay},
        {"params": [one for one in learning if id(one) in bare], "weight_decay": 0.0},
    ]


def on_device(batch: list[Example], device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Pictures in [0, 1] and targets, as torchvision's detectors take them."""
    pictures = [one.picture.to(device, non_blocking=True).float() / 255 for one in batch]
    targets = [{name: held.to(device, non_blocking=True) for name, held in one.target.items()} for one in batch]
    return pictures, targets


def _losses(network: nn.Module, batch: list[Example], course: Course) -> dict[str, Tensor]:
    for one in batch:
        course.skipped.update(one.skipped)
    pictures, targets = on_device(batch, course.device)
    kind, mixed = course.device.type, course.precision != "fp32"
    with torch.autocast(kind, dtype=AUTOCAST.get(course.precision), enabled=mixed):
        losses: dict[str, Tensor] = network(pictures, targets)
    return {name: part.float() for name, part in losses.items()}


class _Saver:
    """Checkpoints of a training: written whole or not at all, with a checksum; one is kept."""

    def __init__(
        self, network: nn.Module, solver: torch.optim.Optimizer, scaler: torch.amp.GradScaler, course: Course
    ) -> None:
        self._parts: dict[str, Any] = {"model": network, "optimizer": solver, "scaler": scaler}
        self._course, self._checkpoints = course, Checkpoints(course.folder)

    def restore(self) -> int:
        """Take over the newest checkpoint that is whole. Returns the iterations that are done."""
        for path in reversed(self._checkpoints.paths()):
            state = read(path)
            if state is not None:
                for name, part in self._parts.items():
                    part.load_state_dict(state[name])
                self._course.losses.update(state["losses"])
                self._course.skipped.update(state["skipped"])
                return int(state["step"])
            self._course.tell(f"{path} is damaged and is passed over")
        return 0

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` iterations. Raises TrainingError."""
        course = self._course
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state |= {"format": FORMAT, "step": step, "losses": course.losses, "skipped": course.skipped}
        with_patience(lambda: self._checkpoints.save(state, keep=1), course.tell)


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence(seed, spawn_key=(_STEPS, step)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """What the detector draws (sizes, boxes to learn from) leaves the random numbers of everybody else as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
