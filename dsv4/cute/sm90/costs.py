"""Constants of the cost models that rank plans of kernels on Hopper; needs no compiler.

The defaults are fitted to times on one H200, and are the rule for every GPU without a data file
(``tuned``). The models that use them stand beside the plans. Models of ``gemm_e4m3`` are in
microseconds; the others are in clock cycles, and only the ratios of their results matter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

C = TypeVar("C")


@dataclass(frozen=True)
class SmallMCosts:
    """Thresholds of the small-M GEMM.

    Attributes:
        enough_warps: Number of warps from which K is not split over more CTAs: about two for each
            quarter of the GPU's SMs.
        few_tokens: Most tokens for which this kernel is faster than the one for large M.
        small_matrix: Most weights of a matrix for which it is faster for up to 16 tokens.
    """

    enough_warps: float = 1024
    few_tokens: float = 8
    small_matrix: float = 25165824


@dataclass(frozen=True)
class WgmmaCosts:
    """Constants of ``gemm_wgmma_plan.estimated_cycles``.

    Attributes:
        launch: Cycles of a launch.
        overlap: Cycles that the next kernel's start saves where it finds free SMs.
        ends: Cycles of a tile's start and end, with two warpgroups.
        result: Further cycles of them for 64 results of a CTA.
        ends_power: Exponent by which more warpgroups hide more of both.
        row_tile: Cycles of a tile for each further row tile of a warp.
        exchanged: Cycles of 64 results that go from one CTA to another.
        round: Cycles of each further round of clusters that share K.
        issue: Cycles of the instructions of 64 rows and 64 columns.
        issue_token: Further ones for a token.
        tensor: Cycles of the tensor cores for 64 rows, 64 columns and a token.
        latency: Cycles of a warp's path through 64 columns.
        latency_token: Further ones for a token.
        stage: Cycles of a stage, spread over its blocks of columns.
        x_byte: Cycles of a byte of X, with all SMs at work.
        weight_byte: Cycles of a byte of weights likewise.
    """

    launch: float = 1250
    overlap: float = 1350
    ends: float = 706
    result: float = 4.09
    ends_power: float = 0.53
    row_tile: float = 318
    exchanged: float = 25.5
    round: float = 6470
    issue: float = 103
    issue_token: float = 1.19
    tensor: float = 2.1
    latency: float = 257
    latency_token: float = 1.47
    stage: float = 13.9
    x_byte: float = 0.00221
    weight_byte: float = 0.0146


class Fp8Costs(NamedTuple):
    """Fitted cycles of a launch, of a tile, and of a stage in it, of one kind of FP8 plan.

    Attributes:
        launch: Before the first tile.
        tile: Cycles of a tile, beside its stages and results.
        dequantizing: Cycles of a stage's instructions in a warpgroup.
        multiplying: Cycles of these, and of the tensor cores, for a token.
        latency: Cycles of a warp's path through a stage.
        byte: Cycles of a byte through L2, with all SMs at work.
        exchanged: Cycles of 64 results that go from one CTA to another.
    """

    launch: float
    tile: float
    dequantizing: float
    multiplying: float
    latency: float
    byte: float
    exchanged: float


class Fp8WgmmaCosts(NamedTuple):
    """Constants of ``gemm_fp8_wgmma_plan.estimated_cycles``.

    Attributes:
        plain: Of float32 scales.
        folded: Of E8M0 scales, which operands are multiplied by.
        plain_pair: Of float32 scales, with two CTAs an SM.
        folded_pair: Of E8M0 scales, with two CTAs an SM.
        shallow: How many times as long a stage takes in a ring of two, where copies come late.
        latency_token: Cycles of a warp's path through a stage for a token.
        result: Cycles of 64 results of a CTA.
        round: Cycles of each further round of clusters that share K.
    """

    plain: Fp8Costs = Fp8Costs(7230, 1420, 337, 3.75, 1040, 0.0122, 35.9)
    folded: Fp8Costs = Fp8Costs(6910, 2520, 474, 3.34, 1270, 0.00947, 44.8)
    plain_pair: Fp8Costs = Fp8Costs(10600, 36.4, 285, 0.613, 711, 0.0498, 0.17)
    folded_pair: Fp8Costs = Fp8Costs(11800, 1590, 247, 0.499, 988, 0.0409, 0.0154)
    shallow: float = 1.15
    latency_token: float = 0.64
    result: float = 1.33
    round: float = 9440

    def of(self, folded: bool, ctas_per_sm: int) -> Fp8Costs:
        """Return the constants of a kind of plan."""
        if ctas_per_sm == 1:
            return self.folded if folded else self.plain
        return self.folded_pair if folded else self.plain_pair


class SmallMFp8Costs(NamedTuple):
    """Constants of ``gemm_fp8_small_m_plan.estimated_us``.

    Estimates differ from the times of an H200 by 10 % at most for 8 and 16 tokens, and by up to a
    third for weights of fewer than 9 MB and for 32 tokens.

    Attributes:
        launch: Microseconds of a launch, from its start to the first weights and after the last.
        exchange: Microseconds of the exchange of partial sums in a cluster.
        token_tile: Microseconds of each further tile of 8 tokens.
        rate: Bytes of weights that arrive in a microsecond.
        in_flight: Bytes that each SM has to wait for at a time to reach this rate.
        warps: Warps of each SM that convert and multiply weights at this rate.
    """

    launch: float = 2.2
    exchange: float = 0.4
    token_tile: float = 1.2
    rate: float = 4.2e6
    in_flight: float = 49152
    warps: float = 8


class TileTimes(NamedTuple):
    """Microseconds of a GEMM's parts.

    Attributes:
        launch: Constant part.
        tile: Constant part of a tile: arrival of the first stage, and results.
        stage: Time of a stage of 128 columns of a tile.
        stage_column: Further time of a stage for each column of the weight.
        fixed: Experts only: share of a stage's time that a tile takes however few of its rows are
            an expert's. The rest is shared by its blocks of 64 rows.
    """

    launch: float
    tile: float
    stage: float
    stage_column: float = 0.0
    fixed: float = 0.0

    def tile_us(self, columns: int) -> float:
        """Microseconds of a full tile of a number of columns."""
        return self.tile + self.stages_us(columns)

    def stages_us(self, columns: int) -> float:
        """Microseconds of the stages of a full tile."""
        return columns // 128 * (self.stage + self.stage_column * columns)


class Bfloat16Times(NamedTuple):
    """Microseconds of a GEMM of the bfloat16 kernel with FP8 weights.

    Attributes:
        launch: Constant part.
        weight: Time per weight.
        multiply: Time per weight and token.
    """

    launch: float
    weight: float
    multiply: float

    def us(self, weights: int, tokens: int) -> float:
        """Microseconds of a number of weights."""
        return self.launch + weights * (self.weight + self.multiply * tokens)


class Bfloat16ExpertsTimes(NamedTuple):
    """Microseconds of a grouped GEMM of the bfloat16 kernel.

    Attributes:
        launch: Constant part.
        weight: Time to read a weight of an expert that has rows.
        multiply: Time per weight of all experts and row of an expert, at the rate of many rows.
    """

    launch: float
    weight: float
    multiply: float

    def us(self, weights: int, rows: float) -> float:
        """Microseconds of the weights of all experts; ``rows``: the mean of an expert.

        Reading and multiplying hide each other in part: the root of the sum of their squares is
        close to what was measured from 1 to 768 rows.
        """
        reading = self.weight * (1 - math.exp(-rows))
        return self.launch + weights * math.hypot(reading, self.multiply * rows)


class E4m3Costs(NamedTuple):
    """Times of the GEMMs with FP8 arithmetic, and of the bfloat16 kernels that they compete with.

    The defaults are those of one H200; ``dsv4.cute.sm90.e4m3_times`` says what they were fitted to.
    An H100 has as many SMs and the same tensor cores, but 0.7 times the bandwidth. There, times of
    bytes (``conversion_byte``, ``bfloat16_experts.weight``) should be longer; nothing was measured.

    Attributes:
        loop_narrow: Weights dequantized in the main loop, tiles of 128 tokens.
        loop_wide: The same in tiles of 256 tokens.
        converted_narrow: Weights converted first, tiles of 128 tokens.
        converted_wide: The same in tiles of 256 tokens.
        block_narrow: FP8 weights, tiles of 128 tokens.
        block_wide: The same in tiles of 256 tokens; slower at 16384 columns and in few rounds.
        experts_loop_narrow: Experts, dequantized in the main loop, tiles of 128 tokens.
        experts_loop_wide: The same in tiles of 256 tokens.
        experts_three_stages: Experts, converted first, three stages: results in FP8 leave no room
            for four.
        experts_four_stages: The same with four stages.
        conversion: Microseconds of a conversion, apart from its size.
        conversion_byte: Microseconds of a byte that a conversion reads or writes.
        bfloat16_launch: Microseconds of a call of the bfloat16 kernel with NVFP4 weights, beyond
            the cycles that its own model (``gemm_wgmma_plan``) estimates.
        bfloat16_block: The bfloat16 kernel with FP8 weights.
        bfloat16_experts: The bfloat16 kernel of experts.
        dequantization: Least microseconds of the kernel that gives a bfloat16 kernel the values of
            codes. It takes 10.2 to 13 us for 1 to 2.6 million codes.
        dequantized_code: Microseconds of a code of it where there are more: 18 us for 3.7 million,
            35.5 for 7.3, 98 for 22, 247 for 47, 500 for 94.
    """

    loop_narrow: TileTimes = TileTimes(4.8, 1.8, 0.73)
    loop_wide: TileTimes = TileTimes(4.8, 1.8, 0.993)
    converted_narrow: TileTimes = TileTimes(1.5, 1.55, 0.388)
    converted_wide: TileTimes = TileTimes(1.5, 2.96, 0.673, 5.7e-6)
    block_narrow: TileTimes = TileTimes(2.0, 1.5, 0.452)
    block_wide: TileTimes = TileTimes(2.0, 2.8, 0.689, 1.55e-5)
    experts_loop_narrow: TileTimes = TileTimes(4.8, 2.5, 0.753, fixed=0.60)
    experts_loop_wide: TileTimes = TileTimes(4.8, 1.5, 1.11, fixed=0.81)
    experts_three_stages: TileTimes = TileTimes(1.5, 1.5, 0.925, fixed=0.81)
    experts_four_stages: TileTimes = TileTimes(1.5, 1.5, 0.87, fixed=0.81)
    conversion: float = 2.25
    conversion_byte: float = 1 / 3.83e6
    bfloat16_launch: float = 3.8
    bfloat16_block: Bfloat16Times = Bfloat16Times(4.3, 0.11e-6, 3.05e-9)
    bfloat16_experts: Bfloat16ExpertsTimes = Bfloat16ExpertsTimes(4.0, 0.15e-6, 2.85e-9)
    dequantization: float = 10.5
    dequantized_code: float = 4.85e-6


@dataclass(frozen=True)
class GroupedCosts:
    """Constants of the grouped GEMM's estimate, fitted to 38 times of Pro's GEMMs on an H200.

    8 to 512 rows an expert; all times but one within 12 %.

    Attributes:
        issue: Cycles of the instructions of 64 rows and 64 columns with one row tile of a warp.
        issue_two: The same with two row tiles.
        both: Further cycles for a token.
        tensor: Cycles of a token where the tensor cores are the bound, with one row tile.
        tensor_two: The same with two row tiles.
        memory: Cycles of a byte of weights from memory, with all SMs at work.
        tile: Cycles of a tile's start and end.
        result: Cycles of 64 results of a warpgroup.
    """

    issue: float = 104.0
    issue_two: float = 67.0
    both: float = 1.56
    tensor: float = 2.39
    tensor_two: float = 2.08
    memory: float = 0.0414
    tile: float = 1500
    result: float = 10.3


@dataclass(frozen=True)
class AttentionCosts:
    """Constants of ``attention_plan``: clock cycles of some 0.48 ns on an H200.

    Attributes:
        block: A KV block of ``AttentionKernel``.
        tile: A tile beside its KV blocks.
        head: A head of the tile.
        batch: A batch of partial sums of ``MergeKernel``.
        row: A head of a token of it.
        bytes_per_cycle: Bytes of partial sums written and read again while an SM's clock ticks.
        paired: The exchange of partial sums between the two CTAs of a pair.
        columns: A tile of 16 heads of ``ColumnsKernel``.
        columns_cta: Each CTA of its cluster.
        columns_block: A KV block of it.
        mean: Some splits of a token have one KV block more than others. This share of the time goes
            by their mean, the rest by the largest: 16 splits of 18 blocks take less time than 9 of
            two each.
        tpc: A head of a tile whose partial sums are stored where both SMs of a pair (TPC) are at
            work: 72 CTAs take 2 us longer than 64, with a third less to do (H200).
    """

    block: float = 4153
    tile: float = 9647
    head: float = 34
    batch: float = 1766
    row: float = 634
    bytes_per_cycle: float = 37
    paired: float = 3575
    columns: float = 8133
    columns_cta: float = 594
    columns_block: float = 3446
    mean: float = 0.49
    tpc: float = 25


@dataclass(frozen=True)
class Costs:
    """Constants of all families of kernels.

    Attributes:
        gemm_small_m: GEMM of few tokens.
        gemm_wgmma: GEMM of many tokens, NVFP4 weights.
        gemm_fp8_wgmma: GEMM of FP8 weights in bfloat16.
        gemm_fp8_small_m: The same of few tokens.
        gemm_e4m3: GEMM with FP8 arithmetic.
        grouped_gemm: GEMM of routed experts.
        attention: Sparse attention.
    """

    gemm_small_m: SmallMCosts = field(default_factory=SmallMCosts)
    gemm_wgmma: WgmmaCosts = field(default_factory=WgmmaCosts)
    gemm_fp8_wgmma: Fp8WgmmaCosts = field(default_factory=Fp8WgmmaCosts)
    gemm_fp8_small_m: SmallMFp8Costs = field(default_factory=SmallMFp8Costs)
    gemm_e4m3: E4m3Costs = field(default_factory=E4m3Costs)
    grouped_gemm: GroupedCosts = field(default_factory=GroupedCosts)
    attention: AttentionCosts = field(default_factory=AttentionCosts)


def flat(costs: Any) -> dict[str, float]:
    """Return constants by name; those of a part have its name and a dot before theirs."""
    values: dict[str, float] = {}
    for name, value in _items(costs):
        if isinstance(value, (int, float)):
            values[name] = value
        else:
            values |= {f"{name}.{inner}": number for inner, number in flat(value).items()}
    return values


def with_values(costs: C, values: Mapping[str, float]) -> C:
    """Return constants with some replaced; names as ``flat`` gives them."""
    replaced: dict[str, Any] = {}
    for name, value in _items(costs):
        if name in values:
            replaced[name] = values[name]
            continue
        own = {k[len(name) + 1 :]: v for k, v in values.items() if k.startswith(f"{name}.")}
        if own:
            replaced[name] = with_values(value, own)
    if isinstance(costs, tuple):
        return costs._replace(**replaced)  # type: ignore[attr-defined]
    return dataclasses.replace(costs, **replaced)  # type: ignore[type-var]


def _items(costs: Any) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass or a ``NamedTuple``."""
    if isinstance(costs, tuple):
        return list(costs._asdict().items())  # type: ignore[attr-defined]
    return [(f.name, getattr(costs, f.name)) for f in dataclasses.fields(costs)]
