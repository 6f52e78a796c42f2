"""Which configuration of the kernel in ``grouped`` a product takes; needs no compiler."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute._architectures import HOPPER
from dsv4.cute.sm90.few_plan import FewPlan
from dsv4.cute.sm90.many_plan import ManyPlan

MOST_EXPERTS = 512
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
# Tokens of a tile and of narrower products, warpgroups, tiles of 16 rows of a warp, and blocks of
# 64 columns of a stage: what registers and shared memory hold.
_SHAPES = (
    (16, (8,), 4, 2, 2),
    (24, (16,), 4, 2, 2),
    (32, (16, 24), 4, 2, 2),
    (32, (16,), 4, 1, 2),
    (48, (32, 40), 3, 2, 2),
    (48, (32, 40), 4, 1, 2),
    (64, (48,), 3, 2, 2),
    (64, (48,), 4, 1, 2),
    (80, (64,), 3, 2, 2),
    (80, (64,), 4, 1, 2),
    (128, (64, 96), 2, 2, 2),
    (128, (64, 96), 3, 1, 1),
    (160, (128, 144), 2, 1, 1),
    (192, (), 2, 1, 1),
)
# Cycles of 64 rows and columns, by tiles of a warp: of the instructions; of a token beside them;
# and of a token where the tensor cores bound. Cycles of a byte of weights from memory.
_ISSUE, _BOTH, _TENSOR, _MEMORY = {1: 104.0, 2: 99.0}, 1.56, {1: 2.39, 2: 2.6}, 0.0414
SLOTS = 14  # of what tiles are, more than there are stages
# Rows on average from which experts may be shared among launches, and least rows more than that of
# those that have far more. Rows up to which an expert has far fewer, also its tokens of a tile,
# with the average from which that is so; rows above which it has far more, with tokens of a tile.
_SHARED_FROM, _FAR = 0.5, 5.0
_SMALL = {16: 16, 32: 48, 64: 96, 128: 192}
_LARGE = {8: 64, 16: 64, 32: 80, 48: 128, 80: 128, 128: 160}
EVERY = 2**31 - 1
_TABLE_BYTES = 8 * (MOST_EXPERTS + 2) + 16 * SLOTS


class Experts(NamedTuple):
    """What a kernel depends on beside the number of rows of X.

    Attributes:
        rows: N of an expert, a multiple of 16.
        columns: K, a multiple of 128.
        experts: How many.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every row of X has a scale of its own (quantised activations).
        swiglu: Whether rows are gate and up in turn, and the result is their SwiGLU.
        row_weighted: Whether that is multiplied by a weight of the row of X.
        quantized_out: Whether the result of SwiGLU is NVFP4 codes, block scales, scales of rows.
    """

    rows: int
    columns: int
    experts: int
    float32_out: bool
    row_scaled: bool
    swiglu: bool = False
    row_weighted: bool = False
    quantized_out: bool = False


@dataclass(frozen=True)
class GroupedPlan(ManyPlan):
    """One configuration of the kernel; ``blocks`` is 1.

    Attributes:
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        quantized_out: Whether results are NVFP4: codes, block scales, scales of rows.
        narrow: Tokens of narrower products, ascending, multiples of 8 below ``token_block``. A tile
            takes the first that has as many as its expert's rows.
    """

    row_weighted: bool = False
    quantized_out: bool = False
    narrow: tuple[int, ...] = ()

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.grouped:GroupedKernel"

    @property
    def sizes(self) -> tuple[int, ...]:
        """As there, the narrower ones first."""
        return (*self.narrow, self.token_block)

    @property
    def box(self) -> int:
        """As there: every size is some of them."""
        return math.gcd(*self.sizes)

    @property
    def rooms(self) -> int:
        """As there; one, so that there is room for stages."""
        return 1

    @property
    def beside_bytes(self) -> int:
        """As there: tables of the experts' tiles and first rows, and slots."""
        return _TABLE_BYTES


@dataclass(frozen=True)
class GroupedFewPlan(FewPlan):
    """One configuration of the kernel for few rows an expert.

    ``blocks`` is 1, and ``depth`` is a divisor of ``steps``. A unit is a row tile, or two where
    their outputs make a block of 16 codes.

    Attributes:
        parts: Parts of K, a divisor of ``tiles``.
        segment_rows: Most rows of X of a segment, at most 8 ``token_tiles``.
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        quantized_out: Whether results are NVFP4: codes, block scales, scales of rows.
    """

    parts: int = 1
    row_weighted: bool = False
    segment_rows: int = 8
    quantized_out: bool = False

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.grouped_few:GroupedFewKernel"

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
    def room_bytes(self) -> int:
        """Room in which a warp turns its results: of 8 codes 16 bytes before they are coded."""
        return self.partial_bytes // 2 if self.quantized_out else self.partial_bytes

    @property
    def steps(self) -> int:
        """Tiles of 64 columns of a part."""
        return self.tiles // self.parts

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        state = 8 + 16 * PLACES + STATE_BYTES
        return self.x_bytes + self.sums_bytes + self.turned_bytes + state + _TABLE_BYTES


class Share(NamedTuple):
    """The experts of one launch.

    Attributes:
        plan: Its configuration.
        above: Rows above which an expert is its.
        most: Rows up to which it is.
    """

    plan: GroupedPlan | GroupedFewPlan
    above: int
    most: int


def shares(wanted: Experts, tokens: int, arch: str = HOPPER) -> tuple[Share, ...]:
    """Launches for a number of rows of X, in their order, none if there is no kernel.

    What ``choose`` finds is for experts with about as many rows as an expert has on average. Those
    that have far more come before, those that have far fewer after, in launches for so many rows,
    which is seldom any expert where rows were drawn uniformly.
    """
    plan = choose(wanted, tokens, arch)
    if plan is None:
        return ()
    return _shares(plan, wanted, counted_as(tokens), arch)


@functools.cache
def _shares(
    plan: GroupedPlan | GroupedFewPlan, wanted: Experts, tokens: int, arch: str
) -> tuple[Share, ...]:
    mean = tokens / wanted.experts
    if arch != HOPPER or mean < _SHARED_FROM:
        return (Share(plan, 0, EVERY),)
    blocks = {one.token_block: one for one in _candidates(wanted)}
    block = plan.token_block if isinstance(plan, GroupedPlan) else 0
    many = EVERY
    if block == 160 and mean <= 160:
        # Faster than tiles that the rows of all fit: half of the experts have fewer.
        block = many = 128
        plan = blocks[block]
    few = max((rows for rows, least in _SMALL.items() if least <= mean and rows < block), default=0)
    # Two standard deviations of a uniform draw: few experts, or none.
    far = mean + max(_FAR, 2 * mean**0.5)
    large = (rows for rows, wide in _LARGE.items() if rows >= far and wide > block)
    many = min([many, *large])
    found = [Share(plan, few, many)]
    if many < EVERY:
        found.insert(0, Share(blocks[_LARGE[many]], many, EVERY))
    if few:
        found.append(Share(blocks[few], 0, few))
    return tuple(found)


@functools.lru_cache(maxsize=1 << 14)
def choose(wanted: Experts, tokens: int, arch: str = HOPPER) -> GroupedPlan | GroupedFewPlan | None:
    """The configuration for a number of rows of X, None if there is none.

    How many of them each expert has is known on the GPU alone, so the choice supposes that they
    were drawn uniformly; the result is right for any routing. Elsewhere than on Hopper the kernel
    for few rows an expert is all there is: more rows are more segments.
    """
    return _chosen(wanted, counted_as(tokens), arch)


@functools.cache
def _chosen(wanted: Experts, tokens: int, arch: str) -> GroupedPlan | GroupedFewPlan | None:
    if wanted.experts > MOST_EXPERTS or wanted.columns % 128:
        return None
    if arch != HOPPER or tokens <= _FEW_ROWS * wanted.experts:
        few = _few(wanted, tokens, arch)
        if few is not None or arch != HOPPER:
            return few
    return min(_candidates(wanted), key=lambda plan: _cycles(plan, wanted, tokens))


def _few(wanted: Experts, tokens: int, arch: str) -> GroupedFewPlan | None:
    """The kernel for few rows an expert, None if shared memory does not hold a segment's rows."""
    tiles = wanted.columns // 64
    token_tiles = 1 if tokens <= _ONE_TILE * wanted.experts else 2
    warps, parts = _jobs(wanted, tokens, arch)
    most = 3 if wanted.float32_out or wanted.row_scaled else 6 if parts > 1 else 4
    if warps == _FEWER_WARPS:
        most = 8  # a warp has more registers
    depth = next(n for n in range(most, 0, -1) if tiles // parts % n == 0)
    plan = GroupedFewPlan(
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


def _candidates(wanted: Experts) -> Iterator[GroupedPlan]:
    # Two tiles of a warp are faster, but for SwiGLU's results with scales of rows, or for so many
    # tokens, registers do not hold both.
    single = 32 if wanted.row_scaled and wanted.swiglu else 160
    for token_block, narrow, warpgroups, tiles, depth in _SHAPES:
        if tiles != (1 if token_block >= single else 2):
            continue
        yield GroupedPlan(
            token_block,
            warpgroups,
            1,
            depth,
            wanted.float32_out,
            wanted.row_scaled,
            wanted.swiglu,
            tiles,
            wanted.row_weighted,
            wanted.quantized_out,
            narrow,
        )


def _cycles(plan: GroupedPlan, wanted: Experts, tokens: int) -> float:
    """Estimated cycles: tiles of all experts, in rounds while there are few.

    Its constants are fitted to times on an H200; it is there to rank configurations.
    """
    steps, results = wanted.columns // 64, 10.3 * plan.token_block * plan.warpgroups * plan.tiles
    each = {size: 1500 + steps * _step_cycles(plan, size) + results for size in plan.sizes}
    cycles = tiles = 0.0
    for rows, share in _rows_of_one(tokens / wanted.experts):
        whole, rest = divmod(rows, plan.token_block)
        last = next(size for size in plan.sizes if size >= rest)
        tiles += share * (whole + bool(rest))
        cycles += share * (whole * each[plan.token_block] + bool(rest) * each[last])
    row_blocks = wanted.experts * -(-wanted.rows // plan.rows)
    rounds = tiles * row_blocks / _PROCESSORS
    if rounds < 8:  # few: as many as it takes, of tiles as they are on average
        return math.ceil(rounds) / rounds * cycles * row_blocks / _PROCESSORS
    return cycles * row_blocks / _PROCESSORS


def _step_cycles(plan: GroupedPlan, size: int) -> float:
    """Cycles of 64 columns of a tile of so many tokens.

    Bound by instructions and the tensor cores, which get in each other's way, or by memory.
    """
    issue = _ISSUE[plan.tiles] + _BOTH * size
    return max(
        plan.warpgroups * plan.tiles * max(issue, _TENSOR[plan.tiles] * size),
        _MEMORY * 36 * plan.rows,
    )


@functools.lru_cache(maxsize=4096)
def _rows_of_one(mean: float) -> list[tuple[int, float]]:
    """Numbers of rows of an expert, Poisson distributed, and how probable they are."""
    around = 8 * mean**0.5 + 8
    every = range(max(0, int(mean - around)), int(mean + around) + 1)
    return [(n, math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))) for n in every]


@functools.lru_cache(maxsize=4096)
def expected_tiles(mean: float, block: int) -> float:
    """Expected tiles of ``block`` tokens for a number of them that is Poisson distributed."""
    return sum(_more_than(mean, k * block) for k in range(int(mean + 8 * mean**0.5) // block + 2))


def _more_than(mean: float, count: int) -> float:
    """Probability of more than ``count``."""
    if mean > 200:  # normal, near enough
        return 0.5 * math.erfc((count + 0.5 - mean) / math.sqrt(2 * mean))
    term = below = math.exp(-mean)
    for i in range(1, count + 1):
        term *= mean / i
        below += term
    return max(0.0, 1.0 - below)


@functools.lru_cache(maxsize=1 << 14)
def counted_as(tokens: int) -> int:
    """The number of rows that stands for this one: powers of two and the middles between them."""
    if tokens <= 4:
        return max(tokens, 1)
    power = 1 << (tokens - 1).bit_length()  # at least tokens
    return power * 3 // 4 if tokens <= power * 3 // 4 else power
