"""Values that must be equal on all ranks, and errors that must reach all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dsv4.parallel.context import ParallelContext, RankError


@contextmanager
def reported(context: ParallelContext | None) -> Iterator[None]:
    """Tell the other ranks of an error in the block, so that none waits for this one."""
    try:
        yield
    except BaseException as error:
        if context is not None and not isinstance(error, RankError):
            context.group.report(error)
        raise


def agree(context: ParallelContext, values: Mapping[str, Any]) -> None:
    """Raise on all ranks unless they have equal values.

    Args:
        context: This rank.
        values: Small values by what they are, for the message.

    Raises:
        RankError: if another rank failed.
        ValueError: naming the first value that differs, the rank, and both values.
    """
    ours = {name: repr(value) for name, value in values.items()}
    first, *others = context.group.exchange(ours)
    for rank, theirs in enumerate(others, 1):
        for name in dict.fromkeys((*first, *theirs)):
            if first.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name} is {first.get(name)} on rank 0 and {theirs.get(name)} on rank {rank}, "
                    "wanted the same on all ranks"
                )


def digest(value: Any) -> str:
    """Return a short hash of a value's ``repr``."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
