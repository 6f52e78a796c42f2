"""GEMM with FP8 arithmetic and FP8 weights, one scale per 128 x 128 block, for large M.

It has the warps, rings and tiles of ``gemm_e4m3_converted``, with these differences.

Weights are E4M3 codes as they are stored; columns keep their order.

Scales. A tile's 128 rows lie in one row of blocks. The sums of a stage are multiplied by the
token's scale times the block's, which a lane loads from global memory a stage earlier. Rows have no
factors.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.e4m3_results import Lane, ResultBuffers, Tile, Values
from dsv4.cute.sm90.e4m3_tiles import ScaleAddresses
from dsv4.cute.sm90.gemm_e4m3_converted import ConvertedE4m3Kernel
from dsv4.cute.sm90.gemm_e4m3_plan import BLOCK_E4M3_ABI, ROWS, BlockE4m3Args, BlockE4m3Plan


class BlockE4m3Kernel(ConvertedE4m3Kernel):
    """The kernel of one configuration."""

    abi = BLOCK_E4M3_ABI
    plan: BlockE4m3Plan  # type: ignore[assignment]

    def _load_factor(self, args: Any, tile: Tile, me: Lane) -> None:
        """Return None, because rows have no factors."""

    def _factors(self, buffers: ResultBuffers, slot: Int32, factor: Any, me: Lane) -> Uint32:
        """Do nothing, because rows have no factors."""
        return Uint32(0)

    def _scale_addresses(self, args: BlockE4m3Args, tile: Tile, first: Int32) -> ScaleAddresses:
        """Where the lane's scales are; its first token is ``first``."""
        width = 1 if self.plan.e8m0_scales else 4
        addresses = super()._scale_addresses(args, tile, first)
        row = Int64(tile.row // ROWS)
        return addresses._replace(weight=args.scales + row * args.stages * width)

    def _scales(self, addresses: ScaleAddresses, k: Int32) -> list[Float32]:
        """What sums of stage ``k`` are multiplied by, for each of the lane's tokens."""
        if self.plan.e8m0_scales:
            of_weight = ptx.e8m0_to_float(ptx.load_global_byte(addresses.weight + Int64(k)))
        else:
            of_weight = ptx.load_global_float(addresses.weight + Int64(k) * 4)
        return [scale * of_weight for scale in super()._scales(addresses, k)]

    def _values(
        self, sums: cute.Tensor, first: int, count: int, factors: Uint32, args: Any, lane: Int32
    ) -> Values:
        """Sums of ``count`` tiles of 8 rows from ``first`` on, which hold all scales."""
        return [[Float32(sums[n * 4 + j]) for j in range(4)] for n in range(first, first + count)]
