"""Epilogue of ``attention``: rotate, normalize and store, or exchange partial sums.

Accumulators
    A consumer warpgroup has 64 heads by half of the dims: warp ``w`` heads ``16 (w % 4)`` on, a
    lane heads ``lane // 4`` and ``lane // 4 + 8`` of these (``r`` = 0 and 1) and of every 8 dims
    the pair ``2 (lane % 4)``. Accumulator ``4 n + 2 r + i`` is dim ``8 n + 2 (lane % 4) + i``.

Three ways out
    Alone: the inverse rotation, then bfloat16 through the queries' buffer, so that a warp stores
    whole 512-byte halves of a head. Nobody reads queries any more: every consumer has passed the
    barrier of ``_reduce_totals`` after its last logits.
    Split: 20-bit partial sums and their statistics to global memory, for ``MergeKernel``.
    Paired: each CTA of the cluster gives the other its partial sums of half of each warp's dims,
    packed, by bulk copies of ``_PIECES`` pieces, and adds and stores its own half piece by piece,
    while the next is on its way.

Barriers of a pair
    ``peer_ready`` (an mbarrier, ``CONSUMER_WARPS`` arrivals of the other CTA's warps): the other
    CTA has read its queries for the last time, so their buffer may be overwritten from here.
    ``pieces`` (an mbarrier a piece): completes with the bytes of the piece that all warps of the
    other CTA send; the first also with the statistics of both. Phase 0: a pair has one item.

Numerics
    Both CTAs of a pair add in the order of ranks only statistics; a sum is its own plus the
    other's, whose packing to 20 bits is the one rounding that own sums do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import transpose_quad
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.attention_args import AttentionArgs
from dsv4.cute.sm90.attention_plan import (
    CONSUMER_WARPS,
    DIMS,
    HEADS,
    PACKED_BYTES,
    ROPE,
    AttentionPlan,
)
from dsv4.cute.sm90.attention_softmax import (
    Softmax,
    finite_origin,
    merged_total,
    reciprocal_or_zero,
)

PIECES = 4  # in which a warp of a pair sends its partial sums, of 32 dims
# Bytes of half of a warp's partial sums: as float32, and packed.
HALF_BYTES, PACKED_HALF_BYTES = DIMS // 4 * 16 * 4, DIMS // 4 * 16 * PACKED_BYTES // DIMS
_CONSUMERS = 32 * CONSUMER_WARPS

Sums = cute.Tensor  # accumulators of a thread


class Consumer(NamedTuple):
    """A thread that multiplies.

    Attributes:
        group: Number of its warpgroup, which has that half of the dims.
        thread: Thread of the CTA.
        warp: Warp of the CTA.
        lane: Lane of the warp.
        row: First of its two heads of the tile; the other is 8 on.
    """

    group: Int32
    thread: Int32
    warp: Int32
    lane: Int32
    row: Int32


class Tile(NamedTuple):
    """A tile of heads of a token.

    Attributes:
        token: Number of the token.
        split: Number of the KV split among those of all tokens.
        head_tile: Number of the tile of heads.
    """

    token: Int32
    split: Int32
    head_tile: Int32

    @property
    def first_head(self) -> Int32:
        """First head of the tile; computed where it is used, because no register is left."""
        return self.head_tile * HEADS


class Tables(NamedTuple):
    """Shared-memory addresses of what the epilogue needs of the inputs.

    Attributes:
        sinks: Sinks of the tile, as multiples of ``log2 e``.
        angles: 32 cosines and 32 sines of the token.
    """

    sinks: Uint32
    angles: Uint32


class PairBuffers(NamedTuple):
    """Shared memory of a warp for the exchange between the CTAs of a pair.

    Attributes:
        own: Its half of the partial sums, in the stages, which nobody reads any more.
        sent: The other's half, packed, behind it.
        received: What the other CTA sends, in the queries' buffer.
        statistics: References and sums of weights of both CTAs' heads, 16 bytes each.
        barriers: ``peer_ready``, then ``pieces``.
    """

    own: Uint32
    sent: Uint32
    received: Uint32
    statistics: Uint32
    barriers: Uint32


class AttentionEpilogue(PlannedKernel):
    """Device functions that run once for a tile, after its KV blocks."""

    plan: AttentionPlan

    @cute.jit
    def _rotate_back(
        self, args: AttentionArgs, sums: Sums, angles: Uint32, consumer: Consumer
    ) -> None:
        """Rotate the last 64 dims, which the second warpgroup has, by the opposite angle.

        A lane has both dims of a pair. Sums are rotated before they are normalized.
        """
        if (args.cos != Int64(0)) & (consumer.group == 1):
            address = angles + Uint32(consumer.lane % 4 * 4)
            for n in cutlass.range_constexpr(ROPE // 8):
                cos = ptx.load_shared_float(address + n * 16)
                sin = ptx.load_shared_float(address + (n * 16 + ROPE * 2))
                for r in cutlass.range_constexpr(2):
                    at = ((DIMS - ROPE) // 8 - DIMS // 16 + n) * 4 + 2 * r
                    sums[at], sums[at + 1] = ptx.inverse_rope_pair(sums[at], sums[at + 1], cos, sin)

    @cute.jit
    def _store_partials(
        self, args: AttentionArgs, sums: Sums, softmax: Softmax, tile: Tile, consumer: Consumer
    ) -> None:
        """Store the packed partial sums of a KV split, and their statistics."""
        group, lane = consumer.group, consumer.lane
        first = tile.first_head + consumer.row
        for r in cutlass.range_constexpr(2):
            head = first + 8 * r
            if head < args.heads:
                row = Int64(tile.split) * args.heads + head
                if group == 0 and lane % 4 == 0:
                    ptx.store_global_float2(
                        args.statistics + row * 8, softmax.references[r], softmax.totals[r]
                    )
                # Eight sums of 20 bits are four words and a fifth, which stands behind all fours.
                line = args.out + row * PACKED_BYTES + group * DIMS + lane % 4 * 16
                fifths = args.out + row * PACKED_BYTES + 2 * DIMS + (group * 4 + lane % 4) * 32
                for m in cutlass.range_constexpr(0, DIMS // 64, 4):
                    last = []
                    for i in cutlass.range_constexpr(4):
                        words = ptx.pack_accumulators(self._eight(sums, m + i, r))
                        ptx.store_global4(line + (m + i) * 64, words[:4])
                        last.append(words[4])
                    ptx.store_global4(fifths + m * 4, last)

    def _eight(self, sums: Sums, m: int, r: int) -> list[Float32]:
        """A lane's sums of a head, of the ``m``-th 32 neighbouring dims."""
        eight: list[Any] = [sums[(4 * m + n) * 4 + 2 * r + i] for n in range(4) for i in range(2)]
        return eight

    @cute.jit
    def _store_results(
        self,
        args: AttentionArgs,
        sums: Sums,
        softmax: Softmax,
        sinks: Uint32,
        buffer: Uint32,
        tile: Tile,
        consumer: Consumer,
    ) -> None:
        """Normalize, transpose through shared memory, and store one head after another.

        Args:
            args: Arguments of the kernel.
            sums: Accumulators.
            softmax: Softmax of the thread's two heads.
            sinks: Sinks of the tile.
            buffer: The warp's part of the queries' buffer: 16 lines of 512 bytes, a head's half of
                the dims each, whose chunks of 16 bytes are exchanged against bank conflicts.
            tile: Tile of heads.
            consumer: The thread.
        """
        first, row, lane, heads = tile.first_head, consumer.row, consumer.lane, args.heads
        factors = [
            self._normalizer(
                softmax.references[r],
                softmax.totals[r],
                ptx.load_shared_float(sinks + Uint32((row + 8 * r) * 4)),
            )
            for r in range(2)
        ]
        line = buffer + Uint32(lane % 16 * DIMS)
        for n in cutlass.range_constexpr(0, DIMS // 16, 2):
            words = [
                ptx.pack_bfloat16x2(
                    sums[m * 4 + 2 * r] * factors[r], sums[m * 4 + 2 * r + 1] * factors[r]
                )
                for m in (n, n + 1)
                for r in range(2)
            ]
            ptx.stmatrix_x4(line + Uint32(((n + lane // 16) ^ (lane % 8)) * 16), words)
        cute.arch.sync_warp()  # the warp's lines are written by all of its lanes
        head = first + consumer.warp % 4 * 16
        half = consumer.group * (DIMS // 2)
        to = args.out + ((Int64(tile.token) * heads + head) * DIMS + half + lane * 8) * 2
        for i in cutlass.range(16, unroll=4):
            four = ptx.load_shared(buffer + Uint32(i * DIMS + (lane ^ (i % 8)) * 16), 4)
            if head + i < heads:
                ptx.store_global4(to + Int64(i) * (DIMS * 2), four)

    @cute.jit
    def _normalizer(self, reference: Float32, total: Float32, sink: Float32) -> Float32:
        """Factor on sums: 1 / the sum of weights, the sink's included; 0 if there are none."""
        origin = ptx.max_float(reference, sink)
        origin = finite_origin(origin)
        scaled = ptx.exp2_approx(reference - origin)
        whole = total * scaled + ptx.exp2_approx(sink - origin)
        return ptx.select_float(whole == Float32(0.0), Float32(0.0), scaled / whole)

    @cute.jit
    def _exchange_halves(
        self,
        sums: Sums,
        softmax: Softmax,
        buffers: PairBuffers,
        rank: Int32,
        consumer: Consumer,
    ) -> None:
        """Send the other CTA of the pair its half of the dims, and put this one's aside.

        Args:
            sums: Accumulators.
            softmax: Softmax of the thread's two heads.
            buffers: Buffers of the warp.
            rank: Rank of the CTA in the cluster.
            consumer: The thread.
        """
        lane, thread, barriers = consumer.lane, consumer.thread, buffers.barriers
        references, total = softmax
        peer, size = 1 - rank, PACKED_HALF_BYTES // PIECES
        if thread == 0:
            for piece in cutlass.range_constexpr(PIECES):
                stats = self.plan.ctas * HEADS * 16 if piece == 0 else 0
                ptx.mbarrier_arrive_expect_tx(
                    barriers + 8 + piece * 8, CONSUMER_WARPS * size + stats
                )
        # Both warpgroups have the same statistics: the first sends them, to both CTAs.
        if (thread < _CONSUMERS // 2) & (thread % 4 == 0):
            for other in cutlass.range_constexpr(self.plan.ctas):
                for r in cutlass.range_constexpr(2):
                    row = rank * HEADS + consumer.row + 8 * r
                    address = buffers.statistics + Uint32(row * 16)
                    four = [references[r], total[r], Float32(0.0), Float32(0.0)]
                    to = ptx.map_to_cta(address, Int32(other))
                    ptx.async_store_remote4(to, four, ptx.map_to_cta(barriers + 8, Int32(other)))
        if lane == 0:
            ptx.mbarrier_wait(barriers, Int32(0))  # peer_ready
        for piece in cutlass.range_constexpr(PIECES):
            for half in cutlass.range_constexpr(2):
                if rank != half:
                    self._pack(
                        sums, buffers.sent + Uint32(piece * size), half * PIECES + piece, lane
                    )
            # The bulk copy reads through the async proxy what all lanes have written.
            ptx.fence_proxy_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                ptx.bulk_copy_to_remote(
                    ptx.map_to_cta(buffers.received + Uint32(piece * size), peer),
                    buffers.sent + Uint32(piece * size),
                    size,
                    ptx.map_to_cta(barriers + 8 + Uint32(piece * 8), peer),
                )
        for half in cutlass.range_constexpr(2):
            if rank == half:
                self._put_aside(sums, buffers.own + Uint32(lane * 16), half)

    @cute.jit
    def _put_aside(self, sums: Sums, address: Uint32, half: int) -> None:
        """Write a lane's sums of half of its dims to shared memory, which only it reads."""
        for n in cutlass.range_constexpr(DIMS // 32):
            at = half * (DIMS // 8) + 4 * n
            four = [sums[at + i] for i in range(4)]
            ptx.store_shared_float4(address + n * 512, four)

    @cute.jit
    def _pack(self, sums: Sums, address: Uint32, number: int, lane: Int32) -> None:
        """Write a piece: 32 dims of two heads, four words of each, then the two fifth words."""
        fifth = []
        for r in cutlass.range_constexpr(2):
            words = ptx.pack_accumulators(self._eight(sums, number, r))
            ptx.store_shared4(address + Uint32(lane * 16), words[:4], r * 512)
            fifth.append(words[4])
        ptx.store_shared2(address + Uint32(lane * 8 + 1024), fifth)

    @cute.jit
    def _merge_halves(
        self,
        args: AttentionArgs,
        buffers: PairBuffers,
        tables: Tables,
        tile: Tile,
        rank: Int32,
        consumer: Consumer,
    ) -> None:
        """Add both CTAs' sums of this one's half of the dims and store, a piece at a time.

        Args:
            args: Arguments of the kernel.
            buffers: Buffers of the warp.
            tables: Sinks and angles.
            tile: Tile of heads.
            rank: Rank of the CTA in the cluster.
            consumer: The thread.
        """
        row, group, lane, heads = consumer.row, consumer.group, consumer.lane, args.heads
        first, barriers = tile.first_head, buffers.barriers
        ptx.mbarrier_wait(barriers + 8, Int32(0))  # with the first piece come all statistics
        factors, whole = self._pair_factors(buffers.statistics, tables.sinks, row, rank)
        share = DIMS // 16 // self.plan.ctas  # groups of 8 dims
        own_address = buffers.own + Uint32(lane * 16)
        line = (
            args.out + ((Int64(tile.token) * heads + first + row) * DIMS + group * (DIMS // 2)) * 2
        )
        for piece in cutlass.range(PIECES, unroll=1):
            ptx.mbarrier_wait(barriers + Uint32(8 + piece * 8), Int32(0))
            piece_address = buffers.received + Uint32(piece * (PACKED_HALF_BYTES // PIECES))
            fifth = ptx.load_shared(piece_address + Uint32(lane * 8), 2, 1024)
            more = [
                ptx.unpack_all_accumulators(
                    [*ptx.load_shared(piece_address + Uint32(lane * 16), 4, r * 512), fifth[r]]
                )
                for r in range(2)
            ]
            sums = []
            for m in cutlass.range_constexpr(share // PIECES):
                mine = ptx.load_shared_float4(own_address + Uint32((piece * 4 + m) * 512))
                for i in cutlass.range_constexpr(4):
                    other = more[i // 2][2 * m + i % 2] * factors[i // 2][1]
                    sums.append(mine[i] * factors[i // 2][0] + other)
            # Number of the piece's first 8 dims among the rotary ones.
            number = rank * share + piece * (share // PIECES) - ((DIMS - ROPE) // 8 - DIMS // 16)
            if (args.cos != Int64(0)) & (group == 1) & (number >= 0):
                for m in cutlass.range_constexpr(share // PIECES):
                    address = tables.angles + Uint32((lane % 4 + (number + m) * 4) * 4)
                    c, s = ptx.load_shared_float(address), ptx.load_shared_float(address + ROPE * 2)
                    for r in cutlass.range_constexpr(2):
                        at = 4 * m + 2 * r
                        sums[at], sums[at + 1] = ptx.inverse_rope_pair(sums[at], sums[at + 1], c, s)
            for r in cutlass.range_constexpr(2):
                words = [
                    ptx.pack_bfloat16x2(
                        sums[4 * m + 2 * r] * whole[r], sums[4 * m + 2 * r + 1] * whole[r]
                    )
                    for m in range(4)
                ]
                # Four lanes have 32 dims of a head: transposed, each stores 16 bytes of them.
                words = transpose_quad(words, lane)
                if first + row + 8 * r < heads:
                    dim = rank * (share * 8) + piece * 32 + lane % 4 * 8
                    ptx.store_global4(line + (dim + 8 * r * DIMS) * 2, words)

    @cute.jit
    def _pair_factors(
        self, statistics: Uint32, sinks: Uint32, row: Int32, rank: Int32
    ) -> tuple[list[list[Float32]], Sequence[Float32]]:
        """Return each own head's factors on this CTA's and the other's sums; 1 / weights.

        Args:
            statistics: Statistics of both CTAs.
            sinks: Sinks of the tile.
            row: First of the thread's heads.
            rank: Rank of the CTA in the cluster.
        """
        factors, whole = [], []
        for r in cutlass.range_constexpr(2):
            pairs = [
                ptx.load_shared_float2(statistics + Uint32((p * HEADS + row + 8 * r) * 16))
                for p in range(self.plan.ctas)
            ]
            sink = ptx.load_shared_float(sinks + Uint32((row + 8 * r) * 4))
            (first, second), total = merged_total(pairs, sink)
            factors.append(
                [
                    ptx.select_float(rank, second, first),
                    ptx.select_float(rank, first, second),
                ]
            )
            whole.append(reciprocal_or_zero(total))
        return factors, whole
