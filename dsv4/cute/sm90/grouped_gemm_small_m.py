"""NVFP4 product of sorted rows with their experts' weights, for few rows an expert.

The arithmetic of ``small_m_tile`` with the experts of ``grouped``: bound by reading, once, the
weights of every expert that has rows.

* A segment is up to ``segment_rows`` rows of one expert. The row tiles (16 rows of the weight) of
  all segments, one after another, are shared out evenly: every block has a range of them, of one
  segment or few.
* A block copies a segment's rows of X to shared memory, whole, once. A job is a part of K of one
  row tile; the warps take jobs in turn, and ask for the weights of the next while they multiply.
* Where there are parts, a warp leaves its sums in shared memory. The one that finds itself the last
  of a row tile adds them in ascending order and stores the results; nobody waits for it. A place is
  used again when its parts are read, which whoever wants it checks.
* Results as NVFP4: two row tiles of gate and up make a block of 16 codes. So they are a unit, their
  parts are left like those of one row tile, and the last warp codes the results of both. Below, a
  unit is called a row tile there, and the parts of both its parts.

So with parts a range of, say, 17.5 row tiles keeps 16 warps busy to within a part of a row tile;
without, there is nothing to add, and fewer instructions a weight.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.expert_scheduler import (
    ExpertTable,
    Lines,
    QuantizedLines,
    RowCounts,
    clear_lines,
    clear_padding,
    clear_quantized_lines,
    count_tiles,
    end_row,
    find_expert_by_warp,
    padding_before,
    total_tiles,
)
from dsv4.cute.device.quantize import quantize_half_block, swizzled_offset
from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.sm90.grouped_gemm_plans import PLACES, STATE_BYTES, GroupedSmallMPlan
from dsv4.cute.sm90.small_m_tile import (
    CODE_BYTES,
    PARTIAL_BYTES,
    SCALE_BYTES,
    Fragment,
    GlobalScales,
    Output,
    SmallMTile,
    WeightAddress,
)

Value = Any
# What a block is at, in its shared memory, because registers hold weights: the next row tile of all
# and the end of its range; the segment's first row tile, its jobs, its first row tile of those of
# all experts, its expert, first row of X and rows; row tiles done in the segments before; the
# parity of X's barrier; 0; the warps' jobs; the segment's first row among swizzled scales.
_BEGIN, _END, _FIRST, _JOBS, _BASE, _OWNER, _ROW, _ROWS = range(0, 32, 4)
_DONE, _PARITY, _ZERO, _JOB = range(32, 48, 4)
_PADDED = STATE_BYTES - 4


class GroupedSmallMKernel(SmallMTile):
    """The kernel of one configuration."""

    plan: GroupedSmallMPlan

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            *[Int64(0)] * 11,
            *[Int32(1)] * 3,
            Int64(8),
            *[Int32(1)] * 8,
            Float32(1.0),
            CUstream(0),
            options=options,
        )

    @cute.jit
    def __call__(
        self,
        codes: Int64,
        scales: Int64,
        global_scale: Int64,
        x: Int64,
        token_scale: Int64,
        row_weight: Int64,
        out: Int64,
        offsets: Int64,
        codes_scale: Int64,
        block_scales: Int64,
        row_scale: Int64,
        tokens: Int32,
        experts: Int32,
        row_tiles: Int32,
        token_stride: Int64,
        scales_each: Int32,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        sixteen: Int32,
        most: Int32,
        early: Int32,
        limit: Float32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        self.kernel(
            codes, scales, global_scale, x, token_scale, row_weight, out, offsets, codes_scale,
            block_scales, row_scale, tokens, experts, row_tiles, token_stride, scales_each, cut0,
            cut1, cut2, scale_rows, sixteen, most, early, limit,
        ).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[1, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        codes: Int64,
        scales: Int64,
        global_scale: Int64,
        x: Int64,
        token_scale: Int64,
        row_weight: Int64,
        out: Int64,
        offsets: Int64,
        codes_scale: Int64,
        block_scales: Int64,
        row_scale: Int64,
        tokens: Int32,
        experts: Int32,
        row_tiles: Int32,
        token_stride: Int64,
        scales_each: Int32,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        sixteen: Int32,
        most: Int32,
        early: Int32,
        limit: Float32,
    ) -> None:
        """See the module; arguments as in ``GroupedWgmmaKernel.kernel``.

        ``early`` is 1 where the offsets are older than the kernel in front of this one: the first
        weights are asked for before that one's results, the rows of X, are waited for. It is 2
        where that kernel is a launch for the experts of more than ``most`` rows, which has waited
        for the operands: it is waited for at the end alone.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared_x, parts, turned, x_full, counts, state, table = self._places(experts)
        if thread < PLACES:
            if thread == 0:
                ptx.mbarrier_init(x_full, 1)
            ptx.mbarrier_init(counts + Uint32(thread * 16), 32 * self.plan.shares)
            ptx.mbarrier_init(counts + Uint32(thread * 16 + 8), 32)
            ptx.fence_mbarrier_init()
        if early == 0:
            cute.arch.griddepcontrol_wait()
        if warp == 0:
            self._start(offsets, (state, table), (row_tiles, block, grid), lane, most)
        weight, of_x = (codes, scales), (x, shared_x, x_full, token_stride)
        # The rows of X, too, unless they are the work of the kernel in front.
        ahead = self._begin(weight, of_x, state, table, row_tiles, early != 1)
        if early == 1:
            cute.arch.griddepcontrol_wait()
            if warp == 0 and self._goes_on(state):
                self._ask_rows(of_x, state)
        # Not before: what a product of settled offsets follows has seen them.
        cute.arch.griddepcontrol_launch_dependents()
        while self._goes_on(state):
            ptx.mbarrier_wait(x_full, ptx.load_shared_int(state + _PARITY))
            while self._my_job(state) < ptx.load_shared_int(state + _JOBS):
                sums, ahead = self._multiply_part(weight, state, ahead, shared_x, Uint32(sixteen))
                of_warp, of_lane = self._reread_lane(state + _ZERO)
                job = ptx.load_shared_int(state + Uint32(_JOB + of_warp * 4))
                last = Int32(1) > 0  # a value of the kernel, as what takes its place is
                if cutlass.const_expr(self.plan.shares > 1):
                    place = ptx.load_shared_int(state + _DONE) + self._tile_of(job)
                    last = self._leave(sums, parts, counts, place, self._part_of(job), of_lane)
                if last:
                    tile = ptx.load_shared_int(state + _FIRST) + self._tile_of(job)
                    row = ptx.load_shared_int(state + _ROW)
                    owner = ptx.load_shared_int(state + _OWNER)
                    of_owner = global_scale + Int64(owner) * scales_each * 4
                    output = Output(
                        buffer=turned + Uint32(of_warp * self.plan.buffer_bytes),
                        token_scale=token_scale + Int64(row) * 4,
                        out=out + Int64(row) * row_tiles * self.tile_bytes,
                        x=x + Int64(row) * token_stride * 2,
                        row_weight=row_weight + Int64(row) * 4,
                        tokens=ptx.load_shared_int(state + _ROWS),
                        row_tiles=row_tiles,
                        token_stride=token_stride,
                        groups=Int32(1),
                        limit=limit,
                    )
                    scales_of_owner = GlobalScales(of_owner, cut0, cut1, cut2, scale_rows)
                    if cutlass.const_expr(self.plan.quantized_out):
                        of_blocks: Value = block_scales
                        if cutlass.const_expr(self.plan.swizzled_out):
                            of_blocks = (block_scales, state + _PADDED)
                        results = (out, of_blocks, row_scale, codes_scale + Int64(owner) * 4)
                        self._store_codes(
                            (tile, place, Int64(row)), (parts, counts), results,
                            scales_of_owner, output, of_lane,
                        )  # fmt: skip
                    else:
                        if cutlass.const_expr(self.plan.parts > 1):
                            sums = self._added(parts, counts, place, of_lane)
                        factors = self._row_factors(scales_of_owner, tile * 16 + of_lane // 4)
                        self._store(tile, sums, factors, output, of_lane)
                if of_lane == 0:
                    ptx.store_shared_int(state + Uint32(_JOB + of_warp * 4), job + self.plan.warps)
                cute.arch.sync_warp()
            cute.arch.sync_threads()  # all have read the segment's X
            if thread == 0:
                self._proceed(state)
            ahead = self._begin(weight, of_x, state, table, row_tiles, early >= 0)
        lines = Lines(end_row(table) + block, tokens, grid)
        if cutlass.const_expr(self.plan.quantized_out):
            if cutlass.const_expr(self.plan.swizzled_out):
                # Anew, so that the thread's number is not kept, and spilled, while multiplying.
                of_warp, of_lane = self._reread_lane(state + _ZERO)
                thread, cta = of_warp * 32 + of_lane, Int32(block)
                clear_padding(
                    block_scales, table, cta, grid, tokens, row_tiles * 16, thread,
                    self.plan.threads,
                )  # fmt: skip
            linear = None if self.plan.swizzled_out else block_scales
            cleared = QuantizedLines(out, linear, row_scale)
            clear_quantized_lines(cleared, lines, row_tiles * 16, thread, self.plan.threads)
        else:
            clear_lines(out, lines, row_tiles * (self.tile_bytes // 16), thread, self.plan.threads)
        if early == 2:
            cute.arch.griddepcontrol_wait()

    @property
    def tile_bytes(self) -> int:
        """Bytes of a token's results in a tile of 16 rows; 0 where ``_store_codes`` knows."""
        if self.plan.quantized_out:
            return 0
        return self.tile_outputs * (4 if self.plan.float32_out else 2)

    def _places(self, experts: Value) -> tuple[Value, ...]:
        """Addresses of X, the parts, the warps' rooms, the barrier of X, counts, state, table."""
        shared_x = Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        parts = shared_x + self.plan.x_bytes
        turned = parts + self.plan.sums_bytes
        x_full = turned + self.plan.epilogue_bytes
        counts = x_full + 8
        state = counts + 16 * PLACES
        tiles_at = state + STATE_BYTES
        return (
            shared_x,
            parts,
            turned,
            x_full,
            counts,
            state,
            ExpertTable(tiles_at, tiles_at + 4 * (MOST_EXPERTS + 1), experts),
        )

    def _goes_on(self, state: Value) -> Value:
        """Whether the block's range has a row tile more."""
        return ptx.load_shared_int(state + _BEGIN) < ptx.load_shared_int(state + _END)

    @cute.jit
    def _start(self, offsets: Value, words: Value, sizes: Value, lane: Value, most: Value) -> None:
        """A warp fills the table and writes down the block's range of row tiles."""
        state, table = words
        row_tiles, block, grid = sizes
        if lane < STATE_BYTES // 4:
            ptx.store_shared_int(state + Uint32(lane * 4), Int32(0))
        count_tiles(offsets, table, self.plan.segment_rows, lane, RowCounts(Int32(0), most))
        cute.arch.sync_warp()
        if lane == 0:
            total, blocks = Uint32(total_tiles(table) * row_tiles), Uint32(grid)
            each = total // blocks
            more = total - each * blocks
            for end in cutlass.range_constexpr(2):
                # total * number // blocks, whose product might not fit 32 bits. Were the first so
                # many blocks to have one more each, ranges would reach over more experts' ends.
                number = Uint32(block + end)
                at = Int32(each * number + more * number // blocks)
                ptx.store_shared_int(state + (_BEGIN, _END)[end], at)

    @cute.jit
    def _begin(
        self,
        weight: Value,
        of_x: Value,
        state: Value,
        table: Value,
        row_tiles: Value,
        ask: Value,
    ) -> Value:
        """Enter the block's next segment; what is ahead of each warp's first job there.

        After the last segment nothing is read.
        """
        thread, _, _ = cute.arch.thread_idx()
        more = Int32(0)
        if thread < 32:
            cute.arch.sync_warp()
            more = self._enter(state, table, row_tiles, thread)
            cute.arch.sync_warp()
            if ask and more == 1:
                self._ask_rows(of_x, state)
        cute.arch.sync_threads()
        warp, lane = self._reread_lane(state + _ZERO)
        if lane == 0:
            ptx.store_shared_int(state + Uint32(_JOB + warp * 4), warp)
        cute.arch.sync_warp()
        at = self._address(weight, self._job(state, warp), lane)
        more = Int32(self._goes_on(state))
        return [self._fetch(at, t, more) for t in range(self.plan.stages)]

    @cute.jit
    def _enter(self, state: Value, table: Value, row_tiles: Value, lane: Value) -> Value:
        """A warp writes down the block's next segment; whether there is one."""
        begin, last = ptx.load_shared_int(state + _BEGIN), ptx.load_shared_int(state + _END)
        segment = Int32(Uint32(begin) // Uint32(row_tiles))
        first = begin - segment * row_tiles
        end = cutlass.min(last, (segment + 1) * row_tiles)
        expert, before, start, stop = find_expert_by_warp(segment, table, lane)
        start += (segment - before) * self.plan.segment_rows
        if cutlass.const_expr(self.plan.swizzled_out):
            padded = start + padding_before(table, expert, lane)
            if lane == 0:
                ptx.store_shared_int(state + _PADDED, padded)
        if lane == 0:
            ptx.store_shared_int(state + _FIRST, first)
            ptx.store_shared_int(state + _JOBS, (end - begin) * self.plan.shares)
            ptx.store_shared_int(state + _BASE, expert * row_tiles + first)
            ptx.store_shared_int(state + _OWNER, expert)
            ptx.store_shared_int(state + _ROW, start)
            ptx.store_shared_int(state + _ROWS, cutlass.min(stop - start, self.plan.segment_rows))
        return Int32(begin < last)

    @cute.jit
    def _proceed(self, state: Value) -> None:
        """A thread: the segment is done."""
        tiles = self._tile_of(ptx.load_shared_int(state + _JOBS))
        ptx.store_shared_int(state + _BEGIN, ptx.load_shared_int(state + _BEGIN) + tiles)
        ptx.store_shared_int(state + _DONE, ptx.load_shared_int(state + _DONE) + tiles)
        ptx.store_shared_int(state + _PARITY, ptx.load_shared_int(state + _PARITY) ^ 1)

    def _my_job(self, state: Value) -> Value:
        """The warp's job."""
        warp, _ = self._reread_lane(state + _ZERO)
        return ptx.load_shared_int(state + Uint32(_JOB + warp * 4))

    def _tile_of(self, job: Value) -> Value:
        """The row tile of a job, from the segment's first one; unsigned division is shorter."""
        return job if self.plan.shares == 1 else Int32(Uint32(job) // Uint32(self.plan.shares))

    def _part_of(self, job: Value) -> Value:
        """Which of its row tile's parts a job is."""
        return Int32(0) if self.plan.shares == 1 else Int32(Uint32(job) % Uint32(self.plan.shares))

    def _job(self, state: Value, job: Value) -> Value:
        """Where a job's part of its row tile begins, or the last one's: in tiles of 64 columns."""
        job = cutlass.min(job, ptx.load_shared_int(state + _JOBS) - 1)
        tile = ptx.load_shared_int(state + _BASE) + self._tile_of(job)
        return tile * (self.plan.shares * self.plan.steps) + self._part_of(job) * self.plan.steps

    def _address(self, weight: Value, at: Value, lane: Value) -> WeightAddress:
        """The lane's codes and scales of a tile."""
        codes, scales = weight
        return WeightAddress(
            codes + (Int64(at) * CODE_BYTES + lane * 16),
            scales + (Int64(at) * SCALE_BYTES + lane // 4 * 8),
        )

    @cute.jit
    def _ask_rows(self, of_x: Value, state: Value) -> None:
        """A warp: start the copies of the segment's rows of X."""
        x, shared_x, barrier, token_stride = of_x
        _, lane = self._reread_lane(state + _ZERO)
        start, count = ptx.load_shared_int(state + _ROW), ptx.load_shared_int(state + _ROWS)
        if lane == 0:
            ptx.mbarrier_arrive_expect_tx(barrier, count * (self.plan.columns * 2))
        cute.arch.sync_warp()
        if lane < count:
            to = shared_x + Uint32(lane * self.plan.x_row_bytes)
            source = x + (Int64(start) + lane) * token_stride * 2
            ptx.bulk_copy_to_shared(to, source, self.plan.columns * 2, barrier)

    @cute.jit
    def _multiply_part(
        self, weight: Value, state: Value, ahead: Value, shared_x: Value, sixteen: Value
    ) -> Value:
        """The sums of a job; what is ahead of the warp's next one."""
        warp, lane = self._reread_lane(state + _ZERO)
        job = ptx.load_shared_int(state + Uint32(_JOB + warp * 4))
        codes, scales = self._address(weight, self._job(state, job), lane)
        rows = self._rows(shared_x, lane)
        if cutlass.const_expr(self.plan.parts > 1):
            part = self._part_of(job) % self.plan.parts
            rows = [at + Uint32(part * (self.plan.steps * 128)) for at in rows]
        sums = [[Float32(0.0)] * 4 for _ in range(self.plan.accumulators)]
        right = self._load_x(rows, 0)
        for _ in cutlass.range(self.plan.steps // self.plan.stages - 1, unroll=1):
            codes += self.plan.stages * CODE_BYTES
            scales += self.plan.stages * SCALE_BYTES
            for t in cutlass.range_constexpr(self.plan.stages):
                following = self._load_x(rows, t + 1)
                sums = self._multiply_tile(sums, ahead[t], right, sixteen)
                ahead[t] = self._fetch(WeightAddress(codes, scales), t)
                right = following
            rows = [at + Uint32(self.plan.stages * 128) for at in rows]
        warp, lane = self._reread_lane(state + _ZERO)
        follows = ptx.load_shared_int(state + Uint32(_JOB + warp * 4)) + self.plan.warps
        next_job = self._address(weight, self._job(state, follows), lane)
        more = Int32(follows < ptx.load_shared_int(state + _JOBS))
        for t in cutlass.range_constexpr(self.plan.stages):
            following = self._load_x(rows, min(t + 1, self.plan.stages - 1))
            sums = self._multiply_tile(sums, ahead[t], right, sixteen)
            ahead[t] = self._fetch(next_job, t, more)
            right = following
        return self._joined(sums), ahead

    def _rows(self, shared_x: Value, lane: Value) -> list[Value]:
        """Where the lane's row begins, for each tile of 8 rows; the last one's where there is none.

        A row that is not there gives a column of sums that nobody stores.
        """
        rows = []
        for n in range(self.plan.token_tiles):
            row = lane % 8 + n * 8
            if n * 8 + 8 > self.plan.segment_rows:
                row = cutlass.min(row, self.plan.segment_rows - 1)
            rows.append(shared_x + Uint32(row * self.plan.x_row_bytes + lane // 8 * 16))
        return rows

    def _load_x(self, rows: list[Value], tile: int) -> list[Value]:
        """Right operands of a tile of 64 columns: 8 words per 8 rows."""
        words: list[Value] = []
        for at in rows:
            words += [*ptx.ldmatrix_x4(at, tile * 128), *ptx.ldmatrix_x4(at, tile * 128 + 64)]
        return words

    @cute.jit
    def _leave(
        self, sums: Value, parts: Value, counts: Value, place: Value, part: Value, lane: Value
    ) -> Value:
        """Write a part's sums; whether it was the last of its row tile.

        A place has two barriers. A phase of the first ends when all parts were left; who arrives
        last finds so in what its arrival returns. One of the second ends when they were read, which
        is waited for before a part is left there again. Every lane arrives for what it wrote or
        read itself. Lanes that arrive together arrive as one, and none is told that it was the
        last: so a warp's first lane arrives after the others.
        """
        left, read, parity = self._of_place(counts, place)
        ptx.mbarrier_wait(read, parity ^ 1)
        at = parts + Uint32(
            (place % PLACES * self.plan.shares + part) * self.plan.partial_bytes + lane * 16
        )
        for n in cutlass.range_constexpr(self.plan.token_tiles):
            ptx.store_shared_float4(at + n * PARTIAL_BYTES, sums[n])
        wanted = Int32(0)
        if lane != 0:
            ptx.mbarrier_arrive(left)
        cute.arch.sync_warp()
        if lane == 0:
            wanted = Int32(ptx.mbarrier_arrive_pending_count(left))
        is_last = cute.arch.shuffle_sync(wanted, 0) == 1
        if is_last:
            ptx.mbarrier_wait(left, parity)  # at once; orders what the others left
        return is_last

    def _of_place(self, counts: Value, place: Value) -> tuple[Value, Value, Value]:
        """A place's barriers of parts that were left and that were read, and the phase's parity."""
        left = counts + Uint32(place % PLACES * 16)
        return left, left + 8, place // PLACES & 1

    @cute.jit
    def _added(self, parts: Value, counts: Value, place: Value, lane: Value) -> Value:
        """The sum of the parts; their place is free then."""
        sums = self._sum(parts, place, Int32(0), lane)
        self._free(counts, place)
        return sums

    @cute.jit
    def _sum(self, parts: Value, place: Value, first: Value, lane: Value) -> Value:
        """The sum of ``plan.parts`` parts of a place from one of them on, in ascending order."""
        slot = place % PLACES
        sums = [[Float32(0.0)] * 4 for _ in range(self.plan.token_tiles)]
        at = parts + Uint32((slot * self.plan.shares + first) * self.plan.partial_bytes + lane * 16)
        for part in cutlass.range_constexpr(self.plan.parts):
            for n in cutlass.range_constexpr(self.plan.token_tiles):
                more = ptx.load_shared_float4(
                    at + (part * self.plan.partial_bytes + n * PARTIAL_BYTES)
                )
                sums[n] = [sums[n][i] + more[i] for i in range(4)]
        return sums

    @cute.jit
    def _free(self, counts: Value, place: Value) -> None:
        """The lane has read a place."""
        _, read, _ = self._of_place(counts, place)
        ptx.mbarrier_arrive(read)

    @cute.jit
    def _store_codes(
        self,
        which: Value,
        left: Value,
        results: Value,
        global_scales: GlobalScales,
        output: Output,
        lane: Value,
    ) -> None:
        """Add, turn, code and store what two row tiles gave.

        Args:
            which: The unit, its place, the segment's first row of X.
            left: Addresses of the parts and of their counts.
            results: Addresses of codes, block scales, rows' scales, and the expert's scale. Where
                block scales are swizzled, theirs with that of the first row's place among them.
            global_scales: The expert's.
            output: As in ``_store``.
            lane: Of the warp.
        """
        unit, place, row = which
        parts, counts = left
        codes, block_scales, row_scale, codes_scale = results
        there, units = output.tokens, output.row_tiles
        cute.arch.sync_warp()  # all lanes have read what the room held
        for half in cutlass.range(2, unroll=1):
            sums = self._sum(parts, place, half * self.plan.parts, lane)
            factors = self._row_factors(global_scales, (unit * 2 + half) * 16 + lane // 4)
            self._transpose(sums, factors, output, lane, half * 8, 16)
        self._free(counts, place)
        cute.arch.sync_warp()  # all lanes have written the room
        factor = ptx.load_global_float(codes_scale)
        number = lane % (16 * self.plan.token_tiles)  # a token has two lanes
        words = ptx.load_shared(output.buffer + Uint32(number * 16), 4)
        eight, byte = quantize_half_block(words, factor)
        token = number // 2
        if token < there and lane == number:
            block = (row + token) * units + unit
            ptx.store_global(codes + block * 8 + number % 2 * 4, eight)
            if number % 2 == 0:
                if cutlass.const_expr(self.plan.swizzled_out):
                    of_all, padded = block_scales
                    padded = ptx.load_shared_int(padded) + token
                    ptx.store_global_byte(of_all + swizzled_offset(padded, unit, units), byte)
                else:
                    ptx.store_global_byte(block_scales + block, byte)
                if unit == 0:
                    ptx.store_global_float(row_scale + (row + token) * 4, factor)

    def _weighted(self, values: Fragment, output: Output, token: Int32) -> Fragment:
        """Outputs of SwiGLU for two tokens, times what their tokens weigh."""
        if not self.plan.row_weighted:
            return values
        weighted = []
        for i, value in enumerate(values):
            at = cutlass.min(token + i, output.tokens - 1)
            weighted.append(value * ptx.load_global_float(output.row_weight + Int64(at) * 4))
        return weighted
