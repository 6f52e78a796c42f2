"""The last line of a command: that all passed, or what failed and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsv4.bench.results import Row
from dsv4.bench.tables import short

_NAMED = 3  # failures that the line names; all of them stand above it
_MOST = 60  # characters of what was found


@dataclass(frozen=True)
class Check:
    """A check that was made.

    Attributes:
        kind: What is counted: ``"operator check"``, ``"generation"``.
        where: Which operator, shape and implementation, or which model.
        passed: None if it was not checked.
        detail: What is wrong, in a few words.
    """

    kind: str
    where: str
    passed: bool | None
    detail: str = ""


def where(row: Row) -> str:
    """A row's operator, case, shape, tokens and implementation in words."""
    tokens = f"{row.tokens} token{'s' * (row.tokens != 1)}"
    what = " ".join(filter(None, label(row)))
    return ", ".join(filter(None, (what, tokens, row.backend)))


def label(row: Row) -> tuple[str, str, str]:
    """Operator, case in brackets and shape; empty where there is none."""
    shape = " ".join(f"{name}={size}" for name, size in row.shape.items())
    return row.op, f"[{row.case}]" if row.case else "", shape


def of_row(row: Row) -> Check:
    """The check of one measured row."""
    detail = ""
    if row.match is False:
        ratio = row.ratio
        known = ratio is not None and math.isfinite(ratio)
        detail = f"error {ratio:.3g} times its budget" if known else short(row.message, _MOST)
    return Check("check", where(row), row.match, detail)


def line(checks: Sequence[Check], stopped: str = "") -> str:
    """The verdict.

    Args:
        checks: All that was checked or left unchecked.
        stopped: Why not everything was; empty if everything was.
    """
    kinds = list(dict.fromkeys(check.kind for check in checks))
    failed = [check for check in checks if check.passed is False]
    skipped = sum(check.passed is None for check in checks)
    rest = f"; {skipped} not checked" if skipped else ""
    if stopped:
        rest += f"; {stopped}"
    if not failed:
        good = ", ".join(filter(None, (_count(checks, kind) for kind in kinds)))
        word = "STOPPED" if stopped else ("PASSED" if good else "NOT CHECKED")
        return f"{word}: {f'{good} passed' if good else 'nothing was checked'}{rest}"
    counts = ", ".join(
        f"{sum(check.kind == kind for check in failed)} of {_count(checks, kind)}"
        for kind in kinds
        if any(check.kind == kind for check in failed)
    )
    named = "; ".join(f"{check.where}: {check.detail}" for check in failed[:_NAMED])
    more = f"; and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    return f"FAILED: {counts}: {named}{more}{rest}"


def _count(checks: Sequence[Check], kind: str) -> str:
    """``"71 checks"``, of those that were done."""
    count = sum(check.kind == kind and check.passed is not None for check in checks)
    return f"{count} {kind}{'s' if count > 1 else ''}" if count else ""
