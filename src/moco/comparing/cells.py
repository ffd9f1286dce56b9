"""Carrying a cell out: a training in a process of its own, then its figures. What is done is not done again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from moco.comparing.children import GO_ON, Children
from moco.comparing.plan import Cell
from moco.errors import Interrupted, UserError
from moco.evaluation import evaluate
from moco.train.checkpoints import write_atomically
from moco.train.lock import is_held
from moco.train.run import SETTINGS, Run

STOPPED = (130, 143, -2, -15)
NEIGHBOURS = 20
UNTRAINED = "untrained"
"""How the row is called, here and in `moco eval`."""


@dataclass(frozen=True)
class Result:
    """What a cell came to. figures: shares from 0 to 1 by name. seconds, peak_bytes: of its training, or None.

    failed: the line that the training ended with, or empty.
    """

    row: str
    seed: int
    folder: str
    figures: Mapping[str, float]
    images_per_second: float | None
    seconds: float | None
    peak_bytes: int | None
    failed: str = ""


@dataclass(frozen=True)
class Work:
    """What all cells have in common.

    out: the folder of the comparison. base: settings of every training, with data. threads: of each. figures: what is
    evaluated (knn, linear). evaluation: options of `moco.evaluation.evaluate`.
    """

    out: Path
    base: Mapping[str, Any]
    threads: int | None
    figures: tuple[str, ...]
    evaluation: Mapping[str, Any]


def carry_out(work: Work, cell: Cell, children: Children | None = None) -> Result:
    """Train and evaluate a cell, as far as that has not been done.

    children: who passes signals on to the training. Raises Interrupted where the training was, and UserError where
    another process trains there.
    """
    known = done_before(work.out, cell)
    if known is not None:
        return known
    folder, children = work.out / cell.folder, children or Children()
    check_free(folder)
    line = "" if finished(folder) else _train(work, cell, folder, children)
    children.check(cell.folder)
    spent = _spent(work.out / f"{cell.folder}.times.json")
    if line:
        return Result(cell.row.name, cell.seed, cell.folder, {}, None, spent["seconds"], spent["peak_bytes"], line)
    figures = _figures(work, folder)
    rates = [found["images_per_second"] for found in Run(folder).metrics() if "images_per_second" in found]
    result = Result(
        cell.row.name, cell.seed, cell.folder, figures, median(rates) if rates else None, spent["seconds"],
        spent["peak_bytes"],
    )  # fmt: skip
    write_atomically(_note(work.out, cell), json.dumps(asdict(result), indent=2).encode())
    return result


def done_before(out: Path, cell: Cell) -> Result | None:
    """What an earlier call found for a cell of the comparison in `out`, unless its training failed."""
    return _noted(_note(out, cell))


def untrained(work: Work, trained: Result) -> Result:
    """The figures of the network that a training began with, random weights of the same seed."""
    note = work.out / f"{UNTRAINED}-seed{trained.seed}.json"
    known = _noted(note)
    if known is not None:
        return known
    figures = _figures(work, work.out / trained.folder, UNTRAINED)
    result = Result(UNTRAINED, trained.seed, trained.folder, figures, None, None, None)
    write_atomically(note, json.dumps(asdict(result), indent=2).encode())
    return result


def _noted(note: Path) -> Result | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        held = json.loads(note.read_text(encoding="utf-8"))
        if not held["failed"]:
            return Result(**held)
    return None


def _note(out: Path, cell: Cell) -> Path:
    return out / f"{cell.folder}.json"


def finished(folder: Path) -> bool:
    """Whether the training in a run folder has come to its end."""
    if not (folder / SETTINGS).is_file():
        return False
    run = Run(folder)
    lines = run.metrics()
    return bool(lines and run.checkpoints() and lines[-1]["epoch"] >= run.settings.epochs)


def check_free(folder: Path) -> None:
    """Raise UserError where a process trains in a run folder, as one does whose comparison was killed."""
    if is_held(folder):
        raise UserError(
            f"{folder} is being trained by another process: wait for it, or stop it (its number is in run.lock), then "
            "repeat the command"
        )


def _train(work: Work, cell: Cell, folder: Path, children: Children) -> str:
    """Train or go on training. Returns an empty string, or the line that it failed with."""
    values = {**work.base, **cell.row.settings, "seed": cell.seed, "out": str(folder)}
    if work.threads is not None:
        values |= {"threads": work.threads}
    if (folder / SETTINGS).is_file():
        command = ["resume", str(folder)]
    else:
        file = work.out / f"{cell.folder}.yaml"
        plain = json.loads(json.dumps(values))  # tuples are lists in YAML
        write_atomically(file, yaml.safe_dump(plain, allow_unicode=True).encode())
        command = ["pretrain", "--config", str(file)]
    environment = os.environ | ({"OMP_NUM_THREADS": str(work.threads)} if work.threads is not None else {})
    began = time.monotonic()
    log = work.out / f"{cell.folder}.log"
    with log.open("ab") as written:
        before = written.tell()
        code, usage = children.run([sys.executable, "-m", "moco", *command], written, environment, cell.folder)
    _add_times(work.out / f"{cell.folder}.times.json", time.monotonic() - began, usage.ru_maxrss * 1024)
    if code:
        children.check(cell.folder)
    if code in STOPPED:
        raise Interrupted(f"stopped in {cell.folder}; {GO_ON}", 128 + abs(code) % 128)
    if code < 0:  # nobody asked it to stop: the system, where memory is short
        return f"killed by signal {-code}" + (": out of memory?" if code == -signal.SIGKILL else "")
    if code:
        check_free(folder)  # an older training may have taken the folder in the meantime: this is no failure
    return "" if code == 0 else _last_line(log, before) or f"ended with status {code}"


def _last_line(log: Path, since: int) -> str:
    """The last line of what was written behind the first `since` bytes: before them stand earlier attempts."""
    text = log.read_bytes()[since:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("moco: ") if lines else ""


def _add_times(file: Path, seconds: float, peak: int) -> None:
    """A training that was interrupted has times of several processes."""
    before = _spent(file)
    both = {"seconds": (before["seconds"] or 0) + seconds, "peak_bytes": max(before["peak_bytes"] or 0, peak)}
    write_atomically(file, json.dumps(both).encode())


def _spent(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"seconds": None, "peak_bytes": None}
    return found


def _figures(work: Work, folder: Path, kind: str = "pre-trained") -> dict[str, float]:
    """The figures of a network, from `moco eval`; without labels, those of the training's own last check."""
    if not work.figures:
        checks = [line for line in Run(folder).metrics() if "retrieval" in line]
        return {"retrieval": checks[-1]["retrieval"]} if checks else {}
    found = {}
    for task in work.figures:
        # The usual 200 neighbours are for data sets of many thousands; few pictures leave each class too few votes.
        k = {"k": NEIGHBOURS} if task == "knn" else {}
        rows = evaluate(task, folder, quiet=True, baseline=kind == UNTRAINED, **k, **work.evaluation).rows
        found[task] = next(iter(rows[kind].values()))
    return found
