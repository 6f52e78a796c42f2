"""The indexer's Hadamard transform and FP4 rounding, for a block of rows held in registers.

Bit for bit what ``dsv4.reference.indexer`` computes: float32 additions in the order of its
butterflies, one rounding to the dtype of the input, then E2M1 codes in groups of 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._numerics import narrow, power_of_two, widen

GROUP = tl.constexpr(32)
_FLOOR = tl.constexpr(0x01C00000)  # bits of 6 * 2^-126, the least magnitude that sets a scale
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def hadamard_row(values, D: tl.constexpr):
    """Sylvester's matrix times ``D ** -0.5``, of float32 ``[ROWS, D]`` along D.

    Each step adds and subtracts neighbours and moves the lowest bit of the column number to the
    top, so that after log2(D) steps every bit has been served once, lowest first, and columns are
    back in their places.
    """
    ROWS: tl.constexpr = values.shape[0]
    STEPS: tl.constexpr = D.bit_length() - 1
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(values, [ROWS, D // 2, 2]))
        pair = tl.join(even + odd, even - odd)
        values = tl.reshape(tl.permute(pair, (0, 2, 1)), [ROWS, D])
    return values * (D**-0.5)


@triton.jit
def fp4_exponents(groups):
    """Scale exponents of float32 ``[ROWS, G, 32]``: ``ceil(log2(max(amax, 6 * 2^-126) / 6))``.

    Returns ``(exponent, finite)``, each ``[ROWS, G, 1]``; the exponent is 0 where a group holds a
    NaN or an Inf. Magnitudes are compared as integers, which keeps NaN; 6 is 1.5 * 2^2, so the
    exponent rises by one where the mantissa exceeds 1.5.
    """
    amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2, keep_dims=True)
    finite = amax < _INFINITY
    exponent = ((tl.maximum(amax, _FLOOR) + 0x3FFFFF) >> 23) - 129
    return tl.where(finite, exponent, 0), finite


@triton.jit
def round_e2m1(x):
    """To the nearest E2M1 value, ties to the even code; ``|x| <= 6``. The sign of zero is kept.

    Adding 2^22, 2^23 or 2^24 leaves multiples of 0.5, 1 or 2 in float32.
    """
    magnitude = tl.abs(x)
    large = tl.where(magnitude < 2, 4194304.0, tl.where(magnitude < 4, 8388608.0, 16777216.0))
    rounded = (magnitude + large) - large
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def rotate_quantize_row(values, D: tl.constexpr, DTYPE: tl.constexpr = tl.bfloat16):
    """Hadamard transform, rounding to ``DTYPE``, quantisation to FP4 and back.

    ``values``: float32 ``[ROWS, D]``, D a power of two >= 32. Returns the same shape in float32;
    every value is one of ``DTYPE``. A NaN or an Inf makes its row NaN.
    """
    ROWS: tl.constexpr = values.shape[0]
    rotated = widen(narrow(hadamard_row(values, D), DTYPE))
    groups = tl.reshape(rotated, [ROWS, D // GROUP, GROUP])
    exponent, finite = fp4_exponents(groups)
    value = round_e2m1(groups * power_of_two(-exponent)) * power_of_two(exponent)
    return tl.reshape(tl.where(finite, value, float("nan")), [ROWS, D])
