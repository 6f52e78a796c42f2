"""vLLM's compressors on this package's kernel, with their states in vLLM's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.compressor import DeepseekCompressor

from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.attention_step import Tokens, stored_slots
from dsv4.integrations.vllm.cache_views import PagesOf
from dsv4.integrations.vllm.switches import ATTENTION
from dsv4.kv_cache.pages import Pages
from dsv4.ops.compressor_paged import compress_write_paged

if TYPE_CHECKING:
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention


class Compressor(DeepseekCompressor):
    """``DeepseekCompressor`` with this package's operator; made by ``adopt`` alone.

    vLLM's states stay as they are: a row of each position with ape added to its score, in blocks
    of 4 or 8 positions, whatever step it came in. Its Triton and CuTeDSL kernels and this one can
    take turns.
    """

    dsv4_pages: PagesOf

    def forward(self, kv_score: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
        """Store the states of a step's tokens, and the entries of the windows that end in it."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return
        state = metadata[self.state_cache.prefix]
        pages = self._pages()
        slots = self._slots(metadata[self.k_cache_prefix], pages)
        count = min(kv_score.shape[0], state.slot_mapping.shape[0], slots.shape[0])
        kv, score = kv_score[:count].chunk(2, dim=-1)
        compress_write_paged(
            kv,
            score,
            self.ape,
            self.state_cache.kv_cache,
            positions[:count],
            state.token_to_req_indices[:count],
            state.slot_mapping[:count],
            state.block_table,
            slots[:count],
            self.norm.weight,
            rotary_emb.cos_sin_cache,
            pages,
            overlap=self.overlap,
            eps=self.rms_norm_eps,
        )

    def dsv4_store_slots(self, tokens: Tokens, metadata: dict[str, Any]) -> None:
        """Compute the slots of entries if vLLM has not; call it before side streams fork."""
        own = metadata[self.k_cache_prefix]
        if own.slot_mapping is None:
            pages = self._pages()
            tokens.store_slots(own.block_table, pages.page_size, self.compress_ratio)

    def _slots(self, own: Any, pages: Pages) -> torch.Tensor:
        if own.slot_mapping is None:
            return stored_slots(own.block_table, pages.page_size, self.compress_ratio)
        return own.slot_mapping  # type: ignore[no-any-return]

    def _pages(self) -> Pages:
        cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        if self.makes_index_keys:
            entry_format = "index_mxfp4" if self.use_fp4_cache else "index_fp8"
            return self.dsv4_pages.index(cache, self.head_dim, entry_format)
        return self.dsv4_pages.kv(cache, self.head_dim, self.rope_head_dim)

    @property
    def makes_index_keys(self) -> bool:
        """Whether entries are keys of an indexer."""
        return self._quant_block != 64


def adopt(name: str, attention: DeepseekV4Attention, context: Adoption) -> None:
    """Let an attention module's own compressor run on this package's operator, or say why not."""
    module = attention.compressor
    if module is None:
        return
    compressor_name, reason = f"{name}.compressor", reason_against(module)
    if reason:
        context.report.left(ATTENTION, compressor_name, type(module).__name__, reason)
        return
    adopt_compressor(module)
    context.report.replaced(ATTENTION, compressor_name, "compress_write_paged")


def adopt_compressor(module: Any) -> None:
    """Change the class of one module."""
    module.dsv4_pages = PagesOf()
    module.__class__ = Compressor


def reason_against(module: Any) -> str:
    """Say why a compressor stays as it is; empty if it need not."""
    if type(module) is not DeepseekCompressor:
        return f"vLLM chose {type(module).__name__}, expected DeepseekCompressor"
    if module.state_cache.dtype != torch.float32:
        return f"the compressor's state is {module.state_cache.dtype}, expected float32"
    return ""
