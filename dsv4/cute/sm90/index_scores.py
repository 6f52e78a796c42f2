"""Scores of MXFP4 index keys and queries of 128 dims; a warpgroup has blocks of 64 entries.

Codes become integers: twice their values, times the scale of their group over the largest of the
key or query, as far as that is at least 2^-3. So a product is exact in ``wgmma`` of 8-bit integers.
Where a group that is not zero has a smaller scale, a warp multiplies its 16 keys again, groups with
scales within 2^3 at a time, and adds these products in float32.

* A thread loads, of two keys, the 32 codes of a group from memory to the registers in which they
  are the left operand: the order of the dims is another one, and queries are stored in that.
* The tensor cores multiply a block while the scores of the one before are stored and the codes of
  the next are on their way. Other warpgroups of the multiprocessor have them meanwhile.
* The logic pipe takes an instruction every other cycle, so it does what nothing else can. Further
  steps of the tensor cores make sums positive, so that their bits are subnormal float32 numbers. A
  product that saturates at 0 gives the positive part of what they would have been.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int8, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.cute import _ptx as ptx
from dsv4.cute.sm90.index_scores_plan import ScoresPlan

Value = Any
_HEADS, _DIMS, _BLOCK = 64, 128, 64
_LINE = 64  # bytes of a key's codes
_WEIGHTS = 80  # bytes of a lane's weights and a gap, so that four lanes use all banks
_EVEN = 3  # further steps, of equal bytes, by which no sum of products is negative
_SAME = 0x7F7F7F7F
_SUM = _EVEN * 32 * 127 * 127
_PRODUCT = 2.0**-22  # what a product of integers counts as, so that sums are below 1


class ScoresKernel(ScoresPlan):
    """See the module."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        sizes = [Int32(1)] * 12
        return cute.compile(
            self, *[Int64(0)] * 9, *[Int64(0)] * 3, *sizes, CUstream(0), options=options
        )

    @cute.jit
    def __call__(
        self,
        q: Int64,
        q_scales: Int64,
        weights: Int64,
        keys: Int64,
        table: Int64,
        sequences: Int64,
        visible: Int64,
        scores: Int64,
        maxima: Int64,
        token_stride: Int64,
        head_stride: Int64,
        page_stride: Int64,
        table_stride: Int32,
        score_stride: Int32,
        maxima_stride: Int32,
        heads: Int32,
        capacity: Int32,
        k: Int32,
        page_shift: Int32,
        splits: Int32,
        table_bytes: Int32,
        sequence_bytes: Int32,
        visible_bytes: Int32,
        half: Int32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        self.kernel_(
            q, q_scales, weights, keys, table, sequences, visible, scores, maxima, token_stride,
            head_stride, page_stride, table_stride, score_stride, maxima_stride, heads, capacity, k,
            page_shift, splits, table_bytes, sequence_bytes, visible_bytes, half,
        ).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=50,
        )  # fmt: skip

    @cute.kernel
    def kernel_(
        self,
        q: Int64,
        q_scales: Int64,
        weights: Int64,
        keys: Int64,
        table: Int64,
        sequences: Int64,
        visible: Int64,
        scores: Int64,
        maxima: Int64,
        token_stride: Int64,
        head_stride: Int64,
        page_stride: Int64,
        table_stride: Int32,
        score_stride: Int32,
        maxima_stride: Int32,
        heads: Int32,
        capacity: Int32,
        k: Int32,
        page_shift: Int32,
        splits: Int32,
        table_bytes: Int32,
        sequence_bytes: Int32,
        visible_bytes: Int32,
        half: Int32,
    ) -> None:
        """A warpgroup for every (token, part)."""
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        token, part = number // splits, number % splits
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        mma, more = self._product(), self._product()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        more.set(warpgroup.Field.ACCUMULATE, True)
        smem = cutlass.memory.SmemAllocator()
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Int8)
        layout = cute.tile_to_shape(atom, (_HEADS, _DIMS), (0, 1))
        shared, even = (
            smem.allocate_tensor(Int8, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for _ in range(2)
        )
        told, plain, exponents, windows = (
            Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=128).toint())
            for size in (4 * _WEIGHTS, _HEADS * _LINE, _HEADS * 4, 8)
        )
        cute.arch.griddepcontrol_launch_dependents()
        if thread < 2:
            ptx.store_shared_int(windows + Uint32(thread * 4), Int32(0))
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        shown = ptx.number_at(visible + Int64(token) * visible_bytes, visible_bytes)
        end = cutlass.min(shown, capacity)
        if end > k:
            sequence = ptx.number_at(sequences + Int64(token) * sequence_bytes, sequence_bytes)
            sequence = cutlass.max(sequence, Int32(0))
            pages = table + Int64(sequence) * table_stride * table_bytes
            count = (end + _BLOCK - 1) // _BLOCK
            where = (keys, pages, table_bytes, page_stride, page_shift, count, warp, lane)
            block = part
            page = self._page(where, block)
            words = self._fetch(where, block, page)
            page = self._page(where, block + splits)
            of_head = Int64(token) * heads
            weight, down = self._queries(
                q + token * token_stride,
                q_scales + of_head * 4,
                weights + of_head * 4,
                (Uint32(shared.iterator.toint()), told, plain, exponents, windows),
                (heads, head_stride, thread, lane),
                (Uint32(even.iterator.toint()), Uint32(half)),
            )
            slice_ = mma.get_slice(thread)
            right = [mma.make_fragment_B(slice_.partition_B(one)) for one in (shared, even)]
            left_shape = slice_.partition_shape_A((_BLOCK, _DIMS))
            left = mma.make_fragment_A(left_shape)
            line = cute.recast_tensor(left, Uint32)
            same = mma.make_fragment_A(slice_.partition_shape_A((_BLOCK, 32)))
            # Loaded: a constant would be made anew between steps, which would then wait.
            bytes_of = cute.recast_tensor(same, Uint32)
            for i, word in enumerate(ptx.load_shared(Uint32(even.iterator.toint()), 4)):
                bytes_of[i] = word
            dots = cute.make_rmem_tensor(slice_.partition_shape_C((_BLOCK, _HEADS)), Int32)
            also = ptx.load_shared(windows, 2)
            apart = (also[0] > Uint32(1)) | (also[1] != Uint32(0))
            own = (lane, Uint32(half))
            factors, again = self._expand(line, words, own)
            self._multiply((mma, more), dots, (left, same), right)
            words = self._fetch(where, block + splits, page)
            page = self._page(where, block + 2 * splits)
            to = (
                scores + Int64(token) * score_stride * 4,
                maxima + Int64(token) * maxima_stride * 4,
                end,
                down,
            )
            while block < count:
                warpgroup.wait_group(0)
                sums = self._sums(dots, weight)
                following, far = self._expand(line, words, own)
                again = again | far
                self._multiply((mma, more), dots, (left, same), right)
                words = self._fetch(where, block + 2 * splits, page)
                page = self._page(where, block + 3 * splits)
                self._store(sums, factors, to, block, (warp, lane))
                factors = following
                block += splits
            warpgroup.wait_group(0)
            if again | apart:
                queries = (plain, exponents, also, Uint32(half))
                self._correct(where, (part, splits, apart), queries, weight, to)

    def _product(self) -> cute.TiledMma:
        """64 keys by 64 heads."""
        op = warpgroup.MmaI8Op(
            Int8,
            Int8,
            Int32,
            (_BLOCK, _HEADS, 32),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        return cute.make_tiled_mma(op, (1, 1, 1))

    def _multiply(self, mma: Value, dots: Value, left: Value, right: Value) -> None:
        """Start the products of a block."""
        warpgroup.fence()
        codes, same = left
        queries, even = right
        for i in range(4):
            cute.gemm(mma[i > 0], dots, codes[None, None, i], queries[None, None, i], dots)
        for i in range(_EVEN):
            cute.gemm(mma[1], dots, same[None, None, 0], even[None, None, i], dots)
        warpgroup.commit_group()

    def _page(self, where: Value, block: Value) -> Value:
        """The page of a block, the last one's if there is none."""
        _, pages, table_bytes, _, shift, count, _, _ = where
        first = cutlass.min(block, count - 1) * _BLOCK
        return ptx.load_global(pages + Int64(first >> shift) * table_bytes)

    def _fetch(self, where: Value, block: Value, page: Value) -> Value:
        """The lane's codes of two keys, four words each, and their scales."""
        keys, _, _, page_stride, shift, count, warp, lane = where
        first = cutlass.min(block, count - 1) * _BLOCK & ((1 << shift) - 1)
        start = keys + Int64(cutlass.max(Int32(page), Int32(0))) * page_stride
        entry = first + warp * 16 + lane // 4
        codes = start + Int64(entry * _LINE + lane % 4 * 16)
        scales = start + Int64((_LINE << shift) + entry * 4)
        return [
            *ptx.load_streamed(codes, 4),
            *ptx.load_streamed(codes, 4, None, 8 * _LINE),
            ptx.load_once(scales, 0),
            ptx.load_once(scales, 32),
        ]

    @cute.jit
    def _expand(self, line: Value, words: Value, own: Value) -> Value:
        """The left operands of four steps; what both keys' scores are to be multiplied by.

        And whether a key of the warp has groups whose scales are too far apart.

        ``line``: 16 registers: by step, half of the word, key.
        """
        lane, half = own
        largests, shifts = [], []
        for h in cutlass.range_constexpr(2):
            shift, largest = self._shift(words[8 + h], lane % 4)
            low, high = self._pools(shift)
            for i in cutlass.range_constexpr(4):
                first, second = ptx.signed_codes(words[4 * h + i], low, high, half)
                line[4 * i + h], line[4 * i + 2 + h] = first, second
            largests.append(largest)
            shifts.append(shift)
        again = cute.arch.vote_any_sync(cutlass.min(shifts[0], shifts[1]) < 0)
        if again:
            # Not of groups of zeros.
            again = cute.arch.vote_any_sync(self._is_far(words, shifts))
        return largests, again

    def _some(self, words: Value) -> Value:
        """Whether a code is not zero."""
        return ((words[0] | words[1] | words[2] | words[3]) & Uint32(0x77777777)) != Uint32(0)

    def _shift(self, scales: Value, group: Value) -> Value:
        """3 less what a group's scale is below the largest, as powers of two; and the largest."""
        largest = ptx.largest_byte(scales)
        byte = ptx.byte_of(scales, group)
        return Int32(byte) - Int32(largest) + 3, largest

    def _pools(self, shift: Value) -> Value:
        """Bytes that the eight codes without a sign stand for, times a power of two."""
        shift = Uint32(cutlass.max(shift, Int32(0)))
        return Uint32(0x03020100) << shift, Uint32(0x0C080604) << shift

    @cute.jit
    def _pools_of(self, shift: Value, window: Value) -> Value:
        """The same in a window of four shifts down from 3; zeros if the shift is in another."""
        within = shift + 4 * window
        low, high = Uint32(0), Uint32(0)
        if (within >= 0) & (within < 4):
            low, high = Uint32(0x03020100) << Uint32(within), Uint32(0x0C080604) << Uint32(within)
        return low, high

    def _window(self, shift: Value) -> Value:
        """Which window a shift is in, 0 to 63."""
        return (3 - shift) >> 2

    @cute.jit
    def _bits(self, shift: Value, wanted: Value) -> Value:
        """The bit of a shift's window in two words, if it is wanted."""
        window = self._window(shift)
        bit = Uint32(1) << Uint32(window & 31)
        low, high = Uint32(0), Uint32(0)
        if wanted:
            if window < 32:
                low = bit
            else:
                high = bit
        return low, high

    def _next(self, low: Value, high: Value) -> Value:
        """The number of the lowest bit of two words, not both 0, and the words without it."""
        number = ptx.lowest_bit(low, high)
        rest = low & (low - 1)
        return number, rest, ptx.choose_word(low == Uint32(0), high & (high - 1), high)

    @cute.jit
    def _correct(
        self, where: Value, blocks: Value, queries: Value, weight: Value, to: Value
    ) -> None:
        """Store scores of the warp's keys again, of blocks that integers do not hold."""
        part, splits, apart = blocks
        count, warp, lane = where[5:]
        for block in cutlass.range(part, count, splits, unroll=1):
            words = self._fetch(where, block, self._page(where, block))
            far = self._is_far(words, [self._shift(words[8 + h], lane % 4)[0] for h in range(2)])
            if cute.arch.vote_any_sync(far) | apart:
                sums = self._sums_apart(words, queries, weight, lane)
                factors = [ptx.largest_byte(words[8 + h]) for h in range(2)]
                self._store(sums, factors, to, block, (warp, lane))

    def _is_far(self, words: Value, shifts: Value) -> Value:
        """Whether one of the lane's groups has a shift below 0 and is not zero."""
        first = (shifts[0] < 0) & self._some(words[:4])
        return first | ((shifts[1] < 0) & self._some(words[4:8]))

    @cute.jit
    def _sums_apart(self, words: Value, queries: Value, weight: Value, lane: Value) -> Value:
        """As ``_sums``, of keys or queries with groups whose scales are far apart, by the warp.

        Windows of a key's groups with windows of the queries', each an integer product.
        """
        shifts, low, high = [], Uint32(0), Uint32(0)
        for h in cutlass.range_constexpr(2):
            shift, _ = self._shift(words[8 + h], lane % 4)
            shifts.append(shift)
            bits = self._bits(shift, self._some(words[4 * h : 4 * h + 4]))
            low, high = low | bits[0], high | bits[1]
        low, high = ptx.any_bits_of_warp(low), ptx.any_bits_of_warp(high)
        first, second = Float32(0.0), Float32(0.0)
        # Few heads at a time: their sums would take registers from everything else.
        for n in cutlass.range(0, _HEADS // 8, 2, unroll=1):
            totals = self._totals((words, shifts, low, high), queries, n, lane)
            for i in cutlass.range_constexpr(2):
                pair = ptx.load_shared_float2(weight + (n + i) * 8)
                for c in cutlass.range_constexpr(2):
                    first += ptx.maximum(totals[4 * i + c], Float32(0.0)) * pair[c]
                    second += ptx.maximum(totals[4 * i + 2 + c], Float32(0.0)) * pair[c]
        return first * Float32(_PRODUCT), second * Float32(_PRODUCT)

    @cute.jit
    def _totals(self, keys: Value, queries: Value, n: Value, lane: Value) -> Value:
        """Sums over all windows for 16 heads from ``8 n`` on, in the order of ``mma``."""
        words, shifts, low, high = keys
        plain, exponents, also, half = queries
        totals = [Float32(0.0)] * 8
        while (low | high) != Uint32(0):
            window, low, high = self._next(low, high)
            line = [Uint32(0)] * 16
            for h in cutlass.range_constexpr(2):
                least, most = self._pools_of(shifts[h], window)
                for i in cutlass.range_constexpr(4):
                    both = ptx.signed_codes(words[4 * h + i], least, most, half)
                    line[4 * i + h], line[4 * i + 2 + h] = both
            lower, upper = also
            while (lower | upper) != Uint32(0):
                other, lower, upper = self._next(lower, upper)
                # Of the largest scales; 0 below 2^-126.
                exponent = cutlass.max(127 - 4 * (window + other), Int32(0))
                factor = ptx.float_of(Uint32(exponent) << Uint32(23))
                for m in cutlass.range_constexpr(2):
                    head = 8 * (n + m) + lane // 4
                    scales = Uint32(ptx.load_shared_int(exponents + Uint32(head * 4)))
                    shift, _ = self._shift(scales, lane % 4)
                    least, most = self._pools_of(shift, other)
                    right = ptx.load_shared(plain + Uint32(head * _LINE + lane % 4 * 16), 4)
                    four: Value = [Int32(0)] * 4
                    for i in cutlass.range_constexpr(4):
                        codes = ptx.signed_codes(right[i], least, most, half)
                        four = ptx.mma_m16n8k32(four, line[4 * i : 4 * i + 4], codes)
                    for c in cutlass.range_constexpr(4):
                        one = ptx.float_of_int(four[c])
                        totals[4 * m + c] = ptx.multiply_add_float(one, factor, totals[4 * m + c])
        return totals

    @cute.jit
    def _queries(
        self, q: Value, q_scales: Value, weights: Value, rooms: Value, who: Value, more: Value
    ) -> Value:
        """Put the heads' codes in shared memory; the lane's weights, and what they were divided by.

        Half of a head for each thread.
        """
        shared, told, plain, exponents, windows = rooms
        heads, head_stride, thread, lane = who
        even, half = more
        for i in cutlass.range_constexpr(_DIMS * _HEADS // 16 // self.threads):
            at = even + Uint32((i * self.threads + thread) * 16)
            ptx.store_shared4(at, [Uint32(_SAME)] * 4)
        head, side = thread // 2, thread % 2
        words, scales, weight = [Uint32(0)] * 8, Uint32(0), Float32(0.0)
        if head < heads:
            place = q + head * head_stride + Int64(side * 32)
            words = [*ptx.load_streamed(place, 4), *ptx.load_streamed(place, 4, None, 16)]
            scales = ptx.load_global(q_scales + Int64(head) * 4)
            weight = ptx.load_global_float(weights + Int64(head) * 4)
        for g in cutlass.range_constexpr(2):
            shift, largest = self._shift(scales, side * 2 + g)
            low, high = self._pools(shift)
            bits = self._bits(shift, self._some(words[4 * g : 4 * g + 4]))
            for i in cutlass.range_constexpr(2):
                ptx.set_shared_bits(windows + Uint32(i * 4), bits[i])
            ptx.store_shared4(
                plain + Uint32(head * _LINE + side * 32 + g * 16), words[4 * g : 4 * g + 4]
            )
            for i in cutlass.range_constexpr(4):
                both = ptx.signed_codes(words[4 * g + i], low, high, half)
                for h in cutlass.range_constexpr(2):
                    chunk = (2 * i + h) ^ (head % 8)
                    at = shared + Uint32(head * _DIMS + chunk * 16 + (side * 2 + g) * 4)
                    ptx.store_shared_int(at, Int32(both[h]))
        weight = weight * ptx.e8m0(largest)
        if side == 0:
            ptx.store_shared_float(told + Uint32(head * 4), weight)
            ptx.store_shared_int(exponents + Uint32(head * 4), Int32(scales))
        ptx.fence_shared()
        cute.arch.sync_threads()
        top = Int32(1)
        for i in cutlass.range_constexpr(2):
            two = ptx.load_shared_int(told + Uint32((lane + 32 * i) * 4))
            top = cutlass.max(top, (two >> 23) & 255)
        top = cutlass.min(Int32(ptx.highest_of_warp(Uint32(top))), Int32(252))
        up = ptx.float_of(Uint32(253 - top) << Uint32(23))
        weight = weight * up
        # Where the lanes that need it find four in a row.
        cute.arch.sync_threads()
        if side == 0:
            ptx.store_shared_float(told + Uint32(self._line_of(head)), weight)
        cute.arch.sync_threads()
        return told + Uint32(lane % 4 * _WEIGHTS), ptx.float_of(Uint32(top) << Uint32(23))

    def _line_of(self, head: Value) -> Value:
        """Where a head's weight is: 16 of each lane of four, heads 2 j and 2 j + 1 of every 8."""
        return head // 2 % 4 * _WEIGHTS + (head // 8 * 2 + head % 2) * 4

    def _sums(self, dots: Value, weight: Value) -> Value:
        """Of both keys the sums over the lane's heads."""
        sums = [Float32(0.0)] * 4
        for n in range(8):
            if n % 2 == 0:
                four = ptx.load_shared_float4(weight + n * 8)
            for h in range(2):
                for c in range(2):
                    one = 2 * h + c
                    part = ptx.positive_part(
                        dots[4 * n + one], _PRODUCT * 2.0**149, -_SUM * _PRODUCT
                    )
                    sums[one] = ptx.multiply_add_float(part, four[n % 2 * 2 + c], sums[one])
        return [sums[0] + sums[1], sums[2] + sums[3]]

    @cute.jit
    def _store(self, sums: Value, factors: Value, to: Value, block: Value, who: Value) -> None:
        """Keys of the scores of a block, and their groups' maxima."""
        scores, maxima, end, down = to
        warp, lane = who
        for step in cutlass.range_constexpr(2):
            sums = [one + cute.arch.shuffle_sync_bfly(one, 1 << step) for one in sums]
        # The first two of four lanes have a key each.
        second = lane % 2 == 1
        total = ptx.choose(second, sums[1], sums[0])
        factor = ptx.e8m0(ptx.choose_word(second, factors[1], factors[0]))
        key = ptx.ordered(total * Float32(2.0**-7 / _PRODUCT) * down * factor)
        row = warp * 16 + lane // 4 + lane % 2 * 8
        entry = block * _BLOCK + row
        if entry >= end:
            key = Uint32(0)
        if (lane % 4 < 2) & (entry < end):
            ptx.store_global(scores + Int64(entry) * 4, key)
        if cutlass.const_expr(self.group == 16):
            highest = ptx.highest_of_warp(key)
            if (lane == 0) & (entry < end):
                ptx.store_global(maxima + Int64(entry >> 4) * 4, highest)
        if cutlass.const_expr(self.group == 8):
            mine = ptx.choose_word(second, Uint32(0), key)
            other = ptx.highest_of_warp(key - mine)
            highest = ptx.highest_of_warp(mine)
            if second:
                highest = other
            if (lane < 2) & (entry < end):
                ptx.store_global(maxima + Int64(entry >> 3) * 4, highest)
