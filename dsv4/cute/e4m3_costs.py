"""Estimated times of the GEMMs with FP8 arithmetic on Hopper, and of bfloat16's, to choose by.

Three forms give results of the same operands: FP8 arithmetic with weights that a kernel dequantizes
in its main loop, FP8 arithmetic with weights that a kernel has converted before, and the bfloat16
kernel on dequantized activations. The first two give equal bits. A dense weight of more than
``MOST_CONVERTED`` bytes is never converted; experts are converted in ranges.

Times of tiles are in ``dsv4.cute.sm90.e4m3_times``; here are those of the conversion and of the
bfloat16 kernels, of the same log. They rank forms.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from dsv4.cute.sm90 import e4m3_times
from dsv4.cute.sm90.e4m3_converted_plan import (
    ConvertedE4m3Plan,
    GroupedConvertedE4m3Plan,
    converted_plan,
    grouped_converted_plan,
)
from dsv4.cute.sm90.gemm_e4m3_plan import (
    E4m3Plan,
    GroupedE4m3Plan,
    block_e4m3_plan,
    e4m3_plan,
    grouped_e4m3_plan,
)
from dsv4.quant.exact_fp8 import MOST_CONVERTED

_CONVERSION = 5.25  # us of a conversion that do not depend on its size
_CONVERSION_RATE = 3.83e6  # bytes a us
_CONVERSION_BYTES = 0.5625 + 1.0  # of a weight: read packed, written


class Bfloat16Times(NamedTuple):
    """Microseconds of a GEMM of a bfloat16 kernel.

    Attributes:
        launch: What does not depend on size.
        weight: Of a weight.
        multiply: Of a weight and token.
    """

    launch: float
    weight: float
    multiply: float

    def us(self, weights: int, tokens: float) -> float:
        """Microseconds; of experts ``weights`` are all, ``tokens`` one's."""
        return self.launch + weights * (self.weight + self.multiply * tokens)


_BFLOAT16 = Bfloat16Times(8.0, 0.11e-6, 2.35e-9)
_BFLOAT16_BLOCK = Bfloat16Times(8.0, 0.11e-6, 3.05e-9)  # FP8 weights
_BFLOAT16_EXPERTS = Bfloat16Times(8.0, 0.11e-6, 2.5e-9)


class Estimate(NamedTuple):
    """Estimated times of a GEMM.

    Attributes:
        fp8: Microseconds with FP8 arithmetic, in its fastest form.
        bfloat16: Microseconds of the bfloat16 kernel.
    """

    fp8: float
    bfloat16: float

    @property
    def is_faster(self) -> bool:
        """Return whether FP8 arithmetic is."""
        return self.fp8 < self.bfloat16


@functools.lru_cache(maxsize=4096)
def estimate(rows: int, columns: int, tokens: int, *, is_block: bool = False) -> Estimate:
    """Times of a dense GEMM.

    Args:
        rows: N, of all groups.
        columns: K, a multiple of 128.
        tokens: At least 1.
        is_block: Whether the weight is FP8, else NVFP4.
    """
    weights = rows * columns
    if is_block:
        block = block_e4m3_plan(rows, columns, tokens, False, False)
        us = plan_us(block, rows, columns, tokens)
        return Estimate(us, _BFLOAT16_BLOCK.us(weights, tokens))
    plan = nvfp4_plan(rows, columns, tokens, False, False)
    return Estimate(plan_us(plan, rows, columns, tokens), _BFLOAT16.us(weights, tokens))


@functools.lru_cache(maxsize=4096)
def estimate_experts(
    rows: int, columns: int, experts: int, rows_of_x: int, *, quantized_out: bool = False
) -> Estimate:
    """Times of a grouped GEMM.

    Args:
        rows: N of an expert.
        columns: K.
        experts: How many.
        rows_of_x: Of all experts.
        quantized_out: Whether results are FP8 codes of SwiGLU.
    """
    sizes = (rows, columns, experts, rows_of_x)
    plan = experts_plan(*sizes, (False, quantized_out, False, quantized_out))
    weights = experts * rows * columns
    bfloat16 = _BFLOAT16_EXPERTS.us(weights, rows_of_x / experts)
    return Estimate(experts_plan_us(plan, *sizes), bfloat16)


@functools.lru_cache(maxsize=4096)
def nvfp4_plan(rows: int, columns: int, tokens: int, float32_out: bool, swiglu: bool) -> E4m3Plan:
    """The configuration of a GEMM with NVFP4 weights: the one of two forms that takes less time.

    Arguments as in ``e4m3_plan``.
    """
    plans: list[E4m3Plan] = [e4m3_plan(rows, columns, tokens, float32_out, swiglu)]
    if rows * columns <= MOST_CONVERTED:
        plans.append(converted_plan(rows, columns, tokens, float32_out, swiglu))
    return min(plans, key=lambda plan: plan_us(plan, rows, columns, tokens))


def plan_us(plan: E4m3Plan, rows: int, columns: int, tokens: int) -> float:
    """Microseconds of a dense GEMM in a configuration, the conversion among them."""
    us = plan.dense_us(rows, columns, tokens)
    converted = isinstance(plan, ConvertedE4m3Plan)
    return us + conversion_us(rows * columns) if converted else us


@functools.lru_cache(maxsize=4096)
def experts_plan(
    rows: int,
    columns: int,
    experts: int,
    rows_of_x: int,
    kind: tuple[bool, bool, bool, bool],
) -> GroupedE4m3Plan:
    """The configuration of a grouped GEMM: the one of two forms that takes less time.

    Args:
        rows: N of an expert.
        columns: K.
        experts: How many.
        rows_of_x: Of all experts, which are supposed to have as many each.
        kind: The last four arguments of ``grouped_e4m3_plan``.
    """
    sizes = (rows, columns, experts, rows_of_x)
    plans = (grouped_e4m3_plan(rows_of_x, experts, *kind), grouped_converted_plan(columns, *kind))
    return min(plans, key=lambda plan: experts_plan_us(plan, *sizes))


def experts_plan_us(
    plan: GroupedE4m3Plan, rows: int, columns: int, experts: int, rows_of_x: int
) -> float:
    """Microseconds of a grouped GEMM in a configuration, conversions among them."""
    sizes = (rows, columns, experts, rows_of_x)
    us = e4m3_times.grouped_us(plan.times, plan.token_rows, *sizes)
    if not isinstance(plan, GroupedConvertedE4m3Plan):
        return us
    ranges = -(-experts // experts_at_once(rows, columns))
    more = (ranges - 1) * plan.times.launch
    return us + more + conversion_us(experts * rows * columns, ranges)


def conversion_us(weights: int, launches: int = 1) -> float:
    """Microseconds of the conversion of a number of weights."""
    return launches * _CONVERSION + weights * _CONVERSION_BYTES / _CONVERSION_RATE


def experts_at_once(rows: int, columns: int) -> int:
    """Experts whose converted weights fit into scratch memory; one at least."""
    return max(1, MOST_CONVERTED // (rows * columns))
