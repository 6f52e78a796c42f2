"""Tile scheduler of grouped GEMMs: which expert's rows a tile has, found on the GPU.

Rows of X are sorted by expert. Once in every CTA a warp counts the experts' tiles of rows and
writes prefix sums into a table in shared memory (``count_tiles``); then any thread finds a tile's
expert by bisection (``find_tile``), or a warp does together (``find_expert_by_warp``). An expert
without rows has no tile. The host never reads the offsets.

Offsets that descend or exceed the rows that exist are the caller's to avoid.

Also here: zeros for rows of no expert, which warps without other work write.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import nvvm

from dsv4.cute.device import ptx
from dsv4.cute.grouped_problem import MOST_EXPERTS

_BISECTIONS = MOST_EXPERTS.bit_length()
_LANE_EXPERTS = MOST_EXPERTS // 32  # experts that a lane counts; their offsets are loaded at once


class ExpertTable(NamedTuple):
    """Tiles and rows of the experts, in shared memory.

    Attributes:
        tiles: Address of int32 ``[experts + 1]``: tiles before each expert, then all tiles.
        rows: Address of int32 ``[experts + 1]``: first row of each expert, then the end.
        experts: How many.
    """

    tiles: Uint32
    rows: Uint32
    experts: Int32


class RowCounts(NamedTuple):
    """The experts of this launch: those with more than ``above`` rows, up to ``most``.

    Attributes:
        above: Excluded.
        most: Included.
    """

    above: Int32
    most: Int32


class ExpertRange(NamedTuple):
    """The expert of a tile.

    Attributes:
        expert: Its number.
        tiles_before: Tiles of the experts before it.
        first_row: Its first row of X.
        end_row: The row after its last.
    """

    expert: Int32
    tiles_before: Int32
    first_row: Int32
    end_row: Int32


class GroupedTileOrder(NamedTuple):
    """The order of output tiles: by expert, then by block of rows of the weight, then by tokens.

    So the tiles that read the same rows of the weight follow one another, and find them in L2.

    Attributes:
        table: The experts' tiles of tokens.
        row_blocks: Blocks of rows of an expert's weight.
    """

    table: ExpertTable
    row_blocks: Int32


class GroupedTile(NamedTuple):
    """An output tile of a grouped GEMM.

    Attributes:
        expert: Whose it is.
        row_block: Block of rows of the expert's weight.
        first_row: First row of X.
        rows: Rows of X from there to the expert's end; 0 or less where no tile is left.
    """

    expert: Int32
    row_block: Int32
    first_row: Int32
    rows: Int32


class Lines(NamedTuple):
    """Rows of the result that a CTA clears: every ``stride``-th from ``first`` up to ``end``.

    Attributes:
        first: The first one.
        end: The row after the last.
        stride: From one to the next: the number of CTAs.
    """

    first: Int32
    end: Int32
    stride: Int32


class QuantizedLines(NamedTuple):
    """Addresses of all rows of NVFP4 results.

    Attributes:
        codes: Two to a byte.
        block_scales: One byte for 16 results; None where they are swizzled, not row after row.
        row_scales: float32, one for each row.
    """

    codes: Int64
    block_scales: Int64 | None
    row_scales: Int64


@cute.jit
def count_tiles(
    offsets: Int64,
    table: ExpertTable,
    tile_rows: cutlass.Constexpr,
    lane: Int32,
    selected: RowCounts | None = None,
) -> None:
    """One warp: fill a table from the offsets.

    A lane counts ``_LANE_EXPERTS`` neighbouring experts; an inclusive scan over the lanes adds up
    what the lanes before it counted.

    Args:
        offsets: Address of int32 ``[experts + 1]`` in global memory.
        table: Where to.
        tile_rows: Rows of X of a tile.
        lane: Lane of the warp.
        selected: Experts that have tiles; None for all.
    """
    first = lane * _LANE_EXPERTS
    rows = []
    # Experts that do not exist have the rows from the end to the end: none.
    for i in cutlass.range_constexpr(_LANE_EXPERTS + 1):
        at = offsets + Int64(cutlass.min(first + i, table.experts)) * 4
        rows.append(Int32(ptx.load_global(at)))
    counts = [rows[i + 1] - rows[i] for i in range(_LANE_EXPERTS)]
    counts = _selected(counts, selected)
    tiles = [cutlass.max(n + (tile_rows - 1), 0) // tile_rows for n in counts]
    running = sum(tiles[1:], tiles[0])
    before = -running
    for power in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_op(
            running, 1 << power, mask_and_clamp=0, kind=nvvm.ShflKind.up
        )
        if lane >= (1 << power):
            running = running + other
    before += running
    for i in cutlass.range_constexpr(_LANE_EXPERTS):
        if first + i < table.experts:
            ptx.store_shared_int(table.tiles + Uint32((first + i) * 4), before)
            ptx.store_shared_int(table.rows + Uint32((first + i) * 4), rows[i])
        before += tiles[i]
    if lane == 31:
        ptx.store_shared_int(table.tiles + Uint32(table.experts * 4), before)
        ptx.store_shared_int(table.rows + Uint32(table.experts * 4), rows[_LANE_EXPERTS])


def _selected(counts: list[Int32], selected: RowCounts | None) -> list[Int32]:
    """The counts, 0 for experts that have no tiles in this launch."""
    if selected is None:
        return counts
    return [n * Int32(n > selected.above) * Int32(n <= selected.most) for n in counts]


def total_tiles(table: ExpertTable) -> Int32:
    """Tiles of all experts; loaded each time, so that no register has to hold it."""
    total: Int32 = ptx.load_shared_int(table.tiles + Uint32(table.experts * 4))
    return total


def end_row(table: ExpertTable) -> Int32:
    """The row after the last expert's; rows from there on belong to no expert."""
    end: Int32 = ptx.load_shared_int(table.rows + Uint32(table.experts * 4))
    return end


@cute.jit
def _find_expert(tile: Int32, table: ExpertTable) -> tuple[ExpertRange, Int32]:
    """Expert of a tile of rows, and how many tiles the expert has.

    For a tile beyond the last one it is some expert; the number of its tiles is at least 1, so that
    it may be divided by.
    """
    low, high = Int32(0), table.experts
    for _ in cutlass.range(_BISECTIONS, unroll=1):
        middle = (low + high) // 2
        if high - low > 1:
            if ptx.load_shared_int(table.tiles + Uint32(middle * 4)) <= tile:
                low = middle
            else:
                high = middle
    before = ptx.load_shared_int(table.tiles + Uint32(low * 4))
    tiles = cutlass.max(ptx.load_shared_int(table.tiles + Uint32(low * 4 + 4)) - before, 1)
    first = ptx.load_shared_int(table.rows + Uint32(low * 4))
    end = ptx.load_shared_int(table.rows + Uint32(low * 4 + 4))
    return ExpertRange(low, before, first, end), tiles


@cute.jit
def find_expert_by_warp(tile: Int32, table: ExpertTable, lane: Int32) -> ExpertRange:
    """One warp: the expert of a tile of rows.

    Two loads that depend on one another instead of the ten of a bisection: each lane compares the
    tile with a number of the table, first with every ``_LANE_EXPERTS``-th, then with every one.
    """
    low = Int32(0)
    for level in cutlass.range_constexpr(2):
        step = (_LANE_EXPERTS, 1)[level]
        expert = cutlass.min(low + lane * step, table.experts)
        begins_before = ptx.load_shared_int(table.tiles + Uint32(expert * 4)) <= tile
        ballot = Uint32(cute.arch.vote_ballot_sync(begins_before))
        if cutlass.const_expr(step == 1):
            ballot = ballot & Uint32((1 << _LANE_EXPERTS) - 1)
        low += cutlass.max(Int32(cute.arch.popc(ballot)) - 1, 0) * step
    low = cutlass.min(low, table.experts - 1)
    before = ptx.load_shared_int(table.tiles + Uint32(low * 4))
    first = ptx.load_shared_int(table.rows + Uint32(low * 4))
    end = ptx.load_shared_int(table.rows + Uint32(low * 4 + 4))
    return ExpertRange(low, before, first, end)


@cute.jit
def find_tile(tile: Int32, order: GroupedTileOrder, tile_rows: cutlass.Constexpr) -> GroupedTile:
    """The ``tile``-th output tile.

    Args:
        tile: Below ``total_tiles row_blocks``; any other one gives some tile.
        order: The order of tiles.
        tile_rows: Rows of X of a tile.
    """
    tile = cutlass.max(tile, 0)
    expert_range, tiles = _find_expert(tile // order.row_blocks, order.table)
    rest = tile - expert_range.tiles_before * order.row_blocks
    row_block = rest // tiles
    first_row = expert_range.first_row + (rest - row_block * tiles) * tile_rows
    return GroupedTile(expert_range.expert, row_block, first_row, expert_range.end_row - first_row)


@cute.jit
def padding_before(table: ExpertTable, expert: Int32, lane: Int32) -> Int32:
    """One warp: rows that pad those of each expert before ``expert`` to a multiple of 128."""
    padding = Int32(0)
    for before in cutlass.range(lane, expert, 32, unroll=1):
        at = table.rows + Uint32(before * 4)
        # The number of rows, negated, modulo 128.
        padding += (ptx.load_shared_int(at) - ptx.load_shared_int(at + 4)) & 127
    for power in cutlass.range_constexpr(5):
        padding += Int32(cute.arch.shuffle_sync_bfly(padding, 1 << power))
    return padding


@cute.jit
def clear_padding(
    scales: Int64,
    table: ExpertTable,
    cta: Int32,
    ctas: Int32,
    tokens: Int32,
    columns: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
) -> None:
    """Write zeros to swizzled scales that belong to no row.

    Those are the scales behind every expert's rows in its last 128 rows, and the whole 128s behind
    all experts. A unit of work is an expert or such a 128; CTAs take every ``ctas``-th. A warp
    clears 512 bytes at a time, 4 scales of 128 rows.

    Args:
        scales: Address of the scales.
        table: The table that ``count_tiles`` filled.
        cta: Which CTA this is.
        ctas: How many there are.
        tokens: Rows of X; 0 for nothing to clear.
        columns: Columns of a row, a multiple of 64.
        thread: Which of the threads that call this.
        threads: How many call this, whole warps.
    """
    lane, unit = thread % 32, cta
    # 128s of rows that the buffer has, whatever the offsets are.
    most = (tokens + 127 * cutlass.min(tokens, table.experts)) // 128
    units = Int32(tokens > 0) * (table.experts + most)
    while unit < units:
        expert = cutlass.min(unit, table.experts)
        start = ptx.load_shared_int(table.rows + Uint32(expert * 4))
        following = cutlass.min(expert + 1, table.experts)
        end = ptx.load_shared_int(table.rows + Uint32(following * 4))
        filled = (end - start) % 128
        if filled > 0 or unit >= table.experts:
            row_tile = (end + padding_before(table, expert, lane)) // 128 + (unit - expert)
            if row_tile < most:
                at = scales + Int64(row_tile) * (columns * 8) + lane * 16
                for word in cutlass.range(thread // 32, columns // 64, threads // 32, unroll=1):
                    # A lane has the 16 bytes of rows ``lane``, ``lane + 32`` and so on.
                    for part in cutlass.range_constexpr(4):
                        if lane + 32 * part >= filled:
                            ptx.store_global(at + Int64(word * 512 + part * 4), Uint32(0))
        unit += ctas


@cute.jit
def clear_quantized_lines(
    out: QuantizedLines,
    lines: Lines,
    columns: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
) -> None:
    """Write codes and block scales of 0 and a row scale of 1 to rows of no expert.

    Args:
        out: The result.
        lines: Which rows.
        columns: Columns of a row, a multiple of 16.
        thread: Which of the threads that call this.
        threads: How many call this.
    """
    line = lines.first
    while line < lines.end:
        codes = out.codes + Int64(line) * (columns // 2)
        for word in cutlass.range(thread, columns // 8, threads, unroll=1):
            ptx.store_global(codes + Int64(word) * 4, Uint32(0))
        if cutlass.const_expr(out.block_scales is not None):
            scales = out.block_scales + Int64(line) * (columns // 16)
            for block in cutlass.range(thread, columns // 16, threads, unroll=1):
                ptx.store_global_byte(scales + block, Uint32(0))
        if thread == 0:
            ptx.store_global_float(out.row_scales + Int64(line) * 4, Float32(1.0))
        line += lines.stride


@cute.jit
def clear_lines(
    out: Int64, lines: Lines, vectors: Int32, thread: Int32, threads: cutlass.Constexpr
) -> None:
    """Write zeros to rows of no expert, each ``vectors`` times 16 bytes.

    Args:
        out: Address of the result.
        lines: Which rows.
        vectors: Vectors of 16 bytes in a row.
        thread: Which of the threads that call this.
        threads: How many call this.
    """
    line, zero = lines.first, Uint32(0)
    while line < lines.end:
        at = out + Int64(line) * vectors * 16
        for vector in cutlass.range(thread, vectors, threads, unroll=1):
            ptx.store_global4(at + Int64(vector) * 16, [zero, zero, zero, zero])
        line += lines.stride
