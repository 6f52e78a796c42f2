"""TMA copies of the ``tcgen05`` GEMMs, and the warp that issues them.

A CTA copies its own 128 rows of the weight. Of two CTAs that multiply together each copies its half
of the tokens' codes, and half of the tokens' scales into both CTAs (multicast, the only one),
because the MMA reads all tokens' scales in each CTA. All of these copies complete bytes of the
leader's ``full`` mbarrier.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint8, Uint16, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu.tcgen05 import CtaGroup
from cutlass.cute.runtime import make_fake_tensor

from dsv4.cute.device import ptx
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm100.gemm_pipeline import (
    Barriers,
    KRange,
    RingPosition,
    SharedMemory,
    Tcgen05Pipeline,
    Thread,
    TmaOperand,
)
from dsv4.cute.sm100.gemm_plan import ROWS, OperandTile, Tcgen05Args, Tcgen05Tma
from dsv4.cute.sm100.tensor_maps import SCALE_TILE_BYTES, STAGE_K

Coordinates = tuple[Int32, Int32]  # of the innermost but one and the innermost axis, or tiles

_ANY = 1 << 20  # a size: only the tensor map has the real one


def fake_codes() -> cute.Tensor:
    """Make codes ``[rows, K / 2]`` that stand for any, for the compiler."""
    return make_fake_tensor(Uint8, (_ANY, _ANY), stride=(_ANY, 1), assumed_align=16)


def fake_scales() -> cute.Tensor:
    """Make swizzled scales ``[rows / 128, K / 64, 256]``, 16-bit words, for the compiler."""
    words = SCALE_TILE_BYTES // 2
    return make_fake_tensor(
        Uint16, (_ANY, _ANY, words), stride=(_ANY * 2 * words, words, 1), assumed_align=16
    )


class Tcgen05Copies(Tcgen05Pipeline):
    """TMA copies of operands, and the loop of the copy warp."""

    @property
    def _tma_group(self) -> CtaGroup:
        """Return whether copies complete bytes of the mbarrier of the first of two CTAs."""
        return CtaGroup.TWO if self.plan.cta_group == 2 else CtaGroup.ONE

    def _code_operand(self, codes: cute.Tensor, rows: int) -> TmaOperand:
        """TMA copies of ``rows`` rows of a stage's codes."""
        box = (rows, STAGE_K // 2)
        layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_ordered_layout(box, order=(1, 0))
        )
        op = cpasync.CopyBulkTensorTileG2SOp(self._tma_group)
        return TmaOperand(*cpasync.make_tiled_tma_atom(op, codes, layout, box))

    def _scale_operand(
        self, scales: cute.Tensor, tiles: tuple[int, int], *, multicast: bool = False
    ) -> TmaOperand:
        """TMA copies of scales, ``tiles`` of 128 rows and of 64 columns; to both CTAs or one."""
        kind = cpasync.CopyBulkTensorTileG2SMulticastOp if multicast else None
        op = (kind or cpasync.CopyBulkTensorTileG2SOp)(self._tma_group)
        box = (*tiles, SCALE_TILE_BYTES // 2)
        layout = cute.make_ordered_layout(box, order=(2, 1, 0))
        return TmaOperand(*cpasync.make_tiled_tma_atom(op, scales, layout, box))

    @cute.jit
    def _copy(
        self,
        tma: Tcgen05Tma,
        memory: SharedMemory,
        barriers: Barriers,
        walk: Walk,
        k_range: KRange,
        args: Tcgen05Args,
        me: Thread,
    ) -> None:
        """Copy warp: keep the ring full, tile after tile; in the end wait until all is read.

        The weights of the first stages do not depend on the preceding kernel: they are copied
        before griddepcontrol.wait, and the loop then adds the tokens of these stages.
        """
        position, tile = RingPosition(Int32(0), Int32(1)), Int32(walk.first)
        early = cutlass.min(k_range.stages, self.plan.stages)
        row_block, token_tile = tile_position(tile, walk.order, cutlass.min)
        for k in cutlass.range(early, unroll=1):
            self._expect(barriers.full, k, me)
            source = self.plan.row_tile(row_block, me.rank, k_range.begin + k)
            self._copy_rows(tma, memory, k, source)
        cute.arch.griddepcontrol_wait()
        while tile < walk.total:
            row_block, token_tile = tile_position(tile, walk.order, cutlass.min)
            group = row_block // args.group_blocks
            for k in cutlass.range(k_range.stages, unroll=1):
                if tile != walk.first or k >= early:
                    ptx.mbarrier_wait(barriers.empty + Uint32(position.stage * 8), position.parity)
                    self._expect(barriers.full, position.stage, me)
                    source = self.plan.row_tile(row_block, me.rank, k_range.begin + k)
                    self._copy_rows(tma, memory, position.stage, source)
                token = token_tile * self.plan.token_block
                tokens = self.plan.token_tile(token, group, args.tokens, me.rank, k_range.begin + k)
                self._copy_tokens(tma, memory, position.stage, tokens, me.rank)
                position = self._next(position)
            tile += walk.stride
        self._drain(barriers.empty, position)

    @cute.jit
    def _drain(self, empty: Uint32, position: RingPosition) -> None:
        """Wait until every stage has been read, so that no commit arrives after the CTA's end."""
        for _ in cutlass.range(self.plan.stages, unroll=1):
            ptx.mbarrier_wait(empty + Uint32(position.stage * 8), position.parity)
            position = self._next(position)

    @cute.jit
    def _expect(self, full: Uint32, stage: Int32, me: Thread) -> None:
        """Leader: expect the bytes of a stage, those of both CTAs."""
        if me.lane == 0 and me.rank == 0:
            stage_bytes = self.plan.cta_group * self.plan.tma_bytes
            ptx.mbarrier_arrive_expect_tx(full + Uint32(stage * 8), stage_bytes)

    @cute.jit
    def _copy_rows(
        self, tma: Tcgen05Tma, memory: SharedMemory, stage: Int32, source: OperandTile
    ) -> None:
        """Copy a stage's codes and scales of the CTA's rows."""
        to, barrier = memory.stages + stage * self.plan.stage_bytes, memory.barriers + stage
        self._copy_codes(tma.row_codes, source.codes, to, ROWS, barrier)
        to += self.plan.row_code_bytes + self.plan.token_code_bytes
        self._copy_scales(tma.row_scales, source.scales, to, (1, 4), barrier)

    @cute.jit
    def _copy_tokens(
        self,
        tma: Tcgen05Tma,
        memory: SharedMemory,
        stage: Int32,
        source: OperandTile,
        rank: Int32,
    ) -> None:
        """Copy a stage's codes of the CTA's tokens, and scales of the tile's."""
        barrier = memory.barriers + stage
        to = memory.stages + stage * self.plan.stage_bytes + self.plan.row_code_bytes
        self._copy_codes(tma.token_codes, source.codes, to, self.plan.cta_tokens, barrier)
        own_half = self.plan.token_scale_offset(rank)
        to += self.plan.token_code_bytes + self.plan.row_scale_bytes + own_half
        self._copy_scales(tma.token_scales, source.scales, to, self.plan.token_scale_box, barrier)

    @cute.jit
    def _copy_codes(
        self,
        operand: TmaOperand,
        source: Coordinates,
        to: cute.Pointer,
        rows: cutlass.Constexpr,
        barrier: cute.Pointer,
    ) -> None:
        """Copy ``rows`` rows of a stage's codes."""
        box = (rows, STAGE_K // 2)
        target = cute.make_tensor(
            cute.recast_ptr(to, cute.make_swizzle(3, 4, 3), Uint8),
            cute.make_ordered_layout(box, order=(1, 0)),
        )
        tile = cute.local_tile(cute.domain_offset(source, operand.tensor), box, (0, 0))
        self._copy_box(operand.atom, tile, target, barrier)

    @cute.jit
    def _copy_scales(
        self,
        operand: TmaOperand,
        source: Coordinates,
        to: cute.Pointer,
        tiles: cutlass.Constexpr,
        barrier: cute.Pointer,
    ) -> None:
        """Copy scales, ``tiles`` of 128 rows and of 64 columns."""
        box = (*tiles, SCALE_TILE_BYTES // 2)
        target = cute.make_tensor(
            cute.recast_ptr(to, None, Uint16), cute.make_ordered_layout(box, order=(2, 1, 0))
        )
        offset = cute.domain_offset((*source, 0), operand.tensor)
        self._copy_box(operand.atom, cute.local_tile(offset, box, (0, 0, 0)), target, barrier)

    def _copy_box(
        self, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, barrier: cute.Pointer
    ) -> None:
        """Issue one TMA copy."""
        rank = cute.rank(target.layout)
        target, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(target, 0, rank),
            cute.group_modes(source, 0, rank),
        )
        # The mask is of multicast copies alone: CTAs 0 and 1.
        cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=Int16(3))
