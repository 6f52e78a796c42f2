"""``compare A.json B.json``: two files of results, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4.bench import verdict
from dsv4.bench.report import check, number
from dsv4.bench.results import Results, Row
from dsv4.bench.tables import labelled

_HEADER = ("gpu", "driver", "versions", "commit")
_HEADINGS = (
    *("operator [case] shape", "tokens", "A backend", "B backend", "A us", "B us", "B / A"),
    "B is",
)
Key = tuple[str, str, tuple[tuple[str, int], ...], int, int]


@dataclass(frozen=True)
class Comparison:
    """Two files of results.

    Attributes:
        a: The first.
        b: The second.
        threshold: Percent below which a difference counts as none.
    """

    a: Results
    b: Results
    threshold: float = 5.0

    def pairs(self) -> list[tuple[Row, Row]]:
        """Rows that both have, in the order of the second: same operator, case, shape, tokens."""
        before = _by_key(self.a.rows)
        return [(before[key], row) for key, row in _by_key(self.b.rows).items() if key in before]

    def alone(self) -> tuple[int, int]:
        """Count the rows that only the first file has, and only the second."""
        a, b = set(_by_key(self.a.rows)), set(_by_key(self.b.rows))
        return len(a - b), len(b - a)

    def word(self, a: Row, b: Row) -> str:
        """Say how a row changed, in a word."""
        if a.match is False or b.match is False:
            return f"{check(b.match)}, was {check(a.match)}"
        if not a.us or not b.us:
            return "not timed"
        change = 100 * (b.us / a.us - 1)
        # Of equal sizes in both directions: 5 percent slower is B / A = 1.05, faster 1 / 1.05.
        if max(b.us / a.us, a.us / b.us) <= 1 + self.threshold / 100:
            return "same"
        return "slower" if change > 0 else "faster"

    def lines(self) -> list[str]:
        """Return the differences of the headers, a table, and the verdict."""
        differences = []
        for name in _HEADER:
            a, b = self.a.header[name], self.b.header[name]
            if a != b:
                differences.append(f"{name}: {_difference(a, b)}")
        pairs = self.pairs()
        body = [
            (
                verdict.label(b),
                (
                    *(str(b.tokens), a.backend, b.backend, _us(a), _us(b)),
                    f"{b.us / a.us:.3f}" if a.us and b.us else "-",
                    self.word(a, b),
                ),
            )
            for a, b in pairs
        ]
        table = labelled(_HEADINGS, body) if body else []
        return [*differences, *([""] if differences else []), *table, "", self.summary(pairs)]

    def failed(self) -> bool:
        """Return whether a check failed in the second file, or nothing could be compared."""
        return any(row.match is False for row in self.b.rows) or not self.pairs()

    def summary(self, pairs: Sequence[tuple[Row, Row]]) -> str:
        """The verdict in one line."""
        only_a, only_b = self.alone()
        alone = f"; {only_a} rows in A alone, {only_b} in B alone" if only_a or only_b else ""
        if not pairs:
            return f"FAILED: no row is in both files{alone}"
        wrong = [row for row in self.b.rows if row.match is False]
        if wrong:
            return verdict.line([verdict.of_row(row) for row in self.b.rows]) + " (in B)" + alone
        words = [self.word(a, b) for a, b in pairs]
        counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        logs = [math.log(b.us / a.us) for a, b in pairs if a.us and b.us]
        mean = f"; B / A {math.exp(sum(logs) / len(logs)):.3f} (geometric mean)" if logs else ""
        return f"COMPARED: {len(pairs)} rows: {counts} (within {self.threshold:g} %){mean}{alone}"


def _us(row: Row) -> str:
    return "-" if row.us is None else number(row.us)


def _by_key(rows: Sequence[Row]) -> dict[Key, Row]:
    """Rows by what they measure; the n-th of equal ones (several backends) has the number n."""
    by_key: dict[Key, Row] = {}
    for row in rows:
        first, count = (row.op, row.case, tuple(sorted(row.shape.items())), row.tokens), 0
        while (key := (*first, count)) in by_key:
            count += 1
        by_key[key] = row
    return by_key


def _difference(a: object, b: object) -> str:
    """Say how two values differ; of versions, those that do."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        return ", ".join(f"{name} {a.get(name)} -> {b.get(name)}" for name in names)
    return f"{a} -> {b}"
