"""Epilogue warps of the ``tcgen05`` GEMMs: from accumulators in TMEM to results.

Ownership. TMEM lanes are the CTA's 128 rows, columns are tokens. The hardware lets warp ``w`` read
lanes ``32 w`` to ``32 w + 31``: its 32 rows, in two halves of 16. ``CHUNK_TOKENS`` tokens are
loaded at a time, as fragments of 16 rows and 8 tokens (``tcgen05.load``), so a lane has results of
four rows. Sums times both global scales, or SwiGLU of them, are stored.

Stores. bfloat16 results of a chunk are transposed in shared memory, a line for each token, and
stored as whole lines; float32 results are stored from registers, 32 bytes of a token at a time.

Split-K. The CTAs of a cluster share K of one tile of 64 tokens. Each leaves its sums in its own
shared memory, where stages have been, in the order in which threads hold them. After a barrier of
the cluster each adds those of its ``split_tiles`` fragments of tokens, ranks in ascending order, so
that the bits do not depend on timing.

Barriers:

* ``accumulator_full`` and ``accumulator_empty`` of ``gemm_pipeline.Barriers``: the accumulator is
  released as soon as its last chunk is in registers, before it is stored. Overlapping accumulators
  are released when the chunks of common columns are, which are loaded first.
* named barrier 1 (``_LINES``): orders writes to the transpose buffer and reads, of the epilogue
  warps; once before the buffer is written, once after.
* cluster barrier: all sums of a split K are in shared memory. The other warps take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import Vector, swiglu_output_row, swiglu_outputs, transpose
from dsv4.cute.device.quantize import BlockScales
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm100 import tcgen05
from dsv4.cute.sm100.gemm_pipeline import Barriers, Tcgen05Pipeline, Thread
from dsv4.cute.sm100.gemm_plan import CHUNK_TOKENS, EPILOGUE_WARPS, ROWS, Tcgen05Args

_LINES = 1  # named barrier of the epilogue warps
_THREADS = 32 * EPILOGUE_WARPS
_SUM_BYTES = 16 * _THREADS  # four float32 of each thread: the sums of 16 rows a warp and 8 tokens

Fragment = list[Float32]  # four accumulators, or two outputs of SwiGLU
Halves = list[list[Fragment]]  # of a warp's two halves of 16 rows, a fragment for every 8 tokens


class ExpertOutput(NamedTuple):
    """Addresses of what the epilogue of routed experts reads and writes besides.

    Attributes:
        row_weight: Weight of token 0; read where the plan is ``row_weighted``.
        result_scale: With ``quantized_out``, the global scale of the expert's results.
        block_scales: With ``quantized_out``, the block scales of token 0.
        row_scale: With ``quantized_out``, the global scale of token 0, to be written.
    """

    row_weight: Int64
    result_scale: Int64
    block_scales: BlockScales
    row_scale: Int64


class Output(NamedTuple):
    """Addresses of what the epilogue reads and writes, beside accumulators.

    Attributes:
        global_scale: Global scales of the weight; of routed experts, of the tile's expert.
        token_scale: Global scale of token 0.
        token_scale_stride: 1, or 0 where all tokens have one global scale.
        out: Results of token 0.
        lines: The transpose buffer, in shared memory.
        experts: Addresses for routed experts; None in a GEMM without.
    """

    global_scale: Int64
    token_scale: Int64
    token_scale_stride: Int32
    out: Int64
    lines: Uint32
    experts: ExpertOutput | None = None


class Tile(NamedTuple):
    """A tile as the epilogue sees it.

    Attributes:
        row_block: Which rows of the weight.
        token: First token.
        tokens: End of the tokens, of all tiles.
        output: Addresses, from token 0 on.
    """

    row_block: Int32
    token: Int32
    tokens: Int32
    output: Output


class Results(NamedTuple):
    """Results that a CTA stores at a time.

    Attributes:
        token: First token.
        tokens: End of the tokens.
        first: First result of a token.
        outputs: Results of a token.
    """

    token: Int32
    tokens: Int32
    first: Int32
    outputs: Int32


class Tcgen05Epilogue(Tcgen05Pipeline):
    """The loop of the epilogue warps."""

    @cute.jit
    def _store_tiles(
        self,
        barriers: Barriers,
        stages_at: Uint32,
        tmem: Uint32,
        walk: Walk,
        output: Output,
        args: Tcgen05Args,
        me: Thread,
    ) -> None:
        """Epilogue warps: load every tile's accumulators, release them, and store.

        Args:
            barriers: All of them.
            stages_at: Shared memory of the stages, where sums of a split K are left.
            tmem: First TMEM column.
            walk: The cluster's tiles.
            output: Addresses, from the first token of all on.
            args: The scalars.
            me: Who this thread is.
        """
        index, count = Int32(walk.first), Int32(0)
        while index < walk.total:
            tile = self._tile(index, walk, output, args)
            row = (tile.row_block * self.plan.cta_group + me.rank) * ROWS
            # Global scales are loaded before the wait, so that no result waits for them.
            factors = self._row_scales(
                tile.output.global_scale, row + me.warp * 32 + me.lane // 4, args
            )
            self._before_results(tile, me)
            accumulator, parity = self.plan.accumulator_phase(count)
            ptx.mbarrier_wait(barriers.accumulator_full + Uint32(accumulator * 8), parity)
            tcgen05.fence_after_sync()
            # TMEM lane 32 of the warp is bit 16 and up of the address.
            sums = tmem + Uint32(self.plan.accumulator_column(count)) + Uint32(me.warp << 21)
            for i in cutlass.range(self.plan.chunks, unroll=1):
                chunk = self.plan.chunk(i, count)
                begin = tile.token + chunk * CHUNK_TOKENS
                own_token = begin + me.lane % 4 * 2
                scales = self._token_scales(tile, own_token, CHUNK_TOKENS // 8)
                weights = self._row_weights(tile, own_token)
                fragments = tcgen05.load(sums + Uint32(chunk * CHUNK_TOKENS), CHUNK_TOKENS // 8)
                if i == self.plan.early_chunks - 1:
                    self._release(barriers.accumulator_empty + Uint32(accumulator * 8), me.lane)
                if cutlass.const_expr(self.plan.k_splits > 1):
                    self._leave_sums(fragments, stages_at + Uint32(me.thread * 16), chunk)
                else:
                    values = self._scaled(fragments, factors, scales, args.limit, me.lane)
                    values = self._weighted(values, weights)
                    self._store(values, tile, begin, row, args.rows, me)
            if cutlass.const_expr(self.plan.k_splits > 1):
                begin = tile.token + me.split * (8 * self.plan.split_tiles)
                own_token = begin + me.lane % 4 * 2
                scales = self._token_scales(tile, own_token, self.plan.split_tiles)
                self._sync_cluster()
                fragments = self._reduced(stages_at + Uint32(me.thread * 16), me.split)
                values = self._scaled(fragments, factors, scales, args.limit, me.lane)
                self._store(values, tile, begin, row, args.rows, me)
            index += walk.stride
            count += 1

    # What a GEMM of routed experts does otherwise.

    def _tile(self, index: Int32, walk: Walk, output: Output, args: Tcgen05Args) -> Tile:
        """The ``index``-th tile of all clusters."""
        row_block, token_tile = tile_position(index, walk.order, cutlass.min)
        group = row_block // args.group_blocks
        offset = Int64(group * args.tokens) * output.token_scale_stride * 4
        return Tile(
            row_block,
            token_tile * self.plan.token_block,
            args.tokens,
            output._replace(token_scale=output.token_scale + offset),
        )

    def _before_results(self, tile: Tile, me: Thread) -> None:
        """Store what depends on no accumulator: nothing."""

    def _row_weights(self, tile: Tile, token: Int32) -> Sequence[Float32] | None:
        """Weights of results of the lane's tokens: none."""
        return None

    def _weighted(self, values: Halves, weights: Sequence[Float32] | None) -> Halves:
        """Results times the weights of their tokens."""
        return values

    # Sums.

    @cute.jit
    def _leave_sums(self, fragments: tcgen05.Halves, buffer: Uint32, chunk: Int32) -> None:
        """Leave a chunk of this CTA's sums for the other CTAs, where stages have been."""
        for h in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(CHUNK_TOKENS // 8):
                number = chunk * (CHUNK_TOKENS // 4) + n * 2 + h
                ptx.store_shared_float4(buffer + Uint32(number * _SUM_BYTES), fragments[h][n])

    @cute.jit
    def _reduced(self, buffer: Uint32, split: Int32) -> tcgen05.Halves:
        """Add all CTAs' sums of the tokens that this CTA stores, ranks in ascending order."""
        halves = []
        for h in cutlass.range_constexpr(2):
            tiles = []
            for n in cutlass.range_constexpr(self.plan.split_tiles):
                number = (split * self.plan.split_tiles + n) * 2 + h
                at = buffer + Uint32(number * _SUM_BYTES)
                total = [Float32(0.0)] * 4
                for r in cutlass.range_constexpr(self.plan.k_splits):
                    more = ptx.load_shared_cluster_float4(ptx.map_to_cta(at, Int32(r)))
                    total = [total[i] + more[i] for i in range(4)]
                tiles.append(total)
            halves.append(tiles)
        return halves

    @cute.jit
    def _release(self, barrier: Uint32, lane: Int32) -> None:
        """One warp: tell the leader that what the next MMAs overwrite is loaded."""
        tcgen05.fence_before_sync()
        cute.arch.sync_warp()
        if lane == 0:
            if cutlass.const_expr(self.plan.cta_group > 1):
                tcgen05.arrive_leader(barrier)
            else:
                ptx.mbarrier_arrive(barrier)

    # Scales.

    @cute.jit
    def _row_scales(self, global_scale: Int64, row: Int32, args: Tcgen05Args) -> list[Float32]:
        """Global scales of the lane's four rows: ``row``, 8, 16 and 24 further."""
        factors = []
        for h in cutlass.range_constexpr(4):
            at = cutlass.min(row + h * 8, args.rows - 1)
            # The segment of the row; a cut that does not exist is larger than any row.
            index = Int32(at >= args.cut0) + Int32(at >= args.cut1) + Int32(at >= args.cut2)
            if args.scale_rows == 1:
                index = at
            factors.append(ptx.load_global_float(global_scale + Int64(index) * 4))
        return factors

    @cute.jit
    def _token_scales(self, tile: Tile, token: Int32, count: cutlass.Constexpr) -> list[Float32]:
        """Global scales of the lane's two tokens in each of ``count`` tiles of 8."""
        output = tile.output
        stride = output.token_scale_stride
        return self._token_values(output.token_scale, stride, token, tile.tokens, count)

    @cute.jit
    def _token_values(
        self,
        start: Int64,
        stride: Int32,
        token: Int32,
        tokens: Int32,
        count: cutlass.Constexpr,
    ) -> list[Float32]:
        """float32 numbers of ``token`` and the next in each of ``count`` tiles of 8 tokens."""
        values = []
        for n in cutlass.range_constexpr(2 * count):
            at = cutlass.min(token + n // 2 * 8 + n % 2, tokens - 1)
            values.append(ptx.load_global_float(start + Int64(at * stride) * 4))
        return values

    def _scaled(
        self,
        fragments: tcgen05.Halves,
        factors: list[Float32],
        scales: list[Float32],
        limit: Float32,
        lane: Int32,
    ) -> Halves:
        """Sums times both global scales, or SwiGLU of these."""
        values = [
            [
                [four[i] * (factors[2 * h + i // 2] * scales[2 * n + i % 2]) for i in range(4)]
                for n, four in enumerate(half)
            ]
            for h, half in enumerate(fragments)
        ]
        if not self.plan.swiglu:
            return values
        return [[swiglu_outputs(four, limit, lane) for four in half] for half in values]

    # Stores.

    @cute.jit
    def _store(
        self, values: Halves, tile: Tile, token: Int32, row: Int32, rows: Int32, me: Thread
    ) -> None:
        """Store the results of a chunk of tokens and the CTA's rows.

        Args:
            values: The lane's results.
            tile: Where they go.
            token: First token of the chunk.
            row: First row of the CTA.
            rows: Rows of the weight.
            me: Who this thread is.
        """
        outputs = rows // 16 * self.plan.tile_outputs
        first = row // 16 * self.plan.tile_outputs
        if cutlass.const_expr(self.plan.float32_out):
            for h in cutlass.range_constexpr(2):
                start = first + (me.warp * 2 + h) * self.plan.tile_outputs
                results = Results(token, tile.tokens, start, outputs)
                self._store_float32(values[h], tile.output.out, results, me.lane)
        else:
            results = Results(token, tile.tokens, first, outputs)
            self._store_lines(values, tile.output, results, me)

    @cute.jit
    def _store_float32(
        self, values: list[Fragment], out: Int64, results: Results, lane: Int32
    ) -> None:
        """Store float32 results of 16 rows from registers."""
        for n in cutlass.range_constexpr(len(values)):
            for i in cutlass.range_constexpr(len(values[n])):
                token = results.token + n * 8 + lane % 4 * 2 + i % 2
                in_tile = swiglu_output_row(lane) if self.plan.swiglu else lane // 4 + i // 2 * 8
                at = results.first + in_tile
                if token < results.tokens and at < results.outputs:
                    offset = (Int64(token) * results.outputs + at) * 4
                    ptx.store_global_float(out + offset, values[n][i])

    @cute.jit
    def _store_lines(self, values: Halves, output: Output, results: Results, me: Thread) -> None:
        """Store bfloat16 results of the CTA's rows, 16 bytes of a token's line a thread."""
        line_bytes = self.plan.line_bytes
        tokens = 8 * len(values[0])
        cute.arch.barrier(barrier_id=_LINES, number_of_threads=_THREADS)
        for h in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(tokens // 8):
                lines = output.lines + Uint32(n * 8 * line_bytes)
                transpose(values[h][n], lines, line_bytes, me.warp * 2 + h, me.lane)
        cute.arch.barrier(barrier_id=_LINES, number_of_threads=_THREADS)
        vectors = self.plan.tile_outputs  # of 8 results, of a line: 8 tiles of 16 rows
        for i in cutlass.range_constexpr(-(-tokens * vectors // _THREADS)):
            number = i * _THREADS + me.thread
            line, vector = number // vectors, number % vectors
            token, at = results.token + line, results.first + vector * 8
            exists = line < tokens and token < results.tokens and at < results.outputs
            address = output.lines + Uint32(line * line_bytes + vector * 16)
            self._store_eight(address, output, Vector(token, at, results.outputs), exists)

    @cute.jit
    def _store_eight(
        self, address: Uint32, output: Output, vector: Vector, exists: Boolean
    ) -> None:
        """All lanes: store eight results of a token from shared memory, where they exist."""
        if exists:
            words = ptx.load_shared(address, 4)
            offset = (Int64(vector.token) * vector.rows + vector.row) * 2
            ptx.store_global4(output.out + offset, words)
