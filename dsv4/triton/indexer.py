"""Kernels of ``dsv4.ops.indexer``: queries, scores, and the choice of the highest.

Scores go to a scratch buffer as integers that order as the scores do, then one program per token
chooses. It finds the k-th highest key by a search over keys held in registers. A long row is first
reduced to what reaches a threshold that at least k keys reach: the k-th highest of the maxima of
some 2 k classes, which few more than k do. Of very long rows the score kernel keeps the maximum of
every group of neighbouring entries; the threshold is that of these, and only groups that reach it
are read. Where too many do, because they are equal, the row is searched in pieces.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.triton import _launch, _rows
from dsv4.triton._hadamard import hadamard, hadamard_row, rotate_quantize, rotate_quantize_row
from dsv4.triton._index_entries import (
    e4m3_scale,
    e4m3_values,
    expand_words,
    fetch_words,
    in_word_order,
    load_fp4_queries,
    load_keys,
    mxfp4_rows,
    mxfp4_tile,
    mxfp4_values,
)
from dsv4.triton._numerics import INTERPRETED, e4m3_tile, narrow, wait_for_inputs, widen
from dsv4.triton._nvfp4 import conversion, larger, largest, narrowed

_TILE = 256  # values of one program of the query kernel, or 16 times as many
_FEW, _MANY = 1 << 16, 1 << 20  # values up to which such programs are small, or not large
_SCORE_BYTES = 64 << 20  # of keys of scores at a time
_SEARCHED = 8192  # entries up to which a row is searched as it is
_DIRECT = 16384  # and up to which it is without groups
_GROUP = 8  # entries per group, or twice as many
_LONG = 131072  # entries from which groups are the larger ones
_FEWEST, _USUAL, _MOST = 4, 16, 32  # warps of the selection; most of many chosen of long rows
_SHARED_FROM = 128  # tokens from which neighbours share the tiles of their sequence
_COLUMNS = 256  # heads of all tokens that share a tile

# Of the score kernels: entries per tile, tiles in flight, warps, programs for each multiprocessor.
# By whether tokens share tiles, None for float32 operands; by format where blocks are in pages.
_SHAPES = {
    False: (64, 3, 4, 4),
    True: (64, 3, 8, 4),
    None: (32, 2, 4, 4),
    "plain": (64, 5, 4, 3),
    "index_fp8": (64, 1, 4, 4),
    "index_mxfp4": (64, 1, 4, 4),
}

_LOWEST = tl.constexpr(-0x80000000)  # flipped in a key, makes the order unsigned: 0 is none
_TOP = tl.constexpr(0x80000000)  # the same bit, unsigned
_BINADE = tl.constexpr(1 << 23)  # from a key to that of half the score


@triton.jit
def _turn(x, cos, sin, inside, START: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Columns START and following of queries ``x [ROWS, WIDTH]``, turned where they are to be.

    Interleaved pairs; compiled without contraction, so that both products round as they do in
    separate operators. Columns that are not turned keep their bits. ``cos`` and ``sin`` point to
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

    All are loaded before the first is turned.
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
            place = token * cos_stride
            values = _turn(values, cos + place, sin + place, inside, tile * WIDTH, D, HALF)
        tiles += (values,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _widened(tiles, TILES: tl.constexpr):
    made = ()
    for tile in tl.static_range(TILES):
        made += (widen(tiles[tile]),)  # type: ignore[assignment]
    return made


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
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    strides = (token_stride, head_stride, cos_stride)
    tiles = _load_tiles(x, cos, sin, row, inside, strides, HEADS, D, HALF, WIDTH)
    if ROTATE:
        if TILED:
            tiles = rotate_quantize(_widened(tiles, TILES), TILES, DTYPE)
        else:
            tiles = (narrow(rotate_quantize_row(widen(tiles[0]), D, DTYPE), DTYPE),)
    for tile in tl.static_range(TILES):
        column = tile * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = inside[:, None] & (column < D)
        tl.store(out + row[:, None] * D + column, tiles[tile], mask=mask)


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
    wait_for_inputs(PDL)
    DTYPE: tl.constexpr = x.dtype.element_ty
    TILES: tl.constexpr = (D + WIDTH - 1) // WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    strides = (token_stride, head_stride, cos_stride)
    tiles = _load_tiles(x, cos, sin, row, inside, strides, HEADS, D, HALF, WIDTH)
    weight = widen(tl.load(weights + row, mask=inside, other=0.0)) * weight_scale
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


def indexer_rotate_quantize(x: torch.Tensor) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_rotate_quantize``."""
    rows = _rows.as_rows(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch_queries(rows.unsqueeze(1), None, None, out, True)
    return out


def indexer_queries(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotate_quantize: bool
) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_queries``."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch_queries(q, cos.contiguous(), sin.contiguous(), out, rotate_quantize)
    return out


def quantize_index_queries(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: torch.Tensor,
    rotate: bool,
    query_format: str,
    weight_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.indexer.quantize_index_queries``."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    tokens, heads, d = q.shape
    fp8 = query_format == "fp8"
    codes = q.new_empty((tokens, heads, d if fp8 else d // 2), dtype=torch.uint8)
    scales = q.new_empty((tokens, heads, 0 if fp8 else d // 32), dtype=torch.uint8)
    folded = q.new_empty((tokens, heads), dtype=torch.float32)
    if folded.numel():
        tile = _query_tile(q)
        with _launch.on(q):
            _codes_kernel[(triton.cdiv(tokens * heads, tile["ROWS"]),)](
                q,
                cos.contiguous(),
                sin.contiguous(),
                weights.contiguous(),
                codes,
                scales,
                folded,
                tokens * heads,
                q.stride(0),
                q.stride(1),
                cos.shape[1],
                weight_scale,
                HEADS=heads,
                D=d,
                HALF=cos.shape[1],
                ROTATE=rotate,
                FORMAT=query_format,
                CONVERT=conversion(q),
                **tile,
                **_without_contraction(q),
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
    width = _launch.power_of_two(d)
    values = tokens * heads * width
    # Triton knows of a size that it is a multiple of 16, or nothing.
    whole = d % 32 == 0 and q.data_ptr() % 16 == 0 and not any(n % 16 for n in q.stride()[:2])
    if q.dtype != torch.bfloat16 or not whole:
        rows = _TILE if values <= _MANY else 4 * _TILE
        return {"TILED": False, "ROWS": max(1, rows // width), "WIDTH": width, "num_warps": 1}
    if values <= _FEW or d % 64:
        return {"TILED": True, "ROWS": max(1, _TILE // width), "WIDTH": width, "num_warps": 1}
    if values <= _MANY:
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
    with _launch.on(q):
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
            **tile,
            **_without_contraction(q),
        )


def _without_contraction(tensor: torch.Tensor) -> dict[str, Any]:
    options = _launch.options(tensor)
    return {key: False if key == "enable_fp_fusion" else value for key, value in options.items()}


@triton.jit
def _key_of(score):
    """int32 that orders as float32 scores do: zeros are equal, every NaN is the highest.

    And lower than the highest int32, so that there is a key above each.
    """
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFE, key)


@triton.jit
def _shown(visible, token, inside, capacity, k):
    # Entries to be scored: none where the token will get all it sees.
    count = tl.load(visible + token, mask=inside, other=0)
    count = tl.minimum(count, capacity).to(tl.int32)
    return tl.where(count > k, count, 0)


@triton.jit
def _key_tile(
    keys,
    table,
    entry,
    end,
    size,
    page_stride,
    entry_stride,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    # Entries of one sequence, [BLOCK, DIMS]; zeros past `end`, where there need not be a page. And
    # by what their scores are to be multiplied.
    seen = entry < end
    page = tl.load(table + entry // size, mask=seen, other=0).to(tl.int64)
    start = tl.maximum(page, 0) * page_stride
    if KEYS == "plain":
        place = start + entry % size * entry_stride
        dim = tl.arange(0, DIMS)
        mask = seen[:, None] & (dim < D)[None, :]
        tile = tl.load(keys + place[:, None] + dim[None, :], mask=mask, other=0.0)
        return tile, tl.full(seen.shape, 1.0, tl.float32)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return load_keys(keys, start, entry % size, size, seen, D, DIMS, KEYS, OPERAND)


@triton.jit
def _query_tile_of(
    q,
    q_scales,
    token,
    head,
    real,
    token_stride,
    head_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    QUERIES: tl.constexpr,
    OPERAND: tl.constexpr,
):
    # Queries of some heads of some tokens, [N, DIMS]; zeros where they are not real.
    COLUMNS: tl.constexpr = D // 2 if QUERIES == "mxfp4" else D
    column = tl.arange(0, DIMS // 2 if QUERIES == "mxfp4" else DIMS)[None, :]
    place = q + (token * token_stride + head * head_stride)[:, None] + column
    tile = tl.load(place, mask=real[:, None] & (column < COLUMNS), other=0)
    if QUERIES == "fp8":
        tile = e4m3_values(tile, OPERAND)
    elif QUERIES == "mxfp4":
        group = tl.arange(0, DIMS // 32)[None, :]
        place = q_scales + (token * H + head)[:, None] * (D // 32) + group
        scales = tl.load(place, mask=real[:, None] & (group < D // 32), other=0)
        tile = mxfp4_values(tile, scales, OPERAND)
    return tile


@triton.jit
def _dot(a, b, OPERAND: tl.constexpr):
    # "else" matters: Triton 3.6 compiles what follows a return, and refuses two operand types.
    if INTERPRETED or tl.float32 == OPERAND:
        return tl.dot(widen(a), widen(b), input_precision="ieee")
    else:  # noqa: RET505
        return tl.dot(a, b)


@triton.jit
def _score_tokens(
    q,
    q_scales,
    weights,
    keys,
    table,
    visible,
    scores,
    maxima,
    first,
    sequence,
    end,
    tokens,
    capacity,
    k,
    page_size,
    token_stride,
    head_stride,
    page_stride,
    entry_stride,
    table_stride,
    score_stride,
    maxima_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    # TOKENS neighbours of one sequence against its entries below `end`.
    column = tl.arange(0, TOKENS * HEADS)
    token, head = first + column // HEADS, column % HEADS
    real = (token < tokens) & (head < H)
    query = _query_tile_of(
        q, q_scales, token, head, real, token_stride, head_stride, H, D, DIMS, QUERIES, OPERAND
    )
    query = tl.trans(query)
    weight = widen(tl.load(weights + token * H + head, mask=real, other=0.0))
    of = first + tl.arange(0, TOKENS)
    shown = _shown(visible, of, of < tokens, capacity, k)
    table += sequence * table_stride
    size = page_size if PAGE == 0 else PAGE
    for block in tl.range(
        tl.program_id(1), tl.cdiv(end, BLOCK), tl.num_programs(1), num_stages=STAGES
    ):
        entry = block * BLOCK + tl.arange(0, BLOCK)
        tile, scale = _key_tile(
            keys, table, entry, end, size, page_stride, entry_stride, D, DIMS, KEYS, OPERAND
        )
        dots = _dot(tile, query, OPERAND)
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        score = tl.sum(tl.reshape(dots, [BLOCK, TOKENS, HEADS]), 2)
        if KEYS == "index_fp8":
            # A power of two, by which no sum and no maximum would round otherwise.
            score = score * scale[:, None]
        key = _key_of(score)
        seen = entry[:, None] < shown[None, :]
        out = scores + (of * score_stride)[None, :] + entry[:, None]
        tl.store(out, key ^ _LOWEST, mask=seen)
        if GROUP > 0:
            highest = tl.reshape(tl.where(seen, key, _LOWEST), [BLOCK // GROUP, GROUP, TOKENS])
            group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            tl.store(
                maxima + (of * maxima_stride)[None, :] + group[:, None],
                tl.max(highest, 1) ^ _LOWEST,
                mask=group[:, None] * GROUP < shown[None, :],
            )


@triton.jit(do_not_specialize=["tokens", "k", "page_size"])
def _score_kernel(
    q,
    q_scales,
    weights,
    keys,
    table,
    sequences,
    visible,
    scores,
    maxima,
    tokens,
    capacity,
    k,
    page_size,
    token_stride,
    head_stride,
    page_stride,
    entry_stride,
    table_stride,
    score_stride,
    maxima_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    token = first + tl.arange(0, TOKENS)
    shown = _shown(visible, token, token < tokens, capacity, k)
    sequence = tl.load(sequences + token, mask=token < tokens, other=0).to(tl.int64)
    sequence = tl.maximum(sequence, 0)
    end = tl.max(shown, 0)
    # Tokens without anything to score agree with any sequence.
    lowest = tl.min(tl.where(shown > 0, sequence, 0x7FFFFFFFFFFFFFFF), 0)
    highest = tl.max(tl.where(shown > 0, sequence, 0), 0)
    if end > 0:
        if TOKENS == 1 or lowest == highest:
            _score_tokens(
                q,
                q_scales,
                weights,
                keys,
                table,
                visible,
                scores,
                maxima,
                first,
                highest,
                end,
                tokens,
                capacity,
                k,
                page_size,
                token_stride,
                head_stride,
                page_stride,
                entry_stride,
                table_stride,
                score_stride,
                maxima_stride,
                H,
                D,
                PAGE,
                KEYS,
                QUERIES,
                OPERAND,
                TOKENS,
                HEADS,
                DIMS,
                BLOCK,
                GROUP,
                STAGES,
            )
        else:
            for i in range(TOKENS):
                one = token == first + i
                _score_tokens(
                    q,
                    q_scales,
                    weights,
                    keys,
                    table,
                    visible,
                    scores,
                    maxima,
                    first + i,
                    tl.max(tl.where(one, sequence, 0), 0),
                    tl.max(tl.where(one, shown, 0), 0),
                    tokens,
                    capacity,
                    k,
                    page_size,
                    token_stride,
                    head_stride,
                    page_stride,
                    entry_stride,
                    table_stride,
                    score_stride,
                    maxima_stride,
                    H,
                    D,
                    PAGE,
                    KEYS,
                    QUERIES,
                    OPERAND,
                    1,
                    HEADS,
                    DIMS,
                    BLOCK,
                    GROUP,
                    STAGES,
                )


@triton.jit
def _entry_tile(
    keys, page, within, page_stride, entry_stride, BLOCK: tl.constexpr, D: tl.constexpr
):
    # Neighbouring entries of one page.
    start = keys + tl.maximum(page, 0).to(tl.int64) * page_stride
    place = (within + tl.arange(0, BLOCK)) * entry_stride
    return tl.load(start + place[:, None] + tl.arange(0, D)[None, :])


@triton.jit
def _store_block(
    dots,
    scale,
    weight,
    scores,
    maxima,
    block,
    end,
    GROUP: tl.constexpr,
):
    # Keys of the scores of a block, from products with each head, and their groups' maxima.
    BLOCK: tl.constexpr = dots.shape[0]
    dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    # The scale is a power of two, by which no sum and no maximum would round otherwise.
    key = _key_of(tl.sum(dots, 1) * scale)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    seen = entry < end
    _store_where(scores + entry, key ^ _LOWEST, seen)
    if GROUP > 0:
        highest = tl.reshape(tl.where(seen, key, _LOWEST), [BLOCK // GROUP, GROUP])
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        _store_where(maxima + group, tl.max(highest, 1) ^ _LOWEST, group * GROUP < end)


@triton.jit(do_not_specialize=["k"])
def _score_pages_kernel(
    q,
    q_scales,
    weights,
    keys,
    table,
    sequences,
    visible,
    scores,
    maxima,
    capacity,
    k,
    token_stride,
    head_stride,
    page_stride,
    entry_stride,
    table_stride,
    score_stride,
    maxima_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    OPERAND: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As ``_score_kernel``, a token to a program, where every block lies within a page.

    Then its page is one number and all of the block is read, whatever there is past the end. Codes
    go from memory straight to the registers that they are operands in, a block ahead.
    """
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(visible + token), capacity).to(tl.int32)
    if end > k:
        sequence = tl.maximum(tl.load(sequences + token).to(tl.int64), 0)
        table += sequence * table_stride
        scores += token * score_stride
        maxima += token * maxima_stride
        first, step, count = tl.program_id(1), tl.num_programs(1), tl.cdiv(end, BLOCK)
        head = tl.arange(0, HEADS)
        real = head < H
        if KEYS != "plain":
            # The page after next is known when the next block is asked for.
            block = tl.minimum(first, count - 1)
            page = tl.load(table + block * BLOCK // PAGE)
            within = block * BLOCK % PAGE
            a, b, s = fetch_words(keys, page, within, page_stride, PAGE, BLOCK, KEYS)
            block = tl.minimum(first + step, count - 1)
            page = tl.load(table + block * BLOCK // PAGE)
            within = block * BLOCK % PAGE
        weight = widen(tl.load(weights + token * H + head, mask=real, other=0.0))
        if KEYS == "index_mxfp4" and QUERIES == "mxfp4":
            place = (q + token * token_stride).to(tl.pointer_type(tl.int32))
            scales = q_scales.to(tl.pointer_type(tl.int32)) + token * H
            place += head * (head_stride // 4)
            query, query_scale = load_fp4_queries(place, scales + head, real)
            weight *= query_scale
        else:
            query = _query_tile_of(
                q,
                q_scales,
                token,
                head,
                real,
                token_stride,
                head_stride,
                H,
                D,
                D,
                QUERIES,
                OPERAND,
            )
            if KEYS != "plain":
                query = in_word_order(query, KEYS)
        query = tl.trans(query)
        if KEYS == "plain":
            one = tl.full([BLOCK], 1.0, tl.float32)
            for block in tl.range(first, count, step, num_stages=STAGES):
                page = tl.load(table + block * BLOCK // PAGE)
                within = block * BLOCK % PAGE
                tile = _entry_tile(keys, page, within, page_stride, entry_stride, BLOCK, D)
                dots = _dot(tile, query, OPERAND)
                _store_block(dots, one, weight, scores, maxima, block, end, GROUP)
        else:
            for block in tl.range(first, count, step, num_stages=1):
                c, d, t = fetch_words(keys, page, within, page_stride, PAGE, BLOCK, KEYS)
                later = tl.minimum(block + 2 * step, count - 1)
                page = tl.load(table + later * BLOCK // PAGE)
                within = later * BLOCK % PAGE
                tile, scale = expand_words(a, b, s, KEYS, OPERAND)
                dots = _dot(tile, query, OPERAND)
                _store_block(dots, scale, weight, scores, maxima, block, end, GROUP)
                a, b, s = c, d, t


@triton.jit
def _store_where(pointer, value, flag):
    """Store where the flag is set. ``tl.store`` would move the operands to another layout first."""
    if INTERPRETED:
        tl.store(pointer, value, mask=flag)
    elif value.dtype == tl.int64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r",
            [pointer.to(tl.int64), value, flag.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointer.to(tl.int64), value, flag.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _ones(bits):
    """Number of bits that are set, of 16."""
    if INTERPRETED:
        bits = (bits & 0x5555) + ((bits >> 1) & 0x5555)
        bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
        bits = (bits & 0x0F0F) + ((bits >> 4) & 0x0F0F)
        return (bits & 0x1F) + (bits >> 8)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [bits], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _reach(keys, threshold):
    """How many keys (uint32 ``[T, N]``) reach a threshold."""
    return tl.sum(tl.sum((keys >= threshold).to(tl.int32), 1), 0)


@triton.jit
def _reach_both(keys, a, b):
    """As ``_reach`` of two thresholds, by one sum: most of its time goes to waiting for warps."""
    flags = (keys >= a).to(tl.int32) + ((keys >= b).to(tl.int32) << 16)
    both = tl.sum(tl.sum(flags, 1), 0)
    return both & 0xFFFF, both >> 16


@triton.jit
def _search(keys, low, reached, high, down, k):
    """The highest threshold that k keys (uint32 ``[T, N]``, below 2^15) reach, and how many do.

    ``reached`` of them, at least k, reach ``low``, none does ``high``. Ends early at a threshold
    that exactly k reach. Guesses by the numbers that reach both ends, on either side of what is
    likely, and takes thirds at every third guess; but if ``down`` is not 0, first looks as far
    below the upper end and 4 times as far, then further, until there are k.
    """
    low, high = tl.full([], low, tl.uint32), tl.full([], high, tl.uint32)
    down = tl.full([], down, tl.uint32)
    reached = tl.full([], reached, tl.int32)
    above, turn = tl.full([], 0, tl.int32), 0
    while high - low > 1:
        last = high - low - 1
        number = (reached - above).to(tl.float32)
        share = (reached - k + 0.5) / number
        # Of that many evenly spread ones, the k-th is mostly as near.
        about = tl.sqrt(share * (1.0 - share) / number)
        first = tl.where(turn == 2, 1.0 / 3, tl.maximum(share - about, 0.0))
        second = tl.where(turn == 2, 2.0 / 3, tl.minimum(share + about, 1.0))
        span = tl.minimum((last + 1).to(tl.float32), 4294967040.0)
        a = tl.minimum(tl.maximum((span * first).to(tl.uint32), 1), last)
        b = tl.minimum(tl.maximum((span * second).to(tl.uint32), 1), last)
        far = tl.where(down > last // 4, last, 4 * down)
        a = low + tl.where(down > 0, last + 1 - far, a)
        b = low + tl.where(down > 0, last + 1 - tl.minimum(down, last), b)
        i, j = _reach_both(keys, a, b)
        high = tl.where(i < k, a, tl.where(j < k, b, high))
        above = tl.where(i < k, i, tl.where(j < k, j, above))
        low = tl.where(j >= k, b, tl.where(i >= k, a, low))
        reached = tl.where(j >= k, j, tl.where(i >= k, i, reached))
        high = tl.where(reached == k, low + 1, high)
        down = tl.where(i >= k, down * 0, down * 16)
        turn = tl.where(turn == 2, 0, turn + 1)
    return low, reached


@triton.jit
def _before(flag):
    """How many flags (bool ``[T, N]``, N up to 16) stand before each, row by row; and of all."""
    T: tl.constexpr = flag.shape[0]
    N: tl.constexpr = flag.shape[1]
    bit = tl.arange(0, N)[None, :]
    mine = tl.sum(flag.to(tl.int32) << bit, 1)
    # Rows that one warp holds, then over the rows: a scan of the whole would have every thread read
    # the totals of all warps one after the other.
    tile = tl.reshape(_ones(mine), [T // 32, 32])
    row = tl.arange(0, T // 32)
    total = tl.sum(tile, 1)
    above = tl.sum(tl.where(row[:, None] > row[None, :], total[None, :], 0), 1)
    start = tl.reshape(tl.cumsum(tile, 1) - tile + above[:, None], [T])
    return _ones(mine[:, None] & ((1 << bit) - 1)) + start[:, None], tl.sum(total, 0)


@triton.jit
def _chosen(keys, least, kept, down, k):
    """Which of the keys (uint32 ``[T, N]``) are the k highest, of equal ones the first.

    ``kept`` of them reach ``least``; if fewer than k, those. ``down`` as in ``_search``.
    """
    threshold, reached = least, kept
    if kept > k:
        highest = tl.max(tl.max((keys ^ _TOP).to(tl.int32, bitcast=True), 1), 0)
        highest = highest.to(tl.uint32, bitcast=True) ^ _TOP
        threshold, reached = _search(keys, least, kept, highest + 1, down, k)
    flag = keys >= threshold
    if reached > k:
        equal = keys == threshold
        wanted = k - reached + _before(equal)[1]
        flag &= (keys > threshold) | (_before(equal)[0] < wanted)
    return flag


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    # Of [T] each to [T, 8].
    a, c = tl.join(a, b), tl.join(c, d)
    e, g = tl.join(e, f), tl.join(g, h)
    parts = tl.join(tl.join(a, c), tl.join(e, g))
    return tl.reshape(tl.permute(parts, [0, 3, 2, 1]), [a.shape[0], 8])


@triton.jit
def _at(pointer, place, count):
    return tl.load(pointer + place, mask=place < count, other=0)


@triton.jit
def _columns(pointer, place, step, count, N: tl.constexpr):
    """``[T, N]``: what is at ``place`` (``[T]``) and the N - 1 next steps; 0 from ``count`` on."""
    T: tl.constexpr = place.shape[0]
    if N == 1:
        return _at(pointer, place, count)[:, None]
    elif N == 2:  # noqa: RET505  (a choice of the compiler; what follows would be compiled too)
        return tl.join(_at(pointer, place, count), _at(pointer, place + step, count))
    elif N == 4:
        low = tl.join(_at(pointer, place, count), _at(pointer, place + step, count))
        place += 2 * step
        high = tl.join(_at(pointer, place, count), _at(pointer, place + step, count))
        return tl.reshape(tl.permute(tl.join(low, high), [0, 2, 1]), [T, 4])
    else:
        return _joined(
            _at(pointer, place, count),
            _at(pointer, place + step, count),
            _at(pointer, place + 2 * step, count),
            _at(pointer, place + 3 * step, count),
            _at(pointer, place + 4 * step, count),
            _at(pointer, place + 5 * step, count),
            _at(pointer, place + 6 * step, count),
            _at(pointer, place + 7 * step, count),
        )


@triton.jit
def _unsigned(keys):
    return keys.to(tl.uint32, bitcast=True)


@triton.jit
def _least(keys, count, k, CLASSES: tl.constexpr, T: tl.constexpr):
    """A threshold above 0 that at least k of ``count`` keys reach, mostly few more.

    The upper half of the k-th highest of the maxima of classes, to which keys are dealt out in
    turn; 1 if there are fewer than k.
    """
    N: tl.constexpr = CLASSES // T
    highest = tl.zeros([T, N], tl.uint32)
    for start in range(0, count, 16 * T):
        for i in tl.static_range(16 // N):
            place = start + i * CLASSES + tl.arange(0, T)
            highest = tl.maximum(highest, _unsigned(_columns(keys, place, T, count, N)))
    digits = highest >> 16
    top = tl.max(tl.max(digits.to(tl.int32, bitcast=True), 1), 0).to(tl.uint32, bitcast=True)
    digit, _ = _search(digits, 0, CLASSES, top + 1, 128, k)
    return tl.maximum(digit << 16, 1)


@triton.jit
def _by_thread(x):
    # [REPS, T, V] to [T, REPS * V].
    return tl.reshape(tl.permute(x, [1, 0, 2]), [x.shape[1], x.shape[0] * x.shape[2]])


@triton.jit
def _places(T: tl.constexpr, N: tl.constexpr):
    # [N / 4, T, 4]: numbers of a thread follow one another, four in an access.
    r = tl.arange(0, N // 4)[:, None, None]
    t = tl.arange(0, T)[None, :, None]
    return t * N + r * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def _keep_groups(maxima, number, least, groups, ROOM: tl.constexpr, T: tl.constexpr):
    """Store which of ``number`` groups reach ``least``, the first ROOM of them; how many do."""
    kept = 0
    for start in range(0, number, 8 * T):
        place = start + _places(T, 8)
        keys = tl.where(place < number, tl.load(maxima + place), 0)
        flag = _unsigned(_by_thread(keys)) >= least
        before, more = _before(flag)
        before += kept
        _store_where(groups + before, _by_thread(place), flag & (before < ROOM))
        kept += more
    return kept


@triton.jit
def _keep(keys, ids, least, kept, pairs, ROOM: tl.constexpr):
    # Store the pairs of a key in the upper half and its id that reach ``least``; the new number.
    keys, ids = _by_thread(keys), _by_thread(ids)
    flag = _unsigned(keys) >= least
    before, more = _before(flag)
    before += kept
    both = (keys.to(tl.int64) << 32) | ids.to(tl.int64)
    _store_where(pairs + before, both, flag & (before < ROOM))
    return kept + more


@triton.jit
def _keep_entries(keys, shown, least, pairs, ROOM: tl.constexpr, T: tl.constexpr):
    """As ``_keep_groups``, pairs of the entries themselves."""
    kept = 0
    for start in range(0, shown, 8 * T):
        ids = start + _places(T, 8)
        values = tl.where(ids < shown, tl.load(keys + ids), 0)
        kept = _keep(values, ids, least, kept, pairs, ROOM)
    return kept


@triton.jit
def _keep_members(
    keys,
    shown,
    groups,
    found,
    least,
    pairs,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    T: tl.constexpr,
):
    """As ``_keep_entries``, of the entries of the first ``found`` groups, of 8 or 16."""
    kept = 0
    PARTS: tl.constexpr = GROUP // 8
    part = tl.arange(0, T)
    for start in range(0, found, T // PARTS):
        item = start + part // PARTS
        real = item < found
        first = tl.load(groups + item, mask=real, other=0) * GROUP + part % PARTS * 8
        ids = first[None, :, None] + _places(1, 8)
        values = tl.where((ids < shown) & real[None, :, None], tl.load(keys + ids), 0)
        kept = _keep(values, ids, least, kept, pairs, ROOM)
    return kept


@triton.jit
def _choose(keys, ids, out, shown, k):
    """The k highest of the first ``shown`` keys, ascending, to ``out``; all are as ``_places``."""
    values = _unsigned(_by_thread(tl.where(ids < shown, keys, 0)))
    flag = _chosen(values, tl.full([], 1, tl.uint32), shown, _BINADE, k)
    _store_where(out + _before(flag)[0], _by_thread(ids).to(tl.int64), flag)


@triton.jit
def _choose_kept(pairs, out, least, kept, k, ROOM: tl.constexpr, T: tl.constexpr):
    """The ids of the k highest of ``kept`` pairs, in their order."""
    N: tl.constexpr = ROOM // T
    both = _columns(pairs, tl.arange(0, T) * N, 1, kept, N)
    flag = _chosen(_unsigned((both >> 32).to(tl.int32)), least, kept, 0, k)
    _store_where(out + _before(flag)[0], both & 0x7FFFFFFF, flag)


@triton.jit
def _item(keys, groups, out, place, start, kept, count, shown, GROUP: tl.constexpr):
    # Key and id of what is at ``place``: what was chosen so far, then items from ``start`` on.
    new = place >= kept
    item = start + place - kept
    ids = item
    if GROUP > 0:
        group = tl.load(groups + item // GROUP, mask=new & (item < count), other=0)
        ids = group * GROUP + item % GROUP
    before = tl.load(out + place, mask=place < kept, other=0).to(tl.int32)
    ids = tl.where(new, ids, before)
    real = ((item < count) | (place < kept)) & (ids < shown)
    return tl.load(keys + ids, mask=real, other=0), ids


@triton.jit
def _choose_in_pieces(keys, groups, out, count, shown, k, GROUP: tl.constexpr, T: tl.constexpr):
    """The k highest of ``count`` items, more than k, ascending, to ``out``; slowly.

    Items are entries, or those below ``shown`` of ``groups``. What was chosen so far comes before
    the next items, in the same order.
    """
    place = tl.arange(0, T) * 8
    start = 0
    kept = 0
    while start < count:
        a, i = _item(keys, groups, out, place, start, kept, count, shown, GROUP)
        b, j = _item(keys, groups, out, place + 1, start, kept, count, shown, GROUP)
        c, s = _item(keys, groups, out, place + 2, start, kept, count, shown, GROUP)
        d, m = _item(keys, groups, out, place + 3, start, kept, count, shown, GROUP)
        e, n = _item(keys, groups, out, place + 4, start, kept, count, shown, GROUP)
        f, o = _item(keys, groups, out, place + 5, start, kept, count, shown, GROUP)
        g, p = _item(keys, groups, out, place + 6, start, kept, count, shown, GROUP)
        h, q = _item(keys, groups, out, place + 7, start, kept, count, shown, GROUP)
        values = _unsigned(_joined(a, b, c, d, e, f, g, h))
        flag = _chosen(values, tl.full([], 1, tl.uint32), _reach(values, 1), _BINADE, k)
        ids = _joined(i, j, s, m, n, o, p, q).to(out.dtype.element_ty)
        tl.debug_barrier()
        _store_where(out + _before(flag)[0], ids, flag)
        tl.debug_barrier()
        start += 8 * T - kept
        kept = k


@triton.jit(do_not_specialize=["k"])
def _select_kernel(
    scores,
    maxima,
    room,
    visible,
    out,
    capacity,
    k,
    score_stride,
    maxima_stride,
    room_stride,
    TOP: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    DIRECT: tl.constexpr,
    ROOM: tl.constexpr,
    CLASSES: tl.constexpr,
    T: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    shown = tl.minimum(tl.load(visible + token), capacity).to(tl.int32)
    out += token * k
    scores += token * score_stride
    maxima += token * maxima_stride
    groups = room + token * room_stride
    pairs = (groups + ROOM).to(tl.pointer_type(tl.int64))
    ids = _places(T, 8)
    keys = ids
    if EXACT > 0 and DIRECT == 0:
        # Asked for before it is known how many count.
        keys = tl.load(scores + ids)
    if shown <= k:
        place = tl.arange(0, TOP)
        tl.store(out + place, tl.where(place < shown, place, -1).to(tl.int64), mask=place < k)
    elif shown <= EXACT:
        if DIRECT > 0:
            keys = tl.load(scores + ids)
        _choose(keys, ids, out, shown, k)
    else:
        if DIRECT > 0:
            if shown <= DIRECT:
                least = _least(scores, shown, k, CLASSES, T)
                kept = _keep_entries(scores, shown, least, pairs, ROOM, T)
                tl.debug_barrier()
                if kept <= ROOM:
                    _choose_kept(pairs, out, least, kept, k, ROOM, T)
                else:
                    _choose_in_pieces(scores, groups, out, shown, shown, k, 0, T)
            else:
                if GROUP > 0:
                    number = tl.cdiv(shown, GROUP)
                    least = _least(maxima, number, k, CLASSES, T)
                    kept = _keep_groups(maxima, number, least, groups, ROOM, T)
                    if kept <= ROOM:
                        tl.debug_barrier()
                        kept = _keep_members(
                            scores, shown, groups, kept, least, pairs, GROUP, ROOM, T
                        )
                    tl.debug_barrier()
                    if kept <= ROOM:
                        _choose_kept(pairs, out, least, kept, k, ROOM, T)
                    else:
                        _choose_in_pieces(maxima, groups, groups, number, number, k, 0, T)
                        _choose_in_pieces(scores, groups, out, k * GROUP, shown, k, GROUP, T)


def indexer_select(
    q: torch.Tensor,
    weights: torch.Tensor,
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    rope_dim: int,
    page_table: torch.Tensor,
    sequence_of_token: torch.Tensor,
    visible: torch.Tensor,
    top_k: int,
    query_scales: torch.Tensor | None,
) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_select``."""
    tokens = q.shape[0]
    capacity = page_table.shape[1] * page_size
    k = min(top_k, capacity)
    out = torch.empty((tokens, k), dtype=torch.int64, device=q.device)
    if out.numel() == 0:
        return out
    q = q if q.stride(-1) == 1 else q.contiguous()
    data = data if data.stride(-1) == 1 else data.contiguous()
    weights, page_table = weights.contiguous(), page_table.contiguous()
    sequences, visible = sequence_of_token.contiguous(), visible.contiguous()
    sizes = _Sizes.of(capacity, k)
    step = max(1, _SCORE_BYTES // max(1, 4 * sizes.width))
    size = min(step, tokens)
    scores = _scratch(q, size, sizes.width)
    maxima = _scratch(q, size, sizes.groups)
    room = _scratch(q, size, 3 * sizes.room if sizes.direct else 0)
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        if k < capacity:
            _launch_scores(
                q[part],
                None if query_scales is None else query_scales[part],
                weights[part],
                data,
                page_size,
                entry_format,
                page_table,
                sequences[part],
                visible[part],
                scores,
                maxima,
                k,
                sizes.group,
            )
        _launch_selection(scores, maxima, room, visible[part], out[part], capacity, sizes)
    return out


def _scratch(like: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    return torch.empty((tokens, width), dtype=torch.int32, device=like.device)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of a selection.

    Attributes:
        exact: Entries up to which a row is searched as it is.
        direct: Entries up to which it is without groups; 0: none is longer than ``exact``.
        group: Entries per group; 0: none is longer than ``direct``.
        width: Numbers in a row of scores: as many as are loaded from it, whatever they are.
        groups: The same of maxima.
        room: Entries that are chosen among, and groups that they come from.
        classes: Of which maxima give the threshold that lets entries in.
        warps: Of a program.
    """

    exact: int
    direct: int
    group: int
    width: int
    groups: int
    room: int
    classes: int
    warps: int

    @classmethod
    def of(cls, capacity: int, k: int) -> _Sizes:
        """Sizes for the k highest of ``capacity`` entries."""
        if k == capacity:  # Nothing is chosen: any k.
            return cls(0, 0, 0, 0, 0, 32 * _FEWEST, 32 * _FEWEST, _FEWEST)
        top = _launch.power_of_two(k)
        usual = _MOST if capacity >= _LONG and top > 512 else _USUAL
        warps = max(_FEWEST, min(usual, _launch.power_of_two(capacity) // 256))
        warps = min(_MOST, max(warps, top // 128))
        loaded, room = 8 * 32 * warps, max(32 * warps, 2 * top)
        exact = min(_SEARCHED, loaded)
        group = _GROUP if capacity < _LONG else 2 * _GROUP
        # The maxima of fewer groups than k would let all groups in.
        direct = max(_DIRECT, group * top)
        if capacity <= direct:
            group = 0
        if capacity <= exact:
            direct = 0
        width = triton.cdiv(capacity, loaded) * loaded
        groups = triton.cdiv(triton.cdiv(capacity, group), loaded) * loaded if group else 0
        return cls(exact, direct, group, width, groups, room, room, warps)


_CODES = {torch.float8_e4m3fn: "fp8", torch.uint8: "mxfp4"}
# Narrow types of operands that hold every value of a format; the others are multiplied in float32.
_EXACT: dict[Any, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
    torch.float32: (),
    "fp8": (torch.float16, torch.bfloat16),
    "index_fp8": (torch.float16, torch.bfloat16),
    "mxfp4": (torch.bfloat16,),
    "index_mxfp4": (torch.bfloat16,),
}


def _operand(queries: Any, keys: Any) -> torch.dtype:
    """In which type queries and keys are multiplied; each is a dtype or a format."""
    return next((x for x in _EXACT[queries] if x in _EXACT[keys]), torch.float32)


def _launch_scores(
    q: torch.Tensor,
    query_scales: torch.Tensor | None,
    weights: torch.Tensor,
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    page_table: torch.Tensor,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    scores: torch.Tensor,
    maxima: torch.Tensor,
    k: int,
    group: int,
) -> None:
    tokens, heads, d = q.shape
    queries = _CODES.get(q.dtype, "plain")
    if query_scales is not None:
        d, query_scales = 2 * d, query_scales.contiguous().view(torch.uint8)
    capacity = page_table.shape[1] * page_size
    operand = _operand(
        q.dtype if queries == "plain" else queries,
        data.dtype if entry_format == "plain" else entry_format,
    )
    narrow_types = operand != torch.float32
    padded = max(16, _launch.power_of_two(heads))
    shared = max(1, _COLUMNS // padded) if narrow_types and tokens >= _SHARED_FROM else 1
    within = narrow_types and shared == 1 and _within_pages(data, page_size, entry_format, d)
    shape = entry_format if within else shared > 1 if narrow_types else None
    block, stages, warps, resident = _SHAPES[shape]
    programs = triton.cdiv(tokens, shared)
    splits = max(1, resident * _launch.multiprocessors(q.device) // programs)
    grid = (programs, min(splits, triton.cdiv(capacity, block)))
    pointers = (weights, data, page_table, sequences, visible, scores, maxima)
    strides = (
        *(data.stride(0), data.stride(1), page_table.stride(0)),
        *(scores.stride(0), maxima.stride(0)),
    )
    options = {
        "H": heads,
        "D": d,
        "KEYS": entry_format,
        "QUERIES": queries,
        "OPERAND": _rows.TYPES[operand],
        "HEADS": padded,
        "BLOCK": block,
        "GROUP": group,
        "STAGES": stages,
        "num_warps": warps,
        **_launch.options(q),
    }
    if within and query_scales is not None:
        q, query_scales = _in_words(q), _in_words(query_scales)
    x = q.view(torch.uint8) if queries == "fp8" else q
    with _launch.on(q):
        if within:
            _score_pages_kernel[grid](
                x,
                query_scales,
                *pointers,
                capacity,
                k,
                *q.stride()[:2],
                *strides,
                PAGE=page_size,
                **options,
            )
            return
        _score_kernel[grid](
            x,
            query_scales,
            *pointers,
            tokens,
            capacity,
            k,
            page_size,
            *q.stride()[:2],
            *strides,
            PAGE=page_size if page_size == _launch.power_of_two(page_size) else 0,
            TOKENS=shared,
            DIMS=max(16, _launch.power_of_two(d)),
            **options,
        )


def _within_pages(data: torch.Tensor, page_size: int, entry_format: str, d: int) -> bool:
    """Whether ``_score_pages_kernel`` reads such pages."""
    if page_size % _SHAPES[entry_format][0]:
        return False
    if entry_format == "plain":
        return d >= 16 and d == _launch.power_of_two(d)
    return d == 128 and data.data_ptr() % 16 == 0 and data.stride(0) % 16 == 0


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """Bytes that can be read four at a time."""
    aligned = all(number % 4 == 0 for number in (x.data_ptr(), *x.stride()[:-1]))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _launch_selection(
    scores: torch.Tensor,
    maxima: torch.Tensor,
    room: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    capacity: int,
    sizes: _Sizes,
) -> None:
    tokens, k = out.shape
    with _launch.on(out):
        _select_kernel[(tokens,)](
            scores,
            maxima,
            room,
            visible,
            out,
            capacity,
            k,
            scores.stride(0),
            maxima.stride(0),
            room.stride(0),
            TOP=_launch.power_of_two(k),
            GROUP=sizes.group,
            EXACT=sizes.exact,
            DIRECT=sizes.direct,
            ROOM=sizes.room,
            CLASSES=sizes.classes,
            T=32 * sizes.warps,
            num_warps=sizes.warps,
            **_launch.options(out),
        )
