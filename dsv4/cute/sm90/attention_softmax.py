"""Arithmetic of the running softmax that the attention kernels share.

Logits are multiplied by ``log2 e``, so that weights are powers of two: a softmax weight is
``2^(logit - reference)``. The reference follows the largest logit of its head only once that
exceeds it by more than ``2^8``: float32 sums bear that, and most KV blocks leave the sums as they
are. Sums of weights are taken over the weights as rounded to bfloat16, so that a result stays a
mean of entries and zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from dsv4.cute.device import ptx

LOG2E = 1.4426950408889634
INFINITY = float("inf")
_SLACK = 8.0  # powers of two by which a logit may exceed its reference


class Softmax(NamedTuple):
    """Running softmax of a thread's heads.

    Attributes:
        references: To which the weights of each head are relative.
        totals: Sums of weights of each head, of the thread's own entries.
    """

    references: list[Float32]
    totals: list[Float32]


class Reference(NamedTuple):
    """The reference of a head after a KV block.

    Attributes:
        value: The new reference.
        origin: What logits are reduced by: the reference, or 0 if it is -inf.
        factor: On sums that are relative to the old reference.
    """

    value: Float32
    origin: Float32
    factor: Float32


def empty_softmax(heads: int) -> Softmax:
    """Return the softmax of no entries."""
    return Softmax([Float32(-INFINITY)] * heads, [Float32(0.0)] * heads)


def new_reference(largest: Float32, old: Float32) -> Reference:
    """Follow the largest logit of a KV block if it exceeds the old reference by far.

    Args:
        largest: Logit of the KV block, -inf if no entry exists.
        old: Reference before it.
    """
    # False where both are -inf, and for NaN, which the exponentials then carry on.
    grown = largest > old + Float32(_SLACK)
    value = ptx.select_float(grown, largest, old)
    origin = finite_origin(value)
    factor = ptx.select_float(grown, ptx.exp2_approx(old - value), Float32(1.0))
    return Reference(value, origin, factor)


def finite_origin(reference: Float32) -> Float32:
    """The reference, or 0 if it is -inf, so that no ``inf - inf`` arises."""
    return ptx.select_float(reference == -Float32(INFINITY), Float32(0.0), reference)


def reciprocal_or_zero(total: Float32) -> Float32:
    """``1 / total``; 0 if there is neither an entry nor a sink."""
    return ptx.select_float(total == Float32(0.0), Float32(0.0), Float32(1.0) / total)


def merged_total(
    statistics: Sequence[tuple[Float32, Float32]], sink: Float32
) -> tuple[list[Float32], Float32]:
    """Factors on the partial sums of several CTAs, and the sum of all weights.

    Added in the order of CTAs, the sink first.

    Args:
        statistics: Reference and sum of weights of each CTA.
        sink: Logit of the head's sink.
    """
    origin = sink
    for reference, _ in statistics:
        origin = ptx.max_float(origin, reference)
    origin = finite_origin(origin)
    total = ptx.exp2_approx(sink - origin)
    factors = [ptx.exp2_approx(reference - origin) for reference, _ in statistics]
    for (_, weights), factor in zip(statistics, factors, strict=True):
        total = total + weights * factor
    return factors, total


def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes that have the same row of an accumulator."""
    # Lanes of a quad differ in bits 0 and 1.
    value = value + cute.arch.shuffle_sync_bfly(value, 1)
    return value + cute.arch.shuffle_sync_bfly(value, 2)
