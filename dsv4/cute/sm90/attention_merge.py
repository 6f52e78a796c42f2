"""The sums of all blocks that share a token, in their order; a block of threads has a head."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from dsv4.cute import _ptx as ptx
from dsv4.cute.sm90.attention_plan import DIMS, ROPE, MergePlan

Value = Any
_LOG2E = 1.4426950408889634
_INFINITY = float("inf")


class MergeKernel(MergePlan):
    """See the module."""

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        places = [Int64(0)] * 7
        return cute.compile(self, *places, Int32(1), Int32(1), CUstream(0), options=options)

    @cute.jit
    def __call__(
        self,
        parts: Int64,
        tops: Int64,
        totals: Int64,
        sink: Int64,
        out: Int64,
        cos: Int64,
        sin: Int64,
        heads: Int32,
        splits: Int32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        self.kernel_(parts, tops, totals, sink, out, cos, sin, heads, splits).launch(
            grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel_(
        self,
        parts: Int64,
        tops: Int64,
        totals: Int64,
        sink: Int64,
        out: Int64,
        cos: Int64,
        sin: Int64,
        heads: Int32,
        splits: Int32,
    ) -> None:
        """A block for every (token, head).

        Args:
            parts: Address of float32 sums, ``[tokens, splits, heads, 512]``.
            tops: Address of float32 ``[tokens, splits, heads]``, what they are relative to.
            totals: Likewise, sums of weights.
            sink: Address of float32 ``[heads]``.
            out: Address of bfloat16 ``[tokens, heads, 512]``.
            cos: Address of float32 ``[tokens, 32]``, by whose angles the last 64 dims are turned
                back; 0: they are not.
            sin: As ``cos``.
            heads: Of a token.
            splits: Parts of a token.
        """
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        token, head = number // heads, number % heads
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        first = Int64(token) * splits * heads + head
        logit = ptx.load_global_float(sink + Int64(head) * 4) * Float32(_LOG2E)
        origin = logit
        for part in cutlass.range(splits, unroll=4):
            row = first + Int64(part) * heads
            origin = ptx.maximum(origin, ptx.load_global_float(tops + row * 4))
        origin = ptx.choose(origin == -Float32(_INFINITY), Float32(0.0), origin)
        total = ptx.power_of_two(logit - origin)
        sums = [Float32(0.0)] * 4
        for part in cutlass.range(splits, unroll=4):
            row = first + Int64(part) * heads
            factor = ptx.power_of_two(ptx.load_global_float(tops + row * 4) - origin)
            total = total + ptx.load_global_float(totals + row * 4) * factor
            four = ptx.load_global_float4(parts + (row * DIMS + thread * 4) * 4)
            sums = [sums[i] + four[i] * factor for i in range(4)]
        factor = ptx.choose(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)
        dim = thread * 4 - (DIMS - ROPE)
        if (cos != Int64(0)) & (dim >= 0):
            for i in cutlass.range_constexpr(2):
                place = (Int64(token) * (ROPE // 2) + dim // 2 + i) * 4
                c, s = ptx.load_global_float(cos + place), ptx.load_global_float(sin + place)
                sums[2 * i], sums[2 * i + 1] = ptx.turn_back(sums[2 * i], sums[2 * i + 1], c, s)
        words = [
            ptx.bfloat16_pair(sums[2 * i] * factor, sums[2 * i + 1] * factor) for i in range(2)
        ]
        ptx.store_global2(out + (Int64(number) * DIMS + thread * 4) * 2, words)
