"""Tokens on their way to the ranks that hold their experts, and results on their way back.

With data-parallel attention each rank has tokens of its own, and a range of the routed experts.
``moe_send`` brings each token once to every rank that holds one of its experts; each
rank sums its experts' outputs for a token; ``moe_return`` brings these sums back and adds them.

All ranks have as many tokens, T, and buffers have room for all tokens of all ranks: row ``s T + t``
is token t of rank s. So no size depends on the choice of experts, nothing is read on the host, and
a CUDA graph can hold both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops.moe import check_ids
from dsv4.parallel import groups

Received = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_INT32 = (torch.int32,)


class MoeSendArgs(NamedTuple):
    """Arguments of ``moe_send``.

    Attributes:
        x: ``[T, H]`` floating, this rank's tokens.
        ids: ``[T, k]`` int32 or int64, their experts.
        weights: ``[T, k]`` floating.
        num_experts: Number of experts of all ranks.
        group: ``group_name`` of a process group; empty: this process alone.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    group: str


class MoeReturnArgs(NamedTuple):
    """Arguments of ``moe_return``.

    Attributes:
        y: ``[N T, H]`` floating, this rank's part of the result of every row that it received.
        received: ``[N T, k]`` int32, the ids that came with them.
        ids: ``[T, k]`` int32 or int64, the experts of this rank's own tokens.
        shared: ``[T, H]`` floating, the shared expert's result, or None.
        num_experts: Number of experts of all ranks.
        group: ``group_name`` of a process group; empty: this process alone.
    """

    y: torch.Tensor
    received: torch.Tensor
    ids: torch.Tensor
    shared: torch.Tensor | None
    num_experts: int
    group: str


def _fake_send(args: MoeSendArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_rows(args, groups.size(args.group))


def empty_rows(args: MoeSendArgs, ranks: int) -> Received:
    """Return results of ``moe_send`` over a number of ranks, without contents."""
    (tokens, hidden), top_k = args.x.shape, args.ids.shape[1]
    return (
        args.x.new_empty([ranks * tokens, hidden]),
        args.ids.new_empty([ranks * tokens, top_k], dtype=torch.int32),
        args.weights.new_empty([ranks * tokens, top_k]),
    )


def _fake_return(args: MoeReturnArgs) -> torch.Tensor:
    return args.y.new_empty([args.ids.shape[0], args.y.shape[1]])


def _check_send(op: str, args: MoeSendArgs) -> None:
    check_ids(args.ids, args.num_experts, op)


_moe_send = define("moe_send", MoeSendArgs, _fake_send, _check_send)
_moe_return = define("moe_return", MoeReturnArgs, _fake_return)


def moe_send(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: str = "",
    *,
    backend: str = "auto",
) -> Received:
    """Send each token once to every rank that holds one of its experts.

    Rank r of N holds the experts ``r E / N`` to ``(r + 1) E / N``. Collective: all ranks call it in
    the same order, with as many tokens and the same dtypes. A rank without tokens sends ids of -1.

    ============  ==========================================================================
    backend       what moves
    ============  ==========================================================================
    ``push``      a token to the ranks that need it, into their mailboxes; ids to all ranks
    ``nccl``      all tokens to all ranks, by one all-gather
    ``gloo``      likewise, on the CPU
    ============  ==========================================================================

    Args:
        x: ``[T, H]``, bfloat16, float16, float32 or float64.
        ids: ``[T, k]``, int32 or int64; -1 and ``num_experts`` choose none. Anything else raises on
            the CPU, and chooses none elsewhere.
        weights: ``[T, k]``, floating.
        num_experts: E, a multiple of N.
        group: ``group_name`` of a process group; empty: this process alone.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(rows [N T, H], ids [N T, k] int32, weights [N T, k])``, for ``moe_sort``: row ``s T + t``
        is token t of rank s, bit for bit. A token that has no expert here has ids of -1, weights of
        0, and any finite or other values in its row.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape does not fit, a tensor is on another device, the ranks do not divide
            the experts, no group has that name, or (on the CPU) an id is out of range.
    """
    op = "moe_send"
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("T", "H")),
        ("ids", ids, _check.INTEGERS, ("T", "k")),
        ("weights", weights, _check.FLOATS, ("T", "k")),
    )
    experts_of_rank(num_experts, groups.size(group), op)
    return _moe_send(MoeSendArgs(x, ids, weights, num_experts, group), backend)


def moe_return(
    y: torch.Tensor,
    received: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    group: str = "",
    *,
    shared: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Bring the ranks' parts of each token's result back to its rank, and add them.

    ``out[t] = sum over r of y of rank r + shared[t]``, over the ranks r that hold an expert of
    token t, in float32 (float64 for float64 ``y``), from 0 on in the order of the ranks, the shared
    expert last, rounded once. So the bits do not depend on other tokens, or on which rank has the
    token. Collective, as ``moe_send``, after which it comes.

    Args:
        y: ``[N T, H]``, floating, in the order of ``moe_send``; rows of tokens that have no expert
            here may hold anything.
        received: ``[N T, k]`` int32, from ``moe_send``.
        ids: ``[T, k]``, int32 or int64, as in ``moe_send``.
        num_experts: See there.
        group: See there.
        shared: ``[T, H]``, floating, or None.
        backend: See there.

    Returns:
        ``[T, H]`` in ``y.dtype``.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape does not fit, a tensor is on another device, the ranks do not divide
            the experts, or no group has that name.
    """
    op, ranks = "moe_return", groups.size(group)
    rows = ranks * (ids.shape[0] if ids.dim() else 0)
    _check.tensors(
        op,
        ("ids", ids, _check.INTEGERS, ("T", "k")),
        ("y", y, _check.FLOATS, (rows, "H")),
        ("received", received, _INT32, (rows, "k")),
        ("shared", shared, _check.FLOATS, ("T", "H")),
    )
    experts_of_rank(num_experts, ranks, op)
    return _moe_return(MoeReturnArgs(y, received, ids, shared, num_experts, group), backend)


def experts_of_rank(num_experts: int, ranks: int, op: str) -> int:
    """Return the number of experts of each rank.

    Raises:
        ValueError: if the ranks have not equally many.
    """
    if num_experts < 1 or num_experts % ranks:
        raise ValueError(
            f"{op}: num_experts is {num_experts}, wanted a multiple of the number of ranks "
            f"({ranks})"
        )
    return num_experts // ranks
