"""Kernels of ``dsv4.ops.moe``.

A program owns columns of a token: it reads the token's row once and writes it to each of the
token's sorted rows, or reads the sorted rows and sums them. ``rows`` holds their positions, so each
of these is one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.moe import (
    MoeCombineArgs,
    MoeGatherArgs,
    MoeGatherQuantizeArgs,
    MoePermuteArgs,
    MoeSortArgs,
    check_ids,
)
from dsv4.quant import formats
from dsv4.triton._lib import nvfp4, row_tiles
from dsv4.triton._lib.arrival import arrival, once_here
from dsv4.triton._lib.numerics import narrow, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import (
    block_scales,
    dynamic_scale,
    e2m1_codes,
    finite_amax,
    is_moderate,
    larger,
    largest,
)
from dsv4.triton._lib.nvfp4_tile import (
    block_peaks,
    load_pieces,
    loaded_coordinates,
    of_block,
    over_threads,
    own_coordinates,
    own_part,
    row_peak,
    shared_blocks,
    store_halves,
    store_scales,
    sum_of_all,
    tile_warps,
)
from dsv4.triton._lib.words import word_of
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_RANKED_SLOTS = 4096  # slots up to which a slot's rank is found by comparing it with all others
_QUERIES = 8  # ranks that one program finds then
_BLOCK = 256  # slots of one program above, by histogram, scan and scatter
_FUSED_SLOTS = 512  # slots up to which one launch sorts and copies rows
_SEPARATE_TOKENS = 32  # tokens up to which each slot has a program of its own to quantise it
_FEW_PROGRAMS = 256  # programs that quantise up to which a row has many threads
_CLEARED_WORDS = 4096  # words of experts' swizzled scales that a program clears
_WARP_CLEARED_WORDS = 512  # words that a warp clears, where several programs share a row
_CLEARING_BLOCKS = 64  # blocks of a row that a program codes where others clear


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
@triton.jit
def _gather_kernel(
    x,
    rows,
    out,
    weights,
    row_weight,
    stride,
    columns,
    chunks,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of a token to SHARE of its K sorted rows; maybe what its slots weigh, too."""
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    first = token * K + tl.program_id(1) * SHARE
    # All loads come before the first store, because the compiler moves no load across a store.
    targets = ()
    for j in tl.static_range(SHARE):
        targets += (tl.load(rows + first + j).to(tl.int64),)  # type: ignore[assignment]
    values = tl.load(x + token * stride + column, mask=column < columns)
    for j in tl.static_range(SHARE):
        offset = targets[j] * columns + column  # type: ignore[misc]
        tl.store(out + offset, values, mask=column < columns)
        if WEIGHTED:
            alone = tl.program_id(0) % chunks == 0
            tl.store(row_weight + targets[j], tl.load(weights + first + j), mask=alone)


def _chunks(tokens: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Columns per program, and programs per token: small ones while there are few tokens."""
    block = 1024 if tokens * columns >= 1024 * 4 * launch_options.sm_count(device) else 256
    block = min(block, launch_options.power_of_two(columns))
    return block, max(1, triton.cdiv(columns, block))


def _warps(block: int) -> int:
    """A thread takes 8 columns."""
    return max(1, block // 256)


def moe_gather(args: MoeGatherArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_gather``."""
    out = args.x.new_empty((args.rows.numel(), args.x.shape[1])) if out is None else out
    if out.numel():
        _gather(args.x, args.rows.contiguous(), out, None, None)
    return out


def _gather(
    x: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    row_weight: torch.Tensor | None,
) -> None:
    (tokens, columns), source = x.shape, row_tiles.as_rows(x)
    block, chunks = _chunks(tokens, columns, x.device)
    # While programs do not fill the GPU, every row of a token has a program of its own.
    share = 1 if tokens * chunks < launch_options.sm_count(x.device) else rows.shape[1]
    with launch_options.on(x):
        _gather_kernel[(tokens * chunks, rows.shape[1] // share)](
            source,
            rows,
            out,
            weights,
            row_weight,
            source.stride(0),
            columns,
            chunks,
            K=rows.shape[1],
            SHARE=share,
            BLOCK=block,
            WEIGHTED=weights is not None,
            num_warps=_warps(block),
            **launch_options.options(x),
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
            _gather(x, rows, out, weights, row_weight)
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
            num_warps=_warps(block),
            **launch_options.options(x),
        )
    return out, row_weight, offsets, rows


@triton.jit
def _expert_of(offsets, row, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The expert that owns a sorted row: the number of those that end before it or at it."""
    expert = tl.arange(0, BLOCK)
    end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0x7FFFFFFF)
    return tl.sum((end <= row).to(tl.int32), 0)


@triton.jit
def _scale_row(offsets, row, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """The row of a sorted row's scales: PADDED, behind the rows that pad every expert's to 128."""
    scale_row = row
    if PADDED:
        expert = tl.arange(0, BLOCK)
        start = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
        end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0x7FFFFFFF)
        scale_row += tl.sum(tl.where(end <= row, (start - end) & 127, 0), 0)
    return scale_row


@triton.jit
def _clear_part(
    scales,
    offsets,
    number,
    WORDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Zeros behind an expert's rows in a part, of CLEARED words, of a tile of 128 rows' scales.

    WORDS are in such a tile.
    """
    parts: tl.constexpr = (WORDS + CLEARED - 1) // CLEARED
    tile = number // parts
    expert = tl.arange(0, BLOCK)
    start = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0)
    tiles = (end - start + 127) // 128
    before = tl.cumsum(tiles, 0) - tiles
    # Rows that the tile's owner has from this tile on; 0 of a tile that no expert has.
    own = (before <= tile) & (tile < before + tiles) & (expert < EXPERTS)
    rows = sum_of_all(tl.where(own, end - start - (tile - before) * 128, 0).to(tl.int32))
    word = number % parts * CLEARED + tl.arange(0, CLEARED)
    row = word % 128 // 4 + word % 4 * 32
    address = scales.to(tl.pointer_type(tl.uint32)) + tile * WORDS + word
    empty = tl.zeros([CLEARED], tl.uint32)
    tl.store(address, empty, mask=(word < WORDS) & (row >= rows))


@triton.jit
def _store_row(
    halves,
    peaks,
    scale,
    codes,
    scales,
    slots,
    offsets,
    local,
    padded,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CONVERT: tl.constexpr,
    MODERATE: tl.constexpr,
):
    """Codes and scale bytes of one token to its rows below ``local``.

    All chunks are coded before any is stored: the row's position in the scales is a search among
    all experts, which every chunk would repeat, and codes take fewer registers than values.
    """
    line = tl.zeros([BLOCKS], tl.int64)
    coded = ()
    for chunk in tl.static_range(CHUNKS):
        amax, finite = finite_amax(peaks[chunk])
        bits, product = block_scales(amax, finite, scale, False, MODERATE)
        first = e2m1_codes(widen(halves[2 * chunk]), product, CONVERT, MODERATE)
        last = e2m1_codes(widen(halves[2 * chunk + 1]), product, CONVERT, MODERATE)
        coded += (first, last, bits)  # type: ignore[assignment]
    for j in range(SLOTS):
        row = tl.load(slots + j).to(tl.int64)
        if row < local:
            scale_row = line + _scale_row(offsets, row, EXPERTS, EXPERT_BLOCK, PADDED)
            for chunk in tl.static_range(CHUNKS):
                block = chunk * BLOCKS + tl.arange(0, BLOCKS)
                inside = block < COLUMNS // 16
                first, last, bits = coded[3 * chunk], coded[3 * chunk + 1], coded[3 * chunk + 2]
                store_halves(codes, line + row, COLUMNS // 16, block, first, last, inside)
                store_scales(
                    scales, bits, scale_row, block, inside, padded, SCALE_COLUMNS, SWIZZLED
                )


@triton.jit
def _code_few(
    values,
    amax,
    finite,
    scale,
    codes,
    scales,
    targets,
    lines,
    local,
    padded,
    piece,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    PADDED: tl.constexpr,
    CONVERT: tl.constexpr,
    MODERATE: tl.constexpr,
):
    """Codes and scale bytes of one token to rows ``targets``, zeros to those from ``local`` on.

    ``lines`` are the rows of their scales; PADDED, a row of no expert has none.
    """
    bits, product = block_scales(amax, finite, scale, False, MODERATE)
    word = word_of(e2m1_codes(values, product, CONVERT, MODERATE))
    inside = piece < COLUMNS // 8
    first = tl.where(piece % 2 == 0, piece // 2, SCALE_COLUMNS)  # of the two that own a block
    for j in tl.static_range(SLOTS):
        used = targets[j] + tl.zeros_like(piece) < local
        address = codes.to(tl.pointer_type(tl.uint32)) + targets[j] * (COLUMNS // 8) + piece
        tl.store(address, tl.where(used, word, 0), mask=inside)
        line = lines[j] + tl.zeros_like(piece).to(tl.int64)
        if PADDED:
            line = tl.where(used, line, padded)  # where no scale is
        store_scales(scales, bits, line, first, inside & used, padded, SCALE_COLUMNS, SWIZZLED)


@triton.jit
def _quantize_few(
    x,
    slots,
    offsets,
    input_scale,
    codes,
    scales,
    total,
    padded,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    STATIC: tl.constexpr,
    SWIZZLED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """A token at ``x`` to SLOTS rows, one thread per 8 columns, so that few tokens have many."""
    expert = tl.arange(0, EXPERT_BLOCK)
    _, _, piece = loaded_coordinates(1, BLOCKS, CHUNKS, WHOLE)
    _, _, own = own_coordinates(1, BLOCKS, CHUNKS)
    loaded = load_pieces(x, 0, piece * 0, piece, piece < COLUMNS // 8)
    local = tl.load(offsets + EXPERTS)
    if PADDED:
        start = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
        end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0x7FFFFFFF)
    targets, lines = (), ()
    for j in tl.static_range(SLOTS):
        row = tl.load(slots + j)
        targets += (row.to(tl.int64),)  # type: ignore[assignment]
        if PADDED:
            row += sum_of_all(tl.where(end <= row, (start - end) & 127, 0))
        lines += (row.to(tl.int64),)  # type: ignore[assignment]
    if WHOLE > 4 * 2 * BLOCKS:
        loaded = once_here(loaded, arrival(loaded, 2 * BLOCKS))
    values = own_part(loaded, tl.program_id(0) % CHUNKS, 2 * BLOCKS)
    amax, finite = finite_amax(of_block(largest(values), 2))
    if STATIC:
        last = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0x7FFFFFFF)
        owner = sum_of_all((last <= targets[0]).to(tl.int32))  # type: ignore[misc]
        owner = tl.minimum(owner, EXPERTS - 1)
        scale = tl.load(input_scale + owner)
    else:
        scale = dynamic_scale(row_peak(over_threads(block_peaks(loaded), 2 * BLOCKS), 1))
    for j in tl.static_range(SLOTS):
        target = targets[j]  # type: ignore[misc, var-annotated]
        tl.store(
            total + target,
            tl.where(target < local, scale, 1.0),
            mask=tl.program_id(0) % CHUNKS == 0,
        )
    if is_moderate(scale):
        _code_few(
            values,
            amax,
            finite,
            scale,
            codes,
            scales,
            targets,
            lines,
            local,
            padded,
            own,
            COLUMNS,
            SCALE_COLUMNS,
            SLOTS,
            SWIZZLED,
            PADDED,
            CONVERT,
            True,
        )
    else:
        _code_few(
            values,
            amax,
            finite,
            scale,
            codes,
            scales,
            targets,
            lines,
            local,
            padded,
            own,
            COLUMNS,
            SCALE_COLUMNS,
            SLOTS,
            SWIZZLED,
            PADDED,
            CONVERT,
            False,
        )


@triton.jit
def _clear_row(
    codes,
    scales,
    row,
    count,
    padded,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Zeros in a row; from row ``count`` on there are scale bytes alone."""
    line = row + tl.zeros([BLOCKS], tl.int64)
    nothing = tl.zeros([BLOCKS], tl.uint8)
    empty = tl.zeros([BLOCKS, 4], tl.uint8)
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        real = (block < COLUMNS // 16) & (line < count)
        store_halves(codes, line, COLUMNS // 16, block, empty, empty, real)
        store_scales(scales, nothing, line, block, real, padded, SCALE_COLUMNS, SWIZZLED)


@triton.jit
def _clear(
    codes,
    scales,
    offsets,
    number,
    count,
    padded,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Zeros in the padding rows of the scales, by program ``number`` past those of slots."""
    if PADDED:
        _clear_part(scales, offsets, number, 32 * SCALE_COLUMNS, EXPERTS, EXPERT_BLOCK, CLEARED)
    else:
        row, end = count + number, padded
        _clear_row(codes, scales, row, count, end, COLUMNS, SCALE_COLUMNS, SWIZZLED, BLOCKS, CHUNKS)


@fast_launch
@triton.jit(do_not_specialize=["programs", "count", "padded"])
def _gather_quantize_kernel(
    x,
    rows,
    offsets,
    input_scale,
    codes,
    scales,
    total,
    stride,
    programs,
    count,
    padded,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    STATIC: tl.constexpr,
    SWIZZLED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    CLEARED: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise a token for SLOTS of its K slots, all of them unless experts have scales.

    Programs past the slots clear the padding rows of the scales. PADDED, these are in every
    expert's last tile, and a row of no expert has none.
    """
    program = tl.program_id(0).to(tl.int64)
    if WHOLE > 0:
        clear = program - programs * CHUNKS
        program = program // CHUNKS
    slots = rows + program * SLOTS
    x += program * SLOTS // K * stride
    if WHOLE > 0:
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            if program < programs:
                _quantize_few(
                    x,
                    slots,
                    offsets,
                    input_scale,
                    codes,
                    scales,
                    total,
                    padded,
                    COLUMNS,
                    SCALE_COLUMNS,
                    SLOTS,
                    EXPERTS,
                    STATIC,
                    SWIZZLED,
                    PADDED,
                    BLOCKS,
                    CHUNKS,
                    WHOLE,
                    EXPERT_BLOCK,
                    CONVERT,
                )
            else:
                _clear(
                    codes,
                    scales,
                    offsets,
                    clear,
                    count,
                    padded,
                    COLUMNS,
                    SCALE_COLUMNS,
                    SWIZZLED,
                    PADDED,
                    EXPERTS,
                    EXPERT_BLOCK,
                    BLOCKS,
                    CHUNKS,
                    CLEARED,
                )
        return
    wait_for_inputs(PDL)
    if program >= programs:
        _clear(
            codes,
            scales,
            offsets,
            program - programs,
            count,
            padded,
            COLUMNS,
            SCALE_COLUMNS,
            SWIZZLED,
            PADDED,
            EXPERTS,
            EXPERT_BLOCK,
            BLOCKS,
            CHUNKS,
            CLEARED,
        )
    else:
        halves = ()
        for chunk in tl.static_range(CHUNKS):
            block = chunk * BLOCKS + tl.arange(0, BLOCKS)
            address = x + block[:, None] * 16 + tl.arange(0, 8)[None, :]
            inside = (block < COLUMNS // 16)[:, None]
            halves += (tl.load(address, mask=inside, other=0.0),)  # type: ignore[assignment]
            halves += (tl.load(address + 8, mask=inside, other=0.0),)  # type: ignore[assignment]
        local = tl.load(offsets + EXPERTS)
        if STATIC:
            expert = _expert_of(offsets, tl.load(slots), EXPERTS, EXPERT_BLOCK)
            scale = tl.load(input_scale + tl.minimum(expert, EXPERTS - 1))
        peaks = ()
        peak = tl.zeros([BLOCKS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            both = larger(largest(halves[2 * chunk]), largest(halves[2 * chunk + 1]))
            peaks += (both,)  # type: ignore[assignment]
            peak = tl.maximum(peak, finite_amax(both)[0])
        if not STATIC:
            scale = dynamic_scale(tl.max(peak, 0))
        if is_moderate(scale):
            _store_row(
                halves,
                peaks,
                scale,
                codes,
                scales,
                slots,
                offsets,
                local,
                padded,
                COLUMNS,
                SCALE_COLUMNS,
                SLOTS,
                SWIZZLED,
                PADDED,
                EXPERTS,
                EXPERT_BLOCK,
                BLOCKS,
                CHUNKS,
                CONVERT,
                True,
            )
        else:
            _store_row(
                halves,
                peaks,
                scale,
                codes,
                scales,
                slots,
                offsets,
                local,
                padded,
                COLUMNS,
                SCALE_COLUMNS,
                SLOTS,
                SWIZZLED,
                PADDED,
                EXPERTS,
                EXPERT_BLOCK,
                BLOCKS,
                CHUNKS,
                CONVERT,
                False,
            )
        for j in range(SLOTS):
            row = tl.load(slots + j).to(tl.int64)
            tl.store(total + row, tl.where(row < local, scale, 1.0))
            if row >= local:
                _clear_row(
                    codes,
                    scales,
                    row,
                    count,
                    0 if PADDED else padded,
                    COLUMNS,
                    SCALE_COLUMNS,
                    SWIZZLED,
                    BLOCKS,
                    CHUNKS,
                )


def _gather_tile(blocks: int, wide: int, programs: int, by_expert: bool) -> dict[str, int]:
    """Blocks of a chunk and chunks of a row; WHOLE: its pieces, where programs share it or are one.

    Few programs are better spread over many threads; in many, a thread computes the common once,
    and WHOLE is 0: each goes through its row chunk by chunk. Those that clear experts' scales are
    as large as the others, and are best small.
    """
    row = launch_options.power_of_two(wide)
    across = min(128, blocks & -blocks)
    if programs > _FEW_PROGRAMS and 32 <= across < row and blocks // across <= 8:
        warps = max(1, across // 32)
        return {"BLOCKS": across, "CHUNKS": wide // across, "WHOLE": 0, "num_warps": warps}
    across = min(row, _CLEARING_BLOCKS) if by_expert else shared_blocks(wide, programs)
    sizes = {"BLOCKS": across, "CHUNKS": triton.cdiv(wide, across), "WHOLE": 2 * row}
    return {**sizes, "num_warps": tile_warps(2 * across)}


def moe_gather_quantize(
    args: MoeGatherQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_gather_quantize``."""
    x, rows = args.x, args.rows
    columns = x.shape[1]
    count, blocks, experts = rows.numel(), columns // 16, args.offsets.shape[0] - 1
    swizzled, by_expert = args.layout != formats.LINEAR, args.layout == formats.SWIZZLED_EXPERTS
    wide = nvfp4.scale_columns(blocks, swizzled)
    tiles = formats.expert_tiles(count, experts)
    padded = 128 * tiles if by_expert else nvfp4.scale_rows(count, swizzled)
    codes = x.new_empty((count, columns // 2), dtype=torch.uint8)
    shape = (padded * wide,) if swizzled else (padded, wide)
    scales = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    total = x.new_empty((count,), dtype=torch.float32)
    if count == 0:
        return codes, scales, total
    source, rows = row_tiles.as_rows(x), rows.contiguous()
    top_k = rows.shape[1]
    slots = top_k if args.input_scale is None and x.shape[0] > _SEPARATE_TOKENS else 1
    tile = _gather_tile(blocks, wide, count // slots, by_expert)
    warps, cleared = tile["num_warps"], _CLEARED_WORDS
    programs = count // slots
    if tile["WHOLE"]:
        programs, cleared = programs * tile["CHUNKS"], _WARP_CLEARED_WORDS * warps
    programs += tiles * triton.cdiv(32 * wide, cleared) if by_expert else padded - count
    with launch_options.on(x):
        _gather_quantize_kernel[(programs,)](
            source,
            rows,
            args.offsets.contiguous(),
            None if args.input_scale is None else args.input_scale.contiguous(),
            codes,
            scales.view(torch.uint8),
            total,
            source.stride(0),
            count // slots,
            count,
            padded,
            COLUMNS=columns,
            SCALE_COLUMNS=wide,
            K=top_k,
            SLOTS=slots,
            EXPERTS=experts,
            STATIC=args.input_scale is not None,
            SWIZZLED=swizzled,
            PADDED=by_expert,
            CLEARED=cleared,
            EXPERT_BLOCK=launch_options.power_of_two(experts),
            CONVERT=nvfp4.conversion(x),
            **tile,
            **launch_options.options(x, small=launch_options.is_small(programs, warps)),
        )
    return codes, scales, total


@fast_launch
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
    token = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
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
            address = shared + token * shared_stride + column
            total += widen(tl.load(address, mask=inside, other=0.0))
        tl.store(out + token * columns + column, narrow(total, out.dtype.element_ty), mask=inside)


def moe_combine(args: MoeCombineArgs) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_combine``."""
    y, shared = args.y, args.shared
    (tokens, top_k), columns = args.rows.shape, y.shape[1]
    out = y.new_empty((tokens, columns), dtype=args.out_dtype)
    if out.numel() == 0:
        return out
    y = row_tiles.as_rows(y)
    shared = None if shared is None else row_tiles.as_rows(shared)
    block, chunks = _chunks(tokens, columns, y.device)
    options = launch_options.options(
        y, small=launch_options.is_small(tokens * chunks, _warps(block))
    )
    if "enable_fp_fusion" in options:
        options["enable_fp_fusion"] = False
    with launch_options.on(y):
        _combine_kernel[(tokens * chunks,)](
            y,
            args.rows.contiguous(),
            args.offsets.contiguous(),
            None if args.weights is None else args.weights.contiguous(),
            shared,
            out,
            y.stride(0),
            0 if shared is None else shared.stride(0),
            columns,
            chunks,
            EXPERTS=args.offsets.shape[0] - 1,
            K=top_k,
            WEIGHTED=args.weights is not None,
            SHARED=shared is not None,
            BLOCK=block,
            num_warps=_warps(block),
            **options,
        )
    return out
