"""The table of compiled kernels."""

from __future__ import annotations

from tests._tools.compile_table import table


def test_a_cell_has_the_most_of_each():
    first = {"kernel": "_a", "registers": 40, "shared": 128, "stack": 0}
    second = {"kernel": "_a", "registers": 32, "shared": 512, "stack": 8}
    assert table({"80": [first, second], "89": [first], "120": [first | {"kernel": "_b"}]}) == (
        "| kernel | sm_80 | sm_89 | sm_120 |\n"
        "| --- | --- | --- | --- |\n"
        "| `_a` | 2: 40, 512, stack 8 | 1: 40, 128 | - |\n"
        "| `_b` | - | - | 1: 40, 128 |"
    )
