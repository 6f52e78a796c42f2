"""Which configuration of the kernel in ``grouped`` a product takes; needs no compiler."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

from dsv4.cute.grouped_problem import MOST_EXPERTS, Experts, counted_as, expected_tiles
from dsv4.cute.sm100 import plans as _plans
from dsv4.cute.sm100.dense_plan import (
    COPY_WARP,
    ROWS,
    STEP,
    TOKEN_BLOCKS,
    Box,
    DensePlan,
    code_box,
    scale_box,
)

TURN_WARP, CLEAR_WARP = COPY_WARP + 1, COPY_WARP + 2
AHEAD = 4  # stages whose scales are asked for at a time: 64 bytes of a row
SCALE_BYTES = STEP // 16  # of a row, in a stage
_FEW_ROUNDS = 8  # up to which the last one counts as a whole


@dataclass(frozen=True)
class GroupedPlan(DensePlan):
    """One configuration of the kernel; ``parts`` is 1.

    Attributes:
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        quantized_out: Whether results are NVFP4: codes, block scales, scales of rows.
        swizzled_out: Whether those block scales are swizzled, by expert.
    """

    row_weighted: bool = False
    quantized_out: bool = False
    swizzled_out: bool = False

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm100.grouped:GroupedKernel"

    @property
    def threads(self) -> int:
        """Threads of a block: beside a dense one's, a warp of scales and one that clears."""
        return super().threads + 64

    @property
    def copied_bytes(self) -> int:
        """Bytes of a stage that tensor copies bring: all but the tokens' scales."""
        return self.stage_bytes - self.token_scale_bytes

    @property
    def table_bytes(self) -> int:
        """Room for the experts' first tiles and rows."""
        return 8 * (MOST_EXPERTS + 2)

    @property
    def shared_scales(self) -> bool:
        """Whether blocks of the cluster copy scales for each other: never."""
        return False

    @property
    def full_arrivals(self) -> int:
        """Arrivals that fill a stage: of the copies, and of each block's warp of scales."""
        return 1 + self.pair

    @property
    def tile_bytes(self) -> int:
        """Bytes of a token's results, or their codes, in 16 rows."""
        if self.quantized_out:
            return self.tile_outputs // 2
        return self.tile_outputs * (4 if self.float32_out else 2)

    def operands(self, rows: int, columns: int, tokens: int, experts: int) -> tuple[Box, Box, Box]:
        """Codes and scales of all experts' weights, codes of the rows of X."""
        return (
            code_box(experts * rows, columns, ROWS),
            scale_box(experts * -(-rows // ROWS), columns, (1, 4)),
            code_box(tokens, columns, self.own_tokens),
        )

    # What follows is arithmetic on Python's numbers as well as on a kernel's.

    def expert_place(self, row_block: Any, rank: Any, k: Any, expert: Any, rows: Any) -> Any:
        """Where a stage of the block's rows of an expert begins, as ``row_place`` says it."""
        (row, byte), (tile, block) = self.row_place(row_block, rank, k)
        tiles = (rows + ROWS - 1) // ROWS
        return (expert * rows + row, byte), (expert * tiles + tile, block)

    def sorted_place(self, start: Any, rank: Any, k: Any) -> tuple[Any, Any]:
        """Where the codes begin that a block copies of the tile whose first row is ``start``."""
        return start + rank * self.own_tokens, k * (STEP // 2)


@functools.lru_cache(maxsize=1 << 14)
def choose(wanted: Experts, tokens: int) -> GroupedPlan | None:
    """The configuration for a number of rows of X, None if there is none.

    How many of them each expert has is known on the GPU alone, so the choice supposes that they
    were drawn uniformly; the result is right for any routing.
    """
    return _chosen(wanted, counted_as(tokens))


@functools.cache
def _chosen(wanted: Experts, tokens: int) -> GroupedPlan | None:
    if wanted.experts > MOST_EXPERTS or wanted.columns % STEP:
        return None
    return min(candidates(wanted), key=lambda plan: _cycles(plan, wanted, tokens))


def candidates(wanted: Experts) -> list[GroupedPlan]:
    """Every configuration that can multiply."""
    return [
        GroupedPlan(
            *how,
            wanted.float32_out,
            wanted.swiglu,
            row_weighted=wanted.row_weighted,
            quantized_out=wanted.quantized_out,
            swizzled_out=wanted.swizzled_out,
        )
        for how in itertools.product(TOKEN_BLOCKS, (1, 2))
    ]


def plans(wanted: Experts, max_tokens: int) -> list[GroupedPlan]:
    """The configurations taken for 1 to ``max_tokens`` rows of X, each once."""
    stand, tokens = [], 1
    while tokens < max_tokens:
        stand.append(tokens)
        tokens = counted_as(tokens + 1)
    found = (choose(wanted, count) for count in [*stand, max_tokens])
    return list(dict.fromkeys(plan for plan in found if plan is not None))


def _cycles(plan: GroupedPlan, wanted: Experts, tokens: int) -> float:
    """Estimated cycles: tiles of all experts, in rounds while there are few."""
    of_tokens = wanted.experts * expected_tiles(tokens / wanted.experts, plan.token_block)
    tiles = of_tokens * -(-wanted.rows // plan.rows)
    rounds = tiles / (_plans.PROCESSORS // plan.blocks)
    if rounds < _FEW_ROUNDS:
        rounds = math.ceil(rounds)
    return _plans.cycles_of(plan, rounds, tiles, plan.steps(wanted.columns))
