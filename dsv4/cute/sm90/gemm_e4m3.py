"""GEMM with FP8 arithmetic and exact NVFP4 weights for large M.

``out[m, n] = sum_k x[m, k] w[n, k]`` as ``wgmma`` of E4M3 operands, both in shared memory: M of the
instruction is 64 tokens, N 128 rows of the weight, K 32 columns.

Tiling and ownership. A CTA computes tiles of ``token_block`` tokens and 128 rows of the weight, one
after another. Of its four warpgroups two multiply, each ``token_rows`` tiles of 64 tokens by all
128 rows; one dequantizes weights; one copies. Dequantized weights are common to both MMA
warpgroups, so their cost is spread over all tokens of the tile. Tokens are the rows of accumulators
because a lane has two rows of each fragment, so two scales, and 32 columns.

Pipeline. The copy warp keeps a ring of ``stages`` stages of 128 columns full by TMA: X as E4M3
codes, packed codes and scales of the weight. The warps that dequantize read the latter and write
E4M3 to a ring of ``dequantized_stages`` stages, in the layout that ``wgmma`` reads (lines of 128
bytes, a row each, whose 16-byte pieces are exchanged by the row's number). A lane's codes of a row
and 64 columns become 16 consecutive bytes, so columns stand in *fragment order* there
(``dsv4.quant.fragments.fragment_columns``), and in X, too.

Barriers:

* ``full[stage]``: mbarrier with one arrival (with the expected bytes) and the bytes of a stage.
* ``empty[stage]``: mbarrier with an arrival of every MMA warp and of every warp that dequantizes.
* ``ready[stage]``: mbarrier with an arrival of every warp that dequantizes; its rows are written.
* ``free[stage]``: mbarrier with an arrival of every MMA warp that has read dequantized weights.

Factors of rows (global scale times power of two) are written to shared memory by the warps that
dequantize, before they signal the tile's first stage; there is room for those of all tiles that
these warps may be ahead.

Numerics. Operands are exact E4M3 numbers. The tensor cores sum 128 columns with the precision that
they have (about 14 bits below the largest term), in accumulators of their own; these sums times the
token's scale are added in float32, in ascending order of K. The bits of a token depend on the plan,
not on the other tokens. A NaN among the codes of X makes its token's results NaN, and no other's.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from dsv4.cute.device import exact_fp8, ptx
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.device.tile_walk import TileOrder, Walk
from dsv4.cute.sm90.gemm_e4m3_plan import E4M3_ABI, K_BLOCK, LINE, ROWS, E4m3Args, E4m3Plan
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaTma
from dsv4.cute.sm90.wgmma_copies import WgmmaCopies, fake_weights, fake_x

MMA_WARPS, DEQUANT_WARPS = 8, 4
K_STEPS = K_BLOCK // 32  # wgmma of a stage


class Rings(NamedTuple):
    """mbarriers of both rings, 8 bytes a stage.

    Attributes:
        full: Those that say that a stage has arrived.
        empty: Those that say that it has been read.
        ready: Those that say that a stage of weights is dequantized.
        free: Those that say that it has been read.
    """

    full: Uint32
    empty: Uint32
    ready: Uint32
    free: Uint32


class Position(NamedTuple):
    """A warp's position in a ring.

    Attributes:
        stage: The next one.
        parity: Parity of its barriers' phase.
    """

    stage: Int32
    parity: Int32


class Warp(NamedTuple):
    """A thread's position.

    Attributes:
        thread: Thread of the CTA.
        warp: Warp of the CTA.
        lane: Lane of the warp.
    """

    thread: Int32
    warp: Int32
    lane: Int32


class Operands(NamedTuple):
    """Operands of the MMAs of a warpgroup.

    Attributes:
        first_mma: wgmma that begins new sums.
        next_mma: wgmma that adds to them.
        x: Left operands of all steps, and of all tiles of 64 tokens of all stages.
        weights: Right operands of all steps and stages.
        sums: The tile's, for each of the warpgroup's tiles of 64 tokens.
        stage_sums: What the MMAs write.
    """

    first_mma: cute.TiledMma
    next_mma: cute.TiledMma
    x: cute.Tensor
    weights: cute.Tensor
    sums: list[cute.Tensor]
    stage_sums: cute.Tensor


class Tile(NamedTuple):
    """A tile of the result.

    Attributes:
        row_block: Block of 128 rows of the weight.
        token: The first token of the lane's first row of accumulators.
        begin: First token of the warp.
    """

    row_block: Int32
    token: Int32
    begin: Int32


class E4m3Kernel(WgmmaCopies):
    """The kernel of one configuration."""

    abi = E4M3_ABI
    plan: E4m3Plan  # type: ignore[assignment]

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
        args: E4m3Args,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself.

        Args:
            x: E4M3 codes as pairs, ``[tokens, groups K / 2]``.
            codes: Packed codes, as words.
            scales: Packed block scales, as words.
            args: The scalars.
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
            x_layout=self._layout(self.plan.token_block, self.plan.stages),
        )
        self.kernel(tma, args).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[1, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tma: WgmmaTma, args: E4m3Args) -> None:
        """Multiply the tiles of a CTA, one after another; see the module."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        me = Warp(thread, cute.arch.make_warp_uniform(thread // 32), thread % 32)
        order = TileOrder(args.token_tiles, args.token_span, args.row_blocks)
        walk = Walk(Int32(block), Int32(grid), args.token_tiles * args.row_blocks, order)

        smem = cutlass.memory.SmemAllocator()
        shared_x = smem.allocate_tensor(
            BFloat16, tma.x_layout.outer, byte_alignment=1024, swizzle=tma.x_layout.inner
        )
        layout = self._layout(ROWS, self.plan.dequantized_stages)
        shared_weights = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        packed = smem.allocate_array(
            cutlass.Uint8, self.plan.stages * self.plan.weight_bytes, byte_alignment=128
        )
        buffer = Uint32(
            smem.allocate_array(cutlass.Uint8, self.plan.epilogue_bytes, byte_alignment=16).toint()
        )
        factors = buffer + Uint32(self.plan.transpose_bytes)
        full_at = smem.allocate_array(cutlass.Int64, self.plan.barriers)
        full = Uint32(full_at.toint())
        ready = full + Uint32(16 * self.plan.stages)
        rings = Rings(
            full=full,
            empty=full + Uint32(8 * self.plan.stages),
            ready=ready,
            free=ready + Uint32(8 * self.plan.dequantized_stages),
        )
        cute.arch.griddepcontrol_launch_dependents()
        if me.warp == 0:
            self._make_rings(rings, me.lane)
        cute.arch.sync_threads()

        if me.warp >= MMA_WARPS + DEQUANT_WARPS:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if me.warp == MMA_WARPS + DEQUANT_WARPS:
                self._copy(tma, shared_x, packed, full_at, rings, walk, args, me.lane)
        elif me.warp >= MMA_WARPS:
            cute.arch.setmaxregister_decrease(self.plan.dequant_registers)
            to = Uint32(shared_weights.iterator.toint())
            self._dequantize(Uint32(packed.toint()), to, factors, rings, walk, args, me)
        else:
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            operands = self._mma_operands(shared_x, shared_weights)
            self._multiply(operands, buffer, factors, rings, walk, args, me)

    @cute.jit
    def _make_rings(self, rings: Rings, lane: Int32) -> None:
        """One warp: make the mbarriers."""
        if lane < self.plan.stages:
            ptx.mbarrier_init(rings.full + Uint32(lane * 8), 1)
            ptx.mbarrier_init(rings.empty + Uint32(lane * 8), MMA_WARPS + DEQUANT_WARPS)
        if lane < self.plan.dequantized_stages:
            ptx.mbarrier_init(rings.ready + Uint32(lane * 8), DEQUANT_WARPS)
            ptx.mbarrier_init(rings.free + Uint32(lane * 8), MMA_WARPS)
        ptx.fence_mbarrier_init()

    @cute.jit
    def _advanced(self, position: Position, stages: cutlass.Constexpr) -> Position:
        """The position after this one."""
        stage, parity = position.stage + 1, position.parity
        if stage == stages:
            stage = Int32(0)
            parity = parity ^ 1
        return Position(stage, parity)

    @cute.jit
    def _next_slot(self, slot: Int32) -> Int32:
        """Where the factors of the next tile's rows are."""
        slot += 1
        if slot == self.plan.factor_slots:
            slot = Int32(0)
        return slot

    # The copy warp.

    @cute.jit
    def _copy(
        self,
        tma: WgmmaTma,
        shared_x: cute.Tensor,
        packed: cute.Pointer,
        full_at: cute.Pointer,
        rings: Rings,
        walk: Walk,
        args: E4m3Args,
        lane: Int32,
    ) -> None:
        """One warp: keep the ring full, tile after tile, once the preceding kernel has ended."""
        cpasync.prefetch_descriptor(tma.x_tma)
        cpasync.prefetch_descriptor(tma.codes_tma)
        cpasync.prefetch_descriptor(tma.scales_tma)
        cute.arch.griddepcontrol_wait()
        x_tiles = cute.local_tile(tma.x_tensor, (self.plan.tma_tokens, 64), (None, None))
        stages_of_x = cute.make_tensor(
            shared_x.iterator, self._layout(self.plan.tma_tokens, self.plan.stages).outer
        )
        x = self._partition(tma.x_tma, stages_of_x, x_tiles)
        tile, position = walk.first, Position(Int32(0), Int32(1))
        while tile < walk.total:
            row_block, token_tile = tile_position(tile, walk.order, cutlass.min)
            weights = self._weight_copies(tma, packed, row_block * self.plan.cta_row_tiles)
            column = row_block // args.group_blocks * args.stages
            for k in cutlass.range(args.stages, unroll=1):
                stage = position.stage
                ptx.mbarrier_wait(rings.empty + Uint32(stage * 8), position.parity)
                if lane == 0:
                    ptx.mbarrier_arrive_expect_tx(
                        rings.full + Uint32(stage * 8), self.plan.x_bytes + self.plan.weight_bytes
                    )
                self._copy_weights(tma, weights, Int32(k), stage, full_at + stage)
                cute.copy(
                    tma.x_tma,
                    x.source[(None, token_tile, column + k)],
                    x.to[(None, stage)],
                    tma_bar_ptr=full_at + stage,
                )
                position = self._advanced(position, self.plan.stages)
            tile += walk.stride

    # The warps that dequantize weights.

    @cute.jit
    def _dequantize(
        self,
        packed: Uint32,
        to: Uint32,
        factors: Uint32,
        rings: Rings,
        walk: Walk,
        args: E4m3Args,
        me: Warp,
    ) -> None:
        """Four warps: dequantize the weights of every stage, two row tiles each.

        Args:
            packed: Codes and scales of all stages.
            to: Dequantized weights of all stages.
            factors: Factors of rows.
            rings: mbarriers.
            walk: The CTA's tiles.
            args: The scalars.
            me: Who this is.
        """
        warp, lane = me.warp - MMA_WARPS, me.lane
        row, quarter = lane // 4, lane % 4
        codes_from = packed + Uint32(warp * self.plan.code_bytes + lane * 16)
        scales_from = packed + Uint32(
            self.plan.cta_row_tiles * self.plan.code_bytes + warp * self.plan.scale_bytes + row * 8
        )
        # The first of the lane's two pieces of a line; the other one is its neighbour.
        to += Uint32((warp * 16 + row) * K_BLOCK) + Uint32(((2 * quarter) ^ row) * 16)
        opaque_16 = Uint32(args.opaque_16)
        cute.arch.griddepcontrol_wait()
        tile, slot = walk.first, Int32(0)
        position, target = Position(Int32(0), Int32(0)), Position(Int32(0), Int32(1))
        while tile < walk.total:
            row_block, _ = tile_position(tile, walk.order, cutlass.min)
            of_thread = me.thread % ROWS
            factor = self._factor(args, row_block * ROWS + of_thread)
            ptx.store_shared_float(factors + Uint32(slot * (ROWS * 4) + of_thread * 4), factor)
            slot = self._next_slot(slot)
            biases = [
                self._row_biases(args, row_block * ROWS + (warp + h * DEQUANT_WARPS) * 16 + row)
                for h in range(2)
            ]
            for _ in cutlass.range(args.stages, unroll=1):
                ptx.mbarrier_wait(rings.full + Uint32(position.stage * 8), position.parity)
                ptx.mbarrier_wait(rings.free + Uint32(target.stage * 8), target.parity)
                skip = Uint32(position.stage * self.plan.weight_bytes)
                there = to + Uint32(target.stage * self.plan.dequantized_bytes)
                self._dequantize_stage(
                    codes_from + skip, scales_from + skip, there, biases, opaque_16
                )
                # Written by ordinary stores, read by wgmma.
                ptx.fence_proxy_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.mbarrier_arrive(rings.ready + Uint32(target.stage * 8))
                    ptx.mbarrier_arrive(rings.empty + Uint32(position.stage * 8))
                position = self._advanced(position, self.plan.stages)
                target = self._advanced(target, self.plan.dequantized_stages)
            tile += walk.stride

    def _dequantize_stage(
        self,
        codes_from: Uint32,
        scales_from: Uint32,
        to: Uint32,
        biases: list[Uint32],
        opaque_16: Uint32,
    ) -> None:
        """One warp: dequantize two row tiles of a stage.

        Args:
            codes_from: The lane's codes.
            scales_from: The lane's block scales.
            to: The first of the lane's two pieces of a line.
            biases: ``exact_fp8.row_biases`` of both row tiles.
            opaque_16: 16.
        """
        for h, u in itertools.product(range(2), repeat=2):
            further = h * DEQUANT_WARPS
            codes = ptx.load_shared(codes_from, 4, further * self.plan.code_bytes + u * 512)
            scales = ptx.load_shared(scales_from, 2, further * self.plan.scale_bytes + u * 64)
            lines: tuple[list[Uint32], list[Uint32]] = ([], [])
            for j in range(4):
                powers = exact_fp8.factors((scales[0], scales[1]), j, biases[h], opaque_16)
                for line, word in zip(
                    lines, exact_fp8.dequantized(codes[j], powers, opaque_16), strict=True
                ):
                    line.append(word)
            # The second piece is the first one's neighbour.
            at = to ^ Uint32(u * 16)
            for half, line in enumerate(lines):
                ptx.store_shared4(at, line, (further * 16 + half * 8) * K_BLOCK)

    @cute.jit
    def _row_biases(self, args: E4m3Args, row: Int32) -> Uint32:
        """``exact_fp8.row_biases`` of a lane's two rows."""
        exponents = []
        for h in cutlass.range_constexpr(2):
            at = args.row_exponent + Int64(cutlass.min(row + 8 * h, args.rows - 1))
            exponents.append(self._signed_byte(ptx.load_global_byte(at)))
        return exact_fp8.row_biases(exponents[0], exponents[1])

    def _signed_byte(self, byte: Uint32) -> Int32:
        """A byte's two's complement."""
        return (Int32(byte) ^ 128) - 128

    # The MMA warps.

    def _tiled_mma(self) -> cute.TiledMma:
        """wgmma of 64 tokens and 128 rows of the weight."""
        op = warpgroup.MmaF8Op(
            Float8E4M3FN,
            Float8E4M3FN,
            Float32,
            (64, ROWS, 32),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        return cute.make_tiled_mma(op, (1, 1, 1))

    def _lines(self, shared: cute.Tensor, rows: int, stages: int) -> cute.Tensor:
        """Stages of lines of 128 E4M3 numbers, in shared memory that TMA has as pairs."""
        swizzle = self._layout(8, 1).inner
        pointer = cute.recast_ptr(shared.iterator, swizzle, dtype=Float8E4M3FN)
        layout = cute.make_layout(
            ((8, rows // 8), (K_BLOCK, 1), (1, stages)),
            stride=((K_BLOCK, 8 * K_BLOCK), (1, 0), (0, rows * K_BLOCK)),
        )
        return cute.make_tensor(pointer, layout)

    def _mma_operands(self, shared_x: cute.Tensor, shared_weights: cute.Tensor) -> Operands:
        """Operands of a warpgroup's MMAs."""
        first, following = self._tiled_mma(), self._tiled_mma()
        first.set(warpgroup.Field.ACCUMULATE, False)
        following.set(warpgroup.Field.ACCUMULATE, True)
        slice_ = following.get_slice(0)
        blocks = self.plan.stages * self.plan.token_block // 64
        x = self._lines(shared_x, 64, blocks)
        weights = self._lines(shared_weights, ROWS, self.plan.dequantized_stages)
        shape = slice_.partition_shape_C((64, ROWS))
        sums = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.plan.token_rows)]
        return Operands(
            first_mma=first,
            next_mma=following,
            x=following.make_fragment_A(slice_.partition_A(x)),
            weights=following.make_fragment_B(slice_.partition_B(weights)),
            sums=sums,
            stage_sums=cute.make_rmem_tensor(shape, Float32),
        )

    @cute.jit
    def _multiply(
        self,
        operands: Operands,
        buffer: Uint32,
        factors: Uint32,
        rings: Rings,
        walk: Walk,
        args: E4m3Args,
        me: Warp,
    ) -> None:
        """Two warpgroups: multiply and store, tile after tile."""
        group = me.warp // 4
        cute.arch.griddepcontrol_wait()
        tile, slot = walk.first, Int32(0)
        position, source = Position(Int32(0), Int32(0)), Position(Int32(0), Int32(0))
        while tile < walk.total:
            row_block, token_tile = tile_position(tile, walk.order, cutlass.min)
            begin = token_tile * self.plan.token_block + group * (64 * self.plan.token_rows)
            begin += me.warp % 4 * 16
            own = Tile(row_block, begin + me.lane // 4, begin)
            for i in cutlass.range_constexpr(self.plan.token_rows):
                operands.sums[i].fill(Float32(0.0))
            position, source = self._multiply_ring(
                operands, rings, position, source, args, own, group, me.lane
            )
            of_tile = factors + Uint32(slot * (ROWS * 4))
            self._store_tile(operands.sums, of_tile, buffer, own, args, me)
            slot = self._next_slot(slot)
            tile += walk.stride

    @cute.jit
    def _multiply_ring(
        self,
        operands: Operands,
        rings: Rings,
        position: Position,
        source: Position,
        args: E4m3Args,
        tile: Tile,
        group: Int32,
        lane: Int32,
    ) -> tuple[Position, Position]:
        """All MMA warps: add a tile's products to its sums.

        Returns:
            The positions in both rings after the tile.
        """
        stage_sums = operands.stage_sums
        first = args.x_scales + Int64(tile.row_block // args.group_blocks * args.stages)
        offsets = self._scale_offsets(args, tile)
        scales = self._token_scales_at(first, offsets)
        for k in cutlass.range(args.stages, unroll=1):
            # A stage early; of the last one again.
            further = first + Int64(cutlass.min(k + 1, args.stages - 1))
            coming = self._token_scales_at(further, offsets)
            ptx.mbarrier_wait(rings.full + Uint32(position.stage * 8), position.parity)
            ptx.mbarrier_wait(rings.ready + Uint32(source.stage * 8), source.parity)
            block = (position.stage * 2 + group) * self.plan.token_rows
            for i in cutlass.range_constexpr(self.plan.token_rows):
                # Reads of the accumulators come before the MMAs write them.
                warpgroup.fence()
                for step in cutlass.range_constexpr(K_STEPS):
                    cute.gemm(
                        operands.next_mma if step else operands.first_mma,
                        stage_sums,
                        operands.x[None, None, step, block + i],
                        operands.weights[None, None, step, source.stage],
                        stage_sums,
                    )
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if cutlass.const_expr(i + 1 == self.plan.token_rows):  # noqa: SIM102
                    if lane == 0:
                        ptx.mbarrier_arrive(rings.empty + Uint32(position.stage * 8))
                        ptx.mbarrier_arrive(rings.free + Uint32(source.stage * 8))
                self._promote(operands.sums[i], stage_sums, scales[2 * i : 2 * i + 2])
            scales = coming
            position = self._advanced(position, self.plan.stages)
            source = self._advanced(source, self.plan.dequantized_stages)
        return position, source

    def _promote(self, sums: cute.Tensor, stage_sums: cute.Tensor, scales: list[Float32]) -> None:
        """Add the sums of a stage, times the scales of the lane's two tokens."""
        for n in range(cute.size(sums)):
            # Accumulators 0 and 1 of four are of the first token, 2 and 3 of the other.
            sums[n] = ptx.fma_float(stage_sums[n], scales[n % 4 // 2], sums[n])

    def _scale_offsets(self, args: E4m3Args, tile: Tile) -> list[Uint32]:
        """Bytes from the scales of the first token to those of the lane's tokens."""
        offsets = []
        for h in range(2 * self.plan.token_rows):
            token = cutlass.min(tile.token + (h // 2 * 64 + h % 2 * 8), args.tokens - 1)
            offsets.append(Uint32(token) * Uint32(args.scale_stride))
        return offsets

    def _token_scales_at(self, first: Int64, offsets: list[Uint32]) -> list[Float32]:
        """Scales of the lane's tokens in a stage, those of the first token at ``first``."""
        return [
            ptx.bits_to_float(ptx.load_global_byte(first + Int64(offset)) << Uint32(23))
            for offset in offsets
        ]

    @cute.jit
    def _factor(self, args: E4m3Args, row: Int32) -> Float32:
        """Global scale of a row of the weight, times the power of two of its exponent."""
        row = cutlass.min(row, args.rows - 1)
        index = Int32(row >= args.cut0) + Int32(row >= args.cut1) + Int32(row >= args.cut2)
        if args.scale_rows == 1:
            index = row
        scale = ptx.load_global_float(args.global_scale + Int64(index) * 4)
        exponent = self._signed_byte(ptx.load_global_byte(args.row_exponent + Int64(row)))
        return scale * ptx.bits_to_float(Uint32((exponent + 127) << 23))

    # Results.

    @cute.jit
    def _store_tile(
        self,
        sums: list[cute.Tensor],
        factors: Uint32,
        buffer: Uint32,
        tile: Tile,
        args: E4m3Args,
        me: Warp,
    ) -> None:
        """One warp: store its tokens of a tile.

        Args:
            sums: For each of its tiles of tokens.
            factors: Those of the tile's rows.
            buffer: Transpose buffers of all warps.
            tile: Which one.
            args: The scalars.
            me: Who this is.
        """
        factors += Uint32(me.lane % 4 * 8)
        lines = buffer + Uint32(me.warp * (16 * LINE))
        width = ROWS // 2 if self.plan.swiglu else ROWS
        total = args.rows // 2 if self.plan.swiglu else args.rows
        for i in cutlass.range_constexpr(self.plan.token_rows):
            # 64 results of 16 tokens at a time.
            for part in cutlass.range_constexpr(width // 64):
                count = ROWS * 64 // width // 8  # tiles of 8 rows of the weight
                values = []
                for n in cutlass.range_constexpr(count):
                    tile_of_8 = part * count + n
                    two = ptx.load_shared_float2(factors + Uint32(tile_of_8 * 32))
                    four = [Float32(sums[i][tile_of_8 * 4 + j]) * two[j % 2] for j in range(4)]
                    if cutlass.const_expr(self.plan.swiglu):
                        four = [
                            ptx.swiglu(four[2 * h], four[2 * h + 1], args.limit) for h in range(2)
                        ]
                    values.append(four)
                first = tile.row_block * width + part * 64
                begin = tile.begin + i * 64
                if cutlass.const_expr(self.plan.float32_out):
                    self._store_tokens_float32(values, args, begin, first, total, me.lane)
                else:
                    self._store_tokens_bfloat16(values, lines, args, begin, first, total, me.lane)

    @cute.jit
    def _store_tokens_float32(
        self,
        values: list[list[Float32]],
        args: E4m3Args,
        begin: Int32,
        first: Int32,
        total: Int32,
        lane: Int32,
    ) -> None:
        """One warp: store float32 results of 16 tokens from registers."""
        for n in cutlass.range_constexpr(len(values)):
            for h in cutlass.range_constexpr(2):
                token = begin + lane // 4 + h * 8
                if cutlass.const_expr(self.plan.swiglu):
                    row = first + n * 4 + lane % 4
                    if token < args.tokens and row < total:
                        at = args.out + (Int64(token) * total + row) * 4
                        ptx.store_global_float(at, values[n][h])
                else:
                    row = first + n * 8 + lane % 4 * 2
                    if token < args.tokens and row < total:
                        at = args.out + (Int64(token) * total + row) * 4
                        ptx.store_global_float2(at, values[n][2 * h], values[n][2 * h + 1])

    @cute.jit
    def _store_tokens_bfloat16(
        self,
        values: list[list[Float32]],
        lines: Uint32,
        args: E4m3Args,
        begin: Int32,
        first: Int32,
        total: Int32,
        lane: Int32,
    ) -> None:
        """One warp: store 64 bfloat16 results of 16 tokens, by lines of 128 bytes."""
        cute.arch.sync_warp()
        if cutlass.const_expr(self.plan.swiglu):
            at = lines + Uint32(lane // 4 * LINE + lane % 4 * 2)
            for n in cutlass.range_constexpr(len(values)):
                for h in cutlass.range_constexpr(2):
                    ptx.store_shared_bfloat16(at + Uint32(h * 8 * LINE + n * 8), values[n][h])
        else:
            # Lane 8 i + r: row r of matrix i; matrices are 8 tokens and 8 results.
            matrix = lane // 8
            at = lines + Uint32((lane % 8 + matrix % 2 * 8) * LINE + matrix // 2 * 16)
            for n in cutlass.range_constexpr(0, len(values), 2):
                words = [
                    ptx.pack_bfloat16x2(
                        values[n + j // 2][j % 2 * 2], values[n + j // 2][j % 2 * 2 + 1]
                    )
                    for j in range(4)
                ]
                ptx.stmatrix_x4(at + Uint32(n * 16), words)
        cute.arch.sync_warp()
        for v in cutlass.range_constexpr(4):
            number = v * 32 + lane
            token, row = begin + number // 8, first + number % 8 * 8
            if token < args.tokens and row < total:
                line = ptx.load_shared(lines + Uint32(number // 8 * LINE + number % 8 * 16), 4)
                ptx.store_global4(args.out + (Int64(token) * total + row) * 2, line)
