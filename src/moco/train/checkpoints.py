"""Checkpoints on disk: written whole or not at all, with a checksum beside them, in the background of the training."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from moco.errors import TrainingError, UserError

FORMAT = 1
"""Version of what is in a checkpoint; written as `format`."""
BEST = "best.pt"
PATIENCE = 600.0
"""Seconds to wait for room on a full disk."""
RETRY = 5.0


class Checkpoints:
    """The checkpoints of a run: step-N.pt, and best.pt, each with NAME.sha256 beside it.

    A file that does not match its checksum (torn by a power cut, changed by a disk or by hand) is passed over. What
    has no checksum file is still protected by the one that PyTorch keeps for each tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self) -> list[Path]:
        """Those by step, the oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, state: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint under its `step`, and remove all but the newest `keep` up to it. Raises OSError.

        Those of later steps were passed over as damaged when the run went on: they count for nothing.
        """
        path = self.folder / f"step-{state['step']:09d}.pt"
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                torch.save(dict(state), file)
                to_disk(file)
            # The checksum first: a checkpoint whose checksum is not there yet would look older than it is.
            write_atomically(_checksum_of(path), digest(partial).encode())
            rename(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        for old in [found for found in self.paths() if found <= path][:-keep]:
            old.unlink()
            _checksum_of(old).unlink(missing_ok=True)
        for left_over in self.folder.glob("*.partial"):  # of a process that was killed while it wrote
            left_over.unlink(missing_ok=True)
        return path

    def mark_best(self, path: Path) -> None:
        """Keep a checkpoint as the best so far, whatever becomes of the others."""
        best = self.folder / BEST
        for source, target in ((_checksum_of(path), _checksum_of(best)), (path, best)):
            partial = target.with_name(target.name + ".partial")
            partial.unlink(missing_ok=True)
            try:
                os.link(source, partial)  # the same bytes under a second name
            except OSError:  # a file system without such links
                partial.write_bytes(source.read_bytes())
            rename(partial, target)

    def newest(self) -> dict[str, Any]:
        """The newest checkpoint that is whole, on the CPU; damaged ones are named in a warning and passed over.

        Raises UserError where there is none yet, none is whole, or it is of a later version of moco.
        """
        found = self.paths()
        run = self.folder.parent
        if not found:
            raise UserError(f"{run} has no checkpoint yet: the run ended before its first one")
        for path in reversed(found):
            state = read(path)
            if state is None:
                warnings.warn(f"{path} is damaged and is passed over", stacklevel=3)
                continue
            if state.get("format", FORMAT) > FORMAT:
                raise UserError(
                    f"{path} was written by a later version of moco (format {state['format']}; this one reads up to "
                    f"{FORMAT}): update moco"
                )
            return state
        raise UserError(f"{run}: none of its {len(found)} checkpoints can be read; start a new run")


def read(path: Path) -> dict[str, Any] | None:
    """The content of a checkpoint, on the CPU, or None where it is damaged. Tensors and plain values only."""
    try:
        checksum = _checksum_of(path)
        if checksum.exists() and checksum.read_text() != digest(path):
            return None
        state = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception:  # a changed byte can become any mistake inside the reader
        return None
    return state if isinstance(state, dict) and isinstance(state.get("step"), int) else None


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


class BackgroundSaver:
    """Writes checkpoints while the training goes on; one at a time.

    The state is copied when it is handed over, so that the next step may change it. write: what to do with the copy.
    say: told in one line that the disk is full and that the run waits. Errors come out at the next call.
    """

    def __init__(self, write: Callable[[Mapping[str, Any]], object], say: Callable[[str], None]) -> None:
        self._write, self._say = write, say
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, state: Mapping[str, Any]) -> None:
        """Begin to write a state. Waits for the one before. Raises what went wrong with it."""
        copied = copied_to_cpu(state)
        self.close()
        self._thread = threading.Thread(target=self._run, args=(copied,), name="checkpoint")
        self._thread.start()

    def close(self) -> None:
        """Wait until everything is on disk. Raises what went wrong: TrainingError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, state: Mapping[str, Any]) -> None:
        try:
            with_patience(lambda: self._write(state), self._say)
        except Exception as error:  # it belongs to the thread that trains
            self._error = error


def with_patience(write: Callable[[], object], say: Callable[[str], None], patience: float | None = None) -> None:
    """Write, and on a full disk try again for `patience` seconds. Raises TrainingError where it stays impossible."""
    patience = PATIENCE if patience is None else patience
    until, told = time.monotonic() + patience, False
    while True:
        try:
            write()
            return
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or time.monotonic() >= until:
                waited = f" (waited {patience / 60:.0f} minutes for room)" if full else ""
                raise TrainingError(
                    f"cannot write {error.filename or 'to the run folder'}: {error.strerror}{waited}; what was saved "
                    "before is whole: make it writable and resume"
                ) from error
            if not told:
                say(f"the disk is full: trying again for {patience / 60:.0f} minutes; free some room")
                told = True
            time.sleep(min(RETRY, patience))


def copied_to_cpu(value: Any) -> Any:
    """A copy of a tree of dicts, lists, tuples, tensors and plain values, its tensors in memory of their own."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copied_to_cpu(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied_to_cpu(item) for item in value)
    return value


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file or nothing, even if the machine stops."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        to_disk(file)
    rename(partial, path)


def to_disk(file: IO[bytes]) -> None:
    """Have the system write what it holds of a file."""
    file.flush()
    os.fsync(file.fileno())


def rename(partial: Path, path: Path) -> None:
    """Give a file its final name, and have the system write that down as well."""
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
