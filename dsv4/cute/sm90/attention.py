"""Sparse attention of 64 heads of a token: an entry is expanded once, and multiplied twice.

* Eight or four warps expand blocks of 64 ``"fp8"`` entries to bfloat16 in shared memory, into two
  stages. Entries that are not there are zeros, and their logits -inf.
* Of two warpgroups, each computes the logits and softmax weights of the blocks of one stage, and
  has half of the dims of all results in its registers. So it multiplies its own weights from
  registers, and the other's from shared memory, with its half of the entries' dims: the tile that
  the first product read, turned. Between the other's weights and its own next logits no product is
  waited for: the other's stage is given back when a quarter of these logits' products are begun.
* Blocks of threads stay and take (token, part, tile of heads) in turn. The entries of the next are
  expanded while the results of the last are stored.
* ``together``, two blocks of a cluster have the odd and the even blocks of a tile's entries. At the
  end each gives the other its sums of the dims that are the other's, packed, by bulk copies of four
  pieces, and adds and stores its own, piece after piece.

Weights are relative to a reference that follows the largest logit when that has grown by more than
``2^8``; sums of float32 bear that, and most blocks leave the sums as they are. The warpgroups hand
it on with the weights. The sum of weights is taken over the rounded ones, so that the result stays
a mean of entries and zero.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import transpose_quad
from dsv4.cute.sm90._entries import EntryDequant, Producer, Ring, Split, caches_of
from dsv4.cute.sm90.attention_args import ATTENTION_ABI, AttentionArgs, AttentionLayouts
from dsv4.cute.sm90.attention_plan import (
    BLOCK,
    CONSUMER_WARPS,
    DIMS,
    HEADS,
    INFO_BYTES,
    PACKED_BYTES,
    REGISTERS,
    ROPE,
    STAGES,
    AttentionPlan,
    code_bytes,
)

Value = Any
_LOG2E = 1.4426950408889634
_SLACK = 8.0  # powers of two by which a logit may exceed its reference
_INFINITY = float("inf")
_MEET = 1  # named barrier of both warpgroups that multiply
_CONSUMERS = 32 * CONSUMER_WARPS
_BEGUN = 8  # steps of the next logits that keep the tensor cores busy while a stage is given back
_PIECES = 4  # in which a warp gives its sums, of 32 dims
# Bytes of half of a warp's sums, as float32 and packed.
_KEPT, _GIVEN = DIMS // 4 * 16 * 4, DIMS // 4 * 16 * PACKED_BYTES // DIMS
_ALL_THERE = 0xFFFFFFFF


class AttentionKernel(EntryDequant):
    """The kernel of one configuration."""

    abi = ATTENTION_ABI
    plan: AttentionPlan

    @cute.jit
    def __call__(self, args: AttentionArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.attention`` launches the cubin itself."""
        q_layout, k_layout, p_layout, logits_mma, own_mma, other_mma = self.tools()
        layouts = AttentionLayouts(q_layout, k_layout, p_layout)
        self.kernel(layouts, logits_mma, own_mma, other_mma, args).launch(
            grid=[self.plan.ctas, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[self.plan.ctas, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def tools(self) -> tuple[Value, ...]:
        """Layouts of queries, stages and weights, and three products: logits, own and other's."""
        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        q_layout = cute.tile_to_shape(swizzle, (HEADS, DIMS), (0, 1))
        k_layout = cute.tile_to_shape(swizzle, (BLOCK, DIMS, STAGES), (0, 1, 2))
        p_layout = cute.tile_to_shape(swizzle, (HEADS, BLOCK), (0, 1))
        logits = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (HEADS, BLOCK, 16),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        # Of 256 dims where that many registers are left for the sums of one product.
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
        products = [cute.make_tiled_mma(op, (1, 1, 1)) for op in (logits, own, other)]
        return (q_layout, k_layout, p_layout, *products)

    @cute.kernel
    def kernel(
        self,
        layouts: AttentionLayouts,
        logits_mma: cute.TiledMma,
        own_mma: cute.TiledMma,
        other_mma: cute.TiledMma,
        args: AttentionArgs,
    ) -> None:
        """See the module.

        Args:
            layouts: Of shared memory.
            logits_mma: Queries times entries.
            own_mma: Weights from registers times half of the dims of entries.
            other_mma: Weights from shared memory likewise.
            args: See ``AttentionArgs``.
        """
        q_layout, k_layout, p_layout = layouts.q_layout, layouts.k_layout, layouts.p_layout
        q, sink = args.q, args.sink
        out, known, cos, sin = args.out, args.statistics, args.cos, args.sin
        token_stride, head_stride = args.token_stride, args.head_stride
        heads, splits, tiles, items = args.heads, args.splits, args.head_tiles, args.items
        scan, scale = args.scan, args.scale
        thread, _, _ = cute.arch.thread_idx()
        begin, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = cutlass.memory.SmemAllocator()
        shared_q = smem.allocate_tensor(
            BFloat16, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner
        )
        shared_k = smem.allocate_tensor(
            BFloat16, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner
        )
        shared_p = smem.allocate_tensor(
            BFloat16, p_layout.outer, byte_alignment=1024, swizzle=p_layout.inner
        )
        codes = smem.allocate_array(cutlass.Uint8, code_bytes(self.plan), byte_alignment=16)
        notes = smem.allocate_array(
            cutlass.Uint8, STAGES * INFO_BYTES + self.plan.scan_bytes, byte_alignment=16
        )
        told = Uint32(
            smem.allocate_array(cutlass.Float32, self.plan.shared_words, byte_alignment=16).toint()
        )
        info = Uint32(notes.toint())
        full = Uint32(smem.allocate_array(cutlass.Int64, 3 * STAGES + 1 + _PIECES).toint())
        empty, ready, arrived = full + 8 * STAGES, full + 16 * STAGES, full + 24 * STAGES
        at_q = Uint32(shared_q.iterator.toint())
        at_k = Uint32(shared_k.iterator.toint())
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            for s in cutlass.range_constexpr(STAGES):
                ptx.mbarrier_init(full + s * 8, 32 * self.plan.dequant_warps)
                ptx.mbarrier_init(empty + s * 8, CONSUMER_WARPS)
                ptx.mbarrier_init(ready + s * 8, _CONSUMERS // 2)
            ptx.mbarrier_init(arrived, CONSUMER_WARPS)
            for piece in cutlass.range_constexpr(_PIECES):
                ptx.mbarrier_init(arrived + 8 + piece * 8, 1)
            ptx.fence_mbarrier_init()
        if cutlass.const_expr(self.plan.paired):
            cute.arch.cluster_arrive_relaxed()
        caches = caches_of(args)
        tile, rest, token = self._item(begin, tiles, splits)
        self.prefetch_slots(caches, token, thread)
        self._prefetch(
            q + (Int64(token) * token_stride) * 2,
            (sink, cos, sin),
            (token, tile, heads, head_stride),
            (thread, self.plan.threads),
        )
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.plan.paired):
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp >= CONSUMER_WARPS:
            cute.arch.setmaxregister_decrease(REGISTERS[self.plan.dequant_warps][1])
            own = Uint32(codes.toint()) + Uint32((thread - _CONSUMERS) * 16)
            producer = Producer(info, full, empty, at_k, own, Int32(0), warp - CONSUMER_WARPS, lane)
            ring, item = Ring(Int32(0), Int32(1)), Int32(begin)
            while item < items:
                rest = item // tiles
                part = Split(rest // splits, rest % splits, splits, scan)
                if cutlass.const_expr(self.plan.paired):
                    number = item // self.plan.ctas
                    part = Split(
                        number // tiles, item % self.plan.ctas, Int32(self.plan.ctas), scan
                    )
                ring = self.dequantize_split(caches, part, producer, ring)
                item += grid
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.plan.dequant_warps][0])
            group = cute.arch.make_warp_uniform(thread // 128)
            operands = (shared_q, shared_k, shared_p, k_layout, logits_mma, own_mma, other_mma)
            self._multiply_items(
                operands,
                (info, full, empty, ready, arrived),
                (at_q, at_k, Uint32(shared_p.iterator.toint()), told),
                (q, token_stride, head_stride, sink, out, known, cos, sin),
                (begin, grid, items, tiles, splits, heads, scale * Float32(_LOG2E)),
                (group, thread, warp, lane),
            )

    @cute.jit
    def _multiply_items(
        self, operands: Value, ring: Value, shared: Value, tensors: Value, sizes: Value, who: Value
    ) -> None:
        """A warpgroup's share of every (token, part, tile of heads) of the block."""
        shared_q, shared_k, shared_p, k_layout, logits_mma, own_mma, other_mma = operands
        info, full, empty, ready, arrived = ring
        at_q, at_k, at_p, told = shared
        q, token_stride, head_stride, sink, out, known, cos, sin = tensors
        begin, grid, items, tiles, splits, heads, scale = sizes
        group, thread, warp, lane = who
        inner = thread % 128
        logits_slice, own_slice = logits_mma.get_slice(inner), own_mma.get_slice(inner)
        left = logits_mma.make_fragment_A(logits_slice.partition_A(shared_q))
        right = logits_mma.make_fragment_B(logits_slice.partition_B(shared_k))
        turned = cute.make_tensor(shared_k.iterator, cute.select(k_layout.outer, mode=[1, 0, 2]))
        halves = cute.local_tile(turned, (DIMS // 2, BLOCK), (None, 0, None))
        values = own_mma.make_fragment_B(own_slice.partition_B(halves))
        given = other_mma.make_fragment_A(other_mma.get_slice(inner).partition_A(shared_p))
        logits = cute.make_rmem_tensor(logits_slice.partition_shape_C((HEADS, BLOCK)), Float32)
        sums = cute.make_rmem_tensor(own_slice.partition_shape_C((HEADS, DIMS // 2)), Float32)
        weights = cute.make_rmem_tensor(own_slice.partition_shape_A((HEADS, BLOCK)), BFloat16)
        words = cute.recast_tensor(weights, Uint32)
        own_mma.set(warpgroup.Field.ACCUMULATE, True)
        other_mma.set(warpgroup.Field.ACCUMULATE, True)
        row = warp % 4 * 16 + lane // 4
        line = told + Uint32(row * 4)
        give_at = at_p + Uint32((warp % 4 * 16 + lane % 16) * 128)
        stage, parity, item = Int32(0), Int32(0), Int32(begin)
        kept = told + Uint32(3 * 4 * HEADS + warp * 4)
        sinks = told + Uint32(4 * (3 * HEADS + CONSUMER_WARPS))
        tables = sinks + Uint32(4 * HEADS)
        while item < items:
            tile, rest, token = self._item(item, tiles, splits)
            # No register is left to keep it.
            if lane == 0:
                ptx.store_shared_int(kept, item)
            cute.arch.sync_warp()
            cute.arch.barrier(barrier_id=_MEET, number_of_threads=_CONSUMERS)
            self._load_queries(
                q + (Int64(token) * token_stride) * 2, at_q, (thread, tile, heads, head_stride)
            )
            if cutlass.const_expr(not self.plan.split):
                self._load_tables(
                    (sink, cos, sin), (sinks, tables), (token, tile * HEADS, heads), thread
                )
            ptx.wait_async_copies(0)
            ptx.fence_proxy_async_shared()
            cute.arch.barrier(barrier_id=_MEET, number_of_threads=_CONSUMERS)
            # Of blocks of threads that have many; beside eight warps there is no register for it.
            if cutlass.const_expr(self.plan.dequant_warps == 4):  # noqa: SIM102 - one is constant
                if item + grid < items:
                    later, _, after = self._item(item + grid, tiles, splits)
                    self._prefetch(
                        q + (Int64(after) * token_stride) * 2,
                        (sink, cos, sin),
                        (after, later, heads, head_stride),
                        (thread, _CONSUMERS),
                    )
            sums.fill(0.0)
            references = [-Float32(_INFINITY), -Float32(_INFINITY)]
            total = [Float32(0.0), Float32(0.0)]
            products = (logits_mma, own_mma, logits, left, right, words, weights, values, sums)
            places = (info, full, empty, ready, arrived, give_at, line)
            last = Uint32(0)
            if group == stage:
                references, total, last = self._own(
                    products,
                    places,
                    (references, total),
                    (stage, parity, group, lane),
                    scale,
                    False,
                )
                stage, parity = self._next(stage, parity)
            while last == Uint32(0):
                # Who has given the weights has fenced what the expanding warps have written.
                ptx.mbarrier_wait(ready + Uint32(stage * 8), parity)
                references, total = self._follow(sums, references, total, line)
                _, _, last = ptx.load_shared_broadcast(info + Uint32(stage * INFO_BYTES), 3, lane)
                self._add(other_mma, sums, given, values, (group, stage))
                stage, parity = self._next(stage, parity)
                if last == Uint32(0):
                    references, total, last = self._own(
                        products,
                        places,
                        (references, total),
                        (stage, parity, group, lane),
                        scale,
                        True,
                    )
                    stage, parity = self._next(stage, parity)
                else:
                    self._done_with_queries(arrived, last, lane)
                    warpgroup.wait_group(0)
                    self._release(empty, 1 - stage, lane)
            total = self._together(total, line + Uint32(4 * HEADS), (group, lane))
            item = ptx.load_shared_int(kept)
            tile, rest, token = self._item(item, tiles, splits)
            if cutlass.const_expr(self.plan.paired):
                rank = cute.arch.block_idx_in_cluster()
                stats = tables + Uint32(4 * ROPE)
                own = at_k + Uint32(warp * 2 * _KEPT)
                rooms = (own, own + Uint32(_KEPT), at_q + Uint32(warp * _GIVEN), stats)
                self._give_half(
                    sums, (references, total), rooms, arrived, (row, rank, thread, lane)
                )
                self._merge(
                    rooms,
                    arrived,
                    (sinks, out, cos, tables),
                    (tile * HEADS, token, heads),
                    (row, rank, group, ptx.opaque(lane)),
                )
                cute.arch.cluster_arrive_relaxed()
                cute.arch.cluster_wait()
            else:
                if cutlass.const_expr(not self.plan.split):
                    self._turn_back(sums, (cos, tables), (group, lane))
                    self._put(
                        sums,
                        (references, total),
                        (sinks, at_q + Uint32(warp * _KEPT), out),
                        (tile * HEADS, row, token, heads),
                        (group, warp, lane),
                    )
                else:
                    self._store(
                        sums,
                        (references, total),
                        (out, known),
                        (tile * HEADS + row, rest, heads, group, lane),
                    )
            item += grid

    def _next(self, stage: Value, parity: Value) -> Value:
        """Of the ring of two stages."""
        return 1 - stage, parity ^ stage

    @cute.jit
    def _done_with_queries(self, arrived: Value, last: Value, lane: Value) -> None:
        """After the last block, the other block of threads may write where the queries were."""
        if cutlass.const_expr(self.plan.paired):  # noqa: SIM102 - one is constant
            if (lane == 0) & (last != Uint32(0)):
                peer = 1 - cute.arch.block_idx_in_cluster()
                ptx.mbarrier_arrive_remote(ptx.map_to_cta(arrived, peer))

    @cute.jit
    def _own(
        self,
        products: Value,
        places: Value,
        state: Value,
        where: Value,
        scale: Value,
        pending: bool,
    ) -> Value:
        """A block of entries whose weights are this warpgroup's.

        ``pending``: the other's, of the stage before, are still being multiplied.
        """
        logits_mma, own_mma, logits, left, right, words, weights, values, sums = products
        info, full, empty, ready, arrived, give_at, line = places
        references, total = state
        stage, parity, group, lane = where
        ptx.mbarrier_wait(full + Uint32(stage * 8), parity)
        ptx.fence_proxy_async_shared()
        tools = (logits_mma, logits, left, right)
        warpgroup.fence()
        self._score(tools, stage, 0, _BEGUN)
        if cutlass.const_expr(pending):
            warpgroup.wait_group(1)
            self._release(empty, 1 - stage, lane)
        self._score(tools, stage, _BEGUN, DIMS // 16)
        low, high, last = ptx.load_shared_broadcast(info + Uint32(stage * INFO_BYTES), 3, lane)
        warpgroup.wait_group(0)
        self._done_with_queries(arrived, last, lane)
        self._hide(logits, (low, high), lane)
        references, total, factors = self._weigh(logits, words, (references, total), scale)
        self._give(words, references, give_at, line, lane)
        ptx.fence_proxy_async_shared()
        ptx.mbarrier_arrive(ready + Uint32(stage * 8))
        self._rescale(sums, factors)
        self._add(own_mma, sums, weights, values, (group, stage))
        warpgroup.wait_group(0)
        self._release(empty, stage, lane)
        return references, total, last

    def _item(self, item: Value, tiles: Value, splits: Value) -> Value:
        """Tile of heads, number among all tokens' parts, and token."""
        if self.plan.paired:
            number = item // self.plan.ctas
            return number % tiles, number, number // tiles
        return item % tiles, item // tiles, item // tiles // splits

    @cute.jit
    def _score(self, tools: Value, stage: Value, first: int, end: int) -> None:
        """Begin a part of the product of queries and a stage."""
        mma, logits, left, right = tools
        # Of its own, as what is set within a branch is lost beyond it.
        mma = cute.make_tiled_mma(mma.op, (1, 1, 1))
        mma.set(warpgroup.Field.ACCUMULATE, first > 0)
        for k in cutlass.range_constexpr(first, end):
            cute.gemm(mma, logits, left[None, None, k], right[None, None, k, stage], logits)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _add(self, mma: Value, sums: Value, weights: Value, values: Value, where: Value) -> None:
        """Weights times half of the dims of a stage's entries."""
        group, stage = where
        warpgroup.fence()
        for k in cutlass.range_constexpr(BLOCK // 16):
            cute.gemm(mma, sums, weights[None, None, k], values[None, None, k, group, stage], sums)
        warpgroup.commit_group()

    @cute.jit
    def _release(self, empty: Value, stage: Value, lane: Value) -> None:
        """All lanes of this warp have read the stage."""
        cute.arch.sync_warp()
        if lane == 0:
            ptx.mbarrier_arrive(empty + Uint32(stage * 8))

    @cute.jit
    def _rescale(self, sums: Value, factors: Value) -> None:
        """Sums relative to other references; most often to the same."""
        if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
            for n in cutlass.range_constexpr(DIMS // 16):
                for i in cutlass.range_constexpr(4):
                    sums[n * 4 + i] = sums[n * 4 + i] * factors[i // 2]

    @cute.jit
    def _follow(self, sums: Value, references: Value, total: Value, line: Value) -> Value:
        """Take over the references that the other warpgroup has given its weights by."""
        new = [ptx.load_shared_float(line + Uint32(32 * r)) for r in range(2)]
        factors = [
            ptx.select_float(
                new[r] > references[r], ptx.exp2_approx(references[r] - new[r]), Float32(1.0)
            )
            for r in range(2)
        ]
        self._rescale(sums, factors)
        return new, [total[r] * factors[r] for r in range(2)]

    @cute.jit
    def _give(
        self, words: Value, references: Value, place: Value, line: Value, lane: Value
    ) -> None:
        """Weights and references, for the other warpgroup."""
        for n in cutlass.range_constexpr(0, BLOCK // 8, 2):
            chunk = (n + lane // 16) ^ (lane % 8)
            ptx.stmatrix_x4(place + Uint32(chunk * 16), [words[2 * n + i] for i in range(4)])
        # All lanes have read what is overwritten.
        cute.arch.sync_warp()
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                ptx.store_shared_float(line + Uint32(32 * r), references[r])

    @cute.jit
    def _together(self, total: Value, line: Value, who: Value) -> Value:
        """Sums of the weights of both warpgroups, whose references are the same at the end."""
        group, lane = who
        total = [self._quad_sum(t) for t in total]
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                ptx.store_shared_float(line + Uint32(group * 4 * HEADS + 32 * r), total[r])
        cute.arch.barrier(barrier_id=_MEET, number_of_threads=_CONSUMERS)
        # In the same order in both, so that they divide by the same bits.
        return [
            ptx.load_shared_float(line + Uint32(32 * r))
            + ptx.load_shared_float(line + Uint32(4 * HEADS + 32 * r))
            for r in range(2)
        ]

    @cute.jit
    def _prefetch(self, q: Value, tensors: Value, where: Value, who: Value) -> None:
        """Bring a tile's queries and sinks, and angles, to the level-2 cache."""
        sink, cos, sin = tensors
        token, tile, heads, head_stride = where
        thread, threads = who
        if (thread < 2) & (cos != Int64(0)):
            table = cos
            if thread == 1:
                table = sin
            ptx.prefetch_l2(table + Int64(token) * (ROPE * 2))
        for i in cutlass.range_constexpr(-(-HEADS * 8 // threads)):
            number = i * threads + thread
            head = tile * HEADS + number // 8
            if (number < HEADS * 8) & (head < heads):
                ptx.prefetch_l2(q + (Int64(head) * head_stride) * 2 + number % 8 * 128)
        head = tile * HEADS + thread * 32
        if (thread < HEADS // 32) & (head < heads):
            ptx.prefetch_l2(sink + Int64(head) * 4)

    @cute.jit
    def _load_queries(self, q: Value, at: Value, where: Value) -> None:
        """64 heads into swizzled shared memory, zeros where there are no more heads."""
        thread, tile, heads, head_stride = where
        for i in cutlass.range_constexpr(HEADS * DIMS // 8 // _CONSUMERS):
            number = i * _CONSUMERS + thread
            row, chunk = number // (DIMS // 8), number % (DIMS // 8)
            head = tile * HEADS + row
            source = q + (Int64(head) * head_stride + chunk * 8) * 2
            place = chunk // 8 * (HEADS * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
            ptx.async_copy16_or_zero(at + Uint32(place), source, Int32(head < heads) * 16)
        ptx.commit_async_copies()

    @cute.jit
    def _load_tables(self, sources: Value, places: Value, where: Value, thread: Value) -> None:
        """Sinks of a tile and a token's angles, which are needed at the end."""
        sink, cos, sin = sources
        sinks, tables = places
        token, first, heads = where
        if thread < HEADS:
            head = cutlass.min(first + thread, heads - 1)
            logit = ptx.load_global_float(sink + Int64(head) * 4) * Float32(_LOG2E)
            ptx.store_shared_float(sinks + Uint32(thread * 4), logit)
        number = thread - HEADS
        if (number >= 0) & (number < ROPE) & (cos != Int64(0)):
            table = cos
            if number >= ROPE // 2:
                table = sin
            angle = table + (Int64(token) * (ROPE // 2) + number % (ROPE // 2)) * 4
            ptx.store_shared_float(tables + Uint32(number * 4), ptx.load_global_float(angle))

    @cute.jit
    def _hide(self, logits: Value, there: Value, lane: Value) -> None:
        """-inf for entries that are not there."""
        if (there[0] & there[1]) != Uint32(_ALL_THERE):
            for half in cutlass.range_constexpr(2):
                bits = there[half] >> Uint32(lane % 4 * 2)
                for n in cutlass.range_constexpr(4):
                    for i in cutlass.range_constexpr(2):
                        bit = bits & Uint32(1 << (n * 8 + i))
                        for r in cutlass.range_constexpr(2):
                            at = half * 16 + n * 4 + r * 2 + i
                            logits[at] = ptx.select_float(bit, logits[at], -Float32(_INFINITY))

    @cute.jit
    def _weigh(self, logits: Value, words: Value, state: Value, scale: Value) -> Value:
        """Weights of a block, as left operand; new references and sums, and factors on the old."""
        references, total = state
        new, sums, factors = [], [], []
        for r in cutlass.range_constexpr(2):
            high = logits[2 * r]
            for n in cutlass.range_constexpr(BLOCK // 8):
                high = ptx.max_float(
                    high, ptx.max_float(logits[n * 4 + 2 * r], logits[n * 4 + 2 * r + 1])
                )
            high = ptx.max_float(high, cute.arch.shuffle_sync_bfly(high, 1))
            high = ptx.max_float(high, cute.arch.shuffle_sync_bfly(high, 2)) * scale
            old = references[r]
            grown = high > old + Float32(_SLACK)
            reference = ptx.select_float(grown, high, old)
            # Of nothing but -inf, so that no inf - inf arises.
            origin = ptx.select_float(reference == -Float32(_INFINITY), Float32(0.0), reference)
            factor = ptx.select_float(grown, ptx.exp2_approx(old - reference), Float32(1.0))
            part = total[r] * factor
            for n in cutlass.range_constexpr(BLOCK // 8):
                at = n * 4 + 2 * r
                low = ptx.exp2_approx(ptx.fma_float(logits[at], scale, -origin))
                up = ptx.exp2_approx(ptx.fma_float(logits[at + 1], scale, -origin))
                word = ptx.pack_bfloat16x2(low, up)
                words[n * 2 + r] = word
                part = part + (ptx.bfloat16_low_to_float(word) + ptx.bfloat16_high_to_float(word))
            new.append(reference)
            sums.append(part)
            factors.append(factor)
        return new, sums, factors

    @cute.jit
    def _quad_sum(self, value: Value) -> Value:
        value = value + cute.arch.shuffle_sync_bfly(value, 1)
        return value + cute.arch.shuffle_sync_bfly(value, 2)

    @cute.jit
    def _turn_back(self, sums: Value, tables: Value, where: Value) -> None:
        """The rotated dims, which are the second warpgroup's last, by the opposite angle.

        A pair of dims is in one lane. The sums are turned, whose factor comes later.
        """
        group, lane = where
        if (tables[0] != Int64(0)) & (group == 1):
            place = tables[1] + Uint32(lane % 4 * 4)
            for n in cutlass.range_constexpr(ROPE // 8):
                cos = ptx.load_shared_float(place + n * 16)
                sin = ptx.load_shared_float(place + (n * 16 + ROPE * 2))
                for r in cutlass.range_constexpr(2):
                    at = ((DIMS - ROPE) // 8 - DIMS // 16 + n) * 4 + 2 * r
                    sums[at], sums[at + 1] = ptx.inverse_rope_pair(sums[at], sums[at + 1], cos, sin)

    @cute.jit
    def _store(self, sums: Value, state: Value, places: Value, where: Value) -> None:
        """Sums of a part of a token's entries, and what they are relative to."""
        out, known = places
        references, total = state
        first, part, heads, group, lane = where
        for r in cutlass.range_constexpr(2):
            head = first + 8 * r
            if head < heads:
                row = Int64(part) * heads + head
                if group == 0 and lane % 4 == 0:
                    ptx.store_global_float2(known + row * 8, references[r], total[r])
                line = out + row * PACKED_BYTES + group * DIMS + lane % 4 * 16
                rest = out + row * PACKED_BYTES + 2 * DIMS + (group * 4 + lane % 4) * 32
                for m in cutlass.range_constexpr(0, DIMS // 64, 4):
                    last = []
                    for i in cutlass.range_constexpr(4):
                        words = ptx.pack_accumulators(self._eight(sums, m + i, r))
                        ptx.store_global4(line + (m + i) * 64, words[:4])
                        last.append(words[4])
                    ptx.store_global4(rest + m * 4, last)

    def _eight(self, sums: Value, m: int, r: int) -> list[Value]:
        """A lane's sums of a head of 32 neighbouring dims."""
        return [sums[(4 * m + n) * 4 + 2 * r + i] for n in range(4) for i in range(2)]

    @cute.jit
    def _put(self, sums: Value, state: Value, rooms: Value, item: Value, where: Value) -> None:
        """Results by way of the queries' room, which nobody needs any more, a head after another.

        A warp has 16 heads of half of the dims there, whose pieces of 16 bytes are exchanged.
        """
        sinks, room, out = rooms
        references, total = state
        first, row, token, heads = item
        group, warp, lane = where
        factors = [
            self._mean(
                references[r], total[r], ptx.load_shared_float(sinks + Uint32((row + 8 * r) * 4))
            )
            for r in range(2)
        ]
        line = room + Uint32(lane % 16 * DIMS)
        for n in cutlass.range_constexpr(0, DIMS // 16, 2):
            words = [
                ptx.pack_bfloat16x2(
                    sums[m * 4 + 2 * r] * factors[r], sums[m * 4 + 2 * r + 1] * factors[r]
                )
                for m in (n, n + 1)
                for r in range(2)
            ]
            ptx.stmatrix_x4(line + Uint32(((n + lane // 16) ^ (lane % 8)) * 16), words)
        cute.arch.sync_warp()
        head = first + warp % 4 * 16
        to = out + ((Int64(token) * heads + head) * DIMS + group * (DIMS // 2) + lane * 8) * 2
        for i in cutlass.range(16, unroll=4):
            four = ptx.load_shared(room + Uint32(i * DIMS + (lane ^ (i % 8)) * 16), 4)
            if head + i < heads:
                ptx.store_global4(to + Int64(i) * (DIMS * 2), four)

    @cute.jit
    def _give_half(
        self, sums: Value, state: Value, rooms: Value, arrived: Value, where: Value
    ) -> None:
        """Give the other block of the cluster its half of the dims, and keep this one's.

        Rooms of a warp: in the stages, whose contents nobody needs any more, for its own half and
        for the other's, packed; in the queries', for what comes; and for what sums are relative to.
        Barriers: of the other's warps that have done with its queries, and of each piece that
        arrives.
        """
        row, rank, thread, lane = where
        own, given, come, known = rooms
        references, total = state
        peer, size = 1 - rank, _GIVEN // _PIECES
        if thread == 0:
            for piece in cutlass.range_constexpr(_PIECES):
                stats = self.plan.ctas * HEADS * 16 if piece == 0 else 0
                ptx.mbarrier_arrive_expect_tx(
                    arrived + 8 + piece * 8, CONSUMER_WARPS * size + stats
                )
        if (thread < _CONSUMERS // 2) & (thread % 4 == 0):
            for other in cutlass.range_constexpr(self.plan.ctas):
                for r in cutlass.range_constexpr(2):
                    place = known + Uint32((rank * HEADS + row + 8 * r) * 16)
                    four = [references[r], total[r], Float32(0.0), Float32(0.0)]
                    to = ptx.map_to_cta(place, Int32(other))
                    ptx.async_store_remote4(to, four, ptx.map_to_cta(arrived + 8, Int32(other)))
        if lane == 0:
            ptx.mbarrier_wait(arrived, Int32(0))
        for piece in cutlass.range_constexpr(_PIECES):
            for half in cutlass.range_constexpr(2):
                if rank != half:
                    self._pack(sums, given + Uint32(piece * size), half * _PIECES + piece, lane)
            ptx.fence_proxy_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                ptx.bulk_copy_to_remote(
                    ptx.map_to_cta(come + Uint32(piece * size), peer),
                    given + Uint32(piece * size),
                    size,
                    ptx.map_to_cta(arrived + 8 + Uint32(piece * 8), peer),
                )
        for half in cutlass.range_constexpr(2):
            if rank == half:
                self._keep(sums, own + Uint32(lane * 16), half)

    @cute.jit
    def _keep(self, sums: Value, place: Value, half: int) -> None:
        """A lane's sums of half of its dims, to shared memory."""
        for n in cutlass.range_constexpr(DIMS // 32):
            at = half * (DIMS // 8) + 4 * n
            four = [sums[at + i] for i in range(4)]
            ptx.store_shared_float4(place + n * 512, four)

    @cute.jit
    def _pack(self, sums: Value, place: Value, number: int, lane: Value) -> None:
        """Of 32 of its dims likewise, packed: four words of each of two heads, then the fifths."""
        fifth = []
        for r in cutlass.range_constexpr(2):
            words = ptx.pack_accumulators(self._eight(sums, number, r))
            ptx.store_shared4(place + Uint32(lane * 16), words[:4], r * 512)
            fifth.append(words[4])
        ptx.store_shared2(place + Uint32(lane * 8 + 1024), fifth)

    @cute.jit
    def _merge(
        self, rooms: Value, arrived: Value, places: Value, item: Value, where: Value
    ) -> None:
        """Add both blocks' sums of this one's half of the dims, piece after piece as they come."""
        own, _, come, known = rooms
        sinks, out, cos, tables = places
        first, token, heads = item
        row, rank, group, lane = where
        ptx.mbarrier_wait(arrived + 8, Int32(0))
        factors, whole = [], []
        for r in cutlass.range_constexpr(2):
            pairs = [
                ptx.load_shared_float2(known + Uint32((p * HEADS + row + 8 * r) * 16))
                for p in range(self.plan.ctas)
            ]
            logit = ptx.load_shared_float(sinks + Uint32((row + 8 * r) * 4))
            origin = logit
            for p in cutlass.range_constexpr(self.plan.ctas):
                origin = ptx.max_float(origin, pairs[p][0])
            origin = ptx.select_float(origin == -Float32(_INFINITY), Float32(0.0), origin)
            total = ptx.exp2_approx(logit - origin)
            each = [ptx.exp2_approx(pairs[p][0] - origin) for p in range(self.plan.ctas)]
            for p in cutlass.range_constexpr(self.plan.ctas):
                total = total + pairs[p][1] * each[p]
            # On this block's sums, then on the other's.
            factors.append(
                [ptx.select_float(rank, each[1], each[0]), ptx.select_float(rank, each[0], each[1])]
            )
            whole.append(
                ptx.select_float(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)
            )
        share = DIMS // 16 // self.plan.ctas
        kept = own + Uint32(lane * 16)
        line = out + ((Int64(token) * heads + first + row) * DIMS + group * (DIMS // 2)) * 2
        for piece in cutlass.range(_PIECES, unroll=1):
            ptx.mbarrier_wait(arrived + Uint32(8 + piece * 8), Int32(0))
            given = come + Uint32(piece * (_GIVEN // _PIECES))
            fifth = ptx.load_shared(given + Uint32(lane * 8), 2, 1024)
            more = [
                ptx.unpack_all_accumulators(
                    [*ptx.load_shared(given + Uint32(lane * 16), 4, r * 512), fifth[r]]
                )
                for r in range(2)
            ]
            sums = []
            for m in cutlass.range_constexpr(share // _PIECES):
                mine = ptx.load_shared_float4(kept + Uint32((piece * 4 + m) * 512))
                for i in cutlass.range_constexpr(4):
                    other = more[i // 2][2 * m + i % 2] * factors[i // 2][1]
                    sums.append(mine[i] * factors[i // 2][0] + other)
            number = rank * share + piece * (share // _PIECES) - ((DIMS - ROPE) // 8 - DIMS // 16)
            if (cos != Int64(0)) & (group == 1) & (number >= 0):
                for m in cutlass.range_constexpr(share // _PIECES):
                    place = tables + Uint32((lane % 4 + (number + m) * 4) * 4)
                    c, s = ptx.load_shared_float(place), ptx.load_shared_float(place + ROPE * 2)
                    for r in cutlass.range_constexpr(2):
                        at = 4 * m + 2 * r
                        sums[at], sums[at + 1] = ptx.inverse_rope_pair(sums[at], sums[at + 1], c, s)
            for r in cutlass.range_constexpr(2):
                words = [
                    ptx.pack_bfloat16x2(
                        sums[4 * m + 2 * r] * whole[r], sums[4 * m + 2 * r + 1] * whole[r]
                    )
                    for m in range(4)
                ]
                words = transpose_quad(words, lane)
                if first + row + 8 * r < heads:
                    dim = rank * (share * 8) + piece * 32 + lane % 4 * 8
                    ptx.store_global4(line + (dim + 8 * r * DIMS) * 2, words)

    @cute.jit
    def _mean(self, reference: Value, total: Value, logit: Value) -> Value:
        """What to multiply sums by; 0 if there is neither an entry nor a sink."""
        origin = ptx.max_float(reference, logit)
        origin = ptx.select_float(origin == -Float32(_INFINITY), Float32(0.0), origin)
        scaled = ptx.exp2_approx(reference - origin)
        whole = total * scaled + ptx.exp2_approx(logit - origin)
        return ptx.select_float(whole == Float32(0.0), Float32(0.0), scaled / whole)
