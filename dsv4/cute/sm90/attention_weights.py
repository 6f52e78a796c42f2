"""Softmax weights of ``attention``: from logits, to the other warpgroup, and their sums.

The consumer warpgroup that owns a KV block turns its logits into weights, the left operand of its
own MMAs in registers, and gives them to the other warpgroup through shared memory, along with the
references to which they are relative. A thread has two heads (rows ``lane // 4`` and 8 on) and of
every 8 entries the pair ``2 (lane % 4)``; four lanes have a row.

Order of the exchange: the warpgroups take turns, so a warp overwrites the weights and references of
its 16 heads that it has read itself before. Its MMAs on them are complete (``wait_group(0)``), and
a ``sync_warp`` orders its lanes' loads of references before the stores. The mbarrier ``ready`` of
the stage orders the stores before the other warpgroup's reads (``attention``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90._entries import EntryMask
from dsv4.cute.sm90.attention_plan import BLOCK, CONSUMER_WARPS, DIMS, HEADS
from dsv4.cute.sm90.attention_softmax import INFINITY, Softmax, new_reference, quad_sum

MEET = 1  # named barrier of the consumers
_CONSUMERS = 32 * CONSUMER_WARPS
_ALL = 0xFFFFFFFF


class Operands(NamedTuple):
    """Fragments of a consumer thread.

    Attributes:
        queries: Left operand of the logits.
        entries: Right operand of the logits, by stage.
        values: Entries, transposed, as right operand of weights, by half of the dims and stage.
        weights: Own weights, left operand in registers.
        words: The same registers as words.
        given: The other warpgroup's weights, left operand in shared memory.
        logits: Accumulators of logits.
        sums: Accumulators of the thread's half of the results.
    """

    queries: cute.Tensor
    entries: cute.Tensor
    values: cute.Tensor
    weights: cute.Tensor
    words: cute.Tensor
    other_weights: cute.Tensor
    logits: cute.Tensor
    sums: cute.Tensor


class Exchange(NamedTuple):
    """Shared-memory addresses of what a thread gives to the other warpgroup.

    Attributes:
        weights: The lane's row of weights for ``stmatrix``.
        references: References of the thread's two heads, 32 bytes apart.
    """

    weights: Uint32
    references: Uint32


class AttentionWeights(PlannedKernel):
    """Device functions of the consumers between logits and results."""

    @cute.jit
    def _mask(self, logits: cute.Tensor, exists: EntryMask, lane: Int32) -> None:
        """Set logits of entries that do not exist to -inf."""
        if (exists.low & exists.high) != Uint32(_ALL):
            for half in cutlass.range_constexpr(2):
                bits = exists[half] >> Uint32(lane % 4 * 2)
                for n in cutlass.range_constexpr(4):
                    for i in cutlass.range_constexpr(2):
                        bit = bits & Uint32(1 << (n * 8 + i))
                        for r in cutlass.range_constexpr(2):
                            at = half * 16 + n * 4 + r * 2 + i
                            logits[at] = ptx.select_float(bit, logits[at], -Float32(INFINITY))

    @cute.jit
    def _weigh(
        self, operands: Operands, softmax: Softmax, scale: Float32
    ) -> tuple[Softmax, list[Float32]]:
        """Make weights of logits, the left operand in registers.

        Returns:
            The new softmax, and factors on sums that are relative to the old references.
        """
        logits, words = operands.logits, operands.words
        new, sums, factors = [], [], []
        for r in cutlass.range_constexpr(2):
            high = logits[2 * r]
            for n in cutlass.range_constexpr(BLOCK // 8):
                high = ptx.max_float(
                    high, ptx.max_float(logits[n * 4 + 2 * r], logits[n * 4 + 2 * r + 1])
                )
            # Four lanes have a row's 64 logits.
            high = ptx.max_float(high, cute.arch.shuffle_sync_bfly(high, 1))
            high = ptx.max_float(high, cute.arch.shuffle_sync_bfly(high, 2)) * scale
            reference = new_reference(high, softmax.references[r])
            part = softmax.totals[r] * reference.factor
            for n in cutlass.range_constexpr(BLOCK // 8):
                at = n * 4 + 2 * r
                low = ptx.exp2_approx(ptx.fma_float(logits[at], scale, -reference.origin))
                up = ptx.exp2_approx(ptx.fma_float(logits[at + 1], scale, -reference.origin))
                word = ptx.pack_bfloat16x2(low, up)
                words[n * 2 + r] = word
                part = part + (ptx.bfloat16_low_to_float(word) + ptx.bfloat16_high_to_float(word))
            new.append(reference.value)
            sums.append(part)
            factors.append(reference.factor)
        return Softmax(new, sums), factors

    @cute.jit
    def _rescale(self, sums: cute.Tensor, factors: Sequence[Float32]) -> None:
        """Make sums relative to new references; skipped where no lane's references changed."""
        if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
            for n in cutlass.range_constexpr(DIMS // 16):
                for i in cutlass.range_constexpr(4):
                    sums[n * 4 + i] = sums[n * 4 + i] * factors[i // 2]

    @cute.jit
    def _follow(self, sums: cute.Tensor, softmax: Softmax, address: Uint32) -> Softmax:
        """Take over the references to which the other warpgroup's weights are relative."""
        references, total = softmax
        new = [ptx.load_shared_float(address + Uint32(32 * r)) for r in range(2)]
        factors = [
            ptx.select_float(
                new[r] > references[r], ptx.exp2_approx(references[r] - new[r]), Float32(1.0)
            )
            for r in range(2)
        ]
        self._rescale(sums, factors)
        return Softmax(new, [total[r] * factors[r] for r in range(2)])

    @cute.jit
    def _give(
        self, words: cute.Tensor, references: Sequence[Float32], exchange: Exchange, lane: Int32
    ) -> None:
        """Write weights and references for the other warpgroup, which read those before."""
        for n in cutlass.range_constexpr(0, BLOCK // 8, 2):
            chunk = (n + lane // 16) ^ (lane % 8)
            four = [words[2 * n + i] for i in range(4)]
            ptx.stmatrix_x4(exchange.weights + Uint32(chunk * 16), four)
        # All lanes have read the references that are overwritten.
        cute.arch.sync_warp()
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                ptx.store_shared_float(exchange.references + Uint32(32 * r), references[r])

    @cute.jit
    def _reduce_totals(
        self, total: Sequence[Float32], address: Uint32, group: Int32, lane: Int32
    ) -> list[Float32]:
        """Sums of the weights of both warpgroups, whose references are equal at the end."""
        total = [quad_sum(t) for t in total]
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                ptx.store_shared_float(address + Uint32(group * 4 * HEADS + 32 * r), total[r])
        cute.arch.barrier(barrier_id=MEET, number_of_threads=_CONSUMERS)
        # In the same order in both warpgroups, so that they divide by the same bits.
        return [
            ptx.load_shared_float(address + Uint32(32 * r))
            + ptx.load_shared_float(address + Uint32(4 * HEADS + 32 * r))
            for r in range(2)
        ]
