"""Kernels of ``dsv4.ops.indexer``: queries, scores, and the choice of the highest.

Scores go to a scratch buffer as integers that order as the scores do, then one program per token
chooses. It finds the k-th largest key by bisection over keys held in registers. A long row is first
narrowed: the score kernel keeps the maximum of every group of neighbouring entries, and the k
groups with the highest maxima (of equal ones the first) hold the k highest entries with their ties,
because each of those groups has an entry at least as high as any entry outside of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.triton import _launch, _rows
from dsv4.triton._hadamard import hadamard_row, rotate_quantize_row
from dsv4.triton._index_entries import (
    e4m3_rows,
    e4m3_values,
    load_keys,
    mxfp4_rows,
    mxfp4_values,
)
from dsv4.triton._numerics import INTERPRETED, narrow, wait_for_inputs, widen
from dsv4.triton._nvfp4 import conversion

_TILE = 256  # values of one program of the query kernel, or four times as many
_FEW = 1 << 20  # values up to which programs are small
_SCORE_BYTES = 64 << 20  # of keys of scores at a time
_DIRECT = 16384  # entries among which one program chooses without narrowing
_SMALLEST, _LARGEST = 128, 32768  # keys of one program
_GROUP = 16  # entries per group
_SHARED_FROM = 128  # tokens from which neighbours share the tiles of their sequence
_COLUMNS = 256  # heads of all tokens that share a tile

# Of the score kernel by whether tokens share tiles, None for float32 operands: entries per tile,
# tiles in flight, warps, programs for each multiprocessor.
_SHAPES = {False: (64, 3, 4, 4), True: (64, 3, 8, 4), None: (32, 2, 4, 4)}

_LOWEST = tl.constexpr(-0x80000000)  # flipped in a key, makes the order unsigned: 0 is none
_BASE = tl.constexpr(8388608.0)  # 2^23: integers added to it stay in the low bits


@triton.jit
def _turn(x, cos, sin, token, inside, cos_stride, D: tl.constexpr, HALF: tl.constexpr):
    # Interleaved pairs; compiled without contraction, so that both products round as they do in
    # separate operators. Columns that are not turned keep their bits.
    ROWS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    first, second = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    angle = tl.arange(0, BLOCK // 2) - (D // 2 - HALF)
    turned = (angle >= 0) & (angle < HALF)
    place = token[:, None] * cos_stride + angle[None, :]
    mask = inside[:, None] & turned[None, :]
    c = widen(tl.load(cos + place, mask=mask, other=1.0))
    s = widen(tl.load(sin + place, mask=mask, other=0.0))
    a, b = widen(first), widen(second)
    dtype: tl.constexpr = x.dtype
    first = tl.where(turned[None, :], narrow(a * c - b * s, dtype), first)
    second = tl.where(turned[None, :], narrow(b * c + a * s, dtype), second)
    return tl.reshape(tl.join(first, second), [ROWS, BLOCK])


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = row < rows
    mask = inside[:, None] & (column < D)[None, :]
    token = row // HEADS
    place = token * token_stride + row % HEADS * head_stride
    values = tl.load(x + place[:, None] + column[None, :], mask=mask, other=0.0)
    if HALF > 0:
        values = _turn(values, cos, sin, token, inside, cos_stride, D, HALF)
    if ROTATE:
        dtype: tl.constexpr = values.dtype
        values = narrow(rotate_quantize_row(widen(values), D, dtype), dtype)
    tl.store(out + row[:, None] * D + column[None, :], values, mask=mask)


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = row < rows
    token = row // HEADS
    place = x + (token * token_stride + row % HEADS * head_stride)[:, None] + column
    values = tl.load(place, mask=inside[:, None] & (column < D), other=0.0)
    weight = widen(tl.load(weights + row, mask=inside, other=0.0)) * weight_scale
    if HALF > 0:
        values = _turn(values, cos, sin, token, inside, cos_stride, D, HALF)
    dtype: tl.constexpr = values.dtype
    values = widen(values)
    if ROTATE:
        values = widen(narrow(hadamard_row(values, D), dtype))
    if FORMAT == "fp8":
        bits, scale = e4m3_rows(values)
        tl.store(codes + row[:, None] * D + column, bits, mask=inside[:, None] & (column < D))
        weight = weight * scale
    else:
        packed, byte = mxfp4_rows(values, CONVERT)
        pair = tl.arange(0, BLOCK // 2)[None, :]
        place = codes + row[:, None] * (D // 2) + pair
        tl.store(place, packed, mask=inside[:, None] & (pair < D // 2))
        group = tl.arange(0, BLOCK // 32)[None, :]
        place = scales + row[:, None] * (D // 32) + group
        tl.store(place, byte, mask=inside[:, None] & (group < D // 32))
    tl.store(folded + row, weight, mask=inside)


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
        block, rows = _query_tile(tokens * heads, d)
        with _launch.on(q):
            _codes_kernel[(triton.cdiv(tokens * heads, rows),)](
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
                ROWS=rows,
                BLOCK=block,
                num_warps=1,
                **_without_contraction(q),
            )
    if fp8:
        codes = codes.view(torch.float8_e4m3fn)
    return codes, scales.view(torch.float8_e8m0fnu), folded


def _query_tile(rows: int, d: int) -> tuple[int, int]:
    """Columns of a program of the query kernels, and its rows."""
    block = _launch.power_of_two(d)
    few = rows * block <= _FEW
    return block, max(1, (_TILE if few else 4 * _TILE) // block)


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
    block, rows = _query_tile(tokens * heads, d)
    with _launch.on(q):
        _queries_kernel[(triton.cdiv(tokens * heads, rows),)](
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
            ROWS=rows,
            BLOCK=block,
            num_warps=1,
            **_without_contraction(q),
        )


def _without_contraction(tensor: torch.Tensor) -> dict[str, Any]:
    options = _launch.options(tensor)
    return {key: False if key == "enable_fp_fusion" else value for key, value in options.items()}


@triton.jit
def _key_of(score):
    """int32 that orders as float32 scores do: zeros are equal, every NaN is the highest."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, key)


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
def _above(digit, bound):
    """1.0 where an integer in float32 exceeds another, else 0.0.

    One instruction of the float pipe, which issues twice as often as the integer pipe: distinct
    integers are at least 1 apart, where the subtraction saturates.
    """
    if INTERPRETED:
        return tl.where(digit > bound, 1.0, 0.0)
    bound = tl.zeros_like(digit) + bound
    return tl.inline_asm_elementwise(
        "sub.sat.f32 $0, $1, $2;", "=f,f,f", [digit, bound], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _count(flag):
    # Sum of flags. Four of a thread at a time in float32, then integers, which a warp adds in one
    # instruction.
    part = tl.sum(tl.reshape(flag, [flag.shape[0] // 4, 4]), 1)
    return tl.sum((part + _BASE).to(tl.int32, bitcast=True) - 0x4B000000, 0)


@triton.jit
def _number_before(flag):
    """How many flags stand before each, float32.

    In rows that one warp holds, and then over the rows by a triangular sum: a scan of the whole
    would have every thread read the totals of all warps one after the other.
    """
    BLOCK: tl.constexpr = flag.shape[0]
    COLUMNS: tl.constexpr = min(128, BLOCK)
    ROWS: tl.constexpr = BLOCK // COLUMNS
    tile = tl.reshape(flag, [ROWS, COLUMNS])
    row = tl.arange(0, ROWS)
    earlier = row[:, None] > row[None, :]
    above = tl.sum(tl.where(earlier, tl.sum(tile, 1)[None, :], 0.0), 1)
    return tl.reshape(tl.cumsum(tile, 1) - tile + above[:, None], [BLOCK])


@triton.jit
def _store_where(pointer, value, flag):
    """Store where the flag is 1.0. ``tl.store`` would move the operands to another layout first."""
    if INTERPRETED:
        tl.store(pointer, value, mask=flag > 0)
    elif value.dtype == tl.int64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.f32 p, $3, 0f00000000; @p st.global.b64 [$1], $2; "
            "mov.b32 $0, 0; }",
            "=r,l,l,f",
            [pointer.to(tl.int64), value, flag],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.f32 p, $3, 0f00000000; @p st.global.b32 [$1], $2; "
            "mov.b32 $0, 0; }",
            "=r,l,r,f",
            [pointer.to(tl.int64), value, flag],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _search(digit, low, high, up, down, k):
    """Largest threshold in ``low .. high`` that k digits reach, and how many reach it.

    Exact integers in float32. Ends early at a threshold that exactly k reach. At least k digits
    must reach ``low``; if nothing above does, the number is not known and given as 0. Bisection,
    but no further than ``up`` from the lower end or ``down`` from the upper end, each doubled as
    long as it leads nowhere: the wanted threshold may be known to be near one of them.
    """
    low, high = tl.full([], low, tl.float32), tl.full([], high, tl.float32)
    up, down = tl.full([], up, tl.float32), tl.full([], down, tl.float32)
    reached = 0
    while low < high:
        half = low + tl.floor((high - low + 1) * 0.5)
        middle = tl.minimum(tl.maximum(half, high - down), low + up)
        count = _count(_above(digit, middle - 1))
        enough = count >= k
        reached = tl.where(enough, count, reached)
        low = tl.where(enough, middle, low)
        high = tl.where(count == k, middle, tl.where(enough, high, middle - 1))
        up = tl.where(enough, up * 2, 65536.0)
        down = tl.where(enough, 65536.0, down * 2)
    return low, reached


@triton.jit
def _digit(half):
    # 2^23 + half, by its bits, for 0 <= half < 2^16.
    return (half | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _highest(keys, least, k):
    """The k highest keys, of equal ones the first; at least k have an upper half >= ``least``.

    Returns 1.0 for them and 0.0 for others, and the lowest upper half among them, as a digit.
    The k highest of many scores have few of all possible exponents, near the highest; or, where
    ``least`` comes from the maxima of groups, near that.
    """
    upper = _digit((keys >> 16) & 0xFFFF)
    digit = upper
    near = least > _BASE + 1
    up, down = tl.where(near, 1.0, 65536.0), tl.where(near, 65536.0, 127.0)
    threshold, reached = _search(digit, least, tl.max(upper, 0), up, down, k)
    lowest = threshold
    if reached != k:
        lower = _digit(keys & 0xFFFF)
        others = tl.where(upper > threshold, _BASE + 65536, _BASE - 1)
        digit = tl.where(upper == threshold, lower, others)
        threshold, reached = _search(digit, _BASE + 0, _BASE + 65535, 65536.0, 65536.0, k)
    flag = _above(digit, threshold - 1)
    if reached != k:
        equal = flag - _above(digit, threshold)
        wanted = k - _count(_above(digit, threshold))
        flag = tl.where(_number_before(equal) >= wanted, flag - equal, flag)
    return flag, lowest


@triton.jit
def _store_ids(keys, ids, out, least, k):
    # The ids of the k highest keys in the order of their places, counted in float32: exact.
    flag, lowest = _highest(keys, least, k)
    # 2^23 + number has the number in its low bits.
    place = (_number_before(flag) + _BASE).to(tl.int32, bitcast=True).to(tl.int64) - 0x4B000000
    _store_where(out + place, ids.to(out.dtype.element_ty), flag)
    return lowest


@triton.jit
def _choose(keys, out, count, k, BLOCK: tl.constexpr):
    """The k highest of the first ``count`` keys, ``k < count <= BLOCK``, ascending, to ``out``.

    Returns the lowest upper half of their keys, as a digit.
    """
    ids = tl.arange(0, BLOCK)
    keys = tl.where(ids < count, tl.load(keys + ids), 0)
    return _store_ids(keys, ids, out, _BASE + 1, k)


@triton.jit
def _choose_within(keys, groups, out, shown, least, k, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """As ``_choose``, of the entries below ``shown`` of k groups; k of them are >= ``least``."""
    place = tl.arange(0, BLOCK // GROUP)
    group = tl.load(groups + place, mask=place < k, other=0)[:, None] * GROUP
    ids = group + tl.arange(0, GROUP)[None, :]
    real = (ids < shown) & (place < k)[:, None]
    values = tl.where(real, tl.load(keys + ids), 0)
    _store_ids(tl.reshape(values, [BLOCK]), tl.reshape(ids, [BLOCK]), out, least, k)


@triton.jit
def _choose_in_pieces(keys, groups, out, count, shown, k, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """As ``_choose`` (GROUP 0) or ``_choose_within``, for more items than fit.

    What was chosen so far comes before the next items, in the same order.
    """
    place = tl.arange(0, BLOCK)
    start = 0
    kept = 0
    while start < count:
        item = start + place - kept
        new = (place >= kept) & (item < count)
        ids = item
        if GROUP > 0:
            group = tl.load(groups + item // GROUP, mask=new, other=0)
            ids = group * GROUP + item % GROUP
        before = tl.load(out + place, mask=place < kept, other=0).to(tl.int32)
        ids = tl.where(place < kept, before, ids)
        real = (new | (place < kept)) & (ids < shown)
        tl.debug_barrier()
        _store_ids(tl.load(keys + ids, mask=real, other=0), ids, out, _BASE + 1, k)
        tl.debug_barrier()
        start += BLOCK - kept
        kept = k


@triton.jit(do_not_specialize=["k"])
def _select_kernel(
    scores,
    maxima,
    groups,
    visible,
    out,
    capacity,
    k,
    score_stride,
    maxima_stride,
    TOP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    shown = tl.minimum(tl.load(visible + token), capacity).to(tl.int32)
    out += token * k
    scores += token * score_stride
    if shown <= k:
        place = tl.arange(0, TOP)
        tl.store(out + place, tl.where(place < shown, place, -1).to(tl.int64), mask=place < k)
    elif shown <= BLOCK:
        _choose(scores, out, shown, k, BLOCK)
    else:
        if GROUP > 0:
            groups += token * k
            maxima += token * maxima_stride
            number = tl.cdiv(shown, GROUP)
            if PIECES:
                _choose_in_pieces(maxima, groups, groups, number, number, k, 0, BLOCK)
                _choose_in_pieces(scores, groups, out, k * GROUP, shown, k, GROUP, BLOCK)
            else:
                least = _choose(maxima, groups, number, k, BLOCK)
                tl.debug_barrier()
                _choose_within(scores, groups, out, shown, least, k, GROUP, BLOCK)


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
    group, block = _selection_sizes(capacity, k)
    # Rows as long as the blocks that are loaded from them, whatever they hold past the end.
    width = triton.cdiv(capacity, block) * block
    step = max(1, _SCORE_BYTES // (4 * width))
    size = min(step, tokens)
    scores = _scratch(q, size, width if k < capacity else 0)
    maxima = _scratch(q, size, triton.cdiv(width, group * block) * block if group else 0)
    groups = _scratch(q, size, k if group else 0)
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
                group,
            )
        _launch_selection(scores, maxima, groups, visible[part], out[part], capacity, group, block)
    return out


def _scratch(like: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    return torch.empty((tokens, width), dtype=torch.int32, device=like.device)


def _selection_sizes(capacity: int, k: int) -> tuple[int, int]:
    """Entries per group (0: no narrowing) and keys of one program."""
    if k == capacity:
        return 0, _SMALLEST
    if capacity <= _DIRECT:
        return 0, max(_SMALLEST, _launch.power_of_two(capacity))
    group = max(1, min(_GROUP, _LARGEST // _launch.power_of_two(k)))
    return group, max(_DIRECT, group * _launch.power_of_two(k))


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
    block, stages, warps, resident = _SHAPES[shared > 1 if narrow_types else None]
    programs = triton.cdiv(tokens, shared)
    splits = max(1, resident * _launch.multiprocessors(q.device) // programs)
    with _launch.on(q):
        _score_kernel[(programs, min(splits, triton.cdiv(capacity, block)))](
            q.view(torch.uint8) if queries == "fp8" else q,
            query_scales,
            weights,
            data,
            page_table,
            sequences,
            visible,
            scores,
            maxima,
            tokens,
            capacity,
            k,
            page_size,
            q.stride(0),
            q.stride(1),
            data.stride(0),
            data.stride(1),
            page_table.stride(0),
            scores.stride(0),
            maxima.stride(0),
            H=heads,
            D=d,
            PAGE=page_size if page_size == _launch.power_of_two(page_size) else 0,
            KEYS=entry_format,
            QUERIES=queries,
            OPERAND=_rows.TYPES[operand],
            TOKENS=shared,
            HEADS=padded,
            DIMS=max(16, _launch.power_of_two(d)),
            BLOCK=block,
            GROUP=group,
            STAGES=stages,
            num_warps=warps,
            **_launch.options(q),
        )


def _launch_selection(
    scores: torch.Tensor,
    maxima: torch.Tensor,
    groups: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    capacity: int,
    group: int,
    block: int,
) -> None:
    tokens, k = out.shape
    with _launch.on(out):
        _select_kernel[(tokens,)](
            scores,
            maxima,
            groups,
            visible,
            out,
            capacity,
            k,
            scores.stride(0),
            maxima.stride(0),
            TOP=_launch.power_of_two(k),
            GROUP=group,
            BLOCK=block,
            PIECES=bool(group) and max(triton.cdiv(capacity, group), k * group) > block,
            num_warps=min(32, max(4, block // 512)),
            **_launch.options(out),
        )
