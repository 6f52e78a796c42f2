"""Arguments and configurations of the small-M GEMM with FP8 weights; needs no compiler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import Int32, Int64, KernelAbi, Pointer
from dsv4.cute.sm90.costs import SmallMFp8Costs
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan
from dsv4.cute.sm90.plans import GemmProblem
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import RULE, SmallMFp8Configuration, SmallMFp8Key
from dsv4.device import cached

BLOCK = 128  # rows, and columns, that share a scale
TOKENS = 32  # of one launch: four tiles of 8
RING_TILE = 16 * BLOCK  # bytes of 16 rows and 128 columns
_CTAS = (1, 2, 4, 8)  # CTAs of a cluster
_MOST_WARPS = 18  # of a CTA
_MOST_STAGES = 8
_SHARED = 227 * 1024  # shared memory that one CTA can have
_HALF_SM = 112 * 1024  # shared memory of each of two CTAs of an SM


class SmallMFp8Args(NamedTuple):
    """Arguments of the small-M GEMM with FP8 weights.

    Attributes:
        codes: E4M3 codes of the weight, ``[rows, K]``.
        scales: Block scales, ``[rows / 128 rounded up, K / 128]``, float32 or E8M0.
        x: bfloat16 ``[tokens, groups, K]``.
        token_scale: float32 ``[tokens, groups]``; read where the plan is ``row_scaled``.
        out: ``[tokens, rows]``, bfloat16 or float32.
        tokens: 1 to 8 ``token_tiles``.
        row_tiles: Rows of the weight / 16.
        group_tiles: Row tiles that share an input; a multiple of the plan's ``warps``, or all.
        token_stride: Elements of X from one token to the next.
        group_stride: Elements of X from one group to the next.
        codes_stride: Bytes from one row of codes to the next, a multiple of 16.
        groups: Inputs of a token.
    """

    codes: Pointer
    scales: Pointer
    x: Pointer
    token_scale: Pointer
    out: Pointer
    tokens: Int32
    row_tiles: Int32
    group_tiles: Int32
    token_stride: Int64
    group_stride: Int64
    codes_stride: Int64
    groups: Int32


SMALL_M_FP8_ABI = KernelAbi(SmallMFp8Args)


@dataclass(frozen=True)
class SmallMFp8Plan(SmallMPlan):
    """One configuration of the kernel in ``gemm_fp8_small_m``.

    ``columns / 128`` is a multiple of ``ctas``; ``token_tiles`` is 1, 2 or 4; ``stages`` is how
    many tiles of 16 rows and 128 columns a warp's ring has, at most ``blocks``.

    Attributes:
        e8m0_scales: Whether block scales are E8M0, else float32.
        l2_bytes: Bytes of a row that a copy of 128 brings to L2: 128 or 256.
        prefetched: Tiles whose codes are brought to L2 before griddepcontrol.wait.
    """

    e8m0_scales: bool = False
    l2_bytes: int = 256
    prefetched: int = 2

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.gemm_fp8_small_m:SmallMFp8Kernel"

    @property
    def for_family(self) -> bool:
        """Whether one cubin serves all of Blackwell: the kernel is for Hopper alone."""
        return False

    @property
    def blocks(self) -> int:
        """Blocks of 128 columns of a CTA's part of K."""
        return self.columns // BLOCK // self.ctas

    @property
    def ring_bytes(self) -> int:
        """A warp's ring, which the epilogue transpose uses afterwards."""
        return max(self.partial_bytes, self.stages * RING_TILE)

    @property
    def scale_words(self) -> int:
        """Block scales that each lane loads."""
        return -(-self.blocks // 32)

    @property
    def buffer_bytes(self) -> int:
        """A warp's ring, and its block scales as float32."""
        return self.ring_bytes + 128 * self.scale_words

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that an SM must hold at once: two where registers and shared memory allow it."""
        warps = _most_warps(self.token_tiles, self.row_scaled)
        return 2 if 2 * self.warps <= warps and self.shared_bytes <= _HALF_SM else 1


# Few configurations serve all matrices, and keep what is derived from their fields.
_configuration = functools.cache(SmallMFp8Plan)


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens of a launch for 1 to ``TOKENS`` tokens: 1, 2 or 4."""
    return 1 if tokens <= 8 else 2 if tokens <= 16 else 4


@cached
def fp8_small_m_plan(problem: GemmProblem, tokens: int, folded: bool) -> SmallMFp8Plan | None:
    """The fastest configuration of a launch, measured or by ``estimated_us``; None: there is none.

    Args:
        problem: The GEMM; it has no SwiGLU.
        tokens: 1 to ``TOKENS``.
        folded: Whether block scales are E8M0, else float32.
    """
    sizes = (problem.rows, problem.groups, problem.columns, token_tiles(tokens))
    measured = tuned().plan_of(SmallMFp8Key(*sizes))
    if measured is not None:
        plan = plan_of(measured, problem, tokens, folded)
        if _fits(plan):
            return plan
    return min(
        candidates(problem, tokens, folded),
        key=lambda plan: (_us(plan, problem), -plan.stages * plan.warps),
        default=None,
    )


def plan_of(
    measured: SmallMFp8Configuration, problem: GemmProblem, tokens: int, folded: bool
) -> SmallMFp8Plan:
    """Return the plan of a configuration that was measured; see ``fp8_small_m_plan``."""
    kind = (token_tiles(tokens), problem.float32_out, problem.row_scaled)
    shape = (problem.columns, measured.ctas, measured.warps, *kind, measured.stages)
    return _configuration(*shape, e8m0_scales=folded, l2_bytes=measured.l2_bytes)


def configuration_of(plan: SmallMFp8Plan) -> SmallMFp8Configuration:
    """Return the configuration of a plan, as a data file has it."""
    return SmallMFp8Configuration(plan.ctas, plan.warps, plan.stages, plan.l2_bytes)


def fits(key: SmallMFp8Key, measured: SmallMFp8Configuration) -> bool:
    """Return whether a kernel can have a configuration for a key, and an SM can hold it."""
    row_tiles, rest = divmod(key.rows, 16 * key.groups)
    parts = key.columns % (BLOCK * measured.ctas)
    whole = key.groups == 1 or row_tiles % measured.warps == 0
    if rest or parts or not whole or measured.ctas not in _CTAS or key.token_tiles not in (1, 2, 4):
        return False
    problem = GemmProblem(key.rows, key.columns, key.groups, False, False)
    plan = plan_of(measured, problem, 8 * key.token_tiles, True)
    return plan.stages <= plan.blocks and plan.l2_bytes in (128, 256) and _fits(plan)


def _fits(plan: SmallMFp8Plan) -> bool:
    """Return whether an SM can hold a CTA."""
    warps = _most_warps(plan.token_tiles, plan.row_scaled)
    return plan.warps <= warps and plan.shared_bytes <= _SHARED


def candidates(problem: GemmProblem, tokens: int, folded: bool) -> Iterator[SmallMFp8Plan]:
    """Return every configuration that can multiply; arguments as in ``fp8_small_m_plan``.

    Of each split of K and number of warps it is the one with the deepest ring that leaves room for
    two CTAs an SM, and the one with the deepest ring that fits one.
    """
    row_tiles, rest = divmod(problem.rows, 16 * problem.groups)
    if problem.columns % BLOCK or not problem.columns or rest or problem.swiglu:
        return
    kind = (token_tiles(tokens), problem.float32_out, problem.row_scaled)
    every_warps = range(1, min(_most_warps(kind[0], problem.row_scaled), row_tiles) + 1)
    for ctas, warps in itertools.product(_CTAS, every_warps):
        blocks, rest = divmod(problem.columns // BLOCK, ctas)
        if rest or not blocks or (problem.groups > 1 and row_tiles % warps):
            continue
        shape = (problem.columns, ctas, warps, *kind)
        rings = range(min(_MOST_STAGES, blocks), 0, -1)
        plans = [_configuration(*shape, stages, e8m0_scales=folded) for stages in rings]
        fitting = [plan for plan in plans if _fits(plan)]
        pairs = [plan for plan in fitting if plan.ctas_per_sm == 2]
        yield from dict.fromkeys([*fitting[:1], *pairs[:1]])


def estimated_us(
    plan: SmallMFp8Plan, problem: GemmProblem, costs: SmallMFp8Costs, clusters: Mapping[int, int]
) -> float:
    """Microseconds of a launch: the time to read what CTAs of all rounds could hold.

    CTAs of a last round that is not full read more slowly than all could, and rows that a CTA has
    beyond the weight's are read, too.

    Args:
        plan: The configuration.
        problem: The GEMM.
        costs: The constants.
        clusters: Clusters that the GPU holds, by their CTAs.
    """
    number = -(-problem.rows // (16 * plan.warps))
    resident = clusters[plan.ctas] * plan.ctas_per_sm
    warps = plan.ctas_per_sm * plan.warps
    in_flight = warps * plan.stages * RING_TILE
    rate = costs.rate * min(1.0, in_flight / costs.in_flight, warps / costs.warps)
    read = -(-number // resident) * resident * plan.warps * 16 * problem.columns
    us = costs.launch + costs.token_tile * (plan.token_tiles - 1) + read / rate
    return us + costs.exchange * (plan.ctas > 1)


def launches_of(tokens: int) -> list[int]:
    """Return the tokens of each launch."""
    return [min(TOKENS, tokens - first) for first in range(0, tokens, TOKENS)]


def is_measured() -> bool:
    """Return whether a data file has times of this kernel on the GPU at hand."""
    return tuned().origins["gemm_fp8_small_m"].kind != RULE


@cached
def fastest_us(problem: GemmProblem, tokens: int, folded: bool) -> float:
    """Microseconds of the configurations that a GEMM takes, by ``estimated_us``.

    Each launch is counted as if no weight were left in L2.
    """
    us = 0.0
    for count in launches_of(tokens):
        plan = fp8_small_m_plan(problem, count, folded)
        assert plan is not None
        us += _us(plan, problem)
    return us


def _us(plan: SmallMFp8Plan, problem: GemmProblem) -> float:
    """``estimated_us`` on the GPU at hand."""
    return estimated_us(plan, problem, tuned().costs.gemm_fp8_small_m, tuned().clusters)


def _most_warps(tiles: int, row_scaled: bool) -> int:
    """Warps of an SM, whose registers hold them.

    A thread has 124 registers with four tiles of tokens, and 185 if these have scales.
    """
    if tiles < 4:
        return _MOST_WARPS
    return 8 if row_scaled else 16
