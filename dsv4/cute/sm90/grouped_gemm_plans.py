"""Which configuration of the kernel in ``grouped`` a product takes; needs no compiler."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.grouped_problem import MOST_EXPERTS, Experts, counted_as
from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan

PLACES = 8  # of sums of row tiles, in its shared memory
STATE_BYTES = 48 + 4 * 16
# Rows of X up to which K is cut into parts, because there are few row tiles for all warps.
_CUT_ROWS = 64
# Rows an expert, on average, up to which a segment has 8 rows, and the kernel for few is taken; and
# fewest rows of a larger segment.
_ONE_TILE, _FEW_ROWS, _LEAST = 4, 6, 12
_WARPS, _FEWER_WARPS = 16, 12
# Longest part of K of the fewer warps, in tiles of 64 columns, and how much better they must fill
# their rounds to be taken.
_LONGEST, _WORTH = 64, 0.05
_SHARED_ROOM = 227 * 1024
_PROCESSORS = 132  # of an H200
# Cycles of 64 rows and columns, by tiles of a warp: of the instructions; of a token beside them;
# and of a token where the tensor cores bound. Cycles of a byte of weights from memory.
_ISSUE, _BOTH, _TENSOR, _MEMORY = {1: 104.0, 2: 67.0}, 1.56, {1: 2.39, 2: 2.08}, 0.0414
SLOTS = 14  # of what tiles are, more than there are stages
# Rows on average from which experts are shared among launches, and at least so many rows more than
# the average has an expert that has far more. Average from which one launch takes all that have
# more rows than those for far fewer do.
_SHARED_FROM, _FAR, _WHOLE_FROM = 0.5, 5.0, 144.0
_FAR_FEWER = (16, 32, 48, 64)
# Rows on average from which blocks take tiles as they are done, up to ``_WHOLE_FROM``.
_COUNTED_FROM = 48.0
EVERY = 2**31 - 1
_TABLE_BYTES = 8 * (MOST_EXPERTS + 2) + 24 * SLOTS  # a slot has a barrier


@dataclass(frozen=True)
class GroupedWgmmaPlan(WgmmaPlan):
    """One configuration of the kernel; ``blocks`` is 1.

    Attributes:
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        quantized_out: Whether results are NVFP4: codes, block scales, scales of rows.
        swizzled_out: Whether those block scales are swizzled, by expert.
        narrow: Tokens of narrower products, ascending, multiples of 8 below ``token_block``. A tile
            takes the first that has as many as its expert's rows.
    """

    row_weighted: bool = False
    quantized_out: bool = False
    narrow: tuple[int, ...] = ()
    swizzled_out: bool = False

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        if self.shares_scales:
            return "dsv4.cute.sm90.grouped_gemm_wgmma_shared_scales:GroupedWgmmaSharedScalesKernel"
        return "dsv4.cute.sm90.grouped_gemm_wgmma:GroupedWgmmaKernel"

    @property
    def shares_scales(self) -> bool:
        """Whether the lanes of a warp share the expansion of its scales.

        Of four pairs of a row tile and a block of 64 columns at a time, if registers hold it.
        """
        # 128 sums of a thread leave too few for float32 results, or four tiles and scales of rows.
        most = self.warp_tiles * self.token_block == 256
        spills = most and (self.float32_out or (self.row_scaled and self.warp_tiles == 4))
        whole = self.warp_tiles > 1 and self.warp_tiles * self.stage_k_blocks % 4 == 0
        # Of three warpgroups the assembler follows one loop alone.
        fits = self.warpgroups == 2 or (self.warpgroups == 3 and not self.narrow)
        return fits and whole and not spills

    @property
    def scale_room_bytes(self) -> int:
        """Where the warps leave expanded scales for their lanes."""
        return 512 * self.mma_warps if self.shares_scales else 0

    @property
    def mma_widths(self) -> tuple[int, ...]:
        """As there, the narrower ones first."""
        return (*self.narrow, self.token_block)

    @property
    def tma_tokens(self) -> int:
        """As there: every size is some of them."""
        return math.gcd(*self.mma_widths)

    @property
    def k_steps(self) -> int:
        """As there."""
        return 2

    @property
    def epilogue_buffers(self) -> int:
        """As there; one, so that there is room for stages."""
        return 1

    @property
    def other_bytes(self) -> int:
        """As there: tables of the experts' tiles and first rows, slots, expanded scales."""
        return _TABLE_BYTES + self.scale_room_bytes


@dataclass(frozen=True)
class GroupedSmallMPlan(SmallMPlan):
    """One configuration of the kernel for few rows an expert.

    ``ctas`` is 1, and ``stages`` is a divisor of ``steps``. A unit is a row tile, or two where
    their outputs make a block of 16 codes.

    Attributes:
        parts: Parts of K, a divisor of ``tiles``.
        segment_rows: Most rows of X of a segment, at most 8 ``token_tiles``.
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        quantized_out: Whether results are NVFP4: codes, block scales, scales of rows.
        swizzled_out: Whether those block scales are swizzled, by expert.
    """

    parts: int = 1
    row_weighted: bool = False
    segment_rows: int = 8
    quantized_out: bool = False
    swizzled_out: bool = False

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.grouped_gemm_small_m:GroupedSmallMKernel"

    @property
    def x_bytes(self) -> int:
        """Bytes of a segment's rows of X."""
        return self.segment_rows * self.x_row_bytes

    @property
    def unit_tiles(self) -> int:
        """Row tiles of a unit."""
        return 2 if self.quantized_out else 1

    @property
    def shares(self) -> int:
        """Jobs of a unit: parts of K of its row tiles."""
        return self.parts * self.unit_tiles

    @property
    def sums_bytes(self) -> int:
        """Room for sums of shares."""
        return PLACES * self.shares * self.partial_bytes if self.shares > 1 else 0

    @property
    def buffer_bytes(self) -> int:
        """A warp's buffer for the epilogue transpose: of 8 codes 16 bytes before they are coded."""
        return self.partial_bytes // 2 if self.quantized_out else self.partial_bytes

    @property
    def steps(self) -> int:
        """Tiles of 64 columns of a part."""
        return self.tiles // self.parts

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        state = 8 + 16 * PLACES + STATE_BYTES
        return self.x_bytes + self.sums_bytes + self.epilogue_bytes + state + _TABLE_BYTES


class _Shape(NamedTuple):
    """Tokens of a tile and of narrower products, warpgroups, row tiles of a warp, ``depth``."""

    token_block: int
    narrow: tuple[int, ...]
    warpgroups: int
    tiles: int
    depth: int = 2


class _Ladder(NamedTuple):
    """What registers and shared memory hold of a kind of product, the fastest that was measured.

    More row tiles of a warp share more of what waiting, addresses and descriptors of X cost.

    Attributes:
        steps: Of launches for experts of at most so many rows.
        above: Of the launch for more rows than these take, where they take up to 16, and further.
        whole: For many more rows on average.
        most: Where blocks take tiles as they are done, steps go up to here, however few rows an
            expert has on average.
    """

    steps: dict[int, _Shape]
    above: tuple[_Shape, _Shape]
    whole: tuple[_Shape, ...]
    most: int = 0


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
# Where rows have no scales, registers hold more: shared scales of three warpgroups, more sums.
_UNSCALED = {72: _Shape(72, (), 3, 2), 80: _Shape(80, (), 3, 2), 144: _Shape(144, (136,), 2, 2)}
_LADDER_UNSCALED = _LADDER._replace(
    steps=dict(sorted({**_LADDER.steps, **_UNSCALED}.items())), most=144
)
# Where storing float32 results, or coding them, takes more registers.
_LADDER_OF_MORE = _LADDER._replace(
    steps={
        **_LADDER.steps,
        48: _Shape(48, (32, 40), 3, 2),
        64: _Shape(64, (48,), 3, 2),
        80: _Shape(80, (64,), 3, 2),
        128: _HEAVY[1],
    }
)
# SwiGLU's results with scales of rows: of 32 tokens on registers do not hold two tiles of a warp.
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

# float32 results of scaled rows, whose 128 sums of a thread are too many.
_LADDER_OF_MOST = _LADDER_OF_MORE._replace(
    steps={**_LADDER_OF_MORE.steps, 128: _HEAVY_SCALED[1]},
    above=(_HEAVY[0], _HEAVY_SCALED[1]),
    whole=_LADDER_SCALED.whole,
)


def _ladder(wanted: Experts) -> _Ladder:
    if wanted.row_scaled and wanted.swiglu:
        return _LADDER_SCALED
    if wanted.float32_out or wanted.quantized_out:
        most = wanted.float32_out and wanted.row_scaled
        return _LADDER_OF_MOST if most else _LADDER_OF_MORE
    return _LADDER if wanted.row_scaled else _LADDER_UNSCALED


class Share(NamedTuple):
    """The experts of one launch.

    Attributes:
        plan: Its configuration.
        above: Rows above which an expert is its.
        most: Rows up to which it is.
    """

    plan: GroupedWgmmaPlan | GroupedSmallMPlan
    above: int
    most: int


def shares(wanted: Experts, tokens: int, arch: str = HOPPER) -> tuple[Share, ...]:
    """Launches for a number of rows of X, in their order, none if there is no kernel.

    How many rows each expert has is known on the GPU alone, so every launch is for the experts of
    so many rows: those that have about as many as an expert has on average, in steps; those that
    have far more before, those that have far fewer after, which is seldom any expert where rows
    were drawn uniformly. The result is right for any routing.
    """
    return _shares(wanted, counted_as(tokens), arch)


@functools.cache
def _shares(wanted: Experts, tokens: int, arch: str) -> tuple[Share, ...]:
    if wanted.experts > MOST_EXPERTS or wanted.columns % 128:
        return ()
    mean = tokens / wanted.experts
    few = _few(wanted, tokens, arch) if arch != HOPPER or mean <= _FEW_ROWS else None
    if arch != HOPPER or (few is not None and mean < _SHARED_FROM):
        return () if few is None else (Share(few, 0, EVERY),)
    ladder, found, above = _ladder(wanted), [], 0
    # Two standard deviations of a uniform draw.
    far = mean + max(_FAR, 2 * mean**0.5)
    if few is not None:
        above = 8 if far <= 8 else 16
        found.append(Share(few, 0, above))
    for most in _steps(mean, far, ladder) if few is None else ():
        found.append(Share(_plan(wanted, ladder.steps[most]), above, most))
        above = most
    if mean > _WHOLE_FROM:
        every = (_plan(wanted, shape) for shape in ladder.whole)
        plan = min(every, key=lambda plan: _cycles(plan, wanted, tokens))
    else:
        plan = _plan(wanted, ladder.above[above > 16])
    return (Share(plan, above, EVERY), *reversed(found))


def counts_tiles(wanted: Experts, tokens: int) -> bool:
    """Whether blocks take tiles as they are done, by counters, not every so many.

    Where there are many launches, blocks begin at times that differ by whole tiles.
    """
    return _COUNTED_FROM < counted_as(tokens) / wanted.experts <= _WHOLE_FROM


def _steps(mean: float, far: float, ladder: _Ladder) -> list[int]:
    """Most rows of each launch but the one that takes all above."""
    steps = list(ladder.steps)
    if mean > _WHOLE_FROM:
        return [most for most in steps if most in _FAR_FEWER]
    last = next((most for most in steps if most >= far), steps[-1])
    if mean > _COUNTED_FROM:
        last = max(last, ladder.most)
    near = mean - mean**0.5
    return [n for n in steps if n <= last and (n > near or n in _FAR_FEWER)]


def choose(
    wanted: Experts, tokens: int, arch: str = HOPPER
) -> GroupedWgmmaPlan | GroupedSmallMPlan | None:
    """The configuration for experts of about as many rows as the average, None if there is none."""
    rows = max(tokens, 1) / wanted.experts
    found = (s.plan for s in shares(wanted, tokens, arch) if s.above < rows <= s.most)
    return next(found, None)


def _few(wanted: Experts, tokens: int, arch: str) -> GroupedSmallMPlan | None:
    """The kernel for few rows an expert, None if shared memory does not hold a segment's rows."""
    tiles = wanted.columns // 64
    token_tiles = 1 if tokens <= _ONE_TILE * wanted.experts else 2
    warps, parts = _jobs(wanted, tokens, arch)
    most = 3 if wanted.float32_out or wanted.row_scaled else 6 if parts > 1 else 4
    if warps == _FEWER_WARPS:
        most = 8  # a warp has more registers
    depth = next(n for n in range(most, 0, -1) if tiles // parts % n == 0)
    plan = GroupedSmallMPlan(
        wanted.columns,
        1,
        warps,
        token_tiles,
        wanted.float32_out,
        wanted.row_scaled,
        depth,
        wanted.swiglu,
        parts=parts,
        row_weighted=wanted.row_weighted,
        segment_rows=8 * token_tiles,
        quantized_out=wanted.quantized_out,
        swizzled_out=wanted.swizzled_out,
    )
    # A few rows less than 16 seldom need a second segment; fewer than 12 would.
    over = plan.shared_bytes - _SHARED_ROOM
    rows = plan.segment_rows - max(0, -(-over // plan.x_row_bytes))
    fits = rows == plan.segment_rows or (token_tiles == 2 and rows >= _LEAST)
    return dataclasses.replace(plan, segment_rows=rows) if fits else None


def _jobs(wanted: Experts, tokens: int, arch: str) -> tuple[int, int]:
    """Warps of a block, and parts of K: such that the last round of jobs is well filled.

    Of a block's row tiles where every row has an expert of its own. Fewer warps have longer parts.
    """
    tiles = wanted.columns // 64
    if tokens > _CUT_ROWS:
        return _WARPS, 1
    parts = _parts(tiles)
    if arch != HOPPER or wanted.float32_out or wanted.row_scaled or wanted.quantized_out:
        return _WARPS, parts
    longer = min(p for p in range(1, tiles + 1) if tiles % p == 0 and tiles // p <= _LONGEST)
    each = tokens * wanted.rows / 16 / _PROCESSORS

    def filled(warps: int, parts: int) -> float:
        rounds = each * parts / warps
        return rounds / math.ceil(rounds)

    if filled(_FEWER_WARPS, longer) > filled(_WARPS, parts) + _WORTH:
        return _FEWER_WARPS, longer
    return _WARPS, parts


def _parts(tiles: int) -> int:
    """Into how many parts K is cut: of about 26 tiles, the fastest of those measured."""
    return min((p for p in range(1, 17) if tiles % p == 0), key=lambda p: abs(tiles // p - 26))


def _plan(wanted: Experts, shape: _Shape) -> GroupedWgmmaPlan:
    return GroupedWgmmaPlan(
        shape.token_block,
        shape.warpgroups,
        1,
        shape.depth,
        wanted.float32_out,
        wanted.row_scaled,
        wanted.swiglu,
        shape.tiles,
        wanted.row_weighted,
        wanted.quantized_out,
        shape.narrow,
        wanted.swizzled_out,
    )


def _cycles(plan: GroupedWgmmaPlan, wanted: Experts, tokens: int) -> float:
    """Estimated cycles: tiles of all experts, in rounds while there are few.

    Its constants are fitted to times on an H200; it is there to rank configurations.
    """
    steps, results = (
        wanted.columns // 64,
        10.3 * plan.token_block * plan.warpgroups * plan.warp_tiles,
    )
    each = {size: 1500 + steps * _step_cycles(plan, size) + results for size in plan.mma_widths}
    cycles = tiles = 0.0
    for rows, share in _rows_of_one(tokens / wanted.experts):
        whole, rest = divmod(rows, plan.token_block)
        last = next(size for size in plan.mma_widths if size >= rest)
        tiles += share * (whole + bool(rest))
        cycles += share * (whole * each[plan.token_block] + bool(rest) * each[last])
    row_blocks = wanted.experts * -(-wanted.rows // plan.rows)
    rounds = tiles * row_blocks / _PROCESSORS
    if rounds < 8:  # few: as many as it takes, of tiles as they are on average
        return math.ceil(rounds) / rounds * cycles * row_blocks / _PROCESSORS
    return cycles * row_blocks / _PROCESSORS


def _step_cycles(plan: GroupedWgmmaPlan, size: int) -> float:
    """Cycles of 64 columns of a tile of so many tokens.

    Bound by instructions and the tensor cores, which get in each other's way, or by memory.
    """
    issue = _ISSUE[plan.warp_tiles] + _BOTH * size
    return max(
        plan.warpgroups * plan.warp_tiles * max(issue, _TENSOR[plan.warp_tiles] * size),
        _MEMORY * 36 * plan.rows,
    )


@functools.lru_cache(maxsize=4096)
def _rows_of_one(mean: float) -> list[tuple[int, float]]:
    """Numbers of rows of an expert, Poisson distributed, and how probable they are."""
    around = 8 * mean**0.5 + 8
    every = range(max(0, int(mean - around)), int(mean + around) + 1)
    return [(n, math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))) for n in every]
