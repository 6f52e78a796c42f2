"""Kernels of ``dsv4.ops.norm``: one program per row, the row in registers, one pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.ops.norm import HeadNormRopeArgs, RmsNormArgs, RmsNormPairArgs, RmsNormQuantizeArgs
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
    narrowed,
    rounded,
    scale_offset,
)
from dsv4.triton._lib.nvfp4_tile import (
    TOKEN,
    Output,
    blank_tile,
    block_peaks,
    load_pieces,
    loaded_coordinates,
    own_coordinates,
    own_part,
    quantize_tile,
)
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._lib.rms import broadcast_total, inverse_rms, shared_sum
from dsv4.triton._lib.rotation import load_angles, rotate_pairs
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

# From here on, rows or heads share programs or threads.
_FEW_ROWS = 2048
_WIDE = 64


@triton.jit
def inverse_rms_of(values, columns, eps, DTYPE: tl.constexpr):
    """Return it for rows ``[ROWS, BLOCK]`` loaded as DTYPE: ``[ROWS, 1]`` or ``[1, BLOCK]``."""
    ROWS: tl.constexpr = values.shape[0]
    BLOCK: tl.constexpr = values.shape[1]
    SPAN: tl.constexpr = 32 * 128 // DTYPE.primitive_bitwidth  # 16 bytes to a thread
    if ROWS == 1 and BLOCK >= 4 * SPAN:
        total = shared_sum(tl.reshape(values * values, [BLOCK]), SPAN)
        return tl.reshape(broadcast_total(inverse_rms(total, columns, eps), BLOCK), [1, BLOCK])
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return inverse_rms(tl.sum(values * values, 1), columns, eps)[:, None]


@triton.jit
def _norm_rows(
    x,
    weight,
    out,
    stride,
    row,
    rows,
    columns,
    eps,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norms of the rows ``row [ROWS, 1]`` (int64) of ``x`` to those of ``out``.

    Rows and weight are loaded before anything is added up: behind the barrier of the sum, the
    weight would cost a second trip to memory.
    """
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * stride + column, mask=inside, other=0.0)
    if WEIGHTED:
        factor = widen(tl.load(weight + column, mask=column < columns, other=0.0))
    values = widen(values)
    values = values * inverse_rms_of(values, columns, eps, x.dtype.element_ty)
    if WEIGHTED:
        values = factor * values
    tl.store(out + row * columns + column, narrow(values, out.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    weight,
    out,
    stride,
    rows,
    columns,
    eps,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if WEIGHTED and tl.program_id(0) == 0:
        prefetch_row(weight, columns, BLOCK)
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        _norm_rows(x, weight, out, stride, row, rows, columns, eps, WEIGHTED, BLOCK)


def rms_norm(args: RmsNormArgs) -> torch.Tensor:
    """See ``dsv4.ops.norm.rms_norm``."""
    x, weight = args.x, args.weight
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = row_tiles.as_rows(x)
    count, columns = rows.shape
    tile = row_tiles.tile(count, columns, x.element_size())
    programs, warps = triton.cdiv(count, tile["ROWS"]), tile["num_warps"]
    # No loop for them: in a loop the loads of a row that 16 warps share would be separated, and the
    # loop would end with a barrier.
    small = warps < 16 and launch_options.is_small(programs, warps)
    weight = None if weight is None else weight.contiguous()
    with launch_options.on(x):
        _rms_norm_kernel[(programs,)](
            rows,
            weight,
            out,
            rows.stride(0),
            count,
            columns,
            args.eps,
            WEIGHTED=weight is not None,
            BLOCK=launch_options.power_of_two(columns),
            **tile,
            **launch_options.options(x, small=small),
        )
    return out


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _pair_kernel(
    x,
    first_weight,
    second_weight,
    first,
    second,
    stride,
    rows,
    eps,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Even programs take the first parts of their rows, odd ones the second."""
    part = tl.program_id(0) % 2
    if tl.program_id(0) == 0:
        prefetch_row(first_weight, FIRST, FIRST_BLOCK)
        prefetch_row(second_weight, SECOND, SECOND_BLOCK)
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        row = (tl.program_id(0) // 2).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        if part == 0:
            _norm_rows(x, first_weight, first, stride, row, rows, FIRST, eps, True, FIRST_BLOCK)
        else:
            x2 = x + FIRST
            _norm_rows(
                x2, second_weight, second, stride, row, rows, SECOND, eps, True, SECOND_BLOCK
            )


def rms_norm_pair(args: RmsNormPairArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.norm.rms_norm_pair``."""
    x = args.x
    widths = args.first_weight.shape[0], args.second_weight.shape[0]
    first, second = (x.new_empty((*x.shape[:-1], width)) for width in widths)
    rows = row_tiles.as_rows(x)
    if rows.shape[0] == 0 or x.shape[-1] == 0:
        return first, second
    tile = row_tiles.tile(rows.shape[0], max(widths), x.element_size())
    programs = 2 * triton.cdiv(rows.shape[0], tile["ROWS"])
    with launch_options.on(x):
        _pair_kernel[(programs,)](
            rows,
            args.first_weight.contiguous(),
            args.second_weight.contiguous(),
            first,
            second,
            rows.stride(0),
            rows.shape[0],
            args.eps,
            FIRST=widths[0],
            SECOND=widths[1],
            FIRST_BLOCK=launch_options.power_of_two(widths[0]),
            SECOND_BLOCK=launch_options.power_of_two(widths[1]),
            **tile,
            **launch_options.options(x, small=launch_options.is_small(programs, tile["num_warps"])),
        )
    return first, second


@triton.jit
def norm_rotate_heads(
    program,
    q,
    token_stride,
    head_stride,
    cos,
    sin,
    table_stride,
    heads,
    count,
    eps,
    UNROTATED: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS heads in place. A pair is rotated by the thread that loaded it, so every address has one
    reader and one writer, the same thread.

    Where UNROTATED is odd, the tile begins one column before the head, so that pairs begin at even
    columns. ``program`` is the number among the programs of heads.
    """
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        head = program * ROWS + tl.arange(0, ROWS)[:, None]
        token = (head // heads).to(tl.int64)
        column = tl.arange(0, BLOCK)[None, :] - UNROTATED % 2
        pair = tl.arange(0, BLOCK // 2)[None, :] - (UNROTATED + 1) // 2
        inside = (head < count) & (column < UNROTATED + 2 * HALF)
        if UNROTATED % 2:
            inside = inside & (column >= 0)
        address = q + token * token_stride + (head % heads).to(tl.int64) * head_stride + column
        loaded = tl.load(address, mask=inside, other=0.0)
        rotating = (head < count) & (pair >= 0) & (pair < HALF)
        c, s = load_angles(cos, sin, token * table_stride, pair, rotating, False)
        values = widen(loaded)
        scale = inverse_rms(tl.sum(values * values, 1), UNROTATED + 2 * HALF, eps)[:, None]
        normed = rounded(values * scale, q.dtype.element_ty)
        even, odd = tl.split(tl.reshape(normed, [ROWS, BLOCK // 2, 2]))
        first, second = rotate_pairs(even, odd, c, s)
        # Rotation by 0 would lose the sign of a zero.
        rotated = tl.join(tl.where(rotating, first, even), tl.where(rotating, second, odd))
        rotated = narrowed(tl.reshape(rotated, [ROWS, BLOCK]), q.dtype.element_ty)
        tl.store(address, rotated, mask=inside)


@fast_launch
@triton.jit(do_not_specialize=["count"])
def _head_kernel(
    q,
    token_stride,
    head_stride,
    cos,
    sin,
    table_stride,
    heads,
    count,
    eps,
    UNROTATED: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    norm_rotate_heads(
        tl.program_id(0),
        q,
        token_stride,
        head_stride,
        cos,
        sin,
        table_stride,
        heads,
        count,
        eps,
        UNROTATED,
        HALF,
        ROWS,
        BLOCK,
        PDL,
    )


def _head_tile(count: int, width: int) -> dict[str, int]:
    """Heads of a program, whose width is in bytes, and its warps: no more than 4 KiB to a warp.

    So up to 4 KiB are added up without a barrier. Few heads are spread over more programs.
    """
    width = launch_options.power_of_two(width)
    most = 1 if count < _FEW_ROWS else 2 if count < 16 * _FEW_ROWS else 4096
    return {
        "ROWS": min(most, max(1, 4096 // width)),
        "num_warps": min(16, max(1, width // 4096)),
    }


@dataclass(frozen=True)
class Heads:
    """Launch arguments of ``norm_rotate_heads``.

    Attributes:
        programs: Programs.
        warps: Warps of a program.
        arguments: Positional arguments, from ``q`` to ``count``.
        constants: Its constants but ``PDL``.
    """

    programs: int
    warps: int
    arguments: tuple[Any, ...]
    constants: dict[str, int]

    @classmethod
    def of(cls, args: HeadNormRopeArgs) -> Heads:
        """Return them for heads that are not empty."""
        q, cos, sin = args.q, args.cos, args.sin
        tokens, heads, columns = q.shape
        count, half = tokens * heads, cos.shape[-1]
        if cos.stride() != sin.stride() or cos.stride(-1) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        unrotated = columns - 2 * half
        tile = _head_tile(count, columns * q.element_size())
        strides = q.stride(0), q.stride(1)
        constants = {
            "UNROTATED": unrotated,
            "HALF": half,
            "ROWS": tile["ROWS"],
            "BLOCK": launch_options.power_of_two(max(2, columns + unrotated % 2)),
        }
        arguments = (q, *strides, cos, sin, cos.stride(0), heads, count)
        return cls(triton.cdiv(count, tile["ROWS"]), tile["num_warps"], arguments, constants)


def head_norm_rope_(args: HeadNormRopeArgs) -> None:
    """See ``dsv4.ops.norm.head_norm_rope_``."""
    q = args.q
    if q.numel() == 0:
        return
    heads = Heads.of(args)
    small = launch_options.is_small(heads.programs, heads.warps)
    with launch_options.on(q):
        _head_kernel[(heads.programs,)](
            *heads.arguments,
            args.eps,
            **heads.constants,
            num_warps=heads.warps,
            **launch_options.options(q, small=small),
        )


@triton.jit
def _halves(row, chunk, BLOCKS: tl.constexpr):
    """Return where in a row the first 8 columns of a chunk's blocks of 16 are, ``[BLOCKS, 8]``.

    So a thread has whole blocks, in two loads of 16 bytes each.
    """
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    return row + (block * 16)[:, None] + tl.arange(0, 8)[None, :]


@triton.jit
def _load_chunks(row, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Halves of the blocks of a row, a tuple of ``[BLOCKS, 8]``: two of them for each chunk."""
    halves = ()
    for chunk in tl.static_range(CHUNKS):
        address = _halves(row, chunk, BLOCKS)
        inside = (chunk * BLOCKS + tl.arange(0, BLOCKS) < COLUMNS // 16)[:, None]
        first = tl.load(address, mask=inside, other=0.0)
        last = tl.load(address + 8, mask=inside, other=0.0)
        halves += (first, last)  # type: ignore[assignment]
    return halves


@triton.jit
def _norm_chunks(
    halves,
    weights,
    scale,
    y,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Store the norm; its halves in the dtype of ``y``, and the largest magnitude of each block."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    normed = ()
    peaks = ()
    for chunk in tl.static_range(CHUNKS):
        first = widen(weights[2 * chunk]) * (widen(halves[2 * chunk]) * scale)
        last = widen(weights[2 * chunk + 1]) * (widen(halves[2 * chunk + 1]) * scale)
        first, last = narrowed(first, DTYPE), narrowed(last, DTYPE)
        peak = larger(largest(first), largest(last))
        peaks += (peak,)  # type: ignore[assignment]
        inside = (chunk * BLOCKS + tl.arange(0, BLOCKS) < COLUMNS // 16)[:, None]
        address = _halves(y, chunk, BLOCKS)
        tl.store(address, first, mask=inside)
        tl.store(address + 8, last, mask=inside)
        normed += (first, last)  # type: ignore[assignment]
    return normed, peaks


@triton.jit
def _code_chunks(
    chunks,
    shared,
    to,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CONVERT: tl.constexpr,
    MODERATE: tl.constexpr,
):
    # Codes and scales of a row, from what ``_norm_chunks`` returned.
    normed, peaks = chunks
    codes, scales, row = to
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        inside = block < COLUMNS // 16
        amax, finite = finite_amax(peaks[chunk])
        bits, product = block_scales(amax, finite, shared, False, MODERATE)
        first = e2m1_codes(normed[2 * chunk], product, CONVERT, MODERATE)
        last = e2m1_codes(normed[2 * chunk + 1], product, CONVERT, MODERATE)
        both = tl.reshape(tl.permute(tl.join(first, last), (0, 2, 1)), [BLOCKS, 8])
        address = codes + row * (COLUMNS // 2) + (block * 8)[:, None] + tl.arange(0, 8)[None, :]
        tl.store(address, both, mask=inside[:, None])
        address = scales + scale_offset(row, block, SCALE_COLUMNS, SWIZZLED)
        tl.store(address, tl.where(inside, bits, 0).to(tl.uint8), mask=block < SCALE_COLUMNS)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _norm_quantize_few_kernel(
    x,
    weight,
    y,
    stride,
    eps,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    partials,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTIALS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """CHUNKS programs to a row: each adds up its squares, and codes and stores a part of its norm.

    A thread has 8 columns of that part, two threads a block.
    """
    if tl.program_id(0) == 0:
        prefetch_row(weight, COLUMNS, 8 * WHOLE)
    number = tl.program_id(0) - rows * CHUNKS
    if number >= 0:
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            blank_tile(scales, rows, scale_rows, scale_columns, number, 2 * BLOCKS)
    else:
        N: tl.constexpr = 2 * BLOCKS
        _, row, piece = loaded_coordinates(1, BLOCKS, CHUNKS, WHOLE)
        _, own_row, own_piece = own_coordinates(1, BLOCKS, CHUNKS)
        chunk = tl.program_id(0) % CHUNKS
        own = own_piece < COLUMNS // 8
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            loaded = load_pieces(x, stride, row, piece, piece < COLUMNS // 8)
            if SOURCE == TOKEN:
                factor = load_pieces(weight, 0, piece * 0, piece, piece < COLUMNS // 8)
            else:
                factor = load_pieces(weight, 0, own_piece * 0, own_piece, own)
            here = arrival(factor, N)
            if SOURCE != TOKEN:
                peaks_or_scale = tl.load(source + (tl.program_id(0) // CHUNKS if PER_ROW else 0))
                here |= arrival(peaks_or_scale, N)
            loaded = once_here(loaded, here)
            values = widen(loaded)
            square = tl.sum(values * values, 1)
            if SOURCE != TOKEN:
                values = widen(own_part(loaded, chunk, N))
            if WHOLE >= 64:
                rms = inverse_rms(shared_sum(square, 32), COLUMNS, eps)
                rms = broadcast_total(rms, values.shape[0])[:, None]
            else:
                rms = inverse_rms(tl.sum(square, 0), COLUMNS, eps)
            normed = narrowed(widen(factor) * (values * rms), y.dtype.element_ty)
            if SOURCE == TOKEN:
                peaks_or_scale = block_peaks(normed)
                normed = own_part(normed, chunk, N)
            address = y + (own_row * COLUMNS + own_piece * 8)[:, None] + tl.arange(0, 8)[None, :]
            tl.store(address, normed, mask=own[:, None])
            quantize_tile(
                normed,
                peaks_or_scale,
                (source, codes, scales, total, rows, blocks, scale_rows, scale_columns, partials),
                SOURCE,
                PER_ROW,
                WEIGHT,
                SWIZZLED,
                ROWS,
                BLOCKS,
                CHUNKS,
                PARTIALS,
                CONVERT,
            )


@triton.jit
def _norm_quantize_row(
    x,
    weight,
    source,
    y,
    codes,
    scales,
    total,
    row,
    eps,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    TOKEN: tl.constexpr,
    PER_ROW: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """The norm of the row at ``x`` rounded to the dtype of ``y``, and that quantised."""
    halves = _load_chunks(x, COLUMNS, BLOCKS, CHUNKS)
    if not TOKEN:
        shared = tl.load(source + (row if PER_ROW else 0))
    square = tl.zeros([BLOCKS], tl.float32)
    for half in tl.static_range(2 * CHUNKS):
        wide = widen(halves[half])
        square += tl.sum(wide * wide, 1)
    scale = inverse_rms(tl.sum(square, 0), COLUMNS, eps)
    # A row takes many registers, so the weight waits until it is used: it is in the cache.
    weights = _load_chunks(weight, COLUMNS, BLOCKS, CHUNKS)
    normed, peaks = _norm_chunks(halves, weights, scale, y, COLUMNS, BLOCKS, CHUNKS)
    if TOKEN:
        peak = tl.zeros([BLOCKS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            peak = tl.maximum(peak, finite_amax(peaks[chunk])[0])
        shared = dynamic_scale(tl.max(peak, 0))
    if PER_ROW or row == 0:
        tl.store(total + (row if PER_ROW else 0), shared)
    both, to = (normed, peaks), (codes, scales, row)
    if is_moderate(shared):
        _code_chunks(
            both, shared, to, COLUMNS, SCALE_COLUMNS, SWIZZLED, BLOCKS, CHUNKS, CONVERT, True
        )
    else:
        _code_chunks(
            both, shared, to, COLUMNS, SCALE_COLUMNS, SWIZZLED, BLOCKS, CHUNKS, CONVERT, False
        )


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _norm_quantize_kernel(
    x,
    weight,
    source,
    y,
    codes,
    scales,
    total,
    stride,
    rows,
    eps,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    TOKEN: tl.constexpr,
    PER_ROW: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm and quantise one row per program. Padding rows of the scales' layout get scales 0."""
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        prefetch_row(weight, COLUMNS, 16 * BLOCKS)
    wait_for_inputs(PDL)
    if row < rows:
        _norm_quantize_row(
            x + row * stride,
            weight,
            source,
            y + row * COLUMNS,
            codes,
            scales,
            total,
            row,
            eps,
            COLUMNS,
            SCALE_COLUMNS,
            TOKEN,
            PER_ROW,
            SWIZZLED,
            BLOCKS,
            CHUNKS,
            CONVERT,
        )
    else:
        for chunk in tl.static_range(CHUNKS):
            block = chunk * BLOCKS + tl.arange(0, BLOCKS)
            address = scales + scale_offset(row, block, SCALE_COLUMNS, SWIZZLED)
            tl.store(address, tl.zeros([BLOCKS], tl.uint8), mask=block < SCALE_COLUMNS)


def _quantize_tile(rows: int, blocks: int) -> dict[str, int]:
    """Blocks of a chunk, and chunks of a row; one while rows are few, which have their own kernel.

    Many rows: several blocks to a thread, so that more programs, each at another step, share a
    SM; but a thread's blocks are in its registers.
    """
    least = launch_options.power_of_two(triton.cdiv(blocks, 4))
    across = min(512, launch_options.power_of_two(blocks))
    if rows >= _FEW_ROWS // 8:
        across = min(across, max(_WIDE, least))
    chunks = triton.cdiv(blocks, across)
    return {"BLOCKS": across, "CHUNKS": chunks, "num_warps": max(1, across // 32)}


def rms_norm_quantize(
    args: RmsNormQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.norm.rms_norm_quantize``."""
    x = args.x
    rows, columns = x.shape
    out = Output.empty(x, columns, args.global_scale, args.scaling, args.layout)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows == 0:
        return y, *out.without_rows()
    swizzled = args.layout == formats.SWIZZLED
    high = nvfp4.scale_rows(rows, swizzled)
    wide = nvfp4.scale_columns(columns // 16, swizzled)
    source = row_tiles.as_rows(x)
    tile = _quantize_tile(rows, wide)
    with launch_options.on(x):
        if tile["CHUNKS"] == 1:
            out = replace(out, normed=True)
            _norm_quantize_few_kernel[out.grid](
                source,
                args.weight.contiguous(),
                y,
                source.stride(0),
                args.eps,
                *out.arguments,
                COLUMNS=columns,
                WHOLE=out.whole,
                **{**out.options, **launch_options.options(x, small=True)},
            )
            return y, *out.tensors
        _norm_quantize_kernel[(high,)](
            source,
            args.weight.contiguous(),
            out.source,
            y,
            out.codes,
            out.scales.view(torch.uint8),
            out.total,
            source.stride(0),
            rows,
            args.eps,
            COLUMNS=columns,
            SCALE_COLUMNS=wide,
            TOKEN=out.source is None,
            PER_ROW=out.source is None or out.total.shape[0] != 1,
            SWIZZLED=swizzled,
            CONVERT=nvfp4.conversion(x),
            **tile,
            **launch_options.options(x),
        )
    return y, *out.tensors
