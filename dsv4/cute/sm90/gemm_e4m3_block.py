"""GEMM with FP8 arithmetic and FP8 weights, one scale per 128 x 128 block, for large M.

It has the tiles, MMA warps and results of ``gemm_e4m3``, with these differences.

Weights. A stage is 128 columns of X and of 128 rows of the weight, E4M3 codes as they are stored;
TMA copies and swizzles both. Nothing is dequantized, so there is one ring, no warpgroup between
copies and MMAs, and columns of X stand in their order.

Scales. A tile's 128 rows lie in one row of blocks. The sums of a stage are multiplied by the
token's scale times the block's, which a lane loads from global memory a stage earlier.

Dependencies. The weights may be results of the preceding kernel, so nothing is read before
griddepcontrol.wait.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from dsv4.cute.device import ptx
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.device.tile_walk import TileOrder, Walk
from dsv4.cute.sm90.e4m3_results import MMA_WARPS, Lane, ResultBuffers, Tile, Values
from dsv4.cute.sm90.e4m3_tiles import E4m3Tiles, Position, Rings, ScaleAddresses
from dsv4.cute.sm90.gemm_e4m3_plan import (
    BLOCK_E4M3_ABI,
    ROWS,
    BlockE4m3Args,
    BlockE4m3Plan,
    BlockE4m3Tma,
)
from dsv4.cute.sm90.wgmma_copies import fake_x


class BlockE4m3Kernel(E4m3Tiles):
    """The kernel of one configuration."""

    abi = BLOCK_E4M3_ABI
    plan: BlockE4m3Plan  # type: ignore[assignment]

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        operands = (fake_x(), fake_x())
        return cute.compile(self, *operands, self.abi.placeholders(), CUstream(0), options=options)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, codes: cute.Tensor, args: BlockE4m3Args, stream: CUstream
    ) -> None:
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
    def kernel(self, tma: BlockE4m3Tma, args: BlockE4m3Args) -> None:
        """Multiply the tiles of a CTA, one after another; see the module."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        me = Lane(thread, cute.arch.make_warp_uniform(thread // 32), thread % 32)
        order = TileOrder(args.token_tiles, args.token_span, args.row_blocks)
        walk = Walk(Int32(block), Int32(grid), args.token_tiles * args.row_blocks, order)
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
        full_at = smem.allocate_array(cutlass.Int64, self.plan.barriers)
        rings = self._rings(Uint32(full_at.toint()))
        cute.arch.griddepcontrol_launch_dependents()
        if me.warp == 0:
            self._make_rings(rings, me.lane)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        if me.warp >= MMA_WARPS:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if me.warp == MMA_WARPS:
                self._copy(tma, shared_x, shared_weights, full_at, rings, walk, args, me.lane)
        else:
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            operands = self._mma_operands(shared_x, shared_weights)
            buffers = ResultBuffers(lines, Uint32(0), Uint32(0))
            self._multiply(operands, buffers, rings, walk, args, me)

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

    @cute.jit
    def _copy(
        self,
        tma: BlockE4m3Tma,
        shared_x: cute.Tensor,
        shared_weights: cute.Tensor,
        full_at: cute.Pointer,
        rings: Rings,
        walk: Walk,
        args: BlockE4m3Args,
        lane: Int32,
    ) -> None:
        """One warp: keep the ring full, tile after tile."""
        cpasync.prefetch_descriptor(tma.x_tma)
        cpasync.prefetch_descriptor(tma.codes_tma)
        x_tiles = cute.local_tile(tma.x_tensor, (self.plan.tma_tokens, 64), (None, None))
        x = self._partition(tma.x_tma, shared_x, x_tiles)
        codes_tiles = cute.local_tile(tma.codes_tensor, (ROWS, 64), (None, None))
        codes = self._partition(tma.codes_tma, shared_weights, codes_tiles)
        number, position = walk.first, Position(Int32(0), Int32(1))
        while number < walk.total:
            tile = self._tile(number, walk, args)
            token_tile, row_block = tile.token // self.plan.token_block, tile.row // ROWS
            for k in cutlass.range(args.stages, unroll=1):
                stage = position.stage
                ptx.mbarrier_wait(rings.empty + Uint32(stage * 8), position.parity)
                if lane == 0:
                    ptx.mbarrier_arrive_expect_tx(
                        rings.full + Uint32(stage * 8), self.plan.x_bytes + self.plan.weight_bytes
                    )
                cute.copy(
                    tma.codes_tma,
                    codes.source[(None, row_block, k)],
                    codes.to[(None, stage)],
                    tma_bar_ptr=full_at + stage,
                )
                cute.copy(
                    tma.x_tma,
                    x.source[(None, token_tile, tile.input + k)],
                    x.to[(None, stage)],
                    tma_bar_ptr=full_at + stage,
                )
                position = self._advanced(position, self.plan.stages)
            number += walk.stride

    def _scale_addresses(self, args: BlockE4m3Args, tile: Tile, first: Int32) -> ScaleAddresses:
        """Where the lane's scales are; its first token is ``first``."""
        width = 1 if self.plan.e8m0_scales else 4
        addresses = super()._scale_addresses(args, tile, first)
        row = Int64(tile.row // ROWS)
        return addresses._replace(weight=args.scales + row * args.stages * width)

    def _scales(self, addresses: ScaleAddresses, k: Int32) -> list[Float32]:
        """What sums of stage ``k`` are multiplied by, for each of the lane's tokens."""
        if self.plan.e8m0_scales:
            of_weight = ptx.e8m0_to_float(ptx.load_global_byte(addresses.weight + Int64(k)))
        else:
            of_weight = ptx.load_global_float(addresses.weight + Int64(k) * 4)
        return [scale * of_weight for scale in super()._scales(addresses, k)]

    def _values(
        self, sums: cute.Tensor, first: int, count: int, factors: Uint32, args: Any, lane: Int32
    ) -> Values:
        """Sums of ``count`` tiles of 8 rows from ``first`` on, which hold all scales."""
        return [[Float32(sums[n * 4 + j]) for j in range(4)] for n in range(first, first + count)]
