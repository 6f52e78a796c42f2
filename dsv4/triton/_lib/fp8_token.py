"""FP8 quantisation by tokens in registers, bit for bit as ``dsv4.reference.quantize`` does it.

A tile is ``[rows, 128]``: a row of it is one block, whose values share one power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.numerics import INTERPRETED, e4m3_tile, e4m3_word
from dsv4.triton._lib.words import fours

WIDTH = tl.constexpr(128)
# 1e-4 as float32 bits: the least maximum that sets a scale, as in DeepSeek's code.
_LEAST = tl.constexpr(0x38D1B717)


@triton.jit
def power_of_two_byte(amax, LEAST: tl.constexpr, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """E8M0 byte of ``2 ** ceil(log2(amax / largest))``, largest = (1 + MANTISSA / 2^23) 2^EXPONENT.

    The exponent of amax less EXPONENT, and one more where its mantissa passes that of ``largest``:
    a carry out of the mantissa bits. Maxima below LEAST count as LEAST.
    """
    bits = tl.maximum(amax.to(tl.int32, bitcast=True), LEAST)
    return ((bits + (0x7FFFFF - MANTISSA)) >> 23) - EXPONENT


@triton.jit
def inverse_of_byte(byte):
    """``2 ** (127 - byte)`` as float32, for bytes 1 to 253."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_token_tile(values):
    """E4M3 bits ``[rows, 128]`` and E8M0 bytes ``[rows]`` of a float32 tile ``[rows, 128]``.

    A value that is not finite becomes NaN and sets no scale.
    """
    values = without_infinities(values)
    byte = power_of_two_byte(finite_peak(values), _LEAST, 0x600000, 8)
    return e4m3_tile(values * inverse_of_byte(byte)[:, None]), byte.to(tl.uint8)


@triton.jit
def without_infinities(values):
    """``values``, NaN where they are infinite, since infinity times 0 is NaN."""
    return tl.fma(values, 0.0, values)


@triton.jit
def finite_peak(values):
    """Largest magnitude along the last axis of ``without_infinities``; 0 where all are NaN."""
    magnitude = tl.abs(values)
    if INTERPRETED:  # the hardware's maximum of NaN and a number is the number
        magnitude = tl.where(magnitude == magnitude, magnitude, 0.0)
    return tl.maximum(tl.max(magnitude, len(values.shape) - 1), 0.0)


@triton.jit
def inverse_scales(amax):
    """Powers of two and E8M0 bytes of blocks whose pieces' maxima are ``amax [pieces]``.

    8 neighbouring pieces of 16 columns are a block; all of them get what is the block's.
    """
    BLOCKS: tl.constexpr = amax.shape[0] // 8
    peak = tl.max(tl.reshape(amax, [BLOCKS, 8]), 1)
    byte = power_of_two_byte(peak, _LEAST, 0x600000, 8)
    bytes_of = tl.reshape(tl.broadcast_to(byte[:, None], [BLOCKS, 8]), [BLOCKS * 8])
    return inverse_of_byte(bytes_of), bytes_of.to(tl.uint8)


@triton.jit
def fragment_words(first, last):
    """Codes of 16 columns in the order of fragments: four words ``[pieces]``.

    Word q of piece ``4 u + j`` is at place ``32 q + 16 u + 4 j`` of a block.

    Args:
        first: float32 values ``[pieces, 8]`` of columns ``2 q + e`` with k = 0, as
            ``dsv4.quant.fragments.fragment_columns`` names them.
        last: Those with k = 1.
    """
    PIECES: tl.constexpr = first.shape[0]
    even, odd = tl.split(tl.reshape(first, [PIECES, 4, 2]))
    last_even, last_odd = tl.split(tl.reshape(last, [PIECES, 4, 2]))
    return fours(e4m3_word(last_even, even, last_odd, odd))


@triton.jit
def fragment_order(bits):
    """Codes ``[rows, 128]`` with their columns as ``dsv4.quant.fragments.fragment_columns`` has."""
    parts = tl.reshape(bits, [bits.shape[0], 2, 4, 2, 4, 2])  # u, j, k, q, e
    first, last = tl.split(tl.permute(parts, (0, 4, 1, 2, 5, 3)))
    return tl.reshape(tl.join(last, first), [bits.shape[0], 128])
