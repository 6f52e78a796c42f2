"""Choice of a configuration for a ``tcgen05`` GEMM; needs no compiler.

``choose`` takes the configuration that ``estimated_cycles`` calls the fastest. Its constants are
rates of a B200 from its documentation; nothing here was measured, because the project has no such
GPU. So it ranks configurations, and predicts no times.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from dsv4.cute.sm100.gemm_plan import K_SPLITS, ROWS, TOKEN_BLOCKS, Tcgen05Plan
from dsv4.cute.sm100.tensor_maps import STAGE_K

# Rates of a B200, per cycle.
SMS = 148
_MMA_CODES = 16384  # pairs of codes that the tensor core of an SM multiplies
_L2_BYTES = 64  # that L2 gives an SM
_MEMORY_BYTES = 4300  # that memory gives all SMs
_TOKEN_STEP, _MOST_TOKENS = 64, 8192
# Guesses, in cycles.
_LAUNCH_CYCLES = 3000
_FILL_CYCLES = 1500  # until the first stage of a tile has arrived
_CHUNK_CYCLES = 350  # of the epilogue, for 32 tokens
_REDUCTION_CYCLES = 2500  # of the sums of CTAs that share K


class GemmProblem(NamedTuple):
    """A GEMM without its number of tokens.

    Attributes:
        rows: N, of all groups; a multiple of 16.
        columns: K, a multiple of 32.
        groups: Groups of rows with an input each, of 128 rows or a multiple each if several.
        float32_out: Whether the result is float32, else bfloat16.
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
    """

    rows: int
    columns: int
    groups: int
    float32_out: bool
    swiglu: bool = False


def choose(problem: GemmProblem, tokens: int) -> Tcgen05Plan:
    """The configuration for a number of tokens that ``estimated_cycles`` calls the fastest.

    It depends on the number of tiles of 64 tokens, and above 8192 tokens on nothing more.
    """
    return _choose(problem, min(-(-tokens // _TOKEN_STEP) * _TOKEN_STEP, _MOST_TOKENS))


@functools.lru_cache(maxsize=1 << 16)
def _choose(problem: GemmProblem, tokens: int) -> Tcgen05Plan:
    return min(candidates(problem), key=lambda plan: estimated_cycles(plan, problem, tokens))


def candidates(problem: GemmProblem) -> list[Tcgen05Plan]:
    """Return every configuration that can compute a GEMM."""
    ctas = (1, 2) if problem.rows // problem.groups % (2 * ROWS) == 0 else (1,)
    if problem.groups == 1:
        ctas = (1, 2)
    kind = (problem.float32_out, problem.swiglu)
    whole = [Tcgen05Plan(*shape, *kind) for shape in itertools.product(TOKEN_BLOCKS, ctas)]
    splits = [splits for splits in K_SPLITS if splits <= -(-problem.columns // STAGE_K)]
    return whole + [Tcgen05Plan(TOKEN_BLOCKS[0], count, *kind, count) for count in splits]


def plans(problem: GemmProblem, max_tokens: int) -> list[Tcgen05Plan]:
    """The configurations that a GEMM takes for 1 to ``max_tokens`` tokens, each once."""
    steps = range(_TOKEN_STEP, min(max_tokens, _MOST_TOKENS) + _TOKEN_STEP, _TOKEN_STEP)
    return list(dict.fromkeys(choose(problem, tokens) for tokens in steps))


def estimated_cycles(plan: Tcgen05Plan, problem: GemmProblem, tokens: int) -> float:
    """Estimated cycles of a GEMM: rounds of tiles. It is there to rank configurations.

    A stage takes as long as the tensor core multiplies, or as its bytes take to arrive.
    """
    tiles = -(-tokens // plan.token_block) * -(-problem.rows // plan.rows)
    rounds = -(-tiles // (SMS // plan.ctas))
    return cycles_of(plan, rounds, tiles, plan.k_stages(problem.columns))


def cycles_of(plan: Tcgen05Plan, rounds: float, tiles: float, k_stages: int) -> float:
    """Estimated cycles of ``rounds`` rounds of ``tiles`` tiles, of ``k_stages`` stages each."""
    busy_sms = min(tiles, SMS // plan.ctas) * plan.ctas
    stage = max(
        ROWS * plan.token_block * STAGE_K / _MMA_CODES,
        plan.stage_bytes / _L2_BYTES,
        busy_sms * (plan.row_code_bytes + plan.row_scale_bytes) / _MEMORY_BYTES,
    )
    results = plan.chunks * _CHUNK_CYCLES
    k_stages = -(-k_stages // plan.k_splits)
    if plan.k_splits > 1:
        tile = _FILL_CYCLES + k_stages * stage + _REDUCTION_CYCLES + results
        return _LAUNCH_CYCLES + rounds * tile
    # The epilogue of a tile overlaps the MMAs of the next one.
    return _LAUNCH_CYCLES + _FILL_CYCLES + rounds * max(k_stages * stage, results) + results
