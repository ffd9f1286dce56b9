"""One picture of a run: loss beside its chance level, contrast accuracy, similarities, and the checks after epochs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moco.train.run import Run

# Figures of a training line; whatever else stands in a line beside step and epoch is a check.
TRAINING = ("loss", "chance_loss", "contrast_accuracy", "positive_similarity", "negative_similarity", "feature_spread")
LARGE_CHECKS = ("effective_rank", "oldest_key_age", "uniformity")
"""Checks that are not drawn: beside them, those between 0 and 1 would be flat lines."""
LARGEST = 1e9
"""Beyond it nothing is drawn, as with what is no number."""


def draw_curves(run: Run) -> Path:
    """Draw curves.png into the run folder and return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = run.metrics()
    training = [line for line in lines if "loss" in line]
    checks = [line for line in lines if "loss" not in line]
    figure = Figure(figsize=(12, 3.6))
    FigureCanvasAgg(figure)
    # Fixed margins: matplotlib's own layout would draw everything once more to find them, half of the time.
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.13, top=0.91, wspace=0.3)
    loss, similarity, check = figure.subplots(1, 3)

    _curve(loss, training, "loss", "C0")
    _curve(loss, training, "chance_loss", "grey", label="chance", linestyle="--")
    highest = max((value for name in TRAINING[:2] for _, value in _points(training, name)), default=1.0)
    loss.set(title="loss", xlabel="epoch", ylim=(0, 1.4 * highest))  # room for the legend
    accuracy = loss.twinx()
    _curve(accuracy, training, "contrast_accuracy", "C1", label="contrast accuracy")
    accuracy.set(ylim=(0, 1.4), yticks=(0, 0.25, 0.5, 0.75, 1), yticklabels=("0 %", "25 %", "50 %", "75 %", "100 %"))
    handles = [*loss.get_lines(), *accuracy.get_lines()]
    loss.legend(handles, [line.get_label() for line in handles], fontsize=8, loc="upper right")

    for name in TRAINING[3:]:
        _curve(similarity, training, name, None, label=name.replace("_", " "))
    similarity.set(title="similarities and spread", xlabel="epoch")
    similarity.legend(fontsize=8)

    names = sorted({name for line in checks for name in line if name not in ("step", "epoch", *LARGE_CHECKS)})
    for name in names:
        _curve(check, checks, name, None, label=name.replace("_", " "), marker="o", markersize=3)
    check.set(title="checks after epochs" if names else "no checks (monitor none)", xlabel="epoch")
    if names:
        check.legend(fontsize=8)
    path = run.path / "curves.png"
    figure.savefig(path, dpi=110)
    return path


def _curve(axes: Any, lines: list[dict[str, Any]], name: str, color: str | None, **style: Any) -> None:
    points = _points(lines, name)
    if points:
        axes.plot(*zip(*points, strict=True), color=color, **({"label": name} | style))


def _points(lines: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Epoch and value where both can be drawn: not those of a damaged line."""
    found = [(line["epoch"], line[name]) for line in lines if "epoch" in line and name in line]
    return [point for point in found if max(map(abs, point)) < LARGEST]
