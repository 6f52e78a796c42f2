"""NVFP4 product of rows sorted by expert with their experts' weights, and its SwiGLU.

``out[r, n] = sum_k x[r, k] w[e, n, k]`` for ``offsets[e] <= r < offsets[e + 1]``: the kernel of
``many``, whose tiles are those of all experts, one after another. Nothing is read by the host:

* Every block adds up the experts' numbers of tiles from ``offsets`` (they are the work of the
  kernel before, so this waits for its end) and finds the expert of a tile by bisection. An expert
  without rows has no tile.
* The tiles of an expert follow one another, the tokens of a block of rows first, so that its
  weights are read from memory once and found in the level-2 cache by its other tiles.
* A tile of tokens begins at an expert's first row or some whole tiles later, and may reach into the
  next expert's rows: those are multiplied, not stored.
* Rows after the last expert's are filled with zeros by the warps that have nothing to copy.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsv4.cute import _ptx as ptx
from dsv4.cute.sm90._codes import store_coded
from dsv4.cute.sm90._experts import (
    all_tiles,
    clear_codes,
    clear_lines,
    count_tiles,
    find_tile,
    last_row,
)
from dsv4.cute.sm90.grouped_plan import MOST_EXPERTS, GroupedPlan
from dsv4.cute.sm90.many import ManyKernel, rows_of_x

Value = Any


class GroupedKernel(GroupedPlan, ManyKernel):
    """The kernel of one configuration."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            rows_of_x(),
            *[Int64(0)] * 11,
            *[Int32(1)] * 5,
            Int64(8),
            *[Int32(1)] * 6,
            Float32(1.0),
            CUstream(0),
            options=options,
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        global_scale: Int64,
        x_at: Int64,
        token_scale: Int64,
        row_weight: Int64,
        out: Int64,
        offsets: Int64,
        codes_scale: Int64,
        block_scales: Int64,
        row_scale: Int64,
        tokens: Int32,
        experts: Int32,
        k_blocks: Int32,
        row_tiles: Int32,
        row_blocks: Int32,
        token_stride: Int64,
        scales_each: Int32,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        sixteen: Int32,
        limit: Float32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        atom, x_tiles, layout, mma = self.tools(x)
        self.kernel(
            atom, x_tiles, layout, mma, codes, scales, global_scale, x_at, token_scale, row_weight,
            out, offsets, codes_scale, block_scales, row_scale, tokens, experts, k_blocks,
            row_tiles, row_blocks, token_stride, scales_each, cut0, cut1, cut2, scale_rows,
            sixteen, limit,
        ).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[1, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        x_tiles: cute.Tensor,
        layout: cute.ComposedLayout,
        mma: cute.TiledMma,
        codes: Int64,
        scales: Int64,
        global_scale: Int64,
        x_at: Int64,
        token_scale: Int64,
        row_weight: Int64,
        out: Int64,
        offsets: Int64,
        codes_scale: Int64,
        block_scales: Int64,
        row_scale: Int64,
        tokens: Int32,
        experts: Int32,
        k_blocks: Int32,
        row_tiles: Int32,
        row_blocks: Int32,
        token_stride: Int64,
        scales_each: Int32,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        sixteen: Int32,
        limit: Float32,
    ) -> None:
        """See the module. What is not named here is as in ``ManyKernel.kernel``.

        Args:
            atom: The tensor copy of a block of X.
            x_tiles: X, ``[tokens, K]``, as the copy addresses it.
            layout: A stage of X, and all of them.
            mma: The product of 64 rows a warpgroup.
            codes: Address of the packed codes of all experts.
            scales: Address of their packed scales.
            global_scale: Address of float32 ``[experts, scales_each]``.
            x_at: Address of X.
            token_scale: Address of float32 ``[tokens]``, where ``row_scaled``.
            row_weight: Address of float32 ``[tokens]``, where ``row_weighted``.
            out: Address of ``[tokens, rows]``.
            offsets: Address of int32 ``[experts + 1]``, the first row of each and the end.
            codes_scale: Address of float32 ``[experts]``, the global scale of each expert's
                results, where ``quantized_out``; ``out`` is their codes, ``[tokens, rows / 4]``.
            block_scales: Address of their scale bytes, ``[tokens, rows / 32]``, likewise.
            row_scale: Address of their rows' global scales, float32 ``[tokens]``, likewise.
            tokens: Rows of X, all of them.
            experts: At most ``MOST_EXPERTS``.
            k_blocks: K / 64, a multiple of ``depth``.
            row_tiles: Rows of an expert's weight / 16.
            row_blocks: Those rows / those of a block, rounded up.
            token_stride: Elements between rows of X.
            scales_each: Global scales of an expert.
            cut0: First row of the second segment; ``cut1``, ``cut2`` of the third and fourth.
            cut1: See ``cut0``.
            cut2: See ``cut0``.
            scale_rows: 1 where every row has its own global scale, else 0.
            sixteen: 16, of which the compiler must not know.
            limit: The clamp's bound, where ``swiglu``.
        """
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = cutlass.memory.SmemAllocator()
        shared_x = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        turned = Uint32(smem.allocate_array(cutlass.Uint8, self.turned_bytes).toint())
        full_at = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        full = Uint32(full_at.toint())
        empty = full + 8 * self.stages
        tiles_at = Uint32(smem.allocate_array(cutlass.Int32, MOST_EXPERTS + 1).toint())
        rows_at = Uint32(smem.allocate_array(cutlass.Int32, MOST_EXPERTS + 1).toint())
        table = (tiles_at, rows_at, experts)
        cute.arch.griddepcontrol_launch_dependents()
        if warp == self.mma_warps and lane < self.stages:
            ptx.barrier_init(full + Uint32(lane * 8), 1)
            ptx.barrier_init(empty + Uint32(lane * 8), self.mma_warps)
            ptx.fence_barrier_init()
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            count_tiles(offsets, table, self.token_block, lane)
        cute.arch.sync_threads()
        order = (table, row_blocks)

        if warp >= self.mma_warps:
            cute.arch.setmaxregister_decrease(self.copy_registers)
            if warp == self.mma_warps:
                stage, parity, tile = Int32(0), Int32(1), Int32(first)
                while tile < self._total(order):
                    _, _, start, _ = self._find(tile, order)
                    tiles = cute.local_tile(
                        cute.domain_offset((start, 0), x_tiles), (self.token_block, 64), (0, None)
                    )
                    to, source = cpasync.tma_partition(
                        atom,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(shared_x, 0, 2),
                        cute.group_modes(tiles, 0, 2),
                    )
                    stage, parity = self._fill(
                        (atom, source, to),
                        (full, full_at, empty, stage, parity),
                        (Int32(0), k_blocks, lane),
                    )
                    tile += stride
            else:
                lines = (last_row(table) + first, tokens, stride)
                among = thread - 32 * (self.mma_warps + 1)
                if cutlass.const_expr(self.quantized_out):
                    room = (out, block_scales, row_scale)
                    clear_codes(room, lines, row_tiles * self.tile_outputs, among, 96)
                else:
                    clear_lines(out, lines, row_tiles * (self.tile_bytes // 16), among, 96)
        else:
            cute.arch.setmaxregister_increase(self.mma_registers)
            slice_ = mma.get_slice(thread)
            right = mma.make_fragment_B(slice_.partition_B(shared_x))
            shape = slice_.partition_shape_C((64 * self.warpgroups, self.token_block))
            sums = cute.make_rmem_tensor(shape, Float32)
            left_shape = slice_.partition_shape_A((64 * self.warpgroups, 64))
            left = [cute.make_rmem_tensor(left_shape, BFloat16) for _ in range(self.sets)]
            words = [cute.recast_tensor(one, Uint32) for one in left]
            mma.set(warpgroup.Field.ACCUMULATE, True)
            codes += lane * 16
            scales += lane // 4 * 8
            rules = (cut0, cut1, cut2, scale_rows)
            stage, parity, tile = Int32(0), Int32(0), Int32(first)
            expert, row_block, _, _ = self._find(cutlass.min(tile, self._total(order) - 1), order)
            at = (expert * row_tiles + self._safe_row(row_block, warp, row_tiles)) * k_blocks
            ahead = [self._fetch(codes, scales, at, t) for t in range(self.depth)]
            self._fall_behind(warp, k_blocks * Int32(first < self._total(order)))
            while tile < self._total(order):
                other, follows, _, _ = self._find(
                    cutlass.min(tile + stride, self._total(order) - 1), order
                )
                then = (other * row_tiles + self._safe_row(follows, warp, row_tiles)) * k_blocks
                at, ahead, stage, parity, before = self._multiply(
                    (mma, sums, left, words, right),
                    (codes, scales, at, then, ahead),
                    (full, empty, stage, parity),
                    (k_blocks, tile == first and warp < 4, lane, Uint32(sixteen)),
                )
                # Found anew, so that it need not be kept, and spilled, while multiplying.
                expert, row_block, start, count = self._find(tile, order)
                row_tile = self._row_tile(row_block, warp)
                of_expert = global_scale + Int64(expert) * scales_each * 4
                factors = self._factors(of_expert, row_tile, lane, row_tiles, rules)
                warpgroup.wait_group(0)
                self._release(empty, before, lane)
                places = (
                    turned,
                    token_scale + Int64(start) * 4,
                    out + Int64(start) * row_tiles * self.tile_bytes,
                    x_at + Int64(start) * token_stride * 2,
                    row_weight + Int64(start) * 4,
                    block_scales + Int64(start) * (row_tiles // 2),
                    codes_scale + Int64(expert) * 4,
                )
                if cutlass.const_expr(self.quantized_out):  # noqa: SIM102 - one is constant
                    if row_block == 0 and thread < cutlass.min(count, self.token_block):
                        of_all = ptx.load_global_float(places[6])
                        ptx.store_global_float(row_scale + (Int64(start) + thread) * 4, of_all)
                self._store(
                    self._together(sums, shared_x, Int32(0), thread),
                    factors,
                    places,
                    (Int32(0), row_tile, warp, lane, thread, Int32(0)),
                    (count, row_tiles, token_stride, Int32(1), k_blocks, limit),
                )
                tile += stride

    @property
    def tile_bytes(self) -> int:
        """Bytes of a token's results, or their codes, in a tile of 16 rows."""
        if self.quantized_out:
            return self.tile_outputs // 2
        return self.tile_outputs * (4 if self.float32_out else 2)

    def _total(self, order: Value) -> Value:
        """Tiles of all experts' rows and columns of results."""
        table, row_blocks = order
        return all_tiles(table) * row_blocks

    def _find(self, tile: Value, order: Value) -> Value:
        """Expert, block of rows, first row of X, and rows of X from there to the expert's end."""
        return find_tile(tile, order, self.token_block)

    def _weighted(self, values: Value, places: Value, begin: Value, tokens: Value) -> Value:
        """Outputs of SwiGLU, two tokens of each tile of 8, times what their tokens weigh."""
        if not self.row_weighted:
            return values
        weighted = []
        for n, pair in enumerate(values):
            row = []
            for i, value in enumerate(pair):
                token = cutlass.min(begin + (n * 8 + i), tokens - 1)
                row.append(value * ptx.load_global_float(places[4] + Int64(token) * 4))
            weighted.append(row)
        return weighted

    @cute.jit
    def _write_eight(self, at: Value, places: Value, where: Value, there: Value) -> None:
        """As there, or as codes, of which neighbouring lanes have a block."""
        token, row, rows = where
        if cutlass.const_expr(self.quantized_out):
            # Of a line that is not there, whatever follows in shared memory.
            words, scale = ptx.load_shared(at, 4), ptx.load_global_float(places[6])
            store_coded(words, (places[2], places[5], scale), where, there)
        elif there:
            words = ptx.load_shared(at, 4)
            ptx.store_global4(places[2] + (Int64(token) * rows + row) * 2, words)
