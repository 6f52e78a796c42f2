"""Estimate times of GEMMs on Hopper with FP8 arithmetic and in bfloat16; dispatch chooses by them.

The same operands can be multiplied in three forms: FP8 arithmetic with weights that are dequantized
in the main loop, FP8 arithmetic with weights that another kernel converts first, and the bfloat16
kernel on dequantized activations. The first two give equal bits. A dense weight of more than
``MOST_CONVERTED`` bytes is never converted; experts are converted in ranges.

An estimate is of the GEMM alone: launches, conversion, rounds of tiles, their stages with promotion
and, of experts, SwiGLU and the rounding of its result to FP8 where the FP8 kernel does that.
``Estimate.of_codes`` adds what only the bfloat16 kernel needs: activations in FP8 are codes, or are
rounded to codes first, and it multiplies the values of codes, which another kernel writes. Left out
are the quantiser before both, and the one behind the bfloat16 kernel where the result is FP8. Each
GEMM is chosen by itself, gate and up of experts apart from down: FP8 codes of the first are an
input of both forms of the second.

``dsv4.cute.sm90.e4m3_times`` adds up the times of tiles and says what the constants were fitted to.
This module adds those of the conversion and has those of the bfloat16 kernels: with dense NVFP4
weights by the model that ranks their plans and a constant, with FP8 weights by two rates, of
experts by the rates of reading and of multiplying. The times only rank the forms; a form that was
measured to be the fastest is taken (``dsv4.cute.sm90.tuned``). By the times of ``bench crossover``
of 2026-11-29, one H200, of GEMMs alone, no choice without ``of_codes`` loses more than 1 %
(``tests/cute/test_e4m3_times.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from dsv4.cute.sm90 import e4m3_times
from dsv4.cute.sm90.costs import Costs, E4m3Costs
from dsv4.cute.sm90.e4m3_converted_plan import (
    ConvertedE4m3Plan,
    GroupedConvertedE4m3Plan,
    converted_plans,
    grouped_converted_plan,
)
from dsv4.cute.sm90.gemm_e4m3_plan import (
    BlockE4m3Plan,
    E4m3Plan,
    GroupedE4m3Plan,
    block_e4m3_plans,
    e4m3_plans,
    grouped_e4m3_plan,
)
from dsv4.cute.sm90.plans import GemmProblem, large_m_us
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import E4m3Configuration, E4m3Key, TunedData
from dsv4.device import cached
from dsv4.quant.exact_fp8 import MOST_CONVERTED

P = TypeVar("P", bound=E4m3Plan)
# Rows from which the dequantization of codes counts. It was timed from 320 rows on, and kernels for
# fewer rows than the bfloat16 kernel's read codes in other ways.
_FEWEST_DEQUANTIZED = 256
_CONVERSION_BYTES = 0.5625 + 1.0  # per weight: packed bytes read, and bytes written


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

    def of_codes(self, rows: int, codes: int) -> Estimate:
        """Return the times with the dequantization of codes for the bfloat16 kernel.

        Args:
            rows: Rows of X, of all experts; below 256 nothing is added.
            codes: All codes of X.
        """
        if rows < _FEWEST_DEQUANTIZED:
            return self
        costs = tuned().costs.gemm_e4m3
        more = max(costs.dequantization, codes * costs.dequantized_code)
        return self._replace(bfloat16=self.bfloat16 + more)


@cached
def estimate(rows: int, columns: int, tokens: int, *, is_block: bool = False) -> Estimate:
    """Times of a dense GEMM.

    Args:
        rows: N, of all groups.
        columns: K, a multiple of 128.
        tokens: At least 1.
        is_block: Whether the weight is FP8, else NVFP4.
    """
    sizes = (rows, columns, tokens)
    make_plan = block_plan if is_block else nvfp4_plan
    fp8 = plan_us(make_plan(*sizes, False, False), *sizes)
    return Estimate(fp8, bfloat16_us(*sizes, is_block, tuned().costs, tuned()))


def bfloat16_us(
    rows: int, columns: int, tokens: int, is_block: bool, costs: Costs, gpu: TunedData
) -> float:
    """Microseconds of the bfloat16 kernel for many tokens.

    Args:
        rows: N, of all groups.
        columns: K, a multiple of 128.
        tokens: At least 1.
        is_block: Whether the weight is FP8, else NVFP4.
        costs: The constants.
        gpu: SMs and clusters of the GPU.
    """
    own = costs.gemm_e4m3
    if is_block:
        return own.bfloat16_block.us(rows * columns, tokens)
    problem = GemmProblem(rows, columns, 1, False, False)
    return own.bfloat16_launch + large_m_us(problem, tokens, costs.gemm_wgmma, gpu)


@cached
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
    bfloat16 = tuned().costs.gemm_e4m3.bfloat16_experts.us(weights, rows_of_x / experts)
    return Estimate(experts_plan_us(plan, *sizes), bfloat16)


@cached
def nvfp4_plan(rows: int, columns: int, tokens: int, float32_out: bool, swiglu: bool) -> E4m3Plan:
    """Return the faster configuration of a GEMM with NVFP4 weights: converted or in the loop.

    Args:
        rows: N, of all groups, a multiple of 128 in each group if there are several.
        columns: K, a multiple of 128.
        tokens: At least 1.
        float32_out: Whether the result is float32.
        swiglu: See ``E4m3Plan``.
    """
    plans = plans_of(rows, columns, False, float32_out, swiglu)
    return _fastest(plans, rows, columns, tokens)


def plans_of(
    rows: int, columns: int, is_block: bool, float32_out: bool = False, other: bool = False
) -> list[E4m3Plan]:
    """Return every configuration of a GEMM; ``other``: E8M0 scales of FP8 weights, else SwiGLU."""
    if is_block:
        return [*block_e4m3_plans(float32_out, other)]
    plans: list[E4m3Plan] = [*e4m3_plans(float32_out, other)]
    if rows * columns <= MOST_CONVERTED:
        plans += converted_plans(float32_out, other)
    return plans


@cached
def block_plan(
    rows: int, columns: int, tokens: int, float32_out: bool, e8m0_scales: bool
) -> BlockE4m3Plan:
    """Return the faster configuration of a GEMM with FP8 weights; see ``BlockE4m3Plan``."""
    return _fastest(block_e4m3_plans(float32_out, e8m0_scales), rows, columns, tokens)


def _fastest(plans: Sequence[P], rows: int, columns: int, tokens: int) -> P:
    """Return the fastest measured plan; without measurements the plan with the least estimate."""
    is_block = isinstance(plans[0], BlockE4m3Plan)
    counted = -(-tokens // 128) * 128
    measured = tuned().plan_of(E4m3Key(rows, columns, counted, is_block))
    if measured is not None:
        return next(plan for plan in plans if configuration_of(plan) == measured)
    return min(plans, key=lambda plan: plan_us(plan, rows, columns, tokens))


def configuration_of(plan: E4m3Plan) -> E4m3Configuration:
    """Return the configuration of a plan, as a data file has it."""
    return E4m3Configuration(plan.token_rows, isinstance(plan, ConvertedE4m3Plan))


def fits(key: E4m3Key, measured: E4m3Configuration) -> bool:
    """Return whether a configuration is a candidate for a key."""
    if key.columns % 128 or key.tokens % 128 or measured.token_rows > 2:
        return False
    can_convert = not key.is_block and key.rows * key.columns <= MOST_CONVERTED
    return can_convert or not measured.converted


def plan_us(plan: E4m3Plan, rows: int, columns: int, tokens: int) -> float:
    """Microseconds of a dense GEMM in a configuration, with its conversion."""
    us = plan.dense_us(rows, columns, tokens)
    converted = isinstance(plan, ConvertedE4m3Plan)
    return us + conversion_us(rows * columns) if converted else us


@cached
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
        rows_of_x: Rows of all experts; each is assumed to have about as many.
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


def conversion_us(weights: int, launches: int = 1, costs: E4m3Costs | None = None) -> float:
    """Microseconds of the conversion of a number of weights; by the constants of the GPU."""
    costs = costs or tuned().costs.gemm_e4m3
    return launches * costs.conversion + weights * _CONVERSION_BYTES * costs.conversion_byte


def experts_at_once(rows: int, columns: int) -> int:
    """Number of experts whose converted weights fit into scratch memory; at least one."""
    return max(1, MOST_CONVERTED // (rows * columns))
