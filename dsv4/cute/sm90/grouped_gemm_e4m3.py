"""Grouped GEMM with FP8 arithmetic and exact NVFP4 weights, for many rows an expert.

``out[r, n] = sum_k x[r, k] w[e, n, k]`` for ``offsets[e] <= r < offsets[e + 1]``, or its SwiGLU.
Warps, rings, arithmetic and results are those of ``gemm_e4m3``; what differs:

Tiling and ownership. A tile is 128 rows of an expert's weight and up to ``token_block`` rows of X
that belong to the expert, in blocks of 64. Blocks without rows are neither copied nor multiplied;
rows of the next expert that lie in the last one are multiplied, not stored. Tiles of an expert
follow one another, the tokens of a block of rows first, so that its weights come from memory once
and from L2 for the other tiles. CTAs are persistent and take every tile that is a grid further.

FP8 results. A scale belongs to 128 results, those of 256 rows of gate and up: a unit of two tiles
for the same tokens, which a CTA computes one after the other (``e4m3_results``).

Warps. All CTAs count the experts' tiles into a table in shared memory first (one warp); every warp
finds the expert of a tile there. Three copy warps clear rows of no expert.

Barriers: those of ``gemm_e4m3``. Numerics: as ``gemm_e4m3``.
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
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_results import Lane, Tile
from dsv4.cute.sm90.gemm_e4m3 import E4m3Kernel
from dsv4.cute.sm90.gemm_e4m3_plan import GROUPED_E4M3_ABI

_CLEAR_THREADS = 96  # of the copy warps but the first
_SCALE_OF_ZEROS = 105  # as the quantiser gives to 128 zeros


class GroupedE4m3Kernel(E4m3Kernel):
    """The kernel of one configuration; ``kernel`` is that of ``E4m3Kernel``."""

    abi = GROUPED_E4M3_ABI

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
