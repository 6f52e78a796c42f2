"""Tables of results in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsv4.bench.report import number

_WORD = re.compile(r"\(?\[[^\]]*\]\([^)]*\)\S*|\S+")


def table(headings: Sequence[str], body: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the lines of a table.

    Args:
        headings: Headings of the columns.
        body: The texts of each row.
        texts: How many first columns are aligned to the left; the others hold numbers.
    """
    rules = ["---" if i < texts else "---:" for i in range(len(headings))]
    return [_line(headings), f"|{'|'.join(rules)}|", *map(_line, body)]


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in texts)} |"


def cell(value: float | None) -> str:
    """A number with three significant digits; ``"-"`` for None."""
    return "-" if value is None else number(value)


def paragraph(text: str, width: int = 100) -> list[str]:
    """Lines of at most ``width`` characters; a link or a longer word is not broken."""
    lines = [""]
    for word in _WORD.findall(text):
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines
