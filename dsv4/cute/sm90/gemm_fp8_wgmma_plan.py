"""Arguments and configurations of the large-M GEMM with FP8 weights; needs no compiler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import (
    Empty,
    Int32,
    Int64,
    KernelAbi,
    Pointer,
    TmaDescriptor,
    TmaSizes,
)
from dsv4.cute.sm90.costs import Fp8WgmmaCosts
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan
from dsv4.cute.sm90.plans import GemmProblem, counted_as
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import (
    CLUSTERS,
    Fp8WgmmaConfiguration,
    Fp8WgmmaKey,
    TunedData,
)
from dsv4.device import cached

BLOCK = 128  # rows, and columns, that share a scale
# Warpgroups, and tokens of a tile: what registers hold. float32 scales take two sets of
# accumulators, folded ones take one, so their tiles may be wider.
_SHAPES = (
    (2, (16, 32, 64, 96, 128, 160)),
    (4, (16, 32)),
)
_FOLDED_SHAPES = (
    (2, (16, 32, 64, 96, 128, 160, 192, 256)),
    (4, (16, 32, 64)),
)


_CYCLES_PER_US = 1980.0
_SHARED_OF_TWO = 113 * 1024  # shared memory of each of two CTAs of an SM


class Fp8WgmmaTma(NamedTuple):
    """Types of the TMA copies for the compiler, as in ``WgmmaTma``.

    Attributes:
        x_tma: Copies 64 columns of the X of a tile.
        codes_tma: Copies the codes of a stage.
        x_tensor: X, ``[tokens, groups K]``.
        codes_tensor: E4M3 codes as pairs, ``[rows, K / 2]``.
        x_layout: Shared-memory layout of the X of all stages.
    """

    x_tma: TmaDescriptor
    codes_tma: TmaDescriptor
    x_tensor: TmaSizes
    codes_tensor: TmaSizes
    x_layout: Empty


class Fp8WgmmaArgs(NamedTuple):
    """Arguments of the large-M GEMM with FP8 weights.

    Attributes:
        codes: E4M3 codes, ``[rows, K]``; TMA reads them through ``Fp8WgmmaTma.codes_tma``.
        scales: Block scales, ``[scale_blocks, K / 128]``, float32 or E8M0.
        x: bfloat16 ``[tokens, groups, K]``; TMA reads it through ``Fp8WgmmaTma.x_tma``.
        token_scale: float32 ``[tokens, groups]``, 0 if tokens have no scales.
        out: ``[tokens, rows]``, bfloat16 or float32.
        tokens: At least 1.
        token_tiles: Tiles of ``token_block`` tokens.
        token_span: Token tiles that follow one another before the next block of rows does.
        k_blocks: K / 64, a multiple of 2 and at least ``2 ctas``.
        row_tiles: Rows of the weight / 16.
        row_blocks: Rows of the weight / rows of a CTA, rounded up.
        group_blocks: Blocks of rows that share an input.
        token_stride: Elements of X from one token to the next.
        group_stride: Elements of X from one group to the next.
        codes_stride: Bytes from one row of codes to the next.
        groups: Inputs of a token.
        scale_blocks: Rows of the weight / 128, rounded up.
    """

    codes: Pointer
    scales: Pointer
    x: Pointer
    token_scale: Pointer
    out: Pointer
    tokens: Int32
    token_tiles: Int32
    token_span: Int32
    k_blocks: Int32
    row_tiles: Int32
    row_blocks: Int32
    group_blocks: Int32
    token_stride: Int64
    group_stride: Int64
    codes_stride: Int64
    groups: Int32
    scale_blocks: Int32


FP8_WGMMA_ABI = KernelAbi(Fp8WgmmaTma, Fp8WgmmaArgs)


@dataclass(frozen=True)
class Fp8WgmmaPlan(WgmmaPlan):
    """One configuration: ``WgmmaPlan`` with ``stage_k_blocks`` 2, so that a stage has one scale.

    ``row_scaled`` is True: the launch says whether tokens have scales, not the configuration.

    Attributes:
        folded: Whether scales are E8M0, which operands are multiplied by, else float32.
        ctas_per_sm: 1 or, of 2 warpgroups and 16 tokens, 2: then CTAs of the next kernel are there
            when this one ends. 7168 x 3072 with 16 tokens 10.9 us instead of 12.1, but 2048 x 7168
            10.1 instead of 9.8 (H200).
    """

    folded: bool = False
    ctas_per_sm: int = 1

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        if self.folded:
            return "dsv4.cute.sm90.gemm_fp8_wgmma_folded:FoldedFp8WgmmaKernel"
        return "dsv4.cute.sm90.gemm_fp8_wgmma:Fp8WgmmaKernel"

    @property
    def scale_item_bytes(self) -> int:
        """Bytes of a scale."""
        return 1 if self.folded else 4

    def _stages_with(self, taken: int) -> int:
        """Return the stages that fit, as in ``WgmmaPlan``; for two CTAs half an SM is counted."""
        if self.ctas_per_sm == 1:
            return super()._stages_with(taken)
        left = _SHARED_OF_TWO - 1024 - self.epilogue_bytes - self.other_bytes - taken
        return left // self.stage_bytes

    @property
    def k_steps(self) -> int:
        """Steps of 16 columns that are converted, and then multiplied, at a time."""
        return 2

    @property
    def weight_bytes(self) -> int:
        """Codes of a stage."""
        return self.rows * BLOCK


# Few configurations serve all matrices, and keep what is derived from their fields.
_configuration = functools.cache(Fp8WgmmaPlan)


@cached
def fp8_plan(problem: GemmProblem, tokens: int, folded: bool) -> Fp8WgmmaPlan | None:
    """The fastest configuration, measured or by ``estimated_cycles``; None if there is none.

    Args:
        product: The GEMM; its columns are a multiple of 128, and it has no SwiGLU.
        tokens: At least 1.
        folded: See ``Fp8WgmmaPlan``.
    """
    counted = counted_as(tokens)
    sizes = (problem.rows, problem.groups, problem.columns, counted)
    measured = None if problem.float32_out else tuned().plan_of(Fp8WgmmaKey(*sizes, folded))
    if measured is not None:
        return plan_of(measured, folded)
    costs, gpu = tuned().costs.gemm_fp8_wgmma, tuned()
    return min(
        candidates(problem, counted, folded),
        key=lambda plan: estimated_cycles(plan, problem, counted, costs, gpu),
        default=None,
    )


def plan_of(measured: Fp8WgmmaConfiguration, folded: bool) -> Fp8WgmmaPlan:
    """Return the plan of a configuration that was measured."""
    shape = (measured.token_block, measured.warpgroups, measured.ctas, 2, False, True)
    return _configuration(*shape, folded=folded, ctas_per_sm=measured.ctas_per_sm)


def configuration_of(plan: Fp8WgmmaPlan) -> Fp8WgmmaConfiguration:
    """Return the configuration of a plan, as a data file has it."""
    return Fp8WgmmaConfiguration(plan.token_block, plan.warpgroups, plan.ctas, plan.ctas_per_sm)


def fits(key: Fp8WgmmaKey, measured: Fp8WgmmaConfiguration) -> bool:
    """Return whether a configuration is a candidate for a key."""
    if key.rows % key.groups:
        return False
    problem = GemmProblem(key.rows, key.columns, key.groups, False, False)
    plan = plan_of(measured, key.folded)
    return plan in candidates(problem, key.tokens, key.folded)


def candidates(problem: GemmProblem, tokens: int, folded: bool) -> Iterator[Fp8WgmmaPlan]:
    """Return every configuration that can multiply; arguments as in ``fp8_plan``."""
    group_rows = problem.rows // problem.groups
    if group_rows % 16:
        return
    own_rows = None if problem.groups == 1 else group_rows
    for plan in _of_any_tokens(own_rows, problem.columns, problem.float32_out, folded):
        if plan.token_block <= 2 * max(tokens, 16):
            yield plan


@functools.cache  # as in ``gemm_wgmma_plan``
def _of_any_tokens(
    group_rows: int | None, columns: int, float32_out: bool, folded: bool
) -> tuple[Fp8WgmmaPlan, ...]:
    """Return ``candidates`` for more tokens than a tile has; ``group_rows`` of several groups."""
    if columns % BLOCK:
        return ()
    result = []
    shapes = [(w, tile, 1) for w, tiles in _shapes(folded) for tile in tiles] + [(2, 16, 2)]
    for (warpgroups, token_block, resident), ctas in itertools.product(shapes, CLUSTERS):
        kind = (float32_out, True)
        plan = _configuration(
            token_block, warpgroups, ctas, 2, *kind, folded=folded, ctas_per_sm=resident
        )
        whole = group_rows is None or group_rows % plan.rows == 0
        if not whole or columns // BLOCK < ctas:
            continue
        stages = plan.stages * (plan.stage_bytes - 16)
        if plan.stages >= 2 and (
            ctas == 1 or plan.has_exchange_buffer or plan.exchange_bytes <= stages
        ):
            result.append(plan)
    return tuple(result)


@cached
def fastest_us(problem: GemmProblem, tokens: int, folded: bool) -> float:
    """Microseconds of the configuration that a GEMM takes, by ``estimated_cycles``.

    The times that the constants were fitted to are these cycles at 1.98 GHz.
    """
    plan = fp8_plan(problem, tokens, folded)
    assert plan is not None
    costs, gpu = tuned().costs.gemm_fp8_wgmma, tuned()
    return estimated_cycles(plan, problem, counted_as(tokens), costs, gpu) / _CYCLES_PER_US


def _shapes(folded: bool) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Warpgroups, and tokens of a tile."""
    return _FOLDED_SHAPES if folded else _SHAPES


def estimated_cycles(
    plan: Fp8WgmmaPlan, problem: GemmProblem, tokens: int, fitted: Fp8WgmmaCosts, gpu: TunedData
) -> float:
    """Cycles of a GEMM: rounds of tiles, each of steps of 128 columns; to rank configurations.

    Args:
        plan: The configuration.
        problem: The GEMM.
        tokens: M.
        fitted: The constants.
        gpu: SMs and clusters of the GPU.
    """
    costs = fitted.of(plan.folded, plan.ctas_per_sm)
    tiles = -(-problem.rows // plan.rows) * -(-tokens // plan.token_block)
    rounds = -(-tiles // (gpu.clusters[plan.ctas] * plan.ctas_per_sm))
    steps = -(-problem.columns // BLOCK // plan.ctas)
    results = plan.token_block * plan.rows / 64
    active = min(1.0, tiles * plan.ctas / gpu.sms)
    busy = max(
        plan.warpgroups * (costs.dequantizing + costs.multiplying * plan.token_block),
        costs.latency + fitted.latency_token * plan.token_block,
    )
    if plan.stages < 3:
        busy *= fitted.shallow
    busy += active * costs.byte * (plan.weight_bytes + 2 * plan.x_bytes)
    tile = costs.tile + fitted.result * results / plan.ctas + steps * busy
    tile += costs.exchanged * results * (plan.ctas - 1) / plan.ctas
    cycles = costs.launch + rounds * tile
    return cycles + fitted.round * (rounds - 1) if plan.ctas > 1 else cycles
