"""The grouped GEMM in ``grouped_gemm_e4m3`` whose weights two CTAs dequantize together.

Dequantizing takes longer than the MMAs of 256 tokens, and experts of more than 256 rows have two
tiles of tokens or more, for each of which the weights are dequantized again. Here a cluster of two
CTAs has up to 512 rows of an expert and the same 128 rows of its weight. Each CTA dequantizes 64 of
these and gives them to the other one. The tokens are shared evenly, in blocks of 64.

Exchange. A warp that has dequantized its rows of a stage copies them to the same place in the other
CTA by a bulk copy, which completes bytes of the ``ready`` mbarrier there. A CTA whose tile has no
tokens dequantizes its half all the same.

Barriers: those of ``gemm_e4m3``, with these differences.

* ``ready[stage]``: the arrival of a warp that dequantizes also expects the bytes that the warp of
  the same number in the other CTA sends.
* ``free[stage]``: has an arrival of every MMA warp of both CTAs, because a warp writes both.
* A cluster barrier before the first arrival says that both CTAs have mbarriers; another one, at the
  end, that neither sends anything to the other any more.

Numerics: the bits of ``grouped_gemm_e4m3``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.expert_scheduler import (
    ExpertTable,
    GroupedTileOrder,
    count_tiles,
    find_tile,
    total_tiles,
)
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_results import Lane, Tile
from dsv4.cute.sm90.gemm_e4m3_plan import K_BLOCK, ROWS, GroupedPairE4m3Plan
from dsv4.cute.sm90.grouped_gemm_e4m3 import GroupedE4m3Kernel

_WARP_ROWS = 16


class GroupedPairE4m3Kernel(GroupedE4m3Kernel):
    """The kernel of one configuration."""

    plan: GroupedPairE4m3Plan  # type: ignore[assignment]

    def _rank(self) -> Int32:
        """This CTA's rank in its pair."""
        return Int32(cute.arch.block_idx_in_cluster())

    def _first_own_row(self) -> Int32:
        """First of the 128 rows of a tile that this CTA dequantizes."""
        return self._rank() * (ROWS // 2)

    @cute.jit
    def _begin(self, table_at: Uint32, args: Any, me: Lane) -> Walk:
        """All threads: wait for the preceding kernel, count tiles, wait for the other CTA."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        table = ExpertTable(table_at, table_at + Uint32(self.plan.table_bytes // 2), args.experts)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if me.warp == 0:
            count_tiles(args.offsets, table, self.plan.pair_tokens, me.lane)
        cute.arch.sync_threads()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
        total = total_tiles(table) * args.row_blocks
        order = GroupedTileOrder(table, args.row_blocks)
        return Walk(Int32(block) // 2, Int32(grid) // 2, total, order)

    def _tile(self, number: Int32, walk: Walk, args: Any) -> Tile:
        """This CTA's part of the ``number``-th tile."""
        grouped = find_tile(number, walk.order, self.plan.pair_tokens)
        tokens = cutlass.min(grouped.rows, Int32(self.plan.pair_tokens))
        half = (tokens + 127) // 128 * 64
        rank = self._rank()
        return Tile(
            expert=grouped.expert,
            row=grouped.row_block * self.plan.unit_rows,
            token=grouped.first_row + rank * half,
            end=grouped.first_row + cutlass.min(tokens, (rank + 1) * half),
            input=Int32(0),
        )

    def _clear(self, walk: Walk, args: Any, thread: Int32) -> None:
        """Three warps: clear the rows of no expert, each CTA other ones."""
        own = walk._replace(first=walk.first * 2 + self._rank(), stride=walk.stride * 2)
        super()._clear(own, args, thread)

    def _signal_ready(self, ready: Uint32, written: Uint32) -> None:
        """One lane: send its warp's rows of a stage, and say that they are dequantized."""
        count = _WARP_ROWS * K_BLOCK
        peer = 1 - self._rank()
        ptx.mbarrier_arrive_expect_tx(ready, count)
        target, barrier = ptx.map_to_cta(written, peer), ptx.map_to_cta(ready, peer)
        ptx.bulk_copy_to_remote(target, written, count, barrier)

    def _signal_free(self, free: Uint32) -> None:
        """One lane: say in both CTAs that its warp has read dequantized weights of a stage."""
        ptx.mbarrier_arrive(free)
        ptx.mbarrier_arrive_remote(ptx.map_to_cta(free, 1 - self._rank()))

    def _finish(self) -> None:
        """All threads: wait until the other CTA sends nothing to this one any more."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
