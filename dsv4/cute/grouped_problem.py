"""The grouped GEMM problem that plans of every architecture are chosen for; needs no compiler."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

MOST_EXPERTS = 512


class Experts(NamedTuple):
    """The facts that a kernel depends on, except the number of rows of X.

    Attributes:
        rows: N of an expert, a multiple of 16.
        columns: K, a multiple of 128.
        experts: How many.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every row of X has a scale of its own (quantised activations).
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
        row_weighted: Whether that is multiplied by a weight of the row of X.
        quantized_out: Whether the result of SwiGLU is NVFP4 codes, block scales, scales of rows.
        swizzled_out: Whether those block scales are swizzled, by expert.
    """

    rows: int
    columns: int
    experts: int
    float32_out: bool
    row_scaled: bool
    swiglu: bool = False
    row_weighted: bool = False
    quantized_out: bool = False
    swizzled_out: bool = False


@functools.lru_cache(maxsize=4096)
def expected_tiles(mean: float, block: int) -> float:
    """Return the expected tiles of ``block`` tokens for a Poisson distributed number of them."""
    return sum(_more_than(mean, k * block) for k in range(int(mean + 8 * mean**0.5) // block + 2))


def _more_than(mean: float, count: int) -> float:
    """Probability of more than ``count``."""
    if mean > 200:  # normal, near enough
        return 0.5 * math.erfc((count + 0.5 - mean) / math.sqrt(2 * mean))
    term = below = math.exp(-mean)
    for i in range(1, count + 1):
        term *= mean / i
        below += term
    return max(0.0, 1.0 - below)


@functools.lru_cache(maxsize=1 << 14)
def counted_as(tokens: int) -> int:
    """The number of rows that stands for this one: powers of two and the middles between them."""
    if tokens <= 4:
        return max(tokens, 1)
    power = 1 << (tokens - 1).bit_length()  # at least tokens
    return power * 3 // 4 if tokens <= power * 3 // 4 else power
