"""Who is missing when processes wait for each other in vain: each leaves signs of life in the store they share."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from moco.errors import TrainingError

INTERVAL = 1.0
"""Seconds between two signs of life."""
PROOF = 5.0
"""Seconds without a new sign, once one is looked for, after which a process counts as silent."""
ANSWER = 10.0
"""Seconds after which a store that does not answer counts as gone."""
NAMED = 8
LOST = ("timed out", "timeout", "connection closed", "connection reset", "broken pipe", "nccl")
"""Words of the errors that collective calls raise where another process is gone."""

T = TypeVar("T")


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> object:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read; waits for the key."""

    def check(self, keys: list[str]) -> bool:
        """Whether the keys are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write where the key holds `expected` (empty: where it is not there); what it holds now."""


@dataclass(frozen=True)
class Sign:
    """What a process last said of itself. place: how many places of the story of a training it has come to."""

    host: str
    pid: int
    beat: int
    place: int
    doing: str
    seconds: float
    clock: str
    left: bool


class Heartbeat:
    """The signs of life of this process, from `start` to `stop`, written by a thread: no step waits for them.

    store: a connection of its own to what the processes share. patience: seconds after which a process that waits
    while another one is missing says so and ends, by itself and without clean-up (for NCCL, whose waiting cannot be
    interrupted in any other way). The place that `at` states is counted: all processes come to the same places in the
    same order, so that who has the lower count is behind.
    """

    def __init__(self, store: Store, rank: int, world: int, patience: float) -> None:
        self._store, self._rank, self._world, self._patience = store, rank, world, patience
        self._place, self._beat, self._left = 0, 0, False
        self._doing, self._since = "at its start", time.monotonic()
        self._gone: set[int] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to give signs of life."""
        self._write()
        self._thread.start()

    def at(self, doing: str) -> None:
        """Say where in its story the process has come to, in words."""
        self._doing, self._since = doing, time.monotonic()
        self._place += 1

    def stop(self) -> None:
        """Say goodbye: who leaves in order is not missing for it."""
        self._end.set()
        self._thread.join()
        self._left = True
        self._write()
        if self._rank == 0 and not _by_torchrun():  # the store ends with this process: the others go first
            _until(lambda: self._all_left() is not False)

    def _all_left(self) -> bool | None:
        signs = _within(ANSWER, self._signs)
        return None if signs is None else all(sign.left for rank, sign in signs.items() if rank not in {0} | self._gone)

    def error(self, otherwise: str, advice: str) -> TrainingError:
        """What to say after a collective call has failed: who is missing, or else `otherwise`; then `advice`.

        Takes two signs' time to see who still gives any. Where the process that speaks for its machine (the first one)
        is missing itself, the line is printed here.
        """
        found = self._missing()
        text, speaks = (otherwise, False) if found is None else found
        line = f"{text}; {advice}"
        if speaks and os.environ.get("LOCAL_RANK", "0") != "0":
            _print(line)
        return TrainingError(line)

    def _run(self) -> None:
        while not self._end.wait(INTERVAL):
            self._write()
            if time.monotonic() - self._since > self._patience:
                found = self._missing()
                if found is not None and not self._end.is_set():
                    if found[1]:
                        _print(f"{found[0]}; go on with moco resume")
                    os._exit(1)

    def _write(self) -> None:
        self._beat += 1
        sign = Sign(
            socket.gethostname(), os.getpid(), self._beat, self._place, self._doing, time.monotonic() - self._since,
            time.strftime("%H:%M:%S"), self._left,
        )  # fmt: skip
        with contextlib.suppress(RuntimeError):  # the store ends with the process, or machine, that keeps it
            self._store.set(str(self._rank), json.dumps(asdict(sign)))

    def _missing(self) -> tuple[str, bool] | None:
        """Who is missing, in words, and whether this process speaks for its machine; None where nobody is."""
        place, waited = self._place, time.monotonic() - self._since
        before = now = _within(ANSWER, self._signs)
        if before is None or now is None:
            return f"the store of all processes does not answer: {_keeper()} is gone or stopped", True
        found = [now]

        def all_show_themselves() -> bool:
            self._write()  # others are looking as well
            found.append(_within(ANSWER, self._signs) or found[-1])
            return not _silent(before, found[-1], own=self._rank)

        _until(all_show_themselves)
        now = found[-1]
        reasons = _reasons(before, now, self._world, own=self._rank, place=place, waited=waited)
        # The first to find out decides for all: who ends on this account is not missing.
        said = _within(ANSWER, lambda: self._verdict(reasons))
        reasons = reasons if said is None else said
        self._gone = set(reasons)
        if not reasons:
            return None
        here = socket.gethostname()
        left = [rank for rank, sign in now.items() if sign.host == here and rank not in reasons]
        names = [f"process {rank} of {self._world} {reason}" for rank, reason in sorted(reasons.items())]
        more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
        return "; ".join(names[:NAMED] + more), self._rank == min(left, default=self._rank)

    def _signs(self) -> dict[int, Sign]:
        keys = {rank: str(rank) for rank in range(self._world)}
        return {
            rank: Sign(**json.loads(self._store.get(key))) for rank, key in keys.items() if self._store.check([key])
        }

    def _verdict(self, reasons: Mapping[int, str]) -> dict[int, str]:
        if not reasons:
            held = self._store.get("verdict") if self._store.check(["verdict"]) else b"{}"
        else:
            held = self._store.compare_set("verdict", "", json.dumps(reasons))
        found: dict[str, str] = json.loads(held)
        return {int(rank): reason for rank, reason in found.items()}


def _silent(before: Mapping[int, Sign], now: Mapping[int, Sign], *, own: int) -> set[int]:
    """Those who have not given a new sign between the two looks, though they did not leave."""
    same = {rank for rank, sign in now.items() if rank in before and before[rank].beat == sign.beat and not sign.left}
    return same - {own}


def _reasons(
    before: Mapping[int, Sign], now: Mapping[int, Sign], world: int, *, own: int, place: int, waited: float
) -> dict[int, str]:
    """Those who are missing, each with what is known of it."""
    reasons: dict[int, str] = {}
    silent = _silent(before, now, own=own)
    for rank in set(range(world)) - {own}:
        sign = now.get(rank)
        if sign is None:
            reasons[rank] = "never came: see whether its machine runs and reaches this one"
            continue
        who = f"(pid {sign.pid} on {sign.host})"
        if sign.left:
            reasons[rank] = f"{who} ended {sign.doing}: see its own message"
        elif rank in silent:
            reasons[rank] = (
                f"{who} gives no sign of life since {sign.clock}, {sign.doing}: see whether its machine runs, and "
                "whether it was stopped, or killed for want of memory"
            )
        elif sign.place < place and sign.seconds > waited / 2:
            reasons[rank] = (
                f"{who} lives, but has been {sign.doing} for {sign.seconds:.0f} s while the others wait: see whether "
                "its storage or its data workers hang"
            )
    return reasons


def _keeper() -> str:
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return f"{'torchrun' if _by_torchrun() else 'process 0'}, which keeps it at {address},"


def _by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_loss(error: RuntimeError) -> bool:
    """Whether a collective call has failed because another process is gone, or has not answered."""
    return not isinstance(error, TrainingError) and any(word in str(error).lower() for word in LOST)


def _until(there: Callable[[], bool]) -> None:
    """Wait for something, PROOF seconds at most."""
    deadline = time.monotonic() + PROOF
    while not there() and time.monotonic() < deadline:
        time.sleep(INTERVAL / 4)


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """The answer of `call`, or None where it fails or takes longer: a stopped store would hold its caller for ever."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _print(line: str) -> None:
    print(f"moco: {line}", file=sys.stderr, flush=True)
