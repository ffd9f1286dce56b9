"""Data sets of Hugging Face: from their hub, saved in a folder, or in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from moco.data.sources.base import Pictures, one_line
from moco.data.sources.labels import LABEL_NAMES
from moco.data.sources.tables import IMAGE_NAMES, image_bytes, label_column, needs
from moco.errors import UserError


class HuggingFaceSource(Pictures):
    """The pictures of a `datasets.Dataset`, as the bytes of their files; nothing is decoded here.

    Args:
        dataset: with a column of type Image, or of bytes. Labels are in a column of type ClassLabel, or in one of
            integers or strings called label or the like.
        name: what messages call it.
        files: folders where pictures may lie that the data set names by path only; None for anywhere. A path that
            comes with downloaded data may not point to other files of the user.

    Raises UserError for a data set without pictures.
    """

    def __init__(self, dataset: Any, name: str, files: list[Path] | None = None) -> None:
        super().__init__()
        if not hasattr(dataset, "features") or not hasattr(dataset, "__len__") or dataset.features is None:
            raise UserError(f"{name} is read in order only (streaming): load it without streaming")
        if len(dataset) == 0:
            raise UserError(f"no images in {name}: it has no rows")
        features = dataset.features
        self._name, self._column = name, _image_column(features, name)
        self._folders = None if files is None else [os.path.realpath(folder) for folder in files]
        self._rows = _bytes_only(dataset.with_format(None).select_columns([self._column]), self._column)
        label = _label_column(features)
        if label is not None:
            table = dataset.with_format("arrow").select_columns([label])[:]
            self.labels, self.classes = label_column([table.column(label)], getattr(features[label], "names", None))

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> tuple[bytes, str]:
        """Bytes and name of a picture."""
        value, name = self._rows[index][self._column], f"{self._name}[{index}]"
        data = image_bytes(value)
        if data or not isinstance(value, dict) or not value.get("path"):
            return data, name
        path = os.path.realpath(value["path"])
        if self._folders is not None and not any(path.startswith(folder + os.sep) for folder in self._folders):
            raise OSError(errno.EACCES, "the data set names a file outside of its own folders", name)
        with open(path, "rb") as file:
            return file.read(), name


def is_dataset(data: Any) -> bool:
    """Whether this is an object of `datasets`, which need not be installed for the question."""
    own = ("datasets.arrow_dataset", "datasets.iterable_dataset", "datasets.dataset_dict")
    return any(kind.__module__ in own for kind in type(data).__mro__)


def source_of_dataset(dataset: Any, name: str = "data set", files: list[Path] | None = None) -> HuggingFaceSource:
    """The pictures of a data set; of several splits, those of the split `train`, or of the only one."""
    if isinstance(dataset, dict):
        if "train" not in dataset and len(dataset) != 1:
            raise UserError(f"{name} has the splits {', '.join(map(str, dataset))}: name one of them")
        split = "train" if "train" in dataset else next(iter(dataset))
        dataset, others = dataset[split], [str(other) for other in dataset if other != split]
        source = HuggingFaceSource(dataset, name, files)
        if others:
            source.notices.append(f"{name}: the split {split} is used; there are also {', '.join(others)}")
        return source
    return HuggingFaceSource(dataset, name, files)


def open_hub(text: str) -> HuggingFaceSource:
    """The pictures of NAME or NAME:SPLIT on the hub, or in a folder that `datasets` can load.

    Raises UserError for whatever `datasets` cannot load.
    """
    name, _, split = text.partition(":")
    if not name:
        raise UserError("hf: must be followed by the name of a data set, such as hf:cifar10 or hf:cifar10:test")
    datasets = _datasets(f"hf:{text}")
    try:
        dataset = datasets.load_dataset(name, split=split or None)
    except Exception as error:  # of the hub, the network, the builder …
        raise UserError(f"cannot load hf:{text}: {one_line(error)}") from error
    config = datasets.config
    own = [Path(config.HF_CACHE_HOME), Path(config.HF_DATASETS_CACHE)]
    return source_of_dataset(dataset, f"hf:{text}", own + ([Path(name)] if os.path.isdir(name) else []))


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def open_saved(folder: Path) -> HuggingFaceSource:
    """The pictures of a data set in a folder written by `save_to_disk`. Raises UserError."""
    datasets = _datasets(str(folder))
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # of Arrow, the file system …
        raise UserError(f"cannot load the data set in {folder}: {one_line(error)}") from error
    return source_of_dataset(dataset, str(folder), [folder])


def _datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise needs("datasets", what) from error
    return datasets


def _image_column(features: Any, name: str) -> str:
    kinds = {column: _kind(feature) for column, feature in features.items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    found = images or [column for column, kind in kinds.items() if kind in ("binary", "large_binary")]
    if len(found) == 1 or images:
        return next((column for column in IMAGE_NAMES if column in found), found[0])
    held = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())[:500]
    raise UserError(f"{name} has {'several columns' if found else 'no column'} of images or bytes; it holds {held}")


def _label_column(features: Any) -> str | None:
    kinds = {column: _kind(feature) for column, feature in features.items()}
    named = [column for column in LABEL_NAMES if column in kinds]
    classes = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    return next((column for column in named if column in classes), None) or next(iter(named or classes), None)


def _kind(feature: Any) -> str:
    """The name of a feature's type: Image, ClassLabel, binary, int64 …"""
    return str(getattr(feature, "dtype", "")) if type(feature).__name__ == "Value" else type(feature).__name__


def _bytes_only(rows: Any, column: str) -> Any:
    """The rows with the images as they are stored."""
    feature = rows.features[column]
    return rows.cast_column(column, type(feature)(decode=False)) if _kind(feature) == "Image" else rows
