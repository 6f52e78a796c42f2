"""Arguments and configurations of the small-M GEMM with FP8 weights; needs no compiler."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import Int32, Int64, KernelAbi, Pointer
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan
from dsv4.cute.sm90.plans import GemmProblem
from dsv4.cute.sm90.tuned import tuned
from dsv4.device import cached

BLOCK = 128  # rows, and columns, that share a scale
TOKENS = 32  # of one launch: four tiles of 8
RING_TILE = 16 * BLOCK  # bytes of 16 rows and 128 columns
_CTAS = (1, 2, 4, 8)  # CTAs of a cluster
_WARPS = (8, 4, 2, 1)
_STAGES = (4, 3, 2, 1)  # the most first
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
    """

    e8m0_scales: bool = False

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
    def buffer_bytes(self) -> int:
        """A warp's ring, and its block scales as float32; a multiple of a line of 128 bytes."""
        return self.ring_bytes + -(-4 * self.blocks // 128) * 128

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that an SM must hold at once: two where they fit, with 128 registers a thread."""
        fits = self.warps <= 8 and self.shared_bytes <= _HALF_SM
        return 2 if fits else 1


# Few configurations serve all matrices, and keep what is derived from their fields.
_configuration = functools.cache(SmallMFp8Plan)


def token_tiles(tokens: int) -> int:
    """Tiles of 8 tokens of a launch for 1 to ``TOKENS`` tokens: 1, 2 or 4."""
    return 1 if tokens <= 8 else 2 if tokens <= 16 else 4


@cached
def fp8_small_m_plan(problem: GemmProblem, tokens: int, folded: bool) -> SmallMFp8Plan | None:
    """The configuration for a number of tokens, or None if there is none.

    As few CTAs share K as make ``enough_warps``, because the partial sums of each travel.

    Args:
        problem: The GEMM; it has no SwiGLU.
        tokens: 1 to ``TOKENS``; more are several launches of these.
        folded: Whether block scales are E8M0, else float32.
    """
    found = list(candidates(problem, tokens, folded))
    enough = tuned().costs.gemm_small_m.enough_warps
    wide = [plan for plan in found if problem.rows // 16 * plan.ctas >= enough]
    return wide[0] if wide else found[-1] if found else None


def candidates(problem: GemmProblem, tokens: int, folded: bool) -> Iterator[SmallMFp8Plan]:
    """Return the configuration of each split of K that fits; arguments as in ``fp8_small_m_plan``.

    Each has the most warps, up to 8, and the deepest ring that leave room for two CTAs an SM, or
    else for one.
    """
    tiles = problem.rows // 16
    if problem.columns % BLOCK or problem.rows % (16 * problem.groups) or not problem.columns:
        return
    group_tiles = tiles // problem.groups
    warps = next(w for w in _WARPS if problem.groups == 1 or group_tiles % w == 0)
    kind = (token_tiles(min(tokens, TOKENS)), problem.float32_out, problem.row_scaled)
    for ctas in _CTAS:
        blocks, rest = divmod(problem.columns // BLOCK, ctas)
        if rest or not blocks:
            continue
        plans = [
            _configuration(problem.columns, ctas, warps, *kind, stages, e8m0_scales=folded)
            for stages in _STAGES
            if stages <= blocks
        ]
        fitting = [plan for plan in plans if plan.shared_bytes <= _SHARED]
        two = [plan for plan in fitting if plan.ctas_per_sm == 2]
        if fitting:
            yield (two or fitting)[0]
