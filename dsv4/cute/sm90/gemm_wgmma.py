"""NVFP4 GEMM for large M: bound by the tensor cores, or by dequantizing the weights.

``out[m, n] = sum_k x[m, k] w[n, k]`` as ``wgmma`` with the weights as left operand from registers
(M of the instruction = 64 rows of the weight, N = ``token_block`` tokens) and X as right operand
from shared memory.

Tiling and ownership. A cluster computes a tile of ``rows`` rows of the weight and ``token_block``
tokens at a time. A CTA has two to four MMA warpgroups and one warpgroup for copies. An MMA warp
owns one row tile of 16 rows or two, which share what waiting and addresses cost: row tile ``warp +
h mma_warps`` of the CTA. Of its 64 columns a lane owns 16 bytes of codes and 8 bytes of block
scales (``dsv4.quant.fragments``), which it loads from shared memory. CTAs of clusters of one are
persistent; the CTAs of a larger cluster share K of one tile (``wgmma_epilogue``).

Pipeline. The first copy warp keeps a ring of ``stages`` stages full by TMA: ``stage_k_blocks``
blocks of 64 columns of X, codes and scales. It loads the weights of the first ``early_stages``
before griddepcontrol.wait, X after it. The second copy warp prefetches the first columns of X and
global scales to L2. An MMA warp dequantizes 32 or 64 columns into one of two sets of left operands
while the tensor cores multiply by the other, and has the next ``prefetched_k_blocks`` blocks of
codes and scales in registers. Weights wait in shared memory rather than in registers, so memory
may take its time.

With two warpgroups, a single CTA and wide tiles, the second warpgroup starts ``skew`` stages after
the first, so that one multiplies while the other stores its results.

Barriers:

* ``full[stage]``: mbarrier with one arrival (with the expected bytes) and the bytes of a stage.
* ``empty[stage]``: mbarrier with an arrival of every MMA warp that has read the stage.
* named barrier 5 (``READY``): the mbarriers exist; the copy warps arrive, MMA warps wait.
* named barrier 6 (``BEHIND``): the first warpgroup arrives after ``skew`` stages, the second waits.
* those of ``wgmma_epilogue``.

Both kinds of mbarrier complete a phase with every round of the ring; waits take the parity.

Numerics. Codes and block scales become bfloat16 exactly (times 2^-7); products are exact in float32
and summed by the tensor cores in the order of K. The bits of a token depend on the plan, not on
the other tokens.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.dequant import dequantized_fragment, scales_to_bfloat16
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.gemm_wgmma_plan import WGMMA_ABI, WgmmaArgs, WgmmaTma
from dsv4.cute.sm90.wgmma_copies import (
    KPart,
    Pipeline,
    SharedMemory,
    WgmmaCopies,
    fake_weights,
    fake_x,
)
from dsv4.cute.sm90.wgmma_epilogue import (
    Bounds,
    Exchange,
    Fragment,
    Output,
    RowTile,
)

CODE_BYTES, SCALE_BYTES = 512, 64  # of 16 rows and 64 columns
K_STEPS = 2  # as ``WgmmaPlan.k_steps``, of routed experts
READY, BEHIND = 5, 6  # named barriers, after those of the warpgroups

LaneWords = list[Uint32]  # a lane's 4 words of codes and 2 of scales of a row tile and 64 columns


class LaneWeights(NamedTuple):
    """Shared-memory addresses of a lane's weights in the first stage.

    Attributes:
        codes: Address of the codes of the warp's first row tile.
        scales: Address of its block scales.
    """

    codes: Uint32
    scales: Uint32


class Operands(NamedTuple):
    """Operands of the MMAs of a warpgroup.

    Attributes:
        mma: wgmma of 64 rows a warpgroup.
        sums: Accumulators of each of the warp's row tiles, as far as ``mma`` writes them.
        x: Right operands, of all stages.
        fragments: Two sets of left operands.
        words: The registers of these.
    """

    mma: cute.TiledMma
    sums: list[cute.Tensor]
    x: cute.Tensor
    fragments: list[cute.Tensor]
    words: list[cute.Tensor]


class Position(NamedTuple):
    """The position of an MMA warp in the ring.

    Attributes:
        stage: The next one.
        parity: Parity of its barriers' phase.
        in_flight: Stage that the MMAs in flight read, -1 for none.
    """

    stage: Int32
    parity: Int32
    in_flight: Int32


class Loop(NamedTuple):
    """The main loop of one tile.

    Attributes:
        stages: How many stages it takes.
        is_last: Whether no stage follows, because this is the cluster's last tile.
        lane: Lane of the warp.
        opaque_16: See ``WgmmaArgs``.
    """

    stages: Int32
    is_last: Boolean
    lane: Int32
    opaque_16: Uint32


class WgmmaKernel(WgmmaCopies):
    """The kernel of one configuration."""

    abi = WGMMA_ABI

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
        args: Any,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself.

        Args:
            x: bfloat16 ``[tokens, groups K]``.
            codes: Packed codes, as words.
            scales: Packed block scales, as words.
            args: ``WgmmaArgs``, or those of the subclass.
            stream: The driver's handle.
        """
        x_atom, x_tensor = self._x_tma(x)
        codes_atom, codes_tensor = self._weights_tma(codes, self.plan.code_bytes)
        scales_atom, scales_tensor = self._weights_tma(scales, self.plan.scale_bytes)
        tma = WgmmaTma(
            x_tma=x_atom,
            codes_tma=codes_atom,
            scales_tma=scales_atom,
            x_tensor=x_tensor,
            codes_tensor=codes_tensor,
            scales_tensor=scales_tensor,
            x_layout=self._x_layout(),
        )
        self._launch(self.kernel(tma, self._mma(self.plan.token_block), args), stream)

    @cute.kernel
    def kernel(self, tma: WgmmaTma, mma: cute.TiledMma, args: WgmmaArgs) -> None:
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
        weights_at = smem.allocate_array(cutlass.Uint8, self.plan.stages * self.plan.weight_bytes)
        buffer = Uint32(smem.allocate_array(cutlass.Uint8, self.plan.epilogue_bytes).toint())
        sums_at = self._exchange_buffer(smem, shared_x)
        full_at = smem.allocate_array(cutlass.Int64, 2 * self.plan.stages + 2)
        full = Uint32(full_at.toint())
        pipeline = Pipeline(full, full + 8 * self.plan.stages)
        exchange = Exchange(sums_at, pipeline.empty + 8 * self.plan.stages)
        # At once: the next kernel's CTAs start where SMs are free, and wait for this kernel's end
        # before they read its results.
        cute.arch.griddepcontrol_launch_dependents()

        # The copy warp makes the mbarriers and waits for no other warp: weights come first.
        if warp >= self.plan.mma_warps:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if warp == self.plan.mma_warps:
                self._make_pipeline(pipeline, lane)
                self._make_exchange(exchange.barrier, me)
                cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=self.plan.threads)
            # A relaxed arrival: one that releases would wait for all loads that are under way.
            self._arrive_cluster()
            if warp == self.plan.mma_warps + 1:
                self._prefetch(args, walk, part, lane)
            if warp == self.plan.mma_warps:
                shared = SharedMemory(shared_x, weights_at, full_at)
                self._copy(tma, shared, pipeline, walk, part, args.group_blocks, lane)
            self._wait_cluster()
        else:
            self._arrive_cluster()
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            slice_ = mma.get_slice(thread)
            shape = slice_.partition_shape_C((64 * self.plan.warpgroups, self.plan.token_block))
            sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.plan.warp_tiles)]
            operands = self._operands(mma, sums, shared_x, thread)[0]
            codes_from = Uint32(weights_at.toint())
            scales_from = codes_from + Uint32(self.plan.cta_row_tiles * self.plan.code_bytes)
            weights = LaneWeights(
                codes_from + Uint32(warp * self.plan.code_bytes + lane * 16),
                scales_from + Uint32(warp * self.plan.scale_bytes + lane // 4 * 8),
            )
            stage, parity, tile = Int32(0), Int32(0), Int32(first)
            cute.arch.barrier(barrier_id=READY, number_of_threads=self.plan.threads)
            skewed = total > stride and part.stages > self.skew
            self._fall_behind(warp, skewed)
            prefetched = self._start(weights, full, tile < total)
            while tile < total:
                row_block, token_tile = tile_position(tile, order, cutlass.min)
                own = self._own(row_block, warp)
                # Global scales are loaded before the MMAs, so that no result waits for them.
                factors = [self._factors(args, row_tile, lane) for row_tile in own]
                for h in cutlass.range_constexpr(self.plan.warp_tiles):
                    sums[h].fill(0.0)
                prefetched, position = self._multiply_ring(
                    operands,
                    weights,
                    prefetched,
                    pipeline,
                    Position(stage, parity, Int32(-1)),
                    Loop(part.stages, tile + stride >= total, lane, Uint32(args.opaque_16)),
                    skewed and tile == first and warp < 4,
                )
                stage, parity = position.stage, position.parity
                warpgroup.wait_group(0)
                self._release(pipeline.empty, position.in_flight, lane)
                group = row_block // args.group_blocks
                reduced = self._reduced(sums, exchange, me)
                self._store_tiles(
                    list(map(RowTile, reduced, own, factors)),
                    Output(
                        buffer=buffer,
                        token_scale=args.token_scale + group * 4,
                        out=args.out,
                        x=args.x + group * args.group_stride * 2,
                    ),
                    token_tile,
                    me,
                    Bounds(
                        tokens=cutlass.min(args.tokens, (token_tile + 1) * self.plan.token_block),
                        row_tiles=args.row_tiles,
                        token_stride=args.token_stride,
                        groups=args.groups,
                        k_blocks=args.k_blocks,
                        limit=args.limit,
                    ),
                )
                tile += stride

    # The copy warps.

    @cute.jit
    def _copy(
        self,
        tma: WgmmaTma,
        shared: SharedMemory,
        pipeline: Pipeline,
        walk: Walk,
        part: KPart,
        group_blocks: Int32,
        lane: Int32,
    ) -> None:
        """One warp: keep the ring full, tile after tile.

        The weights of the first ``early_stages`` are copied before griddepcontrol.wait; the loop
        then adds the X of these stages.
        """
        full, full_at = pipeline.full, shared.full
        # A part of K may have fewer stages than the ring.
        early = cutlass.min(part.stages, Int32(self.plan.early_stages))
        cpasync.prefetch_descriptor(tma.x_tma)
        row_block, _ = tile_position(walk.first, walk.order, cutlass.min)
        first_row = row_block * self.plan.cta_row_tiles
        at_once = self._weight_copies(tma, shared.weights, first_row)
        for k in cutlass.range(early, unroll=1):
            self._expect(full + Uint32(k * 8), self.plan.token_block, lane)
            self._copy_weights(tma, at_once, part.begin + k, Int32(k), full_at + k)
        cute.arch.griddepcontrol_wait()
        x_tiles = cute.local_tile(tma.x_tensor, (self.plan.tma_tokens, 64), (None, None))
        x = self._partition(tma.x_tma, self._x_stages(shared.x), x_tiles)
        tile, stage, parity = walk.first, Int32(0), Int32(1)
        while tile < walk.total:
            row_block, token_tile = tile_position(tile, walk.order, cutlass.min)
            row = row_block * self.plan.cta_row_tiles
            weights = self._weight_copies(tma, shared.weights, row)
            group = row_block // group_blocks
            column = (group * part.total + part.begin) * self.plan.stage_k_blocks
            for k in cutlass.range(part.stages, unroll=1):
                # Stages whose weights are there already, and whose bytes are expected.
                if early > 0:
                    early -= 1
                else:
                    ptx.mbarrier_wait(pipeline.empty + Uint32(stage * 8), parity)
                    self._expect(full + Uint32(stage * 8), self.plan.token_block, lane)
                    self._copy_weights(tma, weights, part.begin + k, stage, full_at + stage)
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
    def _prefetch(self, args: WgmmaArgs, walk: Walk, part: KPart, lane: Int32) -> None:
        """One warp: bring X of the first stage and global scales of the first tile to L2.

        Harmless while the preceding kernel still writes X: L2 is where both meet.
        """
        row_block, token_tile = tile_position(walk.first, walk.order, cutlass.min)
        first = token_tile * self.plan.token_block
        column = row_block // args.group_blocks * args.group_stride
        column += part.begin * (64 * self.plan.stage_k_blocks)
        for i in cutlass.range_constexpr(-(-self.plan.token_block // 32)):
            token = cutlass.min(first + i * 32 + lane, args.tokens - 1)
            start = args.x + (Int64(token) * args.token_stride + column) * 2
            ptx.bulk_prefetch_l2(start, 128 * self.plan.stage_k_blocks)
        # 64 bytes are the global scales of a row tile, where rows have their own.
        row = cutlass.min(row_block * self.plan.cta_row_tiles + lane, args.row_tiles - 1)
        ptx.prefetch_l2(args.global_scale + Int64(row * args.scale_rows) * 64)

    # The MMA warps.

    def _mma(self, tokens: int) -> cute.TiledMma:
        """wgmma of 64 rows a warpgroup and ``tokens`` tokens."""
        op = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (64, tokens, 16),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        return cute.make_tiled_mma(op, (self.plan.warpgroups, 1, 1))

    def _own(self, row_block: Int32, warp: Int32) -> list[Int32]:
        """The warp's row tiles in a block of rows."""
        first = row_block * self.plan.cta_row_tiles + warp
        return [first + h * self.plan.mma_warps for h in range(self.plan.warp_tiles)]

    @cute.jit
    def _factors(self, args: WgmmaArgs, row_tile: Int32, lane: Int32) -> Fragment:
        """Global scale times 2^7 of the lane's two rows of a row tile."""
        factors = []
        for h in cutlass.range_constexpr(2):
            row = cutlass.min(row_tile, args.row_tiles - 1) * 16 + lane // 4 + h * 8
            # The segment of the row; a cut that does not exist is larger than any row.
            index = Int32(row >= args.cut0) + Int32(row >= args.cut1) + Int32(row >= args.cut2)
            if args.scale_rows == 1:
                index = row
            scale = ptx.load_global_float(args.global_scale + Int64(index) * 4)
            factors.append(scale * Float32(128.0))
        return factors

    def _operands(
        self, mma: cute.TiledMma, sums: list[cute.Tensor], shared_x: cute.Tensor, thread: Int32
    ) -> list[Operands]:
        """Operands of the wgmma of each width of ``mma_widths``; left operands are common."""
        slice_ = mma.get_slice(thread)
        rows = 64 * self.plan.warpgroups
        left_shape = slice_.partition_shape_A((rows, 16 * self.plan.k_steps))
        left = [cute.make_rmem_tensor(left_shape, BFloat16) for _ in range(2)]
        words = [cute.recast_tensor(operand, Uint32) for operand in left]
        operands = []
        for tokens in self.plan.mma_widths:
            op = mma if tokens == self.plan.token_block else self._mma(tokens)
            op.set(warpgroup.Field.ACCUMULATE, True)
            slice_ = op.get_slice(thread)
            shape = slice_.partition_shape_C((rows, tokens))
            parts = [cute.make_tensor(tile.iterator, cute.make_layout(shape)) for tile in sums]
            # Lines of 128 bytes in groups of 8, as a whole stage has them; the first ``tokens``.
            stages = cute.make_layout(
                ((8, tokens // 8), (64, 1), (1, self.plan.stage_k_blocks * self.plan.stages)),
                stride=((64, 512), (1, 0), (0, self.plan.token_block * 64)),
            )
            lines = cute.make_tensor(shared_x.iterator, stages)
            right = op.make_fragment_B(slice_.partition_B(lines))
            operands.append(Operands(op, parts, right, left, words))
        return operands

    @cute.jit
    def _start(self, weights: LaneWeights, full: Uint32, exists: Boolean) -> list[LaneWords]:
        """The lane's first weights, once the first stage has arrived, where there is one."""
        if exists:
            ptx.mbarrier_wait(full, Int32(0))
        return self._load_first(weights)

    def _load_first(self, weights: Any) -> list[LaneWords]:
        """Weights of the first ``prefetched_k_blocks`` blocks of each of the warp's row tiles."""
        blocks = range(self.plan.prefetched_k_blocks)
        pairs = itertools.product(blocks, range(self.plan.warp_tiles))
        return [self._load(weights, Int32(0), u, h) for u, h in pairs]

    def _load(self, weights: Any, stage: Int32, u: int, h: int) -> LaneWords:
        """The lane's 4 words of codes and 2 of scales.

        Args:
            weights: Where the lane's are in the first stage.
            stage: Stage of the ring.
            u: Block of 64 columns of the stage.
            h: Row tile of the warp.
        """
        skip, further = Uint32(stage * self.plan.weight_bytes), h * self.plan.mma_warps
        codes_from = weights.codes + skip
        codes_from += Uint32(further * self.plan.code_bytes + u * CODE_BYTES)
        scales_from = weights.scales + skip
        scales_from += Uint32(further * self.plan.scale_bytes + u * SCALE_BYTES)
        return [*ptx.load_shared(codes_from, 4), *ptx.load_shared(scales_from, 2)]

    @cute.jit
    def _multiply_ring(
        self,
        operands: Operands,
        weights: LaneWeights,
        prefetched: list[LaneWords],
        pipeline: Pipeline,
        position: Position,
        loop: Loop,
        leads: Any = None,
    ) -> tuple[list[LaneWords], Position]:
        """All MMA warps: add a tile's products to its sums; the last MMAs stay in flight.

        Args:
            operands: Operands of the MMAs.
            weights: Where the lane's weights are.
            prefetched: The lane's weights of the first columns, in registers.
            pipeline: mbarriers of the ring.
            position: In the ring.
            loop: Stages of the tile.
            leads: Whether this is the first tile of the warpgroup that another one falls behind.

        Returns:
            The lane's next weights, and the position after the tile.
        """
        mma, sums, right, left, words = operands
        stage, parity, before = position
        for step in cutlass.range(loop.stages, unroll=1):
            following, later = stage + 1, parity
            if following == self.plan.stages:
                following = Int32(0)
                later = parity ^ 1
            for piece in cutlass.range_constexpr(4 * self.plan.stage_k_blocks // self.plan.k_steps):
                u, start = divmod(piece * self.plan.k_steps, 4)
                for h in cutlass.range_constexpr(self.plan.warp_tiles):
                    # Two sets of left operands, used alternately: the MMAs in flight read one
                    # while the other is written.
                    turn = (piece * self.plan.warp_tiles + h) % 2
                    register_set = u % self.plan.prefetched_k_blocks * self.plan.warp_tiles + h
                    self._dequantize(words[turn], prefetched[register_set], start, loop.opaque_16)
                    # Writes to left operands and accumulators come before the MMAs read them.
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
                        # The block of 64 columns that these registers hold next, maybe one of the
                        # next stage.
                        coming = u + self.plan.prefetched_k_blocks
                        whole = self.plan.stage_k_blocks
                        if cutlass.const_expr(coming == whole and h == 0):  # noqa: SIM102
                            if not (loop.is_last and step + 1 == loop.stages):
                                ptx.mbarrier_wait(pipeline.full + Uint32(following * 8), later)
                        there = following if coming >= whole else stage
                        prefetched[register_set] = self._load(weights, there, coming % whole, h)
                    # The MMAs before those just started are done: their operands may be written.
                    warpgroup.wait_group(1)
                    # So the MMAs that read the stage before are done, too.
                    if cutlass.const_expr(piece == h == 0):
                        self._release(pipeline.empty, before, loop.lane)
            self._let_follow(leads, step)
            before = stage
            stage = following
            parity = later
        return prefetched, Position(stage, parity, before)

    def _dequantize(
        self, words: cute.Tensor, loaded: LaneWords, start: int, opaque_16: Uint32
    ) -> None:
        """Write left operands of ``k_steps`` steps of 16 columns, from step ``start`` on."""
        for k in range(self.plan.k_steps):
            scales = scales_to_bfloat16((loaded[4], loaded[5]), start + k, opaque_16)
            for i, word in enumerate(dequantized_fragment(loaded[start + k], scales)):
                words[k * 4 + i] = word

    @cute.jit
    def _release(self, empty: Uint32, stage: Int32, lane: Int32) -> None:
        """One warp: say that it has read a stage, unless that is -1."""
        if lane == 0 and stage >= 0:
            ptx.mbarrier_arrive(empty + Uint32(stage * 8))

    @property
    def skew(self) -> int:
        """Stages that the first of two warpgroups is ahead of the other, 0 where it is not.

        One then multiplies while the other stores its results.
        """
        # Two stages less than the ring has: a skew of more stages than the ring has would hang.
        wide = self.plan.warpgroups == 2 and self.plan.ctas == 1 and self.plan.token_block >= 128
        return self.plan.stages - 2 if wide else 0

    @cute.jit
    def _fall_behind(self, warp: Int32, skewed: Boolean) -> None:
        """The second warpgroup: wait until the first is ``skew`` stages ahead."""
        if cutlass.const_expr(self.skew):  # noqa: SIM102 - one is known to the compiler
            if skewed and warp >= 4:
                threads = self.plan.mma_warps * 32
                cute.arch.barrier(barrier_id=BEHIND, number_of_threads=threads)

    @cute.jit
    def _let_follow(self, leads: Any, step: Int32) -> None:
        """The first warpgroup: let the other start after ``skew`` stages of its first tile."""
        if cutlass.const_expr(self.skew and leads is not None):  # noqa: SIM102
            if leads and step == self.skew - 1:
                threads = self.plan.mma_warps * 32
                cute.arch.barrier_arrive(barrier_id=BEHIND, number_of_threads=threads)
