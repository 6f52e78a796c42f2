"""Shared memory and the copy warp of the GEMMs with FP8 arithmetic.

``gemm_e4m3`` says what a CTA's warps do, and names the barriers.

Shared memory holds X of all stages, the weights that MMAs read, the packed weights if they are
dequantized, buffers of results with the factors of rows, a table of experts' tiles, and mbarriers.

The copy warp keeps the ring full by TMA, tile after tile: X of the tile's tokens, in boxes of
``tma_tokens``, and the weights of its rows. All copies of a stage complete bytes of its mbarrier.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from dsv4.cute.device import ptx
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_results import Lane, ResultBuffers, Tile
from dsv4.cute.sm90.e4m3_tiles import E4m3Tiles, Position, Rings
from dsv4.cute.sm90.gemm_e4m3_plan import K_BLOCK, ROWS


class CtaMemory(NamedTuple):
    """Shared memory of a CTA.

    Attributes:
        x: X of all stages.
        weights: E4M3 weights of all stages, as MMAs read them.
        copied: Where TMA copies of weights go: packed weights of all stages, or ``weights``.
        buffers: Those of results.
        table: The table of experts.
        full: ``rings.full`` as a pointer, which TMA copies take.
        rings: The mbarriers.
    """

    x: cute.Tensor
    weights: Any
    copied: Any
    buffers: ResultBuffers
    table: Uint32
    full: cute.Pointer
    rings: Rings


class E4m3Copies(E4m3Tiles):
    """Device functions of a CTA's shared memory and of its copy warp."""

    def _lane(self) -> Lane:
        """The thread's position."""
        thread, _, _ = cute.arch.thread_idx()
        return Lane(thread, cute.arch.make_warp_uniform(thread // 32), thread % 32)

    def _memory(self) -> CtaMemory:
        """Allocate the CTA's shared memory."""
        smem = cutlass.memory.SmemAllocator()
        x = self._allocated(smem, self.plan.token_block, self.plan.stages)
        weights = copied = self._allocated(smem, ROWS, self.plan.mma_weight_stages)
        if self.plan.dequantized_stages:
            packed_bytes = self.plan.stages * self.plan.weight_bytes
            copied = smem.allocate_array(cutlass.Uint8, packed_bytes, byte_alignment=128)
        other = smem.allocate_array(cutlass.Uint8, self.plan.other_bytes, byte_alignment=16)
        lines = Uint32(other.toint())
        first_results = lines + Uint32(self.plan.transpose_bytes)
        factors = first_results + Uint32(self.plan.first_result_bytes)
        table = factors + Uint32(self.plan.factor_slots * (ROWS * 4))
        full = smem.allocate_array(cutlass.Int64, self.plan.barriers)
        return CtaMemory(
            x=x,
            weights=weights,
            copied=copied,
            buffers=ResultBuffers(lines, first_results, factors),
            table=table,
            full=full,
            rings=self._rings(Uint32(full.toint())),
        )

    def _allocated(self, smem: Any, rows: int, stages: int) -> cute.Tensor:
        """Stages of lines of 128 E4M3 numbers, as pairs, swizzled."""
        layout = self._layout(rows, stages)
        return smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )

    @cute.jit
    def _copy(self, tma: Any, memory: CtaMemory, walk: Walk, args: Any, lane: Int32) -> None:
        """One warp: keep the ring full, tile after tile."""
        cpasync.prefetch_descriptor(tma.x_tma)
        cpasync.prefetch_descriptor(tma.codes_tma)
        if cutlass.const_expr(self.plan.dequantized_stages):
            cpasync.prefetch_descriptor(tma.scales_tma)
        boxes = self.plan.token_block // self.plan.tma_tokens
        stages_of_x = cute.make_tensor(
            memory.x.iterator, self._layout(self.plan.tma_tokens, self.plan.stages * boxes).outer
        )
        number, position = walk.first, Position(Int32(0), Int32(1))
        while number < walk.total:
            tile = self._tile(number, walk, args)
            tokens = cute.domain_offset((tile.token, 0), tma.x_tensor)
            x_tiles = cute.local_tile(tokens, (self.plan.tma_tokens, 64), (None, None))
            x = self._partition(tma.x_tma, stages_of_x, x_tiles)
            # Boxes with tokens of the tile; a dense tile is a single box.
            count = Int32(1)
            if cutlass.const_expr(boxes > 1):
                most = cutlass.min(tile.end - tile.token, self.plan.token_block)
                count = (most + (self.plan.tma_tokens - 1)) // self.plan.tma_tokens
            box_bytes = self.plan.tma_tokens * K_BLOCK
            for part in cutlass.range_constexpr(self.plan.row_parts):
                weights = self._tile_weights(tma, memory.copied, args, tile, part)
                for k in cutlass.range(args.stages, unroll=1):
                    stage = position.stage
                    barrier = memory.full + stage
                    ptx.mbarrier_wait(memory.rings.empty + Uint32(stage * 8), position.parity)
                    if lane == 0:
                        ptx.mbarrier_arrive_expect_tx(
                            memory.rings.full + Uint32(stage * 8),
                            count * box_bytes + self.plan.weight_bytes,
                        )
                    self._copy_weights(tma, weights, Int32(k), stage, barrier)
                    for box in cutlass.range(count, unroll=1):
                        cute.copy(
                            tma.x_tma,
                            x.source[(None, box, tile.input + k)],
                            x.to[(None, stage * boxes + box)],
                            tma_bar_ptr=barrier,
                        )
                    position = self._advanced(position, self.plan.stages)
            number = self._following(number, walk)

    def _tile_weights(self, tma: Any, to: Any, args: Any, tile: Tile, part: int) -> Any:
        """The TMA copies of the weights of 128 rows of a tile, for ``_copy_weights``.

        Args:
            tma: ``E4m3Tma`` or ``BlockE4m3Tma``.
            to: ``CtaMemory.copied``.
            args: The scalars.
            tile: The tile.
            part: Which 128 of its rows.
        """
        raise NotImplementedError
