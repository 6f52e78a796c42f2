"""FP8 quantisation by tokens in registers, bit for bit as ``dsv4.reference.quantize`` does it.

A tile is ``[rows, 128]``: a row of it is one block, whose values share one power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.numerics import e4m3_tile

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

    A value that is not finite becomes NaN and sets no scale: times 0 it is NaN, which is added.
    """
    magnitude = tl.abs(values)
    amax = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1)
    byte = power_of_two_byte(amax, _LEAST, 0x600000, 8)
    scaled = tl.fma(values, inverse_of_byte(byte)[:, None], values * 0.0)
    return e4m3_tile(scaled), byte.to(tl.uint8)


@triton.jit
def fragment_order(bits):
    """Codes ``[rows, 128]`` with their columns as ``dsv4.quant.fragments.fragment_columns`` has."""
    parts = tl.reshape(bits, [bits.shape[0], 2, 4, 2, 4, 2])  # u, j, k, q, e
    first, last = tl.split(tl.permute(parts, (0, 4, 1, 2, 5, 3)))
    return tl.reshape(tl.join(last, first), [bits.shape[0], 128])
