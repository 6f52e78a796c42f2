"""Kernels of ``dsv4.ops.hyper_connection``, for four streams.

A collapse needs the product of ``fn`` with a token's flattened streams before it can begin, so it
takes two launches. The first spreads the product over the GPU: a program takes some tokens and some
columns, and leaves its part of the product and of the sum of squares. The second adds the parts in
their order and collapses. The streams are read twice: 9 rows of H are moved where 5 would do. For a
few tokens the write-back of the sublayer before is part of the first launch; for many it is one of
its own, because a program of the product then wants columns of one stream.

The product is exact up to float32 sums: ``fn`` is cut into three bfloat16 numbers that add up to
all its 24 bits, and products of bfloat16 are exact.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4.formats import LINEAR
from dsv4.triton import _launch
from dsv4.triton._numerics import INTERPRETED, narrow, wait_for_inputs, widen
from dsv4.triton._nvfp4 import (
    block_scales,
    conversion,
    dynamic_scale,
    e2m1_codes,
    finite_amax,
    is_moderate,
    largest,
    near_reciprocal,
)
from dsv4.triton._prefetch import prefetch_tile
from dsv4.triton.norm import inverse_rms
from dsv4.triton.quantize import Output

_LARGEST = tl.constexpr(3.3895313892515355e38)  # finite bfloat16

# From this many tokens on the mixing matrices are made 32 tokens at a time, one to a thread.
_MANY = 1024
_LANES = 32
# Their product: tokens and columns of a tile, tiles in flight, warps.
_TALL = (256, 64, 4, 8)
# Up to this many tokens a program takes one, and the product needs no tensor core.
_FEW = 4


@triton.jit
def _mix(y, x0, x1, x2, x3, post, c0, c1, c2, c3):
    """``post y + sum_j c_j x_j``: written out, so that every kernel rounds alike."""
    total = tl.fma(c3, x3, tl.fma(c2, x2, tl.fma(c1, x1, c0 * x0)))
    return tl.fma(post, y, total)


@triton.jit
def _load_streams(x, place, hidden, mask):
    """Four streams at ``place``, float32."""
    x0 = widen(tl.load(x + place, mask=mask, other=0.0))
    x1 = widen(tl.load(x + place + hidden, mask=mask, other=0.0))
    x2 = widen(tl.load(x + place + 2 * hidden, mask=mask, other=0.0))
    x3 = widen(tl.load(x + place + 3 * hidden, mask=mask, other=0.0))
    return x0, x1, x2, x3


@triton.jit
def _mixed_stream(y, x0, x1, x2, x3, post, comb, token, K: tl.constexpr):
    """Stream K of a token after the write-back; ``comb[j, K]`` is what stream j gives to it."""
    return _mix(
        y,
        x0,
        x1,
        x2,
        x3,
        widen(tl.load(post + token * 4 + K)),
        widen(tl.load(comb + token * 16 + K)),
        widen(tl.load(comb + token * 16 + 4 + K)),
        widen(tl.load(comb + token * 16 + 8 + K)),
        widen(tl.load(comb + token * 16 + 12 + K)),
    )


@triton.jit
def _post_kernel(
    y,
    x,
    post,
    comb,
    out,
    hidden,
    slices,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // slices).to(tl.int64)
    column = (tl.program_id(0) % slices) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    wide = widen(tl.load(y + token * hidden + column, mask=inside, other=0.0))
    place = token * 4 * hidden + column
    x0, x1, x2, x3 = _load_streams(x, place, hidden, inside)
    DTYPE: tl.constexpr = out.dtype.element_ty
    for k in tl.static_range(4):
        mixed = _mixed_stream(wide, x0, x1, x2, x3, post, comb, token, k)
        tl.store(out + place + k * hidden, narrow(mixed, DTYPE), mask=inside)


def hc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection.hc_post``."""
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    hidden = streams.shape[-1]
    tokens = out.numel() // (4 * hidden)
    # One warp a slice while there are few tokens, so that they spread over the GPU.
    block, warps = (256, 1) if tokens < 64 else (1024, 4)
    block = min(block, _launch.power_of_two(hidden))
    slices = -(-hidden // block)
    with _launch.on(out):
        _post_kernel[(tokens * slices,)](
            y.contiguous(),
            streams.contiguous(),
            post.contiguous(),
            comb.contiguous(),
            out,
            hidden,
            slices,
            BLOCK=block,
            num_warps=warps,
            **_launch.options(out),
        )
    return out


@triton.jit
def _cut(fn):
    """Three bfloat16 numbers whose sum is fn, the largest first."""
    # What exceeds the largest bfloat16 is left to the other parts; NaN stays.
    near = tl.clamp(fn, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    high = narrow(near, tl.bfloat16)
    rest = fn - widen(high)
    middle = narrow(rest, tl.bfloat16)
    return high, middle, narrow(rest - widen(middle), tl.bfloat16)


@triton.jit
def _product(x, fn, total):
    """``total + x [TOKENS, K] fn [ROWS, K]^T`` for float32 fn: exact products, float32 sums."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        total = tl.dot(widen(x), tl.trans(fn), total, input_precision="ieee")
    else:
        high, middle, low = _cut(fn)
        total = tl.dot(x, tl.trans(low), total)
        total = tl.dot(x, tl.trans(middle), total)
        total = tl.dot(x, tl.trans(high), total)
    return total


@triton.jit(do_not_specialize=["tokens"])
def _product_kernel(
    x,
    fn,
    parts,
    tokens,
    width,
    splits,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Parts of the product of many tokens: of columns of the flattened streams, ``width`` in all.

    Columns 0 to ROWS - 1 of a part are the product, column ROWS is the sum of squares.
    """
    wait_for_inputs(PDL)
    split = tl.program_id(0) % splits
    row = tl.arange(0, ROW_BLOCK)
    token = (tl.program_id(0) // splits) * TOKENS + tl.arange(0, TOKENS)
    here = (token < tokens)[:, None]
    token = token.to(tl.int64)[:, None]
    product = tl.zeros([TOKENS, ROW_BLOCK], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        column = (split * CHUNKS + chunk) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = column < width
        tile = tl.load(x + token * width + column, mask=here & inside, other=0.0)
        at = fn + row[:, None].to(tl.int64) * width + column
        weights = tl.load(at, mask=(row < ROWS)[:, None] & inside, other=0.0)
        product = _product(tile, weights, product)
        wide = widen(tile)
        squares += wide * wide
    total = tl.where(row[None, :] == ROWS, tl.sum(squares, 1)[:, None], product)
    place = (split.to(tl.int64) * tokens + token) * ROW_BLOCK + row[None, :]
    tl.store(parts + place, total, mask=here)


@triton.jit
def _cut_kernel(
    fn,
    out,
    rows,
    width,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``fn`` in three parts, ROW_BLOCK rows to each; rows that fn has not are zeros."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.where(row < rows, width, 0)
    high, middle, low = _cut(tl.load(fn + row * width + column, mask=column < end, other=0.0))
    out += row * width + column
    step = tl.cast(ROW_BLOCK, tl.int64) * width
    tl.store(out, high, mask=column < width)
    tl.store(out + step, middle, mask=column < width)
    tl.store(out + 2 * step, low, mask=column < width)


@triton.jit(do_not_specialize=["tokens"])
def _tall_kernel(
    x,
    cut,
    parts,
    tokens,
    splits,
    ROW_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Parts of the product, as ``_product_kernel``, of ``fn`` that is cut already.

    One product with all three parts, and a quarter of nothing: past the matrix ``cut`` lie zeros.
    There are no squares: the collapse sums them up.
    """
    wait_for_inputs(PDL)
    split = tl.program_id(0) % splits
    first = tl.program_id(0) // splits * TOKENS
    total = tl.zeros([TOKENS, 4 * ROW_BLOCK], tl.float32)
    for chunk in tl.range(split * CHUNKS, (split + 1) * CHUNKS, num_stages=STAGES):
        start = chunk * BLOCK
        total = _dot(x.load([first, start]), cut.load([0, start]).T, total)
    token = first.to(tl.int64) + tl.arange(0, TOKENS)[:, None]
    place = (split.to(tl.int64) * tokens + token) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[None, :]
    total = tl.sum(tl.reshape(total, [TOKENS, 4, ROW_BLOCK]), 1)
    tl.store(parts + place, total, mask=token < tokens)


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit(do_not_specialize=["tokens"])
def _few_kernel(
    x,
    fn,
    parts,
    y,
    post,
    comb,
    out,
    tokens,
    hidden,
    splits,
    WRITE_BACK: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for one token and a slice of the hidden dimension, of all streams.

    So a write-back can come before it. All loads are issued before the first use: one latency.
    """
    split = tl.program_id(0) % splits
    row = tl.arange(0, ROW_BLOCK)
    if PREFETCH:
        for k in tl.static_range(4):
            start = k * hidden + split * BLOCK
            prefetch_tile(fn, 4 * hidden, tl.minimum(row, ROWS - 1), start, BLOCK)
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // splits).to(tl.int64)
    column = split * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    at = fn + row[:, None].to(tl.int64) * (4 * hidden) + column[None, :]
    f0, f1, f2, f3 = _load_streams(at, 0, hidden, (row < ROWS)[:, None] & inside[None, :])
    place = token * 4 * hidden + column
    x0, x1, x2, x3 = _load_streams(x, place, hidden, inside)
    if WRITE_BACK:
        wide = widen(tl.load(y + token * hidden + column, mask=inside, other=0.0))
        DTYPE: tl.constexpr = x.dtype.element_ty
        m0 = narrow(_mixed_stream(wide, x0, x1, x2, x3, post, comb, token, 0), DTYPE)
        m1 = narrow(_mixed_stream(wide, x0, x1, x2, x3, post, comb, token, 1), DTYPE)
        m2 = narrow(_mixed_stream(wide, x0, x1, x2, x3, post, comb, token, 2), DTYPE)
        m3 = narrow(_mixed_stream(wide, x0, x1, x2, x3, post, comb, token, 3), DTYPE)
        tl.store(out + place, m0, mask=inside)
        tl.store(out + place + hidden, m1, mask=inside)
        tl.store(out + place + 2 * hidden, m2, mask=inside)
        tl.store(out + place + 3 * hidden, m3, mask=inside)
        # Columns outside would be NaN where the coefficients are: 0 instead, as they are not there.
        x0, x1 = tl.where(inside, widen(m0), 0.0), tl.where(inside, widen(m1), 0.0)
        x2, x3 = tl.where(inside, widen(m2), 0.0), tl.where(inside, widen(m3), 0.0)
    squares = tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0)))
    sums = tl.fma(f1, x1[None, :], f0 * x0[None, :])
    sums = tl.fma(f3, x3[None, :], tl.fma(f2, x2[None, :], sums))
    total = tl.where(row == ROWS, tl.sum(squares, 0), tl.sum(sums, 1))
    tl.store(parts + (split.to(tl.int64) * tokens + token) * ROW_BLOCK + row, total)


@dataclass(frozen=True)
class _Parts:
    """The parts of a product with ``rows`` rows: ``[splits, T, row_block]`` float32.

    If ``squared``, the row after them has the sum of a token's squares.
    """

    data: torch.Tensor
    rows: int
    squared: bool = True

    @property
    def splits(self) -> int:
        return self.data.shape[0]

    @property
    def row_block(self) -> int:
        return self.data.shape[2]


def _empty_parts(x: torch.Tensor, fn: torch.Tensor, splits: int) -> _Parts:
    rows = fn.shape[0]
    shape = (splits, x.shape[0], _launch.power_of_two(rows + 1))
    return _Parts(x.new_empty(shape, dtype=torch.float32), rows)


def _parts_of_many(x: torch.Tensor, fn: torch.Tensor) -> _Parts:
    """Parts of ``fn`` times the streams ``x [T, 4, H]``: about two programs per multiprocessor."""
    tokens, width = x.shape[0], fn.shape[1]
    group, block = (16 if tokens <= 64 else 64), 128
    groups, chunks = -(-tokens // group), -(-width // block)
    splits = max(1, min(chunks, 2 * _launch.multiprocessors(x.device) // groups))
    each = -(-chunks // splits)
    parts = _empty_parts(x, fn, -(-chunks // each))
    with _launch.on(x):
        _product_kernel[(groups * parts.splits,)](
            x,
            fn,
            parts.data,
            tokens,
            width,
            parts.splits,
            ROWS=parts.rows,
            ROW_BLOCK=parts.row_block,
            TOKENS=group,
            BLOCK=block,
            CHUNKS=each,
            num_warps=4,
            num_stages=3,
            **_launch.options(x),
        )
    return parts


def _parts_of_all(x: torch.Tensor, fn: torch.Tensor) -> _Parts:
    """The same of so many tokens that ``fn`` is cut by a launch of its own; without squares."""
    tokens, width = x.shape[0], fn.shape[1]
    group, block, stages, warps = _TALL
    groups, chunks = -(-tokens // group), -(-width // block)
    splits = max(1, min(chunks, _launch.multiprocessors(x.device) // groups))
    each = -(-chunks // splits)
    parts = _empty_parts(x, fn, -(-chunks // each))
    parts = dataclasses.replace(parts, squared=False)
    cut = x.new_empty((3 * parts.row_block, width))
    with _launch.on(x):
        _cut_kernel[(parts.row_block, -(-width // 1024))](
            fn,
            cut,
            parts.rows,
            width,
            ROW_BLOCK=parts.row_block,
            BLOCK=1024,
            num_warps=4,
            **_launch.options(x),
        )
        _tall_kernel[(groups * parts.splits,)](
            TensorDescriptor.from_tensor(x.view(tokens, width), [group, block]),
            TensorDescriptor.from_tensor(cut, [4 * parts.row_block, block]),
            parts.data,
            tokens,
            parts.splits,
            ROW_BLOCK=parts.row_block,
            TOKENS=group,
            BLOCK=block,
            CHUNKS=each,
            STAGES=stages,
            num_warps=warps,
            **_launch.options(x),
        )
    return parts


def _parts_of_few(
    x: torch.Tensor,
    fn: torch.Tensor,
    write_back: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[_Parts, torch.Tensor]:
    """Parts of ``fn`` times the streams, and those streams: of what the ``write_back`` of ``(y,
    post, comb)`` makes of ``x``, where there is one."""
    tokens, _, hidden = x.shape
    block = 32 if hidden <= 4096 else 64
    parts = _empty_parts(x, fn, -(-hidden // block))
    y, post, comb = write_back or (None, None, None)
    out = x if write_back is None else torch.empty_like(x)
    with _launch.on(x):
        _few_kernel[(tokens * parts.splits,)](
            x,
            fn,
            parts.data,
            y,
            post,
            comb,
            out,
            tokens,
            hidden,
            parts.splits,
            WRITE_BACK=write_back is not None,
            ROWS=parts.rows,
            ROW_BLOCK=parts.row_block,
            BLOCK=block,
            PREFETCH=hidden % block == 0 and _launch.capability(x) is not None,
            num_warps=4,
            **_launch.options(x),
        )
    return parts, out


def _parts(x: torch.Tensor, fn: torch.Tensor) -> _Parts:
    tokens, _, hidden = x.shape
    if tokens <= _FEW:
        return _parts_of_few(x, fn)[0]
    # Tensor descriptors want rows of whole 16 bytes, at multiples of 16.
    whole = hidden % 8 == 0 and x.data_ptr() % 16 == 0
    if tokens >= _MANY and x.dtype == torch.bfloat16 and whole:
        return _parts_of_all(x, fn)
    return _parts_of_many(x, fn)


@triton.jit
def _summed(parts, token, tokens, splits, SPLITS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """The parts of one token added up, ``[ROW_BLOCK]``."""
    split = tl.arange(0, SPLITS)[:, None]
    place = (split.to(tl.int64) * tokens + token) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[None, :]
    return tl.sum(tl.load(parts + place, mask=split < splits, other=0.0), 0)


@triton.jit
def _pick(values, INDEX: tl.constexpr):
    """Entry INDEX of a short vector, in every thread."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == INDEX, values, 0.0), 0)


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

    Its entries are numbers of their own, so a round needs no other thread: some 50 cycles.
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
def _parameters(scale, base, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Factor and base of each row: the first n make the collapse, n more the write-back."""
    row = tl.arange(0, ROW_BLOCK)
    part = tl.minimum(row // 4, 2)
    factor = widen(tl.load(scale + part, mask=row < ROWS, other=0.0))
    return factor, widen(tl.load(base + row, mask=row < ROWS, other=0.0))


@triton.jit
def _logits(values, squares, factor, base, hidden, norm_eps):
    """``mix * factor + base`` of every row."""
    inverse = inverse_rms(squares, 4 * hidden, norm_eps)
    return tl.fma(values * inverse, factor, base)


@triton.jit
def _coefficients(
    values, factor, base, token, hidden, post, comb, norm_eps, hc_eps, ITERATIONS: tl.constexpr
):
    """Post and comb of one token."""
    logits = _logits(values, _pick(values, 24), factor, base, hidden, norm_eps)
    row = tl.arange(0, values.shape[0])
    tl.store(post + token * 4 + row - 4, 2.0 * tl.sigmoid(logits), mask=(row >= 4) & (row < 8))
    _sinkhorn_and_store(
        comb + token * 16,
        True,
        _pick(logits, 8),
        _pick(logits, 9),
        _pick(logits, 10),
        _pick(logits, 11),
        _pick(logits, 12),
        _pick(logits, 13),
        _pick(logits, 14),
        _pick(logits, 15),
        _pick(logits, 16),
        _pick(logits, 17),
        _pick(logits, 18),
        _pick(logits, 19),
        _pick(logits, 20),
        _pick(logits, 21),
        _pick(logits, 22),
        _pick(logits, 23),
        hc_eps,
        ITERATIONS,
    )


@triton.jit
def _many_rows(parts, token, tokens, splits, ROW: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """Row ROW of the summed product of each of many tokens."""
    total = tl.zeros(token.shape, tl.float32)
    for split in range(splits):
        place = (tl.cast(split, tl.int64) * tokens + token) * ROW_BLOCK + ROW
        total += tl.load(parts + place, mask=token < tokens, other=0.0)
    return total


@triton.jit
def _many_logits(
    parts, token, tokens, splits, inverse, scale, base, ROW: tl.constexpr, ROW_BLOCK: tl.constexpr
):
    mix = _many_rows(parts, token, tokens, splits, ROW, ROW_BLOCK) * inverse
    factor = widen(tl.load(scale + (1 if ROW < 8 else 2)))
    return tl.fma(mix, factor, widen(tl.load(base + ROW)))


@triton.jit(do_not_specialize=["tokens"])
def _coefficients_kernel(
    parts,
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
    squares = _many_rows(parts, token, tokens, splits, 24, ROW_BLOCK)
    inverse = inverse_rms(squares, 4 * hidden, norm_eps)
    for i in tl.static_range(4):
        logit = _many_logits(parts, token, tokens, splits, inverse, scale, base, 4 + i, ROW_BLOCK)
        tl.store(post + token * 4 + i, 2.0 * tl.sigmoid(logit), mask=mask)
    _sinkhorn_and_store(
        comb + token * 16,
        mask,
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 8, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 9, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 10, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 11, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 12, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 13, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 14, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 15, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 16, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 17, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 18, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 19, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 20, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 21, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 22, ROW_BLOCK),
        _many_logits(parts, token, tokens, splits, inverse, scale, base, 23, ROW_BLOCK),
        hc_eps,
        ITERATIONS,
    )


@triton.jit
def _store_codes(
    values,
    shared,
    codes,
    scales,
    blocks,
    CONVERT: tl.constexpr,
    MODERATE: tl.constexpr,
):
    """A row ``[BLOCKS, 16]`` in NVFP4."""
    amax, finite = finite_amax(largest(values))
    bits, product = block_scales(amax, finite, shared, False, MODERATE)
    packed = e2m1_codes(widen(values), product, CONVERT, MODERATE)
    block = tl.arange(0, values.shape[0])
    place = codes + (block * 8)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(place, packed, mask=(block < blocks)[:, None])
    tl.store(scales + block, bits, mask=block < blocks)


@triton.jit
def _quantize_row(
    row, source, codes, scales, total, token, hidden, SCALE: tl.constexpr, CONVERT: tl.constexpr
):
    """A row ``[BLOCK]`` in NVFP4, with its own global scale or one from ``source``."""
    values = tl.reshape(row, [row.shape[0] // 16, 16])
    if SCALE == "token":
        shared = dynamic_scale(tl.max(finite_amax(largest(values))[0], 0))
    else:
        shared = tl.load(source + (token if SCALE == "row" else 0))
    if SCALE != "one" or token == 0:
        tl.store(total + (0 if SCALE == "one" else token), shared)
    codes += token * (hidden // 2)
    scales += token * (hidden // 16)
    if is_moderate(shared):
        _store_codes(values, shared, codes, scales, hidden // 16, CONVERT, True)
    else:
        _store_codes(values, shared, codes, scales, hidden // 16, CONVERT, False)


@triton.jit(do_not_specialize=["tokens"])
def _finish_kernel(
    parts,
    sums,
    x,
    scale,
    base,
    weight,
    out,
    post,
    comb,
    source,
    codes,
    scales,
    total_scale,
    tokens,
    hidden,
    splits,
    slices,
    norm_eps,
    hc_eps,
    ITERATIONS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    SQUARED: tl.constexpr,
    NORM: tl.constexpr,
    SCALE: tl.constexpr,
    CONVERT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token has ``slices`` programs that collapse and, with COEFFICIENTS, first one that makes
    post and comb: its many dependent steps take as long as the collapse, beside it. Parts that
    are not SQUARED leave that to the collapse, of a whole token then; what post and comb are made
    of goes to ``sums``, as a single part. The norm is quantised too, with the global scale of
    SCALE: ``"token"``, ``"one"`` or ``"row"`` given."""
    wait_for_inputs(PDL)
    programs = slices + COEFFICIENTS
    token = (tl.program_id(0) // programs).to(tl.int64)
    part = tl.program_id(0) % programs
    factor, start = _parameters(scale, base, ROWS, ROW_BLOCK)
    if COEFFICIENTS and part == 0:
        values = _summed(parts, token, tokens, splits, SPLITS, ROW_BLOCK)
        _coefficients(
            values, factor, start, token, hidden, post, comb, norm_eps, hc_eps, ITERATIONS
        )
    else:
        column = (part - COEFFICIENTS) * BLOCK + tl.arange(0, BLOCK)
        inside = column < hidden
        x0, x1, x2, x3 = _load_streams(x, token * 4 * hidden + column, hidden, inside)
        values = _summed(parts, token, tokens, splits, SPLITS, ROW_BLOCK)
        if SQUARED:
            squares = _pick(values, ROWS)
        else:
            squares = tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0)))
            squares = tl.sum(squares, 0)
            if sums is not None:
                row = tl.arange(0, ROW_BLOCK)
                found = tl.where(row == ROWS, squares, values)
                tl.store(sums + token * ROW_BLOCK + row, found)
        gates = tl.sigmoid(_logits(values, squares, factor, start, hidden, norm_eps)) + hc_eps
        total = tl.fma(_pick(gates, 1), x1, _pick(gates, 0) * x0)
        total = tl.fma(_pick(gates, 3), x3, tl.fma(_pick(gates, 2), x2, total))
        stored = narrow(total, out.dtype.element_ty)
        if NORM:
            wide = tl.where(inside, widen(stored), 0.0)
            inverse = inverse_rms(tl.sum(wide * wide, 0), hidden, norm_eps)
            gain = widen(tl.load(weight + column, mask=inside, other=0.0))
            stored = narrow(gain * (wide * inverse), out.dtype.element_ty)
        tl.store(out + token * hidden + column, stored, mask=inside)
        if SCALE is not None:
            _quantize_row(stored, source, codes, scales, total_scale, token, hidden, SCALE, CONVERT)


def _finish(
    parts: _Parts,
    x: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    weight: torch.Tensor | None,
    coefficients: tuple[torch.Tensor, torch.Tensor] | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    quantized: Output | None = None,
) -> torch.Tensor:
    """The collapsed streams ``[T, H]``, normed if there is a ``weight``; fills ``coefficients``.

    And ``quantized``, the norm in NVFP4.
    """
    tokens, _, hidden = x.shape
    out = x.new_empty((tokens, hidden))
    post, comb = coefficients or (None, None)
    beside = coefficients is not None and tokens < _MANY
    block = _launch.power_of_two(hidden)
    if weight is None and parts.squared:
        block = min(1024, block)
    slices = -(-hidden // block)
    outputs: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    scale_of, warps = None, 4 if parts.squared else max(4, block // 1024)
    if quantized is not None:
        codes, scales, total = quantized.tensors
        outputs = (quantized.source, codes, scales.view(torch.uint8), total)
        given = "one" if total.shape[0] == 1 else "row"
        scale_of = "token" if quantized.source is None else given
        # No more than 32 numbers to a thread, which has all of a block or half of it.
        warps = min(32, max(4, block // 1024))
    common = (norm_eps, hc_eps, iterations)
    sums = None
    if coefficients is not None and not parts.squared:
        sums = torch.empty_like(parts.data[:1])
    with _launch.on(x):
        _finish_kernel[(tokens * (slices + beside),)](
            parts.data,
            sums,
            x,
            scale,
            base,
            None if weight is None else weight.contiguous(),
            out,
            post,
            comb,
            *outputs,
            tokens,
            hidden,
            parts.splits,
            slices,
            *common,
            COEFFICIENTS=int(beside),
            SQUARED=parts.squared,
            NORM=weight is not None,
            SCALE=scale_of,
            CONVERT=conversion(x),
            SPLITS=_launch.power_of_two(parts.splits),
            ROWS=parts.rows,
            ROW_BLOCK=parts.row_block,
            BLOCK=block,
            num_warps=warps,
            **_launch.options(x),
        )
        if coefficients is not None and not beside:
            summed = parts.data if sums is None else sums
            _coefficients_kernel[(-(-tokens // _LANES),)](
                summed,
                scale,
                base,
                post,
                comb,
                tokens,
                hidden,
                summed.shape[0],
                *common,
                ROW_BLOCK=parts.row_block,
                LANES=_LANES,
                num_warps=1,
                **_launch.options(x),
            )
    return out


def _flat(streams: torch.Tensor) -> torch.Tensor:
    return streams.reshape(-1, *streams.shape[-2:]).contiguous()


def _wide(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(torch.float32).contiguous() for tensor in tensors)


def _pre(
    parts: _Parts | None,
    x: torch.Tensor,
    lead: torch.Size,
    scale: torch.Tensor,
    base: torch.Tensor,
    weight: torch.Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    quantized: Output | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    post = x.new_empty((x.shape[0], 4), dtype=torch.float32)
    comb = x.new_empty((x.shape[0], 4, 4), dtype=torch.float32)
    if parts is None:
        out = x.new_empty((x.shape[0], x.shape[2]))
    else:
        settings = (norm_eps, hc_eps, iterations)
        out = _finish(parts, x, scale, base, weight, (post, comb), *settings, quantized)
    return out.view(*lead, x.shape[2]), post.view(*lead, 4), comb.view(*lead, 4, 4)


def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_pre``."""
    return _collapse(streams, fn, scale, base, None, norm_eps, hc_eps, iterations)


def hc_pre_norm(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_pre_norm``."""
    return _collapse(streams, fn, scale, base, norm_weight, norm_eps, hc_eps, iterations)


def _collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    weight: torch.Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lead, x = streams.shape[:-2], _flat(streams)
    fn, scale, base = _wide(fn, scale, base)
    parts = _parts(x, fn) if x.numel() else None
    return _pre(parts, x, lead, scale, base, weight, norm_eps, hc_eps, iterations)


def hc_post_pre_norm(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_post_pre_norm``."""
    parameters = (fn, scale, base, norm_weight, norm_eps, hc_eps, iterations)
    return _hand_over(y, streams, post, comb, *parameters, None)


def hc_post_pre_norm_quantize(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    scaling: str,
) -> tuple[torch.Tensor, ...]:
    """See ``dsv4.ops.hyper_connection.hc_post_pre_norm_quantize``."""
    # In the dtype of the streams, which is that of the norm; y may have another.
    out = Output.empty(streams[:, 0], streams.shape[-1], global_scale, scaling, LINEAR)
    parameters = (fn, scale, base, norm_weight, norm_eps, hc_eps, iterations)
    mixed, normed, post, comb = _hand_over(y, streams, post, comb, *parameters, out)
    made = out.tensors if streams.shape[0] else out.without_rows()
    return mixed, normed, *made, post, comb


def _hand_over(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    quantized: Output | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    lead, x = streams.shape[:-2], _flat(streams)
    fn, scale, base = _wide(fn, scale, base)
    parts, mixed = None, torch.empty_like(x)
    if 0 < x.shape[0] <= _FEW and x.numel():
        parts, mixed = _parts_of_few(x, fn, (y.contiguous(), post.contiguous(), comb.contiguous()))
    elif x.numel():
        mixed = _flat(hc_post(y, streams, post, comb))
        parts = _parts(mixed, fn)
    settings = (norm_eps, hc_eps, iterations)
    made = _pre(parts, mixed, lead, scale, base, norm_weight, *settings, quantized)
    return mixed.view(streams.shape), *made


def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection.hc_head``."""
    lead, x = streams.shape[:-2], _flat(streams)
    if x.numel() == 0:
        return x.new_empty((*lead, x.shape[-1]))
    fn, scale, base = _wide(fn, scale, base)
    parts = _parts(x, fn)
    return _finish(parts, x, scale, base, None, None, norm_eps, hc_eps, 1).view(*lead, x.shape[2])
