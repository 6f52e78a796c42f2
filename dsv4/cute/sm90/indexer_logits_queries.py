"""Queries of the indexer-logits kernel: their integers, bias and weights in shared memory.

The threads of a CTA that multiply share its token's queries: four or eight of them have a head.
Rows of the queries and of the bias step's right operand are 128 bytes, swizzled; dims are in the
order in which lanes have those of keys (``indexer_logits_tile``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.indexer_logits_plan import CODE_BYTES, DIMS, HEADS, IndexerLogitsArgs
from dsv4.cute.sm90.indexer_logits_tile import WEIGHT_BYTES, IndexerLogitsTile

QUERIES_READY = 1  # named barrier of the threads that multiply


class Ring(NamedTuple):
    """A warpgroup's stages.

    Attributes:
        stages: Shared-memory address of the first stage.
        barriers: Address of its mbarriers: ``full``, and 8 bytes later ``empty``.
    """

    stages: Uint32
    barriers: Uint32


class SharedMemory(NamedTuple):
    """The layout of shared memory; numbers are addresses.

    Attributes:
        queries: Queries as integers, ``[64 heads, 128 dims]``, swizzled for ``wgmma``.
        bias: Right operand of the bias step, of the same layout; the first 32 columns are read.
        bias_left: Its left operand, ``[64 entries, 32]``.
        weights: Weights of the heads, as lanes want them (``_weight_offset``).
        codes: Queries as packed codes, 64 bytes for each head.
        scales: Their scales, four bytes for each head.
        windows: Two words: windows of all groups of queries. A third: -1.
        ring: Stages of all warpgroups.
    """

    queries: cute.Tensor
    bias: cute.Tensor
    bias_left: cute.Tensor
    weights: Uint32
    codes: Uint32
    scales: Uint32
    windows: Uint32
    ring: Ring


class QueryShare(NamedTuple):
    """A thread's share of a head's query.

    Attributes:
        codes: Some words of its codes.
        scales: All its scales, a byte each.
        weight: The head's weight.
    """

    codes: list[Uint32]
    scales: Uint32
    weight: Float32


def tensor_address(tensor: Any) -> Uint32:
    """The address of a tensor in shared memory."""
    return Uint32(tensor.iterator.toint())


class IndexerLogitsQueries(IndexerLogitsTile):
    """Device functions that prepare the right operands."""

    @cute.jit
    def _load_query(self, args: IndexerLogitsArgs, token: Int32, thread: Int32) -> QueryShare:
        """Load a thread's share of a head, 2 or 4 words of codes; zeros without such a head."""
        first_head = Int64(token) * args.heads
        q = args.q + token * args.token_stride
        q_scales, head_weights = args.q_scales + first_head * 4, args.weights + first_head * 4
        sharers = self.plan.mma_threads // HEADS
        head, side = thread // sharers, thread % sharers
        count = CODE_BYTES // 4 // sharers
        words, scales, weight = [Uint32(0)] * count, Uint32(0), Float32(0.0)
        if head < args.heads:
            address = q + head * args.head_stride + Int64(side * (4 * count))
            width = min(4, count)
            words = [
                word
                for first in range(0, count, width)
                for word in ptx.load_streaming(address, width, 4 * first)
            ]
            scales = ptx.load_global(q_scales + Int64(head) * 4)
            weight = ptx.load_global_float(head_weights + Int64(head) * 4)
        return QueryShare(words, scales, weight)

    @cute.jit
    def _prepare_queries(
        self,
        share: QueryShare,
        shared: SharedMemory,
        thread: Int32,
        lane: Int32,
        shift16: Uint32,
    ) -> tuple[Uint32, Float32]:
        """Put the heads' queries and weights in shared memory. The threads that multiply.

        A weight is multiplied by the largest scale of its head's query. Then all are divided by a
        power of two, so that they are below 1.

        Returns:
            The address of the lane's weights, and what weights were divided by.
        """
        scales, weight = share.scales, share.weight
        sharers = self.plan.mma_threads // HEADS
        head, side = thread // sharers, thread % sharers
        queries, bias = tensor_address(shared.queries), tensor_address(shared.bias)
        total, bits = Int32(0), [Uint32(0)] * 2
        for n, word in enumerate(share.codes):
            number = side * len(share.codes) + n
            group = number // 4
            if cutlass.const_expr(n % 4 == 0):
                shift, largest = self._shift(scales, group)
                low, high = self._query_tables(shift)
                bit = self._window_bit(shift, self._is_nonzero(share.codes[n : n + 4]))
                bits = [word_bits | more for word_bits, more in zip(bits, bit, strict=True)]
            ptx.store_shared_int(shared.codes + Uint32(head * CODE_BYTES + number * 4), Int32(word))
            both = ptx.e2m1_to_signed_bytes(word, low, high, shift16)
            for h in cutlass.range_constexpr(2):
                total = ptx.add_sum_of_bytes(both[h], total)
                # Chunks of 16 bytes are swizzled by the row. Those of a group of dims are the same
                # four bytes of each of eight chunks, as keys' fragments have them.
                chunk = (number % 4 * 2 + h) ^ (head % 8)
                target = queries + Uint32(head * DIMS + chunk * 16 + group * 4)
                ptx.store_shared_int(target, Int32(both[h]))
        of_warp = [ptx.warp_or(word_bits) for word_bits in bits]
        if lane == 0:
            for i in cutlass.range_constexpr(2):
                ptx.reduce_or_shared(shared.windows + Uint32(i * 4), of_warp[i])
        for step in cutlass.range_constexpr(sharers.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, 1 << step)
        most, rest = self._bias_bytes(total)
        words = [Uint32(most & 255) * Uint32(0x01010100)] * 4
        if side == 0:
            words = [words[0] | Uint32(rest & 255), *words[1:]]
        if side < 2:
            target = bias + Uint32(head * DIMS + (side ^ (head % 8)) * 16)
            ptx.store_shared4(target, words)
        weight = weight * ptx.e8m0_to_float(largest)
        if side == 0:
            ptx.store_shared_float(shared.weights + Uint32(head * 4), weight)
            ptx.store_shared_int(shared.scales + Uint32(head * 4), Int32(scales))
        # ``wgmma`` reads the operands through the async proxy.
        ptx.fence_proxy_async_shared()
        # Operands and weights, in the order of heads, are complete.
        cute.arch.barrier(barrier_id=QUERIES_READY, number_of_threads=self.plan.mma_threads)
        top = Int32(1)
        for i in cutlass.range_constexpr(2):
            weight_bits = ptx.load_shared_int(shared.weights + Uint32((lane + 32 * i) * 4))
            top = cutlass.max(top, (weight_bits >> 23) & 255)
        top = cutlass.min(Int32(ptx.warp_max(Uint32(top))), Int32(252))
        weight = weight * ptx.bits_to_float(Uint32(253 - top) << Uint32(23))
        # All have read the weights, which are stored again where a lane finds four in a row.
        cute.arch.barrier(barrier_id=QUERIES_READY, number_of_threads=self.plan.mma_threads)
        if side == 0:
            ptx.store_shared_float(shared.weights + Uint32(self._weight_offset(head)), weight)
        cute.arch.barrier(barrier_id=QUERIES_READY, number_of_threads=self.plan.mma_threads)
        weights = shared.weights + Uint32(lane % 4 * WEIGHT_BYTES)
        return weights, ptx.bits_to_float(Uint32(top) << Uint32(23))

    def _query_tables(self, shift: Int32) -> tuple[Uint32, Uint32]:
        """Bytes that the eight codes without a sign stand for, times a power of two."""
        left = Uint32(cutlass.max(shift, Int32(0)))
        return Uint32(0x03020100) << left, Uint32(0x0C080604) << left
