"""Device functions of kernels that draw tokens: noise, best candidates, borders of filters.

``dsv4.serving.sampler`` has the formulas. A relative logit is a logit less the largest of its row,
over the temperature. A weight is a probability relative to the largest one, as an integer.
"""

from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(2147483647)  # no token


@triton.jit
def log_exponential(word):
    """``log(E)`` of a random word; see ``dsv4.serving.sampler.exponential_log``."""
    v = (word.to(tl.float32) + 0.5) * (2.0**-32)
    v = tl.minimum(v, 1 - 2.0**-24)
    series = v + v * v * (0.5 + v * (1.0 / 3))
    return tl.log(tl.where(v < 2.0**-8, series, -tl.log(1 - v)))


@triton.jit
def better_of(best, at, score, token):
    """The better of two candidates in each lane; the one before, if they are equal."""
    better = score > best
    return tl.where(better, score, best), tl.where(better, token, at)


@triton.jit
def best_of(best, at):
    """The best of all lanes, the lowest token of equal ones."""
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, at, NONE), 0)


@triton.jit
def weigh(relative):
    """The weight of a relative logit."""
    return (tl.exp(relative) * (2.0**40)).to(tl.int64)


@triton.jit
def mass_above(relatives, bound, vocab, BLOCK: tl.constexpr):
    """Return how many tokens lie above ``bound``, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(relatives + token, mask=token < vocab, other=float("-inf"))
        above = x > bound
        count += above.to(tl.int32)
        mass += tl.where(above, weigh(x), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def mass_up_to(relatives, key, vocab, BLOCK: tl.constexpr):
    """Return how many tokens have a key up to ``key``, and the sum of their weights.

    The key of a token is the bits of its negated relative logit: the more probable, the lower.
    """
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < vocab
        x = tl.load(relatives + token, mask=inside, other=0)
        reached = inside & ((0.0 - x).to(tl.int32, bitcast=True) <= key)
        count += reached.to(tl.int32)
        mass += tl.where(reached, weigh(x), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def mass_of_top_k(relatives, top_k, vocab, BLOCK: tl.constexpr):
    """Sum of the weights that top-k keeps: of the lowest key that ``top_k`` tokens reach."""
    low, high = tl.full([], 0, tl.int32), tl.full([], 0x7F800000, tl.int32)
    while low < high:
        middle = low + (high - low) // 2
        count, _ = mass_up_to(relatives, middle, vocab, BLOCK)
        low = tl.where(count >= top_k, low, middle + 1)
        high = tl.where(count >= top_k, middle, high)
        low = tl.where(count == top_k, middle, low)
    return mass_up_to(relatives, high, vocab, BLOCK)[1]


@triton.jit
def needed_mass(relatives, top_k, top_p, vocab, BLOCK: tl.constexpr):
    """Tokens stay while those above them weigh less than this."""
    needed = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    if top_p < 1:
        total = tl.full([], 0, tl.int64)
        if top_k < vocab:
            total = mass_of_top_k(relatives, top_k, vocab, BLOCK)
        else:
            total = mass_above(relatives, float("-inf"), vocab, BLOCK)[1]
        part = total.to(tl.float64) * top_p
        needed = part.to(tl.int64)
        needed = tl.where(needed.to(tl.float64) < part, needed + 1, needed)
        needed = tl.maximum(needed, 1)
    return needed
