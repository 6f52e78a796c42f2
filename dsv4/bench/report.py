"""Rows for people and spreadsheets: a table (rich if it is there), Markdown, CSV."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from dsv4.bench.results import Row

HEADINGS = (
    "operator",
    "case",
    "shape",
    "tokens",
    "backend",
    "error",
    "check",
    "us",
    "floor us",
    "% copy",
    "rivals us",
    "best rival / us",
    "why this backend",
)
_RIGHT = (
    *("tokens", "error", "us", "floor us", "% copy", "best rival / us"),
    *("experts", "gate_up us", "down us", "pair us", "pair / floor", "block us"),
    *("points", "bf16 error", "f32 error"),
    *("around us", "around / block", "layer us", "layer / floor"),
    *("us / floor", "TFLOP/s", "TB/s"),
)


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, in the order of ``HEADINGS``."""
    check = {True: "ok", False: "WRONG", None: "not run"}[row.match]
    error = f"{row.error:.1e}" if isinstance(row.error, float) else (row.error or "-")
    return (
        row.op,
        row.case,
        " ".join(f"{name}={size}" for name, size in row.shape.items()),
        str(row.tokens),
        row.backend,
        error,
        check,
        "-" if row.us is None else number(row.us),
        number(row.floor_us),
        "-" if row.copy_share is None else f"{100 * row.copy_share:.0f}",
        ", ".join(f"{name} {number(us)}" for name, us in row.rivals.items()),
        "-" if row.rival_ratio is None else f"{row.rival_ratio:.2f}",
        row.reason,
    )


def number(value: float) -> str:
    """Three significant digits without an exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def table(rows: Sequence[Row], stream: TextIO | None = None) -> None:
    """Print a table: with rich on a terminal, else in plain lines; then the checks that failed."""
    stream = stream or sys.stdout
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        _rich(rows, stream)
    else:
        print("\n".join(plain(HEADINGS, [cells(row) for row in rows])), file=stream)
    for row in rows:
        if row.match is False:
            print(f"WRONG {row.op} {row.case}: {row.message}", file=stream)


def plain(headings: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(len(line[i]) for line in (headings, *body)) for i in range(len(headings))]
    pads: list[Callable[[str, int], str]] = [
        str.rjust if name in _RIGHT else str.ljust for name in headings
    ]

    def line(texts: Sequence[str]) -> str:
        padded = (pad(text, width) for pad, text, width in zip(pads, texts, widths, strict=True))
        return "  ".join(padded).rstrip()

    return [line(headings), line(["-" * width for width in widths]), *map(line, body)]


def _rich(rows: Sequence[Row], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(header_style="bold")
    for name in HEADINGS:
        drawn.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, cells(row)), style="bold red" if row.match is False else None)
    Console(file=stream).print(drawn)


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [HEADINGS, ["---:" if name in _RIGHT else "---" for name in HEADINGS]]
    body = [[text.replace("|", "\\|") for text in cells(row)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (*lines, *body))


def write_csv(path: str, rows: Sequence[Row]) -> Path:
    """Write the cells with full numbers, one line per row."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as stream:
        writer = csv.writer(stream)
        names = ("op", "case", "shape", "tokens", "backend", "error", "match", "us", "floor_us")
        writer.writerow([*names, "copy_share", "bytes", "flops", "rivals", "rival_ratio", "reason"])
        for row in rows:
            shape, rivals = (
                " ".join(f"{k}={v}" for k, v in pairs.items()) for pairs in (row.shape, row.rivals)
            )
            found = [row.op, row.case, shape, row.tokens, row.backend, row.error, row.match, row.us]
            found += [row.floor_us, row.copy_share, row.bytes, row.flops, rivals]
            found += [row.rival_ratio, row.reason]
            writer.writerow(found)
    return target
