"""Several runs on one page: curves over each other, settings that differ, verdicts and figures side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moco.report.charts import Chart
from moco.report.page import render
from moco.reporting import records, sections
from moco.reporting.single import Reporter, overall

FIGURES = (
    ("loss", "loss", 1.0),
    ("contrast_accuracy", "contrast accuracy, %", 100.0),
    ("knn_accuracy", "kNN accuracy after epochs, %", 100.0),
    ("retrieval", "retrieval after epochs, %", 100.0),
    ("feature_spread", "feature spread", 1.0),
)
RANKED = ("knn_accuracy", "retrieval")
"""Figures of which the highest is the best; a loss of another queue or temperature says nothing."""


def comparison_page(reporters: Sequence[Reporter], refresh: int | None) -> bytes:
    """The page. refresh: seconds after which a browser loads it again, or None."""
    names = _names(reporters)
    settings = [reporter.run.settings for reporter in reporters]
    lines = [reporter.run.metrics() for reporter in reporters]
    looked = [reporter.looked(pictures=False) for reporter in reporters]
    charts = overlaid([records.charts(*pair) for pair in zip(lines, settings, strict=True)], names)
    values: dict[str, Any] = {
        "title": " · ".join(names),
        "made": records.now(),
        "refresh": refresh,
        "runs": [
            {"name": name, "overall": overall(found, records.warnings(reporter.run))}
            for name, found, reporter in zip(names, looked, reporters, strict=True)
        ],
        "figures": [*_progress(reporters), *_figures(lines), *_evaluations(reporters)],
        "findings": _findings([(found.health or {}).get("findings", []) for found in looked]),
        "notes": [f"{name}: {note}" for name, found in zip(names, looked, strict=True) for note in found.notes],
        "charts": charts,
        "differing": records.differing(settings),
        "data": {"charts": {chart.name: chart.points for chart in charts}, "map": None},
    }
    return render("comparison.html.jinja", values)


def _names(reporters: Sequence[Reporter]) -> list[str]:
    """The names of the run folders, or their paths where two have the same name."""
    names = [reporter.name for reporter in reporters]
    return names if len(set(names)) == len(names) else [str(reporter.run.path) for reporter in reporters]


def overlaid(several: Sequence[Sequence[Chart]], names: Sequence[str]) -> list[Chart]:
    """The charts of all runs over each other, the first curve of each: (chart with a line per run) by title."""
    titles = dict.fromkeys(chart.title for charts in several for chart in charts)
    found = []
    for number, title in enumerate(titles):
        there = [
            (place, chart)
            for place, charts in enumerate(several)
            for chart in charts
            if chart.title == title
        ]  # fmt: skip
        lines = tuple(
            replace(chart.lines[0], label=names[place], tone=place, low=(), high=()) for place, chart in there
        )
        first = there[0][1]
        what = f" Here: {first.lines[0].label}." if len(first.lines) > 1 else ""
        found.append(replace(first, name=f"c{number}", lines=lines, explanation=first.explanation + what))
    return found


def _row(name: str, values: Sequence[float | None], texts: Sequence[str], *, best: bool = False) -> dict[str, Any]:
    """A row of the table; the highest value is marked where it is the best and not that of all."""
    known = [value for value in values if value is not None]
    top = max(known, default=None) if best and len(set(known)) > 1 else None
    cells = [
        {"text": text, "best": top is not None and value == top} for value, text in zip(values, texts, strict=True)
    ]
    return {"name": name, "cells": cells}


def _progress(reporters: Sequence[Reporter]) -> list[dict[str, Any]]:
    texts = []
    for reporter in reporters:
        found = records.progress(reporter.run, reporter.run.settings, reporter.run.metrics())
        texts.append(f"{found.state}, epoch {found.epoch:.3g} of {found.epochs}")
    return [_row("progress", [None] * len(texts), texts)]


def _figures(lines: Sequence[records.Records]) -> list[dict[str, Any]]:
    below = [records.below_chance(several) for several in lines]
    rows = [_row("loss below chance", below, ["–" if share is None else f"{share:.0%}" for share in below])]
    for name, text, scale in FIGURES:
        values = [records.latest(several, name) for several in lines]
        if any(value is not None for value in values):
            shown = ["–" if value is None else f"{value * scale:.4g}" for value in values]
            rows.append(_row(text, values, shown, best=name in RANKED))
    return rows


def _evaluations(reporters: Sequence[Reporter]) -> list[dict[str, Any]]:
    """The first row (the network itself) of each evaluation that a run has."""
    tables = []
    for reporter in reporters:
        found: dict[str, str] = {}
        for evaluation in map(sections.evaluation, records.evaluations(reporter.run)):
            row = evaluation["table"][0] if evaluation["table"] else {"cells": []}
            found |= {
                f"{evaluation['name']}: {name}": cell
                for name, cell in zip(evaluation["columns"], row["cells"], strict=False)
            }
        tables.append(found)
    names = dict.fromkeys(name for found in tables for name in found)
    return [_row(name, [None] * len(tables), [found.get(name, "–") for found in tables]) for name in names]


def _findings(several: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Findings of the same name side by side; the one that is worst anywhere comes first."""
    tables = [{finding["name"]: finding for finding in findings} for findings in several]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [{"name": f"health: {name}", "cells": [table.get(name) for table in tables]} for name in names]
    return sorted(rows, key=lambda row: -max(records.severity((cell or {}).get("verdict")) for cell in row["cells"]))
