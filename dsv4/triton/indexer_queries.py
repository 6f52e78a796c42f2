"""Kernels of ``dsv4.ops.indexer`` that make queries: RoPE, Hadamard transform, rounding, codes.

Of ``indexer_rotate_quantize``, ``indexer_queries`` and ``quantize_index_queries``. A program has
some rows, each the query of a head, in tiles of neighbouring columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.ops.indexer import IndexerQueriesArgs, IndexerRotateQuantizeArgs, QuantizeIndexQueriesArgs
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.hadamard import hadamard, hadamard_row, rotate_quantize, rotate_quantize_row
from dsv4.triton._lib.index_keys import e4m3_scale, mxfp4_rows, mxfp4_tile
from dsv4.triton._lib.numerics import e4m3_tile, narrow, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import conversion, larger, largest, narrowed
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_TILE = 256  # values of a program of the query kernel where values are few; 16 times as many else
_SMALL_VALUES, _LARGE_VALUES = (
    1 << 16,
    1 << 20,
)  # values up to which programs are small, medium


@triton.jit
def _rotate_columns(x, cos, sin, inside, START: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Columns START and following of queries ``x [ROWS, WIDTH]``, rotated where they are to be.

    Interleaved pairs; compiled without contraction, so that both multiplications round as they do
    in separate operators. Other columns keep their bits. ``cos`` and ``sin`` point to
    the angles of each row.
    """
    ROWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    first, second = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
    angle = START // 2 + tl.arange(0, PAIRS) - (D // 2 - HALF)
    mask = inside[:, None]
    if START < D - 2 * HALF or START + x.shape[1] > D:
        mask = mask & ((angle >= 0) & (angle < HALF))[None, :]
    c = widen(tl.load(cos[:, None] + angle[None, :], mask=mask, other=1.0))
    s = widen(tl.load(sin[:, None] + angle[None, :], mask=mask, other=0.0))
    a, b = widen(first), widen(second)
    result = narrowed(tl.reshape(tl.join(a * c - b * s, b * c + a * s), x.shape), x.dtype)
    if START < D - 2 * HALF or START + x.shape[1] > D:
        mask = tl.broadcast_to(mask, first.shape)
        result = tl.where(tl.reshape(tl.join(mask, mask), x.shape), result, x)
    return result


@triton.jit
def _load_tiles(
    x,
    cos,
    sin,
    row,
    inside,
    strides,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Queries after RoPE: a tuple of tiles ``[ROWS, WIDTH]``, neighbours, zeros past D.

    All are loaded before the first is rotated.
    """
    token_stride, head_stride, cos_stride = strides
    TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    token = row // HEADS
    x += token * token_stride + row % HEADS * head_stride
    column = tl.arange(0, WIDTH)[None, :]
    loaded, tiles = (), ()
    for tile in tl.static_range(TILES):
        mask = inside[:, None] & (tile * WIDTH + column < D)
        loaded += (tl.load(x[:, None] + (tile * WIDTH + column), mask=mask, other=0.0),)  # type: ignore[assignment]
    for tile in tl.static_range(TILES):
        values = loaded[tile]  # type: ignore[misc, var-annotated]
        if HALF > 0 and (tile + 1) * WIDTH > D - 2 * HALF:
            offset = token * cos_stride
            values = _rotate_columns(
                values, cos + offset, sin + offset, inside, tile * WIDTH, D, HALF
            )
        tiles += (values,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _widened(tiles, TILES: tl.constexpr):
    made = ()
    for tile in tl.static_range(TILES):
        made += (widen(tiles[tile]),)  # type: ignore[assignment]
    return made


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _queries_kernel(
    x,
    cos,
    sin,
    out,
    rows,
    token_stride,
    head_stride,
    cos_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTATE: tl.constexpr,
    SM: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        DTYPE: tl.constexpr = x.dtype.element_ty
        TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        strides = (token_stride, head_stride, cos_stride)
        tiles = _load_tiles(x, cos, sin, row, inside, strides, HEADS, D, HALF, WIDTH)
        if ROTATE:
            if TILED:
                tiles = rotate_quantize(_widened(tiles, TILES), TILES, DTYPE, SM)
            else:
                tiles = (narrow(rotate_quantize_row(widen(tiles[0]), D, DTYPE), DTYPE),)
        for tile in tl.static_range(TILES):
            column = tile * WIDTH + tl.arange(0, WIDTH)[None, :]
            mask = inside[:, None] & (column < D)
            tl.store(out + row[:, None] * D + column, tiles[tile], mask=mask)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _codes_kernel(
    x,
    cos,
    sin,
    weights,
    codes,
    scales,
    folded,
    rows,
    token_stride,
    head_stride,
    cos_stride,
    weight_scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROTATE: tl.constexpr,
    FORMAT: tl.constexpr,
    CONVERT: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        strides = (token_stride, head_stride, cos_stride)
        tiles = _load_tiles(x, cos, sin, row, inside, strides, HEADS, D, HALF, WIDTH)
        weight = widen(tl.load(weights + row, mask=inside, other=0.0)) * weight_scale
        # With few rows: stored last, it would be loaded last, a second trip to memory.
        EARLY: tl.constexpr = FORMAT != "fp8" and TILES <= 2
        if EARLY:
            tl.store(folded + row, weight, mask=inside)
        if ROTATE:
            if TILED:
                rotated = hadamard(_widened(tiles, TILES), TILES)
                tiles = ()
                for tile in tl.static_range(TILES):
                    tiles += (narrowed(rotated[tile], DTYPE),)  # type: ignore[misc, assignment]
            else:
                tiles = (narrow(hadamard_row(widen(tiles[0]), D), DTYPE),)
        if FORMAT == "fp8":
            weight *= _store_e4m3(codes, tiles, row, inside, D)
        else:
            _store_mxfp4(codes, scales, tiles, row, inside, D, CONVERT, TILED)
        if not EARLY:
            tl.store(folded + row, weight, mask=inside)


@triton.jit
def _store_e4m3(codes, tiles, row, inside, D: tl.constexpr):
    """Store the codes of rows of D columns; returns the scale of each row."""
    WIDTH: tl.constexpr = tiles[0].shape[1]
    TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    peak = largest(widen(tiles[0]))
    for tile in tl.static_range(1, TILES):
        peak = larger(peak, largest(widen(tiles[tile])))
    factor, scale = e4m3_scale(peak)
    for tile in tl.static_range(TILES):
        column = tile * WIDTH + tl.arange(0, WIDTH)[None, :]
        bits = e4m3_tile(widen(tiles[tile]) * factor[:, None])
        tl.store(codes + row[:, None] * D + column, bits, mask=inside[:, None] & (column < D))
    return scale


@triton.jit
def _store_mxfp4(
    codes, scales, tiles, row, inside, D: tl.constexpr, CONVERT: tl.constexpr, TILED: tl.constexpr
):
    """Store the codes and scales of rows of D columns."""
    WIDTH: tl.constexpr = tiles[0].shape[1]
    for tile in tl.static_range((D + WIDTH - 1) // WIDTH):
        if TILED:
            packed, bits = mxfp4_tile(tiles[tile], CONVERT)
        else:
            packed, bits = mxfp4_rows(widen(tiles[tile]), CONVERT)
        byte = tile * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        mask = inside[:, None] & (byte < D // 2)
        tl.store(codes + row[:, None] * (D // 2) + byte, packed, mask=mask)
        group = tile * (WIDTH // 32) + tl.arange(0, WIDTH // 32)[None, :]
        mask = inside[:, None] & (group < D // 32)
        tl.store(scales + row[:, None] * (D // 32) + group, bits, mask=mask)


def indexer_rotate_quantize(args: IndexerRotateQuantizeArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_rotate_quantize``."""
    rows = row_tiles.as_rows(args.x)
    out = torch.empty_like(args.x, memory_format=torch.contiguous_format)
    _launch_queries(rows.unsqueeze(1), None, None, out, True)
    return out


def indexer_queries(args: IndexerQueriesArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_queries``."""
    q = args.q
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch_queries(q, args.cos.contiguous(), args.sin.contiguous(), out, args.rotate_quantize)
    return out


def quantize_index_queries(
    args: QuantizeIndexQueriesArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.indexer.quantize_index_queries``."""
    q = args.q
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, heads, d = q.shape
    fp8 = args.query_format == "fp8"
    codes = q.new_empty((tokens, heads, d if fp8 else d // 2), dtype=torch.uint8)
    scales = q.new_empty((tokens, heads, 0 if fp8 else d // 32), dtype=torch.uint8)
    folded = q.new_empty((tokens, heads), dtype=torch.float32)
    if folded.numel():
        tile = _query_tile(q)
        with launch_options.on(q):
            _codes_kernel[(triton.cdiv(tokens * heads, tile["ROWS"]),)](
                q,
                args.cos.contiguous(),
                args.sin.contiguous(),
                args.weights.contiguous(),
                codes,
                scales,
                folded,
                tokens * heads,
                q.stride(0),
                q.stride(1),
                args.cos.shape[1],
                args.weight_scale,
                HEADS=heads,
                D=d,
                HALF=args.cos.shape[1],
                ROTATE=args.rotate,
                FORMAT=args.query_format,
                CONVERT=conversion(q),
                **tile,
                **_without_contraction(q, small=True),
            )
    if fp8:
        codes = codes.view(torch.float8_e4m3fn)
    return codes, scales.view(torch.float8_e8m0fnu), folded


def _query_tile(q: torch.Tensor) -> dict[str, Any]:
    """Rows of a program of the query kernels, columns of its tiles, and its warps.

    TILED: whether threads load 16 bytes of bfloat16 at a time, as ``_hadamard`` wants tiles. Then
    the fewer values there are, the wider are the tiles, up to a row: more threads share a row.
    """
    tokens, heads, d = q.shape
    width = launch_options.power_of_two(d)
    values = tokens * heads * width
    # Triton knows of a size that it is a multiple of 16, or nothing.
    whole = d % 32 == 0 and q.data_ptr() % 16 == 0 and not any(n % 16 for n in q.stride()[:2])
    if q.dtype != torch.bfloat16 or not whole:
        rows = _TILE if values <= _LARGE_VALUES else 4 * _TILE
        return {"TILED": False, "ROWS": max(1, rows // width), "WIDTH": width, "num_warps": 1}
    if values <= _SMALL_VALUES or d % 64:
        return {"TILED": True, "ROWS": max(1, _TILE // width), "WIDTH": width, "num_warps": 1}
    if values <= _LARGE_VALUES:
        tall = max(1, 2 * _TILE // width)
        return {"TILED": True, "ROWS": tall, "WIDTH": width // 2, "num_warps": 1}
    tall = max(8, 16 * _TILE // width)
    return {"TILED": True, "ROWS": tall, "WIDTH": 32, "num_warps": min(4, tall // 8)}


def _launch_queries(
    q: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    out: torch.Tensor,
    rotate_quantize: bool,
) -> None:
    if out.numel() == 0:
        return
    tokens, heads, d = q.shape
    half = 0 if cos is None else cos.shape[1]
    tile = _query_tile(q)
    with launch_options.on(q):
        _queries_kernel[(triton.cdiv(tokens * heads, tile["ROWS"]),)](
            q,
            cos,
            sin,
            out,
            tokens * heads,
            q.stride(0),
            q.stride(1),
            half,
            HEADS=heads,
            D=d,
            HALF=half,
            ROTATE=rotate_quantize,
            SM=launch_options.sm(q),
            **tile,
            **_without_contraction(q, small=tokens * heads <= 1024),
        )


def _without_contraction(tensor: torch.Tensor, small: bool) -> dict[str, Any]:
    options = launch_options.options(tensor, small)
    return {key: False if key == "enable_fp_fusion" else value for key, value in options.items()}
