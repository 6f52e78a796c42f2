"""Triton's interpreter with a fused multiply-add that rounds once.

That of Triton 3.6 multiplies, rounds, and adds, so what divides by way of a reciprocal and its rest
is a unit of the last place off there, and codes at a border differ from those of a GPU. Triton 3.9
rounds once itself.
"""

from __future__ import annotations

import functools

import numpy as np


def fma(x, y, z):
    """``x * y + z`` of float32 arrays, rounded once.

    The product is exact in float64. The sum is rounded to odd: of two neighbours, the one with an
    odd last bit where it is neither. So the second rounding, to float32, sees on which side of a
    tie it was.
    """
    with np.errstate(all="ignore"):
        product = x.astype(np.float64) * y
        total = product + z
        rest = total - product
        error = (product - (total - rest)) + (z - rest)
        even = total.view(np.int64) & 1 == 0
        lost = np.isfinite(total) & even & (error != 0) & np.isfinite(error)
        beside = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(lost, beside, total).astype(np.float32)


@functools.cache
def install() -> None:
    """Where the interpreter rounds twice. Idempotent; nothing where Triton is missing."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    theirs = builder.create_fma

    def create_fma(self, x, y, z):
        if x.data.dtype != np.float32:
            return theirs(self, x, y, z)
        return handle(fma(*np.broadcast_arrays(x.data, y.data, z.data)), z.dtype.scalar)

    near, minus = (
        handle(np.array([v], np.float32), interpreter.tl.float32) for v in (1 + 2.0**-12, -1)
    )
    if theirs(None, near, near, minus).data[0] != 2.0**-11 + 2.0**-24:
        builder.create_fma = create_fma
