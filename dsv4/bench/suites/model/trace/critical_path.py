"""The critical path of a step: the launches that determine its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4.bench.suites.model.trace.matching import Launch


@dataclass(frozen=True)
class Visit:
    """A launch on the critical path.

    Attributes:
        launch: The launch.
        gap: Microseconds between the end of the path before it and its start.
        time: Microseconds of it that do not overlap earlier launches of the path.
    """

    launch: Launch
    gap: float
    time: float


def critical_path(launches: Sequence[Launch]) -> tuple[Visit, ...]:
    """Return the launches on the critical path of a step, in order of their starts.

    The last launch of the path is the one that ends last. The predecessor of a launch is the one
    that ends last among those that it waits for. A launch may begin before its predecessor ends
    (programmatic dependent launch); the path then counts only the part after that end. Gaps and
    times therefore add up to the time of the step.
    """
    if not launches:
        return ()
    by_number = {launch.number: launch for launch in launches}
    path = [max(launches, key=lambda launch: launch.end)]
    while path[-1].after:
        path.append(max((by_number[i] for i in path[-1].after), key=lambda launch: launch.end))
    visits, reached = [], min(launch.start for launch in launches)
    for launch in reversed(path):
        gap = max(0.0, launch.start - reached)
        time = max(0.0, launch.end - max(launch.start, reached))
        visits.append(Visit(launch, gap, time))
        reached = max(reached, launch.end)
    return tuple(visits)


def idle(launches: Sequence[Launch]) -> float:
    """Microseconds between a step's begin and end in which nothing runs."""
    total, reached = 0.0, min((launch.start for launch in launches), default=0.0)
    for launch in sorted(launches, key=lambda launch: launch.start):
        total += max(0.0, launch.start - reached)
        reached = max(reached, launch.end)
    return total


def length(launches: Sequence[Launch]) -> float:
    """Microseconds from the first start to the last end."""
    if not launches:
        return 0.0
    return max(launch.end for launch in launches) - min(launch.start for launch in launches)
