"""Top-k selection from few long rows: the CTAs of a cluster share a row. ``topk`` has the steps.

Tiling and ownership
    Every CTA reads all group maxima and finds the same threshold for itself (step 1): the cluster
    needs no exchange for it. Groups are split into ``plan.ctas`` neighbouring parts; the CTA of
    rank r gathers groups and candidates of part r (steps 2 and 3). So the candidates of the CTAs,
    one after another, are in the row's order.

Exchange
    Each CTA stores its candidates' keys and their number to all CTAs through distributed shared
    memory. Then each finds the same cut for itself (step 4), and how many selected positions the
    preceding CTAs store; its own follow them (step 5). Positions are not exchanged: a CTA stores
    those of its own candidates.

Barriers
    Cluster barrier 1: all CTAs run, so that their shared memory may be written. Its arrival comes
    first in the kernel, relaxed, because it orders no data; the wait comes before the first remote
    store.
    Cluster barrier 2: all remote stores are visible. No CTA writes to another after it, so a CTA
    may end while others still read their own memory.
    Both are passed by all CTAs of a row, or by none: the condition is the row's length.

Too many candidates
    If a CTA has more than ``SHARE``, all learn it from the numbers, and the CTA of rank 0 selects
    alone. So does it in rows of at most ``direct`` entries.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.topk import TopkKernel
from dsv4.cute.sm90.topk_plan import CANDIDATES, SHARE, TopkArgs, TopkClusterPlan
from dsv4.cute.sm90.topk_rows import (
    KEY_OFFSET,
    TOTALS_BYTES,
    ClusterKeys,
    Index,
    Keys,
    Lane,
    Output,
    Placed,
    Row,
    RowKeys,
    SharedMemory,
    Words,
    log2,
)


class TopkClusterKernel(TopkKernel):
    """The kernel of a cluster a row."""

    plan: TopkClusterPlan

    def _shared(self, smem: cutlass.memory.SmemAllocator) -> SharedMemory:
        """The same and the candidates of all CTAs."""
        shared = TopkKernel._shared(self, smem)
        return shared._replace(
            cluster_keys=self._allocate(smem, self.plan.ctas * SHARE * 4),
            cluster_counts=self._allocate(smem, self.plan.ctas * 4),
        )

    @cute.jit
    def _select_from_row(
        self, args: TopkArgs, row: Row, rank: Int32, shared: SharedMemory, who: Lane
    ) -> None:
        """Select from a row of more than k, by all CTAs or the first."""
        selected = Int32(0)
        if row.visible > args.direct:
            selected = self._select_together(args, row, rank, shared, who)
        if (selected == 0) & (rank == 0):
            self._select_alone(args, row, shared, who)

    @cute.jit
    def _select_together(
        self, args: TopkArgs, row: Row, rank: Int32, shared: SharedMemory, who: Lane
    ) -> Int32:
        """Select from a row by all CTAs; 0, and nothing stored, if one has too many candidates."""
        cute.arch.cluster_arrive_relaxed()
        k, ctas = args.k, self.plan.ctas
        # Computed before all branches: within them, addresses are computed again for every use.
        candidate_keys = shared.candidate_keys
        maxima = self._group_maxima(row)
        limits = self._candidate_range(maxima, k, args.slack, shared, who)
        # This CTA's part of the groups, whole vectors of their maxima.
        part = ((maxima.vectors + ctas - 1) >> log2(ctas)) * 4
        first = rank * part
        own = cutlass.max(cutlass.min(maxima.limit - first, part), Int32(0))
        own_maxima = RowKeys(row.maxima + Int64(first) * 4, Uint32(0), own, (own + 3) >> 2)
        count = Int32(SHARE + 1)
        gathered = self._gather(own_maxima, limits.least - 1, shared.groups, 0, shared, who)
        origin = first * self.plan.group
        if gathered <= CANDIDATES:
            source = RowKeys(
                vectors=gathered * self.plan.group_vectors,
                address=row.keys + Int64(origin) * 4,
                groups=shared.groups,
                limit=row.visible - origin,
            )
            count = self._gather(
                source, limits.least - 1, shared.positions, KEY_OFFSET, shared, who
            )
        vectors = (count + 3) >> 2
        # Before a CTA writes to another, that has to run.
        cute.arch.cluster_wait()
        self._share(candidate_keys, shared, count, rank, who)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        most, total = Int32(0), Int32(0)
        for peer in cutlass.range_constexpr(ctas):
            of_peer = ptx.load_shared_int(shared.cluster_counts + Uint32(peer * 4))
            most, total = cutlass.max(most, of_peer), total + of_peer
        fits = Int32(most <= SHARE)
        if most <= SHARE:
            # A thread's vectors are ``plan.threads`` apart, a multiple of the CTAs: all of one CTA.
            peer = who.thread & ctas - 1
            there = ptx.load_shared_int(shared.cluster_counts + Uint32(peer * 4))
            together = ClusterKeys(shared.cluster_keys, there, ((most + 3) >> 2) * ctas)
            cut = self._cut(together, limits, total, k, shared, who)
            placed = self._placed_before(together, cut.bound, peer, rank, shared, who)
            address = ptx.shared_to_generic(candidate_keys)
            mine = RowKeys(address, Uint32(0), count, vectors)
            output = Output(row.out, k, shared.positions, origin, row.pages)
            self._select(mine, cut, output, placed, shared, who)
        return fits

    @cute.jit
    def _share(
        self, candidate_keys: Uint32, shared: SharedMemory, count: Int32, rank: Int32, who: Lane
    ) -> None:
        """Store this CTA's candidates, if they are not too many, and their number to all CTAs."""
        ctas, vectors = self.plan.ctas, (count + 3) >> 2
        if count <= SHARE:
            for i in cutlass.range(who.thread, vectors, self.plan.threads, unroll=1):
                four = ptx.load_shared(candidate_keys + Uint32(i * 16), 4)
                # Vectors of the CTAs alternate, so that as many of each are looked at.
                target = shared.cluster_keys + Uint32((i * ctas + rank) * 16)
                for peer in cutlass.range_constexpr(ctas):
                    ptx.store_shared_cluster4(ptx.map_to_cta(target, Int32(peer)), four)
        if who.thread < ctas:
            number = shared.cluster_counts + Uint32(rank * 4)
            ptx.store_shared_cluster(ptx.map_to_cta(number, who.thread), Uint32(count))

    def _load_vector(self, source: Keys, number: Index) -> tuple[Words, Index]:
        """The same, and also candidates of all CTAs, whose positions mean nothing."""
        if isinstance(source, ClusterKeys):
            return self._load_cluster_vector(source, number), Int32(0)
        return TopkKernel._load_vector(self, source, number)

    @cute.jit
    def _load_cluster_vector(self, source: ClusterKeys, number: Index) -> Words:
        """Four candidates of the CTA whose vectors this thread reads; 0 where there is none."""
        there = source.limit - (number >> log2(self.plan.ctas)) * 4
        if number >= source.vectors:
            there = Int32(0)
        address = ptx.shared_to_generic(source.address + Uint32(number * 16))
        return ptx.load_keys4(address, there)

    @cute.jit
    def _placed_before(
        self,
        source: ClusterKeys,
        bound: Uint32,
        peer: Int32,
        rank: Int32,
        shared: SharedMemory,
        who: Lane,
    ) -> Placed:
        """Return how many keys of the preceding CTAs are above the bound, and how many equal it.

        Args:
            source: Candidates of all CTAs.
            bound: The bound.
            peer: Rank of the CTA whose candidates this thread reads.
            rank: Rank of this CTA.
            shared: Shared memory.
            who: This thread.
        """
        # Both numbers are summed as one integer, the second times 2^16.
        mine = Int32(0)
        if peer < rank:
            threads = self.plan.threads
            for number in cutlass.range(who.thread, source.vectors, threads, unroll=1):
                four, _ = self._load_vector(source, number)
                for i in cutlass.range_constexpr(4):
                    mine += Int32(four[i] > bound) + (Int32(four[i] == bound) << 16)
        # The second buffer, because ``_select`` begins with the first while others read this one.
        totals = shared.totals ^ Uint32(TOTALS_BYTES)
        prefix = self._prefix(ptx.warp_sum(mine), totals, who)
        return Placed(prefix.total & 0xFFFF, prefix.total >> 16)
