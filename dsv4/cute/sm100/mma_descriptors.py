"""Descriptors of ``tcgen05.mma`` operands and instructions, as plain numbers; needs no compiler.

The layouts are those of the PTX manual. Tests compare each number with those in a kernel that
CuTeDSL compiles of its own layouts and instructions (``tests/sm100_layouts.py``).
"""

from __future__ import annotations

# Matrix descriptor of an operand in shared memory. Bits 32 to 45 are the stride between groups of 8
# rows in units of 16 bytes. The leading offset, bits 16 to 29, is ignored for these layouts; 1 as
# CuTeDSL has it. Bit 46 is the version of descriptors on compute capability 10.x.
_VERSION, _LEADING = 1 << 46, 1 << 16
CODES_DESCRIPTOR = (2 << 61) | _VERSION | (64 << 32) | _LEADING  # 2: swizzled in 128 bytes
SCALES_DESCRIPTOR = _VERSION | (8 << 32) | _LEADING  # rows of 16 bytes, one after another


def instruction_descriptor(rows: int, tokens: int) -> int:
    """Descriptor of ``kind::mxf4nvf4`` for E2M1 with UE4M3 scales, K-major, K = 64.

    Args:
        rows: M, 128 or 256.
        tokens: N, a multiple of 16.
    """
    e2m1 = 1
    return (e2m1 << 7) | (e2m1 << 10) | (tokens // 8 << 17) | (rows // 128 << 27)
