"""What is kept on disk between runs: indices of shards, and blocks of remote files within a bound."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

CACHE_BYTES = 16 * 2**30
"""Blocks of remote files take at most this much disk, unless told otherwise."""

BLOCK_BYTES = 256 * 2**10
"""Unit of what is fetched: about two photographs. Larger ones would fetch too much for one random picture."""


def user_cache_folder() -> Path | None:
    """`moco` in the user's cache folder ($XDG_CACHE_HOME, or ~/.cache); None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the specification says to ignore others
        return Path(given) / "moco"
    try:
        return Path.home() / ".cache" / "moco"
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Cache:
    """Where things are kept, and how much.

    Attributes:
        folder: None keeps nothing.
        block_bytes: bound for the blocks of remote files.
    """

    folder: Path | None
    block_bytes: int = CACHE_BYTES

    def file(self, kind: str, key: str, suffix: str) -> Path | None:
        """The file for what `key` names."""
        return None if self.folder is None else self.folder / kind / (digest(key) + suffix)

    def blocks(self) -> BlockCache | None:
        """The blocks of remote files."""
        return None if self.folder is None else BlockCache(self.folder / "blocks", self.block_bytes)


def digest(text: str) -> str:
    """A file name for any text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when it is complete, or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """A small file, opened to be read and changed, while no other process has it (on Windows, nobody waits)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


class BlockCache:
    """Blocks of bytes on disk, at most `bound` bytes of them; the ones not used for longest go first.

    Safe with several processes: blocks appear whole, and the bytes in use are counted under a lock before a block
    is written. A block carries a checksum; a damaged one is as good as none. Trouble with the disk means that nothing
    is kept, never an error.
    """

    def __init__(self, folder: Path, bound: int) -> None:
        self.folder, self.bound = folder, bound

    def get(self, key: str) -> bytes | None:
        """The block of this key, if it is there."""
        path = self.folder / key
        try:
            data = path.read_bytes()
            os.utime(path)  # its last use
        except OSError:
            return None
        content = data[4:]
        return content if data[:4] == zlib.crc32(content).to_bytes(4, "little") else None

    def put(self, key: str, content: bytes) -> None:
        """Keep a block, if there is room for it."""
        data = zlib.crc32(content).to_bytes(4, "little") + content
        if len(data) > self.bound:
            return
        # Written while the count is locked, so that nobody counts a block that is half there.
        with suppress(OSError), locked(self.folder / "used") as count:
            text = count.read(32)
            used = int(text) if text.isdigit() else self._shrink(self.bound)
            if used + len(data) > self.bound:
                # An eighth more than needed, so that the folder is not looked through for every block.
                used = self._shrink(min(self.bound - len(data), self.bound * 7 // 8))
            count.truncate(0)
            count.write(str(used + len(data)).encode())
            count.flush()
            with written_whole(self.folder / key) as file:
                file.write(data)

    def _shrink(self, limit: int) -> int:
        """Drop the oldest blocks until at most `limit` bytes are left; return how many are."""
        with os.scandir(self.folder) as found:
            states = [(entry.path, entry.stat()) for entry in found if entry.name != "used"]
        left = sum(state.st_size for _, state in states)
        for path, state in sorted(states, key=lambda item: item[1].st_mtime_ns):
            if left <= limit:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            left -= state.st_size
        return left
