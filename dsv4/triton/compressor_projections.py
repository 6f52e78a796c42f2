"""Kernel of ``dsv4.ops.compressor_projections``: several weights of one input in one launch.

A program owns ROWS rows of one weight and TOKENS tokens, over all columns, so a sum needs no second
launch. A step of its loop multiplies BLOCK columns. Each of SPLIT warps takes a part of them, with
its own float32 sums; these are added at the end, in the order of the parts. Other tokens of a call
can change a result only through the choice of tiles (``tile_of``).

One or two tokens take another kernel. A program loads its rows into registers and computes the dot
products of one token after the other. It uses no shared memory, so CTAs of a GEMM on another stream
fit on the same SM.

Weights are read once if all tokens fit into a tile. Programs of few rows spread the weights over
the GPU. The number of bytes in flight limits a call of few tokens. A program therefore prefetches
all its rows into L2, then loads ``stages`` steps ahead. For more tokens a program has more rows,
because each program reads all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4.ops.compressor_projections import CompressorProjectionsArgs
from dsv4.triton._lib.numerics import dot, narrow, wait_for_inputs, widen
from dsv4.triton._lib.prefetch import prefetch_tile
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_MOST_TOKENS = 64  # most tokens of a tile
# Most tokens that are multiplied one after the other. Microseconds of 1, 2 and 4 tokens, Flash's
# weights with an indexer and without on an H200: 7.9, 9.2, 13.0 and 3.7, 4.3, 5.7; tiles take 9.8
# and 5.9 for each.
_MOST_VECTORS = 2
_HOPPER_SHARED = 227 * 1024


@triton.jit
def _part_of(
    program, kv, gate, index_kv, index_gate, heads, TILES: tl.constexpr, INDEX_TILES: tl.constexpr
):
    """Weight of a program, number of its tile in the weight, and number of the weight (0 to 4)."""
    weight, begin, number = kv, 0, 0
    after = program >= TILES
    weight, begin = tl.where(after, gate, weight), tl.where(after, TILES, begin)
    number += tl.where(after, 1, 0)
    if INDEX_TILES > 0:
        after = program >= 2 * TILES
        weight, begin = tl.where(after, index_kv, weight), tl.where(after, 2 * TILES, begin)
        number += tl.where(after, 1, 0)
        after = program >= 2 * TILES + INDEX_TILES
        weight = tl.where(after, index_gate, weight)
        begin = tl.where(after, 2 * TILES + INDEX_TILES, begin)
        number += tl.where(after, 1, 0)
        after = program >= 2 * (TILES + INDEX_TILES)
        weight = tl.where(after, heads, weight)
        begin = tl.where(after, 2 * (TILES + INDEX_TILES), begin)
        number += tl.where(after, 1, 0)
    return weight, program - begin, number


@triton.jit
def _rows_of(
    kv,
    gate,
    index_kv,
    index_gate,
    heads,
    CHANNELS: tl.constexpr,
    INDEX_CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Weight of this program, number of the weight (0 to 4), the program's rows, and all rows."""
    TILES: tl.constexpr = (CHANNELS + ROWS - 1) // ROWS
    INDEX_TILES: tl.constexpr = (INDEX_CHANNELS + ROWS - 1) // ROWS
    weight, tile, number = _part_of(
        tl.program_id(0), kv, gate, index_kv, index_gate, heads, TILES, INDEX_TILES
    )
    rows = tl.where(number < 2, CHANNELS, tl.where(number < 4, INDEX_CHANNELS, HEADS))
    row = tile * ROWS + tl.arange(0, ROWS)
    return weight, number, row, rows


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _projections_kernel(
    x,
    kv,
    gate,
    index_kv,
    index_gate,
    heads,
    out,
    head_out,
    x_stride,
    tokens,
    HIDDEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    INDEX_CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of one weight by TOKENS tokens; INDEX_CHANNELS is 0 without an indexer."""
    PART: tl.constexpr = BLOCK // SPLIT
    weight, number, row, rows = _rows_of(
        kv, gate, index_kv, index_gate, heads, CHANNELS, INDEX_CHANNELS, HEADS, ROWS
    )
    row_read = tl.minimum(row, rows - 1)  # rows past the end repeat the last one
    if PDL and PREFETCH:
        prefetch_tile(weight, HIDDEN, row_read, 0, HIDDEN)
    wait_for_inputs(PDL)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    begin = (tl.arange(0, SPLIT) * PART)[:, None, None]
    columns = begin + tl.arange(0, PART)[None, None, :]  # of x [SPLIT, TOKENS, PART]
    weight_columns = begin + tl.arange(0, PART)[None, :, None]  # of weight [SPLIT, PART, ROWS]
    x += (token.to(tl.int64) * x_stride)[None, :, None] + columns
    weight += (row_read.to(tl.int64) * HIDDEN)[None, None, :] + weight_columns
    present = (token < tokens)[None, :, None]
    sums = tl.zeros([SPLIT, TOKENS, ROWS], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK, num_stages=STAGES):
        if HIDDEN % BLOCK == 0:
            values = tl.load(x + start, mask=present, other=0.0)
            weights = tl.load(weight + start)
        else:
            inside = present & (start + columns < HIDDEN)
            values = tl.load(x + start, mask=inside, other=0.0)
            weights = tl.load(weight + start, mask=start + weight_columns < HIDDEN, other=0.0)
        sums = dot(values, weights, sums)
    _store(
        tl.sum(sums, 0),
        row,
        token,
        (row < rows)[None, :] & (token < tokens)[:, None],
        number,
        out,
        head_out,
        CHANNELS,
        INDEX_CHANNELS,
        HEADS,
    )


@fast_launch
@triton.jit(do_not_specialize=["tokens"])
def _vectors_kernel(
    x,
    kv,
    gate,
    index_kv,
    index_gate,
    heads,
    out,
    head_out,
    x_stride,
    tokens,
    HIDDEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    INDEX_CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply ROWS rows of one weight, held in registers, by each token; COLUMNS >= HIDDEN."""
    weight, number, row, rows = _rows_of(
        kv, gate, index_kv, index_gate, heads, CHANNELS, INDEX_CHANNELS, HEADS, ROWS
    )
    row_read = tl.minimum(row, rows - 1)  # rows past the end repeat the last one
    column = tl.arange(0, COLUMNS)
    weight += row_read.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    wait_for_inputs(PDL)
    if HIDDEN == COLUMNS:
        weights = tl.load(weight)
    else:
        weights = tl.load(weight, mask=column[None, :] < HIDDEN, other=0.0)
    # Weights stay packed: hoisted out of the loop, their conversion would take twice the registers.
    for index in tl.range(0, tokens, disable_licm=True):
        token = tl.arange(0, 1).to(tl.int64) + index
        values = tl.load(x + token * x_stride + column, mask=column < HIDDEN, other=0.0)
        total = tl.sum(widen(weights) * widen(values)[None, :], 1)
        _store(
            total[None, :],
            row,
            token,
            (row < rows)[None, :],
            number,
            out,
            head_out,
            CHANNELS,
            INDEX_CHANNELS,
            HEADS,
        )


@triton.jit
def _store(
    total,
    row,
    token,
    mask,
    number,
    out,
    head_out,
    CHANNELS: tl.constexpr,
    INDEX_CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Store sums ``[tokens, rows]`` of the weight ``number``."""
    token = token.to(tl.int64)[:, None]
    if number < 4:
        first = tl.where(number == 1, CHANNELS, 0)
        first = tl.where(number >= 2, 2 * CHANNELS, first)
        column = first + tl.where(number == 3, INDEX_CHANNELS, 0) + row
        offset = token * (2 * (CHANNELS + INDEX_CHANNELS)) + column[None, :]
        tl.store(out + offset, narrow(total, out.dtype.element_ty), mask=mask)
    else:
        offset = token * HEADS + row[None, :]
        tl.store(head_out + offset, narrow(total, head_out.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Tile:
    """Sizes that a program multiplies in a step.

    Attributes:
        tokens: Tokens, a power of two from 16.
        rows: Rows of a weight, a power of two from 8.
        block: Columns, a power of two.
        warps: Warps, each of which has ``block / warps`` of the columns, at least 16.
        stages: Steps whose loads are in flight.
    """

    tokens: int
    rows: int
    block: int
    warps: int
    stages: int


def tile_of(tokens: int, hidden: int, shared: int = _HOPPER_SHARED) -> Tile:
    """Tile for a number of tokens, guessed from bytes in flight, not searched on a GPU.

    ``shared`` is the number of bytes of shared memory of a program; it bounds the stages.
    """
    high = min(_MOST_TOKENS, max(16, launch_options.power_of_two(tokens)))
    rows, block = {16: (8, 512), 32: (16, 256), 64: (32, 256)}[high]
    block = min(block, max(64, launch_options.power_of_two(hidden)))
    # Operands have two bytes; one of the stages is multiplied from registers.
    stages = min(4, 1 + (shared - 1024) // (2 * block * (high + rows)))
    return Tile(high, rows, block, 4, stages)


@dataclass(frozen=True)
class Vectors:
    """Sizes of a program that multiplies tokens one after the other.

    Attributes:
        rows: Rows of a weight, a power of two.
        warps: Warps.
    """

    rows: int
    warps: int


# A lane has 32 or 64 values of weights, all of which are loaded before the first is used.
VECTORS = Vectors(rows=2, warps=8)


def compressor_projections(args: CompressorProjectionsArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.compressor_projections.compressor_projections``."""
    tokens, hidden = args.x.shape
    if tokens <= _MOST_VECTORS:
        return multiply(args, VECTORS)
    return multiply(args, tile_of(tokens, hidden, launch_options.shared_memory(args.x)))


def multiply(
    args: CompressorProjectionsArgs, tile: Tile | Vectors, *, prefetch: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``compressor_projections`` with a tile.

    Args:
        args: Arguments of the operator.
        tile: The tile.
        prefetch: Whether a program asks L2 for all its rows first.
    """
    x, kv = args.x, args.kv
    (tokens, hidden), channels = x.shape, kv.shape[0]
    index_channels = 0 if args.index_kv is None else args.index_kv.shape[0]
    heads = 0 if args.heads is None else args.heads.shape[0]
    out = x.new_empty((tokens, 2 * (channels + index_channels)), dtype=args.out_dtype)
    head_out = x.new_empty((tokens, heads))
    if tokens == 0 or hidden == 0:
        return out.zero_(), head_out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    weights = [
        (kv if weight is None else weight).contiguous()
        for weight in (kv, args.gate, args.index_kv, args.index_gate, args.heads)
    ]
    tiles = [triton.cdiv(n, tile.rows) for n in (channels, index_channels, heads)]
    grid = 2 * tiles[0] + 2 * tiles[1] + tiles[2]
    operands = (x, *weights, out, head_out, x.stride(0), tokens)
    sizes = {
        "HIDDEN": hidden,
        "CHANNELS": channels,
        "INDEX_CHANNELS": index_channels,
        "HEADS": heads,
        "ROWS": tile.rows,
    }
    options = {"num_warps": tile.warps, **launch_options.options(x)}
    with launch_options.on(x):
        if isinstance(tile, Vectors):
            columns = launch_options.power_of_two(hidden)
            _vectors_kernel[(grid,)](*operands, **sizes, COLUMNS=columns, **options)
        else:
            _projections_kernel[(grid, triton.cdiv(tokens, tile.tokens))](
                *operands,
                **sizes,
                TOKENS=tile.tokens,
                BLOCK=tile.block,
                SPLIT=tile.warps,
                STAGES=tile.stages,
                PREFETCH=prefetch,
                **options,
            )
    return out, head_out
