"""Which kernel a product takes, in which configuration; needs no compiler.

That for few tokens runs on every architecture, that for many is Hopper's alone (``wgmma``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.sm90.gemm_small_m_plan import TOKENS, SmallMPlan, is_measured, small_m_plan
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan, wgmma_plan

Plan = SmallMPlan | WgmmaPlan
# The kernel for few tokens is the faster one up to 8, and up to 16 for small matrices.
_FEW_TOKENS = 8
_SMALL = 24 << 20  # weights


class Product(NamedTuple):
    """What a kernel depends on beside the number of tokens.

    Attributes:
        rows: N, of all groups; a multiple of 16 in each.
        columns: K, a multiple of 64.
        groups: Groups of rows with an input each.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every token has a scale of its own (quantised activations).
        swiglu: Whether rows are gate and up in turn, and the result is their SwiGLU.
    """

    rows: int
    columns: int
    groups: int
    float32_out: bool
    row_scaled: bool
    swiglu: bool = False


@functools.lru_cache(maxsize=1 << 16)
def choose(product: Product, tokens: int, arch: str = HOPPER) -> Plan | None:
    """The configuration for a number of tokens; None if there is none.

    A ``SmallMPlan`` for more than ``TOKENS`` tokens means as many launches as it takes.
    """
    few = _few(product, min(tokens, TOKENS))
    if arch != HOPPER:
        return few
    if few is not None and tokens <= (TOKENS if _takes_sixteen(product) else _FEW_TOKENS):
        return few
    return _many(product, counted_as(tokens)) or few


def counted_as(tokens: int) -> int:
    """The number of tokens that stands for this one: steps of 16, 64 and 512, at most 8192.

    So that few configurations have to be compiled.
    """
    for most, step in ((256, 16), (1024, 64), (8192, 512)):
        if tokens <= most:
            return -(-tokens // step) * step
    return 8192


def token_counts(most: int) -> list[int]:
    """Numbers of tokens that stand for all from 1 to ``most``."""
    stand = {counted_as(tokens) for tokens in range(TOKENS + 1, min(most, 8192) + 1)}
    return [*range(1, min(most, TOKENS) + 1), *sorted(stand)]


def _takes_sixteen(product: Product) -> bool:
    """Whether few tokens means 16: in small matrices, and where that was measured."""
    if product.rows * product.columns <= _SMALL:
        return True
    tiles = product.rows // 16
    kind = (product.float32_out, product.row_scaled)
    return is_measured(tiles, tiles // product.groups, product.columns, TOKENS, *kind)


@functools.cache
def _few(product: Product, tokens: int) -> SmallMPlan | None:
    tiles = product.rows // 16
    plan = small_m_plan(
        tiles,
        tiles // product.groups,
        product.columns,
        tokens,
        product.float32_out,
        product.row_scaled,
    )
    return plan and dataclasses.replace(plan, swiglu=product.swiglu)


@functools.cache
def _many(product: Product, tokens: int) -> WgmmaPlan | None:
    plan = wgmma_plan(
        product.rows,
        product.rows // product.groups,
        product.columns,
        tokens,
        product.float32_out,
        product.row_scaled,
    )
    return plan and dataclasses.replace(plan, swiglu=product.swiglu)
