"""What else could do the job, timed beside an operator. More can be registered.

A rival takes the operator's ``Problem`` and returns a call without arguments that gives what the
operator gives; what it prepares before (a dequantised weight, a transposed matrix, a compiled
kernel) is not timed. None: it cannot do this problem, or its library is not installed. No library
is needed or imported until its rival is asked for.

A note in parentheses after a library's name says where it does less than the operator, or how it is
run. Whatever does less is a bound on what the library could reach, not an equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dsv4.bench.problem import Problem, UsageError
from dsv4.bench.rivals import flash_mla, inductor, liger, packed, plain, tile_kernels, torchao
from dsv4.bench.rivals._prepare import Call, Rival, reasons

# Prepared only when asked for by name.
SLOW = (inductor.NAME, *liger.SLOW, *packed.SLOW)


def _merged() -> dict[str, dict[str, Rival]]:
    merged: dict[str, dict[str, Rival]] = {}
    for source in (plain, packed, liger, tile_kernels, torchao, flash_mla, inductor):
        for op, known in source.RIVALS.items():
            merged.setdefault(op, {}).update(known)
    return merged


RIVALS: dict[str, dict[str, Rival]] = _merged()


def register(op: str, name: str) -> Callable[[Rival], Rival]:
    """Decorator: add a rival of an operator."""

    def add(rival: Rival) -> Rival:
        RIVALS.setdefault(op, {})[name] = rival
        return rival

    return add


def rivals(
    op: str,
    problem: Problem,
    names: tuple[str, ...] | None = None,
    refused: dict[str, str] | None = None,
) -> dict[str, Call]:
    """Prepared calls, by name, of the rivals that can do this problem.

    Args:
        op: Name of the operator.
        problem: What to do.
        names: Which rivals, with their note or without, in any case; None for all but those in
            ``SLOW``.
        refused: Gets the reason of each that cannot.
    """
    known = RIVALS.get(op, {})
    usual = [name for name in known if name not in SLOW]
    wanted = usual if names is None else [name for name in known if is_among(name, names)]
    prepared: dict[str, Call] = {}
    for name in wanted:
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
    """Whether a rival was asked for: its name with its note or without, in any case."""
    name = name.casefold()
    return any(asked.casefold() in (name, name.partition(" (")[0]) for asked in names)
