"""NVFP4 product of rows sorted by expert with their experts' weights on Blackwell's tensor cores.

``out[r, n] = sum_k x[r, k] w[e, n, k]`` for ``offsets[e] <= r < offsets[e + 1]``, and its SwiGLU:
the kernel of ``dense``, whose tiles are those of all experts, one after another. Nothing is read by
the host: every block counts the experts' tiles from ``offsets`` and finds a tile's expert by
bisection, as Hopper's ``grouped`` does. An expert without rows has no tile.

* The weights' scales are swizzled expert by expert, each from a border of 128 rows. Rows of a tile
  beyond an expert's last are the next one's, or zeros: they are multiplied, not stored.
* A tile begins at any row of X. Codes come by tensor copies all the same, but not scales: the
  product wants row ``r`` of a tile in lane ``r % 32`` of tensor memory. So scales of X are linear,
  and a warp turns those of a stage in its registers: it loads 16 bytes of a row, and of four rows
  that are 32 apart writes 16 to each 64 columns' scales. A stage is full when the copies have come
  and this warp has written. Rows of the next expert have scales 0 here.
* Rows after the last expert's are filled with zeros by a warp that has nothing else to do.

The bits of a row depend on the plan, not on the other rows.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32
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
from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.sm100 import _tcgen05 as tcgen05
from dsv4.cute.sm100.dense import DenseKernel, any_codes, any_scales
from dsv4.cute.sm100.dense_plan import ATOM, CHUNK, COPY_WARP, MULTIPLY_WARP, ROWS
from dsv4.cute.sm100.grouped_plan import AHEAD, CLEAR_WARP, SCALE_BYTES, TURN_WARP, GroupedPlan

Value = Any


class GroupedKernel(GroupedPlan, DenseKernel):
    """The kernel of one configuration."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            any_codes(),
            any_scales(),
            any_codes(),
            *[Int64(0)] * 9,
            *[Int32(1)] * 10,
            Float32(1.0),
            CUstream(0),
            options=options,
        )

    @cute.jit
    def __call__(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        x_codes: cute.Tensor,
        x_scales: Int64,
        global_scale: Int64,
        token_scale: Int64,
        row_weight: Int64,
        out: Int64,
        offsets: Int64,
        codes_scale: Int64,
        block_scales: Int64,
        row_scale: Int64,
        tokens: Int32,
        experts: Int32,
        steps: Int32,
        rows: Int32,
        row_blocks: Int32,
        scales_each: Int32,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        limit: Float32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        copies = []
        for atom, places in (
            self._code_copy(codes, ROWS),
            self._scale_copy(scales, 1, 4),
            self._code_copy(x_codes, self.own_tokens),
        ):
            copies += [atom, places]
        self.kernel(
            *copies, x_scales, global_scale, token_scale, row_weight, out, offsets, codes_scale,
            block_scales, row_scale, tokens, experts, steps, rows, row_blocks, scales_each, cut0,
            cut1, cut2, scale_rows, limit,
        ).launch(
            grid=[self.blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.blocks, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        row_codes: cute.CopyAtom,
        row_codes_at: cute.Tensor,
        row_scales: cute.CopyAtom,
        row_scales_at: cute.Tensor,
        token_codes: cute.CopyAtom,
        token_codes_at: cute.Tensor,
        x_scales: Int64,
        global_scale: Int64,
        token_scale: Int64,
        row_weight: Int64,
        out: Int64,
        offsets: Int64,
        codes_scale: Int64,
        block_scales: Int64,
        row_scale: Int64,
        tokens: Int32,
        experts: Int32,
        steps: Int32,
        rows: Int32,
        row_blocks: Int32,
        scales_each: Int32,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        limit: Float32,
    ) -> None:
        """See the module. What is not named here is as in ``DenseKernel.kernel``.

        Args:
            row_codes: The tensor copy of codes of the weights, ``[experts rows, K / 2]``.
            row_codes_at: The codes as it addresses them.
            row_scales: That of their scales, ``[experts ceil(rows / 128), K / 64, 512 bytes]``.
            row_scales_at: The scales as it addresses them.
            token_codes: The tensor copy of codes of X, ``[tokens, K / 2]``.
            token_codes_at: The codes as it addresses them.
            x_scales: Address of its scales, ``[tokens, K / 16]``.
            global_scale: Address of float32 ``[experts, scales_each]``.
            token_scale: Address of float32 ``[tokens]``.
            row_weight: Address of float32 ``[tokens]``, where ``row_weighted``.
            out: Address of ``[tokens, rows]``, or of half as many columns.
            offsets: Address of int32 ``[experts + 1]``, the first row of each and the end.
            codes_scale: Address of float32 ``[experts]``, the global scale of each expert's
                results, where ``quantized_out``; ``out`` is their codes, ``[tokens, rows / 4]``.
            block_scales: Address of their scale bytes, ``[tokens, rows / 32]`` or swizzled by
                expert, likewise.
            row_scale: Address of their rows' global scales, float32 ``[tokens]``, likewise.
            tokens: Rows of X, all of them, at least 1.
            experts: At most ``MOST_EXPERTS``.
            steps: K / 256.
            rows: Of an expert's weight, a multiple of 16.
            row_blocks: Those rows / those of a tile, rounded up.
            scales_each: Global scales of an expert.
            cut0: First row of the second segment; ``cut1``, ``cut2`` of the third and fourth.
            cut1: See ``cut0``.
            cut2: See ``cut0``.
            scale_rows: 1 where every row has its own global scale, else 0.
            limit: The clamp's bound, where ``swiglu``.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank = block % self.pair
        smem = cutlass.memory.SmemAllocator()
        room, turned, barriers_at, slot = self._rooms(smem)
        full, empty, sums_full, sums_empty = self._barriers(Uint32(barriers_at.toint()))
        tiles_at = Uint32(smem.allocate_array(Int32, MOST_EXPERTS + 1).toint())
        rows_at = Uint32(smem.allocate_array(Int32, MOST_EXPERTS + 1).toint())
        table = ExpertTable(tiles_at, rows_at, experts)
        cute.arch.griddepcontrol_launch_dependents()

        if warp == COPY_WARP:
            for atom in (row_codes, row_scales, token_codes):
                cpasync.prefetch_descriptor(atom)
            self._make_barriers(full, lane)
        if warp == 0:
            tcgen05.allocate(slot, self.tensor_columns, self.pair)
        cute.arch.griddepcontrol_wait()
        if warp == TURN_WARP:
            count_tiles(offsets, table, self.token_block, lane)
        tcgen05.before_arrival()
        self._meet()
        tcgen05.after_wait()
        memory = Uint32(ptx.load_shared_int(slot))
        order = GroupedTileOrder(table, row_blocks)
        tiles = (block // self.blocks, grid // self.blocks, total_tiles(table) * row_blocks)

        if warp == COPY_WARP:
            copies = (
                (row_codes, row_codes_at, row_scales, row_scales_at),
                (token_codes, token_codes_at),
            )
            ring = (room, barriers_at, full, empty)
            self._copy_sorted(copies, ring, tiles, order, (steps, rows, rank, lane))
        elif warp == MULTIPLY_WARP:
            if rank == 0:
                waits = (full, empty, sums_full, sums_empty)
                self._multiply(Uint32(room.toint()), waits, memory, tiles, order, steps)
        elif warp == TURN_WARP:
            self._turn_scales(
                x_scales, (Uint32(room.toint()), full, empty), tiles, order, (steps, lane)
            )
        elif warp == CLEAR_WARP:
            lines = Lines(end_row(table) + block, tokens, grid)
            if cutlass.const_expr(self.quantized_out):
                columns = rows // 16 * self.tile_outputs
                linear = None if self.swizzled_out else block_scales
                results = QuantizedLines(out, linear, row_scale)
                clear_quantized_lines(results, lines, columns, lane, 32)
                if cutlass.const_expr(self.swizzled_out):
                    cta = Int32(block)
                    clear_padding(block_scales, table, cta, grid, tokens, columns, lane, 32)
            else:
                clear_lines(out, lines, rows // 16 * (self.tile_bytes // 16), lane, 32)
        else:
            places = (
                global_scale,
                token_scale,
                Int32(1),
                out,
                turned,
                row_weight,
                codes_scale,
                block_scales,
                row_scale,
            )
            self._results(
                (sums_full, sums_empty, memory, Uint32(room.toint())),
                places,
                tiles,
                order,
                (tokens, rows, limit, scales_each),
                (cut0, cut1, cut2, scale_rows),
                (rank, Int32(0), warp, lane, thread),
            )
        tcgen05.before_arrival()
        self._meet()
        tcgen05.after_wait()
        if warp == 0:
            tcgen05.free(memory, self.tensor_columns, self.pair)

    # The warp that copies.

    @cute.jit
    def _copy_sorted(
        self, copies: Value, ring: Value, tiles: Value, order: Value, sizes: Value
    ) -> None:
        """Keep the ring full of codes and the weights' scales, and wait until all are read."""
        weight, x = copies
        room, barriers_at, full, empty = ring
        first, stride, total = tiles
        steps, rows, rank, lane = sizes
        stage, parity, tile = Int32(0), Int32(1), Int32(first)
        while tile < total:
            expert, row_block, start, _ = find_tile(tile, order, self.token_block)
            for k in cutlass.range(steps, unroll=1):
                ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
                self._expect(full, stage, rank, lane)
                at = self.expert_place(row_block, rank, k, expert, rows)
                self._copy_rows(weight, (room, barriers_at, stage), at)
                to = room + (stage * self.stage_bytes + self.row_code_bytes)
                at = self.sorted_place(start, rank, k)
                self._copy_codes(x, at, to, self.own_tokens, barriers_at + stage)
                stage, parity = self._next(stage, parity)
            tile += stride
        self._drain(empty, stage, parity)

    # The warp that turns scales of X.

    @cute.jit
    def _turn_scales(
        self, scales: Value, ring: Value, tiles: Value, order: Value, sizes: Value
    ) -> None:
        """Keep the ring full of the scales of X, those of some stages asked for at a time."""
        room, full, empty = ring
        first, stride, total = tiles
        steps, lane = sizes
        stage, parity, tile = Int32(0), Int32(1), Int32(first)
        while tile < total:
            _, _, start, count = find_tile(tile, order, self.token_block)
            at = scales + Int64(start + lane) * steps * SCALE_BYTES
            for k in cutlass.range(0, steps, AHEAD, unroll=1):
                found = [self._load_scales(at, count, (k, i, steps), lane) for i in range(AHEAD)]
                for i in cutlass.range_constexpr(AHEAD):
                    if k + i < steps:
                        ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
                        self._store_scales(found[i], room + Uint32(stage * self.stage_bytes), lane)
                        self._announce(full + Uint32(stage * 8), lane)
                        stage, parity = self._next(stage, parity)
            tile += stride

    def _load_scales(self, at: Value, count: Value, which: Value, lane: Value) -> Value:
        """Of rows ``lane``, ``lane + 32`` and so on 16 bytes each; zeros of what is not there."""
        k, i, steps = which
        found = []
        for n in range(self.token_block // 32):
            there = Int32(lane + 32 * n < count) & Int32(k + i < steps)
            row = at + Int64(32 * n * SCALE_BYTES) * steps + Int64(k) * SCALE_BYTES
            found.append(ptx.load_global_or_zero(row, 4, there, i * SCALE_BYTES))
        return found

    def _store_scales(self, found: Value, room: Value, lane: Value) -> None:
        """The scales of a stage, 512 bytes of 128 rows and 64 columns after another."""
        codes = self.row_code_bytes + self.token_code_bytes
        at = room + Uint32(codes + self.row_scale_bytes) + Uint32(lane * 16)
        nothing = [Uint32(0)] * 4
        for tile in range(self.scale_tiles):
            rows = (found[4 * tile : 4 * tile + 4] + [nothing] * 4)[:4]
            for block in range(4):
                words = [row[block] for row in rows]
                ptx.store_shared4(at, words, (tile * 4 + block) * ATOM)

    @cute.jit
    def _announce(self, barrier: Value, lane: Value) -> None:
        """What this warp wrote is there for the tensor core: the first block is told."""
        ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            if cutlass.const_expr(self.pair > 1):
                tcgen05.arrive_first(barrier)
            else:
                ptx.mbarrier_arrive(barrier)

    # The warp that multiplies.

    def _shift(self, tile: Value, order: Value) -> Value:
        """The scales of a tile begin with its first token's."""
        return Int32(0)

    # The warps that store results.

    def _of_tile(self, tile: Value, order: Value, places: Value, sizes: Value) -> Value:
        """Tokens are counted from the tile's first, and so is where theirs lies."""
        _, rows, _, scales_each = sizes
        of_experts, of_tokens, one, out, turned, weight, *of_codes = places
        codes_scale, block_scales, row_scale = of_codes
        expert, row_block, first, count = find_tile(tile, order, self.token_block)
        start, padded = Int64(first), first
        if self.swizzled_out:
            lane = cute.arch.thread_idx()[0] % 32
            padded = first + padding_before(order.table, expert, lane)
        at = (
            of_experts + Int64(expert) * scales_each * 4,
            of_tokens + start * 4,
            one,
            out + start * (rows // 16) * self.tile_bytes,
            turned,
            weight + start * 4,
            codes_scale + Int64(expert) * 4,
            BlockScales(block_scales, padded)
            if self.swizzled_out
            else BlockScales(block_scales + start * (rows // 32)),
            row_scale + start * 4,
        )
        return row_block, Int32(0), count, at

    @cute.jit
    def _before_results(self, places: Value, where: Value) -> None:
        """The global scale of quantised rows, by the tile of an expert's first rows of weights."""
        if cutlass.const_expr(self.quantized_out):
            row_block, rank, tokens, thread = where
            of_all = ptx.load_global_float(places[6])
            for i in cutlass.range_constexpr(-(-self.token_block // 128)):
                token = thread + 128 * i
                there = token < cutlass.min(tokens, self.token_block)
                if row_block + rank == 0 and there:
                    ptx.store_global_float(places[8] + Int64(token) * 4, of_all)

    def _row_weights(self, places: Value, begin: Value, tokens: Value) -> Value:
        """Of two tokens of each tile of 8."""
        if not self.row_weighted:
            return None
        return self._token_scales((places[5], Int32(1)), begin, CHUNK // 8, tokens)

    def _weighted(self, values: Value, weights: Value) -> Value:
        """Outputs of SwiGLU times what their tokens weigh."""
        if not self.row_weighted:
            return values
        return [
            [[pair[i] * weights[2 * n + i] for i in range(2)] for n, pair in enumerate(half)]
            for half in values
        ]

    def _write_eight(self, at: Value, places: Value, where: Value, there: Value) -> None:
        """As there, or as codes, of which neighbouring lanes have a block."""
        if self.quantized_out:
            words, scale = ptx.load_shared(at, 4), ptx.load_global_float(places[6])
            store_quantized(
                words, QuantizedOutput(places[3], places[7], scale), Vector(*where), there
            )
        else:
            DenseKernel._write_eight(self, at, places, where, there)
