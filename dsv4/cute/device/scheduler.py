"""In which order tiles follow one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def place(tile: Any, order: Any, least: Callable[[Any, Any], Any] = min) -> tuple[Any, Any]:
    """Block of rows and tile of tokens: spans of tokens, in them rows, in them tokens.

    So that what runs at a time reads few rows and few tokens, from the level-2 cache.

    Args:
        tile: From 0.
        order: Tiles of tokens; of these, how many come one after another before the next rows do;
            and blocks of rows.
        least: The smaller of two numbers: of Python's, or a kernel's.
    """
    token_tiles, span, row_blocks = order
    begin = tile // (span * row_blocks) * span
    rest = tile - begin * row_blocks
    width = least(span, token_tiles - begin)
    row_block = rest // width
    return row_block, begin + rest - row_block * width
