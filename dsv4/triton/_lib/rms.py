"""Root mean squares of rows, and sums that all threads of a program get behind one barrier."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def inverse_rms(total, columns, eps):
    """``rsqrt(total / columns + eps)``; NaN where the mean overflows, as the reference says."""
    mean = total / columns
    return tl.where(mean == float("inf"), float("nan"), tl.rsqrt(mean + eps))


@triton.jit
def shared_sum(values, SPAN: tl.constexpr):
    """The sum of ``values [N]`` in all of ``[32]`` numbers, behind one barrier.

    ``broadcast_total`` makes a tile of it.

    A warp has SPAN neighbours: it broadcasts their sum through shared memory, and each thread adds
    the sums of all warps. ``tl.sum`` would let one warp add them and broadcast the total behind a
    second barrier.
    """
    N: tl.constexpr = values.shape[0]
    parts = tl.sum(tl.reshape(values, [N // SPAN, SPAN]), 1)
    return tl.sum(tl.broadcast_to(parts[None, :], [32, N // SPAN]), 1)


@triton.jit
def broadcast_total(same, N: tl.constexpr):
    """The number that all of ``same [32]`` are, as ``[N]``."""
    return tl.reshape(tl.broadcast_to(same[:, None], [32, N // 32]), [N])
