"""``gemm_e4m3`` with warps that load weights a piece before they dequantize them.

Compiled and inspected, never run: no plan names it but by hand.

Why. Of ``gemm_e4m3`` the warps that dequantize issue a stage's 462 instructions in 681 cycles at
least, by what the assembler makes them wait; measured were some 1800 a stage (H200). Four times a
stage such a warp stores a piece, loads the next one from shared memory, where MMAs read most of the
time, and waits for it; then for the fence, and for the next stage.

Here a warp has the next piece (16 rows and 64 columns) in registers while it dequantizes one, that
of the next stage, too: it waits for the next stage, and loads from it, before the fence.

Barriers and numerics: those of ``gemm_e4m3``. A warp waits for stage n + 1 before it signals that
it has dequantized stage n; stage n + 1 needs the MMAs of earlier stages than n alone, as the ring
has two stages or more.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from dsv4.cute.device import exact_fp8, ptx
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_results import MMA_WARPS, Lane
from dsv4.cute.sm90.e4m3_tiles import Position, Rings
from dsv4.cute.sm90.gemm_e4m3 import ROW_TILES, E4m3Kernel
from dsv4.cute.sm90.gemm_e4m3_plan import K_BLOCK, ROWS, PrefetchE4m3Plan

Piece = list[Uint32]  # a lane's 4 words of codes and 2 of scales of 16 rows and 64 columns


class PrefetchE4m3Kernel(E4m3Kernel):
    """The kernel of one configuration."""

    plan: PrefetchE4m3Plan  # type: ignore[assignment]

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
        """``dequant_warps`` warps: dequantize the weights of every stage; see ``E4m3Kernel``."""
        warp, lane = me.warp - MMA_WARPS, me.lane
        row, quarter = lane // 4, lane % 4
        tiles = ROW_TILES // self.plan.dequant_warps
        codes_from = packed + Uint32(warp * self.plan.code_bytes + lane * 16)
        scales_from = packed + Uint32(
            self.plan.cta_row_tiles * self.plan.code_bytes + warp * self.plan.scale_bytes + row * 8
        )
        to += Uint32((warp * 16 + row) * K_BLOCK) + Uint32(((2 * quarter) ^ row) * 16)
        opaque_16 = Uint32(args.opaque_16)
        number, slot = walk.first, Int32(0)
        position, target = Position(Int32(0), Int32(0)), Position(Int32(0), Int32(1))
        piece = self._next_piece(codes_from, scales_from, rings, position, number < walk.total)
        while number < walk.total:
            tile = self._tile(number, walk, args)
            is_last = number + walk.stride >= walk.total
            for part in cutlass.range_constexpr(self.plan.row_parts):
                first_row = tile.row + part * ROWS
                of_thread = me.thread % ROWS
                factor = self._factor(args, tile.expert, first_row + of_thread)
                ptx.store_shared_float(factors + Uint32(slot * (ROWS * 4) + of_thread * 4), factor)
                slot = self._next_slot(slot)
                biases = [
                    self._row_biases(
                        args,
                        tile.expert,
                        first_row + (warp + h * self.plan.dequant_warps) * 16 + row,
                    )
                    for h in range(tiles)
                ]
                for k in cutlass.range(args.stages, unroll=1):
                    following = self._advanced(position, self.plan.stages)
                    ptx.mbarrier_wait(rings.free + Uint32(target.stage * 8), target.parity)
                    there = to + Uint32(target.stage * self.plan.dequantized_bytes)
                    for n in cutlass.range_constexpr(2 * tiles):
                        current = piece
                        if cutlass.const_expr(n + 1 < 2 * tiles):
                            piece = self._load(codes_from, scales_from, position.stage, n + 1)
                        else:
                            more = not (
                                is_last and k + 1 == args.stages and part + 1 == self.plan.row_parts
                            )
                            piece = self._next_piece(
                                codes_from, scales_from, rings, following, more
                            )
                        self._write(current, there, biases[n // 2], opaque_16, n)
                    # Written by ordinary stores, read by wgmma.
                    ptx.fence_proxy_async_shared()
                    cute.arch.sync_warp()
                    if lane == 0:
                        ptx.mbarrier_arrive(rings.ready + Uint32(target.stage * 8))
                        ptx.mbarrier_arrive(rings.empty + Uint32(position.stage * 8))
                    position = following
                    target = self._advanced(target, self.plan.dequantized_stages)
            number += walk.stride

    @cute.jit
    def _next_piece(
        self,
        codes_from: Uint32,
        scales_from: Uint32,
        rings: Rings,
        position: Position,
        exists: Boolean,
    ) -> Piece:
        """The lane's first piece of a stage that it has not waited for, where there is one."""
        if exists:
            ptx.mbarrier_wait(rings.full + Uint32(position.stage * 8), position.parity)
        return self._load(codes_from, scales_from, position.stage, 0)

    def _load(self, codes_from: Uint32, scales_from: Uint32, stage: Int32, n: int) -> Piece:
        """The lane's piece ``n`` of a stage: row tile ``n // 2`` of the warp's, column half."""
        skip, further = Uint32(stage * self.plan.weight_bytes), n // 2 * self.plan.dequant_warps
        codes = ptx.load_shared(codes_from + skip, 4, further * self.plan.code_bytes + n % 2 * 512)
        scales = ptx.load_shared(
            scales_from + skip, 2, further * self.plan.scale_bytes + n % 2 * 64
        )
        return [*codes, *scales]

    def _write(self, piece: Piece, to: Uint32, biases: Uint32, opaque_16: Uint32, n: int) -> None:
        """One warp: dequantize piece ``n`` of a stage."""
        lines: tuple[list[Uint32], list[Uint32]] = ([], [])
        for j in range(4):
            powers = exact_fp8.factors((piece[4], piece[5]), j, biases, opaque_16)
            words = exact_fp8.dequantized(piece[j], powers, opaque_16)
            for line_of_half, word in zip(lines, words, strict=True):
                line_of_half.append(word)
        # The second piece of 16 bytes is the first one's neighbour.
        at = to ^ Uint32(n % 2 * 16)
        for half, line_of_half in enumerate(lines):
            row = n // 2 * self.plan.dequant_warps * 16 + half * 8
            ptx.store_shared4(at, line_of_half, row * K_BLOCK)
