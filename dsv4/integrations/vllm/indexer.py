"""vLLM's lightning indexer on this package's kernels: index queries and the choice of entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.attention import DeepseekV4Indexer
from vllm.utils.multi_stream_utils import maybe_execute_in_parallel

from dsv4.integrations.vllm import compressor
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.attention_step import Tokens, capturing, columns_used, tables
from dsv4.integrations.vllm.cache_views import PagesOf
from dsv4.integrations.vllm.switches import ATTENTION
from dsv4.ops.indexer import indexer_select, quantize_index_queries
from dsv4.quant.formats import MXFP4, QuantizedTensor

if TYPE_CHECKING:
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention

# Queries as ``quantize_index_queries`` makes them: codes, MXFP4 scales as bytes or None, weights.
Queries = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


class Indexer(DeepseekV4Indexer):
    """``DeepseekV4Indexer`` with this package's operators; made by ``adopt`` alone.

    There is no Hadamard transform, see ``cache_views``.
    """

    dsv4_pages: PagesOf

    @property
    def entry_format(self) -> str:
        """Return the entry format of vLLM's index pages."""
        return "index_mxfp4" if self.use_fp4_kv else "index_fp8"

    def forward(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        compressed_kv_score: torch.Tensor | None,
        indexer_weights: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: nn.Module,
        qr_scale: torch.Tensor | None = None,
        skip_compressor: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Store the keys that closed and make queries; None three times if all entries are taken.

        That is known of a batch whose longest context has no more entries than are chosen. A graph
        that is captured may later run with longer ones.
        """

        def store_keys() -> None:
            if not skip_compressor:
                self.compressor(compressed_kv_score, positions, rotary_emb)

        if self.takes_all():
            store_keys()
            return None, None, None

        def make_queries() -> Queries:
            q = self._wq_b_proj(qr, qr_scale)
            return self.queries(q, positions, rotary_emb, indexer_weights)

        queries, _ = maybe_execute_in_parallel(
            make_queries,
            store_keys,
            self.ln_events[0],
            self.ln_events[1],
            None if skip_compressor else self.aux_stream,
        )
        return queries  # type: ignore[no-any-return]

    def takes_all(self) -> bool:
        """Return whether the step's longest context has no more entries than are chosen."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return False
        if capturing():
            return False
        longest: int = metadata[self.k_cache.prefix].max_seq_len
        return longest // self.compress_ratio <= self.topk_tokens

    def queries(
        self, q: torch.Tensor, positions: torch.Tensor, rotary_emb: Any, weights: torch.Tensor
    ) -> Queries:
        """Quantise rotated queries.

        Args:
            q: ``[T, heads D]``.
            positions: ``[T]``.
            rotary_emb: vLLM's, with its table.
            weights: ``[T, heads]``, of the heads.
        """
        cos, sin = tables(rotary_emb.cos_sin_cache, positions)
        made, folded = quantize_index_queries(
            q.view(-1, self.n_head, self.head_dim),
            cos,
            sin,
            weights,
            rotate=False,
            query_format=self.entry_format.removeprefix("index_"),
            weight_scale=self.softmax_scale * self.n_head**-0.5,
        )
        if isinstance(made, QuantizedTensor):
            return made.codes, made.scales.view(torch.uint8), folded
        return made, None, folded

    def select(
        self, queries: Queries, attn_metadata: dict[str, Any], tokens: Tokens
    ) -> torch.Tensor:
        """Entry numbers within its sequence for each token, ``[count, top_k]``, -1 for none."""
        count = tokens.count
        q: Any = queries[0][:count]
        if queries[1] is not None:
            scales = queries[1][:count].view(torch.float8_e8m0fnu)
            q = QuantizedTensor(q, scales, None, MXFP4)
        own = attn_metadata[self.k_cache.prefix]
        pages = self.dsv4_pages.index(self.k_cache.kv_cache, self.head_dim, self.entry_format)
        block_tokens = pages.page_size * self.compress_ratio
        return indexer_select(
            q,
            queries[2][:count],
            pages,
            columns_used(own.block_table, block_tokens, own.max_seq_len),
            tokens.sequences,
            tokens.visible(self.compress_ratio),
            top_k=self.topk_tokens,
        )


def adopt(name: str, attention: DeepseekV4Attention, context: Adoption) -> None:
    """Let the indexer of an attention module run on this package's operators, or say why not."""
    module = attention.indexer
    if module is None:
        return
    indexer_name = f"{name}.indexer"
    reason = compressor.reason_against(module.compressor) or reason_against(module)
    if reason:
        context.report.left(ATTENTION, indexer_name, type(module).__name__, reason)
        return
    adopt_indexer(module)
    context.report.replaced(ATTENTION, indexer_name, "indexer_select")
    context.report.replaced(ATTENTION, f"{indexer_name}.compressor", "compress_write_paged")


def adopt_indexer(module: Any) -> None:
    """Change the class of one module and of its compressor, which writes the keys."""
    module.dsv4_pages = PagesOf()
    module.__class__ = Indexer
    compressor.adopt_compressor(module.compressor)


def reason_against(module: Any) -> str:
    """Say why an indexer stays as it is; empty if it need not."""
    if type(module) is not DeepseekV4Indexer:
        return f"vLLM chose {type(module).__name__}, expected DeepseekV4Indexer"
    if module.indexer_op.candidate_blocks is not None:
        return "candidates are chosen by blocks first"
    return ""
