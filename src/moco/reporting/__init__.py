"""`moco report`: one self-contained page of a run, or of several beside each other.

records  what the run folder says    pictures, similarities  what its network makes of pictures    sections  from there
to what the template shows    single, comparing  the two kinds of page
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moco.errors import UserError
from moco.evaluation import is_text
from moco.evaluation_settings import ReportSettings, inspection
from moco.reporting.comparing import comparison_page
from moco.reporting.records import check_runs, progress
from moco.reporting.single import Reporter
from moco.train.checkpoints import write_atomically
from moco.train.run import Run


def report(
    runs: str | Path | Run | Sequence[str | Path | Run],
    data: Any = None,
    *,
    labels: Any = None,
    quiet: bool = False,
    **given: Any,
) -> Path:
    """Write the page of a run, or one that compares several, as `moco report` does. Returns its path.

    runs: run folders. data: pictures, whatever `moco.pretrain` takes; by default those of the run, and where they are
    gone, the page is made without pictures and says so. labels: for the map and the classes. given: fields of
    `ReportSettings`. quiet: print nothing. With `watch` it goes on until the runs are finished, or Ctrl-C.

    Raises UserError for anything wrong with runs, data or settings.
    """
    several = [runs] if isinstance(runs, (str, Path, Run)) else list(runs)
    named = {"data": data, "labels": labels}
    settings = inspection(ReportSettings, given | {name: str(value) for name, value in named.items() if is_text(value)})
    if not several:
        raise UserError("name a run to report on: moco report RUN")
    check_runs([str(run.path if isinstance(run, Run) else run) for run in several])
    opened = [run if isinstance(run, Run) else Run(Path(run).expanduser()) for run in several]
    if len(opened) > 1 and (settings.data or data is not None):
        raise UserError("--data goes with one run: a comparison takes the pictures of each")
    console = None if quiet else Console(soft_wrap=True)
    path = _path(opened, settings)
    pages = _Pages([Reporter(run, settings, data, labels) for run in opened])
    if settings.watch:
        _watch(opened, pages, path, settings.every, console)
    else:
        _write(path, pages.made(refresh=None))
    if console is not None:
        size = path.stat().st_size / 1e6
        console.print(f"report: {path} ({size:.1f} MB; open it in a browser)", highlight=False, markup=False)
    return path


class _Pages:
    """The page of one run, or of several."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self.reporters = reporters

    def made(self, *, refresh: int | None) -> bytes:
        """The page as it is now. refresh: seconds after which a browser loads it again."""
        if len(self.reporters) == 1:
            return self.reporters[0].page(refresh)
        return comparison_page(self.reporters, refresh)


def _path(runs: Sequence[Run], settings: ReportSettings) -> Path:
    """Where the page goes: a file, or the usual name in a folder."""
    name = "report.html" if len(runs) == 1 else "comparison.html"
    given = Path(settings.out).expanduser() if settings.out else runs[0].path
    return given / name if given.is_dir() or (settings.out and given.suffix == "") else given


def _write(path: Path, page: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file with --out") from error


def _watch(runs: Sequence[Run], pages: _Pages, path: Path, every: float, console: Console | None) -> None:
    """Write the page again and again. What is left at the end no longer refreshes itself."""
    with contextlib.suppress(KeyboardInterrupt):
        while not all(progress(run, run.settings, run.metrics()).state == "finished" for run in runs):
            _write(path, pages.made(refresh=max(round(every), 1)))
            if console is not None:
                console.print(f"{path} is fresh; next in {every:g} s (Ctrl-C ends)", highlight=False, markup=False)
            time.sleep(every)
    _write(path, pages.made(refresh=None))
