"""Line charts as inline SVG, coloured by the page's own style sheet. Used by the report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 12, 34
_MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One line. style: a class of the style sheet (`main`, `faint`, `second`); dots mark each point."""

    name: str
    points: Sequence[Point]
    style: str = "main"
    dots: bool = False


def line_chart(series: Sequence[Series], *, label: str, x_label: str = "step") -> str:
    """An SVG of the lines over one pair of axes; a sentence when there is nothing to draw.

    A value that is not finite breaks its line. Long series are thinned to means of neighbouring points.
    """
    drawn = [_thinned(one) for one in series]
    finite = [point for one in drawn for point in one.points if _is_finite(point)]
    if not finite:
        return f'<p class="none">{escape(label)}: nothing was measured.</p>'
    x_low, x_high = _range([x for x, _ in finite], pad=0.0)
    y_low, y_high = _range([y for _, y in finite], pad=0.06)

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + (point[0] - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (y_high - point[1]) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    grid = []
    for value in ticks(y_low, y_high):
        _, y = place((x_low, value))
        grid.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        grid.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{number(value)}</text>')
    steps = [round(value) for value in ticks(x_low, x_high, at_most=8)]
    for value in dict.fromkeys(step for step in steps if x_low <= step <= x_high):
        x, _ = place((value, y_low))
        grid.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 14}" text-anchor="middle">{number(value)}</text>')
    grid.append(
        f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 1}" text-anchor="end">{escape(x_label)}</text>'
    )
    lines = "".join(_line(one, place) for one in drawn)
    hover = [
        {"name": one.name, "style": one.style, "points": [[*place(p), p[0], p[1]] for p in one.points if _is_finite(p)]}
        for one in drawn
        if one.style != "faint" or len(drawn) == 1
    ]
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label, quote=True)}" '
        f'data-lines="{escape(json.dumps(hover, separators=(",", ":")), quote=True)}">'
        f'{"".join(grid)}{lines}<line class="cross" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></svg>'
    )


def _line(series: Series, place: Callable[[Point], Point]) -> str:
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in series.points:
        if _is_finite(point):
            pieces[-1].append(place(point))
        elif pieces[-1]:
            pieces.append([])
    marks = []
    for piece in pieces:
        if len(piece) > 1:
            path = " ".join(f"{x},{y}" for x, y in piece)
            marks.append(f'<polyline class="line {series.style}" points="{path}"/>')
        if series.dots or len(piece) == 1:
            marks += [f'<circle class="dot {series.style}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in piece]
    return "".join(marks)


def smoothed(points: Sequence[Point], *, span: int) -> list[Point]:
    """An exponential mean over about `span` points, unbiased at the start; values that are not finite are left out."""
    keep, total, weight, result = 1 - 2 / (max(span, 1) + 1), 0.0, 0.0, []
    for x, y in points:
        if math.isfinite(y):
            total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
            result.append((x, total / weight))
    return result


def ticks(low: float, high: float, *, at_most: int = 6) -> list[float]:
    """Round values inside a range: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / max(at_most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [(first + index) * step for index in range(count)]


def number(value: float) -> str:
    """A short form for axes and tables: 12.5k, 0.0002, 3.4M."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            unit = limit if suffix != "k" else 1e3
            return f"{value / unit:.3g}{suffix}"
    if size < 1e-3:
        return f"{value:.3g}"
    return f"{value:.4g}"


def _thinned(series: Series) -> Series:
    points = list(series.points)
    if len(points) <= _MOST_POINTS:
        return series
    width = math.ceil(len(points) / _MOST_POINTS)
    groups = [points[start : start + width] for start in range(0, len(points), width)]
    thinned = []
    for group in groups:
        finite = [y for _, y in group if math.isfinite(y)]
        thinned.append((group[-1][0], sum(finite) / len(finite) if finite else math.nan))
    return Series(name=series.name, points=thinned, style=series.style, dots=series.dots)


def _range(values: Sequence[float], *, pad: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    spread = high - low
    if spread <= abs(high) * 1e-9:
        spread = abs(high) * 0.1 or 1.0
        return low - spread / 2, high + spread / 2
    return low - pad * spread, high + pad * spread


def _is_finite(point: Point) -> bool:
    # 1e300, not infinity: a range round values near the largest float overflows.
    return all(abs(value) < 1e300 for value in point)
