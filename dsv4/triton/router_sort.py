"""Kernel of ``dsv4.ops.router_sort``: top-k and sort of one token as one launch.

Each program chooses the token's experts again, from the partial logits: a program has a warp, which
finds the k of 256 logits in registers. More tokens take the launches of both operators: a program
would have to choose for all tokens, one after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops._library import as_record
from dsv4.ops.moe import MoeSortArgs
from dsv4.ops.router import RouteTopkArgs
from dsv4.ops.router_sort import RoutedSort, RouteTopkSortArgs
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import narrow, wait_for_inputs
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._lib.router_logits import partial_logits
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.moe_sort import sort_rows
from dsv4.triton.router import (
    choose_experts,
    is_left_out,
    logits_are_stored,
    route_topk,
    token_logits,
    topk_warps,
    weights_of,
)

_COLUMNS = 256  # of the row that a program copies
_QUERIES = 8  # offsets that a program finds


@fast_launch
@triton.jit(do_not_specialize=["may_leave_out", "first"])
def _topk_sort_kernel(
    partials,
    logits,
    bias,
    routed,
    weights,
    ids,
    x,
    out,
    row_weight,
    offsets,
    rows,
    may_leave_out,
    factor,
    first,
    columns,
    copying,
    EXPERTS: tl.constexpr,
    LOCAL: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of the one token, then copy COLUMNS columns of it to all its rows.

    The first program also stores the choice. Programs from ``copying`` on find QUERIES offsets
    each. The rank of a slot is the number of smaller keys, as in ``moe_sort``.
    """
    program = tl.program_id(0)
    if BIASED and program == 0:
        prefetch_row(bias, EXPERTS, BLOCK)
    wait_for_inputs(PDL)
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(x + column, mask=column < columns, other=0.0)
    token = tl.full([], 0, tl.int64)
    left_out = is_left_out(routed, token, may_leave_out)
    tokens = tl.full([], 1, tl.int32)
    # Stored below, by one program.
    logit, good = token_logits(partials, logits, token, tokens, EXPERTS, SPLITS, True, BLOCK)
    experts, chosen, total = choose_experts(logit, bias, K, EXPERTS, BIASED, BLOCK, SLOTS)
    expert, weight = weights_of(left_out, experts, chosen, total, factor, good)
    slot = tl.arange(0, SLOTS)
    own = expert - first
    local = tl.where((own >= 0) & (own < LOCAL), own, LOCAL)
    key = tl.where(slot < K, local, LOCAL + 1) * K + slot
    if program < copying:
        rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
        line = out + rank[:, None].to(tl.int64) * columns
        inside = (slot < K)[:, None] & (column < columns)[None, :]
        tl.store(line + column[None, :], values[None, :], mask=inside)
        if program == 0:
            tl.store(rows + slot, rank, mask=slot < K)
            tl.store(row_weight + rank, weight, mask=slot < K)
            tl.store(weights + slot, weight, mask=slot < K)
            tl.store(ids + slot, expert.to(tl.int64), mask=slot < K)
            if not STORED:
                number = tl.arange(0, BLOCK)
                stored = narrow(logit, logits.dtype.element_ty)
                tl.store(logits + number, stored, mask=number < EXPERTS)
    else:
        bound = (program - copying) * QUERIES + tl.arange(0, QUERIES)
        rank = tl.sum((key[None, :] < (bound * K)[:, None]).to(tl.int32), 1)
        tl.store(offsets + bound, rank, mask=bound <= LOCAL)


def route_topk_sort(args: RouteTopkSortArgs, out: torch.Tensor | None = None) -> RoutedSort:
    """See ``dsv4.ops.router_sort.route_topk_sort``."""
    if args.x.shape[0] == 1 and args.x.shape[1] > 0:
        return _of_one_token(args, out)
    logits, weights, ids = route_topk(as_record(RouteTopkArgs, args))
    experts = args.weight.shape[0]
    sort = as_record(MoeSortArgs, args, ids=ids, weights=weights, num_experts=experts)
    return *sort_rows(sort, out), logits, weights, ids


def _of_one_token(args: RouteTopkSortArgs, out: torch.Tensor | None) -> RoutedSort:
    x, bias, k, local = row_tiles.as_rows(args.x), args.bias, args.top_k, args.num_local_experts
    experts, columns = args.weight.shape
    out = x.new_empty((k, columns)) if out is None else out
    row_weight = x.new_empty((k,), dtype=torch.float32)
    offsets = x.new_empty((local + 1,), dtype=torch.int32)
    rows = x.new_empty((1, k), dtype=torch.int32)
    logits = x.new_empty((1, experts), dtype=args.logits_dtype)
    weights = x.new_empty((1, k), dtype=torch.float32)
    ids = x.new_empty((1, k), dtype=torch.int64)
    partials = partial_logits(x, args.weight, logits)
    block = launch_options.power_of_two(experts)
    copying = triton.cdiv(columns, _COLUMNS)
    with launch_options.on(x):
        _topk_sort_kernel[(copying + triton.cdiv(local + 1, _QUERIES),)](
            partials,
            logits,
            None if bias is None else bias.contiguous(),
            # Without it any int64 tensor stands for it, as in ``route_topk``.
            ids if args.routed is None else args.routed.contiguous(),
            weights,
            ids,
            x,
            out,
            row_weight,
            offsets,
            rows,
            int(args.routed is not None),
            args.scaling_factor,
            args.first_expert,
            columns,
            copying,
            EXPERTS=experts,
            LOCAL=local,
            K=k,
            SPLITS=partials.shape[0],
            STORED=logits_are_stored(x, partials, logits),
            BIASED=bias is not None,
            BLOCK=block,
            SLOTS=launch_options.power_of_two(k),
            COLUMNS=_COLUMNS,
            QUERIES=_QUERIES,
            num_warps=topk_warps(block),
            **launch_options.options(x),
        )
    return out, row_weight, offsets, rows, logits, weights, ids
