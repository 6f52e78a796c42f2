"""NVFP4 weight fragments to bfloat16 MMA operands, in registers (layout: ``dsv4.quant.fragments``).

One word of codes and two scales become the four registers of an ``m16n8k16`` left operand by 14
instructions: 8 for the codes, 2 for the scales, 4 products. The logic pipe of a quarter of an SM
takes a warp's instruction every other cycle, and 31 cycles are what memory needs to deliver the 256
weights of a K step: 8 of the 14 are that pipe's. The scales' shift and the last code's are written
as multiplications, which run elsewhere.

Exact: a dequantized weight is ``code * block scale * 2^-7``, which bfloat16 holds.
"""

from __future__ import annotations

from cutlass import Uint32

from dsv4.cute.device.ptx import mad_u32, mul_bfloat16x2_by_half, permute_bytes, rotate_right
from dsv4.quant.fragments import SCALE_BIAS

_MASK = 0x81C081C0  # sign and magnitude bits of an E2M1 code, in place in both bfloat16


def codes_to_bfloat16(word: Uint32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Eight codes as four pairs of bfloat16, each ``code * 2^-126``."""
    mask = Uint32(_MASK)
    # Bits 3 and 4 move left by 3, bit 0 by 8, bit 1 by 14; in neither half do two of them meet.
    last = (word & Uint32(0x001B001B)) * Uint32(0x4108)
    return word & mask, rotate_right(word, 3) & mask, rotate_right(word, 6) & mask, last & mask


def scales_to_bfloat16(words: tuple[Uint32, Uint32], block: int, opaque_16: Uint32) -> Uint32:
    """The scales of block ``block`` (0 to 3) as bfloat16 ``scale * 2^119``.

    Row ``lane // 4`` in the low half, row ``lane // 4 + 8`` in the high half.

    Args:
        words: The lane's two words of scales.
        block: Which 16 columns.
        opaque_16: 16, unknown to the compiler, which would turn the product into a shift of the
            logic pipe.
    """
    first = block % 2 * 2
    pair = permute_bytes(words[block // 2], 0x4040 | ((first + 1) << 8) | first)
    return mad_u32(pair, opaque_16, Uint32(SCALE_BIAS * 0x10001))


def dequantized_fragment(word: Uint32, scales: Uint32) -> list[Uint32]:
    """The left operand of one K step of 16 columns, ``code * scale * 2^-7``.

    Args:
        word: The lane's codes of the step.
        scales: A result of ``scales_to_bfloat16``.
    """
    codes = codes_to_bfloat16(word)
    return [mul_bfloat16x2_by_half(code, scales, i % 2) for i, code in enumerate(codes)]
