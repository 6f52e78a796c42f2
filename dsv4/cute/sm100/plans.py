"""Which configuration of Blackwell's kernels a product takes; needs no compiler."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from dsv4.cute.sm100.dense_plan import PARTS, ROWS, STEP, TOKEN_BLOCKS, DensePlan

# Of a B200, from its documentation: nothing here was measured. Codes that a processor's tensor core
# multiplies in a cycle, bytes that the level-2 cache gives it, and that memory gives all.
PROCESSORS = 148
_PRODUCTS = 16384
_CACHE_BYTES = 64
_MEMORY_BYTES = 4300
_FEWEST, _MOST_TOKENS = 64, 8192
# Cycles: of a launch, a tile's first stage, 32 tokens' results, and adding what others have.
_LAUNCH, _FILL, _CHUNK, _TOGETHER = 3000, 1500, 350, 2500


class Product(NamedTuple):
    """What a kernel depends on beside the number of tokens.

    Attributes:
        rows: N, of all groups; a multiple of 16.
        columns: K, a multiple of 32.
        groups: Groups of rows with an input each, of 128 rows or a multiple each if several.
        float32_out: Whether the result is float32, else bfloat16.
        swiglu: Whether rows are gate and up in turn, and the result is their SwiGLU.
    """

    rows: int
    columns: int
    groups: int
    float32_out: bool
    swiglu: bool = False


def choose(product: Product, tokens: int) -> DensePlan:
    """The configuration for a number of tokens, that ``estimated_cycles`` calls the fastest.

    It depends on tiles of 64 tokens, and above 8192 tokens on nothing more.
    """
    return _choose(product, min(-(-tokens // _FEWEST) * _FEWEST, _MOST_TOKENS))


@functools.lru_cache(maxsize=1 << 16)
def _choose(product: Product, tokens: int) -> DensePlan:
    return min(candidates(product), key=lambda plan: estimated_cycles(plan, product, tokens))


def candidates(product: Product) -> list[DensePlan]:
    """Every configuration that can multiply."""
    blocks = (1, 2) if product.rows // product.groups % (2 * ROWS) == 0 else (1,)
    if product.groups == 1:
        blocks = (1, 2)
    kind = (product.float32_out, product.swiglu)
    found = [DensePlan(*how, *kind) for how in itertools.product(TOKEN_BLOCKS, blocks)]
    shares = [parts for parts in PARTS if parts <= -(-product.columns // STEP)]
    return found + [DensePlan(_FEWEST, parts, *kind, parts) for parts in shares]


def plans(product: Product, max_tokens: int) -> list[DensePlan]:
    """The configurations that a product takes for 1 to ``max_tokens`` tokens, each once."""
    steps = range(_FEWEST, min(max_tokens, _MOST_TOKENS) + _FEWEST, _FEWEST)
    return list(dict.fromkeys(choose(product, tokens) for tokens in steps))


def estimated_cycles(plan: DensePlan, product: Product, tokens: int) -> float:
    """Cycles that a product takes: rounds of tiles. It is there to rank configurations.

    A stage takes as long as the tensor core multiplies, or as its bytes take to come.
    """
    tiles = -(-tokens // plan.token_block) * -(-product.rows // plan.rows)
    rounds = -(-tiles // (PROCESSORS // plan.blocks))
    return cycles_of(plan, rounds, tiles, plan.steps(product.columns))


def cycles_of(plan: DensePlan, rounds: float, tiles: float, steps: int) -> float:
    """Cycles of so many rounds of so many tiles, of so many stages each."""
    busy = min(tiles, PROCESSORS // plan.blocks) * plan.blocks
    stage = max(
        ROWS * plan.token_block * STEP / _PRODUCTS,
        plan.stage_bytes / _CACHE_BYTES,
        busy * (plan.row_code_bytes + plan.row_scale_bytes) / _MEMORY_BYTES,
    )
    results = plan.chunks * _CHUNK
    steps = -(-steps // plan.parts)
    if plan.parts > 1:
        return _LAUNCH + rounds * (_FILL + steps * stage + _TOGETHER + results)
    return _LAUNCH + _FILL + rounds * max(steps * stage, results) + results
