"""Warps that expand ``"fp8"`` entries of two paged caches to bfloat16 in shared memory.

A warp has 8 or 16 rows of a block of 64; a lane has a quarter of each group of 64 dims in one or
two of them, so that a load and its place differ between groups by constants alone. Before a stage
is free, some of a block's codes are in the lane's registers and the others in shared memory, which
only this lane writes and reads: neither has room for all. A code goes by
way of float16, which holds it exactly, and bfloat16, which does too, to a product with the scale
that is rounded once.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.attention_plan import (
    BLOCK,
    INFO_BYTES,
    NOPE,
    ROPE,
    STAGE_BYTES,
    STAGES,
    AttentionPlan,
    ColumnsPlan,
)

Value = Any
_ENTRY = NOPE + 2 * ROPE  # bytes of an entry, but for its scales
_GROUPS = NOPE // 64
_COLUMNS = BLOCK * 128  # bytes between groups of 64 dims in shared memory
_SCAN = 40  # slots that a lane asks for at a time to find the last, times the warps that do
_SCANNED = 8  # named barrier of the first group of warps that looks for the last


class Entries(PlannedKernel):
    """The part of a group of such warps in a kernel, ``plan.dequant_groups`` of which it has.

    A cache is (address, bytes between pages, log2 of a page's entries, address of slots, width).
    """

    plan: AttentionPlan | ColumnsPlan

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """A lane's rows and groups of 64 dims, in the order in which they are expanded."""
        return [
            (h, g) for h in range(BLOCK // (8 * self.plan.dequant_warps)) for g in range(_GROUPS)
        ]

    @cute.jit
    def expand_part(self, caches: Value, item: Value, shared: Value, ring: Value) -> Value:
        """All blocks of a part of a token; returns the ring's next stage and parity.

        Codes are copied, and slots loaded, while the block before is multiplied. Of several
        groups, each has a stage and every so manyeth block.
        """
        token, part, parts, scan = item
        info, full, empty, at, own, group, warp, lane = shared
        stage, parity = ring
        stride = parts * self.plan.dequant_groups
        begin = (caches[0][4] + BLOCK - 1) // BLOCK
        sizes = (token, caches[0][4], caches[1][4], begin)
        row = warp * (BLOCK // self.plan.dequant_warps) + lane // 4
        place = Uint32(row * 128 + ((lane % 4 * 2) ^ (lane // 4)) * 16)
        tail = Uint32(row * 128 + (lane % 4 ^ (lane // 4)) * 16 + _GROUPS * _COLUMNS)
        block = part + group * parts
        found = self._ask(caches, sizes, block, lane)
        blocks = begin + (caches[1][4] + BLOCK - 1) // BLOCK
        every = (token, begin, blocks)
        scanned = (info + Uint32(STAGES * INFO_BYTES), group, warp, lane)
        # Of two groups, the first looks after it has asked for its codes, which are wanted first.
        early = (group == 0) & (self.plan.dequant_groups > 1)
        if (scan == 1) & (not early):
            blocks = self._used(caches, every, scanned)
        slots, there = self._share(found, warp, lane)
        starts, scales = self._find(slots, self._cache(caches, begin, block), lane)
        codes = self._load_codes(slots, starts)
        self._copy_codes(slots, starts, own)
        found = self._ask(caches, sizes, block + stride, lane)
        if (scan == 1) & early:
            blocks = self._used(caches, every, scanned)
        # Of a part without any block, the first is one of nothing.
        more = (group == 0) | (block < blocks)
        while more:
            final = block + parts >= blocks
            block += stride
            more = block < blocks
            ptx.mbarrier_wait(empty + Uint32(stage * 8), parity)
            to = at + Uint32(stage * STAGE_BYTES)
            if cutlass.const_expr(not self.plan.rope_staged):
                self._copy_tails(slots, starts, to + tail)
            if warp == 0 and lane == 0:
                described = [there[0], there[1], Uint32(final), Uint32(0)]
                ptx.store_shared4(info + Uint32(stage * INFO_BYTES), described)
            self._expand_held(codes, scales, to + place)
            self._expand_copied(scales, own, to, (place, tail))
            ptx.wait_async_copies(0)
            if cutlass.const_expr(self.plan.producer_fences):
                ptx.fence_proxy_async_shared()
            ptx.mbarrier_arrive(full + Uint32(stage * 8))
            slots, there = self._share(found, warp, lane)
            starts, scales = self._find(slots, self._cache(caches, begin, block), lane)
            codes = self._load_codes(slots, starts)
            self._copy_codes(slots, starts, own)
            found = self._ask(caches, sizes, block + stride, lane)
            stage += self.plan.dequant_groups
            if stage >= STAGES:
                stage -= STAGES
                parity = parity ^ 1
        ptx.wait_async_copies(0)
        return stage, parity

    def _byte(self, scales: Value, h: int, g: int) -> Value:
        """The scale of a row's group."""
        return (scales[2 * h + g // 4] >> Uint32(g % 4 * 8)) & Uint32(255)

    def _expand_held(self, codes: Value, scales: Value, to: Value) -> None:
        """Pieces that are in registers."""
        for n, (h, g) in enumerate(self.pieces[: self.plan.register_pieces]):
            self._expand(codes[n], self._byte(scales, h, g), to, h * 1024 + g * _COLUMNS)

    @cute.jit
    def _expand_copied(self, scales: Value, own: Value, to: Value, places: Value) -> None:
        """Those in shared memory, and tails."""
        place, tail = places
        ptx.wait_async_copies(0 if self.plan.rope_staged else 1)
        later, step = self.pieces[self.plan.register_pieces :], 512 * self.plan.dequant_warps
        rows = range(BLOCK // (8 * self.plan.dequant_warps)) if self.plan.rope_staged else ()
        tails = [(h, c) for h in rows for c in range(2)]
        # All before the first is stored, behind which the next would wait.
        waiting = [
            ptx.load_shared(own + Uint32(n * step), 4) for n in range(len(later) + len(tails))
        ]
        for n, (h, g) in enumerate(later):
            skip = h * 1024 + g * _COLUMNS
            self._expand(waiting[n], self._byte(scales, h, g), to + place, skip)
        for n, (h, c) in enumerate(tails):
            words = waiting[len(later) + n]
            ptx.store_shared4((to + tail) ^ Uint32(c * 64), words, h * 1024)

    def _load_slot(self, row: Value, number: Value, width: Value) -> Value:
        """Both words of a slot, all ones beyond the end."""
        return ptx.load_global2_or_ones(row + Int64(number) * 8, Int32(number < width))

    def _slot(self, words: Value) -> Value:
        """A slot as int32; all negative ones are -1."""
        return cutlass.max(Int32(words[0]) | (Int32(words[1]) >> 31), Int32(-1))

    @cute.jit
    def _used(self, caches: Value, sizes: Value, where: Value) -> Value:
        """How many blocks there are up to the last slot that is not negative.

        Every thread looks at many at a time and tells the others, so that it mostly takes no longer
        than one load.
        """
        token, begin, blocks = sizes
        room, group, warp, lane = where
        place = room + Uint32(group * self.plan.scan_bytes)
        used: Value = Int32(0)
        own = warp * 32 + lane
        threads, count = 32 * self.plan.dequant_warps, _SCAN // self.plan.dequant_warps
        for first in cutlass.range(own, blocks * BLOCK, count * threads, unroll=1):
            numbers = [first + i * threads for i in range(count)]
            loaded = [self._load_of_both(caches, token, begin, number) for number in numbers]
            for i in cutlass.range_constexpr(count):
                if self._slot(loaded[i]) >= 0:
                    used = numbers[i] // BLOCK + 1
        for step in cutlass.range_constexpr(5):
            used = cutlass.max(used, cute.arch.shuffle_sync_bfly(used, 1 << step))
        # Nobody still reads what was told of the token before.
        cute.arch.barrier(barrier_id=_SCANNED + group, number_of_threads=threads)
        if lane == 0:
            ptx.store_shared_int(place + Uint32(warp * 4), used)
        cute.arch.barrier(barrier_id=_SCANNED + group, number_of_threads=threads)
        for four in cutlass.range_constexpr(self.plan.dequant_warps // 4):
            for other in ptx.load_shared(place + Uint32(four * 16), 4):
                used = cutlass.max(used, Int32(other))
        return used

    @cute.jit
    def _load_of_both(self, caches: Value, token: Value, begin: Value, number: Value) -> Value:
        """A slot by its number among all blocks."""
        row, limit = self._row(caches[0], token), caches[0][4]
        if number >= begin * BLOCK:
            row, limit = self._row(caches[1], token), caches[1][4]
            number -= begin * BLOCK
        return self._load_slot(row, number, limit)

    @cute.jit
    def prefetch_slots(self, caches: Value, token: Value, thread: Value) -> None:
        """Bring a token's slots to the level-2 cache, as far as there are threads."""
        for c in cutlass.range_constexpr(2):
            if thread * 16 < caches[c][4]:
                ptx.prefetch_l2(self._row(caches[c], token) + Int64(thread) * 128)

    def _row(self, cache: Value, token: Value) -> Value:
        """Where a token's slots are."""
        return cache[3] + Int64(token) * cache[4] * 8

    @cute.jit
    def _cache(self, caches: Value, begin: Value, block: Value) -> Value:
        """Of a block: where its pages are, bytes of one, its entries' log2."""
        data, stride, shift = caches[0][0], caches[0][1], caches[0][2]
        if block >= begin:
            data, stride, shift = caches[1][0], caches[1][1], caches[1][2]
        return data, stride, shift

    @cute.jit
    def _ask(self, caches: Value, sizes: Value, block: Value, lane: Value) -> Value:
        """Load two slots of a block, none beyond the last."""
        token, width, second_width, begin = sizes
        row, limit, number = self._row(caches[0], token), width, block
        if block >= begin:
            row, limit, number = self._row(caches[1], token), second_width, block - begin
        number = number * BLOCK + lane
        return tuple(self._load_slot(row, number + 32 * h, limit) for h in range(2))

    @cute.jit
    def _share(self, found: Value, warp: Value, lane: Value) -> Value:
        """Slots of the lane's two rows, and a bit for each of the block's 64."""
        low, high = self._slot(found[0]), self._slot(found[1])
        there = (
            Uint32(cute.arch.vote_ballot_sync(low >= 0)),
            Uint32(cute.arch.vote_ballot_sync(high >= 0)),
        )
        mine = low
        if warp >= self.plan.dequant_warps // 2:
            mine = high
        rows = BLOCK // self.plan.dequant_warps
        source = warp % (self.plan.dequant_warps // 2) * rows + lane // 4
        slots = tuple(cute.arch.shuffle_sync(mine, source + 8 * h) for h in range(rows // 8))
        return slots, there

    @cute.jit
    def _find(self, slots: Value, cache: Value, lane: Value) -> Value:
        """Of each row: where the lane's codes are, and the scales' bytes."""
        data, stride, shift = cache
        starts: list[Value] = []
        scales: list[Value] = []
        for h in cutlass.range_constexpr(len(slots)):
            safe = cutlass.max(slots[h], Int32(0))
            page = data + Int64(safe >> shift) * stride
            entry = safe & ((1 << shift) - 1)
            source = page + Int64((_ENTRY << shift) + entry * 8)
            scales.extend(ptx.load_global_or_zero(source, 2, Int32(slots[h] >= 0)))
            starts.append(page + Int64(entry * _ENTRY + lane % 4 * 16))
        return starts, scales

    def _load_codes(self, slots: Value, starts: Value) -> list[Value]:
        """The lane's 16 codes of the first pieces, zeros if there is no entry."""
        return [
            ptx.load_global_or_zero(starts[h], 4, Int32(slots[h] >= 0), g * 64)
            for h, g in self.pieces[: self.plan.register_pieces]
        ]

    def _copy_codes(self, slots: Value, starts: Value, own: Value) -> None:
        """Those of the others, and tails, to shared memory."""
        step = 512 * self.plan.dequant_warps
        later = [(h, g * 64) for h, g in self.pieces[self.plan.register_pieces :]]
        if self.plan.rope_staged:
            later += [(h, NOPE + c * 64) for h in range(len(slots)) for c in range(2)]
        for n, (h, offset) in enumerate(later):
            ptx.async_copy16_or_zero(own, starts[h], Int32(slots[h] >= 0) * 16, n * step, offset)
        ptx.commit_async_copies()

    @cute.jit
    def _copy_tails(self, slots: Value, starts: Value, place: Value) -> None:
        """Dims of the rotary embedding, bfloat16 as they are."""
        for h in cutlass.range_constexpr(len(slots)):
            wanted = Int32(slots[h] >= 0) * 16
            for c in cutlass.range_constexpr(2):
                to = place ^ Uint32(c * 64)
                ptx.async_copy16_or_zero(to, starts[h], wanted, h * 1024, NOPE + c * 64)
        ptx.commit_async_copies()

    def _expand(self, codes: Value, byte: Value, place: Value, offset: int) -> None:
        """16 codes of a group of a row."""
        factor = ptx.e8m0_to_bfloat16x2(byte)
        words = [ptx.e4m3x2_times_bfloat16x2(codes[w // 2], w % 2, factor) for w in range(8)]
        ptx.store_shared4(place, words[:4], offset)
        ptx.store_shared4(place ^ Uint32(16), words[4:], offset)
