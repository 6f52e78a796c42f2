"""Times of FP8 and bfloat16 GEMMs by tokens, and from how many tokens on FP8 is faster.

A file has a line for each GEMM: ``{"schema": ..., "header": {...}, "gemms": [...]}``. For
``compare``, each number of tokens of it is a row (``rows``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dsv4.bench.pages.tables import table
from dsv4.bench.report import number
from dsv4.bench.results import Row
from dsv4.bench.tables import plain, wrapped

SCHEMA = "dsv4.bench.crossover/1"
OP, BFLOAT16 = "crossover", "bf16 kernel"
EXPLAINED = (
    "FP8 from: the number of tokens from which FP8 arithmetic is faster, there and at all larger "
    "numbers that were measured; estimate: the same by the dispatcher's estimates of these GEMMs; "
    "lost: the most by which the form that they choose takes longer than the other one, and where. "
    "With codes the dispatcher adds their dequantization to the bfloat16 kernel's estimate. "
    "Columns of tokens: the bfloat16 kernel's time over FP8's. Activations are quantised before "
    "the timed call; the weights are mxfp4-cast (exact in FP8)."
)
_DIGITS = 4  # of a time in a file


@dataclass(frozen=True)
class Times:
    """Microseconds of a GEMM by tokens.

    Attributes:
        name: Preset and matrix.
        shape: Names and sizes.
        tokens: Numbers of tokens, rising.
        fp8: With FP8 arithmetic, for each; None where the check failed.
        bfloat16: Of the bfloat16 kernel on the same values, likewise.
        fp8_estimate: What the dispatcher estimates for FP8 arithmetic.
        bfloat16_estimate: What it estimates for the bfloat16 kernel.
        message: What is wrong, or why there are no times; empty if nothing is.
    """

    name: str
    shape: dict[str, int]
    tokens: tuple[int, ...] = ()
    fp8: tuple[float | None, ...] = ()
    bfloat16: tuple[float | None, ...] = ()
    fp8_estimate: tuple[float, ...] = ()
    bfloat16_estimate: tuple[float, ...] = ()
    message: str = ""

    def speedup(self, tokens: int) -> float | None:
        """Return the bfloat16 kernel's time over FP8's; None without one of them."""
        if tokens not in self.tokens:
            return None
        index = self.tokens.index(tokens)
        fp8, bfloat16 = self.fp8[index], self.bfloat16[index]
        return bfloat16 / fp8 if fp8 and bfloat16 else None

    def measured_from(self) -> int | None:
        """Return the tokens from which FP8 is faster; see ``faster_from``."""
        return faster_from(self.tokens, self.fp8, self.bfloat16)

    def estimated_from(self) -> int | None:
        """Return the tokens from which FP8 is faster by estimates."""
        return faster_from(self.tokens, self.fp8_estimate, self.bfloat16_estimate)

    def losses(self) -> dict[int, float]:
        """Return, by tokens, the time of the form that estimates choose over the faster one's."""
        lost = {}
        for i, count in enumerate(self.tokens):
            fp8, bfloat16 = self.fp8[i], self.bfloat16[i]
            if fp8 and bfloat16:
                takes_fp8 = self.fp8_estimate[i] < self.bfloat16_estimate[i]
                lost[count] = (fp8 if takes_fp8 else bfloat16) / min(fp8, bfloat16)
        return lost


def faster_from(
    tokens: Sequence[int], fp8: Sequence[float | None], bfloat16: Sequence[float | None]
) -> int | None:
    """Return the least number of tokens from which FP8 is faster, there and at all larger ones.

    Numbers without times are passed over. None if it is not faster at the largest one.
    """
    first = None
    for count, left, right in zip(tokens, fp8, bfloat16, strict=True):
        if left is None or right is None:
            continue
        if left >= right:
            first = None
        elif first is None:
            first = count
    return first


@dataclass
class Crossovers:
    """All that one command measured.

    Attributes:
        gemms: The GEMMs.
        left_out: What was not measured because the time was over.
    """

    gemms: list[Times] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def document(header: dict[str, Any], gemms: Iterable[Times]) -> dict[str, Any]:
    """Return the content of a file."""
    lines = [asdict(times) for times in gemms]
    for line in lines:
        for name, value in line.items():
            if name.startswith(("fp8", "bfloat16")):
                line[name] = [None if us is None else float(f"{us:.{_DIGITS}g}") for us in value]
    return {"schema": SCHEMA, "header": dict(header), "gemms": lines}


def parse(content: dict[str, Any]) -> tuple[Times, ...]:
    """Return the GEMMs of a file.

    Raises:
        ValueError: naming a field that is missing, unknown, or has another length than ``tokens``.
    """
    if content.get("schema") != SCHEMA:
        raise ValueError(f"results: wanted a file of {SCHEMA}")
    _check_names("results", content, {"schema", "header", "gemms"})
    gemms = []
    for i, line in enumerate(content["gemms"]):
        _check_names(f"gemms[{i}]", line, {f.name for f in fields(Times)})
        lists = {name: tuple(value) for name, value in line.items() if isinstance(value, list)}
        for name, values in lists.items():
            if len(values) != len(line["tokens"]):
                count = len(line["tokens"])
                raise ValueError(f"results: gemms[{i}].{name} has {len(values)}, wanted {count}")
        gemms.append(Times(**{**line, **lists}))
    return tuple(gemms)


def _check_names(where: str, content: Any, names: set[str]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"results: {where} is {type(content).__name__}, wanted named fields")
    for name in sorted(names ^ content.keys()):
        kind = "missing" if name in names else "unknown"
        raise ValueError(f"results: {where}.{name} is {kind}")


def rows(gemms: Iterable[Times]) -> tuple[Row, ...]:
    """Return a row for each GEMM and number of tokens."""
    made = []
    for times in gemms:
        for count, fp8, bfloat16 in zip(times.tokens, times.fp8, times.bfloat16, strict=True):
            good = fp8 is not None and bfloat16 is not None
            row = Row(OP, times.name, times.shape, count, "fp8", match=good, message=times.message)
            if good:
                assert bfloat16 is not None
                row = Row(
                    *(OP, times.name, times.shape, count, "fp8"),
                    us=fp8,
                    baselines={BFLOAT16: bfloat16},
                    match=True,
                )
            made.append(row)
    return tuple(made)


def headings(gemms: Sequence[Times]) -> tuple[str, ...]:
    """Return the headings of the table."""
    return ("GEMM", "sizes", "FP8 from", "estimate", "lost", *map(str, _tokens(gemms)))


def body(gemms: Sequence[Times]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            times.name,
            " ".join(f"{name}={size}" for name, size in times.shape.items()),
            _said(times, times.measured_from),
            _said(times, times.estimated_from),
            _lost(times),
            *(_ratio(times.speedup(count)) for count in _tokens(gemms)),
        ]
        for times in gemms
    ]


def lines(gemms: Sequence[Times]) -> list[str]:
    """Return the table as text, and why some have no times."""
    if not gemms:
        return []
    said = [f"{times.name}: {times.message}" for times in gemms if times.message]
    table = plain(headings(gemms), body(gemms), keys=2)
    return [*table, "", *wrapped(EXPLAINED), *(line for text in said for line in wrapped(text))]


def markdown(gemms: Sequence[Times]) -> str:
    """Return the table in Markdown, with what its columns mean below."""
    text = [*table(headings(gemms), body(gemms), texts=2), "", EXPLAINED]
    return "\n".join([*text, ""])


def _tokens(gemms: Sequence[Times]) -> list[int]:
    return sorted({count for times in gemms for count in times.tokens})


def _said(times: Times, crossover: Callable[[], int | None]) -> str:
    if not any(times.speedup(count) for count in times.tokens):
        return "-"
    first = crossover()
    if first is None:
        return f"> {times.tokens[-1]}"
    return f"<= {first}" if first == times.tokens[0] else str(first)


def _lost(times: Times) -> str:
    losses = times.losses()
    if not losses:
        return "-"
    where = max(losses, key=lambda count: losses[count])
    if losses[where] == 1:
        return "0 %"
    return f"{100 * (losses[where] - 1):.0f} % ({where})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else number(value)
