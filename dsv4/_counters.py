"""Zeros in which the blocks of products count the tiles that they have taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_COUNT = 32  # of two products of routed experts at least
_spare: ContextVar[list[torch.Tensor] | None] = ContextVar("dsv4_spare_counters", default=None)


@contextmanager
def one_launch_of_zeros() -> Iterator[None]:
    """Products inside, all of one stream, share a tensor of zeros.

    So only the first that counts has a launch in front, and the next can begin as the blocks of the
    one before leave the GPU.
    """
    token = _spare.set([])
    try:
        yield
    finally:
        _spare.reset(token)


def zeros(count: int, device: torch.device) -> torch.Tensor:
    """``[count]`` int32 that nobody else has."""
    spare = _spare.get()
    if spare is None:
        return torch.zeros(count, dtype=torch.int32, device=device)
    if not spare or len(spare[0]) < count:
        spare[:] = [torch.zeros(max(count, _COUNT), dtype=torch.int32, device=device)]
    taken, spare[0] = spare[0][:count], spare[0][count:]
    return taken
