"""vLLM's DeepSeek-V4 attention on this package's kernels and on vLLM's own pages.

``adopt`` changes the class of vLLM's attention modules. vLLM keeps their construction, weights,
cache specifications, metadata, projections, streams and breaks of captured graphs. All tokens of a
step (decode, verification of drafts, whole and chunked prompts) go through ``sparse_attention``,
which reads FP8 entries where they lie in vLLM's caches: nothing is dequantised to a workspace.
``cache_views`` says which bytes agree.

Captured graphs: whatever depends on tokens is read from device tensors of vLLM's metadata. The
numbers of decode and prefill tokens and the longest context are host numbers, as in vLLM's own
class; batches with prefill run eagerly there, too (``eager_break_during_capture``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import (
    BreakableCUDAGraphCapture,
    eager_break_during_capture,
)
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

from dsv4.integrations.vllm import attention_warm, compressor, indexer, step_metadata
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.attention_step import Tokens, tables
from dsv4.integrations.vllm.cache_views import PagesOf
from dsv4.integrations.vllm.o_projection import Projection, grouped_projection
from dsv4.integrations.vllm.switches import ATTENTION
from dsv4.ops.attention import sparse_attention
from dsv4.ops.kv_cache import Pages, norm_rope_write_kv
from dsv4.ops.norm import head_norm_rope_, rms_norm
from dsv4.ops.slots import entry_slots

_RATIOS = (1, 4, 128)
# Bytes of slots of compressed entries that one call of attention takes; prompts are cut by it.
_SLOT_BYTES = 128 << 20


@dataclass
class Attended:
    """Buffers that attention writes outside of graphs with eager pieces, so that nothing is copied.

    Attributes:
        heads: ``[T, heads, D]``, rotated back.
    """

    heads: torch.Tensor | None = None


@dataclass
class _State:
    """State that the module keeps beside vLLM's attributes."""

    window: PagesOf
    compressed: PagesOf
    limits: attention_warm.Limits | None = None
    projection: Projection | None = None
    has_own_metadata: bool = False


class Attention(DeepseekV4FlashMLAAttention):
    """``DeepseekV4FlashMLAAttention`` with this package's operators; made by ``adopt`` alone."""

    dsv4_state: _State

    def get_attn_backend(self) -> Any:
        """The class that names the builder of metadata of compressed entries."""
        if self.dsv4_state.has_own_metadata:
            return step_metadata.EntriesBackend
        return super().get_attn_backend()

    def _alloc_attn_out(self, num_tokens: int, hidden_states: torch.Tensor) -> Any:
        """vLLM's buffer where a captured graph reads it behind an eager piece, else a place."""
        if _has_eager_pieces():
            return super()._alloc_attn_out(num_tokens, hidden_states)
        return Attended()

    def _split_qkv_and_norm(
        self, qr_kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The query's low rank, normalised; kv as it is: its norm is made where it is stored."""
        qr, kv = qr_kv.split([self.q_lora_rank, self.head_dim], dim=-1)
        return rms_norm(qr, self.q_norm.weight, self.eps), None, kv

    def _prepare_and_attn(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        kv: torch.Tensor,
        qr_scale: torch.Tensor | None,
        kv_score: torch.Tensor,
        indexer_kv_score: torch.Tensor,
        indexer_weights: torch.Tensor,
        positions: torch.Tensor,
        o_padded: Any,
    ) -> None:
        """Run vLLM's method; values that side streams share are made before they fork."""
        tables(self.rotary_emb.cos_sin_cache, positions)
        self._store_slots(positions)
        super()._prepare_and_attn(
            hidden_states,
            qr,
            kv,
            qr_scale,
            kv_score,
            indexer_kv_score,
            indexer_weights,
            positions,
            o_padded,
        )

    def _store_slots(self, positions: torch.Tensor) -> None:
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return
        for part in (self.compressor, getattr(self.indexer, "compressor", None)):
            if isinstance(part, compressor.Compressor):
                part.dsv4_store_slots(self._tokens(metadata, positions), metadata)

    def _fused_qnorm_rope_kv_insert(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, attn_metadata: Any
    ) -> torch.Tensor:
        """Norm and rotation of ``q [T, heads, D]`` in place; norm, rotation and storing of kv."""
        if not isinstance(attn_metadata, dict):
            return q
        cos, sin = tables(self.rotary_emb.cos_sin_cache, positions)
        head_norm_rope_(q, cos, sin, self.eps)
        slots = attn_metadata[self.swa_cache_layer.prefix].slot_mapping
        count = min(slots.shape[0], kv.shape[0])
        norm_rope_write_kv(
            self.window_pages(),
            kv[:count],
            self.kv_norm.weight,
            cos[:count],
            sin[:count],
            slots[:count],
            eps=self.eps,
        )
        return q

    @eager_break_during_capture
    def _sparse_indexer_and_attn(
        self,
        hidden_states: torch.Tensor,
        index_q: torch.Tensor | None,
        index_q_scale: torch.Tensor | None,
        index_weights: torch.Tensor | None,
        q: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        out: Any,
    ) -> None:
        """Choose compressed entries and attend to them, without vLLM's buffer in between."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(self.indexer, indexer.Indexer):
            super()._sparse_indexer_and_attn(
                hidden_states, index_q, index_q_scale, index_weights, q, kv, positions, out
            )
            return
        if not isinstance(metadata, dict):  # a profile run, which chooses nothing
            self.forward_mqa(q, kv, positions, out)
            return
        chosen = None
        tokens = self._tokens(metadata, positions)
        if index_q is not None and tokens.count:
            assert index_weights is not None
            queries = index_q, index_q_scale, index_weights
            chosen = self.indexer.select(queries, metadata, tokens)
        self._attend(q, tokens, metadata, out, chosen)

    def forward_mqa(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: Any
    ) -> None:
        """Attend to the window and, at ratio 4, to the entries in vLLM's buffer of choices."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            self._leave(torch.zeros_like(q), output)
            return
        assert isinstance(metadata, dict)
        tokens, chosen = self._tokens(metadata, positions), None
        if self.compress_ratio == 4:
            assert self.topk_indices_buffer is not None
            chosen = self.topk_indices_buffer[: tokens.count]
        self._attend(q, tokens, metadata, output, chosen)

    def _o_proj(self, o: Any, positions: torch.Tensor) -> torch.Tensor:
        """Both output projections; attention has rotated its result back already."""
        heads = o.heads if isinstance(o, Attended) else o
        assert heads is not None
        state, groups = self.dsv4_state, self.n_local_groups
        if state.projection is None:
            state.projection = grouped_projection(self.wo_a, groups)
        z = state.projection(heads.reshape(heads.shape[0], groups, -1))
        return self.wo_b(z.flatten(1))  # type: ignore[no-any-return]

    @property
    def dsv4_kind(self) -> int:
        """Modules of one ratio launch the same kernels."""
        return int(self.compress_ratio)

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the kernels of steps of that many tokens; not where parts are vLLM's own."""
        parts = [self.compressor, self.indexer, getattr(self.indexer, "compressor", None)]
        known = (compressor.Compressor, indexer.Indexer)
        limits = self.dsv4_state.limits
        if limits is not None and all(part is None or isinstance(part, known) for part in parts):
            attention_warm.warm(self, tokens, limits)

    def dsv4_choose(self, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Choose entries in a forward that takes them all, and attend to them.

        A step does so if captured pieces, which do not know the longest context, have made the
        queries.

        Args:
            x: ``[T, H]``.
            positions: ``[T]``.
        """
        part = self.indexer
        if not isinstance(part, indexer.Indexer) or not part.takes_all():
            return
        count = x.shape[0]
        q, index_q, weights = (
            x.new_zeros(size)
            for size in (
                (count, self.n_local_heads, self.head_dim),
                (count, part.n_head * part.head_dim),
                (count, part.n_head),
            )
        )
        queries = part.queries(index_q, positions, self.indexer_rotary_emb, weights)
        self._sparse_indexer_and_attn(x, *queries, q, q[:, 0], positions, Attended())

    def _tokens(self, metadata: dict[str, Any], positions: torch.Tensor) -> Tokens:
        return Tokens(metadata[self.swa_cache_layer.prefix], positions, self.window_size)

    def window_pages(self) -> Pages:
        """Pages of raw entries, in vLLM's cache."""
        cache = self.swa_cache_layer.kv_cache
        return self.dsv4_state.window.kv(cache, self.head_dim, self.rope_head_dim)

    def _compressed_pages(self) -> Pages | None:
        if self.compress_ratio <= 1:
            return None
        return self.dsv4_state.compressed.kv(self.kv_cache, self.head_dim, self.rope_head_dim)

    def _compressed_slots(
        self, tokens: Tokens, metadata: dict[str, Any], chosen: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Slots of the chosen entries, or of all that a token sees; None without any."""
        pages = self._compressed_pages()
        if pages is None:
            return None
        own = metadata[self.prefix]
        if chosen is not None:
            return entry_slots(own.block_table, pages.page_size, tokens.sequences, chosen)
        ratio = self.compress_ratio
        return tokens.prefix_slots(own.block_table, pages.page_size, ratio, own.max_seq_len)

    def _attend(
        self,
        q: torch.Tensor,
        tokens: Tokens,
        metadata: dict[str, Any],
        output: Any,
        chosen: torch.Tensor | None,
    ) -> None:
        """Attention of all tokens. Padding behind them keeps what it had, or gets zeros."""
        count = tokens.count
        if count == 0:
            self._leave(torch.zeros_like(q), output)
            return
        slots = self._compressed_slots(tokens, metadata, chosen)
        rows = count if slots is None else max(1, _SLOT_BYTES // max(1, 8 * slots.shape[1]))
        parts = [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
        made = [self._attend_part(q, tokens, slots, part) for part in parts]
        self._leave(made[0] if len(made) == 1 else torch.cat(made), output, q.shape[0])

    def _attend_part(
        self, q: torch.Tensor, tokens: Tokens, slots: torch.Tensor | None, part: slice
    ) -> torch.Tensor:
        cos, sin = tables(self.rotary_emb.cos_sin_cache, tokens.positions)
        return sparse_attention(
            q[part],
            self.window_pages(),
            tokens.window_slots[part],
            self._compressed_pages(),
            None if slots is None else slots[part],
            self.attn_sink[: self.n_local_heads],
            scale=self.scale,
            cos=cos[part],
            sin=sin[part],
        )

    @staticmethod
    def _leave(heads: torch.Tensor, output: Any, rows: int | None = None) -> None:
        """Leave a result where ``_alloc_attn_out`` said."""
        if not isinstance(output, Attended):
            output[: heads.shape[0]].copy_(heads)
            return
        missing = 0 if rows is None else rows - heads.shape[0]
        output.heads = heads if missing == 0 else nn.functional.pad(heads, (0, 0, 0, 0, 0, missing))


def _has_eager_pieces() -> bool:
    """Whether a graph is being captured around pieces that stay eager."""
    if not BreakableCUDAGraphCapture.is_active():
        return False
    if not is_forward_context_available():
        return True
    return get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.FULL


def adopt(model: nn.Module, context: Adoption) -> None:
    """Let every attention module of vLLM's model run on this package's operators, or say why not.

    Args:
        model: vLLM's model, before weights are loaded.
        context: Gets a row for each attention, indexer and compressor.
    """
    for name, module in model.named_modules():
        if not isinstance(module, DeepseekV4Attention):
            continue
        reason = reason_against(module, context.vllm_config)
        if reason:
            context.report.left(ATTENTION, name, type(module).__name__, reason)
            continue
        adopt_attention(module, attention_warm.Limits.of(context.vllm_config, module))
        context.report.replaced(ATTENTION, name, "sparse_attention")
        compressor.adopt(name, module, context)
        indexer.adopt(name, module, context)
        if adopt_metadata(module, context.vllm_config):
            context.report.replaced(ATTENTION, f"{name}.indexer.k_cache", step_metadata.KERNEL)


def adopt_attention(
    module: DeepseekV4FlashMLAAttention, limits: attention_warm.Limits | None = None
) -> None:
    """Change the class of one module. Its heads need no padding any more.

    Args:
        module: vLLM's.
        limits: The engine's, by which the module warms up; None: it does not.
    """
    module.dsv4_state = _State(PagesOf(), PagesOf(), limits)
    module.padded_heads = module.n_local_heads
    narrow = module._prepare_and_attn_fn.__func__ is DeepseekV4Attention._prepare_and_attn
    module.__class__ = Attention
    # vLLM binds one of the two at construction.
    chosen = Attention._prepare_and_attn if narrow else DeepseekV4Attention._prepare_and_attn_eager
    module._prepare_and_attn_fn = chosen.__get__(module)


def adopt_metadata(module: Any, vllm_config: Any) -> bool:
    """Let vLLM make the metadata that replaced modules read; with drafts, it makes all the rest.

    A draft updates the metadata of its windows in place, for which it needs what vLLM makes. Index
    keys are the main model's alone.

    Returns:
        Whether those of index keys are without DeepGEMM's plan.
    """
    if module.compressor is not None and not isinstance(module.compressor, compressor.Compressor):
        return False  # vLLM's attention reads slots that these builders do not make
    parts = [module.compressor]
    plans_nothing = False
    if isinstance(module.indexer, indexer.Indexer):
        plans_nothing = step_metadata.adopt(module.indexer.k_cache)
        parts.append(module.indexer.compressor)
    if getattr(vllm_config, "speculative_config", None) is not None:
        return plans_nothing
    module.dsv4_state.has_own_metadata = True
    step_metadata.adopt_window(module.swa_cache_layer)
    for part in parts:
        if isinstance(part, compressor.Compressor):
            step_metadata.adopt(part.state_cache)
    return plans_nothing


def reason_against(module: DeepseekV4Attention, vllm_config: Any) -> str:
    """Say why a module stays as it is; empty if it need not."""
    if type(module) is not DeepseekV4FlashMLAAttention:
        return f"vLLM chose {type(module).__name__}, expected DeepseekV4FlashMLAAttention"
    if module.kv_cache_dtype != "fp8_ds_mla":
        return f"the KV cache is {module.kv_cache_dtype}, expected fp8_ds_mla"
    if module.compress_ratio not in _RATIOS:
        return f"the compression ratio is {module.compress_ratio}, expected 1, 4 or 128"
    if module.max_image_tokens:
        return "the model sees images, whose tokens attend in both directions"
    block_size = attention_warm.block_tokens(module, vllm_config)
    if block_size % module.compress_ratio:
        return f"blocks of {block_size} tokens are no multiple of {module.compress_ratio}"
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "contexts are split between ranks"
    table = module.rotary_emb.cos_sin_cache
    if table.dtype != torch.float32 or table.shape[-1] != module.rope_head_dim:
        return (
            f"the rotary table is {list(table.shape)} {table.dtype}, expected float32 with "
            f"{module.rope_head_dim} columns"
        )
    return ""
