"""Kernels of ``dsv4.ops.rope``: a few rows per program; copied and rotated columns apart."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from dsv4.triton import _launch, _rotation, _rows
from dsv4.triton._angles import cos_sin
from dsv4.triton._numerics import narrow, once, wait_for_inputs, widen
from dsv4.triton._nvfp4 import narrowed
from dsv4.triton._nvfp4_tile import (
    Output,
    blank_scales,
    blank_tile,
    quantize_row,
    quantize_tile,
    tile_places,
)
from dsv4.triton._rotation import load_angles, rotate

# Of a thread that keeps 8 blocks of 16: the compiler would take more, and fewer programs would fit.
# Of one that takes one: with no number the compiler saves registers, and loads wait for loads.
_REGISTERS = 128
_TABLE_ROWS = 4  # positions of a program: four angles a thread


@triton.jit(do_not_specialize=["count"])
def _tables_kernel(
    positions,
    inv_freq,
    cos,
    sin,
    count,
    half,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    pair = tl.arange(0, HALF)
    position = tl.load(positions + row, mask=row < count, other=0).to(tl.float32)
    frequency = tl.load(inv_freq + pair, mask=pair < half, other=0.0)
    c, s = cos_sin(position[:, None] * frequency[None, :])
    inside = (row < count)[:, None] & (pair < half)[None, :]
    place = row[:, None] * half + pair[None, :]
    tl.store(cos + place, c, mask=inside)
    tl.store(sin + place, s, mask=inside)


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.rope.rope_tables``."""
    half = inv_freq.shape[0]
    cos, sin = (inv_freq.new_empty((*positions.shape, half)) for _ in range(2))
    if cos.numel() == 0:
        return cos, sin
    count = positions.numel()
    with _launch.on(positions):
        _tables_kernel[(triton.cdiv(count, _TABLE_ROWS),)](
            positions.contiguous(),
            inv_freq.contiguous(),
            cos,
            sin,
            count,
            half,
            ROWS=_TABLE_ROWS,
            HALF=triton.next_power_of_2(half),
            num_warps=1,
            **_launch.options(positions),
        )
    return cos, sin


@triton.jit(do_not_specialize=["count"])
def _rope_kernel(
    x,
    stride,
    cos,
    sin,
    table_stride,
    sharing,
    out,
    count,
    kept,
    half,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = row < count
        source = x + row.to(tl.int64) * stride
        target = out + row.to(tl.int64) * (kept + 2 * half)
        column, pair = tl.arange(0, 2 * HALF)[None, :], tl.arange(0, HALF)[None, :]
        turning = inside & (column < 2 * half)
        angles = inside & (pair < half)
        start = (row // sharing).to(tl.int64) * table_stride
        values = tl.load(source + kept + column, mask=turning, other=0.0)
        c, s = load_angles(cos, sin, start, pair, angles, INVERSE)
        if KEPT > 0:
            left = tl.arange(0, KEPT)[None, :]
            copied = inside & (left < kept)
            same = tl.load(source + left, mask=copied)
            tl.store(target + left, same, mask=copied)
        turned = narrow(rotate(widen(values), c, s), out.dtype.element_ty)
        tl.store(target + kept + column, turned, mask=turning)


def _tile(rows: int) -> dict[str, int]:
    """Rows per program: one while there are few; more than that start too slowly one by one."""
    return {"ROWS": 1, "num_warps": 1} if rows <= 1024 else {"ROWS": 16, "num_warps": 4}


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """See ``dsv4.ops.rope.rope``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = _rows.as_rows(x)
    count, half = rows.shape[0], cos.shape[-1]
    kept = rows.shape[1] - 2 * half
    cos, sin, sharing = _rotation.tables(x, cos, sin)
    tile = _tile(count)
    with _launch.on(x):
        _rope_kernel[(triton.cdiv(count, tile["ROWS"]),)](
            rows,
            rows.stride(0),
            cos,
            sin,
            cos.stride(0),
            sharing,
            out,
            count,
            kept,
            half,
            INVERSE=inverse,
            KEPT=_launch.power_of_two(kept) if kept else 0,
            HALF=_launch.power_of_two(half),
            **tile,
            **_launch.options(x, few=tile["ROWS"] == 1),
        )
    return out


@triton.jit
def _load_turned(
    x,
    cos,
    sin,
    column,
    inside,
    DIM: tl.constexpr,
    KEPT: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """8 columns from ``column [N]`` on, a multiple of 8, of a token's heads, turned: ``[N, 8]``.

    In the dtype of ``x``. They lie in one head, and pairs begin at even columns: DIM is a multiple
    of 16, KEPT of 2.
    """
    eight, four = tl.arange(0, 8)[None, :], tl.arange(0, 4)[None, :]
    values = tl.load(x + column[:, None] + eight, mask=inside[:, None], other=0.0)
    in_head = (column % DIM).to(tl.int32)[:, None]
    pair = in_head // 2 - KEPT // 2 + four
    c, s = load_angles(cos, sin, 0, pair, inside[:, None] & (pair >= 0), INVERSE)
    turned = narrowed(rotate(widen(values), c, s), x.dtype.element_ty)
    # A zero's sign could change by a turn of 0.
    return tl.where(in_head + eight >= KEPT, turned, values)


@triton.jit
def _rope_quantize_kernel(
    x,
    stride,
    cos,
    sin,
    table_stride,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    parts,
    DIM: tl.constexpr,
    KEPT: tl.constexpr,
    INVERSE: tl.constexpr,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks of the groups (rows) of one token (matrix)."""
    if tl.program_id(0) * ROWS >= rows:
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            blank_tile(scales, rows, scale_rows, scale_columns, ROWS)
    else:
        token, row, piece = tile_places(ROWS, 2 * BLOCKS)
        x, cos, sin = x + token * stride, cos + token * table_stride, sin + token * table_stride
        column = (row * blocks * 2 + piece) * 8
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            inside = (row < rows) & (piece < 2 * blocks)
            quantize_tile(
                _load_turned(x, cos, sin, column, inside, DIM, KEPT, INVERSE),
                source,
                codes,
                scales,
                total,
                rows,
                blocks,
                scale_rows,
                scale_columns,
                parts,
                SOURCE,
                PER_ROW,
                WEIGHT,
                SWIZZLED,
                ROWS,
                BLOCKS,
                PARTS,
                CONVERT,
            )


@triton.jit
def _kept_first(place, heads, KEPT: tl.constexpr, ALL: tl.constexpr):
    """Blocks of ``heads`` heads in another order: KEPT of the ALL of every head, then the others.

    So most programs' chunks have blocks that do not turn, and no warp waits for a turn of few.
    """
    if KEPT == 0 or KEPT == ALL:
        return place
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        turned = place - heads * KEPT
        kept = place // KEPT * ALL + place % KEPT
        other = turned // (ALL - KEPT) * ALL + KEPT + turned % (ALL - KEPT)
        return tl.where(turned < 0, kept, other)


@triton.jit
def _rope_quantize_row_kernel(
    x,
    stride,
    cos,
    sin,
    table_stride,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    parts,
    DIM: tl.constexpr,
    KEPT: tl.constexpr,
    INVERSE: tl.constexpr,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One group (row) of one token (matrix)."""
    wait_for_inputs(PDL)
    row, token = tl.program_id(0), tl.program_id(2).to(tl.int64)
    if row >= rows:
        blank_scales(scales, scale_rows, scale_columns, SWIZZLED, BLOCKS, CHUNKS)
    else:
        HEADS: tl.constexpr = BLOCKS * CHUNKS // (DIM // 16)
        x += token * stride + row.to(tl.int64) * (HEADS * DIM)
        cos, sin = cos + token * table_stride, sin + token * table_stride
        firsts, lasts, places = (), (), ()
        for chunk in tl.static_range(CHUNKS):
            place = chunk * BLOCKS + tl.arange(0, BLOCKS)
            block = _kept_first(place, HEADS, KEPT // 16, DIM // 16)
            inside = block < blocks
            if (chunk + 1) * BLOCKS > HEADS * (KEPT // 16):
                first = _load_turned(x, cos, sin, block * 16, inside, DIM, KEPT, INVERSE)
                last = _load_turned(x, cos, sin, block * 16 + 8, inside, DIM, KEPT, INVERSE)
            else:
                start = x + block[:, None] * 16 + tl.arange(0, 8)[None, :]
                first, last = tl.load(start), tl.load(start + 8)
            firsts += (first,)  # type: ignore[assignment]
            lasts += (last,)  # type: ignore[assignment]
            places += (block,)  # type: ignore[assignment]
        quantize_row(
            firsts,
            lasts,
            places,
            source,
            codes,
            scales,
            total,
            rows,
            blocks,
            scale_rows,
            scale_columns,
            parts,
            SOURCE,
            PER_ROW,
            WEIGHT,
            SWIZZLED,
            BLOCKS,
            CHUNKS,
            PARTS,
            CONVERT,
        )


def rope_quantize(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
    groups: int,
    global_scale: torch.Tensor | None,
    scaling: str,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.rope.rope_quantize``."""
    tokens, heads, dims = x.shape
    columns = heads * dims // groups
    out = Output.empty(x.new_empty((tokens, groups, 0)), columns, global_scale, scaling, layout)
    if out.codes.numel() == 0:
        return out.without_rows()
    # Only where a chunk is no wider than a warp are there chunks without a turn.
    out = replace(out, by_warp=True)
    rows = _rows.as_rows(x.reshape(tokens, heads * dims))
    cos, sin, _ = _rotation.tables(rows, cos, sin)
    tables = (cos, sin, cos.stride(0))
    options = {"DIM": dims, "KEPT": dims - 2 * cos.shape[1], "INVERSE": inverse}
    arguments = (rows, rows.stride(0), *tables, *out.arguments)
    with _launch.on(x):
        if out.by_row:
            _rope_quantize_row_kernel[out.row_grid](
                *arguments, **options, **out.row_options, maxnreg=_REGISTERS
            )
        else:
            _rope_quantize_kernel[out.grid](
                *arguments, **options, **out.options, maxnreg=_REGISTERS
            )
    return out.tensors
