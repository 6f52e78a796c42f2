"""The configuration of ``indexer_logits``, without CuTeDSL."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.cute.sm90.topk_plan import TopkClusterPlan, TopkPlan

_HEADS, _BLOCK = 64, 64
DIMS = 128  # of a key
STAGE = _BLOCK * (DIMS // 2 + DIMS // 32)  # bytes of a block
_MANY = 1 << 17  # entries of all tokens from which its beginning does not matter


@dataclass(frozen=True)
class IndexerLogitsPlan:
    """The kernel that scores MXFP4 keys.

    Attributes:
        group: Neighbouring entries whose highest score is kept, 8 or 16; 0: none.
        warpgroups: Of a block, which share a token's queries, 2 or 4.
    """

    group: int
    warpgroups: int

    kernel = "dsv4.cute.sm90.indexer_logits:IndexerLogitsKernel"
    blocks = 1

    @property
    def stages(self) -> int:
        """Blocks that a warpgroup has on their way, a power of two."""
        return 4

    @property
    def workers(self) -> int:
        """Threads of a block that multiply."""
        return 128 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a block: a further warpgroup copies keys, a warp for each that multiplies."""
        return self.workers + 128

    @property
    def registers(self) -> int:
        """Of a thread that multiplies, when those of the others are given away."""
        return {2: 104, 4: 112}[self.warpgroups]

    @property
    def shared_bytes(self) -> int:
        """Queries as integers, what takes the middle away, queries as they are, scales and weights.

        And what the middle is multiplied with, and keys on their way.
        """
        queries = _HEADS * (2 * DIMS + DIMS // 2 + 4 + 4) + _BLOCK * 32 + 2048
        return queries + self.warpgroups * self.stages * (STAGE + 16)

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor: four warpgroups that multiply take all registers."""
        return 4 // self.warpgroups


def plans() -> list[TopkPlan | IndexerLogitsPlan]:
    """All kernels of the indexer, for ``dsv4.warmup``."""
    scores = [IndexerLogitsPlan(group, warpgroups) for group in (0, 8, 16) for warpgroups in (2, 4)]
    choices = [TopkPlan(8, 1024), TopkPlan(8, 512), TopkPlan(16, 1024)]
    spread = [TopkClusterPlan(group, 512, blocks) for group, blocks in ((8, 4), (16, 4), (16, 8))]
    return [*choices, *spread, *scores]


def multiplies(
    q: torch.Tensor,
    weights: torch.Tensor,
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    query_scales: torch.Tensor | None,
    capacity: int,
) -> bool:
    """Whether the kernel scores such keys, ``capacity`` for each token, faster than Triton's.

    What is not named here does not matter to it.
    """
    if q.shape[0] * capacity < _MANY:
        return False
    if entry_format != "index_mxfp4" or query_scales is None or weights.dtype != torch.float32:
        return False
    if q.shape[1] > _HEADS or 2 * q.shape[2] != DIMS or page_size % _BLOCK:
        return False
    if data.stride(0) >= 1 << 31:
        return False
    places = (q.data_ptr(), *q.stride()[:2], data.data_ptr(), data.stride(0))
    aligned = all(place % 16 == 0 for place in places) and q.stride(2) == data.stride(1) == 1
    return aligned and query_scales.data_ptr() % 4 == 0 and page_size & (page_size - 1) == 0
