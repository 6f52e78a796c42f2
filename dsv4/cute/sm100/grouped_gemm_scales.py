"""The scale warp of the ``tcgen05`` grouped GEMM: block scales of X to the stages of the ring.

Scales of X are linear, 16 bytes of a row in a stage of 256 columns. The MMA wants 512 bytes for 128
rows and 64 columns: of row ``r`` the 4 bytes at ``r % 32 * 16 + r // 32 * 4``. So a lane loads the
16 bytes of rows ``lane``, ``lane + 32``, ``lane + 64`` and ``lane + 96``, a word of each for every
64 columns, and stores the four rows' words of 64 columns together. That is 4 loads and 4 stores of
16 bytes for 128 rows, a fence and an arrival at the stage's ``full`` mbarrier.

Rows behind the expert's last have scales 0 and are not loaded. Scales by TMA, transposed in shared
memory, were rejected: 16 bytes of a row are a request as the 128 bytes of its codes are, and would
take another barrier a stage. Which is faster is not measured: no such GPU.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.expert_scheduler import find_tile
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm100 import tcgen05
from dsv4.cute.sm100.gemm_pipeline import Barriers, RingPosition, Tcgen05Pipeline
from dsv4.cute.sm100.grouped_gemm_plan import PREFETCHED_STAGES, SCALE_BYTES
from dsv4.cute.sm100.tensor_maps import SCALE_TILE_BYTES

Scales = list[tuple[Uint32, ...]]  # of a lane's rows, 4 words each: 16 scales of a stage


class GroupedTcgen05Scales(Tcgen05Pipeline):
    """The loop of the scale warp."""

    @cute.jit
    def _fill_scales(
        self,
        x_scales: Int64,
        k_stages: Int32,
        stages_at: Uint32,
        barriers: Barriers,
        walk: Walk,
        lane: Int32,
    ) -> None:
        """Scale warp: keep the ring full of scales of X, tile after tile.

        Those of ``PREFETCHED_STAGES`` stages are loaded at a time, before the first is stored.

        Args:
            x_scales: All scales of X.
            k_stages: Stages of a tile.
            stages_at: Shared memory of the stages.
            barriers: All of them.
            walk: The cluster's tiles.
            lane: Lane of the warp.
        """
        position, index = RingPosition(Int32(0), Int32(1)), Int32(walk.first)
        while index < walk.total:
            tile = find_tile(index, walk.order, self.plan.token_block)
            own = x_scales + Int64(tile.first_row + lane) * k_stages * SCALE_BYTES
            for k in cutlass.range(0, k_stages, PREFETCHED_STAGES, unroll=1):
                loaded = [
                    self._load_scales(own, tile.rows, Int32(k), i, k_stages, lane)
                    for i in range(PREFETCHED_STAGES)
                ]
                for i in cutlass.range_constexpr(PREFETCHED_STAGES):
                    if k + i < k_stages:
                        stage = position.stage
                        ptx.mbarrier_wait(barriers.empty + Uint32(stage * 8), position.parity)
                        stage_at = stages_at + Uint32(stage * self.plan.stage_bytes)
                        self._store_scales(loaded[i], stage_at, lane)
                        self._announce(barriers.full + Uint32(stage * 8), lane)
                        position = self._next(position)
            index += walk.stride

    def _load_scales(
        self, own: Int64, rows: Int32, k: Int32, i: int, k_stages: Int32, lane: Int32
    ) -> Scales:
        """Scales of the lane's rows in stage ``k + i``; zeros behind the expert's rows and K.

        Args:
            own: Scales of row ``lane`` of the tile.
            rows: Rows of the tile's expert from the tile's first on.
            k: Number of the first of ``PREFETCHED_STAGES`` stages.
            i: Which of them.
            k_stages: Stages of a tile.
            lane: Lane of the warp.
        """
        scales = []
        for n in range(self.plan.token_block // 32):
            exists = Int32(lane + 32 * n < rows) & Int32(k + i < k_stages)
            row = own + Int64(32 * n * SCALE_BYTES) * k_stages + Int64(k) * SCALE_BYTES
            scales.append(ptx.load_global_or_zero(row, 4, exists, i * SCALE_BYTES))
        return scales

    def _store_scales(self, scales: Scales, stage_at: Uint32, lane: Int32) -> None:
        """Store the lane's scales of a stage, 16 bytes to each 128 rows and 64 columns."""
        codes = self.plan.row_code_bytes + self.plan.token_code_bytes
        at = stage_at + Uint32(codes + self.plan.row_scale_bytes) + Uint32(lane * 16)
        zeros = (Uint32(0),) * 4
        for tile in range(self.plan.scale_tiles):
            # A tile of 64 tokens, or the last of 192, has two rows of a lane, not four.
            rows = (scales[4 * tile : 4 * tile + 4] + [zeros] * 4)[:4]
            for block in range(4):
                words = [row[block] for row in rows]
                ptx.store_shared4(at, words, (tile * 4 + block) * SCALE_TILE_BYTES)

    @cute.jit
    def _announce(self, full: Uint32, lane: Int32) -> None:
        """One warp: tell the leader that the tensor core may read the scales of a stage."""
        ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            if cutlass.const_expr(self.plan.cta_group > 1):
                tcgen05.arrive_leader(full)
            else:
                ptx.mbarrier_arrive(full)
