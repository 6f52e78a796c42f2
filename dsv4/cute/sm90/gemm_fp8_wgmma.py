"""GEMM with FP8 weights for large M, one scale per 128 x 128 block of the weight.

It has the tiles, warps, clusters, barriers and epilogue of ``gemm_wgmma``, with these differences.

Weights. The weight is read as it is stored, rows of E4M3 codes: no second copy in another layout. A
stage is 128 columns (``stage_k_blocks`` is 2), so it has one scale; of each row its codes are a
line of 128 bytes, which TMA copies and swizzles as it does X. A lane's left operands of 16 columns
are four pairs of codes, a load each, because columns stand in X's order. The swizzle exchanges
pieces of 16 bytes of a line by the row's number, so that none of these loads meets another in a
bank. A pair becomes bfloat16, exactly, through float16 and float32; NaN stays NaN.

Pipeline. A stage is four pieces of 32 columns. A piece is converted while the tensor cores multiply
the one before, from pairs of codes that were loaded a piece earlier. The scale of a stage is loaded
from global memory a stage earlier.

Dependencies. The weights may be results of the preceding kernel, so nothing is read before
griddepcontrol.wait. The codes of the first stages are prefetched to L2 before it, where later
writes are seen.

Numerics, float32 scales. The tensor cores sum 128 columns in accumulators of their own. These sums
times the block's scale are added in float32, in ascending order of K: the operands hold no scale,
and no scale is rounded. E8M0 scales: see ``gemm_fp8_wgmma_folded``.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.gemm_fp8_wgmma_plan import (
    BLOCK,
    FP8_WGMMA_ABI,
    Fp8WgmmaArgs,
    Fp8WgmmaPlan,
    Fp8WgmmaTma,
)
from dsv4.cute.sm90.gemm_wgmma import READY, WgmmaKernel
from dsv4.cute.sm90.wgmma_copies import KPart, Pipeline, fake_x
from dsv4.cute.sm90.wgmma_epilogue import Bounds, Exchange, Fragment, Fragments, RowTile

PIECES = 4  # of 32 columns, of a stage

Pairs = list[Uint32]  # two E4M3 codes in each, of a piece's left operands in their order


class Fp8SharedMemory(NamedTuple):
    """Shared memory that the copy warp fills.

    Attributes:
        x: X of all stages.
        codes: Codes of all stages, as pairs.
        full: ``Pipeline.full`` as a pointer, which TMA copies take.
    """

    x: cute.Tensor
    codes: cute.Tensor
    full: cute.Pointer


class Fp8Operands(NamedTuple):
    """Operands of the MMAs of a warpgroup.

    Attributes:
        first_mma: wgmma of a stage's first 16 columns; begins new sums, unless scales are folded.
        next_mma: wgmma that adds to the sums.
        sums: The tile's.
        stage_sums: What the MMAs write; those of a stage, unless scales are folded.
        x: Right operands, of all stages.
        fragments: Two sets of left operands.
        words: The registers of these.
    """

    first_mma: cute.TiledMma
    next_mma: cute.TiledMma
    sums: cute.Tensor
    stage_sums: cute.Tensor
    x: cute.Tensor
    fragments: list[cute.Tensor]
    words: list[cute.Tensor]


class ScaleTable(NamedTuple):
    """The weight's block scales, as a warp reads them.

    Attributes:
        scales: Address of the CTA's first column of scales.
        columns: Scales of a row of blocks.
        rows: Rows of blocks.
        warp: Warp of the CTA.
    """

    scales: Int64
    columns: Int32
    rows: Int32
    warp: Int32


class Fp8Loop(NamedTuple):
    """The main loop of one tile.

    Attributes:
        stages: How many stages it takes.
        is_last: Whether no stage follows, because this is the cluster's last tile.
        lane: Lane of the warp.
        scales: Address of the scale of the tile's first stage.
        next_scales: The same of the cluster's next tile.
    """

    stages: Int32
    is_last: Boolean
    lane: Int32
    scales: Int64
    next_scales: Int64


class Fp8Output(NamedTuple):
    """Addresses of results, and what else the epilogue reads; like ``Output``.

    Attributes:
        buffer: Transpose buffers of all warpgroups, in shared memory.
        token_scale: Scales of tokens, from the tile's group on.
        out: The result.
        x: The input of the tile's group.
        has_token_scale: Not 0 if there are scales of tokens.
    """

    buffer: Uint32
    token_scale: Int64
    out: Int64
    x: Int64
    has_token_scale: Int32


class Fp8WgmmaKernel(WgmmaKernel):
    """The kernel of one configuration, with float32 scales."""

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
        x_atom, x_tensor = self._x_tma(x)
        codes_atom, codes_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            codes,
            cute.select(self._layout(self.plan.rows, 1), mode=[0, 1]),
            (self.plan.rows, 64),
        )
        tma = Fp8WgmmaTma(
            x_tma=x_atom,
            codes_tma=codes_atom,
            x_tensor=x_tensor,
            codes_tensor=codes_tensor,
            x_layout=self._x_layout(),
        )
        self._launch(
            self.kernel(tma, self._mma(self.plan.token_block), args),
            stream,
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
        me, walk, part = self._schedule(args)
        thread, warp, lane, _ = me
        first, stride, total, order = walk

        smem = cutlass.memory.SmemAllocator()
        shared_x = smem.allocate_tensor(
            BFloat16, tma.x_layout.outer, byte_alignment=1024, swizzle=tma.x_layout.inner
        )
        codes_layout = self._layout(self.plan.rows, self.plan.stages)
        shared_codes = smem.allocate_tensor(
            BFloat16, codes_layout.outer, byte_alignment=1024, swizzle=codes_layout.inner
        )
        buffer = Uint32(smem.allocate_array(cutlass.Uint8, self.plan.epilogue_bytes).toint())
        sums_at = self._exchange_buffer(smem, shared_x)
        full_at = smem.allocate_array(cutlass.Int64, 2 * self.plan.stages + 2)
        full = Uint32(full_at.toint())
        pipeline = Pipeline(full, full + 8 * self.plan.stages)
        exchange = Exchange(sums_at, pipeline.empty + 8 * self.plan.stages)
        cute.arch.griddepcontrol_launch_dependents()

        if warp >= self.plan.mma_warps:
            # Two CTAs of an SM share its registers as they come.
            if cutlass.const_expr(self.plan.ctas_per_sm == 1):
                cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if warp == self.plan.mma_warps:
                self._make_pipeline(pipeline, lane)
                self._make_exchange(exchange.barrier, me)
                cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=self.plan.threads)
            self._arrive_cluster()
            if warp == self.plan.mma_warps + 1:
                self._prefetch(args, walk, part, lane)
            if warp == self.plan.mma_warps:
                shared = Fp8SharedMemory(shared_x, shared_codes, full_at)
                self._copy(tma, shared, pipeline, walk, part, args.group_blocks, lane)
            self._wait_cluster()
        else:
            self._arrive_cluster()
            if cutlass.const_expr(self.plan.ctas_per_sm == 1):
                cute.arch.setmaxregister_increase(self.plan.mma_registers)
            operands = self._fp8_operands(mma, shared_x, thread)
            sums = operands.sums
            # Row lane // 4 of the warp's, its pieces of 16 bytes exchanged by that number.
            row = lane // 4
            weights = Uint32(shared_codes.iterator.toint())
            weights += Uint32((warp * 16 + row) * BLOCK + row * 16 + lane % 4 * 2)
            stage, parity, tile = Int32(0), Int32(0), Int32(first)
            cute.arch.barrier(barrier_id=READY, number_of_threads=self.plan.threads)
            skewed = total > stride and part.stages > self.skew
            self._fall_behind(warp, skewed)
            cute.arch.griddepcontrol_wait()
            table = ScaleTable(
                args.scales + Int64(part.begin * self.plan.scale_item_bytes),
                part.total,
                args.scale_blocks,
                warp,
            )
            first_row = tile_position(tile, order, cutlass.min)[0]
            scale = self._first_scale(self._scale_address(table, first_row))
            pairs = self._start_converted(weights, operands.words, scale, full, tile < total)
            while tile < total:
                row_block, token_tile = tile_position(tile, order, cutlass.min)
                own = self._own(row_block, warp)
                sums.fill(Float32(0.0))
                # Rows of the cluster's next tile, whose first scale is loaded in this one's loop.
                following = cutlass.min(tile + stride, total - 1)
                next_row = tile_position(following, order, cutlass.min)[0]
                pairs, scale, stage, parity = self._multiply_ring(
                    operands,
                    weights,
                    pairs,
                    scale,
                    pipeline,
                    stage,
                    parity,
                    Fp8Loop(
                        stages=part.stages,
                        is_last=tile + stride >= total,
                        lane=lane,
                        scales=self._scale_address(table, row_block),
                        next_scales=self._scale_address(table, next_row),
                    ),
                    skewed and tile == first and warp < 4,
                )
                group = row_block // args.group_blocks
                (reduced,) = self._reduced([sums], exchange, me)
                self._store_tiles(
                    # The sums hold all scales of the weight.
                    [RowTile(reduced, own[0], [Float32(1.0)] * 2)],
                    Fp8Output(
                        buffer=buffer,
                        token_scale=args.token_scale + group * 4,
                        out=args.out,
                        x=args.x + group * args.group_stride * 2,
                        has_token_scale=Int32(args.token_scale != 0),
                    ),
                    token_tile,
                    me,
                    Bounds(
                        tokens=cutlass.min(args.tokens, (token_tile + 1) * self.plan.token_block),
                        row_tiles=args.row_tiles,
                        token_stride=args.token_stride,
                        groups=args.groups,
                        k_blocks=args.k_blocks,
                        limit=Float32(0.0),
                    ),
                )
                tile += stride

    # The copy warps.

    @cute.jit
    def _copy(
        self,
        tma: Fp8WgmmaTma,
        shared: Fp8SharedMemory,
        pipeline: Pipeline,
        walk: Walk,
        part: KPart,
        group_blocks: Int32,
        lane: Int32,
    ) -> None:
        """One warp: keep the ring full, tile after tile, once the preceding kernel has ended."""
        full, full_at = pipeline.full, shared.full
        cpasync.prefetch_descriptor(tma.x_tma)
        cpasync.prefetch_descriptor(tma.codes_tma)
        # The preceding kernel may have written X, the codes or both.
        cute.arch.griddepcontrol_wait()
        x_tiles = cute.local_tile(tma.x_tensor, (self.plan.tma_tokens, 64), (None, None))
        x = self._partition(tma.x_tma, self._x_stages(shared.x), x_tiles)
        codes_tiles = cute.local_tile(tma.codes_tensor, (self.plan.rows, 64), (None, None))
        codes = self._partition(tma.codes_tma, shared.codes, codes_tiles)
        tile, stage, parity = walk.first, Int32(0), Int32(1)
        while tile < walk.total:
            row_block, token_tile = tile_position(tile, walk.order, cutlass.min)
            group = row_block // group_blocks
            column = (group * part.total + part.begin) * self.plan.stage_k_blocks
            for k in cutlass.range(part.stages, unroll=1):
                ptx.mbarrier_wait(pipeline.empty + Uint32(stage * 8), parity)
                self._expect(full + Uint32(stage * 8), self.plan.token_block, lane)
                cute.copy(
                    tma.codes_tma,
                    codes.source[(None, row_block, part.begin + k)],
                    codes.to[(None, stage)],
                    tma_bar_ptr=full_at + stage,
                )
                for u in cutlass.range_constexpr(self.plan.stage_k_blocks):
                    cute.copy(
                        tma.x_tma,
                        x.source[(None, token_tile, column + self.plan.stage_k_blocks * k + u)],
                        x.to[(None, self.plan.stage_k_blocks * stage + u)],
                        tma_bar_ptr=full_at + stage,
                    )
                stage += 1
                if stage == self.plan.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
            tile += walk.stride

    @cute.jit
    def _prefetch(self, args: Fp8WgmmaArgs, walk: Walk, part: KPart, lane: Int32) -> None:
        """One warp: bring the codes of the first stages to L2, where later writes are seen."""
        row_block = tile_position(walk.first, walk.order, cutlass.min)[0]
        count = cutlass.min(part.stages, self.plan.stages) * BLOCK
        for i in cutlass.range_constexpr(self.plan.rows // 32):
            row = row_block * self.plan.rows + i * 32 + lane
            row = cutlass.min(row, args.row_tiles * 16 - 1)
            start = args.codes + row * args.codes_stride + part.begin * BLOCK
            ptx.bulk_prefetch_l2(start, count)

    # The MMA warps.

    def _fp8_operands(
        self, mma: cute.TiledMma, shared_x: cute.Tensor, thread: Int32
    ) -> Fp8Operands:
        """Operands of the MMAs, with one set of sums where scales are folded, else two."""
        slice_ = mma.get_slice(thread)
        shape = slice_.partition_shape_C((64 * self.plan.warpgroups, self.plan.token_block))
        sums = cute.make_rmem_tensor(shape, Float32)
        stage_sums = sums if self.plan.folded else cute.make_rmem_tensor(shape, Float32)
        adding = self._operands(mma, [stage_sums], shared_x, thread)[0]
        first_mma = adding.mma
        if not self.plan.folded:
            first_mma = self._mma(self.plan.token_block)
            first_mma.set(warpgroup.Field.ACCUMULATE, False)
        return Fp8Operands(
            first_mma=first_mma,
            next_mma=adding.mma,
            sums=sums,
            stage_sums=adding.sums[0],
            x=adding.x,
            fragments=adding.fragments,
            words=adding.words,
        )

    def _scale_address(self, table: ScaleTable, row_block: Int32) -> Int64:
        """Address of the scale of the warp's rows and the CTA's first 128 columns."""
        # The warp's 16 rows lie in one block of 128.
        row = cutlass.min(self._own(row_block, table.warp)[0] // 8, table.rows - 1)
        return table.scales + Int64(row * table.columns * self.plan.scale_item_bytes)

    @cute.jit
    def _release(self, empty: Uint32, stage: Int32, lane: Int32) -> None:
        """One warp: say that it has read a stage."""
        if lane == 0:
            ptx.mbarrier_arrive(empty + Uint32(stage * 8))

    @cute.jit
    def _scaled(
        self,
        fragments: Fragments,
        factors: Fragment,
        output: Fp8Output,
        begin: Int32,
        bounds: Bounds,
    ) -> Fragments:
        """Sums times the scales of their tokens, if there are any: one kernel serves both."""
        values = [list(four) for four in fragments]
        if output.has_token_scale != 0:
            values = WgmmaKernel._scaled(self, values, factors, output, begin, bounds)
        return values

    @cute.jit
    def _start_converted(
        self, weights: Uint32, words: list[cute.Tensor], scale: Any, full: Uint32, exists: Boolean
    ) -> Pairs:
        """Convert the first piece of the first stage; return the pairs of the second.

        Args:
            weights: Where the lane's codes of the first stage are.
            words: Registers of both sets of left operands.
            scale: Scale of the first stage.
            full: mbarrier of the first stage.
            exists: Whether there is one.
        """
        if exists:
            ptx.mbarrier_wait(full, Int32(0))
        self._convert(words[0], self._load_pairs(weights, 0), scale)
        return self._load_pairs(weights, 1)

    def _load_pairs(self, stage_at: Uint32, piece: int) -> Pairs:
        """The lane's pairs of codes of a piece, in the order of its left operands."""
        pairs = []
        for step in range(piece * self.plan.k_steps, (piece + 1) * self.plan.k_steps):
            # The swizzle exchanges pieces of 16 bytes: XOR of the row's number and the piece's.
            at = stage_at ^ Uint32(step * 16)
            for k, h in itertools.product(range(2), repeat=2):  # 8 columns, or rows, further on
                pairs.append(ptx.load_shared_u16(at, k * 8 + h * 8 * BLOCK))
        return pairs

    def _convert(self, words: cute.Tensor, pairs: Pairs, scale: Any) -> None:
        """Write left operands of a piece; the scale is for the sums."""
        for i, pair in enumerate(pairs):
            words[i] = ptx.e4m3x2_to_bfloat16x2(pair)

    def _first_scale(self, address: Int64) -> Any:
        """Load the scale of a cluster's first stage."""
        return self._load_scale(address)

    def _load_scale(self, address: Int64) -> Any:
        """Load a block's scale."""
        return ptx.load_global_float(address)

    @cute.jit
    def _multiply_ring(
        self,
        operands: Fp8Operands,
        weights: Uint32,
        pairs: Pairs,
        scale: Float32,
        pipeline: Pipeline,
        stage: Int32,
        parity: Int32,
        loop: Fp8Loop,
        leads: Boolean,
    ) -> tuple[Pairs, Float32, Int32, Int32]:
        """All MMA warps: add a tile's products to its sums.

        Args:
            operands: Operands of the MMAs.
            weights: Where the lane's codes of the first stage are.
            pairs: Pairs of the second piece; the first one is converted already.
            scale: Scale of the first stage.
            pipeline: mbarriers of the ring.
            stage: Stage of the ring.
            parity: Parity of its barriers' phase.
            loop: Stages of the tile.
            leads: Whether this is the first tile of the warpgroup that another one falls behind.

        Returns:
            Pairs of the second piece and first scale of the next tile, whose first piece is
            converted, and the ring's next stage and parity.
        """
        sums, stage_sums, words = operands.sums, operands.stage_sums, operands.words
        for step in cutlass.range(loop.stages, unroll=1):
            following, later = self._next_stage(stage, parity)
            more = not (loop.is_last and step + 1 == loop.stages)
            # A stage early: it takes longer from memory than a stage does.
            coming = self._load_scale(self._next_scale_address(loop, step + 1))
            for piece in cutlass.range_constexpr(PIECES):
                self._multiply(operands, piece, stage)
                current = pairs
                pairs = self._prefetch_pairs(
                    weights, piece, stage, following, later, pipeline.full, more
                )
                # The MMAs before those just started are done: their operands may be written.
                warpgroup.wait_group(1)
                self._convert(words[(piece + 1) % 2], current, scale)
            warpgroup.wait_group(0)
            self._release(pipeline.empty, stage, loop.lane)
            # This warpgroup has no MMAs in flight meanwhile; those of the others go on.
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = ptx.fma_float(stage_sums[i], scale, sums[i])
            self._let_follow(leads, step)
            scale = coming
            stage = following
            parity = later
        return pairs, scale, stage, parity

    @cute.jit
    def _next_stage(self, stage: Int32, parity: Int32) -> tuple[Int32, Int32]:
        """The stage after this one, and the parity of its barriers' phase."""
        following = stage + 1
        if following == self.plan.stages:
            following = Int32(0)
            parity = parity ^ 1
        return following, parity

    @cute.jit
    def _next_scale_address(self, loop: Fp8Loop, step: Int32) -> Int64:
        """Address of the scale of stage ``step`` of a tile, or of the next tile's first."""
        at = loop.scales + Int64(step * self.plan.scale_item_bytes)
        if step == loop.stages:
            at = loop.next_scales
        return at

    @cute.jit
    def _prefetch_pairs(
        self,
        weights: Uint32,
        piece: cutlass.Constexpr,
        stage: Int32,
        following: Int32,
        later: Int32,
        full: Uint32,
        more: Boolean,
    ) -> Pairs:
        """Load the pairs of two pieces further on, of the next stage when it has arrived.

        Args:
            weights: Where the lane's codes of the first stage are.
            piece: Piece of the stage, which is being multiplied.
            stage: Stage of the ring.
            following: The stage after it.
            later: The parity of that one's phase.
            full: mbarriers of the ring.
            more: Whether there is a stage after it.
        """
        if cutlass.const_expr(piece + 2 == PIECES):  # noqa: SIM102 - one is known to the compiler
            if more:
                ptx.mbarrier_wait(full + Uint32(following * 8), later)
        # The last two pieces of a stage are followed by the first two of the next one.
        at = stage if piece + 2 < PIECES else following
        return self._load_pairs(weights + Uint32(at * self.plan.weight_bytes), (piece + 2) % PIECES)

    @cute.jit
    def _multiply(self, operands: Fp8Operands, piece: cutlass.Constexpr, stage: Int32) -> None:
        """Start the MMAs of a converted piece; a stage's first one begins new sums."""
        # Writes to left operands and accumulators come before the MMAs read them.
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.plan.k_steps):
            u, column = divmod(piece * self.plan.k_steps + k, 4)
            cute.gemm(
                operands.first_mma if piece == k == 0 else operands.next_mma,
                operands.stage_sums,
                operands.fragments[piece % 2][None, None, k],
                operands.x[None, None, column, self.plan.stage_k_blocks * stage + u],
                operands.stage_sums,
            )
        warpgroup.commit_group()
