"""Sparse attention of few tokens: a cluster has 16 heads of a token and splits its entries.

Tiling and ownership
    A cluster of ``plan.ctas`` CTAs has a (token, tile of 16 heads). Its CTAs take steps of
    ``plan.step`` entries in turn. Each of eight warps has 64 dims (a group) of every entry: it
    copies its group of codes to shared memory and dequantizes them into registers, which are right
    operands (``m16n8k16``, entries as N) of the logits' MMAs as they are, and, transposed by
    ``movmatrix``, of the MMAs with softmax weights (dims as N). No other warp reads them.
    A warp's logits are partial sums over its dims: they meet in shared memory, where a warp adds
    those of its two heads, has their softmax, and leaves weights for all warps.
    Dims of the logits' GEMM are permuted: a lane's 16 neighbouring codes are words of four K steps.
    Queries are loaded in the same order, so logits are those of the dims in order; results'
    dims follow it, too.

Pipeline
    Codes are copied by ``cp.async`` ``plan.prefetched`` steps ahead into ``plan.stages`` stages;
    slots are loaded one step before their codes. A lane reads only codes that its own warp copied,
    so ``cp.async.wait_group`` and a ``sync_warp`` order them. Steps without an entry are skipped.

Barriers
    Two CTA barriers a step: partial logits are written; weights and factors are written. The next
    step's partial logits are written after the second barrier, when the first's are read.
    ``arrived`` (an mbarrier): completes in an owner with the partial sums (bulk copies) and the
    statistics (``st.async``) of all CTAs of the cluster. Phase 0.
    Cluster barrier, twice: orders the initialisation of ``arrived`` before other CTAs' copies; and
    keeps a CTA's shared memory until its outgoing copies have left, because the owners arrive when
    theirs are complete.

Determinism and numerics
    The owner of a head adds partial sums in the order of ranks, packed to 20 bits each, its
    own too, so that a token's bits depend on its slots and the plan alone. See
    ``attention_softmax`` for weights and references.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90._cluster_launch import ClusterLaunch
from dsv4.cute.sm90._entries import ENTRY_BYTES, Cache, Caches, PageTable, Words
from dsv4.cute.sm90.attention_args import ClusterAttentionArgs
from dsv4.cute.sm90.attention_plan import DIMS, NOPE, PACKED_BYTES, ROPE, NarrowPlan
from dsv4.cute.sm90.attention_softmax import (
    INFINITY,
    LOG2E,
    Softmax,
    empty_softmax,
    finite_origin,
    new_reference,
    reciprocal_or_zero,
)

_WARPS = 8
_GROUP = 64  # dims of a warp
_CODED = NOPE // _GROUP  # warps whose dims are codes; the last one's are bfloat16
_PART = PACKED_BYTES // _WARPS  # bytes of a head's packed sums of a warp's dims

Fragment = list[Float32]


class Tile(NamedTuple):
    """A tile of heads of a token.

    Attributes:
        token: Number of the token.
        first_head: First head of the tile.
    """

    token: Int32
    first_head: Int32


class Worker(NamedTuple):
    """A thread.

    Attributes:
        rank: Rank of its CTA in the cluster.
        thread: Thread of the CTA.
        warp: Warp of the CTA.
        lane: Lane of the warp.
    """

    rank: Int32
    thread: Int32
    warp: Int32
    lane: Int32


class SharedMemory(NamedTuple):
    """Shared-memory addresses, in the order in which they lie.

    Attributes:
        stages: Stages of codes, rotary dims and scales.
        gathered: Packed partial sums of the CTA's owned heads, of all ranks.
        logits: Partial logits of all warps.
        weights: bfloat16 weights, ``weights_line`` bytes a head.
        factors: On sums of each head, for a new reference.
        statistics: Reference and sum of weights of owned heads, of all ranks, 16 bytes each.
        sinks: Sinks of the tile.
        angles: 32 cosines and 32 sines of the token.
        arrived: mbarrier.
    """

    stages: Uint32
    gathered: Uint32
    logits: Uint32
    weights: Uint32
    factors: Uint32
    statistics: Uint32
    sinks: Uint32
    angles: Uint32
    arrived: Uint32


class NarrowKernel(ClusterLaunch):
    """The kernel of one configuration."""

    plan: NarrowPlan

    @property
    def halves(self) -> int:
        """Entries of a step that a lane has when a warp has all of them."""
        return self.plan.step // 32

    @property
    def code_bytes(self) -> int:
        """Bytes of a warp's group of codes of a step."""
        return self.plan.step * _GROUP

    @property
    def scales_offset(self) -> int:
        """The offset of scales in a stage: after codes and the last group, which is bfloat16."""
        return (_WARPS + 1) * self.code_bytes

    @property
    def logits_line(self) -> int:
        """Bytes of a head's logits of a step."""
        return self.plan.step * 4

    @property
    def weights_line(self) -> int:
        """Bytes of a head's weights, padded so that eight lines lie in different banks."""
        return self.plan.step * 2 + 16

    def _shared(self) -> SharedMemory:
        """Allocate shared memory."""
        plan, smem = self.plan, cutlass.memory.SmemAllocator()

        def allocated(size: int) -> Uint32:
            return Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=128).toint())

        return SharedMemory(
            stages=allocated(plan.stages * plan.stage_bytes),
            gathered=allocated(plan.ctas * plan.owned_heads * PACKED_BYTES),
            logits=allocated(_WARPS * plan.heads * self.logits_line),
            weights=allocated(plan.heads * self.weights_line),
            factors=allocated(plan.heads * 4),
            statistics=allocated(plan.ctas * plan.owned_heads * 16),
            sinks=allocated(plan.heads * 4),
            angles=allocated(2 * ROPE * 2),
            arrived=allocated(8),
        )

    @cute.kernel
    def kernel(self, args: ClusterAttentionArgs) -> None:
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank, item = block % self.plan.ctas, block // self.plan.ctas
        token, head_tile = item // args.head_tiles, item % args.head_tiles
        shared = self._shared()
        worker = Worker(rank, thread, warp, lane)
        # CTAs of the next kernel may start; they wait by griddepcontrol.wait for this one.
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            ptx.mbarrier_init(shared.arrived, 1)
            ptx.fence_mbarrier_init()
        # Waited for before this CTA first writes to others.
        cute.arch.cluster_arrive_relaxed()
        tile = Tile(token, head_tile * self.plan.heads)
        caches = self._token_caches(args, token)
        self._prefetch(args, caches, tile, thread)
        # From here on slots, entries and queries are what preceding kernels wrote.
        cute.arch.griddepcontrol_wait()
        # Steps from this one on are of the compressed cache.
        begin = (args.window_width + self.plan.step - 1) // self.plan.step
        steps = begin + (args.compressed_width + self.plan.step - 1) // self.plan.step
        step = Int32(rank)
        slots = [
            self._load_slots(caches, begin, step + s * self.plan.ctas, lane)
            for s in range(self.plan.prefetched + 1)
        ]
        queries = self._load_queries(args, tile, worker)
        self._copy_tables(args, shared, tile, thread)
        offset = self._source_offset(warp, lane)
        exists = []
        for s in cutlass.range_constexpr(self.plan.prefetched):
            address = shared.stages + Uint32(s * self.plan.stage_bytes)
            number = step + s * self.plan.ctas
            exists.append(self._copy(caches, begin, number, slots[s], address, worker, offset))
            # A group of copies a step, also where there is none: the wait below counts groups.
            ptx.commit_async_copies()
        loaded = slots[self.plan.prefetched]
        sums = [[Float32(0.0)] * 4 for _ in range(8)]
        softmax = empty_softmax(self.plan.heads // _WARPS)
        stage = Int32(0)
        while step < steps:
            here = exists[0]
            following = step + self.plan.prefetched * self.plan.ctas
            last = stage + self.plan.prefetched
            if last >= self.plan.stages:
                last -= self.plan.stages
            # The stage that the warp itself read in the iteration before.
            to = shared.stages + Uint32(last * self.plan.stage_bytes)
            exists = [
                *exists[1:],
                self._copy(caches, begin, following, loaded, to, worker, offset),
            ]
            ptx.commit_async_copies()
            loaded = self._load_slots(caches, begin, following + self.plan.ctas, lane)
            ptx.wait_async_copies(self.plan.prefetched)
            cute.arch.sync_warp()
            # The same in all warps, so that they meet at the barriers inside.
            if self._any(here):
                stage_at = shared.stages + Uint32(stage * self.plan.stage_bytes)
                words = self._dequantize(stage_at, warp, lane)
                self._score(words, queries, shared.logits, warp, lane)
                cute.arch.sync_threads()  # partial logits are written
                softmax = self._weigh(shared, here, softmax, args.scale, warp, lane)
                cute.arch.sync_threads()  # weights are written, partial logits are read
                sums = self._add(sums, shared, words, lane)
            step += self.plan.ctas
            stage += 1
            if stage == self.plan.stages:
                stage = Int32(0)
        ptx.wait_async_copies(0)
        # The mbarriers of all CTAs are initialised.
        cute.arch.cluster_wait()
        if thread == 0:
            # Partial sums of the other CTAs and statistics of all. They may arrive before they are
            # expected, because the phase waits for this arrival as well.
            received_bytes = (self.plan.ctas - 1) * PACKED_BYTES
            ptx.mbarrier_arrive_expect_tx(
                shared.arrived, self.plan.owned_heads * (received_bytes + self.plan.ctas * 16)
            )
        self._send(sums, shared, worker)
        self._send_statistics(softmax, shared, worker)
        # All threads have copied their part of the tables, and stored own sums.
        cute.arch.sync_threads()
        if rank < self.plan.owners:
            ptx.mbarrier_wait(shared.arrived, Int32(0))
        # An owner has all of the others' sums. A CTA may exit when all owners have its sums.
        cute.arch.cluster_arrive_relaxed()
        if rank < self.plan.owners:
            self._merge(args, shared, tile, worker)
        cute.arch.cluster_wait()

    def _token_caches(self, args: ClusterAttentionArgs, token: Int32) -> Caches:
        """The KV caches, with the addresses of a token's slots."""
        row_bytes = Int64(token) * 8
        return Caches(
            Cache(
                args.window,
                args.window_stride,
                args.window_shift,
                args.window_slots + row_bytes * args.window_width,
                args.window_width,
            ),
            Cache(
                args.compressed,
                args.compressed_stride,
                args.compressed_shift,
                args.compressed_slots + row_bytes * args.compressed_width,
                args.compressed_width,
            ),
        )

    @cute.jit
    def _prefetch(
        self, args: ClusterAttentionArgs, caches: Caches, tile: Tile, thread: Int32
    ) -> None:
        """Prefetch queries, slots, sinks and angles to L2, while preceding kernels still run."""
        q = args.q + (Int64(tile.token) * args.token_stride) * 2
        head = tile.first_head + thread // 8
        if (thread < self.plan.heads * 8) & (head < args.heads):
            ptx.prefetch_l2(q + (Int64(head) * args.head_stride) * 2 + thread % 8 * 128)
        for c in cutlass.range_constexpr(2):
            if thread * 16 < caches[c].width:
                ptx.prefetch_l2(caches[c].slots + Int64(thread) * 128)
        if thread == 0:
            ptx.prefetch_l2(args.sink + Int64(tile.first_head) * 4)
        if (thread < 2) & (args.cos != Int64(0)):
            table = args.cos
            if thread == 1:
                table = args.sin
            ptx.prefetch_l2(table + Int64(tile.token) * (ROPE * 2))

    @cute.jit
    def _load_slots(self, caches: Caches, begin: Int32, step: Int32, lane: Int32) -> list[Words]:
        """Load the lane's slots of a step; all ones, which is no entry, beyond the last."""
        row, limit, number = caches.window.slots, caches.window.width, step
        if step >= begin:
            row, limit, number = caches.compressed.slots, caches.compressed.width, step - begin
        number = number * self.plan.step + lane
        return [
            ptx.load_global2_or_ones(
                row + Int64(number + 32 * h) * 8, Int32(number + 32 * h < limit)
            )
            for h in range(self.halves)
        ]

    def _any(self, exists: Words) -> cutlass.Boolean:
        """Return whether a step has an entry."""
        bits = exists[0]
        for more in exists[1:]:
            bits = bits | more
        return bits != Uint32(0)

    def _source_offset(self, warp: Int32, lane: Int32) -> Int32:
        """Bytes of an entry before the lane's part: codes, or bfloat16 dims of the last warp."""
        coded = Int32(warp < _CODED)
        return warp * _GROUP + lane % 4 * (32 - 16 * coded)

    @cute.jit
    def _locate(self, table: PageTable, slot: Int32) -> tuple[Int64, Int32]:
        """Address of an entry's page and the entry's number in it; the first's if there is none."""
        safe = cutlass.max(slot, Int32(0))
        page = table.pages + Int64(safe >> table.shift) * table.stride
        return page, safe & ((1 << table.shift) - 1)

    @cute.jit
    def _copy(
        self,
        caches: Caches,
        begin: Int32,
        step: Int32,
        loaded: Sequence[Words],
        stage: Uint32,
        worker: Worker,
        offset: Int32,
    ) -> list[Uint32]:
        """One warp: copy its part of a step's entries to a stage.

        Args:
            caches: Both KV caches.
            begin: First step of the compressed cache.
            step: Number of the step.
            loaded: The lane's slots.
            stage: Where to.
            worker: The thread.
            offset: Offset of the lane's part in an entry.

        Returns:
            A bit for each entry that exists.
        """
        warp, lane = worker.warp, worker.lane
        slots = [cutlass.max(Int32(low) | (Int32(high) >> 31), Int32(-1)) for low, high in loaded]
        exists = [Uint32(cute.arch.vote_ballot_sync(slot >= 0)) for slot in slots]
        if self._any(exists):
            pages, stride, shift = caches.window.table
            if step >= begin:
                pages, stride, shift = caches.compressed.table
            table = PageTable(pages, stride, shift)
            to = stage + Uint32(warp * self.code_bytes + lane * 16)
            if warp < _CODED:
                for h in cutlass.range_constexpr(self.halves):
                    page, entry = self._locate(table, slots[h])
                    line = self.scales_offset + (warp * self.plan.step + 32 * h + lane) * 4
                    ptx.async_copy4_or_zero(
                        stage + Uint32(line),
                        page + Int64((ENTRY_BYTES << shift) + entry * 8 + warp // 4 * 4),
                        Int32(slots[h] >= 0) * 4,
                    )
                # A quarter of the lanes' slots at a time: four lanes copy an entry's 64 codes.
                for i in cutlass.range_constexpr(self.plan.step // 8):
                    other = cute.arch.shuffle_sync(slots[i // 4], lane // 4 + i % 4 * 8)
                    page, entry = self._locate(table, other)
                    start = page + Int64(entry * ENTRY_BYTES + offset)
                    ptx.async_copy16_or_zero(to, start, Int32(other >= 0) * 16, i * 512)
            else:
                # The last warp's 64 dims are bfloat16: twice the bytes, no scales.
                for i in cutlass.range_constexpr(self.plan.step // 8):
                    other = cute.arch.shuffle_sync(slots[i // 4], lane // 4 + i % 4 * 8)
                    page, entry = self._locate(table, other)
                    start = page + Int64(entry * ENTRY_BYTES + offset)
                    for h in cutlass.range_constexpr(2):
                        size = Int32(other >= 0) * 16
                        ptx.async_copy16_or_zero(to, start, size, i * 1024 + h * 512, h * 16)
        return exists

    @cute.jit
    def _copy_tables(
        self, args: ClusterAttentionArgs, shared: SharedMemory, tile: Tile, thread: Int32
    ) -> None:
        """Copy the tile's sinks and the token's angles, which the merge needs."""
        if thread < self.plan.heads:
            head = cutlass.min(tile.first_head + thread, args.heads - 1)
            to = shared.sinks + Uint32(thread * 4)
            ptx.async_copy4_or_zero(to, args.sink + Int64(head) * 4, Int32(4))
        if (thread >= 32) & (thread < 32 + ROPE) & (args.cos != Int64(0)):
            number = thread - 32
            table = args.cos
            if number >= ROPE // 2:
                table = args.sin
            source = table + (Int64(tile.token) * (ROPE // 2) + number % (ROPE // 2)) * 4
            ptx.async_copy4_or_zero(shared.angles + Uint32(number * 4), source, Int32(4))

    @cute.jit
    def _load_queries(
        self, args: ClusterAttentionArgs, tile: Tile, worker: Worker
    ) -> list[list[Uint32]]:
        """Load the left operands of four K steps: of each row of the lane 16 dims of the group."""
        q = args.q + (Int64(tile.token) * args.token_stride) * 2
        rows = []
        for r in cutlass.range_constexpr(self.plan.heads // 8):
            head = tile.first_head + worker.lane // 4 + 8 * r
            row = Int64(head) * args.head_stride
            address = q + (row + worker.warp * _GROUP + worker.lane % 4 * 16) * 2
            exists = Int32(head < args.heads)
            words = [
                *ptx.load_global_or_zero(address, 4, exists),
                *ptx.load_global_or_zero(address, 4, exists, 16),
            ]
            rows.append(words)
        return rows

    @cute.jit
    def _dequantize(self, stage: Uint32, warp: Int32, lane: Int32) -> list[Uint32]:
        """Dequantize 16 dims of each of the lane's entries to pairs of bfloat16."""
        words = [Uint32(0)] * self.plan.step
        address = stage + Uint32(warp * self.code_bytes + lane * 16)
        if warp < _CODED:
            line = self.scales_offset + (warp * self.plan.step + lane // 4) * 4
            scales = stage + Uint32(line)
            made: list[Uint32] = []
            for i in cutlass.range_constexpr(self.plan.step // 8):
                codes = ptx.load_shared(address + i * 512, 4)
                word = Uint32(ptx.load_shared_int(scales + i * 32))
                factor = ptx.e8m0_to_bfloat16x2((word >> Uint32(warp % 4 * 8)) & Uint32(255))
                made += [
                    ptx.e4m3x2_times_bfloat16x2(codes[w // 2], w % 2, factor) for w in range(8)
                ]
            words = made
        else:
            plain: list[Uint32] = []
            for i in cutlass.range_constexpr(self.plan.step // 4):
                plain += list(ptx.load_shared(address + i * 512, 4))
            words = plain
        return words

    @cute.jit
    def _score(
        self,
        words: Words,
        queries: Sequence[Words],
        logits_at: Uint32,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """Compute and write the warp's partial logits, of its 64 dims."""
        row = lane // 4
        logits = [[Float32(0.0)] * 4 for _ in range(self.plan.step // 8)]
        low, high = queries
        for j in cutlass.range_constexpr(4):
            left = [low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1]]
            for i in cutlass.range_constexpr(self.plan.step // 8):
                at = 8 * i + 2 * j
                logits[i] = ptx.mma_m16n8k16_bf16(logits[i], left, words[at : at + 2])
        line = logits_at + Uint32((warp * self.plan.heads + row) * self.logits_line + lane % 4 * 8)
        for i in cutlass.range_constexpr(self.plan.step // 8):
            # Groups of 8 entries are exchanged by the row's number, against bank conflicts.
            address = line + Uint32((i ^ (row % 4)) * 32)
            ptx.store_shared_float2(address, logits[i][0], logits[i][1])
            ptx.store_shared_float2(address + 8 * self.logits_line, logits[i][2], logits[i][3])

    @cute.jit
    def _weigh(
        self,
        shared: SharedMemory,
        exists: Words,
        softmax: Softmax,
        scale: Float32,
        warp: Int32,
        lane: Int32,
    ) -> Softmax:
        """One warp: add the partial logits of its heads; write weights and factors on sums.

        Args:
            shared: Addresses.
            exists: A bit for each entry of the step.
            softmax: Softmax of the warp's heads; sums of weights are the lane's own.
            scale: Scale of logits.
            warp: Warp of the CTA.
            lane: Lane of the warp, which has entries ``lane`` and, of 64, ``lane + 32``.
        """
        scale = scale * Float32(LOG2E)
        new, sums, weighed = [], [], []
        count = self.plan.heads // _WARPS
        for h in cutlass.range_constexpr(count):
            head = warp * count + h
            column = ((lane // 8) ^ (head % 4)) * 8 + lane % 8
            address = shared.logits + Uint32(head * self.logits_line + column * 4)
            logits = []
            for half in cutlass.range_constexpr(self.halves):
                logit = ptx.load_shared_float(address + half * 128)
                for g in cutlass.range_constexpr(1, _WARPS):
                    at = address + (g * self.plan.heads * self.logits_line + half * 128)
                    logit = logit + ptx.load_shared_float(at)
                bit = (exists[half] >> Uint32(lane)) & Uint32(1)
                logits.append(ptx.select_float(bit, logit, -Float32(INFINITY)))
            high = logits[0]
            for logit in logits[1:]:
                high = ptx.max_float(high, logit)
            for step in cutlass.range_constexpr(5):
                high = ptx.max_float(high, cute.arch.shuffle_sync_bfly(high, 1 << step))
            reference = new_reference(high * scale, softmax.references[h])
            if lane == 0:
                ptx.store_shared_float(shared.factors + Uint32(head * 4), reference.factor)
            weighed.append(
                [
                    ptx.exp2_approx(ptx.fma_float(logit, scale, -reference.origin))
                    for logit in logits
                ]
            )
            sums.append(softmax.totals[h] * reference.factor)
            new.append(reference.value)
            # Two heads make a word, and sums take the weights as rounded.
            if cutlass.const_expr(h % 2 == 1):
                for half in cutlass.range_constexpr(self.halves):
                    word = ptx.pack_bfloat16x2(weighed[h - 1][half], weighed[h][half])
                    line = shared.weights + Uint32((head - 1) * self.weights_line)
                    address = line + Uint32((lane + 32 * half) * 2)
                    ptx.store_shared_halves(address, word, self.weights_line)
                    sums[h - 1] = sums[h - 1] + ptx.bfloat16_low_to_float(word)
                    sums[h] = sums[h] + ptx.bfloat16_high_to_float(word)
        return Softmax(new, sums)

    @cute.jit
    def _add(
        self, sums: Sequence[Fragment], shared: SharedMemory, words: Words, lane: Int32
    ) -> list[Fragment]:
        """Add weights times the warp's group of dims; 8 fragments of 16 heads and 8 dims."""
        line = shared.weights + Uint32(lane % 16 * self.weights_line + lane // 16 * 16)
        by = [
            ptx.load_shared_float(shared.factors + Uint32((lane // 4 + 8 * r) * 4))
            for r in range(2)
        ]
        # Most often no head has a new reference.
        if cute.arch.vote_any_sync((by[0] != Float32(1.0)) | (by[1] != Float32(1.0))):
            sums = [[sums[n][i] * by[i // 2] for i in range(4)] for n in range(8)]
        made = [list(sums[n]) for n in range(8)]
        for k in cutlass.range_constexpr(self.plan.step // 16):
            left = ptx.ldmatrix_x4(line, k * 32)
            for n in cutlass.range_constexpr(8):
                right = [ptx.movmatrix_transpose(words[8 * (2 * k + h) + n]) for h in range(2)]
                made[n] = ptx.mma_m16n8k16_bf16(made[n], left, right)
        return made

    @cute.jit
    def _send(self, sums: Sequence[Fragment], shared: SharedMemory, worker: Worker) -> None:
        """One warp: send packed partial sums of its dims of every head to the head's owner.

        A head's packed sums are pieces of 16 bytes, exchanged against bank conflicts, then the
        fifth words. They go by way of the warp's part of two stages, which nobody reads any more:
        those of eight heads are no more bytes than the codes of 32 entries.
        """
        rank, warp, lane = worker.rank, worker.warp, worker.lane
        part = _PART
        mine = shared.stages + Uint32(warp * self.code_bytes)
        gap = self.plan.stage_bytes - 8 * part
        row = lane // 4
        for r in cutlass.range_constexpr(2):
            head = row + 8 * r
            line = mine + Uint32(head * part + r * gap)
            if head // self.plan.owned_heads == rank:
                # Written in place, because a bulk copy to the CTA itself is forbidden.
                own = rank * self.plan.owned_heads + head % self.plan.owned_heads
                line = shared.gathered + Uint32(own * PACKED_BYTES + warp * part)
            fifth = []
            for k in cutlass.range_constexpr(2):
                four = [sums[4 * k + n] for n in range(4)]
                words = ptx.pack_accumulators([pair[2 * r + i] for pair in four for i in range(2)])
                ptx.store_shared4(line + Uint32(((lane % 4 * 2 + k) ^ row) * 16), words[:4])
                fifth.append(words[4])
            ptx.store_shared2(line + Uint32(2 * _GROUP + lane % 4 * 8), fifth)
        # Bulk copies read through the async proxy what all lanes have written.
        ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
        owner, own = lane // self.plan.owned_heads, lane % self.plan.owned_heads
        if (lane < self.plan.heads) & (owner != rank):
            slot = rank * self.plan.owned_heads + own
            to = shared.gathered + Uint32(slot * PACKED_BYTES + warp * part)
            ptx.bulk_copy_to_remote(
                ptx.map_to_cta(to, owner),
                mine + Uint32(lane * part + lane // 8 * gap),
                part,
                ptx.map_to_cta(shared.arrived, owner),
            )

    @cute.jit
    def _send_statistics(self, softmax: Softmax, shared: SharedMemory, worker: Worker) -> None:
        """One warp: send references and sums of weights of its heads to the heads' owners."""
        count = self.plan.heads // _WARPS
        for h in cutlass.range_constexpr(count):
            whole = softmax.totals[h]
            for step in cutlass.range_constexpr(5):
                whole = whole + cute.arch.shuffle_sync_bfly(whole, 1 << step)
            if worker.lane == 0:
                head = worker.warp * count + h
                slot = worker.rank * self.plan.owned_heads + head % self.plan.owned_heads
                address = shared.statistics + Uint32(slot * 16)
                four = [softmax.references[h], whole, Float32(0.0), Float32(0.0)]
                owner = head // self.plan.owned_heads
                ptx.async_store_remote4(
                    ptx.map_to_cta(address, owner), four, ptx.map_to_cta(shared.arrived, owner)
                )

    @cute.jit
    def _merge(
        self, args: ClusterAttentionArgs, shared: SharedMemory, tile: Tile, worker: Worker
    ) -> None:
        """Add all CTAs' sums of the owned heads and store, four dims of a head by each thread."""
        pieces = self.plan.owned_heads * (DIMS // 4)
        for begin in cutlass.range_constexpr(0, pieces, self.plan.threads):
            if begin + worker.thread < pieces:
                self._merge_four(args, shared, tile, worker.rank, begin + worker.thread)

    @cute.jit
    def _merge_four(
        self,
        args: ClusterAttentionArgs,
        shared: SharedMemory,
        tile: Tile,
        rank: Int32,
        number: Int32,
    ) -> None:
        """Merge four dims of a head.

        Args:
            args: Arguments of the kernel.
            shared: Addresses.
            tile: Tile of heads.
            rank: Rank of the CTA.
            number: Number of the four dims among those of all owned heads.
        """
        ctas, owned_heads = range(self.plan.ctas), self.plan.owned_heads
        own, piece = number // (DIMS // 4), number % (DIMS // 4)
        mine = rank * owned_heads + own
        line = shared.gathered + Uint32(own * PACKED_BYTES + piece // 16 * _PART)
        eight = piece % 16 // 2
        at = line + Uint32((eight ^ (mine % 8)) * 16 + piece % 2 * 8)
        last = line + Uint32(2 * _GROUP + eight * 4)
        statistics = [
            ptx.load_shared_float2(shared.statistics + Uint32((r * owned_heads + own) * 16))
            for r in ctas
        ]
        skips = [r * owned_heads * PACKED_BYTES for r in ctas]
        fours = [
            ptx.unpack_accumulators(
                ptx.load_shared(at, 2, skip), ptx.load_shared_word(last, skip), piece % 2
            )
            for skip in skips
        ]
        logit = ptx.load_shared_float(shared.sinks + Uint32(mine * 4)) * Float32(LOG2E)
        origin = logit
        for r in cutlass.range_constexpr(self.plan.ctas):
            origin = ptx.max_float(origin, statistics[r][0])
        origin = finite_origin(origin)
        total = ptx.exp2_approx(logit - origin)
        sums = [Float32(0.0)] * 4
        # In the order of ranks.
        for r in cutlass.range_constexpr(self.plan.ctas):
            factor = ptx.exp2_approx(statistics[r][0] - origin)
            total = total + statistics[r][1] * factor
            sums = [sums[i] + fours[r][i] * factor for i in range(4)]
        factor = reciprocal_or_zero(total)
        dim = piece * 4 - (DIMS - ROPE)
        if (args.cos != Int64(0)) & (dim >= 0):
            for i in cutlass.range_constexpr(2):
                angle = shared.angles + Uint32((dim // 2 + i) * 4)
                c = ptx.load_shared_float(angle)
                s = ptx.load_shared_float(angle + ROPE // 2 * 4)
                sums[2 * i], sums[2 * i + 1] = ptx.inverse_rope_pair(
                    sums[2 * i], sums[2 * i + 1], c, s
                )
        words = [
            ptx.pack_bfloat16x2(sums[2 * i] * factor, sums[2 * i + 1] * factor) for i in range(2)
        ]
        head = tile.first_head + mine
        if head < args.heads:
            address = (Int64(tile.token) * args.heads + head) * DIMS + piece * 4
            ptx.store_global2(args.out + address * 2, words)
