"""The order in which persistent CTAs take tiles."""

from __future__ import annotations

import collections
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.cute.device.scheduler import next_tile

SMS = (78, 114, 132, 144, 148)  # of Hopper and Blackwell GPUs


def tiles_of(cta, ctas, total):
    """What a CTA takes."""
    tiles, tile = [], cta
    while tile < total:
        tiles.append(tile)
        tile = next_tile(tile, ctas)
    return tiles


@given(st.integers(1, 150), st.integers(0, 3000))
def test_every_tile_is_taken_once(ctas, total):
    """By one CTA, which takes a tile of each round."""
    taken = [tiles_of(cta, ctas, total) for cta in range(ctas)]
    assert sorted(itertools.chain.from_iterable(taken)) == list(range(total))
    for tiles in taken:
        assert [tile // ctas for tile in tiles] == list(range(len(tiles)))


@pytest.mark.parametrize("ctas", SMS)
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_no_cta_has_only_full_tiles(ctas, count):
    """Of experts with as many tiles of tokens, each CTA takes about as many last ones."""
    rounds = 4 * count
    for cta in range(ctas):
        tiles = collections.Counter(tile % count for tile in tiles_of(cta, ctas, rounds * ctas))
        # Exactly a quarter of ``rounds`` but for those rounds in which its places wrap around.
        assert max(tiles.values()) - min(tiles.values()) <= 3
