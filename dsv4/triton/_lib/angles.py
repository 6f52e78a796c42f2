"""Cosine and sine of the angles of rotary embeddings, the same code compiled and interpreted.

The instructions that Triton's own ``tl.cos`` and ``tl.sin`` become lose all digits at large angles,
and a position of a million is an angle of a million. CUDA's functions are right but keep part of
their reduction in local memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TURNS = tl.constexpr(0.6366197723675814)  # 2 / pi
_QUARTER = tl.constexpr(1.5707963267948966)  # pi / 2
_ROUND = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: a float64 sum with it is an integer


@triton.jit
def cos_sin(angle):
    """``(cos, sin)`` of float32 angles up to 2^24, each off by at most 2^-23.

    The nearest multiple of pi/2 is taken off in float64, which leaves 29 bits more than float32 has
    and costs four operations. The polynomials are those of the C library's float functions, right
    to the last bit or two up to pi/4.
    """
    wide = angle.to(tl.float64)
    turns = (wide * tl.full([], _TURNS, tl.float64) + tl.full([], _ROUND, tl.float64)) - tl.full(
        [], _ROUND, tl.float64
    )
    x = (wide - turns * tl.full([], _QUARTER, tl.float64)).to(tl.float32)
    quarter = turns.to(tl.int32)
    t = x * x
    c = ((2.4433157e-5 * t - 1.3887316e-3) * t + 4.1666646e-2) * t - 0.5
    s = ((-1.9515296e-4 * t + 8.3321609e-3) * t - 1.6666655e-1) * t
    c, s = c * t + 1.0, s * x + x
    odd = (quarter & 1) != 0
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    cos = tl.where(((quarter + 1) & 2) != 0, -cos, cos)
    return cos, tl.where((quarter & 2) != 0, -sin, sin)
