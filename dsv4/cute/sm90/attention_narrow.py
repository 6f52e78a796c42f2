"""Sparse attention of few tokens: a cluster has 16 heads, a warp 64 dims of 32 or 64 entries.

* Each of eight warps copies its group of codes to shared memory two steps ahead and expands it into
  registers, which are right operands of the product with the queries as they are, and, turned, of
  the product with the weights. No other warp reads it, and it is in shared memory as codes alone.
* Logits are sums of all warps' parts. A warp adds them, and has the softmax, of two heads, and
  leaves the weights for all.
* The blocks of a cluster share a token's entries in turn. At the end some or all of them get the
  sums of all for two heads or one, and add them in the order of their ranks. Sums go by bulk
  copies, from where the warp's codes were.

Columns of the product with the queries are in another order than in memory: a lane's 16 codes in a
row are words of four steps. The queries are loaded in the same order, and the sums' dims follow it.

Weights are relative to a reference that follows the largest logit when that has grown by more than
``2^8``, and rounded in numerator and denominator alike, as in ``attention``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90._cluster_launch import ClusterLaunch
from dsv4.cute.sm90.attention_args import ClusterAttentionArgs
from dsv4.cute.sm90.attention_plan import DIMS, NOPE, PACKED_BYTES, ROPE, NarrowPlan

Value = Any
_LOG2E = 1.4426950408889634
_SLACK = 8.0  # powers of two by which a logit may exceed its reference
_INFINITY = float("inf")
_ENTRY = NOPE + 2 * ROPE  # bytes of an entry, but for its scales
_WARPS = 8
_GROUP = 64  # dims of a warp
_CODED = NOPE // _GROUP  # warps whose entries are codes
_PART = PACKED_BYTES // _WARPS  # bytes of a head's packed sums of a warp's dims


class NarrowKernel(ClusterLaunch):
    """The kernel of one configuration."""

    plan: NarrowPlan

    @property
    def halves(self) -> int:
        """Entries of a lane where a warp has a step's."""
        return self.plan.step // 32

    @property
    def codes(self) -> int:
        """Bytes of a warp's group of a step's entries, as codes."""
        return self.plan.step * _GROUP

    @property
    def scales_at(self) -> int:
        """Of a stage: where scales are, behind codes and the last group's bfloat16."""
        return (_WARPS + 1) * self.codes

    @property
    def line(self) -> int:
        """Bytes of a head's logits."""
        return self.plan.step * 4

    @property
    def weights_line(self) -> int:
        """And of its weights, so that eight rows are in different banks."""
        return self.plan.step * 2 + 16

    @cute.kernel
    def kernel(self, args: ClusterAttentionArgs) -> None:
        """A cluster for every (token, tile of heads)."""
        q, window, window_slots = args.q, args.window, args.window_slots
        compressed, compressed_slots, sink = args.compressed, args.compressed_slots, args.sink
        out, cos, sin = args.out, args.cos, args.sin
        token_stride, head_stride = args.token_stride, args.head_stride
        window_stride, compressed_stride = args.window_stride, args.compressed_stride
        width, second_width = args.window_width, args.compressed_width
        page_shift, second_shift = args.window_shift, args.compressed_shift
        heads, tiles, scale = args.heads, args.head_tiles, args.scale
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank, item = block % self.plan.ctas, block // self.plan.ctas
        token, tile = item // tiles, item % tiles
        smem = cutlass.memory.SmemAllocator()
        raw = self._room(smem, self.plan.stages * self.plan.stage_bytes)
        gathered = self._room(smem, self.plan.ctas * self.plan.owned_heads * PACKED_BYTES)
        parts = self._room(smem, _WARPS * self.plan.heads * self.line)
        weights = self._room(smem, self.plan.heads * self.weights_line)
        factors = self._room(smem, self.plan.heads * 4)
        stats = self._room(smem, self.plan.ctas * self.plan.owned_heads * 16)
        sinks = self._room(smem, self.plan.heads * 4)
        tables = self._room(smem, 2 * ROPE * 2)
        arrived = self._room(smem, 8)
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            ptx.mbarrier_init(arrived, 1)
            ptx.fence_mbarrier_init()
        # Waited for where others are first written to.
        cute.arch.cluster_arrive_relaxed()
        first_head = tile * self.plan.heads
        row_bytes = Int64(token) * 8
        caches = (
            (window, window_stride, page_shift, window_slots + row_bytes * width, width),
            (
                compressed,
                compressed_stride,
                second_shift,
                compressed_slots + row_bytes * second_width,
                second_width,
            ),
        )
        self._prefetch(
            q + (Int64(token) * token_stride) * 2,
            caches,
            (sink, cos, sin),
            (token, first_head, heads, head_stride),
            thread,
        )
        cute.arch.griddepcontrol_wait()
        begin = (width + self.plan.step - 1) // self.plan.step
        steps = begin + (second_width + self.plan.step - 1) // self.plan.step
        step = Int32(rank)
        ahead = [
            self._ask(caches, begin, step + s * self.plan.ctas, lane)
            for s in range(self.plan.prefetched + 1)
        ]
        queries = self._load_queries(
            q + (Int64(token) * token_stride) * 2, (first_head, heads, head_stride), warp, lane
        )
        self._ask_tables((sink, cos, sin), (sinks, tables), (token, first_head, heads), thread)
        source = (warp, lane, self._source(warp, lane))
        there = []
        for s in cutlass.range_constexpr(self.plan.prefetched):
            place = raw + Uint32(s * self.plan.stage_bytes)
            there.append(
                self._copy(caches, begin, step + s * self.plan.ctas, ahead[s], place, source)
            )
            ptx.commit_async_copies()
        found = ahead[self.plan.prefetched]
        sums = [[Float32(0.0)] * 4 for _ in range(8)]
        references = [-Float32(_INFINITY)] * (self.plan.heads // _WARPS)
        total = [Float32(0.0)] * (self.plan.heads // _WARPS)
        stage = Int32(0)
        while step < steps:
            here = there[0]
            following = step + self.plan.prefetched * self.plan.ctas
            last = stage + self.plan.prefetched
            if last >= self.plan.stages:
                last -= self.plan.stages
            to = raw + Uint32(last * self.plan.stage_bytes)
            there = [*there[1:], self._copy(caches, begin, following, found, to, source)]
            ptx.commit_async_copies()
            found = self._ask(caches, begin, following + self.plan.ctas, lane)
            ptx.wait_async_copies(self.plan.prefetched)
            cute.arch.sync_warp()
            if self._any(here):
                words = self._expand(raw + Uint32(stage * self.plan.stage_bytes), warp, lane)
                self._score(words, queries, parts, warp, lane)
                cute.arch.sync_threads()
                references, total = self._weigh(
                    (parts, weights, factors), here, (references, total), scale, (warp, lane)
                )
                cute.arch.sync_threads()
                sums = self._add(sums, weights, factors, words, lane)
            step += self.plan.ctas
            stage += 1
            if stage == self.plan.stages:
                stage = Int32(0)
        ptx.wait_async_copies(0)
        cute.arch.cluster_wait()
        if thread == 0:
            # All blocks' references and sums of weights, and the others' sums. These may be here
            # before it, as the phase waits for this arrival.
            given = (self.plan.ctas - 1) * PACKED_BYTES
            ptx.mbarrier_arrive_expect_tx(
                arrived, self.plan.owned_heads * (given + self.plan.ctas * 16)
            )
        self._give(sums, (raw, gathered, arrived), (rank, warp, lane))
        self._give_stats(references, total, (stats, arrived), (rank, warp, lane))
        # Of all threads: they have copied the tables.
        cute.arch.sync_threads()
        if rank < self.plan.owners:
            ptx.mbarrier_wait(arrived, Int32(0))
        # The others' sums have left them, as its own have left this block when all say so.
        cute.arch.cluster_arrive_relaxed()
        if rank < self.plan.owners:
            self._merge(
                (gathered, stats, sinks, tables),
                (out, cos),
                (token, first_head, heads),
                (rank, thread),
            )
        cute.arch.cluster_wait()

    def _room(self, smem: Value, size: int) -> Value:
        """Address of so many bytes of shared memory."""
        return Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=128).toint())

    @cute.jit
    def _prefetch(
        self, q: Value, caches: Value, tensors: Value, where: Value, thread: Value
    ) -> None:
        """Bring queries, slots, sinks and angles to the level-2 cache."""
        sink, cos, sin = tensors
        token, first_head, heads, head_stride = where
        head = first_head + thread // 8
        if (thread < self.plan.heads * 8) & (head < heads):
            ptx.prefetch_l2(q + (Int64(head) * head_stride) * 2 + thread % 8 * 128)
        for c in cutlass.range_constexpr(2):
            if thread * 16 < caches[c][4]:
                ptx.prefetch_l2(caches[c][3] + Int64(thread) * 128)
        if thread == 0:
            ptx.prefetch_l2(sink + Int64(first_head) * 4)
        if (thread < 2) & (cos != Int64(0)):
            table = cos
            if thread == 1:
                table = sin
            ptx.prefetch_l2(table + Int64(token) * (ROPE * 2))

    @cute.jit
    def _ask(self, caches: Value, begin: Value, step: Value, lane: Value) -> Value:
        """Load the lane's slots of a step; all ones beyond the last."""
        row, limit, number = caches[0][3], caches[0][4], step
        if step >= begin:
            row, limit, number = caches[1][3], caches[1][4], step - begin
        number = number * self.plan.step + lane
        return [
            ptx.load_global2_or_ones(
                row + Int64(number + 32 * h) * 8, Int32(number + 32 * h < limit)
            )
            for h in range(self.halves)
        ]

    def _any(self, there: Value) -> Value:
        """Whether a step has an entry."""
        bits = there[0]
        for more in there[1:]:
            bits = bits | more
        return bits != Uint32(0)

    def _source(self, warp: Value, lane: Value) -> Value:
        """Where a lane's part of an entry begins: codes, or the bfloat16 of the last warp."""
        coded = Int32(warp < _CODED)
        return warp * _GROUP + lane % 4 * (32 - 16 * coded)

    @cute.jit
    def _start(self, cache: Value, slot: Value) -> Value:
        """Where an entry's page is, and the entry's number in it; the first's, if there is none."""
        data, stride, shift = cache
        safe = cutlass.max(slot, Int32(0))
        return data + Int64(safe >> shift) * stride, safe & ((1 << shift) - 1)

    @cute.jit
    def _copy(
        self, caches: Value, begin: Value, step: Value, found: Value, at: Value, source: Value
    ) -> Value:
        """Copy the warp's part of a step's entries to a stage; a bit for each entry there is."""
        warp, lane, offset = source
        slots = [cutlass.max(Int32(low) | (Int32(high) >> 31), Int32(-1)) for low, high in found]
        there = [Uint32(cute.arch.vote_ballot_sync(slot >= 0)) for slot in slots]
        if self._any(there):
            data, stride, shift = caches[0][0], caches[0][1], caches[0][2]
            if step >= begin:
                data, stride, shift = caches[1][0], caches[1][1], caches[1][2]
            cache = (data, stride, shift)
            to = at + Uint32(warp * self.codes + lane * 16)
            if warp < _CODED:
                for h in cutlass.range_constexpr(self.halves):
                    page, entry = self._start(cache, slots[h])
                    ptx.async_copy4_or_zero(
                        at + Uint32(self.scales_at + (warp * self.plan.step + 32 * h + lane) * 4),
                        page + Int64((_ENTRY << shift) + entry * 8 + warp // 4 * 4),
                        Int32(slots[h] >= 0) * 4,
                    )
                for i in cutlass.range_constexpr(self.plan.step // 8):
                    other = cute.arch.shuffle_sync(slots[i // 4], lane // 4 + i % 4 * 8)
                    page, entry = self._start(cache, other)
                    start = page + Int64(entry * _ENTRY + offset)
                    ptx.async_copy16_or_zero(to, start, Int32(other >= 0) * 16, i * 512)
            else:
                for i in cutlass.range_constexpr(self.plan.step // 8):
                    other = cute.arch.shuffle_sync(slots[i // 4], lane // 4 + i % 4 * 8)
                    page, entry = self._start(cache, other)
                    start = page + Int64(entry * _ENTRY + offset)
                    for h in cutlass.range_constexpr(2):
                        wanted = Int32(other >= 0) * 16
                        ptx.async_copy16_or_zero(to, start, wanted, i * 1024 + h * 512, h * 16)
        return there

    @cute.jit
    def _ask_tables(self, sources: Value, places: Value, where: Value, thread: Value) -> None:
        """Copy sinks and angles, which are needed at the end."""
        sink, cos, sin = sources
        sinks, tables = places
        token, first, heads = where
        if thread < self.plan.heads:
            head = cutlass.min(first + thread, heads - 1)
            ptx.async_copy4_or_zero(sinks + Uint32(thread * 4), sink + Int64(head) * 4, Int32(4))
        if (thread >= 32) & (thread < 32 + ROPE) & (cos != Int64(0)):
            number = thread - 32
            table = cos
            if number >= ROPE // 2:
                table = sin
            source = table + (Int64(token) * (ROPE // 2) + number % (ROPE // 2)) * 4
            ptx.async_copy4_or_zero(tables + Uint32(number * 4), source, Int32(4))

    @cute.jit
    def _load_queries(self, q: Value, where: Value, warp: Value, lane: Value) -> Value:
        """For each row of the lane, 16 dims of the warp's group: left operands of four steps."""
        first, heads, head_stride = where
        rows = []
        for r in cutlass.range_constexpr(self.plan.heads // 8):
            head = first + lane // 4 + 8 * r
            place = q + (Int64(head) * head_stride + warp * _GROUP + lane % 4 * 16) * 2
            wanted = Int32(head < heads)
            words = [
                *ptx.load_global_or_zero(place, 4, wanted),
                *ptx.load_global_or_zero(place, 4, wanted, 16),
            ]
            rows.append(words)
        return rows

    @cute.jit
    def _expand(self, at: Value, warp: Value, lane: Value) -> Value:
        """16 dims of each of the lane's entries, as pairs."""
        words = [Uint32(0)] * self.plan.step
        place = at + Uint32(warp * self.codes + lane * 16)
        if warp < _CODED:
            scales = at + Uint32(self.scales_at + (warp * self.plan.step + lane // 4) * 4)
            made = []
            for i in cutlass.range_constexpr(self.plan.step // 8):
                codes = ptx.load_shared(place + i * 512, 4)
                word = Uint32(ptx.load_shared_int(scales + i * 32))
                factor = ptx.e8m0_to_bfloat16x2((word >> Uint32(warp % 4 * 8)) & Uint32(255))
                made += [
                    ptx.e4m3x2_times_bfloat16x2(codes[w // 2], w % 2, factor) for w in range(8)
                ]
            words = made
        else:
            plain = []
            for i in cutlass.range_constexpr(self.plan.step // 4):
                plain += list(ptx.load_shared(place + i * 512, 4))
            words = plain
        return words

    @cute.jit
    def _score(self, words: Value, queries: Value, parts: Value, warp: Value, lane: Value) -> None:
        """The warp's part of the logits."""
        row = lane // 4
        logits = [[Float32(0.0)] * 4 for _ in range(self.plan.step // 8)]
        low, high = queries
        for j in cutlass.range_constexpr(4):
            left = [low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1]]
            for i in cutlass.range_constexpr(self.plan.step // 8):
                at = 8 * i + 2 * j
                logits[i] = ptx.mma_m16n8k16_bf16(logits[i], left, words[at : at + 2])
        line = parts + Uint32((warp * self.plan.heads + row) * self.line + lane % 4 * 8)
        for i in cutlass.range_constexpr(self.plan.step // 8):
            place = line + Uint32((i ^ (row % 4)) * 32)
            ptx.store_shared_float2(place, logits[i][0], logits[i][1])
            ptx.store_shared_float2(place + 8 * self.line, logits[i][2], logits[i][3])

    @cute.jit
    def _weigh(self, places: Value, there: Value, state: Value, scale: Value, who: Value) -> Value:
        """Weights of the warp's heads; new references, and the lane's sums of weights."""
        parts, weights, factors = places
        warp, lane = who
        scale = scale * Float32(_LOG2E)
        references, total = state
        new, sums, weighed = [], [], []
        count = self.plan.heads // _WARPS
        for h in cutlass.range_constexpr(count):
            head = warp * count + h
            column = ((lane // 8) ^ (head % 4)) * 8 + lane % 8
            place = parts + Uint32(head * self.line + column * 4)
            logits = []
            for half in cutlass.range_constexpr(self.halves):
                logit = ptx.load_shared_float(place + half * 128)
                for g in cutlass.range_constexpr(1, _WARPS):
                    at = place + (g * self.plan.heads * self.line + half * 128)
                    logit = logit + ptx.load_shared_float(at)
                bit = (there[half] >> Uint32(lane)) & Uint32(1)
                logits.append(ptx.select_float(bit, logit, -Float32(_INFINITY)))
            high = logits[0]
            for logit in logits[1:]:
                high = ptx.max_float(high, logit)
            for step in cutlass.range_constexpr(5):
                high = ptx.max_float(high, cute.arch.shuffle_sync_bfly(high, 1 << step))
            high = high * scale
            old = references[h]
            grown = high > old + Float32(_SLACK)
            reference = ptx.select_float(grown, high, old)
            # Of nothing but -inf, so that no inf - inf arises.
            origin = ptx.select_float(reference == -Float32(_INFINITY), Float32(0.0), reference)
            factor = ptx.select_float(grown, ptx.exp2_approx(old - reference), Float32(1.0))
            if lane == 0:
                ptx.store_shared_float(factors + Uint32(head * 4), factor)
            weighed.append(
                [ptx.exp2_approx(ptx.fma_float(logit, scale, -origin)) for logit in logits]
            )
            sums.append(total[h] * factor)
            new.append(reference)
            if cutlass.const_expr(h % 2 == 1):
                for half in cutlass.range_constexpr(self.halves):
                    word = ptx.pack_bfloat16x2(weighed[h - 1][half], weighed[h][half])
                    line = weights + Uint32((head - 1) * self.weights_line)
                    place = line + Uint32((lane + 32 * half) * 2)
                    ptx.store_shared_halves(place, word, self.weights_line)
                    sums[h - 1] = sums[h - 1] + ptx.bfloat16_low_to_float(word)
                    sums[h] = sums[h] + ptx.bfloat16_high_to_float(word)
        return new, sums

    @cute.jit
    def _add(self, sums: Value, weights: Value, factors: Value, words: Value, lane: Value) -> Value:
        """Weights times the warp's group of dims."""
        line = weights + Uint32(lane % 16 * self.weights_line + lane // 16 * 16)
        by = [ptx.load_shared_float(factors + Uint32((lane // 4 + 8 * r) * 4)) for r in range(2)]
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
    def _write(self, address: Value, owner: Value, four: Value, arrived: Value) -> None:
        """Four float32 to a block of the cluster."""
        ptx.async_store_remote4(
            ptx.map_to_cta(address, owner), four, ptx.map_to_cta(arrived, owner)
        )

    @cute.jit
    def _give(self, sums: Value, rooms: Value, who: Value) -> None:
        """Sums to whoever has the head, packed: pieces of 16 bytes in another order, fifths behind.

        They go by way of the warp's part of two stages, which nobody needs any more: of eight
        heads, no more bytes than the codes of 32 entries.
        """
        rank, warp, lane = who
        stages, room, arrived = rooms
        part = _PART
        mine = stages + Uint32(warp * self.codes)
        apart = self.plan.stage_bytes - 8 * part
        row = lane // 4
        for r in cutlass.range_constexpr(2):
            head = row + 8 * r
            line = mine + Uint32(head * part + r * apart)
            if head // self.plan.owned_heads == rank:
                # A copy to itself is forbidden.
                own = rank * self.plan.owned_heads + head % self.plan.owned_heads
                line = room + Uint32(own * PACKED_BYTES + warp * part)
            fifth = []
            for k in cutlass.range_constexpr(2):
                four = [sums[4 * k + n] for n in range(4)]
                words = ptx.pack_accumulators([pair[2 * r + i] for pair in four for i in range(2)])
                ptx.store_shared4(line + Uint32(((lane % 4 * 2 + k) ^ row) * 16), words[:4])
                fifth.append(words[4])
            ptx.store_shared2(line + Uint32(2 * _GROUP + lane % 4 * 8), fifth)
        ptx.fence_proxy_async_shared()
        cute.arch.sync_warp()
        owner, own = lane // self.plan.owned_heads, lane % self.plan.owned_heads
        if (lane < self.plan.heads) & (owner != rank):
            to = room + Uint32((rank * self.plan.owned_heads + own) * PACKED_BYTES + warp * part)
            ptx.bulk_copy_to_remote(
                ptx.map_to_cta(to, owner),
                mine + Uint32(lane * part + lane // 8 * apart),
                part,
                ptx.map_to_cta(arrived, owner),
            )

    @cute.jit
    def _give_stats(self, references: Value, total: Value, rooms: Value, who: Value) -> None:
        """What a head's sums are relative to, and its sum of weights."""
        rank, warp, lane = who
        room, arrived = rooms
        count = self.plan.heads // _WARPS
        for h in cutlass.range_constexpr(count):
            whole = total[h]
            for step in cutlass.range_constexpr(5):
                whole = whole + cute.arch.shuffle_sync_bfly(whole, 1 << step)
            if lane == 0:
                head = warp * count + h
                at = room + Uint32(
                    (rank * self.plan.owned_heads + head % self.plan.owned_heads) * 16
                )
                four = [references[h], whole, Float32(0.0), Float32(0.0)]
                self._write(at, head // self.plan.owned_heads, four, arrived)

    @cute.jit
    def _merge(self, rooms: Value, places: Value, where: Value, who: Value) -> None:
        """Add all blocks' sums of this one's heads; four dims of a head at a time."""
        rank, thread = who
        pieces = self.plan.owned_heads * (DIMS // 4)
        for begin in cutlass.range_constexpr(0, pieces, self.plan.threads):
            if begin + thread < pieces:
                self._merge_four(rooms, places, where, (rank, begin + thread))

    @cute.jit
    def _merge_four(self, rooms: Value, places: Value, where: Value, who: Value) -> None:
        sums_at, stats, sinks, tables = rooms
        out, cos = places
        token, first, heads = where
        rank, number = who
        own, piece = number // (DIMS // 4), number % (DIMS // 4)
        mine = rank * self.plan.owned_heads + own
        line = sums_at + Uint32(own * PACKED_BYTES + piece // 16 * _PART)
        eight = piece % 16 // 2
        at = line + Uint32((eight ^ (mine % 8)) * 16 + piece % 2 * 8)
        last = line + Uint32(2 * _GROUP + eight * 4)
        known = [
            ptx.load_shared_float2(stats + Uint32((r * self.plan.owned_heads + own) * 16))
            for r in range(self.plan.ctas)
        ]
        skips = [r * self.plan.owned_heads * PACKED_BYTES for r in range(self.plan.ctas)]
        fours = [
            ptx.unpack_accumulators(
                ptx.load_shared(at, 2, skip), ptx.load_shared_word(last, skip), piece % 2
            )
            for skip in skips
        ]
        logit = ptx.load_shared_float(sinks + Uint32(mine * 4)) * Float32(_LOG2E)
        origin = logit
        for r in cutlass.range_constexpr(self.plan.ctas):
            origin = ptx.max_float(origin, known[r][0])
        origin = ptx.select_float(origin == -Float32(_INFINITY), Float32(0.0), origin)
        total = ptx.exp2_approx(logit - origin)
        sums = [Float32(0.0)] * 4
        for r in cutlass.range_constexpr(self.plan.ctas):
            factor = ptx.exp2_approx(known[r][0] - origin)
            total = total + known[r][1] * factor
            sums = [sums[i] + fours[r][i] * factor for i in range(4)]
        factor = ptx.select_float(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)
        dim = piece * 4 - (DIMS - ROPE)
        if (cos != Int64(0)) & (dim >= 0):
            for i in cutlass.range_constexpr(2):
                angle = tables + Uint32((dim // 2 + i) * 4)
                c = ptx.load_shared_float(angle)
                s = ptx.load_shared_float(angle + ROPE // 2 * 4)
                sums[2 * i], sums[2 * i + 1] = ptx.inverse_rope_pair(
                    sums[2 * i], sums[2 * i + 1], c, s
                )
        words = [
            ptx.pack_bfloat16x2(sums[2 * i] * factor, sums[2 * i + 1] * factor) for i in range(2)
        ]
        head = first + mine
        if head < heads:
            place = (Int64(token) * heads + head) * DIMS + piece * 4
            ptx.store_global2(out + place * 2, words)
