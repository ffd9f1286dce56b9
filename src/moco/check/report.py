"""What was found out about a data set, as counts and lists of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moco.check.advice import Suggestion, suggestions
from moco.check.duplicates import exact_groups, near_groups
from moco.check.examine import KEY_BYTES, THUMBNAIL, Findings
from moco.data.sources import Source

Array = np.ndarray[Any, Any]

COMMON_SIZES = 5


@dataclass
class Report:
    """A data set as `moco check` sees it. Sizes are (width, height) in pixels, upright.

    Attributes:
        data: what was asked for. images: pictures in it.
        unreadable: (name, reason).
        misnamed: (name, format) of files that are not what their names say; they can be read all the same.
        formats, modes, bits, channels: how many pictures have each.
        smallest, median, largest: sizes by area; None where nothing can be read.
        common_sizes: the most frequent sizes with their counts; sizes: how many different ones there are.
        labels: pictures of each label, the largest first; unlabelled: those without.
        exact, near: groups of names of equal pictures, and of nearly equal ones (of equal ones, the first takes part).
        suggestions: settings for `moco pretrain`. unusable: readable pictures with other channels than these suggest.
        command: the command with these settings, to copy; empty where there is none for this data.
        notices: what the source has to say.
        seconds: how long it took.
        good: numbers of the readable pictures without the repetitions of equal ones.
    """

    data: str
    images: int
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    misnamed: list[tuple[str, str]] = field(default_factory=list)
    formats: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    bits: dict[str, int] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    smallest: tuple[int, int] | None = None
    median: tuple[int, int] | None = None
    largest: tuple[int, int] | None = None
    common_sizes: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    sizes: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    unlabelled: int = 0
    exact: list[list[str]] = field(default_factory=list)
    near: list[list[str]] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)
    unusable: int = 0
    command: str = ""
    notices: list[str] = field(default_factory=list)
    seconds: float = 0.0
    good: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def readable(self) -> int:
        """How many pictures can be read."""
        return self.images - len(self.unreadable)

    @property
    def copies(self) -> int:
        """How many pictures repeat another one exactly."""
        return sum(len(group) - 1 for group in self.exact)

    @property
    def near_copies(self) -> int:
        """How many pictures nearly repeat another one."""
        return sum(len(group) - 1 for group in self.near)

    def as_dict(self) -> dict[str, Any]:
        """All of it but `good`, for JSON."""
        return {
            "data": self.data,
            "images": self.images,
            "readable": self.readable,
            "unreadable": [{"name": name, "reason": reason} for name, reason in self.unreadable],
            "misnamed": [{"name": name, "format": kind} for name, kind in self.misnamed],
            "formats": self.formats,
            "modes": self.modes,
            "bits": self.bits,
            "channels": self.channels,
            "sizes": {
                "smallest": self.smallest,
                "median": self.median,
                "largest": self.largest,
                "different": self.sizes,
                "common": [{"size": size, "images": count} for size, count in self.common_sizes],
            },
            "labels": self.labels,
            "unlabelled": self.unlabelled,
            "exact_duplicates": self.exact,
            "near_duplicates": self.near,
            "suggestions": {
                found.setting: {"value": found.value, "reason": found.reason} for found in self.suggestions
            },
            "unusable": self.unusable,
            "command": self.command,
            "notices": self.notices,
            "seconds": round(self.seconds, 2),
        }


def report(data: str, source: Source, parts: Iterable[Findings]) -> Report:
    """Put the findings on all parts of a source together."""
    found = sorted((part for part in parts if len(part.ids)), key=lambda part: int(part.ids[0]))
    return _filled(Report(data, len(source), notices=list(source.notices)), source, found)


def add_failures(made: Report, parts: Iterable[Findings]) -> None:
    """Put the pictures that cannot be read into a report, in the order of the source."""
    parts = list(parts)
    bad = sorted((item for part in parts for item in part.bad), key=lambda item: item[0])
    made.unreadable = [(name, reason) for _, name, reason in bad]
    made.misnamed = sorted(item for part in parts for item in part.misnamed)


def _filled(made: Report, source: Source, found: list[Findings]) -> Report:
    kinds = [kind for part in found for kind in part.kinds]
    made.formats = _counts(kind.format for kind in kinds)
    made.modes = _counts(kind.mode if kind.pages == 1 else f"{kind.mode} × {kind.pages} pages" for kind in kinds)
    made.bits = _counts(str(kind.bits) for kind in kinds)
    channels = _joined([part.channels for part in found], np.zeros(0, np.int64))
    made.channels = _counts(map(str, channels.tolist()))
    _add_sizes(made, np.array([(kind.width, kind.height) for kind in kinds], np.int64).reshape(-1, 2))
    _add_labels(made, source)
    ids = _joined([part.ids for part in found], np.zeros(0, np.int64))
    _add_duplicates(made, source, ids, found)
    colourless = _joined([part.colourless for part in found], np.zeros(0, bool))
    pages = Counter(kind.pages for kind in kinds if kind.mode == "L").most_common(1)
    made.suggestions = suggestions(
        sides=np.array([min(kind.height, kind.width) for kind in kinds]),
        channels=channels,
        colourless=float(colourless.mean()) if len(ids) else 0.0,
        pages=pages[0][0] if pages and 2 * pages[0][1] > len(ids) else 1,
        images=len(made.good),
    )
    wanted = next((item.value for item in made.suggestions if item.setting == "channels"), 3)
    held = np.array([kind.pages for kind in kinds])
    usable = channels <= 4 if wanted in (1, 3) else (channels == wanted) | (held == wanted)
    made.unusable = len(ids) - int(usable.sum())
    return made


def _joined(arrays: list[Array], empty: Array) -> Array:
    return np.concatenate([empty, *arrays])


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _add_sizes(made: Report, sizes: Array) -> None:
    if len(sizes) == 0:
        return

    def size(row: Array) -> tuple[int, int]:
        return int(row[0]), int(row[1])

    order = np.argsort(sizes.prod(axis=1), kind="stable")
    made.smallest, made.median, made.largest = (size(sizes[order[at]]) for at in (0, len(order) // 2, -1))
    different, counts = np.unique(sizes, axis=0, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:COMMON_SIZES]
    made.sizes, made.common_sizes = len(different), [(size(different[at]), int(counts[at])) for at in most]


def _add_labels(made: Report, source: Source) -> None:
    if source.labels is None:
        return
    values, counts = np.unique(source.labels[source.labels >= 0], return_counts=True)
    name: Callable[[int], str] = str
    if (classes := source.classes) is not None:
        name = classes.__getitem__
    order = np.argsort(-counts, kind="stable")
    made.labels = {name(int(values[at])): int(counts[at]) for at in order}
    made.unlabelled = int((source.labels < 0).sum())


def _add_duplicates(made: Report, source: Source, ids: Array, found: list[Findings]) -> None:
    keys = _joined([part.keys for part in found], np.zeros((0, KEY_BYTES), np.uint8))
    thumbnails = _joined([part.thumbnails for part in found], np.zeros((0, *THUMBNAIL), np.uint8))
    exact = exact_groups(keys)
    first = np.ones(len(ids), bool)
    for group in exact:
        first[group[1:]] = False
    kept = np.flatnonzero(first)
    made.good = ids[kept]
    made.exact = [_names(source, ids[group]) for group in exact]
    made.near = [_names(source, ids[kept[group]]) for group in near_groups(thumbnails[kept])]


def _names(source: Source, numbers: Array) -> list[str]:
    return [name_of(source, int(number)) for number in numbers]


def name_of(source: Source, number: int) -> str:
    """The name of a readable picture."""
    names = getattr(source, "names", None)
    return str(names[number]) if names is not None and len(names) == len(source) else source[number].name
