"""Segments of the grouped GEMM for few rows: which units, rows of X and jobs a CTA is at.

Where a CTA is (its range, segment and jobs) is kept in shared memory and loaded when needed,
because registers hold weights: kept in registers it was spilled, 8 to 40 bytes a thread (H200).
One warp writes the state; ``grouped_gemm_small_m`` says which barriers order it.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.expert_scheduler import (
    ExpertTable,
    RowCounts,
    count_tiles,
    find_expert_by_warp,
    padding_before,
    total_tiles,
)
from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.sm90.grouped_gemm_small_m_plan import (
    STATE_BYTES,
    SUM_SLOTS,
    GroupedSmallMArgs,
    GroupedSmallMPlan,
)
from dsv4.cute.sm90.small_m_tile import CODE_BYTES, SCALE_BYTES, SmallMTile, WeightAddress, Words

# Words of a CTA's state, as byte offsets.
NEXT_UNIT, END_UNIT = 0, 4  # the range, in units of all segments; first of the current segment
FIRST_UNIT = 8  # of the segment, among its expert's units
JOBS = 12  # of the segment
WEIGHT_UNIT = 16  # of the segment's first unit, among the units of all experts
EXPERT, ROW, ROWS = 20, 24, 28  # of the segment: expert, first row of X, rows
UNITS_DONE = 32  # units of the segments before, which number the slots
X_PARITY = 36  # of the phase of ``x_full``
ZERO = 40  # 0
JOB = 44  # of each warp
SWIZZLED_ROW = STATE_BYTES - 4  # row of the segment's first results among swizzled scales


class State(NamedTuple):
    """A CTA's state in shared memory.

    Attributes:
        address: Address of its first word.
    """

    address: Uint32

    def load(self, word: int) -> Int32:
        """A word of the CTA, by its offset."""
        value: Int32 = ptx.load_shared_int(self.address + word)
        return value

    def store(self, word: int, value: Int32) -> None:
        """Set a word of the CTA."""
        ptx.store_shared_int(self.address + word, value)

    def load_job(self, warp: Int32) -> Int32:
        """The job of a warp."""
        job: Int32 = ptx.load_shared_int(self.address + Uint32(JOB + warp * 4))
        return job

    def store_job(self, warp: Int32, job: Int32) -> None:
        """Set the job of a warp."""
        ptx.store_shared_int(self.address + Uint32(JOB + warp * 4), job)


class SharedMemory(NamedTuple):
    """Shared-memory addresses, in the order in which they lie.

    Attributes:
        x: The segment's rows of X, ``plan.x_row_bytes`` each.
        sums: ``plan.sum_slots`` slots of a unit's partial sums.
        buffers: The warps' buffers for the epilogue transpose.
        x_full: mbarrier of the segment's X.
        slot_written: mbarriers of the slots, 16 bytes each: sums written and, 8 bytes on, read.
        state: Where the CTA is.
        table: Tiles and rows of the experts.
    """

    x: Uint32
    sums: Uint32
    buffers: Uint32
    x_full: Uint32
    slot_written: Uint32
    state: State
    table: ExpertTable


class GroupedSmallMSegments(SmallMTile):
    """Device functions that enter segments, and the layout of shared memory."""

    plan: GroupedSmallMPlan

    def _shared(self, experts: Int32) -> SharedMemory:
        """The layout of dynamic shared memory."""
        x = Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        sums = x + self.plan.x_bytes
        buffers = sums + self.plan.sums_bytes
        x_full = buffers + self.plan.epilogue_bytes
        slot_written = x_full + 8
        state = slot_written + 16 * SUM_SLOTS
        tiles = state + STATE_BYTES
        table = ExpertTable(tiles, tiles + 4 * (MOST_EXPERTS + 1), experts)
        return SharedMemory(x, sums, buffers, x_full, slot_written, State(state), table)

    def _has_segment(self, state: State) -> Boolean:
        """Return whether units are left in the CTA's range."""
        return state.load(NEXT_UNIT) < state.load(END_UNIT)

    @cute.jit
    def _start(
        self,
        args: GroupedSmallMArgs,
        shared: SharedMemory,
        cta: Int32,
        grid: Int32,
        lane: Int32,
    ) -> None:
        """One warp: fill the table of experts, and write the CTA's range of units to the state."""
        state = shared.state
        if lane < STATE_BYTES // 4:
            ptx.store_shared_int(state.address + Uint32(lane * 4), Int32(0))
        selected = RowCounts(Int32(0), args.most_rows)
        count_tiles(args.offsets, shared.table, self.plan.segment_rows, lane, selected)
        cute.arch.sync_warp()
        if lane == 0:
            total, ctas = Uint32(total_tiles(shared.table) * args.units), Uint32(grid)
            quotient = total // ctas
            rest = total - quotient * ctas
            for end in cutlass.range_constexpr(2):
                # ``total * number // ctas``, without a product above 32 bits. If the first ``rest``
                # CTAs had one unit more each, ranges would reach over more experts' ends: Flash's
                # down took 17.9 us instead of 12.2 at one token (H200).
                number = Uint32(cta + end)
                at = Int32(quotient * number + rest * number // ctas)
                state.store((NEXT_UNIT, END_UNIT)[end], at)

    @cute.jit
    def _begin_segment(
        self, args: GroupedSmallMArgs, shared: SharedMemory, with_x: Boolean
    ) -> list[Words]:
        """Enter the CTA's next segment; load the first weights of each warp's first job there.

        After the last segment nothing is loaded.

        Args:
            args: Arguments of the kernel.
            shared: Shared memory.
            with_x: Whether to start the copies of X, too.
        """
        thread, _, _ = cute.arch.thread_idx()
        exists = Int32(0)
        if thread < 32:
            cute.arch.sync_warp()
            exists = self._write_segment(args, shared, thread)
            cute.arch.sync_warp()
            if with_x and exists == 1:
                self._copy_x(args, shared)
        cute.arch.sync_threads()
        state = shared.state
        warp, lane = self._reread_lane(state.address + ZERO)
        if lane == 0:
            state.store_job(warp, warp)
        cute.arch.sync_warp()
        weight = self._weight_address(args, self._weight_tile(state, warp), lane)
        exists = Int32(self._has_segment(state))
        return [self._fetch(weight, tile, exists) for tile in range(self.plan.stages)]

    @cute.jit
    def _write_segment(self, args: GroupedSmallMArgs, shared: SharedMemory, lane: Int32) -> Int32:
        """One warp: write the CTA's next segment to the state; 1 if there is one, else 0."""
        state = shared.state
        begin, last = state.load(NEXT_UNIT), state.load(END_UNIT)
        segment = Int32(Uint32(begin) // Uint32(args.units))
        first = begin - segment * args.units
        end = cutlass.min(last, (segment + 1) * args.units)
        expert, before, start, stop = find_expert_by_warp(segment, shared.table, lane)
        start += (segment - before) * self.plan.segment_rows
        if cutlass.const_expr(self.plan.swizzled_out):
            swizzled_row = start + padding_before(shared.table, expert, lane)
            if lane == 0:
                state.store(SWIZZLED_ROW, swizzled_row)
        if lane == 0:
            state.store(FIRST_UNIT, first)
            state.store(JOBS, (end - begin) * self.plan.unit_jobs)
            state.store(WEIGHT_UNIT, expert * args.units + first)
            state.store(EXPERT, expert)
            state.store(ROW, start)
            state.store(ROWS, cutlass.min(stop - start, self.plan.segment_rows))
        return Int32(begin < last)

    @cute.jit
    def _end_segment(self, state: State) -> None:
        """One thread: advance the state past the current segment."""
        units = self._unit_of(state.load(JOBS))
        state.store(NEXT_UNIT, state.load(NEXT_UNIT) + units)
        state.store(UNITS_DONE, state.load(UNITS_DONE) + units)
        state.store(X_PARITY, state.load(X_PARITY) ^ 1)

    def _own_job(self, state: State) -> Int32:
        """The warp's job."""
        warp, _ = self._reread_lane(state.address + ZERO)
        return state.load_job(warp)

    def _unit_of(self, job: Int32) -> Int32:
        """The unit of a job, counted from the segment's first one; unsigned division is shorter."""
        jobs = self.plan.unit_jobs
        return job if jobs == 1 else Int32(Uint32(job) // Uint32(jobs))

    def _job_of_unit(self, job: Int32) -> Int32:
        """Return which of its unit's jobs a job is."""
        jobs = self.plan.unit_jobs
        return Int32(0) if jobs == 1 else Int32(Uint32(job) % Uint32(jobs))

    def _weight_tile(self, state: State, job: Int32) -> Int32:
        """First weight tile of a job, or of the segment's last one, among those of all experts."""
        job = cutlass.min(job, state.load(JOBS) - 1)
        unit = state.load(WEIGHT_UNIT) + self._unit_of(job)
        unit_tiles = self.plan.unit_jobs * self.plan.split_tiles
        return unit * unit_tiles + self._job_of_unit(job) * self.plan.split_tiles

    def _weight_address(self, args: GroupedSmallMArgs, tile: Int32, lane: Int32) -> WeightAddress:
        """The lane's bytes of a weight tile."""
        return WeightAddress(
            args.codes + (Int64(tile) * CODE_BYTES + lane * 16),
            args.scales + (Int64(tile) * SCALE_BYTES + lane // 4 * 8),
        )

    @cute.jit
    def _copy_x(self, args: GroupedSmallMArgs, shared: SharedMemory) -> None:
        """One warp: start bulk copies of the segment's rows of X, a row by each lane."""
        state = shared.state
        _, lane = self._reread_lane(state.address + ZERO)
        start, count = state.load(ROW), state.load(ROWS)
        if lane == 0:
            ptx.mbarrier_arrive_expect_tx(shared.x_full, count * (self.plan.columns * 2))
        cute.arch.sync_warp()  # no copy may complete bytes before they are expected
        if lane < count:
            to = shared.x + Uint32(lane * self.plan.x_row_bytes)
            source = args.x + (Int64(start) + lane) * args.token_stride * 2
            ptx.bulk_copy_to_shared(to, source, self.plan.columns * 2, shared.x_full)
