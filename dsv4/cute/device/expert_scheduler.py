"""Which expert's rows a tile of a grouped product has, found on the GPU.

Rows are sorted by expert. A block adds up the experts' numbers of tiles of rows into a table in its
shared memory, once, and finds a tile's expert by bisection. An expert without rows has no tile.
Offsets that are out of order, or beyond the rows there are, are the caller's to avoid.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import nvvm

from dsv4.cute.device import ptx
from dsv4.cute.grouped_problem import MOST_EXPERTS

Value = Any
_BISECTIONS = MOST_EXPERTS.bit_length()
_EACH = MOST_EXPERTS // 32  # experts that a lane counts, all loaded at once


@cute.jit
def count_tiles(
    offsets: Value,
    table: Value,
    block: cutlass.Constexpr,
    lane: Value,
    loads: Value = None,
) -> None:
    """A warp fills a table from the offsets.

    Args:
        offsets: Address of int32 ``[experts + 1]`` in global memory.
        table: Addresses of int32 ``[experts + 1]`` in shared memory, for tiles before each expert
            and for first rows, with the totals as last entries; and the number of experts.
        block: Rows of a tile.
        lane: Of the warp.
        loads: Rows above which an expert has tiles, and up to which it has; None for all experts.
    """
    tiles_at, rows_at, experts = table
    first = lane * _EACH
    rows = []
    for i in cutlass.range_constexpr(_EACH + 1):
        rows.append(Int32(ptx.load_global(offsets + Int64(cutlass.min(first + i, experts)) * 4)))
    counts = [rows[i + 1] - rows[i] for i in range(_EACH)]
    if cutlass.const_expr(loads is not None):
        above, most = loads
        counts = [n * Int32(n > above) * Int32(n <= most) for n in counts]
    tiles = [cutlass.max(n + (block - 1), 0) // block for n in counts]
    running = sum(tiles[1:], tiles[0])
    before = -running
    for power in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_op(
            running, 1 << power, mask_and_clamp=0, kind=nvvm.ShflKind.up
        )
        if lane >= (1 << power):
            running = running + other
    before += running
    for i in cutlass.range_constexpr(_EACH):
        if first + i < experts:
            ptx.store_shared_int(tiles_at + Uint32((first + i) * 4), before)
            ptx.store_shared_int(rows_at + Uint32((first + i) * 4), rows[i])
        before += tiles[i]
    if lane == 31:
        ptx.store_shared_int(tiles_at + Uint32(experts * 4), before)
        ptx.store_shared_int(rows_at + Uint32(experts * 4), rows[_EACH])


def all_tiles(table: Value) -> Value:
    """Tiles of all experts; read anew each time, so that no register has to keep it."""
    tiles_at, _, experts = table
    return ptx.load_shared_int(tiles_at + Uint32(experts * 4))


def last_row(table: Value) -> Value:
    """The row after the last expert's."""
    _, rows_at, experts = table
    return ptx.load_shared_int(rows_at + Uint32(experts * 4))


@cute.jit
def find_expert(tile: Value, table: Value) -> Value:
    """Expert of a tile, tiles before it, its own tiles, its first row and the row after its last.

    Of a tile that there is not, some expert's; its tiles are at least 1 then, too.
    """
    tiles_at, rows_at, experts = table
    low, high = Int32(0), experts
    for _ in cutlass.range(_BISECTIONS, unroll=1):
        middle = (low + high) // 2
        if high - low > 1:
            if ptx.load_shared_int(tiles_at + Uint32(middle * 4)) <= tile:
                low = middle
            else:
                high = middle
    before = ptx.load_shared_int(tiles_at + Uint32(low * 4))
    tiles = cutlass.max(ptx.load_shared_int(tiles_at + Uint32(low * 4 + 4)) - before, 1)
    first = ptx.load_shared_int(rows_at + Uint32(low * 4))
    end = ptx.load_shared_int(rows_at + Uint32(low * 4 + 4))
    return low, before, tiles, first, end


@cute.jit
def find_expert_together(tile: Value, table: Value, lane: Value) -> Value:
    """Expert of a tile, tiles before it, its first row and the row after its last, by a warp.

    As ``find_expert``, which takes ten readings one after another, in two.
    """
    tiles_at, rows_at, experts = table
    low = Int32(0)
    for each in cutlass.range_constexpr(2):
        step = (_EACH, 1)[each]
        at = cutlass.min(low + lane * step, experts)
        before = ptx.load_shared_int(tiles_at + Uint32(at * 4)) <= tile
        found = Uint32(cute.arch.vote_ballot_sync(before))
        if cutlass.const_expr(step == 1):
            found = found & Uint32((1 << _EACH) - 1)
        low += cutlass.max(Int32(cute.arch.popc(found)) - 1, 0) * step
    low = cutlass.min(low, experts - 1)
    before = ptx.load_shared_int(tiles_at + Uint32(low * 4))
    first = ptx.load_shared_int(rows_at + Uint32(low * 4))
    end = ptx.load_shared_int(rows_at + Uint32(low * 4 + 4))
    return low, before, first, end


@cute.jit
def find_tile(tile: Value, order: Value, block: cutlass.Constexpr) -> Value:
    """Expert, block of rows, first row of X, and rows of X from there to the expert's end.

    The tiles of an expert follow one another, of a block of rows those of ``block`` tokens first.

    Args:
        tile: Of all experts' rows and columns of results.
        order: The table, and the blocks of rows of an expert.
        block: Rows of X in a tile.
    """
    table, row_blocks = order
    tile = cutlass.max(tile, 0)
    expert, before, tiles, start, end = find_expert(tile // row_blocks, table)
    rest = tile - before * row_blocks
    row_block = rest // tiles
    start += (rest - row_block * tiles) * block
    return expert, row_block, start, end - start


@cute.jit
def padding_before(table: Value, expert: Value, lane: Value) -> Value:
    """Rows that pad those of the experts before one to whole 128s, by a warp."""
    _, rows_at, _ = table
    padding = Int32(0)
    for one in cutlass.range(lane, expert, 32, unroll=1):
        at = rows_at + Uint32(one * 4)
        padding += (ptx.load_shared_int(at) - ptx.load_shared_int(at + 4)) & 127
    for power in cutlass.range_constexpr(5):
        padding += Int32(cute.arch.shuffle_sync_bfly(padding, 1 << power))
    return padding


@cute.jit
def clear_padding(
    scales: Value,
    table: Value,
    walk: Value,
    columns: Value,
    thread: Value,
    threads: cutlass.Constexpr,
) -> None:
    """Zeros in swizzled scales behind every expert's rows in their last 128, and behind all.

    The blocks of the grid take the experts in turn, then the 128s of which there may be so many. A
    warp clears 512 bytes at a time, which are 4 scales of 128 rows.

    Args:
        scales: Their address.
        table: As ``count_tiles`` filled it.
        walk: Which block this is, how many there are, and rows of X; 0 for nothing to clear.
        columns: Of a row, a multiple of 64.
        thread: Which of them this is.
        threads: How many there are, whole warps.
    """
    _, rows_at, experts = table
    unit, stride, tokens = walk
    lane = thread % 32
    most = (tokens + 127 * cutlass.min(tokens, experts)) // 128
    units = Int32(tokens > 0) * (experts + most)
    while unit < units:
        expert = cutlass.min(unit, experts)
        start = ptx.load_shared_int(rows_at + Uint32(expert * 4))
        end = ptx.load_shared_int(rows_at + Uint32(cutlass.min(expert + 1, experts) * 4))
        filled = (end - start) % 128
        if filled > 0 or unit >= experts:
            place = (end + padding_before(table, expert, lane)) // 128 + (unit - expert)
            if place < most:
                at = scales + Int64(place) * (columns * 8) + lane * 16
                for word in cutlass.range(thread // 32, columns // 64, threads // 32, unroll=1):
                    for part in cutlass.range_constexpr(4):
                        if lane + 32 * part >= filled:
                            ptx.store_global(at + Int64(word * 512 + part * 4), Uint32(0))
        unit += stride


@cute.jit
def clear_codes(
    places: Value, lines: Value, columns: Value, thread: Value, threads: cutlass.Constexpr
) -> None:
    """Codes and block scales 0, scale 1 in rows ``(first, end, stride)``, by so many threads.

    Args:
        places: Addresses of codes, block scales, of which a row may have none, and scales of rows.
        lines: The rows.
        columns: Of a row, a multiple of 16.
        thread: Which of them this is.
        threads: How many there are.
    """
    codes, scales, row_scale = places
    line, end, stride = lines
    while line < end:
        at = codes + Int64(line) * (columns // 2)
        for word in cutlass.range(thread, columns // 8, threads, unroll=1):
            ptx.store_global(at + Int64(word) * 4, Uint32(0))
        if cutlass.const_expr(scales is not None):
            at = scales + Int64(line) * (columns // 16)
            for block in cutlass.range(thread, columns // 16, threads, unroll=1):
                ptx.store_global_byte(at + block, Uint32(0))
        if thread == 0:
            ptx.store_global_float(row_scale + Int64(line) * 4, Float32(1.0))
        line += stride


@cute.jit
def clear_lines(
    out: Value, lines: Value, vectors: Value, thread: Value, threads: cutlass.Constexpr
) -> None:
    """Zeros in lines of ``vectors`` 16 bytes: ``(first, end, stride)``, by so many threads."""
    line, end, stride = lines
    zero = Uint32(0)
    while line < end:
        at = out + Int64(line) * vectors * 16
        for vector in cutlass.range(thread, vectors, threads, unroll=1):
            ptx.store_global4(at + Int64(vector) * 16, [zero, zero, zero, zero])
        line += stride
