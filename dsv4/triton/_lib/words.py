"""E2M1 codes of bfloat16 values, two to a 32-bit word, for GPUs that round through E5M2.

The same bits as ``dsv4.triton._lib.nvfp4`` gives for float32, in fewer instructions: two values
share what can be done to a word (absolute value, clamp, sign), and a value is rounded by one
addition and one subtraction of a number that is 2^22 times the power of two below its quotient,
within a quarter. Compiled code only.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes are rounded at this scale, where 1 is the smallest normal number of E5M2: then E5M2 has the
# subnormal numbers where E2M1 has them.
_UNIT = tl.constexpr(2.0**-14)
_TOP = tl.constexpr(-0x10000)
_SIGNS_OF_CODES = tl.constexpr(-0x77777778)


def _for_words(step: str) -> str:
    """``step`` for each of the operands $1 to $4, called WORD in it, and $5 to $8, called FACTOR.

    @ is a number, 0 to 3.
    """
    return "\n".join(
        step.replace("WORD", f"${k + 1}").replace("FACTOR", f"${k + 5}").replace("@", str(k))
        for k in range(4)
    )


# Signs of 8 values as the highest bits of 8 nibbles; all bits of ``sign`` but these are garbage.
_SIGNS = """
prmt.b32 y, $1, $2, 0x7531; prmt.b32 z, $3, $4, 0x7531;
prmt.b32 sign, y, z, 0x6420; shr.b32 sign, sign, 4; prmt.b32 y, y, z, 0x7531;
lop3.b32 sign, sign, y, 0x0F0F0F0F, 0xE4;
"""

# After the words $1 to $4, of one block: high, low, coarse, least, cap, live. A byte of E5M2
# is the sign (but for zeros), three zeros, the code, a zero.
_DIVIDED = tl.constexpr(
    """{ .reg .b32 a, x, y, z, sign; .reg .b16 c, d; .reg .f32 low, high, m, back;
    .reg .f32 even0, even1, even2, even3, odd0, odd1, odd2, odd3;
    neg.f32 back, $7;"""
    + _for_words("""
    min.xorsign.abs.bf16x2 a, WORD, $9;
    shl.b32 x, a, 16; mov.b32 low, x; and.b32 y, a, 0xFFFF0000; mov.b32 high, y;
    mul.rn.f32 even@, low, $6; fma.rn.f32 even@, low, $5, even@; abs.f32 m, low; max.f32 m, m, $8;
    fma.rn.f32 even@, m, $7, even@; fma.rn.f32 even@, m, back, even@;
    mul.rn.f32 odd@, high, $6; fma.rn.f32 odd@, high, $5, odd@; abs.f32 m, high; max.f32 m, m, $8;
    fma.rn.f32 odd@, m, $7, odd@; fma.rn.f32 odd@, m, back, odd@;""")
    + """
    cvt.rn.satfinite.e5m2x2.f32 c, even1, even0; cvt.rn.satfinite.e5m2x2.f32 d, even3, even2;
    mov.b32 x, {c, d};
    cvt.rn.satfinite.e5m2x2.f32 c, odd1, odd0; cvt.rn.satfinite.e5m2x2.f32 d, odd3, odd2;
    mov.b32 y, {c, d};
    shr.b32 x, x, 1; shl.b32 y, y, 3; lop3.b32 x, x, y, 0x0F0F0F0F, 0xE4;"""
    + _SIGNS
    + "lop3.b32 $0, sign, $10, x, 0xEA; }"
)

# Rounded quotients q0 to q3 in units of 2^-126: there codes are bits 6 to 8 of a bfloat16, because
# the subnormal numbers are where E2M1 has them. Codes of all, without signs, go to x.
_ROUND = """
    max.bf16x2 m, a, one; and.b32 m, m, 0x7F807F80;
    fma.rn.bf16x2 a, m, up, a; fma.rn.bf16x2 a, m, down, a; fma.rn.bf16x2 q@, a, unit, zero;"""
_NUMBERS = """{ .reg .b32 a, m, n, x, y, z, sign, zero, up, down, one, unit, q0, q1, q2, q3;
    mov.b32 zero, 0x80008000; mov.b32 one, 0x3F803F80; mov.b32 unit, 0x00800080;
    mov.b32 up, 0x42804280; mov.b32 down, 0xC280C280;"""
_CODES = """
    shr.b32 x, q0, 6; shl.b32 m, q1, 2; add.u32 x, x, m;
    shr.b32 a, q2, 6; shl.b32 m, q3, 2; add.u32 a, a, m;
    prmt.b32 n, x, a, 0x7632; prmt.b32 x, x, a, 0x5410;
    shl.b32 n, n, 4; add.u32 x, x, n;"""

# After the words, of one block: factor, cap, live.
_SCALED = tl.constexpr(
    _NUMBERS
    + _for_words("fma.rn.bf16x2 a, WORD, $5, zero; abs.bf16x2 a, a; min.bf16x2 a, a, $6;" + _ROUND)
    + _CODES
    + _SIGNS
    + "lop3.b32 $0, sign, $7, x, 0xEA; }"
)

# After the words a factor for each: they may be of different blocks, whose values do not saturate.
_EXACT = tl.constexpr(
    _NUMBERS
    + _for_words("fma.rn.bf16x2 a, WORD, FACTOR, zero; abs.bf16x2 a, a;" + _ROUND)
    + _CODES
    + _SIGNS
    + "lop3.b32 $0, sign, 0x88888888, x, 0xEA; }"
)


@triton.jit
def words_of(values):
    """bfloat16 ``[..., n]`` as 32-bit words ``[..., n / 2]`` of two, the even one below."""
    PAIRS: tl.constexpr = values.shape[len(values.shape) - 1] // 2
    halves = tl.reshape(values.to(tl.uint16, bitcast=True), values.shape[:-1] + [PAIRS, 2])  # noqa: RUF005
    even, odd = tl.split(halves)
    return even.to(tl.uint32) | (odd.to(tl.uint32) << 16)


@triton.jit
def largest_of_words(values):
    """Largest magnitude along the last axis of bfloat16 values, float32; NaN where one is NaN.

    It lies in the threads that have the words of its values, for ``scaled_words``. Magnitudes are
    compared as integers: NaN is above Inf and Inf above every number.
    """
    words = words_of(values).to(tl.int32, bitcast=True)
    larger = tl.maximum(words & 0x7FFF0000, (words << 16) & 0x7FFF0000)
    return tl.max(larger, len(larger.shape) - 1).to(tl.float32, bitcast=True)


@triton.jit
def _twice(x):
    """The word of two bfloat16 numbers that float32 x is cut off to."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits >> 16) | (bits & 0xFFFF0000)


@triton.jit
def _live(x):
    """All signs of codes, or none of them where x is 0."""
    return tl.where(x > 0, _SIGNS_OF_CODES, 0)


@triton.jit
def _cut(x):
    """Float32 x cut off to the precision of bfloat16, toward zero."""
    return (x.to(tl.int32, bitcast=True) & _TOP).to(tl.float32, bitcast=True)


@triton.jit
def fours(x):
    """Split ``[..., 4 n]`` to the first, second, third and fourth of every four, ``[..., n]`` each.

    So one thread has all four, whichever had them before.
    """
    FOURS: tl.constexpr = x.shape[len(x.shape) - 1] // 4
    even, odd = tl.split(tl.reshape(x, x.shape[:-1] + [FOURS, 2, 2]))  # noqa: RUF005
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _as_bytes(words):
    """The bytes of ``words [..., n]``, uint8 ``[..., 4 n]``."""
    COUNT: tl.constexpr = words.shape[len(words.shape) - 1]
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    return tl.reshape(tl.join(even, odd), words.shape[:-1] + [4 * COUNT])  # noqa: RUF005


@triton.jit
def word_of(codes):
    """The four bytes of ``codes [N, 4]`` as a word, ``[N]``."""
    first, second, third, fourth = fours(codes.to(tl.uint32))
    word = first | (second << 8) | (third << 16) | (fourth << 24)
    return tl.reshape(word, [codes.shape[0]])


@triton.jit
def divided_words(values, product, high, low):
    """Packed codes ``[..., n / 2]`` (uint8) of bfloat16 ``values [..., n] / product [...]``.

    n is a multiple of 8. ``high + low`` is the reciprocal (``nvfp4.divisor``) of a moderate
    product, or anything finite where the product is 0, where the codes are 0. The quotient is
    clamped before it is computed, to 5.71 to 5.75, of which the code is that of 6. It is rounded by
    ``coarse * x``, exact in float32 and a multiple of 128 units of the rounding, where x counts as
    no less than ``least``: from 1 to 1.04 times what 1 as a quotient is. Off by a quarter it would
    round the same.
    """
    a, b, c, d = fours(words_of(values))
    codes = tl.inline_asm_elementwise(
        _DIVIDED,
        "=r,r,r,r,r,f,f,f,f,r,r",
        [
            a,
            b,
            c,
            d,
            tl.expand_dims(high * _UNIT, -1),
            tl.expand_dims(low * _UNIT, -1),
            tl.expand_dims(_cut(high * (_UNIT * 4194304.0)), -1),
            tl.expand_dims(_cut(product * 1.03125), -1),
            tl.expand_dims(_twice(product * 5.75), -1),
            tl.expand_dims(_live(product), -1),
        ],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )
    return _as_bytes(codes)


@triton.jit
def scaled_words(values, factor, bound):
    """Packed codes of bfloat16 ``values [..., n] * factor [...]``, a power of two.

    n is a multiple of 8. ``bound`` is 6, or 0 where the codes must be 0.
    """
    a, b, c, d = fours(words_of(values))
    codes = tl.inline_asm_elementwise(
        _SCALED,
        "=r,r,r,r,r,r,r,r",
        [
            a,
            b,
            c,
            d,
            tl.expand_dims(_twice(factor), -1),
            tl.expand_dims(_twice(bound), -1),
            tl.expand_dims(_live(bound), -1),
        ],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )
    return _as_bytes(codes)


@triton.jit
def exact_words(values, factor, usable):
    """``scaled_words`` of values that do not saturate, in whatever order threads have them.

    Codes are 0 where not ``usable [...]``.
    """
    words = tl.where(tl.expand_dims(usable, -1), words_of(values), 0)
    factors = tl.broadcast_to(tl.expand_dims(_twice(factor), -1), words.shape)
    return tl.inline_asm_elementwise(
        _EXACT, "=r,r,r,r,r,r,r,r,r", [words, factors], dtype=tl.uint8, is_pure=True, pack=4
    )
