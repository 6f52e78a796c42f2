"""GEMM with FP8 weights for small M (decode), one scale per 128 x 128 block of the weight.

Bound by reading the weights once from memory, as ``gemm_small_m``, whose split of K in a cluster,
reduction and epilogue it has. The differences:

Weights. The weight is read as it is stored, rows of E4M3 codes: no second copy in another layout. A
weight tile is 16 rows x 128 columns, 2 KiB; its 16 rows have one scale. Of each half of 64 columns
lane ``l`` owns columns ``16 (l % 4)`` to ``16 (l % 4) + 15`` of rows ``l // 4`` and ``l // 4 + 8``.
So the K steps of its MMAs take columns in another order than they stand in memory, and X fragments
are read in the same order: 32 consecutive bytes of a token. A pair of codes becomes bfloat16,
exactly, through float16 and float32; NaN stays NaN.

Pipeline. A warp copies weight tiles to a ring of ``plan.stages`` slots of its own (``cp.async``,
whole lines of 128 bytes), and waits for exactly the tile that it multiplies next. Lanes read what
others copied, so ``sync_warp`` follows the wait, and another one stands between reading a slot and
filling it again. The halves of odd rows are exchanged in a slot, so that the lanes' loads of 16
bytes do not meet in a bank.

Dependencies. The weights may be results of the preceding kernel, so nothing is read before
griddepcontrol.wait. Before it, the codes of the first tiles are prefetched to L2, where later
writes are seen. X comes by bulk copies, a token by each lane of a warp.

Barriers. ``x_full`` (an mbarrier, one arrival): completes with the CTA's part of X.
``partials_full`` and the cluster barrier: as in ``gemm_small_m``.

Numerics. The tensor cores sum 128 columns in accumulators of their own. These sums times the
block's scale are added in float32, in ascending order of K, and then those of the cluster's CTAs
in the order of ranks. So a token's bits depend on the plan, not on the other tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.gemm_fp8_small_m_plan import (
    BLOCK,
    RING_TILE,
    SMALL_M_FP8_ABI,
    SmallMFp8Args,
    SmallMFp8Plan,
)
from dsv4.cute.sm90.gemm_small_m import SmallMKernel
from dsv4.cute.sm90.gemm_small_m_input import SharedMemory
from dsv4.cute.sm90.small_m_tile import Fragment, Output, Words

_HALF = 64  # columns whose codes a lane holds as 16 bytes of each of its rows


class RowCopies(NamedTuple):
    """Where a lane's copies of weight tiles come from and go to.

    A lane copies 16 bytes of every fourth row of a tile.

    Attributes:
        rows: Global addresses of these bytes of rows 0, 4, 8 and 12 from the lane's first row on.
        slot: Shared-memory address of the first row's bytes in the ring's first slot.
    """

    rows: list[Int64]
    slot: Uint32


class Reading(NamedTuple):
    """Shared-memory addresses that a lane reads operands from.

    Attributes:
        codes: Its codes of the first half of a tile, in the ring's first slot.
        x: Its columns of the first half of the first block of X.
        scales: The warp's block scales.
    """

    codes: Uint32
    x: Uint32
    scales: Uint32


class SmallMFp8Kernel(SmallMKernel):
    """The kernel of one configuration."""

    abi = SMALL_M_FP8_ABI
    plan: SmallMFp8Plan

    @cute.jit
    def __call__(self, args: SmallMFp8Args, stream: CUstream) -> None:  # type: ignore[override]
        """Launch, for the compiler's sake; the launcher in ``dsv4.cute`` launches the cubin."""
        self._launch(
            self.kernel(args),
            stream,
            min_blocks_per_mp=self.plan.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, args: SmallMFp8Args) -> None:  # type: ignore[override]
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank = cta % self.plan.ctas
        tile = cta // self.plan.ctas * self.plan.warps + warp
        group = cta // self.plan.ctas * self.plan.warps // args.group_tiles
        shared = self._shared(warp)
        # A warp beyond the last row tile reads that one's weights and stores nothing.
        read_tile = cutlass.min(tile, args.row_tiles - 1)
        self._prefetch_to_l2(args, read_tile, rank, lane)
        if lane == 0:
            if cutlass.const_expr(self.plan.ctas > 1):
                ptx.mbarrier_init(shared.partials_full, 1)
            if warp == 0:
                ptx.mbarrier_init(shared.x_full, 1)
            ptx.fence_mbarrier_init()
        # The next kernel's CTAs may start where SMs have room.
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.plan.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
        else:
            cute.arch.sync_threads()
        # From here on X and the weights are what the preceding kernel wrote.
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            self._copy_x_of_tokens(args, args.x + group * args.group_stride * 2, shared, rank)
        # Scales before codes: else they come after all of those.
        loaded_scales = self._load_scales(args, read_tile, rank, lane)
        copies = self._row_copies(args, shared.buffer, read_tile, rank, lane)
        for stage in cutlass.range_constexpr(self.plan.stages):
            self._copy_tile(copies, stage * BLOCK, stage * RING_TILE)
            ptx.commit_async_copies()
        scales = shared.buffer + self.plan.ring_bytes
        for i in cutlass.range_constexpr(len(loaded_scales)):
            ptx.store_shared_float(scales + Uint32((i * 32 + lane) * 4), loaded_scales[i])
        if cutlass.const_expr(self.plan.ctas > 1):
            # From here on the mbarriers of all of the cluster's CTAs are initialised.
            cute.arch.cluster_wait()
        ptx.mbarrier_wait(shared.x_full, Int32(0))
        row, quarter = lane // 4, lane % 4
        reading = Reading(
            codes=shared.buffer + Uint32(row * BLOCK + (quarter + row % 2 * 4) * 16),
            x=shared.x + Uint32(row * self.plan.x_row_bytes + quarter * 32),
            scales=scales,
        )
        sums = self._multiply_blocks(reading, copies)
        if cutlass.const_expr(self.plan.ctas == 1):
            if tile < args.row_tiles:
                self._store(tile, sums, [Float32(1.0)] * 2, self._result(args, shared, group), lane)
        elif tile < args.row_tiles:
            owner = tile % self.plan.ctas
            # Of ``ctas`` neighbouring warps each has another owner, so they can share its slots.
            slot = warp // self.plan.ctas * self.plan.ctas
            partials = shared.partials + Uint32(slot * self.plan.partial_bytes)
            self._send(sums, partials, shared.partials_full, owner, rank, lane)
            if owner == rank:
                sums = self._reduce(partials, shared.partials_full, lane)
                self._store(tile, sums, [Float32(1.0)] * 2, self._result(args, shared, group), lane)

    def _result(self, args: SmallMFp8Args, shared: SharedMemory, group: Int32) -> Output:
        """Return where the results of a CTA's group go."""
        return Output(
            buffer=shared.buffer,
            out=args.out,
            x=args.x + group * args.group_stride * 2,
            token_scale=args.token_scale + group * 4,
            row_weight=Int64(0),
            tokens=args.tokens,
            row_tiles=args.row_tiles,
            token_stride=args.token_stride,
            groups=args.groups,
            limit=Float32(0.0),
        )

    @cute.jit
    def _prefetch_to_l2(self, args: SmallMFp8Args, tile: Int32, rank: Int32, lane: Int32) -> None:
        """One warp: bring its scales and the codes of its first tiles to L2, a row by each lane.

        16 rows are a loop of 16 turns, because bulk operations take uniform registers; codes of
        more tiles would delay the first tile.
        """
        for i in cutlass.range_constexpr(self.plan.scale_words):
            ptx.prefetch_l2(self._scale_address(args, tile, rank, i * 32 + lane))
        count = min(self.plan.prefetched, self.plan.blocks)
        if cutlass.const_expr(count > 0):  # noqa: SIM102 - one is constant
            if lane < 16:
                row = args.codes + Int64(tile * 16 + lane) * args.codes_stride
                ptx.bulk_prefetch_l2(row + rank * (self.plan.blocks * BLOCK), count * BLOCK)

    @cute.jit
    def _copy_x_of_tokens(
        self, args: SmallMFp8Args, x: Int64, shared: SharedMemory, rank: Int32
    ) -> None:
        """One warp: start bulk copies of the CTA's part of X, a token by each lane."""
        lane = cute.arch.lane_idx()
        count = self.plan.blocks * BLOCK * 2  # bytes of a token
        if lane == 0:
            ptx.mbarrier_arrive_expect_tx(shared.x_full, args.tokens * count)
        cute.arch.sync_warp()  # no copy may complete bytes before they are expected
        if lane < args.tokens:
            to = shared.x + Uint32(lane * self.plan.x_row_bytes)
            source = x + Int64(lane) * args.token_stride * 2 + rank * count
            ptx.bulk_copy_to_shared(to, source, count, shared.x_full)

    def _row_copies(
        self, args: SmallMFp8Args, ring: Uint32, tile: Int32, rank: Int32, lane: Int32
    ) -> RowCopies:
        """Where the lane's copies come from and go to: eight lanes copy 128 bytes of a row."""
        row, piece = lane // 8, lane % 8
        first = args.codes + Int64(tile * 16 + row) * args.codes_stride
        first += rank * (self.plan.blocks * BLOCK) + piece * 16
        rows = [first + args.codes_stride * (4 * i) for i in range(4)]
        return RowCopies(rows, ring + Uint32(row * BLOCK + (piece ^ (row % 2 * 4)) * 16))

    def _copy_tile(self, copies: RowCopies, column: int, slot: int) -> None:
        """Start the lane's copies of a weight tile.

        Args:
            copies: Where from and where to.
            column: Bytes from ``copies.rows`` on.
            slot: Bytes from ``copies.slot`` on.
        """
        for i, row in enumerate(copies.rows):
            ptx.async_copy16(copies.slot, row, slot + i * 4 * BLOCK, column, self.plan.l2_bytes)

    def _scale_address(self, args: SmallMFp8Args, tile: Int32, rank: Int32, block: Int32) -> Int64:
        """Address of a block's scale, or of the last one's of the CTA's part of K."""
        width = 1 if self.plan.e8m0_scales else 4
        block = cutlass.min(block, self.plan.blocks - 1) + rank * self.plan.blocks
        first = Int64(tile // 8) * (self.plan.columns // BLOCK)
        return args.scales + (first + block) * width

    def _load_scales(
        self, args: SmallMFp8Args, tile: Int32, rank: Int32, lane: Int32
    ) -> list[Float32]:
        """The lane's scales of the CTA's blocks: of every 32nd block."""
        addresses = [
            self._scale_address(args, tile, rank, i * 32 + lane)
            for i in range(self.plan.scale_words)
        ]
        if self.plan.e8m0_scales:
            return [ptx.e8m0_to_float(ptx.load_global_byte(address)) for address in addresses]
        return [ptx.load_global_float(address) for address in addresses]

    @cute.jit
    def _multiply_blocks(self, reading: Reading, copies: RowCopies) -> list[Fragment]:
        """Accumulators of the CTA's part of K of a row tile, for each tile of tokens."""
        totals = [[Float32(0.0)] * 4 for _ in range(self.plan.token_tiles)]
        codes, x, scales = reading.codes, reading.x, reading.scales
        rows, slot = copies.rows, copies.slot
        ring_end = reading.codes + self.plan.stages * RING_TILE
        for block in cutlass.range(self.plan.blocks, unroll=1):
            # One group a block, empty ones at the end: the tile of this block has arrived.
            ptx.wait_async_copies(self.plan.stages - 1)
            cute.arch.sync_warp()
            weight = self._load_codes(codes)
            scale = ptx.load_shared_float(scales)
            cute.arch.sync_warp()  # every lane has read the slot
            if block + self.plan.stages < self.plan.blocks:
                self._copy_tile(RowCopies(rows, slot), self.plan.stages * BLOCK, 0)
            ptx.commit_async_copies()
            sums = self._multiply_block(weight, x)
            totals = [
                [totals[n][i] + sums[n][i] * scale for i in range(4)]
                for n in range(self.plan.token_tiles)
            ]
            rows = [row + BLOCK for row in rows]
            codes, slot = codes + RING_TILE, slot + RING_TILE
            if codes == ring_end:
                codes -= self.plan.stages * RING_TILE
                slot -= self.plan.stages * RING_TILE
            x += 2 * BLOCK
            scales += 4
        return totals

    def _load_codes(self, codes: Uint32) -> Words:
        """Read the lane's codes: of each half of the columns four words of either row."""
        words: Words = []
        for at in (codes, codes ^ Uint32(_HALF)):
            for row in range(2):
                words += ptx.load_shared(at, 4, row * 8 * BLOCK)
        return words

    def _multiply_block(self, weight: Words, x: Uint32) -> list[Fragment]:
        """Products of a weight tile: eight K steps, each converted, then multiplied.

        With one tile of tokens, even and odd K steps have fragments of their own, so that
        consecutive MMAs do not wait for each other.

        Args:
            weight: Words of ``_load_codes``.
            x: The lane's address of the block's first half.
        """
        sums = [[Float32(0.0)] * 4 for _ in range(self.plan.accumulators)]
        for half in range(2):
            upper, lower = (weight[8 * half + 4 * r : 8 * half + 4 * r + 4] for r in range(2))
            right = [self._load_x_half(x, n, half) for n in range(self.plan.token_tiles)]
            for step in range(4):
                # Converted right before its MMA: a fragment of four registers is live at a time.
                left = [
                    ptx.e4m3x2_to_bfloat16x2(word, half_of_word)
                    for half_of_word in range(2)
                    for word in (upper[step], lower[step])
                ]
                for n in range(self.plan.token_tiles):
                    chain = step % 2 if self.plan.token_tiles == 1 else n
                    of_step = right[n][2 * step : 2 * step + 2]
                    sums[chain] = ptx.mma_m16n8k16_bf16(sums[chain], left, of_step)
        return self._joined(sums)

    def _load_x_half(self, x: Uint32, token_tile: int, half: int) -> Words:
        """X fragments of 64 columns of 8 tokens: eight words, two for each K step."""
        at = token_tile * 8 * self.plan.x_row_bytes + half * 2 * _HALF
        return [*ptx.load_shared(x, 4, at), *ptx.load_shared(x, 4, at + 16)]
