"""Work of a warp on one row tile in the small-M GEMMs, dense and grouped.

A row tile is 16 rows of the weight; a weight tile is 16 rows x 64 columns of it.

* MMA: ``m16n8k16`` with the weight as left operand (M = 16 rows) and X as right one (N = 8 tokens),
  so few tokens fill the instruction. A weight tile is four steps of K.
* Weight fragments: every lane owns 16 bytes of codes (four words, one for each K step) and 8 bytes
  of block scales of a weight tile, stored in that order (``dsv4.quant.fragments``): no exchange, no
  shared memory.
* Accumulator fragments, float32: of each tile of 8 tokens a lane holds row ``lane // 4`` and row
  ``lane // 4 + 8`` of tokens ``2 (lane % 4)`` and ``2 (lane % 4) + 1``.
* X fragments: ``ldmatrix`` from rows of X in shared memory, 8 words for 8 tokens and 64 columns.

Numerics: codes and block scales become bfloat16 exactly (times 2^-7); products are exact in float32
and summed in the order of K by the tensor core. The epilogue multiplies by the global scale times
2^7, and the token's scale.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.dequant import dequantized_fragment, scales_to_bfloat16
from dsv4.cute.device.epilogue import swiglu_output_row, swiglu_outputs
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan

CODE_BYTES, SCALE_BYTES = 512, 64  # of a weight tile
PARTIAL_BYTES = 512  # a warp's accumulators of 16 rows and 8 tokens

Words = list[Uint32]
Fragment = list[Float32]  # four accumulators


class Lane(NamedTuple):
    """A thread's place in its CTA.

    Attributes:
        warp: Warp of the CTA.
        lane: Lane of the warp.
    """

    warp: Int32
    lane: Int32


class WeightAddress(NamedTuple):
    """Global addresses of a lane's bytes of a weight tile.

    Attributes:
        codes: Address of 16 bytes.
        scales: Address of 8 bytes.
    """

    codes: Int64
    scales: Int64

    def advanced(self, tiles: int) -> WeightAddress:
        """The addresses ``tiles`` weight tiles later."""
        return WeightAddress(self.codes + tiles * CODE_BYTES, self.scales + tiles * SCALE_BYTES)


class GlobalScales(NamedTuple):
    """The weight's global scales: one, one per segment of rows, or one per row.

    Attributes:
        address: Address of the first.
        cut0: First row of the second segment.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        per_row: 1 for one per row, else 0.
    """

    address: Int64
    cut0: Int32
    cut1: Int32
    cut2: Int32
    per_row: Int32


class Output(NamedTuple):
    """Addresses of the results of a row tile, and the scales of the results.

    Attributes:
        buffer: The warp's shared-memory buffer for the transpose.
        out: Results of the first token.
        x: Inputs of the first token.
        token_scale: The first token's scale; read where the plan is ``row_scaled``.
        row_weight: The first token's weight; read by the grouped kernel alone.
        tokens: How many there are.
        row_tiles: Row tiles of a token's results.
        token_stride: Elements of X from one token to the next.
        groups: Scales from one token to the next.
        limit: Clamp of SwiGLU.
    """

    buffer: Uint32
    out: Int64
    x: Int64
    token_scale: Int64
    row_weight: Int64
    tokens: Int32
    row_tiles: Int32
    token_stride: Int64
    groups: Int32
    limit: Float32


class SmallMTile(PlannedKernel):
    """Device functions of a row tile; a kernel adds who has which tile, and the pipeline."""

    plan: SmallMPlan

    def _fetch(self, weight: WeightAddress, tile: int, predicate: Int32 | None = None) -> Words:
        """Load the lane's words of the ``tile``-th weight tile from an address on.

        ``.nc`` loads, so that they may be issued before ``griddepcontrol.wait``: no kernel writes
        weights. Two loads for 24 bytes, because the kernel is bound by issuing instructions almost
        as much as by memory.

        Returns:
            Four words of codes, two of scales; undefined where ``predicate`` is 0.
        """
        return [
            *ptx.load_global_nc(weight.codes, 4, predicate, tile * CODE_BYTES),
            *ptx.load_global_nc(weight.scales, 2, predicate, tile * SCALE_BYTES),
        ]

    def _zero_accumulators(self) -> list[Fragment]:
        return [[Float32(0.0)] * 4 for _ in range(self.plan.accumulators)]

    def _multiply_tile(
        self, sums: list[Fragment], weight: Words, x: Words, opaque_16: Uint32
    ) -> list[Fragment]:
        """Add the products of a weight tile: four K steps, each dequantized, then multiplied.

        Args:
            sums: ``plan.accumulators`` fragments. With one tile of tokens, even and odd K steps
                have fragments of their own.
            weight: Words of ``_fetch``.
            x: Words of ``_load_x``.
            opaque_16: See ``SmallMArgs``.
        """
        sums = [list(s) for s in sums]
        for step in range(4):
            # Dequantized right before its MMA: a fragment of four registers is live at a time.
            scales = scales_to_bfloat16((weight[4], weight[5]), step, opaque_16)
            left = dequantized_fragment(weight[step], scales)
            for n in range(self.plan.token_tiles):
                chain = (n + step) % len(sums) if self.plan.token_tiles == 1 else n
                right = x[8 * n + 2 * step : 8 * n + 2 * step + 2]
                sums[chain] = ptx.mma_m16n8k16_bf16(sums[chain], left, right)
        return sums

    def _joined(self, sums: list[Fragment]) -> list[Fragment]:
        """Return one fragment for each tile of tokens: even and odd K steps added."""
        if self.plan.token_tiles > 1:
            return sums
        return [[sums[0][i] + sums[1][i] for i in range(4)]]

    def _reread_lane(self, zero: Uint32) -> Lane:
        """Warp and lane, opaque to the compiler.

        The compiler computes what depends on them early and keeps it, spilled, over the main loop.
        Adding a word of shared memory that is 0, which it cannot know, defers that to here.

        Args:
            zero: Shared-memory address of a word that is 0.
        """
        thread, _, _ = cute.arch.thread_idx()
        # Plain arithmetic after an opaque load; 32 warps at most.
        thread = thread + ptx.load_shared_int(zero)
        return Lane(cute.arch.make_warp_uniform((thread >> 5) & 31), thread & 31)

    @cute.jit
    def _row_factors(self, scales: GlobalScales, row: Int32) -> Fragment:
        """Global scale times 2^7 of a lane's two rows, ``row`` and ``row + 8``.

        2^7 makes up for the 2^-7 of dequantized weights.
        """
        factors = []
        for h in cutlass.range_constexpr(2):
            at = row + h * 8
            # The number of the row's segment: how many segments start at or before the row, less 1.
            index = Int32(at >= scales.cut0) + Int32(at >= scales.cut1) + Int32(at >= scales.cut2)
            if scales.per_row == 1:
                index = at
            address = scales.address + Int64(index) * 4
            factors.append(ptx.load_global_float(address) * Float32(128.0))
        return factors

    def _weighted(self, values: Fragment, output: Output, token: Int32) -> Fragment:
        """SwiGLU outputs of tokens ``token`` and the next, times the tokens' weights."""
        return values

    @property
    def tile_outputs(self) -> int:
        """Results of a token in a row tile: SwiGLU makes one of gate and up."""
        return 8 if self.plan.swiglu else 16

    @cute.jit
    def _store(
        self, tile: Int32, sums: list[Fragment], factors: Fragment, output: Output, lane: Int32
    ) -> None:
        """Scale the results of a row tile, transpose them, and store 16 bytes a lane.

        Transposed, a token's results of a row tile are whole 32-byte sectors of global memory. The
        two ``sync_warp`` order the warp's buffer: reads of the tile before precede these writes,
        and writes precede reads by other lanes.
        """
        cute.arch.sync_warp()
        self._transpose(sums, factors, output, lane, 0, self.tile_outputs)
        cute.arch.sync_warp()
        width = 4 if self.plan.float32_out else 2
        # The buffer has a line for each token, without gaps, so the address of a vector is 16 bytes
        # times its number. With 8 bfloat16 outputs a token there are fewer vectors than lanes.
        vectors = self.tile_outputs * width // 16  # of a token
        for i in cutlass.range_constexpr(max(1, self.plan.token_tiles * 8 * vectors // 32)):
            number = i * 32 + lane
            token, vector = number // vectors, number % vectors
            if token < output.tokens and token < self.plan.token_tiles * 8:
                line = (Int64(token) * output.row_tiles + tile) * (self.tile_outputs * width)
                words = ptx.load_shared(output.buffer + Uint32(number * 16), 4)
                ptx.store_global4(output.out + line + vector * 16, words)

    @cute.jit
    def _transpose(
        self,
        sums: list[Fragment],
        factors: Fragment,
        output: Output,
        lane: Int32,
        first: cutlass.Constexpr,
        line: cutlass.Constexpr,
    ) -> None:
        """Write a row tile's results to the warp's buffer, a line for each token.

        Args:
            sums: A fragment for each tile of tokens.
            factors: Factors of the lane's two rows.
            output: Where to, and the tokens' scales.
            lane: Lane of the warp.
            first: Where the row tile begins in a line.
            line: Results of a line.
        """
        width = 4 if self.plan.float32_out else 2
        for n in cutlass.range_constexpr(self.plan.token_tiles):
            values = []
            for i in cutlass.range_constexpr(4):
                # Accumulators 0 and 1 are the two tokens of the first row, 2 and 3 of the second.
                position = n * 8 + lane % 4 * 2 + i % 2
                token = cutlass.min(position, output.tokens - 1)
                factor = factors[i // 2]
                if cutlass.const_expr(self.plan.row_scaled):
                    scale_at = output.token_scale + token * output.groups * 4
                    factor = factor * ptx.load_global_float(scale_at)
                value = sums[n][i] * factor
                # Rows of X in shared memory without a token hold anything, infinities too; their
                # columns are not stored, so they are not looked at again.
                if position < output.tokens and ptx.abs_float(value) == Float32(float("inf")):
                    value = self._nan_if_input_infinite(
                        value, output.x + token * output.token_stride * 2
                    )
                values.append(value)
            if cutlass.const_expr(self.plan.swiglu):
                # Half of the rows are outputs: one value for each of the lane's two tokens is left.
                values = swiglu_outputs(values, output.limit, lane)
                values = self._weighted(values, output, n * 8 + lane % 4 * 2)
            for i in cutlass.range_constexpr(len(values)):
                token = n * 8 + lane % 4 * 2 + i % 2
                row = swiglu_output_row(lane) if self.plan.swiglu else lane // 4 + i // 2 * 8
                if token < output.tokens:
                    at = output.buffer + Uint32((token * line + first + row) * width)
                    if cutlass.const_expr(self.plan.float32_out):
                        ptx.store_shared_float(at, values[i])
                    else:
                        ptx.store_shared_bfloat16(at, values[i])

    @cute.jit
    def _nan_if_input_infinite(self, value: Float32, x: Int64) -> Float32:
        """NaN if a token's input holds an infinity or a NaN, else the value.

        A token with an infinite input has NaN results, also where its products add up to an
        infinity. Rare, so a lane reads the whole row by itself.
        """
        result = value
        for i in cutlass.range(self.plan.columns // 2, unroll=1):
            word = ptx.load_global(x + i * 4)
            low, high = word & Uint32(0x7F80), word & Uint32(0x7F800000)
            if low == Uint32(0x7F80) or high == Uint32(0x7F800000):
                result = Float32(float("nan"))
        return result
