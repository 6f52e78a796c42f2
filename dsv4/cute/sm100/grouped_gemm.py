"""NVFP4 GEMM of rows sorted by expert with their experts' weights, on Blackwell's tensor cores.

``out[r, n] = sum_k x[r, k] w[e, n, k]`` for ``offsets[e] <= r < offsets[e + 1]``, and its SwiGLU:
the kernel of ``gemm`` for the tiles of all experts, one after another. The host reads nothing:
every CTA counts the experts' tiles from ``offsets`` and finds a tile's expert by bisection
(``device.expert_scheduler``). An expert without rows has no tile.

Tiling and ownership: as in ``gemm``, but a tile begins at any row of X, and ends with its expert's
rows: rows behind them are the next expert's, or zeros; they are multiplied, not stored. Two more
warps:

* warp 6, the scale warp: block scales of X. It also counts the tiles.
* warp 7, the clear warp: zeros for rows of no expert and for padding of swizzled scales.

Pipeline. Codes and the weights' scales arrive by TMA. Scales of X cannot: the MMA reads row ``r``
of a tile in TMEM lane ``r % 32``, whereas a tile of swizzled scales begins at a multiple of 128
rows. So scales of X are linear, and the scale warp transposes those of a stage in its registers
(``grouped_gemm_scales``). Of two CTAs each does so for all tokens of the tile, because the MMA
reads all tokens' scales in each.

Barriers: as in ``gemm``; ``full`` of a stage has the arrival of each CTA's scale warp, too. Before
anything is read, all threads wait for the preceding kernel, which may write the offsets.

Numerics: as in ``gemm``. The bits of a row depend on the plan, not on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import Vector
from dsv4.cute.device.expert_scheduler import (
    ExpertTable,
    GroupedTileOrder,
    Lines,
    QuantizedLines,
    clear_lines,
    clear_padding,
    clear_quantized_lines,
    count_tiles,
    end_row,
    find_tile,
    padding_before,
    total_tiles,
)
from dsv4.cute.device.quantize import BlockScales, QuantizedOutput, store_quantized
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.sm100 import tcgen05
from dsv4.cute.sm100.gemm import Tcgen05Kernel
from dsv4.cute.sm100.gemm_copies import fake_codes, fake_scales
from dsv4.cute.sm100.gemm_epilogue import ExpertOutput, Halves, Output, Tile
from dsv4.cute.sm100.gemm_pipeline import Barriers, Grid, RingPosition, SharedMemory, Thread
from dsv4.cute.sm100.gemm_plan import CHUNK_TOKENS, COPY_WARP, MMA_WARP, ROWS
from dsv4.cute.sm100.grouped_gemm_plan import (
    CLEAR_WARP,
    GROUPED_TCGEN05_ABI,
    SCALE_WARP,
    GroupedTcgen05Args,
    GroupedTcgen05Plan,
    GroupedTcgen05Tma,
)
from dsv4.cute.sm100.grouped_gemm_scales import GroupedTcgen05Scales


class GroupedTcgen05Kernel(GroupedTcgen05Scales, Tcgen05Kernel):
    """The kernel of one configuration."""

    abi = GROUPED_TCGEN05_ABI
    plan: GroupedTcgen05Plan

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        operands = (fake_codes(), fake_scales(), fake_codes())
        return cute.compile(self, *operands, self.abi.placeholders(), CUstream(0), options=options)

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        x_codes: cute.Tensor,
        args: GroupedTcgen05Args,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        tma = GroupedTcgen05Tma(
            row_codes=self._code_operand(codes, ROWS),
            row_scales=self._scale_operand(scales, (1, 4)),
            token_codes=self._code_operand(x_codes, self.plan.cta_tokens),
        )
        self._launch(self.kernel(tma, args), stream)

    @cute.kernel
    def kernel(self, tma: GroupedTcgen05Tma, args: GroupedTcgen05Args) -> None:  # type: ignore[override]
        """Compute the tiles of a cluster, one after another; see the module.

        Args:
            tma: The operands.
            args: The scalars.
        """
        me, grid = self._thread_and_grid()
        smem = cutlass.memory.SmemAllocator()
        memory = self._allocate(smem)
        stages_at, barriers = Uint32(memory.stages.toint()), self._barriers(memory)
        table = ExpertTable(
            tiles=Uint32(smem.allocate_array(Int32, MOST_EXPERTS + 1).toint()),
            rows=Uint32(smem.allocate_array(Int32, MOST_EXPERTS + 1).toint()),
            experts=args.experts,
        )
        # At once: the next kernel's CTAs start where SMs are free, and wait for this kernel's end
        # before they read its results.
        cute.arch.griddepcontrol_launch_dependents()

        if me.warp == COPY_WARP:
            for operand in tma:
                cpasync.prefetch_descriptor(operand.atom)
            self._make_barriers(barriers, me.lane)
        if me.warp == 0:
            tcgen05.allocate(memory.tmem, self.plan.tmem_columns, self.plan.cta_group)
        cute.arch.griddepcontrol_wait()
        if me.warp == SCALE_WARP:
            count_tiles(args.offsets, table, self.plan.token_block, me.lane)
        tcgen05.fence_before_sync()
        self._sync_cluster()
        tcgen05.fence_after_sync()
        tmem = Uint32(ptx.load_shared_int(memory.tmem))
        order = GroupedTileOrder(table, args.row_blocks)
        walk = Walk(*self._clusters(grid), total_tiles(table) * args.row_blocks, order)

        if me.warp == COPY_WARP:
            self._copy_sorted(tma, memory, barriers, walk, args, me)
        elif me.warp == MMA_WARP:
            if me.rank == 0:
                self._multiply(stages_at, barriers, tmem, walk, args.k_stages)
        elif me.warp == SCALE_WARP:
            self._fill_scales(args.x_scales, args.k_stages, stages_at, barriers, walk, me.lane)
        elif me.warp == CLEAR_WARP:
            self._clear(args, table, grid, me.lane)
        else:
            output = Output(
                global_scale=args.global_scale,
                token_scale=args.token_scale,
                token_scale_stride=Int32(1),
                out=args.out,
                lines=memory.lines,
                experts=ExpertOutput(
                    row_weight=args.row_weight,
                    result_scale=args.result_scale,
                    block_scales=BlockScales(args.block_scales),
                    row_scale=args.row_scale,
                ),
            )
            self._store_tiles(barriers, stages_at, tmem, walk, output, args, me)
        tcgen05.fence_before_sync()
        self._sync_cluster()
        tcgen05.fence_after_sync()
        if me.warp == 0:
            tcgen05.free(tmem, self.plan.tmem_columns, self.plan.cta_group)

    # The copy warp.

    @cute.jit
    def _copy_sorted(
        self,
        tma: GroupedTcgen05Tma,
        memory: SharedMemory,
        barriers: Barriers,
        walk: Walk,
        args: GroupedTcgen05Args,
        me: Thread,
    ) -> None:
        """Copy warp: keep the ring full of codes and of the weights' scales, tile after tile."""
        position, index = RingPosition(Int32(0), Int32(1)), Int32(walk.first)
        while index < walk.total:
            tile = find_tile(index, walk.order, self.plan.token_block)
            for k in cutlass.range(args.k_stages, unroll=1):
                stage = position.stage
                ptx.mbarrier_wait(barriers.empty + Uint32(stage * 8), position.parity)
                self._expect(barriers.full, stage, me)
                rows = self.plan.expert_row_tile(tile.row_block, me.rank, k, tile.expert, args.rows)
                self._copy_rows(tma, memory, stage, rows)
                to = memory.stages + (stage * self.plan.stage_bytes + self.plan.row_code_bytes)
                codes = self.plan.sorted_codes(tile.first_row, me.rank, k)
                tokens, barrier = self.plan.cta_tokens, memory.barriers + stage
                self._copy_codes(tma.token_codes, codes, to, tokens, barrier)
                position = self._next(position)
            index += walk.stride
        self._drain(barriers.empty, position)

    # The clear warp.

    @cute.jit
    def _clear(self, args: GroupedTcgen05Args, table: ExpertTable, grid: Grid, lane: Int32) -> None:
        """Clear warp: write zeros to rows of no expert, every ``grid.ctas``-th."""
        lines = Lines(end_row(table) + grid.cta, args.tokens, grid.ctas)
        if cutlass.const_expr(self.plan.quantized_out):
            columns = args.rows // 16 * self.plan.tile_outputs
            linear = None if self.plan.swizzled_out else args.block_scales
            out = QuantizedLines(args.out, linear, args.row_scale)
            clear_quantized_lines(out, lines, columns, lane, 32)
            if cutlass.const_expr(self.plan.swizzled_out):
                scales, cta = args.block_scales, Int32(grid.cta)
                clear_padding(scales, table, cta, grid.ctas, args.tokens, columns, lane, 32)
        else:
            vectors = args.rows // 16 * (self.plan.tile_bytes // 16)
            clear_lines(args.out, lines, vectors, lane, 32)

    # The MMA warp.

    def _scale_shift(self, tile: Int32, walk: Walk) -> Int32:
        """0: the scales in a stage begin with those of the tile's first row."""
        return Int32(0)

    # The epilogue warps.

    def _tile(  # type: ignore[override]
        self, index: Int32, walk: Walk, output: Output, args: GroupedTcgen05Args
    ) -> Tile:
        """The ``index``-th tile of all clusters; tokens are counted from its first one."""
        tile = find_tile(index, walk.order, self.plan.token_block)
        start, padded_row = Int64(tile.first_row), None
        if self.plan.swizzled_out:
            lane = cute.arch.thread_idx()[0] % 32
            padded_row = tile.first_row + padding_before(walk.order.table, tile.expert, lane)
        experts = _experts(output)
        moved = Output(
            global_scale=output.global_scale + Int64(tile.expert) * args.expert_scales * 4,
            token_scale=output.token_scale + start * 4,
            token_scale_stride=output.token_scale_stride,
            out=output.out + start * (args.rows // 16) * self.plan.tile_bytes,
            lines=output.lines,
            experts=ExpertOutput(
                row_weight=experts.row_weight + start * 4,
                result_scale=experts.result_scale + Int64(tile.expert) * 4,
                block_scales=self._block_scales(args, start, padded_row),
                row_scale=experts.row_scale + start * 4,
            ),
        )
        return Tile(tile.row_block, Int32(0), tile.rows, moved)

    def _block_scales(
        self, args: GroupedTcgen05Args, row: Int64, padded_row: Int32 | None
    ) -> BlockScales:
        """Block scales from ``row`` on; swizzled ones have ``padded_row``."""
        if padded_row is None:
            return BlockScales(args.block_scales + row * (args.rows // 32))
        return BlockScales(args.block_scales, padded_row)

    @cute.jit
    def _before_results(self, tile: Tile, me: Thread) -> None:
        """Store global scales of quantized rows, in the tile of the expert's first rows alone."""
        if cutlass.const_expr(self.plan.quantized_out):
            scale = ptx.load_global_float(_experts(tile.output).result_scale)
            for i in cutlass.range_constexpr(-(-self.plan.token_block // 128)):
                token = me.thread + 128 * i
                exists = token < cutlass.min(tile.tokens, self.plan.token_block)
                if tile.row_block + me.rank == 0 and exists:
                    ptx.store_global_float(
                        _experts(tile.output).row_scale + Int64(token) * 4, scale
                    )

    def _row_weights(self, tile: Tile, token: Int32) -> Sequence[Float32] | None:
        """Weights of the lane's two tokens in each of a chunk's tiles of 8."""
        if not self.plan.row_weighted:
            return None
        weight, count = _experts(tile.output).row_weight, CHUNK_TOKENS // 8
        return self._token_values(weight, Int32(1), token, tile.tokens, count)

    def _weighted(self, values: Halves, weights: Sequence[Float32] | None) -> Halves:
        """Outputs of SwiGLU times the weights of their tokens."""
        if weights is None:
            return values
        return [
            [[pair[i] * weights[2 * n + i] for i in range(2)] for n, pair in enumerate(half)]
            for half in values
        ]

    def _store_eight(
        self, address: Uint32, output: Output, vector: Vector, exists: Boolean
    ) -> None:
        """All lanes: as in a GEMM, or as codes, of which neighbouring lanes have a block."""
        if self.plan.quantized_out:
            words = ptx.load_shared(address, 4)
            experts = _experts(output)
            scale = ptx.load_global_float(experts.result_scale)
            quantized = QuantizedOutput(output.out, experts.block_scales, scale)
            store_quantized(words, quantized, vector, exists)
        else:
            Tcgen05Kernel._store_eight(self, address, output, vector, exists)


def _experts(output: Output) -> ExpertOutput:
    assert output.experts is not None
    return output.experts
