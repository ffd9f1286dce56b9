"""The supervised baseline of `moco eval`: the subject's network trained from random weights on the same labels."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from moco.errors import UserError, counted
from moco.evaluate.finetune import Course, Preparation, Trained, predict, train_on_labels
from moco.evaluate.pictures import Part
from moco.evaluation.comparison import Comparison, Side
from moco.evaluation.figures import share
from moco.evaluation_settings import ScratchSettings
from moco.settings import ViewSettings

BATCH = 64
"""Pictures per step for which learning rates are given."""
SCRATCH_PASSES = 30
"""Fewest passes over the labelled pictures of a training from scratch, however many there are."""
SCRATCH = "supervised from scratch"


def sides(work: Comparison, settings: ScratchSettings) -> Iterator[Side]:
    """The networks side by side, and where asked one that learned from all labels of the pictures to learn from.

    Raises UserError where there are no labels, or the subject itself is untrained.
    """
    if settings.scratch:
        check_scratch(work)
    yield from work.sides()
    if settings.scratch:
        trained = from_scratch(work, settings, work.train, work.settings.seed)
        right = classes_found(work, trained) == work.test.known()
        work.notes.append(
            f"{SCRATCH}: {counted(trained.steps, 'step')} of {min(BATCH, len(work.train))} pictures; its own "
            f"classifier is right for {share(right):.1%}"
        )
        yield work.side(SCRATCH, trained.network[0])


def from_scratch(work: Comparison, settings: ScratchSettings, part: Part, seed: int) -> Trained:
    """The network of the subject, trained from random weights on the labels of a part of the pictures."""
    steps = max(settings.scratch_steps, -(-SCRATCH_PASSES * len(part) // BATCH))
    course = Course(steps, mild_views(work), batch_size=BATCH, learning_rate=settings.scratch_lr)
    with work.bar("training from scratch", steps) as say:
        return train_on_labels(
            untrained(work, seed), part, classes=work.classes, course=course, pictures=preparation(work), seed=seed,
            say=say,
        )  # fmt: skip


def check_scratch(work: Comparison) -> None:
    """Raises UserError where there is nothing that training from scratch could be compared with, or learn from."""
    if work.subject.untrained is None:
        raise UserError("--scratch is what a pre-trained network is compared with, and this one is untrained")
    if work.train.labels is None:
        raise UserError("--scratch learns from labels, and these pictures have none: see --labels")


def untrained(work: Comparison, seed: int) -> nn.Module:
    """The network of the subject with random weights."""
    assert work.subject.untrained is not None
    return work.subject.untrained(seed)


def preparation(work: Comparison) -> Preparation:
    """How pictures are prepared for training and prediction."""
    subject, settings = work.subject, work.settings
    return Preparation(
        subject.size, subject.channels, subject.mean, subject.std, work.device, settings.precision, settings.workers
    )


def classes_found(work: Comparison, trained: Trained) -> Tensor:
    """What a trained network takes the test pictures for: (M,) int64 on the CPU."""
    return predict(trained.network, preparation(work), work.test).argmax(dim=1)


def mild_views(work: Comparison) -> ViewSettings:
    """Augmentation of supervised training: crops of the run, flips as in the run; no change of colours."""
    found = work.subject.settings.query_views if work.subject.settings is not None else ViewSettings()
    return found.model_copy(update={"jitter_probability": 0.0, "grayscale_probability": 0.0, "blur_probability": 0.0})
