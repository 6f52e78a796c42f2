"""The lightning indexer: which compressed entries a query attends to (specification, section 6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import CSA, ModelConfig
from dsv4.kv_cache.paged_cache import CacheStep
from dsv4.kv_cache.pages import COMPACT_FORMATS
from dsv4.layers._module import wider
from dsv4.layers._pooling import PoolingModule, one_cache, plain_pages
from dsv4.layers._rounded import Values
from dsv4.layers.linear import Linear
from dsv4.ops.indexer import (
    indexer_queries,
    indexer_rotate_quantize,
    indexer_select,
    quantize_index_queries,
)
from dsv4.quant.formats import QuantizedTensor

Tables = tuple[torch.Tensor, torch.Tensor]


class DeepseekV4IndexerScorer(nn.Module):
    """The weights with which the indexer's heads are summed (specification, section 6, step 4)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.softmax_scale = config.index_head_dim**-0.5
        self.weights_scaling = config.index_n_heads**-0.5
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads)

    def weights(
        self, hidden_states: torch.Tensor, projected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map ``[..., H]`` to weights ``[..., heads]`` in float32, both scales included.

        Args:
            hidden_states: The tokens.
            projected: Their product with the weight; None: this method computes it.
        """
        weights = self.weights_proj(hidden_states) if projected is None else projected
        wide = weights.to(wider(weights.dtype, torch.float32))
        return wide * self.scale

    @property
    def scale(self) -> float:
        """Both scales of the weights (specification, section 6, step 4)."""
        return self.softmax_scale * self.weights_scaling

    def forward(
        self, q: torch.Tensor, compressed_kv: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Return scores ``[B, S, n]`` of entries ``[B, n, d]`` for queries ``[B, S, heads, d]``."""
        weights = self.weights(hidden_states)
        dots = torch.einsum("bshd,bnd->bshn", q.to(weights.dtype), compressed_kv.to(weights.dtype))
        return (dots.relu() * weights.unsqueeze(-1)).sum(2)


class DeepseekV4Indexer(PoolingModule):
    """Selects the ``index_topk`` entries of each query (specification, section 6).

    With DeepSeek's numerics queries and keys go through a Hadamard transform and FP4.
    """

    paged = ("indexer_state", "indexer_pages")
    rotates = True

    def __init__(self, config: Any) -> None:
        config = ModelConfig.of(config)
        super().__init__(config, CSA, config.index_head_dim, cache_name="indexer")
        self.num_heads = config.index_n_heads
        self.index_topk = config.index_topk
        self.q_b_proj = Linear(
            config.q_lora_rank, self.num_heads * self.head_dim, activation=config.activation
        )
        self.scorer = DeepseekV4IndexerScorer(config)

    def _stored(self, entries: torch.Tensor) -> torch.Tensor:
        return indexer_rotate_quantize(entries) if self.numerics == "deepseek" else entries

    def queries(self, q_residual: Values, position_ids: torch.Tensor) -> torch.Tensor:
        """Project, rotate and quantise index queries ``[..., heads, d]``; no norm per head."""
        q = self.project_queries(q_residual)
        tables = self.rotary_emb(q, position_ids, self.rope_layer_type)
        return self._rotated(q, *(t.expand(*q.shape[:-2], -1).flatten(0, -2) for t in tables))

    def project_queries(self, q_residual: Values) -> torch.Tensor:
        """Return queries ``[..., heads, d]`` before rotation."""
        return self.q_b_proj(q_residual).unflatten(-1, (self.num_heads, self.head_dim))

    def _rotated(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate and quantise queries, by a row of tables for each token."""
        rotate_quantize = self.numerics == "deepseek"
        rotated = indexer_queries(q.flatten(0, -3), cos, sin, rotate_quantize=rotate_quantize)
        return rotated.view(q.shape)

    def head_weights(
        self,
        hidden_states: torch.Tensor,
        step: CacheStep,
        layer_idx: int,
        projected: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weights of the heads for a flat batch.

        They include both scales if keys are plain; for keys in codes they do not, as
        ``quantize_index_queries`` expects. Values that ``select_paged`` reads from the step are
        made first.

        Args:
            hidden_states: ``[T, H]``.
            step: The step.
            layer_idx: The layer's place in its cache.
            projected: Product of the tokens with the heads' weight; None: it is computed here.
        """
        self.visible_in(step)
        pages = step.cache.layers[layer_idx].indexer_pages
        assert pages is not None
        if pages.entry_format in COMPACT_FORMATS:
            return self.scorer.weights_proj(hidden_states) if projected is None else projected
        return self.scorer.weights(hidden_states, projected)

    def _weighted_queries(
        self, weights: torch.Tensor, q: torch.Tensor, step: CacheStep, entry_format: str
    ) -> tuple[torch.Tensor | QuantizedTensor, torch.Tensor]:
        """Return queries and weights of a flat batch, in codes if keys are."""
        cos, sin = self.rotary_emb.of_step(q, step, self.rope_layer_type)
        if entry_format not in COMPACT_FORMATS:
            return self._rotated(q, cos, sin), weights
        return quantize_index_queries(
            q,
            cos,
            sin,
            weights,
            rotate=self.numerics == "deepseek",
            query_format=entry_format.removeprefix("index_"),
            weight_scale=self.scorer.scale,
        )

    def select_paged(
        self, weights: torch.Tensor, q: torch.Tensor, step: CacheStep, layer_idx: int
    ) -> torch.Tensor:
        """Return the slots of the selected entries of each token of a flat batch, ``[T, k]``.

        They are slots of index keys and, because the two are addressed alike, of attention's
        entries; negative for none.

        Args:
            weights: The result of ``head_weights``.
            q: The result of ``project_queries``, ``[T, heads, d]``.
            step: The step, whose keys are stored.
            layer_idx: The layer's place in its cache.
        """
        layer, batch = step.cache.layers[layer_idx], step.batch
        assert layer.indexer_pages is not None
        assert layer.compressed_table is not None
        pages = layer.indexer_pages
        return indexer_select(
            *self._weighted_queries(weights, q, step, pages.entry_format),
            pages,
            layer.compressed_table,
            batch.sequence_of_token,
            self.visible_in(step),
            top_k=self.index_topk,
            slots=True,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_residual: Values,
        position_ids: torch.Tensor,
        past_key_values: Any = None,
        layer_idx: int = -1,
        *,
        cache: Any = None,
    ) -> torch.Tensor:
        """Return entry numbers ``[B, S, min(index_topk, n)]`` int64, -1 where fewer are visible.

        Args:
            hidden_states: ``[B, S, H]``.
            q_residual: ``[B, S, q_lora_rank]``, or its codes.
            position_ids: ``[B, S]`` or ``[1, S]``.
            past_key_values: None or a transformers cache.
            layer_idx: The layer's place in that cache.
            cache: transformers' name of ``past_key_values`` from 5.24 on.
        """
        past_key_values = one_cache(self, past_key_values, cache)
        batch, queries, _ = hidden_states.shape
        keys = self.dense_entries(hidden_states, past_key_values, layer_idx)
        entries = keys.shape[1]
        if entries == 0:
            return torch.empty((batch, queries, 0), dtype=torch.long, device=keys.device)
        rows = torch.arange(batch, device=keys.device)
        pages = torch.arange(batch * entries, device=keys.device).view(batch, entries)
        position_ids = position_ids.expand(batch, queries)
        ids = indexer_select(
            self.queries(q_residual, position_ids).flatten(0, 1),
            self.scorer.weights(hidden_states).flatten(0, 1),
            plain_pages(keys),
            pages,
            rows.repeat_interleave(queries),
            self.visible(position_ids).reshape(-1),
            top_k=self.index_topk,
        )
        return ids.long().view(batch, queries, -1)
