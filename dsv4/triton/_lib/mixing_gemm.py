"""Split-K GEMM of ``fn`` with flattened streams, for ``hyper_connection``.

A program takes a tile of tokens and a range of columns (K) and stores its partial sums of the GEMM
and of the token's squares. The GEMM is exact up to float32 sums: ``fn`` is split into three
bfloat16 numbers that add up to all its 24 bits, and bfloat16 times bfloat16 is exact in float32.

There are three kernels: ``_mixing_small_m_kernel`` (one token per program, FMA instructions),
``_mixing_gemm_kernel`` (16 or 64 tokens, tensor cores, ``fn`` split in registers) and
``_mixing_large_m_kernel`` (256 tokens, TMA loads, ``fn`` split by a launch before it).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4.triton._lib.combined_rows import CombinedRows, load_combined
from dsv4.triton._lib.hyper_streams import load_mixers, load_streams, mixed_stream
from dsv4.triton._lib.mailbox import PushedSum, load_sum
from dsv4.triton._lib.numerics import INTERPRETED, dot, narrow, wait_for_inputs, widen
from dsv4.triton._lib.prefetch import prefetch_tile
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

# Up to this many tokens a program takes one token and uses no tensor core.
SMALL_M = 4
# Most tokens for which that kernel also does the preceding write-back, if rows have at most 4096
# columns; for more tokens the write-back is a separate launch. 8 tokens take 7.1 us instead of 8.2
# (7168 columns: 9.0 either way) on an H200.
_SMALL_M_WRITTEN_BACK, _SHORT_ROW = 8, 4096
# Registers of a thread of that kernel. Without a number the compiler saves registers, so that loads
# wait for earlier loads.
_REGISTERS = 128
# From this many tokens on a launch of its own splits ``fn`` once, not every program again.
LARGE_M = 1024
# Tilings of ``_mixing_large_m_kernel``: tokens and columns of a tile, pipeline stages, warps. The
# second one is for GPUs whose shared memory does not hold the first one.
_LARGE_M_TILE, _LOWER_TILE = (256, 64, 4, 8), (128, 64, 2, 4)


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
    partials,
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
    """Partial sums of TOKENS tokens over CHUNKS * BLOCK of the ``width`` columns.

    Columns 0 to ROWS - 1 of a partial are the GEMM, column ROWS is the sum of squares. Program
    ``p`` has tokens of tile ``p // splits`` and split ``p % splits`` of K.
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
    tl.store(partials + offset, total, mask=here)


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
    """``fn`` as three bfloat16 matrices of ROW_BLOCK rows each; rows past those of fn are zeros."""
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
    partials,
    tokens,
    splits,
    ROW_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial sums as in ``_mixing_gemm_kernel``, of ``fn`` that is split already.

    One GEMM multiplies all three matrices of ``cut``; its last quarter is zeros, which the TMA
    load returns past the end. There are no squares: the launch of ``hc_pre`` sums them up.
    """
    wait_for_inputs(PDL)
    split = tl.program_id(0) % splits
    first = tl.program_id(0) // splits * TOKENS
    total = tl.zeros([TOKENS, 4 * ROW_BLOCK], tl.float32)
    for chunk in tl.range(split * CHUNKS, (split + 1) * CHUNKS, num_stages=STAGES):
        start = chunk * BLOCK
        total = dot(x.load([first, start]), cut.load([0, start]).T, total)
    token = first.to(tl.int64) + tl.arange(0, TOKENS)[:, None]
    offset = (split.to(tl.int64) * tokens + token) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)[None, :]
    total = tl.sum(tl.reshape(total, [TOKENS, 4, ROW_BLOCK]), 1)
    tl.store(partials + offset, total, mask=token < tokens)


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _mixing_small_m_kernel(
    x,
    fn,
    partials,
    y,
    post,
    comb,
    out,
    tokens,
    hidden,
    splits,
    WRITE_BACK: tl.constexpr,
    RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial sums of one token over a slice of the hidden dimension, of all four streams.

    A program has all streams of its columns, so the write-back of the sublayer before can be done
    here; with RANKS its output is the sum of a mailbox's slots (``mailbox.load_sum``), with TOP_K
    that of rows of experts (``combined_rows.load_combined``). All other loads are issued before the
    first use, so that their latencies overlap.
    """
    split = tl.program_id(0) % splits
    row = tl.arange(0, ROW_BLOCK)
    if PREFETCH:
        # Streams as rows, so that each thread of the program prefetches other lines.
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
        if RANKS:  # what does not come from the mailbox is loaded before the wait
            mixers = load_mixers(post, comb, token)
            wide = load_sum(y, token, split * BLOCK, column, inside, hidden, RANKS)
        elif TOP_K:  # what need not be looked up is loaded first
            mixers = load_mixers(post, comb, token)
            wide = widen(load_combined(y, token, column, inside, TOP_K))
        else:
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
    tl.store(partials + (split.to(tl.int64) * tokens + token) * ROW_BLOCK + row, total)


@dataclass(frozen=True)
class Partials:
    """Partial sums of a GEMM with ``rows`` rows: ``[splits, T, row_block]`` float32.

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


def _empty_partials(x: torch.Tensor, fn: torch.Tensor, splits: int) -> Partials:
    rows = fn.shape[0]
    shape = (splits, x.shape[0], launch_options.power_of_two(rows + 1))
    return Partials(x.new_empty(shape, dtype=torch.float32), rows)


def _partials_of_many(x: torch.Tensor, fn: torch.Tensor) -> Partials:
    """Partial sums of ``fn`` times the streams ``x [T, 4, H]``: about two programs per SM."""
    tokens, width = x.shape[0], fn.shape[1]
    # mma.sync takes operands from registers; these hold at most 16 tokens of 128 columns.
    block = 128 if tokens <= 16 or launch_options.has_wide_tiles(x) else 64
    group = 16 if tokens <= 16 else 64
    groups, chunks = -(-tokens // group), -(-width // block)
    splits = max(1, min(chunks, 2 * launch_options.sm_count(x.device) // groups))
    share = -(-chunks // splits)
    partials = _empty_partials(x, fn, -(-chunks // share))
    with launch_options.on(x):
        _mixing_gemm_kernel[(groups * partials.splits,)](
            x,
            fn,
            partials.data,
            tokens,
            width,
            partials.splits,
            ROWS=partials.rows,
            ROW_BLOCK=partials.row_block,
            TOKENS=group,
            BLOCK=block,
            CHUNKS=share,
            PREFETCH=width % (share * block) == 0 and launch_options.capability(x) is not None,
            num_warps=4,
            num_stages=3,
            **launch_options.options(x),
        )
    return partials


def _large_m_tile(shared: int) -> tuple[int, int, int, int]:
    """Tokens, columns, pipeline stages and warps that ``shared`` bytes of shared memory hold."""
    group, block, stages, _ = _LARGE_M_TILE
    rows_of_cut = 4 * 32  # ``cut`` has three blocks of at most 32 rows, loaded as four
    return _LARGE_M_TILE if stages * 2 * block * (group + rows_of_cut) < shared else _LOWER_TILE


def _partials_of_large_m(x: torch.Tensor, fn: torch.Tensor) -> Partials:
    """Partial sums for large M: a launch of its own splits ``fn``; without squares."""
    tokens, width = x.shape[0], fn.shape[1]
    group, block, stages, warps = _large_m_tile(launch_options.shared_memory(x))
    groups, chunks = -(-tokens // group), -(-width // block)
    splits = max(1, min(chunks, launch_options.sm_count(x.device) // groups))
    share = -(-chunks // splits)
    partials = _empty_partials(x, fn, -(-chunks // share))
    partials = dataclasses.replace(partials, squared=False)
    cut = x.new_empty((3 * partials.row_block, width))
    with launch_options.on(x):
        _split_bf16_kernel[(partials.row_block, -(-width // 1024))](
            fn,
            cut,
            partials.rows,
            width,
            ROW_BLOCK=partials.row_block,
            BLOCK=1024,
            num_warps=4,
            **launch_options.options(x),
        )
        _mixing_large_m_kernel[(groups * partials.splits,)](
            TensorDescriptor.from_tensor(x.view(tokens, width), [group, block]),
            TensorDescriptor.from_tensor(cut, [4 * partials.row_block, block]),
            partials.data,
            tokens,
            partials.splits,
            ROW_BLOCK=partials.row_block,
            TOKENS=group,
            BLOCK=block,
            CHUNKS=share,
            STAGES=stages,
            num_warps=warps,
            **launch_options.options(x),
        )
    return partials


# What a kernel adds up to get a sublayer's output: ranks' parts of it, or rows of experts.
Summands = PushedSum | CombinedRows


def argument_of(y: torch.Tensor | Summands) -> Any:
    """Return a sublayer's output as an argument of the kernels that write it back."""
    return y if isinstance(y, torch.Tensor) else y.arguments


def reading(y: torch.Tensor | Summands | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a launch, with constants that say how its kernel reads ``y``.

    Rows of experts are added up without contraction, as by ``moe_combine``. Nothing else in these
    kernels could be contracted.
    """
    ranks = y.ranks if isinstance(y, PushedSum) else 0
    top_k = y.top_k if isinstance(y, CombinedRows) else 0
    if top_k and "enable_fp_fusion" in options:
        options = {**options, "enable_fp_fusion": False}
    return {**options, "RANKS": ranks, "TOP_K": top_k}


@dataclass(frozen=True)
class WriteBack:
    """What ``hc_post`` writes to the streams; all tensors are contiguous.

    Attributes:
        y: ``[T, H]``, output of the sublayer before, or what it is the sum of.
        post: ``[T, 4]``.
        comb: ``[T, 4, 4]``.
    """

    y: torch.Tensor | Summands
    post: torch.Tensor
    comb: torch.Tensor

    @property
    def arguments(self) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Arguments of the kernel."""
        return argument_of(self.y), self.post, self.comb


def writes_back(tokens: int, hidden: int) -> bool:
    """Whether ``partials_of_small_m`` also does the write-back before it, for that many tokens."""
    return 0 < tokens <= (_SMALL_M_WRITTEN_BACK if hidden <= _SHORT_ROW else SMALL_M)


def partials_of_small_m(
    x: torch.Tensor, fn: torch.Tensor, write_back: WriteBack | None = None
) -> tuple[Partials, torch.Tensor]:
    """Partial sums for small M, and the streams that they are of.

    With ``write_back`` these are the streams after it, else ``x``.
    """
    tokens, _, hidden = x.shape
    block = 32 if hidden <= 4096 else 64
    partials = _empty_partials(x, fn, -(-hidden // block))
    y, post, comb = (None, None, None) if write_back is None else write_back.arguments
    out = x if write_back is None else torch.empty_like(x)
    with launch_options.on(x):
        _mixing_small_m_kernel[(tokens * partials.splits,)](
            x,
            fn,
            partials.data,
            y,
            post,
            comb,
            out,
            tokens,
            hidden,
            partials.splits,
            WRITE_BACK=write_back is not None,
            ROWS=partials.rows,
            ROW_BLOCK=partials.row_block,
            BLOCK=block,
            PREFETCH=hidden % block == 0 and launch_options.capability(x) is not None,
            num_warps=4,
            maxnreg=_REGISTERS,
            **reading(None if write_back is None else write_back.y, launch_options.options(x)),
        )
    return partials, out


def partials_of(x: torch.Tensor, fn: torch.Tensor) -> Partials:
    """Partial sums of ``fn`` times the streams ``x``, by the kernel for the number of tokens."""
    tokens, _, hidden = x.shape
    if tokens <= SMALL_M:
        return partials_of_small_m(x, fn)[0]
    # Tensor descriptors want rows of whole 16 bytes, at multiples of 16.
    whole = hidden % 8 == 0 and x.data_ptr() % 16 == 0 and launch_options.has_descriptors(x)
    if tokens >= LARGE_M and x.dtype == torch.bfloat16 and whole:
        return _partials_of_large_m(x, fn)
    return _partials_of_many(x, fn)
