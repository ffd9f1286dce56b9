"""Pictures that lie in large files one after the other: indexed once, then read at random without unpacking."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moco.data.sources.base import EXTENSIONS, Array, PackedNames, Pictures, one_line
from moco.data.sources.cache import Cache, written_whole
from moco.data.sources.labels import LABEL_NAMES, LabelTexts, number_texts
from moco.data.sources.ranges import LocalFile, Ranges, RemoteFile, read_in_order
from moco.data.sources.tar import DamagedTar, Member, members
from moco.errors import UserError, counted

INDEX_FORMAT = 1
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
MOST_LABEL_BYTES = 2**20


@dataclass
class ShardIndex:
    """Where the pictures of one file lie in it.

    Attributes:
        names: of the pictures, N.
        offsets, sizes: (N,) int64, in bytes.
        codes: (N,) int32, which of `texts` is the label; −1 for none.
        texts: the distinct label texts.
        notices: lines for the user.
        others: how many members there are with another extension, by extension.
    """

    names: PackedNames
    offsets: Array
    sizes: Array
    codes: Array
    texts: list[str]
    notices: list[str]
    others: dict[str, int] = field(default_factory=dict)


class ShardSource(Pictures):
    """The pictures in several large files, one file after the other.

    Args:
        files: the files. indices: where the pictures lie in each.
        name: how the file and the picture in it make one name, such as "{}/{}".
    """

    def __init__(self, files: Sequence[Ranges], indices: Sequence[ShardIndex], name: str = "{}/{}") -> None:
        super().__init__()
        self._files, self._name = list(files), name
        self._starts = np.cumsum([0] + [len(index.offsets) for index in indices])
        self._offsets = np.concatenate([index.offsets for index in indices])
        self._sizes = np.concatenate([index.sizes for index in indices])
        self.names = PackedNames.joined([index.names for index in indices])
        texts: dict[str, int] = {}
        codes = [
            np.array([*(texts.setdefault(text, len(texts)) for text in index.texts), -1], np.int32)[index.codes]
            for index in indices
        ]
        self.labels, self.classes = number_texts(np.concatenate(codes), list(texts))
        self.notices = [line for index in indices for line in index.notices]

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> tuple[bytes, str]:
        """Bytes and name of a picture."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        file, size = self._files[shard], int(self._sizes[index])
        name = self._name.format(os.path.basename(file.name), self.names[index])
        try:
            data = file.read(int(self._offsets[index]), size)
        except OSError as error:
            raise OSError(error.errno, error.strerror or one_line(error), f"{file.name}: {name}") from error
        if len(data) < size:
            raise OSError(errno.EIO, "the file ends before this picture does", f"{file.name}: {name}")
        return data, name


def open_tars(locations: Sequence[str], cache: Cache) -> ShardSource:
    """The pictures in tar shards as WebDataset writes them.

    Members next to each other whose names are equal up to the first dot of the base name make one sample. Its picture
    is the first member that is an image; its label is in the member `.cls`, or in `.json` as label, class or cls.

    Args:
        locations: paths or URLs of uncompressed tar files.
        cache: where the indices go, and blocks of remote files.

    Raises UserError for shards that cannot be read or hold no image.
    """
    remote = any("://" in location for location in locations)
    with ThreadPoolExecutor(8 if remote else 1) as pool:  # waiting for servers, one waits best for several at once
        files = list(pool.map(lambda location: _open(location, cache), locations))
        indices = list(pool.map(lambda file: _indexed(file, cache), files))
    source = ShardSource(files, indices)
    if len(source) == 0:
        others = sum((Counter(index.others) for index in indices), Counter[str]())
        held = ", ".join(f"{count:,} × .{name}" for name, count in others.most_common(5)) or "no files"
        what = locations[0] if len(locations) == 1 else f"{locations[0]} and {len(locations) - 1} more"
        reason = "; ".join(source.notices[:1])
        raise UserError(f"no images in {what}; it holds {held}" + (f" ({reason})" if reason else ""))
    return source


def _open(location: str, cache: Cache) -> Ranges:
    if "://" in location:
        return RemoteFile(location, cache)
    try:
        return LocalFile(Path(location))
    except OSError as error:
        raise UserError(f"cannot open {location}: {one_line(error)}") from error


def _indexed(file: Ranges, cache: Cache) -> ShardIndex:
    """The index of a tar file: from the cache if it is for this very version of the file, or made and put there."""
    where = file.name if "://" in file.name else os.path.abspath(file.name)
    kept = cache.file("index", where, ".npz")
    found = None if kept is None else load_index(kept, file.identity, file.size)
    if found is not None:
        return found
    try:
        index = index_tar(file)
    except OSError as error:
        raise UserError(f"cannot read {file.name}: {one_line(error)}") from error
    if kept is not None:
        with suppress(OSError):  # a folder where nothing can be written: then it is made again next time
            save_index(kept, file.identity, index)
    return index


def save_index(path: Path, identity: str, index: ShardIndex) -> None:
    """Keep an index in a file. Raises OSError."""
    described = {"format": INDEX_FORMAT, "identity": identity, "texts": index.texts}
    texts = json.dumps(described | {"notices": index.notices, "others": index.others})
    with written_whole(path) as file:
        np.savez(
            file,
            blob=index.names.blob,
            ends=index.names.ends,
            offsets=index.offsets,
            sizes=index.sizes,
            codes=index.codes,
            texts=np.frombuffer(texts.encode(), np.uint8),
        )


def load_index(path: Path, identity: str, size: int) -> ShardIndex | None:
    """The index in a file, for a shard of `size` bytes; None where it is missing, damaged, or of another version."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("blob", "ends", "offsets", "sizes", "codes", "texts")}
        texts = json.loads(arrays["texts"].tobytes())
        if (texts["format"], texts["identity"]) != (INDEX_FORMAT, identity):
            return None
        names = PackedNames(arrays["blob"], arrays["ends"])
        index = ShardIndex(
            names,
            arrays["offsets"],
            arrays["sizes"],
            arrays["codes"],
            texts["texts"],
            texts["notices"],
            texts["others"],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, RecursionError):
        return None
    return index if _plausible(index, size) else None


def _plausible(index: ShardIndex, size: int) -> bool:
    """Whether all numbers of an index point where they may: its file has a checksum, but could come from anywhere."""
    count, ends = len(index.offsets), index.names.ends
    if {len(index.sizes), len(index.codes), len(ends)} != {count}:
        return False
    kinds = [values.dtype.name for values in (index.names.blob, ends, index.offsets, index.sizes, index.codes)]
    if kinds != ["uint8", "int64", "int64", "int64", "int32"]:
        return False
    if not all(isinstance(text, str) for text in (*index.texts, *index.notices)):
        return False
    steps = np.diff(ends, prepend=0)
    inside = (index.offsets >= 0) & (index.sizes >= 0) & (index.sizes <= size - index.offsets)
    known = (index.codes >= -1) & (index.codes < len(index.texts))
    return bool(inside.all() and known.all() and (steps >= 0).all() and ends[-1:].sum() == len(index.names.blob))


def index_tar(file: Ranges) -> ShardIndex:
    """Where the pictures of a tar shard lie. Raises UserError for anything but an uncompressed tar file."""
    read = read_in_order(file)
    if read(0, 6).startswith(COMPRESSED):
        raise UserError(
            f"{file.name} is compressed, so that no picture in it can be reached without reading all before it; "
            "unpack it to a plain .tar (gunzip, or the like): pictures are compressed anyway"
        )
    groups = _Groups(read)
    end = ""
    try:
        for member in members(read, file.size):
            groups.add(member)
    except DamagedTar as error:
        if error.position == 0 and "no tar" in error.reason:
            raise UserError(f"{file.name}: {error.reason}; a shard is an uncompressed .tar file") from error
        end = f"{file.name}: {error.reason} at byte {error.position:,} of {file.size:,}"
    index = groups.index(file.name)
    if end:
        whole = counted(len(index.offsets), "image before that is", "images before that are")
        index.notices.append(f"{end}; the {whole} used")
    return index


class _Groups:
    """Members become samples: neighbours with the same name up to the first dot of the base name belong together."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._names: list[str] = []
        self._places = array("q")  # offset, size, offset, size, …
        self._labels = LabelTexts()
        self._others: Counter[str] = Counter()
        self._spare = self._odd = 0
        self._key: str | None = None
        self._images: list[tuple[Member, bool]] = []
        self._texts: dict[str, str | None] = {}

    def add(self, member: Member) -> None:
        """The next member of the archive."""
        if not member.plain:
            self._odd += not member.folder
            return
        folder, _, base = member.name.rpartition("/")
        start, dot, extension = base.partition(".")
        if not start or not dot:  # hidden, or without an extension: WebDataset passes over both
            return
        if self._key != (key := f"{folder}/{start}"):
            self._finish()
            self._key = key
        extension = extension.lower()
        if f".{extension.rpartition('.')[2]}" in EXTENSIONS:
            self._images.append((member, "." not in extension))
        elif extension in ("cls", "json") and member.size <= MOST_LABEL_BYTES:
            self._texts[extension] = _label(extension, self._read(member.offset, member.size))
        else:
            self._others[extension] += 1

    def _finish(self) -> None:
        """The sample is complete."""
        if self._images:
            # Of cat.jpg and cat.seg.png it is the former, in whatever order they come.
            member = next((image for image, simple in self._images if simple), self._images[0][0])
            self._names.append(member.name)
            self._places.extend((member.offset, member.size))
            self._labels.add(self._texts.get("cls") or self._texts.get("json"))
            self._spare += len(self._images) - 1
        self._images, self._texts = [], {}

    def index(self, name: str) -> ShardIndex:
        """All samples so far."""
        self._finish()
        places = np.array(self._places, np.int64).reshape(-1, 2)
        notices = []
        if self._spare:
            reason = "not the first of its sample (names that are equal up to their first dot)"
            notices.append(f"{name}: left out {counted(self._spare, 'image')}, each {reason}")
        if self._odd:
            notices.append(f"{name}: left out {self._odd:,} links or sparse members, which hold no plain bytes")
        names, labels = PackedNames.of(self._names), self._labels
        columns = np.ascontiguousarray(places[:, 0]), np.ascontiguousarray(places[:, 1])
        return ShardIndex(names, *columns, labels.codes, labels.texts, notices, dict(self._others.most_common(20)))


def _label(extension: str, data: bytes) -> str | None:
    """The text of a label; None where there is none."""
    text = data.decode("utf-8", "replace").strip()
    if extension == "cls":
        return text[:200]
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    for key in (*LABEL_NAMES, "cls"):
        value = content.get(key)
        if isinstance(value, int | str) and not isinstance(value, bool):
            return str(value)[:200]
    return None
