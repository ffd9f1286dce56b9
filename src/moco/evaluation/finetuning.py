"""`moco eval fewshot` and `moco eval finetune`: what few labels teach, to a classifier or to the whole network."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as as_safetensors
from torch import Tensor, nn

from moco import __version__
from moco.building import build_model
from moco.contrast.batchnorm import has_batchnorm
from moco.contrast.method import Method
from moco.errors import UserError, counted
from moco.evaluate.contrast_beside import ContrastBeside
from moco.evaluate.finetune import Course, Optimizer, Trained, train_on_labels
from moco.evaluate.pictures import Part, open_part, split
from moco.evaluate.subject import checkpoint_of
from moco.evaluation.comparison import Comparison
from moco.evaluation.figures import Figures, drawn_labels, share
from moco.evaluation.scratch import (
    BATCH,
    SCRATCH,
    check_scratch,
    classes_found,
    from_scratch,
    mild_views,
    preparation,
    untrained,
)
from moco.evaluation_settings import UNLABELLED_HINT, FewShotSettings, FineTuneSettings
from moco.settings import RunSettings
from moco.train.checkpoints import write_atomically

FEWEST_HELD = 50
"""Fewer pictures than this tell the epochs of a training apart by luck: all are learned from then."""
ASSUMED_GROUP = 32
"""Pictures per batch norm group of a run of several processes, whose number it does not note."""
USUAL: dict[Optimizer, tuple[float, float]] = {"sgd": (0.05, 5e-4), "adamw": (1e-3, 0.05)}
"""Learning rate at a batch of 64, and weight decay."""
Start = Callable[[Part, int], tuple[nn.Module, ContrastBeside | None]]


def few_shot(work: Comparison, settings: FewShotSettings) -> Figures:
    """Linear probes from few labels, and training from scratch on the same ones where asked."""
    if settings.scratch:
        check_scratch(work)
    amounts, draws = drawn_labels(work, settings, settings.draws)
    found = Figures({}, {"per_class_labels": amounts})
    found.add_probes(work, draws)
    if settings.scratch:

        def scratch(rows: Tensor, seed: int) -> float:
            trained = from_scratch(work, settings, work.train.rows(rows), seed)
            return share(classes_found(work, trained) == work.test.known())

        found.add_draws(SCRATCH, draws, scratch, settings.seed)
    return found


def fine_tune(work: Comparison, settings: FineTuneSettings) -> Figures:
    """The whole network trained on labels from its weights, beside the same from random ones and linear probes."""
    if settings.scratch:
        check_scratch(work)
    file = Path(settings.save).expanduser() if settings.save else None
    if file is not None:
        _check_file(file)
    if work.unlabelled is not None and not settings.contrastive_weight:
        raise UserError(UNLABELLED_HINT)
    label, start = f"{work.subject.label}, fine-tuned", _own_weights(work)
    if settings.contrastive_weight:
        label, start = f"{label} + {settings.contrastive_weight:g} × contrast", _with_contrast(work, settings)
    amounts, draws = drawn_labels(work, settings, settings.draws)
    found = Figures({}, {"per_class_labels": amounts, "trainings": {}})
    own = _Trainings(work, settings, _course(work, settings), start)
    found.add_draws(label, draws, own, settings.seed)
    found.details["trainings"][label] = own.noted
    assert own.best is not None
    found.add_classes(work, own.best.classes, "finetune")
    if file is not None:  # at once: what follows takes as long again
        _save(file, work, own.best.trained)
        work.notes.append(f"the fine-tuned weights are in {file}")
    if settings.scratch:
        course = _course(work, settings, scratch=True)
        scratch = _Trainings(work, settings, course, lambda _, seed: (untrained(work, seed), None))
        found.add_draws(SCRATCH, draws, scratch, settings.seed)
        found.details["trainings"][SCRATCH] = scratch.noted
    found.add_probes(work, draws)
    return found


@dataclass(frozen=True)
class _Tested:
    """A training, and what it took the test pictures for. rank: amount of labels, accuracy on the validation part."""

    trained: Trained
    classes: Tensor
    rank: tuple[int, float]


@dataclass
class _Trainings:
    """The trainings of one row: called with the labelled rows and the seed of each.

    course: steps, batch size and rate are put right for each. start: from the pictures to learn from and the seed to
    the backbone, and what is learned beside the labels. noted: what each came to, for the JSON. best: of those with
    the most labels the best on its validation part, never chosen by the test pictures.
    """

    work: Comparison
    settings: FineTuneSettings
    course: Course
    start: Start
    noted: list[dict[str, Any]] = field(default_factory=list)
    best: _Tested | None = None

    def __call__(self, rows: Tensor, seed: int) -> float:
        work, settings = self.work, self.settings
        train, validation = _held_out(work, work.train.rows(rows), settings.validation_share, seed)
        batch = min(settings.batch_size, len(train))
        backbone, beside = self.start(train, seed)
        steps = max(settings.steps, settings.epochs * (len(train) // batch))
        rate = self.course.learning_rate * batch / BATCH
        course = replace(self.course, steps=steps, batch_size=batch, learning_rate=rate)
        with work.bar(f"training on {counted(len(train), 'label')}", course.steps) as say:
            trained = train_on_labels(
                backbone, train, validation=validation, classes=work.classes, course=course,
                pictures=preparation(work), beside=beside, seed=seed, say=say,
            )  # fmt: skip
        classes = classes_found(work, trained)
        held = trained.validation_accuracy
        note: dict[str, Any] = {
            "labels": len(rows), "seed": seed, "steps": trained.steps, "best step": trained.best_step,
            "validation accuracy": held, "losses": trained.losses, "validation": trained.validation,
        }  # fmt: skip
        if beside is not None:
            note["contrastive losses"] = beside.mean_losses(trained.losses)
        self.noted.append(note)
        rank = len(rows), held or 0.0
        if self.best is None or rank > self.best.rank:
            self.best = _Tested(trained, classes, rank)
        return share(classes == work.test.known())


def _course(work: Comparison, settings: FineTuneSettings, *, scratch: bool = False) -> Course:
    """The settings with `auto` resolved: networks without batch norm, such as transformers, do not train with SGD."""
    by_network: Optimizer = "sgd" if has_batchnorm(work.subject.backbone) else "adamw"
    optimizer = by_network if settings.optimizer == "auto" else settings.optimizer
    usual, decay = USUAL[optimizer]
    rate = settings.scratch_lr if scratch else settings.lr
    return Course(
        settings.steps,
        mild_views(work),
        optimizer=optimizer,
        learning_rate=usual if rate == "auto" else rate,
        layer_decay=1.0 if scratch else settings.layer_decay,
        weight_decay=decay if settings.weight_decay == "auto" else settings.weight_decay,
        patience=settings.patience,
    )


def _held_out(work: Comparison, part: Part, amount: float, seed: int) -> tuple[Part, Part | None]:
    """The pictures to learn from, and those to choose the best step on, or None."""
    if not amount:
        return part, None
    if round(amount * len(part)) < FEWEST_HELD:
        note = (
            f"{len(part)} labels are too few to hold some back: all are learned from, and the weights of the last "
            f"step count (a validation part has {FEWEST_HELD} pictures or more; --validation-share)"
        )
        if note not in work.notes:
            work.notes.append(note)
        return part, None
    return split(part, amount, seed)


def _own_weights(work: Comparison) -> Start:
    return lambda _, seed: (copy.deepcopy(work.subject.backbone), None)


def _with_contrast(work: Comparison, settings: FineTuneSettings) -> Start:
    """The backbone inside the run's model, whose loss is learned beside the labels.

    Raises UserError without a run, and for a memory bank, which knows the pictures of its run only.
    """
    own = work.subject.settings
    if own is None:
        raise UserError(
            f"--contrastive-weight is for runs: {work.where.name} is a timm model, without a projection head, a key "
            "encoder and a queue; leave it away"
        )
    if own.dictionary == "memory-bank":
        raise UserError(
            f"--contrastive-weight: {work.where.name} compares with a memory bank, which has a vector for each picture "
            "of the run and none for others; leave it away"
        )
    given = settings.unlabelled if work.unlabelled is None else work.unlabelled
    none = isinstance(given, str) and not given
    further = None if none else open_part(given, "none", needed=False)
    model = _model(work, own, settings.batch_size * (1 if further is None else 2))

    def start(train: Part, seed: int) -> tuple[nn.Module, ContrastBeside]:
        copied = copy.deepcopy(model)
        beside = ContrastBeside(
            copied,
            settings.contrastive_weight,
            train,
            own.query_views,
            own.key_views,
            preparation(work),
            further,
            seed,
        )
        return copied.backbone, beside

    return start


def _model(work: Comparison, own: RunSettings, rows: int) -> Method:
    """The run's model as its checkpoint has it, normalising `rows` pictures in groups about as large as the run's."""
    state: Any = checkpoint_of(work.where, work.notes)
    pieces = own.batch_size // own.accumulate
    group = pieces // own.bn_groups if own.bn_groups > 1 or not own.shuffle_bn else ASSUMED_GROUP
    groups = max(round(rows / group), 2 if own.shuffle_bn else 1) if own.bn_groups > 1 or own.shuffle_bn else 1
    with torch.random.fork_rng(devices=[]):
        model = build_model(own.model_copy(update={"bn_groups": groups}))
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError(f"{work.where.name} does not fit its settings: {str(error).splitlines()[0]}") from error
    return model


def _check_file(file: Path) -> None:
    """Say now, and not after hours of training, that a file cannot be written."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UserError(f"cannot save to {file}: name a file in a folder that is there")


def _save(file: Path, work: Comparison, trained: Trained) -> None:
    """Write backbone and classifier with what is needed to use them, whole or not at all. Raises UserError."""
    subject = work.subject
    about = {
        "subject": work.where.name, "classes": list(work.train.classes), "image_size": subject.size,
        "channels": subject.channels, "mean": subject.mean, "std": subject.std, "moco": __version__,
    }  # fmt: skip
    if subject.settings is not None:
        names = ("backbone", "base_width", "stem")
        about |= {name: getattr(subject.settings, name) for name in names}
    weights = {name: held.detach().cpu().contiguous() for name, held in trained.network.state_dict().items()}
    try:
        write_atomically(file, as_safetensors(weights, {name: json.dumps(value) for name, value in about.items()}))
    except OSError as error:
        raise UserError(f"cannot save the fine-tuned weights to {file}: {error.strerror}") from error
