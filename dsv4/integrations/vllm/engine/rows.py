"""Rows of requests: a KV cache group whose blocks are numbers, and that takes no memory of vLLM.

Compressor state has one size for every length of a request: 12 MB in Flash. In vLLM's pool it would
need blocks of its own, larger than those of any page, or a copy per step. So it lies in a tensor of
``max_num_seqs`` rows, which the model allocates before vLLM measures what memory is left, and a
request needs nothing but the number of its row. vLLM's scheduler gives such numbers out like
blocks: a request gets its row with its first tokens, keeps it while it runs, and loses it when it
ends, is cancelled or is preempted. A preempted request begins again at position 0, with any row,
and the compressors overwrite whatever state the row holds.

The worker finds the row in the block table of this group. Row 0 belongs to nobody, as vLLM pads
block tables with 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from dsv4.integrations.vllm.engine.specs import ALIGNMENT

FIRST_ROW = 1


@dataclass(frozen=True, kw_only=True)
class RowSpec(CircularBufferSpec):
    """A block per request that stands for the number of its row.

    The pages overlay those of the other groups, like all pages of vLLM, and nobody reads or writes
    them.

    Attributes:
        rows: Requests that run at one time.
    """

    rows: int

    @classmethod
    def of(cls, rows: int, max_tokens: int) -> RowSpec:
        """Make the spec.

        Args:
            rows: Requests that run at one time.
            max_tokens: Longest request. A block stands for at least as many tokens, because Model
                Runner V1 looks for the block of every position.
        """
        block = -(-max_tokens // 256) * 256
        return cls(
            block_size=block,
            tokens_per_state=block,
            state_content_bytes=ALIGNMENT,
            block_stride_alignment=ALIGNMENT,
            num_kv_heads=1,
            head_size=ALIGNMENT,
            head_size_v=0,
            dtype=torch.uint8,
            dcp_sharded=False,
            rows=rows,
        )

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of vLLM's pool that a request needs: none."""
        del vllm_config
        return 0


class RowManager(CircularBufferManager):
    """Gives rows to requests, in the scheduler's process."""

    def __init__(self, kv_cache_spec: RowSpec, **options: Any) -> None:
        super().__init__(kv_cache_spec, **options)
        self._free_rows = list(range(kv_cache_spec.rows, FIRST_ROW - 1, -1))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks of vLLM's pool that a request needs: none, or more than there are without a row.

        The scheduler then lets the request wait.
        """
        if self.req_to_blocks.get(request_id) or self._free_rows:
            return 0
        return int(self.block_pool.num_gpu_blocks) + 1

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Give a request its row, unless it has one."""
        if self.req_to_blocks.get(request_id):
            return []
        row = KVCacheBlock(block_id=self._free_rows.pop(), ref_cnt=1)
        self.req_to_blocks[request_id] = [row]
        return [row]

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Raise: tokens that another process computed have no compressor state here."""
        raise NotImplementedError(
            f"request {request_id} has {num_external_computed_tokens} tokens that another process "
            "computed, expected 0: their compressor state is not in vLLM's blocks"
        )

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Take the row back at once, and give vLLM's pool nothing.

        A step that is under way may still write to the row. The next owner's first step comes after
        it on the same stream, and begins at position 0, whatever the row holds.
        """
        rows = super().pop_blocks_for_free(request_id)
        self._free_rows.extend(row.block_id for row in rows)
        return []


def register() -> None:
    """Tell vLLM which manager gives rows out; to be called in every process, more than once."""
    # vLLM registers its own specs when the first one is asked for, and only into an empty registry.
    KVCacheSpecRegistry.get_manager_class(RowSpec.of(1, 1))
    KVCacheSpecRegistry.register(RowSpec, RowManager, uniform_type_base_spec=RowSpec)
