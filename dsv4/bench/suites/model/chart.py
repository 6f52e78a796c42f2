"""A grouped bar chart as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_INK, _MUTED, _GRID, _PAPER = "#1f2933", "#5b6770", "#dde2e7", "#ffffff"
_COLOURS = ("#aab4be", "#7fb3d5", "#2c6fa6", "#2a9d8f", "#e08a3c")
_FONT = "font-family='Helvetica, Arial, sans-serif'"
_BAR, _GAP, _LEFT, _RIGHT, _TOP, _PLOT = 44, 34, 72, 24, 108, 300
_LOG_FROM = 30  # largest over smallest bar from which the axis is logarithmic
_TEXT = 6.6  # pixels of a character at most


@dataclass(frozen=True)
class Group:
    """Bars that stand together.

    Attributes:
        label: Below them, in one or two lines.
        values: One per series; None leaves a gap that says so.
    """

    label: tuple[str, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """Grouped bars.

    Attributes:
        title: One line.
        notes: Lines below the title.
        unit: Unit of the vertical axis.
        series: Names of the bars of each group, at most five.
        groups: Groups from left to right.
    """

    title: str
    notes: tuple[str, ...]
    unit: str
    series: tuple[str, ...]
    groups: Sequence[Group]

    def __post_init__(self) -> None:
        assert len(self.series) <= len(_COLOURS)
        assert all(len(group.values) == len(self.series) for group in self.groups)

    def svg(self) -> str:
        """The picture."""
        axis = _Axis.of([v for group in self.groups for v in group.values if v is not None])
        width = max(self._bars_width(), self._text_width())
        top = _TOP + 16 * max(0, len(self.notes) - 1)
        height = top + _PLOT + 62
        body = [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
            f"viewBox='0 0 {width} {height}' role='img'>",
            f"<title>{escape(self.title)}</title>",
            f"<rect width='{width}' height='{height}' fill='{_PAPER}'/>",
            _text(24, 30, self.title, size=17, weight="bold"),
            *(_text(24, 50 + 16 * i, note, fill=_MUTED) for i, note in enumerate(self.notes)),
            *self._legend(top - 28),
            *axis.lines(width, top, self.unit),
        ]
        for number, group in enumerate(self.groups):
            body += self._group(number, group, axis, top)
        return "\n".join([*body, "</svg>\n"])

    def _bars_width(self) -> int:
        return _LEFT + len(self.groups) * self._group_width() + _RIGHT

    def _text_width(self) -> int:
        lines = [1.35 * len(self.title), *map(len, self.notes)]
        legend = sum(len(name) + 5 for name in self.series)
        return 48 + round(_TEXT * max(*lines, legend))

    def _group_width(self) -> int:
        return len(self.series) * _BAR + _GAP

    def _legend(self, y: int) -> list[str]:
        marks, x = [], 24
        for name, colour in zip(self.series, _COLOURS, strict=False):
            marks.append(f"<rect x='{x}' y='{y - 10}' width='12' height='12' fill='{colour}'/>")
            marks.append(_text(x + 17, y, name))
            x += round(_TEXT * (len(name) + 5))
        return marks

    def _group(self, number: int, group: Group, axis: _Axis, top: int) -> list[str]:
        left = _LEFT + number * self._group_width() + _GAP // 2
        bottom = top + _PLOT
        marks = []
        for i, value in enumerate(group.values):
            x, middle = left + i * _BAR, left + i * _BAR + _BAR // 2
            if value is None:
                marks.append(_text(middle, bottom - 5, "none", fill=_MUTED, anchor="middle"))
                continue
            high = axis.height(value)
            marks.append(
                f"<rect x='{x + 2}' y='{bottom - high:.1f}' width='{_BAR - 4}' "
                f"height='{high:.1f}' fill='{_COLOURS[i]}'>"
                f"<title>{escape(f'{self.series[i]}: {value:.4g} {self.unit}')}</title></rect>"
            )
            marks.append(_text(middle, bottom - high - 5, _number(value), anchor="middle"))
        middle = left + len(self.series) * _BAR // 2
        for i, line in enumerate(group.label):
            weight = "bold" if i == 0 else "normal"
            marks.append(_text(middle, bottom + 20 + 16 * i, line, anchor="middle", weight=weight))
        return marks


@dataclass(frozen=True)
class _Axis:
    """The vertical axis.

    Attributes:
        low: Value at the bottom.
        high: Value at the top.
        log: Whether it is logarithmic.
        ticks: Values with a line.
    """

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> _Axis:
        """Return an axis that shows all values with room for their labels."""
        most = max(values, default=1.0) or 1.0
        least = min((v for v in values if v > 0), default=most)
        if most / least > _LOG_FROM:
            low, high = (math.floor(math.log10(least / 1.5)), math.ceil(math.log10(1.15 * most)))
            return cls(10.0**low, 10.0**high, True, tuple(10.0**e for e in range(low, high + 1)))
        unit = 10.0 ** math.floor(math.log10(most / 4))
        step = next(m * unit for m in (1, 2, 2.5, 5, 10) if most / (m * unit) <= 6)
        count = math.ceil(1.08 * most / step)
        return cls(0.0, count * step, False, tuple(i * step for i in range(count + 1)))

    def height(self, value: float) -> float:
        """Pixels above the bottom."""
        if not self.log:
            return _PLOT * value / self.high
        low, high = math.log10(self.low), math.log10(self.high)
        return _PLOT * (math.log10(max(value, self.low)) - low) / (high - low)

    def lines(self, width: int, top: int, unit: str) -> list[str]:
        """Grid, tick labels and the axis' name."""
        marks, bottom = [], top + _PLOT
        for tick in self.ticks:
            y = bottom - self.height(tick)
            marks.append(
                f"<line x1='{_LEFT}' y1='{y:.1f}' x2='{width - _RIGHT}' y2='{y:.1f}' "
                f"stroke='{_GRID}'/>"
            )
            marks.append(_text(_LEFT - 8, y + 4, f"{tick:g}", fill=_MUTED, anchor="end"))
        name = f"{unit}, logarithmic" if self.log else unit
        middle = top + _PLOT // 2
        marks.append(
            f"<text x='20' y='{middle}' {_FONT} font-size='12' fill='{_INK}' "
            f"text-anchor='middle' transform='rotate(-90 20 {middle})'>{escape(name)}</text>"
        )
        return marks


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    fill: str = _INK,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {_FONT} font-size='{size}' fill='{fill}' "
        f"text-anchor='{anchor}' font-weight='{weight}'>{escape(words)}</text>"
    )
