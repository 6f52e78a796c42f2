"""Index keys and queries in registers, to and from their codes (``dsv4.pages.IndexLayout``).

Bit for bit what ``dsv4.reference._index_entries`` does, for a block of rows ``[ROWS, BLOCK]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.pages import FP4_GROUP
from dsv4.triton._hadamard import fp4_exponents
from dsv4.triton._numerics import INTERPRETED, e4m3_bits, e4m3_value, narrow, power_of_two
from dsv4.triton._nvfp4 import divided_codes

GROUP = tl.constexpr(FP4_GROUP)
# float32 bits of 1e-4, the smallest maximum a row of E4M3 is scaled by.
_FLOOR = tl.constexpr(0x38D1B717)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def e4m3_rows(values):
    """E4M3 codes (uint8) of float32 rows, and the scale of each, float32 ``[ROWS]``.

    448 is 1.75 * 2^8, so ``ceil(log2(amax / 448))`` is the exponent of amax less 8, and one more
    where its mantissa passes 1.75. Magnitudes are compared as integers, which keeps NaN.
    """
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = amax < _INFINITY
    byte = ((tl.maximum(amax, _FLOOR) + 0x1FFFFF) >> 23) - 8
    factor = tl.where(finite, (254 - byte) << 23, _NAN).to(tl.float32, bitcast=True)
    scale = tl.where(finite, byte << 23, _NAN).to(tl.float32, bitcast=True)
    return e4m3_bits(values * factor[:, None]), scale


@triton.jit
def mxfp4_rows(values, CONVERT: tl.constexpr):
    """Packed E2M1 codes ``[ROWS, BLOCK / 2]`` and E8M0 bytes ``[ROWS, BLOCK / 32]``, uint8.

    ``CONVERT`` is what ``_nvfp4.conversion`` gives.
    """
    ROWS: tl.constexpr = values.shape[0]
    BLOCK: tl.constexpr = values.shape[1]
    groups = tl.reshape(values, [ROWS, BLOCK // GROUP, GROUP])
    exponent, finite = fp4_exponents(groups)
    exponent = tl.reshape(exponent, [ROWS, BLOCK // GROUP])
    finite = tl.reshape(finite, [ROWS, BLOCK // GROUP])
    inverse = power_of_two(-exponent)
    one = tl.full(inverse.shape, 1.0, tl.float32)
    bound = tl.where(finite, 6.0, 0.0)
    codes = divided_codes(groups, inverse, one, one * 0.0, bound, CONVERT)
    scales = tl.where(finite, exponent + 127, 255).to(tl.uint8)
    return tl.reshape(codes, [ROWS, BLOCK // 2]), scales


@triton.jit
def e4m3_values(codes, dtype: tl.constexpr):
    """Values of E4M3 codes (uint8), exact in ``dtype``: bfloat16, float16 or float32."""
    if INTERPRETED:
        return narrow(e4m3_value(codes), dtype)
    return codes.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def _e2m1_value(code):
    # Shifted to the top, the bits of a code are those of float32, of its value times 2^-126.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def mxfp4_values(codes, scales, dtype: tl.constexpr):
    """Values ``[ROWS, n]`` of codes ``[ROWS, n / 2]`` and E8M0 bytes ``[ROWS, n / 32]`` (uint8).

    Exact in ``dtype``, bfloat16 or float32, where they are below 2^127.
    """
    ROWS: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1]
    byte = scales.to(tl.int32)
    # Byte 0 is 2^-127, a subnormal number; byte 255 is NaN.
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    factor = tl.where(byte == 255, _NAN, bits).to(tl.float32, bitcast=True)
    code = codes.to(tl.int32)
    pairs = tl.join(_e2m1_value(code & 15), _e2m1_value(code >> 4))
    groups = tl.reshape(pairs, [ROWS, 2 * BYTES // GROUP, GROUP]) * factor[:, :, None]
    return tl.reshape(narrow(groups, dtype), [ROWS, 2 * BYTES])


@triton.jit
def store_keys(
    data,
    stride,
    slots,
    values,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """Store a tile of keys in their slots.

    Args:
        data: Pointer to the pages, uint8.
        stride: Bytes from one page to the next.
        slots: int64 ``[ROWS]``; a row with a negative slot is not stored.
        values: float32 ``[ROWS, BLOCK]``; what lies past D is ignored.
        D: Dims of a key.
        PAGE_SIZE: Entries per page.
        FORMAT: ``"index_fp8"`` or ``"index_mxfp4"``.
        CONVERT: See ``mxfp4_rows``.
    """
    BLOCK: tl.constexpr = values.shape[1]
    written = slots >= 0
    page, entry = slots // PAGE_SIZE, slots % PAGE_SIZE
    data += page * stride
    column = tl.arange(0, BLOCK)[None, :]
    values = tl.where(column < D, values, 0.0)
    if FORMAT == "index_fp8":
        codes, scale = e4m3_rows(values)
        place = (data + entry * D)[:, None] + column
        tl.store(place, codes, mask=written[:, None] & (column < D))
        place = (data + PAGE_SIZE * D).to(tl.pointer_type(tl.float32)) + entry
        tl.store(place, scale, mask=written)
    else:
        codes, scales = mxfp4_rows(values, CONVERT)
        byte = tl.arange(0, BLOCK // 2)[None, :]
        place = (data + entry * (D // 2))[:, None] + byte
        tl.store(place, codes, mask=written[:, None] & (byte < D // 2))
        group = tl.arange(0, BLOCK // GROUP)[None, :]
        place = (data + PAGE_SIZE * (D // 2) + entry * (D // GROUP))[:, None] + group
        tl.store(place, scales, mask=written[:, None] & (group < D // GROUP))


@triton.jit
def load_keys(
    data,
    start,
    within,
    size,
    seen,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Keys ``[BLOCK, DIMS]`` in ``DTYPE`` and the scale of each: that of FP8, else 1.

    Args:
        data: Pointer to the pages, uint8.
        start: int64 ``[BLOCK]``, byte at which the page of each begins.
        within: ``[BLOCK]``, number of each in its page.
        size: Entries per page.
        seen: ``[BLOCK]``; the others are zeros.
        D: Dims of a key.
        DIMS: A power of two.
        FORMAT: ``"index_fp8"`` or ``"index_mxfp4"``.
        DTYPE: See ``e4m3_values`` and ``mxfp4_values``.
    """
    BYTES: tl.constexpr = D if FORMAT == "index_fp8" else D // 2
    WIDTH: tl.constexpr = DIMS if FORMAT == "index_fp8" else DIMS // 2
    byte = tl.arange(0, WIDTH)[None, :]
    place = data + (start + within * BYTES)[:, None] + byte
    codes = tl.load(place, mask=seen[:, None] & (byte < BYTES), other=0)
    if FORMAT == "index_fp8":
        place = (data + start + size * BYTES).to(tl.pointer_type(tl.float32)) + within
        scale = tl.load(place, mask=seen, other=0.0)
        return e4m3_values(codes, DTYPE), scale
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        group = tl.arange(0, DIMS // GROUP)[None, :]
        place = data + (start + size * BYTES + within * (D // GROUP))[:, None] + group
        scales = tl.load(place, mask=seen[:, None] & (group < D // GROUP), other=0)
        return mxfp4_values(codes, scales, DTYPE), tl.full(seen.shape, 1.0, tl.float32)
