"""NVFP4 fragments to bfloat16 operands, in registers (layout: ``dsv4.fragments``).

One word of codes and two scales become the four registers of an ``m16n8k16`` left operand. The
logic pipe of a quarter of an SM takes a warp's instruction every other cycle, and 31 cycles are
what memory needs to deliver the 256 weights of a step: so left shifts and the scales' arithmetic
are written as multiplications, which run elsewhere, and 8 logic instructions remain.
"""

from __future__ import annotations

from typing import Any

from cutlass import Uint32

from dsv4.cute._ptx import multiply_add, multiply_by_half, permute_bytes
from dsv4.fragments import SCALE_BIAS

Value = Any
_MASK = 0x81C081C0


def codes_to_bfloat16(word: Value) -> tuple[Value, Value, Value, Value]:
    """Eight codes as four pairs of bfloat16, each ``code * 2^-126``."""
    sign, magnitude = Uint32(0x80008000), Uint32(0x01C001C0)
    return (
        word & Uint32(_MASK),
        (word << Uint32(3)) & Uint32(_MASK),
        # By 1 bit and by 6 at once; without the other codes nothing carries.
        (word & Uint32(0x40074007)) * Uint32(66) & Uint32(_MASK),
        ((word >> Uint32(3)) & magnitude) | ((word << Uint32(2)) & sign),
    )


def scales_to_bfloat16(words: tuple[Value, Value], block: int, sixteen: Value) -> Value:
    """The scales of block ``block`` (0 to 3) as bfloat16 ``scale * 2^119``.

    Row ``lane // 4`` in the low half, row ``lane // 4 + 8`` in the high half. ``sixteen`` is 16,
    of which the compiler must not know: it would turn the product into a shift.
    """
    first = block % 2 * 2
    pair = permute_bytes(words[block // 2], 0x4040 | ((first + 1) << 8) | first)
    return multiply_add(pair, sixteen, Uint32(SCALE_BIAS * 0x10001))


def fragment(word: Value, scales: Value) -> list[Value]:
    """The left operand of one k16 step, ``code * scale * 2^-7``.

    Args:
        word: The lane's codes of the step.
        scales: What ``scales_to_bfloat16`` gave.
    """
    codes = codes_to_bfloat16(word)
    return [multiply_by_half(code, scales, i % 2) for i, code in enumerate(codes)]
