"""Pages and line plots as inline SVG: text in, text out, no library and no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

LEFT: Final = 46
RIGHT: Final = 14
TOP: Final = 12
BOTTOM: Final = 34
TARGET_TICKS: Final = 4
STYLE: Final = Path(__file__).with_name("report.css").read_text(encoding="ascii")
"""The style sheet of pages with plots, light or dark as their reader prefers."""
MAX_DOTS: Final = 200
"""Points beyond this many carry no dot and no tooltip: they would only make the file large."""

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line. ``style`` is a CSS class; ``label`` stands in the legend where a plot has several series."""

    label: str
    points: Sequence[Point]
    style: str
    dots: bool = False


def ticks(low: float, high: float, count: int = TARGET_TICKS) -> list[float]:
    """About ``count`` round values from at most ``low`` to at least ``high`` (1, 2 or 5 times a power of ten apart).

    Where there is no range to speak of, it is taken to be 1 wide."""
    if high - low < 1e-9 * max(1.0, abs(low)):
        high = low + 1.0
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def plain(value: float) -> str:
    """A number without needless digits: "0.25", "40", "1,500"."""
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def plot(
    series: Sequence[Series],
    *,
    size: tuple[int, int],
    title: str,
    x_label: str,
    x_format: Format = plain,
    y_format: Format = plain,
    whole_x: bool = False,
    bars: bool = False,
) -> str:
    """One plot as an ``<svg>`` element of ``size`` (width, height); the y axis begins at 0.

    ``title`` is read by screen readers. ``whole_x`` keeps ticks of the x axis to whole numbers; ``bars`` stacks the
    series as bars instead of lines.
    """
    width, height = size
    points = [point for one in series for point in one.points]
    if not points:
        return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}: no data"></svg>'
    xs = [x for x, _ in points]
    highest, x_low, x_high = max(y for _, y in points), min(xs), max(xs)
    if bars:
        highest = max(sum(y for px, y in points if px == x) for x in set(xs))
        x_low, x_high = x_low - 0.5, x_high + 0.5
    y_ticks = ticks(0.0, highest)
    x_high = x_high if x_high > x_low else x_low + 1.0
    x_ticks = [t for t in ticks(x_low, x_high, 6) if x_low <= t <= x_high and (not whole_x or t == int(t))]

    def place(x: float, y: float) -> Point:
        inner_width, inner_height = width - LEFT - RIGHT, height - TOP - BOTTOM
        across = (x - x_low) / (x_high - x_low)
        up = y / y_ticks[-1]
        return LEFT + across * inner_width, TOP + (1 - up) * inner_height

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    for tick in y_ticks:
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{y_format(tick)}</text>')
    for tick in x_ticks:
        x, _ = place(tick, 0)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - BOTTOM + 17}" text-anchor="middle">{x_format(tick)}</text>'
        )
    middle = LEFT + (width - LEFT - RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle}" y="{height - 2}" text-anchor="middle">{escape(x_label)}</text>')
    parts += _bars(series, place, x_format, y_format) if bars else _lines(series, place, x_format, y_format)
    parts.append("</svg>")
    return "".join(parts)


def _lines(series: Sequence[Series], place: Callable[[float, float], Point], xf: Format, yf: Format) -> list[str]:
    parts = []
    for one in series:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in one.points))
        parts.append(f'<polyline class="line {one.style}" points="{path}"/>')
        if one.dots and len(one.points) <= MAX_DOTS:
            for point in one.points:
                x, y = place(*point)
                tip = escape(f"{one.label}: {yf(point[1])} at {xf(point[0])}")
                parts.append(
                    f'<circle class="dot {one.style}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{tip}</title></circle>'
                )
    return parts


def _bars(series: Sequence[Series], place: Callable[[float, float], Point], xf: Format, yf: Format) -> list[str]:
    parts = []
    heights: dict[float, float] = {}
    for one in series:
        for x, y in one.points:
            base = heights.get(x, 0.0)
            heights[x] = base + y
            left, top = place(x - 0.38, base + y)
            right, bottom = place(x + 0.38, base)
            if bottom - top > 0:
                tip = escape(f"{one.label}: {yf(y)} at {xf(x)}")
                parts.append(
                    f'<rect class="bar {one.style}" x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0.5):.1f}" '
                    f'height="{bottom - top:.1f}"><title>{tip}</title></rect>'
                )
    return parts


def legend(series: Sequence[Series]) -> str:
    """The names of several series beside a mark of their colour."""
    items = "".join(f'<li><i class="{one.style}"></i>{escape(one.label)}</li>' for one in series)
    return f'<ul class="legend">{items}</ul>'


def page(title: str, body: str) -> str:
    """A whole HTML document that needs nothing else, with ``body`` in HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )
