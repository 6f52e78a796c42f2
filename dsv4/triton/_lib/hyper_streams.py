"""Four streams of a token in registers, for kernels of hyper-connections."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.numerics import widen


@triton.jit
def _mix(y, x0, x1, x2, x3, post, c0, c1, c2, c3):
    """``post y + sum_j c_j x_j``: written out, so that every kernel rounds alike."""
    total = tl.fma(c3, x3, tl.fma(c2, x2, tl.fma(c1, x1, c0 * x0)))
    return tl.fma(post, y, total)


@triton.jit
def load_streams(x, offset, hidden, mask):
    """Four streams at ``offset``, float32."""
    x0 = widen(tl.load(x + offset, mask=mask, other=0.0))
    x1 = widen(tl.load(x + offset + hidden, mask=mask, other=0.0))
    x2 = widen(tl.load(x + offset + 2 * hidden, mask=mask, other=0.0))
    x3 = widen(tl.load(x + offset + 3 * hidden, mask=mask, other=0.0))
    return x0, x1, x2, x3


@triton.jit
def load_mixers(post, comb, token):
    """For each stream after the write-back ``(post_k, comb[0, k], .. comb[3, k])``, float32.

    ``comb[j, k]`` is what stream j gives to stream k.
    """
    mixers = ()
    for k in tl.static_range(4):
        p = widen(tl.load(post + token * 4 + k))
        c0 = widen(tl.load(comb + token * 16 + k))
        c1 = widen(tl.load(comb + token * 16 + 4 + k))
        c2 = widen(tl.load(comb + token * 16 + 8 + k))
        c3 = widen(tl.load(comb + token * 16 + 12 + k))
        mixers += ((p, c0, c1, c2, c3),)  # type: ignore[assignment]
    return mixers


@triton.jit
def mixed_stream(y, x0, x1, x2, x3, mixer):
    """A stream of a token after the write-back, by its entry of ``load_mixers``."""
    p, c0, c1, c2, c3 = mixer
    return _mix(y, x0, x1, x2, x3, p, c0, c1, c2, c3)


@triton.jit
def pick(values, INDEX: tl.constexpr):
    """Entry INDEX of a short vector, in every thread."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == INDEX, values, 0.0), 0)
