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
from dsv4.cute.sm90.many_plan import ManyPlan, candidates, depth_of, step_cycles

MOST_EXPERTS = 512
PLACES = 8  # of sums of row tiles, in its shared memory
STATE_BYTES = 48 + 4 * 16
# Rows of X up to which K is cut into parts, because there are few row tiles for all warps.
_CUT_ROWS = 64
# Rows an expert, on average, up to which a segment has 8 rows, and the kernel for few is taken.
_ONE_TILE, _FEW_ROWS = 4, 12
_WARPS = 16
_SHARED_ROOM = 227 * 1024
_PROCESSORS = 132  # of an H200
# More than a dense product has: an expert's tokens should fit one tile, whatever their number.
_TOKEN_BLOCKS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
_TABLE_BYTES = 8 * (MOST_EXPERTS + 2)


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
    """

    row_weighted: bool = False
    quantized_out: bool = False

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.grouped:GroupedKernel"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; with tables of the experts' tiles and first rows."""
        return super().shared_bytes + _TABLE_BYTES


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
        state = 8 + 8 * PLACES + STATE_BYTES
        return self.x_bytes + self.sums_bytes + self.turned_bytes + state + _TABLE_BYTES


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
        few = _few(wanted, tokens)
        if few is not None or arch != HOPPER:
            return few
    found = min(
        _candidates(wanted),
        key=lambda plan: _cycles(plan, wanted, tokens),
        default=None,
    )
    if found is None:
        return None
    return GroupedPlan(
        found.token_block,
        found.warpgroups,
        1,
        found.depth,
        wanted.float32_out,
        wanted.row_scaled,
        wanted.swiglu,
        wanted.row_weighted,
        wanted.quantized_out,
    )


def _few(wanted: Experts, tokens: int) -> GroupedFewPlan | None:
    """The kernel for few rows an expert, None if shared memory does not hold a segment's rows."""
    tiles = wanted.columns // 64
    token_tiles = 1 if tokens <= _ONE_TILE * wanted.experts else 2
    parts = _parts(tiles) if tokens <= _CUT_ROWS else 1
    most = 3 if wanted.float32_out or wanted.row_scaled else 6 if parts > 1 else 4
    depth = next(n for n in range(most, 0, -1) if tiles // parts % n == 0)
    plan = GroupedFewPlan(
        wanted.columns,
        1,
        _WARPS,
        token_tiles,
        wanted.float32_out,
        wanted.row_scaled,
        depth,
        wanted.swiglu,
        parts,
        wanted.row_weighted,
        8 * token_tiles,
        wanted.quantized_out,
    )
    # A few rows less than 16 seldom need a second segment; fewer than 12 would.
    over = plan.shared_bytes - _SHARED_ROOM
    rows = plan.segment_rows - max(0, -(-over // plan.x_row_bytes))
    fits = rows == plan.segment_rows or (token_tiles == 2 and rows >= _FEW_ROWS)
    return dataclasses.replace(plan, segment_rows=rows) if fits else None


def _parts(tiles: int) -> int:
    """Into how many parts K is cut: of about 26 tiles, the fastest of those measured."""
    return min((p for p in range(1, 17) if tiles % p == 0), key=lambda p: abs(tiles // p - 26))


def _candidates(wanted: Experts) -> Iterator[ManyPlan]:
    rows, columns = wanted.rows, wanted.columns
    kind = (wanted.float32_out, wanted.row_scaled)
    for plan in candidates(rows, rows, columns, _TOKEN_BLOCKS[-1], *kind, _TOKEN_BLOCKS):
        if plan.blocks > 1:
            continue
        # Finding the expert takes a few registers more than a dense product has left here, and
        # so does what its rows weigh.
        tight = plan.warpgroups == 3 and plan.token_block >= 80
        if tight or (plan.warpgroups == 4 and wanted.row_weighted):
            depth = depth_of(columns // 64, 1, plan.depth - 2)
            if not depth:
                continue
            plan = dataclasses.replace(plan, depth=depth)
        yield plan


def _cycles(plan: ManyPlan, wanted: Experts, tokens: int) -> float:
    """Estimated cycles: tiles of all experts, in rounds while there are few."""
    of_tokens = wanted.experts * expected_tiles(tokens / wanted.experts, plan.token_block)
    tiles = of_tokens * -(-wanted.rows // plan.rows)
    rounds = tiles / _PROCESSORS
    if rounds < 8:
        rounds = math.ceil(rounds)
    results = plan.token_block * plan.warpgroups
    return rounds * (371 + wanted.columns // 64 * step_cycles(plan, 1.0) + 10.3 * results)


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
