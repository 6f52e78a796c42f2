"""Measure the candidates of many problems within a number of seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from dsv4.bench.child import FailedError
from dsv4.bench.tune.work import Candidate, Measured, Timer, Work, WrongError

_PREPARED = 12  # problems whose kernels are compiled together, so that all processors have work
# Failed candidates after which a family is given up. One can be an accident, and a plan that only
# some sizes can run should not end the family; but a hang costs a minute, and by default a run has
# ten for all families.
MOST_FAILURES = 3


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

    After ``MOST_FAILURES`` failed candidates the rest of their family is skipped.

    Args:
        works: The problems.
        timer: Measures a candidate.
        seconds: No candidate begins later than this.
        clock: Tells the time, in seconds.
        measured: Results are added to it, so that an interrupt leaves those before it. A problem
            that was cut short is not whole, and no plan is chosen by it.
        say: Takes a line about each candidate that is wrong or failed.

    Returns:
        Why it ended early, or an empty text.
    """
    end = clock() + seconds
    for first in range(0, len(works), _PREPARED):
        part = works[first : first + _PREPARED]
        if clock() < end:
            timer.prepare([work for work in part if not given_up(measured, work.family)])
        for work in part:
            if given_up(measured, work.family):
                continue
            times = Measured(work)
            measured.append(times)
            for candidate in work.candidates:
                if clock() >= end:
                    whole = sum(m.is_whole for m in measured)
                    return f"{seconds:g} seconds are over after {whole} of {len(works)} problems"
                _try(times, candidate, timer, say)
                if given_up(measured, work.family):
                    break
            tried = len(times.us) + len(times.wrong) + len(times.failed)
            times.is_whole = tried == len(work.candidates)
    return ""


def _try(times: Measured, candidate: Candidate, timer: Timer, say: Callable[[str], None]) -> None:
    """Measure a candidate and record its time, or why it has none."""
    where = f"left out: {times.work.family} {times.work.name}, {candidate}"
    try:
        times.us[candidate] = timer.us(times.work, candidate)
    except WrongError as error:
        times.wrong[candidate] = str(error)
        say(f"wrong, {where}: {error}")
    except FailedError as error:
        times.failed[candidate] = str(error)
        say(f"failed, {where}: {error}")


def given_up(measured: Sequence[Measured], family: str) -> str:
    """Return why no further candidate of a family is tried, or an empty text."""
    own = [m for m in measured if m.work.family == family]
    reasons = [reason for m in own for reason in m.failed.values()]
    if len(reasons) < MOST_FAILURES:
        return ""
    return f"given up after {len(reasons)} failed candidates, the last one {reasons[-1]}"
