"""Estimate times of GEMMs on Hopper with FP8 arithmetic and in bfloat16; dispatch chooses by them.

The same operands can be multiplied in three forms: FP8 arithmetic with weights that are dequantized
in the main loop, FP8 arithmetic with weights that another kernel converts first, and the bfloat16
kernel on dequantized activations. The first two give equal bits. A dense weight of more than
``MOST_CONVERTED`` bytes is never converted; experts are converted in ranges.

``dsv4.cute.sm90.e4m3_times`` has the times of tiles. This module has the times of the conversion
and of the bfloat16 kernels, from the same log. The times only rank the forms.
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

_CONVERSION = 5.25  # us of a conversion, apart from its size
_CONVERSION_RATE = 3.83e6  # bytes per us
_CONVERSION_BYTES = 0.5625 + 1.0  # per weight: packed bytes read, and bytes written


class Bfloat16Times(NamedTuple):
    """Microseconds of a GEMM of a bfloat16 kernel.

    Attributes:
        launch: Constant part.
        weight: Time per weight.
        multiply: Time per weight and token.
    """

    launch: float
    weight: float
    multiply: float

    def us(self, weights: int, tokens: float) -> float:
        """Microseconds; for experts, ``weights`` of all of them and ``tokens`` of one."""
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
        """Return whether FP8 arithmetic is faster."""
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
    """Return the faster configuration of a GEMM with NVFP4 weights: converted or in the loop.

    Arguments as in ``e4m3_plan``.
    """
    plans: list[E4m3Plan] = [e4m3_plan(rows, columns, tokens, float32_out, swiglu)]
    if rows * columns <= MOST_CONVERTED:
        plans.append(converted_plan(rows, columns, tokens, float32_out, swiglu))
    return min(plans, key=lambda plan: plan_us(plan, rows, columns, tokens))


def plan_us(plan: E4m3Plan, rows: int, columns: int, tokens: int) -> float:
    """Microseconds of a dense GEMM in a configuration, with its conversion."""
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
    """Return the faster configuration of a grouped GEMM: converted or in the loop.

    Args:
        rows: N of an expert.
        columns: K.
        experts: Number of experts.
        rows_of_x: Rows of all experts; each is assumed to have the same number.
        kind: The last four arguments of ``grouped_e4m3_plan``.
    """
    sizes = (rows, columns, experts, rows_of_x)
    plans = (grouped_e4m3_plan(rows_of_x, experts, *kind), grouped_converted_plan(columns, *kind))
    return min(plans, key=lambda plan: experts_plan_us(plan, *sizes))


def experts_plan_us(
    plan: GroupedE4m3Plan, rows: int, columns: int, experts: int, rows_of_x: int
) -> float:
    """Microseconds of a grouped GEMM in a configuration, with its conversions."""
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
    """Number of experts whose converted weights fit into scratch memory; at least one."""
    return max(1, MOST_CONVERTED // (rows * columns))
