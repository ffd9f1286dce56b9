"""Which classes are taken for which: the matrix, per-class accuracy, and a picture of it."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import Tensor

from moco.evaluate.features import checked_labels

MOST_SHOWN = 100
"""Classes up to which a picture of the matrix can be read."""


def confusion_matrix(labels: Tensor, found: Tensor, classes: int) -> Tensor:
    """(classes, classes) int64: how many rows of class i (first axis) were taken for class j.

    labels, found: (N,), 0 to classes − 1. Raises UserError for labels that do not fit.
    """
    labels = checked_labels(labels, None).cpu()
    found = checked_labels(found, len(labels), "the predictions").cpu()
    return torch.bincount(labels * classes + found, minlength=classes**2).view(classes, classes)


def per_class(matrix: Tensor) -> list[float | None]:
    """The share of each class that was found, 0 to 1; None for a class of which there is nothing to find."""
    totals = matrix.sum(1).tolist()
    return [int(matrix[number, number]) / total if total else None for number, total in enumerate(totals)]


def draw_confusion(matrix: Tensor, classes: Sequence[str], title: str) -> bytes:
    """The matrix as a PNG, in percent: rows are true classes, each sums to 100; numbers in cells up to 20 classes."""
    from matplotlib.figure import Figure

    percent = (100 * matrix / matrix.sum(1, keepdim=True).clamp(min=1)).numpy()
    side = min(max(0.55 * len(classes) + 2, 5), 16)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(picture, ax=axes, label="% of the true class", shrink=0.8)
    axes.set(title=title, xlabel="taken for", ylabel="true class")
    # Names come from folders: a dollar sign in one would start a formula.
    names = [name.replace("$", r"\$") for name in classes]
    axes.set_xticks(range(len(classes)), names, rotation=90)
    axes.set_yticks(range(len(classes)), names)
    if len(classes) <= 20:
        for row, column in torch.from_numpy(percent).nonzero().tolist():
            value = percent[row, column]
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color="white" if value > 50 else "black")
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=120)
    return written.getvalue()
