"""Kernels of ``dsv4.ops.router``: a split-K GEMM for the logits, then top-k and weights.

A program of the first launch owns a tile of tokens and experts and a slice of the hidden axis (K);
a program of the second one owns a token. Between them are float32 ``[splits, T, E]``: partial sums
over slices of the hidden axis, added in the order of the slices. With one slice and float32 logits
they are the logits themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4.ops.router import RouteHashArgs, RouteTopkArgs, check_ids
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import INTERPRETED, narrow, wait_for_inputs, widen
from dsv4.triton._lib.prefetch import prefetch_row, prefetch_tile
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_SLICE = 4096  # columns of the hidden axis of a program for small M
_SMALL_M = 4  # tokens up to which the GEMM uses FMA instructions, not tensor cores
_LARGE_M = 128  # tokens from which tiles are loaded by TMA
_MOST_SPLITS = 16
_PREFETCHED = 64  # tokens up to which the weight is prefetched: reading it takes most of the time

_NONE = tl.constexpr(-0x80000000)  # below the key of every score
_INFINITY = tl.constexpr(0x7F800000)
_LOG2E = tl.constexpr(1.4426950408889634)
_LOG2E_LOW = tl.constexpr(1.925963033500011e-08)  # log2(e) less its float32 value
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _operand(values, dtype: tl.constexpr):
    if values.dtype == dtype:
        return values
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return narrow(widen(values), dtype)


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _small_m_logits_kernel(
    x,
    weight,
    out,
    x_stride,
    weight_stride,
    tokens,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """All TOKENS tokens by COLUMNS experts over one slice of LENGTH columns."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.minimum(expert, EXPERTS - 1)
    begin = tl.program_id(1) * LENGTH
    if PDL:
        prefetch_tile(weight, weight_stride, row, tl.minimum(begin, HIDDEN - LENGTH), LENGTH)
    wait_for_inputs(PDL)
    token = tl.arange(0, TOKENS)
    column = begin + tl.arange(0, BLOCK)[None, None, :]
    inside = column < tl.minimum(begin + LENGTH, HIDDEN)
    x += (tl.minimum(token, tokens - 1).to(tl.int64) * x_stride)[:, None, None]
    weight += (row.to(tl.int64) * weight_stride)[None, :, None]
    gate = tl.load(weight + column, mask=inside, other=0.0)
    value = tl.load(x + column, mask=inside, other=0.0)
    total = tl.sum(widen(_operand(value, OPERAND)) * widen(_operand(gate, OPERAND)), 2)
    offset = (tl.program_id(1) * tokens + token)[:, None] * EXPERTS + expert[None, :]
    tl.store(out + offset, total, mask=(token < tokens)[:, None] & (expert < EXPERTS)[None, :])


@triton.jit
def _dot(a, b, total):
    if INTERPRETED or a.dtype == tl.float32:
        return tl.dot(widen(a), widen(b), total, input_precision="ieee")
    return tl.dot(a, b, total)


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    x,
    weight,
    out,
    x_stride,
    weight_stride,
    tokens,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOKENS tokens by COLUMNS experts over one slice of LENGTH columns.

    Neighbouring programs take the same tokens, which are then read from memory once.
    """
    TILES: tl.constexpr = (EXPERTS + COLUMNS - 1) // COLUMNS
    first = (tl.program_id(0) // TILES).to(tl.int64) * TOKENS
    token = first + tl.arange(0, TOKENS)
    expert = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * LENGTH
    # Rows past the end repeat the last one; they are not stored.
    row = tl.minimum(expert, EXPERTS - 1)
    if PDL and PREFETCH:
        prefetch_tile(weight, weight_stride, row, tl.minimum(begin, HIDDEN - LENGTH), LENGTH)
    wait_for_inputs(PDL)
    column = tl.arange(0, BLOCK)
    x += (tl.minimum(token, tokens - 1) * x_stride)[:, None] + column[None, :]
    weight += (row.to(tl.int64) * weight_stride)[None, :] + column[:, None]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    end = tl.minimum(begin + LENGTH, HIDDEN)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        if HIDDEN % BLOCK == 0:
            value, gate = tl.load(x + start), tl.load(weight + start)
        else:
            inside = start + column < HIDDEN
            value = tl.load(x + start, mask=inside[None, :], other=0.0)
            gate = tl.load(weight + start, mask=inside[:, None], other=0.0)
        total = _dot(_operand(value, OPERAND), _operand(gate, OPERAND), total)
    offset = (tl.program_id(1).to(tl.int64) * tokens + token)[:, None] * EXPERTS + expert[None, :]
    tl.store(out + offset, total, mask=(token < tokens)[:, None] & (expert < EXPERTS)[None, :])


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _large_m_logits_kernel(
    x,
    weight,
    rest,
    out,
    tokens,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Like ``_logits_kernel``, with tensor descriptors: what lies outside the matrices is zero.

    ``rest`` describes the weight in blocks of REST rows: a program may take COLUMNS + REST experts,
    128 and 64 for one, where a single power of two would leave SMs without work.
    """
    WIDTH: tl.constexpr = COLUMNS + REST
    TILES: tl.constexpr = (EXPERTS + WIDTH - 1) // WIDTH
    wait_for_inputs(PDL)
    first = (tl.program_id(0) // TILES) * TOKENS
    column = tl.program_id(0) % TILES * WIDTH
    begin = tl.program_id(1) * LENGTH
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    if REST > 0:
        other = tl.zeros([TOKENS, REST], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + LENGTH, HIDDEN), BLOCK, num_stages=STAGES):
        value = x.load([first, start])
        total = _dot(value, weight.load([column, start]).T, total)
        if REST > 0:
            other = _dot(value, rest.load([column + COLUMNS, start]).T, other)
    token = first.to(tl.int64) + tl.arange(0, TOKENS)[:, None]
    out += (tl.program_id(1).to(tl.int64) * tokens + token) * EXPERTS
    expert = column + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + expert, total, mask=(token < tokens) & (expert < EXPERTS))
    if REST > 0:
        expert = column + COLUMNS + tl.arange(0, REST)[None, :]
        tl.store(out + expert, other, mask=(token < tokens) & (expert < EXPERTS))


@triton.jit
def _exp_of_minus(a):
    """``exp(-a)`` for a >= 0, float32 with its subnormal numbers, to 5 units of 2^-24.

    The exponent of 2 is a sum of two numbers: rounded to one, an exponent near 100 would be off by
    as much as the result has bits. Results that a power instruction would flush to zero are
    computed at 2^32 times their size.
    """
    a = tl.minimum(a, 200.0)
    high = a * _LOG2E
    low = tl.fma(a, _LOG2E, -high) + a * _LOG2E_LOW
    small = high > 100.0
    power = tl.exp2(tl.where(small, 32.0, 0.0) - high)
    return tl.fma(power, low * -_LN2, power) * tl.where(small, 2.0**-32, 1.0)


@triton.jit
def _quotient(a, b):
    """``a / b`` for b that is neither tiny nor huge: an approximate one and its remainder."""
    inverse = 1.0 / b
    quotient = a * inverse
    return tl.fma(tl.fma(-quotient, b, a), inverse, quotient)


@triton.jit
def _log1p(t):
    """``log(1 + t)`` for t in [0, 1], to 4 units of 2^-24.

    ``2 artanh(t / (2 + t))``, whose series in the square of that quotient, at most 1/9, is cut off
    below 2^-26.
    """
    double = _quotient(t, tl.fma(t, 0.5, 1.0))
    square = double * double * 0.25
    series = tl.fma(square, 1.0 / 13.0, 1.0 / 11.0)
    series = tl.fma(square, series, 1.0 / 9.0)
    series = tl.fma(square, series, 1.0 / 7.0)
    series = tl.fma(square, series, 0.2)
    series = tl.fma(square, series, 1.0 / 3.0)
    return tl.fma(double, square * series, double)


@triton.jit
def _sqrt_softplus(logit):
    """``sqrt(log(1 + exp(logit)))``; it underflows where the softplus does in float32.

    The instruction for roots, too, takes subnormal numbers for zero.
    """
    soft = _log1p(_exp_of_minus(tl.abs(logit))) + tl.maximum(logit, 0.0)
    small = soft < 2.0**-64
    root = tl.sqrt(soft * tl.where(small, 2.0**64, 1.0)) * tl.where(small, 2.0**-32, 1.0)
    return tl.where(logit != logit, float("nan"), root)


@triton.jit
def _key_of(score):
    """int32 that orders as float32 does: zeros are equal, every NaN is the highest."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit
def _token_logits(
    partials,
    logits,
    token,
    tokens,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Summed logits of a token, ``[BLOCK]``, stored unless they are; and 1 if all are finite."""
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    logit = _summed(partials, token, tokens, expert, inside, EXPERTS, SPLITS)
    logit = narrow(logit, logits.dtype.element_ty)
    if not STORED:
        tl.store(logits + token * EXPERTS + expert, logit, mask=inside)
    logit = widen(logit)
    # As integers, magnitudes order with NaN above Inf above every number.
    largest = tl.max(logit.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    return logit, tl.where(largest < _INFINITY, 1, 0)


@triton.jit
def _summed(partials, token, tokens, expert, inside, EXPERTS: tl.constexpr, SPLITS: tl.constexpr):
    partials += token * EXPERTS + expert
    logit = tl.load(partials, mask=inside, other=0.0)
    for i in tl.static_range(1, SPLITS):
        logit += tl.load(partials + i * (tokens.to(tl.int64) * EXPERTS), mask=inside, other=0.0)
    return logit


@triton.jit
def _is_left_out(routed, token, may_leave_out):
    """Whether a token goes to no expert; nothing is read if that holds for none."""
    return tl.load(routed + token, mask=may_leave_out != 0, other=0) < 0


@triton.jit
def _store_experts(weights, ids, offset, mask, left_out, experts, chosen, total, factor, good):
    experts = tl.where(left_out, -1, experts)
    weight = _quotient(chosen, total + 1e-20) * factor
    tl.store(weights + offset, tl.where(good == 1, weight, float("nan")), mask=mask)
    tl.store(ids + offset, experts.to(tl.int64), mask=mask)


@fast_launch
@triton.jit(do_not_specialize=["tokens", "top_k", "may_leave_out"])
def _topk_kernel(
    partials,
    logits,
    bias,
    routed,
    weights,
    ids,
    tokens,
    top_k,
    may_leave_out,
    factor,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one token's logits, experts and weights. Scores and keys stay in registers.

    A round takes the highest key and of those that have it the lowest expert, and removes it.
    """
    if BIASED and tl.program_id(0) == 0:
        prefetch_row(bias, EXPERTS, BLOCK)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    left_out = _is_left_out(routed, token, may_leave_out)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    logit, good = _token_logits(partials, logits, token, tokens, EXPERTS, SPLITS, STORED, BLOCK)
    scores = _sqrt_softplus(logit)
    biased = scores
    if BIASED:
        biased = scores + widen(tl.load(bias + expert, mask=inside, other=0.0))
    keys = tl.where(inside, _key_of(biased), _NONE)
    bits = tl.where(inside, scores, 0.0).to(tl.int32, bitcast=True)
    slot = tl.arange(0, SLOTS)
    experts = tl.zeros([SLOTS], tl.int32)
    chosen = tl.zeros([SLOTS], tl.float32)
    total = 0.0
    for j in range(top_k):
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, BLOCK), 0)
        keys = tl.where(expert == best, _NONE, keys)
        # No score is negative, so that its bits order as it does.
        score = tl.max(tl.where(expert == best, bits, 0), 0).to(tl.float32, bitcast=True)
        total += score
        experts = tl.where(slot == j, best, experts)
        chosen = tl.where(slot == j, score, chosen)
    offset, mask = token * top_k + slot, slot < top_k
    _store_experts(weights, ids, offset, mask, left_out, experts, chosen, total, factor, good)


@fast_launch
@triton.jit(do_not_specialize=["tokens", "vocabulary", "top_k", "may_leave_out"])
def _hash_kernel(
    partials,
    logits,
    table,
    input_ids,
    routed,
    weights,
    ids,
    tokens,
    vocabulary,
    top_k,
    may_leave_out,
    factor,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one token's logits, and the scores of the experts that the table has for its word."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    left_out = _is_left_out(routed, token, may_leave_out)
    word = tl.load(input_ids + token).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    offset = tl.maximum(tl.minimum(word, vocabulary - 1), 0) * top_k + slot
    entry = tl.load(table + offset, mask=slot < top_k, other=0).to(tl.int64)
    expert = tl.maximum(tl.minimum(entry, EXPERTS - 1), 0).to(tl.int32)
    _, good = _token_logits(partials, logits, token, tokens, EXPERTS, SPLITS, STORED, BLOCK)
    good = tl.where((word >= 0) & (word < vocabulary), good, 0)
    good = tl.minimum(good, tl.min((entry == expert).to(tl.int32), 0))
    mask = slot < top_k
    own = _summed(partials, token, tokens, expert, mask, EXPERTS, SPLITS)
    scores = _sqrt_softplus(widen(narrow(own, logits.dtype.element_ty)))
    scores = tl.where(mask, scores, 0.0)
    offset = token * top_k + slot
    total = tl.sum(scores, 0)
    _store_experts(weights, ids, offset, mask, left_out, expert, scores, total, factor, good)


@dataclass(frozen=True)
class _Tile:
    """Sizes of a program of the logits: tokens, experts, columns at a time, and what follows."""

    tokens: int
    columns: int
    block: int
    stages: int
    warps: int
    rest: int = 0

    def programs(self, tokens: int, experts: int) -> int:
        """Programs that cover the logits."""
        width = self.columns + self.rest
        return triton.cdiv(tokens, self.tokens) * triton.cdiv(experts, width)

    def splits(self, tokens: int, experts: int, hidden: int, processors: int) -> int:
        """Split-K slices of the hidden axis, none empty, that give an SM the least work.

        A further slice costs about half a step, because its sums are written and read.
        """
        programs, steps = self.programs(tokens, experts), triton.cdiv(hidden, self.block)
        most = max(1, min(steps, _MOST_SPLITS, 2 * processors // programs))

        def work(splits: int) -> int:
            waves = triton.cdiv(programs * splits, processors)
            return 2 * waves * triton.cdiv(steps, splits) + splits

        return triton.cdiv(steps, triton.cdiv(steps, min(range(1, most + 1), key=work)))


# For many tokens if pointers load tiles: 48 KB, no spill on compute capability 8.x.
_POINTER_TILE = _Tile(64, 64, 64, 3, 4)


def _tile(tokens: int, experts: int, operand: torch.dtype, shared: int) -> _Tile:
    """Tiles for a number of tokens: the fastest on an H200, with fewer stages if memory is smaller.

    Args:
        tokens: Number of tokens.
        experts: Number of experts.
        operand: Type of the operands.
        shared: Bytes of shared memory that a program can have.
    """
    tile = _measured_tile(tokens, experts, operand)
    # Barriers take a few hundred bytes besides the stages.
    stage = tile.block * (tile.tokens + tile.columns + tile.rest) * operand.itemsize
    return replace(tile, stages=min(tile.stages, (shared - 1024) // stage))


def _measured_tile(tokens: int, experts: int, operand: torch.dtype) -> _Tile:
    if operand == torch.float32:
        return _Tile(32, 32, 32, 2, 4)
    if tokens <= 32:
        high = max(16, launch_options.power_of_two(tokens))
        return _Tile(high, 16 if experts <= 256 else 32, 128, 4, 4)
    if tokens < _LARGE_M:
        return _Tile(64, 32, 128, 4, 4)
    if tokens * experts <= 1 << 18:
        return _Tile(64, 64, 128, 4, 4) if experts <= 256 else _Tile(128, 64, 64, 5, 4)
    if triton.cdiv(experts, 192) < triton.cdiv(experts, 128):
        return _Tile(128, 128, 64, 5, 8, 64)
    return _Tile(128, 128, 64, 6, 8)


def _operand_type(x: torch.Tensor, weight: torch.Tensor, logits: torch.dtype) -> torch.dtype:
    """The operand type of the GEMM: that of the logits, or a narrower one if it is exact."""
    if logits == torch.float32 and x.dtype == weight.dtype:
        return x.dtype
    return logits


def _partial_logits(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Launch the GEMM: returns float32 ``[splits, T, E]``, ``logits`` itself where possible."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    if hidden == 0:
        return x.new_zeros((1, tokens, experts), dtype=torch.float32)
    x, weight = (m if m.stride(1) == 1 else m.contiguous() for m in (x, weight))
    operand = _operand_type(x, weight, logits.dtype)
    sizes: dict[str, Any] = {"EXPERTS": experts, "HIDDEN": hidden}
    if tokens <= _SMALL_M:
        splits = triton.cdiv(hidden, _SLICE)
        out = _sums(x, logits, splits)
        length = min(hidden, 8 * triton.cdiv(hidden, 8 * splits))
        block = launch_options.power_of_two(length)
        with launch_options.on(x):
            _small_m_logits_kernel[(triton.cdiv(experts, 2), splits)](
                x,
                weight,
                out,
                x.stride(0),
                weight.stride(0),
                tokens,
                **sizes,
                OPERAND=row_tiles.TYPES[operand],
                TOKENS=launch_options.power_of_two(tokens),
                COLUMNS=2,
                LENGTH=length,
                BLOCK=block,
                # One load per thread and row: the assembler would place a second one behind the
                # FMAs of the first, which wait for memory.
                num_warps=max(1, block // 256),
                **launch_options.options(x),
            )
        return out
    tile = _tile(tokens, experts, operand, launch_options.shared_memory(x))
    described = tokens >= _LARGE_M and operand != torch.float32
    if described and not launch_options.has_descriptors(x):
        described, tile = False, _POINTER_TILE
    splits = tile.splits(tokens, experts, hidden, launch_options.sm_count(x.device))
    out = _sums(x, logits, splits)
    sizes |= {
        "TOKENS": tile.tokens,
        "COLUMNS": tile.columns,
        "BLOCK": tile.block,
        "LENGTH": triton.cdiv(triton.cdiv(hidden, tile.block), splits) * tile.block,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **launch_options.options(x),
    }
    grid = (tile.programs(tokens, experts), splits)
    with launch_options.on(x):
        if described:
            _launch_large_m(grid, x.to(operand), weight.to(operand), out, tile, sizes)
            return out
        _logits_kernel[grid](
            x,
            weight,
            out,
            x.stride(0),
            weight.stride(0),
            tokens,
            OPERAND=row_tiles.TYPES[operand],
            PREFETCH=tokens <= _PREFETCHED and hidden % tile.block == 0,
            **sizes,
        )
    return out


def _launch_large_m(
    grid: tuple[int, int],
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    tile: _Tile,
    sizes: dict[str, Any],
) -> None:
    x, weight = _describable(x), _describable(weight)
    _large_m_logits_kernel[grid](
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.block]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.block]),
        TensorDescriptor.from_tensor(weight, [tile.rest or tile.columns, tile.block]),
        out,
        x.shape[0],
        REST=tile.rest,
        **sizes,
    )


def _describable(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix, or a copy, with rows that begin at multiples of 16 bytes."""
    aligned = 16 // matrix.element_size()
    if matrix.stride(0) % aligned == 0 and matrix.data_ptr() % 16 == 0:
        return matrix
    rows, columns = matrix.shape
    padded = matrix.new_empty((rows, aligned * triton.cdiv(columns, aligned)))[:, :columns]
    return padded.copy_(matrix)


def _sums(x: torch.Tensor, logits: torch.Tensor, splits: int) -> torch.Tensor:
    """Buffer of the GEMM: float32 ``[splits, T, E]``; ``logits`` itself where it has that form."""
    if splits == 1 and logits.dtype == torch.float32:
        return logits.unsqueeze(0)
    return x.new_empty((splits, *logits.shape), dtype=torch.float32)


def _topk_warps(block: int) -> int:
    """Return the warps: one needs no exchange through shared memory, but few logits a thread."""
    return min(16, max(1, block // 1024))


def _route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    top_k: int,
    scaling_factor: float,
    logits_dtype: torch.dtype,
    routed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, experts = x.shape[0], weight.shape[0]
    logits = x.new_empty((tokens, experts), dtype=logits_dtype)
    weights = x.new_empty((tokens, top_k), dtype=torch.float32)
    ids = x.new_empty((tokens, top_k), dtype=torch.int64)
    if logits.numel() == 0:
        return logits, weights, ids
    partials = _partial_logits(x, weight, logits)
    block = launch_options.power_of_two(experts)
    options = {
        "EXPERTS": experts,
        "SPLITS": partials.shape[0],
        # From sizes, not from addresses: kernels are listed on the meta device, where all are 0.
        "STORED": x.shape[1] > 0 and partials.shape[0] == 1 and logits.dtype == torch.float32,
        "BLOCK": block,
        "SLOTS": launch_options.power_of_two(top_k),
        "num_warps": _topk_warps(block),
        **launch_options.options(x),
    }
    # Without it any int64 tensor stands for it, so that there is no further kernel.
    may_leave_out = int(routed is not None)
    routed = ids if routed is None else routed.contiguous()
    with launch_options.on(x):
        if table is None:
            _topk_kernel[(tokens,)](
                partials,
                logits,
                None if bias is None else bias.contiguous(),
                routed,
                weights,
                ids,
                tokens,
                top_k,
                may_leave_out,
                scaling_factor,
                BIASED=bias is not None,
                **options,
            )
        else:
            _hash_kernel[(tokens,)](
                partials,
                logits,
                table,
                input_ids,
                routed,
                weights,
                ids,
                tokens,
                table.shape[0],
                top_k,
                may_leave_out,
                scaling_factor,
                **options,
            )
    return logits, weights, ids


def route_topk(args: RouteTopkArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.router.route_topk``."""
    return _route(
        args.x,
        args.weight,
        args.bias,
        None,
        None,
        args.top_k,
        args.scaling_factor,
        args.logits_dtype,
        args.routed,
    )


def route_hash(args: RouteHashArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.router.route_hash``."""
    check_ids(args.tid2eid, args.input_ids, args.weight.shape[0])
    table, words = args.tid2eid.contiguous(), args.input_ids.contiguous()
    top_k = args.tid2eid.shape[1]
    return _route(
        args.x,
        args.weight,
        None,
        table,
        words,
        top_k,
        args.scaling_factor,
        args.logits_dtype,
        args.routed,
    )
