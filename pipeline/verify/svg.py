"""Small charts as inline SVG: no library, no script, and colours from the page's style sheet, light or dark.

Classes: `ink` text, `soft` secondary text, `axis` and `grid` lines, and the fills `a`, `b` (two series), `good`, `bad`,
`dim`; a `ring` is not filled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 860
_CHARACTER = 7.7  # a digit at 12 px in DejaVu Sans, a wide font, so that labels are given enough room
_ROW = 22


@dataclass(frozen=True)
class Interval:
    """A bar from zero to `value` with the interval `low` … `high`."""

    label: str
    value: float
    low: float
    high: float
    style: str
    text: str
    """written at the right margin"""


def grouped_bars(groups: Sequence[str], series: dict[str, Sequence[float]], *, digits: int = 3) -> str:
    """Horizontal bars from zero, one per group and series; at most two series, in the styles `a` and `b`."""
    left = _room([*groups])
    most = max((v for values in series.values() for v in values), default=0) or 1
    scale = (WIDTH - left - 80) / most
    parts, y, legend = [], 24, left
    for n, name in enumerate(series):
        parts += [f'<rect class="{"ab"[n]}" x="{legend}" y="4" width="12" height="12"/>', _text(legend + 18, 14, name)]
        legend += _room([name]) + 26
    for g, group in enumerate(groups):
        parts.append(_text(left - 8, y + 8 * len(series) + 4, group, anchor="end"))
        for n, values in enumerate(series.values()):
            width = values[g] * scale
            parts.append(f'<rect class="{"ab"[n]}" x="{left}" y="{y + 16 * n}" width="{width:.1f}" height="14"/>')
            parts.append(_text(left + width + 6, y + 16 * n + 11, f"{values[g]:.{digits}f}", style="soft"))
        y += 16 * len(series) + 10
    return _svg(y, parts)


def intervals(rows: Sequence[Interval], *, title: str) -> str:
    """Bars to either side of zero, each with its interval as a whisker."""
    left, right = _room([r.label for r in rows]), _room([r.text for r in rows])
    low, high = min([0.0, *(r.low for r in rows)]), max([0.0, *(r.high for r in rows)])
    if low == high:
        low, high = -1.0, 1.0
    pad = 0.03 * (high - low)
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - left - right)

    bottom = 30 + _ROW * len(rows)
    parts = [_text(left, 12, title, style="soft")]
    for tick in _ticks(low, high):
        style, at = "axis" if tick == 0 else "grid", f"{x(tick):.1f}"
        parts.append(f'<line class="{style}" x1="{at}" x2="{at}" y1="20" y2="{bottom}"/>')
        parts.append(_text(x(tick), bottom + 14, f"{tick:g}", style="soft", anchor="middle"))
    for n, row in enumerate(rows):
        y = 24 + _ROW * n
        start, end = sorted((x(0), x(row.value)))
        parts += [
            _text(left - 8, y + 13, row.label, anchor="end"),
            f'<rect class="{row.style}" x="{start:.1f}" y="{y + 2}" width="{end - start:.1f}" height="14"/>',
            f'<line class="whisker" x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{y + 9}" y2="{y + 9}"/>',
            *(f'<line class="whisker" x1="{x(v):.1f}" x2="{x(v):.1f}" y1="{y + 5}" y2="{y + 13}"/>' for v in (row.low, row.high)),
            _text(WIDTH, y + 13, row.text, style="soft", anchor="end"),
        ]
    return _svg(bottom + 22, parts)


def log_dots(labels: Sequence[str], series: dict[str, Sequence[float]], marked: dict[int, str], *, title: str) -> str:
    """Dots over a logarithmic axis, one per label from left to right.

    Args:
        series: name → values; discs, and rings for a second one.
        marked: index → style of values that are drawn larger and written out.
    """
    positive = [v for values in series.values() for v in values if v > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = max(low + 1, math.ceil(math.log10(max(positive))))
    top, height, left = 44, 170, 60
    step = (WIDTH - left - 40) / max(len(labels) - 1, 1)

    def y(value: float) -> float:
        return top + (high - math.log10(max(value, 10.0**low))) / (high - low) * height

    parts, legend = [_text(left, 12, title, style="soft")], left
    for n, name in enumerate(series):
        parts.append(f'<circle class="{"ring " * n}dim" cx="{legend + 6}" cy="27" r="4"/>')
        parts.append(_text(legend + 16, 31, name, style="soft"))
        legend += _room([name]) + 20
    for exponent in range(low, high + 1, max(1, math.ceil((high - low) / 6))):
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH}" y1="{y(10.0**exponent):.1f}" y2="{y(10.0**exponent):.1f}"/>')
        parts.append(_text(left - 8, y(10.0**exponent) + 4, f"1e{exponent}", style="soft", anchor="end"))
    every = max(1, math.ceil((max(map(len, labels)) * _CHARACTER + 4) / step))
    for i, label in enumerate(labels):
        x = left + 10 + i * step
        values = [v[i] for v in series.values()]
        for n, value in enumerate(values):
            style, radius = (marked[i], 6) if i in marked else ("dim", 3.5)
            parts.append(f'<circle class="{"ring " * n}{style}" cx="{x:.1f}" cy="{y(value):.1f}" r="{radius + n}"/>')
        if i in marked:
            highest = y(max(values))
            above = highest - 12 if highest > top + 10 else y(min(values)) + 22
            written = " and ".join(_exponential(v) for v in values)
            parts.append(_text(min(max(x, left + 60), WIDTH - 60), above, written, anchor="middle"))
        if i % every == 0:
            parts.append(_text(x, top + height + 20, label, style="soft", anchor="middle"))
    return _svg(top + height + 30, parts)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers inside, zero among them."""
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if (high - low) / s <= 8)
    return [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _exponential(value: float) -> str:
    """2e-7"""
    digits, exponent = f"{value:.0e}".split("e")
    return f"{digits}e{int(exponent)}"


def _room(labels: Sequence[str]) -> int:
    return math.ceil(max(map(len, labels), default=0) * _CHARACTER) + 12


def _text(x: float, y: float, text: str, *, style: str = "ink", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">\n' + "\n".join(parts) + "\n</svg>"
