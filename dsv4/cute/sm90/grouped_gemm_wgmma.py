"""Grouped NVFP4 GEMM for many rows an expert, on tensor cores by ``wgmma``.

``out[r, n] = sum_k x[r, k] w[e, n, k]`` for ``offsets[e] <= r < offsets[e + 1]``, and its SwiGLU.
MMA warps, ring of stages, arithmetic and epilogue are those of ``gemm_wgmma``; what differs:

Tiling and ownership. A tile is ``rows`` rows of an expert's weight and up to ``token_block`` rows
of X that belong to the expert. It begins at the expert's first row or some whole tiles later; rows
of the next expert that lie in it are multiplied, not stored. An expert without rows has no tile.
The tiles of an expert follow one another, the tokens of a block of rows first, so that its weights
come from memory once and from L2 for the other tiles. CTAs are persistent: in every round each
takes one of the next tiles (``next_tile``), or they take them by a counter
(``GroupedWgmmaArgs.tile_counter``).

Several widths. If the plan has narrower MMAs, a tile takes the first that its rows fit: 4282 us
with 64 and 80 tokens, 4466 with 80 alone (H200). Each width has a main loop of its own, all but one
of no iterations: with branches instead, ptxas serialises the MMAs.

Warps. All CTAs count the experts' tiles into a table in shared memory first (one warp). The first
copy warp finds the expert of each tile, keeps the ring full by TMA and writes to a slot which tile
it is; MMA warps read the slot. The other three copy warps clear rows of no expert. After the last
tile comes an empty stage, whose slot has a tile without rows, so that the main loop need not know
which tile is the last.

Barriers:

* ``full[stage]``, ``empty[stage]``: as in ``gemm_wgmma``.
* barrier of a slot: mbarrier of every MMA lane, which arrives when it has read the slot. The copy
  warp waits for it before it writes the slot again, ``SLOTS`` tiles later. A phase for each round.
  A slot needs no barrier of its being written: the stage that is full after it orders that.
* ``sync_threads``, once: mbarriers and table exist.
* named barriers of ``wgmma_epilogue``.

Numerics. As ``gemm_wgmma``. The bits of a row depend on the plan, not on the other rows.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.expert_scheduler import (
    ExpertTable,
    GroupedTile,
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
from dsv4.cute.device.scheduler import next_tile
from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.sm90.gemm_wgmma import (
    LaneWeights,
    LaneWords,
    Loop,
    Operands,
    Position,
)
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaTma
from dsv4.cute.sm90.grouped_gemm_wgmma_plan import (
    GROUPED_WGMMA_ABI,
    SLOT_BYTES,
    SLOTS,
    GroupedWgmmaArgs,
)
from dsv4.cute.sm90.grouped_gemm_wgmma_results import GroupedWgmmaResults
from dsv4.cute.sm90.wgmma_copies import Pipeline, SharedMemory
from dsv4.cute.sm90.wgmma_epilogue import Bounds, RowTile, Thread

_CLEAR_THREADS = 96  # of the copy warps but the first


class TileWalk(NamedTuple):
    """The tiles of a CTA.

    Attributes:
        first: Its first one.
        stride: Number of CTAs.
        counter: Address of the counter of tiles that CTAs have taken; 0 for none.
        order: Which tile is which.
    """

    first: Int32
    stride: Int32
    counter: Int64
    order: GroupedTileOrder


class GroupedWgmmaKernel(GroupedWgmmaResults):
    """The kernel of one configuration.

    ``__call__`` and ``compile`` are those of ``WgmmaKernel``.
    """

    abi = GROUPED_WGMMA_ABI

    @cute.kernel
    def kernel(self, tma: WgmmaTma, mma: cute.TiledMma, args: GroupedWgmmaArgs) -> None:
        """Multiply tiles, one after another; see the module.

        Args:
            tma: TMA copies and what they read; the weights of all experts are one matrix.
            mma: wgmma of 64 rows a warpgroup and ``token_block`` tokens.
            args: The scalars.
        """
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        stride, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = cutlass.memory.SmemAllocator()
        shared_x = smem.allocate_tensor(
            BFloat16, tma.x_layout.outer, byte_alignment=1024, swizzle=tma.x_layout.inner
        )
        weights_at = smem.allocate_array(cutlass.Uint8, self.plan.stages * self.plan.weight_bytes)
        buffer = Uint32(smem.allocate_array(cutlass.Uint8, self.plan.epilogue_bytes).toint())
        scale_buffer = self._scale_buffer(smem)
        slots = Uint32(smem.allocate_array(cutlass.Uint8, SLOT_BYTES * SLOTS).toint())
        full_at = smem.allocate_array(cutlass.Int64, 2 * self.plan.stages)
        full = Uint32(full_at.toint())
        pipeline = Pipeline(full, full + 8 * self.plan.stages)
        tiles_at = Uint32(smem.allocate_array(cutlass.Int32, MOST_EXPERTS + 1).toint())
        rows_at = Uint32(smem.allocate_array(cutlass.Int32, MOST_EXPERTS + 1).toint())
        table = ExpertTable(tiles_at, rows_at, args.experts)
        if warp == self.plan.mma_warps and lane < self.plan.stages:
            # full: the lane that expects the bytes; empty: a lane of every MMA warp.
            ptx.mbarrier_init(full + Uint32(lane * 8), 1)
            ptx.mbarrier_init(pipeline.empty + Uint32(lane * 8), self.plan.mma_warps)
            ptx.fence_mbarrier_init()
        if warp == self.plan.mma_warps and lane < SLOTS:
            read = self._slot_barrier(slots, slots + Uint32(lane * 16))
            ptx.mbarrier_init(read, 32 * self.plan.mma_warps)
            ptx.fence_mbarrier_init()
        if args.all_ready == 0:
            cute.arch.griddepcontrol_wait()
        # Not before: a GEMM that follows with ready offsets relies on this kernel's having waited.
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            selected = RowCounts(args.above_rows, args.most_rows)
            count_tiles(args.offsets, table, self.plan.token_block, lane, selected)
        cute.arch.sync_threads()
        stages = args.k_blocks // self.plan.stage_k_blocks  # of a tile

        if warp >= self.plan.mma_warps:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if warp == self.plan.mma_warps:
                shared = SharedMemory(shared_x, weights_at, full_at)
                order = GroupedTileOrder(table, args.row_blocks)
                walk = TileWalk(Int32(first), stride, args.tile_counter, order)
                self._copy_tiles(tma, shared, pipeline, slots, walk, stages, args.row_tiles, lane)
            else:
                self._clear(args, table, thread, first, stride)
        else:
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            slice_ = mma.get_slice(thread)
            shape = slice_.partition_shape_C((64 * self.plan.warpgroups, self.plan.token_block))
            sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.plan.warp_tiles)]
            operands = self._operands(mma, sums, shared_x, thread)
            weights = self._lane_weights(
                Uint32(weights_at.toint()), scale_buffer, warp, lane, Uint32(args.opaque_16)
            )
            stage, parity, slot = Int32(0), Int32(0), slots
            prefetched = self._start(weights, full, cutlass.Boolean(True))
            count = self._read_slot(slot).rows
            while count > 0:
                scales = self._load_scales(args, self._read_slot(slot), warp, lane)
                prefetched, position = self._multiply_tile(
                    operands,
                    sums,
                    weights,
                    prefetched,
                    pipeline,
                    Position(stage, parity, Int32(-1)),
                    slot,
                    Loop(stages, Boolean(False), lane, Uint32(args.opaque_16)),
                )
                stage, parity = position.stage, position.parity
                # All of this again, so that nothing made of it is kept, and spilled, over the main
                # loop: the first entry of the table is 0, which the compiler cannot know.
                thread = cute.arch.thread_idx()[0] + ptx.load_shared_int(tiles_at)
                lane = thread % 32
                warp = cute.arch.make_warp_uniform(thread // 32)
                tile = self._read_slot(slot)
                ptx.mbarrier_arrive(self._slot_barrier(slots, slot))
                slot += 16
                if slot == slots + 16 * SLOTS:
                    slot = slots
                swizzled_row = tile.first_row
                if cutlass.const_expr(self.plan.swizzled_out):
                    swizzled_row = tile.first_row + padding_before(table, tile.expert, lane)
                warpgroup.wait_group(0)
                self._release(pipeline.empty, position.in_flight, lane)
                own = self._own(tile.row_block, warp)
                factors = self._row_factors(scales, lane)
                output = self._output(args, tile, scales, swizzled_row, buffer, lane)
                if cutlass.const_expr(self.plan.quantized_out):
                    rows = cutlass.min(tile.rows, self.plan.token_block)
                    if tile.row_block == 0 and thread < rows:
                        global_scale = ptx.load_global_float(output.result_scale)
                        at = args.out_row_scale + (Int64(tile.first_row) + thread) * 4
                        ptx.store_global_float(at, global_scale)
                reduced = self._fragments(sums)
                self._store_tiles(
                    list(map(RowTile, reduced, own, factors)),
                    output,
                    Int32(0),
                    Thread(thread, warp, lane, Int32(0)),
                    Bounds(
                        tokens=tile.rows,
                        row_tiles=args.row_tiles,
                        token_stride=args.token_stride,
                        groups=Int32(1),
                        k_blocks=args.k_blocks,
                        limit=args.limit,
                    ),
                )
                count = self._read_slot(slot).rows
        # One CTA waits for the launch, so that what follows this launch may wait for it alone. The
        # others leave, so that CTAs of the next launch find free SMs.
        if args.all_ready != 0 and first == 0:
            cute.arch.griddepcontrol_wait()

    # Slots: which tile comes next.

    def _slot_barrier(self, slots: Uint32, slot: Uint32) -> Uint32:
        """The mbarrier of a slot; the barriers follow all slots."""
        return slots + Uint32(16 * SLOTS) + (slot - slots) // 2

    def _read_slot(self, slot: Uint32) -> GroupedTile:
        """The tile of a slot."""
        return GroupedTile(*[Int32(word) for word in ptx.load_shared(slot, 4)])

    # The copy warps.

    @cute.jit
    def _copy_tiles(
        self,
        tma: WgmmaTma,
        shared: SharedMemory,
        pipeline: Pipeline,
        slots: Uint32,
        walk: TileWalk,
        stages: Int32,
        row_tiles: Int32,
        lane: Int32,
    ) -> None:
        """One warp: keep the ring full, tile after tile, and write to a slot which tile it is.

        After the last tile comes an empty stage, whose slot has a tile without rows.

        Args:
            tma: TMA copies and what they read.
            shared: Shared memory that they fill.
            pipeline: mbarriers of the ring.
            slots: Address of the slots.
            walk: The tiles of the CTA.
            stages: Stages of a tile.
            row_tiles: Row tiles of an expert's weight.
            lane: Lane of the warp.
        """
        full, full_at, empty = pipeline.full, shared.full, pipeline.empty
        stage, parity, slot, slot_parity = Int32(0), Int32(1), slots, Int32(1)
        tile = self._taken(walk.first, walk, lane)
        boxes = self.plan.token_block // self.plan.tma_tokens  # of a block of 64 columns
        x_stages = self._x_stages(shared.x)
        while tile < total_tiles(walk.order.table) * walk.order.row_blocks:
            current = find_tile(tile, walk.order, self.plan.token_block)
            ptx.mbarrier_wait(self._slot_barrier(slots, slot), slot_parity)
            if lane == 0:
                ptx.store_shared4(slot, [Uint32(word) for word in current])
            slot += 16
            if slot == slots + 16 * SLOTS:
                slot = slots
                slot_parity = slot_parity ^ 1
            tokens = cute.domain_offset((current.first_row, 0), tma.x_tensor)
            x_tiles = cute.local_tile(tokens, (self.plan.tma_tokens, 64), (None, None))
            x = self._partition(tma.x_tma, x_stages, x_tiles)
            row = current.expert * row_tiles + current.row_block * self.plan.cta_row_tiles
            weights = self._weight_copies(tma, shared.weights, row)
            width = self._width(current.rows)
            for k in cutlass.range(stages, unroll=1):
                ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
                self._expect(full + Uint32(stage * 8), width, lane)
                barrier = full_at + stage
                self._copy_weights(tma, weights, Int32(k), stage, barrier)
                for box in cutlass.range(width // self.plan.tma_tokens, unroll=1):
                    for u in cutlass.range_constexpr(self.plan.stage_k_blocks):
                        cute.copy(
                            tma.x_tma,
                            x.source[(None, box, self.plan.stage_k_blocks * k + u)],
                            x.to[(None, (self.plan.stage_k_blocks * stage + u) * boxes + box)],
                            tma_bar_ptr=barrier,
                        )
                stage += 1
                if stage == self.plan.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
            tile = self._taken(self._following(tile, walk), walk, lane)
        ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
        ptx.mbarrier_wait(self._slot_barrier(slots, slot), slot_parity)
        if lane == 0:
            ptx.store_shared4(slot, [Uint32(0)] * 4)
            ptx.mbarrier_arrive(full + Uint32(stage * 8))

    def _following(self, tile: Int32, walk: TileWalk) -> Int32:
        """Number of the CTA's tile after ``tile``."""
        following: Int32 = next_tile(tile, walk.stride)
        return following

    @cute.jit
    def _taken(self, following: Int32, walk: TileWalk, lane: Int32) -> Int32:
        """One warp: the tile that the CTA takes; ``following`` unless there is a counter."""
        if walk.counter != 0:
            taken = Int32(0)
            if lane == 0:
                taken = Int32(ptx.atomic_increment(walk.counter))
            following = cute.arch.shuffle_sync(taken, 0)
        return following

    def _width(self, rows: Int32) -> Int32:
        """Tokens of the MMAs of a tile: the first of ``mma_widths`` that its rows fit."""
        width = Int32(self.plan.mma_widths[0])
        for narrower, wider in itertools.pairwise(self.plan.mma_widths):
            width += Int32(rows > narrower) * (wider - narrower)
        return width

    @cute.jit
    def _clear(
        self,
        args: GroupedWgmmaArgs,
        table: ExpertTable,
        thread: Int32,
        cta: Int32,
        grid: Int32,
    ) -> None:
        """Three warps: clear the rows of no expert, every ``grid``-th by each CTA.

        Args:
            args: Arguments of the kernel.
            table: Tiles and rows of the experts.
            thread: Thread of the CTA.
            cta: Which CTA this is.
            grid: How many there are.
        """
        lines = Lines(end_row(table) + cta, args.clear_end, grid)
        thread = thread - 32 * (self.plan.mma_warps + 1)  # of the three warps
        if cutlass.const_expr(self.plan.quantized_out):
            linear = None if self.plan.swizzled_out else args.out_block_scales
            out = QuantizedLines(args.out, linear, args.out_row_scale)
            columns = args.row_tiles * self.tile_outputs
            clear_quantized_lines(out, lines, columns, thread, _CLEAR_THREADS)
            if cutlass.const_expr(self.plan.swizzled_out):
                clear_padding(
                    args.out_block_scales,
                    table,
                    Int32(cta),
                    grid,
                    args.clear_end,
                    columns,
                    thread,
                    _CLEAR_THREADS,
                )
        else:
            vectors = args.row_tiles * (self.tile_bytes // 16)
            clear_lines(args.out, lines, vectors, thread, _CLEAR_THREADS)

    # The MMA warps.

    def _scale_buffer(self, smem: Any) -> Uint32:
        """Shared memory of block scales that lanes dequantize for one another: none here."""
        return Uint32(0)

    def _lane_weights(
        self, weights: Uint32, scale_buffer: Uint32, warp: Int32, lane: Int32, opaque_16: Uint32
    ) -> Any:
        """Return where the lane's weights are in the first stage.

        Args:
            weights: Codes of the first stage; its scales follow them.
            scale_buffer: Like ``_scale_buffer``.
            warp: Warp of the CTA.
            lane: Lane of the warp.
            opaque_16: See ``GroupedWgmmaArgs``.
        """
        codes = weights + Uint32(warp * self.plan.code_bytes + lane * 16)
        scales = weights + Uint32(self.plan.cta_row_tiles * self.plan.code_bytes)
        return LaneWeights(codes, scales + Uint32(warp * self.plan.scale_bytes + lane // 4 * 8))

    @cute.jit
    def _multiply_tile(
        self,
        operands: list[Operands],
        sums: list[cute.Tensor],
        weights: Any,
        prefetched: list[LaneWords],
        pipeline: Pipeline,
        position: Position,
        slot: Uint32,
        loop: Loop,
    ) -> tuple[list[LaneWords], Position]:
        """``_multiply_ring`` with the MMAs of the width that the tile's rows fit.

        Every width has its loop, all but one of no iterations: ptxas keeps MMAs in flight over
        loops, and not over branches.

        Args:
            operands: Operands of the MMAs of each width.
            sums: Accumulators.
            weights: Where the lane's weights are.
            prefetched: The lane's weights of the first columns, in registers.
            pipeline: mbarriers of the ring.
            position: In the ring.
            slot: Slot of the tile.
            loop: Stages of the tile. It is never the last one: an empty stage follows.
        """
        for h in cutlass.range_constexpr(self.plan.warp_tiles):
            sums[h].fill(Float32(0.0))
        if cutlass.const_expr(len(operands) == 1):
            prefetched, position = self._multiply_ring(
                operands[0],
                weights,
                prefetched,
                pipeline,
                position,
                loop,
            )
        else:
            width = self._width(self._read_slot(slot).rows)
            for i in cutlass.range_constexpr(len(operands)):
                iterations = loop.stages * Int32(width == self.plan.mma_widths[i])
                prefetched, position = self._multiply_ring(
                    operands[i],
                    weights,
                    prefetched,
                    pipeline,
                    position,
                    loop._replace(stages=iterations),
                )
                warpgroup.wait_group(0)
        return prefetched, position
