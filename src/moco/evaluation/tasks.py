"""The tasks of `moco eval`: from a comparison to rows of figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from moco.data.device import place
from moco.data.loader import ViewStream
from moco.data.sources import ArraySource
from moco.errors import UserError
from moco.evaluate.confusion import MOST_SHOWN, confusion_matrix, draw_confusion, per_class
from moco.evaluate.features import encode
from moco.evaluate.knn import knn_predict, usable_k
from moco.evaluate.linear import few_labels, linear_probe
from moco.evaluate.paper_probe import encode_views, find_rate, paper_probe
from moco.evaluate.ranking import ranking_figures
from moco.evaluate.scratch import BATCH as SCRATCH_BATCH
from moco.evaluate.scratch import scratch_accuracy
from moco.evaluation.comparison import Comparison, Side
from moco.evaluation_settings import (
    EvaluationSettings,
    FewShotSettings,
    KnnSettings,
    LinearSettings,
    RetrievalSettings,
)
from moco.settings import ViewSettings

SCRATCH_PASSES = 30
"""Fewest passes over the labelled pictures of a training from scratch, however many there are."""


@dataclass
class Figures:
    """What a task found.

    rows: figures by row and name, shares from 0 to 1. details: what else goes into the JSON. pictures: PNG by name.
    """

    rows: dict[str, dict[str, float]]
    details: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)


def run_task(task: str, work: Comparison) -> Figures:
    """Carry out a task of that name."""
    todo: dict[str, Callable[[Comparison, Any], Figures]] = {
        "knn": _knn, "linear": _linear, "fewshot": _few_shot, "retrieval": _retrieval
    }  # fmt: skip
    return todo[task](work, work.settings)


def _knn(work: Comparison, settings: KnnSettings) -> Figures:
    found = Figures({})
    used = usable_k(settings.k, len(work.train))
    found.details["k"] = used
    if used < settings.k:
        work.notes.append(f"k is {used}, not {settings.k}: there are no more pictures to vote")
    labels, test_labels = work.train.known(), work.test.known()
    for side in work.sides():
        bank, queries = work.features(side, work.train).to(work.device), work.features(side, work.test)
        classes = knn_predict(
            bank, labels, queries, k=used, temperature=settings.temperature, classes=work.classes
        ).cpu()
        found.rows[side.label] = {"kNN accuracy": _share(classes == test_labels)}
        if len(found.rows) == 1:
            _add_classes(found, work, classes, "knn")
    return found


def _add_classes(found: Figures, work: Comparison, classes: Tensor, name: str) -> None:
    """The confusion of the subject, in the details and as a picture."""
    matrix = confusion_matrix(work.test.known(), classes, work.classes)
    found.details["classes"] = list(work.test.classes)
    found.details["per_class"] = dict(zip(work.test.classes, per_class(matrix), strict=True))
    found.details["confusion"] = matrix.tolist()
    if work.classes <= MOST_SHOWN:
        title = f"{name}: {work.subject.label}"
        found.pictures[f"{name}-confusion.png"] = draw_confusion(matrix, work.test.classes, title)


def _linear(work: Comparison, settings: LinearSettings) -> Figures:
    found = Figures({}, {"protocol": settings.protocol})
    for side in work.sides():
        if settings.protocol == "fast":
            probe = linear_probe(
                work.features(side, work.train), work.train.known(), work.features(side, work.test),
                work.test.known(), seed=settings.seed,
            )  # fmt: skip
            found.rows[side.label] = {"linear accuracy": probe.accuracy, "L2 penalty": probe.strength}
            classes = probe.found
        else:
            classes = _paper(work, settings, side, found)
        if len(found.rows) == 1:
            _add_classes(found, work, classes, "linear")
    return found


def _paper(work: Comparison, settings: LinearSettings, side: Side, found: Figures) -> Tensor:
    """The protocol of the paper for one row. Returns the classes of the test pictures."""
    subject = work.subject
    common: dict[str, Any] = {
        "size": subject.size, "channels": subject.channels, "mean": side.mean, "std": side.std,
        "batch_size": settings.batch_size, "seed": settings.seed, "device": work.device,
        "precision": settings.precision, "workers": settings.workers,
    }  # fmt: skip
    if settings.lr == "auto":
        rate, searched = find_rate(
            *encode_views(side.network, work.train, **common), work.features(side, work.train), work.train.known(),
            classes=work.classes, batch_size=settings.batch_size, seed=settings.seed,
        )  # fmt: skip
        found.details.setdefault("rates", {})[side.label] = {f"{rate:g}": score for rate, score in searched.items()}
    else:
        rate = settings.lr
    test = work.features(side, work.test)
    with work.bar(f"linear probe · {side.label}", settings.epochs) as advance:
        probe = paper_probe(
            side.network, work.train, test, work.test.known(), classes=work.classes, learning_rate=rate,
            epochs=settings.epochs, say=lambda _: advance(1), **common,
        )  # fmt: skip
    if probe.warning:
        work.notes.append(f"{side.label}: {probe.warning}")
    found.rows[side.label] = {
        "linear accuracy": probe.accuracy, "learning rate": rate, "last training loss": probe.losses[-1]
    }  # fmt: skip
    found.details.setdefault("losses", {})[side.label] = list(probe.losses)
    return probe.found


def _few_shot(work: Comparison, settings: FewShotSettings) -> Figures:
    if settings.scratch and work.subject.untrained is None:
        raise UserError("--scratch is what a pre-trained network is compared with, and this one is untrained")
    labels, test_labels = work.train.known(), work.test.known()
    plans = _plans(settings, labels, work.classes)
    draws = {
        name: [few_labels(labels, count, settings.seed + draw) for draw in range(settings.draws)]
        for name, count in plans.items()
    }
    found = Figures({}, {"per_class_labels": plans, "draws": {}})
    for side in work.sides():
        bank, test = work.features(side, work.train), work.features(side, work.test)

        def probe(rows: Tensor, seed: int, bank: Tensor = bank, test: Tensor = test) -> float:
            return linear_probe(bank[rows], labels[rows], test, test_labels, seed=seed).accuracy

        _add_draws(found, f"{side.label}, linear probe", draws, probe, settings.seed)
    if settings.scratch:
        total = len(plans) * settings.draws
        with work.bar("training from scratch", total) as advance:

            def scratch(rows: Tensor, seed: int) -> float:
                accuracy = _from_scratch(work, settings, rows, seed)
                advance(1)
                return accuracy

            _add_draws(found, "supervised from scratch", draws, scratch, settings.seed)
    return found


def _plans(settings: FewShotSettings, labels: Tensor, classes: int) -> dict[str, int]:
    """Labels per class by the name of the column."""
    if settings.shots:
        return {f"{count} per class": count for count in settings.shots}
    return {
        f"{share * 100:g} %": max(round(share * len(labels) / max(len(labels.unique()), 1)), 1)
        for share in settings.shares
    }


def _add_draws(
    found: Figures, row: str, draws: dict[str, list[Tensor]], accuracy: Callable[[Tensor, int], float], seed: int
) -> None:
    found.rows[row], found.details["draws"][row] = {}, {}
    for name, several in draws.items():
        values = [accuracy(rows, seed + number) for number, rows in enumerate(several)]
        found.details["draws"][row][name] = values
        found.rows[row][name] = mean(values)
        found.rows[row][f"{name} ±"] = stdev(values) if len(values) > 1 else 0.0


def _from_scratch(work: Comparison, settings: FewShotSettings, rows: Tensor, seed: int) -> float:
    assert work.subject.untrained is not None
    network = work.subject.untrained(seed)
    part = work.train.rows(rows)
    passes = -(-SCRATCH_PASSES * len(part) // SCRATCH_BATCH)
    subject = work.subject
    return scratch_accuracy(
        network, part, list(work.batches(work.test)), work.test.known(), size=subject.size, channels=subject.channels,
        mean=subject.mean, std=subject.std, classes=work.classes, views=_mild(work),
        steps=max(settings.scratch_steps, passes), learning_rate=settings.scratch_lr, seed=seed, device=work.device,
        precision=settings.precision, workers=settings.workers,
    )  # fmt: skip


def _mild(work: Comparison) -> ViewSettings:
    """Augmentation of supervised training: crops of the run, flips as in the run; no change of colours."""
    found = work.subject.settings.query_views if work.subject.settings is not None else ViewSettings()
    return found.model_copy(update={"jitter_probability": 0.0, "grayscale_probability": 0.0, "blur_probability": 0.0})


def _retrieval(work: Comparison, settings: RetrievalSettings) -> Figures:
    by_label = settings.by == "label" or (settings.by == "auto" and work.test.labels is not None)
    found = Figures({}, {"by": "label" if by_label else "view"})
    if by_label:
        for side in work.sides():
            bank, queries = work.features(side, work.train).to(work.device), work.features(side, work.test)
            found.rows[side.label] = ranking_figures(
                queries, work.test.known(), bank, work.train.known(), recall_at=settings.recall
            )
        return found
    stream = _view_pairs(work, settings)
    numbers = torch.arange(stream.steps_per_epoch * stream.batch_size)
    for side in work.sides():
        pairs = (place(made, work.device) for made in stream.run(0, stream.steps_per_epoch))
        both = encode(
            side.network, (torch.cat([pair.query, pair.key]) for pair in pairs), mean=side.mean, std=side.std,
            device=work.device, precision=settings.precision,
        ).unflatten(0, (-1, 2, stream.batch_size))  # fmt: skip
        first, second = both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)
        found.rows[side.label] = ranking_figures(first, numbers, second, numbers, recall_at=settings.recall)
    return found


def _view_pairs(work: Comparison, settings: EvaluationSettings) -> ViewStream:
    """Two views of each test picture, made as in the run's training (v2's where there is no run)."""
    views = work.subject.settings.query_views if work.subject.settings is not None else ViewSettings()
    source = work.test.as_source()
    small = isinstance(source, ArraySource) and max(source.images.shape[1:3]) <= 96
    stream = ViewStream(
        source, query=views, key=views, size=work.subject.size, channels=work.subject.channels,
        batch_size=min(256, len(source)), seed=settings.seed, workers=settings.workers,
        way="batch" if small else "image", device=work.device,
    )  # fmt: skip
    used = stream.steps_per_epoch * stream.batch_size
    if used < len(source):
        work.notes.append(f"{used} of {len(source)} pictures: whole batches of {stream.batch_size} only")
    return stream


def _share(right: Tensor) -> float:
    return float(right.double().mean())
