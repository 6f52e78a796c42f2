"""A warpgroup that expands ``"fp8"`` entries of two paged caches to bfloat16 in shared memory.

A warp has 16 rows of a block of 64; a lane has a quarter of each group of 64 dims in two of them,
so that a load and its place differ between groups by constants alone. Before a stage is free, the
codes of its first row are in the lane's registers, and those of the second in shared memory, which
only this lane writes and reads: neither has room for both. A code goes by way of float16, which
holds it exactly, and bfloat16, which does too, to a product with the scale that is rounded once.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute import _ptx as ptx
from dsv4.cute.sm90.attention_plan import (
    BLOCK,
    INFO_BYTES,
    NOPE,
    PRODUCER_WARPS,
    ROPE,
    SCAN_BYTES,
    STAGES,
    TILE_BYTES,
)

Value = Any
_ENTRY = NOPE + 2 * ROPE  # bytes of an entry, but for its scales
_GROUPS = NOPE // 64
_COLUMNS = BLOCK * 128  # bytes between groups of 64 dims in shared memory
_SCAN = 10  # slots that a lane asks for at a time when it looks for the last
_SCANNED = 8  # named barrier of the first warpgroup that looks for the last
_OWN = 32 * PRODUCER_WARPS * 16  # bytes between groups of codes that a lane has copied


class Entries:
    """The part of such a warpgroup in a kernel, ``expanders`` of which it has.

    A cache is (address, bytes between pages, log2 of a page's entries, address of slots, width).
    """

    expanders: int  # such warpgroups of a block of threads

    @cute.jit
    def expand_part(self, caches: Value, item: Value, shared: Value, ring: Value) -> Value:
        """All blocks of a part of a token; returns the ring's next stage and parity.

        Codes are copied, and slots loaded, while the block before is expanded. Of several
        warpgroups, each has a stage and every so manyeth block.
        """
        token, part, parts, scan = item
        info, full, empty, at, own, group, warp, lane = shared
        stage, parity = ring
        stride = parts * self.expanders
        begin = (caches[0][4] + BLOCK - 1) // BLOCK
        sizes = (token, caches[0][4], caches[1][4], begin)
        row = warp * 16 + lane // 4
        place = Uint32(row * 128 + ((lane % 4 * 2) ^ (lane // 4)) * 16)
        tail = Uint32(row * 128 + (lane % 4 ^ (lane // 4)) * 16 + _GROUPS * _COLUMNS)
        block = part + group * parts
        found = self._ask(caches, sizes, block, lane)
        blocks = begin + (caches[1][4] + BLOCK - 1) // BLOCK
        if scan == 1:
            scanned = (info + Uint32(STAGES * INFO_BYTES), group, warp, lane)
            blocks = self._used(caches, (token, begin, blocks), scanned)
        slots, there = self._share(found, warp, lane)
        starts, scales = self._find(slots, self._cache(caches, begin, block), lane)
        codes = self._load_codes(slots[0], starts[0])
        self._copy_codes(slots[1], starts[1], own)
        found = self._ask(caches, sizes, block + stride, lane)
        # Of a part without any block, the first is one of nothing.
        more = (group == 0) | (block < blocks)
        while more:
            final = block + parts >= blocks
            block += stride
            more = block < blocks
            ptx.wait(empty + Uint32(stage * 8), parity)
            to = at + Uint32(stage * TILE_BYTES)
            self._copy_tails(slots, starts, to + tail)
            if warp == 0 and lane == 0:
                described = [there[0], there[1], Uint32(final), Uint32(0)]
                ptx.store_shared4(info + Uint32(stage * INFO_BYTES), described)
            for g in cutlass.range_constexpr(_GROUPS):
                byte = (scales[g // 4] >> Uint32(g % 4 * 8)) & Uint32(255)
                self._expand(codes[g], byte, to + place, g * _COLUMNS)
            ptx.wait_copies(1)
            for g in cutlass.range_constexpr(_GROUPS):
                waiting = ptx.load_shared(own + Uint32(g * _OWN), 4)
                byte = (scales[2 + g // 4] >> Uint32(g % 4 * 8)) & Uint32(255)
                self._expand(waiting, byte, to + place, 1024 + g * _COLUMNS)
            ptx.wait_copies(0)
            ptx.fence_shared()
            ptx.arrive(full + Uint32(stage * 8))
            slots, there = self._share(found, warp, lane)
            starts, scales = self._find(slots, self._cache(caches, begin, block), lane)
            codes = self._load_codes(slots[0], starts[0])
            self._copy_codes(slots[1], starts[1], own)
            found = self._ask(caches, sizes, block + stride, lane)
            stage += self.expanders
            if stage >= STAGES:
                stage -= STAGES
                parity = parity ^ 1
        ptx.wait_copies(0)
        return stage, parity

    def _load_slot(self, row: Value, number: Value, width: Value) -> Value:
        """Both words of a slot, all ones beyond the end."""
        return ptx.load2_or_ones(row + Int64(number) * 8, Int32(number < width))

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
        place = room + Uint32(group * SCAN_BYTES)
        used: Value = Int32(0)
        own = warp * 32 + lane
        for first in cutlass.range(own, blocks * BLOCK, _SCAN * 32 * PRODUCER_WARPS, unroll=1):
            numbers = [first + i * 32 * PRODUCER_WARPS for i in range(_SCAN)]
            loaded = [self._load_of_both(caches, token, begin, number) for number in numbers]
            for i in cutlass.range_constexpr(_SCAN):
                if self._slot(loaded[i]) >= 0:
                    used = numbers[i] // BLOCK + 1
        for step in cutlass.range_constexpr(5):
            used = cutlass.max(used, cute.arch.shuffle_sync_bfly(used, 1 << step))
        # Nobody still reads what was told of the token before.
        cute.arch.barrier(barrier_id=_SCANNED + group, number_of_threads=32 * PRODUCER_WARPS)
        if lane == 0:
            ptx.store_shared_int(place + Uint32(warp * 4), used)
        cute.arch.barrier(barrier_id=_SCANNED + group, number_of_threads=32 * PRODUCER_WARPS)
        for other in ptx.load_shared(place, 4):
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
                ptx.prefetch(self._row(caches[c], token) + Int64(thread) * 128)

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
        if warp >= 2:
            mine = high
        source = warp % 2 * 16 + lane // 4
        slots = tuple(cute.arch.shuffle_sync(mine, source + 8 * h) for h in range(2))
        return slots, there

    @cute.jit
    def _find(self, slots: Value, cache: Value, lane: Value) -> Value:
        """Of both rows: where the lane's codes are, and the scales' bytes."""
        data, stride, shift = cache
        starts: list[Value] = []
        scales: list[Value] = []
        for h in cutlass.range_constexpr(2):
            safe = cutlass.max(slots[h], Int32(0))
            page = data + Int64(safe >> shift) * stride
            entry = safe & ((1 << shift) - 1)
            source = page + Int64((_ENTRY << shift) + entry * 8)
            scales.extend(ptx.load_or_zero(source, 2, Int32(slots[h] >= 0)))
            starts.append(page + Int64(entry * _ENTRY + lane % 4 * 16))
        return starts, scales

    def _load_codes(self, slot: Value, start: Value) -> list[Value]:
        """The lane's 16 codes of each group of a row, zeros if there is no entry."""
        wanted = Int32(slot >= 0)
        return [ptx.load_or_zero(start, 4, wanted, g * 64) for g in range(_GROUPS)]

    def _copy_codes(self, slot: Value, start: Value, own: Value) -> None:
        """The same, to shared memory."""
        wanted = Int32(slot >= 0) * 16
        for g in range(_GROUPS):
            ptx.copy_or_zero(own, start, wanted, g * _OWN, g * 64)
        ptx.commit_copies()

    @cute.jit
    def _copy_tails(self, slots: Value, starts: Value, place: Value) -> None:
        """Dims of the rotary embedding, bfloat16 as they are."""
        for h in cutlass.range_constexpr(2):
            wanted = Int32(slots[h] >= 0) * 16
            for c in cutlass.range_constexpr(2):
                to = place ^ Uint32(c * 64)
                ptx.copy_or_zero(to, starts[h], wanted, h * 1024, NOPE + c * 64)
        ptx.commit_copies()

    def _expand(self, codes: Value, byte: Value, place: Value, offset: int) -> None:
        """16 codes of a group of a row."""
        factor = ptx.e8m0_pair(byte)
        words = [ptx.e4m3_pair(codes[w // 2], w % 2, factor) for w in range(8)]
        ptx.store_shared4(place, words[:4], offset)
        ptx.store_shared4(place ^ Uint32(16), words[4:], offset)
