"""Kernels that give back the values of NVFP4, MXFP4 and FP8: see ``dsv4.ops.quantize``."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.ops.quantize import DequantizeArgs
from dsv4.quant import formats
from dsv4.triton._lib.numerics import e4m3_value, narrow, wait_for_inputs
from dsv4.triton._lib.nvfp4 import scale_columns, scale_offset, scale_rows
from dsv4.triton._lib.nvfp4_tile import as_bytes, tile_shape, tile_warps
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_TILE = tl.constexpr(128)


@triton.jit
def _e8m0_value(bits):
    """Value of E8M0 bytes as float32: 0 is 2^-127, a subnormal number, and 255 is NaN."""
    byte = bits.to(tl.int32)
    exponent = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, exponent).to(tl.float32, bitcast=True)


@triton.jit
def _scale_value(loaded, E8M0: tl.constexpr):
    value = loaded
    if E8M0:
        value = _e8m0_value(loaded)
    elif loaded.dtype == tl.uint8:
        value = e4m3_value(loaded)
    return value


@triton.jit
def _e2m1_value(codes):
    """Value of E2M1 codes as float32: shifted to the top, their bits are it times 2^-126."""
    code = codes.to(tl.int32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _store_decoded(out, packed, scale, total, inside):
    """Bytes ``[N, 4]`` as 8 columns at ``out [N, 1]``: ``(code * scale) * total``."""
    values = tl.join(_e2m1_value(packed & 15), _e2m1_value(packed >> 4))
    values = tl.reshape(values, [packed.shape[0], 8]) * scale[:, None] * total
    address = out + tl.arange(0, 8)[None, :]
    tl.store(address, narrow(values, out.dtype.element_ty), mask=inside[:, None])


@fast_launch
@triton.jit
def _unpack_kernel(
    codes,
    scales,
    total,
    out,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    total_stride,
    SCALED: tl.constexpr,
    PER_ROW: tl.constexpr,
    E8M0: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows by BLOCKS pieces of 16 columns; an E8M0 scale belongs to two pieces."""
    wait_for_inputs(PDL)
    matrix = tl.program_id(2).to(tl.int64)
    group = tl.arange(0, ROWS * BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + group // BLOCKS
    block = tl.program_id(1) * BLOCKS + group % BLOCKS
    inside = (row < rows) & (block < blocks)
    piece = ((matrix * rows + row) * blocks + block)[:, None]
    address = codes + piece * 8 + tl.arange(0, 4)[None, :]
    first = tl.load(address, mask=inside[:, None], other=0)
    last = tl.load(address + 4, mask=inside[:, None], other=0)
    scales += matrix * scale_rows * scale_columns
    offset = scale_offset(row, block // 2 if E8M0 else block, scale_columns, SWIZZLED)
    scale = _scale_value(tl.load(scales + offset, mask=inside, other=0), E8M0)
    factor = 1.0
    if SCALED and PER_ROW:
        factor = tl.load(total + matrix * total_stride + row, mask=inside, other=0.0)[:, None]
    elif SCALED:
        factor = tl.load(total + matrix * total_stride)
    _store_decoded(out + piece * 16, first, scale, factor, inside)
    _store_decoded(out + piece * 16 + 8, last, scale, factor, inside)


@fast_launch
@triton.jit
def _decode_fp8_kernel(
    codes,
    scales,
    out,
    rows,
    columns,
    E8M0: tl.constexpr,
    TOKEN: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows, a divisor of 128, of one tile; with TOKEN each of them has its own scale.

    FRAGMENTS: the codes have their columns as ``dsv4.quant.fragments.fragment_columns`` has them.
    """
    wait_for_inputs(PDL)
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * _TILE + tl.arange(0, _TILE)[None, :]
    inside = (row < rows) & (column < columns)
    offset = (matrix * rows + row) * columns + column
    stored = offset
    if FRAGMENTS:
        c = tl.arange(0, _TILE)[None, :]
        moved = c // 2 % 4 * 32 + c // 64 * 16 + c // 16 % 4 * 4 + c % 2 * 2 + 1 - c // 8 % 2
        stored = offset - c + moved
    loaded = tl.load(codes + stored, mask=inside, other=0)
    if TOKEN:
        own = scales + (matrix * rows + row) * tl.num_programs(1) + tl.program_id(1)
        scale = _scale_value(tl.load(own, mask=row < rows, other=0), E8M0)
    else:
        tile = matrix * tl.cdiv(rows, _TILE) + tl.program_id(0) * ROWS // _TILE
        scale = _scale_value(tl.load(scales + tile * tl.num_programs(1) + tl.program_id(1)), E8M0)
    values = narrow(e4m3_value(loaded) * scale, out.dtype.element_ty)
    tl.store(out + offset, values, mask=inside)


def dequantize(args: DequantizeArgs) -> torch.Tensor:
    """See ``dsv4.ops.quantize.dequantize``."""
    codes, scales, global_scale = args.codes, args.scales, args.global_scale
    token = args.format == formats.FP8_TOKEN.name
    packing = 2 if formats.format_named(args.format, formats.ALL_FORMATS).packed else 1
    shape = (*codes.shape[:-1], codes.shape[-1] * packing)
    out = codes.new_empty(shape, dtype=args.dtype)
    if out.numel() == 0:
        return out
    codes, scales = codes.contiguous(), scales.contiguous()
    e8m0 = scales.dtype == torch.float8_e8m0fnu
    scales = scales if scales.dtype == torch.float32 else as_bytes(scales)
    if packing == 1:
        moved = args.layout == formats.FRAGMENTS
        _launch_fp8(as_bytes(codes), scales, out, e8m0=e8m0, token=token, moved=moved)
        return out
    if args.segments:
        assert global_scale is not None
        global_scale = formats.expand_segments(global_scale, args.segments, codes.shape[-2])
    _launch_unpack(codes, scales, global_scale, out, e8m0, args.layout == formats.SWIZZLED)
    return out


def _launch_fp8(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    e8m0: bool,
    token: bool,
    moved: bool,
) -> None:
    rows, columns = out.shape[-2:]
    count = out.numel() // (rows * columns)
    tall = 32
    grid = (triton.cdiv(rows, tall), triton.cdiv(columns, 128), count)
    options: dict[str, Any] = launch_options.options(out)
    with launch_options.on(out):
        _decode_fp8_kernel[grid](
            codes,
            scales,
            out,
            rows,
            columns,
            E8M0=e8m0,
            TOKEN=token,
            FRAGMENTS=moved,
            ROWS=tall,
            num_warps=8,
            **options,
        )


def _launch_unpack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    e8m0: bool,
    swizzled: bool,
) -> None:
    rows, blocks = out.shape[-2], out.shape[-1] // 16
    high = scale_rows(rows, swizzled)
    wide = scale_columns(blocks // 2 if e8m0 else blocks, swizzled)
    tall, across = tile_shape(blocks, False)
    count = out.numel() // (rows * blocks * 16)
    with launch_options.on(out):
        _unpack_kernel[(triton.cdiv(rows, tall), triton.cdiv(blocks, across), count)](
            codes,
            scales,
            None if total is None else total.contiguous(),
            out,
            rows,
            blocks,
            high,
            wide,
            0 if total is None else total.shape[-1],
            SCALED=total is not None,
            PER_ROW=total is not None and total.shape[-1] != 1,
            E8M0=e8m0,
            SWIZZLED=swizzled,
            ROWS=tall,
            BLOCKS=across,
            num_warps=tile_warps(tall * across),
            **launch_options.options(out),
        )
