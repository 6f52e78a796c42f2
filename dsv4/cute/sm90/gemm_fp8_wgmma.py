"""FP8 product for many tokens, one scale per 128 x 128 block of the weight.

``gemm_wgmma``'s kernel, with its tiles, warps, clusters and stores, but:

* The weight is read as it is stored, rows of E4M3 codes: no second copy in another layout. A stage
  is 128 columns, of which a row's codes are a line of 128 bytes, copied as X is.
* A lane's operands of 16 columns are four pairs of codes, a load each, because columns stand in X's
  order. Pieces of 16 bytes of a line are exchanged by the row's number, so that none of these loads
  waits for another's bank.
* A pair becomes bfloat16, exactly, through float16 and float32; NaN stays NaN. Pieces of 32 columns
  are expanded while the tensor cores multiply the one before, from pairs loaded a piece earlier.
* A float32 scale: the tensor cores sum 128 columns in registers of their own. Times the block's
  scale these sums are added in float32, in ascending order: the operands hold no scale, and no
  scale is rounded.
* An E8M0 scale is a power of two: the operands are multiplied by it, exactly, and one set of sums
  is enough (``FoldedFp8WgmmaKernel``).
* Weights may be what the kernel before wrote. Nothing is read before its end, but the codes of the
  first stages are brought to the level-2 cache, which sees what is written since.
"""

from __future__ import annotations

import itertools
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.sm90.gemm_fp8_wgmma_plan import (
    BLOCK,
    FP8_WGMMA_ABI,
    Fp8WgmmaArgs,
    Fp8WgmmaPlan,
    Fp8WgmmaTma,
)
from dsv4.cute.sm90.gemm_wgmma import WgmmaKernel, fake_x

Value = Any
_READY = 5  # a named barrier, after those of the warpgroups
_PIECES = 4  # of 32 columns, of a stage
# Bytes of E8M0 scales with which every code is a normal bfloat16.
_LOWEST, _HIGHEST = 10, 246


class Fp8WgmmaKernel(WgmmaKernel):
    """The kernel of one configuration."""

    abi = FP8_WGMMA_ABI
    plan: Fp8WgmmaPlan

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        operands = (fake_x(), fake_x())
        return cute.compile(self, *operands, self.abi.placeholders(), CUstream(0), options=options)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, codes: cute.Tensor, args: Fp8WgmmaArgs, stream: CUstream
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        atom, x_tensor, layout, mma = self.tools(x)
        codes_atom, codes_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            codes,
            cute.select(self._layout(self.plan.rows, 1), mode=[0, 1]),
            (self.plan.rows, 64),
        )
        tma = Fp8WgmmaTma(
            x_tma=atom,
            codes_tma=codes_atom,
            x_tensor=x_tensor,
            codes_tensor=codes_tensor,
            x_layout=layout,
        )
        self.kernel(tma, mma, args).launch(
            grid=[self.plan.ctas, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[self.plan.ctas, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.plan.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, tma: Fp8WgmmaTma, mma: cute.TiledMma, args: Fp8WgmmaArgs) -> None:
        """Multiply the tiles of a cluster, one after another; see the module.

        Args:
            tma: TMA copies and what they read.
            mma: wgmma of 64 rows a warpgroup and ``token_block`` tokens.
            args: The scalars.
        """
        atom, codes_atom, x_tiles, codes_tiles, layout = tma
        (
            codes_at, scales, x_at, token_scale, out, tokens, token_tiles, token_span, k_blocks,
            row_tiles, row_blocks, group_blocks, token_stride, group_stride, codes_stride, groups,
            scale_blocks,
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
        of_codes = self._layout(self.plan.rows, self.plan.stages)
        shared_codes = smem.allocate_tensor(
            BFloat16, of_codes.outer, byte_alignment=1024, swizzle=of_codes.inner
        )
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

        if warp >= self.plan.mma_warps:
            if cutlass.const_expr(self.plan.ctas_per_sm == 1):
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
                    (codes_at, codes_stride),
                    (tile_position(Int32(first), order, cutlass.min)[0], lane),
                    (row_tiles, begin, steps),
                )
            if warp == self.plan.mma_warps:
                self._copy(
                    (atom, codes_atom),
                    (x_tiles, codes_tiles),
                    (shared_x, shared_codes, full_at, full, empty),
                    (Int32(first), stride, total, order, group_blocks, lane),
                    (begin, steps, every),
                )
            self._wait_cluster()
        else:
            self._arrive_cluster()
            if cutlass.const_expr(self.plan.ctas_per_sm == 1):
                cute.arch.setmaxregister_increase(self.plan.mma_registers)
            product = self._operands(mma, shared_x, thread)
            # Row lane // 4 of the warp's, its pieces of 16 bytes exchanged by that number.
            row = lane // 4
            weights = Uint32(shared_codes.iterator.toint())
            weights += Uint32((warp * 16 + row) * BLOCK + row * 16 + lane % 4 * 2)
            stage, parity, tile = Int32(0), Int32(0), Int32(first)
            cute.arch.barrier(barrier_id=_READY, number_of_threads=self.plan.threads)
            skewed = total > stride and steps > self.skew
            self._fall_behind(warp, skewed)
            cute.arch.griddepcontrol_wait()
            strips = (scales + Int64(begin * self.plan.scale_item_bytes), every, scale_blocks, warp)
            scale = self._first_scale(
                self._strip(strips, tile_position(tile, order, cutlass.min)[0])
            )
            ahead = self._start_expanded((weights, product[-1]), scale, full, tile < total)
            while tile < total:
                row_block, token_tile = tile_position(tile, order, cutlass.min)
                own = self._own(row_block, warp)
                product[1].fill(0.0)
                coming = tile_position(cutlass.min(tile + stride, total - 1), order, cutlass.min)[0]
                ahead, scale, stage, parity = self._multiply_ring(
                    product,
                    (weights, ahead, scale),
                    (full, empty, stage, parity),
                    (
                        steps, tile + stride >= total, lane,
                        self._strip(strips, row_block), self._strip(strips, coming),
                    ),
                    skewed and tile == first and warp < 4,
                )  # fmt: skip
                group = row_block // group_blocks
                factors = [[Float32(1.0)] * 2]
                self._store_each(
                    (self._gathered([product[1]], room, gather, (rank, thread)), own, factors),
                    (
                        turned, (token_scale + group * 4, Int32(token_scale != 0)), out,
                        x_at + group * group_stride * 2,
                    ),
                    (token_tile, warp, lane, thread, rank),
                    # Tokens after those of the tile are another's.
                    (
                        cutlass.min(tokens, (token_tile + 1) * self.plan.token_block),
                        row_tiles, token_stride, groups, k_blocks, Float32(0.0),
                    ),
                )  # fmt: skip
                tile += stride

    def _operands(self, mma: Value, shared_x: Value, thread: Value) -> tuple[Value, ...]:
        """Products, sums of a tile and of a stage, both operands and the left one's words."""
        slice_ = mma.get_slice(thread)
        shape = slice_.partition_shape_C((64 * self.plan.warpgroups, self.plan.token_block))
        sums = cute.make_rmem_tensor(shape, Float32)
        part = sums if self.plan.folded else cute.make_rmem_tensor(shape, Float32)
        left_shape = slice_.partition_shape_A((64 * self.plan.warpgroups, 16 * self.plan.k_steps))
        left = [cute.make_rmem_tensor(left_shape, BFloat16) for _ in range(2)]
        further, (part,), right = self._products(mma, [part], shared_x, thread)[0]
        anew = further
        if not self.plan.folded:
            anew = self.product(self.plan.token_block)
            anew.set(warpgroup.Field.ACCUMULATE, False)
        words = [cute.recast_tensor(one, Uint32) for one in left]
        return (anew, further), sums, part, right, left, words

    def _strip(self, strips: Value, row_block: Value) -> Value:
        """Address of the scale of this warp's rows and the block's first columns."""
        scales, every, scale_blocks, warp = strips
        row = cutlass.min(self._own(row_block, warp)[0] // 8, scale_blocks - 1)
        return scales + Int64(row * every * self.plan.scale_item_bytes)

    @cute.jit
    def _release(self, empty: Value, stage: Value, lane: Value) -> None:
        """This warp has read the stage."""
        if lane == 0:
            ptx.mbarrier_arrive(empty + Uint32(stage * 8))

    @cute.jit
    def _scaled(self, fragments: Value, factors: Value, of_tokens: Value) -> Value:
        """Sums times the scales of their tokens, if there is an address: one kernel for both."""
        token_scale, *rest = of_tokens
        address, there = token_scale
        values = [list(four) for four in fragments]
        if there != 0:
            values = WgmmaKernel._scaled(self, values, factors, (address, *rest))
        return values

    @cute.jit
    def _copy(self, atoms: Value, wholes: Value, rooms: Value, walk: Value, sizes: Value) -> None:
        """A warp keeps the ring full, tile after tile, once the kernel before has ended."""
        shared_x, shared_codes, full_at, full, empty = rooms
        tile, stride, total, order, group_blocks, lane = walk
        begin, steps, every = sizes
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        cute.arch.griddepcontrol_wait()
        x_to, x = self._pair(
            atoms[0],
            self._x_stages(shared_x),
            cute.local_tile(wholes[0], (self.plan.tma_tokens, 64), (None, None)),
        )
        codes_to, codes = self._pair(
            atoms[1], shared_codes, cute.local_tile(wholes[1], (self.plan.rows, 64), (None, None))
        )
        stage, parity = Int32(0), Int32(1)
        while tile < total:
            row_block, token_tile = tile_position(tile, order, cutlass.min)
            column = (row_block // group_blocks * every + begin) * self.plan.stage_k_blocks
            for k in cutlass.range(steps, unroll=1):
                ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
                self._expect(full + Uint32(stage * 8), self.plan.token_block, lane)
                cute.copy(
                    atoms[1],
                    codes[(None, row_block, begin + k)],
                    codes_to[(None, stage)],
                    tma_bar_ptr=full_at + stage,
                )
                for u in cutlass.range_constexpr(self.plan.stage_k_blocks):
                    cute.copy(
                        atoms[0],
                        x[(None, token_tile, column + self.plan.stage_k_blocks * k + u)],
                        x_to[(None, self.plan.stage_k_blocks * stage + u)],
                        tma_bar_ptr=full_at + stage,
                    )
                stage += 1
                if stage == self.plan.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
            tile += stride

    @cute.jit
    def _prefetch(self, codes: Value, where: Value, sizes: Value) -> None:
        """Have the first stages' codes in the level-2 cache, which sees what is written since."""
        start, stride = codes
        row_block, lane = where
        row_tiles, begin, steps = sizes
        count = cutlass.min(steps, self.plan.stages) * BLOCK
        for i in cutlass.range_constexpr(self.plan.rows // 32):
            row = cutlass.min(row_block * self.plan.rows + i * 32 + lane, row_tiles * 16 - 1)
            ptx.bulk_prefetch_l2(start + row * stride + begin * BLOCK, count)

    @cute.jit
    def _start_expanded(self, codes: Value, scale: Value, full: Value, there: Value) -> Value:
        """Expand the first piece of the first stage, once it is there; the next piece's pairs."""
        weights, words = codes
        if there:
            ptx.mbarrier_wait(full, Int32(0))
        self._expand(words[0], self._pairs(weights, 0), scale)
        return self._pairs(weights, 1)

    def _pairs(self, stage_at: Value, piece: int) -> list[Value]:
        """The lane's pairs of codes of a piece, as its left operands follow one another."""
        found = []
        for step in range(piece * self.plan.k_steps, (piece + 1) * self.plan.k_steps):
            at = stage_at ^ Uint32(step * 16)
            for k, h in itertools.product(range(2), repeat=2):  # 8 columns, or rows, further on
                found.append(ptx.load_shared_u16(at, k * 8 + h * 8 * BLOCK))
        return found

    def _expand(self, words: Value, pairs: list[Value], scale: Value) -> None:
        """Left operands of a piece; the scale is that of the sums."""
        for i, pair in enumerate(pairs):
            words[i] = ptx.e4m3x2_to_bfloat16x2(pair)

    def _first_scale(self, address: Value) -> Value:
        """Of a tile's first stage."""
        return self._scale(address)

    def _scale(self, address: Value) -> Value:
        """A block's."""
        return ptx.load_global_float(address)

    @cute.jit
    def _multiply_ring(
        self, product: Value, weight: Value, ring: Value, rest: Value, leads: Value
    ) -> Value:
        """Add a tile's products to its sums.

        A piece is expanded while the tensor cores multiply the one before. ``leads``: as in
        ``WgmmaKernel``. Returns, of the next tile, whose first piece is expanded, the pairs of the
        second piece and the first scale, and the ring's next stage and parity.
        """
        _, sums, part, _, _, words = product
        weights, ahead, scale = weight
        full, empty, stage, parity = ring
        steps, is_last, lane, scales, of_next = rest
        for step in cutlass.range(steps, unroll=1):
            following, later = self._next_stage(stage, parity)
            more = not (is_last and step + 1 == steps)
            # A stage early: its way from memory is longer than a stage takes.
            of_coming = self._scale(self._coming(scales, step + 1, steps, of_next))
            for piece in cutlass.range_constexpr(_PIECES):
                self._multiply(product, piece, stage)
                pairs = ahead
                ahead = self._pairs_ahead(weights, piece, (stage, following, later), full, more)
                warpgroup.wait_group(1)
                self._expand(words[(piece + 1) % 2], pairs, scale)
            warpgroup.wait_group(0)
            self._release(empty, stage, lane)
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = ptx.fma_float(part[i], scale, sums[i])
            self._let_follow(leads, step)
            scale = of_coming
            stage = following
            parity = later
        return ahead, scale, stage, parity

    @cute.jit
    def _next_stage(self, stage: Value, parity: Value) -> Value:
        """The stage after this one, and its parity."""
        following = stage + 1
        if following == self.plan.stages:
            following = Int32(0)
            parity = parity ^ 1
        return following, parity

    @cute.jit
    def _coming(self, scales: Value, step: Value, steps: Value, of_next: Value) -> Value:
        """Address of a stage's scale, or of the next tile's first."""
        at = scales + Int64(step * self.plan.scale_item_bytes)
        if step == steps:
            at = of_next
        return at

    @cute.jit
    def _pairs_ahead(
        self, weights: Value, piece: int, stages: Value, full: Value, more: Value
    ) -> Value:
        """The pairs of two pieces further on, of the next stage when that is there."""
        stage, following, later = stages
        if cutlass.const_expr(piece + 2 == _PIECES):  # noqa: SIM102 - one is known to the compiler
            if more:
                ptx.mbarrier_wait(full + Uint32(following * 8), later)
        at = stage if piece + 2 < _PIECES else following
        return self._pairs(weights + Uint32(at * self.plan.weight_bytes), (piece + 2) % _PIECES)

    @cute.jit
    def _multiply(self, product: Value, piece: int, stage: Value) -> None:
        """Begin the product of an expanded piece; the stage's first one begins its sums anew."""
        (anew, further), _, part, right, left, _ = product
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.plan.k_steps):
            u, column = divmod(piece * self.plan.k_steps + k, 4)
            cute.gemm(
                anew if piece == k == 0 else further,
                part,
                left[piece % 2][None, None, k],
                right[None, None, column, self.plan.stage_k_blocks * stage + u],
                part,
            )
        warpgroup.commit_group()


class FoldedFp8WgmmaKernel(Fp8WgmmaKernel):
    """With E8M0 scales: the operands are multiplied by them.

    What is summed is the result times a power of two. That is 1 unless a scale is so far from 1
    that an operand would not be a normal bfloat16: then the sums are shifted so that it is.
    """

    def _first_scale(self, address: Value) -> Value:
        """As ``_scale_after``, when nothing is summed yet."""
        return self._scale_after(self._scale(address), Int32(0))

    def _scale(self, address: Value) -> Value:
        """A block's byte."""
        return ptx.load_global_byte(address)

    def _scale_after(self, byte: Value, shift: Value) -> Value:
        """What operands are multiplied by, twice, and the power of two of their sums."""
        good = cutlass.max(Int32(byte) - _HIGHEST, cutlass.min(Int32(byte) - _LOWEST, shift))
        shift = Int32(ptx.select_word(byte == 255, Uint32(shift), Uint32(good)))
        moved = ptx.select_word(byte == 255, byte, Uint32(Int32(byte) - shift))
        return [ptx.e8m0_to_bfloat16x2(moved), shift]

    def _expand(self, words: Value, pairs: list[Value], scale: Value) -> None:
        """Left operands of a piece."""
        for i, pair in enumerate(pairs):
            words[i] = ptx.mul_bfloat16x2(ptx.e4m3x2_to_bfloat16x2(pair), scale[0])

    @cute.jit
    def _multiply_ring(
        self, product: Value, weight: Value, ring: Value, rest: Value, leads: Value
    ) -> Value:
        """As in ``Fp8WgmmaKernel``, but the tensor cores go on from stage to stage."""
        _, sums, _, _, _, words = product
        weights, ahead, scale = weight
        full, empty, stage, parity = ring
        steps, is_last, lane, scales, of_next = rest
        before, shift = stage, scale[1]
        for step in cutlass.range(steps, unroll=1):
            following, later = self._next_stage(stage, parity)
            more = not (is_last and step + 1 == steps)
            byte = self._scale(self._coming(scales, step + 1, steps, of_next))
            for piece in cutlass.range_constexpr(_PIECES):
                self._multiply(product, piece, stage)
                pairs = ahead
                ahead = self._pairs_ahead(weights, piece, (stage, following, later), full, more)
                if cutlass.const_expr(piece + 1 == _PIECES):
                    if step + 1 == steps:
                        scale = self._scale_after(byte, Int32(0))
                    else:
                        scale = self._scale_after(byte, shift)
                        shift = self._shifted(sums, shift, scale[1])
                warpgroup.wait_group(1)
                if cutlass.const_expr(piece == 0):  # noqa: SIM102 - one is known to the compiler
                    if step > 0:
                        self._release(empty, before, lane)
                self._expand(words[(piece + 1) % 2], pairs, scale)
            self._let_follow(leads, step)
            before = stage
            stage = following
            parity = later
        warpgroup.wait_group(0)
        self._release(empty, before, lane)
        self._shifted(sums, shift, Int32(0))
        return ahead, scale, stage, parity

    @cute.jit
    def _shifted(self, sums: Value, old: Value, new: Value) -> Value:
        """Make the sums those of another power of two, which is returned."""
        if old != new:
            warpgroup.wait_group(0)
            by = ptx.bits_to_float(Uint32((old - new + 127) << 23))
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = sums[i] * by
        return new
