"""Configurations of the kernels of sparse attention, and among how many blocks a token is dealt."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

HEADS = 64  # of a tile
BLOCK = 64  # entries that are multiplied at a time
DIMS, NOPE, ROPE = 512, 448, 64
STAGES = 2
CONSUMER_WARPS = 8
PACKED_BYTES = DIMS * 5 // 2  # of a head's sums that another block adds: 20 bits each
# Of a thread that multiplies, and of one that expands, by the warps that expand.
REGISTERS = {4: (208, 88), 8: (192, 64)}
TILE_BYTES = BLOCK * DIMS * 2
WEIGHT_BYTES = HEADS * BLOCK * 2
INFO_BYTES = 16  # of a stage: which entries there are, and whether it is the token's last
COLUMN_CLUSTERS = (1, 2, 4, 8)  # blocks that share a token's entries, of 16 heads
MOST_SPLITS = 64  # a multiple of a warp's lanes
MERGED_TOGETHER = 8  # parts that are asked for at once; divides 32
# Of a token that is dealt out, and of one of its parts: up to so many, its end is not looked for.
_FEW_SLOTS, _FEW_BLOCKS = 2048, 4
# In clock cycles of some 0.48 ns, fitted to times on an H200: a block of entries, what a tile costs
# beside them, and a head of it; the second launch for each eight parts, a head of a token there,
# and the bytes of sums that are written and read again while a multiprocessor's clock ticks; what
# two blocks that add their sums together cost; and a tile of 16 heads with entries as rows, each
# block of threads of its cluster, and a block of its entries.
_BLOCK_CYCLES, _TILE_CYCLES, _HEAD_CYCLES = 4153, 9647, 34
_ROUND_CYCLES, _ROW_CYCLES, _BYTES = 1766, 634, 37
_TOGETHER_CYCLES = 3575
_COLUMNS_CYCLES, _COLUMNS_OF_EACH, _COLUMN_BLOCK_CYCLES = 8133, 594, 3446
# Some parts of a token have a block of entries more than others. So much of the time goes by their
# mean, the rest by the largest: 16 parts of 18 blocks take less time than 9 of two each.
_MEAN = 0.49
# A head of a tile whose sums are stored where both multiprocessors of a pair are at work: 72 blocks
# of threads take 2 us longer than 64, with a third less to do.
_PAIR_CYCLES = 25
NARROW_CLUSTERS = (8, 9, 12, 16)  # blocks of a cluster of the narrow kernel
NARROW_STEPS = {32: 4, 64: 7}  # entries that it multiplies at a time, and how long it takes
# Up to so many clusters of that kernel: slots of a token up to which it is the best choice where
# nobody knows how many are used. Slots without an entry cost it a tenth of others; where all are
# used, parts that another launch adds take less time. More than 12 would share multiprocessors.
_MOST_SLOTS = {4: 8704, 12: 4352}


def code_bytes(plan: AttentionPlan | ColumnsPlan) -> int:
    """Of codes and tails that wait in shared memory."""
    rows = BLOCK // (8 * plan.expand_warps)
    pieces = NOPE // 64 * rows - plan.held + 2 * rows * plan.staged
    return pieces * 512 * plan.expand_warps


@dataclass(frozen=True)
class AttentionPlan:
    """A compiled form of the kernel.

    Attributes:
        split: Whether several blocks share a token and leave their sums for another launch.
        together: Whether two blocks share a token and each adds the sums of half of the dims.
        expand_warps: Warps that expand, 8 or 4. Eight are done with a stage sooner; beside four, a
            block of threads that has many tiles does more in the same time.
    """

    split: bool
    together: bool = False
    expand_warps: int = 8

    expanders = 1  # groups of warps that expand, each with blocks of entries of its own
    scan_bytes = 32  # of such a group: a number of each of up to eight warps
    fenced = False  # who multiplies fences, not who expands: that is a barrier of memory as well
    kernel = "dsv4.cute.sm90.attention:AttentionKernel"

    @property
    def held(self) -> int:
        """Groups of 64 codes of a lane that wait in registers; the others do in shared memory."""
        return 4 if self.expand_warps == 8 else 7

    @property
    def staged(self) -> bool:
        """Whether bfloat16 dims wait beside the codes; else they are asked for by a free stage."""
        return self.expand_warps == 8

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return 2 if self.together else 1

    @property
    def told(self) -> int:
        """Words that warps tell one another and keep, of sinks, angles and both blocks' sums."""
        return 4 * HEADS + CONSUMER_WARPS + ROPE + (8 * HEADS if self.together else 0)

    @property
    def threads(self) -> int:
        """Of a block: two warpgroups multiply, one or two expand."""
        return 32 * (CONSUMER_WARPS + self.expand_warps)

    @property
    def shared_bytes(self) -> int:
        """Queries, stages, weights, codes, what warpgroups tell one another, and barriers."""
        tiles = (1 + STAGES) * TILE_BYTES + WEIGHT_BYTES + code_bytes(self)
        return 1024 + tiles + 4 * self.told + STAGES * (INFO_BYTES + 24) + self.scan_bytes + 64


@dataclass(frozen=True)
class ColumnsPlan:
    """The kernel whose tiles have 16 heads, and entries as rows of both products.

    Attributes:
        blocks: Of a cluster, which share a token's entries.
    """

    blocks: int

    kernel = "dsv4.cute.sm90.attention_columns:ColumnsKernel"
    heads = 16  # of a tile
    expanders = 2  # groups of warps that expand, each with every other block of entries
    expand_warps = 4  # of such a group; another one multiplies
    held = 7  # groups of 64 codes of a lane that wait in registers; the others do in shared memory
    staged = False  # bfloat16 dims are asked for when a stage is free
    scan_bytes = 16  # of a group: a number of each warp
    fenced = True  # by who expands
    threads = 384

    @property
    def shared_bytes(self) -> int:
        """Stages, queries, weights, codes, statistics, descriptions and barriers."""
        tiles = STAGES * TILE_BYTES + self.heads * (DIMS + BLOCK) * 2
        statistics = self.heads * (4 * 4 + self.blocks * 8) + (self.heads + ROPE) * 4
        notes = STAGES * INFO_BYTES + self.expanders * self.scan_bytes
        return 1024 + tiles + self.expanders * code_bytes(self) + statistics + notes + 256


@dataclass(frozen=True)
class MergePlan:
    """The kernel that adds the sums of a token's blocks."""

    kernel = "dsv4.cute.sm90.attention_merge:MergeKernel"
    blocks = 1
    threads = DIMS // 8
    shared_bytes = 0


@dataclass(frozen=True)
class NarrowPlan:
    """The kernel for few tokens, a cluster of which has 16 heads of one.

    Attributes:
        blocks: Of a cluster, 8 to 16; not every GPU has room for as many clusters of more than 8.
        step: Entries that are multiplied at a time, 32 or 64.
    """

    blocks: int = 8
    step: int = 32

    kernel = "dsv4.cute.sm90.attention_narrow:NarrowKernel"
    heads = 16  # of a tile
    threads = 256
    stages = 3  # of codes
    ahead = 2  # steps whose codes are asked for while one is multiplied

    @property
    def owners(self) -> int:
        """Blocks of the cluster that add up and store."""
        return self.heads if self.blocks >= self.heads else 8

    @property
    def share(self) -> int:
        """Heads that each of them adds up and stores."""
        return self.heads // self.owners

    @property
    def stage_bytes(self) -> int:
        """Entries of a step and, once for every warp, their scales."""
        return self.step * (NOPE + 2 * ROPE + 32)

    @property
    def shared_bytes(self) -> int:
        """At least more than half, so that blocks are on different multiprocessors."""
        sums = self.blocks * self.share * PACKED_BYTES
        weighing = self.heads * (8 * 4 + 2) * self.step
        return max(128 * 1024, self.stages * self.stage_bytes + sums + weighing + 2048)


Plan = AttentionPlan | ColumnsPlan | MergePlan | NarrowPlan


@functools.cache
def choose(
    tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int
) -> tuple[AttentionPlan | ColumnsPlan | NarrowPlan, int]:
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
        few = narrow(widths, room)
        return few, few.blocks
    sizes = (tokens, heads, widths, multiprocessors)
    count = splits(*sizes)
    forms: list[tuple[float, AttentionPlan | ColumnsPlan, int]] = [
        (_cycles(count, *sizes), _alone(count, *sizes), count),
        (_together(*sizes), AttentionPlan(False, together=True), 2),
        *((_columns(b, *sizes), ColumnsPlan(b), b) for b in COLUMN_CLUSTERS),
    ]
    _, plan, count = min(forms, key=lambda form: form[0])
    return plan, count


def narrow(widths: tuple[int, int], room: Sequence[int]) -> NarrowPlan:
    """The form whose blocks' steps take the least time; of several the largest, else the smallest.

    Args:
        widths: Slots of a token, of either cache.
        room: Blocks of clusters that all fit at a time.
    """

    def cost(plan: NarrowPlan) -> tuple[int, bool, int]:
        steps = -(-_steps(widths, plan.step) // plan.blocks)
        return steps * NARROW_STEPS[plan.step], plan.blocks != NARROW_CLUSTERS[-1], plan.blocks

    return min((NarrowPlan(b, step) for b in room for step in NARROW_STEPS), key=cost)


def _alone(
    count: int, tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int
) -> AttentionPlan:
    """The form whose blocks of threads have no other's sums to add."""
    many = count == 1 and tokens * tiles(heads) > multiprocessors
    return AttentionPlan(count > 1, expand_warps=4 if many else 8)


def _together(tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int) -> float:
    """Cycles of two blocks to a tile, which add their sums; all of them at work at a time."""
    if 2 * tokens * tiles(heads) > multiprocessors or _blocks(widths) == 1:
        return float("inf")
    return _tile(heads) + -(-_blocks(widths) // 2) * _BLOCK_CYCLES + _TOGETHER_CYCLES


def _columns(
    blocks: int, tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int
) -> float:
    """Cycles of tiles of 16 heads, each of which is dealt out to so many blocks of threads."""
    items = tokens * -(-heads // ColumnsPlan.heads)
    # Larger clusters leave some multiprocessors of a group of 16 or 18 without any.
    room = multiprocessors // blocks if blocks < 4 else multiprocessors * 10 // 11 // blocks
    if blocks > 1 and items > room:
        return float("inf")
    beside = _COLUMNS_CYCLES + _COLUMNS_OF_EACH * blocks
    each = beside + -(-_blocks(widths) // blocks) * _COLUMN_BLOCK_CYCLES
    return -(-items // room) * each


def is_narrow(tokens: int, heads: int, widths: tuple[int, int]) -> bool:
    """Whether tiles of 16 heads take less time than larger ones."""
    clusters = tokens * -(-heads // NarrowPlan.heads)
    most = next((slots for room, slots in _MOST_SLOTS.items() if clusters <= room), -1)
    return sum(widths) <= most


def _steps(widths: tuple[int, int], step: int) -> int:
    """Of so many entries, of the narrow kernel."""
    return sum(-(-width // step) for width in widths)


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
    most = max(1, min(MOST_SPLITS, _blocks(widths), 2 * multiprocessors // programs))
    sizes = (tokens, heads, widths, multiprocessors)
    return min(range(1, most + 1), key=lambda count: _cycles(count, *sizes))


def _cycles(
    count: int, tokens: int, heads: int, widths: tuple[int, int], multiprocessors: int
) -> float:
    programs = tokens * tiles(heads)
    rounds = -(-programs * count // multiprocessors)
    blocks = _blocks(widths)
    each = (1 - _MEAN) * -(-blocks // count) + _MEAN * blocks / count
    alone = rounds * (_tile(heads) + each * _BLOCK_CYCLES)
    if count == 1:
        return alone
    stored = min(heads, HEADS)
    if 2 * programs * count > multiprocessors:
        alone += _PAIR_CYCLES * stored
    moved = PACKED_BYTES * stored * programs * count / _BYTES
    merged = _ROUND_CYCLES * -(-count // MERGED_TOGETHER)
    return alone + merged + (moved + _ROW_CYCLES * tokens * heads) / multiprocessors


def _tile(heads: int) -> int:
    """Cycles of a tile of 64 heads beside its entries; of fewer, less is stored."""
    return _TILE_CYCLES + _HEAD_CYCLES * min(heads, HEADS)


def is_scanned(count: int, widths: tuple[int, int]) -> bool:
    """Whether a block of threads that has a ``count``-th of a token looks for its last slot.

    That takes microseconds where slots are many, and saves steps without any entry behind it.
    """
    return count == 1 or (sum(widths) > _FEW_SLOTS and _blocks(widths) > _FEW_BLOCKS * count)


def _blocks(widths: tuple[int, int]) -> int:
    """Blocks of entries of a token."""
    return max(1, sum(-(-width // BLOCK) for width in widths))


def tiles(heads: int) -> int:
    """Tiles of a token's heads."""
    return -(-heads // HEADS)
