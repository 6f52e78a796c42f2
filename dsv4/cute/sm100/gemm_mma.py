"""The warp of the ``tcgen05`` GEMMs that issues MMAs.

Of two CTAs that multiply together, the leader's warp does so for both. For every stage one thread
copies the scales of 256 columns from shared memory to TMEM and issues four MMAs of 64 columns. The
tensor core executes them in this order, so the scales of one stage are overwritten by the next only
after they have been used; there is one set of scale columns.

TMEM of each CTA, in columns: accumulators of two tiles, so that the epilogue stores one while the
other is computed; 16 columns of the rows' scales; 16 for each 128 tokens of the tokens' scales.
Accumulators of 256 tokens do not fit twice: they overlap by 48 columns (``Tcgen05Plan.overlap``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm100 import tcgen05
from dsv4.cute.sm100.gemm_pipeline import Barriers, RingPosition, Tcgen05Pipeline
from dsv4.cute.sm100.tensor_maps import SCALE_TILE_BYTES


class Tcgen05Mma(Tcgen05Pipeline):
    """The loop of the MMA warp."""

    @cute.jit
    def _multiply(
        self, stages_at: Uint32, barriers: Barriers, tmem: Uint32, walk: Walk, k_stages: Int32
    ) -> None:
        """MMA warp of the leader: compute every tile's sums; in the end wait until all are loaded.

        Args:
            stages_at: Shared memory of the stages.
            barriers: All of them.
            tmem: First TMEM column.
            walk: The cluster's tiles.
            k_stages: Stages of the CTA's part of K.
        """
        position, tile, count = RingPosition(Int32(0), Int32(0)), Int32(walk.first), Int32(0)
        while tile < walk.total:
            shift = self._scale_shift(tile, walk)
            accumulator, parity = self.plan.accumulator_phase(count)
            ptx.mbarrier_wait(barriers.accumulator_empty + Uint32(accumulator * 8), parity ^ 1)
            tcgen05.fence_after_sync()
            sums = tmem + Uint32(self.plan.accumulator_column(count))
            for k in cutlass.range(k_stages, unroll=1):
                ptx.mbarrier_wait(barriers.full + Uint32(position.stage * 8), position.parity)
                tcgen05.fence_after_sync()
                with cute.arch.elect_one():
                    stage_at = stages_at + Uint32(position.stage * self.plan.stage_bytes)
                    self._multiply_stage(stage_at, sums, tmem, shift, Int32(k))
                    tcgen05.commit(barriers.empty + Uint32(position.stage * 8), self.plan.cta_group)
                position = self._next(position)
            with cute.arch.elect_one():
                tcgen05.commit(
                    barriers.accumulator_full + Uint32(accumulator * 8), self.plan.cta_group
                )
            tile += walk.stride
            count += 1
        # As before two more tiles: until the epilogue has loaded all accumulators.
        for _ in cutlass.range(self.plan.accumulator_stages, unroll=1):
            accumulator, parity = self.plan.accumulator_phase(count)
            ptx.mbarrier_wait(barriers.accumulator_empty + Uint32(accumulator * 8), parity ^ 1)
            count += 1

    def _scale_shift(self, tile: Int32, walk: Walk) -> Int32:
        """``Tcgen05Plan.scale_shift`` of a tile."""
        _, token_tile = tile_position(tile, walk.order, cutlass.min)
        return self.plan.scale_shift(token_tile)

    def _multiply_stage(
        self, stage_at: Uint32, sums: Uint32, tmem: Uint32, shift: Int32, k: Int32
    ) -> None:
        """One thread: copy the scales of 256 columns to TMEM, and issue their MMAs."""
        plan = self.plan
        tokens_at = stage_at + Uint32(plan.row_code_bytes)
        row_scales_at = tokens_at + Uint32(plan.token_code_bytes)
        token_scales_at = row_scales_at + Uint32(plan.row_scale_bytes)
        row_scales = tmem + Uint32(plan.row_scale_column)
        token_scales = tmem + Uint32(plan.token_scale_column)
        for block in range(4):
            tcgen05.copy_scales(
                row_scales + Uint32(4 * block),
                row_scales_at + Uint32(block * SCALE_TILE_BYTES),
                plan.cta_group,
            )
            for tile in range(plan.scale_tiles):
                tcgen05.copy_scales(
                    token_scales + Uint32(4 * (block * plan.scale_tiles + tile)),
                    token_scales_at + Uint32((tile * 4 + block) * SCALE_TILE_BYTES),
                    plan.cta_group,
                )
        left, right = tcgen05.codes_descriptor(stage_at), tcgen05.codes_descriptor(tokens_at)
        for block in range(4):
            tcgen05.multiply(
                sums,
                left + Int64(2 * block),
                right + Int64(2 * block),
                row_scales + Uint32(4 * block),
                token_scales + Uint32(4 * block * plan.scale_tiles) + Uint32(shift),
                # The first MMA of a tile overwrites what the accumulator held.
                Uint32(1) if block else Uint32(k),
                plan.instruction_descriptor,
                plan.cta_group,
            )
