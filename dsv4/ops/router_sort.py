"""The learned router, and the sort of its choice, as one operator."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define, define_out
from dsv4.ops._plans import planned
from dsv4.ops.moe import local_experts_count
from dsv4.ops.router import checked_topk

# Rows in sorted order, their weights, offsets, row of each slot; logits, weights and ids.
RoutedSort = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]


class RouteTopkSortArgs(NamedTuple):
    """Arguments of ``route_topk_sort``: ``route_topk``, then ``moe_sort`` of the same rows.

    Attributes:
        x: ``[T, H]`` floating.
        weight: ``[E, H]`` floating.
        bias: ``[E]`` floating, for the selection only; or None.
        top_k: Experts per token.
        scaling_factor: Multiplied into the weights.
        logits_dtype: Dtype of the logits, floating.
        routed: ``[T]`` int64, negative for a token that goes to no expert; None: all go to some.
        first_expert: First expert held here.
        num_local_experts: Number of experts held here.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    top_k: int
    scaling_factor: float
    logits_dtype: torch.dtype
    routed: torch.Tensor | None
    first_expert: int
    num_local_experts: int


def _fake(args: RouteTopkSortArgs) -> RoutedSort:
    x, (experts, hidden), k = args.x, args.weight.shape, args.top_k
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    tokens = x.shape[0]
    return (
        x.new_empty([tokens * k, hidden]),
        x.new_empty([tokens * k], dtype=wide),
        x.new_empty([args.num_local_experts + 1], dtype=torch.int32),
        x.new_empty([tokens, k], dtype=torch.int32),
        x.new_empty([tokens, experts], dtype=args.logits_dtype),
        x.new_empty([tokens, k], dtype=wide),
        x.new_empty([tokens, k], dtype=torch.int64),
    )


_route_topk_sort = define("route_topk_sort", RouteTopkSortArgs, _fake)
_route_topk_sort_out = define_out("route_topk_sort", RouteTopkSortArgs, _fake)


@planned
def route_topk_sort(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    scaling_factor: float,
    logits_dtype: torch.dtype = torch.float32,
    routed: torch.Tensor | None = None,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> RoutedSort:
    """Run ``route_topk``, then ``moe_sort`` of the same rows, with its ids and weights.

    The bits are those of the operators one after the other. One token takes one launch less.

    Args:
        x: ``[T, H]``, see ``route_topk``, also for the following arguments.
        weight: ``[E, H]``.
        bias: ``[E]``, or None.
        top_k: Experts per token, 1 to E.
        scaling_factor: ``routed_scaling_factor`` of the configuration.
        logits_dtype: Dtype of the logits.
        routed: ``[T]`` int64, or None.
        first_expert: See ``moe_permute``.
        num_local_experts: Likewise.
        out: Tensor for the sorted rows, as in ``moe_gather``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(sorted rows [T k, H], their weights [T k], offsets, rows)`` as ``moe_sort``, then
        ``(logits [T, E], weights [T, k], ids [T, k])`` as ``route_topk``.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: as ``route_topk`` and ``moe_sort``.
    """
    op = "route_topk_sort"
    dtype = checked_topk(op, x, weight, bias, top_k, logits_dtype, routed)
    experts = weight.shape[0]
    local = local_experts_count(op, x.shape[0] * top_k, experts, first_expert, num_local_experts)
    args = RouteTopkSortArgs(
        x, weight, bias, top_k, scaling_factor, dtype, routed, first_expert, local
    )
    if out is None:
        return _route_topk_sort(args, backend)
    _check.result(op, out, (x.shape[0] * top_k, x.shape[1]), x.dtype, x)
    return (out, *_route_topk_sort_out(args, backend, out))
