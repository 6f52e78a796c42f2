"""Tables and charts of operators: a row for each case, a column for each number of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from dsv4.bench.pages.charts import Chart, Series
from dsv4.bench.pages.folder import ResultFile
from dsv4.bench.pages.tables import cell, table
from dsv4.bench.results import Row

Name = tuple[str, str]  # a case and its sizes
_FOLLOWS = ("touched", "launches", "transformers_launches")  # counts of a run, no sizes


def sections(file: ResultFile) -> list[str]:
    """Return the tables of a file: microseconds, roofline bounds, and each baseline."""
    rows = file.rows
    lines = ["Microseconds of a call, by tokens:", "", *_by_tokens(rows, lambda row: row.us)]
    if any(row.bound_us for row in rows):
        lines += ["", "Time over the roofline bound:", ""]
        lines += _by_tokens(
            rows, lambda row: row.us / row.bound_us if row.us and row.bound_us else None
        )
    for name in _baselines(rows):
        timed = [row for row in rows if name in row.baselines]
        lines += ["", f"{name}, its time over ours:", ""]
        lines += _by_tokens(timed, partial(_speedup, name))
    wrong = [row for row in rows if row.match is False]
    if wrong:
        lines += ["", f"{len(wrong)} rows failed their check and have no time."]
    return lines


def _speedup(name: str, row: Row) -> float | None:
    return row.baselines[name] / row.us if row.us and name in row.baselines else None


def _baselines(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.baselines))


def _named(row: Row, with_backend: bool = False) -> Name:
    sizes = " ".join(f"{k}={v}" for k, v in row.shape.items() if k not in _FOLLOWS)
    case = row.case or row.op
    return f"{case}, {row.backend}" if with_backend else case, sizes


def _compares_backends(rows: Sequence[Row]) -> bool:
    """Whether a case has a row for each of several implementations."""
    of_case: dict[tuple[Name, int], set[str]] = {}
    for row in rows:
        of_case.setdefault((_named(row), row.tokens), set()).add(row.backend)
    return any(len(backends) > 1 for backends in of_case.values())


def _tokens(rows: Sequence[Row]) -> list[int]:
    return sorted({row.tokens for row in rows})


def _by_tokens(rows: Sequence[Row], value: Callable[[Row], float | None]) -> list[str]:
    tokens = _tokens(rows)
    with_backend = _compares_backends(rows)
    cells: dict[Name, dict[int, float | None]] = {}
    for row in rows:
        cells.setdefault(_named(row, with_backend), {})[row.tokens] = value(row)
    body = [
        [*name, *(cell(of_case.get(count)) for count in tokens)] for name, of_case in cells.items()
    ]
    return table(["case", "sizes", *map(str, tokens)], body, texts=2)


def chart(file: ResultFile, gpu: str) -> Chart | None:
    """Return the chart of a file; None where a table says as much."""
    kind = "gemm" if file.suite.startswith("gemm") else file.suite
    made = _CHARTS.get(kind)
    if made is None or len(_tokens(file.rows)) < 3:
        return None
    return made(file, f"{gpu}, {file.date}")


def _mean(values: Sequence[float]) -> float | None:
    """Geometric mean."""
    if not values:
        return None
    return round(math.exp(sum(map(math.log, values)) / len(values)), 4)


def _gemm(file: ResultFile, where: str) -> Chart:
    """Baselines' times over ours, averaged over the matrices."""
    tokens = _tokens(file.rows)
    series = []
    for name in _baselines(file.rows):
        values = []
        for count in tokens:
            ratios = [_speedup(name, row) for row in file.rows if row.tokens == count]
            values.append(_mean([ratio for ratio in ratios if ratio is not None]))
        series.append(Series(name, tuple(values)))
    cases = ", ".join(dict.fromkeys(row.case for row in file.rows))
    return Chart(
        "lines",
        "NVFP4 GEMMs: how many times faster than",
        (where, f"geometric mean of {cases}"),
        "tokens",
        "baseline's time over ours",
        tuple(map(str, tokens)),
        tuple(series),
    )


def _moe(file: ResultFile, where: str) -> Chart:
    """Both GEMMs of the routed experts beside a baseline and the bound."""
    tokens = _tokens(file.rows)
    presets = dict.fromkeys(row.case.split()[0] for row in file.rows)
    series = []
    for preset in presets:
        pair = {r.tokens: r for r in file.rows if r.case == f"{preset} uniform pair"}
        of = [pair.get(count) for count in tokens]
        label = preset.capitalize()
        series.append(
            Series(f"{label}, bound", tuple(_us(row, lambda r: r.bound_us) for row in of))
        )
        series.append(Series(f"{label}, ours", tuple(_us(row, lambda r: r.us) for row in of)))
        for name in _baselines(list(pair.values())):
            times = tuple(_us(row, partial(_baseline_us, name)) for row in of)
            series.append(Series(f"{label}, {name.partition(' (')[0]}", times))
    return Chart(
        "lines",
        "Both GEMMs of the routed experts",
        (where, "uniform routing, NVFP4 weights, bfloat16 activations"),
        "tokens",
        "microseconds",
        tuple(map(str, tokens)),
        tuple(series),
    )


def _attention(file: ResultFile, where: str) -> Chart:
    """Times of the cases that have all numbers of tokens."""
    tokens = _tokens(file.rows)
    series = []
    for case in dict.fromkeys(row.case for row in file.rows):
        times = {row.tokens: row for row in file.rows if row.case == case}
        if set(times) == set(tokens):
            of = [times[count] for count in tokens]
            series.append(Series(case, tuple(_us(row, lambda r: r.us) for row in of)))
    return Chart(
        "lines",
        "Sparse attention",
        (where, "FP8 entries; each token is of another sequence"),
        "tokens",
        "microseconds",
        tuple(map(str, tokens)),
        tuple(series),
    )


def _us(row: Row | None, value: Callable[[Row], float | None]) -> float | None:
    us = None if row is None else value(row)
    return None if us is None else round(us, 3)


def _baseline_us(name: str, row: Row) -> float | None:
    return row.baselines.get(name)


_CHARTS: dict[str, Callable[[ResultFile, str], Chart]] = {
    "gemm": _gemm,
    "moe": _moe,
    "attention": _attention,
}
