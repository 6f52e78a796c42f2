"""Indexer logits (``mqa_logits``) of MXFP4 keys and queries of 128 dims, by integer ``wgmma``.

``logit[m, n] = sum_h weight[m, h] relu(q[m, h] . k[n])`` for up to 64 heads h, stored as keys that
order as the logits do, with the maxima of groups of them for ``topk``. ``indexer_logits_tile``
describes how codes become integers, fragments and numerics; ``indexer_logits_queries`` prepares the
right operands, and ``indexer_logits_correction`` has keys and queries that one integer product does
not hold.

Tiling and ownership
    ``args.splits`` CTAs share a token's entries. A warpgroup that multiplies has pairs of blocks of
    64 entries, ``2 * plan.warpgroups * splits`` blocks apart, and all 64 heads: an accumulator of
    64 x 64. A warp has 16 entries of a block. The CTA's warpgroups share the token's queries in
    shared memory. A CTA of four warpgroups fills an SM; preparing the queries costs a large part of
    its start, so it is done once for them, unless such CTAs would leave many SMs idle.

Pipeline
    For each warpgroup that multiplies a warp of a further warpgroup has bulk copies bring its
    blocks to shared memory, ``plan.stages`` ahead, because registers cannot hold as many bytes
    in flight as the latency of memory needs. Page numbers are loaded 32 blocks ahead.
    While the MMAs of a block are in flight, a warpgroup dequantizes the codes of the next one to
    other registers. Logits are stored meanwhile, too, between steps of the dequantization.
    Heads beyond ``args.heads`` have zero codes and weights.

Barriers
    ``full`` (an mbarrier a stage): the bulk copies of the stage's block. One arrival, that of the
    copying lane, with the number of bytes.
    ``empty`` (an mbarrier a stage): 128 arrivals, of every thread when it has read its share. The
    arrival's address depends on the words that were read, because loads in flight and an arrival
    are in no order with a later bulk copy.
    ``QUERIES_READY`` (named, threads that multiply): orders the phases of ``_prepare_queries``.
    The phase of a stage is the parity of its rounds through the ring.
    griddepcontrol.wait precedes the first load of queries, keys and tables, which preceding kernels
    write. Before it, prefetches to L2 alone: they are hints, and no data is read by them.

Determinism
    No order of threads, and no number of CTAs, changes a logit's bits. They depend on its query,
    weights and key, and on whether one of the 16 keys of its warp in the block has distant scales:
    all 16 are multiplied again then, and their sums over heads rounded in another order.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int8, Int32, Int64, Uint8, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dsv4.cute.device import ptx
from dsv4.cute.sm90.indexer_logits_correction import (
    Blocks,
    IndexerLogitsCorrection,
    QueryCodes,
    SequencePages,
    Windows,
)
from dsv4.cute.sm90.indexer_logits_plan import (
    BLOCK,
    CODE_BYTES,
    DIMS,
    HEADS,
    INDEXER_LOGITS_ABI,
    STAGE,
    IndexerLogitsArgs,
)
from dsv4.cute.sm90.indexer_logits_queries import (
    IndexerLogitsQueries,
    Ring,
    SharedMemory,
    tensor_address,
)
from dsv4.cute.sm90.indexer_logits_tile import (
    BIAS_LEFT,
    WEIGHT_BYTES,
    KeyPair,
    Lane,
    Output,
    PairScores,
)

_COPYING_REGISTERS = 32  # of a thread that copies
_BLOCK_SHIFT = 6  # log2 of a block's entries


class Mma(NamedTuple):
    """Products of a block of entries with all heads, and the operands that all blocks share.

    Attributes:
        first: The step that overwrites the accumulators.
        later: A step that adds to them.
        bias: The bias step, with its left operand in shared memory.
        queries: Right operands of the steps.
        query_bias: Right operand of the bias step.
        bias_left: Its left operand.
    """

    first: cute.TiledMma
    later: cute.TiledMma
    bias: cute.TiledMma
    queries: cute.Tensor
    query_bias: cute.Tensor
    bias_left: cute.Tensor


class IndexerLogitsKernel(IndexerLogitsQueries, IndexerLogitsCorrection):
    """The kernel."""

    abi = INDEXER_LOGITS_ABI

    @cute.jit
    def __call__(self, args: IndexerLogitsArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.indexer`` launches the cubin itself."""
        self._launch(
            self.kernel(args),
            stream,
            min_blocks_per_mp=self.plan.ctas_per_sm,
            preferred_smem_carveout=50,
        )

    @cute.kernel
    def kernel(self, args: IndexerLogitsArgs) -> None:
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        token = Int32(ptx.mulhi_u32(Uint32(2 * cta), Uint32(args.inverse_splits)))
        # Warpgroups of the token before this CTA's.
        part = (cta - token * args.splits) * self.plan.warpgroups
        shared = self._shared(cutlass.memory.SmemAllocator())
        # The next kernel's CTAs may start where SMs have room.
        cute.arch.griddepcontrol_launch_dependents()
        self._initialize(shared, thread)
        cute.arch.sync_threads()
        self._prefetch_token(args, token, thread)
        step = 2 * self.plan.warpgroups * args.splits
        if warp >= self.plan.mma_threads // 32:
            self._prefetch_pages(args, token, part, step, Lane(warp, lane))
        # From here on memory is what the preceding kernels wrote.
        cute.arch.griddepcontrol_wait()
        visible = ptx.load_index_saturated(
            args.visible + Int64(token) * args.visible_bytes, args.visible_bytes
        )
        end = cutlass.min(visible, args.capacity)
        sequence = ptx.load_index_saturated(
            args.sequences + Int64(token) * args.sequence_bytes, args.sequence_bytes
        )
        sequence = cutlass.max(sequence, Int32(0))
        # Of at most k entries all are selected, whatever their logits.
        if end > args.k:
            table = args.table + Int64(sequence) * args.table_stride * args.table_bytes
            count = (end + BLOCK - 1) >> _BLOCK_SHIFT
            pages = SequencePages(
                table=table,
                table_bytes=args.table_bytes,
                cache=args.cache,
                page_stride=args.page_stride,
                block_shift=args.page_shift - _BLOCK_SHIFT,
                last=count - 1,
            )
            if warp >= 4 * self.plan.warpgroups:
                cute.arch.setmaxregister_decrease(_COPYING_REGISTERS)
                group = warp - 4 * self.plan.warpgroups
                if group < self.plan.warpgroups:
                    blocks = Blocks(2 * (part + group), step, count)
                    self._produce(self._ring_of(shared.ring, group), pages, blocks, lane)
            else:
                cute.arch.setmaxregister_increase(self.plan.registers)
                group, who = warp >> 2, Lane(warp & 3, lane)
                ring = self._ring_of(shared.ring, group)
                blocks = Blocks(2 * (part + group), step, count)
                self._consume(args, token, end, shared, ring, pages, blocks, thread, who)

    def _shared(self, smem: cutlass.memory.SmemAllocator) -> SharedMemory:
        """Allocate shared memory."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Int8)
        layout = cute.tile_to_shape(atom, (HEADS, DIMS), (0, 1))
        queries, bias = (
            smem.allocate_tensor(Int8, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for _ in range(2)
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, Uint8)
        layout = cute.tile_to_shape(atom, (BLOCK, 32), (0, 1))
        left = smem.allocate_tensor(Uint8, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        stages = self.plan.warpgroups * self.plan.stages
        return SharedMemory(
            queries=queries,
            bias=bias,
            bias_left=left,
            weights=self._allocate(smem, 4 * WEIGHT_BYTES),
            codes=self._allocate(smem, HEADS * CODE_BYTES),
            scales=self._allocate(smem, HEADS * 4),
            windows=self._allocate(smem, 12),
            ring=Ring(self._allocate(smem, stages * STAGE), self._allocate(smem, stages * 16)),
        )

    def _allocate(self, smem: cutlass.memory.SmemAllocator, size: int) -> Uint32:
        return Uint32(smem.allocate_array(cutlass.Uint8, size, byte_alignment=128).toint())

    def _ring_of(self, ring: Ring, group: Int32) -> Ring:
        """The stages of a warpgroup."""
        stages = self.plan.stages
        return Ring(
            ring.stages + Uint32(group * (stages * STAGE)),
            ring.barriers + Uint32(group * (stages * 16)),
        )

    @cute.jit
    def _initialize(self, shared: SharedMemory, thread: Int32) -> None:
        """Initialize mbarriers and what does not depend on the token. All threads."""
        if thread == 0:
            for i in cutlass.range_constexpr(self.plan.warpgroups * self.plan.stages):
                ptx.mbarrier_init(shared.ring.barriers + 16 * i, 1)
                ptx.mbarrier_init(shared.ring.barriers + (16 * i + 8), 128)
            ptx.fence_mbarrier_init()
        if thread < 2:
            ptx.store_shared_int(shared.windows + Uint32(thread * 4), Int32(0))
        if thread < 128:
            # All rows are equal, so the layout does not matter.
            address = tensor_address(shared.bias_left) + Uint32(thread * 16)
            ptx.store_shared4(address, [Uint32(BIAS_LEFT)] * 4)
            ptx.fence_proxy_async_shared()
        if thread == 2:
            # Read again where -1 has to be opaque to the compiler.
            ptx.store_shared_int(shared.windows + 8, Int32(-1))

    @cute.jit
    def _prefetch_token(self, args: IndexerLogitsArgs, token: Int32, thread: Int32) -> None:
        """All threads: load to L2 what is read first, one load after another."""
        if thread < args.heads:
            ptx.prefetch_l2(args.q + token * args.token_stride + thread * args.head_stride)
        if thread == 0:
            ptx.prefetch_l2(args.visible + Int64(token) * args.visible_bytes)
            ptx.prefetch_l2(args.sequences + Int64(token) * args.sequence_bytes)

    def _prefetch_pages(
        self, args: IndexerLogitsArgs, token: Int32, part: Int32, step: Int32, who: Lane
    ) -> None:
        """One copying warp: load to L2 the page numbers of a warpgroup's first 32 blocks.

        As if the token's sequence had its number, which is often so.
        """
        sequence = cutlass.min(token, args.table_rows - 1)
        pages = SequencePages(
            table=args.table + Int64(sequence) * args.table_stride * args.table_bytes,
            table_bytes=args.table_bytes,
            cache=args.cache,
            page_stride=args.page_stride,
            block_shift=args.page_shift - _BLOCK_SHIFT,
            last=(args.capacity - 1) >> _BLOCK_SHIFT,
        )
        first = 2 * (part + who.warp - self.plan.mma_threads // 32)
        block = first + (who.lane >> 1) * step + (who.lane & 1)
        ptx.prefetch_l2(self._page_address(pages, block))

    @cute.jit
    def _produce(self, ring: Ring, pages: SequencePages, blocks: Blocks, lane: Int32) -> None:
        """Copy a warpgroup's blocks to its stages. One warp, each lane every 32nd block.

        A warpgroup takes two blocks, even if it has none, and two for every further pair.
        """
        number = Int32(0)  # of the blocks that are copied
        # Page numbers are loaded 32 blocks ahead.
        page = self._page(pages, blocks.first + (lane >> 1) * blocks.step + (lane & 1))
        while (number < 2) | (blocks.first + (number >> 1) * blocks.step < blocks.end):
            block = blocks.first + ((number + lane) >> 1) * blocks.step + (lane & 1)
            later = self._page(pages, block + 16 * blocks.step)
            within = cutlass.min(block, pages.last) & ((1 << pages.block_shift) - 1)
            page_number = cutlass.max(Int32(page), Int32(0))
            start = ptx.element_address(pages.cache, page_number, pages.page_stride)
            codes = start + Int64(within * (BLOCK * CODE_BYTES))
            all_codes = Int64(BLOCK * CODE_BYTES) << Int64(pages.block_shift)
            scales = start + all_codes + Int64(within * (BLOCK * 4))
            turn = Int32(0)
            while (turn < 32) & (
                (number < 2) | (blocks.first + (number >> 1) * blocks.step < blocks.end)
            ):
                stage = number & self.plan.stages - 1
                target = ring.stages + Uint32(stage * STAGE)
                full = ring.barriers + Uint32(stage * 16)
                # In the first round the stage is empty: the parity before the first phase.
                ptx.mbarrier_wait(full + 8, self._parity(number) ^ 1)
                if lane == turn:
                    ptx.mbarrier_arrive_expect_tx(full, STAGE)
                    ptx.bulk_copy_to_shared(target, codes, BLOCK * CODE_BYTES, full)
                    ptx.bulk_copy_to_shared(target + BLOCK * CODE_BYTES, scales, BLOCK * 4, full)
                turn += 1
                number += 1
            page = later

    def _parity(self, number: Int32) -> Int32:
        """The parity of the ring's round in which the ``number``-th block is copied."""
        return (number >> self.plan.stages.bit_length() - 1) & 1

    @cute.jit
    def _wait_block(self, ring: Ring, number: Int32) -> None:
        """Wait for the bytes of the warpgroup's ``number``-th block."""
        full = ring.barriers + Uint32((number & self.plan.stages - 1) * 16)
        ptx.mbarrier_wait(full, self._parity(number))

    def _read_block(self, ring: Ring, number: Int32, who: Lane, zero: Uint32) -> KeyPair:
        """Load the lane's share of two keys of the ``number``-th block, and give the stage back."""
        stage = number & self.plan.stages - 1
        address = ring.stages + Uint32(stage * STAGE)
        codes = address + Uint32(who.warp * (16 * CODE_BYTES) + who.lane * 16)
        scales = address + Uint32(who.warp * (16 * 4) + who.lane // 4 * 4)
        first, second = ptx.load_shared(codes, 4), ptx.load_shared(codes, 4, 8 * CODE_BYTES)
        first_scales, second_scales = (
            ptx.load_shared_word(scales, BLOCK * CODE_BYTES + i) for i in (0, 32)
        )
        # Each lane for itself: it has read the stage, which is copied to after this. Loads and an
        # arrival are in order, the copy is not: by its address the arrival waits for the words.
        words = (first[0], second[0], first_scales, second_scales)
        read = functools.reduce(operator.or_, words)
        ptx.mbarrier_arrive(ring.barriers + Uint32(stage * 16 + 8) + (read & zero))
        return KeyPair(first, second, first_scales, second_scales)

    def _tiled_mma(self, source: warpgroup.OperandSource, accumulate: bool) -> cute.TiledMma:
        """A step of 64 keys by 64 heads by 32 dims; keys come from ``source``."""
        left, right, major = Uint8, Int8, OperandMajorMode.K
        op = warpgroup.MmaI8Op(left, right, Int32, (BLOCK, HEADS, 32), source, major, major)
        mma = cute.make_tiled_mma(op, (1, 1, 1))
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def _multiply(self, mma: Mma, dots: cute.Tensor, codes: cute.Tensor) -> None:
        """Start the MMAs of a block. One warpgroup.

        Args:
            mma: Steps and operands.
            dots: Accumulators; may not be touched before ``warpgroup.wait_group(0)``.
            codes: Left operands of four steps, which are read until then.
        """
        warpgroup.fence()
        for i in range(4):
            step = mma.later if i > 0 else mma.first
            cute.gemm(step, dots, codes[None, None, i], mma.queries[None, None, i], dots)
        left, right = mma.bias_left[None, None, 0], mma.query_bias[None, None, 0]
        cute.gemm(mma.bias, dots, left, right, dots)
        warpgroup.commit_group()

    @cute.jit
    def _consume(
        self,
        args: IndexerLogitsArgs,
        token: Int32,
        end: Int32,
        shared: SharedMemory,
        ring: Ring,
        pages: SequencePages,
        blocks: Blocks,
        thread: Int32,
        who: Lane,
    ) -> None:
        """Multiply and store a warpgroup's blocks. The threads that multiply.

        Args:
            args: See there.
            token: The CTA's token.
            end: Entries that it sees.
            shared: Shared memory.
            ring: The warpgroup's stages.
            pages: Where keys are, for those that are multiplied again.
            blocks: The warpgroup's blocks.
            thread: Thread of the CTA.
            who: The thread's place in the warpgroup.
        """
        share = self._load_query(args, token, thread)
        weights, weight_scale = self._prepare_queries(
            share, shared, thread, who.lane, Uint32(args.shift16)
        )
        registers, memory = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM
        first = self._tiled_mma(registers, False)
        bias = self._tiled_mma(memory, True)
        mma_slice, bias_slice = first.get_slice(thread % 128), bias.get_slice(thread % 128)
        right = [
            first.make_fragment_B(mma_slice.partition_B(operand))
            for operand in (shared.queries, shared.bias)
        ]
        # Codes of the two blocks of a pair are dequantized to two sets of registers alternately.
        left_shape = mma_slice.partition_shape_A((BLOCK, DIMS))
        even, odd = [first.make_fragment_A(left_shape) for _ in range(2)]
        even_words, odd_words = cute.recast_tensor(even, Uint32), cute.recast_tensor(odd, Uint32)
        mma = Mma(
            first=first,
            later=self._tiled_mma(registers, True),
            bias=bias,
            queries=right[0],
            query_bias=right[1],
            bias_left=bias.make_fragment_A(bias_slice.partition_A(shared.bias_left)),
        )
        dots = cute.make_rmem_tensor(mma_slice.partition_shape_C((BLOCK, HEADS)), Int32)
        minus_one = Uint32(ptx.load_shared_int(shared.windows + 8))
        zero = minus_one + Uint32(1)  # opaque to the compiler
        number, block = Int32(0), blocks.first
        self._wait_block(ring, number)
        keys = self._read_block(ring, number, who, zero)
        factors, far = self._dequantize(even_words, keys, who.lane, minus_one)
        self._multiply(mma, dots, even)
        self._wait_block(ring, number + 1)
        keys = self._read_block(ring, number + 1, who, zero)
        odd_factors, below = self._dequantize(odd_words, keys, who.lane, minus_one)
        far = ptx.max_u16x2(far, below)  # the largest distances so far
        output = Output(
            scores=args.scores + Int64(token) * args.score_stride * 4,
            maxima=args.maxima + Int64(token) * args.maxima_stride * 4,
            end=end,
            weight_scale=weight_scale,
        )
        # The compiler moves a wait for products to before what is independent of it, and starts of
        # products to among what follows, but neither past a branch: there is one on either side of
        # where codes are expanded.
        while block < blocks.end:
            warpgroup.wait_group(0)
            sums = self._sum_heads(dots, weights)
            self._multiply(mma, dots, odd)
            block += blocks.step
            next_factors, next_odd_factors = factors, odd_factors
            if block < blocks.end:
                self._wait_block(ring, number + 2)
                keys = self._read_block(ring, number + 2, who, zero)
                next_factors, below = self._dequantize(even_words, keys, who.lane, minus_one)
                far = ptx.max_u16x2(far, below)
            warpgroup.wait_group(0)
            sums += self._sum_heads(dots, weights)
            pair = PairScores(sums, factors, odd_factors, block - blocks.step)
            if block < blocks.end:
                self._multiply(mma, dots, even)
                self._wait_block(ring, number + 3)
                keys = self._read_block(ring, number + 3, who, zero)
                storing = self._storing(pair, output, who)
                next_odd_factors, below = self._dequantize(
                    odd_words, keys, who.lane, minus_one, storing
                )
                far = ptx.max_u16x2(far, below)
            else:
                self._store(pair, output, who)
            factors, odd_factors = next_factors, next_odd_factors
            number += 2
        # Products that nobody reads: of the second pair that a warpgroup without blocks takes.
        warpgroup.wait_group(0)
        low, high = ptx.load_shared(shared.windows, 2)
        # Of queries more than the first window is used.
        all_keys = (low > Uint32(1)) | (high != Uint32(0))
        if cute.arch.vote_any_sync(self._is_distant(far)) | all_keys:
            windows = Windows(low, high)
            queries = QueryCodes(shared.codes, shared.scales, windows, Uint32(args.shift16))
            self._correct(pages, blocks, all_keys, queries, weights, output, who)
