"""Choice of an NVFP4 GEMM's kernel and its configuration; needs no compiler.

The small-M kernels run on every architecture, the large-M kernel on Hopper alone (``wgmma``).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from dsv4.cute.runtime.architectures import HOPPER, shared_limit
from dsv4.cute.sm90.costs import WgmmaCosts
from dsv4.cute.sm90.gemm_small_m_plan import TOKENS, SmallMPlan, is_measured, small_m_plan
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan, estimated_cycles, wgmma_plan
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import TunedData
from dsv4.device import cached

Plan = SmallMPlan | WgmmaPlan
_CYCLES_PER_US = 1980.0


class GemmProblem(NamedTuple):
    """The facts that a kernel depends on, except the number of tokens.

    Attributes:
        rows: N, of all groups; a multiple of 16 in each.
        columns: K, a multiple of 64.
        groups: Groups of rows with an input each.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every token has a scale of its own (quantised activations).
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
    """

    rows: int
    columns: int
    groups: int
    float32_out: bool
    row_scaled: bool
    swiglu: bool = False


@cached
def choose(problem: GemmProblem, tokens: int, arch: str = HOPPER) -> Plan | None:
    """The configuration for a number of tokens; None if there is none.

    A ``SmallMPlan`` for more than ``TOKENS`` tokens means as many launches as it takes.
    """
    small = _small_m(problem, min(tokens, TOKENS), shared_limit(arch))
    # wgmma is Hopper's alone; elsewhere the small-M kernel multiplies 16 tokens at a time.
    if arch != HOPPER:
        return small
    if small is not None and tokens <= (
        TOKENS if _takes_16_tokens(problem) else tuned().costs.gemm_small_m.few_tokens
    ):
        return small
    return _large_m(problem, counted_as(tokens)) or small


def large_m_us(problem: GemmProblem, tokens: int, costs: WgmmaCosts, gpu: TunedData) -> float:
    """Estimate the microseconds of the large-M kernel in its configuration on Hopper.

    The model counts the cycles of tiles, at a clock of 1.98 GHz. The launch is not included.

    Args:
        problem: The GEMM; its columns are a multiple of 128.
        tokens: At least 1.
        costs: The constants.
        gpu: SMs and clusters of the GPU.
    """
    plan = _large_m(problem, counted_as(tokens))
    assert isinstance(plan, WgmmaPlan)
    cycles = estimated_cycles(plan, problem.rows, problem.columns, tokens, costs, gpu)
    return cycles / _CYCLES_PER_US


def counted_as(tokens: int) -> int:
    """The number of tokens whose configuration this one takes: steps of 16, 64 and 512 up to 8192.

    Coarse, so that few configurations have to be compiled.
    """
    for most, step in ((256, 16), (1024, 64), (8192, 512)):
        if tokens <= most:
            return -(-tokens // step) * step
    return 8192


def token_counts(most: int) -> list[int]:
    """Return every ``counted_as`` of 1 to ``most`` tokens, ascending."""
    counted = {counted_as(tokens) for tokens in range(TOKENS + 1, min(most, 8192) + 1)}
    return [*range(1, min(most, TOKENS) + 1), *sorted(counted)]


def _takes_16_tokens(problem: GemmProblem) -> bool:
    """Return whether the small-M kernel takes up to 16 tokens: small and measured matrices."""
    if problem.rows * problem.columns <= tuned().costs.gemm_small_m.small_matrix:
        return True
    tiles = problem.rows // 16
    kind = (problem.float32_out, problem.row_scaled)
    return is_measured(tiles, tiles // problem.groups, problem.columns, TOKENS, *kind)


@cached
def _small_m(problem: GemmProblem, tokens: int, shared: int) -> SmallMPlan | None:
    tiles = problem.rows // 16
    plan = small_m_plan(
        tiles,
        tiles // problem.groups,
        problem.columns,
        tokens,
        problem.float32_out,
        problem.row_scaled,
        shared,
    )
    return plan and dataclasses.replace(plan, swiglu=problem.swiglu)


@cached
def _large_m(problem: GemmProblem, tokens: int) -> WgmmaPlan | None:
    plan = wgmma_plan(
        problem.rows,
        problem.rows // problem.groups,
        problem.columns,
        tokens,
        problem.float32_out,
        problem.row_scaled,
    )
    return plan and dataclasses.replace(plan, swiglu=problem.swiglu)
