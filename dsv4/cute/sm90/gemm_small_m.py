"""NVFP4 GEMM for small M (decode), bound by reading the weights once from memory.

``out[m, n] = sum_k x[m, k] w[n, k]`` for 1 to 16 tokens m, with the weight as left operand of
``mma.m16n8k16`` (``small_m_tile`` describes fragments and numerics).

Tiling and ownership
    A warp computes one row tile (16 rows of the weight, all tokens) over its CTA's part of K. A
    CTA's warps have neighbouring row tiles. The ``plan.ctas`` CTAs of a cluster split K: the CTA of
    rank r has ``plan.tiles`` weight tiles of 64 columns from ``r * plan.tiles`` on. So the partial
    sums of a warp meet only those of the same warp of the cluster's other CTAs, and the CTA of rank
    ``row tile % plan.ctas`` (the owner) adds them and stores. Without a cluster CTAs are
    persistent: a warp's row tiles are a grid of warps apart.

Pipeline
    Every lane loads its own 24 bytes of a weight tile straight to registers, ``plan.stages`` tiles
    ahead: no barrier, no shared memory. The first stages are loaded before griddepcontrol.wait
    (programmatic dependent launch), because no kernel writes weights. X, which the preceding kernel
    writes, is copied to shared memory once, after the wait: by ``cp.async.bulk`` of one lane a
    token for up to 8 tokens, by ``cp.async`` of all threads for more. Copies by all threads gain 0
    to 3 % at 16 tokens and cost up to 0.6 us at 1 to 8 (H200). Rows without a token are not
    written; their columns of the accumulators are not stored.

Barriers
    ``x_full`` (two mbarriers): the first completes with the columns of X that the first ``stages``
    tiles multiply, the second with all others. Arrivals: ``x_arrivals``.
    ``partials_full`` (an mbarrier a warp): completes in the owner with the partial sums of all CTAs
    of the cluster (``st.async`` bytes). Its phase is 0: a warp owns at most one row tile.
    Cluster barrier: orders the initialisation of mbarriers before other CTAs' ``st.async``. The
    arrival is relaxed, because a release would wait for the weights that are being loaded. What a
    thread wrote to shared memory is read after the barrier of X, at which it arrives later.

Determinism
    The owner adds the partial sums in the order of ranks, so a token's bits depend on the shape of
    the weight and on ``plan.ctas``, not on the other tokens.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm90.gemm_small_m_input import SharedMemory, SmallMInput, XRows
from dsv4.cute.sm90.gemm_small_m_plan import SMALL_M_ABI, SmallMArgs
from dsv4.cute.sm90.small_m_tile import (
    PARTIAL_BYTES,
    Fragment,
    GlobalScales,
    Output,
    WeightAddress,
    Words,
)


class SmallMKernel(SmallMInput):
    """The kernel with prefetched weights in registers."""

    abi = SMALL_M_ABI

    @cute.jit
    def __call__(self, args: SmallMArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.gemm`` launches the cubin itself."""
        self._launch(
            self.kernel(args),
            stream,
            min_blocks_per_mp=self.plan.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, args: SmallMArgs) -> None:
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        rank = cta % self.plan.ctas
        tile = cta // self.plan.ctas * self.plan.warps + warp
        shared = self._shared(warp)
        stride = grid // self.plan.ctas * self.plan.warps
        # A warp beyond the last row tile loads that one's weights and computes nothing of them.
        weight = self._weight_address(args, cutlass.min(tile, args.row_tiles - 1), rank, lane)
        # Before anything that waits: the latency of these loads overlaps the preceding kernel.
        prefetched = self._prefetch(weight, shared.buffer)
        if lane == 0:
            if cutlass.const_expr(self.plan.ctas > 1):
                ptx.mbarrier_init(shared.partials_full, 1)
            if warp == 0:
                ptx.mbarrier_init(shared.x_full, self.x_arrivals)
                ptx.mbarrier_init(shared.x_full + 8, self.x_arrivals)
                ptx.store_shared_int(shared.zero, Int32(0))
            ptx.fence_mbarrier_init()
        # The next kernel's CTAs may start where SMs have room. They load their weights and wait for
        # this kernel's results by griddepcontrol.wait.
        cute.arch.griddepcontrol_launch_dependents()
        # Kept in shared memory, because the epilogue needs it when registers hold weights.
        group = cta // self.plan.ctas * self.plan.warps // args.group_tiles
        if thread == 0:
            ptx.store_shared_int(shared.zero + 4, group)
        if cutlass.const_expr(self.plan.ctas > 1):
            # Relaxed: a release would wait for the weights in flight. See "Barriers" above.
            cute.arch.cluster_arrive_relaxed()
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(self.plan.token_tiles == 1):  # noqa: SIM102 - one is constant
            if warp == 0:
                self._prefetch_x_to_l2(args, args.x + group * args.group_stride * 2, rank)
        # From here on X is what the preceding kernel wrote.
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.plan.token_tiles == 1):  # noqa: SIM102 - one is constant
            if warp == 0:
                self._bulk_copy_x(args, args.x + group * args.group_stride * 2, shared, rank)
        if cutlass.const_expr(self.plan.ctas > 1):
            # From here on the mbarriers of other CTAs are initialised. The bulk copies of X above
            # need those of this CTA alone.
            cute.arch.cluster_wait()
        if cutlass.const_expr(self.plan.token_tiles > 1):
            self._copy_x(args, args.x + group * args.group_stride * 2, shared, rank, thread)
        self._prefetch_more(weight, prefetched)
        if tile < args.row_tiles:
            ptx.mbarrier_wait(shared.x_full, Int32(0))
        rows = self._rows(shared.x, lane)
        opaque_16 = args.opaque_16
        if cutlass.const_expr(self.plan.ctas == 1):
            # Persistent warps. The row tile is kept in shared memory: registers hold weights.
            if lane == 0:
                ptx.store_shared_int(shared.partials_full, tile)
            cute.arch.sync_warp()
            while ptx.load_shared_int(shared.partials_full) < args.row_tiles:
                sums, prefetched = self._multiply_next(
                    args, prefetched, shared, stride, Uint32(opaque_16)
                )
                tile = ptx.load_shared_int(shared.partials_full)
                of_warp, of_lane = self._reread_lane(shared.zero)
                group = ptx.load_shared_int(shared.zero + 4)
                buffer = shared.x + Uint32(self.plan.x_bytes + of_warp * self.plan.buffer_bytes)
                output = self._output(args, buffer, group)
                factors = self._row_factors(self._scales(args), tile * 16 + of_lane // 4)
                self._store(tile, sums, factors, output, of_lane)
                if of_lane == 0:
                    ptx.store_shared_int(shared.partials_full, tile + stride)
                cute.arch.sync_warp()
        elif tile < args.row_tiles:
            sums = self._multiply(weight, prefetched, XRows(rows, shared.x_full), Uint32(opaque_16))
            # All that follows is computed again from opaque numbers, not kept over the main loop.
            warp, lane = self._reread_lane(shared.zero)
            cta += ptx.load_shared_int(shared.zero)
            rank, group = cta % self.plan.ctas, ptx.load_shared_int(shared.zero + 4)
            tile = cta // self.plan.ctas * self.plan.warps + warp
            shared = self._shared(warp)
            owner = tile % self.plan.ctas
            # Of ``ctas`` neighbouring warps each has another owner, so they can share its slots.
            slot = warp // self.plan.ctas * self.plan.ctas
            partials = shared.partials + Uint32(slot * self.plan.partial_bytes)
            self._send(sums, partials, shared.partials_full, owner, rank, lane)
            if owner == rank:
                # The global scales are loaded while the other CTAs' partial sums are on their way.
                factors = self._row_factors(self._scales(args), tile * 16 + lane // 4)
                sums = self._reduce(partials, shared.partials_full, lane)
                output = self._output(args, shared.buffer, group)
                self._store(tile, sums, factors, output, lane)

    def _weight_address(
        self, args: SmallMArgs, tile: Int32, rank: Int32, lane: Int32
    ) -> WeightAddress:
        """The lane's bytes of the first weight tile of the CTA's part of a row tile."""
        codes, scales = args.codes + lane * 16, args.scales + lane // 4 * 8
        tiles = Int64(tile) * (self.plan.columns // 64) + rank * self.plan.tiles
        return WeightAddress(codes, scales).advanced(tiles)

    def _scales(self, args: SmallMArgs) -> GlobalScales:
        return GlobalScales(args.global_scale, args.cut0, args.cut1, args.cut2, args.scale_rows)

    def _output(self, args: SmallMArgs, buffer: Uint32, group: Int32) -> Output:
        """Return where the results of a CTA's group go."""
        return Output(
            buffer=buffer,
            out=args.out,
            x=args.x + group * args.group_stride * 2,
            token_scale=args.token_scale + group * 4,
            row_weight=Int64(0),
            tokens=args.tokens,
            row_tiles=args.row_tiles,
            token_stride=args.token_stride,
            groups=args.groups,
            limit=args.limit,
        )

    def _prefetch(self, weight: WeightAddress, buffer: Uint32) -> list[Words]:
        """Load the first stages, before griddepcontrol.wait."""
        return [self._fetch(weight, stage) for stage in range(self.plan.stages)]

    def _prefetch_more(self, weight: WeightAddress, prefetched: list[Words]) -> None:
        """Load stages that X should not wait for; the register kernel has none."""

    @cute.jit
    def _multiply(
        self, weight: WeightAddress, prefetched: list[Words], x: XRows, opaque_16: Uint32
    ) -> list[Fragment]:
        """Accumulators of the CTA's part of K of a row tile, for each tile of tokens."""
        sums, right, rows, prefetched = self._multiply_but_last(weight, prefetched, x, opaque_16)
        for t in cutlass.range_constexpr(self.plan.stages):
            following = self._load_x(rows, min(t + 1, self.plan.stages - 1))
            sums = self._multiply_tile(sums, prefetched[t], right, opaque_16)
            right = following
        return self._joined(sums)

    @cute.jit
    def _multiply_next(
        self,
        args: SmallMArgs,
        prefetched: list[Words],
        shared: SharedMemory,
        stride: Int32,
        opaque_16: Uint32,
    ) -> tuple[list[Fragment], list[Words]]:
        """The same for persistent warps; also the prefetched stages of the warp's next row tile.

        The next row tile's weights are loaded during the last ``stages`` tiles of this one, so that
        the epilogue overlaps their latency. After the last row tile nothing is loaded.
        """
        _, lane = self._reread_lane(shared.zero)
        tile = ptx.load_shared_int(shared.partials_full)
        weight = self._weight_address(args, tile, Int32(0), lane)
        x = XRows(self._rows(shared.x, lane), shared.x_full)
        sums, right, rows, prefetched = self._multiply_but_last(weight, prefetched, x, opaque_16)
        _, lane = self._reread_lane(shared.zero)
        tile = ptx.load_shared_int(shared.partials_full) + stride
        has_next = Int32(tile < args.row_tiles)
        tile = cutlass.min(tile, args.row_tiles - 1)
        next_weight = self._weight_address(args, tile, Int32(0), lane)
        for t in cutlass.range_constexpr(self.plan.stages):
            following = self._load_x(rows, min(t + 1, self.plan.stages - 1))
            sums = self._multiply_tile(sums, prefetched[t], right, opaque_16)
            prefetched[t] = self._fetch(next_weight, t, has_next)
            right = following
        return self._joined(sums), prefetched

    @cute.jit
    def _multiply_but_last(
        self, weight: WeightAddress, prefetched: list[Words], x: XRows, opaque_16: Uint32
    ) -> tuple[list[Fragment], Words, Uint32, list[Words]]:
        """Multiply all tiles but the last ``stages``, which are prefetched then.

        Returns:
            Accumulators, X fragments of the next tile, where the next tiles of X begin, and the
            prefetched words.
        """
        rows = x.rows
        sums = self._zero_accumulators()
        right = self._load_x(rows, 0)
        count = self.plan.rounds * self.plan.stages  # tiles of an iteration
        steps, rest = divmod(self.plan.tiles - self.plan.stages, count)
        # One iteration back, so that the address can be advanced before its loads: with the tile as
        # an immediate offset, a lane keeps two pointers, not one for each load.
        weight = weight.advanced(self.plan.stages - count)
        for step in cutlass.range(steps, unroll=1):
            weight = weight.advanced(count)
            sums, right, prefetched = self._iterate(
                sums, prefetched, weight, 0, count, XRows(rows, x.full), right, step, opaque_16
            )
            rows += count * 128
        if cutlass.const_expr(rest > 0):
            step = 1 if steps else 0
            sums, right, prefetched = self._iterate(
                sums, prefetched, weight, count, rest, XRows(rows, x.full), right, step, opaque_16
            )
            rows += rest * 128
        return sums, right, rows, prefetched

    @cute.jit
    def _iterate(
        self,
        sums: list[Fragment],
        prefetched: list[Words],
        weight: WeightAddress,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
        x: XRows,
        right: Words,
        step: Int32,
        opaque_16: Uint32,
    ) -> tuple[list[Fragment], Words, list[Words]]:
        """Multiply the first ``count`` prefetched tiles, and load as many.

        The loads in flight share a scoreboard of the warp: the first MMA of a round waits for all
        of them. With two rounds the next round is loaded right after that wait; 7168 x 16384 took
        18.6 us instead of 19.0 at one token, and matrices of two or three rounds more (H200).

        Args:
            sums: Accumulators.
            ahead: Prefetched words.
            weight: Address that tiles are counted from.
            first: The tile that is loaded first.
            count: How many.
            x: The next tiles of X, and its mbarriers.
            right: X fragments of the first tile.
            step: 0 in the first iteration, which waits for the rest of X.
            opaque_16: See ``SmallMArgs``.
        """
        prefetched, stages = list(prefetched), self.plan.stages
        for t in cutlass.range_constexpr(count):
            if cutlass.const_expr(self.plan.rounds == 2 and t % stages == 0):
                more = min(stages, count - t)
                prefetched += [self._fetch(weight, first + t + i) for i in range(more)]
            if cutlass.const_expr(t == min(stages, count) - 1):  # noqa: SIM102 - one is constant
                if step == 0:
                    ptx.mbarrier_wait(x.full + 8, Int32(0))
            following = self._load_x(x.rows, t + 1)
            sums = self._multiply_tile(sums, prefetched[t], right, opaque_16)
            if cutlass.const_expr(self.plan.rounds == 1):
                # Not before the MMAs: the old words would have to be moved out of the way, 24
                # moves a round.
                prefetched.append(self._fetch(weight, first + t))
            right = following
        return sums, right, prefetched[count:]

    @cute.jit
    def _send(
        self,
        sums: list[Fragment],
        partials: Uint32,
        full: Uint32,
        owner: Int32,
        rank: Int32,
        lane: Int32,
    ) -> None:
        """Send a warp's accumulators to the owner of its row tile, also where that is this CTA.

        ``st.async`` completes bytes on the owner's mbarrier, so that the sender never waits.
        """
        if lane == 0 and owner == rank:
            ptx.mbarrier_arrive_expect_tx(full, self.plan.ctas * self.plan.partial_bytes)
        own = partials + Uint32(rank * self.plan.partial_bytes + lane * 16)
        target, barrier = ptx.map_to_cta(own, owner), ptx.map_to_cta(full, owner)
        for n in cutlass.range_constexpr(self.plan.token_tiles):
            ptx.async_store_remote4(target + n * PARTIAL_BYTES, sums[n], barrier)

    @cute.jit
    def _reduce(self, partials: Uint32, full: Uint32, lane: Int32) -> list[Fragment]:
        """The sum of the cluster's partial sums, in the order of ranks."""
        ptx.mbarrier_wait(full, Int32(0))
        sums = []
        for n in cutlass.range_constexpr(self.plan.token_tiles):
            total = [Float32(0.0)] * 4
            for r in cutlass.range_constexpr(self.plan.ctas):
                offset = r * self.plan.partial_bytes + n * PARTIAL_BYTES
                more = ptx.load_shared_float4(partials + Uint32(lane * 16 + offset))
                total = [total[i] + more[i] for i in range(4)]
            sums.append(total)
        return sums
