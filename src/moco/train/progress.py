"""The display while training: a progress bar with the figures under it, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

CHECKS = {"knn_accuracy": ("kNN accuracy", ".1%"), "retrieval": ("retrieval", ".1%"), "effective_rank": ("rank", ".1f")}
"""What the line of an epoch shows of a check, and how; the rest is in the files."""


class ProgressDisplay:
    """Shows how far a run is. `console` None shows nothing (processes other than the first)."""

    def __init__(
        self, console: Console | None, *, first_step: int, steps: int, steps_per_epoch: int, epochs: int
    ) -> None:
        self._console = console
        self._steps, self._steps_per_epoch, self._epochs = steps, steps_per_epoch, epochs
        self._first, self._began = first_step, time.monotonic()
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"), BarColumn(None), MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left"), expand=True,
        )  # fmt: skip
        self._task = self._bar.add_task(
            "train", total=steps, completed=first_step, epoch=first_step // steps_per_epoch + 1, epochs=epochs, left="–"
        )
        self._figures = Text("")
        self._live: Live | None = None

    def __enter__(self) -> ProgressDisplay:
        if self._console is not None and self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _render(self) -> Group:
        return Group(self._bar, self._figures)

    def step(self, done: int, line: Mapping[str, float] | None) -> None:
        """`done` steps are finished; `line` are their newest figures, if there are new ones."""
        left = (time.monotonic() - self._began) / max(done - self._first, 1) * (self._steps - done)
        epoch = min((done - 1) // self._steps_per_epoch + 1, self._epochs)
        self._bar.update(self._task, completed=done, epoch=epoch, left=duration(left))
        if line is not None:
            self._figures = Text(figures(line), style="dim")
            if self._live is not None:
                self._live.update(self._render())

    def epoch(self, epoch: int, line: Mapping[str, float], checks: Mapping[str, float]) -> None:
        """An epoch is over: one line that stays."""
        if self._console is None:
            return
        found = "".join(f" · {word} {checks[name]:{form}}" for name, (word, form) in CHECKS.items() if name in checks)
        left = self._steps - epoch * self._steps_per_epoch
        eta = (time.monotonic() - self._began) / max(epoch * self._steps_per_epoch - self._first, 1) * left
        tail = f" · {duration(eta)} left" if left else ""
        self._console.print(
            f"epoch {epoch}/{self._epochs} · {figures(line)}{found}{tail}", highlight=False, markup=False
        )


def figures(line: Mapping[str, float]) -> str:
    """The figures of a metrics line, in words."""
    if "loss" not in line:
        return "no step gave a number"
    parts = [
        f"{line['images_per_second']:.0f} images/s",
        f"{line['data_wait']:.0%} waiting for data",
        f"loss {line['loss']:.3f}" + (f" (chance {line['chance_loss']:.3f})" if "chance_loss" in line else ""),
    ]
    if "contrast_accuracy" in line:
        parts += [
            f"accuracy {line['contrast_accuracy']:.1%}",
            f"similarity {line['positive_similarity']:+.2f} / {line['negative_similarity']:+.2f}",
        ]
    return " · ".join([*parts, f"spread {line['feature_spread']:.2f}", f"rate {line['learning_rate']:.2g}"])


def duration(seconds: float) -> str:
    """Seconds as 1:05 or 2:03:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
