"""Routed experts of few rows in one launch: gate_up GEMM, SwiGLU and down GEMM, weights in NVFP4.

Both GEMMs are ``grouped_gemm_small_m``'s, with its tiles, warps' jobs, sums and bits.

Work list. The units of gate_up of all segments are divided evenly into as many ranges as there are
CTAs, and those of down likewise. A CTA takes ranges by a counter in global memory, gate_up's before
down's: usually one of each.

Between the GEMMs. Results of SwiGLU go to global memory. A unit of down needs all units of gate_up
of the same segment (up to 8 rows of one expert), so every segment has a counter in global memory. A
CTA that has finished units of gate_up adds their number, with release at GPU scope; a CTA that
begins units of down waits, with acquire, until the counter says all of them.

The wait ends, however few CTAs the GPU runs at a time: who takes a range of down has seen that all
ranges of gate_up are taken, by CTAs that run and that do not wait before these ranges are finished.

Before it waits, a warp loads the first ``stages`` weight tiles of down to registers. Asking for
more of them in L2 made the launch 6 to 10 % slower (H200): they arrive together with weights of
gate_up that are needed first.

Counters end at zero. A CTA that has waited adds the number of its units of down to the counter's
upper half; the one that makes it complete stores 0, because all CTAs have read the counter then.
Every CTA takes one number that stands for no range; the last of these stores 0.

Groups. A CTA's range of units may reach over the end of a segment. Up to two neighbouring segments
whose rows fit ``segment_rows`` together are one group: their rows of X lie in shared memory
together, and warps take jobs of both. Else 5 of 132 CTAs would have two rounds of jobs for the work
of one (6 experts of one row).

Barriers: those of ``grouped_gemm_small_m``, of each GEMM its own (``x_full`` of down has the 32
arrivals of the warp that copies); ``sync_threads`` at the end of a group also orders the results of
all warps before the release by one of them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.expert_scheduler import ExpertTable, find_expert_by_warp, total_tiles
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.sm90.expert_mlp_plan import (
    COUNTER_BYTES,
    EXPERT_MLP_ABI,
    MOST_ROWS,
    ExpertMlpPlan,
    ExpertMlpSmallMArgs,
)
from dsv4.cute.sm90.grouped_gemm_small_m import GroupedSmallMKernel
from dsv4.cute.sm90.grouped_gemm_small_m_plan import (
    STATE_BYTES,
    SUM_SLOTS,
    GroupedSmallMArgs,
)
from dsv4.cute.sm90.grouped_gemm_small_m_segments import (
    END_UNIT,
    EXPERT,
    FIRST_UNIT,
    JOBS,
    NEXT_UNIT,
    ROW,
    ROWS,
    UNITS_DONE,
    WEIGHT_UNIT,
    X_PARITY,
    ZERO,
    SharedMemory,
    State,
)
from dsv4.cute.sm90.small_m_tile import CODE_BYTES, SCALE_BYTES, Output, Words

# A group's second segment has its words this far behind those of the first.
_SECOND = STATE_BYTES
# Words of the group, where the second segment has none: units of the first segment in the group,
# and its number among all segments.
_FIRST_UNITS, _SEGMENT = _SECOND + NEXT_UNIT, _SECOND + END_UNIT
# Number of the last range that the CTA took, there too, in the state of gate_up.
_TICKET = _SECOND + JOBS
_ANY_ROWS = 2**31 - 1


class GroupedGemm(GroupedSmallMKernel):
    """Device functions of one GEMM of the launch, whose segments come in groups of up to two."""

    # Places.

    def _state_of(self, state: State, unit: Int32) -> State:
        """The words of the segment of a unit, which is counted from the group's first one."""
        is_second = Int32(unit >= state.load(_FIRST_UNITS))
        return State(state.address + Uint32(is_second * _SECOND))

    @cute.jit
    def _write_segment(self, args: GroupedSmallMArgs, shared: SharedMemory, lane: Int32) -> Int32:
        """One warp: write the CTA's next group to the state; 1 if there is one, else 0."""
        state, table = shared.state, shared.table
        begin, last = state.load(NEXT_UNIT), state.load(END_UNIT)
        segment = Int32(Uint32(begin) // Uint32(args.units))
        first = begin - segment * args.units
        expert, row, rows = self._segment(segment, table, lane)
        next_expert, next_row, next_rows = self._segment(segment + 1, table, lane)
        end = cutlass.min(last, (segment + 1) * args.units)
        first_units = end - begin
        if end < last and rows + next_rows <= self.plan.segment_rows:
            end = cutlass.min(last, (segment + 2) * args.units)
        else:
            next_rows = Int32(0)
        if lane == 0:
            state.store(JOBS, (end - begin) * self.plan.unit_jobs)
            state.store(_FIRST_UNITS, first_units)
            state.store(_SEGMENT, segment)
            state.store(FIRST_UNIT, first)
            state.store(WEIGHT_UNIT, expert * args.units + first)
            state.store(EXPERT, expert)
            state.store(ROW, row)
            state.store(ROWS, rows)
            # Units are counted from the group's first one.
            state.store(_SECOND + FIRST_UNIT, -first_units)
            state.store(_SECOND + WEIGHT_UNIT, next_expert * args.units - first_units)
            state.store(_SECOND + EXPERT, next_expert)
            state.store(_SECOND + ROW, next_row)
            state.store(_SECOND + ROWS, next_rows)
        return Int32(begin < last)

    @cute.jit
    def _segment(
        self, segment: Int32, table: ExpertTable, lane: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """One warp: expert, first row of X and rows of a segment; some of them beyond the last."""
        expert, before, start, stop = find_expert_by_warp(segment, table, lane)
        row = start + (segment - before) * self.plan.segment_rows
        return expert, row, cutlass.min(stop - row, self.plan.segment_rows)

    def _rows_to_copy(self, state: State) -> Int32:
        """Rows of X of both segments, which follow one another."""
        return state.load(ROWS) + state.load(_SECOND + ROWS)

    def _weight_tile(self, state: State, job: Int32) -> Int32:
        """First weight tile of a job, or of the group's last one, among those of all experts."""
        job = cutlass.min(job, state.load(JOBS) - 1)
        in_group = self._unit_of(job)
        unit = self._state_of(state, in_group).load(WEIGHT_UNIT) + in_group
        unit_tiles = self.plan.unit_jobs * self.plan.split_tiles
        return unit * unit_tiles + self._job_of_unit(job) * self.plan.split_tiles

    def _rows_of(self, shared: SharedMemory, job: Int32, lane: Int32) -> list[Uint32]:
        """Return where the lane's row for ``ldmatrix`` begins.

        Rows behind those of the segment give columns of sums that nobody stores. Rows that shared
        memory does not hold are replaced by its last one.
        """
        state = shared.state
        is_second = Int32(self._unit_of(job) >= state.load(_FIRST_UNITS))
        row = lane % 8 + is_second * state.load(ROWS)
        row = cutlass.min(row, self.plan.segment_rows - 1)
        return [shared.x + Uint32(row * self.plan.x_row_bytes + lane // 8 * 16)]

    # Work.

    @cute.jit
    def run_group(
        self, args: GroupedSmallMArgs, shared: SharedMemory, prefetched: list[Words]
    ) -> list[Words]:
        """All threads: compute and store a group's results; returns undefined words."""
        state = shared.state
        ptx.mbarrier_wait(shared.x_full, state.load(X_PARITY))
        while self._own_job(state) < state.load(JOBS):
            sums, prefetched = self._multiply(args, shared, prefetched)
            of_warp, of_lane = self._reread_lane(state.address + ZERO)
            job = state.load_job(of_warp)
            is_last = Int32(1) > 0  # a dynamic value, as what replaces it
            if cutlass.const_expr(self.plan.unit_jobs > 1):
                number = state.load(UNITS_DONE) + self._unit_of(job)
                is_last = self._write_sums(sums, shared, number, self._job_of_unit(job), of_lane)
            if is_last:
                in_group = self._unit_of(job)
                segment = self._state_of(state, in_group)
                unit = segment.load(FIRST_UNIT) + in_group
                if cutlass.const_expr(self.plan.splits > 1):
                    sums = self._reduce(shared, number, of_lane)
                scales = self._scales(args, segment.load(EXPERT))
                output = self._output_of(args, shared, segment, of_warp)
                factors = self._row_factors(scales, unit * 16 + of_lane // 4)
                self._store(unit, sums, factors, output, of_lane)
            if of_lane == 0:
                state.store_job(of_warp, job + self.plan.warps)
            cute.arch.sync_warp()
        return prefetched

    def _output_of(
        self, args: GroupedSmallMArgs, shared: SharedMemory, segment: State, warp: Int32
    ) -> Output:
        """Return where the results of a segment go."""
        output = self._output(args, shared, segment.load(ROW), warp)
        return output._replace(tokens=segment.load(ROWS))

    def own_units(self, state: State, lane: Int32) -> Int32:
        """Units of a group: of its first segment for lane 0, of its second for lane 1, else 0."""
        units = self._unit_of(state.load(JOBS))
        first = cutlass.min(units, state.load(_FIRST_UNITS))
        return Int32(lane == 0) * first + Int32(lane == 1) * (units - first)


class DownGemm(GroupedGemm):
    """Device functions of the second GEMM, whose rows of X are results of the first."""

    @cute.jit
    def _copy_x(self, args: GroupedSmallMArgs, shared: SharedMemory) -> None:
        """One warp: start copies of the group's rows of X, 16 bytes by each lane.

        By ``cp.async``, because a bulk copy of what this launch wrote would need a fence between
        memory proxies, which waits for all loads of the warp.
        """
        state, row_vectors = shared.state, self.plan.columns // 8
        _, lane = self._reread_lane(state.address + ZERO)
        source = args.x + Int64(state.load(ROW)) * args.token_stride * 2
        for row in cutlass.range(self._rows_to_copy(state), unroll=1):
            to = shared.x + Uint32(row * self.plan.x_row_bytes)
            start = source + Int64(row) * args.token_stride * 2
            for vector in cutlass.range(lane, row_vectors, 32, unroll=4):
                ptx.async_copy16(to + Uint32(vector * 16), start + Int64(vector) * 16)
        ptx.mbarrier_arrive_on_async_copies(shared.x_full)


class ExpertMlpKernel(PlannedKernel):
    """The kernel of one configuration."""

    abi = EXPERT_MLP_ABI
    plan: ExpertMlpPlan

    def __init__(self, plan: ExpertMlpPlan) -> None:
        super().__init__(plan)
        self.gate_up, self.down = GroupedGemm(plan.gate_up), DownGemm(plan.down)

    @cute.jit
    def __call__(self, args: ExpertMlpSmallMArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.expert_mlp`` launches the cubin itself."""
        self._launch(self.kernel(args), stream, preferred_smem_carveout=100)

    @cute.kernel
    def kernel(self, args: ExpertMlpSmallMArgs) -> None:
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        first_args, second_args = self._gate_up_args(args), self._down_args(args)
        first, second = self._shared(args.experts)
        self._init_barriers(first, second, thread)
        # The preceding kernel writes the offsets.
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            ticket = Int32(0)
            if lane == 0:  # the counter answers while the offsets are on their way
                ticket = self._take(args, Int32(0))
            self.gate_up._clear_state(first.state, lane)
            self.down._clear_state(second.state, lane)
            self.gate_up._count_segments(first_args, first, lane)
            if lane == 0:
                self._enter_gate_up(args, first, ticket)
        prefetched = self.gate_up._begin_segment(first_args, first, args.experts > 0)
        cute.arch.griddepcontrol_launch_dependents()
        while self.gate_up._has_segment(first.state):
            prefetched = self.gate_up.run_group(first_args, first, prefetched)
            _, of_lane = self.gate_up._reread_lane(first.state.address + ZERO)
            units = self.gate_up.own_units(first.state, of_lane)
            counter = self._counter(args, first.state, of_lane)
            # The results of all warps are stored, and all warps have read the group's X.
            cute.arch.sync_threads()
            # By the last warp: the first one enters the next group.
            if warp == self.plan.warps - 1 and units > 0:
                ptx.reduce_add_release(counter, units)
            if thread == 0:
                self.gate_up._end_segment(first.state)
                if first.state.load(NEXT_UNIT) >= first.state.load(END_UNIT):
                    zero = first.state.load(ZERO)
                    self._enter_gate_up(args, first, self._take(args, zero))
            prefetched = self.gate_up._begin_segment(first_args, first, args.experts > 0)
        if thread == 0:
            self._enter_down(args, second, first.state.load(_TICKET))
        # Weights first, and then the wait.
        down_weights = self.down._begin_segment(second_args, second, args.experts < 0)
        while self.down._has_segment(second.state):
            if warp == 0:
                self._wait_for_gate_up(args, second.state, lane)
                self.down._copy_x(second_args, second)
            down_weights = self.down.run_group(second_args, second, down_weights)
            cute.arch.sync_threads()
            if thread == 0:
                self.down._end_segment(second.state)
                if second.state.load(NEXT_UNIT) >= second.state.load(END_UNIT):
                    zero = second.state.load(ZERO)
                    self._enter_down(args, second, self._take(args, zero))
            down_weights = self.down._begin_segment(second_args, second, args.experts < 0)
        self.down._clear(second_args, second, thread, cta, grid)

    # Arguments and shared memory of each GEMM.

    def _gate_up_args(self, args: ExpertMlpSmallMArgs) -> GroupedSmallMArgs:
        zero = Int64(0)
        return GroupedSmallMArgs(
            codes=args.codes,
            scales=args.scales,
            global_scale=args.global_scale,
            x=args.x,
            token_scale=zero,
            row_weight=args.row_weight,
            out=args.inner,
            offsets=args.offsets,
            result_scale=zero,
            out_block_scales=zero,
            out_row_scale=zero,
            clear_end=Int32(0),
            experts=args.experts,
            units=args.units,
            token_stride=args.token_stride,
            expert_scales=args.expert_scales,
            cut0=args.cut0,
            cut1=args.cut1,
            cut2=args.cut2,
            scale_rows=args.scale_rows,
            opaque_16=args.opaque_16,
            most_rows=Int32(_ANY_ROWS),
            ready=Int32(0),
            limit=args.limit,
        )

    def _down_args(self, args: ExpertMlpSmallMArgs) -> GroupedSmallMArgs:
        return self._gate_up_args(args)._replace(
            codes=args.down_codes,
            scales=args.down_scales,
            global_scale=args.down_global_scale,
            x=args.inner,
            out=args.out,
            clear_end=args.clear_end,
            units=args.down_units,
            token_stride=args.inner_stride,
            expert_scales=args.down_expert_scales,
            cut0=args.no_cut,
            cut1=args.no_cut,
            cut2=args.no_cut,
            scale_rows=args.down_scale_rows,
        )

    def _shared(self, experts: Int32) -> tuple[SharedMemory, SharedMemory]:
        """The layout of dynamic shared memory for each GEMM: barriers and state are its own."""
        x = Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        sums = x + self.plan.x_bytes
        buffers = sums + self.plan.sums_bytes
        at = buffers + self.plan.epilogue_bytes
        own_bytes = 8 + 16 * SUM_SLOTS + 2 * STATE_BYTES
        tiles = at + 2 * own_bytes
        table = ExpertTable(tiles, tiles + 4 * (MOST_EXPERTS + 1), experts)
        layouts = []
        for number in range(2):
            x_full = at + number * own_bytes
            slots = x_full + 8
            state = State(slots + 16 * SUM_SLOTS)
            layouts.append(SharedMemory(x, sums, buffers, x_full, slots, state, table))
        return layouts[0], layouts[1]

    @cute.jit
    def _init_barriers(self, first: SharedMemory, second: SharedMemory, thread: Int32) -> None:
        """Initialise the mbarriers of both GEMMs."""
        if thread < SUM_SLOTS:
            for number in cutlass.range_constexpr(2):
                shared, gemm = ((first, self.gate_up), (second, self.down))[number]
                if thread == 0:
                    ptx.mbarrier_init(shared.x_full, (1, 32)[number])
                written = shared.slot_written + Uint32(thread * 16)
                ptx.mbarrier_init(written, 32 * gemm.plan.unit_jobs)
                ptx.mbarrier_init(written + 8, 32)
            ptx.fence_mbarrier_init()

    # Ranges of units.

    @cute.jit
    def _take(self, args: ExpertMlpSmallMArgs, zero: Int32) -> Int32:
        """One thread: the number of the CTA's next range.

        The first numbers, as many as CTAs, are ranges of gate_up, as many after them ranges of
        down. Every CTA takes one of the further ones; who takes the last of them stores 0.

        Args:
            args: Arguments of the kernel.
            zero: 0, which the compiler cannot know: it would compute what follows before the main
                loops and keep it, spilled.
        """
        grid, _, _ = cute.arch.grid_dim()
        grid += zero
        tickets = args.counters + (Int64(zero) + MOST_ROWS * COUNTER_BYTES)
        ticket = Int32(ptx.atomic_add(tickets, Int32(1)))
        if ticket == grid * 3 - 1:
            ptx.store_global(tickets, Uint32(0))
        return ticket

    @cute.jit
    def _enter_gate_up(
        self, args: ExpertMlpSmallMArgs, shared: SharedMemory, ticket: Int32
    ) -> None:
        """One thread: write a range of gate_up to the state, if one with units is left.

        Args:
            args: Arguments of the kernel.
            shared: Shared memory of gate_up.
            ticket: The number of a range, of gate_up or a later one.
        """
        grid, _, _ = cute.arch.grid_dim()
        zero = shared.state.load(ZERO)
        grid += zero
        units = total_tiles(shared.table) * args.units
        begin, end = self.gate_up._range_of(units, ticket, grid)
        while begin >= end and ticket < grid:
            ticket = self._take(args, zero)
            begin, end = self.gate_up._range_of(units, ticket, grid)
        if ticket < grid:
            shared.state.store(NEXT_UNIT, begin)
            shared.state.store(END_UNIT, end)
        shared.state.store(_TICKET, ticket)

    @cute.jit
    def _enter_down(
        self, args: ExpertMlpSmallMArgs, shared: SharedMemory, ticket: Int32
    ) -> None:
        """One thread: write a range of down to the state, if one with units is left.

        Args:
            args: Arguments of the kernel.
            shared: Shared memory of down.
            ticket: The number of a range that is not gate_up's.
        """
        grid, _, _ = cute.arch.grid_dim()
        zero = shared.state.load(ZERO)
        grid += zero
        units = total_tiles(shared.table) * args.down_units
        begin, end = self.down._range_of(units, ticket - grid, grid)
        while begin >= end and ticket < grid * 2:
            ticket = self._take(args, zero)
            begin, end = self.down._range_of(units, ticket - grid, grid)
        if ticket < grid * 2:
            shared.state.store(NEXT_UNIT, begin)
            shared.state.store(END_UNIT, end)

    # The order of the GEMMs.

    def _counter(self, args: ExpertMlpSmallMArgs, state: State, lane: Int32) -> Int64:
        """Address of the counter of the group's first segment, or for lane 1 of its second."""
        return args.counters + Int64(state.load(_SEGMENT) + lane) * COUNTER_BYTES

    @cute.jit
    def _wait_for_gate_up(self, args: ExpertMlpSmallMArgs, state: State, lane: Int32) -> None:
        """One warp: wait for all results of SwiGLU of the group's rows.

        Lane 0 waits for the first segment, lane 1 for the second, if there is one. It then counts
        the CTA's units of down among those that have waited, and clears the counter if these are
        all.
        """
        units = self.down.own_units(state, lane)
        if units > 0:
            counter = self._counter(args, state, lane)
            value = Int32(ptx.load_acquire(counter))
            while (value & 0xFFFF) < args.units:
                value = Int32(ptx.load_acquire(counter))
            before = Int32(ptx.atomic_add(counter, units << 16) >> Uint32(16))
            if before + units == args.down_units:
                ptx.store_global(counter, Uint32(0))
        cute.arch.sync_warp()
