"""Rotation of interleaved pairs in registers, the same bits in every kernel that does it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton._lib.numerics import widen

_SIGN = tl.constexpr(-0x80000000)


def tables(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """``(cos, sin, sharing)`` for the rows of ``x [..., D]`` taken as one matrix.

    The tables become ``[A, R/2]`` with unit stride and one common row stride; row i of ``x`` turns
    by row ``i // sharing`` of them. Views, unless a size in the middle is broadcast.
    """
    lead, half = x.shape[:-1], cos.shape[-1]
    sizes = (1,) * (len(lead) + 1 - cos.dim()) + tuple(cos.shape[:-1])
    outer = len(lead)
    while outer and sizes[outer - 1] == 1:
        outer -= 1
    cos, sin = (
        t.reshape(*sizes[:outer], half).expand(*lead[:outer], half).reshape(-1, half)
        for t in (cos, sin)
    )
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, lead[outer:].numel()


@triton.jit
def load_angles(cos, sin, start, pair, mask, INVERSE: tl.constexpr):
    """``(cos, sin)`` in float32 at ``start + pair``; 1 and 0, no turn, where ``mask`` is false."""
    c = widen(tl.load(cos + start + pair, mask=mask, other=1.0))
    s = widen(tl.load(sin + start + pair, mask=mask, other=0.0))
    if INVERSE:
        s = _negative(s)
    return c, s


@triton.jit
def _negative(x):
    """``-x`` with the sign of zeros rotated too, which ``0 - x`` leaves."""
    return (x.to(tl.int32, bitcast=True) ^ _SIGN).to(tl.float32, bitcast=True)


@triton.jit
def rotate(x, cos, sin):
    """Rotate the pairs of ``x [ROWS, 2 N]`` (float32) by the angles ``[ROWS, N]``."""
    ROWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    even, odd = tl.split(tl.reshape(x, [ROWS, PAIRS, 2]))
    first, second = rotate_pairs(even, odd, cos, sin)
    return tl.reshape(tl.join(first, second), [ROWS, 2 * PAIRS])


@triton.jit
def rotate_pairs(even, odd, cos, sin):
    """Rotate ``(even, odd)``; all float32 of one shape.

    One product rounds, the other goes into the sum exactly: written out, so that no compiler
    chooses which, and two kernels agree.
    """
    return tl.fma(even, cos, odd * _negative(sin)), tl.fma(odd, cos, even * sin)
