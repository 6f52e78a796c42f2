"""The sums of all blocks that share a token, in their order; a block of threads has a head."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import transpose_quad
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.attention_args import MERGE_ABI, MergeArgs
from dsv4.cute.sm90.attention_plan import (
    DIMS,
    MAX_SPLITS,
    MERGE_BATCH,
    PACKED_BYTES,
    ROPE,
    MergePlan,
)

Value = Any
_LOG2E = 1.4426950408889634
_INFINITY = float("inf")


class MergeKernel(PlannedKernel):
    """See the module."""

    abi = MERGE_ABI
    plan: MergePlan

    @cute.jit
    def __call__(self, args: MergeArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.attention`` launches the cubin itself."""
        self.kernel(args).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            stream=stream,
            # Without it the compiler saves registers, and loads wait for loads.
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, args: MergeArgs) -> None:
        """A CTA for every (token, head)."""
        parts, known, sink, out = args.partials, args.statistics, args.sink, args.out
        cos, sin, heads, splits = args.cos, args.sin, args.heads, args.splits
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        token, head = number // heads, number % heads
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        first = Int64(token) * splits * heads + head
        logit = ptx.load_global_float(sink + Int64(head) * 4) * Float32(_LOG2E)
        own, sizes = parts + first * PACKED_BYTES, (heads, splits, thread)
        # On their way while the factors are made.
        packed = self._ask(own, sizes, Int32(0))
        factors, total = self._weigh(known + first * 8, logit, (heads, splits))
        sums = self._add([Float32(0.0)] * 8, packed, factors, Int32(0))
        for begin in cutlass.range(MERGE_BATCH, splits, MERGE_BATCH, unroll=1):
            sums = self._add(sums, self._ask(own, sizes, begin), factors, begin)
        factor = ptx.select_float(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)
        # Pairs of dims, the first of four that are eight dims apart.
        pair = thread // 4 * 16 + thread % 4 - (DIMS - ROPE) // 2
        if (cos != Int64(0)) & (pair >= 0):
            for i in cutlass.range_constexpr(4):
                place = (Int64(token) * (ROPE // 2) + pair + 4 * i) * 4
                c, s = ptx.load_global_float(cos + place), ptx.load_global_float(sin + place)
                sums[2 * i], sums[2 * i + 1] = ptx.inverse_rope_pair(
                    sums[2 * i], sums[2 * i + 1], c, s
                )
        words = [
            ptx.pack_bfloat16x2(sums[2 * i] * factor, sums[2 * i + 1] * factor) for i in range(4)
        ]
        words = transpose_quad(words, thread)
        ptx.store_global4(out + (Int64(number) * DIMS + thread * 8) * 2, words)

    def _ask(self, own: Value, sizes: Value, begin: Value) -> list[Value]:
        """The thread's dims of some parts, the last part's again where there are no more."""
        heads, splits, thread = sizes
        fifth = Int32(DIMS * 2) + (thread // 32 * 4 + thread % 4) * 32 + thread % 32 // 4 * 4
        packed = []
        for i in range(MERGE_BATCH):
            row = own + Int64(cutlass.min(begin + i, splits - 1)) * heads * PACKED_BYTES
            words = ptx.load_streaming(row + thread * 16, 4)
            packed.append([*words, ptx.load_global(row + fifth)])
        return packed

    def _add(self, sums: Value, packed: Value, factors: Value, begin: Value) -> list[Value]:
        """And those, in their order."""
        lane = begin % 32
        here = ptx.select_float(begin < 32, *factors)
        for i, words in enumerate(packed):
            factor = cute.arch.shuffle_sync(here, lane + i)
            part = ptx.unpack_all_accumulators(words)
            sums = [sums[d] + part[d] * factor for d in range(8)]
        return sums

    @cute.jit
    def _weigh(self, known: Value, logit: Value, sizes: Value) -> Value:
        """Factors on the sums of parts, two to a lane of each warp, and the sum of all weights.

        Of two to a lane all are asked for at once, not one after another.
        """
        heads, splits = sizes
        lane = cute.arch.lane_idx()
        found = []
        for h in cutlass.range_constexpr(MAX_SPLITS // 32):
            part = lane + 32 * h
            row = Int64(cutlass.min(part, splits - 1)) * heads
            top, weights = ptx.load_global_float2(known + row * 8)
            found.append((part < splits, top, weights))
        origin = logit
        for _, top, _ in found:
            # The last part's again where there are no more.
            origin = ptx.max_float(origin, top)
        for step in cutlass.range_constexpr(5):
            origin = ptx.max_float(origin, cute.arch.shuffle_sync_bfly(origin, 1 << step))
        origin = ptx.select_float(origin == -Float32(_INFINITY), Float32(0.0), origin)
        factors, total = [], Float32(0.0)
        for there, top, weights in found:
            factor = ptx.select_float(there, ptx.exp2_approx(top - origin), Float32(0.0))
            factors.append(factor)
            total = total + weights * factor
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
        return factors, total + ptx.exp2_approx(logit - origin)
