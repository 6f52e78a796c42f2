"""NVFP4 quantisation in registers, bit for bit as ``dsv4.reference.quantize`` does it.

A tile holds its values in blocks of 16 along the last axis: ``values [..., 16]``, float32. What
belongs to a block has the leading shape ``[...]``; so has the global scale, or it is a scalar. A
kernel takes ``block_amax``, then ``dynamic_scale`` of a row's largest where the scale comes from
the data, then ``quantize_blocks``, and stores codes ``[..., 8]`` and scale bytes at
``scale_offset``. It visits ``scale_rows`` rows and ``scale_columns`` blocks of each, and stores
scale 0 where there is no row or no block.

``CONVERT`` is what the launcher gets from ``conversion``: how codes come out of float32.

Every quotient must equal one IEEE division where it decides a code or a block scale: at the borders
of E2M1 and E4M3, which are small multiples of 1/16 times a power of two. Two operations do it once
the reciprocal is known to some 46 bits, as a sum of two numbers: ``x * high + x * low``. A test on
a GPU compares every mantissa of a divisor and the numbers nearest to each border.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton._lib.numerics import INTERPRETED, e4m3_bits, e4m3_value, narrow, widen
from dsv4.triton._lib.words import divided_words, scaled_words
from dsv4.triton._runtime import launch_options

_INTEGERS = tl.constexpr(0)
_THROUGH_E5M2 = tl.constexpr(1)
_BY_INSTRUCTION = tl.constexpr(2)

_NAN_SCALE = tl.constexpr(0x7F)
_INFINITY = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)
# Codes are rounded at this scale, where 1 is the smallest normal number of E5M2: then E5M2 has the
# subnormal numbers where E2M1 has them.
_UNIT = tl.constexpr(2.0**-14)


def conversion(tensor: torch.Tensor) -> int:
    """Return how kernels on the tensor's GPU make codes: integers, E5M2, or instructions.

    All give the same bits. Conversions to E5M2 exist from compute capability 8.9, to E2M1 from
    10.0; integers are for older GPUs and the interpreter.
    """
    version = launch_options.capability(tensor)
    if version is None or version < (8, 9):
        return 0
    return 2 if version >= (10, 0) else 1


def scale_rows(rows: int, swizzled: bool) -> int:
    """Rows of scale bytes that a matrix has in memory: padded to 128 in the swizzled layout."""
    return -(-rows // 128) * 128 if swizzled else rows


def scale_columns(blocks: int, swizzled: bool) -> int:
    """Scale bytes that a row has in memory: padded to 4 in the swizzled layout."""
    return -(-blocks // 4) * 4 if swizzled else blocks


@triton.jit
def scale_offset(row, block, columns, SWIZZLED: tl.constexpr):
    """Return the offset of the scale byte of ``block`` in ``row``, from the first of its matrix.

    ``columns`` is ``scale_columns``. Swizzled (specification, section 11.3): tiles of 128 rows by 4
    blocks, 512 bytes each, one after the other along the row.
    """
    if SWIZZLED:
        of_row = (row // 128) * (columns // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4
        return of_row + (block // 4 * 512 + block % 4)
    return row * columns + block


@triton.jit
def larger(a, b):
    """The larger of two; NaN where one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger_bits(a, b):
    return tl.maximum(a, b)


@triton.jit
def largest(values):
    """Largest magnitude along the last axis, float32; NaN where one is NaN.

    The values may be of a narrow dtype still. Of 16 bits, or interpreted, they are compared as
    integers, among which NaN is above Inf and Inf above every number.
    """
    AXIS: tl.constexpr = len(values.shape) - 1
    if INTERPRETED:
        bits = widen(values).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return tl.max(bits, AXIS).to(tl.float32, bitcast=True)
    if values.dtype == tl.float32:
        return tl.reduce(tl.abs(values), AXIS, larger)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        # Not tl.max, which would widen each of them.
        bits = tl.reduce(values.to(tl.int16, bitcast=True) & 0x7FFF, AXIS, _larger_bits)
        return widen(bits.to(values.dtype, bitcast=True))


@triton.jit
def finite_amax(peak):
    """``(amax, finite)`` from ``largest``: amax is 0 where it is NaN or infinite."""
    finite = peak < float("inf")
    return tl.where(finite, peak, 0.0), finite


@triton.jit
def block_amax(values):
    """``(amax, finite)`` of blocks; amax is 0 where a value is NaN or infinite."""
    return finite_amax(largest(values))


@triton.jit
def _scale_of(amax, DIVISOR: tl.constexpr, HIGH: tl.constexpr, REST: tl.constexpr):
    """``amax / DIVISOR``, one IEEE division, but at least 2^-126, and 1 where amax is 0.

    DIVISOR times ``HIGH + REST`` is 1; compared with a division for every mantissa of amax. Where
    ``amax * REST`` could be subnormal, both are 2^64 times as large.
    """
    if INTERPRETED:  # whose fma rounds twice
        ratio = tl.div_rn(amax, DIVISOR)
    else:
        small = amax < 2.0**-60
        x = amax * tl.where(small, 2.0**64, 1.0)
        ratio = tl.fma(x, HIGH, x * REST) * tl.where(small, 2.0**-64, 1.0)
    return tl.where(amax == 0, 1.0, tl.maximum(ratio, 2.0**-126))


@triton.jit
def dynamic_scale(amax):
    """``amax / 2688``: at least 2^-126, and 1 where amax is 0."""
    return _scale_of(amax, 2688.0, 0.00037202381645329297, -6.929483462730923e-12)


@triton.jit
def fp8_block_scale(amax):
    """``amax / 448``: at least 2^-126, and 1 where amax is 0."""
    return _scale_of(amax, 448.0, 0.0022321429569274187, -9.978456255721468e-11)


@triton.jit
def near_reciprocal(x):
    """``1 / x`` within one unit of the last place, for normal x and result."""
    if INTERPRETED:
        return tl.div_rn(1.0, x)
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _reciprocal(x):
    """``1 / x`` correctly rounded, for normal x and result.

    One step of Newton from the hardware's guess. It is what the division of the hardware's vendor
    does; a test on a GPU compares all mantissas.
    """
    guess = near_reciprocal(x)
    return tl.fma(tl.fma(-x, guess, 1.0), guess, guess)


@triton.jit
def narrowed(values, dtype: tl.constexpr):
    """``narrow`` for values that are not stored but quantised as ``dtype``.

    Conversions to bfloat16 that are not stored come out one by one, at an eighth of the speed of
    conversions in pairs; so pairs are asked for.
    """
    if dtype == tl.bfloat16 and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [values],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return narrow(values, dtype)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """float32 ``values`` rounded to ``dtype`` and back; see ``narrowed``."""
    return widen(narrowed(values, dtype))


@triton.jit
def is_moderate(global_scale):
    """Return whether divisions by this scale, or by it times a block scale, need no ``shift``.

    Then no intermediate value that matters underflows or overflows, and block maxima that are
    rounded as subnormal numbers have block scale 0 however they are rounded.
    """
    return (global_scale > 2.0**-100) & (global_scale < 2.0**60)


@triton.jit
def divisor(x, MODERATE: tl.constexpr = False):
    """``(shift, high, low)`` for ``quotient``: what all divisions by x > 0 have in common.

    ``shift`` is a power of two by which numerator and divisor are multiplied, exactly, so that
    nothing that decides a result underflows or overflows; 1 without asking where x is known to be
    ``MODERATE``. An infinite x is the caller's to handle.
    """
    shift = tl.full(x.shape, 1.0, tl.float32)
    if not MODERATE:
        shift = tl.where(x < 2.0**-60, 2.0**100, tl.where(x > 2.0**60, 2.0**-100, 1.0))
    shifted = x * shift
    high = _reciprocal(shifted)
    error = tl.fma(-shifted, high, 1.0)
    return shift, high, tl.fma(error, error, error) * high


@triton.jit
def quotient(x, shift, high, low):
    """``|x / divisor|``, one IEEE division as far as borders of E2M1 or E4M3 can tell.

    Where it overflows it may be NaN: callers take the smaller of it and the largest value they can
    hold, which is a number then, too.
    """
    scaled = x * shift
    return tl.abs(tl.fma(scaled, high, scaled * low))


@triton.jit
def _sixth(x, MODERATE: tl.constexpr):
    """``x / 6``, one IEEE division; where MODERATE, of results that are normal numbers.

    6 times a sum of two numbers is 1; compared with a division for every mantissa of x.
    """
    if MODERATE:
        return tl.fma(x, 0.16666667163372039795, x * -4.9670538793122887e-09)
    return tl.div_rn(x, 6.0)


@triton.jit
def block_scales(amax, finite, global_scale, WEIGHT: tl.constexpr, MODERATE: tl.constexpr = False):
    """E4M3 bytes of the block scales, and ``block scale * global scale`` for the codes.

    The product is 0 where the codes must be 0: the block scale rounded to 0, or its byte is NaN
    (0x7F) because the block or the global scale is no usable number.
    """
    if WEIGHT:
        six = global_scale * 6.0
        shift, high, low = divisor(six, MODERATE)
        ratio = tl.minimum(quotient(amax, shift, high, low), 448.0)
        ratio = tl.where(six < float("inf"), tl.maximum(ratio, 0.001953125), 0.001953125)
        ratio = tl.where(amax == 0, 1.0, ratio)
    else:
        shift, high, low = divisor(global_scale, MODERATE)
        ratio = tl.minimum(quotient(_sixth(amax, MODERATE), shift, high, low), 448.0)
    usable = finite
    if not MODERATE:
        # Both comparisons are false for a NaN. A scalar condition is not broadcast if interpreted.
        _, scale = tl.broadcast(amax, global_scale)
        usable = finite & (scale > 0) & (scale < float("inf"))
    bits = e4m3_bits(ratio)
    product = tl.where(usable, e4m3_value(bits) * global_scale, 0.0)
    return tl.where(usable, bits, _NAN_SCALE).to(tl.uint8), product


@triton.jit
def _round(x, shift, high, low, bound, sign, CONVERT: tl.constexpr):
    """``x / product`` as a value of E2M1, times ``_UNIT``; the sign, of zeros too, is that of x.

    Where an instruction will round, neither rounded nor times ``_UNIT``. Else by addition of 2^22
    times the power of two below the magnitude (1 at least), which leaves a multiple of half that
    power; ties go to the even code. ``bound`` is 6, where it saturates; in a block whose codes must
    be 0 it is 0, and so is ``sign``.
    """
    magnitude = tl.minimum(quotient(x, shift, high, low), bound)
    if CONVERT != _BY_INSTRUCTION:
        power = tl.maximum(magnitude, _UNIT).to(tl.int32, bitcast=True) & _INFINITY
        power = power.to(tl.float32, bitcast=True)
        magnitude = tl.fma(power, -4194304.0, tl.fma(power, 4194304.0, magnitude))
    signed = magnitude.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & sign)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def _nibble(x):
    """Code of an E2M1 value times ``_UNIT``: at 2^-126 its bits are those of float32, shifted."""
    bits = (x * 2.0**-112).to(tl.int32, bitcast=True)
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def _pack(even, odd, CONVERT: tl.constexpr):
    """Bytes of what ``_round`` returned, ``even`` in the low nibble."""
    if CONVERT == _BY_INSTRUCTION:
        return tl.inline_asm_elementwise(
            """
            { .reg .b8 a, b, c, d;
            cvt.rn.satfinite.e2m1x2.f32 a, $5, $1; cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 c, $7, $3; cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
            mov.b32 $0, {a, b, c, d}; }
            """,
            "=r,f,f,f,f,f,f,f,f",
            [even, odd],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    if CONVERT == _THROUGH_E5M2:
        # A byte of E5M2 is the sign, three zeros, the code, a zero.
        return tl.inline_asm_elementwise(
            """
            { .reg .b16 a, b; .reg .b32 x, y, z;
            cvt.rn.satfinite.e5m2x2.f32 a, $2, $1; cvt.rn.satfinite.e5m2x2.f32 b, $4, $3;
            mov.b32 x, {a, b};
            cvt.rn.satfinite.e5m2x2.f32 a, $6, $5; cvt.rn.satfinite.e5m2x2.f32 b, $8, $7;
            mov.b32 y, {a, b};
            shr.b32 z, x, 1; and.b32 z, z, 0x07070707;
            shr.b32 x, x, 4; and.b32 x, x, 0x08080808; or.b32 z, z, x;
            shl.b32 x, y, 3; and.b32 x, x, 0x70707070; or.b32 z, z, x;
            and.b32 y, y, 0x80808080; or.b32 $0, z, y; }
            """,
            "=r,f,f,f,f,f,f,f,f",
            [even, odd],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return (_nibble(even) | (_nibble(odd) << 4)).to(tl.uint8)


@triton.jit
def divided_codes(values, shift, high, low, bound, CONVERT: tl.constexpr):
    """Packed codes ``[..., n / 2]`` (uint8) of ``values [..., n]`` divided by block.

    ``shift``, ``high`` and ``low`` are as for ``quotient``. A quotient past ``bound``, at most 6,
    becomes ``bound``; where that is 0 the codes are 0, whatever the values. Each ``[...]``.
    """
    PAIRS: tl.constexpr = values.shape[len(values.shape) - 1] // 2
    UNIT: tl.constexpr = 1.0 if CONVERT == _BY_INSTRUCTION else _UNIT
    even, odd = tl.split(tl.reshape(values, values.shape[:-1] + [PAIRS, 2]))  # noqa: RUF005
    shift = tl.expand_dims(shift, -1)
    high = tl.expand_dims(high * UNIT, -1)
    low = tl.expand_dims(low * UNIT, -1)
    sign = tl.expand_dims(tl.where(bound > 0, _SIGN, 0), -1)
    bound = tl.expand_dims(bound * UNIT, -1)
    even = _round(even, shift, high, low, bound, sign, CONVERT)
    odd = _round(odd, shift, high, low, bound, sign, CONVERT)
    return _pack(even, odd, CONVERT)


@triton.jit
def e2m1_codes(values, product, CONVERT: tl.constexpr, MODERATE: tl.constexpr = False):
    """Packed codes ``[..., n / 2]`` (uint8) of ``values [..., n] / product [...]``.

    The values may be of a narrow dtype still. To nearest even, saturating at 6; the even column is
    the low nibble. Blocks whose product is 0 get codes 0. A part of a block may be coded alone,
    ``n = 8`` say.
    """
    if MODERATE and CONVERT == _THROUGH_E5M2 and values.dtype == tl.bfloat16:
        _, high, low = divisor(tl.where(product > 0, product, 1.0), MODERATE)
        return divided_words(values, product, high, low)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        shift, high, low = divisor(product, MODERATE)
        bound = tl.full(product.shape, 6.0, tl.float32)
        if not MODERATE:
            # Divided by an infinity all is 0, but for the sign.
            bound = tl.where(product < float("inf"), 6.0, 2.0**-100)
        bound = tl.where(product > 0, bound, 0.0)
        return divided_codes(widen(values), shift, high, low, bound, CONVERT)


@triton.jit
def scaled_codes(values, factor, bound, CONVERT: tl.constexpr):
    """Packed codes ``[..., n / 2]`` (uint8) of ``values [..., n] * factor [...]``, powers of two.

    ``bound`` is 6, or 0 where the codes must be 0. The values may be of a narrow dtype still.
    """
    if CONVERT == _THROUGH_E5M2 and values.dtype == tl.bfloat16:
        return scaled_words(values, factor, bound)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        unit = tl.full(factor.shape, 1.0, tl.float32)
        return divided_codes(widen(values), factor, unit, unit * 0.0, bound, CONVERT)


@triton.jit
def quantize_blocks(
    values, amax, finite, global_scale, WEIGHT: tl.constexpr, CONVERT: tl.constexpr
):
    """``(codes [..., 8], scale bytes [...])`` of ``values [..., 16]``; see ``block_amax``."""
    bits, product = block_scales(amax, finite, global_scale, WEIGHT)
    return e2m1_codes(values, product, CONVERT), bits
