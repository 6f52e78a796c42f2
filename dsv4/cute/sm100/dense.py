"""NVFP4 x NVFP4 product on Blackwell's tensor cores.

``out[t, n] = sum_k x[t, k] w[n, k]`` with 128 rows of the weight as a block's left operand, or 256
as that of two blocks, and 64 to 256 tokens as right one. So few tokens fill the instruction.

* One warp copies codes and scales of 256 columns at a time into a ring of stages, by tensor copies
  that write zeros beyond the end of an operand. What the kernel before wrote, the tokens, waits for
  it; the first rows do not.
* One warp moves a stage's scales to tensor memory and multiplies. Of two blocks, the first does so
  for both: either holds its own rows and half of the tokens, and copies half of the tokens' scales
  into both.
* Four warps store results while the next tile is multiplied into another accumulator. Two of 256
  tokens share columns: those are loaded first, and given back then.
* Or the blocks of a cluster share K, for one tile of few tokens. Each keeps its sums in its shared
  memory, in the order in which threads hold them; then each adds its tokens' parts, ranks in
  ascending order.

Tiles follow one another. The bits of a token depend on the plan, not on the other tokens.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int16, Int32, Int64, Uint8, Uint16, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from cutlass.cute.runtime import make_fake_tensor

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import swiglu_output_row, swiglu_outputs, transpose
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.sm100 import _tcgen05 as tcgen05
from dsv4.cute.sm100.dense_plan import (
    ATOM,
    CHUNK,
    COPY_WARP,
    EPILOGUE_WARPS,
    MULTIPLY_WARP,
    ROWS,
    STEP,
    DensePlan,
)

Value = Any
_ANY = 1 << 20  # a size: which one, only the driver is told
_KEPT = 16 * 32 * EPILOGUE_WARPS  # bytes of the sums of 16 rows of each warp and 8 tokens


def any_codes() -> Any:
    """Any codes ``[rows, K / 2]``, for the compiler."""
    return make_fake_tensor(Uint8, (_ANY, _ANY), stride=(_ANY, 1), assumed_align=16)


def any_scales() -> Any:
    """Any swizzled scales ``[rows / 128, K / 64, 256]`` as words of 16 bits, for the compiler."""
    return make_fake_tensor(
        Uint16, (_ANY, _ANY, ATOM // 2), stride=(_ANY * ATOM, ATOM // 2, 1), assumed_align=16
    )


class DenseKernel(DensePlan):
    """The kernel of one configuration."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            any_codes(),
            any_scales(),
            any_codes(),
            any_scales(),
            *[Int64(0)] * 3,
            *[Int32(1)] * 12,
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
        x_scales: cute.Tensor,
        global_scale: Int64,
        token_scale: Int64,
        out: Int64,
        tokens: Int32,
        token_tiles: Int32,
        token_span: Int32,
        steps: Int32,
        rows: Int32,
        row_blocks: Int32,
        group_blocks: Int32,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        scale_tokens: Int32,
        limit: Float32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        copies = []
        operands = (codes, self._code_copy(codes, ROWS)), (scales, self._scale_copy(scales, 1, 4))
        right = (
            (x_codes, self._code_copy(x_codes, self.own_tokens)),
            (
                x_scales,
                self._scale_copy(x_scales, *self.scale_box, shared=self.shared_scales),
            ),
        )
        for _, (atom, places) in (*operands, *right):
            copies += [atom, places]
        self.kernel(
            *copies, global_scale, token_scale, out, tokens, token_tiles, token_span, steps, rows,
            row_blocks, group_blocks, cut0, cut1, cut2, scale_rows, scale_tokens, limit,
        ).launch(
            grid=[self.blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.blocks, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @property
    def cta_group(self) -> Any:
        """Of the copies: whether they announce themselves to the first of two blocks."""
        return CtaGroup.TWO if self.pair == 2 else CtaGroup.ONE

    def _code_copy(self, codes: cute.Tensor, rows: int) -> Any:
        """Tensor copy of so many rows of codes, and what it addresses."""
        box = (rows, STEP // 2)
        layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_ordered_layout(box, order=(1, 0))
        )
        op = cpasync.CopyBulkTensorTileG2SOp(self.cta_group)
        return cpasync.make_tiled_tma_atom(op, codes, layout, box)

    def _scale_copy(
        self, scales: cute.Tensor, high: int, wide: int, *, shared: bool = False
    ) -> Any:
        """Tensor copy of so many tiles of scales, into both blocks if ``shared``."""
        kind = cpasync.CopyBulkTensorTileG2SMulticastOp if shared else None
        op = (kind or cpasync.CopyBulkTensorTileG2SOp)(self.cta_group)
        box = (high, wide, ATOM // 2)
        layout = cute.make_ordered_layout(box, order=(2, 1, 0))
        return cpasync.make_tiled_tma_atom(op, scales, layout, box)

    @cute.kernel
    def kernel(
        self,
        row_codes: cute.CopyAtom,
        row_codes_at: cute.Tensor,
        row_scales: cute.CopyAtom,
        row_scales_at: cute.Tensor,
        token_codes: cute.CopyAtom,
        token_codes_at: cute.Tensor,
        token_scales: cute.CopyAtom,
        token_scales_at: cute.Tensor,
        global_scale: Int64,
        token_scale: Int64,
        out: Int64,
        tokens: Int32,
        token_tiles: Int32,
        token_span: Int32,
        steps: Int32,
        rows: Int32,
        row_blocks: Int32,
        group_blocks: Int32,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        scale_tokens: Int32,
        limit: Float32,
    ) -> None:
        """See the module.

        Args:
            row_codes: The tensor copy of codes of the weight, ``[rows, K / 2]``.
            row_codes_at: The codes as it addresses them.
            row_scales: That of scales of the weight, ``[rows / 128, K / 64, 512 bytes]``.
            row_scales_at: The scales as it addresses them.
            token_codes: That of codes of the tokens, ``[groups tokens, K / 2]``.
            token_codes_at: The codes as it addresses them.
            token_scales: That of their scales; each group begins at a multiple of 128.
            token_scales_at: The scales as it addresses them.
            global_scale: Address of the weight's float32 global scales.
            token_scale: Address of float32 ``[groups, tokens]``, or of one.
            out: Address of ``[tokens, rows]``, or of half as many columns.
            tokens: At least 1.
            token_tiles: Tiles of ``token_block`` tokens.
            token_span: Of these, how many come one after another before the next rows do.
            steps: K / 256, rounded up.
            rows: Of the weight, a multiple of 16.
            row_blocks: Tiles of the weight's rows.
            group_blocks: Of these, how many share an input.
            cut0: First row of the second segment; ``cut1``, ``cut2`` of the third and fourth.
            cut1: See ``cut0``.
            cut2: See ``cut0``.
            scale_rows: 1 where every row has its own global scale, else 0.
            scale_tokens: 1 where every token has its own, else 0.
            limit: The clamp's bound, where ``swiglu``.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank, part = block % self.pair, block % self.parts
        first, stride = block // self.blocks, grid // self.blocks
        order = (token_tiles, token_span, row_blocks)
        tiles = (first, stride, token_tiles * row_blocks)

        smem = cutlass.memory.SmemAllocator()
        room, turned, barriers_at, slot = self._rooms(smem)
        full, empty, sums_full, sums_empty = self._barriers(Uint32(barriers_at.toint()))
        cute.arch.griddepcontrol_launch_dependents()

        if warp == COPY_WARP:
            for atom in (row_codes, row_scales, token_codes, token_scales):
                cpasync.prefetch_descriptor(atom)
            self._make_barriers(full, lane)
        if warp == 0:
            tcgen05.allocate(slot, self.tensor_columns, self.pair)
        tcgen05.before_arrival()
        self._meet()
        tcgen05.after_wait()
        memory = Uint32(ptx.load_shared_int(slot))

        if warp == COPY_WARP:
            copies = (
                (row_codes, row_codes_at, row_scales, row_scales_at),
                (token_codes, token_codes_at, token_scales, token_scales_at),
            )
            self._copy(
                copies,
                (room, barriers_at, full, empty),
                tiles,
                order,
                (self.share(steps, part), tokens, group_blocks, rank, lane),
            )
            self._meet_parts()
        elif warp == MULTIPLY_WARP:
            if rank == 0:
                waits = (full, empty, sums_full, sums_empty)
                begin, end = self.share(steps, part)
                self._multiply(Uint32(room.toint()), waits, memory, tiles, order, end - begin)
            self._meet_parts()
        else:
            cute.arch.griddepcontrol_wait()
            places = (global_scale, token_scale, scale_tokens, out, turned)
            sizes = (tokens, rows, limit, group_blocks)
            rules = (cut0, cut1, cut2, scale_rows)
            where = (rank, part, warp, lane, thread)
            self._results(
                (sums_full, sums_empty, memory, Uint32(room.toint())),
                places,
                tiles,
                order,
                sizes,
                rules,
                where,
            )
        tcgen05.before_arrival()
        self._meet()
        tcgen05.after_wait()
        if warp == 0:
            tcgen05.free(memory, self.tensor_columns, self.pair)

    def _rooms(self, smem: Value) -> Value:
        """Where stages lie, results that are turned, barriers, and which memory was allocated."""
        room = smem.allocate(self.stages * self.stage_bytes, 1024)
        turned = Uint32(smem.allocate_array(Uint8, max(16, self.turned_bytes)).toint())
        barriers_at = smem.allocate_array(Int64, self.barriers)
        slot = Uint32(smem.allocate_array(Uint32, 4).toint())
        return room, turned, barriers_at, slot

    def _barriers(self, full: Value) -> Value:
        """Of full and empty stages, of sums that are there and that are loaded."""
        empty = full + Uint32(8 * self.stages)
        sums_full = empty + Uint32(8 * self.stages)
        return full, empty, sums_full, sums_full + Uint32(8 * self.sum_stages)

    @cute.jit
    def _make_barriers(self, first: Value, lane: Value) -> None:
        """What announces a stage. Sums: one; and one from each warp that loaded them."""
        if lane < self.stages:
            ptx.mbarrier_init(first + Uint32(lane * 8), self.full_arrivals)
        elif lane < self.barriers - self.sum_stages:
            ptx.mbarrier_init(first + Uint32(lane * 8), 1)
        elif lane < self.barriers:
            ptx.mbarrier_init(first + Uint32(lane * 8), EPILOGUE_WARPS * self.pair)
        ptx.fence_mbarrier_init()
        cute.arch.sync_warp()

    @cute.jit
    def _meet(self) -> None:
        """All threads of the cluster."""
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def _meet_parts(self) -> None:
        """Those who do not store, where the blocks that share K have kept their sums."""
        if cutlass.const_expr(self.parts > 1):
            self._meet()

    @cute.jit
    def _next(self, stage: Value, parity: Value) -> Value:
        """The ring's next stage and its parity."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            parity = parity ^ 1
        return stage, parity

    # The warp that copies.

    @cute.jit
    def _copy(self, copies: Value, ring: Value, tiles: Value, order: Value, sizes: Value) -> None:
        """Keep the ring full of every tile's stages; in the end wait until all are read."""
        weight, inputs = copies
        room, barriers_at, full, empty = ring
        first, stride, total = tiles
        (begin, end), tokens, group_blocks, rank, lane = sizes
        steps = end - begin
        stage, parity, tile = Int32(0), Int32(1), Int32(first)
        # The weights of the first stages do not wait for the kernel before, the tokens do.
        ahead = cutlass.min(steps, self.stages)
        row_block, token_tile = tile_position(tile, order, cutlass.min)
        for k in cutlass.range(ahead, unroll=1):
            self._expect(full, k, rank, lane)
            at = self.row_place(row_block, rank, begin + k)
            self._copy_rows(weight, (room, barriers_at, k), at)
        cute.arch.griddepcontrol_wait()
        while tile < total:
            row_block, token_tile = tile_position(tile, order, cutlass.min)
            group = row_block // group_blocks
            for k in cutlass.range(steps, unroll=1):
                if tile != first or k >= ahead:
                    ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
                    self._expect(full, stage, rank, lane)
                    at = self.row_place(row_block, rank, begin + k)
                    self._copy_rows(weight, (room, barriers_at, stage), at)
                where = (token_tile * self.token_block, group, tokens, rank, begin + k)
                self._copy_tokens(inputs, (room, barriers_at, stage), where)
                stage, parity = self._next(stage, parity)
            tile += stride
        self._drain(empty, stage, parity)

    @cute.jit
    def _drain(self, empty: Value, stage: Value, parity: Value) -> None:
        """Until all that was copied has been read."""
        for _ in cutlass.range(self.stages, unroll=1):
            ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
            stage, parity = self._next(stage, parity)

    @cute.jit
    def _expect(self, full: Value, stage: Value, rank: Value, lane: Value) -> None:
        """The stage is full when the bytes of all blocks have come, which the first waits for."""
        if lane == 0 and rank == 0:
            ptx.mbarrier_arrive_expect_tx(full + Uint32(stage * 8), self.pair * self.copied_bytes)

    @cute.jit
    def _copy_rows(self, copies: Value, ring: Value, where: Value) -> None:
        """A stage's codes and scales of the block's rows."""
        codes, codes_at, scales, scales_at = copies
        room, barriers_at, stage = ring
        row, tile = where
        at, barrier = room + stage * self.stage_bytes, barriers_at + stage
        self._copy_codes((codes, codes_at), row, at, ROWS, barrier)
        at += self.row_code_bytes + self.token_code_bytes
        self._copy_scales((scales, scales_at), tile, at, (1, 4), barrier)

    @cute.jit
    def _copy_tokens(self, copies: Value, ring: Value, where: Value) -> None:
        """A stage's codes of the block's tokens, and scales of the tile's."""
        codes, codes_at, scales, scales_at = copies
        room, barriers_at, stage = ring
        row, tile = self.token_place(*where)
        barrier, at = barriers_at + stage, room + stage * self.stage_bytes + self.row_code_bytes
        self._copy_codes((codes, codes_at), row, at, self.own_tokens, barrier)
        at += self.token_code_bytes + self.row_scale_bytes + self.token_scale_offset(where[3])
        self._copy_scales((scales, scales_at), tile, at, self.scale_box, barrier)

    @cute.jit
    def _copy_codes(self, copy: Value, where: Value, at: Value, rows: int, barrier: Value) -> None:
        """``rows`` rows of codes of a stage's columns."""
        atom, places = copy
        box = (rows, STEP // 2)
        to = cute.make_tensor(
            cute.recast_ptr(at, cute.make_swizzle(3, 4, 3), Uint8),
            cute.make_ordered_layout(box, order=(1, 0)),
        )
        source = cute.local_tile(cute.domain_offset(where, places), box, (0, 0))
        self._copy_box(atom, source, to, barrier)

    @cute.jit
    def _copy_scales(
        self, copy: Value, where: Value, at: Value, box: tuple[int, int], barrier: Value
    ) -> None:
        """``box`` tiles of scales."""
        atom, places = copy
        shape = (*box, ATOM // 2)
        to = cute.make_tensor(
            cute.recast_ptr(at, None, Uint16), cute.make_ordered_layout(shape, order=(2, 1, 0))
        )
        source = cute.local_tile(cute.domain_offset((*where, 0), places), shape, (0, 0, 0))
        self._copy_box(atom, source, to, barrier)

    def _copy_box(self, atom: Value, source: Value, to: Value, barrier: Value) -> None:
        """One tensor copy."""
        rank = cute.rank(to.layout)
        to, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(to, 0, rank),
            cute.group_modes(source, 0, rank),
        )
        cute.copy(atom, source, to, tma_bar_ptr=barrier, mcast_mask=Int16(3))

    # The warp that multiplies.

    @cute.jit
    def _multiply(
        self, room: Value, waits: Value, memory: Value, tiles: Value, order: Value, steps: Value
    ) -> None:
        """Every tile's sums; in the end wait until all are loaded."""
        full, empty, sums_full, sums_empty = waits
        first, stride, total = tiles
        stage, parity, tile, count = Int32(0), Int32(0), Int32(first), Int32(0)
        while tile < total:
            shift = self._shift(tile, order)
            which, ends = self.sums(count)
            ptx.mbarrier_wait(sums_empty + Uint32(which * 8), ends ^ 1)
            tcgen05.after_wait()
            sums = memory + Uint32(self.first_column(count))
            for k in cutlass.range(steps, unroll=1):
                ptx.mbarrier_wait(full + Uint32(stage * 8), parity)
                tcgen05.after_wait()
                with cute.arch.elect_one():
                    at = room + Uint32(stage * self.stage_bytes)
                    self._multiply_stage(at, sums, memory, shift, k)
                    tcgen05.commit(empty + Uint32(stage * 8), self.pair)
                stage, parity = self._next(stage, parity)
            with cute.arch.elect_one():
                tcgen05.commit(sums_full + Uint32(which * 8), self.pair)
            tile += stride
            count += 1
        for _ in cutlass.range(self.sum_stages, unroll=1):
            which, ends = self.sums(count)
            ptx.mbarrier_wait(sums_empty + Uint32(which * 8), ends ^ 1)
            count += 1

    def _shift(self, tile: Value, order: Value) -> Value:
        """``scale_shift`` of a tile."""
        _, token_tile = tile_position(tile, order, cutlass.min)
        return self.scale_shift(token_tile)

    def _multiply_stage(
        self, at: Value, sums: Value, memory: Value, shift: Value, k: Value
    ) -> None:
        """Scales of 256 columns to tensor memory, and the product."""
        right_at = at + Uint32(self.row_code_bytes)
        row_scales = right_at + Uint32(self.token_code_bytes)
        token_scales = row_scales + Uint32(self.row_scale_bytes)
        left_columns = memory + Uint32(self.row_scale_column)
        right_columns = memory + Uint32(self.token_scale_column)
        for block in range(4):
            tcgen05.copy_scales(
                left_columns + Uint32(4 * block), row_scales + Uint32(block * ATOM), self.pair
            )
            for tile in range(self.scale_tiles):
                tcgen05.copy_scales(
                    right_columns + Uint32(4 * (block * self.scale_tiles + tile)),
                    token_scales + Uint32((tile * 4 + block) * ATOM),
                    self.pair,
                )
        left, right = tcgen05.codes_descriptor(at), tcgen05.codes_descriptor(right_at)
        for block in range(4):
            scales = (
                left_columns + Uint32(4 * block),
                right_columns + Uint32(4 * block * self.scale_tiles) + Uint32(shift),
            )
            accumulate = Uint32(1) if block else Uint32(k)
            tcgen05.multiply(
                sums,
                left + Int64(2 * block),
                right + Int64(2 * block),
                scales,
                accumulate,
                self.instruction,
                self.pair,
            )

    # The warps that store results.

    @cute.jit
    def _results(
        self,
        waits: Value,
        places: Value,
        tiles: Value,
        order: Value,
        sizes: Value,
        rules: Value,
        where: Value,
    ) -> None:
        """Load every tile's sums, give the columns back, and store."""
        sums_full, sums_empty, memory, room = waits
        first, stride, total = tiles
        rows, limit = sizes[1:3]
        rank, part, warp, lane, thread = where
        tile, count = Int32(first), Int32(0)
        while tile < total:
            row_block, token, tokens, of_tile = self._of_tile(tile, order, places, sizes)
            row = (row_block * self.pair + rank) * ROWS
            factors = self._factors(of_tile[0], row + warp * 32 + lane // 4, rows, rules)
            self._before_results(of_tile, (row_block, rank, tokens, thread))
            which, ends = self.sums(count)
            ptx.mbarrier_wait(sums_full + Uint32(which * 8), ends)
            tcgen05.after_wait()
            sums = memory + Uint32(self.first_column(count)) + Uint32(warp << 21)
            for i in cutlass.range(self.chunks, unroll=1):
                chunk = self.chunk(i, count)
                begin = token + chunk * CHUNK
                scales = self._token_scales(of_tile[1:3], begin + lane % 4 * 2, CHUNK // 8, tokens)
                weights = self._row_weights(of_tile, begin + lane % 4 * 2, tokens)
                fragments = tcgen05.load(sums + Uint32(chunk * CHUNK), CHUNK // 8)
                if i == self.early_chunks - 1:
                    self._release(sums_empty + Uint32(which * 8), lane)
                if cutlass.const_expr(self.parts > 1):
                    self._keep(fragments, room + Uint32(thread * 16), chunk)
                else:
                    values = self._scaled(fragments, factors, scales, limit, lane)
                    values = self._weighted(values, weights)
                    self._store(values, of_tile, (begin, row, warp, lane, thread), (tokens, rows))
            if cutlass.const_expr(self.parts > 1):
                begin = token + part * (8 * self.own_tiles)
                scales = self._token_scales(
                    of_tile[1:3], begin + lane % 4 * 2, self.own_tiles, tokens
                )
                self._meet()
                fragments = self._together(room + Uint32(thread * 16), part)
                values = self._scaled(fragments, factors, scales, limit, lane)
                self._store(values, of_tile, (begin, row, warp, lane, thread), (tokens, rows))
            tile += stride
            count += 1

    def _of_tile(self, tile: Value, order: Value, places: Value, sizes: Value) -> Value:
        """A tile's block of rows, its first token, how many there are, and where its things lie."""
        tokens, _, _, group_blocks = sizes
        global_scale, token_scale, scale_tokens, *rest = places
        row_block, token_tile = tile_position(tile, order, cutlass.min)
        scale_at = token_scale + Int64(row_block // group_blocks * tokens) * scale_tokens * 4
        at = (global_scale, scale_at, scale_tokens, *rest)
        return row_block, token_tile * self.token_block, tokens, at

    def _before_results(self, places: Value, where: Value) -> None:
        """What else is done for a tile, before its sums are there: nothing."""

    def _row_weights(self, places: Value, begin: Value, tokens: Value) -> Value:
        """What results of two tokens of each tile of 8 are multiplied by: nothing."""

    def _weighted(self, values: Value, weights: Value) -> Value:
        """Results times what their tokens weigh."""
        return values

    @cute.jit
    def _keep(self, fragments: Value, room: Value, chunk: Value) -> None:
        """A chunk of the block's sums, for the other blocks that share K: where stages were."""
        for h in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(CHUNK // 8):
                at = room + Uint32((chunk * (CHUNK // 4) + n * 2 + h) * _KEPT)
                ptx.store_shared_float4(at, fragments[h][n])

    @cute.jit
    def _together(self, room: Value, part: Value) -> Value:
        """The sums of all blocks, of the tokens that this block stores."""
        halves = []
        for h in cutlass.range_constexpr(2):
            tiles = []
            for n in cutlass.range_constexpr(self.own_tiles):
                at = room + Uint32(((part * self.own_tiles + n) * 2 + h) * _KEPT)
                total = [Float32(0.0)] * 4
                for r in cutlass.range_constexpr(self.parts):
                    more = ptx.load_shared_cluster_float4(ptx.map_to_cta(at, Int32(r)))
                    total = [total[i] + more[i] for i in range(4)]
                tiles.append(total)
            halves.append(tiles)
        return halves

    @cute.jit
    def _release(self, barrier: Value, lane: Value) -> None:
        """This warp has loaded what the next product overwrites: the first block is told."""
        tcgen05.before_arrival()
        cute.arch.sync_warp()
        if lane == 0:
            if cutlass.const_expr(self.pair > 1):
                tcgen05.arrive_first(barrier)
            else:
                ptx.mbarrier_arrive(barrier)

    @cute.jit
    def _factors(self, global_scale: Value, row: Value, rows: Value, rules: Value) -> Value:
        """Global scales of the lane's four rows: of two fragments, two each."""
        cut0, cut1, cut2, scale_rows = rules
        factors = []
        for h in cutlass.range_constexpr(4):
            at = cutlass.min(row + h * 8, rows - 1)
            index = Int32(at >= cut0) + Int32(at >= cut1) + Int32(at >= cut2)
            if scale_rows == 1:
                index = at
            factors.append(ptx.load_global_float(global_scale + Int64(index) * 4))
        return factors

    @cute.jit
    def _token_scales(self, scale: Value, begin: Value, count: int, tokens: Value) -> Value:
        """The number of two tokens of each tile of 8; of addresses of one for all the same."""
        start, stride = scale
        found = []
        for n in cutlass.range_constexpr(2 * count):
            token = cutlass.min(begin + n // 2 * 8 + n % 2, tokens - 1)
            found.append(ptx.load_global_float(start + Int64(token * stride) * 4))
        return found

    def _scaled(
        self, fragments: Value, factors: Value, scales: Value, limit: Value, lane: Value
    ) -> Value:
        """Results of both halves' fragments: the sums times both global scales, or SwiGLU."""
        values = [
            [
                [four[i] * (factors[2 * h + i // 2] * scales[2 * n + i % 2]) for i in range(4)]
                for n, four in enumerate(half)
            ]
            for h, half in enumerate(fragments)
        ]
        if not self.swiglu:
            return values
        return [[swiglu_outputs(four, limit, lane) for four in half] for half in values]

    @cute.jit
    def _store(self, values: Value, places: Value, where: Value, sizes: Value) -> None:
        """Results of a chunk of tokens."""
        begin, row, warp, lane, thread = where
        tokens, rows = sizes
        outputs = rows // 16 * self.tile_outputs
        first = row // 16 * self.tile_outputs
        if cutlass.const_expr(self.float32_out):
            for h in cutlass.range_constexpr(2):
                start = first + (warp * 2 + h) * self.tile_outputs
                self._scatter(values[h], places[3], (begin, start, lane), (tokens, outputs))
        else:
            self._lines(values, places, (begin, first, warp, lane, thread), (tokens, outputs))

    @cute.jit
    def _scatter(self, values: Value, out: Value, where: Value, sizes: Value) -> None:
        """float32 results, 32 bytes of a token at a time."""
        begin, start, lane = where
        tokens, outputs = sizes
        for n in cutlass.range_constexpr(len(values)):
            for i in cutlass.range_constexpr(len(values[n])):
                token = begin + n * 8 + lane % 4 * 2 + i % 2
                at = start + (swiglu_output_row(lane) if self.swiglu else lane // 4 + i // 2 * 8)
                if token < tokens and at < outputs:
                    place_ = (Int64(token) * outputs + at) * 4
                    ptx.store_global_float(out + place_, values[n][i])

    @cute.jit
    def _lines(self, values: Value, places: Value, where: Value, sizes: Value) -> None:
        """bfloat16 results by lines of a block's rows."""
        turned = places[4]
        begin, first, warp, lane, thread = where
        tokens, outputs = sizes
        count = 8 * len(values[0])
        cute.arch.barrier(barrier_id=1, number_of_threads=32 * EPILOGUE_WARPS)
        for h in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(count // 8):
                room = turned + Uint32(n * 8 * self.line)
                transpose(values[h][n], room, self.line, warp * 2 + h, lane)
        cute.arch.barrier(barrier_id=1, number_of_threads=32 * EPILOGUE_WARPS)
        vectors = self.tile_outputs  # of 8 results, of a line
        for i in cutlass.range_constexpr(-(-count * vectors // 128)):
            number = i * 128 + thread
            line, vector = number // vectors, number % vectors
            token, at = begin + line, first + vector * 8
            there = line < count and token < tokens and at < outputs
            room = turned + Uint32(line * self.line + vector * 16)
            self._write_eight(room, places, (token, at, outputs), there)

    @cute.jit
    def _write_eight(self, at: Value, places: Value, where: Value, there: Value) -> None:
        """Eight results of a token from shared memory, if they are there; all lanes together."""
        token, row, rows = where
        if there:
            words = ptx.load_shared(at, 4)
            ptx.store_global4(places[3] + (Int64(token) * rows + row) * 2, words)
