"""NVFP4 weights whose block scales are powers of two as E4M3, exactly, in registers.

``dsv4.quant.fragments`` has the layout of codes and scales. A weight is ``code * 2^k`` times a
power of two of its row, with k in -8..6 where a matrix qualifies (``row_exponent``), and that is
an E4M3 number.

The conversion is a multiplication in bfloat16. An E4M3 number of bits ``s eeee mmm`` has the value
of the bfloat16 ``s 0000eeee mmm0000``, times ``2^120``, subnormals included: both formats have the
same rule, and exponent 0 means the lowest binade in both. The bits of a code, masked in place,
are the bfloat16 ``code * 2^-126``; times ``2^(k + 6)`` it is ``code * 2^k * 2^-120``, whose bits 10
to 4 are the E4M3 number without its sign. bfloat16 products keep subnormals, and these are exact.

Two such pairs are merged into four bytes; signs come from the word of codes. 28 instructions for 8
codes.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Int32, Int64, Uint32

from dsv4.cute.device.ptx import (
    load_global_byte,
    mad_u32,
    mul_bfloat16x2_by_half,
    permute_bytes,
    rotate_right,
)

_MAGNITUDE = 0x01C001C0  # magnitude bits of an E2M1 code, in place in both bfloat16
_HIGH_SIGNS, _LOW_SIGNS = 0x80008000, 0x00800080
# Exponent field of 2^(k + 6) is ``byte >> 3`` plus this, less the row's exponent: k is
# ``(byte >> 3) - 10 - row_exponent``.
EXPONENT_BIAS = 127 + 6 - 10


def load_row_exponent(address: Int64) -> Int32:
    """``row_exponent`` of a row, an int8 in global memory."""
    return (Int32(load_global_byte(address)) ^ 128) - 128


def row_biases(low: Int32, high: Int32) -> Uint32:
    """What turns scale bytes of two rows, times 16, into bfloat16 factors.

    Args:
        low: ``row_exponent`` of the row in the low half.
        high: That of the row in the high half.
    """
    bias_low = Uint32(Int32(EXPONENT_BIAS) - low) * Uint32(1 << 7)
    bias_high = Uint32(Int32(EXPONENT_BIAS) - high) * Uint32(1 << 23)
    return bias_low + bias_high


def factors(words: tuple[Uint32, Uint32], block: int, biases: Uint32, opaque_16: Uint32) -> Uint32:
    """``2^(k + 6)`` of block ``block`` (0 to 3) as bfloat16, for row ``lane // 4`` in the low half.

    Row ``lane // 4 + 8`` is in the high half.

    Args:
        words: The lane's two words of scales of 64 columns.
        block: Which 16 columns.
        biases: ``row_biases`` of the two rows.
        opaque_16: 16, unknown to the compiler, which would turn the product into a shift.
    """
    first = block % 2 * 2
    pair = permute_bytes(words[block // 2], 0x4040 | ((first + 1) << 8) | first)
    return mad_u32(pair, opaque_16, biases)


def dequantized(word: Uint32, factor: Uint32, opaque_16: Uint32) -> tuple[Uint32, Uint32]:
    """Eight codes as E4M3: four of row ``lane // 4``, four of row ``lane // 4 + 8``.

    Byte ``2 e + (1 - k)`` is column ``8 k + 2 (lane % 4) + e`` of the block of 16 columns.

    Args:
        word: The lane's codes of the block.
        factor: A result of ``factors``.
        opaque_16: 16, unknown to the compiler.
    """
    mask = Uint32(_MAGNITUDE)
    other = rotate_right(word, 3)
    last = (word & Uint32(0x00190019)) * Uint32(0x108)
    pairs = (word & mask, other & mask, rotate_right(word, 6) & mask, last & mask)
    low0, low1, high0, high1 = (
        mul_bfloat16x2_by_half(pair, factor, i % 2) for i, pair in enumerate(pairs)
    )
    rows = []
    for of_k0, of_k1, signs, other_signs in (
        (low0, high0, word, rotate_right(word, 14)),
        (low1, high1, other, rotate_right(word, 26)),
    ):
        # Bits 10 to 4 become 14 to 8, or 6 to 0.
        merged = mad_u32(of_k0, opaque_16, of_k1 >> Uint32(4))
        merged = merged | (signs & Uint32(_HIGH_SIGNS))
        rows.append(merged | (other_signs & Uint32(_LOW_SIGNS)))
    return rows[0], rows[1]


def dequantized_lines(
    codes: Sequence[Uint32], scales: Sequence[Uint32], biases: Uint32, opaque_16: Uint32
) -> tuple[list[Uint32], list[Uint32]]:
    """16 neighbouring bytes of row ``lane // 4``, and 16 of row ``lane // 4 + 8``.

    Args:
        codes: The lane's four words of codes of 64 columns.
        scales: Its two words of their scales.
        biases: ``row_biases`` of the two rows.
        opaque_16: 16, unknown to the compiler.
    """
    lines: tuple[list[Uint32], list[Uint32]] = ([], [])
    for block, word in enumerate(codes):
        powers = factors((scales[0], scales[1]), block, biases, opaque_16)
        for line, of_row in zip(lines, dequantized(word, powers, opaque_16), strict=True):
            line.append(of_row)
    return lines
