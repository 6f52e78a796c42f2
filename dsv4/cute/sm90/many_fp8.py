"""FP8 product for many tokens, one scale per 128 x 128 block of the weight.

``many``'s kernel, with its tiles, warps, clusters and stores, but:

* The weight is read as it is stored, rows of E4M3 codes: no second copy in another layout. A stage
  is 128 columns, of which a row's codes are a line of 128 bytes, copied as X is.
* A lane's operands of 16 columns are four pairs of codes, a load each, because columns stand in X's
  order. Pieces of 16 bytes of a line are exchanged by the row's number, so that none of these loads
  waits for another's bank.
* A pair becomes bfloat16, exactly, through float16 and float32; NaN stays NaN.
* The tensor cores sum 128 columns in registers of their own. Times the block's scale these sums are
  added in float32, in ascending order: the operands hold no scale, and no scale is rounded.
* Pieces of 32 columns are expanded while the tensor cores multiply those before, the first two of
  the next stage before this one's sums are waited for: so the tensor cores have work as soon as
  these have been added.
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

from dsv4.cute import _ptx as ptx
from dsv4.cute._tiles import place
from dsv4.cute.sm90.many import ManyKernel, rows_of_x
from dsv4.cute.sm90.many_fp8_plan import BLOCK, ManyFp8Plan

Value = Any
_READY = 5  # a named barrier, after those of the warpgroups
_PIECES, _EARLY = 4, 2  # of 32 columns, of a stage; expanded during the stage before


class ManyFp8Kernel(ManyFp8Plan, ManyKernel):
    """The kernel of one configuration."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            rows_of_x(),
            rows_of_x(),
            *[Int64(0)] * 5,
            *[Int32(1)] * 7,
            *[Int64(8)] * 3,
            *[Int32(1)] * 3,
            CUstream(0),
            options=options,
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: cute.Tensor,
        codes_at: Int64,
        scales: Int64,
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
        codes_stride: Int64,
        groups: Int32,
        scale_blocks: Int32,
        scale_bytes: Int32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        atom, x_tiles, layout, mma = self.tools(x)
        codes_atom, codes_tiles = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            codes,
            cute.select(self._layout(self.rows, 1), mode=[0, 1]),
            (self.rows, 64),
        )
        self.kernel(
            atom, codes_atom, x_tiles, codes_tiles, layout, mma, codes_at, scales, x_at,
            token_scale, out, tokens, token_tiles, token_span, k_blocks, row_tiles, row_blocks,
            group_blocks, token_stride, group_stride, codes_stride, groups, scale_blocks,
            scale_bytes,
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
        atom: cute.CopyAtom,
        codes_atom: cute.CopyAtom,
        x_tiles: cute.Tensor,
        codes_tiles: cute.Tensor,
        layout: cute.ComposedLayout,
        mma: cute.TiledMma,
        codes_at: Int64,
        scales: Int64,
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
        codes_stride: Int64,
        groups: Int32,
        scale_blocks: Int32,
        scale_bytes: Int32,
    ) -> None:
        """See the module. What is not named here is as in ``ManyKernel.kernel``.

        Args:
            atom: The tensor copy of 64 columns of a tile's X.
            codes_atom: The tensor copy of a stage's codes.
            x_tiles: X, ``[tokens, groups K]``, as the copy addresses it.
            codes_tiles: The codes, ``[rows, K / 2]`` pairs, as the copy addresses them.
            layout: Blocks of 64 columns of X, of all stages.
            mma: The product of 64 rows a warpgroup.
            codes_at: Address of the codes.
            scales: Address of the block scales, ``[scale_blocks, K / 128]``.
            x_at: Address of X.
            token_scale: Address of float32 ``[tokens, groups]``, where ``row_scaled``.
            out: Address of ``[tokens, rows]``.
            tokens: At least 1.
            token_tiles: Tiles of ``token_block`` tokens.
            token_span: Of these, how many come one after another before the next rows do.
            k_blocks: K / 64, a multiple of 2 and at least twice ``blocks``.
            row_tiles: Rows of the weight / 16.
            row_blocks: Rows of the weight / those of a block, rounded up.
            group_blocks: Blocks of rows that share an input.
            token_stride: Elements between tokens of X.
            group_stride: Elements between groups of X: K.
            codes_stride: Bytes between rows of codes.
            groups: Inputs of every token.
            scale_blocks: Rows of the weight / 128, rounded up.
            scale_bytes: 4 for float32 scales, 1 for E8M0.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank = block % self.blocks
        first, stride = block // self.blocks, grid // self.blocks
        total = token_tiles * row_blocks
        order = (token_tiles, token_span, row_blocks)
        every = k_blocks // self.depth
        begin = rank * every // self.blocks
        steps = (rank + 1) * every // self.blocks - begin

        smem = cutlass.memory.SmemAllocator()
        shared_x = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        of_codes = self._layout(self.rows, self.stages)
        shared_codes = smem.allocate_tensor(
            BFloat16, of_codes.outer, byte_alignment=1024, swizzle=of_codes.inner
        )
        turned = Uint32(smem.allocate_array(cutlass.Uint8, self.turned_bytes).toint())
        room = Uint32(shared_x.iterator.toint())
        if cutlass.const_expr(self.apart):
            room = Uint32(smem.allocate_array(cutlass.Uint8, self.apart_bytes).toint())
        full_at = smem.allocate_array(cutlass.Int64, 2 * self.stages + 2)
        full = Uint32(full_at.toint())
        empty = full + 8 * self.stages
        gather = empty + 8 * self.stages
        cute.arch.griddepcontrol_launch_dependents()

        if warp >= self.mma_warps:
            cute.arch.setmaxregister_decrease(self.copy_registers)
            if warp == self.mma_warps:
                if lane < self.stages:
                    ptx.barrier_init(full + Uint32(lane * 8), 1)
                    ptx.barrier_init(empty + Uint32(lane * 8), self.mma_warps)
                    ptx.fence_barrier_init()
                self._make_gather(gather, rank, lane)
                cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=_READY, number_of_threads=self.threads)
            self._arrive_cluster()
            if warp == self.mma_warps + 1:
                self._prefetch(
                    (codes_at, codes_stride),
                    (place(Int32(first), order, cutlass.min)[0], lane),
                    (row_tiles, begin, steps),
                )
            if warp == self.mma_warps:
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
            cute.arch.setmaxregister_increase(self.mma_registers)
            slice_ = mma.get_slice(thread)
            shape = slice_.partition_shape_C((64 * self.warpgroups, self.token_block))
            sums, part = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
            left_shape = slice_.partition_shape_A((64 * self.warpgroups, 16 * self.piece))
            left = [cute.make_rmem_tensor(left_shape, BFloat16) for _ in range(_PIECES)]
            words = [cute.recast_tensor(one, Uint32) for one in left]
            further, (part,), right = self._products(mma, [part], shared_x, thread)[0]
            anew = self.product(self.token_block)
            anew.set(warpgroup.Field.ACCUMULATE, False)
            product = ((anew, further), sums, part, right, left, words)
            # Row lane // 4 of the warp's, its pieces of 16 bytes exchanged by that number.
            row = lane // 4
            weights = Uint32(shared_codes.iterator.toint())
            weights += Uint32((warp * 16 + row) * BLOCK + row * 16 + lane % 4 * 2)
            stage, parity, tile = Int32(0), Int32(0), Int32(first)
            cute.arch.barrier(barrier_id=_READY, number_of_threads=self.threads)
            skewed = total > stride and steps > self.skew
            self._fall_behind(warp, skewed)
            self._start_expanded(weights, words, full, tile < total)
            while tile < total:
                row_block, token_tile = place(tile, order, cutlass.min)
                own = self._own(row_block, warp)
                sums.fill(0.0)
                scale_row = cutlass.min(own[0] // 8, scale_blocks - 1)
                of_rows = scales + Int64(scale_row * every + begin) * scale_bytes
                stage, parity = self._multiply_ring(
                    product,
                    weights,
                    (full, empty, stage, parity),
                    (steps, tile + stride >= total, lane, of_rows, scale_bytes),
                    skewed and tile == first and warp < 4,
                )
                group = row_block // group_blocks
                factors = [[Float32(1.0)] * 2]
                self._store_each(
                    (self._gathered([sums], room, gather, (rank, thread)), own, factors),
                    (turned, token_scale + group * 4, out, x_at + group * group_stride * 2),
                    (token_tile, warp, lane, thread, rank),
                    # Tokens after those of the tile are another's.
                    (
                        cutlass.min(tokens, (token_tile + 1) * self.token_block),
                        row_tiles, token_stride, groups, k_blocks, Float32(0.0),
                    ),
                )  # fmt: skip
                tile += stride

    @cute.jit
    def _release(self, empty: Value, stage: Value, lane: Value) -> None:
        """This warp has read the stage."""
        if lane == 0:
            ptx.arrive(empty + Uint32(stage * 8))

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
            cute.local_tile(wholes[0], (self.box, 64), (None, None)),
        )
        codes_to, codes = self._pair(
            atoms[1], shared_codes, cute.local_tile(wholes[1], (self.rows, 64), (None, None))
        )
        stage, parity = Int32(0), Int32(1)
        while tile < total:
            row_block, token_tile = place(tile, order, cutlass.min)
            column = (row_block // group_blocks * every + begin) * self.depth
            for k in cutlass.range(steps, unroll=1):
                ptx.wait(empty + Uint32(stage * 8), parity)
                self._expect(full + Uint32(stage * 8), self.token_block, lane)
                cute.copy(
                    atoms[1],
                    codes[(None, row_block, begin + k)],
                    codes_to[(None, stage)],
                    tma_bar_ptr=full_at + stage,
                )
                for u in cutlass.range_constexpr(self.depth):
                    cute.copy(
                        atoms[0],
                        x[(None, token_tile, column + self.depth * k + u)],
                        x_to[(None, self.depth * stage + u)],
                        tma_bar_ptr=full_at + stage,
                    )
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
            tile += stride

    @cute.jit
    def _prefetch(self, codes: Value, where: Value, sizes: Value) -> None:
        """Have the first stages' codes in the level-2 cache, which sees what is written since."""
        start, stride = codes
        row_block, lane = where
        row_tiles, begin, steps = sizes
        count = cutlass.min(steps, self.stages) * BLOCK
        for i in cutlass.range_constexpr(self.rows // 32):
            row = cutlass.min(row_block * self.rows + i * 32 + lane, row_tiles * 16 - 1)
            ptx.prefetch_bulk(start + row * stride + begin * BLOCK, count)

    @cute.jit
    def _start_expanded(self, weights: Value, words: Value, full: Value, there: Value) -> None:
        """Expand what the first stage begins with, once it is there."""
        if there:
            ptx.wait(full, Int32(0))
        for piece in cutlass.range_constexpr(_EARLY):
            self._expand(words[piece], weights, piece)

    def _expand(self, words: Value, stage_at: Value, piece: int) -> None:
        """Left operands of a piece of 32 columns."""
        first = piece * self.piece
        pairs = []
        for step in range(first, first + self.piece):
            at = stage_at ^ Uint32(step * 16)
            for k, h in itertools.product(range(2), repeat=2):  # 8 columns, or rows, further on
                pairs.append(ptx.load_shared_pair(at, k * 8 + h * 8 * BLOCK))
        for i, pair in enumerate(pairs):
            words[i] = ptx.e4m3_to_bfloat16(pair)

    def _scale(self, address: Value, width: Value) -> Value:
        """A block's: float32, or E8M0."""
        word = ptx.load_word_or_byte(address, width)
        return ptx.choose(width == 4, ptx.float_of(word), ptx.e8m0(word))

    @cute.jit
    def _multiply_ring(
        self, product: Value, weights: Value, ring: Value, rest: Value, leads: Value
    ) -> Value:
        """Add a tile's products to its sums, a stage's at a time.

        While the tensor cores multiply two pieces the others are expanded, and then the first two
        of the next stage: so they have work again as soon as their sums have been added.
        ``leads``: as in ``ManyKernel``. Returns the ring's next stage and parity.
        """
        _, sums, part, _, _, words = product
        full, empty, stage, parity = ring
        steps, is_last, lane, scales, scale_bytes = rest
        for step in cutlass.range(steps, unroll=1):
            following, later = stage + 1, parity
            if following == self.stages:
                following = Int32(0)
                later = parity ^ 1
            here = weights + Uint32(stage * self.weight_bytes)
            more = not (is_last and step + 1 == steps)
            scale = self._scale(scales + Int64(step) * scale_bytes, scale_bytes)
            for piece in cutlass.range_constexpr(_PIECES):
                if cutlass.const_expr(piece >= _EARLY):
                    self._expand(words[piece], here, piece)
                self._multiply(product, piece, stage)
            coming = weights + Uint32(following * self.weight_bytes)
            if more:
                ptx.wait(full + Uint32(following * 8), later)
            for piece in cutlass.range_constexpr(_EARLY):
                warpgroup.wait_group(_PIECES - 1 - piece)
                self._expand(words[piece], coming, piece)
            # Again, or the compiler would have them expanded after the sums are there.
            if more:
                ptx.wait(full + Uint32(following * 8), later)
            warpgroup.wait_group(0)
            self._release(empty, stage, lane)
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = ptx.multiply_add_float(part[i], scale, sums[i])
            self._let_follow(leads, step)
            stage = following
            parity = later
        return stage, parity

    @cute.jit
    def _multiply(self, product: Value, piece: int, stage: Value) -> None:
        """Begin the product of an expanded piece; the stage's first one begins the sums anew."""
        (anew, further), _, part, right, left, _ = product
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.piece):
            u, column = divmod(piece * self.piece + k, 4)
            cute.gemm(
                anew if piece == k == 0 else further,
                part,
                left[piece][None, None, k],
                right[None, None, column, self.depth * stage + u],
                part,
            )
        warpgroup.commit_group()
