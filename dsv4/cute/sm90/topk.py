"""Top-k selection from long rows of indexer logits: positions of the k highest keys, ascending.

Keys are unsigned integers that order as the logits do (``dsv4.triton._lib.index_logits``); 0: no
entry. Of equal keys the first ones are selected. ``topk_cluster`` has the variant of few rows,
``topk_rows`` the device functions of both that keep keys in order.

Tiling and ownership
    A CTA has a row. A vector is four neighbouring keys, one 16-byte load. Where a thread's vectors
    may come in any order (thresholds, counts), they are ``plan.threads`` apart. Where order matters
    (candidates, results), a warp has 32 or ``32 * plan.gathered_vectors`` neighbouring vectors, a
    lane of each 32 one.

Algorithm
    1. Threshold (``_candidate_range``). The row, or its groups' maxima where it is longer than
       ``direct``, is split into ``plan.classes`` classes in turn. The threshold is about the k-th
       highest of the classes' maxima. At least k keys reach it; of random keys at most 1.4 k.
    2. Groups (``_gather``). The groups whose maximum reaches the threshold are listed.
    3. Candidates (``_gather``). Keys of these groups that reach the threshold are copied to shared
       memory with their positions, in order.
    4. Cut (``_cut``). The k-th highest candidate is found by counting candidates in ``BUCKETS``
       equal parts of their range, then in the part that holds it: 1 to 3 rounds.
    5. Selection (``_select``). Positions of keys above the k-th, and of the first that equal it,
       are stored in order, or with ``plan.slots`` their slots; a prefix sum over the CTA gives
       their places.

    If more than ``CANDIDATES`` groups reach the threshold, it is taken again from the whole row. If
    there are more than ``CANDIDATES`` candidates, because high keys are neighbours, it is taken
    again from the keys of the listed groups. If there still are, because keys are equal, steps 4
    and 5 read the row from memory, which is slow.

Barriers
    ``sync_threads`` alone. ``_prefix`` has one barrier for each step of a loop: the warps' totals
    go to two buffers in turn, because a warp may still read those of this step while another
    stores those of the next. A round of ``_search`` has three: after counting, after the warps'
    totals, and after the bucket that was found.
    griddepcontrol.wait precedes the first load of keys, maxima, ``visible`` and the page table:
    preceding kernels write all of them.

Numerics and determinism
    Counts are of integers and places are prefix sums, so no order of threads changes a result.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.topk_plan import BUCKETS, CANDIDATES, TOPK_ABI, TopkArgs
from dsv4.cute.sm90.topk_rows import (
    KEY_OFFSET,
    TOTALS_BYTES,
    Cut,
    KeyRange,
    Keys,
    Lane,
    Output,
    PageRow,
    Placed,
    Row,
    RowKeys,
    SharedKeys,
    SharedMemory,
    Threshold,
    TopkRows,
    log2,
)

# Keys that reach a threshold where nobody has counted them: a search goes on until it has.
_UNKNOWN = 1 << 30


class TopkKernel(TopkRows):
    """The kernel of one CTA a row."""

    abi = TOPK_ABI

    @cute.jit
    def __call__(self, args: TopkArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.indexer`` launches the cubin itself."""
        self._launch(self.kernel(args), stream, min_blocks_per_mp=0)

    @cute.kernel
    def kernel(self, args: TopkArgs) -> None:
        """Select from a token's row, by a CTA or a cluster of ``plan.ctas``."""
        cta, _, _ = cute.arch.block_idx()
        token, rank = cta >> log2(self.plan.ctas), cta & self.plan.ctas - 1
        shared = self._shared(cutlass.memory.SmemAllocator())
        who = self._lane()
        # The next kernel's CTAs may start where SMs have room.
        cute.arch.griddepcontrol_launch_dependents()
        self._clear(shared.counts, who.thread)
        # From here on memory is what the preceding kernels wrote.
        cute.arch.griddepcontrol_wait()
        visible = ptx.load_index_saturated(
            args.visible + Int64(token) * args.visible_bytes, args.visible_bytes
        )
        row = Row(
            visible=cutlass.min(visible, args.capacity),
            out=args.out + Int64(token) * args.k * 8,
            keys=args.keys + Int64(token) * args.key_stride * 4,
            maxima=args.maxima + Int64(token) * args.maxima_stride * 4,
            pages=self._pages_of(args, token),
        )
        if row.visible > args.k:
            self._select_from_row(args, row, rank, shared, who)
        elif rank == 0:
            self._store_all(row, args.k, who.thread)

    def _select_from_row(
        self, args: TopkArgs, row: Row, rank: Int32, shared: SharedMemory, who: Lane
    ) -> None:
        """Select from a row of more than k."""
        self._select_alone(args, row, shared, who)

    @cute.jit
    def _pages_of(self, args: TopkArgs, token: Int32) -> PageRow:
        """Where the entries of the token's sequence lie."""
        address = Int64(0)
        if cutlass.const_expr(self.plan.slots):
            sequence = ptx.load_index_saturated(
                args.sequences + Int64(token) * args.sequence_bytes, args.sequence_bytes
            )
            if sequence >= 0:
                address = args.table + Int64(sequence) * args.table_stride * args.table_bytes
        return PageRow(address, args.page_shift, args.table_bytes)

    def _lane(self) -> Lane:
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread >> 5)
        return Lane(thread, thread & 31, warp)

    def _shared(self, smem: cutlass.memory.SmemAllocator) -> SharedMemory:
        """Addresses of what is in shared memory."""
        return SharedMemory(
            counts=self._allocate(smem, BUCKETS * 4),
            classes=self._allocate(smem, self.plan.classes * 4),
            groups=self._allocate(smem, CANDIDATES * 4),
            positions=self._allocate(smem, 2 * CANDIDATES * 4),
            totals=self._allocate(smem, 2 * TOTALS_BYTES),
            extremes=self._allocate(smem, 2 * TOTALS_BYTES),
            threshold=self._allocate(smem, 16),
            cluster_keys=Uint32(0),
            cluster_counts=Uint32(0),
        )

    def _allocate(self, smem: cutlass.memory.SmemAllocator, size: int) -> Uint32:
        return Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=512).toint())

    @cute.jit
    def _store_all(self, row: Row, k: Int32, thread: Int32) -> None:
        """Store all positions that are seen, at most k, then -1."""
        for slot in cutlass.range(thread, k, self.plan.threads, unroll=1):
            result = Int64(-1)
            if slot < row.visible:
                result = self._result(slot, row.pages)
            ptx.store_global_int64(row.out + Int64(slot) * 8, result)

    @cute.jit
    def _select_alone(self, args: TopkArgs, row: Row, shared: SharedMemory, who: Lane) -> None:
        """Select from a row of more than k by this CTA: steps 1 to 5 of the module."""
        k, slack = args.k, args.slack
        maxima = self._group_maxima(row)
        # Scalars, of which a record is made after each branch that changes some of them.
        address, groups, limit, vectors = row.keys, Uint32(0), row.visible, (row.visible + 3) >> 2
        limits = KeyRange(Uint32(0), Uint32(0))
        if row.visible > args.direct:
            limits = self._candidate_range(maxima, k, slack, shared, who)
            gathered = self._gather(maxima, limits.least - 1, shared.groups, 0, shared, who)
            if gathered <= CANDIDATES:
                groups, vectors = shared.groups, gathered * self.plan.group_vectors
            else:
                limits = self._candidate_range(
                    RowKeys(address, groups, limit, vectors), k, slack, shared, who
                )
        else:
            limits = self._candidate_range(
                RowKeys(address, groups, limit, vectors), k, slack, shared, who
            )
        source = RowKeys(address, groups, limit, vectors)
        gathered = self._gather(source, limits.least - 1, shared.positions, KEY_OFFSET, shared, who)
        if (gathered > CANDIDATES) & (groups != Uint32(0)):
            # High keys are neighbours, so their groups' maxima say too little: of all their keys.
            limits = self._candidate_range(source, k, slack, shared, who)
            gathered = self._gather(
                source, limits.least - 1, shared.positions, KEY_OFFSET, shared, who
            )
        positions = Uint32(0)
        if gathered <= CANDIDATES:
            address, groups = ptx.shared_to_generic(shared.candidate_keys), Uint32(0)
            positions = shared.positions
            limit, vectors = gathered, (gathered + 3) >> 2
        # Else too many keys are equal: the rest reads the row itself.
        source = RowKeys(address, groups, limit, vectors)
        cut = self._cut(source, limits, gathered, k, shared, who)
        output = Output(row.out, k, positions, Int32(0), row.pages)
        self._select(source, cut, output, Placed(Int32(0), Int32(0)), shared, who)

    @cute.jit
    def _candidate_range(
        self, source: Keys, k: Int32, slack: Int32, shared: SharedMemory, who: Lane
    ) -> KeyRange:
        """A threshold above 0 that at least k keys reach, if there are k; the highest key.

        A class's maximum is one key that reaches it, so k classes that reach the threshold are at
        least k keys.
        """
        a, b, c, d = Uint32(0), Uint32(0), Uint32(0), Uint32(0)
        threads = self.plan.threads
        # All that a thread has of 4096 vectors at once: their loads overlap.
        for number in cutlass.range(who.thread, source.vectors, threads, unroll=4096 // threads):
            four, _ = self._load_vector(source, number)
            a, b = cutlass.max(a, four[0]), cutlass.max(b, four[1])
            c, d = cutlass.max(c, four[2]), cutlass.max(d, four[3])
        high, other = cutlass.max(a, b), cutlass.max(c, d)
        low = cutlass.min(high, other)
        # A thread has two classes with 1024 threads, four with 512.
        if cutlass.const_expr(self.plan.classes == 4 * threads):
            ptx.store_shared4(shared.classes + Uint32(who.thread * 16), (a, b, c, d))
            low = cutlass.min(cutlass.min(a, b), cutlass.min(c, d))
        else:
            ptx.store_shared2(shared.classes + Uint32(who.thread * 8), (high, other))
        top, low = ptx.warp_max(cutlass.max(high, other)), ptx.warp_min(low)
        if who.lane == 0:
            ptx.store_shared2(shared.extremes + Uint32(who.warp * 8), (top, low))
        cute.arch.sync_threads()
        of_warp = Uint32((who.lane & self.plan.warps - 1) * 8)
        both = ptx.load_shared(shared.extremes + of_warp, 2)
        top, low = ptx.warp_max(both[0]), ptx.warp_min(both[1])
        # All classes reach the lowest maximum; of empty ones (0) nobody has counted the others.
        reached = Int32(_UNKNOWN)
        if low > Uint32(0):
            reached = Int32(self.plan.classes)
        classes = SharedKeys(shared.classes, Int32(self.plan.classes // 4))
        low = cutlass.max(low, Uint32(1))
        known = KeyRange(low, top)
        threshold = self._search(classes, known, reached, k, slack, shared, who)
        return KeyRange(threshold.key, top)

    @cute.jit
    def _cut(
        self,
        source: Keys,
        limits: KeyRange,
        count: Int32,
        k: Int32,
        shared: SharedMemory,
        who: Lane,
    ) -> Cut:
        """Return where the k highest of ``count`` keys within the limits end."""
        threshold = self._search(source, limits, count, k, Int32(0), shared, who)
        bound, ties = threshold.key, k - threshold.above
        if threshold.reached <= k:
            # All keys that reach the threshold are selected.
            bound, ties = threshold.key - 1, Int32(0)
        return Cut(bound, ties)

    @cute.jit
    def _search(
        self,
        source: Keys,
        known: KeyRange,
        reached: Int32,
        k: Int32,
        slack: Int32,
        shared: SharedMemory,
        who: Lane,
    ) -> Threshold:
        """Find a threshold that at least k keys reach, and at most ``slack`` more.

        It ends early at a single key, of which any number may be equal. A round splits the range
        into at most ``BUCKETS`` buckets of ``2^shift`` keys, counts keys in them, and goes on in
        the bucket that holds the k-th highest key.

        Args:
            source: Keys.
            known: A threshold that at least k keys reach, and the highest key.
            reached: How many reach that threshold.
            k: Number of keys to select.
            slack: Keys beyond k that the threshold may let through.
            shared: Shared memory; ``counts`` are zeros before and after.
            who: This thread.
        """
        threads = self.plan.threads
        low, top = known.least, known.top
        above = Int32(0)
        while (top > low) & (reached - k > slack):
            span = top - low
            # The shift that leaves 10 bits: 32 - clz(span) - 10.
            shift = cutlass.max(Int32(22) - Int32(cute.arch.clz(Int32(span))), Int32(0))
            for number in cutlass.range(who.thread, source.vectors, threads, unroll=2):
                four, _ = self._load_vector(source, number)
                for i in cutlass.range_constexpr(4):
                    # The lowest bucket, where most equal keys are, is not counted: ``reached`` less
                    # the other buckets is its count.
                    ptx.count_bucket(shared.counts, four[i] - low, span, shift)
            cute.arch.sync_threads()
            own = self._load_counts(shared.counts, who.thread)
            self._clear(shared.counts, who.thread)
            # A suffix sum over the CTA: how many keys are in this thread's buckets and higher ones.
            mine = sum(own[1:], own[0])
            upto = mine
            for step in cutlass.range_constexpr(5):
                more = cute.arch.shuffle_sync_down(upto, 1 << step)
                if who.lane + (1 << step) < 32:
                    upto += more
            if who.lane == 0:
                ptx.store_shared_int(shared.totals + Uint32(who.warp * 4), upto)
            cute.arch.sync_threads()
            total = self._load_total(shared.totals, who.lane)
            if who.lane <= who.warp:
                total = Int32(0)
            upto += ptx.warp_sum(total) + above
            if (upto - mine < k) & (upto >= k):
                self._store_bucket(own, upto - mine, k, who.thread, shared.threshold)
            if (who.thread == 0) & (upto < k):
                # All counted buckets have less than k: it is the lowest one.
                ptx.store_shared4(shared.threshold, (who.thread, upto, reached, Int32(0)))
            cute.arch.sync_threads()
            four = ptx.load_shared(shared.threshold, 4)
            low = low + (four[0] << Uint32(shift))
            top = low + cutlass.min(top - low, (Uint32(1) << Uint32(shift)) - 1)
            above, reached = Int32(four[1]), Int32(four[2])
        return Threshold(low, above, reached)

    def _clear(self, counts: Uint32, thread: Int32) -> None:
        """Make a thread's counts 0."""
        buckets = self.plan.thread_buckets
        address = counts + Uint32(thread * (4 * buckets))
        if buckets == 1:
            ptx.store_shared_int(address, Int32(0))
        elif buckets == 2:
            ptx.store_shared2(address, [Uint32(0)] * 2)
        else:
            ptx.store_shared4(address, [Uint32(0)] * 4)

    def _load_counts(self, counts: Uint32, thread: Int32) -> list[Int32]:
        """Load a thread's counts."""
        buckets = self.plan.thread_buckets
        address = counts + Uint32(thread * (4 * buckets))
        if buckets == 1:
            return [ptx.load_shared_int(address)]
        return [Int32(count) for count in ptx.load_shared(address, buckets)]

    @cute.jit
    def _store_bucket(
        self, own: list[Int32], above: Int32, k: Int32, thread: Int32, threshold: Uint32
    ) -> None:
        """Store which of a thread's buckets holds the k-th key, and the keys above and with it.

        One thread of the CTA calls it: the one whose buckets hold that key.
        """
        buckets = self.plan.thread_buckets
        for i in cutlass.range_constexpr(buckets - 1, -1, -1):
            upto = above + own[i]
            if (above < k) & (upto >= k):
                ptx.store_shared4(threshold, (thread * buckets + i, above, upto, Int32(0)))
            above = upto
