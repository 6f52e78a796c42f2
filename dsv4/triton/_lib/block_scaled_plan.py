"""Tiles of the GEMMs of ``dsv4.triton.gemm_nvfp4`` and ``grouped_nvfp4``; needs no compiler.

Chosen by computation, not measured: no such GPU was there. With few tokens a GEMM is bound by
reading the weight, so a program has few rows and there are many programs. With many, the tensor
cores bound it, and a tile is as large as registers allow.

Plans depend on powers of two of tokens and on token tiles, so that the steps that
``dsv4.compilation`` runs launch every kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

_MOST_TOKENS = 128
_LEAST_TOKENS = 8  # columns of one instruction
_ROWS = (128, 64, 32, 16)
_STAGES = 4


@dataclass(frozen=True)
class BlockScaledPlan:
    """Tiling of one GEMM.

    Attributes:
        rows: Rows of the weight in one program.
        tokens: Tokens in one program.
        columns: Columns of a step.
        warps: Warps of a program.
        stages: Pipeline stages.
    """

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int = _STAGES


def _plan(rows: int, tokens: int, columns: int) -> BlockScaledPlan:
    """Return the plan of a tile; 32 to 64 sums a thread, where the tile is large enough."""
    warps = 8 if rows * tokens >= 1 << 14 else 4 if rows * tokens >= 1 << 10 else 2
    step = 64 if columns % 128 else 256 if tokens <= 16 and not columns % 256 else 128
    return BlockScaledPlan(rows, tokens, step, warps)


@functools.lru_cache(maxsize=4096)
def dense_plan(rows: int, columns: int, tokens: int, groups: int, sms: int) -> BlockScaledPlan:
    """Choose the largest tile that gives every SM a program, or else the smallest.

    Args:
        rows: Rows of one group.
        columns: A multiple of 64.
        tokens: At least 1.
        groups: Groups of rows with tokens of their own.
        sms: SMs of the GPU.
    """
    wide = min(_MOST_TOKENS, max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length()))
    copies = groups * -(-tokens // wide)
    enough = (high for high in _ROWS if -(-rows // high) * copies >= sms)
    return _plan(next(enough, _ROWS[-1]), wide, columns)


@functools.lru_cache(maxsize=4096)
def grouped_plan(columns: int, rows: int, experts: int) -> BlockScaledPlan:
    """Choose tiles for ``rows`` rows of x that are spread over ``experts`` experts.

    Results are right for any routing; the plan assumes a uniform one.
    """
    mean = rows / experts
    steps = ((4, 8), (10, 16), (24, 32), (80, 64))
    wide = next((tokens for most, tokens in steps if mean <= most), _MOST_TOKENS)
    return _plan(64 if wide <= 16 else 128, wide, columns)
