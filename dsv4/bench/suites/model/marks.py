"""Times at which the decode steps of a call of ``generate`` began.

``generate`` returns all tokens at once, so its steps are noticed in the runner that it drives.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from dsv4.serving.graphs import DecodeStep


@dataclass(frozen=True)
class Mark:
    """A decode step of a runner, captured or not.

    Attributes:
        sequences: Sequences that it decodes.
        seconds: When it began, a reading of ``time.perf_counter``.
    """

    sequences: int
    seconds: float


@contextmanager
def marked() -> Iterator[list[Mark]]:
    """Let every decode step of every runner add its mark to the list, within the block."""
    marks: list[Mark] = []
    run = DecodeStep.run

    def marked_run(self: DecodeStep, rows: Sequence[int], *arguments: Any, **named: Any) -> Any:
        marks.append(Mark(len(rows), time.perf_counter()))
        return run(self, rows, *arguments, **named)

    with mock.patch.object(DecodeStep, "run", marked_run):
        yield marks


def decode_ms(marks: Sequence[Mark], sequences: int, skip: int, steps: int) -> float | None:
    """Median milliseconds between decode steps of all sequences; None if there are too few.

    A runner decodes some sequences while it processes the prompts of others, but all of them only
    when no prompt is left.

    Args:
        marks: Marks of a whole call.
        sequences: Sequences that decode together.
        skip: Steps left out at the beginning.
        steps: Steps that are timed.
    """
    times = [mark.seconds for mark in marks if mark.sequences == sequences]
    times = times[skip : skip + steps + 1]
    if len(times) < steps + 1:
        return None
    return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times))
