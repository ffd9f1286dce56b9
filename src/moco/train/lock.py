"""One training process per run folder: a lock that the system lets go of when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any

from moco.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
SILENT = 120.0
"""Seconds without a sign of life after which a process on another machine counts as gone."""
HEARTBEAT = 10.0
_HELD: dict[Path, int] = {}
"""Lock files that this process holds, with its number, which a forked worker does not share."""


def is_held(run: str | Path) -> bool:
    """Whether a process trains in a run folder; nothing is changed."""
    path = (Path(run) / LOCK).resolve()
    if _HELD.get(path) == os.getpid():  # opening and closing the file would let go of the lock
        return True
    try:
        with path.open(encoding="utf-8") as file:
            silent = time.time() - os.fstat(file.fileno()).st_mtime
            holder = _holder(file)
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    elsewhere = fcntl is None or holder.get("host") not in (None, socket.gethostname())
    return bool(holder) and elsewhere and silent < SILENT


class RunLock:
    """The lock of a run folder, from `take` to `release`; run.lock says who holds it, and since when.

    On one machine the system answers for it: the lock goes with the process, however that ends, and worker processes
    do not inherit it. Where several machines share the folder, and their file system does not pass locks on, the
    holder's sign of life (the time of the file) tells.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / LOCK
        self._file: IO[str] | None = None
        self._beat = 0.0

    def take(self) -> None:
        """Become the one process that trains here. Raises UserError where another one is, or nobody can write."""
        if _HELD.get(self.path.resolve()) == os.getpid():  # the system would give it to its own process twice
            raise UserError(f"{self.path.parent} is being trained by this process: wait for it, or stop it")
        try:
            file = self.path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write in the run folder {self.path.parent}: {error.strerror}") from error
        silent = time.time() - os.fstat(file.fileno()).st_mtime
        holder = _holder(file)
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise self._refused(holder, silent) from error
        elsewhere = holder.get("host") not in (None, socket.gethostname())
        if elsewhere and silent < SILENT:
            file.close()
            raise self._refused(holder, silent)
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        self._file, self._beat = file, time.monotonic()
        _HELD[self.path.resolve()] = os.getpid()

    def beat(self) -> None:
        """Show a sign of life, every now and then."""
        if self._file is not None and time.monotonic() - self._beat >= HEARTBEAT:
            self._beat = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        """Let the next one in."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the folder may be gone, or the disk full
                self._file.truncate(0)
            self._file.close()
            self._file = None
            _HELD.pop(self.path.resolve(), None)

    def _refused(self, holder: dict[str, Any], silent: float) -> UserError:
        return UserError(
            f"{self.path.parent} is being trained by process {holder.get('pid', '?')} on {holder.get('host', '?')} "
            f"(last sign of life {max(silent, 0):.0f} s ago): wait for it, or stop it"
        )


def _holder(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        found = json.loads(file.read())
    except ValueError:  # nobody, or a line cut off
        return {}
    return found if isinstance(found, dict) else {}
