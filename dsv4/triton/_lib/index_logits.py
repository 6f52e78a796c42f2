"""Indexer logits, stored as integers that order as the logits do, for ``indexer_select``.

``score_pages_kernel``: a program owns a token and blocks of 64 entries that lie in one page, whose
codes it reads in 32-bit words. ``score_kernel``: any entries and pages; neighbouring tokens of a
sequence share tiles of its entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.index_keys import (
    dequantize_words,
    e4m3_values,
    fetch_words,
    in_word_order,
    load_fp4_queries,
    load_keys,
    mxfp4_values,
)
from dsv4.triton._lib.numerics import INTERPRETED, wait_for_inputs, widen
from dsv4.triton._runtime.launcher import fast_launch

_LOWEST = tl.constexpr(-0x80000000)  # flipped in a key, makes the order unsigned: 0 is none


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
        address = start + entry % size * entry_stride
        dim = tl.arange(0, DIMS)
        mask = seen[:, None] & (dim < D)[None, :]
        tile = tl.load(keys + address[:, None] + dim[None, :], mask=mask, other=0.0)
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
    address = q + (token * token_stride + head * head_stride)[:, None] + column
    tile = tl.load(address, mask=real[:, None] & (column < COLUMNS), other=0)
    if QUERIES == "fp8":
        tile = e4m3_values(tile, OPERAND)
    elif QUERIES == "mxfp4":
        group = tl.arange(0, DIMS // 32)[None, :]
        address = q_scales + (token * H + head)[:, None] * (D // 32) + group
        scales = tl.load(address, mask=real[:, None] & (group < D // 32), other=0)
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
    pointers,
    sizes,
    strides,
    row_strides,
    first,
    sequence,
    end,
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
    # TOKENS neighbours of one sequence against its entries below `end`. Names of the arguments of
    # score_kernel are unpacked from tuples.
    q, q_scales, weights, keys, table, visible, scores, maxima = pointers
    tokens, capacity, k, page_size = sizes
    token_stride, head_stride, page_stride, entry_stride = strides
    table_stride, score_stride, maxima_stride = row_strides
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


@fast_launch
@triton.jit(
    do_not_specialize=["tokens", "capacity", "k", "page_size", "table_stride", "maxima_stride"]
)
def score_kernel(
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
    pointers = (q, q_scales, weights, keys, table, visible, scores, maxima)
    sizes = (tokens, capacity, k, page_size)
    strides = (token_stride, head_stride, page_stride, entry_stride)
    row_strides = (table_stride, score_stride, maxima_stride)
    if end > 0:
        if TOKENS == 1 or lowest == highest:
            _score_tokens(
                pointers,
                sizes,
                strides,
                row_strides,
                first,
                highest,
                end,
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
                is_token = token == first + i
                _score_tokens(
                    pointers,
                    sizes,
                    strides,
                    row_strides,
                    first + i,
                    tl.max(tl.where(is_token, sequence, 0), 0),
                    tl.max(tl.where(is_token, shown, 0), 0),
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
    offset = (within + tl.arange(0, BLOCK)) * entry_stride
    return tl.load(start + offset[:, None] + tl.arange(0, D)[None, :])


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
    # Keys of the logits of a block, from dot products with each head, and their groups' maxima.
    BLOCK: tl.constexpr = dots.shape[0]
    dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    # The scale is a power of two, by which no sum and no maximum would round otherwise.
    key = _key_of(tl.sum(dots, 1) * scale)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    seen = entry < end
    store_where(scores + entry, key ^ _LOWEST, seen)
    if GROUP > 0:
        highest = tl.reshape(tl.where(seen, key, _LOWEST), [BLOCK // GROUP, GROUP])
        group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        store_where(maxima + group, tl.max(highest, 1) ^ _LOWEST, group * GROUP < end)


@fast_launch
@triton.jit(do_not_specialize=["capacity", "k", "table_stride", "maxima_stride"])
def score_pages_kernel(
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
    SM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Like ``score_kernel``, a token to a program, where every block lies within a page.

    Then its page is one number, and the whole block is read, also past the end. Codes are loaded
    into the registers in which they are operands of the tensor cores; the next block is prefetched.
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
            # The number of the page after next is loaded with the next block.
            block = tl.minimum(first, count - 1)
            page = tl.load(table + block * BLOCK // PAGE)
            within = block * BLOCK % PAGE
            a, b, s = fetch_words(keys, page, within, page_stride, PAGE, BLOCK, KEYS)
            block = tl.minimum(first + step, count - 1)
            page = tl.load(table + block * BLOCK // PAGE)
            within = block * BLOCK % PAGE
        weight = widen(tl.load(weights + token * H + head, mask=real, other=0.0))
        if KEYS == "index_mxfp4" and QUERIES == "mxfp4":
            address = (q + token * token_stride).to(tl.pointer_type(tl.int32))
            scales = q_scales.to(tl.pointer_type(tl.int32)) + token * H
            address += head * (head_stride // 4)
            query, query_scale = load_fp4_queries(address, scales + head, real, SM)
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
            unit = tl.full([BLOCK], 1.0, tl.float32)
            for block in tl.range(first, count, step, num_stages=STAGES):
                page = tl.load(table + block * BLOCK // PAGE)
                within = block * BLOCK % PAGE
                tile = _entry_tile(keys, page, within, page_stride, entry_stride, BLOCK, D)
                dots = _dot(tile, query, OPERAND)
                _store_block(dots, unit, weight, scores, maxima, block, end, GROUP)
        else:
            for block in tl.range(first, count, step, num_stages=1):
                c, d, t = fetch_words(keys, page, within, page_stride, PAGE, BLOCK, KEYS)
                later = tl.minimum(block + 2 * step, count - 1)
                page = tl.load(table + later * BLOCK // PAGE)
                within = later * BLOCK % PAGE
                tile, scale = dequantize_words(a, b, s, KEYS, OPERAND, SM)
                dots = _dot(tile, query, OPERAND)
                _store_block(dots, scale, weight, scores, maxima, block, end, GROUP)
                a, b, s = c, d, t


@triton.jit
def load_where(pointer, flag):
    """Load int32 or int64 where the flag is set, else undefined; in the layout of the operands.

    ``tl.load`` would move pointers to a layout of its own and values back, through shared memory.
    """
    if INTERPRETED:
        return tl.load(pointer, mask=flag, other=0)
    elif pointer.dtype.element_ty == tl.int64:  # noqa: RET505  (a choice of the compiler)
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b64 $0, 0; @p ld.global.b64 $0, [$1]; }",
            "=&l,l,r",
            [pointer.to(tl.int64), flag.to(tl.int32)],
            tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }",
            "=&r,l,r",
            [pointer.to(tl.int64), flag.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_where(pointer, value, flag):
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
