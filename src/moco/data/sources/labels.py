"""Labels: checked, collected from texts, taken from folder names, merged."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from moco.data.sources.base import Array, Pictures, shape_text
from moco.errors import UserError, counted

LABEL_NAMES = ("label", "labels", "class", "target", "targets", "y", "fine_label", "fine_labels", "category")
"""What a column of labels is called, the likeliest first."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def check_labels(labels: Array, count: int, what: str) -> Array:
    """Labels as (count,) int64. Raises UserError for another length or for anything but integers."""
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iub":
        kind = f"{labels.dtype} of shape {shape_text(labels)}"
        raise UserError(f"{what}: labels must be one integer per image, not {kind}")
    if len(labels) != count:
        raise UserError(
            f"{what}: {counted(len(labels), 'label')} for {counted(count, 'image')}; there must be one label per image"
        )
    return labels.astype(np.int64)


class LabelTexts:
    """Label texts as they come: each distinct one is kept once, and every picture takes four bytes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._codes = array("i")

    def add(self, text: str | None) -> None:
        """The label of the next picture; None or an empty text where it has none."""
        self._codes.append(self._numbers.setdefault(text, len(self._numbers)) if text else -1)

    @property
    def texts(self) -> list[str]:
        """The distinct texts, in the order in which they came."""
        return list(self._numbers)

    @property
    def codes(self) -> Array:
        """(N,) int32 numbers into `texts`, −1 for none."""
        return np.frombuffer(self._codes, np.int32) if len(self._codes) else np.zeros(0, np.int32)


def number_texts(codes: Array, texts: Sequence[str]) -> tuple[Array | None, list[str] | None]:
    """Labels and class names of pictures whose label texts are `texts[codes]`.

    Integers stay what they are and have no names; other texts are numbered in sorted order. −1 stays −1.
    """
    if not texts:
        return None, None
    if all(_INTEGER.fullmatch(text) for text in texts):
        return np.array([*map(int, texts), -1], np.int64)[codes], None
    return number_names(codes, texts)


def number_names(codes: Array, names: Sequence[str]) -> tuple[Array, list[str]]:
    """Labels and sorted class names of pictures whose classes are `names[codes]`, −1 for none."""
    classes = sorted(set(names))
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([*(numbers[name] for name in names), -1], np.int64)[codes], classes


def by_first_folder(names: Iterable[str]) -> tuple[Array, list[str]] | str:
    """Labels by the first level of relative paths with forward slashes; or why that cannot be."""
    found = LabelTexts()
    for name in names:
        first, slash, _ = name.partition("/")
        if not slash:
            return f"{name} lies directly in the top folder"
        if not first:
            return f"{name} is an absolute path"
        found.add(first)
    if len(found.texts) < 2:
        return f"all images lie in one folder, {''.join(found.texts)}"
    return number_names(found.codes, found.texts)


def merged(parts: Sequence[Pictures]) -> tuple[Array | None, list[str] | None]:
    """Labels of several sources one after the other, their classes merged by name; none if one has no classes."""
    names: list[str] = []
    codes = []
    for part in parts:
        if part.labels is None or part.classes is None:
            return None, None
        codes.append(np.where(part.labels < 0, -1, part.labels + len(names)))
        names += part.classes
    return number_names(np.concatenate(codes), names)
