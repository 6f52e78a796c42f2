"""The gemm of ``fn`` with flattened streams, in parts, for ``hyper_connection``.

A program takes some tokens and some columns, and leaves its part of the gemm and of the sum of
squares. The gemm is exact up to float32 sums: ``fn`` is cut into three bfloat16 numbers that add
up to all its 24 bits, and products of bfloat16 are exact.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4.triton._lib.hyper_streams import load_mixers, load_streams, mixed_stream
from dsv4.triton._lib.numerics import INTERPRETED, narrow, wait_for_inputs, widen
from dsv4.triton._lib.prefetch import prefetch_tile
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

# Up to this many tokens a program takes one, and the gemm needs no tensor core.
FEW = 4
# Of a thread then: with no number the compiler saves registers, and loads wait for loads.
_REGISTERS = 128
# From this many on ``fn`` is cut by a launch of its own.
MANY = 1024
# Then: tokens and columns of a tile, tiles in flight, warps.
_TALL = (256, 64, 4, 8)


@triton.jit
def _upper(x):
    """The upper half of float32 numbers: bfloat16, cut off instead of rounded."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _cut(fn):
    """Three bfloat16 numbers of 8 bits each whose sum is fn, the largest first.

    Cut off, because rounding would make a number above the largest bfloat16 infinite. A NaN whose
    bits are all in the lower half is infinite in the first; the others are NaN then.
    """
    high = _upper(fn)
    rest = fn - widen(high)
    middle = _upper(rest)
    return high, middle, _upper(rest - widen(middle))


@triton.jit
def _split_gemm(x, fn, total):
    """``total + x [TOKENS, K] fn [ROWS, K]^T`` for float32 fn: exact products, float32 sums."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        total = tl.dot(widen(x), tl.trans(fn), total, input_precision="ieee")
    else:
        high, middle, low = _cut(fn)
        total = tl.dot(x, tl.trans(low), total)
        total = tl.dot(x, tl.trans(middle), total)
        total = tl.dot(x, tl.trans(high), total)
    return total


@fast_launch
@triton.jit(do_not_specialize=["tokens", "splits"])
def _mixing_gemm_kernel(
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
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Parts of the gemm of many tokens: of columns of the flattened streams, ``width`` in all.

    Columns 0 to ROWS - 1 of a part are the gemm, column ROWS is the sum of squares.
    """
    split = tl.program_id(0) % splits
    row = tl.arange(0, ROW_BLOCK)
    if PREFETCH:
        start = split * CHUNKS * BLOCK
        prefetch_tile(fn, width, tl.minimum(row, ROWS - 1), start, CHUNKS * BLOCK)
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // splits) * TOKENS + tl.arange(0, TOKENS)
    here = (token < tokens)[:, None]
    token = token.to(tl.int64)[:, None]
    gemm = tl.zeros([TOKENS, ROW_BLOCK], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        column = (split * CHUNKS + chunk) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = column < width
        tile = tl.load(x + token * width + column, mask=here & inside, other=0.0)
        at = fn + row[:, None].to(tl.int64) * width + column
        weights = tl.load(at, mask=(row < ROWS)[:, None] & inside, other=0.0)
        gemm = _split_gemm(tile, weights, gemm)
        wide = widen(tile)
        squares += wide * wide
    total = tl.where(row[None, :] == ROWS, tl.sum(squares, 1)[:, None], gemm)
    offset = (split.to(tl.int64) * tokens + token) * ROW_BLOCK + row[None, :]
    tl.store(parts + offset, total, mask=here)


@fast_launch
@triton.jit
def _split_bf16_kernel(
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


@fast_launch
@triton.jit(do_not_specialize=["tokens", "splits"])
def _mixing_large_m_kernel(
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
    """Parts of the gemm, as ``_mixing_gemm_kernel``, of ``fn`` that is cut already.

    One gemm with all three parts, and a quarter of nothing: past the matrix ``cut`` lie zeros.
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
    offset = (split.to(tl.int64) * tokens + token) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[None, :]
    total = tl.sum(tl.reshape(total, [TOKENS, 4, ROW_BLOCK]), 1)
    tl.store(parts + offset, total, mask=token < tokens)


@triton.jit
def _dot(a, b, total):
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), total, input_precision="ieee")
    return tl.dot(a, b, total)


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _mixing_small_m_kernel(
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
        # Streams as rows, so that the program's threads share the lines: each asked for one alone.
        streamed = tl.minimum(tl.arange(0, 4 * ROW_BLOCK), 4 * ROWS - 1)
        prefetch_tile(fn, hidden, streamed, split * BLOCK, BLOCK)
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // splits).to(tl.int64)
    column = split * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    at = fn + row[:, None].to(tl.int64) * (4 * hidden) + column[None, :]
    f0, f1, f2, f3 = load_streams(at, 0, hidden, (row < ROWS)[:, None] & inside[None, :])
    offset = token * 4 * hidden + column
    x0, x1, x2, x3 = load_streams(x, offset, hidden, inside)
    if WRITE_BACK:
        wide = widen(tl.load(y + token * hidden + column, mask=inside, other=0.0))
        mixers = load_mixers(post, comb, token)
        DTYPE: tl.constexpr = x.dtype.element_ty
        m0 = narrow(mixed_stream(wide, x0, x1, x2, x3, mixers[0]), DTYPE)
        m1 = narrow(mixed_stream(wide, x0, x1, x2, x3, mixers[1]), DTYPE)
        m2 = narrow(mixed_stream(wide, x0, x1, x2, x3, mixers[2]), DTYPE)
        m3 = narrow(mixed_stream(wide, x0, x1, x2, x3, mixers[3]), DTYPE)
        tl.store(out + offset, m0, mask=inside)
        tl.store(out + offset + hidden, m1, mask=inside)
        tl.store(out + offset + 2 * hidden, m2, mask=inside)
        tl.store(out + offset + 3 * hidden, m3, mask=inside)
        # Columns outside would be NaN where the coefficients are: 0 instead, as they are not there.
        x0, x1 = tl.where(inside, widen(m0), 0.0), tl.where(inside, widen(m1), 0.0)
        x2, x3 = tl.where(inside, widen(m2), 0.0), tl.where(inside, widen(m3), 0.0)
    squares = tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0)))
    sums = tl.fma(f1, x1[None, :], f0 * x0[None, :])
    sums = tl.fma(f3, x3[None, :], tl.fma(f2, x2[None, :], sums))
    total = tl.where(row == ROWS, tl.sum(squares, 0), tl.sum(sums, 1))
    tl.store(parts + (split.to(tl.int64) * tokens + token) * ROW_BLOCK + row, total)


@dataclass(frozen=True)
class Parts:
    """The parts of a gemm with ``rows`` rows: ``[splits, T, row_block]`` float32.

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


def _empty_parts(x: torch.Tensor, fn: torch.Tensor, splits: int) -> Parts:
    rows = fn.shape[0]
    shape = (splits, x.shape[0], launch_options.power_of_two(rows + 1))
    return Parts(x.new_empty(shape, dtype=torch.float32), rows)


def _parts_of_many(x: torch.Tensor, fn: torch.Tensor) -> Parts:
    """Parts of ``fn`` times the streams ``x [T, 4, H]``: about two programs per SM."""
    tokens, width = x.shape[0], fn.shape[1]
    group, block = (16 if tokens <= 16 else 64), 128
    groups, chunks = -(-tokens // group), -(-width // block)
    splits = max(1, min(chunks, 2 * launch_options.sm_count(x.device) // groups))
    share = -(-chunks // splits)
    parts = _empty_parts(x, fn, -(-chunks // share))
    with launch_options.on(x):
        _mixing_gemm_kernel[(groups * parts.splits,)](
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
            CHUNKS=share,
            PREFETCH=width % (share * block) == 0 and launch_options.capability(x) is not None,
            num_warps=4,
            num_stages=3,
            **launch_options.options(x),
        )
    return parts


def _parts_of_all(x: torch.Tensor, fn: torch.Tensor) -> Parts:
    """The same of so many tokens that ``fn`` is cut by a launch of its own; without squares."""
    tokens, width = x.shape[0], fn.shape[1]
    group, block, stages, warps = _TALL
    groups, chunks = -(-tokens // group), -(-width // block)
    splits = max(1, min(chunks, launch_options.sm_count(x.device) // groups))
    share = -(-chunks // splits)
    parts = _empty_parts(x, fn, -(-chunks // share))
    parts = dataclasses.replace(parts, squared=False)
    cut = x.new_empty((3 * parts.row_block, width))
    with launch_options.on(x):
        _split_bf16_kernel[(parts.row_block, -(-width // 1024))](
            fn,
            cut,
            parts.rows,
            width,
            ROW_BLOCK=parts.row_block,
            BLOCK=1024,
            num_warps=4,
            **launch_options.options(x),
        )
        _mixing_large_m_kernel[(groups * parts.splits,)](
            TensorDescriptor.from_tensor(x.view(tokens, width), [group, block]),
            TensorDescriptor.from_tensor(cut, [4 * parts.row_block, block]),
            parts.data,
            tokens,
            parts.splits,
            ROW_BLOCK=parts.row_block,
            TOKENS=group,
            BLOCK=block,
            CHUNKS=share,
            STAGES=stages,
            num_warps=warps,
            **launch_options.options(x),
        )
    return parts


def parts_of_few(
    x: torch.Tensor,
    fn: torch.Tensor,
    write_back: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[Parts, torch.Tensor]:
    """Parts of ``fn`` times the streams, and those streams: of what the ``write_back`` of ``(y,
    post, comb)`` makes of ``x``, where there is one."""
    tokens, _, hidden = x.shape
    block = 32 if hidden <= 4096 else 64
    parts = _empty_parts(x, fn, -(-hidden // block))
    y, post, comb = write_back or (None, None, None)
    out = x if write_back is None else torch.empty_like(x)
    with launch_options.on(x):
        _mixing_small_m_kernel[(tokens * parts.splits,)](
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
            PREFETCH=hidden % block == 0 and launch_options.capability(x) is not None,
            num_warps=4,
            maxnreg=_REGISTERS,
            **launch_options.options(x),
        )
    return parts, out


def parts_of(x: torch.Tensor, fn: torch.Tensor) -> Parts:
    tokens, _, hidden = x.shape
    if tokens <= FEW:
        return parts_of_few(x, fn)[0]
    # Tensor descriptors want rows of whole 16 bytes, at multiples of 16.
    whole = hidden % 8 == 0 and x.data_ptr() % 16 == 0
    if tokens >= MANY and x.dtype == torch.bfloat16 and whole:
        return _parts_of_all(x, fn)
    return _parts_of_many(x, fn)
