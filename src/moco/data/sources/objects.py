"""Pictures that Python objects give: sequences, and torch data sets with random access."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from moco.data.decode import pillow_pixels
from moco.data.sources.base import Array, Pictures, Sample, one_line
from moco.data.sources.labels import check_labels
from moco.errors import UserError

WANTED = "PIL images, uint8 arrays, tensors, paths or bytes, or tuples that start with one"


class ObjectSource(Pictures):
    """The items of a Python sequence or of a torch data set (map-style).

    An item is a PIL image; a uint8 array, height × width or height × width × channels; a tensor, also with the
    channels first and of floats in 0…1; a path; the bytes of an image file; or a tuple that starts with one of these.
    Labels are in `targets` or `labels` of the object, or of those that it was made of (Subset, ConcatDataset); for a
    list or a tuple, they are what stands second in its items.

    Raises UserError for an object without random access, without items, or whose first item is something else.
    """

    def __init__(self, data: Any) -> None:
        super().__init__()
        self._data, self._name = data, type(data).__name__
        if isinstance(data, torch.utils.data.DataLoader):
            raise UserError("this is a DataLoader: pass the data set in it; moco makes the batches itself")
        if isinstance(data, Mapping | set | frozenset) or not (
            hasattr(data, "__getitem__") and hasattr(data, "__len__")
        ):
            kind = "an IterableDataset" if isinstance(data, torch.utils.data.IterableDataset) else f"a {self._name}"
            raise UserError(
                f"{kind} has no random access to images: pass a sequence or a map-style data set of {WANTED}"
            )
        if len(data) == 0:
            raise UserError(f"the {self._name} is empty: there are no images in it")
        self._look_at_first()
        labels = _labels_of(data)
        if labels is not None:
            self.labels = check_labels(labels, len(data), self._name)
            self.classes = _classes_of(data, self.labels)
        if "Random" in (transform := repr(getattr(data, "transform", None))):
            self.notices.append(
                f"{self._name} makes random changes of its own ({' '.join(transform.split())[:80]}), which no seed "
                "here decides: take them out, since moco makes the random views itself"
            )

    def _look_at_first(self) -> None:
        try:
            image = _content(first := self._data[0])
        except OSError:
            return  # one unreadable file says nothing about the others
        except _Unusable as error:
            raise UserError(f"the {self._name} must give {WANTED}; item 0 is {error}") from error
        except Exception as error:  # code of the user
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"item 0 of the {self._name} cannot be read: {reason}") from error
        first = first[0] if isinstance(first, tuple | list) else first
        if isinstance(first, np.ndarray | torch.Tensor) and isinstance(image, np.ndarray):
            self.channels = image.shape[2]

    def __len__(self) -> int:
        return len(self._data)

    def read(self, index: int) -> tuple[bytes | Array, str]:
        """Content and name of a picture. Whatever the object raises but OSError is its own affair."""
        item, name = self._data[index], f"{self._name}[{index}]"
        try:
            return _content(item), name
        except _Unusable as error:
            raise OSError(errno.EINVAL, f"it is {error}", name) from error


class _Unusable(Exception):
    """The message says what the item is instead of an image."""


def _content(item: Any) -> bytes | Array:
    """File bytes or pixels (height × width × channels) of an item. Raises _Unusable, or OSError for a file."""
    if isinstance(item, tuple | list):
        if len(item) == 0:
            raise _Unusable(f"an empty {type(item).__name__}")
        item = item[0]
    if isinstance(item, Sample):
        return item.image
    if isinstance(item, Image.Image):
        return _pillow_pixels(item)
    if isinstance(item, torch.Tensor):
        return _tensor_pixels(item)
    if isinstance(item, np.ndarray):
        return _array_pixels(item)
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    if isinstance(item, str | os.PathLike):
        path = Path(item)
        if "\0" in str(path):
            raise _Unusable("a text that cannot be a path")
        return path.expanduser().read_bytes()
    raise _Unusable(f"of type {type(item).__name__}")


def _pillow_pixels(picture: Image.Image) -> Array:
    try:
        pixels = pillow_pixels(picture)
    except Exception as error:  # the file behind it is read only now, and Pillow raises whatever its parsers meet
        raise OSError(errno.EIO, one_line(error), getattr(picture, "filename", None) or "PIL image") from error
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _array_pixels(pixels: Array) -> Array:
    if pixels.dtype != np.uint8:
        raise _Unusable(f"an array of {pixels.dtype}, not of uint8")
    if pixels.ndim == 2:
        return pixels[:, :, None]
    if pixels.ndim != 3 or (pixels.shape[0] <= 4 < pixels.shape[2]):
        raise _Unusable(f"an array of shape {pixels.shape}, not (height, width) or (height, width, channels)")
    return pixels


def _tensor_pixels(tensor: torch.Tensor) -> Array:
    """Pixels of a tensor: channels first, unless only the last dimension can be channels."""
    if tensor.ndim not in (2, 3):
        raise _Unusable(f"a tensor of shape {tuple(tensor.shape)}, not of two or three dimensions")
    pixels = tensor.detach().cpu()
    if pixels.is_floating_point():
        low, high = (float(value) for value in pixels.aminmax()) if pixels.numel() else (0.0, 0.0)
        if not 0 <= low <= high <= 1:
            reason = "take Normalize out of the transforms"
            raise _Unusable(f"a tensor of floats from {low:.3g} to {high:.3g}, not in 0…1 ({reason})")
        pixels = (pixels.float() * 255).round().to(torch.uint8)
    elif pixels.dtype != torch.uint8:
        raise _Unusable(f"a tensor of {pixels.dtype}, not of uint8 or floats")
    if pixels.ndim == 2:
        return pixels[:, :, None].numpy()
    if pixels.shape[0] > 4 and pixels.shape[2] <= 4:
        return pixels.numpy()
    return pixels.permute(1, 2, 0).contiguous().numpy()


def _labels_of(data: Any) -> Array | None:
    """Labels without loading any picture; None where there is no such way."""
    if isinstance(data, torch.utils.data.Subset):
        inner = _labels_of(data.dataset)
        return None if inner is None else inner[np.asarray(data.indices, dtype=np.int64)]
    if isinstance(data, torch.utils.data.ConcatDataset):
        parts = [found for part in data.datasets if (found := _labels_of(part)) is not None]
        return np.concatenate(parts) if len(parts) == len(data.datasets) else None
    if isinstance(data, list | tuple):
        if not all(isinstance(item, tuple | list) and len(item) == 2 for item in data):
            return None
        return _integers([item[1] for item in data], len(data))
    for name in ("targets", "labels"):
        found = _integers(getattr(data, name, None), len(data))
        if found is not None:
            return found
    return None


def _integers(values: Any, count: int) -> Array | None:
    """The values as `count` integers, if that is what they are."""
    if values is None or isinstance(values, str | bytes) or not hasattr(values, "__len__") or len(values) != count:
        return None
    try:
        found = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (ValueError, TypeError, RuntimeError):
        return None
    found = found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found
    return found.astype(np.int64) if found.ndim == 1 and found.dtype.kind in "iu" else None


def _classes_of(data: Any, labels: Array) -> list[str] | None:
    """Names for all labels, if the object or the one that it is a part of has them."""
    while isinstance(data, torch.utils.data.Subset):
        data = data.dataset
    names = getattr(data, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in islice(names, 100_000)):
        return None
    return list(names) if len(labels) and labels.max() < len(names) else None
