"""Kernels of ``moe_permute`` and ``moe_sort`` of ``dsv4.ops.moe``: slots sorted by expert.

Up to ``_RANKED_SLOTS`` slots, a slot's rank is the number of smaller keys, in one launch; above, a
histogram, a scan and a scatter sort blocks of slots. ``moe_sort`` copies rows as well: in the same
launch up to ``_FUSED_SLOTS`` slots, else by the kernel of ``moe_gather``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.moe import MoePermuteArgs, MoeSortArgs, check_ids
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.moe_gather import gather_rows

_RANKED_SLOTS = 4096  # slots up to which a slot's rank is found by comparing it with all others
_QUERIES = 8  # ranks that one program finds then
_BLOCK = 256  # slots of one program above, by histogram, scan and scatter
_FUSED_SLOTS = 512  # slots up to which one launch sorts and copies rows


@triton.jit
def _local_expert(ids, slot, slots, first, EXPERTS: tl.constexpr):
    """Local expert of each slot, int32; EXPERTS where it has none, one more past the last slot."""
    expert = tl.load(ids + slot, mask=slot < slots, other=-1).to(tl.int64) - first
    local = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)
    return tl.where(slot < slots, local, EXPERTS + 1)


@fast_launch
@triton.jit(do_not_specialize=["slots", "first"])
def _count_kernel(
    ids,
    order,
    offsets,
    rows,
    slots,
    first,
    EXPERTS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rank of a slot is the number of smaller keys, where a key is ``expert * slots + slot``.

    An offset is a rank, too: that of the smallest key its expert could have. Each program ranks
    QUERIES of the slots and, behind them, the offsets.
    """
    wait_for_inputs(PDL)
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    own = _local_expert(ids, query, slots, first, EXPERTS)
    ranked = query < slots
    key = tl.where(ranked, own * slots + query, (query - slots) * slots)
    rank = tl.zeros([QUERIES], tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        other = _local_expert(ids, slot, slots, first, EXPERTS) * slots + slot
        rank += tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
    tl.store(order + rank, query, mask=ranked)
    tl.store(rows + query, rank, mask=ranked)
    expert = query - slots
    tl.store(offsets + expert, rank, mask=(expert >= 0) & (expert <= EXPERTS))


@fast_launch
@triton.jit(do_not_specialize=["slots", "first"])
def _histogram_kernel(
    ids,
    counts,
    slots,
    first,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Slots per expert in each block of slots."""
    wait_for_inputs(PDL)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = _local_expert(ids, slot, slots, first, EXPERTS)
    offset = tl.program_id(0).to(tl.int64) * BINS + tl.arange(0, BINS)
    tl.store(counts + offset, tl.histogram(local, BINS))


@fast_launch
@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(
    counts,
    totals,
    blocks,
    BINS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Replace each block's counts of COLUMNS experts by the sums over the blocks before it."""
    wait_for_inputs(PDL)
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, blocks, CHUNK):
        block = (start + tl.arange(0, CHUNK))[:, None]
        address = counts + block.to(tl.int64) * BINS + expert[None, :]
        count = tl.load(address, mask=block < blocks, other=0)
        tl.store(address, total[None, :] + tl.cumsum(count, 0) - count, mask=block < blocks)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total)


@fast_launch
@triton.jit(do_not_specialize=["slots", "first"])
def _scatter_kernel(
    ids,
    counts,
    totals,
    order,
    offsets,
    rows,
    slots,
    first,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort one block of slots; its slots of an expert follow those of the blocks before."""
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    expert = tl.arange(0, BINS)
    total = tl.load(totals + expert)
    before = tl.load(counts + block.to(tl.int64) * BINS + expert)
    index = tl.arange(0, BLOCK)
    local = _local_expert(ids, block * BLOCK + index, slots, first, EXPERTS)
    begin = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(offsets + expert, begin, mask=expert <= EXPERTS)
    own = tl.histogram(local, BINS)
    # Where an expert's first slot of this block goes, less where it is in the sorted block.
    shift = begin + before - (tl.cumsum(own, 0) - own)
    key = tl.sort(local * BLOCK + index)
    slot = block * BLOCK + key % BLOCK
    row = index + tl.gather(shift, key // BLOCK, 0)
    tl.store(order + row, slot, mask=slot < slots)
    tl.store(rows + slot, row, mask=slot < slots)


def moe_permute(args: MoePermuteArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_permute``."""
    ids = args.ids
    check_ids(ids, args.num_experts)
    slots, experts = ids.numel(), args.num_local_experts
    order = ids.new_empty((slots,), dtype=torch.int32)
    offsets = ids.new_empty((experts + 1,), dtype=torch.int32)
    rows = ids.new_empty(ids.shape, dtype=torch.int32)
    if slots == 0:
        return order, offsets.zero_(), rows
    ids = ids.contiguous()
    if slots > _RANKED_SLOTS:
        _permute_blocks(ids, order, offsets, rows, args.first_expert)
        return order, offsets, rows
    block = max(16, min(1024, launch_options.power_of_two(slots)))
    with launch_options.on(ids):
        _count_kernel[(triton.cdiv(slots + experts + 1, _QUERIES),)](
            ids,
            order,
            offsets,
            rows,
            slots,
            args.first_expert,
            EXPERTS=experts,
            QUERIES=_QUERIES,
            BLOCK=block,
            num_warps=max(1, block // 256),
            **launch_options.options(ids),
        )
    return order, offsets, rows


def _permute_blocks(
    ids: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor, first: int
) -> None:
    slots, experts = ids.numel(), offsets.shape[0] - 1
    blocks = triton.cdiv(slots, _BLOCK)
    bins = launch_options.power_of_two(experts + 2)
    columns = min(bins, 32)
    counts = ids.new_empty((blocks, bins), dtype=torch.int32)
    totals = ids.new_empty((bins,), dtype=torch.int32)
    sizes = {"EXPERTS": experts, "BINS": bins, "BLOCK": _BLOCK}
    options = launch_options.options(ids)
    with launch_options.on(ids):
        _histogram_kernel[(blocks,)](ids, counts, slots, first, **sizes, num_warps=1, **options)
        _scan_kernel[(bins // columns,)](
            counts,
            totals,
            blocks,
            BINS=bins,
            COLUMNS=columns,
            CHUNK=min(256, launch_options.power_of_two(blocks)),
            num_warps=8,
            **options,
        )
        _scatter_kernel[(blocks,)](
            ids, counts, totals, order, offsets, rows, slots, first, **sizes, num_warps=1, **options
        )


@fast_launch
@triton.jit(do_not_specialize=["slots", "first", "copying"])
def _sort_kernel(
    x,
    ids,
    weights,
    out,
    row_weight,
    offsets,
    rows,
    slots,
    first,
    stride,
    columns,
    chunks,
    copying,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Ranks as in ``_count_kernel``, each program those it needs: of a token, whose columns it
    copies then, or, from program ``copying`` on, of QUERIES offsets.
    """
    wait_for_inputs(PDL)
    program = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    index = tl.arange(0, QUERIES)
    other = _local_expert(ids, slot, slots, first, EXPERTS) * slots + slot
    if program < copying:
        column = program % chunks * BLOCK + tl.arange(0, BLOCK)
        token = program // chunks
        values = tl.load(x + token.to(tl.int64) * stride + column, mask=column < columns)
        query = token * K + index
        key = _local_expert(ids, query, slots, first, EXPERTS) * slots + query
        rank = tl.sum((other[None, :] < key[:, None]).to(tl.int32), 1)
        line = out + rank[:, None].to(tl.int64) * columns
        inside = (index < K)[:, None] & (column < columns)[None, :]
        tl.store(line + column[None, :], values[None, :], mask=inside)
        # A number per slot: the interpreter takes no mask & a single condition.
        own = index + program % chunks * QUERIES < K
        tl.store(rows + query, rank, mask=own)
        tl.store(row_weight + rank, tl.load(weights + query, mask=own), mask=own)
    else:
        expert = (program - copying) * QUERIES + index
        rank = tl.sum((other[None, :] < (expert * slots)[:, None]).to(tl.int32), 1)
        tl.store(offsets + expert, rank, mask=expert <= EXPERTS)


def moe_sort(
    args: MoeSortArgs, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_sort``."""
    x, ids, weights = args.x, args.ids, args.weights
    slots, columns = ids.numel(), x.shape[1]
    out = x.new_empty((slots, columns)) if out is None else out
    row_weight = weights.new_empty((slots,))
    weights = weights.contiguous()
    if slots > _FUSED_SLOTS or out.numel() == 0:
        _, offsets, rows = moe_permute(
            MoePermuteArgs(ids, args.num_experts, args.first_expert, args.num_local_experts)
        )
        if slots:
            gather_rows(x, rows, out, weights, row_weight)
        return out, row_weight, offsets, rows
    check_ids(ids, args.num_experts)
    offsets = ids.new_empty((args.num_local_experts + 1,), dtype=torch.int32)
    rows = ids.new_empty(ids.shape, dtype=torch.int32)
    source, (tokens, top_k) = row_tiles.as_rows(x), ids.shape
    block = min(256, launch_options.power_of_two(columns))
    chunks = triton.cdiv(columns, block)
    # At least K, which the kernel counts on.
    queries = launch_options.power_of_two(max(top_k, _QUERIES))
    copying = tokens * chunks
    with launch_options.on(x):
        _sort_kernel[(copying + triton.cdiv(args.num_local_experts + 1, queries),)](
            source,
            ids.contiguous(),
            weights,
            out,
            row_weight,
            offsets,
            rows,
            slots,
            args.first_expert,
            source.stride(0),
            columns,
            chunks,
            copying,
            EXPERTS=args.num_local_experts,
            K=top_k,
            QUERIES=queries,
            SLOTS=max(16, launch_options.power_of_two(slots)),
            BLOCK=block,
            num_warps=row_tiles.chunk_warps(block),
            **launch_options.options(x),
        )
    return out, row_weight, offsets, rows
