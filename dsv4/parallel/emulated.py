"""Rank 0 of several whose other ranks are copies of this process: one rank's share on one GPU.

For times of a rank's share without a second GPU, and for lists of its kernels. Sums over ranks are
N times what this process has, so logits mean nothing; sizes, launches and bytes are those of a
rank. Ranks with tokens of their own all have this one's, and its experts: each receives N copies of
the tokens that chose one of them.
"""

from __future__ import annotations

from typing import Any

import torch

from dsv4.config import ModelConfig
from dsv4.parallel import groups, mailboxes, supports
from dsv4.parallel.context import DATA, ParallelContext, Ranks
from dsv4.parallel.exchange_mailboxes import PUSHED_TOKENS
from dsv4.parallel.gather import gather
from dsv4.parallel.token_rows import RowLayout


class EmulatedGroup:
    """A group whose other ranks send what this process sends.

    Attributes:
        name: Its name for operators (``groups.emulated_name``).
        mailbox: Its mailboxes, which the process fills itself; None: sums use none.
    """

    def __init__(self, size: int, mailbox: mailboxes.Mailbox | None = None) -> None:
        self.name = groups.emulated_name(size)
        self.mailbox = mailbox
        self.watch = None
        self._size = size

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor N times, by the mailboxes where a group of GPUs would use them."""
        return gather(tensor, self.name)

    def exchange(self, value: Any) -> list[Any]:
        """Return the value N times."""
        return [value] * self._size

    def broadcast(self, value: Any) -> Any:
        """Return the value."""
        return value

    def report(self, error: BaseException) -> None:
        """Do nothing: nobody waits."""

    def abandon(self, device: torch.device) -> None:
        """Do nothing: no kernel waits for another process."""


def emulated_context(
    size: int, device: torch.device | str = "cpu", *, with_mailboxes: bool = True
) -> ParallelContext:
    """Return rank 0 of an emulated group.

    Args:
        size: Number of ranks, 2 to 16.
        device: Where the mailboxes are.
        with_mailboxes: Whether sums use mailboxes.

    Raises:
        ValueError: if the number of ranks is out of range.
    """
    nbytes = supports.pushed_bytes(size) if with_mailboxes else 0
    return ParallelContext(0, size, _group(size, nbytes, device))


def emulated_exchange(
    size: int,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    *,
    with_mailboxes: bool = True,
) -> ParallelContext:
    """Return rank 0 of an emulated group whose ranks have tokens of their own.

    Args:
        size: Number of ranks, 2 to 16.
        config: Configuration of the model, for the sizes of a token.
        device: Where the mailboxes are, which have room for as many tokens as those of GPUs.
        with_mailboxes: Whether tokens go through mailboxes; otherwise they are copied.

    Raises:
        ValueError: if the number of ranks is out of range.
    """
    nbytes = RowLayout.of_model(config).nbytes(PUSHED_TOKENS) if with_mailboxes else 0
    return ParallelContext(0, size, _group(size, nbytes, device), DATA)


def emulated_rank(
    ranks: Ranks,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    *,
    with_mailboxes: bool = True,
) -> ParallelContext | None:
    """Return rank 0 of an emulated group of these ranks; None for one rank."""
    if ranks.size == 1:
        return None
    if ranks.mode == DATA:
        return emulated_exchange(ranks.size, config, device, with_mailboxes=with_mailboxes)
    return emulated_context(ranks.size, device, with_mailboxes=with_mailboxes)


def _group(size: int, nbytes: int, device: torch.device | str) -> EmulatedGroup:
    """Return a group with mailboxes of slots of some bytes; of 0 without."""
    if not 2 <= size <= mailboxes.MOST_RANKS:
        raise ValueError(f"emulated ranks: {size}, wanted 2 to {mailboxes.MOST_RANKS}")
    return EmulatedGroup(size, mailboxes.emulated(size, nbytes, device) if nbytes else None)
