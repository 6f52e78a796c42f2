"""Which configuration of the kernel in ``many_fp8`` a product takes; needs no compiler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dsv4.cute.sm90.many_plan import PROCESSORS, RESIDENT, ManyPlan
from dsv4.cute.sm90.plans import Product, counted_as

BLOCK = 128  # rows, and columns, that share a scale
# Warpgroups, and tokens of a tile: two sets of sums, and operands, are what registers hold.
_SHAPES = (
    (2, (16, 32, 64, 96, 128, 160)),
    (4, (16, 32)),
)


@dataclass(frozen=True)
class ManyFp8Plan(ManyPlan):
    """One configuration: ``ManyPlan`` with a depth of 2, so that a stage has one scale."""

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.many_fp8:ManyFp8Kernel"

    @property
    def piece(self) -> int:
        """Steps of 16 columns that are expanded, and then multiplied, at a time."""
        return 2

    @property
    def weight_bytes(self) -> int:
        """Codes of a stage."""
        return self.rows * BLOCK


@functools.cache
def fp8_plan(product: Product, tokens: int) -> ManyFp8Plan | None:
    """The configuration that ``estimated_cycles`` calls the fastest, or None if there is none.

    Args:
        product: Its columns a multiple of 128; no SwiGLU.
        tokens: At least 1.
    """
    counted = counted_as(tokens)
    return min(
        candidates(product, counted),
        key=lambda plan: estimated_cycles(plan, product, counted),
        default=None,
    )


def candidates(product: Product, tokens: int) -> Iterator[ManyFp8Plan]:
    """Every configuration that can multiply; arguments as in ``fp8_plan``."""
    group_rows, kind = product.rows // product.groups, (product.float32_out, product.row_scaled)
    if product.columns % BLOCK or group_rows % 16:
        return
    shapes = ((shape[0], token_block) for shape in _SHAPES for token_block in shape[1])
    for (warpgroups, token_block), blocks in itertools.product(shapes, RESIDENT):
        plan = ManyFp8Plan(token_block, warpgroups, blocks, 2, *kind)
        whole = product.groups == 1 or group_rows % plan.rows == 0
        if not whole or product.columns // BLOCK < blocks or token_block > 2 * max(tokens, 16):
            continue
        stages = plan.stages * (plan.stage_bytes - 16)
        if blocks == 1 or plan.apart or plan.exchanged_bytes <= stages:
            yield plan


def estimated_cycles(plan: ManyFp8Plan, product: Product, tokens: int) -> float:
    """Cycles that a product takes: rounds of tiles of so many steps of 128 columns.

    Its constants are fitted to times on an H200; it is there to rank configurations.
    """
    tiles = -(-product.rows // plan.rows) * -(-tokens // plan.token_block)
    rounds = -(-tiles // RESIDENT[plan.blocks])
    steps = -(-product.columns // BLOCK // plan.blocks)
    results = plan.token_block * plan.rows / 64
    active = min(1.0, tiles * plan.blocks / PROCESSORS)
    busy = max(plan.warpgroups * (380 + 1.39 * plan.token_block), 896 + 0.64 * plan.token_block)
    busy += active * 0.0101 * (plan.weight_bytes + 2 * plan.x_bytes)
    tile = 2570 + 1.33 * results / plan.blocks + steps * busy
    tile += 31.7 * results * (plan.blocks - 1) / plan.blocks
    cycles = 2420 + rounds * tile
    return cycles + 9440 * (rounds - 1) if plan.blocks > 1 else cycles
