"""What a comparison came to: a row for each method or value, mean and spread over the seeds, as table and picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from rich.markup import escape
from rich.table import Table

from moco.comparing.cells import Result


@dataclass(frozen=True)
class Line:
    """A row over its seeds. figures: mean and standard deviation (0 for one seed) of shares from 0 to 1, by name."""

    name: str
    seeds: int
    figures: dict[str, tuple[float, float]]
    images_per_second: float | None
    minutes: float | None
    peak_bytes: int | None
    failed: tuple[str, ...]


def lines(results: Sequence[Result]) -> list[Line]:
    """The results of all seeds of a row together, in the order of the rows."""
    found = []
    for name in dict.fromkeys(result.row for result in results):
        own = [result for result in results if result.row == name]
        good = [result for result in own if not result.failed]
        figures = {}
        for figure in dict.fromkeys(key for result in good for key in result.figures):
            values = [result.figures[figure] for result in good if figure in result.figures]
            figures[figure] = (mean(values), stdev(values) if len(values) > 1 else 0.0)
        rates = [result.images_per_second for result in good if result.images_per_second is not None]
        seconds = [result.seconds for result in good if result.seconds is not None]
        peaks = [result.peak_bytes for result in good if result.peak_bytes is not None]
        found.append(
            Line(
                name, len(good), figures, mean(rates) if rates else None, mean(seconds) / 60 if seconds else None,
                max(peaks, default=None), tuple(f"seed {bad.seed}: {bad.failed}" for bad in own if bad.failed),
            )
        )  # fmt: skip
    return found


def table(title: str, rows: Sequence[Line]) -> Table:
    """Figures in percent ± standard deviation over seeds; speed, time and memory of the training."""
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    shown = Table(title=escape(title))
    shown.add_column("")
    for name in [*(f"{name}, %" for name in names), "images/s", "minutes", "memory, GiB"]:
        shown.add_column(name, justify="right")
    best = {name: max(row.figures[name][0] for row in rows if name in row.figures) for name in names}
    for row in rows:
        cells = [_share(row, name, best[name]) for name in names]
        cells += [
            "–" if row.images_per_second is None else f"{row.images_per_second:,.0f}",
            "–" if row.minutes is None else f"{row.minutes:.1f}",
            "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}",
        ]
        shown.add_row(escape(row.name), *cells)
    return shown


def _share(row: Line, name: str, best: float | None = None) -> str:
    if name not in row.figures:
        return "failed" if row.failed else "–"
    value, spread = row.figures[name]
    text = f"{value * 100:.1f}" + (f" ± {spread * 100:.1f}" if row.seeds > 1 else "")
    return f"[bold]{text}[/bold]" if value == best else text


def markdown(rows: Sequence[Line]) -> str:
    """The same as a Markdown table, and what trainings failed with."""
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    head = ["", *(f"{name}, %" for name in names), "images/s", "minutes", "memory, GiB"]
    text = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in rows:
        cells = [row.name.replace("|", "\\|"), *(_share(row, name) for name in names)]
        cells.append("–" if row.images_per_second is None else f"{row.images_per_second:,.0f}")
        cells.append("–" if row.minutes is None else f"{row.minutes:.1f}")
        cells.append("–" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}")
        text.append("| " + " | ".join(cells) + " |")
    failed = [f"- {row.name}, {why}" for row in rows for why in row.failed]
    text += ["", "Failed:", "", *failed] if failed else []
    return "\n".join(text) + "\n"


def picture(title: str, rows: Sequence[Line]) -> bytes:
    """The figures as points with their spread, a panel for each figure: PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row.figures)) or [""]
    figure = Figure(figsize=(4.5 * len(names), 0.45 * len(rows) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        there = [(place, *row.figures[name]) for place, row in enumerate(rows) if name in row.figures]
        for place, value, spread in there:
            axes.errorbar(100 * value, place, xerr=100 * spread, fmt="o", color="C0", capsize=3)
        axes.set(title=f"{name}, %", ylim=(len(rows) - 0.5, -0.5))
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=10)
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=110)
    return held.getvalue()
