"""vLLM's metadata of a step without what only vLLM's own attention kernels read.

vLLM plans DeepGEMM's index logits and lists the slots of FlashMLA's compressed entries before each
step, on the host and outside of captured graphs. Operators of this package need neither. Fields
that they read, buffers and block sizes are vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.sparse_mla import (
    DeepseekV4FlashMLABackend,
    DeepseekV4FlashMLAMetadataBuilder,
)
from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV4IndexerBackend,
    DeepseekV32IndexerMetadata,
    DeepseekV32IndexerMetadataBuilder,
)


class EntriesBuilder(DeepseekV4FlashMLAMetadataBuilder):
    """Makes the metadata of compressed entries; their slots follow where they are attended to."""

    def _build_c128a_metadata(
        self, cm: Any, req_id_per_token: torch.Tensor
    ) -> dict[str, torch.Tensor | None]:
        del cm, req_id_per_token
        return {}


class EntriesBackend(DeepseekV4FlashMLABackend):
    """vLLM's backend with that builder."""

    @staticmethod
    def get_builder_cls() -> type[EntriesBuilder]:
        """Return the class that makes the metadata."""
        return EntriesBuilder


class KeysBuilder(DeepseekV32IndexerMetadataBuilder):
    """Makes the metadata of index keys: where they are stored, and the block table."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> DeepseekV32IndexerMetadata:
        """Make it without the division into decode and prefill."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        slots = get_compressed_slot_mapping(
            common.num_actual_tokens,
            common.slot_mapping,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            int(self.kv_cache_spec.num_states),
            self.compress_ratio,
            out=self.compressed_slot_mapping_buffer,
        )
        return DeepseekV32IndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=slots,
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
    """``DeepseekV4IndexerCache`` whose metadata are those alone; made by ``adopt_keys``."""

    def get_attn_backend(self) -> type[KeysBackend]:
        """Return the class that names the builder."""
        return KeysBackend


def adopt_keys(cache: Any) -> None:
    """Change the class of an indexer's cache; other classes than vLLM's own stay."""
    if type(cache) is DeepseekV4IndexerCache:
        cache.__class__ = KeysCache
