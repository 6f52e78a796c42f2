"""Messages between the runners of several ranks.

Each rank has a runner with the same scheduler. Before each step rank 0 sends what comes from
outside: requests that arrived and requests that ended early. Everything else follows from that and
from the sampled tokens, which are equal on all ranks, so all runners take the same steps with the
same buckets. Rank 0 also sends a hash of its schedule, with which the others compare theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4.parallel.context import ParallelContext
from dsv4.serving.options import SamplingOptions
from dsv4.serving.request import Request


@dataclass(frozen=True)
class Arrival:
    """A request of rank 0, as other ranks make it."""

    number: int
    prompt: tuple[int, ...]
    options: SamplingOptions
    seed: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Orders:
    """Message of rank 0 before a step.

    Attributes:
        schedule: Hash of rank 0's sequences before the step.
        arrivals: Requests that arrived.
        ended: Numbers of requests that ended without the runner, by ``cancel`` for instance.
        closes: Whether there is no step, because the runner is closed.
    """

    schedule: int = 0
    arrivals: tuple[Arrival, ...] = ()
    ended: tuple[int, ...] = ()
    closes: bool = False


@dataclass(eq=False)
class RankLink:
    """The connection of a rank's runner to rank 0's.

    Attributes:
        context: This rank.
    """

    context: ParallelContext
    _expected: deque[Request] = field(default_factory=deque)
    _ended: set[int] = field(default_factory=set)  # numbers that all ranks know to have ended

    @property
    def leads(self) -> bool:
        """Return whether this rank decides."""
        return self.context.rank == 0

    def expect(self, request: Request) -> None:
        """Take a request that another rank than 0 was asked for; rank 0's arrival starts it."""
        self._expected.append(request)

    def lead(self, schedule: int, arrivals: Iterable[Request], open_: Iterable[Request]) -> None:
        """Send the orders for a step, on rank 0.

        Args:
            schedule: Hash of the sequences.
            arrivals: Requests that arrived.
            open_: Requests that arrived before, also some that have ended.
        """
        new = tuple(Arrival(r.number, r.prompt, r.options, r.seed, r.stop_ids) for r in arrivals)
        ended = {request.number for request in (*open_, *arrivals) if request.done} - self._ended
        self._ended |= ended
        self.context.group.broadcast(Orders(schedule, new, tuple(sorted(ended))))

    def close(self) -> None:
        """Send that the runner is closed, on rank 0."""
        self.context.group.broadcast(Orders(closes=True))

    def receive(self) -> Orders:
        """Wait for the orders of rank 0."""
        orders: Orders = self.context.group.broadcast(None)
        return orders

    def check(self, orders: Orders, schedule: int) -> None:
        """Raise if this rank's sequences are not those of rank 0.

        Raises:
            RuntimeError: naming the rank.
        """
        if orders.schedule != schedule:
            raise RuntimeError(
                f"the sequences of rank {self.context.rank} are not those of rank 0: their tokens "
                "differ, so the streams of the ranks do (dsv4.parallel.guard finds the layer)"
            )

    def request(self, arrival: Arrival, step: Any) -> Request:
        """Return this rank's request for an arrival: the expected one, or a new one.

        Raises:
            ValueError: if this rank was asked for another one.
        """
        if not self._expected or self._expected[0].number != arrival.number:
            options, seed, stops = arrival.options, arrival.seed, arrival.stop_ids
            return Request(arrival.number, arrival.prompt, options, seed, stops, step)
        own = self._expected.popleft()
        if own.prompt != arrival.prompt or _unseeded(own) != _unseeded(arrival):
            raise ValueError(
                f"request {arrival.number} has {len(own.prompt)} prompt tokens and {own.options} "
                f"on rank {self.context.rank}, {len(arrival.prompt)} and {arrival.options} on rank "
                "0, wanted the same request on both, or none on this rank"
            )
        own.seed = arrival.seed
        return own


def _unseeded(request: Request | Arrival) -> SamplingOptions:
    return replace(request.options, seed=None)
