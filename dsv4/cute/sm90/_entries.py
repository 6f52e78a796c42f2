"""Warps that dequantize ``"fp8"`` entries of two paged KV caches to bfloat16 in shared memory.

They are the producers of ``attention`` and ``attention_columns``; the consumers' GEMMs read the
stages that they fill.

Tiling and ownership
    A token's slots are padded to KV blocks of 64, first the window's, then the compressed ones. A
    group of ``plan.dequant_warps`` warps fills a stage with one KV block; with two groups, each has
    every other KV block. A warp has 8 or 16 rows (entries) of a KV block; a lane has a quarter of
    each group of 64 dims in one or two rows, so that a load and its place in shared memory differ
    between groups by constants alone.

Pipeline
    Slots of a KV block are loaded two KV blocks ahead, its codes one ahead, while the consumers
    multiply. Before a stage is free, some codes of the next KV block are in the lane's registers
    and the others in shared memory, which only this lane writes and reads: neither has room for
    all. Once the stage is free, both are dequantized into it.

Barriers
    ``full`` (an mbarrier a stage): completes when all threads of the group have filled the stage.
    ``empty`` (an mbarrier a stage): completes when the consumers have read the stage.
    Named barriers ``_SCAN_BARRIER`` on, one a group: order the exchange of ``_used_blocks``.
    A proxy fence has to stand between these generic writes and the tensor cores' reads: by the
    producers where the plan is ``producer_fences``, else by the consumers.

Numerics
    A code goes by way of float16 and bfloat16, both of which hold it exactly, to a product with its
    block scale that is rounded once. Entries that do not exist are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.attention_args import AttentionArgs, ClusterAttentionArgs
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

ENTRY_BYTES = NOPE + 2 * ROPE  # of an entry, without its scales
_GROUPS = NOPE // 64
_COLUMNS = BLOCK * 128  # bytes between groups of 64 dims in shared memory
_SCAN = 40  # slots that a lane loads at a time to find the last used one, times the group's warps
_SCAN_BARRIER = 8  # named barrier of the first group

Words = Sequence[Uint32]


class PageTable(NamedTuple):
    """The table by which an entry of a KV cache is found.

    Attributes:
        pages: Address of the pages.
        stride: Bytes from one page to the next.
        shift: Base-2 logarithm of the entries of a page.
    """

    pages: Int64
    stride: Int64
    shift: Int32


class Cache(NamedTuple):
    """A KV cache and the slots that tokens have in it.

    Attributes:
        pages: Address of the pages.
        stride: Bytes from one page to the next.
        shift: Base-2 logarithm of the entries of a page.
        slots: Address of the slots.
        width: Slots of a token.
    """

    pages: Int64
    stride: Int64
    shift: Int32
    slots: Int64
    width: Int32

    @property
    def table(self) -> PageTable:
        """The cache without its slots."""
        return PageTable(self.pages, self.stride, self.shift)


class Caches(NamedTuple):
    """Both KV caches.

    Attributes:
        window: Whose entries come first.
        compressed: Whose KV blocks follow.
    """

    window: Cache
    compressed: Cache


class Split(NamedTuple):
    """A KV split: every ``splits``-th KV block of a token, from ``first`` on.

    Attributes:
        token: Whose entries they are.
        first: Number of the split's first KV block.
        splits: Splits of the token.
        scan: 1 to end at the token's last used slot.
    """

    token: Int32
    first: Int32
    splits: Int32
    scan: Int32


class Ring(NamedTuple):
    """A stage of the ring.

    Attributes:
        stage: Its number.
        parity: Parity of the phase of its mbarrier that is waited for.
    """

    stage: Int32
    parity: Int32


class Producer(NamedTuple):
    """A thread that dequantizes, and the shared memory that it uses.

    Attributes:
        info: Descriptions of the stages, then the scan results of each group.
        full: mbarriers of stages that are filled.
        empty: mbarriers of stages that are free.
        stages: The stages.
        codes: The lane's bytes of codes that wait in shared memory.
        group: Number of its group of warps.
        warp: Warp of the group.
        lane: Lane of the warp.
    """

    info: Uint32
    full: Uint32
    empty: Uint32
    stages: Uint32
    codes: Uint32
    group: Int32
    warp: Int32
    lane: Int32


class EntryMask(NamedTuple):
    """A bit for each of a KV block's 64 entries, set if the entry exists.

    Attributes:
        low: Bits of the first 32 entries.
        high: Bits of the others.
    """

    low: Uint32
    high: Uint32


def caches_of(args: AttentionArgs | ClusterAttentionArgs) -> Caches:
    """The KV caches among a kernel's arguments."""
    return Caches(
        Cache(
            args.window,
            args.window_stride,
            args.window_shift,
            args.window_slots,
            args.window_width,
        ),
        Cache(
            args.compressed,
            args.compressed_stride,
            args.compressed_shift,
            args.compressed_slots,
            args.compressed_width,
        ),
    )


class EntryDequant(PlannedKernel):
    """Device functions of the warps that dequantize."""

    plan: AttentionPlan | ColumnsPlan

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """A lane's rows and groups of 64 dims, in the order in which they are dequantized."""
        rows = BLOCK // (8 * self.plan.dequant_warps)
        return [(h, g) for h in range(rows) for g in range(_GROUPS)]

    @cute.jit
    def dequantize_split(
        self, caches: Caches, split: Split, producer: Producer, ring: Ring
    ) -> Ring:
        """Fill stages with the KV blocks of a split; returns the next stage.

        Of several groups, each has a stage of its own and every ``dequant_groups``-th KV block.
        """
        warp, lane = producer.warp, producer.lane
        stage, parity = ring.stage, ring.parity
        stride = split.splits * self.plan.dequant_groups
        # KV blocks from this one on are of the compressed cache.
        begin = (caches.window.width + BLOCK - 1) // BLOCK
        row = warp * (BLOCK // self.plan.dequant_warps) + lane // 4
        # SWIZZLE_128B: 16-byte chunks of a 128-byte row are exchanged by the row's number.
        chunk = Uint32(row * 128 + ((lane % 4 * 2) ^ (lane // 4)) * 16)
        rope_chunk = Uint32(row * 128 + (lane % 4 ^ (lane // 4)) * 16 + _GROUPS * _COLUMNS)
        block = split.first + producer.group * split.splits
        # In flight while the end of the token is computed or looked for.
        loaded = self._load_slots(caches, split.token, begin, block, lane)
        every = begin + (caches.compressed.width + BLOCK - 1) // BLOCK
        blocks = every
        results = producer.info + Uint32(STAGES * INFO_BYTES)
        # With two groups, the first scans after it has loaded its codes, which are needed first.
        early = (producer.group == 0) & (self.plan.dequant_groups > 1)
        if (split.scan == 1) & (not early):
            blocks = self._used_blocks(caches, split.token, begin, every, results, producer)
        slots, exists = self._exchange_slots(loaded, warp, lane)
        starts, scales = self._locate(slots, self._table(caches, begin, block), lane)
        codes = self._load_codes(slots, starts)
        self._copy_codes(slots, starts, producer.codes)
        loaded = self._load_slots(caches, split.token, begin, block + stride, lane)
        if (split.scan == 1) & early:
            blocks = self._used_blocks(caches, split.token, begin, every, results, producer)
        # A split without a KV block still has one, whose entries do not exist: consumers need it.
        more = (producer.group == 0) | (block < blocks)
        while more:
            # All groups agree on the split's last KV block: it ends the consumers' loop.
            final = block + split.splits >= blocks
            block += stride
            more = block < blocks
            ptx.mbarrier_wait(producer.empty + Uint32(stage * 8), parity)
            to = producer.stages + Uint32(stage * STAGE_BYTES)
            if cutlass.const_expr(not self.plan.rope_staged):
                self._copy_rope(slots, starts, to + rope_chunk)
            if warp == 0 and lane == 0:
                described = [exists.low, exists.high, Uint32(final), Uint32(0)]
                ptx.store_shared4(producer.info + Uint32(stage * INFO_BYTES), described)
            self._dequantize_registers(codes, scales, to + chunk)
            self._dequantize_shared(scales, producer.codes, to, chunk, rope_chunk)
            ptx.wait_async_copies(0)
            if cutlass.const_expr(self.plan.producer_fences):
                ptx.fence_proxy_async_shared()
            # Every thread releases its own writes, so that no barrier among them is needed.
            ptx.mbarrier_arrive(producer.full + Uint32(stage * 8))
            slots, exists = self._exchange_slots(loaded, warp, lane)
            starts, scales = self._locate(slots, self._table(caches, begin, block), lane)
            codes = self._load_codes(slots, starts)
            self._copy_codes(slots, starts, producer.codes)
            loaded = self._load_slots(caches, split.token, begin, block + stride, lane)
            stage += self.plan.dequant_groups
            if stage >= STAGES:
                stage -= STAGES
                parity = parity ^ 1
        ptx.wait_async_copies(0)
        return Ring(stage, parity)

    def _scale(self, scales: Words, h: int, g: int) -> Uint32:
        """The E8M0 scale of a row's group of dims."""
        return (scales[2 * h + g // 4] >> Uint32(g % 4 * 8)) & Uint32(255)

    def _dequantize_registers(self, codes: list[Words], scales: Words, to: Uint32) -> None:
        """Dequantize the pieces that wait in registers."""
        for n, (h, g) in enumerate(self.pieces[: self.plan.register_pieces]):
            self._dequantize(codes[n], self._scale(scales, h, g), to, h * 1024 + g * _COLUMNS)

    @cute.jit
    def _dequantize_shared(
        self, scales: Words, codes: Uint32, to: Uint32, chunk: Uint32, rope_chunk: Uint32
    ) -> None:
        """Dequantize the pieces that wait in shared memory, and copy staged rotary dims."""
        # Rotary dims that go straight to the stage are the newest group of copies: not waited for.
        ptx.wait_async_copies(0 if self.plan.rope_staged else 1)
        later, step = self.pieces[self.plan.register_pieces :], 512 * self.plan.dequant_warps
        rows = range(BLOCK // (8 * self.plan.dequant_warps)) if self.plan.rope_staged else ()
        rope = [(h, c) for h in rows for c in range(2)]
        # All are loaded before the first store, because a load behind a store would wait for it.
        waiting = [
            ptx.load_shared(codes + Uint32(n * step), 4) for n in range(len(later) + len(rope))
        ]
        for n, (h, g) in enumerate(later):
            skip = h * 1024 + g * _COLUMNS
            self._dequantize(waiting[n], self._scale(scales, h, g), to + chunk, skip)
        for n, (h, c) in enumerate(rope):
            words = waiting[len(later) + n]
            ptx.store_shared4((to + rope_chunk) ^ Uint32(c * 64), words, h * 1024)

    def _load_slot(self, row: Int64, number: Int32, width: Int32) -> Words:
        """Load both words of a slot; all ones, which is no entry, beyond the end."""
        return ptx.load_global2_or_ones(row + Int64(number) * 8, Int32(number < width))

    def _slot(self, words: Words) -> Int32:
        """A slot as int32; all negative ones are -1."""
        return cutlass.max(Int32(words[0]) | (Int32(words[1]) >> 31), Int32(-1))

    @cute.jit
    def _used_blocks(
        self,
        caches: Caches,
        token: Int32,
        begin: Int32,
        blocks: Int32,
        results: Uint32,
        producer: Producer,
    ) -> Int32:
        """All threads of a group: KV blocks up to the token's last slot that is not negative.

        Every thread looks at many slots at a time and the warps exchange their results, so that it
        mostly takes no longer than one load.

        Args:
            caches: Both KV caches.
            token: Whose slots.
            begin: First KV block of the compressed cache.
            blocks: All KV blocks of the token.
            results: Shared memory of the results of all groups.
            producer: The thread.
        """
        warp, lane, group = producer.warp, producer.lane, producer.group
        group_results = results + Uint32(group * self.plan.scan_bytes)
        used: Int32 = Int32(0)
        own = warp * 32 + lane
        threads, count = 32 * self.plan.dequant_warps, _SCAN // self.plan.dequant_warps
        for first in cutlass.range(own, blocks * BLOCK, count * threads, unroll=1):
            numbers = [first + i * threads for i in range(count)]
            loaded = [self._load_any_slot(caches, token, begin, number) for number in numbers]
            for i in cutlass.range_constexpr(count):
                if self._slot(loaded[i]) >= 0:
                    used = Int32(numbers[i] // BLOCK + 1)
        for step in cutlass.range_constexpr(5):
            used = cutlass.max(used, cute.arch.shuffle_sync_bfly(used, 1 << step))
        # All warps have read the results of the token before.
        cute.arch.barrier(barrier_id=_SCAN_BARRIER + group, number_of_threads=threads)
        if lane == 0:
            ptx.store_shared_int(group_results + Uint32(warp * 4), used)
        # The results of all warps are written.
        cute.arch.barrier(barrier_id=_SCAN_BARRIER + group, number_of_threads=threads)
        for four in cutlass.range_constexpr(self.plan.dequant_warps // 4):
            for other in ptx.load_shared(group_results + Uint32(four * 16), 4):
                used = cutlass.max(used, Int32(other))
        return used

    @cute.jit
    def _load_any_slot(self, caches: Caches, token: Int32, begin: Int32, number: Int32) -> Words:
        """Load a slot by its number among those of all KV blocks."""
        row, limit = self._row(caches.window, token), caches.window.width
        if number >= begin * BLOCK:
            row, limit = self._row(caches.compressed, token), caches.compressed.width
            number -= begin * BLOCK
        return self._load_slot(row, number, limit)

    @cute.jit
    def prefetch_slots(self, caches: Caches, token: Int32, thread: Int32) -> None:
        """Prefetch a token's slots to L2, 16 slots by each thread of the CTA."""
        for c in cutlass.range_constexpr(2):
            if thread * 16 < caches[c].width:
                ptx.prefetch_l2(self._row(caches[c], token) + Int64(thread) * 128)

    def _row(self, cache: Cache, token: Int32) -> Int64:
        """Address of a token's slots."""
        return cache.slots + Int64(token) * cache.width * 8

    @cute.jit
    def _table(self, caches: Caches, begin: Int32, block: Int32) -> PageTable:
        """The page table of a KV block's cache."""
        pages, stride, shift = caches.window.table
        if block >= begin:
            pages, stride, shift = caches.compressed.table
        return PageTable(pages, stride, shift)

    @cute.jit
    def _load_slots(
        self, caches: Caches, token: Int32, begin: Int32, block: Int32, lane: Int32
    ) -> tuple[Words, ...]:
        """Load the slots of the lane's two entries of a KV block, ``lane`` and ``lane + 32``.

        They are in flight until ``_exchange_slots``.
        """
        row, limit, number = self._row(caches.window, token), caches.window.width, block
        if block >= begin:
            row, limit, number = (
                self._row(caches.compressed, token),
                caches.compressed.width,
                block - begin,
            )
        number = number * BLOCK + lane
        return tuple(self._load_slot(row, number + 32 * h, limit) for h in range(2))

    @cute.jit
    def _exchange_slots(
        self, loaded: tuple[Words, ...], warp: Int32, lane: Int32
    ) -> tuple[tuple[Int32, ...], EntryMask]:
        """One warp: slots of the lane's rows, and which of the KV block's entries exist.

        Every warp has loaded all 64 slots, so that no other warp has to be waited for.
        """
        low, high = self._slot(loaded[0]), self._slot(loaded[1])
        exists = EntryMask(
            Uint32(cute.arch.vote_ballot_sync(low >= 0)),
            Uint32(cute.arch.vote_ballot_sync(high >= 0)),
        )
        mine = low
        if warp >= self.plan.dequant_warps // 2:
            mine = high
        rows = BLOCK // self.plan.dequant_warps
        source = warp % (self.plan.dequant_warps // 2) * rows + lane // 4
        slots = tuple(cute.arch.shuffle_sync(mine, source + 8 * h) for h in range(rows // 8))
        return slots, exists

    @cute.jit
    def _locate(
        self, slots: tuple[Int32, ...], table: PageTable, lane: Int32
    ) -> tuple[list[Int64], Words]:
        """Addresses of the lane's codes in each row, and the loaded scales, two words a row."""
        starts: list[Int64] = []
        scales: list[Uint32] = []
        for h in cutlass.range_constexpr(len(slots)):
            # The address of a missing entry is that of the first, which is not loaded from.
            safe = cutlass.max(slots[h], Int32(0))
            page = table.pages + Int64(safe >> table.shift) * table.stride
            entry = safe & ((1 << table.shift) - 1)
            source = page + Int64((ENTRY_BYTES << table.shift) + entry * 8)
            scales.extend(ptx.load_global_or_zero(source, 2, Int32(slots[h] >= 0)))
            starts.append(page + Int64(entry * ENTRY_BYTES + lane % 4 * 16))
        return starts, scales

    def _load_codes(self, slots: tuple[Int32, ...], starts: list[Int64]) -> list[Words]:
        """Load 16 codes of each piece that waits in registers; zeros if there is no entry."""
        return [
            ptx.load_global_or_zero(starts[h], 4, Int32(slots[h] >= 0), g * 64)
            for h, g in self.pieces[: self.plan.register_pieces]
        ]

    def _copy_codes(self, slots: tuple[Int32, ...], starts: list[Int64], codes: Uint32) -> None:
        """Copy the other pieces, and rotary dims if these are staged, to shared memory."""
        step = 512 * self.plan.dequant_warps
        later = [(h, g * 64) for h, g in self.pieces[self.plan.register_pieces :]]
        if self.plan.rope_staged:
            later += [(h, NOPE + c * 64) for h in range(len(slots)) for c in range(2)]
        for n, (h, offset) in enumerate(later):
            size = Int32(slots[h] >= 0) * 16
            ptx.async_copy16_or_zero(codes, starts[h], size, n * step, offset)
        ptx.commit_async_copies()

    @cute.jit
    def _copy_rope(self, slots: tuple[Int32, ...], starts: list[Int64], chunk: Uint32) -> None:
        """Copy rotary dims, which are bfloat16 in the cache, straight to a free stage."""
        for h in cutlass.range_constexpr(len(slots)):
            size = Int32(slots[h] >= 0) * 16
            for c in cutlass.range_constexpr(2):
                to = chunk ^ Uint32(c * 64)
                ptx.async_copy16_or_zero(to, starts[h], size, h * 1024, NOPE + c * 64)
        ptx.commit_async_copies()

    def _dequantize(self, codes: Words, scale: Uint32, chunk: Uint32, offset: int) -> None:
        """Dequantize and store 16 codes of a group of a row: two chunks of 16 bytes."""
        factor = ptx.e8m0_to_bfloat16x2(scale)
        words = [ptx.e4m3x2_times_bfloat16x2(codes[w // 2], w % 2, factor) for w in range(8)]
        ptx.store_shared4(chunk, words[:4], offset)
        ptx.store_shared4(chunk ^ Uint32(16), words[4:], offset)
