"""Configurations of the kernels of sparse attention, and among how many blocks a token is dealt."""

from __future__ import annotations

import functools
from dataclasses import dataclass

HEADS = 64  # of a tile
BLOCK = 64  # entries that are multiplied at a time
DIMS, NOPE, ROPE = 512, 448, 64
STAGES = 2
CONSUMER_WARPS, PRODUCER_WARPS = 8, 4
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 88
TILE_BYTES = BLOCK * DIMS * 2
CODE_BYTES = BLOCK * NOPE // 2  # of those that wait in shared memory
SCAN_BYTES = 2 * 4 * PRODUCER_WARPS
WEIGHT_BYTES = HEADS * BLOCK * 2
INFO_BYTES = 16  # of a stage: which entries there are, and whether it is the token's last
_MOST_SPLITS = 64
# In clock cycles, fitted to times on an H200: a block of entries, what a tile of heads costs beside
# them, the second launch, a head of a token there, and the bytes of sums that are written and read
# again while a multiprocessor's clock ticks.
_BLOCK_CYCLES, _TILE_CYCLES, _LAUNCH_CYCLES, _ROW_CYCLES, _BYTES = 4500, 9000, 3000, 200, 9


@dataclass(frozen=True)
class AttentionPlan:
    """A compiled form of the kernel.

    Attributes:
        split: Whether several blocks share a token and leave their sums for another launch.
    """

    split: bool

    kernel = "dsv4.cute.sm90.attention:AttentionKernel"
    blocks = 1

    @property
    def threads(self) -> int:
        """Of a block: two warpgroups multiply, one expands."""
        return 32 * (CONSUMER_WARPS + PRODUCER_WARPS)

    @property
    def shared_bytes(self) -> int:
        """Queries, stages, weights, codes, what warpgroups tell one another, and barriers."""
        tiles = (1 + STAGES) * TILE_BYTES + WEIGHT_BYTES + CODE_BYTES
        return 1024 + tiles + 3 * 4 * HEADS + STAGES * (INFO_BYTES + 24) + SCAN_BYTES


@dataclass(frozen=True)
class MergePlan:
    """The kernel that adds the sums of a token's blocks."""

    kernel = "dsv4.cute.sm90.attention_merge:MergeKernel"
    blocks = 1
    threads = DIMS // 4
    shared_bytes = 0


Plan = AttentionPlan | MergePlan


@functools.cache
def splits(tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int) -> int:
    """Among how many blocks a tile's entries are dealt: the number that takes the fewest cycles.

    Args:
        tokens: At least 1.
        heads: Of a token.
        widths: Slots of a token, of either cache.
        multiprocessors: Of the GPU.
    """
    blocks = max(1, sum(-(-width // BLOCK) for width in widths))
    programs = tokens * tiles(heads)
    most = max(1, min(_MOST_SPLITS, blocks, 2 * multiprocessors // programs))

    def cycles(count: int) -> float:
        rounds = -(-programs * count // multiprocessors)
        alone = rounds * (_TILE_CYCLES + -(-blocks // count) * _BLOCK_CYCLES)
        if count == 1:
            return alone
        moved = 4 * DIMS * min(heads, HEADS) * programs * count / _BYTES
        return alone + _LAUNCH_CYCLES + (moved + _ROW_CYCLES * tokens * heads) / multiprocessors

    return min(range(1, most + 1), key=cycles)


def tiles(heads: int) -> int:
    """Tiles of a token's heads."""
    return -(-heads // HEADS)
