"""The views of each picture of a batch, picture by picture on the CPU: read, decode once, crop, recolour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moco.data import per_image
from moco.data.colour import colour_steps
from moco.data.decode import REDUCTIONS, DecodeError, decode
from moco.data.drawing import ViewParameters, crop_boxes, parameters
from moco.data.header import Header, read_header
from moco.data.reading import Unreadable, read, readable
from moco.data.sources import ArraySource, Sample, Source
from moco.settings import ViewSettings

Array = np.ndarray[Any, Any]

AHEAD = 32
"""Files that are held at a time, so that the boxes of their crops can be drawn together."""

PIXELS = 2**19
"""Views are recoloured together up to this many pixels, so that small ones do not cost more calls than work."""


@dataclass
class Made:
    """Views of n pictures.

    Attributes:
        views: of each kind of view, uint8 (n, S, S, C).
        drawn: what was drawn for them.
        ids: (n,) int64: numbers of the pictures that were used.
        skipped: (name, reason) of pictures that could not be read.
    """

    views: list[Array]
    drawn: tuple[ViewParameters, ...]
    ids: Array
    skipped: list[tuple[str, str]]


def make_views(
    source: Source,
    ids: Array,
    table: Array,
    settings: Sequence[ViewSettings],
    *,
    sizes: Sequence[int],
    channels: int,
    finish: bool,
) -> Made:
    """Views of the pictures `ids`, from a table of uniform numbers (n, views, DRAWS).

    settings, sizes: how each of the views is made, and its side in pixels. finish: False leaves it at crop and resize;
    `drawn` says what is left. Raises UserError if nothing can be read.
    """
    making = _Making(source, ids, table, settings, sizes, channels, finish)
    together = max(1, PIXELS // max(sizes) ** 2)
    ahead = max(AHEAD, together) if isinstance(source, ArraySource) else AHEAD
    for start in range(0, len(ids), ahead):
        making.rows(range(start, min(start + ahead, len(ids))), together)
    return making.made


class _Making:
    """The work on one batch."""

    def __init__(
        self,
        source: Source,
        ids: Array,
        table: Array,
        settings: Sequence[ViewSettings],
        sizes: Sequence[int],
        channels: int,
        finish: bool,
    ) -> None:
        self.source, self.table, self.settings, self.sizes, self.channels = source, table, settings, sizes, channels
        # The boxes come later, when sizes are known: these are those of a single pixel.
        drawn = tuple(parameters(table[:, view], 1, 1, how) for view, how in enumerate(settings))
        self.steps = [colour_steps(view, channels) for view in drawn] if finish else []
        views = [np.empty((len(ids), size, size, channels), np.uint8) for size in sizes]
        self.made = Made(views, drawn, ids.copy(), [])

    def rows(self, rows: range, together: int) -> None:
        """Make the views of some rows of the batch; `together` of them are recoloured at a time."""
        samples = [self._read(row) for row in rows]
        headers = [None if sample is None else _header(sample) for sample in samples]
        sizes = np.array([(1, 1) if header is None else header[:2] for header in headers])
        self._draw_boxes(np.array(rows), sizes)
        for start in range(0, len(rows), together):
            some = rows[start : start + together]
            for row in some:
                self._crop(row, *self._pixels(row, samples[row - rows[0]], headers[row - rows[0]]))
            for view, steps in enumerate(self.steps):
                stack = self.made.views[view][some[0] : some[-1] + 1]
                per_image.recolour(stack, self.made.drawn[view], steps, some)

    def _read(self, row: int) -> Sample | None:
        try:
            return read(self.source, int(self.made.ids[row]))
        except Unreadable:
            return None

    def _draw_boxes(self, rows: Array, sizes: Array) -> None:
        """Draw the crops of `rows` in pictures of (height, width) `sizes`, (n, 2)."""
        for view, drawn in enumerate(self.made.drawn):
            boxes = crop_boxes(self.table[rows, view], sizes[:, 0], sizes[:, 1], self.settings[view])
            drawn.top[rows], drawn.left[rows], drawn.height[rows], drawn.width[rows] = boxes

    def _pixels(self, row: int, sample: Sample | None, header: Header | None) -> tuple[Array, int]:
        """Pixels for a row, of its own picture or of a stand-in, and by what they are reduced; its boxes are drawn."""
        reduction, pixels = 1, None
        if sample is not None:
            if header is not None and not isinstance(sample.image, np.ndarray):
                reduction = self._reduction(row, header)
            try:
                pixels = decode(sample.image, self.channels, reduction, header)
                if reduction > 1 and header is not None and pixels.shape[:2] != header.reduced(reduction):
                    pixels, reduction = decode(sample.image, self.channels, 1, header), 1
            except DecodeError:
                pixels = None
        if pixels is None:
            reduction, header = 1, None
            pixels, self.made.ids[row], missed = readable(self.source, int(self.made.ids[row]), self.channels)
            self.made.skipped.extend(missed)
        if reduction == 1 and (header is None or pixels.shape[:2] != header[:2]):
            self._draw_boxes(np.array([row]), np.array([pixels.shape[:2]]))
        return pixels, reduction

    def _reduction(self, row: int, header: Header) -> int:
        """The largest reduction that leaves all crops at least as large as their views; of CMYK there is none."""
        if header.components == 4:
            return 1
        most = min(
            min(drawn.height[row], drawn.width[row]) / size
            for drawn, size in zip(self.made.drawn, self.sizes, strict=True)
        )
        return next((number for number in REDUCTIONS if most >= number and header.divides(number)), 1)

    def _crop(self, row: int, pixels: Array, reduction: int) -> None:
        """Crop and resize all views of a row."""
        for view, drawn in enumerate(self.made.drawn):
            box = [int(lengths[row]) for lengths in (drawn.top, drawn.left, drawn.height, drawn.width)]
            top, left, height, width = box if reduction == 1 else [length / reduction for length in box]
            self.made.views[view][row] = per_image.crop_resize(pixels, top, left, height, width, self.sizes[view])


def _header(sample: Sample) -> Header | None:
    if isinstance(sample.image, np.ndarray):
        height, width = sample.image.shape[:2]
        return Header(height, width, turned=False)
    return read_header(sample.image)
