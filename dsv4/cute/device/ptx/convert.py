"""Conversions between number formats, in registers."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Uint32

from dsv4.cute.device.ptx._emit import assembly


def mul_bfloat16x2_by_half(a: Uint32, b: Uint32, half: int) -> Uint32:
    """``mul.rn.bf16x2`` of ``a`` by one half of ``b``, 0 the low one; keeps subnormals."""
    name = "lh"[half]
    return assembly(
        "{ .reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, {$r1}; "
        f"mov.b32 d, {{{name}, {name}}}; mul.rn.bf16x2 {{$w0}}, {{$r0}}, d; }}",
        [Uint32],
        [a, b],
    )


def pack_bfloat16x2(low: Float32, high: Float32) -> Uint32:
    """``cvt.rn.bf16x2.f32``: two float32, rounded to nearest even, in one word."""
    return assembly("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", [Uint32], [low, high])


def pack_accumulators(values: Sequence[Float32]) -> tuple[Uint32, ...]:
    """Eight float32 in five words, as 20 bits each: sign, exponent, 11 bits of fraction.

    Truncation is compensated by a factor of 1 + 2^-12.5, so that the relative error is at most
    2^-11.6 and 0 on average. Infinities and NaN stay such (arithmetic's NaN has all bits set).
    Words 0 to 3 are the upper halves of two values each; word 4 holds bits 15 to 12, those of
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


def unpack_accumulators(
    words: Sequence[Uint32], last: Uint32, half: Int32 | int
) -> tuple[Float32, ...]:
    """Four of the eight float32 of ``pack_accumulators``.

    Bits 7 to 4 of a fraction repeat bits 15 to 12, so that values that bfloat16 holds are exact.

    Args:
        words: Packed words 0 and 1, or 2 and 3.
        last: Packed word 4.
        half: 0 with words 0 and 1, 1 with words 2 and 3.
    """
    code = [".reg .b32 s;", "shl.b32 s, {$r2}, {$r3};", "and.b32 s, s, 0xf0f0f0f0;"]
    for i, selector in enumerate(("0x1044", "0x3255", "0x1066", "0x3277")):
        code.append(f"prmt.b32 {{$w{i}}}, {{$r{i // 2}}}, s, {selector};")
    return assembly("{ " + " ".join(code) + " }", [Float32] * 4, [*words, last, 4 * Int32(half)])


def unpack_all_accumulators(words: Sequence[Uint32]) -> list[Float32]:
    """The eight float32 of ``pack_accumulators``."""
    halves = [unpack_accumulators(words[2 * h : 2 * h + 2], words[4], h) for h in range(2)]
    return [*halves[0], *halves[1]]


def bfloat16_low_to_float(word: Uint32) -> Float32:
    """The low bfloat16 of a word as float32 (exact, by a shift)."""
    return assembly("{ .reg .b32 t; shl.b32 t, {$r0}, 16; mov.b32 {$w0}, t; }", [Float32], [word])


def bfloat16_high_to_float(word: Uint32) -> Float32:
    """The high bfloat16 of a word as float32 (exact, by a mask)."""
    code = "{ .reg .b32 t; and.b32 t, {$r0}, 0xFFFF0000; mov.b32 {$w0}, t; }"
    return assembly(code, [Float32], [word])


def e4m3x2_times_bfloat16x2(word: Uint32, half: int, factor: Uint32) -> Uint32:
    """Two E4M3 codes, the low (0) or high (1) pair, times a pair of bfloat16.

    ``cvt.rn.f16x2.e4m3x2``, then through float32 to bfloat16, then ``mul.rn.bf16x2``.
    """
    name = "lh"[half]
    return assembly(
        "{ .reg .b16 l, h, x, y; .reg .b32 d; .reg .f32 a, b; "
        f"mov.b32 {{l, h}}, {{$r0}}; cvt.rn.f16x2.e4m3x2 d, {name}; mov.b32 {{x, y}}, d; "
        "cvt.f32.f16 a, x; cvt.f32.f16 b, y; cvt.rn.bf16x2.f32 d, b, a; "
        "mul.rn.bf16x2 {$w0}, d, {$r1}; }",
        [Uint32],
        [word, factor],
    )


def e8m0_to_bfloat16x2(byte: Uint32) -> Uint32:
    """An E8M0 byte, ``2^(byte - 127)``, as bfloat16 in both halves; NaN of 255."""
    return assembly(
        "{ .reg .u32 t; .reg .pred p; mul.lo.u32 {$w0}, {$r0}, 0x800080; "
        # Byte 0 is subnormal; of byte 255 the shifted bits are infinity's. Both want bit 6.
        "add.u32 t, {$r0}, 1; and.b32 t, t, 0xFE; setp.eq.u32 p, t, 0; "
        "@p or.b32 {$w0}, {$w0}, 0x400040; }",
        [Uint32],
        [byte],
    )


def e2m1_to_signed_bytes(
    word: Uint32, low: Uint32, high: Uint32, shift16: Uint32
) -> tuple[Uint32, ...]:
    """Eight E2M1 codes as signed bytes, codes 0 to 3 and 4 to 7, by ``prmt.b32``.

    A selector with the sign's bit gives zero instead of a table's byte.

    Args:
        word: The codes.
        low: Bytes, below 128, of the codes 0 to 3 without a sign.
        high: Bytes of the codes 4 to 7 without a sign.
        shift16: 2^16, opaque to the compiler: ``mul.hi`` is faster than the shift it would become.
    """
    template = (
        "prmt.b32 p, {{$r1}}, {{$r2}}, {0}; prmt.b32 n, {{$r1}}, {{$r2}}, {1}; "
        "add.u32 p, p, 0x80808080; sub.u32 p, p, n; xor.b32 {{$w{2}}}, p, 0x80808080; "
    )
    return assembly(
        "{ .reg .b32 x, y, z, p, n; xor.b32 x, {$r0}, 0x88888888; mul.hi.u32 y, {$r0}, {$r3}; "
        "mul.hi.u32 z, x, {$r3}; "
        + template.format("{$r0}", "x", 0)
        + template.format("y", "z", 1)
        + "}",
        [Uint32, Uint32],
        [word, low, high, shift16],
    )


def e8m0_to_float(byte: Uint32) -> Float32:
    """An E8M0 byte, ``2^(byte - 127)``, as float32; NaN of 255, subnormal of 0."""
    return assembly(
        "{ .reg .b32 t; .reg .pred p; shl.b32 t, {$r0}, 23; setp.eq.u32 p, {$r0}, 0; "
        "@p mov.b32 t, 0x00400000; setp.eq.u32 p, {$r0}, 255; @p mov.b32 t, 0x7FC00000; "
        "mov.b32 {$w0}, t; }",
        [Float32],
        [byte],
    )


def bits_to_float(word: Uint32) -> Float32:
    """``mov.b32``: reinterpret a word as float32."""
    return assembly("mov.b32 {$w0}, {$r0};", [Float32], [word])


def int_to_float(value: Int32) -> Float32:
    """``cvt.rn.f32.s32``: the nearest float32."""
    return assembly("cvt.rn.f32.s32 {$w0}, {$r0};", [Float32], [value])


def e2m1_to_bytes_by_table(
    word: Uint32, tables: Sequence[Uint32], minus_one: Uint32
) -> tuple[Uint32, ...]:
    """Eight E2M1 codes as table bytes, codes 0 to 3 and 4 to 7, by ``prmt.b32``.

    Args:
        word: The codes.
        tables: Bytes, below 128, of the codes 0 to 3 and 4 to 7 without a sign, and of 7 to 4 and
            3 to 0 with one.
        minus_one: -1, opaque to the compiler: complements, whose selectors have no sign where the
            codes have one, are computed by ``mad.lo``, off the logic pipe.
    """
    template = (
        "prmt.b32 p, {{$r1}}, {{$r2}}, {0}; prmt.b32 n, {{$r3}}, {{$r4}}, {1}; "
        "add.u32 {{$w{2}}}, p, n; "
    )
    return assembly(
        "{ .reg .b32 x, y, z, p, n; mad.lo.u32 x, {$r0}, {$r5}, {$r5}; shr.u32 y, {$r0}, 16; "
        "mad.lo.u32 z, y, {$r5}, {$r5}; "
        + template.format("{$r0}", "x", 0)
        + template.format("y", "z", 1)
        + "}",
        [Uint32, Uint32],
        [word, *tables, minus_one],
    )


def e4m3x2_to_bfloat16x2(word: Uint32, half: int = 0) -> Uint32:
    """Two E4M3 codes, the low (0) or high (1) pair, as a pair of bfloat16; NaN stays NaN.

    Through float32, because the conversion from float16 to bfloat16 has a sixteenth of its rate.
    """
    return assembly(
        "{ .reg .b16 l, h, x, y; .reg .b32 d; .reg .f32 a, b; "
        f"mov.b32 {{l, h}}, {{$r0}}; cvt.rn.f16x2.e4m3x2 d, {'lh'[half]}; mov.b32 {{x, y}}, d; "
        "cvt.f32.f16 a, x; cvt.f32.f16 b, y; cvt.rn.bf16x2.f32 {$w0}, b, a; }",
        [Uint32],
        [word],
    )


def mul_bfloat16x2(a: Uint32, b: Uint32) -> Uint32:
    """``mul.bf16x2``: multiply two pairs of bfloat16, each rounded once."""
    return assembly("mul.bf16x2 {$w0}, {$r0}, {$r1};", [Uint32], [a, b])


def float_to_bits(value: Float32) -> Uint32:
    """``mov.b32``: reinterpret a float32 as a word."""
    return assembly("mov.b32 {$w0}, {$r0};", [Uint32], [value])


def pack_e4m3x2(low: Float32, high: Float32) -> Uint32:
    """``cvt.rn.satfinite.e4m3x2.f32``: two float32, rounded to E4M3, in a word's low half.

    NaN is 0x7F; magnitudes above 448 become 448.
    """
    return assembly(
        "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, {$r1}, {$r0}; cvt.u32.u16 {$w0}, h; }",
        [Uint32],
        [low, high],
    )
