"""GEMM with FP8 arithmetic on NVFP4 weights that ``e4m3_convert`` has converted to E4M3.

It has the tiles, MMA warps and results of ``gemm_e4m3``, with these differences.

Weights. A stage is 128 columns of X and of 128 rows of the weight, E4M3 codes; TMA copies and
swizzles both. Nothing is dequantized, so there is one ring, and no warpgroup between copies and
MMAs. Columns of both operands stand in fragment order.

Factors of rows. Each thread of an MMA warpgroup loads the factor of one row at the beginning of a
tile. At the end it writes the factor to shared memory for its own warpgroup. A named barrier of the
warpgroup orders writes and reads. The writes overwrite factors of the tile before last.

Dependencies. The preceding kernel writes the weights; nothing is read before griddepcontrol.wait.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from dsv4.cute.device import ptx
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_converted_plan import CONVERTED_E4M3_ABI
from dsv4.cute.sm90.e4m3_results import MMA_WARPS, Lane, ResultBuffers, Tile
from dsv4.cute.sm90.e4m3_tiles import E4m3Tiles, Position, Rings
from dsv4.cute.sm90.e4m3_walks import DenseTiles
from dsv4.cute.sm90.gemm_e4m3_plan import K_BLOCK, ROWS, BlockE4m3Tma
from dsv4.cute.sm90.wgmma_copies import fake_x

_FACTORS = 1  # first named barrier; one per MMA warpgroup signals that its factors are written


class ConvertedE4m3Kernel(DenseTiles, E4m3Tiles):
    """The kernel of one configuration."""

    abi = CONVERTED_E4M3_ABI

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        operands = (fake_x(), fake_x())
        return cute.compile(self, *operands, self.abi.placeholders(), CUstream(0), options=options)

    @cute.jit
    def __call__(self, x: cute.Tensor, codes: cute.Tensor, args: Any, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        x_atom, x_tensor = self._x_tma(x)
        codes_atom, codes_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            codes,
            cute.select(self._layout(ROWS, 1), mode=[0, 1]),
            (ROWS, 64),
        )
        tma = BlockE4m3Tma(
            x_tma=x_atom,
            codes_tma=codes_atom,
            x_tensor=x_tensor,
            codes_tensor=codes_tensor,
        )
        self.kernel(tma, args).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[1, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tma: BlockE4m3Tma, args: Any) -> None:
        """Multiply the tiles of a CTA, one after another; see the module."""
        thread, _, _ = cute.arch.thread_idx()
        me = Lane(thread, cute.arch.make_warp_uniform(thread // 32), thread % 32)
        smem = cutlass.memory.SmemAllocator()
        layout = self._layout(self.plan.token_block, self.plan.stages)
        shared_x = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        layout = self._layout(ROWS, self.plan.stages)
        shared_weights = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        other = smem.allocate_array(cutlass.Uint8, self.plan.other_bytes, byte_alignment=16)
        lines = Uint32(other.toint())
        first_results = lines + Uint32(self.plan.transpose_bytes)
        factors = first_results + Uint32(self.plan.first_result_bytes)
        buffers = ResultBuffers(lines, first_results, factors)
        table_at = factors + Uint32(self.plan.factor_slots * (ROWS * 4))
        full_at = smem.allocate_array(cutlass.Int64, self.plan.barriers)
        rings = self._rings(Uint32(full_at.toint()))
        if me.warp == 0:
            self._make_rings(rings, me.lane)
        walk = self._begin(table_at, args, me)

        if me.warp >= MMA_WARPS:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if me.warp == MMA_WARPS:
                self._copy(tma, shared_x, shared_weights, full_at, rings, walk, args, me.lane)
            else:
                self._clear(walk, args, me.thread - 32 * (MMA_WARPS + 1))
        else:
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            operands = self._mma_operands(shared_x, shared_weights)
            self._multiply(operands, buffers, rings, walk, args, me)

    @cute.jit
    def _copy(
        self,
        tma: BlockE4m3Tma,
        shared_x: cute.Tensor,
        shared_weights: cute.Tensor,
        full_at: cute.Pointer,
        rings: Rings,
        walk: Walk,
        args: Any,
        lane: Int32,
    ) -> None:
        """One warp: keep the ring full, tile after tile."""
        cpasync.prefetch_descriptor(tma.x_tma)
        cpasync.prefetch_descriptor(tma.codes_tma)
        boxes = self.plan.token_block // self.plan.tma_tokens
        stages_of_x = cute.make_tensor(
            shared_x.iterator, self._layout(self.plan.tma_tokens, self.plan.stages * boxes).outer
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
                # Rows after the last one are read as zeros.
                row = tile.expert * args.rows + tile.row + part * ROWS
                rows = cute.domain_offset((row, 0), tma.codes_tensor)
                codes = self._partition(
                    tma.codes_tma, shared_weights, cute.local_tile(rows, (ROWS, 64), (0, None))
                )
                for k in cutlass.range(args.stages, unroll=1):
                    stage = position.stage
                    barrier = full_at + stage
                    ptx.mbarrier_wait(rings.empty + Uint32(stage * 8), position.parity)
                    if lane == 0:
                        ptx.mbarrier_arrive_expect_tx(
                            rings.full + Uint32(stage * 8),
                            count * box_bytes + self.plan.weight_bytes,
                        )
                    cute.copy(
                        tma.codes_tma,
                        codes.source[(None, k)],
                        codes.to[(None, stage)],
                        tma_bar_ptr=barrier,
                    )
                    for box in cutlass.range(count, unroll=1):
                        cute.copy(
                            tma.x_tma,
                            x.source[(None, box, tile.input + k)],
                            x.to[(None, stage * boxes + box)],
                            tma_bar_ptr=barrier,
                        )
                    position = self._advanced(position, self.plan.stages)
            number += walk.stride

    def _load_factor(self, args: Any, tile: Tile, me: Lane) -> Any:
        """The factor of one of the tile's rows, for each thread of an MMA warpgroup."""
        return self._factor(args, tile.expert, tile.row + me.thread % ROWS)

    def _factors(self, buffers: ResultBuffers, slot: Int32, factor: Any, me: Lane) -> Uint32:
        """An MMA warpgroup: write the factors that its threads have to shared memory."""
        group = me.warp // 4
        here = buffers.factors + Uint32((group * 2 + slot % 2) * (ROWS * 4))
        ptx.store_shared_float(here + Uint32(me.thread % ROWS * 4), factor)
        cute.arch.barrier(barrier_id=_FACTORS + group, number_of_threads=128)
        return here
