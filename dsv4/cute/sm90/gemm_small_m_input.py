"""X of the small-M GEMM: from global to shared memory, and from there to MMA fragments.

The CTA's part of X stays in shared memory while its warps multiply: ``plan.x_row_bytes`` a token,
of which 16 bytes are padding against bank conflicts of ``ldmatrix``. ``gemm_small_m`` says when it
is copied and which barriers order it.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.gemm_small_m_plan import SmallMArgs
from dsv4.cute.sm90.small_m_tile import SmallMTile, Words


class SharedMemory(NamedTuple):
    """Shared-memory addresses, in the order in which they lie.

    Attributes:
        x: The CTA's part of X, ``plan.x_row_bytes`` a token.
        partials: Partial sums that the cluster's CTAs sent to this one.
        buffer: The warp's buffer for the epilogue transpose; in the ring kernel, its ring.
        zero: A word that is 0; the word after it is the CTA's group.
        x_full: mbarriers of the first columns of X and, 8 bytes on, of the others.
        partials_full: The warp's mbarrier of partial sums; without a cluster, the word that holds
            its row tile.
    """

    x: Uint32
    partials: Uint32
    buffer: Uint32
    zero: Uint32
    x_full: Uint32
    partials_full: Uint32


class XRows(NamedTuple):
    """X in shared memory, as a lane reads it.

    Attributes:
        rows: Where the row begins whose address the lane gives to ``ldmatrix``.
        full: Address of the mbarrier, like ``SharedMemory.x_full``.
    """

    rows: Uint32
    full: Uint32


class SmallMInput(SmallMTile):
    """Device functions that copy and read X, and the layout of shared memory."""

    def _shared(self, warp: Int32) -> SharedMemory:
        """The layout of dynamic shared memory, as a warp uses it."""
        # Each region's size is a multiple of 16, so that its vectors are aligned.
        x = Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        partials = x + self.plan.x_bytes
        buffers = partials + self.plan.partials_bytes
        x_full = buffers + self.plan.epilogue_bytes + 8
        buffer = buffers + Uint32(warp * self.plan.buffer_bytes)
        partials_full = x_full + Uint32(warp * 8 + 16)
        return SharedMemory(x, partials, buffer, x_full - 8, x_full, partials_full)

    @property
    def x_arrivals(self) -> int:
        """Arrivals at each mbarrier of X: of one lane, or of every thread that copies."""
        return 1 if self.plan.token_tiles == 1 else self.plan.threads

    @cute.jit
    def _prefetch_x_to_l2(self, args: SmallMArgs, x: Int64, rank: Int32) -> None:
        """One warp, before griddepcontrol.wait: bring the CTA's part of X to L2.

        Harmless while the preceding kernel still writes it: L2 is where both meet.
        """
        lane = cute.arch.lane_idx()
        if lane < args.tokens:
            source = x + (lane * args.token_stride + rank * (self.plan.tiles * 64)) * 2
            ptx.bulk_prefetch_l2(source, self.plan.tiles * 128)

    @cute.jit
    def _bulk_copy_x(self, args: SmallMArgs, x: Int64, shared: SharedMemory, rank: Int32) -> None:
        """One warp: start bulk copies of the CTA's part of X, a token by each lane.

        First the columns that the first ``stages`` tiles multiply, on a barrier of their own: X is
        what a CTA waits for, as the weights of these stages are there by then.
        """
        lane = cute.arch.lane_idx()
        first, whole = self.plan.stages * 128, self.plan.tiles * 128  # bytes of a token
        if lane == 0:
            ptx.mbarrier_arrive_expect_tx(shared.x_full, args.tokens * first)
            ptx.mbarrier_arrive_expect_tx(shared.x_full + 8, args.tokens * (whole - first))
        cute.arch.sync_warp()  # no copy may complete bytes before they are expected
        if lane < args.tokens:
            to = shared.x + Uint32(lane * self.plan.x_row_bytes)
            source = x + (lane * args.token_stride + rank * (self.plan.tiles * 64)) * 2
            ptx.bulk_copy_to_shared(to, source, first, shared.x_full)
            if cutlass.const_expr(whole > first):
                rest = whole - first
                ptx.bulk_copy_to_shared(to + first, source + first, rest, shared.x_full + 8)

    @cute.jit
    def _copy_x(
        self, args: SmallMArgs, x: Int64, shared: SharedMemory, rank: Int32, thread: Int32
    ) -> None:
        """All threads: copy the CTA's part of X, 16 bytes at a time; faster for 9 to 16 tokens."""
        source = x + rank * (self.plan.tiles * 128)
        # Two passes, the columns of the first barrier before the others.
        first, whole = self.plan.stages * 8, self.plan.tiles * 8  # vectors of a token
        for half, (begin, end) in enumerate(((0, first), (first, whole))):
            count = end - begin
            if cutlass.const_expr(count > 0):
                for number in cutlass.range(
                    thread, args.tokens * count, self.plan.threads, unroll=1
                ):
                    token, column = number // count, number % count + begin
                    # Neighbouring threads have neighbouring vectors of a token: coalesced.
                    to = shared.x + Uint32(token * self.plan.x_row_bytes + column * 16)
                    at = source + Int64(token) * args.token_stride * 2 + column * 16
                    ptx.async_copy16(to, at)
            ptx.mbarrier_arrive_on_async_copies(shared.x_full + half * 8)

    def _rows(self, x: Uint32, lane: Int32) -> Uint32:
        """Return where the lane's row for ``ldmatrix`` begins: 8 rows by 16 bytes, 4 matrices."""
        return x + Uint32(lane % 8 * self.plan.x_row_bytes + lane // 8 * 16)

    def _load_x(self, rows: Uint32, tile: int) -> Words:
        """X fragments of 64 columns: 8 words for each tile of 8 tokens."""
        words: Words = []
        # Each ldmatrix.x4 is the right operand of two K steps of 16 columns, for 8 tokens.
        for n in range(self.plan.token_tiles):
            at = n * 8 * self.plan.x_row_bytes + tile * 128
            words += [*ptx.ldmatrix_x4(rows, at), *ptx.ldmatrix_x4(rows, at + 64)]
        return words
