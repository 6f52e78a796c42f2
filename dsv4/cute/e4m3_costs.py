"""Estimated times of the GEMMs with FP8 arithmetic on Hopper, and of bfloat16's, to choose by.

Three forms give results of the same operands: FP8 arithmetic with weights that a kernel dequantizes
in its main loop, FP8 arithmetic with weights that a kernel has converted before, and the bfloat16
kernel on dequantized activations. The first two give equal bits. A dense weight of more than
``MOST_CONVERTED`` bytes is never converted; experts are converted in ranges.

Times follow from tiles, stages and bytes with constants of two H200 (2026-11-28, 4096 x 8192, 4096
x 4096 and 7168 x 16384 of 256 to 4096 tokens; ``notes/2026-11_fp8_gemm.md``). They rank forms.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from dsv4.cute.sm90.e4m3_converted_plan import (
    ConvertedE4m3Plan,
    GroupedConvertedE4m3Plan,
    converted_plan,
    grouped_converted_plan,
)
from dsv4.cute.sm90.gemm_e4m3_plan import (
    K_BLOCK,
    ROWS,
    E4m3Plan,
    GroupedE4m3Plan,
    block_e4m3_plan,
    e4m3_plan,
    grouped_e4m3_plan,
)
from dsv4.cute.sm90.tuned import tuned
from dsv4.quant.exact_fp8 import MOST_CONVERTED

_LAUNCH = 10.0  # us of a GEMM that do not depend on its size
_TILE = 2.5  # of a tile: the first stage to arrive, and results
# us of a stage of 128 columns of a tile, by its blocks of 128 tokens.
_DEQUANTIZING = {1: 0.73, 2: 1.0}
_CONVERTED = {1: 0.42, 2: 0.85}
_CONVERSION = 3.0  # us of a conversion that do not depend on its size
_CONVERSION_RATE = 3.5e6  # bytes a us
_CONVERSION_BYTES = 0.5625 + 1.0  # of a weight: read packed, written
# Time of the bfloat16 kernel with FP8 weights over that with NVFP4 (4096 x 8192, 256 tokens).
_BLOCK_TO_NVFP4 = 1.25
# bfloat16: us of a GEMM, of a weight, of a weight and token.
_BFLOAT16 = (8.0, 0.11e-6, 2.35e-9)


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
    bfloat16 = bfloat16_us(rows * columns, tokens)
    if is_block:
        token_rows = block_e4m3_plan(rows, columns, tokens, False, False).token_rows
        return Estimate(block_us(rows, columns, tokens, token_rows), _BLOCK_TO_NVFP4 * bfloat16)
    plan = nvfp4_plan(rows, columns, tokens, False, False)
    return Estimate(plan_us(plan, rows, columns, tokens), bfloat16)


@functools.lru_cache(maxsize=4096)
def estimate_experts(rows: int, columns: int, experts: int, rows_of_x: int) -> Estimate:
    """Times of a grouped GEMM; arguments as in ``experts_plan``."""
    sizes = (rows, columns, experts, rows_of_x)
    plan = experts_plan(*sizes, (False, False, False, False))
    weights = experts * rows * columns
    return Estimate(experts_plan_us(plan, *sizes), bfloat16_us(weights, rows_of_x / experts))


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
    """Microseconds of a GEMM with NVFP4 weights in a configuration; see ``dense_us``."""
    converted = isinstance(plan, ConvertedE4m3Plan)
    return dense_us(rows, columns, tokens, plan.token_rows, converted=converted)


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
    """Microseconds of a grouped GEMM in a configuration; see ``grouped_us``."""
    converted = isinstance(plan, GroupedConvertedE4m3Plan)
    sizes = (rows, columns, experts, rows_of_x)
    return grouped_us(*sizes, plan.token_rows, converted=converted)


def dense_us(rows: int, columns: int, tokens: int, token_rows: int, *, converted: bool) -> float:
    """Microseconds of a dense GEMM with FP8 arithmetic.

    Args:
        rows: N, of all groups.
        columns: K.
        tokens: At least 1.
        token_rows: Blocks of 128 tokens of a tile, 1 or 2.
        converted: Whether weights are converted before; that is part of the result.
    """
    rounds = -(-(-(-rows // ROWS) * -(-tokens // (128 * token_rows))) // tuned().sms)
    stage = (_CONVERTED if converted else _DEQUANTIZING)[token_rows]
    us = _LAUNCH + rounds * (_TILE + columns // K_BLOCK * stage)
    return us + conversion_us(rows * columns) if converted else us


def block_us(rows: int, columns: int, tokens: int, token_rows: int) -> float:
    """Microseconds of a GEMM with FP8 weights; arguments as in ``dense_us``."""
    converted = dense_us(rows, columns, tokens, token_rows, converted=True)
    return converted - conversion_us(rows * columns)


def grouped_us(
    rows: int, columns: int, experts: int, rows_of_x: int, token_rows: int, *, converted: bool
) -> float:
    """Microseconds of a grouped GEMM with FP8 arithmetic whose experts have as many rows each.

    Args:
        rows: N of an expert.
        columns: K.
        experts: How many.
        rows_of_x: Of all experts.
        token_rows: Blocks of 128 tokens of a tile, 1 or 2.
        converted: Whether weights are converted before; that is part of the result.
    """
    stages, mean = columns // K_BLOCK, rows_of_x / experts
    full = mean / (128 * token_rows)
    # The last tile of an expert is half empty: dequantizing it takes as long, multiplying half.
    last = 0.3 if converted else 0.5
    stage = (_CONVERTED if converted else _DEQUANTIZING)[token_rows]
    tiles = experts * -(-rows // ROWS)
    us = _LAUNCH + tiles / tuned().sms * ((full + last) * stages * stage + (full + 0.5) * _TILE)
    if not converted:
        return us
    ranges = -(-experts // experts_at_once(rows, columns))
    return us + (ranges - 1) * _LAUNCH + conversion_us(experts * rows * columns, ranges)


def conversion_us(weights: int, launches: int = 1) -> float:
    """Microseconds of the conversion of a number of weights."""
    return launches * _CONVERSION + weights * _CONVERSION_BYTES / _CONVERSION_RATE


def bfloat16_us(weights: int, tokens: float) -> float:
    """Microseconds of a GEMM in bfloat16; of experts ``weights`` are all, ``tokens`` one's."""
    launch, of_weight, of_multiply = _BFLOAT16
    return launch + weights * (of_weight + of_multiply * tokens)


def experts_at_once(rows: int, columns: int) -> int:
    """Experts whose converted weights fit into scratch memory; one at least."""
    return max(1, MOST_CONVERTED // (rows * columns))
