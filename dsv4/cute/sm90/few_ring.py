"""The product of ``few`` with the weights that are ahead in shared memory, for long parts of K.

Loads into registers share a scoreboard of the warp, so that the first product of a round waits for
all of them. Here every lane copies its own 24 bytes of a tile, four times the scales that a tile
has, to a place of its own, and waits for exactly the tile it multiplies. No other lane reads them,
so there is no barrier; a place is asked for anew after the product that read it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.few import FewKernel
from dsv4.cute.sm90.few_plan import FewRingPlan

Value = Any
_CODE_BYTES, _SCALE_BYTES = 512, 64  # of a tile in memory
_LANE_CODES, _LANE_SCALES = 16, 8


class FewRingKernel(FewKernel, FewRingPlan):
    """The kernel of one configuration."""

    def _begin(self, at: Value, room: Value) -> Value:
        """Ask for the first tiles; where the lane's codes and scales lie in the ring."""
        lane = cute.arch.lane_idx()
        scales = room + Uint32(self.depth * 32 * _LANE_CODES)
        ring = room + Uint32(lane * _LANE_CODES), scales + Uint32(lane * _LANE_SCALES)
        for t in range(self.primed):
            self._ask(at, ring, t, t)
        return ring

    def _go_on(self, at: Value, ahead: Value) -> None:
        """Ask for the other tiles that the ring has room for, after X."""
        for t in range(self.primed, self.depth):
            self._ask(at, ahead, t, t)

    def _ask(self, at: Value, ring: Value, tile: int, place: int) -> None:
        """Copy the lane's part of a tile to its place."""
        codes, scales = at
        to_codes, to_scales = place * 32 * _LANE_CODES, place * 32 * _LANE_SCALES
        ptx.async_copy16(ring[0], codes, to_codes, tile * _CODE_BYTES)
        ptx.async_copy8(ring[1], scales, to_scales, tile * _SCALE_BYTES)
        ptx.commit_async_copies()

    def _arrived(self, ring: Value, place: int, later: int) -> list[Value]:
        """The lane's 4 words of codes and 2 of scales; ``later``: tiles asked for since."""
        ptx.wait_async_copies(later)
        return [
            *ptx.load_shared(ring[0], 4, place * 32 * _LANE_CODES),
            *ptx.load_shared(ring[1], 2, place * 32 * _LANE_SCALES),
        ]

    @cute.jit
    def _multiply(self, at: Value, ahead: Value, x: Value, sixteen: Value) -> Value:
        """The warp's sums, 16 rows by 8 tokens per tile of tokens."""
        codes, scales = at
        rows, x_full = x
        sums = [[Float32(0.0)] * 4 for _ in range(self.chains)]
        right = self._load_x(rows, 0)
        steps, rest = divmod(self.tiles - self.depth, self.depth)
        for step in cutlass.range(steps, unroll=1):
            codes += self.depth * _CODE_BYTES
            scales += self.depth * _SCALE_BYTES
            for t in cutlass.range_constexpr(self.depth):
                words = self._arrived(ahead, t, self.depth - 1)
                if cutlass.const_expr(t == self.depth - 1):  # noqa: SIM102 - one is constant
                    if step == 0:
                        ptx.mbarrier_wait(x_full + 8, cutlass.Int32(0))
                following = self._load_x(rows, t + 1)
                sums = self._product(sums, words, right, sixteen)
                self._ask((codes, scales), ahead, t, t)
                right = following
            rows += self.depth * 128
        for t in cutlass.range_constexpr(rest + self.depth):
            words = self._arrived(ahead, t % self.depth, min(self.depth, rest + self.depth - t) - 1)
            if cutlass.const_expr(steps == 0 and rest > 0 and t == self.depth - 1):
                ptx.mbarrier_wait(x_full + 8, cutlass.Int32(0))
            following = self._load_x(rows, min(t + 1, rest + self.depth - 1))
            sums = self._product(sums, words, right, sixteen)
            if cutlass.const_expr(t < rest):
                self._ask((codes, scales), ahead, self.depth + t, t)
            right = following
        return self._joined(sums)
