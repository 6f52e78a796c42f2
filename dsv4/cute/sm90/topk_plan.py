"""The configuration of ``topk``, without CuTeDSL."""

from __future__ import annotations

from dataclasses import dataclass

CANDIDATES = 4096  # keys that are chosen among in shared memory, and groups that they come from
PARTS = 1024  # of a range of keys, which are counted
SHARE = 2048  # such keys of a block of a cluster
_ROWS = {8: 15, 4: 30}  # clusters of so many blocks that an H200 has room for
_MOST = 1024
_SHORT = 8192


@dataclass(frozen=True)
class TopkPlan:
    """The kernel that chooses the highest of a row.

    Attributes:
        group: Neighbouring keys whose highest is known, 8 or 16.
        threads: Of a block, 512 or 1024. Each instruction of 32 warps takes eight cycles.
    """

    group: int
    threads: int

    kernel = "dsv4.cute.sm90.topk:TopkKernel"
    blocks = 1
    classes = 2048  # whose maxima give the threshold

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.threads // 32

    @property
    def shared_bytes(self) -> int:
        """Counts, classes, groups, keys and positions of candidates; numbers of warps."""
        return 4 * (PARTS + self.classes + 3 * CANDIDATES) + 2048

    @property
    def each(self) -> int:
        """Vectors of a thread between two barriers of a copy.

        Four take all registers, so that a next kernel's blocks find no room beside this one; two
        take more steps. Rows of many are of few tokens.
        """
        return self.group // 4


@dataclass(frozen=True)
class TopkClusterPlan(TopkPlan):
    """The same by a cluster, whose blocks have neighbouring parts of the row.

    Attributes:
        blocks: 4 or 8.
    """

    blocks: int

    kernel = "dsv4.cute.sm90.topk_cluster:TopkClusterKernel"

    @property
    def shared_bytes(self) -> int:
        """And the candidates of all blocks and their numbers."""
        return super().shared_bytes + 4 * self.blocks * SHARE + 1024

    @property
    def each(self) -> int:
        """As of one block, of fewer keys."""
        return 2


def choice_plan(tokens: int, group: int) -> TopkPlan:
    """The kernel for so many rows.

    If an H200 has room for them all at a time, four blocks share each, or eight if they are long.
    """
    if not group:
        return TopkPlan(8, 1024)
    for blocks, most in _ROWS.items():
        if tokens <= most and blocks <= group // 2:
            return TopkClusterPlan(group, 512, blocks)
    return TopkPlan(group, 512 if group == 8 else 1024)


def is_long(capacity: int, k: int) -> bool:
    """Whether the kernel takes the k highest of so many entries, and less time than Triton's."""
    return capacity > _SHORT and k <= _MOST
