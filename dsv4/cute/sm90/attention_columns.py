"""Sparse attention of 16 heads of a token: entries, then dims, are the rows of its products.

* Two warpgroups expand every other block of 64 ``"fp8"`` entries each to bfloat16 in shared
  memory, as ``_entries`` says. Entries that are not there are zeros, and their logits -inf.
* The third multiplies entries and queries, so that a tile of 64 rows is full whatever the heads;
  and then the same entries, turned, and weights: rows are dims. A thread has four heads in both.
* ``blocks`` of a cluster share a token's blocks of entries. At the end each gets the others' sums
  of its share of the dims, adds them in the order of ranks, and stores.

Weights are relative to a reference that follows the largest logit when that has grown by more than
``2^8``, and rounded in numerator and denominator alike, as in ``attention``.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.sm90._cluster_launch import ClusterLaunch
from dsv4.cute.sm90._entries import EntryDequant, Producer, Ring, Split, caches_of
from dsv4.cute.sm90.attention_args import ClusterAttentionArgs
from dsv4.cute.sm90.attention_plan import (
    BLOCK,
    DIMS,
    INFO_BYTES,
    ROPE,
    STAGES,
    ColumnsPlan,
    code_bytes,
)

Value = Any
_LOG2E = 1.4426950408889634
_SLACK = 8.0  # powers of two by which a logit may exceed its reference
_INFINITY = float("inf")
_MEET = 1  # named barrier of the warps that multiply
_WARPS = 4  # that multiply
_THREADS = 32 * _WARPS
_ROWS = 64  # of a product
_TILES = DIMS // _ROWS  # of the second product
_OWN = 4  # heads of a thread: 2 j, 2 j + 1, 2 j + 8, 2 j + 9, where j is its number among four


class ColumnsKernel(ClusterLaunch, EntryDequant):
    """The kernel of one configuration."""

    plan: ColumnsPlan

    def tools(self) -> tuple[Value, ...]:
        """Layouts of queries, stages and weights, and both products."""
        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        q_layout = cute.tile_to_shape(swizzle, (self.plan.heads, DIMS), (0, 1))
        k_layout = cute.tile_to_shape(swizzle, (BLOCK, DIMS, STAGES), (0, 1, 2))
        p_layout = cute.tile_to_shape(swizzle, (self.plan.heads, BLOCK), (0, 1))
        products = [
            cute.make_tiled_mma(
                warpgroup.MmaF16BF16Op(
                    BFloat16,
                    Float32,
                    (_ROWS, self.plan.heads, 16),
                    warpgroup.OperandSource.SMEM,
                    major,
                    OperandMajorMode.K,
                ),
                (1, 1, 1),
            )
            for major in (OperandMajorMode.K, OperandMajorMode.MN)
        ]
        return (q_layout, k_layout, p_layout, *products)

    @cute.kernel
    def kernel(self, args: ClusterAttentionArgs) -> None:
        """A cluster for every (token, tile of heads)."""
        q, sink = args.q, args.sink
        out, cos, sin = args.out, args.cos, args.sin
        token_stride, head_stride = args.token_stride, args.head_stride
        heads, tiles, scale = args.heads, args.head_tiles, args.scale
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank, item = block % self.plan.ctas, block // self.plan.ctas
        token, tile = item // tiles, item % tiles
        q_layout, k_layout, p_layout, logits_mma, sums_mma = self.tools()
        smem = cutlass.memory.SmemAllocator()
        shared_k = smem.allocate_tensor(
            BFloat16, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner
        )
        shared_q = smem.allocate_tensor(
            BFloat16, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner
        )
        shared_p = smem.allocate_tensor(
            BFloat16, p_layout.outer, byte_alignment=1024, swizzle=p_layout.inner
        )
        codes = self._room(smem, self.plan.dequant_groups * code_bytes(self.plan))
        told = self._room(smem, _WARPS * self.plan.heads * 4)
        sinks = self._room(smem, (self.plan.heads + ROPE) * 4)
        known = self._room(smem, self.plan.ctas * self.plan.heads * 8)
        info = self._room(
            smem, STAGES * INFO_BYTES + self.plan.dequant_groups * self.plan.scan_bytes
        )
        full = self._room(smem, (2 * STAGES + 2) * 8)
        empty, arrived = full + 8 * STAGES, full + 16 * STAGES
        at_k = Uint32(shared_k.iterator.toint())
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            for s in cutlass.range_constexpr(STAGES):
                ptx.mbarrier_init(full + s * 8, 32 * self.plan.dequant_warps)
                ptx.mbarrier_init(empty + s * 8, _THREADS)
            ptx.mbarrier_init(arrived, 1)
            ptx.mbarrier_init(arrived + 8, self.plan.ctas * _WARPS)
            ptx.fence_mbarrier_init()
        # Waited for where others are first written to.
        cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        first_head = tile * self.plan.heads
        caches = caches_of(args)
        self.prefetch_slots(caches, token, thread)
        self._prefetch(
            q + (Int64(token) * token_stride) * 2,
            (sink, cos, sin),
            (token, first_head, heads, head_stride),
            thread,
        )
        cute.arch.griddepcontrol_wait()
        if warp >= _WARPS:
            group = (warp - _WARPS) // self.plan.dequant_warps
            own = (warp - _WARPS) % self.plan.dequant_warps
            room = codes + Uint32(group * code_bytes(self.plan) + (own * 32 + lane) * 16)
            producer = Producer(info, full, empty, at_k, room, group, own, lane)
            part = Split(token, rank, Int32(self.plan.ctas), Int32(1))
            self.dequantize_split(caches, part, producer, Ring(group, Int32(1)))
            cute.arch.cluster_wait()
        else:
            at_q = Uint32(shared_q.iterator.toint())
            self._load_queries(
                q + (Int64(token) * token_stride) * 2,
                at_q,
                (thread, first_head, heads, head_stride),
            )
            self._load_tables((sink, cos, sin), sinks, (token, first_head, heads), thread)
            ptx.wait_async_copies(0)
            ptx.fence_proxy_async_shared()
            cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
            self._multiply(
                (shared_q, shared_k, shared_p, k_layout, logits_mma, sums_mma),
                (info, full, empty, arrived),
                (at_k, Uint32(shared_p.iterator.toint()), told, known),
                (sinks, out, cos),
                (token, first_head, heads, scale * Float32(_LOG2E)),
                (rank, thread, warp, lane),
            )

    def _room(self, smem: Value, size: int) -> Value:
        """Address of so many bytes of shared memory."""
        return Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=16).toint())

    @cute.jit
    def _multiply(
        self, operands: Value, ring: Value, rooms: Value, tensors: Value, sizes: Value, who: Value
    ) -> None:
        """The part of the warpgroup that multiplies."""
        shared_q, shared_k, shared_p, k_layout, logits_mma, sums_mma = operands
        info, full, empty, arrived = ring
        at_k, at_p, told, known = rooms
        sinks, out, cos = tensors
        token, first_head, heads, scale = sizes
        rank, thread, warp, lane = who
        logits_slice, sums_slice = logits_mma.get_slice(thread), sums_mma.get_slice(thread)
        entries = logits_mma.make_fragment_A(logits_slice.partition_A(shared_k))
        queries = logits_mma.make_fragment_B(logits_slice.partition_B(shared_q))
        turned = cute.make_tensor(shared_k.iterator, cute.select(k_layout.outer, mode=[1, 0, 2]))
        dims = sums_mma.make_fragment_A(sums_slice.partition_A(turned))
        weights = sums_mma.make_fragment_B(sums_slice.partition_B(shared_p))
        logits = cute.make_rmem_tensor(
            logits_slice.partition_shape_C((BLOCK, self.plan.heads)), Float32
        )
        sums = cute.make_rmem_tensor(sums_slice.partition_shape_C((DIMS, self.plan.heads)), Float32)
        sums.fill(0.0)
        sums_mma.set(warpgroup.Field.ACCUMULATE, True)
        # Where the lane's column of four turned matrices of weights begins.
        head = lane // 16 * 8 + lane % 8
        give_at = at_p + Uint32(head * 128 + ((warp * 2 + lane // 8 % 2) ^ (lane % 8)) * 16)
        references = [-Float32(_INFINITY)] * _OWN
        total = [Float32(0.0)] * _OWN
        stage, parity = Int32(0), Int32(0)
        more = cutlass.Boolean(True)
        while more:
            ptx.mbarrier_wait(full + Uint32(stage * 8), parity)
            warpgroup.fence()
            logits_mma.set(warpgroup.Field.ACCUMULATE, False)
            for k in cutlass.range_constexpr(DIMS // 16):
                cute.gemm(
                    logits_mma,
                    logits,
                    entries[None, None, k, stage],
                    queries[None, None, k],
                    logits,
                )
                logits_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            low, high, last, _ = ptx.load_shared(info + Uint32(stage * INFO_BYTES), 4)
            warpgroup.wait_group(0)
            there = low
            if warp >= 2:
                there = high
            self._hide(logits, there >> Uint32(warp % 2 * 16 + lane // 4))
            references, total, factors, words = self._weigh(
                logits, (references, total), scale, (told, warp, lane)
            )
            ptx.stmatrix_x4_transposed(give_at, words)
            ptx.fence_proxy_async_shared()
            cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
            self._rescale(sums, factors)
            warpgroup.fence()
            for k in cutlass.range_constexpr(BLOCK // 16):
                cute.gemm(sums_mma, sums, dims[None, None, k, stage], weights[None, None, k], sums)
            warpgroup.commit_group()
            more = last == Uint32(0)
            warpgroup.wait_group(0)
            ptx.mbarrier_arrive(empty + Uint32(stage * 8))
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                parity = parity ^ 1
        total = self._together(total, (told, warp, lane))
        cute.arch.cluster_wait()
        self._push(sums, (references, total), (at_k, known, arrived), (rank, thread, lane))
        self._merge(
            (at_k, known),
            (sinks, out, cos),
            (token, first_head, heads),
            (rank, thread, warp, lane),
        )

    @cute.jit
    def _prefetch(self, q: Value, tensors: Value, where: Value, thread: Value) -> None:
        """Bring queries, sinks and angles to the level-2 cache."""
        sink, cos, sin = tensors
        token, first_head, heads, head_stride = where
        for i in cutlass.range_constexpr(-(-self.plan.heads * 8 // self.plan.threads)):
            number = i * self.plan.threads + thread
            head = first_head + number // 8
            if (number < self.plan.heads * 8) & (head < heads):
                ptx.prefetch_l2(q + (Int64(head) * head_stride) * 2 + number % 8 * 128)
        if thread == 0:
            ptx.prefetch_l2(sink + Int64(first_head) * 4)
        if (thread < 2) & (cos != Int64(0)):
            table = cos
            if thread == 1:
                table = sin
            ptx.prefetch_l2(table + Int64(token) * (ROPE * 2))

    @cute.jit
    def _load_queries(self, q: Value, at: Value, where: Value) -> None:
        """16 heads into swizzled shared memory, zeros where there are no more heads."""
        thread, first_head, heads, head_stride = where
        for i in cutlass.range_constexpr(self.plan.heads * DIMS // 8 // _THREADS):
            number = i * _THREADS + thread
            row, chunk = number // (DIMS // 8), number % (DIMS // 8)
            head = first_head + row
            source = q + (Int64(head) * head_stride + chunk * 8) * 2
            place = (
                chunk // 8 * (self.plan.heads * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
            )
            ptx.async_copy16_or_zero(at + Uint32(place), source, Int32(head < heads) * 16)
        ptx.commit_async_copies()

    @cute.jit
    def _load_tables(self, sources: Value, sinks: Value, where: Value, thread: Value) -> None:
        """Sinks of a tile and a token's angles, which are needed at the end."""
        sink, cos, sin = sources
        token, first, heads = where
        if thread < self.plan.heads:
            head = cutlass.min(first + thread, heads - 1)
            logit = ptx.load_global_float(sink + Int64(head) * 4) * Float32(_LOG2E)
            ptx.store_shared_float(sinks + Uint32(thread * 4), logit)
        number = thread - self.plan.heads
        if (number >= 0) & (number < ROPE) & (cos != Int64(0)):
            table = cos
            if number >= ROPE // 2:
                table = sin
            angle = table + (Int64(token) * (ROPE // 2) + number % (ROPE // 2)) * 4
            ptx.store_shared_float(
                sinks + Uint32((self.plan.heads + number) * 4), ptx.load_global_float(angle)
            )

    @cute.jit
    def _hide(self, logits: Value, bits: Value) -> None:
        """-inf for entries that are not there: bits 0 and 8 are of the thread's rows."""
        for r in cutlass.range_constexpr(2):
            bit = (bits >> Uint32(8 * r)) & Uint32(1)
            for h in cutlass.range_constexpr(_OWN):
                at = h // 2 * 4 + r * 2 + h % 2
                logits[at] = ptx.select_float(bit, logits[at], -Float32(_INFINITY))

    @cute.jit
    def _weigh(self, logits: Value, state: Value, scale: Value, where: Value) -> Value:
        """References, sums of weights, factors on the old ones, and weights as four matrices."""
        references, total = state
        place, warp, lane = where
        highs = []
        for h in cutlass.range_constexpr(_OWN):
            at = h // 2 * 4 + h % 2
            high = ptx.max_float(logits[at], logits[at + 2])
            for step in cutlass.range_constexpr(2, 5):
                high = ptx.max_float(high, cute.arch.shuffle_sync_bfly(high, 1 << step))
            highs.append(high)
        highs = self._over_warps(highs, ptx.max_float, (place, warp, lane))
        new, sums, factors, pairs = [], [], [], []
        for h in cutlass.range_constexpr(_OWN):
            high = highs[h] * scale
            old = references[h]
            grown = high > old + Float32(_SLACK)
            reference = ptx.select_float(grown, high, old)
            # Of nothing but -inf, so that no inf - inf arises.
            origin = ptx.select_float(reference == -Float32(_INFINITY), Float32(0.0), reference)
            factor = ptx.select_float(grown, ptx.exp2_approx(old - reference), Float32(1.0))
            at = h // 2 * 4 + h % 2
            pairs.append(
                [
                    ptx.exp2_approx(ptx.fma_float(logits[at + 2 * r], scale, -origin))
                    for r in range(2)
                ]
            )
            new.append(reference)
            sums.append(total[h] * factor)
            factors.append(factor)
        words = []
        for h in cutlass.range_constexpr(0, _OWN, 2):
            for r in cutlass.range_constexpr(2):
                word = ptx.pack_bfloat16x2(pairs[h][r], pairs[h + 1][r])
                sums[h] = sums[h] + ptx.bfloat16_low_to_float(word)
                sums[h + 1] = sums[h + 1] + ptx.bfloat16_high_to_float(word)
                words.append(word)
        return new, sums, factors, words

    @cute.jit
    def _over_warps(self, values: Value, join: Any, where: Value) -> Value:
        """Of the thread's heads, what all warps have, joined in their order."""
        place, warp, lane = where
        mine = place + Uint32(warp * (self.plan.heads * 4) + lane * 8)
        if lane < 4:
            for half in cutlass.range_constexpr(2):
                pair = values[2 * half : 2 * half + 2]
                ptx.store_shared_float2(mine + Uint32(half * 32), pair[0], pair[1])
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
        found = [Float32(0.0)] * _OWN
        for w in cutlass.range_constexpr(_WARPS):
            for half in cutlass.range_constexpr(2):
                at = place + Uint32(w * (self.plan.heads * 4) + half * 32 + lane % 4 * 8)
                pair = ptx.load_shared_float2(at)
                for i in cutlass.range_constexpr(2):
                    h = 2 * half + i
                    found[h] = pair[i] if w == 0 else join(found[h], pair[i])
        return found

    @cute.jit
    def _rescale(self, sums: Value, factors: Value) -> None:
        """Sums relative to other references; most often to the same."""
        changed = factors[0] != Float32(1.0)
        for h in cutlass.range_constexpr(1, _OWN):
            changed = changed | (factors[h] != Float32(1.0))
        if cute.arch.vote_any_sync(changed):
            for m in cutlass.range_constexpr(_TILES):
                for i in cutlass.range_constexpr(8):
                    sums[m * 8 + i] = sums[m * 8 + i] * factors[i // 4 * 2 + i % 2]

    @cute.jit
    def _together(self, total: Value, where: Value) -> Value:
        """Sums of the weights of all rows."""
        whole = []
        for h in cutlass.range_constexpr(_OWN):
            value = total[h]
            for step in cutlass.range_constexpr(2, 5):
                value = value + cute.arch.shuffle_sync_bfly(value, 1 << step)
            whole.append(value)
        return self._over_warps(whole, lambda a, b: a + b, where)

    @property
    def share(self) -> int:
        """Tiles of dims that a block of the cluster adds up and stores."""
        return _TILES // self.plan.ctas

    @property
    def room_bytes(self) -> int:
        """Of a block's sums of one share."""
        return self.share * _ROWS * self.plan.heads * 4

    @cute.jit
    def _push(self, sums: Value, state: Value, rooms: Value, who: Value) -> None:
        """Give every block of the cluster this one's sums of the dims that are its share.

        Rooms: stages, whose contents nobody needs any more, for sums; what they are relative to;
        and two barriers, of what arrives and of all who have done with the stages.
        """
        room, known, arrived = rooms
        rank, thread, lane = who
        references, total = state
        if thread == 0:
            ptx.mbarrier_arrive_expect_tx(
                arrived, (self.plan.ctas - 1) * (self.room_bytes + self.plan.heads * 8)
            )
        if lane == 0:
            for other in cutlass.range_constexpr(self.plan.ctas):
                ptx.mbarrier_arrive_remote(ptx.map_to_cta(arrived + 8, Int32(other)))
        ptx.mbarrier_wait(arrived + 8, Int32(0))
        mine = room + Uint32(rank * self.room_bytes + thread * 16)
        for other in cutlass.range_constexpr(self.plan.ctas):
            to, barrier = ptx.map_to_cta(mine, Int32(other)), ptx.map_to_cta(arrived, Int32(other))
            fours = [
                [sums[other * self.share * 8 + n * 4 + i] for i in range(4)]
                for n in range(2 * self.share)
            ]
            if rank == other:
                # Read by nobody but this thread.
                for n in cutlass.range_constexpr(2 * self.share):
                    ptx.store_shared4(mine, fours[n], n * _THREADS * 16)
            else:
                for n in cutlass.range_constexpr(2 * self.share):
                    ptx.async_store_remote4(to, fours[n], barrier, n * _THREADS * 16)
            if thread < 4:
                # References of two heads and sums of their weights.
                for half in cutlass.range_constexpr(2):
                    place = known + Uint32(rank * (self.plan.heads * 8) + half * 64 + thread * 16)
                    four = [x[2 * half + i] for i in range(2) for x in (references, total)]
                    if rank == other:
                        ptx.store_shared_float4(place, four)
                    else:
                        ptx.async_store_remote4(ptx.map_to_cta(place, Int32(other)), four, barrier)
        # What the block's first threads have told of its own sums.
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
        ptx.mbarrier_wait(arrived, Int32(0))

    @cute.jit
    def _merge(self, rooms: Value, tensors: Value, item: Value, who: Value) -> None:
        """Add all blocks' sums of this one's share of the dims, in the order of their ranks."""
        room, known = rooms
        sinks, out, cos = tensors
        token, first_head, heads = item
        rank, thread, warp, lane = who
        factors = self._factors(known, sinks, lane)
        line = room + Uint32(self.plan.ctas * self.room_bytes)
        head = lane // 16 * 8 + lane % 8
        width = self.share * _ROWS * 2
        for m in cutlass.range_constexpr(self.share):
            eight = [Float32(0.0)] * 8
            for p in cutlass.range_constexpr(self.plan.ctas):
                at = room + Uint32(p * self.room_bytes + thread * 16)
                for half in cutlass.range_constexpr(2):
                    four = ptx.load_shared_float4(at + (2 * m + half) * _THREADS * 16)
                    for i in cutlass.range_constexpr(4):
                        own = half * 2 + i % 2
                        n = half * 4 + i
                        eight[n] = eight[n] + four[i] * factors[own][p]
            if (cos != Int64(0)) & (rank * self.share + m == _TILES - 1):
                tables = sinks + Uint32(self.plan.heads * 4)
                eight = self._turn_back(eight, tables, (warp, lane))
            words = [
                ptx.pack_bfloat16x2(
                    eight[2 * n] * factors[n // 2 * 2][self.plan.ctas],
                    eight[2 * n + 1] * factors[n // 2 * 2 + 1][self.plan.ctas],
                )
                for n in range(4)
            ]
            chunk = m * 8 + warp * 2 + lane // 8 % 2
            to = line + Uint32(head * width + (chunk ^ (lane % 8)) * 16)
            ptx.stmatrix_x4_transposed(to, words)
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
        chunks = self.share * _ROWS // 8
        for i in cutlass.range_constexpr(self.plan.heads * chunks // _THREADS):
            number = i * _THREADS + thread
            row, chunk = number // chunks, number % chunks
            four = ptx.load_shared(line + Uint32(row * width + (chunk ^ (row % 8)) * 16), 4)
            if first_head + row < heads:
                place = (Int64(token) * heads + first_head + row) * DIMS
                dim = rank * (self.share * _ROWS) + chunk * 8
                ptx.store_global4(out + (place + dim) * 2, four)

    @cute.jit
    def _factors(self, known: Value, sinks: Value, lane: Value) -> Value:
        """Of each of the thread's heads: factors on all blocks' sums, and then on their sum."""
        found = []
        for h in cutlass.range_constexpr(_OWN):
            head = lane % 4 * 2 + h // 2 * 8 + h % 2
            logit = ptx.load_shared_float(sinks + Uint32(head * 4))
            pairs = [
                ptx.load_shared_float2(known + Uint32(p * (self.plan.heads * 8) + head * 8))
                for p in range(self.plan.ctas)
            ]
            origin = logit
            for p in cutlass.range_constexpr(self.plan.ctas):
                origin = ptx.max_float(origin, pairs[p][0])
            origin = ptx.select_float(origin == -Float32(_INFINITY), Float32(0.0), origin)
            total = ptx.exp2_approx(logit - origin)
            each = [ptx.exp2_approx(pairs[p][0] - origin) for p in range(self.plan.ctas)]
            for p in cutlass.range_constexpr(self.plan.ctas):
                total = total + pairs[p][1] * each[p]
            each.append(ptx.select_float(total == Float32(0.0), Float32(0.0), Float32(1.0) / total))
            found.append(each)
        return found

    @cute.jit
    def _turn_back(self, eight: Value, tables: Value, where: Value) -> Value:
        """The rotated dims by the opposite angle: a pair is in lanes four apart."""
        warp, lane = where
        made = [Float32(0.0)] * 8
        for r in cutlass.range_constexpr(2):
            pair = warp * 8 + lane // 8 + 4 * r
            place = tables + Uint32(pair * 4)
            c, s = ptx.load_shared_float(place), ptx.load_shared_float(place + ROPE * 2)
            for n in cutlass.range_constexpr(_OWN):
                at = n // 2 * 4 + 2 * r + n % 2
                other = cute.arch.shuffle_sync_bfly(eight[at], 4)
                odd = Uint32(lane // 4 % 2)
                even_of = ptx.select_float(odd, other, eight[at])
                odd_of = ptx.select_float(odd, eight[at], other)
                both = ptx.inverse_rope_pair(even_of, odd_of, c, s)
                made[at] = ptx.select_float(odd, both[1], both[0])
        return made
