"""From the pictures of a report to what its template shows: the map, the gallery, the classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moco.evaluation import WHOLE, plus_minus
from moco.report import layout
from moco.report.thumbnails import COLUMNS, PER_SHEET, sheets, uri
from moco.reporting.pictures import Album, Shown

Array = np.ndarray[Any, Any]
Section = dict[str, Any]

SHEET_BYTES = 4_000_000
"""What all small pictures of the map may take in the page."""
QUERIES = 12
EXAMPLES = 6
MOST_GROUPS = 200
LONGEST_NAME = 160


def map_section(album: Album, seed: int) -> Section:
    """The data of the map, for the page's script: places, groups, names, neighbours, pictures."""
    laid = sheets(album.thumbnails, SHEET_BYTES)
    layouts = [
        ("t-SNE", layout.t_sne(album.after, seed)),
        ("PCA", layout.principal(album.after)),
        ("PCA, before training", layout.principal(album.before)),
    ]
    grids = [(name, layout.on_grid(places)) for name, places in layouts]
    colours = [("cluster", [f"cluster {number + 1}" for number in range(album.clusters.max() + 1)], album.clusters)]
    if album.labels is not None:
        colours.insert(0, ("label", album.classes, album.labels.numpy()))
    return {
        "layouts": [
            {"name": name, "x": places[:, 0].tolist(), "y": places[:, 1].tolist()} for name, places in grids
        ],
        "colours": [{"name": name, "groups": groups, "of": of.tolist()} for name, groups, of in colours],
        "names": [short(name) for name in album.names],
        "near": album.near.tolist(),
        "sheets": list(laid.uris),
        "side": laid.side,
        "columns": COLUMNS,
        "perSheet": PER_SHEET,
    }  # fmt: skip


def gallery(album: Album, seed: int) -> list[Section]:
    """Queries, one of each group in turn, with their neighbours before and after training."""
    groups = album.clusters if album.labels is None else album.labels.numpy()
    return [
        {
            "picture": _picture(album, row),
            "rows": [
                {"name": name, "pictures": [_picture(album, int(other), row) for other in near[row]]}
                for name, near in (("before training", album.near_before), ("after training", album.near))
            ],
        }
        for row in spread_over(groups, QUERIES, seed)
    ]


def spread_over(groups: Array, count: int, seed: int) -> list[int]:
    """Rows drawn from the groups in turn, so that each has its share: at most `count`."""
    order = np.random.default_rng(seed).permutation(len(groups))
    turn = np.empty(len(groups), dtype=np.int64)
    for group in np.unique(groups):
        rows = order[groups[order] == group]
        turn[rows] = np.arange(len(rows))
    ranked = np.lexsort((groups, turn))
    return [int(row) for row in ranked[:count]]


def _picture(album: Album, row: int, query: int | None = None) -> Section:
    """A picture as the template shows it; same: whether it has the label of `query`, None where that is not known."""
    label = None if album.labels is None else album.classes[int(album.labels[row])]
    same = None if query is None or album.labels is None else bool(album.labels[row] == album.labels[query])
    name = short(album.names[row])
    return {"uri": uri(album.thumbnails[row]), "name": name, "label": label, "same": same}


def agreement(album: Album) -> Section | None:
    """How many of the eight neighbours share the label, and how often their vote is right: before and after."""
    if album.labels is None or album.votes is None or album.votes_before is None:
        return None
    own = album.labels[:, None]
    return {
        "near": [float((album.labels[near] == own).float().mean()) for near in (album.near_before, album.near)],
        "votes": [float(torch.eq(votes, album.labels).float().mean()) for votes in (album.votes_before, album.votes)],
    }


def groups(album: Album) -> list[Section]:
    """The table of classes, or of clusters where there are no labels: the most numerous MOST_GROUPS of them."""
    of = album.clusters if album.labels is None else album.labels.numpy()
    names = album.classes if album.labels is not None else [f"cluster {n + 1}" for n in range(of.max() + 1)]
    counts = np.bincount(of, minlength=len(names))
    shown = sorted(np.argsort(-counts, kind="stable")[:MOST_GROUPS].tolist())
    return [_group(album, of, number, names) for number in shown if counts[number]]


def _group(album: Album, of: Array, number: int, names: Sequence[str]) -> Section:
    rows = np.flatnonzero(of == number)
    found: Section = {"name": names[number], "count": len(rows), "examples": _typical(album, rows)}
    if album.labels is not None and album.votes is not None and album.votes_before is not None:
        before, after = (float((votes[rows] == number).float().mean()) for votes in (album.votes_before, album.votes))
        wrong = torch.bincount(album.votes[rows][album.votes[rows] != number], minlength=1)
        taken = int(wrong.argmax())
        found |= {
            "before": before,
            "after": after,
            "taken_for": f"{names[taken]} ({int(wrong[taken])})" if int(wrong.max()) else "–",
        }
    return found


def _typical(album: Album, rows: Array) -> list[Section]:
    """The pictures of a group nearest to its middle."""
    unit: Tensor = torch.nn.functional.normalize(album.after[rows], dim=1)
    nearest = (unit @ unit.mean(0)).topk(min(EXAMPLES, len(rows))).indices
    return [_picture(album, int(rows[place])) for place in nearest]


def views(shown: Sequence[Shown]) -> list[Section]:
    """View pairs as the template shows them."""
    return [
        {"name": short(pair.name), "uris": [uri(picture) for picture in (pair.picture, pair.query, pair.key)]}
        for pair in shown
    ]


def short(name: str) -> str:
    """A name that fits: its end tells most."""
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]


def evaluation(found: Section) -> Section:
    """A table that `moco eval` wrote: its rows with shares in percent, and other figures as they are."""
    rows: dict[str, Any] = {str(name): row for name, row in found["rows"].items() if isinstance(row, dict)}
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = [name for name in names if not name.endswith(" ±")]
    table = [{"name": label, "cells": [_cell(row, name) for name in columns]} for label, row in rows.items()]
    return found | {"columns": columns, "table": table, "spread": plus_minus(found)}


def _cell(row: Section, name: str) -> str:
    value, spread = row.get(name), row.get(f"{name} ±")
    if not isinstance(value, (int, float)):
        return "–"
    if name in WHOLE:
        return f"{value:.3g}"
    return f"{value * 100:.1f}\N{NO-BREAK SPACE}%" + (
        f" ± {spread * 100:.1f}" if isinstance(spread, (int, float)) else ""
    )


def links(values: Section) -> list[tuple[str, str]]:
    """The sections that are on the page: anchor and name."""
    named = [
        ("summary", "Summary"), ("curves", "Curves"), ("similarities", "Similarities"), ("views", "Views"),
        ("map", "Map"), ("neighbours", "Neighbours"), ("classes", "Classes"), ("evaluations", "Evaluations"),
        ("skipped", "Skipped files"), ("settings", "Settings"),
    ]  # fmt: skip
    behind = {"similarities": "histograms", "neighbours": "gallery", "classes": "groups"}
    always = ("summary", "curves", "evaluations", "skipped", "settings")
    return [(anchor, text) for anchor, text in named if anchor in always or values[behind.get(anchor, anchor)]]
