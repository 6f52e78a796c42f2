"""Ranks of one process: threads that exchange tensors in lockstep, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from dsv4.parallel.context import ParallelContext

_Result = TypeVar("_Result")
_PATIENCE = 60.0  # seconds that a rank waits for the others


class _Meeting:
    """The place where threads leave values for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size


class ThreadGroup:
    """A group whose ranks are threads of ``run_ranks``; it counts the tensors that it gathered."""

    name = ""
    mailbox: Any = None

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.gathered: list[tuple[int, ...]] = []
        self._meeting = meeting

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        meeting = self._meeting
        meeting.values[self.rank] = value
        meeting.barrier.wait(_PATIENCE)
        values = list(meeting.values)
        meeting.barrier.wait(_PATIENCE)  # before a rank leaves its next value
        return values

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks."""
        self.gathered.append(tuple(tensor.shape))
        return self.exchange(tensor)

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        return self.exchange(value)[0]

    def report(self, error: BaseException) -> None:
        """Let the other ranks' calls raise BrokenBarrierError."""
        self._meeting.barrier.abort()

    def abandon(self, device: torch.device) -> None:
        """Do nothing: no kernel waits for another thread."""


def run_ranks(size: int, work: Callable[[ParallelContext], _Result]) -> list[_Result]:
    """Call ``work`` in a thread per rank, and return the results in the order of ranks.

    Raises:
        BaseException: what the first rank that failed by itself raised.
    """
    meeting = _Meeting(size)

    def rank_work(rank: int) -> _Result:
        group = ThreadGroup(rank, meeting)
        try:
            return work(ParallelContext(rank, size, group))
        except BaseException as error:
            group.report(error)
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_work, rank) for rank in range(size)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    own = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (own or errors)[0]
    return [future.result() for future in futures]
