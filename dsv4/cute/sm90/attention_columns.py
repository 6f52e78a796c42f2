"""Sparse attention of 16 heads of a token, with entries, then dims, as rows of the MMAs.

Tiling and ownership
    A cluster has a (token, tile of 16 heads); each of its ``plan.ctas`` CTAs every ``ctas``-th KV
    block of 64 entries. Two groups of four warps dequantize (``_entries``), each every other KV
    block of the CTA. The consumer warpgroup multiplies entries (M = 64) by queries (N = 16 heads),
    so that a tensor core's 64 rows are full whatever the heads; and then the same entries,
    transposed (M = 8 tiles of 64 dims), by softmax weights (N = 16 heads). A thread has the same
    four heads in both: ``2 j``, ``2 j + 1``, ``2 j + 8``, ``2 j + 9`` with ``j = lane % 4``.

Pipeline
    Two stages of entries, dequantized while the consumers multiply. A KV block's results are added
    before the next is waited for.

Barriers
    ``full``, ``empty`` (an mbarrier a stage): see ``_entries``; all consumers arrive at ``empty``.
    Named barrier ``_MEET``: the consumers. Twice a KV block: the warps' largest logits are written;
    weights are written and fenced for the MMAs. What a barrier's readers read is overwritten only
    after the other barrier.
    ``arrived`` (an mbarrier): completes with the partial sums and statistics that the other CTAs
    push (``st.async``). Phase 0.
    ``stages_read`` (an mbarrier, a lane of each consumer warp of the cluster arrives): no CTA reads
    its stages any more, whose memory takes the partial sums.
    Cluster barrier: orders the initialisation of mbarriers before other CTAs' arrivals. A CTA
    exits with nothing outgoing unread, because ``arrived`` of every CTA waits for all pushes to it
    and pushes are from registers.

Determinism and numerics
    A CTA adds the partial sums of its share of the dims in the order of ranks. See
    ``attention_softmax`` for weights and references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.sm90._cluster_launch import ClusterLaunch
from dsv4.cute.sm90._entries import EntryDequant, Producer, Ring, Split, caches_of
from dsv4.cute.sm90.attention_args import ClusterAttentionArgs
from dsv4.cute.sm90.attention_input import AttentionInput, address_of
from dsv4.cute.sm90.attention_plan import (
    BLOCK,
    DIMS,
    INFO_BYTES,
    ROPE,
    STAGES,
    ColumnsPlan,
    code_bytes,
)
from dsv4.cute.sm90.attention_softmax import (
    INFINITY,
    LOG2E,
    Softmax,
    empty_softmax,
    merged_total,
    new_reference,
    reciprocal_or_zero,
)

_MEET = 1  # named barrier of the consumers
_WARPS = 4  # that multiply
_THREADS = 32 * _WARPS
_ROWS = 64  # of an MMA
_TILES = DIMS // _ROWS  # of results
_OWN = 4  # heads of a thread

Fragment = list[Float32]


class Layouts(NamedTuple):
    """Shared-memory layouts.

    Attributes:
        q: Address of queries.
        k: Address of the stages.
        p: Address of softmax weights.
    """

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    p: cute.ComposedLayout


class SharedTiles(NamedTuple):
    """Tiles in shared memory.

    Attributes:
        k: Stages of entries.
        q: Queries.
        p: Softmax weights.
    """

    k: cute.Tensor
    q: cute.Tensor
    p: cute.Tensor


class SharedMemory(NamedTuple):
    """Shared-memory addresses.

    Attributes:
        codes: Codes that wait for a free stage.
        exchanged: A number of each head, of each consumer warp.
        sinks: Sinks of the tile; the token's angles follow.
        statistics: Reference and sum of weights of each head, of all ranks.
        info: Descriptions of the stages.
        full: mbarriers of stages that are filled.
        empty: mbarriers of stages that are free.
        arrived: mbarriers ``arrived`` and ``stages_read``.
        stages: Stages of ``SharedTiles.k``.
    """

    codes: Uint32
    exchanged: Uint32
    sinks: Uint32
    statistics: Uint32
    info: Uint32
    full: Uint32
    empty: Uint32
    arrived: Uint32
    stages: Uint32


class Tile(NamedTuple):
    """A tile of heads of a token.

    Attributes:
        token: Number of the token.
        first_head: First head of the tile.
    """

    token: Int32
    first_head: Int32


class Consumer(NamedTuple):
    """A thread that multiplies.

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


class ColumnsKernel(ClusterLaunch, AttentionInput, EntryDequant):
    """The kernel of one configuration."""

    plan: ColumnsPlan

    @property
    def tile_heads(self) -> int:
        """Heads of a tile."""
        return self.plan.heads

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return _THREADS

    def _layouts(self) -> Layouts:
        """Layouts with 128-byte swizzle, as ``wgmma`` reads operands."""
        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return Layouts(
            q=cute.tile_to_shape(swizzle, (self.plan.heads, DIMS), (0, 1)),
            k=cute.tile_to_shape(swizzle, (BLOCK, DIMS, STAGES), (0, 1, 2)),
            p=cute.tile_to_shape(swizzle, (self.plan.heads, BLOCK), (0, 1)),
        )

    def _gemm(self, major: OperandMajorMode) -> cute.TiledMma:
        """Entries times queries, K-major; or, transposed, times weights."""
        op = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (_ROWS, self.plan.heads, 16),
            warpgroup.OperandSource.SMEM,
            major,
            OperandMajorMode.K,
        )
        return cute.make_tiled_mma(op, (1, 1, 1))

    def _shared_tiles(self, smem: cutlass.memory.SmemAllocator, layouts: Layouts) -> SharedTiles:
        """Allocate the tiles, each at a multiple of the swizzle's 1024 bytes."""
        return SharedTiles(
            *(
                smem.allocate_tensor(
                    BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
                )
                for layout in (layouts.k, layouts.q, layouts.p)
            )
        )

    def _shared_memory(
        self, smem: cutlass.memory.SmemAllocator, tiles: SharedTiles
    ) -> SharedMemory:
        """Allocate all but the tiles."""
        plan = self.plan

        def allocated(size: int) -> Uint32:
            return Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=16).toint())

        codes = allocated(plan.dequant_groups * code_bytes(plan))
        exchanged = allocated(_WARPS * plan.heads * 4)
        sinks = allocated((plan.heads + ROPE) * 4)
        statistics = allocated(plan.ctas * plan.heads * 8)
        info = allocated(STAGES * INFO_BYTES + plan.dequant_groups * plan.scan_bytes)
        full = allocated((2 * STAGES + 2) * 8)
        return SharedMemory(
            codes=codes,
            exchanged=exchanged,
            sinks=sinks,
            statistics=statistics,
            info=info,
            full=full,
            empty=full + 8 * STAGES,
            arrived=full + 16 * STAGES,
            stages=address_of(tiles.k),
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
        layouts = self._layouts()
        logits_mma, sums_mma = self._gemm(OperandMajorMode.K), self._gemm(OperandMajorMode.MN)
        smem = cutlass.memory.SmemAllocator()
        tiles = self._shared_tiles(smem, layouts)
        shared = self._shared_memory(smem, tiles)
        # CTAs of the next kernel may start; they wait by griddepcontrol.wait for this one.
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            for s in cutlass.range_constexpr(STAGES):
                ptx.mbarrier_init(shared.full + s * 8, 32 * self.plan.dequant_warps)
                ptx.mbarrier_init(shared.empty + s * 8, _THREADS)
            ptx.mbarrier_init(shared.arrived, 1)
            ptx.mbarrier_init(shared.arrived + 8, self.plan.ctas * _WARPS)
            ptx.fence_mbarrier_init()
        # Waited for before this CTA first writes to others.
        cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        tile = Tile(token, head_tile * self.plan.heads)
        caches = caches_of(args)
        self.prefetch_slots(caches, token, thread)
        self._prefetch(args, tile, thread)
        # From here on slots, entries and queries are what preceding kernels wrote.
        cute.arch.griddepcontrol_wait()
        if warp >= _WARPS:
            group = (warp - _WARPS) // self.plan.dequant_warps
            own = (warp - _WARPS) % self.plan.dequant_warps
            offset = group * code_bytes(self.plan) + (own * 32 + lane) * 16
            codes = shared.codes + Uint32(offset)
            producer = Producer(
                shared.info, shared.full, shared.empty, shared.stages, codes, group, own, lane
            )
            split = Split(token, rank, Int32(self.plan.ctas), Int32(1))
            # Parity 1: the first pass finds every stage free.
            self.dequantize_split(caches, split, producer, Ring(group, Int32(1)))
            cute.arch.cluster_wait()
        else:
            to = address_of(tiles.q)
            self._load_queries(args, to, token, head_tile, thread)
            sinks, heads = shared.sinks, self.plan.heads
            self._load_tables(args, sinks, sinks, heads, token, tile.first_head, thread)
            ptx.wait_async_copies(0)
            ptx.fence_proxy_async_shared()
            # Queries of all threads are there.
            cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
            consumer = Consumer(rank, thread, warp, lane)
            self._consume(args, logits_mma, sums_mma, tiles, layouts.k, shared, tile, consumer)

    @cute.jit
    def _consume(
        self,
        args: ClusterAttentionArgs,
        logits_mma: cute.TiledMma,
        sums_mma: cute.TiledMma,
        tiles: SharedTiles,
        k_layout: cute.ComposedLayout,
        shared: SharedMemory,
        tile: Tile,
        consumer: Consumer,
    ) -> None:
        """The consumer warpgroup: multiply the CTA's KV blocks, then merge and store.

        Args:
            args: Arguments of the kernel.
            logits_mma: Entries times queries.
            sums_mma: Entries, transposed, times weights.
            tiles: Tiles in shared memory.
            k_layout: Layout of the stages.
            shared: Addresses.
            tile: Tile of heads.
            consumer: The thread.
        """
        weights_at = address_of(tiles.p)
        scale = args.scale * Float32(LOG2E)
        thread, warp, lane = consumer.thread, consumer.warp, consumer.lane
        logits_slice, sums_slice = logits_mma.get_slice(thread), sums_mma.get_slice(thread)
        entries = logits_mma.make_fragment_A(logits_slice.partition_A(tiles.k))
        queries = logits_mma.make_fragment_B(logits_slice.partition_B(tiles.q))
        transposed = cute.make_tensor(tiles.k.iterator, cute.select(k_layout.outer, mode=[1, 0, 2]))
        dims = sums_mma.make_fragment_A(sums_slice.partition_A(transposed))
        weights = sums_mma.make_fragment_B(sums_slice.partition_B(tiles.p))
        heads = self.plan.heads
        logits = cute.make_rmem_tensor(logits_slice.partition_shape_C((BLOCK, heads)), Float32)
        sums = cute.make_rmem_tensor(sums_slice.partition_shape_C((DIMS, heads)), Float32)
        sums.fill(Float32(0.0))
        sums_mma.set(warpgroup.Field.ACCUMULATE, True)
        # Where the lane's column of four transposed matrices of weights begins, for ``stmatrix``.
        head = lane // 16 * 8 + lane % 8
        give_at = weights_at + Uint32(head * 128 + ((warp * 2 + lane // 8 % 2) ^ (lane % 8)) * 16)
        softmax = empty_softmax(_OWN)
        stage, parity = Int32(0), Int32(0)
        more = cutlass.Boolean(True)
        while more:
            # Producers have fenced what they wrote.
            ptx.mbarrier_wait(shared.full + Uint32(stage * 8), parity)
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
            low, high, last, _ = ptx.load_shared(shared.info + Uint32(stage * INFO_BYTES), 4)
            warpgroup.wait_group(0)
            exists = low
            if warp >= 2:
                exists = high
            self._mask(logits, exists >> Uint32(warp % 2 * 16 + lane // 4))
            softmax, factors, words = self._weigh(
                logits, softmax, scale, shared.exchanged, warp, lane
            )
            ptx.stmatrix_x4_transposed(give_at, words)
            ptx.fence_proxy_async_shared()
            # Weights of all warps are written.
            cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
            self._rescale(sums, factors)
            warpgroup.fence()
            for k in cutlass.range_constexpr(BLOCK // 16):
                cute.gemm(sums_mma, sums, dims[None, None, k, stage], weights[None, None, k], sums)
            warpgroup.commit_group()
            more = last == Uint32(0)
            warpgroup.wait_group(0)
            ptx.mbarrier_arrive(shared.empty + Uint32(stage * 8))
            stage += 1
            if stage == STAGES:
                stage = Int32(0)
                parity = parity ^ 1
        totals = self._reduce_totals(softmax.totals, shared.exchanged, warp, lane)
        softmax = Softmax(softmax.references, totals)
        # The mbarriers of all CTAs are initialised.
        cute.arch.cluster_wait()
        self._push(sums, softmax, shared, consumer)
        self._merge(args, shared, tile, consumer)

    @cute.jit
    def _prefetch(self, args: ClusterAttentionArgs, tile: Tile, thread: Int32) -> None:
        """Prefetch queries, sinks and angles to L2, while preceding kernels still run."""
        q = args.q + (Int64(tile.token) * args.token_stride) * 2
        for i in cutlass.range_constexpr(-(-self.plan.heads * 8 // self.plan.threads)):
            number = i * self.plan.threads + thread
            head = tile.first_head + number // 8
            if (number < self.plan.heads * 8) & (head < args.heads):
                ptx.prefetch_l2(q + (Int64(head) * args.head_stride) * 2 + number % 8 * 128)
        if thread == 0:
            ptx.prefetch_l2(args.sink + Int64(tile.first_head) * 4)
        if (thread < 2) & (args.cos != Int64(0)):
            table = args.cos
            if thread == 1:
                table = args.sin
            ptx.prefetch_l2(table + Int64(tile.token) * (ROPE * 2))

    @cute.jit
    def _mask(self, logits: cute.Tensor, bits: Uint32) -> None:
        """Set logits of entries that do not exist to -inf.

        Args:
            logits: Logits of the thread's two rows.
            bits: Bits 0 and 8 are set if the entries of these rows exist.
        """
        for r in cutlass.range_constexpr(2):
            bit = (bits >> Uint32(8 * r)) & Uint32(1)
            for h in cutlass.range_constexpr(_OWN):
                at = h // 2 * 4 + r * 2 + h % 2
                logits[at] = ptx.select_float(bit, logits[at], -Float32(INFINITY))

    @cute.jit
    def _weigh(
        self,
        logits: cute.Tensor,
        softmax: Softmax,
        scale: Float32,
        exchanged: Uint32,
        warp: Int32,
        lane: Int32,
    ) -> tuple[Softmax, list[Float32], list[Uint32]]:
        """All consumers: turn the logits of a KV block into weights.

        Returns:
            The new softmax, factors on sums that are relative to the old references, and weights as
            words of four 8 x 8 matrices.
        """
        highs = []
        for h in cutlass.range_constexpr(_OWN):
            at = h // 2 * 4 + h % 2
            high = ptx.max_float(logits[at], logits[at + 2])
            # Lanes with the same ``lane % 4`` have other entries of the same heads.
            for step in cutlass.range_constexpr(2, 5):
                high = ptx.max_float(high, cute.arch.shuffle_sync_bfly(high, 1 << step))
            highs.append(high)
        highs = self._over_warps(highs, ptx.max_float, exchanged, warp, lane)
        new, sums, factors, pairs = [], [], [], []
        for h in cutlass.range_constexpr(_OWN):
            reference = new_reference(highs[h] * scale, softmax.references[h])
            at = h // 2 * 4 + h % 2
            pairs.append(
                [
                    ptx.exp2_approx(ptx.fma_float(logits[at + 2 * r], scale, -reference.origin))
                    for r in range(2)
                ]
            )
            new.append(reference.value)
            sums.append(softmax.totals[h] * reference.factor)
            factors.append(reference.factor)
        words = []
        for h in cutlass.range_constexpr(0, _OWN, 2):
            for r in cutlass.range_constexpr(2):
                word = ptx.pack_bfloat16x2(pairs[h][r], pairs[h + 1][r])
                sums[h] = sums[h] + ptx.bfloat16_low_to_float(word)
                sums[h + 1] = sums[h + 1] + ptx.bfloat16_high_to_float(word)
                words.append(word)
        return Softmax(new, sums), factors, words

    @cute.jit
    def _over_warps(
        self,
        values: Sequence[Float32],
        join: Callable[[Float32, Float32], Float32],
        exchanged: Uint32,
        warp: Int32,
        lane: Int32,
    ) -> Fragment:
        """All consumers: join a number of each head over the warps, in their order.

        Args:
            values: Values of the thread's heads, the same in all lanes with the same ``lane % 4``.
            join: Function of two numbers.
            exchanged: Address of the numbers of all warps.
            warp: Warp of the CTA.
            lane: Lane of the warp.
        """
        mine = exchanged + Uint32(warp * (self.plan.heads * 4) + lane * 8)
        if lane < 4:
            for half in cutlass.range_constexpr(2):
                pair = values[2 * half : 2 * half + 2]
                ptx.store_shared_float2(mine + Uint32(half * 32), pair[0], pair[1])
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
        by_head = [Float32(0.0)] * _OWN
        for w in cutlass.range_constexpr(_WARPS):
            for half in cutlass.range_constexpr(2):
                at = exchanged + Uint32(w * (self.plan.heads * 4) + half * 32 + lane % 4 * 8)
                pair = ptx.load_shared_float2(at)
                for i in cutlass.range_constexpr(2):
                    h = 2 * half + i
                    by_head[h] = pair[i] if w == 0 else join(by_head[h], pair[i])
        return by_head

    @cute.jit
    def _rescale(self, sums: cute.Tensor, factors: Sequence[Float32]) -> None:
        """Make sums relative to new references; skipped where no lane's references changed."""
        changed = factors[0] != Float32(1.0)
        for h in cutlass.range_constexpr(1, _OWN):
            changed = changed | (factors[h] != Float32(1.0))
        if cute.arch.vote_any_sync(changed):
            for m in cutlass.range_constexpr(_TILES):
                for i in cutlass.range_constexpr(8):
                    sums[m * 8 + i] = sums[m * 8 + i] * factors[i // 4 * 2 + i % 2]

    @cute.jit
    def _reduce_totals(
        self, totals: Sequence[Float32], exchanged: Uint32, warp: Int32, lane: Int32
    ) -> Fragment:
        """All consumers: sums of the weights of all entries of the CTA."""
        whole = []
        for h in cutlass.range_constexpr(_OWN):
            value = totals[h]
            for step in cutlass.range_constexpr(2, 5):
                value = value + cute.arch.shuffle_sync_bfly(value, 1 << step)
            whole.append(value)
        return self._over_warps(whole, lambda a, b: a + b, exchanged, warp, lane)

    @property
    def share(self) -> int:
        """Tiles of dims that a CTA of the cluster adds and stores."""
        return _TILES // self.plan.ctas

    @property
    def partial_bytes(self) -> int:
        """Bytes of a CTA's partial sums of one share."""
        return self.share * _ROWS * self.plan.heads * 4

    @cute.jit
    def _push(
        self, sums: cute.Tensor, softmax: Softmax, shared: SharedMemory, consumer: Consumer
    ) -> None:
        """All consumers: push to every CTA of the cluster the sums of the dims that it stores.

        They go to the stages, which no CTA reads any more; a thread's 16 bytes are read by the same
        thread of the other CTA.
        """
        rank, thread, lane = consumer.rank, consumer.thread, consumer.lane
        arrived = shared.arrived
        references, total = softmax
        if thread == 0:
            ptx.mbarrier_arrive_expect_tx(
                arrived, (self.plan.ctas - 1) * (self.partial_bytes + self.plan.heads * 8)
            )
        # Every warp says to all CTAs that it has read its stages, and waits for theirs.
        if lane == 0:
            for other in cutlass.range_constexpr(self.plan.ctas):
                ptx.mbarrier_arrive_remote(ptx.map_to_cta(arrived + 8, Int32(other)))
        ptx.mbarrier_wait(arrived + 8, Int32(0))
        mine = shared.stages + Uint32(rank * self.partial_bytes + thread * 16)
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
                    address = shared.statistics + Uint32(
                        rank * (self.plan.heads * 8) + half * 64 + thread * 16
                    )
                    four = [x[2 * half + i] for i in range(2) for x in (references, total)]
                    if rank == other:
                        ptx.store_shared_float4(address, four)
                    else:
                        ptx.async_store_remote4(
                            ptx.map_to_cta(address, Int32(other)), four, barrier
                        )
        # The CTA's own statistics, which its first threads have written.
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
        ptx.mbarrier_wait(arrived, Int32(0))

    @cute.jit
    def _merge(
        self, args: ClusterAttentionArgs, shared: SharedMemory, tile: Tile, consumer: Consumer
    ) -> None:
        """All consumers: add all CTAs' sums of this one's share of the dims, and store."""
        rank, thread, warp, lane = consumer
        sinks = shared.sinks
        factors = self._factors(shared.statistics, sinks, lane)
        # Results are transposed behind the partial sums: a line for each head.
        line = shared.stages + Uint32(self.plan.ctas * self.partial_bytes)
        head = lane // 16 * 8 + lane % 8
        width = self.share * _ROWS * 2
        for m in cutlass.range_constexpr(self.share):
            eight = [Float32(0.0)] * 8
            for p in cutlass.range_constexpr(self.plan.ctas):
                at = shared.stages + Uint32(p * self.partial_bytes + thread * 16)
                for half in cutlass.range_constexpr(2):
                    four = ptx.load_shared_float4(at + (2 * m + half) * _THREADS * 16)
                    for i in cutlass.range_constexpr(4):
                        own = half * 2 + i % 2
                        n = half * 4 + i
                        eight[n] = eight[n] + four[i] * factors[own][p]
            # The last tile of 64 dims is the rotary one.
            if (args.cos != Int64(0)) & (rank * self.share + m == _TILES - 1):
                angles = sinks + Uint32(self.plan.heads * 4)
                eight = self._rotate_back(eight, angles, warp, lane)
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
        # Lines of all warps are written.
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=_THREADS)
        chunks = self.share * _ROWS // 8
        for i in cutlass.range_constexpr(self.plan.heads * chunks // _THREADS):
            number = i * _THREADS + thread
            row, chunk = number // chunks, number % chunks
            vector = ptx.load_shared(line + Uint32(row * width + (chunk ^ (row % 8)) * 16), 4)
            if tile.first_head + row < args.heads:
                address = (Int64(tile.token) * args.heads + tile.first_head + row) * DIMS
                dim = rank * (self.share * _ROWS) + chunk * 8
                ptx.store_global4(args.out + (address + dim) * 2, vector)

    @cute.jit
    def _factors(self, statistics: Uint32, sinks: Uint32, lane: Int32) -> list[Fragment]:
        """Return each own head's factors on all CTAs' sums, then 1 / the sum of weights."""
        by_head = []
        for h in cutlass.range_constexpr(_OWN):
            head = lane % 4 * 2 + h // 2 * 8 + h % 2
            sink = ptx.load_shared_float(sinks + Uint32(head * 4))
            pairs = [
                ptx.load_shared_float2(statistics + Uint32(p * (self.plan.heads * 8) + head * 8))
                for p in range(self.plan.ctas)
            ]
            factors, total = merged_total(pairs, sink)
            by_head.append([*factors, reciprocal_or_zero(total)])
        return by_head

    @cute.jit
    def _rotate_back(self, eight: Fragment, angles: Uint32, warp: Int32, lane: Int32) -> Fragment:
        """Rotate 8 sums of the rotary dims by the opposite angle.

        Even and odd dims of a pair are rows of the MMA, so they are in lanes four apart.
        """
        made = [Float32(0.0)] * 8
        for r in cutlass.range_constexpr(2):
            pair = warp * 8 + lane // 8 + 4 * r
            address = angles + Uint32(pair * 4)
            c, s = ptx.load_shared_float(address), ptx.load_shared_float(address + ROPE * 2)
            for n in cutlass.range_constexpr(_OWN):
                at = n // 2 * 4 + 2 * r + n % 2
                other = cute.arch.shuffle_sync_bfly(eight[at], 4)
                odd = Uint32(lane // 4 % 2)
                even_of = ptx.select_float(odd, other, eight[at])
                odd_of = ptx.select_float(odd, eight[at], other)
                both = ptx.inverse_rope_pair(even_of, odd_of, c, s)
                made[at] = ptx.select_float(odd, both[1], both[0])
        return made
