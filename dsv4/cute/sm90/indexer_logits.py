"""Scores of MXFP4 index keys and queries of 128 dims; a warpgroup has blocks of 64 entries.

Codes become integers: twice their values, times the scale of their group over the largest of the
key or query, as far as that is at least 2^-2 (of a key) or 2^-3 (of a query). So a product is exact
in ``wgmma`` of 8-bit integers. Where a group that is not zero has a smaller scale, a warp
multiplies its 16 keys again, groups with scales within 2^3 at a time, and adds these in float32.

* For each warpgroup a further warp has bulk copies bring its blocks to shared memory, ``stages``
  ahead: registers have no room for as many bytes on their way as the memory's latency wants.
* A thread takes, of two keys, the 32 codes of a group to the registers in which they are the left
  operand: the order of the dims is another one, and queries are stored in that.
* Bytes of keys have 48 added, so that they are positive: one byte permutation looks up those of
  positive codes, one those of negative codes, either 0 in place of the others, and their sum is the
  operand. A further step of the tensor cores takes away what 48 adds to a head's sums.
* While products of a block are on their way, a warpgroup expands the codes of the next to other
  registers; scores are stored meanwhile too, whose steps wait for one another.
* The bits of a positive sum are those of a subnormal float32 number, those of a negative one NaN: a
  saturating product converts the one and makes the other 0, and leaves the logic pipe alone.
* The logic pipe takes an instruction every other cycle and has most of them, so tables and
  complements are products. Shifts are not: upper halves of products take more time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int8, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.indexer_logits_plan import (
    INDEXER_LOGITS_ABI,
    STAGE,
    IndexerLogitsArgs,
    IndexerLogitsPlan,
)

Value = Any
_HEADS, _DIMS, _BLOCK = 64, 128, 64
_LINE = 64  # bytes of a key's codes
_COPYING = 32  # registers of a thread that copies
_MEET = 1  # named barrier of the warps that multiply
_WEIGHTS = 80  # bytes of a lane's weights and a gap, so that four lanes use all banks
_MIDDLE = 48  # what is added to a key's integers, at most 48 in magnitude
_SAME = 0xF0F0F030  # four left bytes of the further step: 5, 5, 5 and 1 times _MIDDLE
_UNITS = 24 * 5  # of a step's 32 such bytes, without those that are _MIDDLE
_UNIT = 2.0**-22  # what an integer counts as in a head's sum, at most 1
# Of sums: integers are 2^7 times their values; weights are halved.
_DOWN = 2.0 ** (-7 + 1) / _UNIT


class IndexerLogitsKernel(PlannedKernel):
    """See the module."""

    abi = INDEXER_LOGITS_ABI
    plan: IndexerLogitsPlan

    @cute.jit
    def __call__(self, args: IndexerLogitsArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.indexer`` launches the cubin itself."""
        self.kernel(args).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.plan.ctas_per_sm,
            preferred_smem_carveout=50,
        )

    @cute.kernel
    def kernel(self, args: IndexerLogitsArgs) -> None:
        """A block for every (token, ``splits`` of it), of whose parts each warpgroup has one."""
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        token = Int32(ptx.mulhi_u32(Uint32(2 * number), Uint32(args.inverse_splits)))
        part = (number - token * args.splits) * self.plan.warpgroups
        registers, memory = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM
        mma, more, further = (self._product(left) for left in (registers, registers, memory))
        mma.set(warpgroup.Field.ACCUMULATE, False)
        more.set(warpgroup.Field.ACCUMULATE, True)
        further.set(warpgroup.Field.ACCUMULATE, True)
        smem = cutlass.memory.SmemAllocator()
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Int8)
        layout = cute.tile_to_shape(atom, (_HEADS, _DIMS), (0, 1))
        shared, less = (
            smem.allocate_tensor(Int8, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for _ in range(2)
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, Uint8)
        layout = cute.tile_to_shape(atom, (_BLOCK, 32), (0, 1))
        flat = smem.allocate_tensor(Uint8, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        told, plain, exponents, windows = (
            Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=128).toint())
            for size in (4 * _WEIGHTS, _HEADS * _LINE, _HEADS * 4, 12)
        )
        ring = self._ring(smem)
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            for i in cutlass.range_constexpr(self.plan.warpgroups * self.plan.stages):
                ptx.mbarrier_init(ring[1] + 16 * i, 1)
                ptx.mbarrier_init(ring[1] + (16 * i + 8), 128)
            ptx.fence_mbarrier_init()
        if thread < 2:
            ptx.store_shared_int(windows + Uint32(thread * 4), Int32(0))
        if thread < 128:
            at = Uint32(flat.iterator.toint()) + Uint32(thread * 16)
            ptx.store_shared4(at, [Uint32(_SAME)] * 4)
            ptx.fence_proxy_async_shared()
        if thread == 2:
            ptx.store_shared_int(windows + 8, Int32(-1))
        cute.arch.sync_threads()
        # What is read first, one thing after another, is then in the level-2 cache.
        if thread < args.heads:
            ptx.prefetch_l2(args.q + token * args.token_stride + thread * args.head_stride)
        if thread == 0:
            ptx.prefetch_l2(args.visible + Int64(token) * args.visible_bytes)
            ptx.prefetch_l2(args.sequences + Int64(token) * args.sequence_bytes)
        step = 2 * self.plan.warpgroups * args.splits
        if warp >= self.plan.mma_threads // 32:
            # As if the token's sequence had its number, which is often so.
            row = (
                args.table
                + Int64(cutlass.min(token, args.table_rows - 1))
                * args.table_stride
                * args.table_bytes
            )
            bits = args.page_shift - 6
            likely = (
                (row, args.table_bytes, args.cache, args.page_stride),
                bits,
                (args.capacity - 1) >> 6,
            )
            block = (
                2 * (part + warp - self.plan.mma_threads // 32) + (lane >> 1) * step + (lane & 1)
            )
            ptx.prefetch_l2(self._place_of_page(likely, block))
        cute.arch.griddepcontrol_wait()
        shown = ptx.load_index_saturated(
            args.visible + Int64(token) * args.visible_bytes, args.visible_bytes
        )
        end = cutlass.min(shown, args.capacity)
        sequence = ptx.load_index_saturated(
            args.sequences + Int64(token) * args.sequence_bytes, args.sequence_bytes
        )
        sequence = cutlass.max(sequence, Int32(0))
        if end > args.k:
            pages = args.table + Int64(sequence) * args.table_stride * args.table_bytes
            count = (end + _BLOCK - 1) >> 6
            pool = (pages, args.table_bytes, args.cache, args.page_stride)
            keys_of = (pool, args.page_shift - 6, count - 1)
            if warp >= 4 * self.plan.warpgroups:
                cute.arch.setmaxregister_decrease(_COPYING)
                group = warp - 4 * self.plan.warpgroups
                if group < self.plan.warpgroups:
                    blocks = (2 * (part + group), step, count)
                    self._produce(self._stages(ring, group), keys_of, blocks, lane)
            else:
                cute.arch.setmaxregister_increase(self.plan.registers)
                group, warp = warp >> 2, warp & 3
                mine, block = self._stages(ring, group), 2 * (part + group)
                of_head = Int64(token) * args.heads
                asked = self._ask(
                    args.q + token * args.token_stride,
                    args.q_scales + of_head * 4,
                    args.weights + of_head * 4,
                    (args.heads, args.head_stride, thread),
                )
                rooms = (Uint32(one.iterator.toint()) for one in (shared, less))
                weight, down = self._queries(
                    asked,
                    (*rooms, told, plain, exponents, windows),
                    (thread, lane),
                    Uint32(args.shift16),
                )
                slice_ = mma.get_slice(thread % 128)
                right = [mma.make_fragment_B(slice_.partition_B(one)) for one in (shared, less)]
                left_shape = slice_.partition_shape_A((_BLOCK, _DIMS))
                left, other = [mma.make_fragment_A(left_shape) for _ in range(2)]
                line, other_line = (
                    cute.recast_tensor(left, Uint32),
                    cute.recast_tensor(other, Uint32),
                )
                same = further.make_fragment_A(further.get_slice(thread % 128).partition_A(flat))
                dots = cute.make_rmem_tensor(slice_.partition_shape_C((_BLOCK, _HEADS)), Int32)
                own = (lane, Uint32(ptx.load_shared_int(windows + 8)))
                products, taken = (mma, more, further), Int32(0)
                reader = (warp, lane, own[1] + Uint32(1))  # 0, which the compiler does not know
                self._arrived(mine, taken)
                words = self._take(mine, taken, reader)
                factors, far = self._expand(line, words, own)
                self._multiply(products, dots, (left, same), right)
                self._arrived(mine, taken + 1)
                words = self._take(mine, taken + 1, reader)
                second, below = self._expand(other_line, words, own)
                far = ptx.max_u16x2(far, below)
                to = (
                    args.scores + Int64(token) * args.score_stride * 4,
                    args.maxima + Int64(token) * args.maxima_stride * 4,
                    end,
                    down,
                )
                # The compiler moves a wait for products to before what is independent of it, and
                # starts of products to among what follows, but neither past a branch: there is one
                # on either side of where codes are expanded.
                while block < count:
                    warpgroup.wait_group(0)
                    sums = self._sums(dots, weight)
                    self._multiply(products, dots, (other, same), right)
                    block += step
                    following, after = factors, second
                    if block < count:
                        self._arrived(mine, taken + 2)
                        words = self._take(mine, taken + 2, reader)
                        following, below = self._expand(line, words, own)
                        far = ptx.max_u16x2(far, below)
                    warpgroup.wait_group(0)
                    sums += self._sums(dots, weight)
                    pair = (sums, (factors, second), to, block - step, (warp, lane))
                    if block < count:
                        self._multiply(products, dots, (left, same), right)
                        self._arrived(mine, taken + 3)
                        words = self._take(mine, taken + 3, reader)
                        after, below = self._expand(other_line, words, own, self._storing(*pair))
                        far = ptx.max_u16x2(far, below)
                    else:
                        self._store(*pair)
                    factors, second = following, after
                    taken += 2
                warpgroup.wait_group(0)
                also = ptx.load_shared(windows, 2)
                apart = (also[0] > Uint32(1)) | (also[1] != Uint32(0))
                if cute.arch.vote_any_sync(self._is_below(far)) | apart:
                    queries = (plain, exponents, also, Uint32(args.shift16))
                    again = (2 * (part + group), step, count, apart)
                    self._correct(keys_of, again, queries, weight, to, (warp, lane))

    def _ring(self, smem: Value) -> Value:
        """Addresses of all stages, by warpgroup, and of their barriers.

        Each has two: that of its bytes, and that of the threads that have read them.
        """
        count = self.plan.warpgroups * self.plan.stages
        return tuple(
            Uint32(smem.allocate_array(cutlass.Uint8, count * size, byte_alignment=128).toint())
            for size in (STAGE, 16)
        )

    def _stages(self, ring: Value, group: Value) -> Value:
        """The same of a warpgroup."""
        return ring[0] + Uint32(group * (self.plan.stages * STAGE)), ring[1] + Uint32(
            group * (self.plan.stages * 16)
        )

    @cute.jit
    def _produce(self, mine: Value, keys_of: Value, blocks: Value, lane: Value) -> None:
        """Copy a warpgroup's blocks to its stages; by a warp, each lane every 32nd block.

        A warpgroup takes two blocks, even if it has none, and two for every further pair.
        """
        (_, _, keys, page_stride), bits, last = keys_of
        first, step, count = blocks
        stages, barriers = mine
        place = Int32(0)
        # Pages are known 32 blocks before.
        page = self._page(keys_of, first + (lane >> 1) * step + (lane & 1))
        while (place < 2) | (first + (place >> 1) * step < count):
            block = first + ((place + lane) >> 1) * step + (lane & 1)
            later = self._page(keys_of, block + 16 * step)
            within = cutlass.min(block, last) & ((1 << bits) - 1)
            start = ptx.element_address(keys, cutlass.max(Int32(page), Int32(0)), page_stride)
            codes = start + Int64(within * (_BLOCK * _LINE))
            scales = start + (Int64(_BLOCK * _LINE) << Int64(bits)) + Int64(within * (_BLOCK * 4))
            turn = Int32(0)
            while (turn < 32) & ((place < 2) | (first + (place >> 1) * step < count)):
                stage = place & self.plan.stages - 1
                room, full = stages + Uint32(stage * STAGE), barriers + Uint32(stage * 16)
                ptx.mbarrier_wait(full + 8, ((place >> self.plan.stages.bit_length() - 1) & 1) ^ 1)
                if lane == turn:
                    ptx.mbarrier_arrive_expect_tx(full, STAGE)
                    ptx.bulk_copy_to_shared(room, codes, _BLOCK * _LINE, full)
                    ptx.bulk_copy_to_shared(room + _BLOCK * _LINE, scales, _BLOCK * 4, full)
                turn += 1
                place += 1
            page = later

    @cute.jit
    def _arrived(self, mine: Value, place: Value) -> None:
        """Wait for the bytes of the block at a place of the warpgroup's."""
        full = mine[1] + Uint32((place & self.plan.stages - 1) * 16)
        ptx.mbarrier_wait(full, (place >> self.plan.stages.bit_length() - 1) & 1)

    def _take(self, mine: Value, place: Value, who: Value) -> Value:
        """The lane's codes of two keys of the block, and scales; the stage is given back."""
        stages, barriers = mine
        warp, lane, none = who
        stage = place & self.plan.stages - 1
        at = stages + Uint32(stage * STAGE)
        codes = at + Uint32(warp * (16 * _LINE) + lane * 16)
        scales = at + Uint32(warp * (16 * 4) + lane // 4 * 4)
        words = [*ptx.load_shared(codes, 4), *ptx.load_shared(codes, 4, 8 * _LINE)]
        words += [ptx.load_shared_word(scales, _BLOCK * _LINE + i) for i in (0, 32)]
        # Each lane for itself: it has read the stage, which is copied to after this. Loads and
        # an arrival are in order, the copy is not: by its address the arrival waits for the words.
        read = functools.reduce(operator.or_, (words[0], words[4], words[8], words[9]))
        ptx.mbarrier_arrive(barriers + Uint32(stage * 16 + 8) + (read & none))
        return words

    def _product(self, left: Value) -> cute.TiledMma:
        """64 keys by 64 heads; ``left``: where keys come from."""
        op = warpgroup.MmaI8Op(
            Uint8,
            Int8,
            Int32,
            (_BLOCK, _HEADS, 32),
            left,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        return cute.make_tiled_mma(op, (1, 1, 1))

    def _multiply(self, mma: Value, dots: Value, left: Value, right: Value) -> None:
        """Start the products of a block."""
        warpgroup.fence()
        codes, same = left
        queries, less = right
        for i in range(4):
            cute.gemm(mma[i > 0], dots, codes[None, None, i], queries[None, None, i], dots)
        cute.gemm(mma[2], dots, same[None, None, 0], less[None, None, 0], dots)
        warpgroup.commit_group()

    def _page(self, keys_of: Value, block: Value) -> Value:
        """The page of a block, the last one's if there is none."""
        return ptx.load_global(self._place_of_page(keys_of, block))

    def _place_of_page(self, keys_of: Value, block: Value) -> Value:
        """Where the number of that page is."""
        (pages, table_bytes, _, _), bits, last = keys_of
        return ptx.element_address(pages, cutlass.min(block, last) >> bits, table_bytes)

    def _fetch(self, keys_of: Value, block: Value, who: Value) -> Value:
        """What ``_take`` returns, from memory."""
        (_, _, keys, page_stride), bits, last = keys_of
        warp, lane = who
        page = cutlass.max(Int32(self._page(keys_of, block)), Int32(0))
        start = ptx.element_address(keys, page, page_stride)
        within = cutlass.min(block, last) & ((1 << bits) - 1)
        first = within * _BLOCK + warp * 16 + lane // 4
        codes = start + Int64(first * _LINE + lane % 4 * 16)
        scales = start + (Int64(_BLOCK * _LINE) << Int64(bits)) + Int64(first * 4)
        return [
            *ptx.load_streaming(codes, 4),
            *ptx.load_streaming(codes, 4, 8 * _LINE),
            ptx.load_streaming_word(scales, 0),
            ptx.load_streaming_word(scales, 32),
        ]

    def _expand(self, line: Value, words: Value, own: Value, beside: Iterable[None] = ()) -> Value:
        """The left operands of four steps; what both keys' scores are to be multiplied by.

        And how far the scales of the lane's groups are below the largest of their keys, as powers
        of two: of each key in a half of a word, in both bytes.

        ``line``: 16 registers: by step, half of the word, key. ``beside``: whose steps wait for one
        another, and here for the codes of a word instead.
        """
        (lane, less), steps = own, iter(beside)
        largest = ptx.max_of_bytes_pair(words[8], words[9])
        below = largest - ptx.select_byte_pair(words[8], words[9], lane % 4)
        for h, distance in enumerate((below, below >> 16)):
            tables = self._tables(ptx.shift_right(Uint32(4), distance))
            for i in range(4):
                both = ptx.e2m1_to_bytes_by_table(words[4 * h + i], tables, less)
                line[4 * i + h], line[4 * i + 2 + h] = both
                next(steps, None)
        for _ in steps:
            pass
        return largest, below

    def _is_below(self, far: Value) -> Value:
        """Whether one of two distances that ``_expand`` returns is too large for integers."""
        return ptx.max_of_halves(far) > Uint32(0x02FF)

    def _both(self, first: Value, second: Value) -> Value:
        """A byte of both keys, in a word."""
        return Uint32(first) | (Uint32(second) << Uint32(16))

    def _tables(self, factor: Value) -> Value:
        """Bytes that codes stand for, times a power of two, and _MIDDLE.

        Of the codes 0 to 3 and 4 to 7, and of 7 to 4 and 3 to 0 with a sign. Products, for the
        logic pipe has more to do. Of a factor 0 all are _MIDDLE.
        """
        fours = (0x03020100, 0x0C080604, 2**32 - 0x0406080C, 2**32 - 0x00010203)
        middle = Uint32(0x01010101 * _MIDDLE)
        return [ptx.mad_u32(factor, Uint32(four), middle) for four in fours]

    def _some(self, words: Value) -> Value:
        """Whether a code is not zero."""
        return (functools.reduce(operator.or_, words) & Uint32(0x77777777)) != Uint32(0)

    def _shift(self, scales: Value, group: Value) -> Value:
        """3 less what a group's scale is below the largest, as powers of two; and the largest."""
        largest = ptx.max_of_bytes(scales)
        byte = ptx.extract_byte(scales, group)
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
        number = ptx.find_lowest_bit(low, high)
        rest = low & (low - 1)
        return number, rest, ptx.select_word(low == Uint32(0), high & (high - 1), high)

    @cute.jit
    def _correct(
        self, keys_of: Value, blocks: Value, queries: Value, weight: Value, to: Value, who: Value
    ) -> None:
        """Store scores of the warp's keys again, of blocks that integers do not hold."""
        first, step, count, apart = blocks
        scores, maxima, end, down = to
        for pair in cutlass.range(first, count, step, unroll=1):
            for block in cutlass.range(pair, cutlass.min(pair + 2, count), 1, unroll=1):
                words = self._fetch(keys_of, block, who)
                shifts = [self._shift(words[8 + h], who[1] % 4)[0] - 1 for h in range(2)]
                if cute.arch.vote_any_sync(self._is_far(words, shifts)) | apart:
                    sums = self._sums_apart(words, queries, weight, who[1])
                    factors = self._both(*[ptx.max_of_bytes(words[8 + h]) for h in range(2)])
                    # Without a second block.
                    alone = (scores, maxima, cutlass.min(end, (block + 1) * _BLOCK), down)
                    self._store([*sums, *sums], (factors, factors), alone, block, who)

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
        low, high = ptx.warp_or(low), ptx.warp_or(high)
        first, second = Float32(0.0), Float32(0.0)
        # Few heads at a time: their sums would take registers from everything else.
        for n in cutlass.range(0, _HEADS // 8, 2, unroll=1):
            totals = self._totals((words, shifts, low, high), queries, n, lane)
            for i in cutlass.range_constexpr(2):
                pair = ptx.load_shared_float2(weight + (n + i) * 8)
                for c in cutlass.range_constexpr(2):
                    first += ptx.max_float(totals[4 * i + c], Float32(0.0)) * pair[c]
                    second += ptx.max_float(totals[4 * i + 2 + c], Float32(0.0)) * pair[c]
        # As integers count, of keys whose largest shift is less by one.
        down = Float32(_UNIT)
        return first * Float32(0.5) * down, second * Float32(0.5) * down

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
                    both = ptx.e2m1_to_signed_bytes(words[4 * h + i], least, most, half)
                    line[4 * i + h], line[4 * i + 2 + h] = both
            lower, upper = also
            while (lower | upper) != Uint32(0):
                other, lower, upper = self._next(lower, upper)
                # Of the largest scales; 0 below 2^-126.
                exponent = cutlass.max(127 - 4 * (window + other), Int32(0))
                factor = ptx.bits_to_float(Uint32(exponent) << Uint32(23))
                for m in cutlass.range_constexpr(2):
                    head = 8 * (n + m) + lane // 4
                    scales = Uint32(ptx.load_shared_int(exponents + Uint32(head * 4)))
                    shift, _ = self._shift(scales, lane % 4)
                    least, most = self._pools_of(shift, other)
                    right = ptx.load_shared(plain + Uint32(head * _LINE + lane % 4 * 16), 4)
                    four: Value = [Int32(0)] * 4
                    for i in cutlass.range_constexpr(4):
                        codes = ptx.e2m1_to_signed_bytes(right[i], least, most, half)
                        four = ptx.mma_m16n8k32_s8(four, line[4 * i : 4 * i + 4], codes)
                    for c in cutlass.range_constexpr(4):
                        one = ptx.int_to_float(four[c])
                        totals[4 * m + c] = ptx.fma_float(one, factor, totals[4 * m + c])
        return totals

    @cute.jit
    def _ask(self, q: Value, q_scales: Value, weights: Value, who: Value) -> Value:
        """A share of a head's codes for each thread, 2 or 8 words, its scales and weight.

        Zeros if there is no such head.
        """
        heads, head_stride, thread = who
        sharers = self.plan.mma_threads // _HEADS
        head, side = thread // sharers, thread % sharers
        count = _LINE // 4 // sharers
        words, scales, weight = [Uint32(0)] * count, Uint32(0), Float32(0.0)
        if head < heads:
            place, each = q + head * head_stride + Int64(side * (4 * count)), min(4, count)
            words = [
                word
                for first in range(0, count, each)
                for word in ptx.load_streaming(place, each, 4 * first)
            ]
            scales = ptx.load_global(q_scales + Int64(head) * 4)
            weight = ptx.load_global_float(weights + Int64(head) * 4)
        return words, scales, weight

    @cute.jit
    def _queries(self, asked: Value, rooms: Value, who: Value, half: Value) -> Value:
        """Put the heads' codes in shared memory; the lane's weights, and what they were divided by.

        ``asked``: what ``_ask`` returns.
        """
        words, scales, weight = asked
        shared, less, told, plain, exponents, windows = rooms
        thread, lane = who
        sharers = self.plan.mma_threads // _HEADS
        head, side = thread // sharers, thread % sharers
        total, bits = Int32(0), [Uint32(0)] * 2
        for n, word in enumerate(words):
            number = side * len(words) + n
            group = number // 4
            if cutlass.const_expr(n % 4 == 0):
                shift, largest = self._shift(scales, group)
                low, high = self._pools(shift)
                bit = self._bits(shift, self._some(words[n : n + 4]))
                bits = [one | more for one, more in zip(bits, bit, strict=True)]
            ptx.store_shared_int(plain + Uint32(head * _LINE + number * 4), Int32(word))
            both = ptx.e2m1_to_signed_bytes(word, low, high, half)
            for h in cutlass.range_constexpr(2):
                total = ptx.add_sum_of_bytes(both[h], total)
                chunk = (number % 4 * 2 + h) ^ (head % 8)
                at = shared + Uint32(head * _DIMS + chunk * 16 + group * 4)
                ptx.store_shared_int(at, Int32(both[h]))
        found = [ptx.warp_or(one) for one in bits]
        if lane == 0:
            for i in cutlass.range_constexpr(2):
                ptx.reduce_or_shared(windows + Uint32(i * 4), found[i])
        for step in cutlass.range_constexpr(sharers.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, 1 << step)
        most, rest = self._taken_away(total)
        words = [Uint32(most & 255) * Uint32(0x01010100)] * 4
        if side == 0:
            words = [words[0] | Uint32(rest & 255), *words[1:]]
        if side < 2:
            ptx.store_shared4(less + Uint32(head * _DIMS + (side ^ (head % 8)) * 16), words)
        weight = weight * ptx.e8m0_to_float(largest)
        if side == 0:
            ptx.store_shared_float(told + Uint32(head * 4), weight)
            ptx.store_shared_int(exponents + Uint32(head * 4), Int32(scales))
        ptx.fence_proxy_async_shared()
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=self.plan.mma_threads)
        top = Int32(1)
        for i in cutlass.range_constexpr(2):
            two = ptx.load_shared_int(told + Uint32((lane + 32 * i) * 4))
            top = cutlass.max(top, (two >> 23) & 255)
        top = cutlass.min(Int32(ptx.warp_max(Uint32(top))), Int32(252))
        up = ptx.bits_to_float(Uint32(253 - top) << Uint32(23))
        weight = weight * up
        # Where the lanes that need it find four in a row.
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=self.plan.mma_threads)
        if side == 0:
            ptx.store_shared_float(told + Uint32(self._line_of(head)), weight)
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=self.plan.mma_threads)
        return told + Uint32(lane % 4 * _WEIGHTS), ptx.bits_to_float(Uint32(top) << Uint32(23))

    @staticmethod
    def _taken_away(total: Value) -> Value:
        """The further step's right bytes of a head whose integers have this sum.

        The last three of every four bytes, and the first of all; the others are 0. With ``_SAME``
        they give what ``_MIDDLE`` adds to the head's sums, negative.
        """
        most = -total // _UNITS
        return most, -total - most * _UNITS

    def _line_of(self, head: Value) -> Value:
        """Where a head's weight is: 16 of each lane of four, heads 2 j and 2 j + 1 of every 8."""
        return head // 2 % 4 * _WEIGHTS + (head // 8 * 2 + head % 2) * 4

    def _sums(self, dots: Value, weight: Value) -> Value:
        """Of both keys the sums over the lane's heads."""
        sums = [Float32(0.0)] * 4
        for n in range(8):
            if n % 2 == 0:
                four = ptx.load_shared_float4(weight + n * 8)
            for one in range(4):
                factor = four[n % 2 * 2 + one % 2]
                sums[one] = ptx.add_scaled_relu(dots[4 * n + one], factor, sums[one])
        return [sums[0] + sums[1], sums[2] + sums[3]]

    def _store(self, sums: Value, factors: Value, to: Value, block: Value, who: Value) -> None:
        """Keys of the scores of two blocks, and their groups' maxima: all of ``_storing``."""
        for _ in self._storing(sums, factors, to, block, who):
            pass

    def _storing(
        self, sums: Value, factors: Value, to: Value, block: Value, who: Value
    ) -> Iterator[None]:
        """Store keys of the scores of two blocks, and their groups' maxima, in steps.

        ``sums``: of both keys of a block, then of the next. ``factors``: of a block, and the next.
        """
        scores, maxima, end, down = to
        warp, lane = who
        # Of four lanes each gets the sum of one key: bit 0 is its block, bit 1 which of both.
        later, second = lane % 2 == 1, lane % 4 > 1
        kept = [ptx.select_float(later, sums[2 + c], sums[c]) for c in range(2)]
        sent = [ptx.select_float(later, sums[c], sums[2 + c]) for c in range(2)]
        sent = [cute.arch.shuffle_sync_bfly(one, 1) for one in sent]
        yield
        pair = [one + other for one, other in zip(kept, sent, strict=True)]
        total = ptx.select_float(second, pair[1], pair[0])
        other = cute.arch.shuffle_sync_bfly(ptx.select_float(second, pair[0], pair[1]), 2)
        both = ptx.select_word(later, factors[1], factors[0])
        factor = ptx.e8m0_to_float(ptx.extract_byte(both, lane & 2))
        yield
        key = ptx.ordered_key((total + other) * Float32(_DOWN) * down * factor)
        entry = (block + lane % 2) * _BLOCK + warp * 16 + lane // 4 + lane % 4 // 2 * 8
        seen = entry < end
        ptx.store_global_if(ptx.element_address(scores, entry, 4), key, seen)
        key = ptx.select_word(seen, key, Uint32(0))
        steps = {0: (), 8: (4, 8, 16), 16: (4, 8, 16, 2)}[self.plan.group]
        for step in steps:
            other = ptx.shuffle_xor(key, step)
            yield
            key = cutlass.max(key, other)
        if steps:
            firsts = 4 if self.plan.group == 8 else 2
            place = ptx.element_address(maxima, entry >> self.plan.group.bit_length() - 1, 4)
            ptx.store_global_if(place, key, (lane < firsts) & seen)
