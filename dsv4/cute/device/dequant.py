"""NVFP4 fragments to bfloat16 operands, in registers (layout: ``dsv4.fragments``).

One word of codes and two scales become the four registers of an ``m16n8k16`` left operand, by 14
instructions: 8 for the codes, 2 for the scales, 4 products. The logic pipe of a quarter of an SM
takes a warp's instruction every other cycle, and 31 cycles are what memory needs to deliver the 256
weights of a step: 8 of the 14 are that pipe's, the scales' shift and the last code's are written as
multiplications, which run elsewhere.
"""

from __future__ import annotations

from typing import Any

from cutlass import Uint32

from dsv4.cute.device.ptx import mad_u32, mul_bfloat16x2_by_half, permute_bytes, rotate_right
from dsv4.fragments import SCALE_BIAS

Value = Any
_MASK = 0x81C081C0


def codes_to_bfloat16(word: Value) -> tuple[Value, Value, Value, Value]:
    """Eight codes as four pairs of bfloat16, each ``code * 2^-126``."""
    mask = Uint32(_MASK)
    # Bits 3 and 4 by 3, bit 0 by 8, bit 1 by 14: in neither half two of them meet.
    last = (word & Uint32(0x001B001B)) * Uint32(0x4108)
    return word & mask, rotate_right(word, 3) & mask, rotate_right(word, 6) & mask, last & mask


def scales_to_bfloat16(words: tuple[Value, Value], block: int, sixteen: Value) -> Value:
    """The scales of block ``block`` (0 to 3) as bfloat16 ``scale * 2^119``.

    Row ``lane // 4`` in the low half, row ``lane // 4 + 8`` in the high half. ``sixteen`` is 16,
    of which the compiler must not know: it would turn the product into a shift.
    """
    first = block % 2 * 2
    pair = permute_bytes(words[block // 2], 0x4040 | ((first + 1) << 8) | first)
    return mad_u32(pair, sixteen, Uint32(SCALE_BIAS * 0x10001))


def fragment(word: Value, scales: Value) -> list[Value]:
    """The left operand of one k16 step, ``code * scale * 2^-7``.

    Args:
        word: The lane's codes of the step.
        scales: What ``scales_to_bfloat16`` gave.
    """
    codes = codes_to_bfloat16(word)
    return [mul_bfloat16x2_by_half(code, scales, i % 2) for i, code in enumerate(codes)]
