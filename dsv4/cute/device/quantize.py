"""NVFP4 results in epilogues, bit for bit as ``dsv4.reference.quantize`` makes them of bfloat16.

Ownership. A block of 16 results is held by two neighbouring lanes, 8 each, packed two to a word.
Both compute the block's scale, so that a single exchange (of the largest magnitude) is enough; the
lane of the first 8 stores it.

Numerics. The scale takes two IEEE divisions. A code needs the quotient by ``block scale * global
scale`` only as far as the borders of E2M1 can tell: the reciprocal is known to some 46 bits, as a
sum of two numbers; ``dsv4.triton._lib.nvfp4`` says why that is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.epilogue import Vector

# Magnitude bits of two bfloat16 in a word. Magnitudes order as unsigned integers do.
_MAGNITUDES = 0x7FFF7FFF


class BlockScales(NamedTuple):
    """The addresses of the block scales of results, one byte for 16 results.

    Attributes:
        address: Address of the first token's scales, row after row; where they are swizzled, of the
            scales of all experts.
        first_row: Row of the first token among the swizzled rows; None where they are linear.
    """

    address: Int64
    first_row: Int32 | None = None


class QuantizedOutput(NamedTuple):
    """The addresses of NVFP4 results, and the scales that they are quantized by.

    Attributes:
        codes: Address of the first token's codes, two to a byte.
        block_scales: Where the block scales go.
        global_scale: The global scale of the results.
    """

    codes: Int64
    block_scales: BlockScales
    global_scale: Float32


class Divisor(NamedTuple):
    """Factors that the quotients of a block have in common.

    Reciprocal and quotient are times 2^-14, because E5M2 has its subnormal numbers where E2M1 has
    them.

    Attributes:
        factor: Power of two that numerators are multiplied by, so that the reciprocal is normal.
        high: The reciprocal of the divisor, rounded.
        low: What the rounded reciprocal lacks.
        limit: The largest quotient.
        sign: The sign bit, or 0 where all codes must be 0.
    """

    factor: Float32
    high: Float32
    low: Float32
    limit: Float32
    sign: Uint32


@cute.jit
def store_quantized(
    words: Sequence[Uint32], output: QuantizedOutput, vector: Vector, exists: Boolean
) -> None:
    """All lanes together: quantize and store eight results a lane, a block for two neighbours.

    Args:
        words: 8 bfloat16, in order.
        output: Where they go.
        vector: Which results they are.
        exists: Whether they are stored.
    """
    codes, scale_byte = quantize_half_block(words, output.global_scale)
    if exists:
        offset = Int64(vector.token) * vector.rows + vector.row
        ptx.store_global(output.codes + offset // 2, codes)
        # The lane of the first half of the block stores its scale.
        if vector.row % 16 == 0:
            scales = output.block_scales
            if cutlass.const_expr(scales.first_row is not None):
                row = scales.first_row + vector.token
                swizzled = swizzled_offset(row, vector.row // 16, vector.rows // 16)
                ptx.store_global_byte(scales.address + swizzled, scale_byte)
            else:
                ptx.store_global_byte(scales.address + offset // 16, scale_byte)


def swizzled_offset(row: Int32, block: Int32, blocks: Int32) -> Int64:
    """Offset of a scale byte in the 128x4-swizzled layout, as ``dsv4.quant.scales.scale_offset``.

    Args:
        row: Number among all experts' rows, each expert's padded to a multiple of 128.
        block: Number of the block of 16 results in the row.
        blocks: Blocks of a row, a multiple of 4.
    """
    tile = (row & 31) * 16 + (row >> 5 & 3) * 4 + (block >> 2) * 512 + (block & 3)
    return Int64(row & -128) * blocks + tile


def quantize_half_block(words: Sequence[Uint32], global_scale: Float32) -> tuple[Uint32, Uint32]:
    """Quantize the half of a block that this lane has; ``lane ^ 1`` has the other half.

    Args:
        words: 8 bfloat16, in order.
        global_scale: The global scale of the results.

    Returns:
        The lane's 8 codes in a word, in order, and the block's E4M3 byte, the same in both lanes.
    """
    largest = words[0] & Uint32(_MAGNITUDES)
    for word in words[1:]:
        largest = ptx.max_u16x2(largest, word & Uint32(_MAGNITUDES))
    largest = ptx.max_u16x2(largest, Uint32(cute.arch.shuffle_sync_bfly(largest, 1)))
    # As integers NaN is above infinity, and that above every number.
    peak = cutlass.max(largest << Uint32(16), largest & Uint32(0x7FFF0000))
    scale_byte, divisor = _block_scale(peak, global_scale)
    # Even results, then odd ones, as ``_packed`` takes them.
    values = [_rounded(word, half, divisor) for half in range(2) for word in words]
    return _packed(values), scale_byte


def _block_scale(peak: Uint32, global_scale: Float32) -> tuple[Uint32, Divisor]:
    """The scale byte of a block, and what divisions by its scale have in common.

    The byte is ``peak / 6 / global_scale`` in E4M3, at most 448. Peaks that are infinite or NaN,
    and global scales that are not above 0 and finite, give the byte 127 (NaN) and codes of 0.

    Args:
        peak: Bits of the block's largest magnitude in float32.
        global_scale: The global scale.
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
    types = [Uint32, Float32, Float32, Float32, Float32, Uint32]
    scale_byte, *divisor = ptx.assembly(code, types, [peak, global_scale])
    return scale_byte, Divisor(*divisor)


def _rounded(word: Uint32, half: int, divisor: Divisor) -> Float32:
    """Divide one of two bfloat16, as a number of E2M1 times 2^-14 with its sign.

    Adding 2^22 times the power of two at or below the quotient, 2^-14 at least, rounds to a
    multiple of half that power; ties go to the even code.

    Args:
        word: Two bfloat16.
        half: Which of them, 0 or 1.
        divisor: Divisor of their block.
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
    value: Float32 = ptx.assembly(code.replace("WIDEN", widen), [Float32], [word, *divisor])
    return value


def _packed(values: Sequence[Float32]) -> Uint32:
    """Codes of four even values and four odd ones, in order, in a word.

    E5M2 of such a value is exact: sign, 000, the three bits of the code, 0.
    """
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
    codes: Uint32 = ptx.assembly(code, [Uint32], values)
    return codes
