"""Logits of keys or queries whose groups have scales too far apart for one integer product.

Groups of a key, and of a query, are split into windows of scales within 2^3 of each other. A
product of a window of the key's groups with one of the query's is exact in integers
(``mma.m16n8k32`` of signed bytes); a warp adds these products in float32, for its 16 keys and 16
heads at a time. Groups that are zero have no window. Keys and maxima that the warp stored before
are replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.indexer_logits_plan import BLOCK, CODE_BYTES, HEADS
from dsv4.cute.sm90.indexer_logits_tile import (
    UNIT,
    Index,
    IndexerLogitsTile,
    KeyPair,
    Lane,
    Output,
    PairScores,
)

_FEW_HEADS = 2  # tiles of 8 heads at a time: more sums would take registers from everything else


class SequencePages(NamedTuple):
    """A sequence's entries in the cache.

    Attributes:
        table: Address of its page numbers.
        table_bytes: Bytes of a page number.
        cache: Address of page 0.
        page_stride: Bytes from one page to the next.
        block_shift: log2 of a page's blocks.
        last: Number of the last block; later blocks are read as that one.
    """

    table: Int64
    table_bytes: Int32
    cache: Int64
    page_stride: Int32
    block_shift: Int32
    last: Int32


class Blocks(NamedTuple):
    """Blocks of entries of a warpgroup: two neighbours of every ``step``.

    Attributes:
        first: Number of the first block.
        step: From one pair to the next.
        end: Blocks that the token sees.
    """

    first: Int32
    step: Int32
    end: Int32


class Windows(NamedTuple):
    """A set of windows, as bits of two words.

    Attributes:
        low: Windows 0 to 31.
        high: Windows 32 to 63.
    """

    low: Uint32
    high: Uint32


class QueryCodes(NamedTuple):
    """A token's queries as they came.

    Attributes:
        codes: Shared-memory address of packed codes, a line of 64 bytes for each head.
        scales: Shared-memory address of four scale bytes for each head.
        windows: Windows of all heads' groups.
        shift16: See ``IndexerLogitsArgs``.
    """

    codes: Uint32
    scales: Uint32
    windows: Windows
    shift16: Uint32


class IndexerLogitsCorrection(IndexerLogitsTile):
    """Device functions that multiply such keys again."""

    def _page(self, pages: SequencePages, block: Index) -> Uint32:
        """Load the page number of a block, the last one's if there is none."""
        return ptx.load_global(self._page_address(pages, block))

    def _page_address(self, pages: SequencePages, block: Index) -> Int64:
        """Return where that number is; its low word, if it is an int64."""
        number = cutlass.min(block, pages.last) >> pages.block_shift
        return ptx.element_address(pages.table, number, pages.table_bytes)

    def _load_keys(self, pages: SequencePages, block: Index, who: Lane) -> KeyPair:
        """Load the lane's share of two keys of a block from global memory."""
        page = cutlass.max(Int32(self._page(pages, block)), Int32(0))
        start = ptx.element_address(pages.cache, page, pages.page_stride)
        within = cutlass.min(block, pages.last) & ((1 << pages.block_shift) - 1)
        first = within * BLOCK + who.warp * 16 + who.lane // 4
        codes = start + Int64(first * CODE_BYTES + who.lane % 4 * 16)
        scales = start + (Int64(BLOCK * CODE_BYTES) << Int64(pages.block_shift)) + Int64(first * 4)
        return KeyPair(
            ptx.load_streaming(codes, 4),
            ptx.load_streaming(codes, 4, 8 * CODE_BYTES),
            ptx.load_streaming_word(scales, 0),
            ptx.load_streaming_word(scales, 32),
        )

    @cute.jit
    def _correct(
        self,
        pages: SequencePages,
        blocks: Blocks,
        all_keys: cutlass.Boolean,
        queries: QueryCodes,
        weights: Uint32,
        output: Output,
        who: Lane,
    ) -> None:
        """Store logits of the warp's keys again, in blocks that integers do not hold. One warp.

        Args:
            pages: Where keys are.
            blocks: The warpgroup's blocks.
            all_keys: Whether queries have distant scales, which concern every key.
            queries: Queries as they came.
            weights: Shared-memory address of the lane's weights.
            output: Where results go.
            who: This thread.
        """
        for pair in cutlass.range(blocks.first, blocks.end, blocks.step, unroll=1):
            for block in cutlass.range(pair, cutlass.min(pair + 2, blocks.end), 1, unroll=1):
                keys = self._load_keys(pages, block, who)
                shifts = [self._shift(scales, who.lane % 4)[0] - 1 for scales in keys.scales]
                if cute.arch.vote_any_sync(self._has_distant(keys, shifts)) | all_keys:
                    sums = self._sum_windows(keys, queries, weights, who.lane)
                    low, high = [ptx.max_of_bytes(scales) for scales in keys.scales]
                    factors = Uint32(low) | (Uint32(high) << Uint32(16))
                    # ``_store`` takes two blocks; here the second one is not stored.
                    alone = output._replace(end=cutlass.min(output.end, (block + 1) * BLOCK))
                    self._store(PairScores([*sums, *sums], factors, factors, block), alone, who)

    def _has_distant(self, keys: KeyPair, shifts: list[Int32]) -> cutlass.Boolean:
        """Return whether one of the lane's groups has a shift below 0 and is not zero."""
        first = (shifts[0] < 0) & self._is_nonzero(keys.first)
        return first | ((shifts[1] < 0) & self._is_nonzero(keys.second))

    @cute.jit
    def _sum_windows(
        self, keys: KeyPair, queries: QueryCodes, weights: Uint32, lane: Int32
    ) -> tuple[Float32, Float32]:
        """One warp: like ``_sum_heads``, for keys or queries with distant scales."""
        # The union over the warp, because all lanes take part in every ``mma``.
        shifts, low, high = [], Uint32(0), Uint32(0)
        for h in cutlass.range_constexpr(2):
            shift, _ = self._shift(keys.scales[h], lane % 4)
            shifts.append(shift)
            bits = self._window_bit(shift, self._is_nonzero(keys.codes[h]))
            low, high = low | bits[0], high | bits[1]
        windows = Windows(ptx.warp_or(low), ptx.warp_or(high))
        first, second = Float32(0.0), Float32(0.0)
        # Rolled: unrolled, all tiles' sums would be in registers at a time.
        for n in cutlass.range(0, HEADS // 8, _FEW_HEADS, unroll=1):
            totals = self._window_totals(keys, shifts, windows, queries, n, lane)
            for i in cutlass.range_constexpr(_FEW_HEADS):
                pair = ptx.load_shared_float2(weights + (n + i) * 8)
                for c in cutlass.range_constexpr(2):
                    first += ptx.max_float(totals[4 * i + c], Float32(0.0)) * pair[c]
                    second += ptx.max_float(totals[4 * i + 2 + c], Float32(0.0)) * pair[c]
        # As integers count, of keys whose largest shift is less by one.
        unit = Float32(UNIT)
        return first * Float32(0.5) * unit, second * Float32(0.5) * unit

    @cute.jit
    def _window_totals(
        self,
        keys: KeyPair,
        shifts: list[Int32],
        key_windows: Windows,
        queries: QueryCodes,
        n: Index,
        lane: Int32,
    ) -> list[Float32]:
        """Sums over all pairs of windows for 16 heads from ``8 n`` on, as ``mma`` orders them."""
        totals = [Float32(0.0)] * 8
        low, high = key_windows.low, key_windows.high
        while (low | high) != Uint32(0):
            window, low, high = self._next_window(low, high)
            # Left operand of four steps of K; zeros where a group is in another window.
            left = [Uint32(0)] * 16
            for h in cutlass.range_constexpr(2):
                least, most = self._window_tables(shifts[h], window)
                for i in cutlass.range_constexpr(4):
                    codes = keys.codes[h][i]
                    both = ptx.e2m1_to_signed_bytes(codes, least, most, queries.shift16)
                    left[4 * i + h], left[4 * i + 2 + h] = both
            lower, upper = queries.windows.low, queries.windows.high
            while (lower | upper) != Uint32(0):
                other, lower, upper = self._next_window(lower, upper)
                # A window is 2^-4 of the one before it, for both operands; 0 below 2^-126.
                exponent = cutlass.max(127 - 4 * (window + other), Int32(0))
                factor = ptx.bits_to_float(Uint32(exponent) << Uint32(23))
                for m in cutlass.range_constexpr(_FEW_HEADS):
                    head = 8 * (n + m) + lane // 4
                    scales = Uint32(ptx.load_shared_int(queries.scales + Uint32(head * 4)))
                    shift, _ = self._shift(scales, lane % 4)
                    least, most = self._window_tables(shift, other)
                    line = queries.codes + Uint32(head * CODE_BYTES + lane % 4 * 16)
                    right = ptx.load_shared(line, 4)
                    four: Sequence[Int32] = [Int32(0)] * 4
                    for i in cutlass.range_constexpr(4):
                        both = ptx.e2m1_to_signed_bytes(right[i], least, most, queries.shift16)
                        four = ptx.mma_m16n8k32_s8(four, left[4 * i : 4 * i + 4], both)
                    for c in cutlass.range_constexpr(4):
                        value = ptx.int_to_float(four[c])
                        totals[4 * m + c] = ptx.fma_float(value, factor, totals[4 * m + c])
        return totals

    def _next_window(self, low: Uint32, high: Uint32) -> tuple[Int32, Uint32, Uint32]:
        """The number of the lowest bit of two words, not both 0, and the words without it."""
        number = ptx.find_lowest_bit(low, high)
        rest = low & (low - 1)
        return number, rest, ptx.select_word(low == Uint32(0), high & (high - 1), high)

    @cute.jit
    def _window_tables(self, shift: Int32, window: Int32) -> tuple[Uint32, Uint32]:
        """Bytes of the eight codes without a sign for a shift in a window; zeros in another."""
        within = shift + 4 * window
        low, high = Uint32(0), Uint32(0)
        if (within >= 0) & (within < 4):
            low, high = Uint32(0x03020100) << Uint32(within), Uint32(0x0C080604) << Uint32(within)
        return low, high
