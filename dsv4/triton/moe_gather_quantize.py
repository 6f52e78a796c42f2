"""Kernel of ``moe_gather_quantize`` of ``dsv4.ops.moe``: tokens, quantised, to their sorted rows.

Many programs: each takes one token, chunk by chunk, and stores its codes in each of its rows. Few
programs (``WHOLE``): a thread takes 8 columns, and several programs share a token. Programs past
those of tokens clear padding rows of the scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.moe import MoeGatherQuantizeArgs
from dsv4.quant import formats
from dsv4.triton._lib import nvfp4, row_tiles
from dsv4.triton._lib.arrival import arrival, once_here
from dsv4.triton._lib.numerics import once, wait_for_inputs, widen
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
from dsv4.triton._lib.sorted_scales import clear_padding, clear_row, expert_of, scale_row_of
from dsv4.triton._lib.words import word_of
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_SEPARATE_TOKENS = 32  # tokens up to which each slot has a program of its own to quantise it
_FEW_PROGRAMS = 256  # programs that quantise up to which a row has many threads
_CLEARED_WORDS = 4096  # words of experts' swizzled scales that a program clears
_WARP_CLEARED_WORDS = 512  # words that a warp clears, where several programs share a row
_CLEARING_BLOCKS = 64  # blocks of a row that a program codes where others clear


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
            scale_row = line + scale_row_of(offsets, row, EXPERTS, EXPERT_BLOCK, PADDED)
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
                clear_padding(
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
        clear_padding(
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
            expert = expert_of(offsets, tl.load(slots), EXPERTS, EXPERT_BLOCK)
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
                clear_row(
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
