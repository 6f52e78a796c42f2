"""Coefficients of four streams from the mixing GEMM: gates, write-back, Sinkhorn matrix."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.hyper_streams import pick
from dsv4.triton._lib.numerics import wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import near_reciprocal
from dsv4.triton._lib.rms import inverse_rms
from dsv4.triton._runtime.launcher import fast_launch


@triton.jit
def summed(partials, token, tokens, splits, SPLITS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Sum of the partial sums of one token, ``[ROW_BLOCK]``."""
    split = tl.arange(0, SPLITS)[:, None]
    offset = (split.to(tl.int64) * tokens + token) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[None, :]
    return tl.sum(tl.load(partials + offset, mask=split < splits, other=0.0), 0)


@triton.jit
def _row_softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    inverse = near_reciprocal(a + b + c + d)
    return a * inverse + eps, b * inverse + eps, c * inverse + eps, d * inverse + eps


@triton.jit
def _normalised(a, b, c, d, eps):
    inverse = near_reciprocal(a + b + c + d + eps)
    return a * inverse, b * inverse, c * inverse, d * inverse


@triton.jit
def _sinkhorn_and_store(
    comb,
    mask,
    c0,
    c1,
    c2,
    c3,
    c4,
    c5,
    c6,
    c7,
    c8,
    c9,
    c10,
    c11,
    c12,
    c13,
    c14,
    c15,
    eps,
    ITERATIONS: tl.constexpr,
):
    """The matrix of logits, row by row, made doubly stochastic; columns last.

    A thread has all 16 entries in registers, so a round needs no other thread: some 50 cycles.
    """
    c0, c1, c2, c3 = _row_softmax(c0, c1, c2, c3, eps)
    c4, c5, c6, c7 = _row_softmax(c4, c5, c6, c7, eps)
    c8, c9, c10, c11 = _row_softmax(c8, c9, c10, c11, eps)
    c12, c13, c14, c15 = _row_softmax(c12, c13, c14, c15, eps)
    c0, c4, c8, c12 = _normalised(c0, c4, c8, c12, eps)
    c1, c5, c9, c13 = _normalised(c1, c5, c9, c13, eps)
    c2, c6, c10, c14 = _normalised(c2, c6, c10, c14, eps)
    c3, c7, c11, c15 = _normalised(c3, c7, c11, c15, eps)
    for _ in range(ITERATIONS - 1):
        c0, c1, c2, c3 = _normalised(c0, c1, c2, c3, eps)
        c4, c5, c6, c7 = _normalised(c4, c5, c6, c7, eps)
        c8, c9, c10, c11 = _normalised(c8, c9, c10, c11, eps)
        c12, c13, c14, c15 = _normalised(c12, c13, c14, c15, eps)
        c0, c4, c8, c12 = _normalised(c0, c4, c8, c12, eps)
        c1, c5, c9, c13 = _normalised(c1, c5, c9, c13, eps)
        c2, c6, c10, c14 = _normalised(c2, c6, c10, c14, eps)
        c3, c7, c11, c15 = _normalised(c3, c7, c11, c15, eps)
    tl.store(comb + 0, c0, mask=mask)
    tl.store(comb + 1, c1, mask=mask)
    tl.store(comb + 2, c2, mask=mask)
    tl.store(comb + 3, c3, mask=mask)
    tl.store(comb + 4, c4, mask=mask)
    tl.store(comb + 5, c5, mask=mask)
    tl.store(comb + 6, c6, mask=mask)
    tl.store(comb + 7, c7, mask=mask)
    tl.store(comb + 8, c8, mask=mask)
    tl.store(comb + 9, c9, mask=mask)
    tl.store(comb + 10, c10, mask=mask)
    tl.store(comb + 11, c11, mask=mask)
    tl.store(comb + 12, c12, mask=mask)
    tl.store(comb + 13, c13, mask=mask)
    tl.store(comb + 14, c14, mask=mask)
    tl.store(comb + 15, c15, mask=mask)


@triton.jit
def parameters_of(scale, base, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Factor and base of each row: the first n are of ``hc_pre``, n more of ``hc_post``."""
    row = tl.arange(0, ROW_BLOCK)
    part = tl.minimum(row // 4, 2)
    factor = widen(tl.load(scale + part, mask=row < ROWS, other=0.0))
    return factor, widen(tl.load(base + row, mask=row < ROWS, other=0.0))


@triton.jit
def logits_of(values, squares, factor, base, hidden, norm_eps):
    """``mix * factor + base`` of every row."""
    inverse = inverse_rms(squares, 4 * hidden, norm_eps)
    return tl.fma(values * inverse, factor, base)


@triton.jit
def coefficients_of_token(
    values, factor, base, token, hidden, post, comb, norm_eps, hc_eps, ITERATIONS: tl.constexpr
):
    """Post and comb of one token."""
    logits = logits_of(values, pick(values, 24), factor, base, hidden, norm_eps)
    row = tl.arange(0, values.shape[0])
    tl.store(post + token * 4 + row - 4, 2.0 * tl.sigmoid(logits), mask=(row >= 4) & (row < 8))
    columns = _columns(logits)
    copy = tl.arange(0, columns[0].shape[0])
    _sinkhorn_and_store(
        comb + token * 16 + copy * 0,
        copy == 0,
        _entry(columns, 8),
        _entry(columns, 9),
        _entry(columns, 10),
        _entry(columns, 11),
        _entry(columns, 12),
        _entry(columns, 13),
        _entry(columns, 14),
        _entry(columns, 15),
        _entry(columns, 16),
        _entry(columns, 17),
        _entry(columns, 18),
        _entry(columns, 19),
        _entry(columns, 20),
        _entry(columns, 21),
        _entry(columns, 22),
        _entry(columns, 23),
        hc_eps,
        ITERATIONS,
    )


@triton.jit
def _columns(values):
    """Return every fourth of ``values [N]``, from the first to the fourth on: ``[N / 4]`` each."""
    even, odd = tl.split(tl.reshape(values, [values.shape[0] // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _entry(columns, INDEX: tl.constexpr):
    """Entry INDEX of the vector of ``columns``, in every thread: one exchange instead of a sum."""
    column = columns[INDEX % 4]
    return tl.gather(column, tl.full(column.shape, INDEX // 4, tl.int32), 0)


@triton.jit
def _many_rows(partials, token, tokens, splits, ROW: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Row ROW of the summed GEMM of each of many tokens."""
    total = tl.zeros(token.shape, tl.float32)
    for split in range(splits):
        offset = (tl.cast(split, tl.int64) * tokens + token) * ROW_BLOCK + ROW
        total += tl.load(partials + offset, mask=token < tokens, other=0.0)
    return total


@triton.jit
def _many_logits(
    partials,
    token,
    tokens,
    splits,
    inverse,
    scale,
    base,
    ROW: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    mix = _many_rows(partials, token, tokens, splits, ROW, ROW_BLOCK) * inverse
    factor = widen(tl.load(scale + (1 if ROW < 8 else 2)))
    return tl.fma(mix, factor, widen(tl.load(base + ROW)))


@fast_launch
@triton.jit(do_not_specialize=["tokens", "splits"])
def coefficients_kernel(
    partials,
    scale,
    base,
    post,
    comb,
    tokens,
    hidden,
    splits,
    norm_eps,
    hc_eps,
    ITERATIONS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Post and comb of many tokens, one to a thread."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = token < tokens
    squares = _many_rows(partials, token, tokens, splits, 24, ROW_BLOCK)
    inverse = inverse_rms(squares, 4 * hidden, norm_eps)
    for i in tl.static_range(4):
        logit = _many_logits(
            partials, token, tokens, splits, inverse, scale, base, 4 + i, ROW_BLOCK
        )
        tl.store(post + token * 4 + i, 2.0 * tl.sigmoid(logit), mask=mask)
    _sinkhorn_and_store(
        comb + token * 16,
        mask,
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 8, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 9, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 10, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 11, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 12, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 13, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 14, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 15, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 16, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 17, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 18, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 19, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 20, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 21, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 22, ROW_BLOCK),
        _many_logits(partials, token, tokens, splits, inverse, scale, base, 23, ROW_BLOCK),
        hc_eps,
        ITERATIONS,
    )
