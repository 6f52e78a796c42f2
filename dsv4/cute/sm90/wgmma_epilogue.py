"""Epilogue of the large-M GEMMs: split-K reduction, scales, stores.

Ownership. Accumulators are fragments of 16 rows of the weight and 8 tokens, as ``wgmma`` leaves
them with the weight as left operand: a lane holds row ``lane // 4`` of tokens ``2 (lane % 4)`` and
the next, then row ``lane // 4 + 8`` of the same tokens. A warp has ``warp_tiles`` row tiles, each
with a fragment for every 8 tokens of the CTA's tile.

Split-K. The CTAs of a cluster share K of one tile. Each owns ``own_tiles`` fragments' worth of
tokens: it receives the sums of these tokens from all others and adds them, ranks in ascending
order, so that the bits do not depend on timing. Sums travel by ``st.async`` to a buffer of their
own or, where that would leave too few stages, to where the stages of the pipeline have been.

Barriers:

* ``Exchange.barrier``: mbarrier of one arrival, expected when it is made, and the bytes of all
  other CTAs' sums. A cluster has one tile, so there is only phase 0.
* ``Exchange.barrier + 8``: mbarrier with one arrival from every CTA of the cluster; says that all
  their warps have read their last stage. Only without a buffer for sums.
* cluster arrive and wait: the mbarriers of every CTA exist before any other CTA signals them.
* named barrier 7 (``_ALL_MMA``): all MMA warps of the CTA have read their last stage.
* named barriers 1 to 4, one for each warpgroup: order writes to its transpose buffer and reads.

Stores. bfloat16 results are transposed in shared memory, so that a warpgroup stores whole lines of
128 bytes; float32 results are stored from registers, 32 bytes of a token at a time.

Numerics. Accumulators are multiplied in float32 by the global scale times 2^7 (dequantized weights
are 2^-7 too small) and the token's scale. A sum that is infinite is looked at again: if the
token's input held an infinity or a NaN, the result is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import (
    Vector,
    outputs_in_order,
    swiglu_output_row,
    swiglu_outputs,
    transpose,
    transpose_outputs,
)
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.gemm_wgmma_plan import LINE, WgmmaPlan

_ALL_MMA = 7  # named barrier of all MMA warps
_INFINITY = float("inf")

Words = Sequence[Uint32]
Fragment = list[Float32]  # four accumulators, or two outputs of SwiGLU
Fragments = list[Fragment]  # of a row tile, one for every 8 tokens


class Thread(NamedTuple):
    """A thread's place.

    Attributes:
        thread: Thread of the CTA.
        warp: Warp of the CTA; the same in all lanes, which the compiler knows.
        lane: Lane of the warp.
        rank: Rank of the CTA in its cluster.
    """

    thread: Int32
    warp: Int32
    lane: Int32
    rank: Int32


class Exchange(NamedTuple):
    """Addresses of sums that the CTAs of a cluster leave for this one, the same in each.

    Attributes:
        buffer: Shared memory for the sums.
        barrier: mbarrier of the sums; 8 bytes on, that of the other CTAs' being ready.
    """

    buffer: Uint32
    barrier: Uint32


class RowTile(NamedTuple):
    """A warp's results of 16 rows of the weight.

    Attributes:
        sums: Accumulators of the CTA's tokens.
        row_tile: Which of the weight's.
        factors: What the lane's two rows are multiplied by.
    """

    sums: Fragments
    row_tile: Int32
    factors: Fragment


class Output(NamedTuple):
    """Addresses of results, and what else the epilogue reads.

    Attributes:
        buffer: Transpose buffers of all warpgroups, in shared memory.
        token_scale: Scales of tokens, from the tile's group on.
        out: The result.
        x: The input of the tile's group, to look for infinities in.
    """

    buffer: Uint32
    token_scale: Int64
    out: Int64
    x: Int64


class Bounds(NamedTuple):
    """Sizes of the result and of X.

    Attributes:
        tokens: End of the tile's tokens. Those after it belong to another tile.
        row_tiles: Rows of the weight / 16.
        token_stride: Elements of X from one token to the next.
        groups: Inputs of a token.
        k_blocks: K / 64.
        limit: Clamp of SwiGLU; infinity for none.
    """

    tokens: Int32
    row_tiles: Int32
    token_stride: Int64
    groups: Int32
    k_blocks: Int32
    limit: Float32


class WgmmaEpilogue(PlannedKernel):
    """Device functions that reduce, scale and store the accumulators of a tile."""

    plan: WgmmaPlan

    @property
    def own_tiles(self) -> int:
        """Tiles of 8 tokens that a CTA stores; the last CTAs of a cluster may have fewer."""
        return -(-self.plan.token_block // 8 // self.plan.ctas)

    @property
    def tile_outputs(self) -> int:
        """Results of a token in a tile of 16 rows."""
        return 8 if self.plan.swiglu else 16

    @property
    def _transposes(self) -> int:
        """Return how many times a transpose buffer is filled with results of a row tile."""
        return -(-self.own_tiles // self.plan.epilogue_tiles)

    # Split-K: sums of the CTAs of a cluster.

    @cute.jit
    def _arrive_cluster(self) -> None:
        """Arrive for this thread's CTA, whose mbarriers are made or are made by others of it."""
        if cutlass.const_expr(self.plan.ctas > 1):
            cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def _wait_cluster(self) -> None:
        """Wait until all CTAs of the cluster have mbarriers."""
        if cutlass.const_expr(self.plan.ctas > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def _make_exchange(self, barrier: Uint32, thread: Thread) -> None:
        """One warp: make the mbarriers of the exchange, and expect the bytes of all sums."""
        if cutlass.const_expr(self.plan.ctas > 1):
            # The last ranks own fewer tokens, or none.
            own = cutlass.min(
                cutlass.max(self.plan.token_block // 8 - thread.rank * self.own_tiles, 0),
                self.own_tiles,
            )
            if thread.lane == 0:
                ptx.mbarrier_init(barrier, 1)
                ptx.mbarrier_init(barrier + Uint32(8), self.plan.ctas)
                ptx.fence_mbarrier_init()
            cute.arch.sync_warp()
            if thread.lane == 0:
                sent = (self.plan.ctas - 1) * 8 * 4 * self.plan.rows
                ptx.mbarrier_arrive_expect_tx(barrier, own * sent)

    @cute.jit
    def _wait_for_buffers(self, barrier: Uint32, thread: Thread) -> None:
        """Wait until sums may be sent to the other CTAs."""
        if cutlass.const_expr(self.plan.has_exchange_buffer):
            self._wait_cluster()
        else:
            # When all warps of all CTAs have read their last stage, sums may lie there.
            cute.arch.barrier(barrier_id=_ALL_MMA, number_of_threads=self.plan.mma_warps * 32)
            self._wait_cluster()
            if thread.thread < self.plan.ctas:
                ready = ptx.map_to_cta(barrier + Uint32(8), Int32(thread.thread))
                ptx.mbarrier_arrive_remote(ready)
            ptx.mbarrier_wait(barrier + Uint32(8), Int32(0))

    def _fragments(self, sums: list[Any]) -> list[Fragments]:
        """The sums of each row tile as fragments."""
        count = self.plan.token_block // 8
        return [[[tile[n * 4 + i] for i in range(4)] for n in range(count)] for tile in sums]

    @cute.jit
    def _reduced(
        self, sums: list[cute.Tensor], exchange: Exchange, thread: Thread
    ) -> list[Fragments]:
        """All MMA warps: the CTA's share of the sums, of each row tile.

        Without a cluster that is what the warp's registers hold. Else every lane sends 16 bytes of
        each fragment to the lane of the same number in the CTA that owns the fragment's tokens.
        """
        count = self.plan.token_block // 8
        if cutlass.const_expr(self.plan.ctas == 1):
            return self._fragments(sums)
        line = 16 * 32 * self.plan.mma_warps  # a fragment of every MMA warp
        part = self.own_tiles * self.plan.warp_tiles * line  # all sums that a CTA sends
        buffer = exchange.buffer + Uint32(thread.thread * 16)
        self._wait_for_buffers(exchange.barrier, thread)
        mine = buffer + Uint32(thread.rank * part)
        for owner in cutlass.range_constexpr(self.plan.ctas):
            first, end = owner * self.own_tiles, min((owner + 1) * self.own_tiles, count)
            to = ptx.map_to_cta(mine, Int32(owner))
            barrier = ptx.map_to_cta(exchange.barrier, Int32(owner))
            for n in cutlass.range_constexpr(max(0, end - first)):
                for h in cutlass.range_constexpr(self.plan.warp_tiles):
                    four = [sums[h][(first + n) * 4 + i] for i in range(4)]
                    offset = (n * self.plan.warp_tiles + h) * line
                    if thread.rank == owner:
                        ptx.store_shared_float4(mine + Uint32(offset), four)
                    else:
                        ptx.async_store_remote4(to, four, barrier, offset)
        ptx.mbarrier_wait(exchange.barrier, Int32(0))
        reduced = []
        for h in cutlass.range_constexpr(self.plan.warp_tiles):
            fragments = []
            for n in cutlass.range_constexpr(self.own_tiles):
                total = [Float32(0.0)] * 4
                # Ranks in ascending order: the same bits every time.
                for r in cutlass.range_constexpr(self.plan.ctas):
                    at = buffer + Uint32(r * part + (n * self.plan.warp_tiles + h) * line)
                    more = ptx.load_shared_float4(at)
                    total = [total[i] + more[i] for i in range(4)]
                if cutlass.const_expr(count % self.plan.ctas):
                    # Where the cluster has no such tile, whatever lay there is no infinity.
                    exists = thread.rank * self.own_tiles + n < count
                    total = [ptx.select_float(exists, value, Float32(0.0)) for value in total]
                fragments.append(total)
            reduced.append(fragments)
        return reduced

    # Scales, infinities, SwiGLU.

    @cute.jit
    def _store_tiles(
        self,
        tiles: list[RowTile],
        output: Output,
        token_tile: Int32,
        thread: Thread,
        bounds: Bounds,
    ) -> None:
        """All MMA warps: store the results of the warp's row tiles."""
        for number, tile in enumerate(tiles):
            self._store(tile, number, output, token_tile, thread, bounds)

    @cute.jit
    def _store(
        self,
        tile: RowTile,
        number: cutlass.Constexpr,
        output: Output,
        token_tile: Int32,
        thread: Thread,
        bounds: Bounds,
    ) -> None:
        """Store the results of the warp's row tile ``number``."""
        fragments, lane = tile.sums, thread.lane
        begin = token_tile * self.plan.token_block
        if cutlass.const_expr(self.plan.ctas > 1):
            begin += thread.rank * (self.own_tiles * 8)
        # SwiGLU of what is infinite is NaN whatever the input held.
        if cutlass.const_expr(not self.plan.swiglu):  # noqa: SIM102 - one is known to the compiler
            if cute.arch.vote_any_sync(self._any_infinite(fragments)):
                flags = self._infinite_inputs(output.x, begin, bounds, lane)
                fragments = self._with_nan(fragments, flags, lane)
        for chunk in cutlass.range_constexpr(0, self.own_tiles, self.plan.epilogue_tiles):
            start = begin + chunk * 8
            count = min(self.plan.epilogue_tiles, self.own_tiles - chunk)
            values = self._scaled(
                fragments[chunk : chunk + count],
                tile.factors,
                output,
                start + lane % 4 * 2,
                bounds,
            )
            if cutlass.const_expr(self.plan.swiglu):
                values = [swiglu_outputs(four, bounds.limit, lane) for four in values]
                values = self._weighted(values, output, chunk)
            if cutlass.const_expr(self.plan.float32_out):
                self._store_float32(values, output.out, start, tile.row_tile, lane, bounds)
            else:
                turn = number * self._transposes + chunk // self.plan.epilogue_tiles
                first = tile.row_tile - thread.warp % 4  # of the warpgroup
                self._store_lines(values, output, start, first, turn, thread, bounds)

    def _weighted(self, values: Fragments, output: Any, first: int) -> Fragments:
        """Outputs of SwiGLU times their tokens' weights, from fragment ``first`` on: none here."""
        return values

    @cute.jit
    def _any_infinite(self, fragments: Fragments) -> Boolean:
        """Return whether one of the lane's sums is infinite.

        By the largest, in four chains: that waits less than a chain of predicates.
        """
        most = [ptx.abs_float(value) for value in fragments[0]]
        for four in fragments[1:]:
            most = [ptx.max_float(m, ptx.abs_float(v)) for m, v in zip(most, four, strict=True)]
        most = [ptx.max_float(*two) for two in zip(most[:2], most[2:], strict=True)]
        return ptx.max_float(*most) == Float32(_INFINITY)

    def _scaled(
        self, fragments: Fragments, factors: Fragment, output: Any, begin: Int32, bounds: Bounds
    ) -> Fragments:
        """Sums times the scales of their rows and, if these have any, of their tokens.

        Args:
            fragments: Sums.
            factors: Factors of the lane's two rows.
            output: Has the address of scales of tokens.
            begin: The lane's first token.
            bounds: Sizes of these scales.
        """
        scale = self._token_scales(output.token_scale, begin, len(fragments), bounds)
        return [
            [four[i] * (factors[i // 2] * scale[2 * n + i % 2]) for i in range(4)]
            for n, four in enumerate(fragments)
        ]

    @cute.jit
    def _token_scales(
        self, token_scale: Int64, begin: Int32, count: cutlass.Constexpr, bounds: Bounds
    ) -> list[Float32]:
        """The scales of the lane's two tokens in each of ``count`` fragments."""
        if cutlass.const_expr(not self.plan.row_scaled):
            return [Float32(1.0)] * (2 * count)
        scales = []
        for n in cutlass.range_constexpr(2 * count):
            token = cutlass.min(begin + n // 2 * 8 + n % 2, bounds.tokens - 1)
            at = token_scale + Int64(token) * bounds.groups * 4
            scales.append(ptx.load_global_float(at))
        return scales

    @cute.jit
    def _infinite_inputs(self, x: Int64, begin: Int32, bounds: Bounds, lane: Int32) -> list[Uint32]:
        """One warp: return a bit per token of the CTA whose input holds an infinity or a NaN.

        It reads the tokens' rows of X again, which is slow, and rare.
        """
        flags = []
        for w in cutlass.range_constexpr(-(-self.own_tiles // 4)):
            flag = Uint32(0)
            for j in cutlass.range(32, unroll=1):
                token = cutlass.min(begin + w * 32 + j, bounds.tokens - 1)
                row = x + (Int64(token) * bounds.token_stride) * 2 + lane * 4
                is_infinite = Uint32(0)
                for c in cutlass.range(bounds.k_blocks, unroll=1):
                    word = ptx.load_global(row + c * 128)
                    low, high = word & Uint32(0x7F80), word & Uint32(0x7F800000)
                    if low == Uint32(0x7F80) or high == Uint32(0x7F800000):
                        is_infinite = Uint32(1)
                if cute.arch.vote_any_sync(is_infinite == Uint32(1)):
                    flag = flag | (Uint32(1) << Uint32(j))
            flags.append(flag)
        return flags

    def _with_nan(self, values: Fragments, flags: list[Uint32], lane: Int32) -> Fragments:
        """The values, NaN for tokens that have a flag."""
        shifted = [flag >> Uint32(lane % 4 * 2) for flag in flags]
        return [
            [
                ptx.nan_if(value, shifted[n // 4] & Uint32(1 << (n % 4 * 8 + i % 2)))
                for i, value in enumerate(four)
            ]
            for n, four in enumerate(values)
        ]

    # Stores.

    @cute.jit
    def _store_float32(
        self,
        values: Fragments,
        out: Int64,
        begin: Int32,
        row_tile: Int32,
        lane: Int32,
        bounds: Bounds,
    ) -> None:
        """Store float32 results from registers, 32 bytes of a token at a time."""
        for n in cutlass.range_constexpr(len(values)):
            for i in cutlass.range_constexpr(len(values[n])):
                token = begin + n * 8 + lane % 4 * 2 + i % 2
                row = swiglu_output_row(lane) if self.plan.swiglu else lane // 4 + i // 2 * 8
                if token < bounds.tokens and row_tile < bounds.row_tiles:
                    line = Int64(token) * bounds.row_tiles + row_tile
                    offset = (line * self.tile_outputs + row) * 4
                    ptx.store_global_float(out + offset, values[n][i])

    @cute.jit
    def _store_lines(
        self,
        values: Fragments,
        output: Output,
        begin: Int32,
        row_tile: Int32,
        turn: cutlass.Constexpr,
        thread: Thread,
        bounds: Bounds,
    ) -> None:
        """A warpgroup: store bfloat16 results of some tokens by lines of the warpgroup's rows.

        Args:
            values: Results of the warp, from token ``begin`` on.
            output: Where they go.
            begin: First token.
            row_tile: The warpgroup's first.
            turn: Number of this transpose in the tile; two buffers are used alternately.
            thread: Who this is.
            bounds: Bounds of the result.
        """
        lane = thread.lane
        group, count = thread.warp // 4, len(values)
        buffers = self.plan.warpgroups * self.plan.epilogue_buffers
        buffer_bytes = self.plan.epilogue_bytes // buffers
        number_of_buffer = group * self.plan.epilogue_buffers + turn % self.plan.epilogue_buffers
        buffer = output.buffer + Uint32(number_of_buffer * buffer_bytes)
        # Of two buffers, the one before last has been read when all have written to the last: the
        # barrier after the writes orders that. So only the tile's first transpose waits here.
        if cutlass.const_expr(self.plan.epilogue_buffers == 1 or turn == 0):
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        if cutlass.const_expr(self.plan.swiglu):
            transpose_outputs(values, buffer, LINE, thread.warp % 4, lane)
        else:
            for n in cutlass.range_constexpr(count):
                transpose(values[n], buffer + Uint32(n * 8 * LINE), LINE, thread.warp % 4, lane)
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        vectors = self.tile_outputs * 4 // 8  # of 8 results, of a line
        for i in cutlass.range_constexpr(-(-count * 8 * vectors // 128)):
            number = i * 128 + thread.thread % 128
            line, vector = number // vectors, number % vectors
            token, row = begin + line, row_tile * self.tile_outputs + vector * 8
            rows = bounds.row_tiles * self.tile_outputs
            exists = line < count * 8 and token < bounds.tokens and row < rows
            if cutlass.const_expr(count * 8 * vectors % 128):
                # For lanes without a line the last one: no warp writes there now.
                line = cutlass.min(line, count * 8 - 1)
            at = buffer + Uint32(line * LINE + vector * 16)
            self._store_vector(at, output, Vector(token, row, rows), exists)

    def _load_vector(self, at: Uint32) -> Words:
        """Eight results of a token from its line, in order."""
        words: Words = ptx.load_shared(at, 4)
        return outputs_in_order(words) if self.plan.swiglu else words

    @cute.jit
    def _store_vector(self, at: Uint32, output: Output, vector: Vector, exists: Boolean) -> None:
        """All lanes together: store eight results of a token, where ``exists``."""
        if exists:
            words = self._load_vector(at)
            offset = (Int64(vector.token) * vector.rows + vector.row) * 2
            ptx.store_global4(output.out + offset, words)
