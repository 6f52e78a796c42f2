"""TMA copies, ring of stages and order of tiles of the large-M GEMMs.

A stage of the ring holds ``stage_k_blocks`` blocks of 64 columns: X of the tile's tokens, in lines
of 128 bytes whose 16-byte pieces are swizzled (K-major, as ``wgmma`` reads them), and the codes and
scales of all row tiles of the CTA. Of every row tile a stage has ``code_bytes`` and ``scale_bytes``
that follow one another, because packed weights lie in the order in which lanes read them
(``dsv4.quant.fragments``); so one TMA copy of ``cta_row_tiles`` lines brings the codes of a stage,
and another one the scales.

Who copies, and when, is the kernels' own: ``gemm_wgmma``, ``gemm_fp8_wgmma``,
``grouped_gemm_wgmma``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor

from dsv4.cute.device import ptx
from dsv4.cute.device.tile_walk import TileOrder, Walk
from dsv4.cute.sm90.wgmma_epilogue import Thread, WgmmaEpilogue


class KPart(NamedTuple):
    """A CTA's part of K, in stages.

    Attributes:
        begin: First stage.
        stages: How many.
        total: Stages of K.
    """

    begin: Int32
    stages: Int32
    total: Int32


class Pipeline(NamedTuple):
    """mbarriers of the ring, 8 bytes a stage.

    Attributes:
        full: Address of those that say that a stage has arrived.
        empty: Address of those that say that all MMA warps have read it.
    """

    full: Uint32
    empty: Uint32


class SharedMemory(NamedTuple):
    """Shared memory that the copy warp fills.

    Attributes:
        x: X of all stages.
        weights: Codes of a stage's row tiles, then their scales; ``weight_bytes`` a stage.
        full: ``Pipeline.full`` as a pointer, which TMA copies take.
    """

    x: cute.Tensor
    weights: cute.Pointer
    full: cute.Pointer


class CopyPair(NamedTuple):
    """Partitions of a TMA copy.

    Attributes:
        to: Shared memory, by stages.
        source: Global memory, by tiles.
    """

    to: cute.Tensor
    source: cute.Tensor


class WeightCopies(NamedTuple):
    """TMA copies of the weights of a block of rows.

    Attributes:
        codes: Copies of the codes.
        scales: Copies of the block scales.
    """

    codes: CopyPair
    scales: CopyPair


def fake_x() -> cute.Tensor:
    """Make an X for the compiler: rows of bfloat16 that begin at multiples of 16 bytes."""
    return make_fake_tensor(
        BFloat16,
        (cute.sym_int(), cute.sym_int(divisibility=64)),
        stride=(cute.sym_int64(divisibility=8), 1),
        assumed_align=16,
    )


def fake_weights() -> cute.Tensor:
    """Make packed codes or scales for the compiler: rows of words of 32 bits."""
    return make_fake_tensor(
        Int32,
        (cute.sym_int(), cute.sym_int(divisibility=16)),
        stride=(cute.sym_int64(divisibility=16), 1),
        assumed_align=16,
    )


class WgmmaCopies(WgmmaEpilogue):
    """Layouts, TMA copies and mbarriers of the ring."""

    def _x_tma(self, x: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """TMA copy of 64 columns of ``tma_tokens`` tokens, and X as it addresses it."""
        # Copies are boxes of the ring's own layout, so that the swizzle is the same.
        box = cute.select(self._layout(self.plan.tma_tokens, 1), mode=[0, 1])
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x, box, (self.plan.tma_tokens, 64)
        )

    def _weights_tma(
        self, whole: cute.Tensor, tile_bytes: int
    ) -> tuple[cute.CopyAtom, cute.Tensor]:
        """TMA copy of ``tile_bytes`` bytes of each row tile of a CTA, and what it reads."""
        # A line is a row tile of all columns: its bytes of a stage follow one another.
        box = (self.plan.cta_row_tiles, tile_bytes // 4)
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), whole, cute.make_layout(box, stride=(box[1], 1)), box
        )

    def _x_layout(self) -> cute.ComposedLayout:
        """Layout of the X of all stages."""
        return self._layout(self.plan.token_block, self.plan.stage_k_blocks * self.plan.stages)

    def _layout(self, tokens: int, count: int) -> cute.ComposedLayout:
        """``count`` blocks of 64 columns of ``tokens`` rows, lines of 128 bytes, swizzled."""
        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return cute.tile_to_shape(swizzle, (tokens, 64, count), (0, 1, 2))

    def _schedule(self, args: Any) -> tuple[Thread, Walk, KPart]:
        """Return the thread's role, its cluster's tiles, and its CTA's part of K.

        Args:
            args: ``WgmmaArgs`` or ``Fp8WgmmaArgs``.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank = block % self.plan.ctas
        me = Thread(thread, warp, lane, rank)
        # A cluster has every ``stride``-th tile; one of several CTAs has one tile.
        first, stride = block // self.plan.ctas, grid // self.plan.ctas
        total = args.token_tiles * args.row_blocks
        order = TileOrder(args.token_tiles, args.token_span, args.row_blocks)
        walk = Walk(Int32(first), stride, total, order)
        # The ranks of a cluster share K as evenly as whole stages allow.
        stages = args.k_blocks // self.plan.stage_k_blocks
        begin = rank * stages // self.plan.ctas
        end = (rank + 1) * stages // self.plan.ctas
        return me, walk, KPart(begin, end - begin, stages)

    def _exchange_buffer(self, smem: Any, shared_x: Any) -> Uint32:
        """Shared memory for sums of other CTAs; where stages have been, if there is no other."""
        if not self.plan.has_exchange_buffer:
            return Uint32(shared_x.iterator.toint())
        buffer = smem.allocate_array(cutlass.Uint8, self.plan.exchange_buffer_bytes)
        return Uint32(buffer.toint())

    @cute.jit
    def _make_pipeline(self, pipeline: Pipeline, lane: Int32) -> None:
        """One warp: make the ring's mbarriers."""
        if lane < self.plan.stages:
            # full: the lane that expects the bytes; empty: a lane of every MMA warp.
            ptx.mbarrier_init(pipeline.full + Uint32(lane * 8), 1)
            ptx.mbarrier_init(pipeline.empty + Uint32(lane * 8), self.plan.mma_warps)
            # Visible to TMA copies, and to the other CTAs of the cluster.
            ptx.fence_mbarrier_init()

    @cute.jit
    def _expect(self, barrier: Uint32, tokens: Int32, lane: Int32) -> None:
        """Expect the bytes of a stage: X of ``tokens`` tokens, and the weights."""
        if lane == 0:
            x_bytes = tokens * (128 * self.plan.stage_k_blocks)
            ptx.mbarrier_arrive_expect_tx(barrier, x_bytes + self.plan.weight_bytes)

    def _weight_copies(self, tma: Any, weights: cute.Pointer, row: Int32) -> WeightCopies:
        """The TMA copies of the weights from row tile ``row`` on.

        Args:
            tma: ``WgmmaTma`` or ``E4m3Tma``.
            weights: Codes of the first stage; its scales follow them.
            row: First row tile.
        """
        # In a stage, the scales of all row tiles follow the codes of all row tiles.
        scales = weights + self.plan.cta_row_tiles * self.plan.code_bytes
        return WeightCopies(
            self._weight_copy(tma.codes_tma, weights, tma.codes_tensor, row, self.plan.code_bytes),
            self._weight_copy(
                tma.scales_tma, scales, tma.scales_tensor, row, self.plan.scale_bytes
            ),
        )

    def _weight_copy(
        self, atom: cute.CopyAtom, at: cute.Pointer, whole: cute.Tensor, row: Int32, tile_bytes: int
    ) -> CopyPair:
        """Stages at ``at``, and what is copied there: ``tile_bytes`` of each row tile."""
        words = tile_bytes // 4
        stages = cute.make_layout(
            (self.plan.cta_row_tiles, words, self.plan.stages),
            stride=(words, 1, self.plan.weight_bytes // 4),
        )
        shared = cute.make_tensor(cute.recast_ptr(at, dtype=Int32), stages)
        # Row tiles after the last one are read as zeros.
        rows = cute.domain_offset((row, 0), whole)
        tiles = cute.local_tile(rows, (self.plan.cta_row_tiles, words), (0, None))
        return self._partition(atom, shared, tiles)

    def _copy_weights(
        self, tma: Any, weights: WeightCopies, k: Int32, stage: Int32, barrier: cute.Pointer
    ) -> None:
        """Copy codes and scales of stage ``k`` of K to a stage of the ring."""
        # Both complete bytes of the same mbarrier, the stage's.
        codes, scales = weights.codes, weights.scales
        cute.copy(
            tma.codes_tma, codes.source[(None, k)], codes.to[(None, stage)], tma_bar_ptr=barrier
        )
        cute.copy(
            tma.scales_tma, scales.source[(None, k)], scales.to[(None, stage)], tma_bar_ptr=barrier
        )

    def _x_stages(self, shared_x: cute.Tensor) -> cute.Tensor:
        """X of all stages in shared memory, by the boxes of TMA copies."""
        # A block of 64 columns is one box; grouped GEMMs of several widths have smaller ones.
        boxes_a_block = self.plan.token_block // self.plan.tma_tokens
        boxes = self.plan.stages * self.plan.stage_k_blocks * boxes_a_block
        return cute.make_tensor(shared_x.iterator, self._layout(self.plan.tma_tokens, boxes).outer)

    def _partition(self, atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor) -> CopyPair:
        """Return where copies go and whence, by stages or tiles."""
        whole = cute.make_layout(1)
        grouped = [cute.group_modes(tensor, 0, 2) for tensor in (shared, tiles)]
        return CopyPair(*cpasync.tma_partition(atom, 0, whole, *grouped))
