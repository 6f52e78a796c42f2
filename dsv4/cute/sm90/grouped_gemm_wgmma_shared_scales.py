"""The grouped GEMM in ``grouped_gemm_wgmma`` whose lanes share the dequantization of scales.

Four lanes multiply by every block scale of a row tile. Here each lane dequantizes a quarter of the
scales of four pairs of a row tile and a block of 64 columns at a time, and the lanes exchange them
through 512 bytes of shared memory of their warp: 1.3 instructions less for the MMAs of 16 columns.
Pro's pair of GEMMs took 5004 thousand cycles instead of 5301 at 512 tokens, 8703 instead of 8827 at
4096 (H200). The bits are those of ``grouped_gemm_wgmma``.

The left operands of the first MMAs of an iteration are dequantized at the end of the iteration
before, so that no MMA waits for a dequantization. That takes registers, which the threads of two
warpgroups have (``GroupedWgmmaPlan.shares_scales``).

Two ``sync_warp`` order the exchange: all lanes have read the scales before, and all have written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.dequant import dequantized_fragment, scales_to_bfloat16
from dsv4.cute.sm90.gemm_wgmma import (
    CODE_BYTES,
    K_STEPS,
    SCALE_BYTES,
    LaneWords,
    Loop,
    Operands,
    Position,
)
from dsv4.cute.sm90.grouped_gemm_wgmma import GroupedWgmmaKernel
from dsv4.cute.sm90.wgmma_copies import Pipeline

_PAIRS = 4  # of a row tile and a block of 64 columns, whose scales are dequantized at a time


class SharedScaleWeights(NamedTuple):
    """Shared-memory addresses of a lane's weights.

    Attributes:
        codes: Address of the codes of the warp's first row tile, in the first stage.
        scales: Address of the block scales that the lane dequantizes, in the first stage.
        written: Where the lane writes its dequantized scales.
        read: Where it reads the dequantized scales of its rows, for the first pair.
        opaque_16: See ``GroupedWgmmaArgs``.
    """

    codes: Uint32
    scales: Uint32
    written: Uint32
    read: Uint32
    opaque_16: Uint32


class GroupedWgmmaSharedScalesKernel(GroupedWgmmaKernel):
    """The kernel of one configuration."""

    def _scale_buffer(self, smem: Any) -> Uint32:
        """Shared memory of block scales that lanes dequantize for one another."""
        buffer = smem.allocate_array(cutlass.Uint8, self.plan.scale_buffer_bytes, byte_alignment=16)
        return Uint32(buffer.toint())

    def _lane_weights(
        self, weights: Uint32, scale_buffer: Uint32, warp: Int32, lane: Int32, opaque_16: Uint32
    ) -> SharedScaleWeights:
        """Return where the lane's weights are in the first stage, and the scales that it shares."""
        codes = weights + Uint32(warp * self.plan.code_bytes + lane * 16)
        scales = weights + Uint32(self.plan.cta_row_tiles * self.plan.code_bytes)
        # Eight lanes have a pair: rows lane % 8 and lane % 8 + 8 of it.
        h, u = lane // 8 % self.plan.warp_tiles, lane // 8 // self.plan.warp_tiles
        offset = h * (self.plan.mma_warps * self.plan.scale_bytes) + u * SCALE_BYTES + lane % 8 * 8
        scales += Uint32(warp * self.plan.scale_bytes + offset)
        buffer = scale_buffer + Uint32(warp * 512)
        written, read = buffer + Uint32(lane * 16), buffer + Uint32(lane // 4 * 16)
        return SharedScaleWeights(codes, scales, written, read, opaque_16)

    def _load_first(self, weights: SharedScaleWeights) -> list[LaneWords]:
        """Weights of the first block of 64 columns of each of the warp's row tiles."""
        self._share_scales(weights, self._load_own_scales(weights, Int32(0), 0))
        return [self._load(weights, Int32(0), 0, h) for h in range(self.plan.warp_tiles)]

    def _load_own_scales(
        self, weights: SharedScaleWeights, stage: Int32, u: int
    ) -> tuple[Uint32, Uint32]:
        """The scales that the lane dequantizes, of pairs from block ``u`` of a stage on."""
        skip = Uint32(stage * self.plan.weight_bytes + u * SCALE_BYTES)
        low, high = ptx.load_shared(weights.scales + skip, 2)
        return low, high

    def _share_scales(self, weights: SharedScaleWeights, own: tuple[Uint32, Uint32]) -> None:
        """One warp: dequantize the lanes' scales and write them for all lanes."""
        values = [scales_to_bfloat16(own, block, weights.opaque_16) for block in range(4)]
        cute.arch.sync_warp()
        ptx.store_shared4(weights.written, values)
        cute.arch.sync_warp()

    def _load(self, weights: SharedScaleWeights, stage: Int32, u: int, h: int) -> LaneWords:
        """The lane's 4 words of codes and 4 of dequantized scales, of the last pairs shared.

        Args:
            weights: Where the lane's are in the first stage.
            stage: Stage of the ring.
            u: Block of 64 columns of the stage.
            h: Row tile of the warp.
        """
        skip = Uint32(stage * self.plan.weight_bytes)
        further = Uint32(h * self.plan.mma_warps * self.plan.code_bytes + u * CODE_BYTES)
        codes = ptx.load_shared(weights.codes + skip + further, 4)
        pair = (u * self.plan.warp_tiles + h) % _PAIRS
        return [*codes, *ptx.load_shared(weights.read + Uint32(pair * 128), 4)]

    @cute.jit
    def _multiply_ring(
        self,
        operands: Operands,
        weights: SharedScaleWeights,
        prefetched: list[LaneWords],
        pipeline: Pipeline,
        position: Position,
        loop: Loop,
        leads: Any = None,
    ) -> tuple[list[LaneWords], Position]:
        """All MMA warps: add a tile's products to its sums; the last MMAs stay in flight.

        A group of MMAs multiplies ``K_STEPS`` steps of 16 columns of a row tile. While it runs, the
        left operands of the next group are dequantized.

        Args:
            operands: Operands of the MMAs.
            weights: Where the lane's weights are.
            prefetched: The lane's weights of the first columns, in registers.
            pipeline: mbarriers of the ring.
            position: In the ring.
            loop: Stages of the tile.
            leads: Not used: no warpgroup falls behind another one.

        Returns:
            The lane's next weights, and the position after the tile.
        """
        mma, sums, right, left, words = operands
        stage, parity, before = position
        groups = 4 * self.plan.stage_k_blocks // K_STEPS * self.plan.warp_tiles  # of a stage
        self._dequantize_shared(words[0], prefetched[0], 0)
        for step in cutlass.range(loop.stages, unroll=1):
            following, later = stage + 1, parity
            if following == self.plan.stages:
                following = Int32(0)
                later = parity ^ 1
            for g in cutlass.range_constexpr(groups):
                piece, h = divmod(g, self.plan.warp_tiles)
                u, start = divmod(piece * K_STEPS, 4)
                warpgroup.fence()
                for k in cutlass.range_constexpr(K_STEPS):
                    cute.gemm(
                        mma,
                        sums[h],
                        left[g % 2][None, None, k],
                        right[None, None, start + k, self.plan.stage_k_blocks * stage + u],
                        sums[h],
                    )
                warpgroup.commit_group()
                # The group before is done: its operands may be written, its stage released.
                warpgroup.wait_group(1)
                if cutlass.const_expr(g == 0):
                    self._release(pipeline.empty, before, loop.lane)
                # The next group.
                piece, h = divmod((g + 1) % groups, self.plan.warp_tiles)
                u, start = divmod(piece * K_STEPS, 4)
                self._dequantize_shared(words[(g + 1) % 2], prefetched[h], start)
                # Weights of the next block of 64 columns, maybe one of the next stage.
                coming = (u + 1) % self.plan.stage_k_blocks
                there = following if coming == 0 else stage
                fresh = coming * self.plan.warp_tiles % _PAIRS == 0
                early = start == 0 and h == self.plan.warp_tiles - 1
                if cutlass.const_expr(coming == 0 and early):  # noqa: SIM102 - one is constant
                    if not (loop.is_last and step + 1 == loop.stages):
                        ptx.mbarrier_wait(pipeline.full + Uint32(following * 8), later)
                if cutlass.const_expr(fresh and early):
                    own = self._load_own_scales(weights, there, coming)
                if cutlass.const_expr(fresh and start + K_STEPS == 4 and h == 0):
                    self._share_scales(weights, own)
                if cutlass.const_expr(start + K_STEPS == 4):
                    prefetched[h] = self._load(weights, there, coming, h)
            before = stage
            stage = following
            parity = later
        return prefetched, Position(stage, parity, before)

    def _dequantize_shared(self, words: cute.Tensor, loaded: LaneWords, start: int) -> None:
        """Write left operands of ``K_STEPS`` steps of 16 columns, from step ``start`` on."""
        for k in range(K_STEPS):
            fragment = dequantized_fragment(loaded[start + k], loaded[4 + start + k])
            for i, word in enumerate(fragment):
                words[k * 4 + i] = word
