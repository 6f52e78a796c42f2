"""Implementations of operators elsewhere, timed for comparison. More can be registered.

A baseline takes the operator's ``Problem`` and returns a call without arguments that gives what the
operator gives; what it prepares before (a dequantised weight, a transposed matrix, a compiled
kernel) is not timed. None: it cannot do this problem, or its library is not installed. No library
is needed or imported until its baseline is asked for.

A note in parentheses after a library's name says where it does less than the operator, or how it is
run. Whatever does less is a bound on what the library could reach, not an equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from dsv4.bench.baselines import (
    flash_mla,
    fp8,
    inductor,
    liger,
    packed,
    plain,
    tile_kernels,
    torchao,
)
from dsv4.bench.baselines._prepare import Baseline, Call, reasons
from dsv4.bench.problem import Problem, UsageError

# Prepared only when asked for by name.
SLOW = (inductor.NAME, *liger.SLOW, *packed.SLOW, *fp8.SLOW)


def _merged() -> dict[str, dict[str, Baseline]]:
    merged: dict[str, dict[str, Baseline]] = {}
    for source in (plain, packed, fp8, liger, tile_kernels, torchao, flash_mla, inductor):
        for op, known in source.BASELINES.items():
            merged.setdefault(op, {}).update(known)
    return merged


BASELINES: dict[str, dict[str, Baseline]] = _merged()
_FORMER_NAMES = {"RIVALS": "BASELINES", "rivals": "prepare_baselines"}


def __getattr__(name: str) -> Any:
    """Names of the last release, each with a warning."""
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _FORMER_NAMES[name]
    message = f"{name} is now {__name__}.{new}; the old name goes with the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return globals()[new]


def register(op: str, name: str) -> Callable[[Baseline], Baseline]:
    """Decorator: add a baseline of an operator."""

    def add(baseline: Baseline) -> Baseline:
        BASELINES.setdefault(op, {})[name] = baseline
        return baseline

    return add


def prepare_baselines(
    op: str,
    problem: Problem,
    names: tuple[str, ...] | None = None,
    refused: dict[str, str] | None = None,
) -> dict[str, Call]:
    """Prepared calls, by name, of the baselines that can do this problem.

    Args:
        op: Name of the operator.
        problem: What to do.
        names: Which baselines, with their note or without, in any case; None for all but those in
            ``SLOW``.
        refused: Gets the reason of each that cannot.
    """
    known = BASELINES.get(op, {})
    quick = [name for name in known if name not in SLOW]
    requested = quick if names is None else [name for name in known if is_among(name, names)]
    prepared: dict[str, Call] = {}
    for name in requested:
        with reasons() as said:
            call = known[name](problem)
        if call is not None:
            prepared[name] = call
        elif refused is not None:
            refused[name] = "; ".join(said) or "it cannot do this problem"
    return prepared


def check_names(names: Iterable[str] | None, known: Iterable[str]) -> None:
    """Check that every name asked for is that of a baseline; see ``is_among``.

    Raises:
        UsageError: naming the first that is not, and those that there are.
    """
    known = list(dict.fromkeys(known))
    for asked in names or ():
        if not any(is_among(name, (asked,)) for name in known):
            there = f"wanted some of {', '.join(known)}" if known else "but there are none here"
            raise UsageError(f"--baselines has {asked!r}, {there}")


def is_among(name: str, names: tuple[str, ...]) -> bool:
    """Return whether a baseline was asked for: its name with its note or without, in any case."""
    name = name.casefold()
    return any(asked.casefold() in (name, name.partition(" (")[0]) for asked in names)
