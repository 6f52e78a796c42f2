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

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from dsv4.cute.device import ptx
from dsv4.cute.sm90.e4m3_converted_plan import CONVERTED_E4M3_ABI
from dsv4.cute.sm90.e4m3_copies import E4m3Copies
from dsv4.cute.sm90.e4m3_results import MMA_WARPS, Lane, ResultBuffers, Tile
from dsv4.cute.sm90.e4m3_walks import DenseTiles
from dsv4.cute.sm90.gemm_e4m3_plan import ROWS, BlockE4m3Tma
from dsv4.cute.sm90.wgmma_copies import CopyPair, fake_x

_FACTORS = 1  # first named barrier; one per MMA warpgroup signals that its factors are written


class ConvertedE4m3Kernel(DenseTiles, E4m3Copies):
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
        self._launch(tma, args, stream)

    @cute.kernel
    def kernel(self, tma: BlockE4m3Tma, args: Any) -> None:
        """Multiply the tiles of a CTA, one after another; see the module."""
        me, memory = self._lane(), self._memory()
        if me.warp == 0:
            self._make_rings(memory.rings, me.lane)
        walk = self._begin(memory.table, args, me)

        if me.warp >= MMA_WARPS:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if me.warp == MMA_WARPS:
                self._copy(tma, memory, walk, args, me.lane)
            else:
                self._clear(walk, args, me.thread - 32 * (MMA_WARPS + 1))
        else:
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            operands = self._mma_operands(memory.x, memory.weights)
            self._multiply(operands, memory.buffers, memory.rings, walk, args, me)

    def _tile_weights(
        self, tma: BlockE4m3Tma, to: cute.Tensor, args: Any, tile: Tile, part: int
    ) -> CopyPair:
        """The TMA copies of E4M3 codes of 128 rows of a tile."""
        # Rows after the last one are read as zeros.
        row = tile.expert * args.rows + tile.row + part * ROWS
        rows = cute.domain_offset((row, 0), tma.codes_tensor)
        return self._partition(tma.codes_tma, to, cute.local_tile(rows, (ROWS, 64), (0, None)))

    def _copy_weights(  # type: ignore[override]
        self, tma: BlockE4m3Tma, weights: CopyPair, k: Int32, stage: Int32, barrier: cute.Pointer
    ) -> None:
        """Copy stage ``k`` of K to a stage of the ring."""
        to = weights.to[(None, stage)]
        cute.copy(tma.codes_tma, weights.source[(None, k)], to, tma_bar_ptr=barrier)

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
