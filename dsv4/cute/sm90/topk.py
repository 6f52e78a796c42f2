"""The k highest of long rows of index scores; a block of threads has a row.

Scores are keys, unsigned integers that order as they do (``dsv4.triton._index_scores``); 0: none.

* A row of many is looked at through the highest of every ``group`` neighbours, which the score
  kernel keeps. Those of them that reach a threshold say where the candidates are.
* The threshold is about the k-th highest of the maxima of 2048 classes, to which keys are dealt out
  in turn. At least k keys reach it, of random ones at most 1.4 k.
* Candidates are copied to shared memory in their order. If they are too many, because high keys are
  neighbours, the threshold is taken again, of the keys of those groups. If they still are, because
  keys are equal, the rest works on memory instead, slowly.
* The k-th highest of the candidates is found by counting them in 1024 equal parts of their range,
  then of the part that holds it. Of keys that equal it, the first are taken.

Counts are of integers, so no order of threads changes a result.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.topk_plan import CANDIDATES, PARTS, TopkPlan

Value = Any
_APART = CANDIDATES * 4  # bytes from positions to keys
_TOTALS = 128  # bytes of a number of each warp
_UNKNOWN = 1 << 30  # a number of keys that reach a threshold


def _bits(number: int) -> int:
    """Of which power of two a number is: of integers that may be negative, quotients take more."""
    return number.bit_length() - 1


class TopkKernel(TopkPlan):
    """See the module."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        places, sizes = [Int64(0)] * 4, [Int32(1)] * 7
        return cute.compile(self, *places, *sizes, CUstream(0), options=options)

    @cute.jit
    def __call__(
        self,
        scores: Int64,
        maxima: Int64,
        visible: Int64,
        out: Int64,
        score_stride: Int32,
        maxima_stride: Int32,
        visible_bytes: Int32,
        capacity: Int32,
        k: Int32,
        slack: Int32,
        direct: Int32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        self.kernel_(
            scores, maxima, visible, out, score_stride, maxima_stride, visible_bytes, capacity, k,
            slack, direct,
        ).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            cluster=[self.blocks, 1, 1],
        )  # fmt: skip

    @cute.kernel
    def kernel_(
        self,
        scores: Int64,
        maxima: Int64,
        visible: Int64,
        out: Int64,
        score_stride: Int32,
        maxima_stride: Int32,
        visible_bytes: Int32,
        capacity: Int32,
        k: Int32,
        slack: Int32,
        direct: Int32,
    ) -> None:
        """A block, or a cluster of ``blocks``, for every token.

        Args:
            scores: Address of keys, ``[tokens, score_stride]``; a row is aligned to 16 bytes.
            maxima: As ``scores``, the highest of every group.
            visible: Address of the number of entries that each token sees, int32 or int64.
            out: Address of int64 ``[tokens, k]``: ascending, then -1.
            score_stride: Keys between rows.
            maxima_stride: Likewise.
            visible_bytes: Of a number, 4 or 8.
            capacity: Entries of a row, at most.
            k: How many are chosen, at most 1024.
            slack: By how many keys more than k a threshold may be reached.
            direct: Entries up to which a row is looked at without groups.
        """
        block, _, _ = cute.arch.block_idx()
        token, rank = block >> _bits(self.blocks), block & self.blocks - 1
        rooms = self._rooms(cutlass.memory.SmemAllocator())
        room, thread = rooms[1], rooms[1][4]
        cute.arch.griddepcontrol_launch_dependents()
        self._clear(room[0], thread)
        cute.arch.griddepcontrol_wait()
        shown = ptx.load_index_saturated(visible + Int64(token) * visible_bytes, visible_bytes)
        shown = cutlass.min(shown, capacity)
        row = out + Int64(token) * k * 8
        start = scores + Int64(token) * score_stride * 4
        highest = maxima + Int64(token) * maxima_stride * 4
        if shown > k:
            self._row((start, shown), highest, (k, slack, direct, row), rank, rooms)
        elif rank == 0:
            self._all(row, shown, k, thread)

    def _row(self, keys_of: Value, maxima: Value, wanted: Value, rank: Value, rooms: Value) -> None:
        """Choose from a row of more than k."""
        self._alone(keys_of, maxima, wanted, *rooms)

    def _rooms(self, smem: Value) -> Value:
        """Addresses of what is in shared memory: lists of groups and entries, and all else."""
        thread, _, _ = cute.arch.thread_idx()
        counts = self._room(smem, PARTS * 4)
        classes = self._room(smem, self.classes * 4)
        listed = self._room(smem, CANDIDATES * 4)
        ids = self._room(smem, 2 * CANDIDATES * 4)
        totals = self._room(smem, 2 * _TOTALS)
        tops = self._room(smem, 2 * _TOTALS)
        found = self._room(smem, 16)
        warp = cute.arch.make_warp_uniform(thread >> 5)
        room = (counts, (classes, tops), totals, found, thread, thread & 31, warp)
        return (listed, ids), room

    @cute.jit
    def _all(self, row: Value, shown: Value, k: Value, thread: Value) -> None:
        """Store all positions that are seen, at most k, then -1."""
        for place in cutlass.range(thread, k, self.threads, unroll=1):
            value = Int64(-1)
            if place < shown:
                value = Int64(place)
            ptx.store_global_int64(row + Int64(place) * 8, value)

    def _groups(self, start: Value, shown: Value) -> Value:
        """The maxima of so many entries, as a source of ``_vector``."""
        number = (shown + self.group - 1) >> _bits(self.group)
        return start, Uint32(0), number, (number + 3) >> 2

    @cute.jit
    def _alone(
        self, keys_of: Value, maxima: Value, wanted: Value, lists: Value, room: Value
    ) -> None:
        """Choose from a row of more than k by this block."""
        # One by one: the compiler would not see that names of nested tuples change in branches.
        start, shown = keys_of
        k, slack, direct, row = wanted
        listed, ids = lists
        groups = self._groups(maxima, shown)
        keys = ids + Uint32(_APART)
        through, vectors = Uint32(0), (shown + 3) >> 2
        least, top = Uint32(0), Uint32(0)
        if shown > direct:
            least, top = self._least(groups, k, slack, room)
            kept = self._gather(groups, least - 1, (listed, 0), room)
            if kept <= CANDIDATES:
                through, vectors = listed, kept * (self.group // 4)
            else:
                least, top = self._least((start, through, shown, vectors), k, slack, room)
        else:
            least, top = self._least((start, through, shown, vectors), k, slack, room)
        source = (start, through, shown, vectors)
        kept = self._gather(source, least - 1, (ids, _APART), room)
        if (kept > CANDIDATES) & (through != Uint32(0)):
            least, top = self._least(source, k, slack, room)
            kept = self._gather(source, least - 1, (ids, _APART), room)
        names = Uint32(0)
        if kept <= CANDIDATES:
            start, through, names = ptx.shared_to_generic(keys), Uint32(0), ids
            shown, vectors = kept, (kept + 3) >> 2
        source = (start, through, shown, vectors)
        bound, equal = self._bound(source, least, top, kept, k, room)
        none = (Int32(0), Int32(0))
        self._choose(source, bound, equal, (row, k, names, Int32(0)), none, room)

    def _room(self, smem: Value, size: int) -> Value:
        """Address of so many bytes of shared memory."""
        return Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=512).toint())

    @cute.jit
    def _vector(self, source: Value, number: Value) -> Value:
        """Four neighbouring keys and the position of the first; 0 where there is none.

        A source is an address, a list of groups in shared memory or 0, the positions there are,
        and the number of vectors. Positions are those of the row, or of the maxima. Or it is an
        address in shared memory where all vectors are whole, which have no positions.
        """
        start, through, limit, vectors = source
        if cutlass.const_expr(limit is None):
            return ptx.load_shared(start + Uint32(number * 16), 4), number
        first = number * 4
        if (through != Uint32(0)) & (number < vectors):
            part = self.group // 4
            group = ptx.load_shared_int(through + Uint32((number >> _bits(part)) * 4))
            first = group * self.group + (number & part - 1) * 4
        there = Int32(0)
        if (number < vectors) & (first < limit):
            there = limit - first
        return ptx.load_keys4(start + Int64(first) * 4, there), first

    @cute.jit
    def _least(self, source: Value, k: Value, slack: Value, room: Value) -> Value:
        """A threshold above 0 that at least k keys reach, if there are so many; the highest key."""
        _, (classes, tops), _, _, thread, lane, warp = room
        a, b, c, d = Uint32(0), Uint32(0), Uint32(0), Uint32(0)
        # All that a thread has of 4096 vectors at once.
        for number in cutlass.range(thread, source[3], self.threads, unroll=4096 // self.threads):
            four, _ = self._vector(source, number)
            a, b = cutlass.max(a, four[0]), cutlass.max(b, four[1])
            c, d = cutlass.max(c, four[2]), cutlass.max(d, four[3])
        high, other = cutlass.max(a, b), cutlass.max(c, d)
        low = cutlass.min(high, other)
        if cutlass.const_expr(self.classes == 4 * self.threads):
            ptx.store_shared4(classes + Uint32(thread * 16), (a, b, c, d))
            low = cutlass.min(cutlass.min(a, b), cutlass.min(c, d))
        else:
            ptx.store_shared2(classes + Uint32(thread * 8), (high, other))
        top, low = ptx.warp_max(cutlass.max(high, other)), ptx.warp_min(low)
        if lane == 0:
            ptx.store_shared2(tops + Uint32(warp * 8), (top, low))
        cute.arch.sync_threads()
        both = ptx.load_shared(tops + Uint32((lane & self.warps - 1) * 8), 2)
        top, low = ptx.warp_max(both[0]), ptx.warp_min(both[1])
        reached = Int32(_UNKNOWN)
        if low > Uint32(0):
            reached = Int32(self.classes)
        dealt = (classes, None, None, Int32(self.classes // 4))
        low = cutlass.max(low, Uint32(1))
        low, _, _ = self._search(dealt, (low, top, reached), k, slack, room)
        return low, top

    @cute.jit
    def _bound(
        self, source: Value, least: Value, top: Value, kept: Value, k: Value, room: Value
    ) -> Value:
        """Keys above a bound are chosen, and the first ``wanted`` of those that equal it."""
        low, above, reached = self._search(source, (least, top, kept), k, Int32(0), room)
        bound, wanted = low, k - above
        if reached <= k:
            bound, wanted = low - 1, Int32(0)
        return bound, wanted

    @cute.jit
    def _search(self, source: Value, known: Value, k: Value, slack: Value, room: Value) -> Value:
        """A threshold that at least k keys reach, at most ``slack`` more of different ones.

        ``known``: a threshold, the highest key, and how many reach the threshold, at least k.

        Returns:
            The threshold, how many exceed all keys of its part, and how many reach it.
        """
        counts, _, totals, found, thread, lane, warp = room
        low, top, reached = known
        above = Int32(0)
        while (top > low) & (reached - k > slack):
            span = top - low
            shift = cutlass.max(Int32(22) - Int32(cute.arch.clz(Int32(span))), Int32(0))
            for number in cutlass.range(thread, source[3], self.threads, unroll=2):
                four, _ = self._vector(source, number)
                for i in cutlass.range_constexpr(4):
                    # But for the lowest part, where equal keys mostly are: the others tell.
                    ptx.count_bucket(counts, four[i] - low, span, shift)
            cute.arch.sync_threads()
            own = self._counted(counts, thread)
            self._clear(counts, thread)
            mine = sum(own[1:], own[0])
            upto = mine
            for step in cutlass.range_constexpr(5):
                more = cute.arch.shuffle_sync_down(upto, 1 << step)
                if lane + (1 << step) < 32:
                    upto += more
            if lane == 0:
                ptx.store_shared_int(totals + Uint32(warp * 4), upto)
            cute.arch.sync_threads()
            total = self._total(totals, lane)
            if lane <= warp:
                total = Int32(0)
            upto += ptx.warp_sum(total) + above
            if (upto - mine < k) & (upto >= k):
                self._find(own, upto - mine, k, thread, found)
            if (thread == 0) & (upto < k):
                ptx.store_shared4(found, (thread, upto, reached, Int32(0)))
            cute.arch.sync_threads()
            four = ptx.load_shared(found, 4)
            low = low + (four[0] << Uint32(shift))
            top = low + cutlass.min(top - low, (Uint32(1) << Uint32(shift)) - 1)
            above, reached = Int32(four[1]), Int32(four[2])
        return low, above, reached

    def _clear(self, counts: Value, thread: Value) -> None:
        """Make a thread's counts 0."""
        each = PARTS // self.threads
        at = counts + Uint32(thread * (4 * each))
        if each == 1:
            ptx.store_shared_int(at, Int32(0))
        elif each == 2:
            ptx.store_shared2(at, [Uint32(0)] * 2)
        else:
            ptx.store_shared4(at, [Uint32(0)] * 4)

    def _counted(self, counts: Value, thread: Value) -> Value:
        """A thread's counts."""
        each = PARTS // self.threads
        at = counts + Uint32(thread * (4 * each))
        if each == 1:
            return [ptx.load_shared_int(at)]
        return [Int32(one) for one in ptx.load_shared(at, each)]

    @cute.jit
    def _find(self, own: Value, above: Value, k: Value, thread: Value, found: Value) -> None:
        """Store which of a thread's parts holds the k-th, and how many are above and with it."""
        each = PARTS // self.threads
        for i in cutlass.range_constexpr(each - 1, -1, -1):
            upto = above + own[i]
            if (above < k) & (upto >= k):
                ptx.store_shared4(found, (thread * each + i, above, upto, Int32(0)))
            above = upto

    @cute.jit
    def _total(self, totals: Value, lane: Value) -> Value:
        """A warp's number, that of the lane; 0 if there is none."""
        total = ptx.load_shared_int(totals + Uint32((lane & self.warps - 1) * 4))
        if lane >= self.warps:
            total = Int32(0)
        return total

    @cute.jit
    def _upto(self, mine: Value, lane: Value) -> Value:
        """The sum of a number over the lanes up to this one."""
        for step in cutlass.range_constexpr(5):
            more = cute.arch.shuffle_sync_up(mine, 1 << step)
            if lane >= (1 << step):
                mine += more
        return mine

    @cute.jit
    def _before(self, total: Value, totals: Value, who: Value) -> Value:
        """The sum of a warp's number over the warps before, and over all; waits for all of them.

        ``total``: of the last lane. ``totals``: room for a number of each warp, that of the last
        time but one.
        """
        lane, warp = who
        if lane == 31:
            ptx.store_shared_int(totals + Uint32(warp * 4), total)
        cute.arch.sync_threads()
        total = self._total(totals, lane)
        less = total
        if lane >= warp:
            less = Int32(0)
        return ptx.warp_sum(less), ptx.warp_sum(total)

    @cute.jit
    def _gather(self, source: Value, bound: Value, to: Value, room: Value) -> Value:
        """Copy positions of keys above the bound, and keys, in order; how many there are.

        ``to``: address of positions in shared memory, and how far behind it that of keys is; 0:
        none. If not all fit there, not all of them are copied, nor counted.
        """
        names, apart = to
        _, _, totals, _, _, lane, warp = room
        kept = Int32(0)
        each = self.each
        for base in cutlass.range(0, source[3], each * self.threads, unroll=1):
            if kept <= CANDIDATES:
                number = base + warp * (each * 32)
                keys, firsts = [Uint32(0)] * (4 * each), [Int32(0)] * each
                # A byte for each of the thread's vectors: 32 of them have at most 128 keys.
                mine = Int32(0)
                # A warp without keys has nothing to count.
                if number < source[3]:
                    parts = [self._vector(source, number + 32 * i + lane) for i in range(each)]
                    keys, firsts = [one for part in parts for one in part[0]], [x[1] for x in parts]
                    for i, one in enumerate(keys):
                        mine = ptx.add_if_above(mine, one, bound, 1 << 8 * (i // 4))
                upto = self._upto(mine, lane)
                whole = Uint32(cute.arch.shuffle_sync(upto, 31))
                counts = [Int32(ptx.extract_byte(whole, i)) for i in range(each)]
                before, total = self._before(sum(counts[1:], counts[0]), totals, (lane, warp))
                if (mine != 0) & (kept + total <= CANDIDATES):
                    place = names + Uint32((kept + before) * 4)
                    for i in cutlass.range_constexpr(each):
                        at = place + ptx.extract_byte(Uint32(upto - mine), i) * 4
                        for e in cutlass.range_constexpr(4):
                            word = (firsts[i] + e, keys[4 * i + e])
                            at = ptx.append_if_above(at, word, bound, apart)
                        place += Uint32(counts[i] * 4)
                kept += total
                # A warp may still read the numbers of this step while another stores the next.
                totals = totals ^ Uint32(_TOTALS)
        cute.arch.sync_threads()
        return kept

    @cute.jit
    def _choose(
        self, source: Value, bound: Value, wanted: Value, to: Value, others: Value, room: Value
    ) -> None:
        """Store the positions of keys above the bound and of the first that equal it.

        ``to``: where to, how many of a row, the address of their names in shared memory, 0 if they
        have none, and the position of the first name. ``others``: how many of either kind others
        store before them.
        """
        row, k, names, origin = to
        _, _, totals, _, thread, lane, warp = room
        above, equal = others
        for base in cutlass.range(0, source[3], self.threads, unroll=1):
            # Until all are stored: where many are equal, they are soon.
            if above + cutlass.min(equal, wanted) < k:
                four, first = self._vector(source, base + thread)
                # 1 for a key above the bound, and 2^16 for one that equals it if such are wanted.
                flag = Int32(wanted > 0) << 16
                flags = [Int32(one > bound) + Int32(one == bound) * flag for one in four]
                mine = flags[0] + flags[1] + flags[2] + flags[3]
                upto = self._upto(mine, lane)
                before, total = self._before(upto, totals, (lane, warp))
                before += upto - mine
                over, same = above + (before & 0xFFFF), equal + (before >> 16)
                if mine != 0:
                    for e in cutlass.range_constexpr(4):
                        if (flags[e] == 1) | ((flags[e] > 1) & (same < wanted)):
                            name = first + e
                            if names != Uint32(0):
                                name = ptx.load_shared_int(names + Uint32(name * 4))
                            place = over + cutlass.min(same, wanted)
                            ptx.store_global_int64(row + Int64(place) * 8, Int64(origin + name))
                        over += flags[e] & 1
                        same += flags[e] >> 16
                above, equal = above + (total & 0xFFFF), equal + (total >> 16)
                totals = totals ^ Uint32(_TOTALS)
