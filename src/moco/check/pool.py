"""A source examined by several processes, none of which must live: one that dies is replaced, its picture named."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cv2
import numpy as np

from moco.check.examine import Findings, examine
from moco.data.sources import Source

PART = 64
"""Pictures that a process is given at a time."""

_AHEAD = 3  # parts for each process that are waiting or being worked on
DIED = "the process that read it ended: it took too much memory, or crashed the decoder"


def examine_all(source: Source, workers: int, start_method: str | None = None) -> Iterator[Findings]:
    """Findings on all pictures of a source, part by part, in no particular order.

    workers: processes; 0 examines in this one, where a picture that kills its process kills all. start_method: of
    multiprocessing; by default "fork" on Linux, as torch's loader does it, and "spawn" elsewhere.
    """
    parts = deque(range(start, min(start + PART, len(source))) for start in range(0, len(source), PART))
    if workers == 0:
        yield from (examine(source, part) for part in parts)
        return
    context = multiprocessing.get_context(start_method or ("fork" if sys.platform == "linux" else "spawn"))
    suspects: deque[range] = deque()
    while parts or suspects:
        # After a death every part that was under way is suspect, and is tried alone, by halves, down to the picture.
        alone = bool(suspects)
        queue = deque([suspects.popleft()]) if alone else parts
        left: list[range] = []
        yield from _one_pool(source, queue, 1 if alone else workers, context, left)
        if alone and left:
            (part,) = left
            if len(part) == 1:
                yield Findings(np.zeros(0, np.int64), bad=[(part[0], _name(source, part[0]), DIED)])
            else:
                middle = part[0] + len(part) // 2
                suspects.extendleft([range(middle, part[-1] + 1), range(part[0], middle)])
        else:
            suspects.extend(left)


def _one_pool(source: Source, parts: deque[range], workers: int, context: Any, left: list[range]) -> Iterator[Findings]:
    """Examine `parts` until they are done or a process dies. What was under way then goes to `left`."""
    running: dict[Future[Findings], range] = {}
    pool = ProcessPoolExecutor(workers, context, _start, (source,))
    try:
        while parts or running:
            while parts and len(running) < _AHEAD * workers:
                part = parts.popleft()
                try:
                    running[pool.submit(_examine, part)] = part
                except BrokenProcessPool:
                    parts.appendleft(part)
                    left.extend(running.values())
                    return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                part = running.pop(future)
                try:
                    found = future.result()
                except BrokenProcessPool:
                    left.extend([part, *running.values()])
                    return
                yield found
    finally:
        pool.shutdown(cancel_futures=True)


_source: Source | None = None  # of this process, which examines it


def _start(source: Source) -> None:
    global _source
    _source = source
    cv2.setNumThreads(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libpng complains there about damaged files, into the progress bar
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends this one in order


def _examine(part: range) -> Findings:
    assert _source is not None
    return examine(_source, part)


def _name(source: Source, index: int) -> str:
    names: Any = getattr(source, "names", None)
    try:
        return str(names[index]) if names is not None else str(index)
    except (IndexError, TypeError):
        return str(index)
