"""Logits of routers, a split-K GEMM: ``partial_logits`` launches one of three kernels.

A program owns a tile of tokens and experts and a slice of the hidden axis (K). The result is
float32 ``[splits, T, E]``: partial sums over slices of the hidden axis, which ``router.py`` adds in
the order of the slices. With one slice and float32 logits they are the logits themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import INTERPRETED, convert, wait_for_inputs, widen
from dsv4.triton._lib.prefetch import prefetch_tile
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_SLICE = 4096  # columns of the hidden axis of a program for small M
_SMALL_M = 4  # tokens up to which the GEMM uses FMA instructions, not tensor cores
_LARGE_M = 128  # tokens from which tiles are loaded by TMA
_MOST_SPLITS = 16
_PREFETCHED = 64  # tokens up to which the weight is prefetched: reading it takes most of the time


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
    total = tl.sum(widen(convert(value, OPERAND)) * widen(convert(gate, OPERAND)), 2)
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
        total = _dot(convert(value, OPERAND), convert(gate, OPERAND), total)
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


def partial_logits(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
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
