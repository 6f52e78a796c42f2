"""The k highest of a long row of index scores by a cluster of blocks; see ``topk``.

* Each block looks at all groups and finds the same threshold for itself. It gathers the entries
  that reach it of its share of the row, neighbours, so the blocks' candidates follow one another.
* It gives all blocks these keys, so each finds the same bound for itself, and how many entries the
  blocks before it store. Its own follow them.
* If a block has too many candidates, the first block chooses alone.

The blocks wait for each other once, and no block writes to another after that.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.topk import _APART, _TOTALS, TopkKernel, _bits
from dsv4.cute.sm90.topk_plan import CANDIDATES, SHARE, TopkClusterPlan

Value = Any


class TopkClusterKernel(TopkClusterPlan, TopkKernel):
    """See the module."""

    def _rooms(self, smem: Value) -> Value:
        """And of all blocks' keys and how many they are."""
        rooms = TopkKernel._rooms(self, smem)
        gathered = self._room(smem, self.blocks * SHARE * 4)
        return *rooms, (gathered, self._room(smem, self.blocks * 4))

    @cute.jit
    def _row(self, keys_of: Value, maxima: Value, wanted: Value, rank: Value, rooms: Value) -> None:
        """Choose from a row of more than k, by all blocks or the first."""
        lists, room, shared = rooms
        chosen = Int32(0)
        if keys_of[1] > wanted[2]:
            chosen = self._together(keys_of, maxima, wanted, lists, (*shared, rank), room)
        if (chosen == 0) & (rank == 0):
            self._alone(keys_of, maxima, wanted, lists, room)

    @cute.jit
    def _together(
        self, keys_of: Value, maxima: Value, wanted: Value, lists: Value, share: Value, room: Value
    ) -> Value:
        """Choose from a row by all blocks; 0 if there are too many candidates."""
        cute.arch.cluster_arrive_relaxed()
        start, shown = keys_of
        k, slack, _, row = wanted
        listed, ids = lists
        gathered, numbers, rank = share
        keys, thread = ids + Uint32(_APART), room[4]
        all_groups = self._groups(maxima, shown)
        least, top = self._least(all_groups, k, slack, room)
        part = ((all_groups[3] + self.blocks - 1) >> _bits(self.blocks)) * 4
        first = rank * part
        own = cutlass.max(cutlass.min(all_groups[2] - first, part), Int32(0))
        groups = (maxima + Int64(first) * 4, Uint32(0), own, (own + 3) >> 2)
        count = Int32(SHARE + 1)
        kept = self._gather(groups, least - 1, (listed, 0), room)
        origin = first * self.group
        if kept <= CANDIDATES:
            vectors = kept * (self.group // 4)
            source = (start + Int64(origin) * 4, listed, shown - origin, vectors)
            count = self._gather(source, least - 1, (ids, _APART), room)
        vectors = (count + 3) >> 2
        # Before a block writes to another, that has to run.
        cute.arch.cluster_wait()
        if count <= SHARE:
            for i in cutlass.range(thread, vectors, self.threads, unroll=1):
                four = ptx.load_shared(keys + Uint32(i * 16), 4)
                # Vectors of the blocks alternate, so that as many of each are looked at.
                to = gathered + Uint32((i * self.blocks + rank) * 16)
                for peer in cutlass.range_constexpr(self.blocks):
                    ptx.store_shared_cluster4(ptx.map_to_cta(to, Int32(peer)), four)
        if thread < self.blocks:
            ptx.store_shared_cluster(
                ptx.map_to_cta(numbers + Uint32(rank * 4), thread), Uint32(count)
            )
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        most, total = Int32(0), Int32(0)
        for peer in cutlass.range_constexpr(self.blocks):
            one = ptx.load_shared_int(numbers + Uint32(peer * 4))
            most, total = cutlass.max(most, one), total + one
        fits = Int32(most <= SHARE)
        if most <= SHARE:
            peer = thread & self.blocks - 1
            there = ptx.load_shared_int(numbers + Uint32(peer * 4))
            all_ = (gathered, None, there, ((most + 3) >> 2) * self.blocks)
            bound, equal = self._bound(all_, least, top, total, k, room)
            others = self._before_me(all_, bound, (peer, rank), room)
            mine = (ptx.shared_to_generic(keys), Uint32(0), count, vectors)
            self._choose(mine, bound, equal, (row, k, ids, origin), others, room)
        return fits

    @cute.jit
    def _vector(self, source: Value, number: Value) -> Value:
        """As of ``TopkKernel``; also of the candidates of all blocks, which are in no list.

        A thread sees those of one block, whose number is in place of the limit.
        """
        if cutlass.const_expr(source[1] is None and source[2] is not None):
            start, _, limit, vectors = source
            there = limit - (number >> _bits(self.blocks)) * 4
            if number >= vectors:
                there = Int32(0)
            return ptx.load_keys4(ptx.shared_to_generic(start + Uint32(number * 16)), there), Int32(
                0
            )
        return TopkKernel._vector(self, source, number)

    @cute.jit
    def _before_me(self, source: Value, bound: Value, who: Value, room: Value) -> Value:
        """How many keys of the blocks before are above the bound, and how many equal it."""
        peer, rank = who
        _, _, totals, _, thread, lane, warp = room
        mine = Int32(0)
        if peer < rank:
            for number in cutlass.range(thread, source[3], self.threads, unroll=1):
                four, _ = self._vector(source, number)
                for i in cutlass.range_constexpr(4):
                    mine += Int32(four[i] > bound) + (Int32(four[i] == bound) << 16)
        # Others may still read what the next step stores in the first half.
        _, total = self._before(ptx.warp_sum(mine), totals ^ Uint32(_TOTALS), (lane, warp))
        return total & 0xFFFF, total >> 16
