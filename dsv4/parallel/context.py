"""The place of this process among the ranks that share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class RankError(RuntimeError):
    """Another rank failed, ended or did not answer; this one cannot go on without it.

    Attributes:
        failed: The rank whose error it quotes; None: unknown.
    """

    def __init__(self, message: str, failed: int | None = None) -> None:
        super().__init__(message)
        self.failed = failed


class Group(Protocol):
    """Ranks that exchange tensors and small values; every rank makes the same calls in order.

    Attributes:
        name: ``group_name`` of a process group of these ranks; empty: there is none.
        mailbox: This rank's ``dsv4.parallel.mailboxes.Mailbox`` of that group, kept alive here;
            None without.
        watch: Its ``dsv4.parallel.peer_watch.PeerWatch`` of the others; None without.
    """

    name: str
    mailbox: Any
    watch: Any

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in the order of ranks; shapes and dtypes are equal."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Return a small Python value of each rank, in the order of ranks."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Return the small Python value of rank 0; those of other ranks are ignored."""
        ...

    def report(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, so that none waits for it for long."""
        ...

    def abandon(self, device: torch.device) -> None:
        """End kernels that still run on a device and wait for a rank that is gone."""
        ...


TENSOR, DATA = "tp", "dp"
MODES = (TENSOR, DATA)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model; none of them needs to exist.

    Attributes:
        size: Number of ranks.
        mode: See ``ParallelContext``.
    """

    size: int = 1
    mode: str = TENSOR


ALONE = Ranks()


@dataclass(frozen=True, eq=False)
class ParallelContext:
    """A rank of several. Modules that hold one hold this rank's share of weights.

    Attributes:
        rank: Number of this rank, 0 to ``size - 1``.
        size: Number of ranks.
        group: How they exchange tensors.
        mode: ``"tp"``: all ranks process the same tokens with parts of all matrices. ``"dp"``: each
            rank has tokens of its own and whole matrices, but for the routed experts, of which it
            has a range.

    Raises:
        ValueError: if there is no such rank or mode.
    """

    rank: int
    size: int
    group: Group
    mode: str = TENSOR

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"ParallelContext: rank is {self.rank}, wanted 0 to size - 1 ({self.size - 1})"
            )
        if self.mode not in MODES:
            raise ValueError(f"ParallelContext: mode is {self.mode!r}, wanted one of {MODES}")

    @property
    def ranks(self) -> Ranks:
        """Return all of them."""
        return Ranks(self.size, self.mode)

    def __repr__(self) -> str:
        return f"ParallelContext(mode={self.mode!r}, rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self  # a copy of a module belongs to the same group


def tensor_parallel(context: ParallelContext | None) -> ParallelContext | None:
    """Return the context of modules of which each rank has a part; None: it has the whole."""
    return None if context is None or context.mode == DATA else context


def has_own_tokens(context: ParallelContext | None) -> bool:
    """Return whether each of several ranks processes tokens of its own."""
    return context is not None and context.mode == DATA
