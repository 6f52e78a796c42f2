"""The small-M GEMM with prefetched weights in shared memory, for long parts of K.

As ``gemm_small_m``, but for the pipeline. Loads to registers share a scoreboard of the warp, so the
first MMA of a round waits for all of them. Here every lane copies its own 24 bytes of a weight tile
(``cp.async``, 16 bytes of codes and 8 of scales) to a ring of ``plan.stages`` slots, and waits for
exactly the tile that it multiplies next (``cp.async.wait_group``). A lane reads only what it copied
itself, so there is no barrier; a slot is filled again after the MMAs that read it. Scales are
copied by each of the four lanes that share them, four times the bytes of a tile's scales.

A thread needs 64 registers, so two CTAs fit an SM. That is faster where the matrix makes CTAs for
nearly all places: Flash's o_a 7.12 to 6.60 us at one token, 4096 x 2048 3.76 to 3.62 (H200).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.gemm_small_m import SmallMKernel
from dsv4.cute.sm90.gemm_small_m_input import XRows
from dsv4.cute.sm90.gemm_small_m_plan import SmallMRingPlan
from dsv4.cute.sm90.small_m_tile import (
    CODE_BYTES,
    SCALE_BYTES,
    Fragment,
    WeightAddress,
    Words,
)

_LANE_CODES, _LANE_SCALES = 16, 8  # bytes of a lane


class Ring(NamedTuple):
    """Shared-memory addresses of the lane's bytes of a ring's first slot.

    Attributes:
        codes: Address of 16 bytes; the next slot is 32 lanes' codes further.
        scales: Address of 8 bytes; likewise.
    """

    codes: Uint32
    scales: Uint32


class SmallMRingKernel(SmallMKernel):
    """The kernel with prefetched weights in a ring of every lane."""

    plan: SmallMRingPlan

    def _prefetch(self, weight: WeightAddress, buffer: Uint32) -> Ring:  # type: ignore[override]
        """Start the copies of ``early_stages`` tiles, before griddepcontrol.wait."""
        lane = cute.arch.lane_idx()
        scales = buffer + Uint32(self.plan.stages * 32 * _LANE_CODES)
        ring = Ring(buffer + Uint32(lane * _LANE_CODES), scales + Uint32(lane * _LANE_SCALES))
        for t in range(self.plan.early_stages):
            self._copy(weight, ring, t, t)
        return ring

    def _prefetch_more(self, weight: WeightAddress, prefetched: Ring) -> None:  # type: ignore[override]
        """Start the copies of the ring's other slots, after those of X."""
        for t in range(self.plan.early_stages, self.plan.stages):
            self._copy(weight, prefetched, t, t)

    def _copy(self, weight: WeightAddress, ring: Ring, tile: int, slot: int) -> None:
        """Copy the lane's bytes of a tile to a slot, as a group of its own."""
        to_codes, to_scales = slot * 32 * _LANE_CODES, slot * 32 * _LANE_SCALES
        ptx.async_copy16(ring.codes, weight.codes, to_codes, tile * CODE_BYTES)
        ptx.async_copy8(ring.scales, weight.scales, to_scales, tile * SCALE_BYTES)
        ptx.commit_async_copies()

    def _wait_slot(self, ring: Ring, slot: int, later: int) -> Words:
        """Wait for a slot and read it.

        Args:
            ring: The lane's.
            slot: Which.
            later: Tiles whose copies were started after this one's.

        Returns:
            Four words of codes, two of scales.
        """
        ptx.wait_async_copies(later)
        return [
            *ptx.load_shared(ring.codes, 4, slot * 32 * _LANE_CODES),
            *ptx.load_shared(ring.scales, 2, slot * 32 * _LANE_SCALES),
        ]

    @cute.jit
    def _multiply(  # type: ignore[override]
        self, weight: WeightAddress, prefetched: Ring, x: XRows, opaque_16: Uint32
    ) -> list[Fragment]:
        """Accumulators of the CTA's part of K of a row tile, for each tile of tokens."""
        rows, stages = x.rows, self.plan.stages
        sums = self._zero_accumulators()
        right = self._load_x(rows, 0)
        steps, rest = divmod(self.plan.tiles - stages, stages)
        for step in cutlass.range(steps, unroll=1):
            weight = weight.advanced(stages)
            for t in cutlass.range_constexpr(stages):
                words = self._wait_slot(prefetched, t, stages - 1)
                if cutlass.const_expr(t == stages - 1):  # noqa: SIM102 - one is constant
                    if step == 0:
                        ptx.mbarrier_wait(x.full + 8, Int32(0))
                following = self._load_x(rows, t + 1)
                sums = self._multiply_tile(sums, words, right, opaque_16)
                self._copy(weight, prefetched, t, t)
                right = following
            rows += stages * 128
        # The last ``stages`` tiles and what no whole turn of the ring has; ``rest`` copies remain.
        for t in cutlass.range_constexpr(rest + stages):
            words = self._wait_slot(prefetched, t % stages, min(stages, rest + stages - t) - 1)
            if cutlass.const_expr(steps == 0 and rest > 0 and t == stages - 1):
                ptx.mbarrier_wait(x.full + 8, Int32(0))
            following = self._load_x(rows, min(t + 1, rest + stages - 1))
            sums = self._multiply_tile(sums, words, right, opaque_16)
            if cutlass.const_expr(t < rest):
                self._copy(weight, prefetched, stages + t, t)
            right = following
        return self._joined(sums)
