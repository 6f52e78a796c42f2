"""Tables of plain text, at most ``WIDTH`` columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

WIDTH = 120
_GAP = "  "
_LEAST = 12  # columns that a wrapped column keeps
_RIGHT = (
    *("tokens", "error", "us", "bound us", "% copy", "speedup", "why", "baseline us"),
    *("experts", "gate_up us", "down us", "pair us", "pair / bound", "block us"),
    *("points", "bf16 error", "f32 error", "A us", "B us", "B / A"),
    *("around us", "around / block", "layer us", "layer / bound"),
    *("us / bound", "TFLOP/s", "TB/s"),
    *("context", "bytes", "flops", "kernels", "step", "runner", "generate", "eager", "gen / step"),
    *("sum us", "path us", "hidden us", "gap us", "MB", "#", "stream", "start"),
    *("prompt", "first", "tokens / s", "ms", "share %", "launches", "deterministic"),
)
Body = Sequence[Sequence[str]]


def is_right(heading: str) -> bool:
    """Return whether a column is aligned to the right."""
    return heading in _RIGHT


def short(text: str, most: int) -> str:
    """The beginning of a text in one line, with "..." where it was cut."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    start, _, cut = line[: most - 3].rpartition(" ")
    return (start if len(cut) < most // 2 else line[: most - 3]).rstrip() + "..."


def wrapped(text: str) -> list[str]:
    """Lines of a text, indented from the second on."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="      ")


def plain(headings: Sequence[str], body: Body, keys: int = 0) -> list[str]:
    """Lines with aligned columns.

    Args:
        headings: Headings of the columns.
        body: The texts of each row.
        keys: If the table is too wide, how many first columns are repeated in each of several
            tables that follow one another; 0: the last column is wrapped instead.
    """
    widths = _widths(headings, body)
    if _total(widths) <= WIDTH or not keys:
        return _wrapped(headings, body)
    lines: list[str] = []
    for columns in _blocks(widths, keys):
        chosen = [*range(keys), *columns]
        part = [[row[i] for i in chosen] for row in body]
        if lines:
            lines.append("")
        lines += _wrapped([headings[i] for i in chosen], part)
    return lines


def labelled(
    headings: Sequence[str], body: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> list[str]:
    """A table whose first column takes what the others leave of the width.

    Args:
        headings: Headings of all columns.
        body: Rows: the parts of the label, which take several lines if they have to, and the texts
            of the other columns, which stand in the label's last line.
    """
    others = [texts for _, texts in body]
    width = max(_LEAST, WIDTH - _total(_widths(headings[1:], others)) - len(_GAP))
    table: list[list[str]] = []
    for parts, texts in body:
        *above, last = _label(parts, width)
        table += [[line, *[""] * len(texts)] for line in above]
        table.append([last, *texts])
    return _aligned(headings, table)


def _label(parts: Sequence[str], width: int) -> list[str]:
    lines: list[str] = [""]
    for part in filter(None, parts):
        joined = f"{lines[-1]} {part}" if lines[-1] else part
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines += [f"  {piece}" for piece in textwrap.wrap(part, width - 2)]
    return lines if lines[0] else lines[1:] or [""]


def _widths(headings: Sequence[str], body: Body) -> list[int]:
    return [max(len(row[i]) for row in (headings, *body)) for i in range(len(headings))]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _blocks(widths: Sequence[int], keys: int) -> list[list[int]]:
    """The other columns, split into tables that fit, at least one in each."""
    blocks: list[list[int]] = [[]]
    for i in range(keys, len(widths)):
        if blocks[-1] and _total([*widths[:keys], *(widths[j] for j in (*blocks[-1], i))]) > WIDTH:
            blocks.append([])
        blocks[-1].append(i)
    return blocks


def _wrapped(headings: Sequence[str], body: Body) -> list[str]:
    """Lay out a table; its last column takes several lines where it would be too wide."""
    width = max(_LEAST, WIDTH - _total(_widths(headings[:-1], [row[:-1] for row in body])) - 2)
    table: list[list[str]] = []
    for *first, last in body:
        pieces = textwrap.wrap(last, width) if len(last) > width else [last]
        table.append([*first, pieces[0]])
        table += [[*[""] * len(first), piece] for piece in pieces[1:]]
    return _aligned(headings, table)


def _aligned(headings: Sequence[str], table: Body) -> list[str]:
    widths = _widths(headings, table)
    pads: list[Callable[[str, int], str]] = [
        str.rjust if is_right(name) else str.ljust for name in headings
    ]

    def line(texts: Sequence[str]) -> str:
        padded = (pad(text, width) for pad, text, width in zip(pads, texts, widths, strict=True))
        return _GAP.join(padded).rstrip()

    return [line(headings), line(["-" * width for width in widths]), *map(line, table)]
