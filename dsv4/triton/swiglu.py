"""Kernels of ``dsv4.ops.swiglu``: a thread takes 8 outputs, or a block of 16 to be quantised."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.ops.swiglu import SwigluArgs, SwigluQuantizeArgs
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.arrival import arrival, once_here
from dsv4.triton._lib.numerics import (
    INTERPRETED,
    narrow,
    once,
    wait_for_inputs,
    widen,
)
from dsv4.triton._lib.nvfp4 import narrowed, near_reciprocal
from dsv4.triton._lib.nvfp4_tile import (
    TOKEN,
    Output,
    blank_scales,
    blank_tile,
    block_peaks,
    loaded_coordinates,
    own_part,
    quantize_row,
    quantize_tile,
    tile_coordinates,
)
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_PIECES = 128  # pieces of 8 outputs of a program, one per thread
# Registers of a thread that makes two blocks of 16: the compiler would take more, and fewer
# programs would fit.
_REGISTERS = 72
# Registers of a thread of one block: without a number the compiler saves registers, so that loads
# wait for earlier loads.
_REGISTERS_OF_TILE = 128
# log2(e) as a sum of two float32 numbers, and ln(2).
_LOG2_E = tl.constexpr(1.44269502162933349609375)
_LOG2_E_REST = tl.constexpr(1.925963033500011e-08)
_LN_2 = tl.constexpr(0.6931471805599453)
# The 16 leading bits of log2(e), and the rest times ln(2).
_SHORT_LOG2_E = tl.constexpr(47274 / 32768)
_SHORT_REST = tl.constexpr((1.4426950408889634 - 47274 / 32768) * 0.6931471805599453)
_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def _exp2(x):
    """``2 ** x``; 0 where that is subnormal."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _exp_of_minus(x, UNIT: tl.constexpr, SHORT: tl.constexpr):
    """``(power, factor)`` whose product is ``exp(-x) * UNIT``, to some units of the last place.

    For x from -88.7 to 128. The exponent is known to more than float32's precision: rounded once,
    an exponent of 100 would be off by 2^-18, and so would the result. With 8 bits of x (SHORT) the
    first part of the exponent is exact.
    """
    if SHORT:
        return _exp2(x * -_SHORT_LOG2_E), tl.fma(x, -_SHORT_REST * UNIT, UNIT)
    exponent = x * -_LOG2_E
    rest = tl.fma(x, -_LOG2_E_REST, tl.fma(x, -_LOG2_E, -exponent))
    return _exp2(exponent), tl.fma(rest, _LN_2 * UNIT, UNIT)


@triton.jit
def swiglu_of(gate, up, limit, CLAMPED: tl.constexpr, UNBOUNDED: tl.constexpr):
    """``silu(gate) * up`` in float32; NaN where gate or up is no number.

    The sigmoid's divisor is computed at 2^-32, where neither it nor its reciprocal leaves the
    normal numbers; and with a zero times gate and up, taken before the clamp makes a number of an
    infinity. Below -88.7, where exp overflows, the gate counts as -88.7: the result is less than
    3e-37 times up. For bfloat16 the reciprocal is the hardware's, one unit of the last place off.
    """
    SHORT: tl.constexpr = gate.dtype == tl.bfloat16
    gate, up = widen(gate), widen(up)
    unit = tl.fma(gate, 0.0, tl.fma(up, 0.0, _UNIT))
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    gate = tl.maximum(gate, -88.7)
    power, factor = _exp_of_minus(tl.minimum(gate, 128.0) if UNBOUNDED else gate, _UNIT, SHORT)
    divisor = tl.fma(power, factor, unit)
    sigmoid = near_reciprocal(divisor)
    if not SHORT:
        sigmoid = tl.fma(tl.fma(-divisor, sigmoid, 1.0), sigmoid, sigmoid)
    return gate * (sigmoid * _UNIT) * up


@triton.jit
def _weave(low, high):
    """``[N, 4]`` and ``[N, 4]`` side by side."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [low.shape[0], 8])


@triton.jit
def load_pairs(x, start, first, half, inside, INTERLEAVED: tl.constexpr):
    """Gate and up, ``[N, 8]`` each, of the 8 outputs from column ``first [N]`` on; 0 outside.

    ``start`` is where the row begins in ``x``, ``half`` is I; ``inside`` may be None, for all. If
    interleaved, they are 16 neighbours, loaded in two halves so that each thread has what it needs.
    """
    eight = tl.arange(0, 8)[None, :]
    if INTERLEAVED:
        N: tl.constexpr = first.shape[0]
        column = 2 * first[:, None] + eight
        address = x + (start + 2 * first)[:, None] + eight
        low = _load_some(address, column, inside, 2 * half)
        high = _load_some(address + 8, column + 8, inside, 2 * half)
        gate_low, up_low = tl.split(tl.reshape(low, [N, 4, 2]))
        gate_high, up_high = tl.split(tl.reshape(high, [N, 4, 2]))
        return _weave(gate_low, gate_high), _weave(up_low, up_high)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        column = first[:, None] + eight
        address = x + (start + first)[:, None] + eight
        gate = _load_some(address, column, inside, half)
        return gate, _load_some(address + half, column, inside, half)


@triton.jit
def _load_some(address, column, inside, columns):
    """Load from ``address [N, 8]``; 0 where not ``inside [N]``, or past ``columns``."""
    if inside is None:
        return tl.load(address)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.load(address, mask=inside[:, None] & (column < columns), other=0.0)


@fast_launch
@triton.jit
def _swiglu_kernel(
    x,
    weight,
    out,
    stride,
    rows,
    half,
    limit,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows by PIECES pieces of 8 outputs."""
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        _, row, piece = tile_coordinates(ROWS, PIECES)
        first = piece * 8
        gate, up = load_pairs(x, row * stride, first, half, row < rows, INTERLEAVED)
        if WEIGHTED:
            factor = widen(tl.load(weight + row, mask=row < rows, other=0.0))
        values = swiglu_of(gate, up, limit, CLAMPED, UNBOUNDED)
        if WEIGHTED:
            values = values * factor[:, None]
        column = first[:, None] + tl.arange(0, 8)[None, :]
        inside = (row < rows)[:, None] & (column < half)
        address = out + (row * half)[:, None] + column
        tl.store(address, narrow(values, out.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit
def _swiglu_quantize_kernel(
    x,
    weight,
    stride,
    limit,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    partials,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
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
        line = matrix * rows + row
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            inside = (row < rows) & (piece < 2 * blocks)
            gate, up = load_pairs(x, line * stride, piece * 8, blocks * 16, inside, INTERLEAVED)
            if WEIGHTED:
                factor = widen(tl.load(weight + line, mask=inside, other=0.0))
            if WHOLE > 2 * 2 * BLOCKS:
                gate = once_here(gate, arrival(gate, 2 * BLOCKS) | arrival(up, 2 * BLOCKS))
            values = swiglu_of(gate, up, limit, CLAMPED, UNBOUNDED)
            if WEIGHTED:
                values = values * factor[:, None]
            values = narrowed(values, x.dtype.element_ty)
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
def _swiglu_quantize_row_kernel(
    x,
    weight,
    stride,
    limit,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    partials,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
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
    line = tl.program_id(2).to(tl.int64) * rows + row
    if row >= rows:
        blank_scales(scales, scale_rows, scale_columns, SWIZZLED, BLOCKS, CHUNKS)
    else:
        if WEIGHTED:
            factor = widen(tl.load(weight + line))
        pairs, block_numbers = (), ()
        for chunk in tl.static_range(CHUNKS):
            block = chunk * BLOCKS + tl.arange(0, BLOCKS)
            block_numbers += (block,)  # type: ignore[assignment]
            for part in tl.static_range(2):
                column = block * 16 + part * 8
                half = blocks * 16
                pair = load_pairs(x + line * stride, 0, column, half, None, INTERLEAVED)
                pairs += (pair,)  # type: ignore[assignment]
        firsts, lasts = (), ()
        for part in tl.static_range(2 * CHUNKS):
            gate, up = pairs[part]  # type: ignore[var-annotated]
            values = swiglu_of(gate, up, limit, CLAMPED, UNBOUNDED)
            if WEIGHTED:
                values = values * factor
            values = narrowed(values, x.dtype.element_ty)
            if part % 2 == 0:
                firsts += (values,)  # type: ignore[assignment]
            else:
                lasts += (values,)  # type: ignore[assignment]
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


def flags(
    limit: float | None, layout: str, weight: torch.Tensor | None
) -> tuple[float, dict[str, Any]]:
    """The bound as a number, and the constants of both kernels."""
    options = {
        "INTERLEAVED": layout == "interleaved",
        "CLAMPED": limit is not None,
        "UNBOUNDED": limit is None or limit > 128,
        "WEIGHTED": weight is not None,
    }
    return float("inf") if limit is None else float(limit), options


def flat(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Weights of rows as a vector."""
    return None if weight is None else weight.reshape(-1).contiguous()


def swiglu(args: SwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.swiglu.swiglu``."""
    half = args.gate_up.shape[-1] // 2
    out = args.gate_up.new_empty((*args.gate_up.shape[:-1], half), dtype=args.out_dtype)
    if out.numel() == 0:
        return out
    x = row_tiles.as_rows(args.gate_up)
    pieces = launch_options.power_of_two(triton.cdiv(half, 8))
    tall, across = max(1, _PIECES // pieces), min(_PIECES, pieces)
    bound, options = flags(args.limit, args.layout, args.row_weight)
    grid = triton.cdiv(x.shape[0], tall), triton.cdiv(half, 8 * across)
    with launch_options.on(x):
        _swiglu_kernel[grid](
            x,
            flat(args.row_weight),
            out,
            x.stride(0),
            x.shape[0],
            half,
            bound,
            **options,
            ROWS=tall,
            PIECES=across,
            num_warps=4,
            **launch_options.options(x, small=launch_options.is_small(grid[0] * grid[1], 4)),
        )
    return out


def swiglu_quantize(args: SwigluQuantizeArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.swiglu.swiglu_quantize``."""
    out = Output.empty(
        args.gate_up,
        args.gate_up.shape[-1] // 2,
        args.global_scale,
        args.scaling,
        args.scale_layout,
    )
    if out.codes.numel() == 0:
        return out.without_rows()
    x = row_tiles.as_rows(args.gate_up)
    bound, options = flags(args.limit, args.layout, args.row_weight)
    arguments = (x, flat(args.row_weight), x.stride(0), bound, *out.arguments)
    with launch_options.on(x):
        if out.by_row:
            constants = out.row_options
            if constants["CHUNKS"] <= 2:
                constants["maxnreg"] = _REGISTERS
            _swiglu_quantize_row_kernel[out.row_grid](*arguments, **options, **constants)
        else:
            _swiglu_quantize_kernel[out.grid](
                *arguments, WHOLE=out.whole, **options, **out.options, maxnreg=_REGISTERS_OF_TILE
            )
    return out.tensors
