"""NVFP4 product for few tokens: bound by reading the weights, once, at the speed of memory.

``out[m, n] = sum_k x[m, k] w[n, k]`` as ``mma.m16n8k16`` with the weights as left operand, so 16
rows of weights and 8 tokens are one instruction.

* A warp computes one row tile (16 rows) over its block's part of K. The blocks of a cluster have
  the parts between them; a block's warps have neighbouring row tiles. So the sums of a warp meet
  only those of the same warp of the other blocks.
* Every lane loads its own 24 bytes of a tile of 64 columns straight into registers, ``depth`` tiles
  ahead: no barrier, no shared memory, two instructions, because the kernel is bound by issuing
  instructions almost as much as by memory. The first of them are asked for before the producer of X
  has ended (programmatic launch: weights must not be what that kernel writes).
* The block's part of X is copied to shared memory once, by bulk copies for up to 8 tokens and by
  all threads for more; rows are padded so that eight of them meet eight groups of banks. Rows of
  tokens that do not exist hold what was there: a column of the product depends on its own token
  alone.
* The block whose turn a row tile is adds the parts in ascending order, applies the global scale and
  stores. The bits of a token depend on the shape of the weight and on ``blocks``, not on the other
  tokens.

A result that is infinite is looked at again: if the token's input held an infinity, it is NaN.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.dequant import fragment, scales_to_bfloat16
from dsv4.cute.device.epilogue import activated, output_row
from dsv4.cute.sm90.few_plan import FewPlan

Value = Any
_CODE_BYTES, _SCALE_BYTES = 512, 64
_PARTIAL = 512


class FewKernel(FewPlan):
    """The kernel of one configuration."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            *[Int64(0)] * 6,
            *[Int32(1)] * 3,
            *[Int64(0)] * 2,
            *[Int32(1)] * 6,
            Float32(1.0),
            Int32(1),
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
        out: Int64,
        tokens: Int32,
        row_tiles: Int32,
        group_tiles: Int32,
        token_stride: Int64,
        group_stride: Int64,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        groups: Int32,
        sixteen: Int32,
        limit: Float32,
        clusters: Int32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        self.kernel(
            codes,
            scales,
            global_scale,
            x,
            token_scale,
            out,
            tokens,
            row_tiles,
            group_tiles,
            token_stride,
            group_stride,
            cut0,
            cut1,
            cut2,
            scale_rows,
            groups,
            sixteen,
            limit,
        ).launch(
            grid=[clusters * self.blocks, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.blocks, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        codes: Int64,
        scales: Int64,
        global_scale: Int64,
        x: Int64,
        token_scale: Int64,
        out: Int64,
        tokens: Int32,
        row_tiles: Int32,
        group_tiles: Int32,
        token_stride: Int64,
        group_stride: Int64,
        cut0: Int32,
        cut1: Int32,
        cut2: Int32,
        scale_rows: Int32,
        groups: Int32,
        sixteen: Int32,
        limit: Float32,
    ) -> None:
        """See the module.

        Args:
            codes: Address of the packed codes.
            scales: Address of the packed scales.
            global_scale: Address of float32 global scales.
            x: Address of bfloat16 ``[tokens, groups, K]``.
            token_scale: Address of float32 ``[tokens, groups]``, where ``row_scaled``.
            out: Address of ``[tokens, rows]``.
            tokens: 1 to 8 ``token_tiles``.
            row_tiles: Rows of the weight / 16.
            group_tiles: Row tiles that share an input; a multiple of ``warps``.
            token_stride: Elements between tokens of x.
            group_stride: Elements between groups of x.
            cut0: First row of the second segment; ``cut1``, ``cut2`` of the third and fourth.
            cut1: See ``cut0``.
            cut2: See ``cut0``.
            scale_rows: 1 where every row has its own global scale, else 0.
            groups: Inputs of every token.
            sixteen: 16, of which the compiler must not know.
            limit: The clamp's bound, where ``swiglu``.
        """
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank = block % self.blocks
        tile = block // self.blocks * self.warps + warp
        shared_x, parts, turned, x_full, arrived = self._shared(warp)
        stride = grid // self.blocks * self.warps
        first = cutlass.min(tile, row_tiles - 1)
        at = self._place(codes + lane * 16, scales + lane // 4 * 8, first, rank)
        ahead = self._begin(at, turned)
        zero = x_full - 8
        if lane == 0:
            if cutlass.const_expr(self.blocks > 1):
                ptx.mbarrier_init(arrived, 1)
            if warp == 0:
                ptx.mbarrier_init(x_full, self.copying)
                ptx.mbarrier_init(x_full + 8, self.copying)
                ptx.store_shared_int(zero, Int32(0))
            ptx.fence_mbarrier_init()
        cute.arch.griddepcontrol_launch_dependents()
        group = block // self.blocks * self.warps // group_tiles
        if thread == 0:
            ptx.store_shared_int(zero + 4, group)
        if cutlass.const_expr(self.blocks > 1):
            # Not a release, which would wait for the weights. What a thread wrote to shared memory
            # is read after the barrier of X, at which the same thread arrives later.
            cute.arch.cluster_arrive_relaxed()
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(self.token_tiles == 1):  # noqa: SIM102 - one is constant
            if warp == 0:
                self._prefetch_x(x + group * group_stride * 2, tokens, token_stride, rank)
        cute.arch.griddepcontrol_wait()
        x_room = (shared_x, x_full)
        if cutlass.const_expr(self.token_tiles == 1):  # noqa: SIM102 - one is constant
            if warp == 0:
                self._ask_x(x + group * group_stride * 2, x_room, tokens, token_stride, rank)
        if cutlass.const_expr(self.blocks > 1):
            cute.arch.cluster_wait()
        if cutlass.const_expr(self.token_tiles > 1):
            self._copy_x(x + group * group_stride * 2, x_room, tokens, token_stride, rank, thread)
        self._go_on(at, ahead)
        if tile < row_tiles:
            ptx.mbarrier_wait(x_full, Int32(0))
        rows = self._rows(shared_x, lane)
        rules = (cut0, cut1, cut2, scale_rows)
        if cutlass.const_expr(self.blocks == 1):
            if lane == 0:
                ptx.store_shared_int(arrived, tile)
            cute.arch.sync_warp()
            state = (arrived, zero, stride, row_tiles)
            while ptx.load_shared_int(arrived) < row_tiles:
                sums, ahead = self._multiply_next(
                    (codes, scales), ahead, (shared_x, x_full), state, Uint32(sixteen)
                )
                tile = ptx.load_shared_int(arrived)
                of_warp, of_lane = self._again(zero)
                group = ptx.load_shared_int(zero + 4)
                places = (
                    shared_x + Uint32(self.x_bytes + of_warp * self.room_bytes),
                    token_scale + group * 4,
                    out,
                    x + group * group_stride * 2,
                )
                factors = self._factors(global_scale, tile * 16 + of_lane // 4, rules)
                sizes = (of_lane, tokens, row_tiles, token_stride, groups, limit)
                self._store(tile, sums, factors, places, sizes)
                if of_lane == 0:
                    ptx.store_shared_int(arrived, tile + stride)
                cute.arch.sync_warp()
        elif tile < row_tiles:
            sums = self._multiply(at, ahead, (rows, x_full), Uint32(sixteen))
            warp, lane = self._again(zero)
            block += ptx.load_shared_int(zero)
            rank, group = block % self.blocks, ptx.load_shared_int(zero + 4)
            tile = block // self.blocks * self.warps + warp
            _, parts, turned, _, arrived = self._shared(warp)
            owner = tile % self.blocks
            place = parts + Uint32(warp // self.blocks * self.blocks * self.partial_bytes)
            self._send(sums, place, arrived, owner, rank, lane)
            if owner == rank:
                factors = self._factors(global_scale, tile * 16 + lane // 4, rules)
                sums = self._collect(place, arrived, lane)
                places = (turned, token_scale + group * 4, out, x + group * group_stride * 2)
                sizes = (lane, tokens, row_tiles, token_stride, groups, limit)
                self._store(tile, sums, factors, places, sizes)

    def _place(self, codes: Value, scales: Value, tile: Value, rank: Value) -> Value:
        """Addresses of codes and scales of the block's part of a row tile."""
        index = Int64(tile) * (self.columns // 64) + rank * self.tiles
        return codes + index * _CODE_BYTES, scales + index * _SCALE_BYTES

    def _rows(self, shared_x: Value, lane: Value) -> Value:
        """Where the lane's row of the first right operands begins."""
        return shared_x + Uint32(lane % 8 * self.x_row_bytes + lane // 8 * 16)

    def _shared(self, warp: Value) -> tuple[Value, ...]:
        """Addresses of X, the parts, the warp's room, the two barriers of X, that of the parts.

        Before the barriers is a word that is 0.
        """
        shared_x = Uint32(cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint())
        parts = shared_x + self.x_bytes
        turned = parts + self.parts_bytes
        barriers = turned + self.turned_bytes + 8
        return (
            shared_x,
            parts,
            turned + Uint32(warp * self.room_bytes),
            barriers,
            barriers + Uint32(warp * 8 + 16),
        )

    def _begin(self, at: Value, room: Value) -> Value:
        """Ask for the first tiles."""
        return [self._fetch(at, t) for t in range(self.depth)]

    def _go_on(self, at: Value, ahead: Value) -> None:
        """Ask for more tiles, after X."""

    def _fetch(self, at: Value, tile: int, wanted: Value | None = None) -> list[Value]:
        """The lane's 4 words of codes and 2 of scales of a tile; nothing where not ``wanted``."""
        codes, scales = at
        return [
            *ptx.load_global_nc(codes, 4, wanted, tile * _CODE_BYTES),
            *ptx.load_global_nc(scales, 2, wanted, tile * _SCALE_BYTES),
        ]

    @cute.jit
    def _prefetch_x(self, x: Value, tokens: Value, token_stride: Value, rank: Value) -> None:
        """Have the block's part of X in the level-2 cache, whatever is still written to it."""
        lane = cute.arch.lane_idx()
        if lane < tokens:
            source = x + (lane * token_stride + rank * (self.tiles * 64)) * 2
            ptx.bulk_prefetch_l2(source, self.tiles * 128)

    @property
    def copying(self) -> int:
        """Arrivals at each barrier of X: of one lane, or of every thread that copies."""
        return 1 if self.token_tiles == 1 else self.threads

    @cute.jit
    def _ask_x(
        self, x: Int64, place: Value, tokens: Int32, token_stride: Int64, rank: Int32
    ) -> None:
        """Start the copies of the block's part of X: first what the first round multiplies.

        X is what a block waits for; the weights of that round are there by then.
        """
        shared_x, barrier = place
        lane = cute.arch.lane_idx()
        first, all_ = self.depth * 128, self.tiles * 128
        if lane == 0:
            ptx.mbarrier_arrive_expect_tx(barrier, tokens * first)
            ptx.mbarrier_arrive_expect_tx(barrier + 8, tokens * (all_ - first))
        cute.arch.sync_warp()
        if lane < tokens:
            to = shared_x + Uint32(lane * self.x_row_bytes)
            source = x + (lane * token_stride + rank * (self.tiles * 64)) * 2
            ptx.bulk_copy_to_shared(to, source, first, barrier)
            if cutlass.const_expr(all_ > first):
                ptx.bulk_copy_to_shared(to + first, source + first, all_ - first, barrier + 8)

    @cute.jit
    def _copy_x(
        self,
        x: Int64,
        place: Value,
        tokens: Int32,
        token_stride: Int64,
        rank: Int32,
        thread: Int32,
    ) -> None:
        """The same by all threads, 16 bytes at a time: faster for more than 8 tokens."""
        shared_x, barrier = place
        source = x + rank * (self.tiles * 128)
        first, all_ = self.depth * 8, self.tiles * 8
        for half, (begin, end) in enumerate(((0, first), (first, all_))):
            count = end - begin
            if cutlass.const_expr(count > 0):
                for number in cutlass.range(thread, tokens * count, self.threads, unroll=1):
                    token, column = number // count, number % count + begin
                    to = shared_x + Uint32(token * self.x_row_bytes + column * 16)
                    ptx.async_copy16(to, source + Int64(token) * token_stride * 2 + column * 16)
            ptx.mbarrier_arrive_on_async_copies(barrier + half * 8)

    def _again(self, zero: Value) -> tuple[Value, Value]:
        """Warp and lane, of what the compiler cannot know to be the same as before.

        So nothing made of them is kept, and spilled, while multiplying. ``zero`` is the address of
        a word of shared memory that is 0.
        """
        thread, _, _ = cute.arch.thread_idx()
        again = thread + ptx.load_shared_int(zero)
        return cute.arch.make_warp_uniform((again >> 5) & 31), again & 31

    @cute.jit
    def _multiply(self, at: Value, ahead: Value, x: Value, sixteen: Value) -> Value:
        """The warp's sums, 16 rows by 8 tokens per tile of tokens."""
        sums, right, rows, ahead = self._multiply_most(at, ahead, x, sixteen)
        for t in cutlass.range_constexpr(self.depth):
            following = self._load_x(rows, min(t + 1, self.depth - 1))
            sums = self._product(sums, ahead[t], right, sixteen)
            right = following
        return self._joined(sums)

    @cute.jit
    def _multiply_next(
        self, weight: Value, ahead: Value, x: Value, state: Value, sixteen: Value
    ) -> Value:
        """The same of a row tile that others follow; what is ahead of the next one."""
        codes, scales = weight
        current, zero, stride, row_tiles = state
        shared_x, x_full = x
        _, lane = self._again(zero)
        tile = ptx.load_shared_int(current)
        at = self._place(codes + lane * 16, scales + lane // 4 * 8, tile, Int32(0))
        of_x = (self._rows(shared_x, lane), x_full)
        sums, right, rows, ahead = self._multiply_most(at, ahead, of_x, sixteen)
        _, lane = self._again(zero)
        tile = ptx.load_shared_int(current) + stride
        more = Int32(tile < row_tiles)
        tile = cutlass.min(tile, row_tiles - 1)
        then = self._place(codes + lane * 16, scales + lane // 4 * 8, tile, Int32(0))
        for t in cutlass.range_constexpr(self.depth):
            following = self._load_x(rows, min(t + 1, self.depth - 1))
            sums = self._product(sums, ahead[t], right, sixteen)
            ahead[t] = self._fetch(then, t, more)
            right = following
        return self._joined(sums), ahead

    @cute.jit
    def _multiply_most(self, at: Value, ahead: Value, x: Value, sixteen: Value) -> Value:
        """Sums of all tiles but the last ``depth``, which are ahead then; X's next ones."""
        codes, scales = at
        rows, x_full = x
        sums = [[Float32(0.0)] * 4 for _ in range(self.chains)]
        right = self._load_x(rows, 0)
        each = self.rounds * self.depth
        steps, rest = divmod(self.tiles - self.depth, each)
        codes += (self.depth - each) * _CODE_BYTES
        scales += (self.depth - each) * _SCALE_BYTES
        for step in cutlass.range(steps, unroll=1):
            codes += each * _CODE_BYTES
            scales += each * _SCALE_BYTES
            sums, right, ahead = self._multiply_some(
                (sums, ahead), (codes, scales), (0, each), (rows, right, x_full, step), sixteen
            )
            rows += each * 128
        if cutlass.const_expr(rest > 0):
            step = 1 if steps else 0
            sums, right, ahead = self._multiply_some(
                (sums, ahead), (codes, scales), (each, rest), (rows, right, x_full, step), sixteen
            )
            rows += rest * 128
        return sums, right, rows, ahead

    @cute.jit
    def _multiply_some(
        self, state: Value, at: Value, place: Value, x: Value, sixteen: Value
    ) -> Value:
        """Add the first tiles of those ahead, and ask for as many.

        The loads under way share a scoreboard of the warp: the first product of a round waits for
        all of them. With two rounds a step the next round is asked for right after that.

        Args:
            state: The sums and what is ahead.
            at: Addresses of codes and scales.
            place: The tile there that is asked for first, and how many.
            x: X's next rows and right operands, its barriers, and whether this is not (0) the first
                step, in which the rest of X is waited for.
            sixteen: 16, of which the compiler must not know.
        """
        sums, ahead = state
        first, count = place
        rows, right, x_full, step = x
        ahead = list(ahead)
        for t in cutlass.range_constexpr(count):
            if cutlass.const_expr(self.rounds == 2 and t % self.depth == 0):
                more = min(self.depth, count - t)
                ahead += [self._fetch(at, first + t + i) for i in range(more)]
            if cutlass.const_expr(t == min(self.depth, count) - 1):  # noqa: SIM102 - constant
                if step == 0:
                    ptx.mbarrier_wait(x_full + 8, Int32(0))
            following = self._load_x(rows, t + 1)
            sums = self._product(sums, ahead[t], right, sixteen)
            if cutlass.const_expr(self.rounds == 1):
                # Not before the product: the old words would have to be moved out of the way.
                ahead.append(self._fetch(at, first + t))
            right = following
        return sums, right, ahead[count:]

    def _joined(self, sums: Value) -> Value:
        """Sums of all steps of k, for each tile of tokens."""
        if self.token_tiles > 1:
            return sums
        return [[sums[0][i] + sums[1][i] for i in range(4)]]

    def _load_x(self, rows: Value, tile: int) -> list[Value]:
        """Right operands of a tile of 64 columns: 8 words per 8 tokens."""
        words: list[Value] = []
        for n in range(self.token_tiles):
            at = n * 8 * self.x_row_bytes + tile * 128
            words += [*ptx.ldmatrix_x4(rows, at), *ptx.ldmatrix_x4(rows, at + 64)]
        return words

    def _product(
        self, sums: list[list[Value]], left: list[Value], right: list[Value], sixteen: Value
    ) -> list[list[Value]]:
        """Add a tile; even and odd steps of k have sums of their own where there is one tile."""
        sums = [list(s) for s in sums]
        for j in range(4):
            weights = fragment(left[j], scales_to_bfloat16((left[4], left[5]), j, sixteen))
            for n in range(self.token_tiles):
                at, chain = 8 * n + 2 * j, (n + j) % len(sums) if self.token_tiles == 1 else n
                sums[chain] = ptx.mma_m16n8k16_bf16(sums[chain], weights, right[at : at + 2])
        return sums

    @cute.jit
    def _send(
        self, sums: Value, place: Value, arrived: Value, owner: Value, rank: Value, lane: Value
    ) -> None:
        """Write the warp's sums to the block whose turn the row tile is."""
        if lane == 0 and owner == rank:
            ptx.mbarrier_arrive_expect_tx(arrived, self.blocks * self.partial_bytes)
        mine = place + Uint32(rank * self.partial_bytes + lane * 16)
        target, barrier = ptx.map_to_cta(mine, owner), ptx.map_to_cta(arrived, owner)
        for n in cutlass.range_constexpr(self.token_tiles):
            ptx.async_store_remote4(target + n * _PARTIAL, sums[n], barrier)

    @cute.jit
    def _collect(self, place: Value, arrived: Value, lane: Value) -> Value:
        """The sum of the blocks' parts, in ascending order."""
        ptx.mbarrier_wait(arrived, Int32(0))
        sums = []
        for n in cutlass.range_constexpr(self.token_tiles):
            total = [Float32(0.0)] * 4
            for r in cutlass.range_constexpr(self.blocks):
                at = place + Uint32(lane * 16 + (r * self.partial_bytes + n * _PARTIAL))
                more = ptx.load_shared_float4(at)
                total = [total[i] + more[i] for i in range(4)]
            sums.append(total)
        return sums

    @cute.jit
    def _factors(self, global_scale: Value, row: Value, rules: Value) -> Value:
        """Global scale times 2^7 of the lane's two rows."""
        cut0, cut1, cut2, scale_rows = rules
        factors = []
        for h in cutlass.range_constexpr(2):
            at = row + h * 8
            index = Int32(at >= cut0) + Int32(at >= cut1) + Int32(at >= cut2)
            if scale_rows == 1:
                index = at
            factors.append(ptx.load_global_float(global_scale + Int64(index) * 4) * Float32(128.0))
        return factors

    def _weighted(self, values: Value, places: Value, begin: Value, tokens: Value) -> Value:
        """Outputs of SwiGLU for two tokens, times what their tokens weigh."""
        return values

    @property
    def tile_outputs(self) -> int:
        """Results of a token in a tile of 16 rows."""
        return 8 if self.swiglu else 16

    @cute.jit
    def _store(self, tile: Value, sums: Value, factors: Value, places: Value, sizes: Value) -> None:
        """Scale, turn in shared memory so that a token's rows are whole sectors, and store."""
        room, _, out, *_ = places
        lane, tokens, row_tiles, *_ = sizes
        cute.arch.sync_warp()  # all lanes have read what the room held
        self._turn(sums, factors, places, sizes, (0, self.tile_outputs))
        cute.arch.sync_warp()
        width = 4 if self.float32_out else 2
        vectors = self.tile_outputs * width // 16  # of a token
        for i in cutlass.range_constexpr(max(1, self.token_tiles * 8 * vectors // 32)):
            number = i * 32 + lane
            token, vector = number // vectors, number % vectors
            if token < tokens and token < self.token_tiles * 8:
                line = (Int64(token) * row_tiles + tile) * (self.tile_outputs * width)
                words = ptx.load_shared(room + Uint32(number * 16), 4)
                ptx.store_global4(out + line + vector * 16, words)

    @cute.jit
    def _turn(
        self, sums: Value, factors: Value, places: Value, sizes: Value, columns: Value
    ) -> None:
        """Results of a row tile into the warp's room, from a column on, of lines of so many."""
        room, token_scale, _, x, *_ = places
        lane, tokens, _, token_stride, groups, limit = sizes
        first, across = columns
        width = 4 if self.float32_out else 2
        for n in cutlass.range_constexpr(self.token_tiles):
            values = []
            for i in cutlass.range_constexpr(4):
                place = n * 8 + lane % 4 * 2 + i % 2
                token = cutlass.min(place, tokens - 1)
                factor = factors[i // 2]
                if cutlass.const_expr(self.row_scaled):
                    factor = factor * ptx.load_global_float(token_scale + token * groups * 4)
                value = sums[n][i] * factor
                # What lay in shared memory where there is no token may be infinite, too.
                if place < tokens and ptx.abs_float(value) == Float32(float("inf")):
                    value = self._unless_infinite(value, x + token * token_stride * 2)
                values.append(value)
            if cutlass.const_expr(self.swiglu):
                values = activated(values, limit, lane)
                values = self._weighted(values, places, n * 8 + lane % 4 * 2, tokens)
            for i in cutlass.range_constexpr(len(values)):
                token = n * 8 + lane % 4 * 2 + i % 2
                row = output_row(lane) if self.swiglu else lane // 4 + i // 2 * 8
                if token < tokens:
                    at = room + Uint32((token * across + first + row) * width)
                    if cutlass.const_expr(self.float32_out):
                        ptx.store_shared_float(at, values[i])
                    else:
                        ptx.store_shared_bfloat16(at, values[i])

    @cute.jit
    def _unless_infinite(self, value: Float32, start: Int64) -> Float32:
        """NaN if the token's input holds an infinity or a NaN, else the value."""
        result = value
        for i in cutlass.range(self.columns // 2, unroll=1):
            word = ptx.load_global(start + i * 4)
            low, high = word & Uint32(0x7F80), word & Uint32(0x7F800000)
            if low == Uint32(0x7F80) or high == Uint32(0x7F800000):
                result = Float32(float("nan"))
        return result
