"""Tiles of the GEMMs with FP8 arithmetic: dense ones, and those of routed experts.

A kernel derives from one of these classes first, and then from the class with its warps.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.expert_scheduler import (
    ExpertTable,
    GroupedTileOrder,
    Lines,
    clear_lines,
    count_tiles,
    end_row,
    find_tile,
    total_tiles,
)
from dsv4.cute.device.scheduler import next_tile, tile_position
from dsv4.cute.device.tile_walk import TileOrder, Walk
from dsv4.cute.sm90.e4m3_results import E4m3Results, Lane, Tile
from dsv4.cute.sm90.gemm_e4m3_plan import ROWS

_CLEAR_THREADS = 96  # threads of the copy warps except the first
_SCALE_OF_ZEROS = 105  # the quantiser's scale of 128 zeros


class DenseTiles(E4m3Results):
    """Tiles of a dense GEMM; the token tiles of a span follow one another."""

    @cute.jit
    def _begin(self, table_at: Uint32, args: Any, me: Lane) -> Walk:
        """All threads: wait for the mbarriers and for the preceding kernel.

        Args:
            table_at: Shared memory of a table of experts; unused here.
            args: The scalars.
            me: This thread.

        Returns:
            The CTA's tiles.
        """
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        order = TileOrder(args.token_tiles, args.token_span, args.row_blocks)
        return Walk(Int32(block), Int32(grid), args.token_tiles * args.row_blocks, order)

    def _tile(self, number: Int32, walk: Walk, args: Any) -> Tile:
        """The ``number``-th tile."""
        row_block, token_tile = tile_position(number, walk.order, cutlass.min)
        token = token_tile * self.plan.token_block
        return Tile(
            expert=Int32(0),
            row=row_block * ROWS,
            token=token,
            end=cutlass.min(token + self.plan.token_block, args.tokens),
            input=row_block // args.group_blocks * args.stages,
        )

    def _following(self, number: Int32, walk: Walk) -> Int32:
        """Number of the CTA's tile after ``number``."""
        return number + walk.stride

    def _clear(self, walk: Walk, args: Any, thread: Int32) -> None:
        """Three warps without other work: do nothing."""


class GroupedTiles(E4m3Results):
    """Tiles of routed experts; a table of them is counted first."""

    @cute.jit
    def _begin(self, table_at: Uint32, args: Any, me: Lane) -> Walk:
        """All threads: wait for the preceding kernel, and count the experts' tiles."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        table = ExpertTable(table_at, table_at + Uint32(self.plan.table_bytes // 2), args.experts)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if me.warp == 0:
            count_tiles(args.offsets, table, self.plan.token_block, me.lane)
        cute.arch.sync_threads()
        total = total_tiles(table) * args.row_blocks
        return Walk(Int32(block), Int32(grid), total, GroupedTileOrder(table, args.row_blocks))

    def _tile(self, number: Int32, walk: Walk, args: Any) -> Tile:
        """The ``number``-th tile."""
        grouped = find_tile(number, walk.order, self.plan.token_block)
        return Tile(
            expert=grouped.expert,
            row=grouped.row_block * self.plan.unit_rows,
            token=grouped.first_row,
            end=grouped.first_row + cutlass.min(grouped.rows, Int32(self.plan.token_block)),
            input=Int32(0),
        )

    def _following(self, number: Int32, walk: Walk) -> Int32:
        """Number of the CTA's tile after ``number``."""
        following: Int32 = next_tile(number, walk.stride)
        return following

    @cute.jit
    def _clear(self, walk: Walk, args: Any, thread: Int32) -> None:
        """Three warps: clear the rows of no expert, every ``stride``-th by each CTA."""
        lines = Lines(end_row(walk.order.table) + walk.first, args.clear_end, walk.stride)
        columns = self._total_columns(args)
        if cutlass.const_expr(self.plan.quantized_out):
            clear_lines(args.out, lines, columns // 16, thread, _CLEAR_THREADS)
            line = lines.first
            while line < lines.end:
                at = args.out_scales + Int64(line) * (columns // 128)
                for i in cutlass.range(thread, columns // 128, _CLEAR_THREADS, unroll=1):
                    ptx.store_global_byte(at + Int64(i), Uint32(_SCALE_OF_ZEROS))
                line += lines.stride
        else:
            width = 4 if self.plan.float32_out else 2
            clear_lines(args.out, lines, columns * width // 16, thread, _CLEAR_THREADS)
