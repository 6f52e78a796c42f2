"""Kernels that quantise to NVFP4, MXFP4 and FP8 in 128x128 blocks: see ``dsv4.ops.quantize``."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from dsv4.ops.quantize import QuantizeFp8BlockArgs, QuantizeMxfp4Args, QuantizeNvfp4Args
from dsv4.quant import formats
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.arrival import arrival, once_here
from dsv4.triton._lib.fp8_token import inverse_of_byte, power_of_two_byte
from dsv4.triton._lib.numerics import e4m3_bits, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import (
    conversion,
    divisor,
    finite_amax,
    fp8_block_scale,
    larger,
    largest,
    scale_columns,
    scale_rows,
    scaled_codes,
)
from dsv4.triton._lib.nvfp4_tile import (
    TOKEN,
    Output,
    are_many,
    as_bytes,
    blank_scales,
    blank_tile,
    block_peaks,
    empty_scales,
    load_halves,
    load_pieces,
    loaded_coordinates,
    of_block,
    own_part,
    quantize_row,
    quantize_tile,
    store_pieces,
    store_scales,
    tile_coordinates,
    tile_shape,
    tile_warps,
)
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

# 6 * 2^-126 and 448 * 2^-126 as float32 bits: the least maxima that set a scale.
_LEAST_OF_6 = tl.constexpr(0x01C00000)
_LEAST_OF_448 = tl.constexpr(0x04E00000)

_TILE = tl.constexpr(128)
_SIGN = tl.constexpr(-0x80000000)


@fast_launch
@triton.jit
def _nvfp4_kernel(
    x,
    stride,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    partials,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTIALS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    number = tl.program_id(0) - tl.cdiv(rows, ROWS) * CHUNKS
    if number >= 0:
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            blank_tile(scales, rows, scale_rows, scale_columns, number, ROWS * BLOCKS * 2)
    else:
        matrix, row, piece = loaded_coordinates(ROWS, BLOCKS, CHUNKS, WHOLE)
        x += matrix * rows * stride
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            inside = (row < rows) & (piece < 2 * blocks)
            values = load_pieces(x, stride, row, piece, inside)
            if WHOLE > 4 * 2 * BLOCKS:
                values = once_here(values, arrival(values, 2 * BLOCKS))
            quantize_tile(
                own_part(values, tl.program_id(0) % CHUNKS, ROWS * BLOCKS * 2),
                block_peaks(values) if SOURCE == TOKEN else None,
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


@fast_launch
@triton.jit
def _nvfp4_row_kernel(
    x,
    stride,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    partials,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTIALS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= rows:
        blank_scales(scales, scale_rows, scale_columns, SWIZZLED, BLOCKS, CHUNKS)
    else:
        x += (tl.program_id(2).to(tl.int64) * rows + row) * stride
        firsts, lasts, block_numbers = (), (), ()
        for chunk in tl.static_range(CHUNKS):
            block = chunk * BLOCKS + tl.arange(0, BLOCKS)
            block_numbers += (block,)  # type: ignore[assignment]
            address = x + block[:, None] * 16 + tl.arange(0, 8)[None, :]
            firsts += (tl.load(address),)  # type: ignore[assignment]
            lasts += (tl.load(address + 8),)  # type: ignore[assignment]
        quantize_row(
            (firsts, lasts, block_numbers),
            (source, codes, scales, total, rows, blocks, scale_rows, scale_columns, partials),
            SOURCE,
            PER_ROW,
            WEIGHT,
            SWIZZLED,
            BLOCKS,
            CHUNKS,
            PARTIALS,
            CONVERT,
        )


@fast_launch
@triton.jit
def _amax_kernel(
    x,
    peaks,
    stride,
    rows,
    blocks,
    chunks,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Largest finite block's amax in every ``partials``-th tile of a matrix."""
    wait_for_inputs(PDL)
    matrix = tl.program_id(1).to(tl.int64)
    partials = tl.num_programs(0)
    group = tl.arange(0, ROWS * BLOCKS)
    x += matrix * rows * stride
    peak = tl.zeros([ROWS * BLOCKS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * chunks, partials):
        row = (tile // chunks).to(tl.int64) * ROWS + group // BLOCKS
        block = tile % chunks * BLOCKS + group % BLOCKS
        first, last = load_halves(x, stride, row, block, (row < rows) & (block < blocks))
        both = larger(largest(first), largest(last))
        peak = tl.maximum(peak, finite_amax(both)[0])
    tl.store(peaks + matrix * partials + tl.program_id(0), tl.max(peak, 0))


def quantize_nvfp4(args: QuantizeNvfp4Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    x = args.x
    out = Output.empty(x, x.shape[-1], args.global_scale, args.scaling, args.layout)
    if out.codes.numel() == 0:
        return out.without_rows()
    matrix = row_tiles.as_rows(x)
    if args.global_scale is None and args.scaling != "token":
        out = replace(out, source=_partial_amax(matrix, matrix.shape[0] // x.shape[-2]))
    arguments = (matrix, matrix.stride(0), *out.arguments)
    with launch_options.on(x):
        if out.by_row:
            _nvfp4_row_kernel[out.row_grid](*arguments, **out.row_options)
        else:
            _nvfp4_kernel[out.grid](*arguments, WHOLE=out.whole, **out.options)
    return out.tensors


def _partial_amax(matrix: torch.Tensor, count: int) -> torch.Tensor:
    """Return up to 1024 partial maxima per matrix, of ``count``: float32 ``[count, partials]``."""
    rows, blocks = matrix.shape[0] // count, matrix.shape[1] // 16
    tall, across = tile_shape(blocks, False)
    chunks = triton.cdiv(blocks, across)
    fill = max(1, 16 * launch_options.sm_count(matrix.device) // count)
    partials = min(triton.cdiv(rows, tall) * chunks, fill, 1024)
    peaks = matrix.new_empty((count, partials), dtype=torch.float32)
    with launch_options.on(matrix):
        _amax_kernel[(partials, count)](
            matrix,
            peaks,
            matrix.stride(0),
            rows,
            blocks,
            chunks,
            ROWS=tall,
            BLOCKS=across,
            num_warps=tile_warps(tall * across),
            **launch_options.options(matrix),
        )
    return peaks


@fast_launch
@triton.jit
def _mxfp4_kernel(
    x,
    codes,
    scales,
    stride,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A thread takes a block of 32, in four loads of 8 columns."""
    wait_for_inputs(PDL)
    matrix, row, block = tile_coordinates(ROWS, BLOCKS)
    inside = (row < rows) & (block < blocks)
    start = matrix * rows
    address = x + ((start + row) * stride + block * 32)[:, None] + tl.arange(0, 8)[None, :]
    a = tl.load(address, mask=inside[:, None], other=0.0)
    b = tl.load(address + 8, mask=inside[:, None], other=0.0)
    c = tl.load(address + 16, mask=inside[:, None], other=0.0)
    d = tl.load(address + 24, mask=inside[:, None], other=0.0)
    peak = larger(larger(largest(a), largest(b)), larger(largest(c), largest(d)))
    amax, finite = finite_amax(peak)
    byte = power_of_two_byte(amax, _LEAST_OF_6, 0x400000, 2)
    factor, bound = inverse_of_byte(byte), tl.where(finite, 6.0, 0.0)
    a, b = scaled_codes(a, factor, bound, CONVERT), scaled_codes(b, factor, bound, CONVERT)
    c, d = scaled_codes(c, factor, bound, CONVERT), scaled_codes(d, factor, bound, CONVERT)
    # Byte 8 i + 4 j + k is byte k of the half j of a and c (i = 0, 1).
    packed = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    address = codes + (((start + row) * blocks + block) * 16)[:, None] + tl.arange(0, 16)[None, :]
    tl.store(address, tl.reshape(packed, [ROWS * BLOCKS, 16]), mask=inside[:, None])
    bits = tl.where(finite, byte, 255)
    scales += matrix * scale_rows * scale_columns
    store_scales(scales, bits, row, block, inside, scale_rows, scale_columns, SWIZZLED)


@fast_launch
@triton.jit
def _mxfp4_few_kernel(
    x,
    codes,
    scales,
    stride,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A thread takes 8 columns, a quarter of a block, so that few blocks have many threads."""
    matrix, row, piece = tile_coordinates(ROWS, 4 * BLOCKS)
    block = piece // 4
    line = matrix * rows + row
    scales += matrix * scale_rows * scale_columns
    # Of the four threads that own a block, the first stores its scale.
    first = tl.where(piece % 4 == 0, block, scale_columns)
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        inside = (row < rows) & (block < blocks)
        values = load_pieces(x, stride, line, piece, inside)
        amax, finite = finite_amax(of_block(largest(values), 4))
        byte = power_of_two_byte(amax, _LEAST_OF_6, 0x400000, 2)
        packed = scaled_codes(values, inverse_of_byte(byte), tl.where(finite, 6.0, 0.0), CONVERT)
        store_pieces(codes, line, 2 * blocks, piece, packed, inside)
        bits = tl.where(finite, byte, 255)
        store_scales(scales, bits, row, first, inside, scale_rows, scale_columns, SWIZZLED)


def quantize_mxfp4(args: QuantizeMxfp4Args) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    x = args.x
    *batch, rows, columns = x.shape
    codes = x.new_empty((*batch, rows, columns // 2), dtype=torch.uint8)
    scales = empty_scales(x.shape, x, 32, args.layout, torch.float8_e8m0fnu)
    if codes.numel() == 0:
        return codes, scales
    matrix = row_tiles.as_rows(x)
    blocks, swizzled = columns // 32, args.layout == formats.SWIZZLED
    high, wide = scale_rows(rows, swizzled), scale_columns(blocks, swizzled)
    sizes = (matrix.stride(0), rows, blocks, high, wide)
    many_rows = are_many(rows)
    sms = launch_options.sm_count(x.device)
    tall, across = _mxfp4_tile(matrix.shape[0], blocks, many_rows, sms)
    grid = (triton.cdiv(high, tall), triton.cdiv(wide, across), matrix.shape[0] // rows)
    options = {
        "SWIZZLED": swizzled,
        "ROWS": tall,
        "BLOCKS": across,
        "CONVERT": conversion(x),
        **launch_options.options(x, small=True),
    }
    with launch_options.on(x):
        if many_rows:
            warps = tile_warps(tall * across)
            _mxfp4_kernel[grid](matrix, codes, as_bytes(scales), *sizes, num_warps=warps, **options)
        else:
            warps = max(1, tall * across // 8)
            _mxfp4_few_kernel[grid](
                matrix, codes, as_bytes(scales), *sizes, num_warps=warps, **options
            )
    return codes, scales


def _mxfp4_tile(rows: int, blocks: int, many_rows: bool, sms: int) -> tuple[int, int]:
    """Rows and blocks of a program: of few rows, blocks enough that no SM has three programs."""
    if many_rows:
        tall, across = tile_shape(blocks, False)
        return 2 * tall, across
    groups = launch_options.power_of_two(triton.cdiv(rows * blocks, 2 * sms))
    groups = min(128, max(8, groups))
    across = min(groups, launch_options.power_of_two(blocks))
    return groups // across, across


@triton.jit
def _fp8_codes(values, shift, high, low, EXACT: tl.constexpr):
    """E4M3 bytes of ``values / scale``, see ``divisor``; EXACT: of ``values * shift``.

    A value times 0 is added, which makes NaN of an infinity. ``low`` may be negative: then a zero
    would lose its sign.
    """
    if EXACT:
        return e4m3_bits(tl.fma(values, shift, values * 0.0))
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        scaled = values * shift
        quotients = tl.fma(scaled, high, tl.fma(values, 0.0, scaled * low))
        magnitude = quotients.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        sign = values.to(tl.int32, bitcast=True) & _SIGN
        return e4m3_bits((magnitude | sign).to(tl.float32, bitcast=True))


@triton.jit
def _load_tile(address, inside, WHOLE: tl.constexpr):
    return tl.load(address) if WHOLE else tl.load(address, mask=inside, other=0.0)


@fast_launch
@triton.jit
def _fp8_block_kernel(
    x,
    codes,
    scales,
    stride,
    rows,
    columns,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantise a tile of 128 rows by 128 columns; non-finite values are looked for once.

    ROWS: fewer where the matrix has no more. A tile of 128 is read twice, because between the two
    it is as well kept by the cache as by registers, and then more programs share an SM.
    WHOLE: no tile is ragged.
    """
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        E8M0: tl.constexpr = scales.dtype.element_ty == tl.uint8
        first = tl.program_id(0) * ROWS
        start = tl.program_id(2).to(tl.int64) * rows + first
        row, column = tl.arange(0, ROWS)[:, None], tl.program_id(1) * _TILE
        inside = (row < rows - first) & (tl.arange(0, _TILE)[None, :] < columns - column)
        x += start * stride + column
        address = x + row.to(tl.int64) * stride + tl.arange(0, _TILE)[None, :]
        loaded = _load_tile(address, inside, WHOLE)
        amax = largest(tl.reshape(loaded, [ROWS * _TILE], can_reorder=True))
        if not amax < float("inf"):
            magnitude = tl.abs(widen(_load_tile(address, inside, WHOLE)))
            amax = tl.max(tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1), 0)
        if E8M0:
            byte = power_of_two_byte(amax, _LEAST_OF_448, 0x600000, 8)
            stored = byte.to(tl.uint8)
            shift, high, low = inverse_of_byte(byte), 1.0, 0.0
        else:
            stored = fp8_block_scale(amax)
            shift, high, low = divisor(stored)
        tile = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(scales + tile * tl.num_programs(1) + tl.program_id(1), stored)
        values = widen(_load_tile(address, inside, WHOLE) if ROWS == _TILE else loaded)
        bits = _fp8_codes(values, shift, high, low, E8M0)
        codes += start * columns + column
        address = codes + row.to(tl.int64) * columns + tl.arange(0, _TILE)[None, :]
        tl.store(address, bits, mask=None if WHOLE else inside)


def quantize_fp8_block(args: QuantizeFp8BlockArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    x = args.x
    *batch, rows, columns = x.shape
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    tiles = (triton.cdiv(rows, 128), triton.cdiv(columns, 128))
    scales = x.new_empty((*batch, *tiles), dtype=args.scale_dtype)
    if codes.numel() == 0:
        return codes, scales
    matrix = row_tiles.as_rows(x)
    grid = (*tiles, matrix.shape[0] // rows)
    tall = min(128, launch_options.power_of_two(rows))
    most = 16 if args.scale_dtype == torch.float32 else 8
    warps = min(most, max(1, tall // 2))
    with launch_options.on(x):
        _fp8_block_kernel[grid](
            matrix,
            as_bytes(codes),
            scales if args.scale_dtype == torch.float32 else as_bytes(scales),
            matrix.stride(0),
            rows,
            columns,
            ROWS=tall,
            WHOLE=rows % tall == 0 and columns % 128 == 0,
            num_warps=warps,
            **launch_options.options(x, small=launch_options.is_small(math.prod(grid), warps)),
        )
    return codes, scales
