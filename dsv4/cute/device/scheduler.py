"""Tile scheduler: the order in which persistent CTAs visit the output tiles of a GEMM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Experts have few tiles of tokens; this is a multiple of 1, 2, 3, 4 and 6.
_TILE_COUNTS = 12


def tile_position(
    tile: Any, order: tuple[Any, Any, Any], least: Callable[[Any, Any], Any] = min
) -> tuple[Any, Any]:
    """Block of rows and tile of tokens of the ``tile``-th output tile.

    Tiles go by spans of tokens, within a span by blocks of rows, within these by tokens. So CTAs
    that run at the same time read few rows and few tokens, which stay in L2.

    Python's numbers as well as a kernel's, hence no types.

    Args:
        tile: Number of the tile, from 0.
        order: Tiles of tokens; of these, how many make a span; and blocks of rows.
        least: Minimum of two numbers: Python's, or ``cutlass.min``.
    """
    token_tiles, span, row_blocks = order
    begin = tile // (span * row_blocks) * span
    rest = tile - begin * row_blocks
    width = least(span, token_tiles - begin)
    row_block = rest // width
    return row_block, begin + rest - row_block * width


def next_tile(tile: Any, ctas: Any) -> Any:
    """Number of the tile of an expert that a persistent CTA takes after ``tile``.

    In every round each CTA takes one of the next ``ctas`` tiles. An expert's last tile of tokens
    has fewer rows, so it takes less time. Tiles of tokens follow one another. If a CTA took the
    tile that is ``ctas`` further, on a GPU of 132 SMs it would get the same tile of tokens of every
    expert that has 2, 3, 4 or 6 of them: some CTAs only the full ones. So CTAs change places: the
    next tile is 1 modulo ``_TILE_COUNTS`` further, except where it wraps around.

    Python's numbers as well as a kernel's, hence no types.

    Args:
        tile: Number of the tile, from 0.
        ctas: Number of CTAs.
    """
    shift = (_TILE_COUNTS + 1 - ctas % _TILE_COUNTS) % _TILE_COUNTS
    return (tile // ctas + 1) * ctas + (tile % ctas + shift) % ctas
