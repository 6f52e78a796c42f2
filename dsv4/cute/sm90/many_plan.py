"""Which configuration of the kernel in ``many`` a product takes; needs no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

_SHARED_ROOM = 227 * 1024
_MOST_STAGES = 12
_PRIMED_BYTES = 36 * 1024
# Of a thread that multiplies, and of one that copies, by warpgroups.
_REGISTERS = {2: 232, 3: 152, 4: 112}
_COPY_REGISTERS = {2: 40, 3: 40, 4: 32}
_RESIDENT = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}  # clusters on an H200, by blocks
LINE = 144  # bytes from one token's 64 rows to the next where results are turned, padded
# Tokens of a tile, warpgroups, tiles of 16 rows of a warp, and blocks of 64 columns of a stage:
# those that are the fastest somewhere.
_SHAPES = (
    (32, 2, 1, 2),
    (32, 2, 2, 2),
    (32, 4, 2, 2),
    (64, 2, 1, 2),
    (64, 4, 1, 2),
    (96, 2, 1, 2),
    (128, 2, 1, 2),
    (128, 2, 2, 2),
    (128, 3, 1, 2),
    (192, 2, 1, 1),
    (256, 2, 1, 1),
)


@dataclass(frozen=True)
class ManyPlan:
    """One configuration of the kernel.

    A stage has ``depth`` blocks of 64 columns, 1 or 2, of X and of the weights; ``K / 64`` is a
    multiple of ``depth`` and at least ``blocks depth``.

    Attributes:
        token_block: Tokens of a tile, a multiple of 8, at most 256.
        warpgroups: Warpgroups that multiply, 2 to 4.
        blocks: Blocks of a cluster, which share K, at most 8.
        depth: See above.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every token has a scale of its own (quantised activations).
        swiglu: Whether rows are gate and up in turn, and the result is their SwiGLU.
        tiles: Tiles of 16 rows of a warp: 1, 2 or, for routed experts, 4.
    """

    token_block: int
    warpgroups: int
    blocks: int
    depth: int
    float32_out: bool
    row_scaled: bool
    swiglu: bool = False
    tiles: int = 1

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.many:ManyKernel"

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 64 * self.warpgroups * self.tiles

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of a block."""
        return self.mma_warps * self.tiles

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens that a product can have, ascending."""
        return (self.token_block,)

    @property
    def box(self) -> int:
        """Tokens that are copied at a time."""
        return self.token_block

    @property
    def ahead(self) -> int:
        """Blocks of 64 columns whose weights registers hold ahead."""
        return self.depth if self.tiles == 1 else 1

    @property
    def x_bytes(self) -> int:
        """Bytes of 64 columns of a tile's X."""
        return self.token_block * 128

    @property
    def code_bytes(self) -> int:
        """Codes of 16 rows in a stage."""
        return 512 * self.depth

    @property
    def scale_bytes(self) -> int:
        """Scales of 16 rows in a stage."""
        return 64 * self.depth

    @property
    def weight_bytes(self) -> int:
        """Codes and scales of a stage."""
        return self.row_tiles * (self.code_bytes + self.scale_bytes)

    @property
    def stage_bytes(self) -> int:
        """X, weights and barriers of a stage."""
        return self.depth * self.x_bytes + self.weight_bytes + 16

    @property
    def exchanged_bytes(self) -> int:
        """Room for the sums of all blocks of a cluster that one of them adds."""
        own = -(-self.token_block // 8 // self.blocks)
        return self.blocks * own * 8 * self.rows * 4

    @property
    def beside_bytes(self) -> int:
        """Shared memory beside stages and results: barriers of sums that blocks exchange."""
        return 16

    @property
    def turned_tiles(self) -> int:
        """Tiles of 8 tokens that are turned at a time."""
        return 4

    @property
    def rooms(self) -> int:
        """Rooms of a warpgroup in which results are turned: of two, one is read meanwhile."""
        return 2

    @property
    def turned_bytes(self) -> int:
        """The warpgroups' rooms."""
        lines = min(8 * self.turned_tiles, self.token_block)
        return self.warpgroups * self.rooms * lines * LINE

    @property
    def stages(self) -> int:
        """Stages of X and the weights; sums of other blocks lie in the same room afterwards."""
        room = _SHARED_ROOM - 1024 - self.turned_bytes - self.beside_bytes
        return min(_MOST_STAGES, room // self.stage_bytes)

    @property
    def primed(self) -> int:
        """Stages whose weights are asked for before the kernel before has ended.

        No more than memory delivers meanwhile: the first columns of X wait for all of them.
        """
        return min(self.stages, max(1, _PRIMED_BYTES // self.weight_bytes))

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply and one warpgroup that copies."""
        return 128 * (self.warpgroups + 1)

    @property
    def mma_warps(self) -> int:
        """Warps that multiply."""
        return 4 * self.warpgroups

    @property
    def mma_registers(self) -> int:
        """Registers of a thread that multiplies."""
        return _REGISTERS[self.warpgroups]

    @property
    def copy_registers(self) -> int:
        """Registers of a thread that copies."""
        return _COPY_REGISTERS[self.warpgroups]

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; 1024 to begin at a multiple of it."""
        return 1024 + self.stages * self.stage_bytes + self.turned_bytes + self.beside_bytes


def many_plan(
    rows: int,
    group_rows: int,
    columns: int,
    tokens: int,
    float32_out: bool,
    row_scaled: bool,
) -> ManyPlan | None:
    """The configuration that ``estimated_cycles`` calls the fastest, or None if there is none.

    Args:
        rows: N, of all groups, a multiple of 16 in each.
        group_rows: Rows that share an input.
        columns: K, a multiple of 64.
        tokens: At least 1.
        float32_out: Whether the result is float32.
        row_scaled: Whether every token has a scale.
    """
    return min(
        candidates(rows, group_rows, columns, tokens, float32_out, row_scaled),
        key=lambda plan: estimated_cycles(plan, rows, columns, tokens),
        default=None,
    )


def candidates(
    rows: int,
    group_rows: int,
    columns: int,
    tokens: int,
    float32_out: bool,
    row_scaled: bool,
) -> Iterator[ManyPlan]:
    """Every configuration that can multiply; arguments as in ``many_plan``."""
    if columns % 128:
        return
    for shape, blocks in itertools.product(_SHAPES, _RESIDENT):
        token_block, warpgroups, tiles, depth = shape
        plan = ManyPlan(
            token_block, warpgroups, blocks, depth, float32_out, row_scaled, tiles=tiles
        )
        whole = rows == group_rows or group_rows % plan.rows == 0
        steps = columns // 64 // depth
        if not whole or steps < blocks or token_block > 2 * max(tokens, 16):
            continue
        if blocks == 1 or plan.exchanged_bytes <= plan.stages * (plan.stage_bytes - 16):
            yield plan


def estimated_cycles(plan: ManyPlan, rows: int, columns: int, tokens: int) -> float:
    """Cycles that a product takes: rounds of tiles of so many steps.

    Its constants are fitted to times on an H200; it is there to rank configurations.
    """
    tiles = -(-rows // plan.rows) * -(-tokens // plan.token_block)
    rounds = -(-tiles // _RESIDENT[plan.blocks])
    steps = -(-columns // 64 // plan.blocks)
    results = plan.token_block * plan.rows / 64
    tile = 1470 + steps * step_cycles(plan, min(1.0, tiles * plan.blocks / 132)) + 9.19 * results
    tile += 1900 * (plan.tiles - 1)
    if plan.blocks > 1:
        tile += 640 + 12.3 * results * (plan.blocks - 1) / plan.blocks + 5470
        return 9100 - 5470 + rounds * tile
    return 9100 + rounds * tile


def step_cycles(plan: ManyPlan, active: float) -> float:
    """Cycles of a block of 64 columns, in all warpgroups of a block.

    Bound by instructions, by the tensor cores, or by a warp's own way through both; and what comes
    through the level-2 cache takes its part.

    Args:
        plan: The configuration.
        active: Share of the processors that have a block.
    """
    units = plan.rows // 64
    busy = max(
        units * (107 + 1.14 * plan.token_block),
        units * 2.08 * plan.token_block,
        280 + 1.59 * plan.token_block,
    )
    return busy + active * (0.00415 * plan.x_bytes + 0.00376 * 36 * plan.rows)
