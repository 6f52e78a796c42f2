"""GEMM with FP8 weights and E8M0 scales for large M: the operands hold the scales.

An E8M0 scale is a power of two, so a bfloat16 operand times its scale is exact and one set of sums
is enough: the tensor cores go on from stage to stage, without a wait for a stage's sums.

Numerics. What is summed is the result times a power of two, ``2^shift``. That is 1 unless a scale
is so far from 1 that an operand would not be a normal bfloat16. Then the shift changes, and the
sums are multiplied by the quotient of both powers (exact, unless they are subnormal); after the
tile the sums are those of shift 0. A scale of NaN (byte 255) makes the operands NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute.nvgpu import warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.sm90.gemm_fp8_wgmma import PIECES, Fp8Loop, Fp8Operands, Fp8WgmmaKernel, Pairs
from dsv4.cute.sm90.wgmma_copies import Pipeline

# Bytes of E8M0 scales with which every code is a normal bfloat16.
_LOWEST, _HIGHEST = 10, 246


class FoldedScale(NamedTuple):
    """A stage's scale.

    Attributes:
        factor: What operands are multiplied by, twice in a word of two bfloat16.
        shift: Power of two of their sums.
    """

    factor: Uint32
    shift: Int32


class FoldedFp8WgmmaKernel(Fp8WgmmaKernel):
    """The kernel of one configuration, with E8M0 scales."""

    def _first_scale(self, address: Int64) -> FoldedScale:
        """Load the scale of a cluster's first stage, when nothing is summed yet."""
        return self._folded_scale(self._load_scale(address), Int32(0))

    def _load_scale(self, address: Int64) -> Uint32:
        """Load a block's byte."""
        return ptx.load_global_byte(address)

    def _folded_scale(self, byte: Uint32, shift: Int32) -> FoldedScale:
        """The scale with the shift nearest to ``shift`` that keeps operands normal."""
        # byte - shift within _LOWEST to _HIGHEST.
        good = cutlass.max(Int32(byte) - _HIGHEST, cutlass.min(Int32(byte) - _LOWEST, shift))
        # NaN keeps its byte.
        shift = Int32(ptx.select_word(byte == 255, Uint32(shift), Uint32(good)))
        moved = ptx.select_word(byte == 255, byte, Uint32(Int32(byte) - shift))
        return FoldedScale(ptx.e8m0_to_bfloat16x2(moved), shift)

    def _convert(self, words: cute.Tensor, pairs: Pairs, scale: FoldedScale) -> None:
        """Write left operands of a piece, times the scale."""
        for i, pair in enumerate(pairs):
            words[i] = ptx.mul_bfloat16x2(ptx.e4m3x2_to_bfloat16x2(pair), scale.factor)

    @cute.jit
    def _multiply_ring(
        self,
        operands: Fp8Operands,
        weights: Uint32,
        pairs: Pairs,
        scale: FoldedScale,
        pipeline: Pipeline,
        stage: Int32,
        parity: Int32,
        loop: Fp8Loop,
        leads: Boolean,
    ) -> tuple[Pairs, FoldedScale, Int32, Int32]:
        """All MMA warps: add a tile's products to its sums.

        Arguments and result are those of ``Fp8WgmmaKernel``. The last MMAs of a stage are in flight
        while the next stage's start, so a stage is released a piece later.
        """
        sums, words = operands.sums, operands.words
        before, shift = stage, scale.shift
        for step in cutlass.range(loop.stages, unroll=1):
            following, later = self._next_stage(stage, parity)
            more = not (loop.is_last and step + 1 == loop.stages)
            byte = self._load_scale(self._next_scale_address(loop, step + 1))
            for piece in cutlass.range_constexpr(PIECES):
                self._multiply(operands, piece, stage)
                current = pairs
                pairs = self._prefetch_pairs(
                    weights, piece, stage, following, later, pipeline.full, more
                )
                # The piece that is converted now is the next stage's first.
                if cutlass.const_expr(piece + 1 == PIECES):
                    if step + 1 == loop.stages:
                        scale = self._folded_scale(byte, Int32(0))
                    else:
                        scale = self._folded_scale(byte, shift)
                        shift = self._shifted(sums, shift, scale.shift)
                warpgroup.wait_group(1)
                if cutlass.const_expr(piece == 0):  # noqa: SIM102 - one is known to the compiler
                    if step > 0:
                        self._release(pipeline.empty, before, loop.lane)
                self._convert(words[(piece + 1) % 2], current, scale)
            self._let_follow(leads, step)
            before = stage
            stage = following
            parity = later
        warpgroup.wait_group(0)
        self._release(pipeline.empty, before, loop.lane)
        self._shifted(sums, shift, Int32(0))
        return pairs, scale, stage, parity

    @cute.jit
    def _shifted(self, sums: cute.Tensor, old: Int32, new: Int32) -> Int32:
        """Make the sums those of another power of two, which is returned."""
        # Seldom, and the same in all lanes of a warp: they share a block's scale.
        if old != new:
            warpgroup.wait_group(0)
            factor = ptx.bits_to_float(Uint32((old - new + 127) << 23))
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] = sums[i] * factor
        return new
