"""``gemm_e4m3`` with seven warps that dequantize, which take turns at the pieces of a stage.

Compiled and inspected, never run: no plan names it but by hand.

Why. With four such warps, of which each has two row tiles of a stage, 301 us of 4096 x 8192 and
4096 tokens became 227 when nothing was dequantized (H200): a warp alone on a quarter of an SM
waits for its own results most of the time. Registers allow no third warpgroup beside two of MMA
warps with 192 accumulators each, but the warpgroup of the copy warp has three warps without work.

Ownership. A piece is 16 rows and 64 columns: a stage has 16. Warp w takes the pieces p with
``(p + 2 n) % 7 == w`` of the n-th stage: two or three, in turn, which the ring evens out. Biases of
rows are in shared memory, because a warp meets every row tile.

Barriers: those of ``gemm_e4m3``, and named barrier 3 (``_BIASES``): the biases of a tile's rows are
written, once a tile. Numerics: bit for bit those of ``gemm_e4m3``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsv4.cute.device import exact_fp8, ptx
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_results import MMA_WARPS, Lane
from dsv4.cute.sm90.e4m3_tiles import Position, Rings
from dsv4.cute.sm90.gemm_e4m3 import E4m3Kernel
from dsv4.cute.sm90.gemm_e4m3_plan import K_BLOCK, ROWS, SpreadE4m3Plan

_BIASES = 3  # named barrier
_PIECES = 16  # of a stage
_TURN = 2  # pieces by which a warp's first one moves from stage to stage


class SpreadE4m3Kernel(E4m3Kernel):
    """The kernel of one configuration."""

    plan: SpreadE4m3Plan  # type: ignore[assignment]

    @cute.jit
    def _dequantize(
        self,
        packed: Uint32,
        to: Uint32,
        factors: Uint32,
        rings: Rings,
        walk: Walk,
        args: Any,
        me: Lane,
    ) -> None:
        """Seven warps: dequantize the weights of every stage; see ``E4m3Kernel``."""
        warps = self.plan.dequant_warps
        warp, lane, thread = me.warp - MMA_WARPS, me.lane, me.thread - 32 * MMA_WARPS
        row = lane // 4
        biases_at = factors + Uint32(self.plan.factor_slots * (ROWS * 4))
        opaque_16 = Uint32(args.opaque_16)
        number, slot, first = walk.first, Int32(0), Int32(warp)
        position, target = Position(Int32(0), Int32(0)), Position(Int32(0), Int32(1))
        while number < walk.total:
            tile = self._tile(number, walk, args)
            of_tile = biases_at + Uint32(slot * (ROWS * 2))
            self._write_scales(args, tile.row, factors + Uint32(slot * (ROWS * 4)), of_tile, thread)
            slot = self._next_slot(slot)
            cute.arch.barrier(barrier_id=_BIASES, number_of_threads=32 * warps)
            for _ in cutlass.range(args.stages, unroll=1):
                ptx.mbarrier_wait(rings.full + Uint32(position.stage * 8), position.parity)
                ptx.mbarrier_wait(rings.free + Uint32(target.stage * 8), target.parity)
                stage = packed + Uint32(position.stage * self.plan.weight_bytes)
                there = to + Uint32(target.stage * self.plan.dequantized_bytes)
                for n in cutlass.range_constexpr(-(-_PIECES // warps)):
                    piece = first + n * warps
                    if piece < _PIECES:
                        bias = ptx.load_shared_word(of_tile + Uint32(piece // 2 * 32 + row * 4), 0)
                        self._dequantize_piece(stage, there, piece, bias, opaque_16, lane)
                # Written by ordinary stores, read by wgmma.
                ptx.fence_proxy_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.mbarrier_arrive(rings.ready + Uint32(target.stage * 8))
                    ptx.mbarrier_arrive(rings.empty + Uint32(position.stage * 8))
                first -= _TURN
                if first < 0:
                    first += warps
                position = self._advanced(position, self.plan.stages)
                target = self._advanced(target, self.plan.dequantized_stages)
            number += walk.stride

    @cute.jit
    def _write_scales(
        self, args: Any, first_row: Int32, factors: Uint32, biases: Uint32, thread: Int32
    ) -> None:
        """All warps that dequantize: write factors and biases of a tile's rows."""
        if thread < ROWS:
            factor = self._factor(args, Int32(0), first_row + thread)
            ptx.store_shared_float(factors + Uint32(thread * 4), factor)
            if thread % 16 < 8:
                # Of 16 rows, word ``row`` has the biases of rows ``row`` and ``row + 8``.
                bias = self._row_biases(args, Int32(0), first_row + thread)
                at = biases + Uint32(thread // 16 * 32 + thread % 16 * 4)
                ptx.store_shared_int(at, Int32(bias))

    def _dequantize_piece(
        self,
        stage: Uint32,
        to: Uint32,
        piece: Int32,
        bias: Uint32,
        opaque_16: Uint32,
        lane: Int32,
    ) -> None:
        """One warp: dequantize 16 rows and 64 columns.

        Args:
            stage: Codes of the stage; its scales follow them.
            to: Dequantized weights of the stage.
            piece: Which: row tile ``piece // 2``, columns ``64 (piece % 2)`` on.
            bias: ``exact_fp8.row_biases`` of the lane's rows.
            opaque_16: 16.
            lane: Lane of the warp.
        """
        row, line = lane // 4, piece // 2 * 16 + lane // 4
        codes = ptx.load_shared(stage + Uint32(piece * 512 + lane * 16), 4)
        scales_from = stage + Uint32(self.plan.cta_row_tiles * self.plan.code_bytes)
        scales = ptx.load_shared(scales_from + Uint32(piece * 64 + row * 8), 2)
        lines: tuple[list[Uint32], list[Uint32]] = ([], [])
        for j in range(4):
            powers = exact_fp8.factors((scales[0], scales[1]), j, bias, opaque_16)
            words = exact_fp8.dequantized(codes[j], powers, opaque_16)
            for line_of_half, word in zip(lines, words, strict=True):
                line_of_half.append(word)
        # Pieces of 16 bytes of a line are exchanged by the row's number.
        at = to + Uint32(line * K_BLOCK) + Uint32(((lane % 4 * 2 + piece % 2) ^ row) * 16)
        for half, line_of_half in enumerate(lines):
            ptx.store_shared4(at, line_of_half, half * 8 * K_BLOCK)
