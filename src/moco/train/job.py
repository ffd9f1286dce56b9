"""What a training run works with, and how it becomes a checkpoint and comes back from one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from rich.console import Console

from moco.contrast.method import Method
from moco.data.bad_files import BadFiles
from moco.data.loader import ViewStream
from moco.errors import UserError, counted
from moco.settings import RunSettings
from moco.train.callbacks import Callbacks
from moco.train.checkpoints import FORMAT, BackgroundSaver
from moco.train.guard import FiniteGuard
from moco.train.lock import RunLock
from moco.train.memory import keep_freed_memory
from moco.train.optim import make_optimizer
from moco.train.parallel import Processes
from moco.train.run import SKIPPED, Run
from moco.train.window import Window

Monitor = Callable[[Method], dict[str, float]]


class Writer(Protocol):
    """What is used of TensorBoard's SummaryWriter; `trackers` has others."""

    def add_scalar(self, tag: str, value: float, step: int) -> object:
        """Add a point to a curve."""

    def flush(self) -> object:
        """Write to disk."""


@dataclass
class Job:
    """What a training run works with."""

    settings: RunSettings
    model: Method
    stream: ViewStream
    run: Run
    processes: Processes
    monitor: Monitor | None
    """Checks the model after an epoch, and leaves it as it is: names and values to write down. Called on all processes,
    to share the work; only the main one gets values."""
    console: Console | None
    writer: Writer | None = None
    lock: RunLock | None = None
    callbacks: Callbacks = field(default_factory=Callbacks)
    first_step: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    guard: FiniteGuard = field(init=False)
    window: Window = field(init=False)
    saver: BackgroundSaver = field(init=False)
    bad_files: BadFiles = field(init=False)

    def __post_init__(self) -> None:
        device = self.processes.device
        if device.type == "cpu":
            keep_freed_memory()
        self.model.to(device).to(memory_format=torch.channels_last)
        self.optimizer = make_optimizer(self.model, self.settings)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.settings.precision == "fp16")
        self.guard = FiniteGuard(
            device,
            self.optimizer,
            fused=self.optimizer.defaults.get("fused", False),
            every_step=device.type != "cuda" or self.settings.on_nan != "stop",
        )
        # Each process counts among the pictures that it reads itself.
        images = len(self.stream.source) // self.processes.world
        self.bad_files = BadFiles(images, self.settings.max_bad, where=f"{self.run.path}/{SKIPPED}")
        self.bad_files.add(self.run.skipped())
        self.window = Window(self.settings.batch_size, self.model.chance_loss)
        self.saver = BackgroundSaver(lambda state: self.run.save(state, self.settings.keep_checkpoints), self.say)

    def say(self, text: str) -> None:
        """Tell the user something, in one line."""
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False)

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole training."""
        return self.settings.epochs * self.stream.steps_per_epoch

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written. Raises UserError if it is not of this job."""
        images = len(self.stream.source)
        if state["images"] is None:
            state = self._placed(state)
        done = state["step"] // self.stream.steps_per_epoch
        if state["images"] != images:
            raise UserError(
                f"{self.run.path} was trained on {counted(state['images'], 'image')}, but there are {images} now: "
                "give it the data it had, or start a new run"
            )
        if done > self.settings.epochs:
            raise UserError(f"{self.run.path} has done {counted(done, 'epoch')} already: set --epochs {done} or more")
        self.load(state)
        if "window" in state:  # not in those of version 0.1
            self.window.load_state_dict(state["window"], self.processes.device)
        self.first_step = state["step"]

    def _placed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of an imported run (`moco.interop`), which counts epochs, among the steps of this data."""
        if "optimizer" not in state:
            raise UserError(
                f"{self.run.path} was imported without the parts that training needs: start a new run from its "
                "weights, moco pretrain DATA --init FILE"
            )
        step = state["epochs"] * self.stream.steps_per_epoch
        model = state["model"] | {"_extra_state": step}
        return state | {"step": step, "images": len(self.stream.source), "model": model}

    def load(self, state: dict[str, Any]) -> None:
        """Take over weights, queue and optimiser of a checkpoint."""
        self.model.load_state_dict(state["model"])
        # How the optimiser computes is a matter of this machine, not of the run.
        here = {"fused": self.optimizer.defaults["fused"]} if "fused" in self.optimizer.defaults else {}
        groups = [group | here for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": groups})
        self.scaler.load_state_dict(state["scaler"])

    def save(self, step: int, *, best: bool = False) -> None:
        """Write a checkpoint after `step` steps, in the background. Main process only."""
        state = {
            "format": FORMAT,
            "step": step,
            "images": len(self.stream.source),
            "best": best,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "window": self.window.state_dict(),
        }
        self.saver.save(state)
