"""The figures of `moco eval detect` over several seeds, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Detection:
    """What was found.

    rows: figures by row (the subject first) and name, from 0 to 1; `NAME ±` is the standard deviation over the seeds.
    details: everything that is in the JSON. notes: lines for the reader. path: where the JSON is.
    """

    rows: dict[str, dict[str, float]]
    details: dict[str, Any]
    notes: tuple[str, ...]
    path: Path | None


def rows_of(trained: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean and standard deviation of the figures of several trainings, by row."""
    rows: dict[str, dict[str, float]] = {}
    for label, several in trained.items():
        rows[label] = {}
        for name in several[0]:
            values = [one[name] for one in several]
            rows[label][name] = mean(values)
            if len(values) > 1:
                rows[label][f"{name} ±"] = stdev(values)
    return rows


def show(found: Detection, console: Console) -> None:
    """Print the table and the notes."""
    pictures, seeds = found.details["pictures"], found.details["settings"]["seeds"]
    what = (
        f"{found.details['resolved']['detector']}: {pictures['to learn from']} pictures, tested on "
        f"{pictures['to test on']} others, {seeds} seed{'s' if seeds > 1 else ''}, %"
    )
    shown = Table(title=escape(what))
    shown.add_column("start")
    names = [name for name in next(iter(found.rows.values())) if not name.endswith(" ±")]
    for name in names:
        shown.add_column(name, justify="right")
    for label, row in found.rows.items():
        shown.add_row(escape(label), *(_cell(row, name) for name in names))
    console.print(shown)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if found.path is not None:
        console.print(f"figures: {found.path}", highlight=False, markup=False)


def _cell(row: Mapping[str, float], name: str) -> str:
    spread = row.get(f"{name} ±")
    return f"{row[name] * 100:.1f}" + (f" ± {spread * 100:.1f}" if spread is not None else "")
