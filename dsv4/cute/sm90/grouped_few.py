"""NVFP4 product of sorted rows with their experts' weights, for few rows an expert.

The arithmetic of ``few`` with the experts of ``grouped``: bound by reading, once, the weights of
every expert that has rows.

* A segment is up to 8 rows of one expert. The row tiles (16 rows of the weight) of all segments,
  one after another, are shared out evenly: every block has a range of them, of one segment or few.
* A block copies a segment's rows of X to shared memory, whole, once. A job is a part of K of one
  row tile; the warps take jobs in turn, and ask for the weights of the next while they multiply.
* A warp leaves its sums in shared memory. The one that finds itself the last of a row tile adds the
  parts in ascending order and stores the results; nobody waits for it. A place is used again when
  its results are out, which whoever wants it checks.

So a range of, say, 17.5 row tiles keeps 16 warps busy to within a part of a row tile.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute import _ptx as ptx
from dsv4.cute.sm90._experts import all_tiles, clear_lines, count_tiles, find_expert, last_row
from dsv4.cute.sm90.few import FewKernel
from dsv4.cute.sm90.grouped_plan import (
    MOST_EXPERTS,
    PLACES,
    ROWS,
    STATE_BYTES,
    GroupedFewPlan,
)

Value = Any
_CODE_BYTES, _SCALE_BYTES, _PARTIAL = 512, 64, 512
# What a block is at, in its shared memory, because registers hold weights: the next row tile of all
# and the end of its range; the segment, the first row tile in it, its jobs, the first row tile of
# the weights of all experts; row tiles done in the segments before; the parity of X's barrier.
_BEGIN, _END, _SEGMENT, _FIRST, _JOBS, _BASE, _DONE, _PARITY = range(0, 32, 4)


class GroupedFewKernel(GroupedFewPlan, FewKernel):
    """The kernel of one configuration."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            *[Int64(0)] * 8,
            *[Int32(1)] * 3,
            Int64(8),
            *[Int32(1)] * 6,
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
        limit: Float32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        self.kernel(
            codes, scales, global_scale, x, token_scale, row_weight, out, offsets, tokens, experts,
            row_tiles, token_stride, scales_each, cut0, cut1, cut2, scale_rows, sixteen, limit,
        ).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[1, 1, 1],
            smem=self.shared_bytes,
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
        limit: Float32,
    ) -> None:
        """See the module; arguments as in ``GroupedKernel.kernel``."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        shared_x, parts, turned, x_full, counts, state, table = self._places(experts)
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            ptx.barrier_init(x_full, 1)
            ptx.fence_barrier_init()
        if thread < 2 * PLACES + STATE_BYTES // 4:
            ptx.store_shared_int(counts + Uint32(thread * 4), Int32(0))
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            count_tiles(offsets, table, ROWS, lane)
        cute.arch.sync_threads()
        if thread == 0:
            total = Int64(all_tiles(table)) * row_tiles
            ptx.store_shared_int(state + _BEGIN, Int32(total * block // grid))
            ptx.store_shared_int(state + _END, Int32(total * (block + 1) // grid))
        cute.arch.sync_threads()
        rows = shared_x + Uint32(lane % 8 * self.x_row_bytes + lane // 8 * 16)
        rules = (cut0, cut1, cut2, scale_rows)
        weight = (codes, scales)
        while ptx.load_shared_int(state + _BEGIN) < ptx.load_shared_int(state + _END):
            if warp == 0:
                here = self._enter(state, table, row_tiles, lane)
                self._ask_rows(x, shared_x, x_full, here, token_stride)
            cute.arch.sync_threads()
            job = warp
            at = self._address(weight, self._job(state, job), lane)
            ahead = [self._fetch(at, t) for t in range(self.depth)]
            ptx.wait(x_full, ptx.load_shared_int(state + _PARITY))
            while job < ptx.load_shared_int(state + _JOBS):
                sums, ahead = self._multiply_part(
                    weight, (state, job, lane), ahead, rows, Uint32(sixteen)
                )
                # Made anew, of what the compiler cannot know to be the same, so that nothing made
                # of it is kept, and spilled, while multiplying.
                again = thread + (sixteen - 16)
                of_lane, of_warp = again % 32, cute.arch.make_warp_uniform(again // 32)
                place = ptx.load_shared_int(state + _DONE) + job // self.parts
                if self._leave(sums[0], parts, counts, place, job % self.parts, of_lane):
                    sums = [self._added(parts, counts, place, of_lane)]
                    owner, row, there = self._find(ptx.load_shared_int(state + _SEGMENT), table)
                    tile = ptx.load_shared_int(state + _FIRST) + job // self.parts
                    of_owner = global_scale + Int64(owner) * scales_each * 4
                    factors = self._factors(of_owner, tile * 16 + of_lane // 4, rules)
                    places = (
                        turned + Uint32(of_warp * self.partial_bytes),
                        token_scale + Int64(row) * 4,
                        out + Int64(row) * row_tiles * self.tile_bytes,
                        x + Int64(row) * token_stride * 2,
                        row_weight + Int64(row) * 4,
                    )
                    sizes = (of_lane, there, row_tiles, token_stride, Int32(1), limit)
                    self._store(tile, sums, factors, places, sizes)
                job += self.warps
            cute.arch.sync_threads()  # all have read the segment's X
            if thread == 0:
                self._proceed(state)
            cute.arch.sync_threads()
        vectors = row_tiles * (self.tile_bytes // 16)
        clear_lines(out, (last_row(table) + block, tokens, grid), vectors, thread, self.threads)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a token's results in a tile of 16 rows."""
        return self.tile_outputs * (4 if self.float32_out else 2)

    def _places(self, experts: Value) -> tuple[Value, ...]:
        """Addresses of X, the parts, the warps' rooms, the barrier of X, counts, state, table."""
        shared_x = Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        parts = shared_x + self.x_bytes
        turned = parts + PLACES * self.parts * _PARTIAL
        x_full = turned + self.turned_bytes
        counts = x_full + 8
        state = counts + 8 * PLACES
        tiles_at = state + STATE_BYTES
        return (
            shared_x,
            parts,
            turned,
            x_full,
            counts,
            state,
            (tiles_at, tiles_at + 4 * (MOST_EXPERTS + 1), experts),
        )

    @cute.jit
    def _find(self, segment: Value, table: Value) -> Value:
        """Expert of a segment, its first row of X, and how many it has."""
        expert, before, _, start, end = find_expert(segment, table)
        start += (segment - before) * ROWS
        return expert, start, cutlass.min(end - start, ROWS)

    @cute.jit
    def _enter(self, state: Value, table: Value, row_tiles: Value, lane: Value) -> Value:
        """A warp writes down the block's next segment; returns its first row and rows of X."""
        begin = ptx.load_shared_int(state + _BEGIN)
        segment = begin // row_tiles
        first = begin - segment * row_tiles
        end = cutlass.min(ptx.load_shared_int(state + _END), (segment + 1) * row_tiles)
        expert, start, count = self._find(segment, table)
        if lane == 0:
            ptx.store_shared_int(state + _SEGMENT, segment)
            ptx.store_shared_int(state + _FIRST, first)
            ptx.store_shared_int(state + _JOBS, (end - begin) * self.parts)
            ptx.store_shared_int(state + _BASE, expert * row_tiles + first)
        return start, count

    @cute.jit
    def _proceed(self, state: Value) -> None:
        """A thread: the segment is done."""
        tiles = ptx.load_shared_int(state + _JOBS) // self.parts
        ptx.store_shared_int(state + _BEGIN, ptx.load_shared_int(state + _BEGIN) + tiles)
        ptx.store_shared_int(state + _DONE, ptx.load_shared_int(state + _DONE) + tiles)
        ptx.store_shared_int(state + _PARITY, ptx.load_shared_int(state + _PARITY) ^ 1)

    def _job(self, state: Value, job: Value) -> Value:
        """Where a job's part of its row tile begins, or the last one's: in tiles of 64 columns."""
        job = cutlass.min(job, ptx.load_shared_int(state + _JOBS) - 1)
        tile = ptx.load_shared_int(state + _BASE) + job // self.parts
        return tile * (self.columns // 64) + job % self.parts * self.steps

    def _address(self, weight: Value, at: Value, lane: Value) -> tuple[Value, Value]:
        """The lane's codes and scales of a tile."""
        codes, scales = weight
        return (
            codes + (Int64(at) * _CODE_BYTES + lane * 16),
            scales + (Int64(at) * _SCALE_BYTES + lane // 4 * 8),
        )

    @cute.jit
    def _ask_rows(
        self, x: Value, shared_x: Value, barrier: Value, rows: Value, token_stride: Value
    ) -> None:
        """A warp: start the copies of a segment's rows of X."""
        start, count = rows
        lane = cute.arch.lane_idx()
        if lane == 0:
            ptx.expect_bytes(barrier, count * (self.columns * 2))
        cute.arch.sync_warp()
        if lane < count:
            to = shared_x + Uint32(lane * self.x_row_bytes)
            source = x + (Int64(start) + lane) * token_stride * 2
            ptx.copy_bulk(to, source, self.columns * 2, barrier)

    @cute.jit
    def _multiply_part(
        self, weight: Value, jobs: Value, ahead: Value, rows: Value, sixteen: Value
    ) -> Value:
        """The sums of a job; what is ahead of the warp's next one."""
        state, job, lane = jobs
        codes, scales = self._address(weight, self._job(state, job), lane)
        rows += Uint32(job % self.parts * (self.steps * 128))
        sums = [[Float32(0.0)] * 4 for _ in range(2)]
        right = self._load_x(rows, 0)
        for _ in cutlass.range(self.steps // self.depth - 1, unroll=1):
            codes += self.depth * _CODE_BYTES
            scales += self.depth * _SCALE_BYTES
            for t in cutlass.range_constexpr(self.depth):
                following = self._load_x(rows, t + 1)
                sums = self._product(sums, ahead[t], right, sixteen)
                ahead[t] = self._fetch((codes, scales), t)
                right = following
            rows += self.depth * 128
        follows = job + self.warps
        next_job = self._address(weight, self._job(state, follows), lane)
        more = Int32(follows < ptx.load_shared_int(state + _JOBS))
        for t in cutlass.range_constexpr(self.depth):
            following = self._load_x(rows, min(t + 1, self.depth - 1))
            sums = self._product(sums, ahead[t], right, sixteen)
            ahead[t] = self._fetch(next_job, t, more)
            right = following
        return [[sums[0][i] + sums[1][i] for i in range(4)]], ahead

    @cute.jit
    def _leave(
        self, sums: Value, parts: Value, counts: Value, place: Value, part: Value, lane: Value
    ) -> Value:
        """Write a part's sums; whether it was the last of its row tile."""
        slot = place % PLACES
        ptx.wait_shared_at_least(counts + Uint32((PLACES + slot) * 4), Uint32(place // PLACES))
        at = parts + Uint32((slot * self.parts + part) * _PARTIAL + lane * 16)
        ptx.store_shared_float4(at, sums)
        cute.arch.sync_warp()
        before = Int32(0)
        if lane == 0:
            before = Int32(ptx.count_shared(counts + Uint32(slot * 4)))
        before = cute.arch.shuffle_sync(before, 0)
        cute.arch.sync_warp()  # what lane 0 has acquired, all have: a shuffle orders no memory
        return before == self.parts - 1

    @cute.jit
    def _added(self, parts: Value, counts: Value, place: Value, lane: Value) -> Value:
        """The sum of the parts, in ascending order; their place is free then."""
        slot = place % PLACES
        total = [Float32(0.0)] * 4
        for part in cutlass.range_constexpr(self.parts):
            at = parts + Uint32(slot * (self.parts * _PARTIAL) + lane * 16) + part * _PARTIAL
            more = ptx.load_shared_float4(at)
            total = [total[i] + more[i] for i in range(4)]
        cute.arch.sync_warp()
        if lane == 0:
            ptx.store_shared_int(counts + Uint32(slot * 4), Int32(0))
            ptx.publish_shared(counts + Uint32((PLACES + slot) * 4), Uint32(place // PLACES + 1))
        return total

    def _weighted(self, values: Value, places: Value, begin: Value, tokens: Value) -> Value:
        """Outputs of SwiGLU for two tokens, times what their tokens weigh."""
        if not self.row_weighted:
            return values
        weighted = []
        for i, value in enumerate(values):
            token = cutlass.min(begin + i, tokens - 1)
            weighted.append(value * ptx.load_global_float(places[4] + Int64(token) * 4))
        return weighted
