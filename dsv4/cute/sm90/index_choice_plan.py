"""The configuration of ``index_choice``, without CuTeDSL."""

from __future__ import annotations

from dataclasses import dataclass

CANDIDATES = 4096  # keys that are chosen among in shared memory, and groups that they come from
_MOST = 1024
_SHORT = 8192


@dataclass(frozen=True)
class ChoicePlan:
    """The kernel that chooses the highest of a row.

    Attributes:
        group: Neighbouring keys whose highest is known, 8 or 16.
    """

    group: int

    kernel = "dsv4.cute.sm90.index_choice:ChoiceKernel"
    threads = 1024
    blocks = 1
    # Counts, classes, groups, keys and positions of candidates; numbers of warps.
    shared_bytes = 4 * (3 * threads + 3 * CANDIDATES) + 2048


def is_long(capacity: int, k: int) -> bool:
    """Whether the kernel takes the k highest of so many entries, and less time than Triton's."""
    return capacity > _SHORT and k <= _MOST
