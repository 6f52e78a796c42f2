"""SMs that products leave to what runs beside them on another stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_left: ContextVar[int] = ContextVar("dsv4_left", default=0)


@contextmanager
def leaving(sm_count: int) -> Iterator[None]:
    """Dense products of many tokens that are launched inside leave so many to others.

    Those of NVFP4 weights on Hopper do, whose blocks take tiles in turn. None of their blocks
    begins before the preceding kernel has ended: waiting for it, it would hold what is to be left.
    """
    token = _left.set(sm_count)
    try:
        yield
    finally:
        _left.reset(token)


def left() -> int:
    """How many SMs the innermost ``leaving`` asks for, 0 outside."""
    return _left.get()
