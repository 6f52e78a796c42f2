"""Work of a warpgroup of the indexer-logits kernel on a block of 64 entries and 64 heads.

Codes become integers: twice their values, times the scale of their group of 32 dims over the
largest of the key or query, as far as that is at least 2^-2 (of a key) or 2^-3 (of a query). So
products and sums of a head are exact in ``wgmma`` of 8-bit integers.

* Left operand, from registers: a lane has two keys of a warp's 16, ``lane // 4`` and the one eight
  later, and of each the 32 codes of group ``lane % 4``, which lie in 16 bytes. Without an exchange
  it holds them as fragments of four steps of K; so dims are in another order than in the cache, and
  queries are stored in that.
* Bias: bytes of keys have ``BIAS`` added, so that they are positive. One byte permutation looks up
  those of positive codes, one those of negative codes, either gives 0 for the others, and their sum
  is the operand. A further step of K, the bias step, subtracts what the bias adds to a head's sums.
* The bits of a positive sum are those of a subnormal float32 number, those of a negative one NaN: a
  saturating product converts the one and makes the other 0 (ReLU), and leaves the logic pipe alone.
* The logic pipe takes an instruction every other cycle and has most of them, so tables and
  complements are products. Shifts are not: high words of products take more time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.indexer_logits_plan import BLOCK, IndexerLogitsPlan

WEIGHT_BYTES = 80  # of a lane's weights and a gap, so that four lanes use all banks
BIAS = 48  # what is added to a key's integers, at most 48 in magnitude
# Four left bytes of the bias step: 5, 5, 5 and 1 times BIAS. Right bytes are signed, so with BIAS
# alone they would not reach the largest sums of a head.
BIAS_LEFT = 0xF0F0F030
_BIAS_WEIGHT = 24 * 5  # of the step's 32 left bytes, those of 5 times BIAS, in units of BIAS
UNIT = 2.0**-22  # what an integer counts as in a head's sum, at most 1
# Of sums: integers are 2^7 times their values; weights are halved.
_SUM_SCALE = 2.0 ** (-7 + 1) / UNIT
# A half has a distance in both bytes; what is greater is a distance above 2.
_FARTHEST = 0x02FF

Words = Sequence[Uint32]
Index = Int32 | int  # loops over ``cutlass.range`` have integers, as mypy sees it


class Lane(NamedTuple):
    """A thread's place in its warpgroup.

    Attributes:
        warp: Warp of the warpgroup.
        lane: Lane of the warp.
    """

    warp: Int32
    lane: Int32


class KeyPair(NamedTuple):
    """A lane's share of two keys.

    Attributes:
        first: Four words: the codes of the lane's group of the first key.
        second: The same of the second key.
        first_scales: The four scales of the first key, a byte each.
        second_scales: The same of the second key.
    """

    first: Words
    second: Words
    first_scales: Uint32
    second_scales: Uint32

    @property
    def codes(self) -> tuple[Words, Words]:
        """Codes of both keys."""
        return self.first, self.second

    @property
    def scales(self) -> tuple[Uint32, Uint32]:
        """Scales of both keys."""
        return self.first_scales, self.second_scales


class PairScores(NamedTuple):
    """A lane's sums of two blocks, which are finished together.

    Attributes:
        sums: Over the lane's heads: both keys of the first block, then of the second.
        first_factors: Largest scales of the keys of the first block, a byte in each half.
        second_factors: The same of the second block.
        block: Number of the first block.
    """

    sums: Sequence[Float32]
    first_factors: Uint32
    second_factors: Uint32
    block: Index


class Output(NamedTuple):
    """Addresses of a token's results.

    Attributes:
        scores: Address of its keys.
        maxima: Address of its groups' maxima.
        end: Entries that the token sees; later ones are not stored.
        weight_scale: What the heads' weights were divided by.
    """

    scores: Int64
    maxima: Int64
    end: Int32
    weight_scale: Float32


class IndexerLogitsTile(PlannedKernel):
    """Device functions of a block of entries."""

    plan: IndexerLogitsPlan

    def _dequantize(
        self,
        registers: cute.Tensor,
        keys: KeyPair,
        lane: Int32,
        minus_one: Uint32,
        steps: Iterable[None] = (),
    ) -> tuple[Uint32, Uint32]:
        """Dequantize codes of two keys to the left operands of four steps of K.

        Args:
            registers: 16 words: by step, half of the word, key.
            keys: Codes and scales.
            lane: Lane of the warp.
            minus_one: -1, opaque to the compiler; see ``ptx.e2m1_to_bytes_by_table``.
            steps: Other work whose steps wait for one another; here each waits while the codes of a
                word are expanded.

        Returns:
            The largest scale of each key, a byte in each half; and how far the scales of the lane's
            groups are below it, as powers of two: of each key in a half, in both bytes.
        """
        steps = iter(steps)
        largest = ptx.max_of_bytes_pair(keys.first_scales, keys.second_scales)
        below = largest - ptx.select_byte_pair(keys.first_scales, keys.second_scales, lane % 4)
        for h, distance in enumerate((below, below >> 16)):
            tables = self._tables(ptx.shift_right(Uint32(4), distance))
            for i in range(4):
                both = ptx.e2m1_to_bytes_by_table(keys.codes[h][i], tables, minus_one)
                registers[4 * i + h], registers[4 * i + 2 + h] = both
                next(steps, None)
        for _ in steps:
            pass
        return largest, below

    def _is_distant(self, below: Uint32) -> cutlass.Boolean:
        """Return whether a distance that ``_dequantize`` returns is too large for integers."""
        return ptx.max_of_halves(below) > Uint32(_FARTHEST)

    def _tables(self, factor: Uint32) -> list[Uint32]:
        """Bytes that codes stand for, times a power of two, plus BIAS.

        Of the codes 0 to 3 and 4 to 7, and of 7 to 4 and 3 to 0 with a sign. Products, because the
        logic pipe has more to do. Of a factor 0 all are BIAS.
        """
        fours = (0x03020100, 0x0C080604, 2**32 - 0x0406080C, 2**32 - 0x00010203)
        bias = Uint32(0x01010101 * BIAS)
        return [ptx.mad_u32(factor, Uint32(four), bias) for four in fours]

    def _is_nonzero(self, words: Words) -> cutlass.Boolean:
        """Return whether a code of some words is not zero."""
        return (functools.reduce(operator.or_, words) & Uint32(0x77777777)) != Uint32(0)

    def _shift(self, scales: Uint32, group: Int32 | int) -> tuple[Int32, Uint32]:
        """3 less what a group's scale is below the largest, as powers of two; and the largest."""
        largest = ptx.max_of_bytes(scales)
        byte = ptx.extract_byte(scales, group)
        return Int32(byte) - Int32(largest) + 3, largest

    @cute.jit
    def _window_bit(self, shift: Int32, is_nonzero: cutlass.Boolean) -> tuple[Uint32, Uint32]:
        """The bit of a shift's window in two words, if its group is not zero.

        A window is four shifts that integers hold together: 3 to 0, then -1 to -4, and so on.
        """
        window = (3 - shift) >> 2
        bit = Uint32(1) << Uint32(window & 31)
        low, high = Uint32(0), Uint32(0)
        if is_nonzero:
            if window < 32:
                low = bit
            else:
                high = bit
        return low, high

    @staticmethod
    def _bias_bytes(total: Int32) -> tuple[Int32, Int32]:
        """The bias step's right bytes of a head whose integers have this sum.

        The last three of every four bytes, and the first of all; the others are 0. With
        ``BIAS_LEFT`` they give what ``BIAS`` adds to the head's sums, negative.
        """
        most = -total // _BIAS_WEIGHT
        return most, -total - most * _BIAS_WEIGHT

    def _weight_offset(self, head: Int32) -> Int32:
        """Return the offset of a head's weight: 16 per lane of four, heads 2 j, 2 j + 1 of 8."""
        return head // 2 % 4 * WEIGHT_BYTES + (head // 8 * 2 + head % 2) * 4

    def _sum_heads(self, dots: cute.Tensor, weights: Uint32) -> list[Float32]:
        """Sum ReLU times weight over the lane's heads, of both keys.

        Args:
            dots: Accumulators of a block: a lane has, of every 8 heads, two of each key.
            weights: Shared-memory address of the lane's weights.
        """
        sums = [Float32(0.0)] * 4
        for n in range(8):
            if n % 2 == 0:
                four = ptx.load_shared_float4(weights + n * 8)
            for i in range(4):
                factor = four[n % 2 * 2 + i % 2]
                sums[i] = ptx.add_scaled_relu(dots[4 * n + i], factor, sums[i])
        return [sums[0] + sums[1], sums[2] + sums[3]]

    def _store(self, pair: PairScores, output: Output, who: Lane) -> None:
        """Store keys of the logits of two blocks, and their groups' maxima: all of ``_storing``."""
        for _ in self._storing(pair, output, who):
            pass

    def _storing(self, pair: PairScores, output: Output, who: Lane) -> Iterator[None]:
        """Store keys of the logits of two blocks, and their groups' maxima, in steps.

        Each step waits for the one before, so the caller puts other work between them. One warp has
        16 entries of each block, a lane one entry of one of them.
        """
        sums, lane = pair.sums, who.lane
        # Four lanes have shares of the same four keys. Of them each gets the sum of one key: bit 0
        # is its block, bit 1 which of both. Two exchanges instead of four reductions.
        later, second = lane % 2 == 1, lane % 4 > 1
        own = [ptx.select_float(later, sums[2 + c], sums[c]) for c in range(2)]
        sent = [ptx.select_float(later, sums[c], sums[2 + c]) for c in range(2)]
        sent = [cute.arch.shuffle_sync_bfly(value, 1) for value in sent]
        yield
        both = [mine + other for mine, other in zip(own, sent, strict=True)]
        total = ptx.select_float(second, both[1], both[0])
        other = cute.arch.shuffle_sync_bfly(ptx.select_float(second, both[0], both[1]), 2)
        factors = ptx.select_word(later, pair.second_factors, pair.first_factors)
        factor = ptx.e8m0_to_float(ptx.extract_byte(factors, lane & 2))
        yield
        key = ptx.ordered_key((total + other) * Float32(_SUM_SCALE) * output.weight_scale * factor)
        entry = (pair.block + lane % 2) * BLOCK + who.warp * 16 + lane // 4 + lane % 4 // 2 * 8
        is_seen = entry < output.end
        ptx.store_global_if(ptx.element_address(output.scores, entry, 4), key, is_seen)
        # The maximum over a group: eight lanes with the same lane % 4 have neighbouring entries.
        key = ptx.select_word(is_seen, key, Uint32(0))
        group = self.plan.group
        steps = {0: (), 8: (4, 8, 16), 16: (4, 8, 16, 2)}[group]
        for step in steps:
            neighbour = ptx.shuffle_xor(key, step)
            yield
            key = cutlass.max(key, neighbour)
        if steps:
            firsts = 4 if group == 8 else 2
            address = ptx.element_address(output.maxima, entry >> group.bit_length() - 1, 4)
            ptx.store_global_if(address, key, (lane < firsts) & is_seen)
