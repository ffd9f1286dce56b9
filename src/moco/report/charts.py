"""Line charts as small SVG pictures: their colours are classes of the page, so that they follow light and dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

MOST_POINTS = 240
"""Points of a line that are drawn; where there are more, each shows the mean of its neighbours and their range."""
DOTTED = 40
"""Up to so many points each is marked."""
LEAST_SHARE = 0.1
"""Range of an axis of shares, at least."""
WIDTH, HEIGHT = 440.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 432.0, 12.0, 204.0


@dataclass(frozen=True)
class Line:
    """Points of one curve.

    label: its name in the legend. x, y: as many numbers each. low, high: a band around it, or none. tone: number of
    its colour. dashed: a bound rather than a measurement.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    tone: int = 0
    dashed: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """Some curves over the epochs.

    name: of the element in the page. title, explanation: what is shown and how to read it. share: values are shares
    of one, shown in percent. zero: the axis begins at zero. least, most: beyond them no value can be.
    """

    name: str
    title: str
    explanation: str
    lines: tuple[Line, ...]
    share: bool = False
    zero: bool = False
    least: float | None = None
    most: float | None = None

    @property
    def svg(self) -> Markup:
        """The picture."""
        return _svg(self)

    @property
    def summary(self) -> str:
        """The picture in a sentence, for those who do not see it."""
        parts = [f"{line.label} from {self.shown(line.y[0])} to {self.shown(line.y[-1])}" for line in self.lines]
        first, last = min(line.x[0] for line in self.lines), max(line.x[-1] for line in self.lines)
        return f"{self.title}, epoch {first:.3g} to {last:.3g}: {'; '.join(parts)}."

    @property
    def points(self) -> dict[str, Any]:
        """What the page's script needs to read values off the curves."""
        low, high = _range(line.x for line in self.lines)
        lines = [
            {
                "label": line.label,
                "tone": line.tone,
                "x": _rounded(line.x),
                "y": [self.shown(value) for value in line.y],
            }
            for line in self.lines
        ]
        return {"lines": lines, "from": low, "to": high, "left": LEFT, "right": RIGHT}

    def rows(self, most: int = 10) -> list[list[str]]:
        """Some of the points as a table: epoch, then the value of each line there (or the nearest before)."""
        longest = max(self.lines, key=lambda line: len(line.x))
        count = len(longest.x)
        chosen = sorted({round(place * (count - 1) / max(most - 1, 1)) for place in range(min(most, count))})
        return [[f"{longest.x[i]:.3g}", *(self._at(line, longest.x[i]) for line in self.lines)] for i in chosen]

    def _at(self, line: Line, x: float) -> str:
        before = [value for place, value in zip(line.x, line.y, strict=True) if place <= x]
        return self.shown(before[-1]) if before else "–"

    def shown(self, value: float) -> str:
        """A value as text."""
        return f"{value * 100:.1f}\N{NO-BREAK SPACE}%" if self.share else f"{value:.4g}"


def line_of(
    records: Iterable[Mapping[str, Any]], name: str, label: str, *, tone: int = 0, dashed: bool = False
) -> Line | None:
    """The curve of one figure in the lines of metrics.jsonl, or None where no line has it as a finite number."""
    points = [
        (float(record["epoch"]), float(record[name]))
        for record in records
        if is_number(record.get(name)) and is_number(record.get("epoch"))
    ]
    if not points:
        return None
    x, y = zip(*points, strict=True)
    return thinned(Line(label, x, y, tone, dashed))


def is_number(value: Any) -> bool:
    """Whether a value can be drawn: a finite number, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def thinned(line: Line, most: int = MOST_POINTS) -> Line:
    """A line of at most `most` points: means of neighbours, with the range of their values as its band."""
    count = len(line.x)
    if count <= most:
        return line
    edges = [round(number * count / most) for number in range(most + 1)]
    x, y, low, high = [], [], [], []
    for start, end in itertools.pairwise(edges):
        x.append(sum(line.x[start:end]) / (end - start))
        y.append(sum(line.y[start:end]) / (end - start))
        low.append(min(line.y[start:end]))
        high.append(max(line.y[start:end]))
    return Line(line.label, x, y, line.tone, line.dashed, low, high)


def between(line: Line, low: Sequence[float], high: Sequence[float]) -> Line:
    """The same line with another band."""
    return Line(line.label, line.x, line.y, line.tone, line.dashed, low, high)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two values, in steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span / about))
    step = next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= about)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _range(values: Iterable[Sequence[float]]) -> tuple[float, float]:
    flat = [value for several in values for value in several]
    low, high = min(flat), max(flat)
    room = 0.05 * abs(high) or 0.5
    return (low, high) if high > low else (low - room, high + room)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _levels(chart: Chart) -> tuple[float, float]:
    """The ends of the upright axis: some room around the curves, and nothing that the quantity cannot be."""
    values = [value for line in chart.lines for several in (line.y, line.low, line.high) for value in several]
    bottom, top = min(values), max(values)
    low, high = (bottom, top) if chart.share else _range([values])
    if chart.share and high - low < LEAST_SHARE:  # a flat curve should look flat
        low, high = (low + high - LEAST_SHARE) / 2, (low + high + LEAST_SHARE) / 2
    low = min(low, 0.0) if chart.zero else low - 0.05 * (high - low)
    high += 0.05 * (high - low)
    # A damaged file can hold anything: its curve stays on the picture.
    least, most = (value if bound is None else bound for bound, value in ((chart.least, low), (chart.most, high)))
    return max(low, min(least, bottom)), min(high, max(most, top))


def _svg(chart: Chart) -> Markup:
    x_low, x_high = _range(line.x for line in chart.lines)
    low, high = _levels(chart)

    def across(value: float) -> float:
        return LEFT + (value - x_low) / (x_high - x_low) * (RIGHT - LEFT)

    def down(value: float) -> float:
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    parts = []
    points = {point for line in chart.lines for point in zip(line.x, line.y, strict=True)}
    for level, text in _marks([y for _, y in points], low, high, chart.share, alone=len(points) == 1):
        y = down(level)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{text}</text>')
    epochs = {x for x, _ in points}
    parts += [
        f'<text class="tick middle" x="{across(place):.1f}" y="{BOTTOM + 17}">{text}</text>'
        for place, text in _marks(epochs, x_low, x_high, alone=len(epochs) == 1)
    ]
    parts.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    for line in chart.lines:
        if len(line.low):
            edge = [*zip(line.x, line.high, strict=True), *reversed(list(zip(line.x, line.low, strict=True)))]
            parts.append(f'<path class="band s{line.tone % 8}" d="{_path(edge, across, down)}Z"/>')
    for line in chart.lines:
        kind = f"curve s{line.tone % 8}" + (" dashed" if line.dashed or line.tone >= 8 else "")
        course = list(zip(line.x, line.y, strict=True))
        parts.append(f'<path class="{kind}" d="{_path(course, across, down)}"/>')
        if len(course) <= DOTTED and not line.dashed:
            parts += [
                f'<circle class="mark s{line.tone % 8}" cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.6"/>'
                for x, y in course
            ]
    parts.append(f'<path class="cursor" d="M0 {TOP}V{BOTTOM}" visibility="hidden"/>')
    label = escape(chart.summary)
    opened = f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{label}">'
    return Markup(opened + "".join(parts) + "</svg>")  # numbers, and one label that is escaped


def _marks(
    values: Iterable[float], low: float, high: float, share: bool = False, *, alone: bool
) -> list[tuple[float, str]]:
    """Ticks of an axis and their texts; where a value stands alone, only that: numbers around it would say nothing."""
    if alone:
        return [(value, f"{value * 100:.3g} %" if share else f"{value:.3g}") for value in values]
    places = ticks(low, high, 6)
    return [(place, _tick(place, places, share)) for place in places]


def _path(points: Iterable[tuple[float, float]], across: Any, down: Any) -> str:
    return "M" + "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in points)


def _tick(value: float, others: Sequence[float], share: bool = False) -> str:
    """A tick with as many decimals as its neighbours need."""
    scale = 100 if share else 1
    step = abs(others[1] - others[0]) * scale if len(others) > 1 else abs(value * scale) or 1
    if not 1e-4 <= step < 1e5:
        return f"{value * scale:.2g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value * scale:.{decimals}f}" + (" %" if share else "")
