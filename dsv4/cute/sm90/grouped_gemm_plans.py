"""Choice of the kernels of a grouped GEMM and their configurations; needs no compiler.

How many rows each expert has is known on the GPU alone, so a grouped GEMM has several launches,
each for the experts whose number of rows lies in a range (``launch_plans``). The ranges suppose
rows that were drawn uniformly; results are right for any routing.

* Few rows: ``grouped_gemm_small_m``, on every architecture.
* More: ``grouped_gemm_wgmma``, on Hopper, in tiles of about as many tokens as an expert has rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from dsv4.cute.grouped_problem import MOST_EXPERTS, Experts, counted_as
from dsv4.cute.runtime.architectures import HOPPER, shared_limit
from dsv4.cute.sm90.costs import GroupedCosts
from dsv4.cute.sm90.grouped_gemm_small_m_plan import GroupedSmallMPlan
from dsv4.cute.sm90.grouped_gemm_wgmma_plan import GroupedWgmmaPlan
from dsv4.cute.sm90.tuned import tuned
from dsv4.device import cached

GroupedPlan = GroupedWgmmaPlan | GroupedSmallMPlan
ANY_ROWS = 2**31 - 1  # no upper bound of an expert's rows

# Rows of X up to which K is split, because there are few row tiles for all warps. At 64 rows
# gate_up and down of Pro took 1594 and 799 us in 4 and 2 splits, 1520 and 741 us in 2 and 1: the
# end of a split costs some 400 instructions, a tile 80 (H200).
_SPLIT_ROWS = 64
# Tiles of 64 columns of a split: 24 to 28 were the fastest of those measured (H200).
_SPLIT_TILES = 26
# Average rows of an expert up to which a segment has 8 rows.
_ONE_TILE_MEAN = 4
# Average rows up to which the small-M kernel is taken: at 4 both kernels take as long, above 6
# wgmma is faster, between them nothing was measured (H200).
_SMALL_M_MEAN = 6
_LEAST_ROWS = 12  # fewest rows of a segment of two tiles of tokens
# Warps of a CTA of the small-M kernel; 12 where these fill their rounds better. At one token:
# gate_up of Flash 20.8 us instead of 22.4, of Pro 44.5 instead of 47.3 (H200).
_WARPS, _FEWER_WARPS = 16, 12
_FEWER_WARPS_TILES = 64  # most tiles of 64 columns of a split of the fewer warps
_FILLED_MORE = 0.05  # by how much they must fill their rounds better

# Average rows per expert from which several launches share the experts, and the most rows of all
# experts that still take one launch: 8 tokens with 6 experts each give no expert more than 8 rows,
# so the launch for more rows would find no work.
_SEVERAL_LAUNCHES_MEAN, _ONE_LAUNCH_ROWS = 0.5, 48
# An expert has far more rows than the average if it has this many more, or two standard deviations.
_FAR_ABOVE = 5.0
# Average rows above which one launch takes all experts but those of far fewer rows.
_WHOLE_MEAN = 144.0
# Most rows of launches for experts of far fewer rows than the average.
_FAR_BELOW = (16, 32, 48, 64)
# Average rows from which CTAs take tiles by a counter, up to ``_WHOLE_MEAN``: 4096 tokens of Pro,
# Zipf, 7120 us instead of 7305 (H200). Below, counters do not repay the launch that sets them to 0.
_COUNTED_MEAN = 48.0


class _Shape(NamedTuple):
    """Tiles of a configuration.

    Attributes:
        token_block: Tokens of a tile.
        narrow_widths: See ``GroupedWgmmaPlan``.
        warpgroups: MMA warpgroups.
        warp_tiles: Row tiles of a warp.
        stage_k_blocks: Blocks of 64 columns of a stage.
    """

    token_block: int
    narrow_widths: tuple[int, ...]
    warpgroups: int
    warp_tiles: int
    stage_k_blocks: int = 2


class _Ladder(NamedTuple):
    """Shapes for one kind of result: of those that registers hold, the fastest measured on an H200.

    More row tiles of a warp share more of what waiting, addresses and descriptors of X cost.

    Attributes:
        steps: The launches for experts of about the average, by the most rows of an expert.
        above: For experts of more rows than the steps: where those end at 16 rows or fewer, and
            where they go further.
        whole: Candidates for averages above ``_WHOLE_MEAN``.
        counted_most: Where CTAs take tiles by a counter, steps go up to here even if experts have
            fewer rows on average.
    """

    steps: dict[int, _Shape]
    above: tuple[_Shape, _Shape]
    whole: tuple[_Shape, ...]
    counted_most: int = 0


_WIDEST = (_Shape(160, (128, 144), 2, 1, 1), _Shape(192, (), 2, 1, 1))
_HEAVY = (_Shape(64, (48,), 3, 2), _Shape(128, (64, 96), 2, 2))
_LADDER = _Ladder(
    {
        16: _Shape(16, (8,), 2, 4),
        32: _Shape(32, (16, 24), 2, 4),
        48: _Shape(48, (40,), 2, 4),
        64: _Shape(64, (56,), 2, 4),
        80: _Shape(80, (72,), 3, 2),
        96: _Shape(96, (80,), 2, 2),
        128: _Shape(128, (112,), 2, 2),
        160: _WIDEST[0],
    },
    _HEAVY,
    (_HEAVY[1], *_WIDEST),
)
# Where rows have no scales, registers hold more: shared block scales with three warpgroups, which
# have a single width (Pro at 4096 tokens 8277 thousand cycles instead of 8524, H200), and 144
# tokens with two row tiles a warp (8192 tokens: 13789 instead of 15069).
_UNSCALED = {72: _Shape(72, (), 3, 2), 80: _Shape(80, (), 3, 2), 144: _Shape(144, (136,), 2, 2)}
_LADDER_UNSCALED = _LADDER._replace(
    steps=dict(sorted({**_LADDER.steps, **_UNSCALED}.items())), counted_most=144
)
# Storing float32 results, or quantizing them, takes more registers.
_LADDER_WIDE_OUT = _LADDER._replace(
    steps={
        **_LADDER.steps,
        48: _Shape(48, (32, 40), 3, 2),
        64: _Shape(64, (48,), 3, 2),
        80: _Shape(80, (64,), 3, 2),
        128: _HEAVY[1],
    }
)
# SwiGLU with scales of rows: from 32 tokens on, registers do not hold two row tiles of a warp.
_HEAVY_SCALED = (_Shape(64, (48,), 4, 1), _Shape(128, (64, 96), 3, 1, 1))
_LADDER_SCALED = _Ladder(
    {
        16: _LADDER.steps[16],
        32: _Shape(32, (16,), 4, 1),
        48: _Shape(48, (32, 40), 4, 1),
        64: _HEAVY_SCALED[0],
        80: _Shape(80, (64,), 4, 1),
        128: _HEAVY_SCALED[1],
        160: _WIDEST[0],
    },
    _HEAVY_SCALED,
    (_HEAVY_SCALED[1], *_WIDEST),
)
# float32 results of scaled rows: 128 accumulators of a thread are too many.
_LADDER_WIDE_OUT_SCALED = _LADDER_WIDE_OUT._replace(
    steps={**_LADDER_WIDE_OUT.steps, 128: _HEAVY_SCALED[1]},
    above=(_HEAVY[0], _HEAVY_SCALED[1]),
    whole=_LADDER_SCALED.whole,
)


def _ladder(problem: Experts) -> _Ladder:
    if problem.row_scaled and problem.swiglu:
        return _LADDER_SCALED
    if problem.float32_out or problem.quantized_out:
        scaled = problem.float32_out and problem.row_scaled
        return _LADDER_WIDE_OUT_SCALED if scaled else _LADDER_WIDE_OUT
    return _LADDER if problem.row_scaled else _LADDER_UNSCALED


class LaunchPlan(NamedTuple):
    """One launch of a grouped GEMM, and the experts that it is for.

    Attributes:
        plan: Its configuration.
        above_rows: Experts of as many rows or fewer are another launch's.
        most_rows: So are experts of more rows than this.
    """

    plan: GroupedPlan
    above_rows: int
    most_rows: int


def launch_plans(problem: Experts, tokens: int, arch: str = HOPPER) -> tuple[LaunchPlan, ...]:
    """Launches for a number of rows of X, in their order; none if there is no kernel.

    Several launches are for experts of about as many rows as the average, in steps of the ladder.
    Experts of far more rows come before them; those of far fewer, which a uniform draw seldom
    gives, after them.

    Args:
        problem: Sizes of the weights, and the kind of result.
        tokens: Rows of X, of all experts.
        arch: What the kernels are compiled for.
    """
    return _launch_plans(problem, counted_as(tokens), arch)


@cached
def _launch_plans(problem: Experts, tokens: int, arch: str) -> tuple[LaunchPlan, ...]:
    if problem.experts > MOST_EXPERTS or problem.columns % 128:
        return ()
    mean = tokens / problem.experts
    small_m = None
    if arch != HOPPER or mean <= _SMALL_M_MEAN:
        small_m = _small_m_plan(problem, tokens, arch)
    one_launch = mean < _SEVERAL_LAUNCHES_MEAN or tokens <= _ONE_LAUNCH_ROWS
    if arch != HOPPER or (small_m is not None and one_launch):
        return () if small_m is None else (LaunchPlan(small_m, 0, ANY_ROWS),)
    ladder, launches, above = _ladder(problem), [], 0
    # Two standard deviations of a uniform draw.
    far = mean + max(_FAR_ABOVE, 2 * mean**0.5)
    if small_m is not None:
        above = 8 if far <= 8 else 16
        launches.append(LaunchPlan(small_m, 0, above))
    for most in _steps(mean, far, ladder) if small_m is None else ():
        launches.append(LaunchPlan(_wgmma_plan(problem, ladder.steps[most]), above, most))
        above = most
    if mean > _WHOLE_MEAN:
        candidates = (_wgmma_plan(problem, shape) for shape in ladder.whole)
        plan = min(candidates, key=lambda plan: _cycles(plan, problem, tokens))
    else:
        plan = _wgmma_plan(problem, ladder.above[above > 16])
    return (LaunchPlan(plan, above, ANY_ROWS), *reversed(launches))


def uses_tile_counters(problem: Experts, tokens: int) -> bool:
    """Return whether a CTA takes its next tile by a counter, not one in each round of all CTAs.

    With many launches, the CTAs of a launch begin at times that differ by whole tiles.
    """
    return _COUNTED_MEAN < counted_as(tokens) / problem.experts <= _WHOLE_MEAN


def _steps(mean: float, far: float, ladder: _Ladder) -> list[int]:
    """Return the most rows of each launch but the last, which takes all experts with more."""
    steps = list(ladder.steps)
    if mean > _WHOLE_MEAN:
        return [most for most in steps if most in _FAR_BELOW]
    last = next((most for most in steps if most >= far), steps[-1])
    if mean > _COUNTED_MEAN:
        last = max(last, ladder.counted_most)
    near = mean - mean**0.5
    return [most for most in steps if most <= last and (most > near or most in _FAR_BELOW)]


def typical_plan(problem: Experts, tokens: int, arch: str = HOPPER) -> GroupedPlan | None:
    """The configuration for experts of about as many rows as the average, None if there is none."""
    rows = max(tokens, 1) / problem.experts
    launches = launch_plans(problem, tokens, arch)
    fitting = (x.plan for x in launches if x.above_rows < rows <= x.most_rows)
    return next(fitting, None)


def _small_m_plan(problem: Experts, tokens: int, arch: str) -> GroupedSmallMPlan | None:
    """The small-M kernel; None if shared memory does not hold the rows of a segment."""
    tiles = problem.columns // 64
    token_tiles = 1 if tokens <= _ONE_TILE_MEAN * problem.experts else 2
    warps, splits = _warps_and_splits(problem, tokens, arch)
    most = 3 if problem.float32_out or problem.row_scaled else 6 if splits > 1 else 4
    if warps == _FEWER_WARPS:
        most = 8  # a warp has more registers
    stages = next(n for n in range(most, 0, -1) if tiles // splits % n == 0)
    plan = GroupedSmallMPlan(
        problem.columns,
        1,
        warps,
        token_tiles,
        problem.float32_out,
        problem.row_scaled,
        stages,
        problem.swiglu,
        splits=splits,
        row_weighted=problem.row_weighted,
        segment_rows=8 * token_tiles,
        quantized_out=problem.quantized_out,
        swizzled_out=problem.swizzled_out,
    )
    # A few rows less than 16 seldom need a second segment; fewer than 12 would.
    over = plan.shared_bytes - shared_limit(arch)
    rows = plan.segment_rows - max(0, -(-over // plan.x_row_bytes))
    fits = rows == plan.segment_rows or (token_tiles == 2 and rows >= _LEAST_ROWS)
    if fits:
        return dataclasses.replace(plan, segment_rows=rows)
    # With less shared memory than Hopper: 8 rows per segment, whatever the rows of an expert.
    halved = dataclasses.replace(plan, token_tiles=1, segment_rows=8)
    return halved if arch != HOPPER and halved.shared_bytes <= shared_limit(arch) else None


def _warps_and_splits(problem: Experts, tokens: int, arch: str) -> tuple[int, int]:
    """Warps of a CTA, and K splits: such that the last round of jobs is well filled.

    Rounds are those of a CTA's row tiles if every row of X has an expert of its own. Fewer warps
    have longer splits. A round has whole units (``GroupedSmallMPlan.sum_slots``).
    """
    tiles = problem.columns // 64
    if tokens > _SPLIT_ROWS:
        return _WARPS, 1
    unit_tiles = 2 if problem.quantized_out else 1

    def possible(warps: int) -> list[int]:
        """Return the numbers of splits that divide K and a round of jobs."""
        return [n for n in range(1, warps + 1) if tiles % n == 0 and warps % (n * unit_tiles) == 0]

    splits = min(possible(_WARPS), key=lambda n: abs(tiles // n - _SPLIT_TILES))
    if arch != HOPPER or problem.float32_out or problem.row_scaled or problem.quantized_out:
        return _WARPS, splits
    longer = next((n for n in possible(_FEWER_WARPS) if tiles // n <= _FEWER_WARPS_TILES), None)
    if longer is None:
        return _WARPS, splits
    row_tiles = tokens * problem.rows / 16 / tuned().sms  # of a CTA

    def filled(warps: int, splits: int) -> float:
        rounds = row_tiles * splits / warps
        return rounds / math.ceil(rounds)

    if filled(_FEWER_WARPS, longer) > filled(_WARPS, splits) + _FILLED_MORE:
        return _FEWER_WARPS, longer
    return _WARPS, splits


def _wgmma_plan(problem: Experts, shape: _Shape) -> GroupedWgmmaPlan:
    return GroupedWgmmaPlan(
        shape.token_block,
        shape.warpgroups,
        1,
        shape.stage_k_blocks,
        problem.float32_out,
        problem.row_scaled,
        problem.swiglu,
        shape.warp_tiles,
        problem.row_weighted,
        problem.quantized_out,
        shape.narrow_widths,
        problem.swizzled_out,
    )


def _cycles(plan: GroupedWgmmaPlan, problem: Experts, tokens: int) -> float:
    """Estimated cycles: tiles of all experts, in rounds while there are few; to rank plans."""
    steps = problem.columns // 64
    costs = tuned().costs.grouped_gemm
    results = costs.result * plan.token_block * plan.warpgroups * plan.warp_tiles
    tile = {
        width: costs.tile + steps * _step_cycles(plan, width, costs) + results
        for width in plan.mma_widths
    }
    cycles = tiles = 0.0
    for rows, share in _rows_of_an_expert(tokens / problem.experts):
        whole, rest = divmod(rows, plan.token_block)
        last = next(width for width in plan.mma_widths if width >= rest)
        tiles += share * (whole + bool(rest))
        cycles += share * (whole * tile[plan.token_block] + bool(rest) * tile[last])
    row_blocks = problem.experts * -(-problem.rows // plan.rows)
    rounds = tiles * row_blocks / tuned().sms
    if rounds < 8:  # few: whole rounds, of average tiles
        return math.ceil(rounds) / rounds * cycles * row_blocks / tuned().sms
    return cycles * row_blocks / tuned().sms


def _step_cycles(plan: GroupedWgmmaPlan, width: int, costs: GroupedCosts) -> float:
    """Cycles of 64 columns of a tile of ``width`` tokens.

    Bound by instructions and the tensor cores, which get in each other's way, or by memory.
    """
    alone = plan.warp_tiles == 1
    issue = (costs.issue if alone else costs.issue_two) + costs.both * width
    tensor = (costs.tensor if alone else costs.tensor_two) * width
    return max(
        plan.warpgroups * plan.warp_tiles * max(issue, tensor),
        costs.memory * 36 * plan.rows,
    )


@functools.lru_cache(maxsize=4096)
def _rows_of_an_expert(mean: float) -> list[tuple[int, float]]:
    """Numbers of rows of an expert, Poisson distributed, and how probable they are."""
    around = 8 * mean**0.5 + 8
    numbers = range(max(0, int(mean - around)), int(mean + around) + 1)
    return [(n, math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))) for n in numbers]
