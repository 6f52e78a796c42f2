"""The simulation that the share of slots comes from, at a small size."""

from __future__ import annotations

from tests._tools.slot_shares import Sizes, loads, table

SMALL = Sizes(14, experts=32, top_k=2, warm=60, steps=120, layers=2)


def test_known_counts_want_few_slots_and_unknown_ones_many():
    few_slots, many_slots = (loads(SMALL, slots, 1.0, counted=True) for slots in (2, 10))
    assert few_slots < many_slots
    few_slots, many_slots = (loads(SMALL, slots, 1.0, counted=False) for slots in (2, 10))
    assert few_slots > many_slots


def test_a_line_for_each_routing():
    lines = table(SMALL, (2, 10))
    assert len(lines) == 6
    assert lines[0].startswith("uniform, most used static: 12+2: ")
