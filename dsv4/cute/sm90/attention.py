"""Sparse attention of 64 heads of a token; an entry is dequantized once and multiplied twice.

Tiling and ownership
    A work item is a (token, KV split, tile of 64 heads). CTAs are persistent and take every
    ``grid``-th item. Four or eight producer warps dequantize KV blocks of 64 entries to bfloat16 in
    shared memory (``_entries``). Two consumer warpgroups multiply: each computes the logits and
    softmax weights of the KV blocks of one of the two stages, and has half of the dims of all
    results in its registers (``attention_epilogue`` describes them). So it multiplies its own
    weights from registers and the other warpgroup's from shared memory, with its half of the
    entries' dims: the tile that the logits' GEMM read, transposed.
    Where the plan is ``paired``, the two CTAs of a cluster have the odd and the even KV blocks of a
    tile, and each adds and stores half of the dims.

Pipeline
    Two stages of entries. Between the other warpgroup's weights and its own next logits a
    warpgroup waits for no MMA: the other's stage is released when a quarter of these logits' MMAs
    are issued (``_ISSUED``). Producers dequantize the next item's entries while the results of the
    last are stored. Queries, sinks and angles of an item are loaded when the item before is done;
    with four producer warps they are prefetched to L2 an item ahead.

Barriers
    ``full``, ``empty`` (an mbarrier a stage): see ``_entries``. ``empty`` takes an arrival of each
    consumer warp, after its last MMA on the stage.
    ``ready`` (an mbarrier a stage): completes when the 128 threads that own a stage have given its
    weights and references to the other warpgroup.
    ``peer_ready`` and ``pieces``, behind ``ready``: of a pair, see ``attention_epilogue``.
    Named barrier ``MEET``: all consumers. Before the queries' copies, because the item before may
    still be stored from their buffer; after them; and in ``_reduce_totals``.
    Fences: consumers fence what producers have written before they multiply it: the owner of a
    stage before its logits, and once more before it arrives at ``ready``, for the other.

Numerics
    ``attention_softmax``: weights are relative to a reference of each head that rarely changes. The
    warpgroups hand it on with the weights: at its stage each starts from the other's reference.
    Results depend on the number of KV splits, not on the other tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.sm90._entries import EntryDequant, EntryMask, Producer, Ring, Split, caches_of
from dsv4.cute.sm90.attention_args import ATTENTION_ABI, AttentionArgs, AttentionLayouts
from dsv4.cute.sm90.attention_epilogue import (
    HALF_BYTES,
    PACKED_HALF_BYTES,
    PIECES,
    AttentionEpilogue,
    Consumer,
    PairBuffers,
    Tables,
    Tile,
)
from dsv4.cute.sm90.attention_input import AttentionInput, address_of
from dsv4.cute.sm90.attention_plan import (
    BLOCK,
    CONSUMER_WARPS,
    DIMS,
    HEADS,
    INFO_BYTES,
    REGISTERS,
    ROPE,
    STAGES,
    AttentionPlan,
    code_bytes,
)
from dsv4.cute.sm90.attention_softmax import LOG2E, Softmax, empty_softmax
from dsv4.cute.sm90.attention_weights import MEET, AttentionWeights, Exchange, Operands

_CONSUMERS = 32 * CONSUMER_WARPS
_ISSUED = 8  # K steps of the next logits that keep the tensor cores busy while a stage is released


class Gemms(NamedTuple):
    """The three GEMMs of a KV block.

    Attributes:
        logits: Queries times entries, 64 heads x 64 entries.
        own: Weights in registers times half of the dims of entries.
        other: Weights in shared memory times half of the dims of entries.
    """

    logits: cute.TiledMma
    own: cute.TiledMma
    other: cute.TiledMma


class SharedTiles(NamedTuple):
    """Tiles in shared memory.

    Attributes:
        q: Address of queries.
        k: Stages of entries.
        p: Weights that one warpgroup gives to the other.
    """

    q: cute.Tensor
    k: cute.Tensor
    p: cute.Tensor


class SharedMemory(NamedTuple):
    """Shared-memory addresses.

    Attributes:
        codes: Codes that wait for a free stage.
        info: Descriptions of the stages.
        words: References, sums of weights, items, sinks, angles, statistics of a pair.
        full: mbarriers of stages that are filled.
        empty: mbarriers of stages that are free.
        ready: mbarriers of weights that are given.
        pair: mbarriers of a pair, ``peer_ready`` and ``pieces``.
        q: Address of ``SharedTiles.q``.
        stages: Stages of ``SharedTiles.k``.
    """

    codes: Uint32
    info: Uint32
    words: Uint32
    full: Uint32
    empty: Uint32
    ready: Uint32
    pair: Uint32
    q: Uint32
    stages: Uint32


class AttentionKernel(AttentionWeights, AttentionEpilogue, AttentionInput, EntryDequant):
    """The kernel of one configuration."""

    abi = ATTENTION_ABI
    plan: AttentionPlan

    @cute.jit
    def __call__(self, args: AttentionArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.attention`` launches the cubin itself."""
        layouts, gemms = self._layouts(), self._gemms()
        self._launch(self.kernel(layouts, gemms, args), stream)

    @property
    def tile_heads(self) -> int:
        """Heads of a tile."""
        return HEADS

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return _CONSUMERS

    def _layouts(self) -> AttentionLayouts:
        """Layouts with 128-byte swizzle, as ``wgmma`` reads operands."""
        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return AttentionLayouts(
            q_layout=cute.tile_to_shape(swizzle, (HEADS, DIMS), (0, 1)),
            k_layout=cute.tile_to_shape(swizzle, (BLOCK, DIMS, STAGES), (0, 1, 2)),
            p_layout=cute.tile_to_shape(swizzle, (HEADS, BLOCK), (0, 1)),
        )

    def _gemms(self) -> Gemms:
        """MMAs of a warpgroup; entries are K-major for logits, transposed for results."""
        logits = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (HEADS, BLOCK, 16),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        # 256 dims at a time where that many registers are left, else 128.
        dims = DIMS // (2 if self.plan.dequant_warps == 4 else 4)
        own, other = (
            warpgroup.MmaF16BF16Op(
                BFloat16,
                Float32,
                (HEADS, dims, 16),
                source,
                OperandMajorMode.K,
                OperandMajorMode.MN,
            )
            for source in (warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM)
        )
        return Gemms(*(cute.make_tiled_mma(op, (1, 1, 1)) for op in (logits, own, other)))

    def _shared_tiles(
        self, smem: cutlass.memory.SmemAllocator, layouts: AttentionLayouts
    ) -> SharedTiles:
        """Allocate the tiles, each at a multiple of the swizzle's 1024 bytes."""
        return SharedTiles(
            *(
                smem.allocate_tensor(
                    BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
                )
                for layout in layouts
            )
        )

    def _shared_memory(
        self, smem: cutlass.memory.SmemAllocator, tiles: SharedTiles
    ) -> SharedMemory:
        """Allocate all but the tiles."""
        codes = smem.allocate_array(cutlass.Uint8, code_bytes(self.plan), byte_alignment=16)
        notes = smem.allocate_array(
            cutlass.Uint8, STAGES * INFO_BYTES + self.plan.scan_bytes, byte_alignment=16
        )
        words = smem.allocate_array(cutlass.Float32, self.plan.shared_words, byte_alignment=16)
        full = Uint32(smem.allocate_array(cutlass.Int64, 3 * STAGES + 1 + PIECES).toint())
        return SharedMemory(
            codes=Uint32(codes.toint()),
            info=Uint32(notes.toint()),
            words=Uint32(words.toint()),
            full=full,
            empty=full + 8 * STAGES,
            ready=full + 16 * STAGES,
            pair=full + 24 * STAGES,
            q=address_of(tiles.q),
            stages=address_of(tiles.k),
        )

    @cute.kernel
    def kernel(self, layouts: AttentionLayouts, gemms: Gemms, args: AttentionArgs) -> None:
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        begin, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = cutlass.memory.SmemAllocator()
        tiles = self._shared_tiles(smem, layouts)
        shared = self._shared_memory(smem, tiles)
        # CTAs of the next kernel may start; they wait by griddepcontrol.wait for this one.
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            for s in cutlass.range_constexpr(STAGES):
                ptx.mbarrier_init(shared.full + s * 8, 32 * self.plan.dequant_warps)
                ptx.mbarrier_init(shared.empty + s * 8, CONSUMER_WARPS)
                ptx.mbarrier_init(shared.ready + s * 8, _CONSUMERS // 2)
            ptx.mbarrier_init(shared.pair, CONSUMER_WARPS)
            for piece in cutlass.range_constexpr(PIECES):
                ptx.mbarrier_init(shared.pair + 8 + piece * 8, 1)
            ptx.fence_mbarrier_init()
        if cutlass.const_expr(self.plan.paired):
            cute.arch.cluster_arrive_relaxed()
        caches = caches_of(args)
        # Prefetches to L2 overlap the preceding kernel, which may still write what they fetch: both
        # meet in L2. Loads may not, so that they follow griddepcontrol.wait.
        tile = self._tile(args, begin)
        self.prefetch_slots(caches, tile.token, thread)
        self._prefetch(args, tile, thread, self.plan.threads)
        cute.arch.griddepcontrol_wait()
        # The mbarriers are initialised: in both CTAs of a pair, else in this one.
        if cutlass.const_expr(self.plan.paired):
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[self.plan.dequant_warps][1])
            producer = Producer(
                info=shared.info,
                full=shared.full,
                empty=shared.empty,
                stages=shared.stages,
                codes=shared.codes + Uint32((thread - _CONSUMERS) * 16),
                group=Int32(0),
                warp=warp - CONSUMER_WARPS,
                lane=lane,
            )
            # Parity 1: the first pass finds every stage free.
            ring, item = Ring(Int32(0), Int32(1)), Int32(begin)
            while item < args.items:
                ring = self.dequantize_split(caches, self._split(args, item), producer, ring)
                item += grid
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.plan.dequant_warps][0])
            group = cute.arch.make_warp_uniform(thread // 128)
            weights = address_of(tiles.p)
            row = warp % 4 * 16 + lane // 4
            consumer = Consumer(group, thread, warp, lane, row)
            k_layout = layouts.k_layout
            self._consume(args, gemms, tiles, k_layout, shared, weights, consumer, begin, grid)

    def _split(self, args: AttentionArgs, item: Int32) -> Split:
        """The KV blocks of a work item."""
        if self.plan.paired:
            number, ctas = item // self.plan.ctas, Int32(self.plan.ctas)
            return Split(number // args.head_tiles, item % self.plan.ctas, ctas, args.scan)
        number = item // args.head_tiles
        return Split(number // args.splits, number % args.splits, args.splits, args.scan)

    def _tile(self, args: AttentionArgs, item: Int32) -> Tile:
        """The tile of heads of a work item."""
        if self.plan.paired:
            number = item // self.plan.ctas
            tile, token = number % args.head_tiles, number // args.head_tiles
        else:
            tile, number = item % args.head_tiles, item // args.head_tiles
            token = number // args.splits
        return Tile(token, number, tile)

    def _operands(
        self, gemms: Gemms, tiles: SharedTiles, k_layout: cute.ComposedLayout, consumer: Consumer
    ) -> Operands:
        """Partition the tiles, and allocate accumulators and weights in registers."""
        inner = consumer.thread % 128
        logits_slice, own_slice = gemms.logits.get_slice(inner), gemms.own.get_slice(inner)
        queries = gemms.logits.make_fragment_A(logits_slice.partition_A(tiles.q))
        entries = gemms.logits.make_fragment_B(logits_slice.partition_B(tiles.k))
        transposed = cute.make_tensor(tiles.k.iterator, cute.select(k_layout.outer, mode=[1, 0, 2]))
        halves = cute.local_tile(transposed, (DIMS // 2, BLOCK), (None, 0, None))
        values = gemms.own.make_fragment_B(own_slice.partition_B(halves))
        other_weights = gemms.other.make_fragment_A(
            gemms.other.get_slice(inner).partition_A(tiles.p)
        )
        logits = cute.make_rmem_tensor(logits_slice.partition_shape_C((HEADS, BLOCK)), Float32)
        sums = cute.make_rmem_tensor(own_slice.partition_shape_C((HEADS, DIMS // 2)), Float32)
        weights = cute.make_rmem_tensor(own_slice.partition_shape_A((HEADS, BLOCK)), BFloat16)
        words = cute.recast_tensor(weights, Uint32)
        return Operands(queries, entries, values, weights, words, other_weights, logits, sums)

    @cute.jit
    def _consume(
        self,
        args: AttentionArgs,
        gemms: Gemms,
        tiles: SharedTiles,
        k_layout: cute.ComposedLayout,
        shared: SharedMemory,
        weights: Uint32,
        consumer: Consumer,
        begin: Int32,
        grid: Int32,
    ) -> None:
        """One warpgroup: its share of every work item of the CTA.

        Args:
            args: Arguments of the kernel.
            gemms: The three MMAs.
            tiles: Tiles in shared memory.
            k_layout: Layout of the stages.
            shared: Addresses.
            weights: Address of ``SharedTiles.p``.
            consumer: The thread.
            begin: First work item.
            grid: Work items from one to the next.
        """
        scale = args.scale * Float32(LOG2E)
        group, thread, warp, lane = consumer.group, consumer.thread, consumer.warp, consumer.lane
        operands = self._operands(gemms, tiles, k_layout, consumer)
        gemms.own.set(warpgroup.Field.ACCUMULATE, True)
        gemms.other.set(warpgroup.Field.ACCUMULATE, True)
        exchange = Exchange(
            references=shared.words + Uint32(consumer.row * 4),
            weights=weights + Uint32((warp % 4 * 16 + lane % 16) * 128),
        )
        ring, item = Ring(Int32(0), Int32(0)), Int32(begin)
        item_address = shared.words + Uint32(3 * 4 * HEADS + warp * 4)
        sinks = shared.words + Uint32(4 * (3 * HEADS + CONSUMER_WARPS))
        tables = Tables(sinks, sinks + Uint32(4 * HEADS))
        while item < args.items:
            tile = self._tile(args, item)
            # Kept in shared memory, because no register is left over the main loop.
            if lane == 0:
                ptx.store_shared_int(item_address, item)
            cute.arch.sync_warp()
            # All consumers have stored the item before: its queries' buffer and tables are free.
            cute.arch.barrier(barrier_id=MEET, number_of_threads=_CONSUMERS)
            self._load_queries(args, shared.q, tile.token, tile.head_tile, thread)
            if cutlass.const_expr(not self.plan.split):
                self._load_tables(
                    args, tables.sinks, tables.angles, 0, tile.token, tile.first_head, thread
                )
            ptx.wait_async_copies(0)
            ptx.fence_proxy_async_shared()
            # Queries of all threads are there.
            cute.arch.barrier(barrier_id=MEET, number_of_threads=_CONSUMERS)
            # With eight producer warps there is no register for it, and few items of a CTA.
            if cutlass.const_expr(self.plan.dequant_warps == 4):  # noqa: SIM102 - one is constant
                if item + grid < args.items:
                    self._prefetch(args, self._tile(args, item + grid), thread, _CONSUMERS)
            operands.sums.fill(Float32(0.0))
            softmax = empty_softmax(2)
            last = Uint32(0)
            if group == ring.stage:
                softmax, last = self._own_block(
                    gemms, operands, shared, exchange, softmax, ring, consumer, scale, False
                )
                ring = self._following(ring)
            while last == Uint32(0):
                # A stage of the other warpgroup, which has fenced what the producers wrote.
                ptx.mbarrier_wait(shared.ready + Uint32(ring.stage * 8), ring.parity)
                softmax = self._follow(operands.sums, softmax, exchange.references)
                _, _, last = ptx.load_shared_broadcast(
                    shared.info + Uint32(ring.stage * INFO_BYTES), 3, lane
                )
                self._add(gemms.other, operands, operands.other_weights, group, ring.stage)
                ring = self._following(ring)
                if last == Uint32(0):
                    softmax, last = self._own_block(
                        gemms, operands, shared, exchange, softmax, ring, consumer, scale, True
                    )
                    ring = self._following(ring)
                else:
                    self._release_queries(shared.pair, last, lane)
                    warpgroup.wait_group(0)
                    self._release(shared.empty, 1 - ring.stage, lane)
            totals = self._reduce_totals(
                softmax.totals, exchange.references + Uint32(4 * HEADS), group, lane
            )
            softmax = Softmax(softmax.references, totals)
            item = ptx.load_shared_int(item_address)
            tile = self._tile(args, item)
            if cutlass.const_expr(self.plan.paired):
                self._finish_pair(args, operands.sums, softmax, shared, tables, tile, consumer)
            elif cutlass.const_expr(self.plan.split):
                self._store_partials(args, operands.sums, softmax, tile, consumer)
            else:
                self._rotate_back(args, operands.sums, tables.angles, consumer)
                buffer = shared.q + Uint32(warp * HALF_BYTES)
                self._store_results(
                    args, operands.sums, softmax, tables.sinks, buffer, tile, consumer
                )
            item += grid

    @cute.jit
    def _finish_pair(
        self,
        args: AttentionArgs,
        sums: cute.Tensor,
        softmax: Softmax,
        shared: SharedMemory,
        tables: Tables,
        tile: Tile,
        consumer: Consumer,
    ) -> None:
        """Exchange partial sums with the other CTA of the pair, add and store."""
        rank = cute.arch.block_idx_in_cluster()
        statistics = tables.angles + Uint32(4 * ROPE)
        own = shared.stages + Uint32(consumer.warp * 2 * HALF_BYTES)
        received = shared.q + Uint32(consumer.warp * PACKED_HALF_BYTES)
        buffers = PairBuffers(own, own + Uint32(HALF_BYTES), received, statistics, shared.pair)
        self._exchange_halves(sums, softmax, buffers, rank, consumer)
        # An opaque lane, so that addresses of the merge are not computed early and kept.
        merging = consumer._replace(lane=ptx.opaque(consumer.lane))
        self._merge_halves(args, buffers, tables, tile, rank, merging)
        # Neither CTA may exit while the other's copies still read or write its shared memory.
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    def _following(self, ring: Ring) -> Ring:
        """The next of two stages."""
        return Ring(1 - ring.stage, ring.parity ^ ring.stage)

    @cute.jit
    def _release_queries(self, pair: Uint32, last: Uint32, lane: Int32) -> None:
        """Let the other CTA of a pair write where the queries were, after the last logits."""
        if cutlass.const_expr(self.plan.paired):  # noqa: SIM102 - one is constant
            if (lane == 0) & (last != Uint32(0)):
                peer = 1 - cute.arch.block_idx_in_cluster()
                ptx.mbarrier_arrive_remote(ptx.map_to_cta(pair, peer))

    @cute.jit
    def _own_block(
        self,
        gemms: Gemms,
        operands: Operands,
        shared: SharedMemory,
        exchange: Exchange,
        softmax: Softmax,
        ring: Ring,
        consumer: Consumer,
        scale: Float32,
        pending: cutlass.Constexpr,
    ) -> tuple[Softmax, Uint32]:
        """One warpgroup: logits, weights and sums of a KV block that it owns.

        Args:
            gemms: The three MMAs.
            operands: Fragments.
            shared: Addresses.
            exchange: Where weights and references go.
            softmax: Before the KV block.
            ring: The stage of the KV block.
            consumer: The thread.
            scale: Scale of logits, times ``log2 e``.
            pending: Whether the MMAs of the other warpgroup's weights, with the stage before, are
                still in flight.

        Returns:
            The softmax after it, and whether it was the item's last KV block (not 0).
        """
        stage, lane = ring.stage, consumer.lane
        ptx.mbarrier_wait(shared.full + Uint32(stage * 8), ring.parity)
        ptx.fence_proxy_async_shared()
        warpgroup.fence()
        self._score(gemms, operands, stage, 0, _ISSUED)
        if cutlass.const_expr(pending):
            # All but the group of MMAs just issued are complete.
            warpgroup.wait_group(1)
            self._release(shared.empty, 1 - stage, lane)
        self._score(gemms, operands, stage, _ISSUED, DIMS // 16)
        low, high, last = ptx.load_shared_broadcast(
            shared.info + Uint32(stage * INFO_BYTES), 3, lane
        )
        warpgroup.wait_group(0)
        self._release_queries(shared.pair, last, lane)
        self._mask(operands.logits, EntryMask(low, high), lane)
        softmax, factors = self._weigh(operands, softmax, scale)
        self._give(operands.words, softmax.references, exchange, lane)
        ptx.fence_proxy_async_shared()
        ptx.mbarrier_arrive(shared.ready + Uint32(stage * 8))
        self._rescale(operands.sums, factors)
        self._add(gemms.own, operands, operands.weights, consumer.group, stage)
        warpgroup.wait_group(0)
        self._release(shared.empty, stage, lane)
        return softmax, last

    @cute.jit
    def _score(
        self,
        gemms: Gemms,
        operands: Operands,
        stage: Int32,
        first: cutlass.Constexpr,
        end: cutlass.Constexpr,
    ) -> None:
        """Issue K steps ``first`` to ``end`` of the logits as a group."""
        # A TiledMma of its own, because what is set within a branch is lost beyond it.
        mma = cute.make_tiled_mma(gemms.logits.op, (1, 1, 1))
        mma.set(warpgroup.Field.ACCUMULATE, first > 0)
        queries, entries, logits = operands.queries, operands.entries, operands.logits
        for k in cutlass.range_constexpr(first, end):
            cute.gemm(mma, logits, queries[None, None, k], entries[None, None, k, stage], logits)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _add(
        self,
        mma: cute.TiledMma,
        operands: Operands,
        weights: cute.Tensor,
        group: Int32,
        stage: Int32,
    ) -> None:
        """Issue weights times half of the dims of a stage's entries as a group."""
        sums, values = operands.sums, operands.values
        warpgroup.fence()
        for k in cutlass.range_constexpr(BLOCK // 16):
            cute.gemm(mma, sums, weights[None, None, k], values[None, None, k, group, stage], sums)
        warpgroup.commit_group()

    @cute.jit
    def _release(self, empty: Uint32, stage: Int32, lane: Int32) -> None:
        """One warp: all of its lanes have read the stage."""
        cute.arch.sync_warp()
        if lane == 0:
            ptx.mbarrier_arrive(empty + Uint32(stage * 8))

    @cute.jit
    def _prefetch(
        self, args: AttentionArgs, tile: Tile, thread: Int32, threads: cutlass.Constexpr
    ) -> None:
        """Prefetch a tile's queries, sinks and angles to L2, by ``threads`` threads."""
        q = args.q + (Int64(tile.token) * args.token_stride) * 2
        if (thread < 2) & (args.cos != Int64(0)):
            table = args.cos
            if thread == 1:
                table = args.sin
            ptx.prefetch_l2(table + Int64(tile.token) * (ROPE * 2))
        for i in cutlass.range_constexpr(-(-HEADS * 8 // threads)):
            number = i * threads + thread
            head = tile.first_head + number // 8
            if (number < HEADS * 8) & (head < args.heads):
                ptx.prefetch_l2(q + (Int64(head) * args.head_stride) * 2 + number % 8 * 128)
        head = tile.first_head + thread * 32
        if (thread < HEADS // 32) & (head < args.heads):
            ptx.prefetch_l2(args.sink + Int64(head) * 4)
