"""Merge of KV splits: add the partial sums that ``attention`` stored, normalize and store.

Tiling and ownership
    A CTA has a (token, head); a thread eight dims of it: of 32 neighbouring dims the pairs of four
    groups of 8 that one lane of an accumulator has (``attention_epilogue``), as they were packed.
    Every warp computes the factors of all splits: a lane has those of splits ``lane`` and
    ``lane + 32``, and ``shuffle`` hands them out.

Pipeline
    Partial sums are loaded ``MERGE_BATCH`` splits at a time, the first batch before the factors are
    known. Loaded one after another, up to 64 splits took as long as the attention kernel.

Barriers
    None: threads exchange only within warps. All loads follow griddepcontrol.wait, because the
    preceding kernel writes what is loaded.

Determinism
    Splits are added in their order, each as unpacked times its factor; the sum is normalized by the
    sum of all weights, the sink's included, and rounded to bfloat16 once.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

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
from dsv4.cute.sm90.attention_softmax import LOG2E, finite_origin, reciprocal_or_zero

_OFFSET_PAIRS = (DIMS - ROPE) // 2  # pairs of dims before the rotary ones


class MergeKernel(PlannedKernel):
    """See the module."""

    abi = MERGE_ABI
    plan: MergePlan

    @cute.jit
    def __call__(self, args: MergeArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.attention`` launches the cubin itself."""
        self._launch(self.kernel(args), stream)

    @cute.kernel
    def kernel(self, args: MergeArgs) -> None:
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        token, head = number // args.heads, number % args.heads
        # CTAs of the next kernel may start; they wait by griddepcontrol.wait for this one.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        first = Int64(token) * args.splits * args.heads + head
        sink = ptx.load_global_float(args.sink + Int64(head) * 4) * Float32(LOG2E)
        partials = args.partials + first * PACKED_BYTES
        # In flight while the factors are computed.
        packed = self._load(args, partials, thread, Int32(0))
        factors, total = self._weigh(args, args.statistics + first * 8, sink)
        sums = self._add([Float32(0.0)] * 8, packed, factors, Int32(0))
        for begin in cutlass.range(MERGE_BATCH, args.splits, MERGE_BATCH, unroll=1):
            split = Int32(begin)
            packed = self._load(args, partials, thread, split)
            sums = self._add(sums, packed, factors, split)
        factor = reciprocal_or_zero(total)
        # The thread's four pairs of dims are eight dims apart; the first, among the rotary ones:
        pair = thread // 4 * 16 + thread % 4 - _OFFSET_PAIRS
        if (args.cos != Int64(0)) & (pair >= 0):
            for i in cutlass.range_constexpr(4):
                offset = (Int64(token) * (ROPE // 2) + pair + 4 * i) * 4
                c = ptx.load_global_float(args.cos + offset)
                s = ptx.load_global_float(args.sin + offset)
                sums[2 * i], sums[2 * i + 1] = ptx.inverse_rope_pair(
                    sums[2 * i], sums[2 * i + 1], c, s
                )
        words = [
            ptx.pack_bfloat16x2(sums[2 * i] * factor, sums[2 * i + 1] * factor) for i in range(4)
        ]
        # Four lanes have 32 dims: transposed, each stores 16 neighbouring bytes.
        words = transpose_quad(words, thread)
        ptx.store_global4(args.out + (Int64(number) * DIMS + thread * 8) * 2, words)

    def _load(
        self, args: MergeArgs, partials: Int64, thread: Int32, begin: Int32
    ) -> list[list[Uint32]]:
        """Load the thread's packed sums of a batch of splits from ``begin`` on.

        Beyond the last split that one's are loaded again, for a factor of 0.
        """
        # A thread's first four words, 16 bytes a thread; the fifth words stand behind all of them.
        fifth = Int32(DIMS * 2) + (thread // 32 * 4 + thread % 4) * 32 + thread % 32 // 4 * 4
        packed = []
        for i in range(MERGE_BATCH):
            split = Int64(cutlass.min(begin + i, args.splits - 1))
            row = partials + split * args.heads * PACKED_BYTES
            words = ptx.load_streaming(row + thread * 16, 4)
            packed.append([*words, ptx.load_global(row + fifth)])
        return packed

    def _add(
        self,
        sums: Sequence[Float32],
        packed: Sequence[Sequence[Uint32]],
        factors: Sequence[Float32],
        begin: Int32,
    ) -> list[Float32]:
        """Add a batch of splits, in their order."""
        lane = begin % 32
        here = ptx.select_float(begin < 32, *factors)
        added = list(sums)
        for i, words in enumerate(packed):
            factor = cute.arch.shuffle_sync(here, lane + i)
            part = ptx.unpack_all_accumulators(words)
            added = [added[d] + part[d] * factor for d in range(8)]
        return added

    @cute.jit
    def _weigh(
        self, args: MergeArgs, statistics: Int64, sink: Float32
    ) -> tuple[list[Float32], Float32]:
        """One warp: factors on the sums of splits, two a lane, and the sum of all weights.

        Args:
            args: Arguments of the kernel.
            statistics: Address of the statistics of the head's first split.
            sink: Logit of the sink.
        """
        lane = cute.arch.lane_idx()
        by_split = []
        # Both are loaded before the first is used.
        for h in cutlass.range_constexpr(MAX_SPLITS // 32):
            split = lane + 32 * h
            row = Int64(cutlass.min(split, args.splits - 1)) * args.heads
            reference, weights = ptx.load_global_float2(statistics + row * 8)
            by_split.append((split < args.splits, reference, weights))
        origin = sink
        for _, reference, _ in by_split:
            # Beyond the last split it is that one's again, which changes no maximum.
            origin = ptx.max_float(origin, reference)
        for step in cutlass.range_constexpr(5):
            origin = ptx.max_float(origin, cute.arch.shuffle_sync_bfly(origin, 1 << step))
        origin = finite_origin(origin)
        factors, total = [], Float32(0.0)
        for exists, reference, weights in by_split:
            factor = ptx.select_float(exists, ptx.exp2_approx(reference - origin), Float32(0.0))
            factors.append(factor)
            total = total + weights * factor
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
        return factors, total + ptx.exp2_approx(sink - origin)
