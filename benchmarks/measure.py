"""Timing several ways to do the same thing in turns, so that a slow minute of a shared machine hits all of them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch


def in_turns(sides: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds that each call took: each side is called once per round, after `warm_up` calls that do not count."""
    for call in sides.values():
        for _ in range(warm_up):
            call()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - began)
    return times


class Elsewhere:
    """A side in a process of its own: what moco does to its process (it keeps freed memory) is not done to that one.

    make: a function of a module, called there with `arguments`; what it returns is called once per call of this.
    """

    def __init__(self, make: Callable[..., Callable[[], object]], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        threads = torch.get_num_threads()
        context.Process(target=_serve, args=(other, threads, make, arguments), daemon=True).start()

    def __call__(self) -> None:
        self._pipe.send(None)
        self._pipe.recv()


def _serve(pipe: Connection, threads: int, make: Callable[..., Callable[[], object]], arguments: tuple[Any]) -> None:
    torch.set_num_threads(threads)
    call = make(*arguments)
    with contextlib.suppress(EOFError):  # the other end is gone
        while True:
            pipe.recv()
            call()
            pipe.send(None)


def summary(times: Mapping[str, list[float]], items: float, reference: str) -> dict[str, dict[str, float]]:
    """Medians per side: seconds of a call, items per second, and how many times as fast as `reference` it was.

    items: how many pictures (or whatever is counted) one call handles. The ratio is the median of the ratios of the
    rounds, not the ratio of medians.
    """
    rows = {}
    for name, seconds in times.items():
        ratios = [base / own for base, own in zip(times[reference], seconds, strict=True)]
        median = statistics.median(seconds)
        rows[name] = {"seconds": median, "per_second": items / median, "ratio": statistics.median(ratios)}
    return rows


def show(title: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> None:
    """Print the rows of a summary under a title. unit: what `per_second` counts."""
    width = max(map(len, [*rows, title])) + 2
    print(f"{title:{width}}{'ms':>9}{unit + '/s':>14}{'ratio':>8}   ({torch.get_num_threads()} threads)")
    for name, row in rows.items():
        print(f"{name:{width}}{row['seconds'] * 1000:9.2f}{row['per_second']:14.1f}{row['ratio']:8.2f}")


def write(path: Path | None, found: dict[str, Any]) -> None:
    """Write figures, with what they were measured on, as JSON; nothing without a path."""
    if path is not None:
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": processor()}
        path.write_text(json.dumps({"machine": machine, **found}, indent=2) + "\n", encoding="utf-8")


def processor() -> str:
    """The name of the processor and what it has for bfloat16."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in lines.items()}
        found = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
        name = " ".join([fields.get("model name", name), *found])
    return name
