"""Reference implementation of ``dsv4.ops.moe_exchange``, over any way to gather tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsv4.ops.moe_exchange import MoeReturnArgs, MoeSendArgs, Received
from dsv4.parallel import groups
from dsv4.reference._precision import compute_dtype

Gather = Callable[[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Rank:
    """A rank that exchanges tokens.

    Attributes:
        rank: Its number.
        size: Number of ranks.
        gather: Function that returns a tensor of each rank, in the order of ranks.
        are_copies: Whether the other ranks are copies of this one, which hold its experts and send
            it what it sends them.
    """

    rank: int
    size: int
    gather: Gather
    are_copies: bool = False

    @classmethod
    def of_group(cls, group: str) -> Rank:
        """Return this process's rank of a group."""
        return cls(
            groups.rank(group),
            groups.size(group),
            lambda own: groups.gather(own, group),
            groups.emulated_ranks(group) is not None,
        )


def moe_send(args: MoeSendArgs) -> Received:
    """See ``dsv4.ops.moe_exchange.moe_send``."""
    return send(args, Rank.of_group(args.group))


def moe_return(args: MoeReturnArgs) -> torch.Tensor:
    """See ``dsv4.ops.moe_exchange.moe_return``."""
    return collect(args, Rank.of_group(args.group))


def send(args: MoeSendArgs, rank: Rank) -> Received:
    """Gather all tokens of all ranks, and clear those that have no expert on this one."""
    whole = torch.cat(list(rank.gather(packed(args))))
    return unpacked(whole, args, rank.rank, rank.size)


def packed(args: MoeSendArgs) -> torch.Tensor:
    """Return tokens, ids and weights as bytes ``[T, B]``, for one collective."""
    columns = (args.x, args.ids.int(), args.weights)
    return torch.cat([_bytes(column) for column in columns], dim=1)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def unpacked(whole: torch.Tensor, args: MoeSendArgs, rank: int, size: int) -> Received:
    """Return what a rank receives, from the bytes of all ranks ``[N T, B]``."""
    widths = [
        args.x.shape[1] * args.x.element_size(),
        args.ids.shape[1] * 4,
        args.weights.shape[1] * args.weights.element_size(),
    ]
    x, ids, weights = (
        part.clone(memory_format=torch.contiguous_format).view(dtype)
        for part, dtype in zip(
            whole.split(widths, dim=1), (args.x.dtype, torch.int32, args.weights.dtype), strict=True
        )
    )
    absent = ~has_expert(ids, rank, args.num_experts // size).unsqueeze(1)
    return x.masked_fill(absent, 0), ids.masked_fill(absent, -1), weights.masked_fill(absent, 0)


def has_expert(ids: torch.Tensor, rank: int, experts: int) -> torch.Tensor:
    """Return which tokens chose one of a rank's experts: bool ``[T]`` for ids ``[T, k]``."""
    first = rank * experts
    return ((ids >= first) & (ids < first + experts)).any(1)


def collect(args: MoeReturnArgs, rank: Rank) -> torch.Tensor:
    """Gather the results of all ranks, and add those of this rank's tokens."""
    shape = (rank.size, args.ids.shape[0], args.y.shape[1])
    if rank.are_copies:
        return summed(args.y.reshape(shape).unbind(0), args, [rank.rank] * rank.size)
    return summed([y.view(shape)[rank.rank] for y in rank.gather(args.y.contiguous())], args)


def summed(
    parts: Sequence[torch.Tensor], args: MoeReturnArgs, ranks: Sequence[int] | None = None
) -> torch.Tensor:
    """Add the ranks' parts ``[T, H]`` of this rank's tokens, and the shared expert.

    Args:
        parts: Of each rank.
        args: Arguments of ``moe_return``.
        ranks: The ranks whose experts made the parts; None: each its own.
    """
    wide = compute_dtype(args.y)
    total = torch.zeros_like(parts[0], dtype=wide)
    for rank, part in zip(ranks or range(len(parts)), parts, strict=True):
        sent = has_expert(args.ids, rank, args.num_experts // len(parts)).unsqueeze(1)
        total = torch.where(sent, total + part, total)
    if args.shared is not None:
        total = total + args.shared
    return total.to(args.y.dtype)
