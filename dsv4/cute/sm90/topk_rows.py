"""Keys of top-k selection, and what a CTA does with them in order: sums, gathering, storing.

``topk`` describes ownership, the buffers and their barriers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.topk_plan import CANDIDATES, TopkPlan

KEY_OFFSET = CANDIDATES * 4  # bytes from a candidate's position to its key
TOTALS_BYTES = 128  # a number of each warp


def log2(number: int) -> int:
    """The exponent of a power of two.

    Shifts and masks stand for quotients and remainders, which take more instructions for integers
    that may be negative.
    """
    return number.bit_length() - 1


class Lane(NamedTuple):
    """The thread's place.

    Attributes:
        thread: Thread of the CTA.
        lane: Lane of the warp.
        warp: Warp of the CTA.
    """

    thread: Int32
    lane: Int32
    warp: Int32


class SharedMemory(NamedTuple):
    """Addresses in shared memory.

    Attributes:
        counts: Keys of each of ``BUCKETS`` buckets; zeros between searches.
        classes: Highest key of each class.
        groups: Groups that candidates may come from, at most ``CANDIDATES``, ascending.
        positions: Positions of candidates, ascending; their keys follow ``KEY_OFFSET`` bytes later.
        totals: Two buffers of ``TOTALS_BYTES`` for a number of each warp.
        extremes: Highest and lowest class maximum of each warp.
        found: What ``_store_bucket`` stores.
        cluster_keys: Candidates of all CTAs of a cluster; unused by a single CTA.
        cluster_counts: How many each CTA of a cluster has; unused by a single CTA.
    """

    counts: Uint32
    classes: Uint32
    groups: Uint32
    positions: Uint32
    totals: Uint32
    extremes: Uint32
    threshold: Uint32
    cluster_keys: Uint32
    cluster_counts: Uint32

    @property
    def candidate_keys(self) -> Uint32:
        """Keys of candidates."""
        return self.positions + Uint32(KEY_OFFSET)


class PageRow(NamedTuple):
    """Where entries of a token's sequence lie; unused unless ``plan.slots``.

    Attributes:
        address: Address of the sequence's first page number; 0: the token has no sequence.
        shift: log2 of a page's entries.
        bytes: Bytes of a page number, 4 or 8.
    """

    address: Int64
    shift: Int32
    bytes: Int32


class Row(NamedTuple):
    """A token's row.

    Attributes:
        visible: Entries that the token sees.
        out: Address of its results.
        keys: Address of its keys.
        maxima: Address of its groups' maxima.
        pages: Where its entries lie.
    """

    visible: Int32
    out: Int64
    keys: Int64
    maxima: Int64
    pages: PageRow


class RowKeys(NamedTuple):
    """Keys by their generic address: all of them, or those of listed groups.

    Attributes:
        address: Address of the key at position 0.
        groups: Shared-memory address of a list of groups; 0: all keys.
        limit: Positions from here on have no key.
        vectors: How many vectors there are.
    """

    address: Int64
    groups: Uint32
    limit: Int32
    vectors: Int32


class SharedKeys(NamedTuple):
    """Keys in shared memory where all vectors are whole, and which have no positions.

    Attributes:
        address: Address of the first vector.
        vectors: How many vectors there are.
    """

    address: Uint32
    vectors: Int32


class ClusterKeys(NamedTuple):
    """Candidates of all CTAs of a cluster; vectors of the CTAs alternate.

    Attributes:
        address: Address of the first vector in shared memory.
        limit: Candidates of the CTA whose vectors this thread reads.
        vectors: How many vectors there are, of all CTAs.
    """

    address: Uint32
    limit: Int32
    vectors: Int32


Words = Sequence[Uint32]
Index = Int32 | int  # loops over ``cutlass.range`` have integers, as mypy sees it
Keys = RowKeys | SharedKeys | ClusterKeys


class KeyRange(NamedTuple):
    """A range of keys that holds the k-th highest one.

    Attributes:
        least: The lowest, above 0.
        top: The highest.
    """

    least: Uint32
    top: Uint32


class Threshold(NamedTuple):
    """The result of a search.

    Attributes:
        key: The threshold.
        above: Keys that exceed all of the last bucket's.
        reached: Keys that reach the threshold; 2^30 if that is not known.
    """

    key: Uint32
    above: Int32
    reached: Int32


class Cut(NamedTuple):
    """The keys that are selected: those above a bound, and some of those that equal it.

    Attributes:
        bound: The bound.
        ties: How many of the keys that equal it.
    """

    bound: Uint32
    ties: Int32


class Placed(NamedTuple):
    """Keys that others store before these.

    Attributes:
        above: Keys above the bound.
        equal: Keys that equal it.
    """

    above: Int32
    equal: Int32


class Output(NamedTuple):
    """Addresses of selected positions, and the rule that gives a key's position.

    Attributes:
        out: Address of the row's results.
        k: How many there are.
        positions: Shared-memory address of positions; 0: a key's index is its position.
        origin: Added to positions.
        pages: Where the token's entries lie.
    """

    out: Int64
    k: Int32
    positions: Uint32
    origin: Int32
    pages: PageRow


class Prefix(NamedTuple):
    """Sums over the CTA's warps.

    Attributes:
        before: Over the preceding warps.
        total: Over all warps.
    """

    before: Int32
    total: Int32


class TopkRows(PlannedKernel):
    """Device functions of rows of keys."""

    plan: TopkPlan

    def _group_maxima(self, row: Row) -> RowKeys:
        """The maxima of a row's groups, as keys."""
        count = (row.visible + self.plan.group - 1) >> log2(self.plan.group)
        return RowKeys(row.maxima, Uint32(0), count, (count + 3) >> 2)

    def _load_vector(self, source: Keys, number: Index) -> tuple[Words, Index]:
        """Four neighbouring keys and the position of the first; a key is 0 where there is none.

        Positions are those of ``source``: of keys in the row, or of maxima among the groups. Those
        of ``SharedKeys`` mean nothing.
        """
        if isinstance(source, SharedKeys):
            return ptx.load_shared(source.address + Uint32(number * 16), 4), number
        assert isinstance(source, RowKeys)
        return self._load_row_vector(source, number)

    @cute.jit
    def _load_row_vector(self, source: RowKeys, number: Index) -> tuple[Words, Index]:
        """The same of a row, or of those of its keys that are in listed groups."""
        first = number * 4
        if (source.groups != Uint32(0)) & (number < source.vectors):
            vectors = self.plan.group_vectors
            of_group = Uint32((number >> log2(vectors)) * 4)
            group = ptx.load_shared_int(source.groups + of_group)
            first = group * self.plan.group + (number & vectors - 1) * 4
        there = Int32(0)
        if (number < source.vectors) & (first < source.limit):
            there = source.limit - first
        return ptx.load_keys4(source.address + Int64(first) * 4, there), first

    @cute.jit
    def _load_total(self, totals: Uint32, lane: Int32) -> Int32:
        """The number of the warp that the lane stands for; 0 if there is none."""
        total = ptx.load_shared_int(totals + Uint32((lane & self.plan.warps - 1) * 4))
        if lane >= self.plan.warps:
            total = Int32(0)
        return total

    @cute.jit
    def _inclusive_sum(self, mine: Int32, lane: Int32) -> Int32:
        """The sum of a number over the lanes up to this one."""
        for step in cutlass.range_constexpr(5):
            more = cute.arch.shuffle_sync_up(mine, 1 << step)
            if lane >= (1 << step):
                mine += more
        return mine

    @cute.jit
    def _prefix(self, total: Int32, totals: Uint32, who: Lane) -> Prefix:
        """Sum a number of each warp over the preceding warps and over all. All threads: a barrier.

        Args:
            total: The warp's number, of its last lane.
            totals: Buffer for a number of each warp; not that of the preceding call.
            who: This thread.
        """
        if who.lane == 31:
            ptx.store_shared_int(totals + Uint32(who.warp * 4), total)
        cute.arch.sync_threads()
        total = self._load_total(totals, who.lane)
        less = total
        if who.lane >= who.warp:
            less = Int32(0)
        return Prefix(ptx.warp_sum(less), ptx.warp_sum(total))

    @cute.jit
    def _gather(
        self,
        source: Keys,
        bound: Uint32,
        positions: Uint32,
        key_offset: cutlass.Constexpr,
        shared: SharedMemory,
        who: Lane,
    ) -> Int32:
        """Copy positions of keys above a bound to shared memory, in order. All threads.

        Args:
            source: Keys.
            bound: Keys above it are copied.
            positions: Address for at most ``CANDIDATES`` positions.
            key_offset: Bytes from a position to its key; 0 to copy positions alone.
            shared: Shared memory.
            who: This thread.

        Returns:
            How many there are. If more than ``CANDIDATES``, not all are copied, nor counted.
        """
        totals = shared.totals
        gathered = Int32(0)
        count = self.plan.gathered_vectors
        for base in cutlass.range(0, source.vectors, count * self.plan.threads, unroll=1):
            if gathered <= CANDIDATES:
                number = base + who.warp * (count * 32)
                keys = [Uint32(0)] * (4 * count)
                firsts: list[Index] = [Int32(0)] * count
                # A byte for each of the thread's vectors, so that one prefix sum does for all of
                # them: 32 lanes have at most 128 keys of each.
                mine = Int32(0)
                # A warp without keys has nothing to count.
                if number < source.vectors:
                    loaded = [
                        self._load_vector(source, number + 32 * i + who.lane) for i in range(count)
                    ]
                    keys = [key for four, _ in loaded for key in four]
                    firsts = [first for _, first in loaded]
                    for i, key in enumerate(keys):
                        mine = ptx.add_if_above(mine, key, bound, 1 << 8 * (i // 4))
                upto = self._inclusive_sum(mine, who.lane)
                whole = Uint32(cute.arch.shuffle_sync(upto, 31))
                counts = [Int32(ptx.extract_byte(whole, i)) for i in range(count)]
                prefix = self._prefix(sum(counts[1:], counts[0]), totals, who)
                if (mine != 0) & (gathered + prefix.total <= CANDIDATES):
                    target = positions + Uint32((gathered + prefix.before) * 4)
                    for i in cutlass.range_constexpr(count):
                        at = target + ptx.extract_byte(Uint32(upto - mine), i) * 4
                        for e in cutlass.range_constexpr(4):
                            words = (firsts[i] + e, keys[4 * i + e])
                            at = ptx.append_if_above(at, words, bound, key_offset)
                        target += Uint32(counts[i] * 4)
                gathered += prefix.total
                # A warp may still read the numbers of this step while another stores the next.
                totals = totals ^ Uint32(TOTALS_BYTES)
        # The list is complete, and both buffers of totals are free again.
        cute.arch.sync_threads()
        return gathered

    @cute.jit
    def _result(self, position: Int32, pages: PageRow) -> Int64:
        """What is stored for a selected position: itself, or its slot, -1 without a sequence."""
        result = Int64(position)
        if cutlass.const_expr(self.plan.slots):
            result = Int64(-1)
            if pages.address != Int64(0):
                at = pages.address + Int64(position >> pages.shift) * pages.bytes
                page = ptx.load_index_saturated(at, pages.bytes)
                within = position & (Int32(1) << pages.shift) - 1
                result = (Int64(page) << Int64(pages.shift)) + Int64(within)
        return result

    @cute.jit
    def _select(
        self,
        source: Keys,
        cut: Cut,
        output: Output,
        placed: Placed,
        shared: SharedMemory,
        who: Lane,
    ) -> None:
        """Store the positions of selected keys, in order. All threads.

        A key's rank is the number of selected keys before it: those above the bound and, at most
        ``cut.ties``, those that equal it. A thread's numbers of both are summed as one integer,
        the second times 2^16.
        """
        totals = shared.totals
        above, equal = placed.above, placed.equal
        for base in cutlass.range(0, source.vectors, self.plan.threads, unroll=1):
            # Until all are stored: where many are equal, they are soon.
            if above + cutlass.min(equal, cut.ties) < output.k:
                four, first = self._load_vector(source, base + who.thread)
                # 1 for a key above the bound, and 2^16 for one that equals it if such are selected.
                flag = Int32(cut.ties > 0) << 16
                flags = [Int32(key > cut.bound) + Int32(key == cut.bound) * flag for key in four]
                mine = flags[0] + flags[1] + flags[2] + flags[3]
                upto = self._inclusive_sum(mine, who.lane)
                prefix = self._prefix(upto, totals, who)
                before = prefix.before + upto - mine
                over, same = above + (before & 0xFFFF), equal + (before >> 16)
                if mine != 0:
                    for e in cutlass.range_constexpr(4):
                        if (flags[e] == 1) | ((flags[e] > 1) & (same < cut.ties)):
                            position = first + e
                            if output.positions != Uint32(0):
                                at = output.positions + Uint32(position * 4)
                                position = ptx.load_shared_int(at)
                            rank = over + cutlass.min(same, cut.ties)
                            ptx.store_global_int64(
                                output.out + Int64(rank) * 8,
                                self._result(output.origin + position, output.pages),
                            )
                        over += flags[e] & 1
                        same += flags[e] >> 16
                above, equal = above + (prefix.total & 0xFFFF), equal + (prefix.total >> 16)
                totals = totals ^ Uint32(TOTALS_BYTES)
