"""The tasks of `moco eval`: from a comparison to rows of figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moco.data.device import place
from moco.data.loader import ViewStream
from moco.data.sources import ArraySource
from moco.evaluate.features import encode
from moco.evaluate.knn import knn_predict, usable_k
from moco.evaluate.linear import linear_probe
from moco.evaluate.paper_probe import encode_views, find_rate, paper_probe
from moco.evaluate.ranking import ranking_figures
from moco.evaluation.comparison import Comparison, Side
from moco.evaluation.figures import Figures, share
from moco.evaluation.finetuning import few_shot, fine_tune
from moco.evaluation.scratch import sides
from moco.evaluation_settings import EvaluationSettings, KnnSettings, LinearSettings, RetrievalSettings
from moco.settings import ViewSettings


def run_task(task: str, work: Comparison) -> Figures:
    """Carry out a task of that name."""
    todo: dict[str, Callable[[Comparison, Any], Figures]] = {
        "knn": _knn, "linear": _linear, "fewshot": few_shot, "finetune": fine_tune, "retrieval": _retrieval
    }  # fmt: skip
    return todo[task](work, work.settings)


def _knn(work: Comparison, settings: KnnSettings) -> Figures:
    found = Figures({})
    used = usable_k(settings.k, len(work.train))
    found.details["k"] = used
    if used < settings.k:
        work.notes.append(f"k is {used}, not {settings.k}: there are no more pictures to vote")
    smallest = len(work.train) // max(work.classes, 1)
    if used > smallest:
        work.notes.append(
            f"k is {used}, and a class has {smallest} pictures on average: --k 20 suits small data better"
        )
    labels, test_labels = work.train.known(), work.test.known()
    for side in sides(work, settings):
        bank, queries = work.features(side, work.train).to(work.device), work.features(side, work.test)
        classes = knn_predict(
            bank, labels, queries, k=used, temperature=settings.temperature, classes=work.classes
        ).cpu()
        found.rows[side.label] = {"kNN accuracy": share(classes == test_labels)}
        if len(found.rows) == 1:
            found.add_classes(work, classes, "knn")
    return found


def _linear(work: Comparison, settings: LinearSettings) -> Figures:
    found = Figures({}, {"protocol": settings.protocol})
    for side in sides(work, settings):
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
            found.add_classes(work, classes, "linear")
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


def _retrieval(work: Comparison, settings: RetrievalSettings) -> Figures:
    by_label = settings.by == "label" or (settings.by == "auto" and work.test.labels is not None)
    found = Figures({}, {"by": "label" if by_label else "view"})
    if by_label:
        for side in sides(work, settings):
            bank, queries = work.features(side, work.train).to(work.device), work.features(side, work.test)
            found.rows[side.label] = ranking_figures(
                queries, work.test.known(), bank, work.train.known(), recall_at=settings.recall
            )
        return found
    stream = _view_pairs(work, settings)
    numbers = torch.arange(stream.steps_per_epoch * stream.batch_size)
    for side in sides(work, settings):
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
