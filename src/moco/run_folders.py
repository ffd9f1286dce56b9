"""Run folders beside each other: `moco runs` says how each of them is, `moco clean` makes room.

The module is not called `runs`, so that `moco.runs` is always the function.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moco.errors import UserError, counted
from moco.train.checkpoints import read
from moco.train.lock import RunLock, is_held
from moco.train.run import METRICS, SETTINGS, Run

State = Literal["running", "finished", "stopped", "failed", "damaged"]

DEPTH = 3
"""How many levels below the folder run folders are looked for."""
FEATURES = "features"
"""Where `moco eval` keeps features that can be computed again."""
CHECKS = ("knn_accuracy", "retrieval")
"""What the check after an epoch is called in the metrics."""


@dataclass(frozen=True)
class RunSummary:
    """A run folder in one line.

    state: running (a process holds its lock), finished (all epochs), stopped, failed (it stopped at a loss that was no
    number), or damaged (its settings cannot be read). note: more about that. epoch: how many are done, of `epochs`.
    loss: the newest. knn_accuracy, retrieval: the best that a check after an epoch found, 0 to 1. checkpoints: how many
    there are besides the best one. bytes: on disk. age: seconds since it was last written to. None: not known.
    """

    path: Path
    state: State
    note: str = ""
    recipe: str | None = None
    method: str | None = None
    backbone: str | None = None
    epoch: float | None = None
    epochs: int | None = None
    loss: float | None = None
    knn_accuracy: float | None = None
    retrieval: float | None = None
    checkpoints: int = 0
    bytes: int = 0
    age: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The same with plain values."""
        return asdict(self) | {"path": str(self.path)}


@dataclass(frozen=True)
class Cleaned:
    """What was removed from a run folder, or would be. removed: paths in it. bytes: freed. note: what was left, why."""

    run: Path
    removed: tuple[str, ...]
    bytes: int
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The same with plain values."""
        return asdict(self) | {"run": str(self.run), "removed": list(self.removed)}


def runs(folder: str | Path = "runs") -> list[RunSummary]:
    """The run folders in a folder (up to three levels deep), or the folder itself where it is one, by name.

    Nothing in them is changed. Raises UserError where there is no such folder.
    """
    return [summary(path) for path in find_runs(folder)]


def find_runs(folder: str | Path) -> list[Path]:
    """The paths of the run folders in a folder, by name. Raises UserError where there is no such folder."""
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"no such folder: {root}; name one with run folders in it")
    return sorted(_find(root, DEPTH))


def _find(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / SETTINGS).is_file():
        yield folder
        return
    if depth == 0:
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _find(folder / entry.name, depth - 1)


def summary(path: Path) -> RunSummary:
    """How a run folder is. Raises UserError where it is none."""
    run = Run(path)
    size, changed = _extent(path)
    about: dict[str, Any] = {"checkpoints": len(run.checkpoints()), "bytes": size, "age": max(time.time() - changed, 0)}
    held = is_held(path)
    try:
        settings = run.settings
    except UserError as error:
        return RunSummary(path, "running" if held else "damaged", str(error), **about)
    try:
        lines = run.metrics()
    except OSError as error:
        return RunSummary(path, "running" if held else "damaged", f"{METRICS}: {error.strerror}", **about)
    epoch = max((line["epoch"] for line in lines if "epoch" in line), default=None)
    knn, retrieval = (max((line[name] for line in lines if name in line), default=None) for name in CHECKS)
    loss = next((line["loss"] for line in reversed(lines) if "loss" in line), None)
    step = max((line["step"] for line in lines), default=0)
    state, note = _state(run, epoch, settings.epochs, step, held)
    return RunSummary(
        path, state, note, settings.recipe, settings.method, settings.backbone, epoch, settings.epochs, loss, knn,
        retrieval, **about,
    )  # fmt: skip


def _state(run: Run, epoch: float | None, epochs: int, step: float, held: bool) -> tuple[State, str]:
    if held:
        return "running", ""
    if epoch is not None and epoch >= epochs - 1e-6:
        return "finished", ""
    # `faults` leaves this report when it stops; a run that got past that step has gone on since.
    reports = [path.stem.rsplit("-", 1)[-1] for path in run.path.glob("not-finite-step-*.json")]
    last = max((int(number) for number in reports if number.isdigit()), default=0)
    if last > step:
        return "failed", f"no number at step {last}"
    if not run.checkpoints():
        return "stopped", "before its first checkpoint"
    # Before the first line of figures, only the checkpoint knows how far it went.
    return "stopped", "" if epoch is not None else f"at step {int(run.checkpoints()[-1].stem.rpartition('-')[2])}"


def _extent(folder: Path) -> tuple[int, float]:
    """Bytes of the files in a folder, those with several names once, and when one of them was last written."""
    sizes, changed = _sizes(folder)
    return sum(sizes.values()), changed


def _sizes(folder: Path, without: frozenset[Path] = frozenset()) -> tuple[dict[tuple[int, int], int], float]:
    sizes: dict[tuple[int, int], int] = {}
    changed = 0.0
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if Path(place, name) not in without]
        for name in names:
            if Path(place, name) in without:
                continue
            with contextlib.suppress(OSError):  # it may be gone by now
                found = os.lstat(os.path.join(place, name))
                sizes[found.st_dev, found.st_ino] = found.st_size
                changed = max(changed, found.st_mtime)
    return sizes, changed


# ---------------------------------------------------------------- making room


def clean(
    folders: Sequence[str | Path], *, keep: int = 1, dry_run: bool = False, skip_held: bool = False
) -> list[Cleaned]:
    """Remove older checkpoints, what a crash left half-written, and cached features from run folders.

    keep: how many checkpoints stay, the newest ones that are whole; the best one stays besides. Whether one is whole is
    read, not guessed, and where none is, nothing is removed. dry_run: only say what would go. skip_held: pass over runs
    that are being trained.

    Raises UserError, before anything is removed, for a folder that is no run and for a run that is being trained.
    """
    if keep < 1:
        raise UserError(f"keep {keep}: at least 1, so that the run can be continued and evaluated")
    opened = [Run(Path(folder).expanduser()) for folder in folders]
    held = {run.path for run in opened if is_held(run.path)}
    if held and not skip_held:
        raise UserError(f"{min(held)} is being trained: clean it when it is finished, or stop it")
    return [
        Cleaned(run.path, (), 0, "is being trained: left alone") if run.path in held else _clean(run, keep, dry_run)
        for run in opened
    ]


def _clean(run: Run, keep: int, dry_run: bool) -> Cleaned:
    if dry_run:
        return _removal(run, keep)[1]
    lock = RunLock(run.path)
    lock.take()  # from here on no training can begin here
    try:
        going, found = _removal(run, keep)
        for path in going:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot remove {error.filename or run.path}: {error.strerror}") from error
    finally:
        lock.release()
    return found


def _removal(run: Run, keep: int) -> tuple[list[Path], Cleaned]:
    """What can go from a run folder, and how to say so."""
    old, note = _older(run.checkpoints(), keep)
    folder = run.path / "checkpoints"
    going = [path for checkpoint in old for path in (checkpoint, Path(f"{checkpoint}.sha256")) if path.exists()]
    going += sorted(folder.glob("*.partial"))
    going += [run.path / FEATURES] if (run.path / FEATURES).is_dir() else []
    freed = _extent(run.path)[0] - sum(_sizes(run.path, frozenset(going))[0].values())
    return going, Cleaned(run.path, tuple(str(path.relative_to(run.path)) for path in going), freed, note)


def _older(checkpoints: Sequence[Path], keep: int) -> tuple[list[Path], str]:
    """The checkpoints behind the newest `keep` that are whole; none of them where fewer are."""
    if len(checkpoints) <= keep:
        return [], ""
    whole = 0
    for number in range(len(checkpoints) - 1, 0, -1):
        whole += read(checkpoints[number]) is not None
        if whole == keep:
            return list(checkpoints[:number]), ""
    return [], "newer checkpoints are damaged: the older ones stay"


# ---------------------------------------------------------------- words


def show_runs(found: Sequence[RunSummary], folder: str | Path, console: Console) -> None:
    """Print a table of run folders, and what more there is to say about some of them."""
    if not found:
        console.print(f"no run folders in {folder}", highlight=False, markup=False)
        return
    # Narrow enough for a terminal of 80 columns.
    table = Table(
        title=f"{counted(len(found), 'run')}, {size(sum(one.bytes for one in found))}",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("run", overflow="fold")
    table.add_column("what", overflow="fold")
    table.add_column("state, epoch", no_wrap=True, min_width=max(12, *(len(state(one)) for one in found)))
    for name in ("loss", "best check", "disk", "age"):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(len(name), 6))
    for one in found:
        name = str(one.path.relative_to(folder)) if one.path.is_relative_to(folder) else str(one.path)
        table.add_row(
            escape(name if name != "." else str(one.path)),
            escape(" ".join(_what(one))),
            state(one),
            "–" if one.loss is None else f"{one.loss:.3f}",
            _best(one),
            size(one.bytes),
            age(one.age),
        )
    console.print(table)
    for one in found:
        if one.note:
            console.print(f"{one.path}: {one.note}", highlight=False, markup=False)


def _what(one: RunSummary) -> list[str]:
    """Recipe, method where the recipe does not say it, and backbone; each once."""
    method = "" if one.method == "moco" else one.method
    return list(dict.fromkeys(word for word in (one.recipe, method, one.backbone) if word)) or ["–"]


def _best(one: RunSummary) -> str:
    return next(
        (
            f"{word} {share:.1%}"
            for word, share in (("kNN", one.knn_accuracy), ("retr.", one.retrieval))
            if share is not None
        ),
        "–",
    )


def state(one: RunSummary) -> str:
    """The state of a run in a few words: finished, running 5.5/10."""
    if one.state in ("damaged", "finished") or one.epoch is None or one.epochs is None:
        return one.state
    return f"{one.state} {math.floor(one.epoch * 10) / 10:g}/{one.epochs}"


def show_cleaned(found: Sequence[Cleaned], console: Console, *, dry_run: bool) -> None:
    """Print what was removed, or would be."""
    for one in found:
        note = f"{one.run}: {one.note}" if one.note else ""
        for text in (*(f"{one.run}/{name}" for name in one.removed), *([note] if note else [])):
            console.print(text, highlight=False, markup=False)
    freed = size(sum(one.bytes for one in found))
    console.print(f"{freed} would be free; nothing is removed yet" if dry_run else f"{freed} freed", highlight=False)


def size(count: float) -> str:
    """Bytes in words: 512 B, 1.2 GB (of 1000 MB)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def age(seconds: float) -> str:
    """How long something lies back, in the largest unit that fits."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"
