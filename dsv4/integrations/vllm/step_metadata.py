"""vLLM's metadata of a step, without the fields that only vLLM's attention kernels read.

Before each step, on the host and outside of captured graphs, vLLM plans DeepGEMM's index logits and
FlashMLA's tiles, lists the slots of raw and compressed entries and finds where the latter are
stored, once for each cache. Operators of this package need none of it. The forward computes slots
once for each ratio, inside the graph if it is captured (``attention_step``). The fields that the
operators read, buffers and block sizes remain vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import (
    CompressorBackend,
    CompressorMetadata,
    CompressorMetadataBuilder,
    CompressorStateCache,
)
from vllm.models.deepseek_v4.nvidia.flashmla import (
    DeepseekSparseSWAFlashMLABackend,
    DeepseekSparseSWAFlashMLAMetadataBuilder,
)
from vllm.models.deepseek_v4.sparse_mla import (
    DeepseekV4FlashMLABackend,
    DeepseekV4FlashMLAMetadata,
    DeepseekV4FlashMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV4IndexerBackend,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

KERNEL = "index metadata, nothing planned"  # in the report


class EntriesBuilder(DeepseekV4FlashMLAMetadataBuilder):
    """Makes the metadata of compressed entries."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> DeepseekV4FlashMLAMetadata:
        """Make it without slots."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        return DeepseekV4FlashMLAMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=None,
            block_table=common.block_table_tensor,
            req_id_per_token=common.token_to_req_indices(self.req_id_per_token_buffer),
            block_size=self.kv_cache_spec.block_size,
            topk_tokens=self.topk_tokens,
        )


class EntriesBackend(DeepseekV4FlashMLABackend):
    """vLLM's backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[EntriesBuilder]:
        """Return the class that makes the metadata."""
        return EntriesBuilder


class KeysBuilder(DeepseekV32IndexerMetadataBuilder):
    """Makes the metadata of index keys: the block table."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> DeepseekV32IndexerMetadata:
        """Make it without the division into decode and prefill."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        return DeepseekV32IndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=None,
            num_decodes=0,
            num_decode_tokens=0,
            num_prefills=0,
            num_prefill_tokens=0,
            block_table=common.block_table_tensor,
        )


class KeysBackend(DeepseekV4IndexerBackend):
    """vLLM's backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[KeysBuilder]:
        """Return the class that makes the metadata."""
        return KeysBuilder


class KeysCache(DeepseekV4IndexerCache):
    """``DeepseekV4IndexerCache`` whose metadata are those alone; made by ``adopt``."""

    def get_attn_backend(self) -> type[KeysBackend]:
        """Return the class that names the builder."""
        return KeysBackend


class StatesBuilder(CompressorMetadataBuilder):
    """Makes the metadata of a compressor's states."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CompressorMetadata:
        """Make it without looking at the requests."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        return CompressorMetadata(
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            block_size=self.block_size,
            token_to_req_indices=common.token_to_req_indices(self.token_to_req_indices),
        )


class StatesBackend(CompressorBackend):
    """vLLM's backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[StatesBuilder]:
        """Return the class that makes the metadata."""
        return StatesBuilder


class StatesCache(CompressorStateCache):
    """``CompressorStateCache`` whose metadata are those alone; made by ``adopt``."""

    def get_attn_backend(self) -> type[StatesBackend]:
        """Return the class that names the builder."""
        return StatesBackend


class WindowBuilder(DeepseekSparseSWAFlashMLAMetadataBuilder):
    """Makes the metadata of raw entries."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,
        replay_start: torch.Tensor | None = None,
    ) -> DeepseekSparseSWAMetadata:
        """Make it without slots, which follow in the forward, in graphs where it is captured.

        Raises:
            ValueError: with ``replay_start``, which no DeepSeek-V4 has.
        """
        del common_prefix_len, fast_build
        if replay_start is not None:
            raise ValueError("replay_start is a tensor, expected None: no window is replayed")
        common = common_attn_metadata
        return DeepseekSparseSWAMetadata(
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            block_size=self.block_size,
            seq_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            token_to_req_indices=common.token_to_req_indices(self.token_to_req_indices),
            num_decode_tokens=common.num_actual_tokens,
        )


class WindowBackend(DeepseekSparseSWAFlashMLABackend):
    """vLLM's backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[WindowBuilder]:
        """Return the class that makes the metadata."""
        return WindowBuilder


_CACHES: dict[type, type] = {
    DeepseekV4IndexerCache: KeysCache,
    CompressorStateCache: StatesCache,
}


def adopt(cache: Any) -> bool:
    """Change the class of a cache that only replaced modules use; keep other classes.

    Returns:
        Whether it was changed.
    """
    own = _CACHES.get(type(cache))
    if own is not None:
        cache.__class__ = own
    return own is not None


def adopt_window(cache: Any) -> None:
    """Change the builder of a cache of raw entries, if it is the one that is known here."""
    if getattr(cache, "backend_cls", None) is DeepseekSparseSWAFlashMLABackend:
        cache.backend_cls = WindowBackend
