"""Kernels of ``dsv4.ops.moe``.

Rows are moved by token: a token's row is read once and written to each of its sorted rows, or its
sorted rows are read and summed. ``rows`` says where they are, so each of these is one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4 import formats
from dsv4.triton import _launch, _nvfp4, _rows
from dsv4.triton._numerics import narrow, wait_for_inputs, widen
from dsv4.triton._nvfp4 import block_scales, dynamic_scale, e2m1_codes, finite_amax, larger, largest
from dsv4.triton.quantize import _load_halves, _store_halves, _store_scales

_COUNTED = 4096  # slots up to which every slot is compared with every other
_BLOCK = 1024  # slots of one program beyond that


@triton.jit
def _local_expert(ids, slot, slots, first, EXPERTS: tl.constexpr):
    """Local expert of each slot, int32; EXPERTS where it has none, one more past the last slot."""
    found = tl.load(ids + slot, mask=slot < slots, other=-1).to(tl.int64) - first
    local = tl.where((found >= 0) & (found < EXPERTS), found, EXPERTS).to(tl.int32)
    return tl.where(slot < slots, local, EXPERTS + 1)


@triton.jit(do_not_specialize=["slots"])
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
    smaller = tl.zeros([QUERIES, BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        other = _local_expert(ids, slot, slots, first, EXPERTS) * slots + slot
        smaller += (other[None, :] < key[:, None]).to(tl.int32)
    rank = tl.sum(smaller, 1)
    tl.store(order + rank, query, mask=ranked)
    tl.store(rows + query, rank, mask=ranked)
    expert = query - slots
    tl.store(offsets + expert, rank, mask=(expert >= 0) & (expert <= EXPERTS))


@triton.jit(do_not_specialize=["slots"])
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
    place = tl.program_id(0) * BINS + tl.arange(0, BINS)
    tl.store(counts + place, tl.histogram(local, BINS))


@triton.jit(do_not_specialize=["slots"])
def _scatter_kernel(
    ids,
    counts,
    order,
    offsets,
    rows,
    slots,
    first,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort one block of slots; its slots of an expert follow those of the blocks before."""
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    expert = tl.arange(0, BINS)
    everywhere, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for start in range(0, blocks, CHUNK):
        other = (start + tl.arange(0, CHUNK))[:, None]
        count = tl.load(counts + other * BINS + expert[None, :], mask=other < blocks, other=0)
        everywhere += tl.sum(count, 0)
        before += tl.sum(tl.where(other < block, count, 0), 0)
    begin = tl.cumsum(everywhere, 0) - everywhere
    if block == 0:
        tl.store(offsets + expert, begin, mask=expert <= EXPERTS)
    own = tl.load(counts + block * BINS + expert)
    # Where an expert's first slot of this block goes, less where it is in the sorted block.
    shift = begin + before - (tl.cumsum(own, 0) - own)
    place = tl.arange(0, BLOCK)
    local = _local_expert(ids, block * BLOCK + place, slots, first, EXPERTS)
    key = tl.sort(local * BLOCK + place)
    slot = block * BLOCK + key % BLOCK
    row = place + tl.gather(shift, key // BLOCK, 0)
    tl.store(order + row, slot, mask=slot < slots)
    tl.store(rows + slot, row, mask=slot < slots)


def moe_permute(
    ids: torch.Tensor, num_experts: int, first_expert: int, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_permute``."""
    slots, experts = ids.numel(), num_local_experts
    order = ids.new_empty((slots,), dtype=torch.int32)
    offsets = ids.new_empty((experts + 1,), dtype=torch.int32)
    rows = ids.new_empty(ids.shape, dtype=torch.int32)
    if slots == 0:
        return order, offsets.zero_(), rows
    ids = ids.contiguous()
    if slots > _COUNTED:
        _permute_blocks(ids, order, offsets, rows, first_expert)
        return order, offsets, rows
    queries = 8 if slots <= 64 else 32
    with _launch.on(ids):
        _count_kernel[(triton.cdiv(slots + experts + 1, queries),)](
            ids,
            order,
            offsets,
            rows,
            slots,
            first_expert,
            EXPERTS=experts,
            QUERIES=queries,
            BLOCK=min(256, max(16, _launch.power_of_two(slots))),
            num_warps=1 if slots <= 64 else 4,
            **_launch.options(ids),
        )
    return order, offsets, rows


def _permute_blocks(
    ids: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor, first: int
) -> None:
    slots, experts = ids.numel(), offsets.shape[0] - 1
    blocks = triton.cdiv(slots, _BLOCK)
    bins = _launch.power_of_two(experts + 2)
    counts = ids.new_empty((blocks, bins), dtype=torch.int32)
    sizes = {"EXPERTS": experts, "BINS": bins, "BLOCK": _BLOCK}
    with _launch.on(ids):
        _histogram_kernel[(blocks,)](
            ids, counts, slots, first, **sizes, num_warps=4, **_launch.options(ids)
        )
        _scatter_kernel[(blocks,)](
            ids,
            counts,
            order,
            offsets,
            rows,
            slots,
            first,
            **sizes,
            CHUNK=max(1, 8192 // bins),
            num_warps=8,
            **_launch.options(ids),
        )


@triton.jit
def _gather_kernel(
    x,
    rows,
    out,
    stride,
    columns,
    chunks,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of a token to its K sorted rows."""
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * stride + column, mask=column < columns)
    for j in tl.range(0, K, loop_unroll_factor=min(K, 8)):
        row = tl.load(rows + token * K + j).to(tl.int64)
        tl.store(out + row * columns + column, values, mask=column < columns)


def _chunks(tokens: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Columns per program, and programs per token: small ones while there are few tokens."""
    block = 1024 if tokens * columns >= 1024 * 4 * _launch.multiprocessors(device) else 256
    block = min(block, _launch.power_of_two(columns))
    return block, triton.cdiv(columns, block)


def _warps(block: int) -> int:
    """A thread takes 8 columns."""
    return max(1, block // 256)


def moe_gather(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_gather``."""
    tokens, columns = x.shape
    out = x.new_empty((rows.numel(), columns))
    if out.numel() == 0:
        return out
    source, rows = _rows.as_rows(x), rows.contiguous()
    block, chunks = _chunks(tokens, columns, x.device)
    with _launch.on(x):
        _gather_kernel[(tokens * chunks,)](
            source,
            rows,
            out,
            source.stride(0),
            columns,
            chunks,
            K=rows.shape[1],
            BLOCK=block,
            num_warps=_warps(block),
            **_launch.options(x),
        )
    return out


@triton.jit
def _expert_of(offsets, row, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The expert that owns a sorted row: the number of those that end before it or at it."""
    expert = tl.arange(0, BLOCK)
    end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0x7FFFFFFF)
    return tl.sum((end <= row).to(tl.int32), 0)


@triton.jit(do_not_specialize=["tokens", "count", "padded"])
def _gather_quantize_kernel(
    x,
    rows,
    offsets,
    given,
    codes,
    scales,
    total,
    stride,
    tokens,
    count,
    padded,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    STATIC: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token to its K sorted rows of ``count``; programs past the tokens clear padding rows."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    line = tl.zeros([BLOCKS], tl.int64)
    inside = (block < COLUMNS // 16) & (line + token < tokens)
    first, last = _load_halves(x + token * stride, 0, line, block, inside)
    amax, finite = finite_amax(larger(largest(first), largest(last)))
    if not STATIC:
        scale = dynamic_scale(tl.max(amax, 0))
        bits, product = block_scales(amax, finite, scale, False)
        low, high = e2m1_codes(first, product, CONVERT), e2m1_codes(last, product, CONVERT)
    local = tl.load(offsets + EXPERTS)
    repeats = K if token < tokens else 1
    for j in range(repeats):
        row = count + token - tokens
        if token < tokens:
            row = tl.load(rows + token * K + j).to(tl.int64)
        used = (line + row) < local
        if STATIC:
            expert = tl.minimum(_expert_of(offsets, row, EXPERTS, EXPERT_BLOCK), EXPERTS - 1)
            scale = tl.load(given + expert)
            bits, product = block_scales(amax, finite, scale, False)
            product = tl.where(used, product, 0.0)
            low, high = e2m1_codes(first, product, CONVERT), e2m1_codes(last, product, CONVERT)
        _store_halves(
            codes,
            line + row,
            COLUMNS // 16,
            block,
            tl.where(used[:, None], low, 0).to(tl.uint8),
            tl.where(used[:, None], high, 0).to(tl.uint8),
            inside,
        )
        shown = tl.where(used, bits, 0)
        _store_scales(scales, shown, line + row, block, inside, padded, SCALE_COLUMNS, SWIZZLED)
        if token < tokens:
            tl.store(total + row, tl.where(row < local, scale, 1.0))


def moe_gather_quantize(
    x: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    input_scale: torch.Tensor | None,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_gather_quantize``."""
    tokens, columns = x.shape
    count, blocks, swizzled = rows.numel(), columns // 16, layout == formats.SWIZZLED
    padded = _nvfp4.scale_rows(count, swizzled)
    wide = _nvfp4.scale_columns(blocks, swizzled)
    codes = x.new_empty((count, columns // 2), dtype=torch.uint8)
    shape = (padded * wide,) if swizzled else (padded, wide)
    scales = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    total = x.new_empty((count,), dtype=torch.float32)
    if count == 0:
        return codes, scales, total
    source, rows = _rows.as_rows(x), rows.contiguous()
    experts = offsets.shape[0] - 1
    with _launch.on(x):
        _gather_quantize_kernel[(tokens + padded - count,)](
            source,
            rows,
            offsets.contiguous(),
            None if input_scale is None else input_scale.contiguous(),
            codes,
            scales.view(torch.uint8),
            total,
            source.stride(0),
            tokens,
            count,
            padded,
            COLUMNS=columns,
            SCALE_COLUMNS=wide,
            K=rows.shape[1],
            EXPERTS=experts,
            STATIC=input_scale is not None,
            SWIZZLED=swizzled,
            BLOCKS=_launch.power_of_two(wide),
            EXPERT_BLOCK=_launch.power_of_two(experts),
            CONVERT=_nvfp4.conversion(x),
            num_warps=min(16, max(1, _launch.power_of_two(wide) // 32)),
            **_launch.options(x),
        )
    return codes, scales, total


@triton.jit
def _combine_kernel(
    y,
    rows,
    offsets,
    weights,
    shared,
    out,
    stride,
    shared_stride,
    columns,
    chunks,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of a token. Compiled without contraction: a product is rounded, then added."""
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    local = tl.load(offsets + EXPERTS)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.range(0, K, loop_unroll_factor=min(K, 8)):
        row = tl.load(rows + token * K + j).to(tl.int64)
        # A condition per column: the interpreter takes a mask & a single one for no mask.
        used = (row + tl.zeros([BLOCK], tl.int64)) < local
        term = widen(tl.load(y + row * stride + column, mask=inside & used, other=0.0))
        if WEIGHTED:
            term *= widen(tl.load(weights + token * K + j))
        total = tl.where(used, total + term, total)
    if SHARED:
        total += widen(tl.load(shared + token * shared_stride + column, mask=inside, other=0.0))
    tl.store(out + token * columns + column, narrow(total, out.dtype.element_ty), mask=inside)


def moe_combine(
    y: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_combine``."""
    (tokens, top_k), columns = rows.shape, y.shape[1]
    out = y.new_empty((tokens, columns), dtype=out_dtype)
    if out.numel() == 0:
        return out
    y = _rows.as_rows(y)
    shared = None if shared is None else _rows.as_rows(shared)
    block, chunks = _chunks(tokens, columns, y.device)
    options = _launch.options(y)
    if "enable_fp_fusion" in options:
        options["enable_fp_fusion"] = False
    with _launch.on(y):
        _combine_kernel[(tokens * chunks,)](
            y,
            rows.contiguous(),
            offsets.contiguous(),
            None if weights is None else weights.contiguous(),
            shared,
            out,
            y.stride(0),
            0 if shared is None else shared.stride(0),
            columns,
            chunks,
            EXPERTS=offsets.shape[0] - 1,
            K=top_k,
            WEIGHTED=weights is not None,
            SHARED=shared is not None,
            BLOCK=block,
            num_warps=_warps(block),
            **options,
        )
    return out
