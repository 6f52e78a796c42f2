"""Which configuration of the kernel in ``many`` a product takes; needs no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

_SHARED_ROOM = 220 * 1024
_STAGES = 12
_TOKEN_BLOCKS = (16, 32, 48, 64, 128, 256)
# Of a thread that multiplies, and of one that copies, by warpgroups.
_REGISTERS = {2: 232, 3: 152, 4: 112}
_COPY_REGISTERS = {2: 40, 3: 40, 4: 32}
_RESIDENT = {1: 132, 2: 66, 4: 30, 8: 15}  # clusters that an H200 holds at a time, by blocks
_AHEAD = 8
LINE = 144  # bytes from one token's 64 rows to the next where results are turned, padded


@dataclass(frozen=True)
class ManyPlan:
    """One configuration of the kernel.

    Attributes:
        token_block: Tokens of a tile, a multiple of 8 ``blocks``, at most 256.
        warpgroups: Warpgroups that multiply, 64 rows each, 2 to 4.
        blocks: Blocks of a cluster, which share K.
        depth: Blocks of 64 columns that are loaded ahead into registers, six words each; even, and
            ``K / 64`` is a multiple of ``blocks depth``.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every token has a scale of its own (quantised activations).
        swiglu: Whether rows are gate and up in turn, and the result is their SwiGLU.
    """

    token_block: int
    warpgroups: int
    blocks: int
    depth: int
    float32_out: bool
    row_scaled: bool
    swiglu: bool = False

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.many:ManyKernel"

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 64 * self.warpgroups

    @property
    def x_bytes(self) -> int:
        """Bytes of one stage of X."""
        return self.token_block * 128

    @property
    def turned_bytes(self) -> int:
        """Room in which the warpgroups turn some of their results."""
        return self.warpgroups * min(8 * self.turned_tiles, self.token_block) * LINE

    @property
    def turned_tiles(self) -> int:
        """Tiles of 8 tokens that are turned at a time."""
        return 8

    @property
    def stages(self) -> int:
        """Stages of X; the sums of a block's part of K lie in the same room afterwards."""
        most = (_SHARED_ROOM - self.turned_bytes) // self.x_bytes
        sums = self.token_block * self.rows * 4 if self.blocks > 1 else 0
        return min(most, max(_STAGES, -(-sums // self.x_bytes)))

    @property
    def sets(self) -> int:
        """Sets of left operands in registers, of 64 columns each."""
        return 1 if self.warpgroups == 4 else 2

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
        return 1024 + self.stages * (self.x_bytes + 16) + self.turned_bytes


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
    token_blocks: tuple[int, ...] = _TOKEN_BLOCKS,
) -> Iterator[ManyPlan]:
    """Every configuration that can multiply; arguments as in ``many_plan``."""
    # Beside weights, registers hold the sums, sets of left operands, and what the results need.
    spare = 40 if float32_out or row_scaled else 32
    sizes = [block for block in token_blocks if block <= 2 * max(tokens, 16)]
    for token_block, warpgroups, blocks in itertools.product(sizes, _REGISTERS, _RESIDENT):
        held = token_block // 2 + (32 if warpgroups < 4 or blocks > 1 else 24)
        room = _REGISTERS[warpgroups] - held - spare
        depth = depth_of(columns // 64, blocks, min(room // 6, 1024 // token_block))
        whole = rows == group_rows or group_rows % (64 * warpgroups) == 0
        if depth and whole and token_block % (8 * blocks) == 0:
            yield ManyPlan(token_block, warpgroups, blocks, depth, float32_out, row_scaled)


def depth_of(steps: int, blocks: int, most: int) -> int:
    """Blocks of K to load ahead: even, a divisor of a part's; 0 if there is none."""
    fitting = (n for n in range(min(_AHEAD, most), 1, -1) if n % 2 == steps % (blocks * n) == 0)
    return next(fitting, 0)


def estimated_cycles(plan: ManyPlan, rows: int, columns: int, tokens: int) -> float:
    """Cycles that a product takes: rounds of tiles of so many steps.

    Its constants are fitted to times on an H200; it is there to rank configurations.
    """
    tiles = -(-rows // plan.rows) * -(-tokens // plan.token_block)
    rounds = -(-tiles // _RESIDENT[plan.blocks])
    active = min(1.0, tiles * plan.blocks / 132)
    step = step_cycles(plan, active)
    results = plan.token_block * plan.warpgroups
    tile = 371 + columns // 64 // plan.blocks * step + 10.3 * results
    if plan.blocks > 1:
        tile += 2020 + 16.5 * results
        return 2700 + rounds * tile + (rounds - 1) * 4120
    return 2700 + rounds * tile


def step_cycles(plan: ManyPlan, active: float) -> float:
    """Cycles of a block of 64 columns, in all warpgroups of a block.

    Bound by the tensor cores, by a warp's own expansion of its weights (latency) or that of all
    (issue), by what the level-2 cache delivers of X and the weights, or by the weights alone.

    Args:
        plan: The configuration.
        active: Share of the processors that have a block.
    """
    late = 1.12 if plan.depth == 2 else 1.0
    weights = 36 * plan.rows
    return max(
        plan.warpgroups * (1.92 * plan.token_block + 16),
        late * 345,
        late * 156 * plan.warpgroups,
        0.0262 * active * (plan.x_bytes + weights),
        0.0765 * active * weights,
    )
