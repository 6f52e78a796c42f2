"""NVFP4 product for many tokens: bound by the tensor cores.

``out[m, n] = sum_k x[m, k] w[n, k]`` as ``wgmma`` with the weights as left operand from registers.

* Two to four warpgroups multiply. A warp loads the fragments of its 16 rows straight from global
  memory, ``depth`` blocks of 64 columns ahead. Of two or three warpgroups, each expands one block
  while the tensor cores multiply the one before: two sets of left operands, used in turn. Of four,
  each has one set and waits for its product, while the others expand.
* The last warpgroup's first warp keeps a ring of blocks of X full, by tensor copies into swizzled
  shared memory.
* Tiles follow one another, and the weights of the next are asked for before the results of the last
  are stored. The first warpgroup is some blocks ahead, so that one of them multiplies meanwhile.
* Or the blocks of a cluster share K, for one tile. Each keeps its sums in its shared memory, in the
  order in which threads hold them; then each adds its tokens' parts, ranks in ascending order.
* Results are turned in shared memory, 64 tokens at a time, so that lines of 128 bytes are stored.

The bits of a token depend on the plan, not on the other tokens. A result that is infinite is looked
at again: if the token's input held an infinity, it is NaN.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor

from dsv4.cute import _ptx as ptx
from dsv4.cute._tiles import place
from dsv4.cute._turning import turn
from dsv4.cute.sm90._activate import activated, output_row
from dsv4.cute.sm90._expand import fragment, scales_to_bfloat16
from dsv4.cute.sm90.many_plan import LINE, ManyPlan

Value = Any
_CODE_BYTES, _SCALE_BYTES = 512, 64
_SKEW = 4  # blocks of X
_BEHIND, _ALL, _READY = 5, 6, 7  # named barriers, after those of the warpgroups
_INFINITY = float("inf")


def rows_of_x() -> Any:
    """Any X, for the compiler: rows of bfloat16 that begin at multiples of 16 bytes."""
    return make_fake_tensor(
        BFloat16,
        (cute.sym_int(), cute.sym_int(divisibility=64)),
        stride=(cute.sym_int64(divisibility=8), 1),
        assumed_align=16,
    )


class ManyKernel(ManyPlan):
    """The kernel of one configuration."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        x = rows_of_x()
        return cute.compile(
            self,
            x,
            *[Int64(0)] * 6,
            *[Int32(1)] * 7,
            Int64(8),
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
        out: Int64,
        tokens: Int32,
        token_tiles: Int32,
        token_span: Int32,
        k_blocks: Int32,
        row_tiles: Int32,
        row_blocks: Int32,
        group_blocks: Int32,
        token_stride: Int64,
        group_stride: Int64,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        groups: Int32,
        sixteen: Int32,
        limit: Float32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        atom, x_tiles, layout, mma = self.tools(x)
        self.kernel(
            atom, x_tiles, layout, mma, codes, scales, global_scale, x_at, token_scale, out,
            tokens, token_tiles, token_span, k_blocks, row_tiles, row_blocks, group_blocks,
            token_stride, group_stride, cut0, cut1, cut2, scale_rows, groups, sixteen,
            limit,
        ).launch(
            grid=[self.blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.blocks, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def tools(self, x: cute.Tensor) -> tuple[Value, ...]:
        """Tensor copy of a block of X, X as it addresses it, layout of the stages, product."""
        layout = self._layout(self.token_block, self.stages)
        atom, x_tiles = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            x,
            cute.select(layout, mode=[0, 1]),
            (self.token_block, 64),
        )
        return atom, x_tiles, layout, self.product(self.token_block)

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
        return cute.make_tiled_mma(op, (self.warpgroups, 1, 1))

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
        out: Int64,
        tokens: Int32,
        token_tiles: Int32,
        token_span: Int32,
        k_blocks: Int32,
        row_tiles: Int32,
        row_blocks: Int32,
        group_blocks: Int32,
        token_stride: Int64,
        group_stride: Int64,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        groups: Int32,
        sixteen: Int32,
        limit: Float32,
    ) -> None:
        """See the module.

        Args:
            atom: The tensor copy of a block of X.
            x_tiles: X, ``[tokens, groups K]``, as the copy addresses it.
            layout: A stage of X, and all of them.
            mma: The product of 64 rows a warpgroup.
            codes: Address of the packed codes.
            scales: Address of the packed scales.
            global_scale: Address of float32 global scales.
            x_at: Address of X.
            token_scale: Address of float32 ``[tokens, groups]``, where ``row_scaled``.
            out: Address of ``[tokens, rows]``.
            tokens: At least 1.
            token_tiles: Tiles of ``token_block`` tokens.
            token_span: Of these, how many come one after another before the next rows do.
            k_blocks: K / 64, a multiple of ``blocks depth``.
            row_tiles: Rows of the weight / 16.
            row_blocks: Rows of the weight / those of a block, rounded up.
            group_blocks: Blocks of rows that share an input.
            token_stride: Elements between tokens of X.
            group_stride: Elements between groups of X: K.
            cut0: First row of the second segment; ``cut1``, ``cut2`` of the third and fourth.
            cut1: See ``cut0``.
            cut2: See ``cut0``.
            scale_rows: 1 where every row has its own global scale, else 0.
            groups: Inputs of every token.
            sixteen: 16, of which the compiler must not know.
            limit: The clamp's bound, where ``swiglu``.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank = block % self.blocks
        first, stride = block // self.blocks, grid // self.blocks
        total = token_tiles * row_blocks
        steps = k_blocks // self.blocks
        order = (token_tiles, token_span, row_blocks)

        smem = cutlass.memory.SmemAllocator()
        shared_x = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        turned = Uint32(smem.allocate_array(cutlass.Uint8, self.turned_bytes).toint())
        full_at = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        full = Uint32(full_at.toint())
        empty = full + 8 * self.stages
        cute.arch.griddepcontrol_launch_dependents()

        # The copying warp makes the barriers and waits for nobody of its block: X comes first.
        if warp >= self.mma_warps:
            cute.arch.setmaxregister_decrease(self.copy_registers)
            if warp == self.mma_warps:
                if lane < self.stages:
                    ptx.barrier_init(full + Uint32(lane * 8), 1)
                    ptx.barrier_init(empty + Uint32(lane * 8), self.mma_warps)
                    ptx.fence_barrier_init()
                cute.arch.sync_warp()
            self._arrive_ready()
            if warp == self.mma_warps:
                if cutlass.const_expr(self.blocks > 1):
                    cute.arch.cluster_wait()
                cute.arch.griddepcontrol_wait()
                tiles = cute.local_tile(x_tiles, (self.token_block, 64), (None, None))
                to, source = cpasync.tma_partition(
                    atom,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(shared_x, 0, 2),
                    cute.group_modes(tiles, 0, 2),
                )
                stage, parity, tile = Int32(0), Int32(1), Int32(first)
                while tile < total:
                    row_block, token_tile = place(tile, order, cutlass.min)
                    begin = row_block // group_blocks * k_blocks + rank * steps
                    stage, parity = self._fill(
                        (atom, source[(None, token_tile, None)], to),
                        (full, full_at, empty, stage, parity),
                        (begin, steps, lane),
                    )
                    tile += stride
            elif cutlass.const_expr(self.blocks > 1):
                cute.arch.cluster_wait()
            self._meet()
        else:
            if cutlass.const_expr(self.blocks > 1):
                cute.arch.cluster_arrive()
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
            stage, parity, tile = Int32(0), Int32(0), Int32(first)
            row_block, _ = place(tile, order, cutlass.min)
            first_row = self._safe_row(row_block, warp, row_tiles)
            at = first_row * k_blocks + rank * steps
            ahead = [self._fetch(codes, scales, at, t) for t in range(self.depth)]
            self._wait_ready()
            self._fall_behind(warp, steps)
            while tile < total:
                row_block, token_tile = place(tile, order, cutlass.min)
                follows, _ = place(cutlass.min(tile + stride, total - 1), order, cutlass.min)
                next_row = self._safe_row(follows, warp, row_tiles)
                then = next_row * k_blocks + rank * steps
                weight = (codes, scales, at, then, ahead)
                at, ahead, stage, parity, before = self._multiply(
                    (mma, sums, left, words, right),
                    weight,
                    (full, empty, stage, parity),
                    (steps, tile == first and warp < 4, lane, Uint32(sixteen)),
                )
                rules = (cut0, cut1, cut2, scale_rows)
                row_tile = self._row_tile(row_block, warp)
                factors = self._factors(global_scale, row_tile, lane, row_tiles, rules)
                warpgroup.wait_group(0)
                self._release(empty, before, lane)
                group = row_block // group_blocks
                fragments = self._together(sums, shared_x, rank, thread)
                self._store(
                    fragments,
                    factors,
                    (turned, token_scale + group * 4, out, x_at + group * group_stride * 2),
                    (token_tile, row_tile, warp, lane, thread, rank),
                    (tokens, row_tiles, token_stride, groups, k_blocks, limit),
                )
                tile += stride
        self._meet()

    @cute.jit
    def _fill(self, copies: Value, ring: Value, rest: Value) -> Value:
        """Keep the ring full of a tile's blocks of X; returns its next stage and parity."""
        atom, source, to = copies
        full, full_at, empty, stage, parity = ring
        begin, steps, lane = rest
        for k in cutlass.range(steps, unroll=1):
            ptx.wait(empty + Uint32(stage * 8), parity)
            if lane == 0:
                ptx.expect_bytes(full + Uint32(stage * 8), self.x_bytes)
            cute.copy(
                atom,
                source[(None, begin + k)],
                to[(None, stage)],
                tma_bar_ptr=full_at + stage,
            )
            stage += 1
            if stage == self.stages:
                stage = Int32(0)
                parity = parity ^ 1
        return stage, parity

    @cute.jit
    def _multiply(self, operands: Value, weight: Value, ring: Value, rest: Value) -> Value:
        """Sums of a tile, the last product in flight.

        Returns the place of the next tile's weights and its first blocks, the ring's next stage
        and parity, and the stage that the product in flight reads.
        """
        mma, sums, left, words, right = operands
        codes, scales, at, then, ahead = weight
        full, empty, stage, parity = ring
        steps, leads, lane, sixteen = rest
        sums.fill(0.0)
        before = Int32(-1)
        for step in cutlass.range(steps // self.depth, unroll=1):
            # In the last round the loads ahead are those of the next tile.
            last = Int32(step + 1 == steps // self.depth)
            at = at + self.depth + last * (then - at - self.depth)
            for t in cutlass.range_constexpr(self.depth):
                self._let_follow(t, step, leads)
                if cutlass.const_expr(self.sets == 1):
                    warpgroup.wait_group(0)
                    self._release(empty, before, lane)
                self._expand(words[t % self.sets], ahead[t], sixteen)
                ahead[t] = self._fetch(codes, scales, at, t)
                ptx.wait(full + Uint32(stage * 8), parity)
                warpgroup.fence()
                for k in cutlass.range_constexpr(4):
                    cute.gemm(
                        mma,
                        sums,
                        left[t % self.sets][None, None, k],
                        right[None, None, k, stage],
                        sums,
                    )
                warpgroup.commit_group()
                if cutlass.const_expr(self.sets == 2):
                    warpgroup.wait_group(1)
                    self._release(empty, before, lane)
                before = stage
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
        return at, ahead, stage, parity, before

    @property
    def skewed(self) -> bool:
        """Whether the first warpgroup begins some blocks of X before the other.

        One then multiplies while the other stores its results. For one tile it would be a delay.
        """
        fits = self.stages > _SKEW
        return self.warpgroups == 2 and self.blocks == 1 and self.token_block >= 128 and fits

    @cute.jit
    def _fall_behind(self, warp: Value, steps: Value) -> None:
        """The second warpgroup waits until the first is ``_SKEW`` blocks of X ahead."""
        if cutlass.const_expr(self.skewed):  # noqa: SIM102 - one is known to the compiler
            if warp >= 4 and steps > _SKEW:
                cute.arch.barrier(barrier_id=_BEHIND, number_of_threads=self.mma_warps * 32)

    @cute.jit
    def _let_follow(self, t: int, step: Value, leads: Value) -> None:
        """The first warpgroup, at that block of its first tile."""
        if cutlass.const_expr(self.skewed and t == _SKEW % self.depth):  # noqa: SIM102
            if leads and step == _SKEW // self.depth:
                cute.arch.barrier_arrive(barrier_id=_BEHIND, number_of_threads=self.mma_warps * 32)

    @cute.jit
    def _arrive_ready(self) -> None:
        """The threads that copy: the barriers of this block are initialised."""
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_arrive()
        else:
            cute.arch.barrier_arrive(barrier_id=_READY, number_of_threads=self.threads)

    @cute.jit
    def _wait_ready(self) -> None:
        """The threads that multiply: wait for the barriers of this block, or of its cluster."""
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=_READY, number_of_threads=self.threads)

    @cute.jit
    def _meet(self) -> None:
        """All threads of the cluster."""
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _row_tile(self, row_block: Value, warp: Value) -> Value:
        """The warp's tile of 16 rows."""
        return row_block * self.mma_warps + warp

    def _safe_row(self, row_block: Value, warp: Value, row_tiles: Value) -> Value:
        """The same, or the last there is where the warp has none."""
        return cutlass.min(self._row_tile(row_block, warp), row_tiles - 1)

    def _fetch(self, codes: Value, scales: Value, at: Value, tile: int) -> list[Value]:
        """The lane's 4 words of codes and 2 of scales."""
        return [
            *ptx.load_streamed(codes + Int64(at) * _CODE_BYTES, 4, None, tile * _CODE_BYTES),
            *ptx.load_streamed(scales + Int64(at) * _SCALE_BYTES, 2, None, tile * _SCALE_BYTES),
        ]

    def _expand(self, words: Value, loaded: list[Value], sixteen: Value) -> None:
        """Left operands of four steps of 16 columns."""
        for k in range(4):
            both = scales_to_bfloat16((loaded[4], loaded[5]), k, sixteen)
            for i, word in enumerate(fragment(loaded[k], both)):
                words[k * 4 + i] = word

    @cute.jit
    def _release(self, empty: Value, stage: Value, lane: Value) -> None:
        """This warp has read the stage."""
        if lane == 0 and stage >= 0:
            ptx.arrive(empty + Uint32(stage * 8))

    @property
    def own_tiles(self) -> int:
        """Tiles of 8 tokens that a block stores."""
        return self.token_block // 8 // self.blocks

    @cute.jit
    def _together(self, sums: Value, shared_x: Value, rank: Value, thread: Value) -> Value:
        """The block's share of the sums: four values per tile of 8 tokens."""
        if cutlass.const_expr(self.blocks == 1):
            return [[sums[n * 4 + i] for i in range(4)] for n in range(self.own_tiles)]
        room = Uint32(shared_x.iterator.toint()) + Uint32(thread * 16)
        line = 16 * 32 * self.mma_warps
        # All warpgroups have read the last of X, whose room this is.
        cute.arch.barrier(barrier_id=_ALL, number_of_threads=self.mma_warps * 32)
        for n in cutlass.range_constexpr(self.token_block // 8):
            ptx.store_shared_float4(room + n * line, [sums[n * 4 + i] for i in range(4)])
        self._meet()
        fragments = []
        for n in cutlass.range_constexpr(self.own_tiles):
            at = room + Uint32(rank * (self.own_tiles * line)) + n * line
            total = [Float32(0.0)] * 4
            for r in cutlass.range_constexpr(self.blocks):
                more = ptx.load_remote_float4(ptx.remote(at, Int32(r)))
                total = [total[i] + more[i] for i in range(4)]
            fragments.append(total)
        return fragments

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
        token_tile, row_tile, warp, lane, thread, rank = where
        tokens, row_tiles, token_stride, groups, k_blocks, limit = sizes
        begin = token_tile * self.token_block
        if cutlass.const_expr(self.blocks > 1):
            begin += rank * (self.own_tiles * 8)
        if cute.arch.vote_any_sync(self._any_infinite(fragments)):
            flags = self._infinite(x, begin, (tokens, token_stride, k_blocks), lane)
            fragments = self._without(fragments, flags, lane)
        for chunk in cutlass.range_constexpr(0, self.own_tiles, self.turned_tiles):
            start, count = begin + chunk * 8, min(self.turned_tiles, self.own_tiles - chunk)
            scale = self._token_factors(token_scale, start + lane % 4 * 2, count, tokens, groups)
            values = [
                [
                    fragments[chunk + n][i] * (factors[i // 2] * scale[2 * n + i % 2])
                    for i in range(4)
                ]
                for n in range(count)
            ]
            if cutlass.const_expr(self.swiglu):
                values = [activated(four, limit, lane) for four in values]
                values = self._weighted(values, places, start + lane % 4 * 2, tokens)
            if cutlass.const_expr(self.float32_out):
                self._scatter(values, out, (start, row_tile, lane), (tokens, row_tiles))
            else:
                self._lines(
                    values,
                    places,
                    (start, row_tile - warp % 4, warp, lane, thread),
                    (tokens, row_tiles),
                )

    def _weighted(self, values: Value, places: Value, begin: Value, tokens: Value) -> Value:
        """Outputs of SwiGLU, two tokens of each tile of 8, times what their tokens weigh."""
        return values

    @property
    def tile_outputs(self) -> int:
        """Results of a token in a tile of 16 rows."""
        return 8 if self.swiglu else 16

    @cute.jit
    def _any_infinite(self, fragments: Value) -> Value:
        """Whether one of the lane's sums is infinite."""
        strange = cutlass.Boolean(False)
        for four in fragments:
            for value in four:
                strange = strange | (ptx.absolute(value) == Float32(_INFINITY))
        return strange

    @cute.jit
    def _token_factors(
        self, token_scale: Value, begin: Value, count: int, tokens: Value, groups: Value
    ) -> Value:
        """The scale of two tokens of each tile of 8."""
        if cutlass.const_expr(not self.row_scaled):
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
                row = output_row(lane) if self.swiglu else lane // 4 + i // 2 * 8
                if token < tokens and row_tile < row_tiles:
                    line = Int64(token) * row_tiles + row_tile
                    place = (line * self.tile_outputs + row) * 4
                    ptx.store_global_float(out + place, values[n][i])

    @cute.jit
    def _lines(self, values: Value, places: Value, where: Value, sizes: Value) -> None:
        """bfloat16 results of at most 64 tokens by lines of a warpgroup's rows."""
        begin, row_tile, warp, lane, thread = where
        tokens, row_tiles = sizes
        group, count = warp // 4, len(values)
        room = places[0] + Uint32(group * (self.turned_bytes // self.warpgroups))
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        for n in cutlass.range_constexpr(count):
            turn(values[n], room + Uint32(n * 8 * LINE), LINE, warp % 4, lane)
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        vectors = self.tile_outputs * 4 // 8  # of 8 results, of a line
        for i in cutlass.range_constexpr(-(-count * 8 * vectors // 128)):
            number = i * 128 + thread % 128
            line, vector = number // vectors, number % vectors
            token, row = begin + line, row_tile * self.tile_outputs + vector * 8
            rows = row_tiles * self.tile_outputs
            there = line < count * 8 and token < tokens and row < rows
            at = room + Uint32(line * LINE + vector * 16)
            self._write_eight(at, places, (token, row, rows), there)

    @cute.jit
    def _write_eight(self, at: Value, places: Value, where: Value, there: Value) -> None:
        """Eight results of a token from shared memory, if they are there; all lanes together."""
        token, row, rows = where
        if there:
            words = ptx.load_shared(at, 4)
            ptx.store_global4(places[2] + (Int64(token) * rows + row) * 2, words)
