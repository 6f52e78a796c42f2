"""``compare A.json B.json``: two files of results, row by row.

Rows of a whole model are its figures: each time of a step, and each time to the first token. Rows
are equal if operator, case, sizes and tokens are; the GPU, versions, and a model's recipe, weights
and routing may differ, which is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4.bench import verdict
from dsv4.bench.content import Content, load
from dsv4.bench.problem import UsageError
from dsv4.bench.report import check, number
from dsv4.bench.results import Results, Row
from dsv4.bench.suites.model.document import Measured, ModelResults
from dsv4.bench.tables import labelled

_MODEL = ("recipe", "weights", "routing", "ranks", "emulated", "parallel")
_HEADER = ("gpu", "driver", "versions", "commit", *_MODEL)
_STEP = ("kernels", "step", "runner", "generate", "deterministic", "eager")
_PROMPT = ("runner", "generate", "first")
_HEADINGS = (
    *("operator [case] shape", "tokens", "A backend", "B backend", "A us", "B us", "B / A"),
    "B is",
)
SLOWER = "slower"
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
        return SLOWER if change > 0 else "faster"

    def lines(self) -> list[str]:
        """Return the differences of the headers, a table, and the verdict."""
        differences = []
        for name in _HEADER:
            a, b = self.a.header.get(name), self.b.header.get(name)
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
        """Return whether a check failed in the second file, or a row is slower there."""
        wrong = any(row.match is False for row in self.b.rows)
        return wrong or any(self.word(a, b) == SLOWER for a, b in self.pairs())

    def summary(self, pairs: Sequence[tuple[Row, Row]]) -> str:
        """The verdict in one line."""
        only_a, only_b = self.alone()
        alone = f"; {only_a} rows in A alone, {only_b} in B alone" if only_a or only_b else ""
        wrong = [row for row in self.b.rows if row.match is False]
        if wrong:
            return verdict.line([verdict.of_row(row) for row in self.b.rows]) + " (in B)" + alone
        words = [self.word(a, b) for a, b in pairs]
        counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        logs = [math.log(b.us / a.us) for a, b in pairs if a.us and b.us]
        mean = f"; B / A {math.exp(sum(logs) / len(logs)):.3f} (geometric mean)" if logs else ""
        result = "SLOWER" if SLOWER in words else "COMPARED"
        return f"{result}: {len(pairs)} rows: {counts} (within {self.threshold:g} %){mean}{alone}"


def comparison(a: str, b: str, threshold: float) -> Comparison:
    """Read two files.

    Raises:
        UsageError: if one is no file of results, or they cannot be compared; says why.
    """
    contents = load(Path(a)), load(Path(b))
    suites = [_suite(content) for content in contents]
    if suites[0].isdisjoint(suites[1]):
        said = [" and ".join(sorted(suite)) or "no rows" for suite in suites]
        raise UsageError(f"{a} has {said[0]}, {b} has {said[1]}: wanted files of one suite")
    compared = Comparison(_results(contents[0]), _results(contents[1]), threshold)
    if not compared.pairs():
        raise UsageError(
            f"no row of {a} is in {b}, wanted the same cases, sizes and numbers of tokens"
        )
    return compared


def _suite(content: Content) -> set[str]:
    """Return the operators of a file."""
    return {"a whole model"} if content.model is not None else {row.op for row in content.rows}


def _results(content: Content) -> Results:
    if content.model is None:
        return Results(content.header, content.rows)
    every: Sequence[Measured] = (*content.model.rows, *content.model.prompts)
    named = {name: getattr(row.model, name) for row in every[:1] for name in _MODEL}
    return Results({**content.header, **named}, tuple(_figures(content.model)))


def _figures(model: ModelResults) -> Iterator[Row]:
    """Yield the times of a model, each as a row."""
    for step in model.rows:
        yield from _times("step", step, _STEP, {"context": step.context}, step.tokens)
    for prompt in model.prompts:
        yield from _times("first token", prompt, _PROMPT, {"prompt": prompt.prompt}, 1)


def _times(
    op: str, row: Measured, names: Sequence[str], sizes: dict[str, int], tokens: int
) -> Iterator[Row]:
    named = row.model
    shape = {"experts": named.experts, "layers": named.layers, **sizes}
    for name in names:
        ms = getattr(row, f"{name}_ms")
        if ms is not None:
            yield Row(op, f"{named.preset} {name}", shape, tokens, named.recipe, us=1e3 * ms)


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
