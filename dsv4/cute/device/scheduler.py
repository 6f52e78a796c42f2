"""Tile scheduler: the order in which persistent CTAs visit the output tiles of a GEMM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
