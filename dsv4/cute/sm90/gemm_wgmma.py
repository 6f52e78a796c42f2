"""NVFP4 product for many tokens: bound by the tensor cores, or by expanding the weights.

``out[m, n] = sum_k x[m, k] w[n, k]`` as ``wgmma`` with the weights as left operand from registers.

* One warp keeps a ring of stages full by tensor copies: some columns of X and the same ones of the
  weights' codes and scales. The others read a lane's operands, 16 bytes of codes and 8 of scales,
  from there, so no register holds what comes later, and memory may take its time.
* That warp asks for the weights of the first stages before the kernel before has ended, for X after
  it. Another one has the first columns of X, and global scales, brought to the level-2 cache.
* Two to four warpgroups multiply. A warp has one tile of 16 rows or two, which share what waiting
  and addresses cost. It expands 32 or 64 columns while the tensor cores multiply the ones before:
  two sets of left operands, used in turn.
* Or the blocks of a cluster share K, for one tile, some maybe a stage more than others. Each writes
  its sums of some tokens to the block that owns these, to a room for them or, where that would
  leave too few stages, where stages have been, and that adds them, ranks in ascending order.
* Results are turned in shared memory, so that lines of 128 bytes are stored.

The bits of a token depend on the plan, not on the other tokens. A result that is infinite is looked
at again: if the token's input held an infinity, it is NaN.
"""

from __future__ import annotations

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor

from dsv4.cute.device import ptx
from dsv4.cute.device.dequant import dequantized_fragment, scales_to_bfloat16
from dsv4.cute.device.epilogue import (
    outputs_in_order,
    swiglu_output_row,
    swiglu_outputs,
    transpose,
    transpose_outputs,
)
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.sm90.gemm_wgmma_plan import LINE, WGMMA_ABI, WgmmaArgs, WgmmaPlan, WgmmaTma

Value = Any
CODE_BYTES, SCALE_BYTES = 512, 64  # of 16 rows and 64 columns
PIECE = 2  # as ``WgmmaPlan.piece``, of routed experts
_READY, _BEHIND, _ALL = 5, 6, 7  # named barriers, after those of the warpgroups
_INFINITY = float("inf")


def fake_x() -> Any:
    """Any X, for the compiler: rows of bfloat16 that begin at multiples of 16 bytes."""
    return make_fake_tensor(
        BFloat16,
        (cute.sym_int(), cute.sym_int(divisibility=64)),
        stride=(cute.sym_int64(divisibility=8), 1),
        assumed_align=16,
    )


def fake_weights() -> Any:
    """Packed codes or scales, for the compiler: rows of words of 32 bits."""
    return make_fake_tensor(
        Int32,
        (cute.sym_int(), cute.sym_int(divisibility=16)),
        stride=(cute.sym_int64(divisibility=16), 1),
        assumed_align=16,
    )


class WgmmaKernel(PlannedKernel):
    """The kernel of one configuration."""

    abi = WGMMA_ABI
    plan: WgmmaPlan

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        operands = (fake_x(), fake_weights(), fake_weights())
        return cute.compile(self, *operands, self.abi.placeholders(), CUstream(0), options=options)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        args: WgmmaArgs,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        atom, x_tensor, layout, mma = self.tools(x)
        codes_atom, codes_tensor = self._copied(codes, self.plan.code_bytes)
        scales_atom, scales_tensor = self._copied(scales, self.plan.scale_bytes)
        tma = WgmmaTma(
            x_tma=atom,
            codes_tma=codes_atom,
            scales_tma=scales_atom,
            x_tensor=x_tensor,
            codes_tensor=codes_tensor,
            scales_tensor=scales_tensor,
            x_layout=layout,
        )
        self.kernel(tma, mma, args).launch(
            grid=[self.plan.ctas, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[self.plan.ctas, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def tools(self, x: cute.Tensor) -> tuple[Value, ...]:
        """Tensor copy of a box of X, X as it addresses it, layout of the stages, product."""
        box = cute.select(self._layout(self.plan.tma_tokens, 1), mode=[0, 1])
        atom, x_tiles = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x, box, (self.plan.tma_tokens, 64)
        )
        layout = self._layout(self.plan.token_block, self.plan.stage_k_blocks * self.plan.stages)
        return atom, x_tiles, layout, self.product(self.plan.token_block)

    def _copied(self, whole: cute.Tensor, each: int) -> tuple[Value, Value]:
        """Tensor copy of so many bytes of every row tile of a block; all of them."""
        box = (self.plan.cta_row_tiles, each // 4)
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), whole, cute.make_layout(box, stride=(box[1], 1)), box
        )

    def _layout(self, tokens: int, count: int) -> Value:
        """So many blocks of X, of 64 columns of ``tokens`` rows."""
        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return cute.tile_to_shape(swizzle, (tokens, 64, count), (0, 1, 2))

    def product(self, tokens: int) -> cute.TiledMma:
        """The product of 64 rows a warpgroup and so many tokens."""
        op = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (64, tokens, 16),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        return cute.make_tiled_mma(op, (self.plan.warpgroups, 1, 1))

    @cute.kernel
    def kernel(self, tma: WgmmaTma, mma: cute.TiledMma, args: WgmmaArgs) -> None:
        """Multiply the tiles of a cluster, one after another; see the module.

        Args:
            tma: TMA copies and what they read.
            mma: wgmma of 64 rows a warpgroup and ``token_block`` tokens.
            args: The scalars.
        """
        atom, codes_atom, scales_atom, x_tiles, codes_tiles, scales_tiles, layout = tma
        (
            global_scale, x_at, token_scale, out, tokens, token_tiles, token_span, k_blocks,
            row_tiles, row_blocks, group_blocks, token_stride, group_stride, cut0, cut1, cut2,
            scale_rows, groups, sixteen, limit,
        ) = args  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank = block % self.plan.ctas
        first, stride = block // self.plan.ctas, grid // self.plan.ctas
        total = token_tiles * row_blocks
        order = (token_tiles, token_span, row_blocks)
        every = k_blocks // self.plan.stage_k_blocks
        begin = rank * every // self.plan.ctas
        steps = (rank + 1) * every // self.plan.ctas - begin

        smem = cutlass.memory.SmemAllocator()
        shared_x = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        weights_at = smem.allocate_array(cutlass.Uint8, self.plan.stages * self.plan.weight_bytes)
        turned = Uint32(smem.allocate_array(cutlass.Uint8, self.plan.epilogue_bytes).toint())
        room = Uint32(shared_x.iterator.toint())
        if cutlass.const_expr(self.plan.has_exchange_buffer):
            room = Uint32(
                smem.allocate_array(cutlass.Uint8, self.plan.exchange_buffer_bytes).toint()
            )
        full_at = smem.allocate_array(cutlass.Int64, 2 * self.plan.stages + 2)
        full = Uint32(full_at.toint())
        empty = full + 8 * self.plan.stages
        gather = empty + 8 * self.plan.stages
        cute.arch.griddepcontrol_launch_dependents()

        # The copying warp makes the barriers and waits for nobody of its block: weights come first.
        if warp >= self.plan.mma_warps:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if warp == self.plan.mma_warps:
                if lane < self.plan.stages:
                    ptx.mbarrier_init(full + Uint32(lane * 8), 1)
                    ptx.mbarrier_init(empty + Uint32(lane * 8), self.plan.mma_warps)
                    ptx.fence_mbarrier_init()
                self._make_gather(gather, rank, lane)
                cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=_READY, number_of_threads=self.plan.threads)
            self._arrive_cluster()
            if warp == self.plan.mma_warps + 1:
                self._prefetch(
                    (x_at, global_scale),
                    (Int32(first), order, group_blocks, lane),
                    (tokens, token_stride, group_stride, scale_rows, row_tiles, begin),
                )
            if warp == self.plan.mma_warps:
                self._copy(
                    (atom, codes_atom, scales_atom),
                    (x_tiles, codes_tiles, scales_tiles),
                    (shared_x, weights_at, full_at, full, empty),
                    (Int32(first), stride, total, order, group_blocks, lane),
                    (begin, steps, every),
                )
            self._wait_cluster()
        else:
            self._arrive_cluster()
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            slice_ = mma.get_slice(thread)
            shape = slice_.partition_shape_C((64 * self.plan.warpgroups, self.plan.token_block))
            sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.plan.warp_tiles)]
            left_shape = slice_.partition_shape_A(
                (64 * self.plan.warpgroups, 16 * self.plan.k_steps)
            )
            left = [cute.make_rmem_tensor(left_shape, BFloat16) for _ in range(2)]
            words = [cute.recast_tensor(one, Uint32) for one in left]
            product = (*self._products(mma, sums, shared_x, thread)[0], left, words)
            codes_from = Uint32(weights_at.toint())
            scales_from = codes_from + Uint32(self.plan.cta_row_tiles * self.plan.code_bytes)
            weights = (
                codes_from + Uint32(warp * self.plan.code_bytes + lane * 16),
                scales_from + Uint32(warp * self.plan.scale_bytes + lane // 4 * 8),
            )
            stage, parity, tile = Int32(0), Int32(0), Int32(first)
            cute.arch.barrier(barrier_id=_READY, number_of_threads=self.plan.threads)
            skewed = total > stride and steps > self.skew
            self._fall_behind(warp, skewed)
            ahead = self._start(weights, full, tile < total)
            while tile < total:
                row_block, token_tile = tile_position(tile, order, cutlass.min)
                rules = (cut0, cut1, cut2, scale_rows)
                own = self._own(row_block, warp)
                factors = self._factors_of(own, (global_scale, lane, row_tiles, rules))
                for h in cutlass.range_constexpr(self.plan.warp_tiles):
                    sums[h].fill(0.0)
                ahead, stage, parity, before = self._multiply_ring(
                    product,
                    (weights, ahead),
                    (full, empty, stage, parity, Int32(-1)),
                    (steps, tile + stride >= total, lane, Uint32(sixteen)),
                    skewed and tile == first and warp < 4,
                )
                warpgroup.wait_group(0)
                self._release(empty, before, lane)
                group = row_block // group_blocks
                self._store_each(
                    (self._gathered(sums, room, gather, (rank, thread)), own, factors),
                    (turned, token_scale + group * 4, out, x_at + group * group_stride * 2),
                    (token_tile, warp, lane, thread, rank),
                    # Tokens after those of the tile are another's.
                    (
                        cutlass.min(tokens, (token_tile + 1) * self.plan.token_block),
                        row_tiles, token_stride, groups, k_blocks, limit,
                    ),
                )  # fmt: skip
                tile += stride

    @cute.jit
    def _copy(self, atoms: Value, wholes: Value, rooms: Value, walk: Value, sizes: Value) -> None:
        """A warp keeps the ring full, tile after tile.

        The weights of as many stages as there are come before the wait for the kernel before.
        """
        shared_x, weights_at, full_at, full, empty = rooms
        tile, stride, total, order, group_blocks, lane = walk
        begin, steps, every = sizes
        primed = cutlass.min(steps, Int32(self.plan.early_stages))
        cpasync.prefetch_descriptor(atoms[0])
        row_block, _ = tile_position(tile, order, cutlass.min)
        at_once = self._weights_of(atoms, wholes, weights_at, row_block * self.plan.cta_row_tiles)
        for k in cutlass.range(primed, unroll=1):
            self._expect(full + Uint32(k * 8), self.plan.token_block, lane)
            self._copy_weights(atoms, at_once, (begin + k, k), full_at + k)
        cute.arch.griddepcontrol_wait()
        to, source = self._pair(
            atoms[0],
            self._x_stages(shared_x),
            cute.local_tile(wholes[0], (self.plan.tma_tokens, 64), (None, None)),
        )
        stage, parity = Int32(0), Int32(1)
        while tile < total:
            row_block, token_tile = tile_position(tile, order, cutlass.min)
            weights = self._weights_of(
                atoms, wholes, weights_at, row_block * self.plan.cta_row_tiles
            )
            column = (row_block // group_blocks * every + begin) * self.plan.stage_k_blocks
            for k in cutlass.range(steps, unroll=1):
                if primed > 0:
                    primed -= 1
                else:
                    ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
                    self._expect(full + Uint32(stage * 8), self.plan.token_block, lane)
                    self._copy_weights(atoms, weights, (begin + k, stage), full_at + stage)
                for u in cutlass.range_constexpr(self.plan.stage_k_blocks):
                    cute.copy(
                        atoms[0],
                        source[(None, token_tile, column + self.plan.stage_k_blocks * k + u)],
                        to[(None, self.plan.stage_k_blocks * stage + u)],
                        tma_bar_ptr=full_at + stage,
                    )
                stage += 1
                if stage == self.plan.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
            tile += stride

    @cute.jit
    def _prefetch(self, places: Value, walk: Value, sizes: Value) -> None:
        """Have what the first tile needs soon in the level-2 cache: of X, and global scales."""
        x, global_scale = places
        tile, order, group_blocks, lane = walk
        tokens, token_stride, group_stride, scale_rows, row_tiles, begin = sizes
        row_block, token_tile = tile_position(tile, order, cutlass.min)
        first = token_tile * self.plan.token_block
        column = row_block // group_blocks * group_stride + begin * (64 * self.plan.stage_k_blocks)
        for i in cutlass.range_constexpr(-(-self.plan.token_block // 32)):
            token = cutlass.min(first + i * 32 + lane, tokens - 1)
            start = x + (Int64(token) * token_stride + column) * 2
            ptx.bulk_prefetch_l2(start, 128 * self.plan.stage_k_blocks)
        row = cutlass.min(row_block * self.plan.cta_row_tiles + lane, row_tiles - 1)
        ptx.prefetch_l2(global_scale + Int64(row * scale_rows) * 64)

    @cute.jit
    def _expect(self, barrier: Value, tokens: Value, lane: Value) -> None:
        """A stage of so many tokens and the weights is to come."""
        if lane == 0:
            ptx.mbarrier_arrive_expect_tx(
                barrier, tokens * (128 * self.plan.stage_k_blocks) + self.plan.weight_bytes
            )

    def _weights_of(self, atoms: Value, wholes: Value, at: Value, row: Value) -> Value:
        """``_weights`` of the codes and of the scales."""
        scales_at = at + self.plan.cta_row_tiles * self.plan.code_bytes
        return (
            self._weights(atoms[1], at, wholes[1], row, self.plan.code_bytes),
            self._weights(atoms[2], scales_at, wholes[2], row, self.plan.scale_bytes),
        )

    def _copy_weights(self, atoms: Value, weights: Value, where: Value, barrier: Value) -> None:
        """Codes and scales of a step, to a stage."""
        k, stage = where
        for atom, (to, source) in zip(atoms[1:], weights, strict=True):
            cute.copy(atom, source[(None, k)], to[(None, stage)], tma_bar_ptr=barrier)

    def _x_stages(self, shared_x: Value) -> Value:
        """The boxes of X of all stages in shared memory."""
        boxes = (
            self.plan.stages
            * self.plan.stage_k_blocks
            * (self.plan.token_block // self.plan.tma_tokens)
        )
        return cute.make_tensor(shared_x.iterator, self._layout(self.plan.tma_tokens, boxes).outer)

    def _weights(self, atom: Value, at: Value, whole: Value, row: Value, each: int) -> Value:
        """Stages in shared memory, and what goes there, ``each`` bytes of tiles from a row on."""
        words = each // 4
        stages = cute.make_layout(
            (self.plan.cta_row_tiles, words, self.plan.stages),
            stride=(words, 1, self.plan.weight_bytes // 4),
        )
        shared = cute.make_tensor(cute.recast_ptr(at, dtype=Int32), stages)
        rows = cute.domain_offset((row, 0), whole)
        return self._pair(
            atom, shared, cute.local_tile(rows, (self.plan.cta_row_tiles, words), (0, None))
        )

    def _pair(self, atom: Value, shared: Value, tiles: Value) -> Value:
        """Where copies go and whence, by stages or tiles."""
        whole = cute.make_layout(1)
        grouped = [cute.group_modes(one, 0, 2) for one in (shared, tiles)]
        return cpasync.tma_partition(atom, 0, whole, *grouped)

    def _own(self, row_block: Value, warp: Value) -> list[Value]:
        """The warp's tiles of 16 rows."""
        first = row_block * self.plan.cta_row_tiles + warp
        return [first + h * self.plan.mma_warps for h in range(self.plan.warp_tiles)]

    def _factors_of(self, own: list[Value], told: Value) -> list[Value]:
        """``_factors`` of each tile."""
        of_expert, lane, row_tiles, rules = told
        return [self._factors(of_expert, tile, lane, row_tiles, rules) for tile in own]

    @cute.jit
    def _store_each(self, tiles: Value, places: Value, where: Value, sizes: Value) -> None:
        """The results of the warp's tiles of rows."""
        token_tile, warp, lane, thread, rank = where
        for h, (fragments, row_tile, factors) in enumerate(zip(*tiles, strict=True)):
            here = (token_tile, row_tile, warp, lane, thread, rank, h)
            self._store(fragments, factors, places, here, sizes)

    @property
    def _turns(self) -> int:
        """How many times the results of a tile of rows are turned."""
        return -(-self.own_tiles // self.plan.epilogue_tiles)

    @property
    def own_tiles(self) -> int:
        """Tiles of 8 tokens that a block stores, the last blocks of a cluster maybe fewer."""
        return -(-self.plan.token_block // 8 // self.plan.ctas)

    @cute.jit
    def _arrive_cluster(self) -> None:
        """This thread's block has made its barriers, or has others that make them."""
        if cutlass.const_expr(self.plan.ctas > 1):
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def _wait_cluster(self) -> None:
        """All blocks of the cluster have barriers."""
        if cutlass.const_expr(self.plan.ctas > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def _make_gather(self, gather: Value, rank: Value, lane: Value) -> None:
        """Barriers of the sums that other blocks send, and of these blocks' being ready."""
        if cutlass.const_expr(self.plan.ctas > 1):
            own = cutlass.min(
                cutlass.max(self.plan.token_block // 8 - rank * self.own_tiles, 0), self.own_tiles
            )
            if lane == 0:
                ptx.mbarrier_init(gather, 1)
                ptx.mbarrier_init(gather + Uint32(8), self.plan.ctas)
                ptx.fence_mbarrier_init()
            cute.arch.sync_warp()
            if lane == 0:
                ptx.mbarrier_arrive_expect_tx(
                    gather, own * ((self.plan.ctas - 1) * 8 * 4 * self.plan.rows)
                )

    @cute.jit
    def _wait_for_room(self, gather: Value, thread: Value) -> None:
        """Until sums may be sent to the other blocks."""
        if cutlass.const_expr(self.plan.has_exchange_buffer):
            self._wait_cluster()
        else:
            # When all warps of all blocks have read their last stage, sums may lie there.
            cute.arch.barrier(barrier_id=_ALL, number_of_threads=self.plan.mma_warps * 32)
            self._wait_cluster()
            if thread < self.plan.ctas:
                ptx.mbarrier_arrive_remote(ptx.map_to_cta(gather + Uint32(8), Int32(thread)))
            ptx.mbarrier_wait(gather + Uint32(8), Int32(0))

    @cute.jit
    def _gathered(self, sums: Value, room: Value, gather: Value, who: Value) -> Value:
        """The block's share of the sums: of each tile of rows, four values per 8 tokens."""
        count = self.plan.token_block // 8
        if cutlass.const_expr(self.plan.ctas == 1):
            return [[[one[n * 4 + i] for i in range(4)] for n in range(count)] for one in sums]
        rank, thread = who
        line = 16 * 32 * self.plan.mma_warps
        part = self.own_tiles * self.plan.warp_tiles * line
        room += Uint32(thread * 16)
        self._wait_for_room(gather, thread)
        mine = room + Uint32(rank * part)
        for owner in cutlass.range_constexpr(self.plan.ctas):
            first, end = owner * self.own_tiles, min((owner + 1) * self.own_tiles, count)
            to, barrier = ptx.map_to_cta(mine, Int32(owner)), ptx.map_to_cta(gather, Int32(owner))
            for n in cutlass.range_constexpr(max(0, end - first)):
                for h in cutlass.range_constexpr(self.plan.warp_tiles):
                    four = [sums[h][(first + n) * 4 + i] for i in range(4)]
                    place = (n * self.plan.warp_tiles + h) * line
                    if rank == owner:
                        ptx.store_shared_float4(mine + Uint32(place), four)
                    else:
                        ptx.async_store_remote4(to, four, barrier, place)
        ptx.mbarrier_wait(gather, Int32(0))
        found = []
        for h in cutlass.range_constexpr(self.plan.warp_tiles):
            fragments = []
            for n in cutlass.range_constexpr(self.own_tiles):
                total = [Float32(0.0)] * 4
                for r in cutlass.range_constexpr(self.plan.ctas):
                    at = room + Uint32(r * part + (n * self.plan.warp_tiles + h) * line)
                    more = ptx.load_shared_float4(at)
                    total = [total[i] + more[i] for i in range(4)]
                if cutlass.const_expr(count % self.plan.ctas):
                    # Where the cluster has no such tile, whatever lay there is no infinity.
                    there = rank * self.own_tiles + n < count
                    total = [ptx.select_float(there, one, Float32(0.0)) for one in total]
                fragments.append(total)
            found.append(fragments)
        return found

    def _products(
        self, mma: Value, sums: Value, shared_x: Value, thread: Value
    ) -> list[tuple[Value, Value, Value]]:
        """For each size: the product, its part of the sums, right operands of all stages."""
        found = []
        for tokens in self.plan.mma_widths:
            one = mma if tokens == self.plan.token_block else self.product(tokens)
            one.set(warpgroup.Field.ACCUMULATE, True)
            slice_ = one.get_slice(thread)
            shape = slice_.partition_shape_C((64 * self.plan.warpgroups, tokens))
            parts = [cute.make_tensor(every.iterator, cute.make_layout(shape)) for every in sums]
            # Rows of 128 bytes in groups of 8, as a whole stage has them; the first so many.
            stages = cute.make_layout(
                ((8, tokens // 8), (64, 1), (1, self.plan.stage_k_blocks * self.plan.stages)),
                stride=((64, 512), (1, 0), (0, self.plan.token_block * 64)),
            )
            rows = cute.make_tensor(shared_x.iterator, stages)
            found.append((one, parts, one.make_fragment_B(slice_.partition_B(rows))))
        return found

    @cute.jit
    def _start(self, weights: Value, full: Value, there: Value) -> Value:
        """The lane's weights of the first stage, once they are there."""
        if there:
            ptx.mbarrier_wait(full, Int32(0))
        return self._load_first(weights)

    def _load_first(self, weights: Value) -> list[Value]:
        """What ``ahead`` blocks of 64 columns need, of each of the warp's tiles."""
        each = itertools.product(range(self.plan.prefetched_k_blocks), range(self.plan.warp_tiles))
        return [self._load(weights, Int32(0), u, h) for u, h in each]

    def _load(self, weights: Value, stage: Value, u: int, h: int) -> list[Value]:
        """The lane's 4 words of codes and 2 of scales, of a stage's block of 64 columns."""
        codes, scales = weights
        skip, further = Uint32(stage * self.plan.weight_bytes), h * self.plan.mma_warps
        codes_from = codes + skip + Uint32(further * self.plan.code_bytes + u * CODE_BYTES)
        scales_from = scales + skip + Uint32(further * self.plan.scale_bytes + u * SCALE_BYTES)
        return [*ptx.load_shared(codes_from, 4), *ptx.load_shared(scales_from, 2)]

    @cute.jit
    def _multiply_ring(
        self, product: Value, weight: Value, ring: Value, rest: Value, leads: Value = None
    ) -> Value:
        """Add a tile's products to its sums, the last one in flight.

        ``leads``: whether this is the first tile of the warpgroup that another one falls behind.
        Returns the lane's next weights, the ring's next stage and parity, and the stage that the
        product in flight reads.
        """
        mma, sums, right, left, words = product
        weights, ahead = weight
        full, empty, stage, parity, before = ring
        steps, is_last, lane, sixteen = rest
        for step in cutlass.range(steps, unroll=1):
            following, later = stage + 1, parity
            if following == self.plan.stages:
                following = Int32(0)
                later = parity ^ 1
            for piece in cutlass.range_constexpr(4 * self.plan.stage_k_blocks // self.plan.k_steps):
                u, start = divmod(piece * self.plan.k_steps, 4)
                for h in cutlass.range_constexpr(self.plan.warp_tiles):
                    turn = (piece * self.plan.warp_tiles + h) % 2
                    place = u % self.plan.prefetched_k_blocks * self.plan.warp_tiles + h
                    self._expand_some(words[turn], ahead[place], start, sixteen)
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(self.plan.k_steps):
                        cute.gemm(
                            mma,
                            sums[h],
                            left[turn][None, None, k],
                            right[None, None, start + k, self.plan.stage_k_blocks * stage + u],
                            sums[h],
                        )
                    warpgroup.commit_group()
                    if cutlass.const_expr(start + self.plan.k_steps == 4):
                        # Of the block of 64 columns so many further on, maybe the next stage's.
                        coming = u + self.plan.prefetched_k_blocks
                        whole = self.plan.stage_k_blocks
                        if cutlass.const_expr(coming == whole and h == 0):  # noqa: SIM102
                            if not (is_last and step + 1 == steps):
                                ptx.mbarrier_wait(full + Uint32(following * 8), later)
                        there = following if coming >= whole else stage
                        ahead[place] = self._load(weights, there, coming % whole, h)
                    warpgroup.wait_group(1)
                    if cutlass.const_expr(piece == h == 0):
                        self._release(empty, before, lane)
            self._let_follow(leads, step)
            before = stage
            stage = following
            parity = later
        return ahead, stage, parity, before

    @property
    def skew(self) -> int:
        """Stages that the first of two warpgroups is ahead of the other, 0 where it is not.

        One then multiplies while the other stores its results.
        """
        fits = self.plan.warpgroups == 2 and self.plan.ctas == 1 and self.plan.token_block >= 128
        return self.plan.stages - 2 if fits else 0

    @cute.jit
    def _fall_behind(self, warp: Value, skewed: Value) -> None:
        """The second warpgroup waits until the first is some stages ahead."""
        if cutlass.const_expr(self.skew):  # noqa: SIM102 - one is known to the compiler
            if skewed and warp >= 4:
                cute.arch.barrier(barrier_id=_BEHIND, number_of_threads=self.plan.mma_warps * 32)

    @cute.jit
    def _let_follow(self, leads: Value, step: Value) -> None:
        """The first warpgroup, after so many stages of its first tile."""
        if cutlass.const_expr(self.skew and leads is not None):  # noqa: SIM102
            if leads and step == self.skew - 1:
                cute.arch.barrier_arrive(
                    barrier_id=_BEHIND, number_of_threads=self.plan.mma_warps * 32
                )

    def _expand_some(self, words: Value, loaded: list[Value], start: int, sixteen: Value) -> None:
        """Left operands of a piece, from that step of 16 columns on."""
        for k in range(self.plan.k_steps):
            both = scales_to_bfloat16((loaded[4], loaded[5]), start + k, sixteen)
            for i, word in enumerate(dequantized_fragment(loaded[start + k], both)):
                words[k * 4 + i] = word

    @cute.jit
    def _release(self, empty: Value, stage: Value, lane: Value) -> None:
        """This warp has read the stage."""
        if lane == 0 and stage >= 0:
            ptx.mbarrier_arrive(empty + Uint32(stage * 8))

    @cute.jit
    def _factors(
        self, global_scale: Value, row_tile: Value, lane: Value, row_tiles: Value, rules: Value
    ) -> Value:
        """Global scale times 2^7 of the lane's two rows."""
        cut0, cut1, cut2, scale_rows = rules
        factors = []
        for h in cutlass.range_constexpr(2):
            at = cutlass.min(row_tile, row_tiles - 1) * 16 + lane // 4 + h * 8
            index = Int32(at >= cut0) + Int32(at >= cut1) + Int32(at >= cut2)
            if scale_rows == 1:
                index = at
            factors.append(ptx.load_global_float(global_scale + Int64(index) * 4) * Float32(128.0))
        return factors

    @cute.jit
    def _store(
        self, fragments: Value, factors: Value, places: Value, where: Value, sizes: Value
    ) -> None:
        _, token_scale, out, x, *_ = places
        token_tile, row_tile, warp, lane, thread, rank, h = where
        tokens, row_tiles, token_stride, groups, k_blocks, limit = sizes
        begin = token_tile * self.plan.token_block
        if cutlass.const_expr(self.plan.ctas > 1):
            begin += rank * (self.own_tiles * 8)
        # SwiGLU of what is infinite is NaN whatever the input held.
        if cutlass.const_expr(not self.plan.swiglu):  # noqa: SIM102 - one is known to the compiler
            if cute.arch.vote_any_sync(self._any_infinite(fragments)):
                flags = self._infinite(x, begin, (tokens, token_stride, k_blocks), lane)
                fragments = self._without(fragments, flags, lane)
        for chunk in cutlass.range_constexpr(0, self.own_tiles, self.plan.epilogue_tiles):
            start, count = begin + chunk * 8, min(self.plan.epilogue_tiles, self.own_tiles - chunk)
            values = self._scaled(
                fragments[chunk : chunk + count],
                factors,
                (token_scale, start + lane % 4 * 2, tokens, groups),
            )
            if cutlass.const_expr(self.plan.swiglu):
                values = [swiglu_outputs(four, limit, lane) for four in values]
                values = self._weighted(values, places, chunk)
            if cutlass.const_expr(self.plan.float32_out):
                self._scatter(values, out, (start, row_tile, lane), (tokens, row_tiles))
            else:
                self._lines(
                    values,
                    places,
                    (start, row_tile - warp % 4, warp, lane, thread),
                    (tokens, row_tiles, h * self._turns + chunk // self.plan.epilogue_tiles),
                )

    def _weighted(self, values: Value, places: Value, first: int) -> Value:
        """Outputs of SwiGLU, from that tile of 8 tokens on, times what their tokens weigh."""
        return values

    @property
    def tile_outputs(self) -> int:
        """Results of a token in a tile of 16 rows."""
        return 8 if self.plan.swiglu else 16

    @cute.jit
    def _any_infinite(self, fragments: Value) -> Value:
        """Whether one of the lane's sums is infinite.

        By the largest, in four chains: that waits less than for a predicate after the other.
        """
        most = [ptx.abs_float(value) for value in fragments[0]]
        for four in fragments[1:]:
            most = [ptx.max_float(one, ptx.abs_float(v)) for one, v in zip(most, four, strict=True)]
        most = [ptx.max_float(*two) for two in zip(most[:2], most[2:], strict=True)]
        return ptx.max_float(*most) == Float32(_INFINITY)

    def _scaled(self, fragments: Value, factors: Value, of_tokens: Value) -> Value:
        """Sums times the scales of their rows and, if these have any, of their tokens."""
        token_scale, begin, tokens, groups = of_tokens
        scale = self._token_factors(token_scale, begin, len(fragments), tokens, groups)
        return [
            [four[i] * (factors[i // 2] * scale[2 * n + i % 2]) for i in range(4)]
            for n, four in enumerate(fragments)
        ]

    @cute.jit
    def _token_factors(
        self, token_scale: Value, begin: Value, count: int, tokens: Value, groups: Value
    ) -> Value:
        """The scale of two tokens of each tile of 8."""
        if cutlass.const_expr(not self.plan.row_scaled):
            return [Float32(1.0)] * (2 * count)
        found = []
        for n in cutlass.range_constexpr(2 * count):
            token = cutlass.min(begin + n // 2 * 8 + n % 2, tokens - 1)
            found.append(ptx.load_global_float(token_scale + Int64(token) * groups * 4))
        return found

    @cute.jit
    def _infinite(self, x: Value, begin: Value, sizes: Value, lane: Value) -> Value:
        """A bit for each of the block's tokens: whether its input holds an infinity or a NaN."""
        tokens, token_stride, k_blocks = sizes
        flags = []
        for w in cutlass.range_constexpr(-(-self.own_tiles // 4)):
            flag = Uint32(0)
            for j in cutlass.range(32, unroll=1):
                token = cutlass.min(begin + w * 32 + j, tokens - 1)
                row = x + (Int64(token) * token_stride) * 2 + lane * 4
                found = Uint32(0)
                for c in cutlass.range(k_blocks, unroll=1):
                    word = ptx.load_global(row + c * 128)
                    low, high = word & Uint32(0x7F80), word & Uint32(0x7F800000)
                    if low == Uint32(0x7F80) or high == Uint32(0x7F800000):
                        found = Uint32(1)
                if cute.arch.vote_any_sync(found == Uint32(1)):
                    flag = flag | (Uint32(1) << Uint32(j))
            flags.append(flag)
        return flags

    def _without(self, values: Value, flags: Value, lane: Value) -> Value:
        """The values, NaN for tokens that have a flag."""
        shifted = [flag >> Uint32(lane % 4 * 2) for flag in flags]
        return [
            [
                ptx.nan_if(value, shifted[n // 4] & Uint32(1 << (n % 4 * 8 + i % 2)))
                for i, value in enumerate(four)
            ]
            for n, four in enumerate(values)
        ]

    @cute.jit
    def _scatter(self, values: Value, out: Value, where: Value, sizes: Value) -> None:
        """float32 results, 32 bytes of a token at a time."""
        begin, row_tile, lane = where
        tokens, row_tiles = sizes
        for n in cutlass.range_constexpr(len(values)):
            for i in cutlass.range_constexpr(len(values[n])):
                token = begin + n * 8 + lane % 4 * 2 + i % 2
                row = swiglu_output_row(lane) if self.plan.swiglu else lane // 4 + i // 2 * 8
                if token < tokens and row_tile < row_tiles:
                    line = Int64(token) * row_tiles + row_tile
                    place = (line * self.tile_outputs + row) * 4
                    ptx.store_global_float(out + place, values[n][i])

    @cute.jit
    def _lines(self, values: Value, places: Value, where: Value, sizes: Value) -> None:
        """bfloat16 results of some tokens by lines of a warpgroup's rows."""
        begin, row_tile, warp, lane, thread = where
        tokens, row_tiles, turns = sizes
        group, count = warp // 4, len(values)
        each = self.plan.epilogue_bytes // self.plan.warpgroups // self.plan.epilogue_buffers
        room = places[0] + Uint32(
            (group * self.plan.epilogue_buffers + turns % self.plan.epilogue_buffers) * each
        )
        # Of two rooms, the one before last has been read when all have written to the last.
        if cutlass.const_expr(self.plan.epilogue_buffers == 1 or turns == 0):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        if cutlass.const_expr(self.plan.swiglu):
            transpose_outputs(values, room, LINE, warp % 4, lane)
        else:
            for n in cutlass.range_constexpr(count):
                transpose(values[n], room + Uint32(n * 8 * LINE), LINE, warp % 4, lane)
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        vectors = self.tile_outputs * 4 // 8  # of 8 results, of a line
        for i in cutlass.range_constexpr(-(-count * 8 * vectors // 128)):
            number = i * 128 + thread % 128
            line, vector = number // vectors, number % vectors
            token, row = begin + line, row_tile * self.tile_outputs + vector * 8
            rows = row_tiles * self.tile_outputs
            there = line < count * 8 and token < tokens and row < rows
            if cutlass.const_expr(count * 8 * vectors % 128):
                # For lanes without a line the last one: no warp writes there now.
                line = cutlass.min(line, count * 8 - 1)
            at = room + Uint32(line * LINE + vector * 16)
            self._write_eight(at, places, (token, row, rows), there)

    def _eight(self, at: Value) -> Value:
        """Eight results of a token, in order."""
        words = ptx.load_shared(at, 4)
        return outputs_in_order(words) if self.plan.swiglu else words

    @cute.jit
    def _write_eight(self, at: Value, places: Value, where: Value, there: Value) -> None:
        """Eight results of a token from shared memory, if they are there; all lanes together."""
        token, row, rows = where
        if there:
            words = self._eight(at)
            ptx.store_global4(places[2] + (Int64(token) * rows + row) * 2, words)
