"""Configurations of the kernels of sparse attention, and among how many blocks a token is dealt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

HEADS = 64  # of a tile
BLOCK = 64  # entries that are multiplied at a time
DIMS, NOPE, ROPE = 512, 448, 64
STAGES = 2
CONSUMER_WARPS, PRODUCER_WARPS = 8, 4
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 88
TILE_BYTES = BLOCK * DIMS * 2
CODE_BYTES = BLOCK * NOPE // 2  # of those that wait in shared memory
SCAN_BYTES = 4 * PRODUCER_WARPS
WEIGHT_BYTES = HEADS * BLOCK * 2
INFO_BYTES = 16  # of a stage: which entries there are, and whether it is the token's last
_MOST_SPLITS = 64
# In clock cycles, fitted to times on an H200: a block of entries, what a tile of heads costs beside
# them, the second launch, a head of a token there, and the bytes of sums that are written and read
# again while a multiprocessor's clock ticks; and what two blocks that add their sums together cost.
_BLOCK_CYCLES, _TILE_CYCLES, _LAUNCH_CYCLES, _ROW_CYCLES, _BYTES = 4500, 9000, 3000, 200, 9
_TOGETHER_CYCLES = 5000
NARROW_CLUSTERS = (8, 9, 12, 16)  # blocks of a cluster of the narrow kernel
# Of that kernel, as measured: clusters that are at work at a time without two blocks on one
# multiprocessor, and steps of a token up to which it is the fastest.
_NARROW_CLUSTERS, _NARROW_STEPS = 8, 40


@dataclass(frozen=True)
class AttentionPlan:
    """A compiled form of the kernel.

    Attributes:
        split: Whether several blocks share a token and leave their sums for another launch.
        together: Whether two blocks share a token and each adds the sums of half of the dims.
    """

    split: bool
    together: bool = False

    kernel = "dsv4.cute.sm90.attention:AttentionKernel"

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return 2 if self.together else 1

    @property
    def threads(self) -> int:
        """Of a block: two warpgroups multiply, one expands."""
        return 32 * (CONSUMER_WARPS + PRODUCER_WARPS)

    @property
    def shared_bytes(self) -> int:
        """Queries, stages, weights, codes, what warpgroups tell one another, and barriers."""
        tiles = (1 + STAGES) * TILE_BYTES + WEIGHT_BYTES + CODE_BYTES
        words = 3 * HEADS + CONSUMER_WARPS
        return 1024 + tiles + 4 * words + STAGES * (INFO_BYTES + 24) + SCAN_BYTES + 16


@dataclass(frozen=True)
class MergePlan:
    """The kernel that adds the sums of a token's blocks."""

    kernel = "dsv4.cute.sm90.attention_merge:MergeKernel"
    blocks = 1
    threads = DIMS // 4
    shared_bytes = 0


@dataclass(frozen=True)
class NarrowPlan:
    """The kernel for few tokens, a cluster of which has 16 heads of one.

    Attributes:
        blocks: Of a cluster, 8 to 16; not every GPU has room for as many clusters of more than 8.
    """

    blocks: int = 8

    kernel = "dsv4.cute.sm90.attention_narrow:NarrowKernel"
    heads = 16  # of a tile
    threads = 256
    stages = 3  # of codes
    ahead = 2  # steps whose codes are asked for while one is multiplied
    shared_bytes = 128 * 1024  # more than half, so that blocks are on different multiprocessors


Plan = AttentionPlan | MergePlan | NarrowPlan


@functools.cache
def choose(
    tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int
) -> tuple[AttentionPlan | NarrowPlan, int]:
    """The kernel that takes the fewest cycles, and among how many blocks it deals a tile's entries.

    Args:
        tokens: At least 1.
        heads: Of a token.
        widths: Slots of a token, of either cache.
        multiprocessors: Of the GPU.
    """
    if is_narrow(tokens, heads, widths):
        clusters = tokens * -(-heads // NarrowPlan.heads)
        room = [
            b for b in NARROW_CLUSTERS if b == NarrowPlan.blocks or clusters * b <= multiprocessors
        ]
        plan = narrow(widths, room)
        return plan, plan.blocks
    count = splits(tokens, heads, widths, multiprocessors)
    cycles = _cycles(count, tokens, heads, widths, multiprocessors)
    two = AttentionPlan(False, together=True)
    programs = tokens * tiles(heads)
    # Of fewer, four to a tile leave less to each, and another launch has less to add.
    if multiprocessors < 4 * programs <= 2 * multiprocessors and _blocks(widths) > 1:
        alone = _TILE_CYCLES + -(-_blocks(widths) // 2) * _BLOCK_CYCLES + _TOGETHER_CYCLES
        if alone < cycles:
            return two, two.blocks
    return AttentionPlan(count > 1), count


def narrow(widths: tuple[int, int], room: Sequence[int]) -> NarrowPlan:
    """The form whose blocks have the fewest steps; of several the largest, else the smallest.

    Args:
        widths: Slots of a token, of either cache.
        room: Blocks of clusters that all fit at a time.
    """
    steps = _steps(widths)
    return NarrowPlan(min(room, key=lambda b: (-(-steps // b), b != NARROW_CLUSTERS[-1], b)))


def is_narrow(tokens: int, heads: int, widths: tuple[int, int]) -> bool:
    """Whether tiles of 16 heads take less time than larger ones."""
    clusters = tokens * -(-heads // NarrowPlan.heads)
    return clusters <= _NARROW_CLUSTERS and _steps(widths) <= _NARROW_STEPS


def _steps(widths: tuple[int, int]) -> int:
    """Of 32 entries, of the narrow kernel."""
    return sum(-(-width // 32) for width in widths)


@functools.cache
def splits(tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int) -> int:
    """Among how many blocks a tile's entries are best dealt if another launch adds their sums.

    Args:
        tokens: At least 1.
        heads: Of a token.
        widths: Slots of a token, of either cache.
        multiprocessors: Of the GPU.
    """
    programs = tokens * tiles(heads)
    most = max(1, min(_MOST_SPLITS, _blocks(widths), 2 * multiprocessors // programs))
    sizes = (tokens, heads, widths, multiprocessors)
    return min(range(1, most + 1), key=lambda count: _cycles(count, *sizes))


def _cycles(
    count: int, tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int
) -> float:
    programs = tokens * tiles(heads)
    rounds = -(-programs * count // multiprocessors)
    alone = rounds * (_TILE_CYCLES + -(-_blocks(widths) // count) * _BLOCK_CYCLES)
    if count == 1:
        return alone
    moved = 4 * DIMS * min(heads, HEADS) * programs * count / _BYTES
    return alone + _LAUNCH_CYCLES + (moved + _ROW_CYCLES * tokens * heads) / multiprocessors


def _blocks(widths: tuple[int, int]) -> int:
    """Blocks of entries of a token."""
    return max(1, sum(-(-width // BLOCK) for width in widths))


def tiles(heads: int) -> int:
    """Tiles of a token's heads."""
    return -(-heads // HEADS)
