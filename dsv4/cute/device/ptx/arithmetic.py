"""Arithmetic and selection on 32-bit words and float32, in registers."""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32

from dsv4.cute.device.ptx._emit import Float, Word, assembly


def opaque(value: Int32) -> Int32:
    """``mov.b32``: the same integer, of which the compiler knows nothing before this place.

    Keeps what is computed from it from being hoisted and held in registers until here.
    """
    return assembly("mov.b32 {$w0}, {$r0};", [Int32], [value])


def mad_u32(a: Uint32, b: Uint32, c: Uint32) -> Uint32:
    """``mad.lo.u32``: ``a b + c``, the low 32 bits."""
    return assembly("mad.lo.u32 {$w0}, {$r0}, {$r1}, {$r2};", [Uint32], [a, b, c])


def mulhi_u32(a: Uint32, b: Uint32) -> Uint32:
    """``mul.hi.u32``: the upper 32 bits of a product."""
    return assembly("mul.hi.u32 {$w0}, {$r0}, {$r1};", [Uint32], [a, b])


def rotate_right(word: Uint32, bits: int) -> Uint32:
    """``shf.r.wrap.b32``: a word rotated right by ``bits``."""
    return assembly(f"shf.r.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {bits};", [Uint32], [word])


def permute_bytes(word: Uint32, selector: int) -> Uint32:
    """``prmt.b32`` with zero: four bytes that the selector's nibbles name, of which 4 is zero."""
    return assembly("prmt.b32 {$w0}, {$r0}, 0, " + f"{selector:#x};", [Uint32], [word])


def select_halves(a: Uint32, b: Uint32, half: int) -> Uint32:
    """``prmt.b32``: the low (0) or high (1) halves of two words, in one word."""
    selector = (0x5410, 0x7632)[half]
    return assembly(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};", [Uint32], [a, b])


def abs_float(value: Float32) -> Float32:
    """``abs.f32``."""
    return assembly("abs.f32 {$w0}, {$r0};", [Float32], [value])


def nan_if(value: Float32, flag: Uint32) -> Float32:
    """``selp.f32``: NaN where the flag is not 0, else the value."""
    return assembly(
        "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; selp.f32 {$w0}, 0f7FC00000, {$r0}, p; }",
        [Float32],
        [value, flag],
    )


def select_float(condition: Word, yes: Float, no: Float) -> Float32:
    """``selp.f32``: ``yes`` where the condition is not 0, else ``no``."""
    return assembly(
        "{ .reg .pred p; setp.ne.u32 p, {$r0}, 0; selp.f32 {$w0}, {$r1}, {$r2}, p; }",
        [Float32],
        [Uint32(condition), yes, no],
    )


def swiglu(gate: Float32, up: Float32, limit: Float32) -> Float32:
    """SwiGLU: ``silu(min(gate, limit)) * clamp(up, -limit, limit)``; NaN unless both are finite.

    ``ex2.approx.ftz`` and ``rcp.approx.ftz``: by their documented errors, within 1e-5 together. 0
    for gates below -87.3, whose silu is above -1.2e-36. Zeros may lose their sign.
    """
    # What is not finite makes NaN of a product with 0.
    return assembly(
        "{ .reg .f32 g, u, l, d; "
        "min.f32 g, {$r0}, {$r2}; neg.f32 l, {$r2}; "
        "min.f32 u, {$r1}, {$r2}; max.f32 u, u, l; "
        "mul.f32 d, g, 0fBFB8AA3B; ex2.approx.ftz.f32 d, d; add.f32 d, d, 0f3F800000; "
        "rcp.approx.ftz.f32 d, d; mul.f32 g, g, d; mul.f32 g, g, u; "
        "fma.rn.f32 g, {$r0}, 0f00000000, g; fma.rn.f32 {$w0}, {$r1}, 0f00000000, g; }",
        [Float32],
        [gate, up, limit],
    )


def max_float(a: Float, b: Float) -> Float32:
    """``max.f32``: the larger one; of a NaN and a number the number."""
    return assembly("max.f32 {$w0}, {$r0}, {$r1};", [Float32], [a, b])


def fma_float(a: Float, b: Float, c: Float) -> Float32:
    """``fma.rn.f32``: ``a b + c``, rounded once."""
    return assembly("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", [Float32], [a, b, c])


def inverse_rope_pair(
    even: Float, odd: Float, cos: Float32, sin: Float32
) -> tuple[Float32, Float32]:
    """A pair rotated by minus an angle: ``(even cos + odd sin, odd cos - even sin)``."""
    code = (
        "{ .reg .f32 a, b, m; mul.rn.f32 a, {$r1}, {$r3}; neg.f32 m, {$r3}; "
        "mul.rn.f32 b, {$r0}, m; "
        "fma.rn.f32 {$w0}, {$r0}, {$r2}, a; fma.rn.f32 {$w1}, {$r1}, {$r2}, b; }"
    )
    return assembly(code, [Float32, Float32], [even, odd, cos, sin])


def exp2_approx(value: Float32) -> Float32:
    """``ex2.approx.ftz.f32``: ``2^value`` within 2^-22; subnormal results are 0."""
    return assembly("ex2.approx.ftz.f32 {$w0}, {$r0};", [Float32], [value])


def select_word(condition: Int32, yes: Uint32, no: Uint32) -> Uint32:
    """``selp.b32``: ``yes`` where the condition is not 0, else ``no``."""
    return assembly(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p; }",
        [Uint32],
        [Int32(condition), yes, no],
    )


def max_u16x2(a: Uint32, b: Uint32) -> Uint32:
    """``max.u16x2``: the larger of two unsigned 16-bit numbers, in both halves."""
    return assembly("max.u16x2 {$w0}, {$r0}, {$r1};", [Uint32], [a, b])


def max_of_bytes(word: Uint32) -> Uint32:
    """The largest of a word's four unsigned bytes."""
    return assembly(
        "{ .reg .b32 a, b; shl.b32 a, {$r0}, 8; max.u16x2 a, a, {$r0}; shl.b32 b, a, 16; "
        "max.u32 a, a, b; shr.u32 {$w0}, a, 24; }",
        [Uint32],
        [word],
    )


def max_of_bytes_pair(a: Uint32, b: Uint32) -> Uint32:
    """The largest of four unsigned bytes, of two words, twice in each half."""
    return assembly(
        "{ .reg .b32 x, y, z; shl.b32 x, {$r0}, 8; max.u16x2 x, x, {$r0}; "
        "shl.b32 y, {$r1}, 8; max.u16x2 y, y, {$r1}; prmt.b32 z, x, y, 0x5410; "
        "prmt.b32 x, x, y, 0x7632; max.u16x2 x, x, z; prmt.b32 {$w0}, x, x, 0x3311; }",
        [Uint32],
        [a, b],
    )


def select_byte_pair(a: Uint32, b: Uint32, number: Uint32) -> Uint32:
    """``prmt.b32``: byte ``number`` of two words, twice in each half."""
    code = "{ .reg .b32 s; mad.lo.u32 s, {$r2}, 0x1111, 0x4400; prmt.b32 {$w0}, {$r0}, {$r1}, s; }"
    return assembly(code, [Uint32], [a, b, number])


def shift_right(number: Uint32, times: Uint32) -> Uint32:
    """``shf.r.wrap.b32``: a logical shift right by the low five bits of ``times``."""
    code = "{ .reg .b32 z; mov.b32 z, 0; shf.r.wrap.b32 {$w0}, {$r0}, z, {$r1}; }"
    return assembly(code, [Uint32], [number, times])


def max_of_halves(word: Uint32) -> Uint32:
    """The larger of a word's unsigned halves."""
    return assembly(
        "{ .reg .b32 l, h; and.b32 l, {$r0}, 0xFFFF; shr.u32 h, {$r0}, 16; max.u32 {$w0}, l, h; }",
        [Uint32],
        [word],
    )


def extract_byte(word: Uint32, number: Word | int) -> Uint32:
    """``prmt.b32``: byte ``number`` (a run-time value, 0 to 3) of a word."""
    code = "{ .reg .b32 s; or.b32 s, {$r1}, 0x4440; prmt.b32 {$w0}, {$r0}, 0, s; }"
    return assembly(code, [Uint32], [word, number])


def find_lowest_bit(low: Uint32, high: Uint32) -> Int32:
    """``brev.b64``, ``clz.b64``: the number of the lowest set bit of 64; one must be set."""
    return assembly(
        "{ .reg .u64 a; mov.b64 a, {{$r0}, {$r1}}; brev.b64 a, a; clz.b64 {$w0}, a; }",
        [Int32],
        [low, high],
    )


def add_scaled_relu(bits: Word, factor: Float32, total: Float32) -> Float32:
    """``fma.rn.f32``: ``total + factor * max(n, 0) * 2^-22`` of an integer's bits.

    ``mul.rn.sat`` makes 0 of a negative integer, whose bits are those of NaN.
    """
    return assembly(
        "{ .reg .f32 f; mov.b32 f, {$r0}; mul.rn.sat.f32 f, f, 0f7F000000; "
        "fma.rn.f32 {$w0}, f, {$r1}, {$r2}; }",
        [Float32],
        [bits, factor, total],
    )


def add_sum_of_bytes(word: Word, total: Int32) -> Int32:
    """``dp4a.s32.s32`` by ones: a total plus the sum of four signed bytes."""
    return assembly("dp4a.s32.s32 {$w0}, {$r0}, 0x01010101, {$r1};", [Int32], [word, total])
