"""Stopping in order: Ctrl-C, and the SIGTERM of a queue system that wants its machine back."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Any

ASKS = (signal.SIGINT, signal.SIGTERM)


class stop_on_signal:
    """While active, the first Ctrl-C or SIGTERM only sets `received`; a second Ctrl-C stops at once as usual."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The number of the signal, once there was one."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> stop_on_signal:
        with contextlib.suppress(ValueError):  # only the main thread may; elsewhere signals are not ours
            for number in ASKS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
