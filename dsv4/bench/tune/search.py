"""Measure the candidates of many problems within a number of seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from dsv4.bench.tune.work import Measured, Timer, Work, WrongError

_PREPARED = 12  # problems whose kernels are compiled together, so that all processors have work


def interleaved(works: Iterable[Sequence[Work]]) -> list[Work]:
    """Return the problems of all families, the first of each, then the second, and so on."""
    rows = zip_longest(*works)
    return [work for row in rows for work in row if work is not None]


def run(
    works: Sequence[Work],
    timer: Timer,
    seconds: float,
    clock: Callable[[], float],
    measured: list[Measured],
    say: Callable[[str], None] = lambda line: None,
) -> str:
    """Measure problems in their order until the time is over.

    Args:
        works: The problems.
        timer: Measures a candidate.
        seconds: No candidate begins later than this.
        clock: Tells the time, in seconds.
        measured: Results are added to it, so that an interrupt leaves those before it. A problem
            that was cut short is not whole, and no plan is chosen by it.
        say: Takes a line about each candidate that is wrong.

    Returns:
        Why it ended early, or an empty text.
    """
    end = clock() + seconds
    for first in range(0, len(works), _PREPARED):
        part = works[first : first + _PREPARED]
        if clock() < end:
            timer.prepare(part)
        for work in part:
            times = Measured(work)
            measured.append(times)
            for candidate in work.candidates:
                if clock() >= end:
                    whole = sum(m.is_whole for m in measured)
                    return f"{seconds:g} seconds are over after {whole} of {len(works)} problems"
                try:
                    times.us[candidate] = timer.us(work, candidate)
                except WrongError as error:
                    times.wrong[candidate] = str(error)
                    say(f"wrong, left out: {work.family} {work.name}, {candidate}: {error}")
            times.is_whole = True
    return ""
