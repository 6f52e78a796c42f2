"""What begins on another stream when a product of routed experts is nearly done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_start: ContextVar[list[Callable[[], None]] | None] = ContextVar("dsv4_nearly", default=None)


@contextmanager
def when_nearly_done(start: Callable[[], None]) -> Iterator[None]:
    """Call ``start`` once: within the product that is launched inside, or behind it.

    Products of several launches call it before the last one that has many tiles, so that what waits
    for the current stream there finds the SMs that this launch's end leaves.
    """
    waiting = [start]
    token = _start.set(waiting)
    try:
        yield
        nearly_done()
    finally:
        _start.reset(token)


def nearly_done() -> None:
    """Say so; the first time what the innermost ``when_nearly_done`` has is called."""
    waiting = _start.get()
    if waiting:
        waiting.pop()()
