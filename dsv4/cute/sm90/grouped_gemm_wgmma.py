"""NVFP4 product of rows sorted by expert with their experts' weights, and its SwiGLU.

``out[r, n] = sum_k x[r, k] w[e, n, k]`` for ``offsets[e] <= r < offsets[e + 1]``, as ``gemm_wgmma``
multiplies and stores, but:

* Every block adds up the experts' numbers of tiles from ``offsets`` (they are the work of the
  kernel before, so this waits for its end). The copying warp finds the expert of each tile and
  tells the others by a slot of shared memory. An expert without rows has no tile.
* The tiles of an expert follow one another, the tokens of a block of rows first, so that its
  weights are read from memory once and found in the level-2 cache by its other tiles.
* A tile of tokens begins at an expert's first row or some whole tiles later, and may reach into the
  next expert's rows: those are multiplied, not stored. Where the plan has narrower products, a tile
  takes the first that its expert's rows fit.
* Rows after the last expert's are filled with zeros by the warps that have nothing to copy.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import Vector
from dsv4.cute.device.expert_scheduler import (
    ExpertTable,
    GroupedTileOrder,
    Lines,
    QuantizedLines,
    RowCounts,
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
from dsv4.cute.sm90.gemm_wgmma import LaneWeights, Loop, Position, WgmmaKernel
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaTma
from dsv4.cute.sm90.grouped_gemm_plans import SLOTS, GroupedWgmmaPlan
from dsv4.cute.sm90.wgmma_copies import Pipeline, fake_weights, fake_x
from dsv4.cute.sm90.wgmma_epilogue import Bounds, RowTile, Thread

Value = Any


class GroupedOutput(NamedTuple):
    """As ``Output``, of an expert's rows from the tile's first on.

    Attributes:
        buffer: As there.
        token_scale: As there.
        out: As there; where ``quantized_out``, the results' codes.
        x: As there.
        weights: What the lane's two tokens of each tile of 8 weigh.
        block_scales: Address of scale bytes; of all of them, with the row where the first token's
            are, where ``swizzled_out``.
        codes_scale: Address of the global scale of the codes.
    """

    buffer: Uint32
    token_scale: Int64
    out: Int64
    x: Int64
    weights: list[list[Float32]]
    block_scales: BlockScales
    codes_scale: Int64


class GroupedWgmmaKernel(WgmmaKernel):
    """The kernel of one configuration."""

    plan: GroupedWgmmaPlan

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            fake_x(),
            fake_weights(),
            fake_weights(),
            *[Int64(0)] * 10,
            *[Int32(1)] * 5,
            Int64(8),
            *[Int32(1)] * 9,
            Float32(1.0),
            CUstream(0),
            options=options,
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        global_scale: Int64,
        x_at: Int64,
        token_scale: Int64,
        row_weight: Int64,
        out: Int64,
        offsets: Int64,
        codes_scale: Int64,
        block_scales: Int64,
        row_scale: Int64,
        counter: Int64,
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
        above: Int32,
        most: Int32,
        beside: Int32,
        limit: Float32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        atom, x_tiles = self._x_tma(x)
        codes_atom, codes_tiles = self._weights_tma(codes, self.plan.code_bytes)
        scales_atom, scales_tiles = self._weights_tma(scales, self.plan.scale_bytes)
        layout, mma = self._x_layout(), self._mma(self.plan.token_block)
        self.kernel(
            atom, codes_atom, scales_atom, x_tiles, codes_tiles, scales_tiles, layout, mma,
            global_scale, x_at, token_scale, row_weight, out, offsets, codes_scale, block_scales,
            row_scale, counter, tokens, experts, k_blocks, row_tiles, row_blocks, token_stride,
            scales_each, cut0, cut1, cut2, scale_rows, sixteen, above, most, beside, limit,
        ).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[1, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        codes_atom: cute.CopyAtom,
        scales_atom: cute.CopyAtom,
        x_tiles: cute.Tensor,
        codes_tiles: cute.Tensor,
        scales_tiles: cute.Tensor,
        layout: cute.ComposedLayout,
        mma: cute.TiledMma,
        global_scale: Int64,
        x_at: Int64,
        token_scale: Int64,
        row_weight: Int64,
        out: Int64,
        offsets: Int64,
        codes_scale: Int64,
        block_scales: Int64,
        row_scale: Int64,
        counter: Int64,
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
        above: Int32,
        most: Int32,
        beside: Int32,
        limit: Float32,
    ) -> None:
        """See the module. What is not named here is as in ``WgmmaKernel.kernel``.

        Args:
            atom: The tensor copy of a box of X.
            codes_atom: The tensor copy of a stage's codes.
            scales_atom: The tensor copy of its scales.
            x_tiles: X, ``[tokens, K]``, as the copy addresses it.
            codes_tiles: The packed codes of all experts, ``[row tiles, K / 64 128]`` words.
            scales_tiles: Their packed scales, ``[row tiles, K / 64 16]`` words.
            layout: Blocks of 64 columns of X, of all stages.
            mma: The product of 64 rows a warpgroup.
            global_scale: Address of float32 ``[experts, scales_each]``.
            x_at: Address of X.
            token_scale: Address of float32 ``[tokens]``, where ``row_scaled``.
            row_weight: Address of float32 ``[tokens]``, where ``row_weighted``.
            out: Address of ``[tokens, rows]``.
            offsets: Address of int32 ``[experts + 1]``, the first row of each and the end.
            codes_scale: Address of float32 ``[experts]``, the global scale of each expert's
                results, where ``quantized_out``; ``out`` is their codes, ``[tokens, rows / 4]``.
            block_scales: Address of their scale bytes, ``[tokens, rows / 32]`` or swizzled by
                expert, likewise.
            row_scale: Address of their rows' global scales, float32 ``[tokens]``, likewise.
            counter: Address of the int32 that counts the tiles that blocks have taken, 0 before the
                launch; or 0, and a block's tiles are every so many.
            tokens: Rows of X, all of them; 0 where rows of no expert are not this launch's to fill.
            experts: At most ``MOST_EXPERTS``.
            k_blocks: K / 64, a multiple of ``stage_k_blocks``.
            row_tiles: Rows of an expert's weight / 16.
            row_blocks: Those rows / those of a block, rounded up.
            token_stride: Elements between rows of X.
            scales_each: Global scales of an expert.
            cut0: First row of the second segment; ``cut1``, ``cut2`` of the third and fourth.
            cut1: See ``cut0``.
            cut2: See ``cut0``.
            scale_rows: 1 where every row has its own global scale, else 0.
            sixteen: 16, of which the compiler must not know.
            above: Rows above which an expert is this launch's.
            most: Rows up to which it is.
            beside: Not 0 where the kernel in front is a launch for the other experts, which has
                waited for the operands: this one's first block waits for it, at its end alone.
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
        weights_at = smem.allocate_array(cutlass.Uint8, self.plan.stages * self.plan.weight_bytes)
        turned = Uint32(smem.allocate_array(cutlass.Uint8, self.plan.epilogue_bytes).toint())
        scale_room = self._room_for_scales(smem)
        slots = Uint32(smem.allocate_array(cutlass.Uint8, 24 * SLOTS).toint())
        full_at = smem.allocate_array(cutlass.Int64, 2 * self.plan.stages)
        full = Uint32(full_at.toint())
        empty = full + 8 * self.plan.stages
        tiles_at = Uint32(smem.allocate_array(cutlass.Int32, MOST_EXPERTS + 1).toint())
        rows_at = Uint32(smem.allocate_array(cutlass.Int32, MOST_EXPERTS + 1).toint())
        table = ExpertTable(tiles_at, rows_at, experts)
        if warp == self.plan.mma_warps and lane < self.plan.stages:
            ptx.mbarrier_init(full + Uint32(lane * 8), 1)
            ptx.mbarrier_init(empty + Uint32(lane * 8), self.plan.mma_warps)
            ptx.fence_mbarrier_init()
        if warp == self.plan.mma_warps and lane < SLOTS:
            ptx.mbarrier_init(
                self._read(slots, slots + Uint32(lane * 16)), 32 * self.plan.mma_warps
            )
            ptx.fence_mbarrier_init()
        if beside == 0:
            cute.arch.griddepcontrol_wait()
        # Not before: what a product of settled offsets follows has seen them.
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            count_tiles(offsets, table, self.plan.token_block, lane, RowCounts(above, most))
        cute.arch.sync_threads()
        order = GroupedTileOrder(table, row_blocks)
        steps = k_blocks // self.plan.stage_k_blocks

        if warp >= self.plan.mma_warps:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if warp == self.plan.mma_warps:
                ring = (full_at, full, empty, slots)
                self._copy(
                    WgmmaTma(
                        atom, codes_atom, scales_atom, x_tiles, codes_tiles, scales_tiles, layout
                    ),
                    (shared_x, weights_at),
                    ring,
                    (Int32(first), stride, counter, order, lane),
                    (steps, row_tiles),
                )
            else:
                lines = Lines(end_row(table) + first, tokens, stride)
                among = thread - 32 * (self.plan.mma_warps + 1)
                if cutlass.const_expr(self.plan.quantized_out):
                    linear = None if self.plan.swizzled_out else block_scales
                    results = QuantizedLines(out, linear, row_scale)
                    columns = row_tiles * self.tile_outputs
                    clear_quantized_lines(results, lines, columns, among, 96)
                    if cutlass.const_expr(self.plan.swizzled_out):
                        cta = Int32(first)
                        clear_padding(block_scales, table, cta, stride, tokens, columns, among, 96)
                else:
                    clear_lines(out, lines, row_tiles * (self.tile_bytes // 16), among, 96)
        else:
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            slice_ = mma.get_slice(thread)
            shape = slice_.partition_shape_C((64 * self.plan.warpgroups, self.plan.token_block))
            sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.plan.warp_tiles)]
            products = self._operands(mma, sums, shared_x, thread)
            rules = (cut0, cut1, cut2, scale_rows)
            codes_from = Uint32(weights_at.toint())
            scales_from = codes_from + Uint32(self.plan.cta_row_tiles * self.plan.code_bytes)
            rooms = (codes_from, scales_from, scale_room)
            weights = self._weights_at(rooms, warp, lane, Uint32(sixteen))
            stage, parity, slot = Int32(0), Int32(0), slots
            ahead = self._start(weights, full, cutlass.Boolean(True))
            count = self._told(slot)[3]
            while count > 0:
                fetched = self._fetch(
                    self._told(slot),
                    (global_scale, scales_each, row_weight),
                    (warp, lane, row_tiles, rules),
                )
                ahead, stage, parity, before = self._multiply_any(
                    (sums, products),
                    (weights, ahead),
                    (full, empty, stage, parity, slot),
                    (steps, cutlass.Boolean(False), lane, Uint32(sixteen)),
                )
                # All of this anew, so that nothing made of it is kept, and spilled, while
                # multiplying: the first entry of the table is 0, which the compiler cannot know.
                thread = cute.arch.thread_idx()[0] + ptx.load_shared_int(tiles_at)
                lane = thread % 32
                warp = cute.arch.make_warp_uniform(thread // 32)
                expert, row_block, start, count = self._told(slot)
                ptx.mbarrier_arrive(self._read(slots, slot))
                slot += 16
                if slot == slots + 16 * SLOTS:
                    slot = slots
                padded = start
                if cutlass.const_expr(self.plan.swizzled_out):
                    padded = start + padding_before(table, expert, lane)
                warpgroup.wait_group(0)
                self._release(empty, before, lane)
                own = self._own(row_block, warp)
                factors = self._factors_among(fetched[0], lane)
                output = GroupedOutput(
                    buffer=turned,
                    token_scale=token_scale + Int64(start) * 4,
                    out=out + Int64(start) * row_tiles * self.tile_bytes,
                    x=x_at + Int64(start) * token_stride * 2,
                    weights=self._weights_among(fetched[1], lane),
                    block_scales=BlockScales(block_scales, padded)
                    if self.plan.swizzled_out
                    else BlockScales(block_scales + Int64(start) * (row_tiles // 2)),
                    codes_scale=codes_scale + Int64(expert) * 4,
                )
                if cutlass.const_expr(self.plan.quantized_out):  # noqa: SIM102 - one is constant
                    if row_block == 0 and thread < cutlass.min(count, self.plan.token_block):
                        of_all = ptx.load_global_float(output.codes_scale)
                        ptx.store_global_float(row_scale + (Int64(start) + thread) * 4, of_all)
                reduced = self._fragments(sums)
                self._store_tiles(
                    [RowTile(*each) for each in zip(reduced, own, factors, strict=True)],
                    output,
                    Int32(0),
                    Thread(thread, warp, lane, Int32(0)),
                    Bounds(count, row_tiles, token_stride, Int32(1), k_blocks, limit),
                )
                count = self._told(slot)[3]
        # One block stands for the launch; the others' multiprocessors are for the next one's.
        if beside != 0 and first == 0:
            cute.arch.griddepcontrol_wait()

    def _fetch(self, told: Value, places: Value, where: Value) -> Value:
        """Global scales of the warp's rows and weights of the tile's tokens, a lane every 32nd.

        Asked for before the products, so that no result waits for them.
        """
        expert, row_block, start, count = told
        global_scale, scales_each, row_weight = places
        warp, lane, row_tiles, (cut0, cut1, cut2, scale_rows) = where
        of_expert = global_scale + Int64(expert) * scales_each * 4
        of_rows = []
        for first in range(0, 16 * self.plan.warp_tiles, 32):
            row = (first + lane) % (16 * self.plan.warp_tiles)
            row_tile = row_block * self.plan.cta_row_tiles + warp + row // 16 * self.plan.mma_warps
            at = cutlass.min(row_tile, row_tiles - 1) * 16 + row % 16
            index = Int32(at >= cut0) + Int32(at >= cut1) + Int32(at >= cut2)
            index += scale_rows * (at - index)
            of_rows.append(ptx.load_global_float(of_expert + Int64(index) * 4))
        of_tokens = []
        for first in range(0, self.plan.token_block if self.plan.row_weighted else 0, 32):
            token = start + cutlass.min(first + lane, count - 1)
            of_tokens.append(ptx.load_global_float(row_weight + Int64(token) * 4))
        return of_rows, of_tokens

    def _factors_among(self, of_rows: Value, lane: Value) -> list[Value]:
        """Global scale times 2^7 of the lane's two rows of each tile."""
        factors = []
        for h in range(self.plan.warp_tiles):
            rows = [h % 2 * 16 + half * 8 + lane // 4 for half in range(2)]
            both = [cute.arch.shuffle_sync(of_rows[h // 2], row) for row in rows]
            factors.append([one * Float32(128.0) for one in both])
        return factors

    def _weights_among(self, of_tokens: Value, lane: Value) -> list[Value]:
        """What two tokens of each tile of 8 weigh, the lane's."""
        count = self.plan.token_block // 8 if self.plan.row_weighted else 0
        lanes = [[n % 4 * 8 + lane % 4 * 2 + i for i in range(2)] for n in range(count)]
        return [
            [cute.arch.shuffle_sync(of_tokens[n // 4], one) for one in two]
            for n, two in enumerate(lanes)
        ]

    @cute.jit
    def _copy(self, tma: WgmmaTma, rooms: Value, ring: Value, walk: Value, sizes: Value) -> None:
        """A warp keeps the ring full, tile after tile, and says in a slot which tile it is.

        After the last one comes a stage of nothing, whose tile has no rows.
        """
        shared_x, weights_at = rooms
        full_at, full, empty, slots = ring
        first, stride, counter, order, lane = walk
        steps, row_tiles = sizes
        stage, parity, slot, again = Int32(0), Int32(1), slots, Int32(1)
        tile = self._following(first - stride, stride, counter, lane)
        boxes = self.plan.token_block // self.plan.tma_tokens  # of a block of 64 columns
        room = self._x_stages(shared_x)
        while tile < self._total(order):
            expert, row_block, start, count = self._find(tile, order)
            ptx.mbarrier_wait(self._read(slots, slot), again)
            if lane == 0:
                words = [Uint32(one) for one in (expert, row_block, start, count)]
                ptx.store_shared4(slot, words)
            slot += 16
            if slot == slots + 16 * SLOTS:
                slot = slots
                again = again ^ 1
            tokens = cute.domain_offset((start, 0), tma.x_tensor)
            tiles = cute.local_tile(tokens, (self.plan.tma_tokens, 64), (None, None))
            to, source = self._partition(tma.x_tma, room, tiles)
            row = expert * row_tiles + row_block * self.plan.cta_row_tiles
            weights = self._weight_copies(tma, weights_at, row)
            width = self._width(count)
            for k in cutlass.range(steps, unroll=1):
                ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
                self._expect(full + Uint32(stage * 8), width, lane)
                barrier = full_at + stage
                self._copy_weights(tma, weights, Int32(k), stage, barrier)
                for b in cutlass.range(width // self.plan.tma_tokens, unroll=1):
                    for u in cutlass.range_constexpr(self.plan.stage_k_blocks):
                        cute.copy(
                            tma.x_tma,
                            source[(None, b, self.plan.stage_k_blocks * k + u)],
                            to[(None, (self.plan.stage_k_blocks * stage + u) * boxes + b)],
                            tma_bar_ptr=barrier,
                        )
                stage += 1
                if stage == self.plan.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
            tile = self._following(tile, stride, counter, lane)
        ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
        ptx.mbarrier_wait(self._read(slots, slot), again)
        if lane == 0:
            ptx.store_shared4(slot, [Uint32(0)] * 4)
            ptx.mbarrier_arrive(full + Uint32(stage * 8))

    @cute.jit
    def _following(self, tile: Value, stride: Value, counter: Value, lane: Value) -> Value:
        """The tile that the block takes after one."""
        following = tile + stride
        if counter != 0:
            taken = Int32(0)
            if lane == 0:
                taken = Int32(ptx.atomic_increment(counter))
            following = cute.arch.shuffle_sync(taken, 0)
        return following

    def _room_for_scales(self, smem: Value) -> Value:
        """Where warps leave what their lanes share of expanded scales: nowhere."""
        return Uint32(0)

    def _weights_at(self, rooms: Value, warp: Value, lane: Value, sixteen: Value) -> Value:
        """Where the lane finds its codes and scales in the first stage."""
        codes, scales, _ = rooms
        codes += Uint32(warp * self.plan.code_bytes + lane * 16)
        return LaneWeights(codes, scales + Uint32(warp * self.plan.scale_bytes + lane // 4 * 8))

    def _width(self, count: Value) -> Value:
        """Tokens of the product of a tile with so many rows."""
        width = Int32(self.plan.mma_widths[0])
        for one, following in itertools.pairwise(self.plan.mma_widths):
            width += Int32(count > one) * (following - one)
        return width

    def _read(self, slots: Value, slot: Value) -> Value:
        """The barrier at which every lane that multiplies arrives when it has read the slot."""
        return slots + Uint32(16 * SLOTS) + (slot - slots) // 2

    def _told(self, slot: Value) -> list[Value]:
        """What ``_find`` found, with the block's own block of rows."""
        return [Int32(word) for word in ptx.load_shared(slot, 4)]

    @cute.jit
    def _multiply_any(self, products: Value, weight: Value, ring: Value, rest: Value) -> Value:
        """``_multiply_ring`` by the product that the tile's rows fit.

        Each size has its loop, all but one of no rounds: the compiler keeps products in flight
        over them, and not over branches.
        """
        sums, sizes = products
        weights, ahead = weight
        full, empty, stage, parity, slot = ring
        steps, is_last, lane, sixteen = rest
        before = Int32(-1)
        for h in cutlass.range_constexpr(self.plan.warp_tiles):
            sums[h].fill(0.0)
        if cutlass.const_expr(len(sizes) == 1):
            ahead, (stage, parity, before) = self._multiply_ring(
                sizes[0],
                weights,
                ahead,
                Pipeline(full, empty),
                Position(stage, parity, before),
                Loop(steps, is_last, lane, sixteen),
            )
        else:
            width = self._width(self._told(slot)[3])
            for i in cutlass.range_constexpr(len(sizes)):
                rounds = steps * Int32(width == self.plan.mma_widths[i])
                ahead, (stage, parity, before) = self._multiply_ring(
                    sizes[i],
                    weights,
                    ahead,
                    Pipeline(full, empty),
                    Position(stage, parity, before),
                    Loop(rounds, is_last, lane, sixteen),
                )
                warpgroup.wait_group(0)
        return ahead, stage, parity, before

    @property
    def tile_bytes(self) -> int:
        """Bytes of a token's results, or their codes, in a tile of 16 rows."""
        if self.plan.quantized_out:
            return self.tile_outputs // 2
        return self.tile_outputs * (4 if self.plan.float32_out else 2)

    def _total(self, order: Value) -> Value:
        """Tiles of all experts' rows and columns of results."""
        return total_tiles(order.table) * order.row_blocks

    def _find(self, tile: Value, order: Value) -> Value:
        """Expert, block of rows, first row of X, and rows of X from there to the expert's end."""
        return find_tile(tile, order, self.plan.token_block)

    def _weighted(self, values: Value, output: GroupedOutput, first: int) -> Value:
        """As there."""
        if not self.plan.row_weighted:
            return values
        each = zip(values, output.weights[first : first + len(values)], strict=True)
        return [[value * weight for value, weight in zip(*two, strict=True)] for two in each]

    @cute.jit
    def _store_vector(
        self, at: Value, output: GroupedOutput, vector: Vector, exists: Value
    ) -> None:
        """As there, or as codes, of which neighbouring lanes have a block."""
        if cutlass.const_expr(self.plan.quantized_out):
            # Of a line that is not there, what another lane has.
            words, scale = self._load_vector(at), ptx.load_global_float(output.codes_scale)
            quantized = QuantizedOutput(output.out, output.block_scales, scale)
            store_quantized(words, quantized, vector, exists)
        elif exists:
            words = self._load_vector(at)
            place = (Int64(vector.token) * vector.rows + vector.row) * 2
            ptx.store_global4(output.out + place, words)
