"""Charts as SVG, drawn by matplotlib, whose numbers are part of the file.

The numbers stand in the SVG's description as JSON. Whether a chart is up to date is decided by
them: the bytes of the same picture change with the version of matplotlib, and a comparison of
numbers needs no matplotlib. One version of matplotlib writes the same bytes each time.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsv4.bench.problem import UsageError
from dsv4.bench.report import number

_INK, _MUTED, _GRID, _PAPER = "#1f2933", "#56616c", "#d5dbe1", "#fdfdfe"
_DARK = {_INK: "#e6e9ec", _MUTED: "#a9b2bb", _GRID: "#39424c", _PAPER: "#161b22"}
# Bright enough for the dark paper, dark enough for the light one.
_BARS = ("#8a95a1", "#5ea3d6", "#3a7fc2", "#1f9e8a", "#d9822b", "#a66bc9", "#c4566b")
_LINES = ("#3a7fc2", "#d9822b", "#1f9e8a", "#a66bc9", "#c4566b", "#8a95a1", "#5ea3d6")
# Largest over smallest value from which the vertical axis is logarithmic.
_LOG_BARS, _LOG_LINES = 30, 4
_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True)
class Series:
    """Values of one name, one for each label of the chart; None where there is none."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Chart:
    """Bars or lines.

    Attributes:
        kind: ``"bars"``: a group of bars for each label. ``"lines"``: points over the labels, which
            are numbers, joined by lines; the horizontal axis is logarithmic.
        title: One line.
        notes: Lines below the title.
        across: Name of the horizontal axis.
        unit: Name of the vertical axis.
        labels: Labels from left to right.
        series: Values by name, at most seven.
    """

    kind: str
    title: str
    notes: tuple[str, ...]
    across: str
    unit: str
    labels: tuple[str, ...]
    series: tuple[Series, ...]

    def __post_init__(self) -> None:
        assert self.kind in ("bars", "lines")
        assert len(self.series) <= len(_BARS)
        assert all(len(series.values) == len(self.labels) for series in self.series)

    def data(self) -> str:
        """Return the chart as JSON, as its SVG holds it."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def values(self) -> list[float]:
        """All values that there are."""
        return [v for series in self.series for v in series.values if v is not None]


def data_of(svg: str) -> str | None:
    """Return the numbers of a chart that ``draw`` made; None if there are none."""
    try:
        description = ET.fromstring(svg).find(f".//{_DESCRIPTION}")
    except ET.ParseError:
        return None
    return None if description is None else description.text


def draw(chart: Chart) -> str:
    """Return the picture.

    Raises:
        UsageError: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('charts need matplotlib: pip install "dsv4[bench]"')
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "dsv4",
        "font.family": ["DejaVu Sans"],  # comes with matplotlib, so its widths are everywhere
        "font.size": 10.0,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "path.simplify": False,
    }
    stream = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        figure = Figure(figsize=(_width(chart), 4.9), facecolor=_PAPER)
        FigureCanvasSVG(figure)
        _fill(figure, chart)
        about = {"Date": None, "Creator": None, "Description": chart.data()}
        figure.savefig(stream, format="svg", facecolor=_PAPER, metadata=about)
    return _finished(stream.getvalue().decode())


def _width(chart: Chart) -> float:
    if chart.kind == "lines":
        return 8.4
    return max(7.2, len(chart.labels) * (0.42 * len(chart.series) + 0.35) + 1.0)


def _fill(figure: Any, chart: Chart) -> None:
    height = figure.get_figheight()
    figure.text(0.02, 1 - 0.3 / height, chart.title, size=13, weight="bold")
    for i, note in enumerate(chart.notes):
        figure.text(0.02, 1 - (0.53 + 0.2 * i) / height, note, size=9, color=_MUTED)
    top = 1 - (0.8 + 0.2 * len(chart.notes)) / height
    left = 0.75 / figure.get_figwidth()
    axes = figure.add_axes((left, 0.62 / height, 0.975 - left, top - 0.62 / height))
    axes.set_facecolor(_PAPER)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.tick_params(length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    (_bars if chart.kind == "bars" else _lines)(axes, chart)
    axes.set_ylabel(chart.unit + (", logarithmic" if axes.get_yscale() == "log" else ""))
    axes.set_xlabel(chart.across)
    handles, names = axes.get_legend_handles_labels()
    legend = {"ncols": len(names), "frameon": False, "handlelength": 1.2, "columnspacing": 1.4}
    position = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "fontsize": 9}
    axes.legend(handles, names, **legend, **position)


def _bars(axes: Any, chart: Chart) -> None:
    count = len(chart.series)
    width = 0.86 / count
    values = chart.values or [1.0]
    if max(values) > _LOG_BARS * min(values):
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.7, 1.6 * max(values))
    else:
        axes.set_ylim(0, 1.1 * max(values))
    for i, series in enumerate(chart.series):
        at = [g + (i - (count - 1) / 2) * width for g in range(len(chart.labels))]
        pairs = [(x, v) for x, v in zip(at, series.values, strict=True) if v is not None]
        axes.bar(
            [x for x, _ in pairs],
            [value for _, value in pairs],
            0.9 * width,
            color=_BARS[i],
            label=series.name,
        )
        for x, value in pairs:
            axes.annotate(
                number(value),
                (x, value),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                size=9,
            )
        missing = [x for x, v in zip(at, series.values, strict=True) if v is None]
        for x in missing:
            axes.annotate(
                "none",
                (x, axes.get_ylim()[0]),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                size=8,
                color=_MUTED,
            )
    axes.set_xticks(range(len(chart.labels)), chart.labels)
    axes.set_xlim(-0.55, len(chart.labels) - 0.45)


def _lines(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

    positions = [float(label) for label in chart.labels]
    axes.set_xscale("log", base=2)
    for i, series in enumerate(chart.series):
        pairs = [(x, v) for x, v in zip(positions, series.values, strict=True) if v is not None]
        axes.plot(
            [x for x, _ in pairs],
            [value for _, value in pairs],
            color=_LINES[i],
            label=series.name,
            linewidth=2,
            marker="o",
            markersize=4.5,
            linestyle="--" if series.name.endswith("bound") else "-",
        )
    axes.set_xticks(positions, chart.labels)
    axes.xaxis.set_minor_locator(NullLocator())
    values = chart.values or [1.0]
    if max(values) <= _LOG_LINES * min(values):
        axes.set_ylim(0, 1.08 * max(values))
        return
    axes.set_yscale("log")
    ticks = _ticks(values)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def _ticks(values: Sequence[float]) -> list[float]:
    """Return numbers 1, 2 and 5 times powers of ten around the values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    every = [m * 10.0**e for e in range(low, high + 1) for m in (1, 2, 5)]
    return [tick for tick in every if min(values) / 1.3 <= tick <= 1.3 * max(values)] or every


def _finished(svg: str) -> str:
    """Add a dark scheme and fonts that browsers have; leave out what no reader needs."""
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    )
    fonts = "text{font-family:'DejaVu Sans',Verdana,sans-serif}"
    style = f"<style>{fonts}@media (prefers-color-scheme:dark){{{rules}}}</style>"
    svg = re.sub(r"<!DOCTYPE[^>]*>\n?", "", svg)
    svg = svg.replace("; font-family: 'DejaVu Sans'", "")
    svg = re.sub(r"(<svg [^>]*>)", lambda match: match[1] + style, svg, count=1)
    head, end, rest = svg.partition("</metadata>")
    rest = re.sub(r"(\.\d\d)\d+", r"\1", rest)  # a hundredth of a pixel is enough
    rest = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", rest)
    return "\n".join(_without_groups(f"{head}{end}{rest}")) + "\n"


def _without_groups(svg: str) -> Iterator[str]:
    """Yield the lines of an SVG without the names of groups, and groups that are nothing else."""
    shown: list[bool] = []
    for line in map(str.strip, svg.splitlines()):
        if line == "</g>":
            if shown.pop():
                yield line
            continue
        text = re.sub(r' id="[^"]*"', "", line) if line.startswith("<g ") else line
        if text == "<g/>":
            continue
        if text.startswith("<g"):
            shown.append(text != "<g>")
        if text != "<g>":
            yield text
