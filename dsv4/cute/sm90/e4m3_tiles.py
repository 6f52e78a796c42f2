"""Main loop of the GEMMs with FP8 arithmetic: rings, MMAs, promotion.

``gemm_e4m3`` says what a CTA's warps do, and names the barriers.

Promotion. The tensor cores sum 128 columns in accumulators of their own; these sums times the
token's scale (and the weight's, where 128 x 128 of it share one) are added in float32, in ascending
order of K. An MMA warpgroup multiplies nothing meanwhile; the other one may.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_results import MMA_WARPS, E4m3Results, Lane, ResultBuffers, Tile
from dsv4.cute.sm90.gemm_e4m3_plan import K_BLOCK, ROWS

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


class Operands(NamedTuple):
    """Operands of the MMAs of a warpgroup.

    Attributes:
        first_mma: wgmma that begins new sums.
        next_mma: wgmma that adds to them.
        x: Left operands of all steps, and of all blocks of 64 tokens of all stages.
        weights: Right operands of all steps and stages.
        sums: The tile's, for each of the warpgroup's blocks of 64 tokens.
        stage_sums: What the MMAs write.
    """

    first_mma: cute.TiledMma
    next_mma: cute.TiledMma
    x: cute.Tensor
    weights: cute.Tensor
    sums: list[cute.Tensor]
    stage_sums: cute.Tensor


class ScaleAddresses(NamedTuple):
    """Where a lane finds the scales of its sums.

    Attributes:
        tokens: Address of the scales of X of the tile's group.
        offsets: Bytes from there to those of the lane's tokens.
        weight: Address of the scale of the weight of the first stage; 0 where there is none.
    """

    tokens: Int64
    offsets: list[Uint32]
    weight: Int64


class E4m3Tiles(E4m3Results):
    """Device functions of the MMA warps, and of both rings."""

    def _rings(self, full: Uint32) -> Rings:
        """The mbarriers, from address ``full`` on."""
        ready = full + Uint32(16 * self.plan.stages)
        return Rings(
            full=full,
            empty=full + Uint32(8 * self.plan.stages),
            ready=ready,
            free=ready + Uint32(8 * self.plan.dequantized_stages),
        )

    @cute.jit
    def _make_rings(self, rings: Rings, lane: Int32) -> None:
        """One warp: make the mbarriers."""
        if lane < self.plan.stages:
            readers = MMA_WARPS + self.plan.dequant_warps
            ptx.mbarrier_init(rings.full + Uint32(lane * 8), 1)
            ptx.mbarrier_init(rings.empty + Uint32(lane * 8), readers)
        if cutlass.const_expr(self.plan.dequantized_stages):  # noqa: SIM102
            if lane < self.plan.dequantized_stages:
                ptx.mbarrier_init(rings.ready + Uint32(lane * 8), self.plan.dequant_warps)
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

    def _tile(self, number: Int32, walk: Walk, args: Any) -> Tile:
        """The ``number``-th tile, or the first of those that share scales of results."""
        raise NotImplementedError

    def _following(self, number: Int32, walk: Walk) -> Int32:
        """Number of the CTA's tile after ``number``, or of none if it is ``walk.total`` or more."""
        raise NotImplementedError

    def _load_factor(self, args: Any, tile: Tile, me: Lane) -> Any:
        """The float32 factor of a tile that a thread of an MMA warpgroup holds; None: no factor."""
        return None

    def _factors(self, buffers: ResultBuffers, slot: Int32, factor: Any, me: Lane) -> Uint32:
        """Shared memory with the factors of a tile's rows, which have been written."""
        return buffers.factors + Uint32(slot * (ROWS * 4))

    # Operands.

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
        weights = self._lines(shared_weights, ROWS, self.plan.mma_weight_stages)
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

    # The MMA warps.

    @cute.jit
    def _multiply(
        self,
        operands: Operands,
        buffers: ResultBuffers,
        rings: Rings,
        walk: Walk,
        args: Any,
        me: Lane,
    ) -> None:
        """Two warpgroups: multiply and store, tile after tile.

        A warpgroup has every second block of 64 tokens.
        """
        group = me.warp // 4
        number, slot = walk.first, Int32(0)
        position, source = Position(Int32(0), Int32(0)), Position(Int32(0), Int32(0))
        while number < walk.total:
            first = self._tile(number, walk, args)
            begin = first.token + group * 64 + me.warp % 4 * 16
            for part in cutlass.range_constexpr(self.plan.row_parts):
                tile = first._replace(row=first.row + part * ROWS)
                factor = self._load_factor(args, tile, me)
                for i in cutlass.range_constexpr(self.plan.token_rows):
                    operands.sums[i].fill(Float32(0.0))
                position, source = self._multiply_ring(
                    operands, rings, position, source, args, tile, begin, me
                )
                factors = self._factors(buffers, slot, factor, me)
                for i in cutlass.range_constexpr(self.plan.token_rows):
                    if self._exists(tile, 2 * i + group):
                        self._store_block(
                            operands.sums[i],
                            i,
                            part,
                            factors,
                            buffers,
                            tile,
                            begin + i * 128,
                            args,
                            me,
                        )
                slot = self._next_slot(slot)
            number = self._following(number, walk)

    @cute.jit
    def _multiply_ring(
        self,
        operands: Operands,
        rings: Rings,
        position: Position,
        source: Position,
        args: Any,
        tile: Tile,
        begin: Int32,
        me: Lane,
    ) -> tuple[Position, Position]:
        """All MMA warps: add a tile's products to its sums.

        Returns:
            The positions in both rings after the tile.
        """
        group = me.warp // 4
        addresses = self._scale_addresses(args, tile, begin + me.lane // 4)
        scales = self._scales(addresses, Int32(0))
        for k in cutlass.range(args.stages, unroll=1):
            # A stage early; of the last one again.
            coming = self._scales(addresses, cutlass.min(k + 1, args.stages - 1))
            ptx.mbarrier_wait(rings.full + Uint32(position.stage * 8), position.parity)
            if cutlass.const_expr(self.plan.dequantized_stages):
                ptx.mbarrier_wait(rings.ready + Uint32(source.stage * 8), source.parity)
            block = position.stage * (2 * self.plan.token_rows) + group
            for i in cutlass.range_constexpr(self.plan.token_rows):
                if cutlass.const_expr(self.plan.is_grouped):
                    if self._exists(tile, 2 * i + group):
                        self._multiply_block(operands, block + 2 * i, source.stage)
                else:
                    self._multiply_block(operands, block + 2 * i, source.stage)
                if cutlass.const_expr(i + 1 == self.plan.token_rows):
                    self._release(rings, position, source, me.lane)
                if cutlass.const_expr(self.plan.is_grouped):
                    if self._exists(tile, 2 * i + group):
                        self._promote(
                            operands.sums[i], operands.stage_sums, scales[2 * i : 2 * i + 2]
                        )
                else:
                    self._promote(operands.sums[i], operands.stage_sums, scales[2 * i : 2 * i + 2])
            scales = coming
            position = self._advanced(position, self.plan.stages)
            if cutlass.const_expr(self.plan.dequantized_stages):
                source = self._advanced(source, self.plan.dequantized_stages)
            else:
                source = position
        return position, source

    @cute.jit
    def _multiply_block(self, operands: Operands, block: Int32, stage: Int32) -> None:
        """A warpgroup: multiply a block of 64 tokens of a stage, and wait for the sums.

        Args:
            operands: Operands.
            block: Block of X.
            stage: Stage of the weights.
        """
        # Reads of the accumulators come before the MMAs write them.
        warpgroup.fence()
        for step in cutlass.range_constexpr(K_STEPS):
            cute.gemm(
                operands.next_mma if step else operands.first_mma,
                operands.stage_sums,
                operands.x[None, None, step, block],
                operands.weights[None, None, step, stage],
                operands.stage_sums,
            )
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def _release(self, rings: Rings, position: Position, source: Position, lane: Int32) -> None:  # type: ignore[override]
        """One warp: say that it has read a stage of both rings."""
        if lane == 0:
            ptx.mbarrier_arrive(rings.empty + Uint32(position.stage * 8))
            if cutlass.const_expr(self.plan.dequantized_stages):
                ptx.mbarrier_arrive(rings.free + Uint32(source.stage * 8))

    def _promote(self, sums: cute.Tensor, stage_sums: cute.Tensor, scales: list[Float32]) -> None:
        """Add the sums of a stage, times the scales of the lane's two tokens."""
        for n in range(cute.size(sums)):
            # Accumulators 0 and 1 of four are of the first token, 2 and 3 of the other.
            sums[n] = ptx.fma_float(stage_sums[n], scales[n % 4 // 2], sums[n])

    def _scale_addresses(self, args: Any, tile: Tile, first: Int32) -> ScaleAddresses:
        """Where the lane's scales are; its first token is ``first``."""
        offsets = []
        for h in range(2 * self.plan.token_rows):
            token = cutlass.min(first + (h // 2 * 128 + h % 2 * 8), tile.end - 1)
            offsets.append(Uint32(token) * Uint32(args.scale_stride))
        return ScaleAddresses(args.x_scales + Int64(tile.input), offsets, Int64(0))

    def _scales(self, addresses: ScaleAddresses, k: Int32) -> list[Float32]:
        """What sums of stage ``k`` are multiplied by, for each of the lane's tokens."""
        first = addresses.tokens + Int64(k)
        return [
            ptx.bits_to_float(ptx.load_global_byte(first + Int64(offset)) << Uint32(23))
            for offset in addresses.offsets
        ]
