"""What a task of `moco eval` found, and figures over several draws of labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from moco.evaluate.confusion import MOST_SHOWN, confusion_matrix, draw_confusion, per_class
from moco.evaluate.linear import few_labels, linear_probe
from moco.evaluation.comparison import Comparison
from moco.evaluation_settings import AmountSettings

Draws = Mapping[str, Sequence[Tensor]]
"""Rows of the labelled pictures, draw by draw, by the name of the column."""


@dataclass
class Figures:
    """What a task found.

    rows: figures by row and name, shares from 0 to 1. details: what else goes into the JSON. pictures: PNG by what
    they show, the end of their file's name.
    """

    rows: dict[str, dict[str, float]]
    details: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)

    def add_classes(self, work: Comparison, classes: Tensor, name: str) -> None:
        """The confusion of the subject, in the details and as a picture. classes: (M,) what it took each for."""
        matrix = confusion_matrix(work.test.known(), classes, work.classes)
        self.details["classes"] = list(work.test.classes)
        self.details["per_class"] = dict(zip(work.test.classes, per_class(matrix), strict=True))
        self.details["confusion"] = matrix.tolist()
        if work.classes <= MOST_SHOWN:
            title = f"{name}: {work.subject.label}"
            self.pictures["confusion"] = draw_confusion(matrix, work.test.classes, title)

    def add_draws(self, row: str, draws: Draws, accuracy: Callable[[Tensor, int], float], seed: int) -> None:
        """A row with the mean of `accuracy(rows, seed)` over the draws of each column, and their standard deviation."""
        self.rows[row] = {}
        values_of = self.details.setdefault("draws", {}).setdefault(row, {})
        for name, several in draws.items():
            values = [accuracy(rows, seed + number) for number, rows in enumerate(several)]
            values_of[name] = values
            self.rows[row][name] = mean(values)
            if len(values) > 1:
                self.rows[row][f"{name} ±"] = stdev(values)

    def add_probes(self, work: Comparison, draws: Draws) -> None:
        """A row for each network beside the others: a linear probe on its features, from the labels of each draw."""
        labels, test_labels = work.train.known(), work.test.known()
        drawn = torch.cat([rows for several in draws.values() for rows in several]).unique()  # few of many
        for side in work.sides():
            bank, test = work.features(side, work.train.rows(drawn)), work.features(side, work.test)

            def probe(rows: Tensor, seed: int, bank: Tensor = bank, test: Tensor = test) -> float:
                learned = bank[torch.searchsorted(drawn, rows)]
                return linear_probe(learned, labels[rows], test, test_labels, seed=seed).accuracy

            self.add_draws(f"{side.label}, linear probe", draws, probe, work.settings.seed)


def drawn_labels(work: Comparison, settings: AmountSettings, draws: int) -> tuple[dict[str, int], Draws]:
    """Labels per class by the name of the column, and the rows of each draw, drawn evenly over the classes.

    Where neither shares nor shots are asked for, one column with all labels. Raises UserError for too few of a class.
    """
    labels, seed = work.train.known(), work.settings.seed
    per_class: dict[str, int] = {f"{count} per class": count for count in settings.shots}
    for share in settings.shares:
        per_class[f"{share * 100:g} %"] = max(round(share * len(labels) / max(len(labels.unique()), 1)), 1)
    if not per_class:
        return {}, {"all labels": [torch.arange(len(labels))] * draws}
    return per_class, {
        name: [few_labels(labels, count, seed + draw) for draw in range(draws)] for name, count in per_class.items()
    }


def share(right: Tensor) -> float:
    """The share of rows that are right."""
    return float(right.double().mean())
