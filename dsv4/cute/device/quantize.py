"""Results in NVFP4, bit for bit as ``dsv4.reference.quantize`` makes them of bfloat16.

A block of 16 results is held by two neighbouring lanes, 8 each. Its scale takes two IEEE divisions.
A code takes the quotient by ``block scale * global scale`` as far as borders of E2M1 can tell: the
reciprocal to some 46 bits, as a sum of two numbers; ``dsv4.triton._lib.nvfp4`` says why that is
enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from dsv4.cute.device import ptx

Value = Any
_MAGNITUDES = 0x7FFF7FFF


@cute.jit
def store_coded(words: Value, places: Value, where: Value, there: Value) -> None:
    """Eight results as codes, of which neighbouring lanes have a block; all lanes together.

    Args:
        words: 8 bfloat16, in order.
        places: Addresses of codes and block scales, and the global scale. Where scales are
            swizzled, the address of all of them, with the row in which the first token's are.
        where: Token, first of the results, and how many a token has.
        there: Whether they are to be stored.
    """
    codes_at, scales_at, scale = places
    token, row, rows = where
    codes, byte = coded(words, scale)
    if there:
        line = Int64(token) * rows + row
        ptx.store_global(codes_at + line // 2, codes)
        if row % 16 == 0:
            if cutlass.const_expr(isinstance(scales_at, tuple)):
                start, first = scales_at
                place = swizzled_place(first + token, row // 16, rows // 16)
                ptx.store_global_byte(start + place, byte)
            else:
                ptx.store_global_byte(scales_at + line // 16, byte)


def swizzled_place(row: Value, block: Value, blocks: Value) -> Value:
    """Where a scale byte lies in the 128x4-swizzled layout, as ``dsv4.quant.scales.scale_offset``.

    Args:
        row: Of all experts' rows, padded to whole 128s each.
        block: Of the row's.
        blocks: Of a row, a multiple of 4.
    """
    place = (row & 31) * 16 + (row >> 5 & 3) * 4 + (block >> 2) * 512 + (block & 3)
    return Int64(row & -128) * blocks + place


def coded(words: Sequence[Value], scale: Value) -> Value:
    """Codes and scale byte of a block, of which this lane has one half and ``lane ^ 1`` the other.

    Args:
        words: 8 bfloat16, in order.
        scale: The global scale, float32.

    Returns:
        The lane's 8 codes in a word, in order; the block's E4M3 byte, the same in both lanes.
    """
    most = words[0] & Uint32(_MAGNITUDES)
    for word in words[1:]:
        most = ptx.max_u16x2(most, word & Uint32(_MAGNITUDES))
    most = ptx.max_u16x2(most, Uint32(cute.arch.shuffle_sync_bfly(most, 1)))
    # As integers NaN is above infinity, and that above every number.
    peak = cutlass.max(most << Uint32(16), most & Uint32(0x7FFF0000))
    byte, *divisor = _block_scale(peak, scale)
    values = [_rounded(word, half, divisor) for half in range(2) for word in words]
    return _packed(values), byte


def _block_scale(peak: Value, scale: Value) -> tuple[Value, ...]:
    """The scale byte of a block, and what divisions by its scale have in common.

    That is a power of two for the numerators; the reciprocal as a sum of two; the largest quotient;
    the sign bit, or 0 where the codes must be 0. Reciprocal and quotient are times 2^-14, where
    E5M2 has its subnormal numbers where E2M1 has them.

    Args:
        peak: Bits of the block's largest magnitude in float32.
        scale: The global scale.
    """
    code = """
        { .reg .f32 a, p, s, e, n; .reg .pred q, r; .reg .b16 h, l, u; .reg .b32 w;
        setp.lt.u32 q, {$r0}, 0x7F800000;
        selp.b32 w, {$r0}, 0, q;
        mov.b32 a, w;
        div.rn.f32 a, a, 0f40C00000;
        div.rn.f32 a, a, {$r1};
        min.f32 a, a, 0f43E00000;
        setp.gt.and.f32 q, {$r1}, 0f00000000, q;
        setp.lt.and.f32 q, {$r1}, 0f7F800000, q;
        cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, a;
        cvt.rn.f16x2.e4m3x2 w, h;
        mov.b32 {l, u}, w;
        cvt.f32.f16 p, l;
        mul.rn.f32 p, p, {$r1};
        selp.f32 p, p, 0f00000000, q;
        cvt.u32.u16 w, h;
        selp.b32 {$w0}, w, 127, q;
        setp.gt.f32 r, p, 0f5D800000;
        selp.f32 s, 0f0D800000, 0f3F800000, r;
        setp.lt.f32 r, p, 0f21800000;
        selp.f32 s, 0f71800000, s, r;
        mov.f32 {$w1}, s;
        mul.rn.f32 a, p, s;
        neg.f32 n, a;
        rcp.approx.ftz.f32 s, a;
        fma.rn.f32 e, n, s, 0f3F800000;
        fma.rn.f32 s, e, s, s;
        fma.rn.f32 e, n, s, 0f3F800000;
        fma.rn.f32 e, e, e, e;
        mul.rn.f32 e, e, s;
        mul.rn.f32 {$w2}, s, 0f38800000;
        mul.rn.f32 {$w3}, e, 0f38800000;
        setp.lt.f32 r, p, 0f7F800000;
        selp.f32 a, 0f39C00000, 0f06800000, r;
        setp.gt.f32 r, p, 0f00000000;
        selp.f32 {$w4}, a, 0f00000000, r;
        selp.b32 {$w5}, 0x80000000, 0, r; }
    """
    kinds = [Uint32, Float32, Float32, Float32, Float32, Uint32]
    return tuple(ptx.assembly(code, kinds, [peak, scale]))


def _rounded(word: Value, half: int, divisor: Sequence[Value]) -> Value:
    """One of two bfloat16 over the divisor as a number of E2M1 times 2^-14, with its sign.

    Rounded by addition of 2^22 times the power of two below it, 2^-14 at least, which leaves a
    multiple of half that power; ties go to the even code.
    """
    code = """
        { .reg .f32 x, l, q, p; .reg .b32 w, b;
        WIDEN
        mov.b32 x, w;
        mul.rn.f32 x, x, {$r1};
        mul.rn.f32 l, x, {$r3};
        fma.rn.f32 q, x, {$r2}, l;
        abs.f32 q, q;
        min.f32 q, q, {$r4};
        max.f32 p, q, 0f38800000;
        mov.b32 b, p;
        and.b32 b, b, 0x7F800000;
        mov.b32 p, b;
        fma.rn.f32 q, p, 0f4A800000, q;
        fma.rn.f32 q, p, 0fCA800000, q;
        and.b32 w, w, {$r5};
        mov.b32 b, q;
        or.b32 b, b, w;
        mov.b32 {$w0}, b; }
    """
    widen = "shl.b32 w, {$r0}, 16;" if half == 0 else "and.b32 w, {$r0}, 0xFFFF0000;"
    return ptx.assembly(code.replace("WIDEN", widen), [Float32], [word, *divisor])


def _packed(values: Sequence[Value]) -> Value:
    """Codes of four even values, then four odd ones. A byte of E5M2: sign, 000, code, 0."""
    code = """
        { .reg .b16 a, b; .reg .b32 x, y, z;
        cvt.rn.satfinite.e5m2x2.f32 a, {$r1}, {$r0}; cvt.rn.satfinite.e5m2x2.f32 b, {$r3}, {$r2};
        mov.b32 x, {a, b};
        cvt.rn.satfinite.e5m2x2.f32 a, {$r5}, {$r4}; cvt.rn.satfinite.e5m2x2.f32 b, {$r7}, {$r6};
        mov.b32 y, {a, b};
        shr.b32 z, x, 1; and.b32 z, z, 0x07070707;
        shr.b32 x, x, 4; and.b32 x, x, 0x08080808; or.b32 z, z, x;
        shl.b32 x, y, 3; and.b32 x, x, 0x70707070; or.b32 z, z, x;
        and.b32 y, y, 0x80808080; or.b32 {$w0}, z, y; }
    """
    return ptx.assembly(code, [Uint32], values)
