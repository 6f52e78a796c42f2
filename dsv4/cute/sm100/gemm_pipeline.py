"""Shared memory, mbarriers and ring of the ``tcgen05`` GEMMs, and what threads know of them.

Shared memory of a CTA, from its start: ``stages`` stages of operands, the transpose buffer of the
epilogue, mbarriers, the address of the allocated TMEM columns. A stage is 256 columns of K:

* codes of the CTA's 128 rows, lines of 128 bytes whose 16-byte pieces are swizzled;
* codes of the CTA's tokens, likewise;
* scales of the rows, ``[4, 512 bytes]``: each 512 are 128 rows and 64 columns;
* scales of the tile's tokens, ``[scale_tiles, 4, 512 bytes]``.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm100.gemm_plan import EPILOGUE_WARPS, Tcgen05Plan


class TmaOperand(NamedTuple):
    """An operand in global memory.

    Attributes:
        atom: Its TMA copy.
        tensor: The operand as the copy addresses it.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Thread(NamedTuple):
    """A thread's place.

    Attributes:
        thread: Thread of the CTA.
        warp: Warp of the CTA; the same in all lanes, which the compiler knows.
        lane: Lane of the warp.
        rank: Rank of the CTA among those of an MMA; 0 is the leader, which issues it.
        split: Which part of K the CTA has.
    """

    thread: Int32
    warp: Int32
    lane: Int32
    rank: Int32
    split: Int32


class Grid(NamedTuple):
    """The place of a CTA in the grid.

    Attributes:
        cta: Its number.
        ctas: Number of CTAs of the grid.
    """

    cta: Int32
    ctas: Int32


class KRange(NamedTuple):
    """A CTA's part of K, in stages.

    Attributes:
        begin: First stage.
        stages: How many.
    """

    begin: Int32
    stages: Int32


class SharedMemory(NamedTuple):
    """Shared memory of a CTA.

    Attributes:
        stages: Stages of operands, as TMA copies take them.
        lines: Address of the transpose buffer.
        barriers: The mbarriers, as TMA copies take them.
        tmem: Address of the address of the allocated TMEM columns.
    """

    stages: cute.Pointer
    lines: Uint32
    barriers: cute.Pointer
    tmem: Uint32


class Barriers(NamedTuple):
    """Addresses of the mbarriers, 8 bytes each.

    All complete a phase with every round of their stages; waits take the parity. Of two CTAs that
    multiply together, the leader waits for its own ``full`` and ``accumulator_empty`` alone; it
    commits to ``empty`` and ``accumulator_full`` of both.

    Attributes:
        full: mbarrier of each stage: its operands have arrived. ``full_arrivals`` arrivals, one of
            which expects the bytes of both CTAs' TMA copies.
        empty: mbarrier of each stage: its operands have been read. One arrival, by
            ``tcgen05.commit``.
        accumulator_full: mbarrier of each accumulator stage: all MMAs of a tile are done. One
            arrival, by ``tcgen05.commit``.
        accumulator_empty: mbarrier of each accumulator stage: what the next MMAs overwrite is
            loaded. An arrival of every epilogue warp of both CTAs.
    """

    full: Uint32
    empty: Uint32
    accumulator_full: Uint32
    accumulator_empty: Uint32


class RingPosition(NamedTuple):
    """The position of a warp in the ring of stages.

    Attributes:
        stage: The next one.
        parity: Parity of the phase that its wait waits for.
    """

    stage: Int32
    parity: Int32


class Tcgen05Pipeline(PlannedKernel):
    """Shared memory and mbarriers of a CTA, synchronization of its cluster, and the ring."""

    plan: Tcgen05Plan

    def _allocate(self, smem: cutlass.memory.SmemAllocator) -> SharedMemory:
        """The shared memory of a CTA."""
        stages = smem.allocate(self.plan.stages * self.plan.stage_bytes, 1024)
        lines = smem.allocate_array(Uint8, max(16, self.plan.epilogue_bytes))
        barriers = smem.allocate_array(Int64, self.plan.barriers)
        tmem = smem.allocate_array(Uint32, 4)
        return SharedMemory(stages, Uint32(lines.toint()), barriers, Uint32(tmem.toint()))

    def _barriers(self, memory: SharedMemory) -> Barriers:
        """Addresses of the mbarriers."""
        full = Uint32(memory.barriers.toint())
        empty = full + Uint32(8 * self.plan.stages)
        accumulator_full = empty + Uint32(8 * self.plan.stages)
        accumulator_empty = accumulator_full + Uint32(8 * self.plan.accumulator_stages)
        return Barriers(full, empty, accumulator_full, accumulator_empty)

    @cute.jit
    def _make_barriers(self, barriers: Barriers, lane: Int32) -> None:
        """One warp: make all mbarriers, a lane each; there are at most 32."""
        first = barriers.full
        if lane < self.plan.stages:
            ptx.mbarrier_init(first + Uint32(lane * 8), self.plan.full_arrivals)
        elif lane < self.plan.barriers - self.plan.accumulator_stages:
            ptx.mbarrier_init(first + Uint32(lane * 8), 1)
        elif lane < self.plan.barriers:
            arrivals = EPILOGUE_WARPS * self.plan.cta_group
            ptx.mbarrier_init(first + Uint32(lane * 8), arrivals)
        # Visible to TMA copies, the tensor core and the other CTAs of the cluster.
        ptx.fence_mbarrier_init()
        cute.arch.sync_warp()

    @cute.jit
    def _sync_cluster(self) -> None:
        """All threads of the cluster: wait for one another."""
        if cutlass.const_expr(self.plan.ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def _sync_splits(self) -> None:
        """Warps without results: take part in the epilogue's wait for sums of other CTAs."""
        if cutlass.const_expr(self.plan.k_splits > 1):
            self._sync_cluster()

    @cute.jit
    def _next(self, position: RingPosition) -> RingPosition:
        """The stage that follows, with its parity."""
        stage, parity = position.stage + 1, position.parity
        if stage == self.plan.stages:
            stage = Int32(0)
            parity = parity ^ 1
        return RingPosition(stage, parity)
