"""Conversions between number formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint32

from dsv4.cute.device.ptx._emit import assembly

Value = Any  # a DSL scalar


def multiply_by_half(a: Value, b: Value, half: int) -> Value:
    """Both bfloat16 of ``a`` times the low (0) or high (1) one of ``b``; subnormals are kept."""
    one = "lh"[half]
    return assembly(
        "{ .reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, {$r1}; "
        f"mov.b32 d, {{{one}, {one}}}; mul.rn.bf16x2 {{$w0}}, {{$r0}}, d; }}",
        [Uint32],
        [a, b],
    )


def bfloat16_pair(low: Value, high: Value) -> Value:
    """Two float32 rounded to nearest even, in one word."""
    return assembly("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", [Uint32], [low, high])


def pack_sums(values: Sequence[Value]) -> tuple[Value, ...]:
    """Eight float32 in five words, as 20 bits each: sign, exponent and 11 bits of the fraction.

    The bits left out are made up for by a factor, so that a value is off by 2^-11.6 of it at most,
    and on average by nothing. Infinities stay such, and NaN, of which arithmetic has one with all
    bits set. Words 0 to 3 are upper halves of two values each; bits 15 to 12 are in word 4, of
    values 4 to 7 in the lower halves of its bytes.
    """
    names = [f"{c}{i}" for c in "xa" for i in range(8)]
    code = [f".reg .f32 {', '.join(names[:8])};", f".reg .b32 {', '.join(names[8:])}, p, q, s, t;"]
    for i in range(8):
        # 1 + 2^-12.5
        code += [f"mul.rn.f32 x{i}, {{$r{i}}}, 0f3F8005A8;", f"mov.b32 a{i}, x{i};"]
    code += [f"prmt.b32 {{$w{i}}}, a{2 * i}, a{2 * i + 1}, 0x7632;" for i in range(4)]
    for first, four in ((0, "s"), (4, "t")):
        code += [
            f"prmt.b32 p, a{first}, a{first + 1}, 0x0051;",
            f"prmt.b32 q, a{first + 2}, a{first + 3}, 0x0051;",
            f"prmt.b32 {four}, p, q, 0x5410;",
        ]
    code += ["shr.u32 t, t, 4;", "lop3.b32 {$w4}, 0x0f0f0f0f, t, s, 0xca;"]
    return assembly("{ " + " ".join(code) + " }", [Uint32] * 5, list(values))


def unpack_sums(words: Sequence[Value], fifth: Value, half: Value) -> tuple[Value, ...]:
    """Four float32 of two of ``pack_sums``' words and the fifth; ``half``: 0 or 1, which four.

    Bits 7 to 4 repeat bits 15 to 12.
    """
    code = [".reg .b32 s;", "shl.b32 s, {$r2}, {$r3};", "and.b32 s, s, 0xf0f0f0f0;"]
    for i, selector in enumerate(("0x1044", "0x3255", "0x1066", "0x3277")):
        code.append(f"prmt.b32 {{$w{i}}}, {{$r{i // 2}}}, s, {selector};")
    return assembly("{ " + " ".join(code) + " }", [Float32] * 4, [*words, fifth, 4 * Int32(half)])


def unpack_all_sums(words: Sequence[Value]) -> list[Value]:
    """The eight float32 of ``pack_sums``' five words."""
    halves = [unpack_sums(words[2 * h : 2 * h + 2], words[4], h) for h in range(2)]
    return [*halves[0], *halves[1]]


def low_float(word: Value) -> Value:
    """The lower bfloat16 of a word, as float32."""
    return assembly("{ .reg .b32 t; shl.b32 t, {$r0}, 16; mov.b32 {$w0}, t; }", [Float32], [word])


def high_float(word: Value) -> Value:
    """The upper bfloat16 of a word, as float32."""
    code = "{ .reg .b32 t; and.b32 t, {$r0}, 0xFFFF0000; mov.b32 {$w0}, t; }"
    return assembly(code, [Float32], [word])


def e4m3_pair(word: Value, half: int, factor: Value) -> Value:
    """Two E4M3 codes, the lower (0) or upper (1), times a pair of bfloat16, as bfloat16."""
    one = "lh"[half]
    return assembly(
        "{ .reg .b16 l, h, x, y; .reg .b32 d; .reg .f32 a, b; "
        f"mov.b32 {{l, h}}, {{$r0}}; cvt.rn.f16x2.e4m3x2 d, {one}; mov.b32 {{x, y}}, d; "
        "cvt.f32.f16 a, x; cvt.f32.f16 b, y; cvt.rn.bf16x2.f32 d, b, a; "
        "mul.rn.bf16x2 {$w0}, d, {$r1}; }",
        [Uint32],
        [word, factor],
    )


def e8m0_pair(byte: Value) -> Value:
    """``2^(byte - 127)`` as bfloat16, twice; NaN of 255."""
    return assembly(
        "{ .reg .u32 t; .reg .pred p; mul.lo.u32 {$w0}, {$r0}, 0x800080; "
        # Byte 0 is subnormal; of byte 255 the shifted bits are infinity's. Both want bit 6.
        "add.u32 t, {$r0}, 1; and.b32 t, t, 0xFE; setp.eq.u32 p, t, 0; "
        "@p or.b32 {$w0}, {$w0}, 0x400040; }",
        [Uint32],
        [byte],
    )


def signed_codes(word: Value, low: Value, high: Value, half: Value) -> tuple[Value, ...]:
    """Eight E2M1 codes as signed bytes, codes 0 to 3 and 4 to 7.

    ``half`` is 2^16, of which the compiler must not know: products take less time than shifts.

    ``low`` and ``high``: bytes, below 128, that the codes 0 to 3 and 4 to 7 without a sign stand
    for. A selector with the sign's bit gives zero instead of one of them.
    """
    one = (
        "prmt.b32 p, {{$r1}}, {{$r2}}, {0}; prmt.b32 n, {{$r1}}, {{$r2}}, {1}; "
        "add.u32 p, p, 0x80808080; sub.u32 p, p, n; xor.b32 {{$w{2}}}, p, 0x80808080; "
    )
    return assembly(
        "{ .reg .b32 x, y, z, p, n; xor.b32 x, {$r0}, 0x88888888; mul.hi.u32 y, {$r0}, {$r3}; "
        "mul.hi.u32 z, x, {$r3}; " + one.format("{$r0}", "x", 0) + one.format("y", "z", 1) + "}",
        [Uint32, Uint32],
        [word, low, high, half],
    )


def e8m0(byte: Value) -> Value:
    """``2^(byte - 127)``; NaN of 255."""
    return assembly(
        "{ .reg .b32 t; .reg .pred p; shl.b32 t, {$r0}, 23; setp.eq.u32 p, {$r0}, 0; "
        "@p mov.b32 t, 0x00400000; setp.eq.u32 p, {$r0}, 255; @p mov.b32 t, 0x7FC00000; "
        "mov.b32 {$w0}, t; }",
        [Float32],
        [byte],
    )


def float_of(word: Value) -> Value:
    """The float32 of these bits."""
    return assembly("mov.b32 {$w0}, {$r0};", [Float32], [word])


def float_of_int(value: Value) -> Value:
    """The nearest float32."""
    return assembly("cvt.rn.f32.s32 {$w0}, {$r0};", [Float32], [value])


def codes_from_tables(word: Value, tables: Sequence[Value], less: Value) -> tuple[Value, ...]:
    """Eight E2M1 codes as the bytes that they stand for, codes 0 to 3 and 4 to 7.

    ``tables``: bytes, below 128, of the codes 0 to 3 and 4 to 7 without a sign, and of 7 to 4 and
    3 to 0 with one. ``less``: -1, of which the compiler must not know: as products the complements,
    whose selectors have no sign where the codes have one, leave the logic pipe alone.
    """
    one = (
        "prmt.b32 p, {{$r1}}, {{$r2}}, {0}; prmt.b32 n, {{$r3}}, {{$r4}}, {1}; "
        "add.u32 {{$w{2}}}, p, n; "
    )
    return assembly(
        "{ .reg .b32 x, y, z, p, n; mad.lo.u32 x, {$r0}, {$r5}, {$r5}; shr.u32 y, {$r0}, 16; "
        "mad.lo.u32 z, y, {$r5}, {$r5}; "
        + one.format("{$r0}", "x", 0)
        + one.format("y", "z", 1)
        + "}",
        [Uint32, Uint32],
        [word, *tables, less],
    )


def e4m3_to_bfloat16(pair: Value) -> Value:
    """The two E4M3 codes in a word's lower half as a pair of bfloat16; NaN stays NaN.

    Through float32: the conversion from float16 to bfloat16 has a sixteenth of its rate.
    """
    return assembly(
        "{ .reg .b16 l, h, x, y; .reg .b32 d; .reg .f32 a, b; "
        "mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 d, l; mov.b32 {x, y}, d; "
        "cvt.f32.f16 a, x; cvt.f32.f16 b, y; cvt.rn.bf16x2.f32 {$w0}, b, a; }",
        [Uint32],
        [pair],
    )


def multiply_pair(a: Value, b: Value) -> Value:
    """Two products of bfloat16, each rounded once."""
    return assembly("mul.bf16x2 {$w0}, {$r0}, {$r1};", [Uint32], [a, b])
