"""Kernels of ``dsv4.ops.rope``: a few rows per program; copied and rotated columns separately."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from dsv4.ops.rope import RopeArgs, RopeQuantizeArgs, RopeTablesArgs
from dsv4.triton._lib import rotation, row_tiles
from dsv4.triton._lib.angles import cos_sin
from dsv4.triton._lib.arrival import arrival, once_here
from dsv4.triton._lib.numerics import narrow, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import narrowed
from dsv4.triton._lib.nvfp4_tile import (
    TOKEN,
    Output,
    blank_scales,
    blank_tile,
    block_peaks,
    loaded_coordinates,
    own_coordinates,
    own_part,
    quantize_row,
    quantize_tile,
)
from dsv4.triton._lib.rotation import load_angles, rotate
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

# Registers of a thread. A thread that keeps 8 blocks of 16: the compiler would take more, and fewer
# programs would fit. A thread of one block: without a number the compiler saves registers, so that
# loads wait for earlier loads.
_REGISTERS = 128
_TABLE_ROWS = 4  # positions of a program, so that a thread has four angles


# Positions of a decode step may be a slice of those of all tokens, at any address.
@fast_launch
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["positions"])
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
    offset = row[:, None] * half + pair[None, :]
    tl.store(cos + offset, c, mask=inside)
    tl.store(sin + offset, s, mask=inside)


def rope_tables(args: RopeTablesArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.rope.rope_tables``."""
    positions = args.positions
    half = args.inv_freq.shape[0]
    cos, sin = (args.inv_freq.new_empty((*positions.shape, half)) for _ in range(2))
    if cos.numel() == 0:
        return cos, sin
    count = positions.numel()
    with launch_options.on(positions):
        _tables_kernel[(triton.cdiv(count, _TABLE_ROWS),)](
            positions.contiguous(),
            args.inv_freq.contiguous(),
            cos,
            sin,
            count,
            half,
            ROWS=_TABLE_ROWS,
            HALF=triton.next_power_of_2(half),
            num_warps=1,
            **launch_options.options(positions),
        )
    return cos, sin


@fast_launch
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
    unrotated,
    half,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    UNROTATED: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = row < count
        source = x + row.to(tl.int64) * stride
        target = out + row.to(tl.int64) * (unrotated + 2 * half)
        column, pair = tl.arange(0, 2 * HALF)[None, :], tl.arange(0, HALF)[None, :]
        rotating = inside & (column < 2 * half)
        angles = inside & (pair < half)
        start = (row // sharing).to(tl.int64) * table_stride
        values = tl.load(source + unrotated + column, mask=rotating, other=0.0)
        c, s = load_angles(cos, sin, start, pair, angles, INVERSE)
        if UNROTATED > 0:
            left = tl.arange(0, UNROTATED)[None, :]
            copied = inside & (left < unrotated)
            same = tl.load(source + left, mask=copied)
            tl.store(target + left, same, mask=copied)
        rotated = narrow(rotate(widen(values), c, s), out.dtype.element_ty)
        tl.store(target + unrotated + column, rotated, mask=rotating)


def _tile(rows: int) -> dict[str, int]:
    """Rows per program: one while there are few; many programs of one row start too slowly."""
    return {"ROWS": 1, "num_warps": 1} if rows <= 1024 else {"ROWS": 16, "num_warps": 4}


def rope(args: RopeArgs) -> torch.Tensor:
    """See ``dsv4.ops.rope.rope``."""
    x, cos, sin = args.x, args.cos, args.sin
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = row_tiles.as_rows(x)
    count, half = rows.shape[0], cos.shape[-1]
    unrotated = rows.shape[1] - 2 * half
    cos, sin, sharing = rotation.tables(x, cos, sin)
    tile = _tile(count)
    with launch_options.on(x):
        _rope_kernel[(triton.cdiv(count, tile["ROWS"]),)](
            rows,
            rows.stride(0),
            cos,
            sin,
            cos.stride(0),
            sharing,
            out,
            count,
            unrotated,
            half,
            INVERSE=args.inverse,
            UNROTATED=launch_options.power_of_two(unrotated) if unrotated else 0,
            HALF=launch_options.power_of_two(half),
            **tile,
            **launch_options.options(x, small=tile["ROWS"] == 1),
        )
    return out


@triton.jit
def _load_rotating(
    x,
    cos,
    sin,
    column,
    inside,
    DIM: tl.constexpr,
    UNROTATED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """8 columns from ``column [N]`` on, a multiple of 8, of a token's heads, and their angles.

    ``[N, 8]`` and twice ``[N, 4]``. They lie in one head, and pairs begin at even columns: DIM is a
    multiple of 16, UNROTATED of 2.
    """
    address = x + column[:, None] + tl.arange(0, 8)[None, :]
    values = tl.load(address, mask=inside[:, None], other=0.0)
    pair = (column % DIM).to(tl.int32)[:, None] // 2 - UNROTATED // 2 + tl.arange(0, 4)[None, :]
    c, s = load_angles(cos, sin, 0, pair, inside[:, None] & (pair >= 0), INVERSE)
    return values, c, s


@triton.jit
def _rotated(values, c, s, column, DIM: tl.constexpr, UNROTATED: tl.constexpr):
    """Rotate what ``_load_rotating`` returned, in its dtype: ``[N, 8]``."""
    rotated = narrowed(rotate(widen(values), c, s), values.dtype)
    in_head = (column % DIM).to(tl.int32)[:, None]
    # Rotation by 0 could change the sign of a zero.
    return tl.where(in_head + tl.arange(0, 8)[None, :] >= UNROTATED, rotated, values)


@triton.jit
def _load_rotated(
    x,
    cos,
    sin,
    column,
    inside,
    DIM: tl.constexpr,
    UNROTATED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Load columns and rotate them: both of the above."""
    values, c, s = _load_rotating(x, cos, sin, column, inside, DIM, UNROTATED, INVERSE)
    return _rotated(values, c, s, column, DIM, UNROTATED)


@triton.jit
def _unrotated_first(index, heads, UNROTATED: tl.constexpr, ALL: tl.constexpr):
    """Blocks of ``heads`` heads reordered: UNROTATED of the ALL of every head, then the others.

    So the chunks of most programs have no rotated blocks, and no warp waits for a few rotations.
    """
    if UNROTATED == 0 or UNROTATED == ALL:
        return index
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        rotated = index - heads * UNROTATED
        still = index // UNROTATED * ALL + index % UNROTATED
        other = rotated // (ALL - UNROTATED) * ALL + UNROTATED + rotated % (ALL - UNROTATED)
        return tl.where(rotated < 0, still, other)


@triton.jit
def _part_of_row(
    x,
    cos,
    sin,
    start,
    pieces,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    UNROTATED: tl.constexpr,
    INVERSE: tl.constexpr,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """N pieces of the row from column ``start`` on, which CHUNKS programs share.

    Returns them rotated, ``[N, 8]``, which they are, ``[N]``, and the ``block_peaks`` of the whole
    row. A chunk without rotated columns skips the rotation: see ``_unrotated_first``.
    """
    ALL: tl.constexpr = DIM // 16
    FIRST: tl.constexpr = HEADS * (UNROTATED // 16) // (N // 2)  # first chunk with rotated columns
    here = tl.zeros([N], tl.int32)
    numbers, loaded, cosines, sines = (), (), (), ()
    for chunk in tl.static_range(CHUNKS):
        index = chunk * N + tl.arange(0, N)
        block = _unrotated_first(index // 2, HEADS, UNROTATED // 16, ALL)
        number = tl.where(index // 2 < HEADS * ALL, 2 * block + index % 2, index)
        column = start + number * 8
        if chunk < FIRST:
            inside = (number < pieces)[:, None]
            values = tl.load(x + column[:, None] + tl.arange(0, 8)[None, :], mask=inside, other=0.0)
        else:
            values, c, s = _load_rotating(
                x, cos, sin, column, number < pieces, DIM, UNROTATED, INVERSE
            )
            here |= arrival(c, N) | arrival(s, N)
            cosines += (c,)  # type: ignore[assignment]
            sines += (s,)  # type: ignore[assignment]
        here |= arrival(values, N)
        numbers += (number,)  # type: ignore[assignment]
        loaded += (values,)  # type: ignore[assignment]
    part = tl.program_id(0) % CHUNKS
    for chunk in tl.static_range(CHUNKS):
        values = once_here(loaded[chunk], here)
        if chunk >= FIRST:
            column = start + numbers[chunk] * 8
            c, s = cosines[chunk - FIRST], sines[chunk - FIRST]
            values = _rotated(values, c, s, column, DIM, UNROTATED)
        peak = block_peaks(values)
        if chunk == 0:
            own, number, peaks = values, numbers[0], peak  # type: ignore[misc]
        else:
            own = tl.where(part == chunk, values, own)
            number = tl.where(part == chunk, numbers[chunk], number)
            peaks = tl.maximum(peaks, peak)
    return own, number, peaks


@fast_launch
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
    partials,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    UNROTATED: tl.constexpr,
    INVERSE: tl.constexpr,
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
    """Blocks of the groups (rows) of one token (matrix); HEADS of a row, 0 of parts of heads."""
    SEPARATE: tl.constexpr = WHOLE > 0 and HEADS > 0 and DIM % 16 == 0 and UNROTATED % 16 == 0
    N: tl.constexpr = ROWS * BLOCKS * 2
    number = tl.program_id(0) - tl.cdiv(rows, ROWS) * CHUNKS
    if number >= 0:
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            blank_tile(scales, rows, scale_rows, scale_columns, number, N)
    else:
        token, row, piece = loaded_coordinates(ROWS, BLOCKS, CHUNKS, WHOLE)
        _, _, own_piece = own_coordinates(ROWS, BLOCKS, CHUNKS)
        x, cos, sin = x + token * stride, cos + token * table_stride, sin + token * table_stride
        column = (row * blocks * 2 + piece) * 8
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            inside = (row < rows) & (piece < 2 * blocks)
            if SEPARATE:
                start = (tl.program_id(0) // CHUNKS).to(tl.int64) * blocks * 16
                values, own, peaks = _part_of_row(
                    x, cos, sin, start, 2 * blocks, HEADS, DIM, UNROTATED, INVERSE, N, CHUNKS
                )
            else:
                values = _load_rotated(x, cos, sin, column, inside, DIM, UNROTATED, INVERSE)
                peaks = block_peaks(values) if SOURCE == TOKEN else None
                values = own_part(values, tl.program_id(0) % CHUNKS, N)
                own = own_piece
            quantize_tile(
                values,
                peaks,
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
                own,
            )


@fast_launch
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
    partials,
    DIM: tl.constexpr,
    UNROTATED: tl.constexpr,
    INVERSE: tl.constexpr,
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
    """Rotate and quantise one group (row) of one token (matrix)."""
    wait_for_inputs(PDL)
    row, token = tl.program_id(0), tl.program_id(2).to(tl.int64)
    if row >= rows:
        blank_scales(scales, scale_rows, scale_columns, SWIZZLED, BLOCKS, CHUNKS)
    else:
        HEADS: tl.constexpr = BLOCKS * CHUNKS // (DIM // 16)
        x += token * stride + row.to(tl.int64) * (HEADS * DIM)
        cos, sin = cos + token * table_stride, sin + token * table_stride
        firsts, lasts, block_numbers = (), (), ()
        for chunk in tl.static_range(CHUNKS):
            index = chunk * BLOCKS + tl.arange(0, BLOCKS)
            block = _unrotated_first(index, HEADS, UNROTATED // 16, DIM // 16)
            inside = block < blocks
            if (chunk + 1) * BLOCKS > HEADS * (UNROTATED // 16):
                first = _load_rotated(x, cos, sin, block * 16, inside, DIM, UNROTATED, INVERSE)
                last = _load_rotated(x, cos, sin, block * 16 + 8, inside, DIM, UNROTATED, INVERSE)
            else:
                start = x + block[:, None] * 16 + tl.arange(0, 8)[None, :]
                first, last = tl.load(start), tl.load(start + 8)
            firsts += (first,)  # type: ignore[assignment]
            lasts += (last,)  # type: ignore[assignment]
            block_numbers += (block,)  # type: ignore[assignment]
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


def rope_quantize(args: RopeQuantizeArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.rope.rope_quantize``."""
    cos, sin = args.cos, args.sin
    tokens, heads, dims = args.x.shape
    columns = heads * dims // args.groups
    out = Output.empty(
        args.x.new_empty((tokens, args.groups, 0)),
        columns,
        args.global_scale,
        args.scaling,
        args.layout,
    )
    if out.codes.numel() == 0:
        return out.without_rows()
    # Only where a chunk is no wider than a warp are there chunks without rotated columns.
    out = replace(out, by_warp=True)
    rows = row_tiles.as_rows(args.x.reshape(tokens, heads * dims))
    cos, sin, _ = rotation.tables(rows, cos, sin)
    tables = (cos, sin, cos.stride(0))
    options = {"DIM": dims, "UNROTATED": dims - 2 * cos.shape[1], "INVERSE": args.inverse}
    arguments = (rows, rows.stride(0), *tables, *out.arguments)
    with launch_options.on(args.x):
        if out.by_row:
            _rope_quantize_row_kernel[out.row_grid](
                *arguments, **options, **out.row_options, maxnreg=_REGISTERS
            )
        else:
            _rope_quantize_kernel[out.grid](
                *arguments,
                HEADS=0 if columns % dims else columns // dims,
                WHOLE=out.whole,
                **options,
                **out.options,
                maxnreg=_REGISTERS,
            )
    return out.tensors
