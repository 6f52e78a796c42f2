"""Scales and results of the grouped GEMM for many rows: what its epilogue adds to the dense one.

The global scales of a warp's rows and the weights of a tile's tokens are loaded before the MMAs,
one of 32 by each lane, and shuffled after them, so that no result waits for a load. Results are
stored as bfloat16 or float32, or quantized to NVFP4 (``device.quantize``).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import Vector
from dsv4.cute.device.expert_scheduler import GroupedTile
from dsv4.cute.device.quantize import BlockScales, QuantizedOutput, store_quantized
from dsv4.cute.sm90.gemm_wgmma import WgmmaKernel
from dsv4.cute.sm90.grouped_gemm_wgmma_plan import GroupedWgmmaArgs, GroupedWgmmaPlan
from dsv4.cute.sm90.wgmma_epilogue import Fragment, Fragments


class GroupedOutput(NamedTuple):
    """Addresses of the results of a tile, like ``Output``; counted from its first row of X.

    Attributes:
        buffer: Transpose buffers of all warpgroups, in shared memory.
        token_scale: Scales of the rows of X.
        out: The result; where ``quantized_out``, its codes.
        x: Rows of X, to look for infinities in.
        row_weights: Weights of the lane's two tokens in each 8 tokens.
        block_scales: Where block scales go, where ``quantized_out``.
        result_scale: Address of the global scale of the expert's results, where ``quantized_out``.
    """

    buffer: Uint32
    token_scale: Int64
    out: Int64
    x: Int64
    row_weights: list[list[Float32]]
    block_scales: BlockScales
    result_scale: Int64


class TileScales(NamedTuple):
    """Scales that a warp loads before the MMAs of a tile; each lane holds every 32nd.

    Attributes:
        rows: Global scales of the warp's rows of the weight.
        tokens: Weights of the tile's tokens, where ``row_weighted``.
    """

    rows: list[Float32]
    tokens: list[Float32]


class GroupedWgmmaResults(WgmmaKernel):
    """Device functions that load scales before the MMAs, and store results."""

    plan: GroupedWgmmaPlan

    def _load_scales(
        self, args: GroupedWgmmaArgs, tile: GroupedTile, warp: Int32, lane: Int32
    ) -> TileScales:
        """Load a tile's global scales and token weights before the MMAs: no result waits for them.

        A lane loads every 32nd of them; ``_row_factors`` and ``_token_weights`` shuffle them.
        """
        of_expert = args.global_scale + Int64(tile.expert) * args.expert_scales * 4
        rows = []
        for first in range(0, 16 * self.plan.warp_tiles, 32):
            row = (first + lane) % (16 * self.plan.warp_tiles)
            row_tile = tile.row_block * self.plan.cta_row_tiles + warp
            row_tile += row // 16 * self.plan.mma_warps
            at = cutlass.min(row_tile, args.row_tiles - 1) * 16 + row % 16
            # The segment of the row, or the row itself.
            index = Int32(at >= args.cut0) + Int32(at >= args.cut1) + Int32(at >= args.cut2)
            index += args.scale_rows * (at - index)
            rows.append(ptx.load_global_float(of_expert + Int64(index) * 4))
        tokens = []
        for first in range(0, self.plan.token_block if self.plan.row_weighted else 0, 32):
            token = tile.first_row + cutlass.min(first + lane, tile.rows - 1)
            tokens.append(ptx.load_global_float(args.row_weight + Int64(token) * 4))
        return TileScales(rows, tokens)

    def _row_factors(self, scales: TileScales, lane: Int32) -> list[Fragment]:
        """Global scale times 2^7 of the lane's two rows of each row tile."""
        factors = []
        for h in range(self.plan.warp_tiles):
            rows = [h % 2 * 16 + half * 8 + lane // 4 for half in range(2)]
            two = [cute.arch.shuffle_sync(scales.rows[h // 2], row) for row in rows]
            factors.append([scale * Float32(128.0) for scale in two])
        return factors

    def _token_weights(self, scales: TileScales, lane: Int32) -> list[list[Float32]]:
        """Weights of the lane's two tokens in each 8 tokens; none if the plan has none."""
        count = self.plan.token_block // 8 if self.plan.row_weighted else 0
        lanes = [[n % 4 * 8 + lane % 4 * 2 + i for i in range(2)] for n in range(count)]
        return [
            [cute.arch.shuffle_sync(scales.tokens[n // 4], source) for source in two]
            for n, two in enumerate(lanes)
        ]

    def _output(
        self,
        args: GroupedWgmmaArgs,
        tile: GroupedTile,
        scales: TileScales,
        swizzled_row: Int32,
        buffer: Uint32,
        lane: Int32,
    ) -> GroupedOutput:
        """Return where the results of a tile go."""
        row = Int64(tile.first_row)
        if self.plan.swizzled_out:
            block_scales = BlockScales(args.out_block_scales, swizzled_row)
        else:
            block_scales = BlockScales(args.out_block_scales + row * (args.row_tiles // 2))
        return GroupedOutput(
            buffer=buffer,
            token_scale=args.token_scale + row * 4,
            out=args.out + row * args.row_tiles * self.tile_bytes,
            x=args.x + row * args.token_stride * 2,
            row_weights=self._token_weights(scales, lane),
            block_scales=block_scales,
            result_scale=args.result_scale + Int64(tile.expert) * 4,
        )

    @property
    def tile_bytes(self) -> int:
        """Bytes of a token's results, or their codes, in a row tile."""
        if self.plan.quantized_out:
            return self.tile_outputs // 2
        return self.tile_outputs * (4 if self.plan.float32_out else 2)

    def _weighted(self, values: Fragments, output: GroupedOutput, first: int) -> Fragments:
        """Outputs of SwiGLU times their tokens' weights, from fragment ``first`` on."""
        if not self.plan.row_weighted:
            return values
        pairs = zip(values, output.row_weights[first : first + len(values)], strict=True)
        return [[value * weight for value, weight in zip(*two, strict=True)] for two in pairs]

    @cute.jit
    def _store_vector(
        self, at: Uint32, output: GroupedOutput, vector: Vector, exists: Boolean
    ) -> None:
        """All lanes together: store eight results of a token, or their codes, where ``exists``."""
        if cutlass.const_expr(self.plan.quantized_out):
            # A lane without results quantizes, and drops, those of another lane: its neighbour in
            # the block may exist.
            words, scale = self._load_vector(at), ptx.load_global_float(output.result_scale)
            quantized = QuantizedOutput(output.out, output.block_scales, scale)
            store_quantized(words, quantized, vector, exists)
        elif exists:
            words = self._load_vector(at)
            offset = (Int64(vector.token) * vector.rows + vector.row) * 2
            ptx.store_global4(output.out + offset, words)
