"""Kernels of ``dsv4.ops.norm``: one program per row, the row in registers, one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4 import formats
from dsv4.triton import _launch, _nvfp4, _rows
from dsv4.triton._numerics import narrow, wait_for_inputs, widen
from dsv4.triton._nvfp4 import (
    block_scales,
    dynamic_scale,
    e2m1_codes,
    finite_amax,
    larger,
    largest,
)
from dsv4.triton._rotation import load_angles, rotate
from dsv4.triton.quantize import Output, _load_halves, _store_halves, _store_scales


@triton.jit
def inverse_rms(total, columns, eps):
    """``rsqrt(total / columns + eps)``; NaN where the mean overflows, as the reference says."""
    mean = total / columns
    return tl.where(mean == float("inf"), float("nan"), tl.rsqrt(mean + eps))


@triton.jit
def _norm_row(x, weight, out, columns, eps, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Norm of the row at ``x`` to the row at ``out``."""
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = widen(tl.load(x + column, mask=inside, other=0.0))
    values = values * inverse_rms(tl.sum(values * values, 0), columns, eps)
    if WEIGHTED:
        values = widen(tl.load(weight + column, mask=inside, other=0.0)) * values
    tl.store(out + column, narrow(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    stride,
    columns,
    eps,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    _norm_row(x + row * stride, weight, out + row * columns, columns, eps, WEIGHTED, BLOCK)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See ``dsv4.ops.norm.rms_norm``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = _rows.as_rows(x)
    columns = rows.shape[1]
    weight = None if weight is None else weight.contiguous()
    with _launch.on(x):
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            out,
            rows.stride(0),
            columns,
            eps,
            WEIGHTED=weight is not None,
            BLOCK=_launch.power_of_two(columns),
            num_warps=_rows.warps(columns, x.element_size()),
            **_launch.options(x),
        )
    return out


@triton.jit(do_not_specialize=["count"])
def _pair_kernel(
    x,
    first_weight,
    second_weight,
    first,
    second,
    stride,
    count,
    eps,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 2 r takes the first part of row r, program 2 r + 1 the second."""
    wait_for_inputs(PDL)
    row = (tl.program_id(0) // 2).to(tl.int64)
    if tl.program_id(0) % 2 == 0:
        _norm_row(x + row * stride, first_weight, first + row * FIRST, FIRST, eps, True, BLOCK)
    else:
        start = x + row * stride + FIRST
        _norm_row(start, second_weight, second + row * SECOND, SECOND, eps, True, BLOCK)


def rms_norm_pair(
    x: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.norm.rms_norm_pair``."""
    widths = first_weight.shape[0], second_weight.shape[0]
    first, second = (x.new_empty((*x.shape[:-1], width)) for width in widths)
    rows = _rows.as_rows(x)
    if rows.shape[0] == 0 or x.shape[-1] == 0:
        return first, second
    with _launch.on(x):
        _pair_kernel[(2 * rows.shape[0],)](
            rows,
            first_weight.contiguous(),
            second_weight.contiguous(),
            first,
            second,
            rows.stride(0),
            rows.shape[0],
            eps,
            FIRST=widths[0],
            SECOND=widths[1],
            BLOCK=_launch.power_of_two(max(widths)),
            num_warps=_rows.warps(max(widths), x.element_size()),
            **_launch.options(x),
        )
    return first, second


@triton.jit(do_not_specialize=["count"])
def _head_kernel(
    q,
    cos,
    sin,
    token_stride,
    head_stride,
    table_stride,
    heads,
    count,
    eps,
    KEPT: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Heads in place. The rotated columns are loaded and stored apart from the others, so every
    address has one reader and one writer, the same program."""
    wait_for_inputs(PDL)
    head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = head < count
    token = (head // heads).to(tl.int64)
    start = q + token * token_stride + (head % heads).to(tl.int64) * head_stride
    column, pair = tl.arange(0, 2 * HALF_BLOCK)[None, :], tl.arange(0, HALF_BLOCK)[None, :]
    turning = inside & (column < 2 * HALF)
    turned = widen(tl.load(start + KEPT + column, mask=turning, other=0.0))
    total = tl.sum(turned * turned, 1)
    c, s = load_angles(cos, sin, token * table_stride, pair, inside & (pair < HALF), False)
    DTYPE: tl.constexpr = q.dtype.element_ty
    if KEPT > 0:
        left = tl.arange(0, KEPT_BLOCK)[None, :]
        copied = inside & (left < KEPT)
        kept = widen(tl.load(start + left, mask=copied, other=0.0))
        scale = inverse_rms(total + tl.sum(kept * kept, 1), KEPT + 2 * HALF, eps)[:, None]
        tl.store(start + left, narrow(kept * scale, DTYPE), mask=copied)
    else:
        scale = inverse_rms(total, 2 * HALF, eps)[:, None]
    normed = widen(narrow(turned * scale, DTYPE))
    tl.store(start + KEPT + column, narrow(rotate(normed, c, s), DTYPE), mask=turning)


def head_norm_rope_(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float) -> None:
    """See ``dsv4.ops.norm.head_norm_rope_``."""
    tokens, heads, columns = q.shape
    count, half = tokens * heads, cos.shape[-1]
    if q.numel() == 0:
        return
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    kept = columns - 2 * half
    # One head a program while there are few, so that they spread over the GPU.
    tile = {"ROWS": 1, "num_warps": 2} if count < 4096 else {"ROWS": 8, "num_warps": 4}
    with _launch.on(q):
        _head_kernel[(triton.cdiv(count, tile["ROWS"]),)](
            q,
            cos,
            sin,
            q.stride(0),
            q.stride(1),
            cos.stride(0),
            heads,
            count,
            eps,
            KEPT=kept,
            HALF=half,
            KEPT_BLOCK=_launch.power_of_two(kept),
            HALF_BLOCK=_launch.power_of_two(half),
            **tile,
            **_launch.options(q),
        )


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
    scale_rows,
    eps,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    TOKEN: tl.constexpr,
    PER_ROW: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the norm rounded to the dtype of ``y``, and that quantised."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) + tl.zeros([BLOCKS], tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = (row < rows) & (block < COLUMNS // 16)
    first, last = _load_halves(x, stride, row, block, inside)
    left, right = _load_halves(weight, 0, row, block, inside)
    square = tl.sum(first * first, 1) + tl.sum(last * last, 1)
    scale = inverse_rms(tl.sum(square, 0), COLUMNS, eps)
    DTYPE: tl.constexpr = y.dtype.element_ty
    first, last = narrow(left * (first * scale), DTYPE), narrow(right * (last * scale), DTYPE)
    place = y + (row * COLUMNS + block * 16)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(place, first, mask=inside[:, None])
    tl.store(place + 8, last, mask=inside[:, None])
    first, last = widen(first), widen(last)
    amax, finite = finite_amax(larger(largest(first), largest(last)))
    line = tl.program_id(0).to(tl.int64)
    if TOKEN:
        shared = dynamic_scale(tl.max(amax, 0))
        tl.store(total + line, shared, mask=line < rows)
    else:
        shared = tl.load(source + (line if PER_ROW else 0), mask=line < rows, other=1.0)
        if PER_ROW or line == 0:
            tl.store(total + line, shared, mask=line < rows)
    bits, product = block_scales(amax, finite, shared, False)
    first, last = e2m1_codes(first, product, CONVERT), e2m1_codes(last, product, CONVERT)
    _store_halves(codes, row, COLUMNS // 16, block, first, last, inside)
    _store_scales(scales, bits, row, block, inside, scale_rows, SCALE_COLUMNS, SWIZZLED)


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    eps: float,
    scaling: str,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.norm.rms_norm_quantize``."""
    rows, columns = x.shape
    out = Output.empty(x, columns, global_scale, scaling, layout)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows == 0:
        return y, *out.without_rows()
    swizzled = layout == formats.SWIZZLED
    high = _nvfp4.scale_rows(rows, swizzled)
    wide = _nvfp4.scale_columns(columns // 16, swizzled)
    source = _rows.as_rows(x)
    with _launch.on(x):
        _norm_quantize_kernel[(high,)](
            source,
            weight.contiguous(),
            out.source,
            y,
            out.codes,
            out.scales.view(torch.uint8),
            out.total,
            source.stride(0),
            rows,
            high,
            eps,
            COLUMNS=columns,
            SCALE_COLUMNS=wide,
            TOKEN=out.source is None,
            PER_ROW=out.total.shape[0] != 1 or rows == 1,
            SWIZZLED=swizzled,
            BLOCKS=_launch.power_of_two(wide),
            CONVERT=_nvfp4.conversion(x),
            num_warps=min(16, max(1, _launch.power_of_two(wide) // 32)),
            **_launch.options(x),
        )
    return y, *out.tensors
