"""Grouped NVFP4 GEMM for few rows an expert: bound by reading each used expert's weights once.

``out[r, n] = sum_k x[r, k] w[e, n, k]`` for ``offsets[e] <= r < offsets[e + 1]``, on tensor cores
with the arithmetic of ``small_m_tile``, and its SwiGLU.

Tiling and ownership. A segment is up to ``segment_rows`` rows of X of one expert. A unit is a row
tile (16 rows of the weight); with NVFP4 results it is two row tiles, because two of gate and up
make a block of 16 codes. The units of all segments, one after another, are divided evenly among the
CTAs: a CTA has a range of them, of one segment or few. A job is a K split of one row tile; a CTA's
warps take the jobs of a segment alternately. So with splits a range of, say, 17.5 row tiles keeps
16 warps busy to within a part of a row tile; without them there is nothing to add, and there are
fewer instructions for a weight.

Pipeline. The CTA copies the rows of X of a segment to shared memory, whole. A lane has the weights
of ``stages`` weight tiles in registers, and loads those of the warp's next job during the last
tiles of this one. If the offsets are older than the preceding kernel, the first weights are loaded
before griddepcontrol.wait (``GroupedSmallMArgs.ready``).

Split-K. A warp writes its accumulators to a slot of shared memory. The warp that writes the last of
a unit's adds them, K splits in ascending order, and stores the results; no other warp waits for it.

Where a CTA is (its range, segment and jobs) is kept in shared memory
(``grouped_gemm_small_m_segments``).

Barriers:

* ``x_full``: mbarrier of one arrival and the bytes of a segment's rows; a phase for each segment.
* ``slot_written``, 16 bytes from slot to slot: mbarrier of every lane of the warps that write to
  the slot. The lane whose arrival completes the phase learns so from the arrival.
* ``slot_written + 8``: mbarrier of the 32 lanes that have read the slot. Who needs the slot for its
  next unit waits for it. Both have a phase for each unit of the slot.
* ``sync_threads``: at the start of a segment its state and X are there to be used, at its end all
  warps have read its X.
* ``sync_warp``: orders a warp's words of the state, and its transpose buffer.

Numerics. The sum of a result is in the order of K, whatever warp adds it; the bits of a row depend
on the plan, not on the other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.expert_scheduler import (
    Lines,
    QuantizedLines,
    clear_lines,
    clear_padding,
    clear_quantized_lines,
    end_row,
)
from dsv4.cute.device.quantize import quantize_half_block, swizzled_offset
from dsv4.cute.sm90.grouped_gemm_small_m_plan import (
    ALL_READY,
    GROUPED_SMALL_M_ABI,
    NOTHING_READY,
    OFFSETS_READY,
    SUM_SLOTS,
    GroupedSmallMArgs,
)
from dsv4.cute.sm90.grouped_gemm_small_m_segments import (
    EXPERT,
    FIRST_UNIT,
    JOBS,
    ROW,
    ROWS,
    SWIZZLED_ROW,
    UNITS_DONE,
    X_PARITY,
    ZERO,
    GroupedSmallMSegments,
    SharedMemory,
)
from dsv4.cute.sm90.small_m_tile import (
    PARTIAL_BYTES,
    Fragment,
    GlobalScales,
    Output,
    Words,
)


class SlotBarriers(NamedTuple):
    """mbarriers of the slot of a unit.

    Attributes:
        written: All partial sums of the unit are there.
        read: They have been read.
        parity: Parity of the unit's phase of both.
    """

    written: Uint32
    read: Uint32
    parity: Int32


class GroupedSmallMKernel(GroupedSmallMSegments):
    """The kernel of one configuration."""

    abi = GROUPED_SMALL_M_ABI

    @cute.jit
    def __call__(self, args: GroupedSmallMArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.grouped_gemm`` launches the cubin itself."""
        self._launch(self.kernel(args), stream, preferred_smem_carveout=100)

    @cute.kernel
    def kernel(self, args: GroupedSmallMArgs) -> None:
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared = self._shared(args.experts)
        state = shared.state
        if thread < SUM_SLOTS:
            if thread == 0:
                ptx.mbarrier_init(shared.x_full, 1)
            written = shared.slot_written + Uint32(thread * 16)
            ptx.mbarrier_init(written, 32 * self.plan.unit_jobs)
            ptx.mbarrier_init(written + 8, 32)
            ptx.fence_mbarrier_init()
        if args.ready == NOTHING_READY:
            cute.arch.griddepcontrol_wait()
        if warp == 0:
            self._start(args, shared, cta, grid, lane)
        # The rows of X, too, unless the preceding kernel writes them.
        prefetched = self._begin_segment(args, shared, args.ready != OFFSETS_READY)
        if args.ready == OFFSETS_READY:
            cute.arch.griddepcontrol_wait()
            if warp == 0 and self._has_segment(state):
                self._copy_x(args, shared)
        # Not before: a GEMM that follows with ready offsets relies on this kernel's having waited.
        cute.arch.griddepcontrol_launch_dependents()
        while self._has_segment(state):
            ptx.mbarrier_wait(shared.x_full, state.load(X_PARITY))
            while self._own_job(state) < state.load(JOBS):
                sums, prefetched = self._multiply(args, shared, prefetched)
                of_warp, of_lane = self._reread_lane(state.address + ZERO)
                job = state.load_job(of_warp)
                is_last = Int32(1) > 0  # a dynamic value, as what replaces it
                if cutlass.const_expr(self.plan.unit_jobs > 1):
                    number = state.load(UNITS_DONE) + self._unit_of(job)
                    is_last = self._write_sums(
                        sums, shared, number, self._job_of_unit(job), of_lane
                    )
                if is_last:
                    unit = state.load(FIRST_UNIT) + self._unit_of(job)
                    row = state.load(ROW)
                    expert = state.load(EXPERT)
                    scales = self._scales(args, expert)
                    output = self._output(args, shared, row, of_warp)
                    if cutlass.const_expr(self.plan.quantized_out):
                        self._store_quantized(
                            args, shared, unit, number, expert, Int64(row), scales, output, of_lane
                        )
                    else:
                        if cutlass.const_expr(self.plan.splits > 1):
                            sums = self._reduce(shared, number, of_lane)
                        factors = self._row_factors(scales, unit * 16 + of_lane // 4)
                        self._store(unit, sums, factors, output, of_lane)
                if of_lane == 0:
                    state.store_job(of_warp, job + self.plan.warps)
                cute.arch.sync_warp()
            cute.arch.sync_threads()  # all warps have read the segment's X
            if thread == 0:
                self._end_segment(state)
            # Always with X, but as a dynamic value: one call of the function more is no branch.
            prefetched = self._begin_segment(args, shared, args.ready >= 0)
        self._clear(args, shared, thread, cta, grid)
        if args.ready == ALL_READY:
            cute.arch.griddepcontrol_wait()

    @property
    def tile_bytes(self) -> int:
        """Bytes of a token's results in a row tile; 0 where ``_store_quantized`` finds its own."""
        if self.plan.quantized_out:
            return 0
        return self.tile_outputs * (4 if self.plan.float32_out else 2)

    def _scales(self, args: GroupedSmallMArgs, expert: Int32) -> GlobalScales:
        """An expert's global scales."""
        address = args.global_scale + Int64(expert) * args.expert_scales * 4
        return GlobalScales(address, args.cut0, args.cut1, args.cut2, args.scale_rows)

    def _output(
        self, args: GroupedSmallMArgs, shared: SharedMemory, row: Int32, warp: Int32
    ) -> Output:
        """Return where the results of a segment go that begins at a row of X."""
        return Output(
            buffer=shared.buffers + Uint32(warp * self.plan.buffer_bytes),
            out=args.out + Int64(row) * args.units * self.tile_bytes,
            x=args.x + Int64(row) * args.token_stride * 2,
            token_scale=args.token_scale + Int64(row) * 4,
            row_weight=args.row_weight + Int64(row) * 4,
            tokens=shared.state.load(ROWS),
            row_tiles=args.units,
            token_stride=args.token_stride,
            groups=Int32(1),
            limit=args.limit,
        )

    # The main loop.

    @cute.jit
    def _multiply(
        self, args: GroupedSmallMArgs, shared: SharedMemory, prefetched: list[Words]
    ) -> tuple[list[Fragment], list[Words]]:
        """One warp: the accumulators of its job, and the first weights of its next one.

        The next job's weights are loaded during the last ``stages`` tiles, so that the epilogue
        overlaps their latency. After the segment's last job nothing is loaded.
        """
        state, stages, opaque_16 = shared.state, self.plan.stages, Uint32(args.opaque_16)
        warp, lane = self._reread_lane(state.address + ZERO)
        job = state.load_job(warp)
        weight = self._weight_address(args, self._weight_tile(state, job), lane)
        rows = self._rows(shared.x, lane)
        if cutlass.const_expr(self.plan.splits > 1):
            split = self._job_of_unit(job) % self.plan.splits
            rows = [at + Uint32(split * (self.plan.split_tiles * 128)) for at in rows]
        sums = self._zero_accumulators()
        right = self._load_x(rows, 0)
        for _ in cutlass.range(self.plan.split_tiles // stages - 1, unroll=1):
            weight = weight.advanced(stages)
            for t in cutlass.range_constexpr(stages):
                following = self._load_x(rows, t + 1)
                sums = self._multiply_tile(sums, prefetched[t], right, opaque_16)
                prefetched[t] = self._fetch(weight, t)
                right = following
            rows = [at + Uint32(stages * 128) for at in rows]
        warp, lane = self._reread_lane(state.address + ZERO)
        next_job = state.load_job(warp) + self.plan.warps
        next_weight = self._weight_address(args, self._weight_tile(state, next_job), lane)
        has_next = Int32(next_job < state.load(JOBS))
        for t in cutlass.range_constexpr(stages):
            following = self._load_x(rows, min(t + 1, stages - 1))
            sums = self._multiply_tile(sums, prefetched[t], right, opaque_16)
            prefetched[t] = self._fetch(next_weight, t, has_next)
            right = following
        return self._joined(sums), prefetched

    def _rows(self, x: Uint32, lane: Int32) -> list[Uint32]:
        """Return where the lane's row for ``ldmatrix`` begins, for each tile of 8 rows.

        Rows that shared memory does not hold are replaced by the last one; they give a column of
        sums that nobody stores.
        """
        rows = []
        for n in range(self.plan.token_tiles):
            row = lane % 8 + n * 8
            if n * 8 + 8 > self.plan.segment_rows:
                row = cutlass.min(row, self.plan.segment_rows - 1)
            rows.append(x + Uint32(row * self.plan.x_row_bytes + lane // 8 * 16))
        return rows

    def _load_x(self, rows: list[Uint32], tile: int) -> Words:
        """X fragments of 64 columns: 8 words for each tile of 8 rows."""
        words: Words = []
        for at in rows:
            words += [*ptx.ldmatrix_x4(at, tile * 128), *ptx.ldmatrix_x4(at, tile * 128 + 64)]
        return words

    # Partial sums.

    def _slot_barriers(self, shared: SharedMemory, number: Int32) -> SlotBarriers:
        """mbarriers of the slot of the CTA's ``number``-th unit."""
        written = shared.slot_written + Uint32(number % self.plan.sum_slots * 16)
        return SlotBarriers(written, written + 8, number // self.plan.sum_slots & 1)

    @cute.jit
    def _write_sums(
        self,
        sums: list[Fragment],
        shared: SharedMemory,
        number: Int32,
        job: Int32,
        lane: Int32,
    ) -> Boolean:
        """One warp: write a job's sums to its unit's slot; return whether they are the last.

        Every lane arrives for what it wrote itself. Lanes that arrive together arrive as one, and
        none of them learns that it was the last; so a warp's first lane arrives after the others.

        Args:
            sums: Accumulators.
            shared: Shared memory.
            number: Number of the unit, among the CTA's.
            job: Job of the unit.
            lane: Lane of the warp.
        """
        barriers = self._slot_barriers(shared, number)
        # The slot's sums before these have been read; passes at once in the slot's first phase.
        ptx.mbarrier_wait(barriers.read, barriers.parity ^ 1)
        slot_job = number % self.plan.sum_slots * self.plan.unit_jobs + job
        at = shared.sums + Uint32(slot_job * self.plan.partial_bytes + lane * 16)
        for n in cutlass.range_constexpr(self.plan.token_tiles):
            ptx.store_shared_float4(at + n * PARTIAL_BYTES, sums[n])
        pending = Int32(0)
        if lane != 0:
            ptx.mbarrier_arrive(barriers.written)
        cute.arch.sync_warp()
        if lane == 0:
            pending = Int32(ptx.mbarrier_arrive_pending_count(barriers.written))
        is_last = cute.arch.shuffle_sync(pending, 0) == 1
        if is_last:
            # Passes at once; orders what the other warps wrote.
            ptx.mbarrier_wait(barriers.written, barriers.parity)
        return is_last

    @cute.jit
    def _reduce(self, shared: SharedMemory, number: Int32, lane: Int32) -> list[Fragment]:
        """One warp: add a unit's K splits and free the slot."""
        sums = self._sum_splits(shared, number, Int32(0), lane)
        self._free_slot(shared, number)
        return sums

    @cute.jit
    def _sum_splits(
        self, shared: SharedMemory, number: Int32, first: Int32, lane: Int32
    ) -> list[Fragment]:
        """The sum of the K splits of a row tile, whose first job of the unit is ``first``."""
        slot = number % self.plan.sum_slots
        sums = [[Float32(0.0)] * 4 for _ in range(self.plan.token_tiles)]
        slot_job = slot * self.plan.unit_jobs + first
        at = shared.sums + Uint32(slot_job * self.plan.partial_bytes + lane * 16)
        # In ascending order: the same bits every time.
        for split in cutlass.range_constexpr(self.plan.splits):
            for n in cutlass.range_constexpr(self.plan.token_tiles):
                more = ptx.load_shared_float4(
                    at + (split * self.plan.partial_bytes + n * PARTIAL_BYTES)
                )
                sums[n] = [sums[n][i] + more[i] for i in range(4)]
        return sums

    @cute.jit
    def _free_slot(self, shared: SharedMemory, number: Int32) -> None:
        """Say that this lane has read a unit's slot."""
        ptx.mbarrier_arrive(self._slot_barriers(shared, number).read)

    # Results.

    @cute.jit
    def _store_quantized(
        self,
        args: GroupedSmallMArgs,
        shared: SharedMemory,
        unit: Int32,
        number: Int32,
        expert: Int32,
        row: Int64,
        scales: GlobalScales,
        output: Output,
        lane: Int32,
    ) -> None:
        """One warp: add, transpose, quantize and store the results of a unit's two row tiles.

        Args:
            args: Arguments of the kernel.
            shared: Shared memory.
            unit: Unit of the expert.
            number: Number of the unit, among the CTA's.
            expert: Whose it is.
            row: The segment's first row of X.
            scales: The expert's global scales.
            output: See ``_store``.
            lane: Lane of the warp.
        """
        result_scale = args.result_scale + Int64(expert) * 4
        cute.arch.sync_warp()  # all lanes have read the results of the unit before
        for half in cutlass.range(2, unroll=1):
            sums = self._sum_splits(shared, number, half * self.plan.splits, lane)
            factors = self._row_factors(scales, (unit * 2 + half) * 16 + lane // 4)
            self._transpose(sums, factors, output, lane, half * 8, 16)
        self._free_slot(shared, number)
        cute.arch.sync_warp()  # all lanes have written theirs
        global_scale = ptx.load_global_float(result_scale)
        vector = lane % (16 * self.plan.token_tiles)  # a token has two vectors of 8 results
        words = ptx.load_shared(output.buffer + Uint32(vector * 16), 4)
        codes, scale_byte = quantize_half_block(words, global_scale)
        token = vector // 2
        if token < output.tokens and lane == vector:
            block = (row + token) * output.row_tiles + unit
            ptx.store_global(args.out + block * 8 + vector % 2 * 4, codes)
            if vector % 2 == 0:
                if cutlass.const_expr(self.plan.swizzled_out):
                    swizzled_row = shared.state.load(SWIZZLED_ROW) + token
                    offset = swizzled_offset(swizzled_row, unit, output.row_tiles)
                    ptx.store_global_byte(args.out_block_scales + offset, scale_byte)
                else:
                    ptx.store_global_byte(args.out_block_scales + block, scale_byte)
                if unit == 0:
                    ptx.store_global_float(args.out_row_scale + (row + token) * 4, global_scale)

    def _weighted(self, values: Fragment, output: Output, token: Int32) -> Fragment:
        """SwiGLU outputs of tokens ``token`` and the next, times the tokens' weights."""
        if not self.plan.row_weighted:
            return values
        weighted = []
        for i, value in enumerate(values):
            at = cutlass.min(token + i, output.tokens - 1)
            weighted.append(value * ptx.load_global_float(output.row_weight + Int64(at) * 4))
        return weighted

    @cute.jit
    def _clear(
        self,
        args: GroupedSmallMArgs,
        shared: SharedMemory,
        thread: Int32,
        cta: Int32,
        grid: Int32,
    ) -> None:
        """All threads: clear the rows of no expert, every ``grid``-th by each CTA."""
        table, threads = shared.table, self.plan.threads
        lines = Lines(end_row(table) + cta, args.clear_end, grid)
        if cutlass.const_expr(self.plan.quantized_out):
            columns = args.units * 16
            if cutlass.const_expr(self.plan.swizzled_out):
                # Reread, so that the thread's number is not kept, and spilled, over the main loop.
                warp, lane = self._reread_lane(shared.state.address + ZERO)
                thread = warp * 32 + lane
                clear_padding(
                    args.out_block_scales,
                    table,
                    Int32(cta),
                    grid,
                    args.clear_end,
                    columns,
                    thread,
                    threads,
                )
            linear = None if self.plan.swizzled_out else args.out_block_scales
            out = QuantizedLines(args.out, linear, args.out_row_scale)
            clear_quantized_lines(out, lines, columns, thread, threads)
        else:
            vectors = args.units * (self.tile_bytes // 16)
            clear_lines(args.out, lines, vectors, thread, threads)
