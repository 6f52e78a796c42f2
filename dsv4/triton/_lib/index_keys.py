"""Index keys and queries in registers, to and from their codes.

The layout is ``dsv4.kv_cache.pages.IndexLayout``.

Bit for bit what ``dsv4.reference._index_entries`` does, for a block of rows ``[ROWS, BLOCK]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kv_cache.pages import FP4_GROUP
from dsv4.triton._lib.hadamard import fp4_exponents, group_exponents
from dsv4.triton._lib.numerics import (
    INTERPRETED,
    converts_e4m3,
    e4m3_bits,
    e4m3_value,
    narrow,
    power_of_two,
)
from dsv4.triton._lib.nvfp4 import divided_codes, largest, scaled_codes
from dsv4.triton._lib.words import exact_words, largest_of_words

GROUP = tl.constexpr(FP4_GROUP)
_THROUGH_E5M2 = tl.constexpr(1)  # of ``nvfp4.conversion``
# float32 bits of 1e-4, the smallest maximum a row of E4M3 is scaled by.
_FLOOR = tl.constexpr(0x38D1B717)
_NAN = tl.constexpr(0x7FC00000)
# Four words, each with two bfloat16 values of the eight codes in $8 times the factors in $9.
_FP4_WORDS = (
    "{ .reg .b32 x, y; "
    "shl.b32 x, $8, 12; and.b32 x, x, 0x80008000; shl.b32 y, $8, 6; "
    "lop3.b32 x, y, 0x01C001C0, x, 0xEA; mul.rn.bf16x2 x, x, $9; mov.b32 {$0, $1}, x; "
    "shl.b32 x, $8, 8; and.b32 x, x, 0x80008000; shl.b32 y, $8, 2; "
    "lop3.b32 x, y, 0x01C001C0, x, 0xEA; mul.rn.bf16x2 x, x, $9; mov.b32 {$2, $3}, x; "
    "shl.b32 x, $8, 4; and.b32 x, x, 0x80008000; shr.u32 y, $8, 2; "
    "lop3.b32 x, y, 0x01C001C0, x, 0xEA; mul.rn.bf16x2 x, x, $9; mov.b32 {$4, $5}, x; "
    "and.b32 x, $8, 0x80008000; shr.u32 y, $8, 6; "
    "lop3.b32 x, y, 0x01C001C0, x, 0xEA; mul.rn.bf16x2 x, x, $9; mov.b32 {$6, $7}, x; }"
)
_MULTIPLIED = tl.constexpr(_FP4_WORDS)
# Before compute capability 9.0 bfloat16 has fma but no mul; adding -0 changes no bit.
_MULTIPLIED_BY_FMA = tl.constexpr(
    _FP4_WORDS.replace("x, y; ", "x, y, none; mov.b32 none, 0x80008000; ", 1).replace(
        "mul.rn.bf16x2 x, x, $9", "fma.rn.bf16x2 x, x, $9, none"
    )
)


@triton.jit
def e4m3_scale(peak):
    """``(factor, scale)`` of rows by their largest magnitudes: codes are of values times factor.

    448 is 1.75 * 2^8, so ``ceil(log2(peak / 448))`` is the exponent of the peak less 8, and one
    more where its mantissa passes 1.75. Both are NaN where the peak is NaN or Inf.
    """
    finite = peak < float("inf")
    byte = ((tl.maximum(peak.to(tl.int32, bitcast=True), _FLOOR) + 0x1FFFFF) >> 23) - 8
    factor = tl.where(finite, (254 - byte) << 23, _NAN).to(tl.float32, bitcast=True)
    return factor, tl.where(finite, byte << 23, _NAN).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_rows(values):
    """E4M3 codes (uint8) of float32 rows, and the scale of each, float32 ``[ROWS]``."""
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    factor, scale = e4m3_scale(amax.to(tl.float32, bitcast=True))
    return e4m3_bits(values * factor[:, None]), scale


@triton.jit
def mxfp4_rows(values, CONVERT: tl.constexpr):
    """Packed E2M1 codes ``[ROWS, BLOCK / 2]`` and E8M0 bytes ``[ROWS, BLOCK / 32]``, uint8.

    ``CONVERT`` is what ``nvfp4.conversion`` gives.
    """
    ROWS: tl.constexpr = values.shape[0]
    BLOCK: tl.constexpr = values.shape[1]
    groups = tl.reshape(values, [ROWS, BLOCK // GROUP, GROUP])
    exponent, finite = group_exponents(groups)
    exponent = tl.reshape(exponent, [ROWS, BLOCK // GROUP])
    finite = tl.reshape(finite, [ROWS, BLOCK // GROUP])
    inverse = power_of_two(-exponent)
    unit = tl.full(inverse.shape, 1.0, tl.float32)
    bound = tl.where(finite, 6.0, 0.0)
    codes = divided_codes(groups, inverse, unit, unit * 0.0, bound, CONVERT)
    scales = tl.where(finite, exponent + 127, 255).to(tl.uint8)
    return tl.reshape(codes, [ROWS, BLOCK // 2]), scales


@triton.jit
def mxfp4_tile(values, CONVERT: tl.constexpr):
    """``mxfp4_rows`` of a tile of bfloat16 rows, see ``_hadamard``."""
    ROWS: tl.constexpr = values.shape[0]
    BLOCK: tl.constexpr = values.shape[1]
    groups = tl.reshape(values, [ROWS * BLOCK // GROUP, GROUP])
    if CONVERT == _THROUGH_E5M2:
        exponent, finite = fp4_exponents(largest_of_words(groups))
        codes = exact_words(groups, power_of_two(-exponent), finite)
    else:
        exponent, finite = fp4_exponents(largest(groups))
        bound = tl.where(finite, 6.0, 0.0)
        codes = scaled_codes(groups, power_of_two(-exponent), bound, CONVERT)
    scales = tl.where(finite, exponent + 127, 255).to(tl.uint8)
    return tl.reshape(codes, [ROWS, BLOCK // 2]), tl.reshape(scales, [ROWS, BLOCK // GROUP])


@triton.jit
def e4m3_values(codes, dtype: tl.constexpr):
    """Values of E4M3 codes (uint8), exact in ``dtype``: bfloat16, float16 or float32."""
    if INTERPRETED or not converts_e4m3():
        return narrow(e4m3_value(codes), dtype)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
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
        address = (data + entry * D)[:, None] + column
        tl.store(address, codes, mask=written[:, None] & (column < D))
        address = (data + PAGE_SIZE * D).to(tl.pointer_type(tl.float32)) + entry
        tl.store(address, scale, mask=written)
    else:
        codes, scales = mxfp4_rows(values, CONVERT)
        byte = tl.arange(0, BLOCK // 2)[None, :]
        address = (data + entry * (D // 2))[:, None] + byte
        tl.store(address, codes, mask=written[:, None] & (byte < D // 2))
        group = tl.arange(0, BLOCK // GROUP)[None, :]
        address = (data + PAGE_SIZE * (D // 2) + entry * (D // GROUP))[:, None] + group
        tl.store(address, scales, mask=written[:, None] & (group < D // GROUP))


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
    address = data + (start + within * BYTES)[:, None] + byte
    codes = tl.load(address, mask=seen[:, None] & (byte < BYTES), other=0)
    if FORMAT == "index_fp8":
        address = (data + start + size * BYTES).to(tl.pointer_type(tl.float32)) + within
        scale = tl.load(address, mask=seen, other=0.0)
        return e4m3_values(codes, DTYPE), scale
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        group = tl.arange(0, DIMS // GROUP)[None, :]
        address = data + (start + size * BYTES + within * (D // GROUP))[:, None] + group
        scales = tl.load(address, mask=seen[:, None] & (group < D // GROUP), other=0)
        return mxfp4_values(codes, scales, DTYPE), tl.full(seen.shape, 1.0, tl.float32)


@triton.jit
def in_word_order(values, FORMAT: tl.constexpr):
    """Queries ``[ROWS, 128]``, their dims in the order of a key's from ``dequantize_words``."""
    ROWS: tl.constexpr = values.shape[0]
    if FORMAT == "index_fp8":
        # By half of the key, thread of four, its word of four, byte of the word: 2 x 2.
        parts = tl.permute(tl.reshape(values, [ROWS, 2, 4, 4, 2, 2]), [0, 1, 3, 4, 2, 5])
        return tl.reshape(parts, [ROWS, 128])
    # By thread of four, its word of four, half of the word, code of that.
    parts = tl.permute(tl.reshape(values, [ROWS, 4, 4, 2, 4]), [0, 2, 4, 1, 3])
    return tl.reshape(parts, [ROWS, 128])


@triton.jit
def load_fp4_queries(codes, scales, real, SM: tl.constexpr):
    """MXFP4 queries of 128 dims, ``[ROWS, 128]`` in bfloat16 and ``in_word_order``, and scales.

    The scale of a row is to be multiplied into its weight, as in ``dequantize_words``.

    Args:
        codes: Pointers ``[ROWS]`` to the codes of each, int32.
        scales: Pointers ``[ROWS]`` to its four scales, int32.
        real: ``[ROWS]``; the others are zeros.
        SM: See ``dequantize_words``.
    """
    ROWS: tl.constexpr = codes.shape[0]
    address = codes[:, None] + tl.arange(0, 16)[None, :]
    words = tl.load(address, mask=real[:, None], other=0)
    factor, scale = _fp4_factors(tl.load(scales, mask=real, other=0))
    factor = tl.broadcast_to(factor[:, :, None], [ROWS, 4, 4])
    parts = _fp4_words(words, tl.reshape(factor, [ROWS, 16]), SM)
    parts = tl.permute(tl.reshape(parts, [ROWS, 4, 4, 2, 2, 2]), [0, 2, 5, 4, 1, 3])
    return tl.reshape(parts, [ROWS, 128]), scale


@triton.jit
def fetch_words(
    data,
    page,
    within,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Words, int32, of neighbouring keys of one page, for ``dequantize_words``.

    Args:
        data: Pointer to the pages, uint8, each of which is aligned to 16 bytes.
        page: Number of the page; -1 counts as 0.
        within: Number of the first key in the page.
        page_stride: Bytes from one page to the next.
        PAGE_SIZE: Entries per page.
        ROWS: A multiple of 64.
        FORMAT: ``"index_fp8"`` or ``"index_mxfp4"``, of 128 dims.

    Returns:
        Codes ``[ROWS, 16]`` and, of FP8, those of the other half; the scales ``[ROWS]`` of a key.
    """
    WORDS: tl.constexpr = 32 if FORMAT == "index_fp8" else 16
    start = data + tl.maximum(page, 0).to(tl.int64) * page_stride
    words = start.to(tl.pointer_type(tl.int32))
    # Row t of the access is key e; the same words of 16 rows are a thread's in steps of 8 keys.
    t = tl.arange(0, ROWS)
    e = (t & 7) | ((t >> 5) & 1) << 3 | ((t >> 3) & 3) << 4 | (t >> 6 << 6)
    codes = words + ((within + e) * WORDS)[:, None] + tl.arange(0, 16)[None, :]
    scales = words + PAGE_SIZE * WORDS + within
    low = tl.load(codes)
    if FORMAT == "index_fp8":
        return low, tl.load(codes + 16), tl.load(scales + t)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return low, low, tl.load(scales + e)


@triton.jit
def dequantize_words(
    low, high, scales, FORMAT: tl.constexpr, DTYPE: tl.constexpr, SM: tl.constexpr
):
    """Keys ``[ROWS, 128]`` in ``DTYPE``, ``in_word_order``, and their scales ``[ROWS]``.

    For the tensor core's operand that is in registers, where a thread holds, of rows r and r + 8
    of every 16, dims 2 j, 2 j + 1, 2 j + 8, 2 j + 9 of every 16: j is its number among four. Words
    of four bytes go from memory to the threads that have them as operands, four in one access, and
    are expanded there; nothing is exchanged. So the dims are in another order.

    A score is to be multiplied by the scale of its key: that of FP8; of MXFP4 the largest of the
    key's, by which its codes are already divided. It is a power of two, or NaN.

    Args:
        low: See ``fetch_words``, as the next two.
        high: See there.
        scales: See there.
        FORMAT: ``"index_fp8"`` or ``"index_mxfp4"``.
        DTYPE: float16 or bfloat16 for FP8, bfloat16 for MXFP4.
        SM: Result of ``launch_options.sm``.
    """
    ROWS: tl.constexpr = low.shape[0]
    if FORMAT == "index_fp8":
        parts = tl.join(_fp8_words(low, DTYPE), _fp8_words(high, DTYPE))
        # [.., 8 rows, thread, word, byte, byte, half]
        parts = tl.reshape(parts, [ROWS // 64, 2, 4, 8, 4, 4, 2, 2, 2])
        parts = tl.permute(parts, [0, 2, 1, 3, 8, 5, 7, 4, 6])
        scale = scales.to(tl.float32, bitcast=True)
    else:
        factor, scale = _fp4_factors(scales)
        factor = tl.broadcast_to(factor[:, :, None], [ROWS, 4, 4])
        parts = _fp4_words(low, tl.reshape(factor, [ROWS, 16]), SM)
        # [.., 8 rows, thread, word, half, code, code]
        parts = tl.reshape(parts, [ROWS // 64, 2, 4, 8, 4, 4, 2, 2, 2])
        parts = tl.permute(parts, [0, 2, 1, 3, 5, 8, 7, 4, 6])
        scale = tl.permute(tl.reshape(scale, [ROWS // 64, 2, 4, 8]), [0, 2, 1, 3])
        scale = tl.reshape(scale, [ROWS])
    return tl.reshape(parts, [ROWS, 128]), scale


@triton.jit
def _fp8_words(words, DTYPE: tl.constexpr):
    # int32 [M, W] of four codes to [M, W, 2, 2]: bit 0 of a code's number, then bit 1.
    if INTERPRETED or tl.bfloat16 == DTYPE or not converts_e4m3():
        a, b = e4m3_values(_byte(words, 0), DTYPE), e4m3_values(_byte(words, 1), DTYPE)
        c, d = e4m3_values(_byte(words, 2), DTYPE), e4m3_values(_byte(words, 3), DTYPE)
        return tl.join(tl.join(a, b), tl.join(c, d))
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; .reg .b32 x, y; mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 x, l; "
            "cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {$0, $1}, x; mov.b32 {$2, $3}, y; }",
            "=h,=h,=h,=h,r",
            [words],
            (tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
        return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _byte(words, NUMBER: tl.constexpr):
    return ((words >> (8 * NUMBER)) & 255).to(tl.uint8)


@triton.jit
def _fp4_factors(four):
    """Factors ``[M, 4]`` (int32, bfloat16 twice) and scales ``[M]`` of E8M0 bytes (int32 ``[M]``).

    A factor is 2^126 times a scale over the largest of the four, which is the other result; 0 where
    it is below 2^-253, so that a code times its own is at most 6.
    """
    lower = tl.maximum(four & 255, (four >> 8) & 255)
    largest = tl.maximum(lower, tl.maximum((four >> 16) & 255, (four >> 24) & 255))
    byte = (four[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 255
    factor = tl.maximum(253 + byte - largest[:, None], 0) * 0x800080
    # Byte 0 is 2^-127, a subnormal number; byte 255 is NaN.
    bits = tl.where(largest == 0, 1 << 22, largest << 23)
    bits = tl.where(largest == 255, _NAN, bits)
    return factor, bits.to(tl.float32, bitcast=True)


@triton.jit
def _fp4_words(words, factor, SM: tl.constexpr):
    # int32 [M, W] of eight codes times bfloat16 factors to [M, W, 2, 2, 2]: by bit 2 of a code's
    # number, bit 0, bit 1. The bits of a code, moved, are those of its value times 2^-126.
    if INTERPRETED:
        a, e = _fp4_value(words, factor, 0), _fp4_value(words, factor, 4)
        b, f = _fp4_value(words, factor, 1), _fp4_value(words, factor, 5)
        c, g = _fp4_value(words, factor, 2), _fp4_value(words, factor, 6)
        d, h = _fp4_value(words, factor, 3), _fp4_value(words, factor, 7)
    else:
        a, e, b, f, c, g, d, h = tl.inline_asm_elementwise(
            _MULTIPLIED if SM >= 90 else _MULTIPLIED_BY_FMA,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [words, factor],
            (tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    low, high = tl.join(tl.join(a, e), tl.join(b, f)), tl.join(tl.join(c, g), tl.join(d, h))
    return tl.join(low, high)


@triton.jit
def _fp4_value(words, factor, NUMBER: tl.constexpr):
    # Of one code of each word, as the instructions compute it.
    code = (words >> (4 * NUMBER)) & 15
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    value = bits.to(tl.float32, bitcast=True) * (factor << 16).to(tl.float32, bitcast=True)
    return narrow(value, tl.bfloat16)
