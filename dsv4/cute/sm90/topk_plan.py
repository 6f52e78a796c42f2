"""Arguments and configurations of the top-k kernels in ``topk`` and ``topk_cluster``.

Needs no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import Int32, KernelAbi, Pointer
from dsv4.cute.sm90.tuned import tuned

CANDIDATES = 4096  # keys that are selected among in shared memory, and groups that they come from
BUCKETS = 1024  # equal parts of a range of keys, whose keys are counted
SHARE = 2048  # candidates that each CTA of a cluster may have
# CTAs of a cluster that shares a row while the GPU holds all rows' clusters at a time. 1 x 262144
# entries, 1024 selected: 10.5 us with one CTA of 1024 threads, 6.9 with eight of 512; 16 x 262144:
# 10.2 and, with four, 8.2 (H200). With more clusters than fit, 64 x 32768 took 25 us (four CTAs
# each) and 43 (eight).
_CTAS = (8, 4)
_MOST = 1024  # entries that are selected, at most
_SHORT = 8192  # entries up to which Triton's kernel takes less time


class TopkArgs(NamedTuple):
    """Arguments of the top-k kernels.

    Attributes:
        keys: uint32 keys, ``[tokens, key_stride]``, that order as the logits do; 0: no entry. A row
            is aligned to 16 bytes.
        maxima: The highest key of every group of ``plan.group`` neighbours,
            ``[tokens, maxima_stride]``; read where ``visible > direct``.
        visible: Number of entries that each token sees, int32 or int64.
        table: Page numbers, ``[sequences, table_stride]``, int32 or int64; read if ``plan.slots``,
            like ``sequences``.
        sequences: Sequence of each token, int32 or int64; negative: none.
        out: int64 ``[tokens, k]``: selected positions, ascending, then -1; or their slots.
        key_stride: Keys from one row to the next.
        maxima_stride: Maxima from one row to the next.
        table_stride: Page numbers from one sequence to the next.
        page_shift: log2 of a page's entries.
        visible_bytes: Bytes of an element of ``visible``, 4 or 8.
        table_bytes: Bytes of an element of ``table``, 4 or 8.
        sequence_bytes: Bytes of an element of ``sequences``, 4 or 8.
        capacity: Entries of a row, at most.
        k: How many are selected, at most 1024.
        slack: How many more than k keys may reach a threshold for candidates.
        direct: Entries up to which a row is read as a whole, without its maxima.
    """

    keys: Pointer
    maxima: Pointer
    visible: Pointer
    table: Pointer
    sequences: Pointer
    out: Pointer
    key_stride: Int32
    maxima_stride: Int32
    table_stride: Int32
    page_shift: Int32
    visible_bytes: Int32
    table_bytes: Int32
    sequence_bytes: Int32
    capacity: Int32
    k: Int32
    slack: Int32
    direct: Int32


TOPK_ABI = KernelAbi(TopkArgs)


@dataclass(frozen=True)
class TopkPlan:
    """One configuration of the kernel in ``topk``: a CTA has a row.

    Attributes:
        group: Neighbouring keys whose highest is known, 8 or 16.
        threads: Threads of a CTA, 512 or 1024. Each instruction of 32 warps takes eight cycles:
            64 x 32768 entries, 1024 selected, took 8.1 us with 512 threads and 9.5 with 1024, but
            64 x 262144 entries 11.2 and 10.7 (H200).
        slots: Whether slots of the selected entries are stored, not their positions.
    """

    group: int
    threads: int
    slots: bool

    kernel = "dsv4.cute.sm90.topk:TopkKernel"
    ctas = 1
    # Classes of keys whose maxima give the threshold. 4096 come nearer to k but take twice as many
    # atomic operations in shared memory.
    classes = 2048

    @property
    def blocks(self) -> int:
        """CTAs of a cluster, by the name that all plans share."""
        return self.ctas

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.threads // 32

    @property
    def thread_buckets(self) -> int:
        """Buckets that a thread sums and clears."""
        return BUCKETS // self.threads

    @property
    def group_vectors(self) -> int:
        """Vectors of four keys of a group."""
        return self.group // 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, as ``topk.SharedMemory`` lists it."""
        return 4 * (BUCKETS + self.classes + 3 * CANDIDATES) + 2048

    @property
    def gathered_vectors(self) -> int:
        """Vectors that a thread gathers between two barriers.

        Two take 39 registers. Four take all registers, so that no CTA of the next kernel fits
        beside this one: 64 tokens at 128k took 170 and 192 us instead of 147. Rows of 131072
        entries and more are those of few tokens; there four gain up to 0.9 us (H200).
        """
        return self.group // 4


@dataclass(frozen=True)
class TopkClusterPlan(TopkPlan):
    """One configuration of the kernel in ``topk_cluster``: a cluster's CTAs share a row.

    Attributes:
        ctas: CTAs of a cluster, 4 or 8.
    """

    ctas: int

    kernel = "dsv4.cute.sm90.topk_cluster:TopkClusterKernel"

    @property
    def shared_bytes(self) -> int:
        """The same and the candidates of all CTAs and their counts."""
        return super().shared_bytes + 4 * self.ctas * SHARE + 1024

    @property
    def gathered_vectors(self) -> int:
        """Two for both sizes of groups, because a CTA has a share of the row."""
        return 2


def topk_plan(tokens: int, group: int, slots: bool = False) -> TopkPlan:
    """The kernel for ``tokens`` rows with maxima of ``group`` keys; 0: without maxima.

    If the GPU has room for all clusters at a time, four CTAs share each row, or eight if rows are
    long (groups of 16).
    """
    if not group:
        return TopkPlan(8, 1024, slots)
    for ctas in _CTAS:
        if tokens <= tuned().clusters[ctas] and ctas <= group // 2:
            return TopkClusterPlan(group, 512, slots, ctas)
    return TopkPlan(group, 512 if group == 8 else 1024, slots)


def is_long(capacity: int, k: int) -> bool:
    """Return whether the kernel supports k of ``capacity`` entries, and is faster than Triton's."""
    return capacity > _SHORT and k <= _MOST
