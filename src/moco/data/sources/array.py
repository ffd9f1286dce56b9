"""Pictures in one array, in memory or mapped from a file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from moco.data.sources.base import Array, Pictures, one_line, shape_text
from moco.data.sources.labels import check_labels
from moco.errors import UserError

MOST_CHANNELS = 64


class ArraySource(Pictures):
    """Pictures of one size in one array.

    Args:
        images: uint8, N × H × W or N × H × W × C with 1…64 channels. Kept as it is, not copied.
        labels: N integers, or None.
        classes: names of the labels.
        name: what messages call it; picture i is `name[i]`.

    Raises UserError for any other type or shape.
    """

    def __init__(
        self, images: Array, labels: Array | None = None, classes: list[str] | None = None, name: str = "array"
    ) -> None:
        super().__init__()
        if images.dtype != np.uint8:
            raise UserError(f"{name}: images must be uint8 (0…255), not {images.dtype}; convert them first")
        if images.ndim not in (3, 4) or (images.ndim == 4 and not _channels_last(*images.shape[1:])):
            hint = "; move the channels to the end" if images.ndim == 4 and images.shape[1] <= MOST_CHANNELS else ""
            wanted = f"N × H × W or N × H × W × (1…{MOST_CHANNELS} channels)"
            raise UserError(f"{name}: images must be {wanted}, not {shape_text(images)}{hint}")
        if images.size == 0:
            raise UserError(f"{name}: there are no images in it ({shape_text(images)})")
        self.images = images if images.ndim == 4 else images[..., None]
        self.labels = None if labels is None else check_labels(labels, len(images), name)
        self.classes = classes
        self.channels = self.images.shape[3]
        self.name = name
        self._file: Path | None = None

    @classmethod
    def map_file(cls, path: Path, labels: Array | None = None) -> ArraySource:
        """The images of a .npy file, read from disk as they are needed."""
        source = cls(load_npy(path), labels, name=path.name)
        source._file = path
        return source

    @classmethod
    def load_file(cls, path: Path) -> ArraySource:
        """The images and labels of a .npz file."""
        arrays = _load_npz(path)
        labels = next((arrays[key] for key in ("y", "labels", "y_train") if key in arrays), None)
        return cls(_pick_images(path, arrays), labels, name=path.name)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._file is not None:  # a spawned worker maps the file again instead of receiving its content
            state["images"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._file is not None:
            images = load_npy(self._file)
            self.images = images if images.ndim == 4 else images[..., None]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Array, str]:
        """Pixels (H, W, C) and name of a picture."""
        return self.images[index], f"{self.name}[{index}]"


def _channels_last(height: int, width: int, channels: int) -> bool:
    """Whether a shape can be read as height × width × channels, and not rather as channels × height × width."""
    if not 1 <= channels <= MOST_CHANNELS:
        return height == 0 or width == 0 or channels == 0  # an empty array gets a message of its own
    return channels <= 4 or not (height <= 4 or height != width == channels)


def _pick_images(path: Path, arrays: dict[str, Array]) -> Array:
    for key in ("x", "images", "x_train"):
        if key in arrays:
            return arrays[key]
    candidates = [value for value in arrays.values() if value.ndim in (3, 4)]
    if len(candidates) != 1:
        holds = ", ".join(f"{key} {shape_text(value)}" for key, value in arrays.items()) or "nothing"
        raise UserError(f"{path} has no array called x or images (it holds {holds}); rename the one with the images")
    return candidates[0]


def _load_npz(path: Path) -> dict[str, Array]:
    if path.is_file() and not zipfile.is_zipfile(path):  # NumPy would advise to unpickle it
        raise UserError(f"{path} is not a readable .npz file: it is cut off, or none of those that numpy.savez writes")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} is not a readable .npz file: {one_line(error)}") from error


def load_npy(path: Path) -> Array:
    """A .npy file mapped into memory. Raises UserError.

    Copy-on-write, so that torch gets a writable array and the file stays.
    """
    try:
        return np.lib.format.open_memmap(path, mode="c")
    except FileNotFoundError as error:
        raise UserError(f"no such file: {path}") from error
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} is not a readable .npy file: {one_line(error)}") from error
