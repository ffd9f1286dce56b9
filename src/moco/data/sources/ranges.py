"""Bytes from the middle of a file: on disk, or behind anything that fsspec opens."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from moco.data.sources.base import one_line
from moco.data.sources.cache import BLOCK_BYTES, BlockCache, Cache, digest
from moco.errors import UserError

MOST_HANDLES = 64
MOST_FAILURES = 20
_PAUSES = (0.5, 2.0)  # seconds before the second and the third try

_handles: OrderedDict[tuple[str, int, int], FileIO] = OrderedDict()  # of this process, shared with forked ones
_process = os.getpid()
_failures = 0  # remote reads that failed one after the other


class Ranges(Protocol):
    """A file that can be read anywhere.

    Attributes:
        name: for messages. identity: tells this version of the file from any other. size: bytes.
        ahead: how much a reader in order should ask for at once, least and most, in bytes.
    """

    name: str
    identity: str
    size: int
    ahead: tuple[int, int]

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from `offset` on; fewer than `size` at the end of the file. Raises OSError."""
        ...


class LocalFile:
    """A file on disk. At most 64 are open at a time; they are opened when first read, in every process anew.

    Raises OSError if there is no such file.
    """

    ahead = (4096, 4096)  # a header or two; the system itself reads further ahead

    def __init__(self, path: Path) -> None:
        state = path.stat()
        self.path, self.name = os.path.abspath(path), str(path)
        self.size, self._changed = state.st_size, state.st_mtime_ns
        self.identity = json.dumps([self.path, self.size, self._changed])

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from `offset` on. Raises OSError, also for a file that is not the one that was opened first."""
        file = self._handle()
        if sys.platform == "win32":
            with open(file.fileno(), "rb", closefd=False) as whole:
                whole.seek(offset)
                return whole.read(size)
        # Without moving a common position, so that forked processes can share the handle.
        data = os.pread(file.fileno(), size, offset)
        while data and len(data) < size and (more := os.pread(file.fileno(), size - len(data), offset + len(data))):
            data += more
        return data

    def _handle(self) -> FileIO:
        key = (self.path, self.size, self._changed)
        file = _handles.pop(key, None)
        if file is None:
            file = FileIO(self.path)
            state = os.fstat(file.fileno())
            if (state.st_size, state.st_mtime_ns) != key[1:]:
                raise OSError(errno.ESTALE, "the file was changed while it was in use; start again", self.name)
        _handles[key] = file
        if len(_handles) > MOST_HANDLES:
            _handles.popitem(last=False)  # closes itself when nobody reads from it any more
        return file


class RemoteFile:
    """A file behind a URL, read in blocks by byte ranges; blocks are kept in the cache.

    Raises UserError if it cannot be reached.
    """

    ahead = (BLOCK_BYTES, 16 * BLOCK_BYTES)

    def __init__(self, url: str, cache: Cache) -> None:
        self.url = self.name = url
        self._cache: BlockCache | None = cache.blocks()
        try:
            system, path = filesystem(url)
            info = system.info(path)
            self.size = int(info["size"])
        except UserError:
            raise
        except (KeyError, TypeError) as error:
            raise UserError(f"{url}: the server does not tell the size of the file; copy it to disk") from error
        except Exception as error:  # every kind of file system has its own
            raise UserError(f"cannot open {url}: {one_line(error)}") from error
        self.identity = json.dumps([url, self.size, _version(info)])

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from `offset` on. Raises OSError after three tries, and UserError if that happens time after time."""
        end = min(offset + size, self.size)
        if end <= offset:
            return b""
        first, last = offset // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        blocks: list[bytes | None] = [self._kept(number) for number in range(first, last + 1)]
        start = 0
        while start < len(blocks):
            stop = start
            while stop < len(blocks) and blocks[stop] is None:
                stop += 1
            if stop > start:  # neighbours in one request
                blocks[start:stop] = self._fetch_blocks(first + start, first + stop)
            start = stop + 1
        data = b"".join(block for block in blocks if block is not None)
        return data[offset - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def _key(self, number: int) -> str:
        return digest(f"{self.identity} {number}")

    def _kept(self, number: int) -> bytes | None:
        block = None if self._cache is None else self._cache.get(self._key(number))
        whole = min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)
        return block if block is not None and len(block) == whole else None

    def _fetch_blocks(self, first: int, stop: int) -> list[bytes]:
        start, end = first * BLOCK_BYTES, min(stop * BLOCK_BYTES, self.size)
        data = self._fetch(start, end)
        blocks = [data[at : at + BLOCK_BYTES] for at in range(0, end - start, BLOCK_BYTES)]
        if self._cache is not None:
            for number, block in enumerate(blocks, start=first):
                self._cache.put(self._key(number), block)
        return blocks

    def _fetch(self, start: int, end: int) -> bytes:
        global _failures
        for pause in (*_PAUSES, None):
            try:
                system, path = filesystem(self.url)
                data: bytes = system.cat_file(path, start=start, end=end)
                break
            except Exception as error:  # every kind of file system has its own
                if isinstance(error, FileNotFoundError | PermissionError) or pause is None:
                    _failures += 1
                    if _failures >= MOST_FAILURES:
                        reason = f"{_failures} reads in a row failed: {one_line(error)}"
                        raise UserError(f"{self.url}: {reason}; check the connection, then resume") from error
                    raise OSError(errno.EIO, one_line(error), self.url) from error
                time.sleep(pause)
        _failures = 0
        if len(data) != end - start:
            reason = f"{len(data):,} bytes came for a range of {end - start:,}: the server may not know byte ranges"
            raise OSError(errno.EIO, reason, self.url)
        return data


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it. Raises UserError for one that fsspec cannot open.

    Asked for at every read rather than kept: fsspec remembers its file systems itself, and anew in a forked process.
    """
    global _process
    from fsspec import asyn, core

    if os.getpid() != _process:  # forked: the thread that does the work of fsspec stayed behind
        _process = os.getpid()
        asyn.reset_lock()
    try:
        system, path = core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot open {url}: {one_line(error)}") from error
    return system, path


def _version(info: dict[str, Any]) -> list[str]:
    """What a file system tells about the version of a file, whatever it is called there."""
    known = ("etag", "mtime", "lastmodified", "last_modified", "last-modified", "created", "updated", "generation")
    hashes = ("md5", "content-md5", "md5hash", "crc32c", "checksum", "digest", "versionid", "version_id")
    return sorted(f"{key}={value}" for key, value in info.items() if key.lower() in known + hashes)


def read_in_order(file: Ranges) -> Callable[[int, int], bytes]:
    """A `read` for somebody who goes through the file: it reads ahead, further the longer nothing is passed over."""
    least, most = file.ahead
    start, buffer, ahead = 0, b"", least

    def read(offset: int, size: int) -> bytes:
        nonlocal start, buffer, ahead
        if not start <= offset <= offset + size <= start + len(buffer):
            near = offset - (start + len(buffer)) < least
            ahead = min(2 * ahead, most) if near else least
            start, buffer = offset, file.read(offset, max(size, ahead))
        return buffer[offset - start : offset - start + size]

    return read
