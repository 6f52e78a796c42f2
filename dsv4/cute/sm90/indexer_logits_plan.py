"""Arguments and configurations of the indexer-logits kernel; needs no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4.cute.runtime.kernel_abi import Int32, Int64, KernelAbi, Pointer, Uint32
from dsv4.cute.sm90.topk_plan import TopkClusterPlan, TopkPlan

HEADS, BLOCK = 64, 64  # query heads and cache entries of a tile of ``wgmma``
DIMS = 128  # of a key
CODE_BYTES, SCALE_BYTES = DIMS // 2, DIMS // 32  # of a key
STAGE = BLOCK * (CODE_BYTES + SCALE_BYTES)  # bytes of a block of entries
# Entries of all tokens from which the kernel's start does not matter. Triton and this kernel took,
# at one token of 262144 entries, 14.5 and 12.4 us; at one of 32768, 5.0 and 4.9 (H200).
_LARGE = 1 << 17


class IndexerLogitsArgs(NamedTuple):
    """Arguments of the indexer-logits kernel.

    Attributes:
        q: Packed E2M1 codes of the queries, ``[tokens, heads, 64]`` bytes.
        q_scales: E8M0 scales, ``[tokens, heads, 4]``.
        weights: float32 ``[tokens, heads]``.
        cache: Pages of the indexer's cache, ``"index_mxfp4"``: codes of all entries, then scales.
        table: Page numbers, ``[sequences, table_stride]``, int32 or int64.
        sequences: Sequence of each token, int32 or int64.
        visible: Number of entries that each token sees, int32 or int64.
        scores: Result: uint32 keys that order as the logits do, ``[tokens, score_stride]``.
        maxima: Result: highest key of each group, ``[tokens, maxima_stride]``.
        token_stride: Bytes of q from one token to the next.
        head_stride: Bytes of q from one head to the next.
        page_stride: Bytes of the cache from one page to the next.
        table_stride: Page numbers from one sequence to the next.
        score_stride: Keys from one token to the next.
        maxima_stride: Maxima from one token to the next.
        heads: Query heads, at most 64.
        capacity: Entries of a sequence, at most.
        k: A token that sees at most k entries needs no logits.
        page_shift: log2 of a page's entries.
        splits: CTAs of a token, which share its entries.
        table_bytes: Bytes of an element of ``table``, 4 or 8.
        sequence_bytes: Bytes of an element of ``sequences``, 4 or 8.
        visible_bytes: Bytes of an element of ``visible``, 4 or 8.
        shift16: 2^16. An argument, so that the compiler cannot turn products by it into shifts.
        inverse_splits: 2^31 / splits + 1. The high word of its product with twice a CTA's number is
            the CTA's token, without a division.
        table_rows: Sequences of ``table``.
    """

    q: Pointer
    q_scales: Pointer
    weights: Pointer
    cache: Pointer
    table: Pointer
    sequences: Pointer
    visible: Pointer
    scores: Pointer
    maxima: Pointer
    token_stride: Int64
    head_stride: Int64
    page_stride: Int32
    table_stride: Int32
    score_stride: Int32
    maxima_stride: Int32
    heads: Int32
    capacity: Int32
    k: Int32
    page_shift: Int32
    splits: Int32
    table_bytes: Int32
    sequence_bytes: Int32
    visible_bytes: Int32
    shift16: Int32
    inverse_splits: Uint32
    table_rows: Int32


INDEXER_LOGITS_ABI = KernelAbi(IndexerLogitsArgs)


@dataclass(frozen=True)
class IndexerLogitsPlan:
    """One configuration of the kernel in ``indexer_logits``.

    Attributes:
        group: Neighbouring entries whose highest key is kept, 8 or 16; 0: none.
        warpgroups: Warpgroups of a CTA that multiply and share a token's queries, 2 or 4.
    """

    group: int
    warpgroups: int

    kernel = "dsv4.cute.sm90.indexer_logits:IndexerLogitsKernel"
    ctas = 1

    @property
    def stages(self) -> int:
        """Blocks of entries that a warpgroup has in flight, a power of two."""
        return 4

    @property
    def mma_threads(self) -> int:
        """Threads of a CTA that multiply."""
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA: one more warpgroup copies keys, with a warp for each that multiplies.

        Registers are given away by whole warpgroups, so the copying warps have one of their own.
        """
        return self.mma_threads + 128

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies, after the others gave theirs away."""
        return {2: 104, 4: 112}[self.warpgroups]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA.

        Queries as integers and the bytes that subtract the bias (2 ``DIMS``), queries as packed
        codes, scales and weights; the left operand of the bias step; stages with their mbarriers.
        """
        queries = HEADS * (2 * DIMS + CODE_BYTES + SCALE_BYTES + 4) + BLOCK * 32 + 2048
        return queries + self.warpgroups * self.stages * (STAGE + 16)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of an SM: four warpgroups that multiply take all registers."""
        return 4 // self.warpgroups


def plans() -> list[TopkPlan | IndexerLogitsPlan]:
    """All kernels of the indexer, for ``dsv4.warmup``."""
    logits = [IndexerLogitsPlan(group, warpgroups) for group in (0, 8, 16) for warpgroups in (2, 4)]
    selections: list[TopkPlan] = []
    for slots in (False, True):
        selections += [TopkPlan(*sizes, slots) for sizes in ((8, 1024), (8, 512), (16, 1024))]
        clusters = ((8, 4), (16, 4), (16, 8))
        selections += [TopkClusterPlan(group, 512, slots, ctas) for group, ctas in clusters]
    return [*selections, *logits]


def supports_int8(
    q: torch.Tensor,
    weights: torch.Tensor,
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    query_scales: torch.Tensor | None,
    capacity: int,
) -> bool:
    """Return whether the kernel supports these arguments, and is faster than Triton's.

    ``capacity`` is a token's number of entries, at most. Other arguments do not matter.
    """
    if q.shape[0] * capacity < _LARGE:
        return False
    if entry_format != "index_mxfp4" or query_scales is None or weights.dtype != torch.float32:
        return False
    if q.shape[1] > HEADS or 2 * q.shape[2] != DIMS or page_size % BLOCK:
        return False
    if data.stride(0) >= 1 << 31:
        return False
    addressed = (q.data_ptr(), *q.stride()[:2], data.data_ptr(), data.stride(0))
    aligned = all(number % 16 == 0 for number in addressed) and q.stride(2) == data.stride(1) == 1
    return aligned and query_scales.data_ptr() % 4 == 0 and page_size & (page_size - 1) == 0
