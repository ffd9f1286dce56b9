"""Image files on disk: a folder at any depth, or paths one by one; and several sources as one."""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from moco.data.sources.base import EXTENSIONS, Array, PackedNames, Pictures
from moco.data.sources.labels import by_first_folder, merged
from moco.errors import UserError


class FileSource(Pictures):
    """Image files by path.

    Args:
        root: where relative paths start.
        names: the paths.
    """

    def __init__(self, root: Path, names: PackedNames) -> None:
        super().__init__()
        self.root, self.names = root, names

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> tuple[bytes, str]:
        """Bytes and path of a picture."""
        name = self.names[index]
        try:
            with open(os.path.join(self.root, name), "rb") as file:
                return file.read(), name
        except ValueError as error:  # a NUL in it
            raise OSError(errno.EINVAL, "this cannot be a path", name) from error


class NoImages(UserError):
    """A folder without image files."""


class FolderSource(FileSource):
    """The images below a folder, at any depth, in an order that does not depend on the file system.

    Hidden files and folders are skipped; links are followed, each real folder once. The label of a picture is its
    first folder level, if no picture lies directly in the root and there are at least two such folders.
    """

    def __init__(self, root: str | Path) -> None:
        root = Path(root)
        if not root.exists():
            raise UserError(f"no such folder: {root}")
        if not root.is_dir():
            raise UserError(f"{root} is not a folder")
        super().__init__(root, PackedNames.of(files_below(root, EXTENSIONS)))
        if len(self.names) == 0:
            raise NoImages(f"no images in {root}: looked at any depth for {', '.join(sorted(EXTENSIONS))}")
        found = by_first_folder(self.names)
        if not isinstance(found, str):
            self.labels, self.classes = found


def files_below(root: Path, extensions: frozenset[str]) -> Iterator[str]:
    """Paths of the files with one of these extensions below `root`, relative to it, sorted, with forward slashes.

    Raises UserError for a folder that cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    stack = [("", _entries(str(root), seen, extensions))]
    while stack:
        prefix, entries = stack[-1]
        entry = next(entries, None)
        if entry is None:
            stack.pop()
            continue
        path = prefix + os.fsdecode(entry[0])
        if entry[1]:
            stack.append((f"{path}/", _entries(os.path.join(root, path), seen, extensions)))
        else:
            yield path


def _entries(folder: str, seen: set[tuple[int, int]], extensions: frozenset[str]) -> Iterator[tuple[bytes, bool]]:
    """(name, is it a folder) of what counts in a folder, sorted; nothing if the folder was met before."""
    try:
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a link back: a loop, or the same pictures again
            return iter(())
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as found:
            kept = [
                (os.fsencode(entry.name), is_folder)
                for entry in found
                if not entry.name.startswith(".") and (is_folder := _kind(entry, extensions)) is not None
            ]
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error
    return iter(sorted(kept))


def _kind(entry: os.DirEntry[str], extensions: frozenset[str]) -> bool | None:
    """True for a folder, False for a file with one of the extensions, None for what does not count."""
    try:
        if entry.is_dir():
            return True
        return False if os.path.splitext(entry.name)[1].lower() in extensions and entry.is_file() else None
    except OSError:  # a link to itself, or to where we may not look: as good as a link to nothing
        return None


class JoinedSource(Pictures):
    """Several sources, their pictures one after the other; classes are merged by name.

    Args:
        parts: the sources.
        prefixes: what stands before the names of each part, such as "cats/".
    """

    def __init__(self, parts: Sequence[Pictures], prefixes: Sequence[str]) -> None:
        super().__init__()
        self._parts, self._prefixes = list(parts), list(prefixes)
        self._starts = list(accumulate(map(len, parts), initial=0))
        self.labels, self.classes = merged(parts)
        channels = {part.channels for part in parts}
        self.channels = channels.pop() if len(channels) == 1 else None
        self.notices = [line for part in parts for line in part.notices]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, index: int) -> tuple[bytes | Array, str]:
        """Content and name of a picture."""
        number = bisect_right(self._starts, index) - 1
        image, name = self._parts[number].read(index - self._starts[number])
        return image, self._prefixes[number] + name
