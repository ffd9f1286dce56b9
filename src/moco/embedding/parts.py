"""The finished parts of an embedding, in a folder beside its file, until all are there.

A part is whole or absent, and says which pictures it covers; so a run that was killed goes on behind the last one.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moco.data.sources import PackedNames
from moco.errors import UserError
from moco.train.checkpoints import write_atomically
from moco.train.lock import RunLock

Array = np.ndarray[Any, Any]

IDENTITY = "embedding.json"


@dataclass
class Part:
    """The pictures `first` … `first` + `count` − 1 of an embedding.

    index: (n,) int64, numbers in the source of those that could be read. names: n paths or names. features: (n, D).
    skipped: (name, reason) of the others, count − n of them.
    """

    first: int
    count: int
    index: Array
    names: PackedNames
    features: Array
    skipped: list[tuple[str, str]]


class Parts:
    """The folder OUT.parts of an embedding.

    Args:
        out: the file that is being made.
        identity: all that its content depends on, by what a message calls it.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out, self.folder = out, out.with_name(out.name + ".parts")
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._paths: list[Path] = []
        self.done = 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[Parts]:
        """Make the folder, or go on with what is in it; `done` pictures are. One process at a time.

        Raises UserError where it cannot be made, another process is at work, or its parts are of another embedding.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write beside {self.out}: {error.strerror}; choose another --out") from error
        lock = RunLock(self.folder)
        try:
            lock.take()
        except UserError as error:
            raise UserError(f"another process is making {self.out}, or {self.folder} cannot be written to") from error
        try:
            self._check()
            self._find()
        except UserError:
            lock.release()
            raise
        try:
            yield self
        finally:
            if self.done == 0:  # nothing worth keeping
                self.remove()
            lock.release()

    def _check(self) -> None:
        path = self.folder / IDENTITY
        if not path.exists():
            write_atomically(path, json.dumps(self.identity).encode())
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name in {**self.identity, **found} if found.get(name) != self.identity.get(name)]
        except (OSError, ValueError, AttributeError, TypeError):
            other = ["content"]
        if other:
            raise UserError(
                f"{self.folder} was begun with other {', '.join(other)}: go on as it was begun, delete that folder, or "
                "choose another --out"
            )

    def _find(self) -> None:
        """Parts from the first picture on without a gap; what lies behind a gap is of no use."""
        waiting = {path.stem: path for path in sorted(self.folder.glob("*.npz"))}
        while (path := waiting.pop(f"{self.done:012}", None)) is not None and (part := _read(path)) is not None:
            self._paths.append(path)
            self.done += part.count
        for left in waiting.values():
            left.unlink()

    def add(self, part: Part) -> None:
        """Put the next part on disk. Raises OSError."""
        path = self.folder / f"{part.first:012}.npz"
        written = io.BytesIO()
        np.savez(
            written,
            count=np.int64(part.count),
            index=part.index,
            blob=part.names.blob,
            ends=part.names.ends,
            features=part.features,
            skipped=np.frombuffer(json.dumps(part.skipped).encode(), np.uint8),
        )
        write_atomically(path, written.getvalue())
        self._paths.append(path)
        self.done += part.count

    def __iter__(self) -> Iterator[Part]:
        """The parts in order, one in memory at a time. Raises UserError for one that was damaged meanwhile."""
        for path in self._paths:
            part = _read(path)
            if part is None:
                raise UserError(f"{path} is damaged: the same command makes it anew")
            yield part

    def remove(self) -> None:
        """All parts are in the file: the folder is not needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(path: Path) -> Part | None:
    """A part, or None where the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as held:
            names = PackedNames(held["blob"], held["ends"])
            skipped = [(str(name), str(reason)) for name, reason in json.loads(held["skipped"].tobytes())]
            part = Part(int(path.stem), int(held["count"]), held["index"], names, held["features"], skipped)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    rows = part.count - len(part.skipped)
    whole = part.count > 0 and rows == len(part.index) == len(names) == len(part.features)
    return part if whole else None
