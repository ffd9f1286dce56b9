"""Supervised training of a whole network: fine-tuning of one that has learned, or from scratch. One loop for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from timm.optim._param_groups import param_groups_layer_decay
from torch import Tensor, nn

from moco.contrast.encoders import feature_width
from moco.data.device import prefetch
from moco.data.loader import ViewStream, evaluation_batches, small_in_memory
from moco.data.views import normalize
from moco.errors import TrainingError
from moco.evaluate.features import AUTOCAST, Precision, encode
from moco.evaluate.pictures import Part
from moco.settings import ViewSettings
from moco.train.memory import keep_freed_memory

Optimizer = Literal["sgd", "adamw"]

ENCODED_AT_ONCE = 256
CHECKS = 20
"""Looks at the validation part during a training; never more than one a pass."""


@dataclass(frozen=True)
class Preparation:
    """How pictures come to a network. mean, std: per channel, on the scale 0 to 1. workers: processes that decode."""

    size: int
    channels: int
    mean: Sequence[float]
    std: Sequence[float]
    device: torch.device
    precision: Precision = "fp32"
    workers: int = 0

    def batches(self, part: Part) -> Iterator[Tensor]:
        """The pictures of a part as they are tested, see `evaluation_batches`."""
        return evaluation_batches(
            part.source, part.indices, size=self.size, channels=self.channels, batch_size=ENCODED_AT_ONCE,
            workers=self.workers,
        )  # fmt: skip

    def stream(self, part: Part, query: ViewSettings, key: ViewSettings, batch_size: int, seed: int) -> ViewStream:
        """Random views of the pictures of a part. Streams of one part, batch size and seed show the same pictures."""
        source = part.as_source()
        return ViewStream(
            source, query=query, key=key, size=self.size, channels=self.channels, batch_size=batch_size, seed=seed,
            workers=self.workers, way="batch" if small_in_memory(source) else "image", device=self.device,
        )  # fmt: skip

    def normalized(self, pictures: Tensor) -> Tensor:
        """Pictures on the device as the network wants them."""
        moved = pictures.to(self.device, non_blocking=True)
        return normalize(moved, self.mean, self.std).contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Course:
    """How a network is trained on labels: linear warm-up, then half a cosine.

    steps: optimiser steps. views: augmentation. batch_size: pictures per step; fewer where there are fewer. optimizer:
    SGD with momentum 0.9, or AdamW. learning_rate: of the classifier. layer_decay: each block's rate is that of the
    block above it times this (1: one rate for all). weight_decay: none on biases, norm layers and what the backbone
    exempts. warmup: share of the steps. patience: looks at the validation part without a better one until it stops.
    """

    steps: int
    views: ViewSettings
    batch_size: int = 64
    optimizer: Optimizer = "sgd"
    learning_rate: float = 0.05
    layer_decay: float = 1.0
    weight_decay: float = 5e-4
    warmup: float = 0.05
    patience: int = 10

    def rate(self, step: int) -> float:
        """The rate of the classifier in a step, from 0."""
        warmup = round(self.warmup * self.steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup))) / 2


class Beside(Protocol):
    """A second loss that is learned beside the labels, with the same backbone. `start` comes before everything."""

    def parameters(self) -> Sequence[nn.Parameter]:
        """What learns besides the backbone."""

    def start(self, steps: int, batch_size: int) -> None:
        """A training of so many steps begins."""

    def begin_step(self, progress: float) -> None:
        """Before the first forward pass of a step. progress: part of the training that is done, 0 to 1."""

    def loss(self, autocast: torch.autocast) -> Tensor:
        """The loss to add in this step, weighted."""

    def end_step(self) -> None:
        """After the optimiser's step."""


@dataclass(frozen=True)
class Trained:
    """What a training came to.

    network: backbone and classifier one after the other, pictures → (N, classes), with the weights of `best_step`.
    steps: those that were done. losses, validation: mean training loss since the last look, accuracy (0 to 1) on the
    validation part, by step (one loss at the end, and no accuracy, where there is no such part).
    """

    network: nn.Sequential
    steps: int
    best_step: int
    losses: dict[int, float]
    validation: dict[int, float]

    @property
    def validation_accuracy(self) -> float | None:
        """Accuracy on the validation part at the best step; None without one."""
        return self.validation.get(self.best_step)


def train_on_labels(
    backbone: nn.Module,
    train: Part,
    *,
    classes: int,
    course: Course,
    pictures: Preparation,
    validation: Part | None = None,
    beside: Beside | None = None,
    seed: int = 0,
    say: Callable[[int], object] = lambda steps: None,
) -> Trained:
    """Train `backbone`, in place, and a new linear layer on labelled pictures.

    backbone: (n, channels, size, size) → (n, D), on the device of `pictures`. Batch norm learns too, in train mode.
    validation: labelled pictures that are not learned from: the weights of the best look at them are kept (by
    accuracy, a lower loss decides a tie), and after `course.patience` looks without a better one the training ends.
    Without it, all steps are done and the last weights count. beside: a second loss. say: told of steps that are done.

    Everything drawn depends on `seed` alone. Raises TrainingError where the loss is no number.
    """
    network = _with_classifier(backbone, classes, pictures, seed)
    labels = train.known().to(pictures.device)
    batch_size = min(course.batch_size, len(train))
    stream = pictures.stream(train, course.views, course.views, batch_size, seed)
    if beside is not None:
        beside.start(course.steps, batch_size)
    solver = _solver(network, course, beside)
    scaler = torch.amp.GradScaler(pictures.device.type, enabled=pictures.precision == "fp16")
    autocast = torch.autocast(
        pictures.device.type, dtype=AUTOCAST.get(pictures.precision), enabled=pictures.precision != "fp32"
    )
    record = _Record(network, validation, pictures, course.patience)
    look_every = max(stream.steps_per_epoch, -(-course.steps // CHECKS))
    if pictures.device.type == "cpu":
        keep_freed_memory()
    done = 0
    with _own_randomness(pictures.device, seed):
        for step, batch in enumerate(prefetch(stream.run(0, course.steps), pictures.device)):
            for group in solver.param_groups:
                group["lr"] = course.rate(step) * group["lr_scale"]
            if beside is not None:
                beside.begin_step(step / course.steps)
            with autocast:
                logits = network(pictures.normalized(batch.query))
            loss = F.cross_entropy(logits.float(), labels[batch.ids])
            scaler.scale(loss).backward()
            record.add(loss)
            if beside is not None:  # a backward pass of its own: one graph at a time in memory
                scaler.scale(beside.loss(autocast)).backward()
            scaler.step(solver)
            scaler.update()
            solver.zero_grad(set_to_none=True)
            if beside is not None:
                beside.end_step()
            done = step + 1
            say(1)
            if done == course.steps or (validation is not None and done % look_every == 0):
                record.look(done)
                if record.in_vain > course.patience:
                    break
    say(course.steps - done)
    return record.finish(done)


class _Record:
    """Losses, looks at the validation part, and the weights of the best one."""

    def __init__(self, network: nn.Sequential, validation: Part | None, pictures: Preparation, patience: int) -> None:
        self._network, self._validation, self._pictures = network, validation, pictures
        self._since: list[Tensor] = []
        self._best: tuple[tuple[float, float], int, dict[str, Tensor]] | None = None
        self.losses: dict[int, float] = {}
        self.found: dict[int, float] = {}
        self.in_vain = 0

    def add(self, loss: Tensor) -> None:
        self._since.append(loss.detach())

    def look(self, step: int) -> None:
        self.losses[step] = loss = float(torch.stack(self._since).mean())
        self._since.clear()
        if not math.isfinite(loss):
            raise TrainingError(f"the loss on the labels was no number by step {step}: lower the learning rate")
        if self._validation is None:
            return
        logits = predict(self._network, self._pictures, self._validation)
        labels = self._validation.known()
        self.found[step] = accuracy = float((logits.argmax(dim=1) == labels).double().mean())
        score = accuracy, -float(F.cross_entropy(logits, labels))
        self.in_vain += 1
        if self._best is None or score >= self._best[0]:
            weights = {name: held.clone() for name, held in self._network.state_dict().items()}
            self._best, self.in_vain = (score, step, weights), 0

    def finish(self, steps: int) -> Trained:
        best = steps
        if self._best is not None:
            _, best, weights = self._best
            self._network.load_state_dict(weights)
        return Trained(self._network.eval(), steps, best, self.losses, self.found)


def predict(network: nn.Module, pictures: Preparation, part: Part) -> Tensor:
    """What a network makes of the pictures of a part, as they are: (N, classes) on the CPU."""
    return encode(
        network, pictures.batches(part), mean=pictures.mean, std=pictures.std, device=pictures.device,
        precision=pictures.precision,
    )  # fmt: skip


def _with_classifier(backbone: nn.Module, classes: int, pictures: Preparation, seed: int) -> nn.Sequential:
    width = feature_width(backbone.cpu(), pictures.channels, pictures.size)
    classifier = nn.utils.skip_init(nn.Linear, width, classes)
    with torch.no_grad():  # small, so that the first steps do not shake what has been learned
        classifier.weight.normal_(0, 0.01, generator=torch.Generator().manual_seed(seed))
        classifier.bias.zero_()
    network = nn.Sequential()
    network.add_module("backbone", backbone)
    network.add_module("classifier", classifier)
    return network.to(pictures.device).to(memory_format=torch.channels_last).train()


def _solver(network: nn.Sequential, course: Course, beside: Beside | None) -> torch.optim.Optimizer:
    groups = parameter_groups(network, course, beside.parameters() if beside is not None else ())
    if course.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=course.learning_rate)
    return torch.optim.SGD(groups, lr=course.learning_rate, momentum=0.9)


def parameter_groups(network: nn.Sequential, course: Course, more: Sequence[nn.Parameter] = ()) -> list[dict[str, Any]]:
    """Groups for an optimiser, `lr_scale` in each: classifier (and `more`) 1, the last block `layer_decay`, and so on.

    The blocks are those that timm knows of the backbone (BEiT's layer-wise rates, arXiv 2106.08254).
    """
    backbone, classifier = network.get_submodule("backbone"), network.get_submodule("classifier")
    exempt: Any = getattr(backbone, "no_weight_decay", tuple)()
    blocks = param_groups_layer_decay(
        backbone, course.weight_decay, no_weight_decay_list=exempt, layer_decay=course.layer_decay
    )
    top = (*classifier.parameters(), *more)
    return [
        {"params": [p for p in top if p.ndim > 1], "weight_decay": course.weight_decay, "lr_scale": 1.0},
        {"params": [p for p in top if p.ndim <= 1], "weight_decay": 0.0, "lr_scale": 1.0},
        *(block | {"lr_scale": block["lr_scale"] * course.layer_decay} for block in blocks),
    ]


@contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """What a network draws by itself (dropout) from the seed; outside, random numbers go on as if nothing happened."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
