"""Where pictures come from: a folder or an array in memory or on disk. All random access: `source[i] → Sample`."""

from __future__ import annotations

import os
import zipfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from moco.errors import UserError

Array = np.ndarray[Any, Any]

EXTENSIONS = frozenset(
    f".{name}"
    for name in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "avif", "jp2", "j2k", "tif", "tiff", "gif"),
        *("bmp", "dib", "tga", "ico", "ppm", "pgm", "pbm", "pnm"),
    )
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One picture: file bytes or pixels (uint8, height × width × channels), its name, its label if it has one."""

    image: bytes | Array
    name: str
    label: int | None


class Source(Protocol):
    """Pictures by number.

    Attributes:
        labels: (N,) int64, or None.
        classes: the names of the labels 0, 1, …, or None.
        channels: 1 or 3, or None where only decoding tells.
    """

    labels: Array | None
    classes: list[str] | None
    channels: int | None

    def __len__(self) -> int:
        """How many pictures there are."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Picture number `index`. Raises IndexError, or OSError where the file cannot be read any more."""
        ...


class PackedNames:
    """Strings in one block of bytes: a million paths take tens of megabytes, and forked workers share them."""

    def __init__(self, blob: bytes | bytearray, ends: array[int]) -> None:
        self._blob = np.frombuffer(blob, np.uint8)
        self._ends = np.concatenate([np.zeros(1, np.int64), np.frombuffer(ends, np.int64)])

    @classmethod
    def of(cls, names: Iterator[str]) -> PackedNames:
        """Pack names as they come."""
        blob, ends = bytearray(), array("q")
        for name in names:
            blob += os.fsencode(name)
            ends.append(len(blob))
        return cls(blob, ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self._blob[self._ends[index] : self._ends[index + 1]].tobytes())


class FolderSource:
    """The images below a folder, at any depth, in an order that does not depend on the file system.

    Hidden files and folders are skipped; links are followed, each real folder once. The label of a picture is its
    first folder level, if no picture lies directly in the root and there are at least two such folders.
    """

    channels: int | None = None

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        if not self.root.exists():
            raise UserError(f"no such folder: {self.root}")
        if not self.root.is_dir():
            raise UserError(f"{self.root} is not a folder")
        self.names = PackedNames.of(_image_paths(self.root))
        if len(self.names) == 0:
            raise UserError(f"no images in {self.root}: looked at any depth for {', '.join(sorted(EXTENSIONS))}")
        self.labels, self.classes = self._folder_labels()

    def _folder_labels(self) -> tuple[Array | None, list[str] | None]:
        codes: dict[str, int] = {}  # the paths are sorted, so the codes are as well
        labels = np.empty(len(self.names), np.int64)
        for index in range(len(self.names)):
            first, slash, _ = self.names[index].partition("/")
            if not slash:
                return None, None
            labels[index] = codes.setdefault(first, len(codes))
        return (labels, list(codes)) if len(codes) > 1 else (None, None)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        name = self.names[index]
        with open(os.path.join(self.root, name), "rb") as file:
            data = file.read()
        return Sample(data, name, None if self.labels is None else int(self.labels[index]))


def _image_paths(root: Path) -> Iterator[str]:
    """Paths of the images below `root`, relative to it, sorted, with forward slashes."""
    seen: set[tuple[int, int]] = set()

    def walk(folder: str, prefix: str) -> Iterator[str]:
        try:
            status = os.stat(folder)
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error
        if (status.st_dev, status.st_ino) in seen:  # a link back: a loop, or the same pictures again
            return
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from walk(entry.path, f"{prefix}{entry.name}/")
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS and entry.is_file():
                yield prefix + entry.name

    return walk(str(root), "")


class ArraySource:
    """Pictures of one size in one array.

    Args:
        images: uint8, N × H × W, N × H × W × 1 or N × H × W × 3. Kept as it is, not copied.
        labels: N integers, or None.
        classes: names of the labels.
        name: what messages call it; picture i is `name[i]`.

    Raises UserError for any other type or shape.
    """

    def __init__(
        self, images: Array, labels: Array | None = None, classes: list[str] | None = None, name: str = "array"
    ) -> None:
        if images.dtype != np.uint8:
            raise UserError(f"{name}: images must be uint8 (0…255), not {images.dtype}; convert them first")
        if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
            hint = ""
            if images.ndim == 4 and images.shape[1] in (1, 3):
                hint = "; move the channels to the end"
            raise UserError(f"{name}: images must be N × H × W or N × H × W × (1 or 3), not {_shape(images)}{hint}")
        if images.size == 0:
            raise UserError(f"{name}: there are no images in it ({_shape(images)})")
        self.images = images if images.ndim == 4 else images[..., None]
        self.labels = None if labels is None else check_labels(labels, len(images), name)
        self.classes = classes
        self.channels: int | None = self.images.shape[3]
        self.name = name
        self._file: Path | None = None

    @classmethod
    def map_file(cls, path: Path, labels: Array | None = None) -> ArraySource:
        """The images of a .npy file, read from disk as they are needed."""
        source = cls(_load_npy(path), labels, name=path.name)
        source._file = path
        return source

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._file is not None:  # a spawned worker maps the file again instead of receiving its content
            state["images"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._file is not None:
            images = _load_npy(self._file)
            self.images = images if images.ndim == 4 else images[..., None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        label = None if self.labels is None else int(self.labels[index])
        return Sample(self.images[index], f"{self.name}[{index}]", label)


def open_source(data: str | Path | Array | torch.Tensor, labels: str | Array | None = "auto") -> Source:
    """The pictures of a folder, a .npy or .npz file, or an array.

    Args:
        data: a folder; a .npz with images in `x` or `images` (or its only 3- or 4-dimensional array) and labels in
            `y` or `labels`; a .npy; or an array or tensor. Images are uint8, N × H × W or N × H × W × (1 or 3).
        labels: "auto" (first folder level, or the labels in the .npz), "none" or None, a .npy file, or an array.

    Raises UserError with one line for anything that cannot be used.
    """
    source: FolderSource | ArraySource
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu().numpy()
    if isinstance(data, np.ndarray):
        source, what = ArraySource(data), "the array"
    else:
        source, what = _open_path(Path(data).expanduser()), str(data)
    if labels is None or (isinstance(labels, str) and labels == "none"):
        source.labels = source.classes = None
    elif not (isinstance(labels, str) and labels == "auto"):
        given = np.asarray(labels) if not isinstance(labels, str | Path) else _load_npy(Path(labels).expanduser())
        source.labels, source.classes = check_labels(given, len(source), what), None
    return source


def _open_path(path: Path) -> FolderSource | ArraySource:
    if path.is_dir():
        return FolderSource(path)
    if not path.exists():
        raise UserError(f"no such file or folder: {path}")
    if path.suffix.lower() == ".npy":
        return ArraySource.map_file(path)
    if path.suffix.lower() != ".npz":
        raise UserError(f"{path} is neither a folder of images nor a .npz or .npy file")
    arrays = _load_npz(path)
    images = _pick_images(path, arrays)
    found = next((arrays[key] for key in ("y", "labels", "y_train") if key in arrays), None)
    return ArraySource(images, found, name=path.name)


def _pick_images(path: Path, arrays: dict[str, Array]) -> Array:
    for key in ("x", "images", "x_train"):
        if key in arrays:
            return arrays[key]
    candidates = [value for value in arrays.values() if value.ndim in (3, 4)]
    if len(candidates) != 1:
        holds = ", ".join(f"{key} {_shape(value)}" for key, value in arrays.items()) or "nothing"
        raise UserError(f"{path} has no array called x or images (it holds {holds}); rename the one with the images")
    return candidates[0]


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a readable .npz file: {' '.join(str(error).split())}") from error


def _load_npy(path: Path) -> Array:
    """A .npy file mapped into memory. Copy-on-write, so that torch gets a writable array and the file stays."""
    try:
        return np.lib.format.open_memmap(path, mode="c")
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path}") from error
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is not a readable .npy file: {' '.join(str(error).split())}") from error


def check_labels(labels: Array, count: int, what: str) -> Array:
    """Labels as (count,) int64. Raises UserError for another length or for anything but integers."""
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        raise UserError(f"{what}: labels must be one integer per image, not {labels.dtype} of shape {_shape(labels)}")
    if len(labels) != count:
        raise UserError(f"{what}: {len(labels)} labels for {count} images; there must be one label per image")
    return labels.astype(np.int64)


def _shape(values: Array) -> str:
    return " × ".join(map(str, values.shape)) or "a single value"
