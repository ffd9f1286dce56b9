"""The trainings of a comparison as processes, and Ctrl-C and SIGTERM for all of them: each saves and can go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, Any

from moco.errors import Interrupted
from moco.train.stopping import ASKS

GO_ON = "the same command goes on there"


class Children:
    """While active, signals that ask this process to stop are passed on to the trainings that it has started.

    Those are sessions of their own: what a terminal sends to all of its processes would otherwise reach them twice.
    Where no training runs, the signal ends what this process does by itself (evaluations, drawing).
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The number of the signal, once there was one."""
        self._running: set[int] = set()
        self._starting = 0
        self._lock = threading.RLock()  # the handler may come in the middle of a start, in the same thread
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Children:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals are not ours
            for number in (*ASKS, *_closed_terminal()):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(
        self, command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], where: str
    ) -> tuple[int, Any]:
        """Carry a training out to its end. Returns its exit status, negative for a signal, and what it used.

        Raises Interrupted where this process was asked to stop before it began.
        """
        with self._lock:
            self.check(where)
            self._starting += 1
        try:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), start_new_session=True
            )
            with self._lock:
                self._running.add(process.pid)
        finally:
            with self._lock:
                self._starting -= 1
        try:
            if self.received is not None:  # between the last look and its place among those that are told
                self._tell(self.received, [process.pid])
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            with self._lock:
                self._running.discard(process.pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage

    def check(self, where: str) -> None:
        """Raise Interrupted where this process has been asked to stop."""
        if self.received is not None:
            raise Interrupted(f"stopped in {where}; {GO_ON}", 128 + self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        with self._lock:
            running, starting = list(self._running), self._starting
        self._tell(number, running)
        if not running and not starting:
            raise Interrupted(f"stopped in the evaluation; {GO_ON}", 128 + number)

    def _tell(self, number: int, running: Sequence[int]) -> None:
        # A training knows Ctrl-C and SIGTERM as what lets it save; a terminal that is closed means the same.
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number if number in ASKS else signal.SIGTERM)


def _closed_terminal() -> tuple[int, ...]:
    """SIGHUP, where there is one and nohup has not said to go on."""
    number = getattr(signal, "SIGHUP", None)
    return () if number is None or signal.getsignal(number) is not signal.SIG_DFL else (number,)
