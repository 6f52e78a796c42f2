"""Values that must be equal on all ranks, and errors that must reach all of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dsv4.parallel.context import ParallelContext, RankError
from dsv4.parallel.peer_watch import GRACE, PeerWatch

# Seconds that a rank waits for work of its device, in which it may wait for other ranks: longer
# than a step takes. They do not count while another rank compiles.
DEVICE_PATIENCE = 40.0
_SHORTEST, _LONGEST = 2e-5, 1e-3  # seconds between two looks at the device
_FAILED = "failed"  # name of a rank's error among its values


@contextmanager
def reported(context: ParallelContext | None) -> Iterator[None]:
    """Tell the other ranks of an error in the block, so that none waits for this one."""
    try:
        yield
    except BaseException as error:
        if context is not None and not isinstance(error, RankError):
            context.group.report(error)
        raise


@contextmanager
def before_agreeing(context: ParallelContext | None) -> Iterator[None]:
    """Send an error of the block, which checks this rank's arguments, to the ranks in ``agree``.

    They raise ``RankError``. The connections stay open, so the ranks can try again.
    """
    try:
        yield
    except Exception as error:
        if context is not None and not isinstance(error, RankError):
            context.group.exchange({_FAILED: f"{type(error).__name__}: {error}"})
        raise


def agree(context: ParallelContext, values: Mapping[str, Any]) -> None:
    """Raise on all ranks unless they have equal values.

    Args:
        context: This rank.
        values: Small values by their names in the message.

    Raises:
        RankError: if another rank failed.
        ValueError: naming the first value that differs, the rank, and both values.
    """
    check_equal(context.group.exchange(described(values)))


def described(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as texts, which ranks can send each other."""
    return {name: repr(value) for name, value in values.items()}


def check_equal(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise unless all ranks described equal values.

    Raises:
        RankError: if a rank sent an error instead, by ``before_agreeing``.
        ValueError: naming the first value that differs, the rank, and both values.
    """
    for rank, values in enumerate(of_ranks):
        if _FAILED in values:
            raise RankError(f"rank {rank}: {values[_FAILED]}")
    first, *others = of_ranks
    for rank, theirs in enumerate(others, 1):
        for name in dict.fromkeys((*first, *theirs)):
            if first.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name} is {first.get(name)} on rank 0 and {theirs.get(name)} on rank {rank}, "
                    "wanted the same on all ranks"
                )


def wait_for_device(is_done: Callable[[], bool], watch: PeerWatch | None = None) -> None:
    """Wait for work of this rank's device that may wait for other ranks.

    Args:
        is_done: Returns whether the work has ended, ``torch.cuda.Event.query`` for instance.
        watch: Watch of the other ranks; None: no watch.

    Raises:
        RankError: if it does not end, or ends with an error, as it does if a rank is gone.
    """
    began, pause = time.monotonic(), _SHORTEST
    lost_at: float | None = None
    try:
        while not is_done():
            now = time.monotonic()
            if watch is not None and watch.others_compile:
                began = now
            if watch is not None and watch.lost is not None:
                lost_at = now if lost_at is None else lost_at
                if now - lost_at > GRACE:  # the work may not need that rank any more
                    raise RankError(f"rank {watch.lost} ended while the device waited for it")
            waited = now - began
            if waited > DEVICE_PATIENCE:
                raise RankError(
                    f"the device did not end a step in {DEVICE_PATIENCE:.0f} s: a rank ended or "
                    "did not answer"
                )
            time.sleep(pause)
            pause = min(_LONGEST, _SHORTEST + waited / 100)
    except RankError:
        raise
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise RankError(
            f"the device ended a step with an error, as it does if a rank is gone: {first}"
        ) from error


def digest(value: Any) -> str:
    """Return a short hash of a value's ``repr``."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
