"""Similarities of positives and negatives as two hills over one axis, checkpoint by checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from moco.report.charts import LEFT, RIGHT, WIDTH

Array = np.ndarray[Any, Any]
BINS = 80
HEIGHT, BOTTOM, TOP = 104.0, 80.0, 8.0


@dataclass(frozen=True)
class Similarities:
    """How similar queries are to their positives and to negatives.

    label: when. positive, negative: cosines, (N,) and (M,). above: share of the negatives above the positive of their
    query. note: what the negatives are, where they are not the keys of the queue.
    """

    label: str
    positive: Array
    negative: Array
    above: float
    note: str = ""

    @property
    def svg(self) -> Markup:
        """The picture: negatives and positives from −1 to 1; a height is the square root of the share."""
        parts = [f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>']
        heights = [density(values) for values in (self.negative, self.positive)]
        # The square root keeps the flatter hill visible beside a narrow one.
        top = max(float(np.sqrt(height).max()) for height in heights) or 1.0
        for tone, height in zip((1, 0), heights, strict=True):
            tops = BOTTOM - np.sqrt(height) / top * (BOTTOM - TOP)
            steps = (f"V{y:.1f}H{across(-1 + 2 * (number + 1) / BINS):.1f}" for number, y in enumerate(tops))
            outline = f"M{across(-1):.1f} {BOTTOM}{''.join(steps)}V{BOTTOM}Z"
            parts.append(f'<path class="hill s{tone}" d="{outline}"/>')
        for tone, values in ((1, self.negative), (0, self.positive)):
            x = across(float(np.median(values)))
            parts.append(f'<path class="median s{tone}" d="M{x:.1f} {TOP}V{BOTTOM}"/>')
        parts += [
            f'<text class="tick middle" x="{across(value):.1f}" y="{BOTTOM + 17}">{value:g}</text>'
            for value in (-1, -0.5, 0, 0.5, 1)
        ]
        opened = (
            f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(self.summary)}">'
        )
        return Markup(opened + "".join(parts) + "</svg>")

    @property
    def summary(self) -> str:
        """The picture in a sentence."""
        return (
            f"{self.label}: positives have a median similarity of {np.median(self.positive):.2f}, negatives of "
            f"{np.median(self.negative):.2f}; {self.above:.2%} of the negatives are nearer than the positive"
        )


def across(value: float) -> float:
    """Where a cosine stands in the picture."""
    return LEFT + (min(max(value, -1.0), 1.0) + 1) / 2 * (RIGHT - LEFT)


def density(values: Array) -> Array:
    """The share of the values in each bin from −1 to 1, (BINS,)."""
    counts, _ = np.histogram(np.clip(values, -1, 1), BINS, (-1.0, 1.0))
    shares: Array = counts / max(len(values), 1)
    return shares
