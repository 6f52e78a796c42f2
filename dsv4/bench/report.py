"""Rows for people and spreadsheets: a table (in colour with rich), Markdown, CSV."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from dsv4.bench.results import Row
from dsv4.bench.tables import is_right, labelled, short, wrapped
from dsv4.bench.verdict import label, where

REASON = 60  # characters of why an implementation was chosen; `explain OP` prints all
_NUMBERS = ("tokens", "backend", "error", "check", "us", "bound us", "% copy", "speedup")
_LABEL = "operator [case] shape"
HEADINGS = ("operator", "case", "shape", *_NUMBERS, "baselines us", "why")


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, in the order of ``HEADINGS``."""
    op, _, shape = label(row)
    baselines = ", ".join(f"{name} {number(us)}" for name, us in row.baselines.items())
    return op, row.case, shape, *_numbers(row), baselines, short(row.reason, REASON)


def _numbers(row: Row) -> tuple[str, ...]:
    """The texts in the order of ``_NUMBERS``."""
    error = f"{row.error:.1e}" if isinstance(row.error, float) else (row.error or "-")
    return (
        str(row.tokens),
        row.backend,
        error,
        check(row.match),
        "-" if row.us is None else number(row.us),
        number(row.bound_us),
        "-" if row.copy_share is None else f"{100 * row.copy_share:.0f}",
        "-" if row.baseline_ratio is None else f"{row.baseline_ratio:.2f}",
    )


def check(match: bool | None) -> str:
    """A check's result in a word."""
    return {True: "ok", False: "WRONG", None: "not run"}[match]


def number(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def lines(rows: Sequence[Row]) -> list[str]:
    """The table, why each implementation was chosen, and all baselines."""
    reasons = dict.fromkeys(dict.fromkeys(short(row.reason, REASON) for row in rows), 0)
    reasons = {reason: i + 1 for i, reason in enumerate(reasons)}
    body = [(label(row), (*_numbers(row), str(reasons[short(row.reason, REASON)]))) for row in rows]
    text = labelled((_LABEL, *_NUMBERS, "why"), body)
    if any(reasons):
        text += ["", "why this implementation runs (`explain OP` has the whole reason):"]
        text += [f"{i:>3}  {reason}" for reason, i in reasons.items()]
    return [*text, *baseline_table(rows), *notes(rows)]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return the messages of rows that are right, each text once."""
    said = dict.fromkeys(row.message for row in rows if row.message and row.match is not False)
    return [line for text in said for line in wrapped(f"note: {text}")]


def baseline_table(rows: Sequence[Row]) -> list[str]:
    """A table of all baselines that were timed, after an empty line; nothing if none was."""
    body = [
        (
            label(row),
            (str(row.tokens), number(row.us), name, number(us), f"{us / row.us:.2f}"),
        )
        for row in rows
        if row.us
        for name, us in row.baselines.items()
    ]
    if not body:
        return []
    headings = (_LABEL, "tokens", "us", "baseline", "baseline us", "speedup")
    return ["", "speedup: the baseline's time over ours", *labelled(headings, body)]


def table(rows: Sequence[Row], stream: TextIO | None = None) -> None:
    """Print the rows, in colour on a terminal that has rich; then the checks that failed."""
    stream = stream or sys.stdout
    text = [*lines(rows), *wrong(rows)]
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        _rich(text, stream)
    else:
        print("\n".join(text), file=stream)


def wrong(rows: Sequence[Row]) -> list[str]:
    """The checks that failed, each with all that was found."""
    text = []
    for row in rows:
        if row.match is False:
            text += wrapped(f"WRONG {where(row)}: {row.message}")
    return text


def _rich(text: Sequence[str], stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)
    for i, line in enumerate(text):
        style = "bold" if i == 0 else ("bold red" if "WRONG" in line else "")
        console.print(Text(line, style=style), soft_wrap=True)


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    rules = [HEADINGS, ["---:" if is_right(name) else "---" for name in HEADINGS]]
    body = [[text.replace("|", "\\|") for text in cells(row)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (*rules, *body))


def write_csv(path: str, rows: Sequence[Row]) -> Path:
    """Write the cells with full numbers, one line per row."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as stream:
        writer = csv.writer(stream)
        names = ("op", "case", "shape", "tokens", "backend", "error", "match", "us", "bound_us")
        writer.writerow(
            [
                *(*names, "copy_share", "bytes", "flops", "baselines", "baseline_ratio"),
                *("reason", "message"),
            ]
        )
        for row in rows:
            shape, baselines = (
                " ".join(f"{k}={v}" for k, v in pairs.items())
                for pairs in (row.shape, row.baselines)
            )
            cells = [row.op, row.case, shape, row.tokens, row.backend, row.error, row.match, row.us]
            cells += [row.bound_us, row.copy_share, row.bytes, row.flops, baselines]
            cells += [row.baseline_ratio, row.reason, row.message]
            writer.writerow(cells)
    return target
