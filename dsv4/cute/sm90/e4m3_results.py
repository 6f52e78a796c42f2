"""Results of the GEMMs with FP8 arithmetic: scales, SwiGLU, quantization, stores.

Ownership. Accumulators of a warp are 16 tokens and 128 rows of the weight: a lane holds, of tokens
``lane // 4`` and ``lane // 4 + 8``, results ``8 n + 2 (lane % 4)`` and the next, for n in 0..15.
With interleaved rows these two are gate and up of result ``4 n + lane % 4``, so that SwiGLU needs
no exchange.

Stores. A warp transposes bfloat16 results, or codes, in a buffer of its own, and stores lines of
128 bytes. float32 results are stored from registers.

FP8 results. A scale belongs to 128 results of a token, which are those of two tiles of 128 rows,
computed one after the other by the same warp. Those of the first are kept in shared memory, as
bfloat16, where only the lane that wrote them reads. Codes are written in the order in which the
next GEMM reads them (``dsv4.quant.fragments.fragment_columns``).

Numerics. Sums are multiplied in float32 by the row's factor; FP8 results are rounded to bfloat16
first, then quantized bit for bit as ``quantize`` does with ``"fp8_token"``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from dsv4.cute.device import exact_fp8, ptx
from dsv4.cute.sm90.gemm_e4m3_plan import LINE, ROWS, E4m3Plan
from dsv4.cute.sm90.wgmma_copies import WgmmaCopies

MMA_WARPS = 8
_LEAST_SCALE = 105  # E8M0 byte of a block whose largest magnitude is 1e-4 or less

Values = list[list[Float32]]  # of each 8 rows: four results, or two of SwiGLU


class Lane(NamedTuple):
    """A thread's position.

    Attributes:
        thread: Thread of the CTA.
        warp: Warp of the CTA.
        lane: Lane of the warp.
    """

    thread: Int32
    warp: Int32
    lane: Int32


class Tile(NamedTuple):
    """A tile of the result.

    Attributes:
        expert: Whose it is; 0 of a dense GEMM.
        row: First row of the weight.
        token: First token.
        end: The token after its last.
        input: Stages of X before those of the tile's group.
    """

    expert: Int32
    row: Int32
    token: Int32
    end: Int32
    input: Int32


class ResultBuffers(NamedTuple):
    """Shared memory of results.

    Attributes:
        lines: Transpose buffers of all MMA warps.
        first_results: Results of the first of two tiles of rows.
        factors: Factors of rows of each slot.
    """

    lines: Uint32
    first_results: Uint32
    factors: Uint32


class E4m3Results(WgmmaCopies):
    """Device functions that scale and store the accumulators of a tile."""

    plan: E4m3Plan  # type: ignore[assignment]

    @property
    def _columns(self) -> int:
        """Return the results of a token in a tile of 128 rows."""
        return ROWS // 2 if self.plan.swiglu else ROWS

    @cute.jit
    def _store_block(
        self,
        sums: cute.Tensor,
        i: cutlass.Constexpr,
        part: cutlass.Constexpr,
        factors: Uint32,
        buffers: ResultBuffers,
        tile: Tile,
        begin: Int32,
        args: Any,
        me: Lane,
    ) -> None:
        """One warp: store its 16 tokens of a block of 64.

        Args:
            sums: Accumulators.
            i: Which block of the warpgroup.
            part: Which of the tiles of rows that share scales.
            factors: Factors of the tile's rows; 0 where there are none.
            buffers: Shared memory.
            tile: The tile.
            begin: First token of the warp.
            args: The scalars.
            me: Who this is.
        """
        lines = buffers.lines + Uint32(me.warp * (16 * LINE))
        for chunk in cutlass.range_constexpr(self._columns // 64):
            count = 64 // (self._columns // 16)  # tiles of 8 rows that make 64 results
            values = self._values(sums, chunk * count, count, factors, args, me.lane)
            if cutlass.const_expr(self.plan.swiglu):
                values = self._swiglu(values, tile, begin, args, me.lane)
            column = tile.row // (ROWS // self._columns) + chunk * 64
            if cutlass.const_expr(self.plan.quantized_out):
                self._store_quantized(values, i, part, buffers, tile, begin, args, me)
            elif cutlass.const_expr(self.plan.float32_out):
                self._store_tokens_float32(values, tile, begin, column, args, me.lane)
            else:
                self._write_lines(values, lines, me.lane)
                total = self._total_columns(args)
                first = args.out + (Int64(begin) * total + column) * 2
                here = cutlass.min(total - column, 64) * 2
                self._store_lines(lines, first, Int64(total) * 2, tile.end - begin, here, me.lane)

    def _row_exponent(self, args: Any, expert: Int32, row: Int32) -> Int32:
        """Exponent of a row of an expert's weight, or of the last one."""
        at = Int64(expert) * args.rows + cutlass.min(row, args.rows - 1)
        return exact_fp8.load_row_exponent(args.row_exponent + at)

    @cute.jit
    def _factor(self, args: Any, expert: Int32, row: Int32) -> Float32:
        """Global scale of a row of the weight, times the power of two of its exponent."""
        row = cutlass.min(row, args.rows - 1)
        index = Int32(row >= args.cut0) + Int32(row >= args.cut1) + Int32(row >= args.cut2)
        if args.scale_rows == 1:
            index = row
        index += expert * args.expert_scales
        scale = ptx.load_global_float(args.global_scale + Int64(index) * 4)
        return scale * ptx.bits_to_float(
            Uint32((self._row_exponent(args, expert, row) + 127) << 23)
        )

    def _total_columns(self, args: Any) -> Int32:
        """Results of a token."""
        return args.rows // (ROWS // self._columns)

    def _values(
        self, sums: cute.Tensor, first: int, count: int, factors: Uint32, args: Any, lane: Int32
    ) -> Values:
        """Sums times the factors of their rows, of ``count`` tiles of 8 rows from ``first`` on."""
        values = []
        for n in range(first, first + count):
            two = ptx.load_shared_float2(factors + Uint32(n * 32) + Uint32(lane % 4 * 8))
            values.append([Float32(sums[n * 4 + j]) * two[j % 2] for j in range(4)])
        return values

    @cute.jit
    def _swiglu(self, values: Values, tile: Tile, begin: Int32, args: Any, lane: Int32) -> Values:
        """SwiGLU of gates and ups, times the weights of their tokens where there are any."""
        weights = [Float32(1.0)] * 2
        if cutlass.const_expr(self.plan.row_weighted):
            weights = []
            for h in cutlass.range_constexpr(2):
                token = cutlass.min(begin + lane // 4 + h * 8, tile.end - 1)
                weights.append(ptx.load_global_float(args.row_weight + Int64(token) * 4))
        results = []
        for four in values:
            two = [ptx.swiglu(four[2 * h], four[2 * h + 1], args.limit) for h in range(2)]
            if cutlass.const_expr(self.plan.row_weighted):
                two = [value * weight for value, weight in zip(two, weights, strict=True)]
            results.append(two)
        return results

    @cute.jit
    def _store_tokens_float32(
        self, values: Values, tile: Tile, begin: Int32, column: Int32, args: Any, lane: Int32
    ) -> None:
        """One warp: store float32 results of 16 tokens from registers."""
        total = self._total_columns(args)
        for n in cutlass.range_constexpr(len(values)):
            for h in cutlass.range_constexpr(2):
                token = begin + lane // 4 + h * 8
                if cutlass.const_expr(self.plan.swiglu):
                    here = column + n * 4 + lane % 4
                    if token < tile.end and here < total:
                        at = args.out + (Int64(token) * total + here) * 4
                        ptx.store_global_float(at, values[n][h])
                else:
                    here = column + n * 8 + lane % 4 * 2
                    if token < tile.end and here < total:
                        at = args.out + (Int64(token) * total + here) * 4
                        ptx.store_global_float2(at, values[n][2 * h], values[n][2 * h + 1])

    @cute.jit
    def _write_lines(self, values: Values, lines: Uint32, lane: Int32) -> None:
        """One warp: write 64 results of 16 tokens to their lines, as bfloat16."""
        cute.arch.sync_warp()  # the lines have been read
        if cutlass.const_expr(self.plan.swiglu):
            at = lines + Uint32(lane // 4 * LINE + lane % 4 * 2)
            for n in cutlass.range_constexpr(len(values)):
                for h in cutlass.range_constexpr(2):
                    ptx.store_shared_bfloat16(at + Uint32(h * 8 * LINE + n * 8), values[n][h])
        else:
            # Lane 8 i + r: row r of matrix i; matrices are 8 tokens and 8 results.
            matrix = lane // 8
            at = lines + Uint32((lane % 8 + matrix % 2 * 8) * LINE + matrix // 2 * 16)
            for n in cutlass.range_constexpr(0, len(values), 2):
                pairs = [values[n + j // 2][j % 2 * 2 : j % 2 * 2 + 2] for j in range(4)]
                words = [ptx.pack_bfloat16x2(pair[0], pair[1]) for pair in pairs]
                ptx.stmatrix_x4(at + Uint32(n * 16), words)

    @cute.jit
    def _store_lines(
        self,
        lines: Uint32,
        first: Int64,
        stride: Int64,
        tokens: Int32,
        count: Int32,
        lane: Int32,
    ) -> None:
        """One warp: store lines of 128 bytes of 16 tokens.

        Args:
            lines: Where they are.
            first: Address of the first token's.
            stride: Bytes from a token's to the next.
            tokens: Of these exist.
            count: Bytes of a line that exist, a multiple of 16.
            lane: Lane of the warp.
        """
        cute.arch.sync_warp()  # the lines are written
        # Computed here, not before the main loop, whose registers are taken.
        lane = ptx.opaque(lane)
        line, byte = lane // 8, lane % 8 * 16
        at = lines + Uint32(line * LINE + byte)
        to = first + Int64(line) * stride + byte
        for v in cutlass.range_constexpr(4):  # four lines at a time
            if line + 4 * v < tokens and byte < count:
                words = ptx.load_shared(at, 4, 4 * v * LINE)
                ptx.store_global4(to + Int64(4 * v) * stride, words)

    # FP8 results.

    @cute.jit
    def _store_quantized(
        self,
        values: Values,
        i: cutlass.Constexpr,
        part: cutlass.Constexpr,
        buffers: ResultBuffers,
        tile: Tile,
        begin: Int32,
        args: Any,
        me: Lane,
    ) -> None:
        """One warp: keep results of the first tile of rows, or quantize those of both and store.

        Arguments as in ``_store_block``.
        """
        # Word h 8 + m: results 8 m + lane % 4 and 4 further on, of the lane's token h.
        words = [
            ptx.pack_bfloat16x2(values[2 * m][h], values[2 * m + 1][h])
            for h in range(2)
            for m in range(8)
        ]
        stored = buffers.first_results + Uint32((i * 16 * MMA_WARPS * 32 + me.thread) * 4)
        if cutlass.const_expr(part == 0):
            for w in cutlass.range_constexpr(16):
                ptx.store_shared_int(stored + Uint32(w * MMA_WARPS * 32 * 4), Int32(words[w]))
        else:
            lines = buffers.lines + Uint32(me.warp * (16 * LINE))
            total = self._total_columns(args)
            block = tile.row // (2 * ROWS)
            cute.arch.sync_warp()  # the lines have been read
            for h in cutlass.range_constexpr(2):
                both = [
                    ptx.load_shared_word(stored, (h * 8 + m) * MMA_WARPS * 32 * 4) for m in range(8)
                ]
                both += words[8 * h : 8 * h + 8]
                byte = self._quantize(both, lines + Uint32(h * 8 * LINE), me.lane)
                token = begin + me.lane // 4 + h * 8
                if token < tile.end and me.lane % 4 == 0:
                    at = Int64(token) * (total // 128) + block
                    ptx.store_global_byte(args.out_scales + at, byte)
            first = args.out + Int64(begin) * total + block * 128
            self._store_lines(lines, first, Int64(total), tile.end - begin, Int32(128), me.lane)

    @cute.jit
    def _quantize(self, words: list[Uint32], lines: Uint32, lane: Int32) -> Uint32:
        """Four lanes: quantize 128 results of a token, and write their codes to its line.

        Args:
            words: The lane's 32 results as bfloat16: word m of results ``8 m + lane % 4`` and 4
                further on.
            lines: Line of token 0 of 8.
            lane: Lane of the warp; ``lane // 4`` is the token.

        Returns:
            The E8M0 byte of the scale.
        """
        # Infinities become NaN, which no maximum counts and E4M3 has.
        results = []
        for word in words:
            for value in (ptx.bfloat16_low_to_float(word), ptx.bfloat16_high_to_float(word)):
                results.append(ptx.fma_float(value, Float32(0.0), value))
        most = [Float32(0.0)] * 4
        for n, value in enumerate(results):
            most[n % 4] = ptx.max_float(most[n % 4], ptx.abs_float(value))
        peak = ptx.max_float(ptx.max_float(most[0], most[1]), ptx.max_float(most[2], most[3]))
        for power in cutlass.range_constexpr(2):
            peak = ptx.max_float(peak, cute.arch.shuffle_sync_bfly(peak, 1 << power))
        byte = self._scale_byte(peak)
        inverse = ptx.bits_to_float((Uint32(254) - byte) << Uint32(23))
        # In fragment order results of the lane whose n differ by 2 are neighbours, the greater one
        # first: result 4 n + q of 64 is at 64 (n % 2) + 32 (q // 2) + 4 (n // 4) + 2 (q % 2) + 1,
        # less 1 if n % 4 is above 1; those of the second tile 16 bytes on.
        quarter = lane % 4
        at = lines + Uint32(lane // 4 * LINE + quarter // 2 * 32 + quarter % 2 * 2)
        for u in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(4):
                for odd in cutlass.range_constexpr(2):
                    n = 16 * u + 4 * j + odd  # and n + 2
                    pair = ptx.pack_e4m3x2(results[n + 2] * inverse, results[n] * inverse)
                    ptx.store_shared_u16(at + Uint32(64 * odd + 16 * u + 4 * j), pair)
        return byte

    def _scale_byte(self, peak: Float32) -> Uint32:
        """The E8M0 byte of the smallest power of two by which E4M3 holds ``peak``, a bfloat16."""
        # 448 is 1.75 * 2^8; mantissas above 1.75 (0x60 of 7 bits) take the next exponent.
        bits = ptx.float_to_bits(peak) >> Uint32(16)
        exponent = Int32((bits + Uint32(0x1F)) >> Uint32(7)) - 8
        return Uint32(cutlass.max(exponent, Int32(_LEAST_SCALE)))

    def _exists(self, tile: Tile, block: Int32) -> Boolean:
        """Return whether a block of 64 tokens of a tile has any."""
        return tile.end - tile.token > block * 64
