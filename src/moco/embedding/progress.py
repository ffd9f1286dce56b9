"""How far an embedding is: a bar on a terminal, a line for each part elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from moco.train.progress import duration


class EncodingProgress:
    """Shows pictures done, pictures per second and the time left; `console` None shows nothing.

    total: pictures. done: those that an earlier run has left.
    """

    def __init__(self, console: Console | None, total: int, done: int = 0) -> None:
        self._console, self._total, self._first, self._done = console, total, done, done
        self._began, self._bad = time.monotonic(), 0
        columns = (TextColumn("embedding"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.description}"))
        hidden = console is None or not console.is_terminal
        # No thread of its own: processes are forked beside it.
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False)
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> EncodingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def batch(self, pictures: int, unreadable: int) -> None:
        """So many more pictures are done, some of which could not be read."""
        self._done += pictures
        self._bad += unreadable
        self._bar.update(self._task, completed=self._done, description=self._figures(), refresh=True)

    def saved(self) -> None:
        """A part is on disk: one line where no bar is shown."""
        if self._console is not None and not self._console.is_terminal:
            text = f"{self._done:,} of {self._total:,} pictures · {self._figures()}"
            self._console.print(text, highlight=False, markup=False)

    def _figures(self) -> str:
        speed = (self._done - self._first) / max(time.monotonic() - self._began, 1e-9)
        left = duration((self._total - self._done) / max(speed, 1e-9))
        return f"{speed:,.0f} pictures/s · {left} left" + (f" · {self._bad:,} unreadable" if self._bad else "")
