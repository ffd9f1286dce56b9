"""`moco check`: look at every picture of a data set before hours are spent on it.

The job as a story: a source → every picture read and decoded, by all cores → counts, bad files, duplicates → settings
that fit → table, words, JSON, and a list of the good files.

>>> found = moco.check.check("photos/")
>>> found.unreadable
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moco.check.advice import command
from moco.check.display import show, words
from moco.check.examine import Findings
from moco.check.fix_list import write_list
from moco.check.pool import examine_all
from moco.check.report import Report, add_failures, report
from moco.data.bad_files import BadFiles
from moco.data.loader import cores
from moco.data.sources import ArraySource, Source, open_source
from moco.errors import UserError, counted

__all__ = ["Report", "check", "run_check", "words"]

IN_PROCESS_BYTES = 2**30
"""Arrays up to this size are looked at in this process: that takes less time than starting others."""


def run_check(data: str, *, labels: str = "auto", workers: int | None = None, fix_list: str = "") -> Report:
    """Check a data set, and show what was found: the verb `moco check`.

    fix_list: file for the paths of the readable pictures without exact repetitions, one a line, which `moco pretrain`
    takes.

    Raises UserError for data that cannot be opened, and where a file cannot be written.
    """
    path = Path(fix_list)
    if fix_list not in ("", "-") and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UserError(f"--fix-list {path}: cannot write there; name a file in a folder that exists")
    if fix_list == "-" or (fix_list and Path(fix_list).suffix.lower() != ".txt"):
        raise UserError(f"--fix-list {fix_list}: name a .txt file, which `moco pretrain` reads as a list of paths")
    if not data:
        raise UserError("no data: name a folder of images, a list, a .npz … (see moco check --help)")
    console = Console(soft_wrap=True)
    source = open_source(data, labels)
    found = _checked(data, labels, source, workers, console)
    show(found, console)
    if fix_list:
        left_out = write_list(Path(fix_list), source, found.good)
        console.print(f"{fix_list}: {counted(len(found.good) - left_out, 'path')}", highlight=False, markup=False)
        if left_out:
            files = counted(left_out, "readable file has", "readable files have")
            console.print(f"{files} a line break in the name: no list can hold such names")
        # Labels of a file belong to all pictures, and the first folders of absolute paths say nothing.
        kept = "none" if labels == "none" else "auto"
        found.command = _command(found, fix_list, kept, len(found.good) - left_out, found.unusable)
    if found.command:
        text = "to train with these settings (with bench in the place of pretrain: how long that takes):"
        console.print(text, highlight=False, markup=False)
        console.print(found.command, highlight=False, markup=False)
    return found


def _command(found: Report, data: str, labels: str, images: int, bad: int) -> str:
    if images < 2:  # no picture to compare with
        return ""
    return command(data, found.suggestions, labels=labels, images=images, bad=bad, usual=BadFiles(images).limit)


def check(
    data: str | Path | np.ndarray[Any, Any] | torch.Tensor | Any,
    *,
    labels: Any = "auto",
    workers: int | None = None,
    start_method: str | None = None,
    console: Console | None = None,
) -> Report:
    """Read every picture of a data set and say what was found. Nothing is written.

    Args:
        data, labels: as for `open_source`.
        workers: processes that read and decode; by default one for each core. 0: none, so that a picture that crashes
            the decoder ends this process.
        start_method: of multiprocessing, see `examine_all`.
        console: shows the progress if it is a terminal.

    Raises UserError for data that cannot be opened.
    """
    source = open_source(data, labels)
    return _checked(data, labels, source, workers, console, start_method)


def _checked(
    data: Any,
    labels: Any,
    source: Source,
    workers: int | None,
    console: Console | None,
    start_method: str | None = None,
) -> Report:
    name = os.fspath(data) if isinstance(data, str | os.PathLike) else f"the {type(data).__name__}"
    began = time.monotonic()
    if workers is not None and workers < 0:
        raise UserError(f"workers {workers}: 0 or more processes can read")
    if workers is None:
        tiny = isinstance(source, ArraySource) and source.images.nbytes <= IN_PROCESS_BYTES
        workers = 0 if tiny else cores()
    parts = list(_shown_progress(examine_all(source, workers, start_method), len(source), console))
    found = report(name, source, parts)
    add_failures(found, parts)
    if isinstance(data, str | os.PathLike) and len(found.good) > 1:
        asked = "none" if labels is None else os.fspath(labels) if isinstance(labels, str | os.PathLike) else "auto"
        found.command = _command(found, name, asked, found.images, len(found.unreadable) + found.unusable)
    found.seconds = time.monotonic() - began
    return found


def _shown_progress(parts: Iterator[Findings], total: int, console: Console | None) -> Iterator[Findings]:
    columns = (
        TextColumn("checking"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    hidden = console is None or not console.is_terminal
    bad = 0
    # No thread of its own: processes are forked beside it.
    with Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)
        for part in parts:
            bad += len(part.bad)
            text = f"{bad:,} unreadable" if bad else ""
            progress.update(task, advance=len(part.ids) + len(part.bad), description=text, refresh=True)
            yield part
