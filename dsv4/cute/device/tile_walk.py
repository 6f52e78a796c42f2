"""The tiles that a cluster of persistent CTAs visits, as kernels hold them."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32


class TileOrder(NamedTuple):
    """The order in which clusters visit the tiles: arguments of ``scheduler.tile_position``.

    Attributes:
        token_tiles: Tiles of tokens.
        token_span: Token tiles that follow one another before the next block of rows does.
        row_blocks: Blocks of rows.
    """

    token_tiles: Int32
    token_span: Int32
    row_blocks: Int32


class Walk(NamedTuple):
    """The tiles of a cluster.

    Attributes:
        first: Number of its first tile.
        stride: Number of clusters: in each round a cluster takes one of as many tiles.
        total: Tiles of all clusters.
        order: ``TileOrder``, or ``GroupedTileOrder`` of routed experts. Only methods that differ
            between both read it.
    """

    first: Int32
    stride: Int32
    total: Int32
    order: Any
