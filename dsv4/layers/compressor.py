"""Compressors: many tokens to one key-value entry, and the indexer that chooses among the entries.

Each module runs in two ways. Dense: hidden states ``[B, S, H]`` with no cache or with one of
transformers' cache objects, whose protocol it speaks. Paged: a flat ragged batch whose state and
entries live in a ``PagedCache``. Both call the same operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.cache import CacheStep
from dsv4.config import CSA, HCA, ModelConfig
from dsv4.layers._module import FixedDtypeModule
from dsv4.layers.linear import Linear
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.layers.rotary import DeepseekV4RotaryEmbedding
from dsv4.ops.compressor import compressor_update, pool_windows
from dsv4.ops.indexer import indexer_rotate_quantize, indexer_select
from dsv4.ops.kv_cache import Pages, fake_quantize_kv, write_kv
from dsv4.ops.rope import rope


class _Compressor(FixedDtypeModule):
    """Projection, pooling, norm and rotation shared by the three compressors.

    Attributes:
        cache_name: Under which name transformers' cache objects keep this compressor's state.
        compress_rate: Tokens per entry.
        overlap: Whether a window also pools the first half of the window before it.
    """

    wide = frozenset({"position_bias"})
    rope_layer_type = "compress"

    def __init__(
        self, config: ModelConfig, layer_type: str, width: int, cache_name: str = "compressor"
    ) -> None:
        super().__init__()
        self.cache_name = cache_name
        self.compress_rate = config.compress_rates[layer_type]
        self.overlap = layer_type == CSA
        self.head_dim = width
        self.rope_dim = config.qk_rope_head_dim
        self.numerics = config.numerics
        channels = width * (2 if self.overlap else 1)
        self.kv_proj = Linear(config.hidden_size, channels, activation=config.activation)
        self.gate_proj = Linear(config.hidden_size, channels, activation=config.activation)
        self.position_bias = nn.Parameter(torch.zeros(self.compress_rate, channels))
        self.kv_norm = DeepseekV4RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)

    def _project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys-values and scores: float32 from here on, as DeepSeek does (section 5.1)."""
        dtype = None
        if self.numerics == "deepseek":
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        return self.kv_proj(hidden_states, dtype), self.gate_proj(hidden_states, dtype)

    def _finish(
        self, pooled: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Norm, then rotation at the position of the window's first token (trap T3)."""
        entries = self.kv_norm(pooled.to(dtype))
        cos, sin = self.rotary_emb(entries, positions, self.rope_layer_type)
        return rope(entries, cos, sin)

    def _stored(self, entries: torch.Tensor) -> torch.Tensor:
        """What reading an entry back from the cache would give."""
        return fake_quantize_kv(entries, self.rope_dim) if self.numerics == "deepseek" else entries

    def dense_entries(
        self, hidden_states: torch.Tensor, past_key_values: Any, layer_idx: int
    ) -> torch.Tensor:
        """All entries so far, ``[B, entries, head_dim]``."""
        kv, score = self._project(hidden_states)
        state = None if past_key_values is None else past_key_values.layers[layer_idx]
        if state is None:
            usable = kv.shape[1] // self.compress_rate * self.compress_rate
            kv, score, first = kv[:, :usable], score[:, :usable], 0
        else:
            kv, score, first = state.store_compression_weights(self.cache_name, kv, score)
        new = self._dense_windows(kv, score, first, state, hidden_states.dtype)
        return new if state is None else state.update_compressor_states(self.cache_name, new)

    def _dense_windows(
        self, kv: torch.Tensor, score: torch.Tensor, first: int, state: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        batch, windows = kv.shape[0], kv.shape[1] // self.compress_rate
        if windows == 0:
            return kv.new_zeros((batch, 0, self.head_dim), dtype=dtype)
        kv = kv.reshape(batch, windows, self.compress_rate, -1)
        score = score.reshape(batch, windows, self.compress_rate, -1)
        score = score + self.position_bias.to(score.dtype)
        previous: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if self.overlap and state is not None:
            previous = state.update_overlap_state(self.cache_name, kv, score, self.head_dim)
        pooled = pool_windows(kv, score, *previous, overlap=self.overlap)
        positions = first + self.compress_rate * torch.arange(windows, device=kv.device)
        entries = self._finish(pooled, positions.expand(batch, windows), dtype)
        return self._stored(entries)

    def _paged_entries(
        self, hidden_states: torch.Tensor, step: CacheStep, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Entries closed by this batch, their sequences and their numbers; -1 marks unused rows."""
        kv, score = self._project(hidden_states)
        batch = step.batch
        pooled, positions, sequences = compressor_update(
            kv,
            score,
            self.position_bias,
            state,
            batch.cu_seqlens,
            batch.starts,
            batch.sequences,
            overlap=self.overlap,
        )
        entries = self._finish(pooled, positions.clamp(min=0), hidden_states.dtype)
        numbers = positions.div(self.compress_rate, rounding_mode="floor")
        return entries, sequences, numbers

    def write_pages(self, hidden_states: torch.Tensor, step: CacheStep, layer_idx: int) -> None:
        """Update the state with ``hidden_states [T, H]`` and store the entries that closed."""
        layer = step.cache.layers[layer_idx]
        assert layer.state is not None
        assert layer.compressed is not None
        entries, sequences, numbers = self._paged_entries(hidden_states, step, layer.state)
        slots = layer.compressed_write_slots(sequences, numbers)
        write_kv(layer.compressed, entries, slots)

    def visible(self, position_ids: torch.Tensor) -> torch.Tensor:
        """How many entries a token at each position may see, itself included in the last."""
        return (position_ids + 1).div(self.compress_rate, rounding_mode="floor")


def plain_pages(entries: torch.Tensor) -> Pages:
    """Entries ``[B, n, d]``, n > 0, as pages: entry i of sequence b has slot ``b * n + i``."""
    return Pages(entries, entries.shape[1], "plain", entries.shape[2], 0)


def _bias_of(slots: torch.Tensor, entries: int, dtype: torch.dtype) -> torch.Tensor:
    """Entry numbers ``[B, S, k]``, -1 for none, to an additive mask ``[B, 1, S, entries]``."""
    batch, queries = slots.shape[:2]
    bias = torch.full((batch, queries, entries + 1), float("-inf"), device=slots.device)
    bias.scatter_(-1, torch.where(slots < 0, entries, slots), 0.0)
    return bias[:, None, :, :entries].to(dtype)


class _AttentionCompressor(_Compressor):
    """A compressor whose entries the attention reads; its kinds differ in which it reads."""

    def select(
        self,
        entries: torch.Tensor,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Entry numbers each query attends to, ``[B, S, k]``, -1 for none."""
        raise NotImplementedError

    def select_paged(
        self, hidden_states: torch.Tensor, q_residual: torch.Tensor, step: CacheStep, layer_idx: int
    ) -> torch.Tensor:
        """Cache slots each token attends to, ``[T, k]``, -1 for none."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' contract: all entries and the additive mask over them.

        Args:
            hidden_states: ``[B, S, H]``.
            q_residual: ``[B, S, q_lora_rank]``, what the indexer reads.
            position_ids: ``[B, S]`` or ``[1, S]``.
            past_key_values: None or a transformers cache.
            layer_idx: The layer's place in that cache.

        Returns:
            Entries ``[B, 1, n, head_dim]`` and mask ``[B, 1, S, n]`` of 0 and -inf.
        """
        entries = self.dense_entries(hidden_states, past_key_values, layer_idx)
        chosen = self.select(
            entries, hidden_states, q_residual, position_ids, past_key_values, layer_idx
        )
        return entries.unsqueeze(1), _bias_of(chosen, entries.shape[1], entries.dtype)


class DeepseekV4HCACompressor(_AttentionCompressor):
    """Heavily compressed attention: disjoint windows, every closed entry attended to."""

    def __init__(self, config: Any) -> None:
        config = ModelConfig.of(config)
        super().__init__(config, HCA, config.head_dim)

    def select(
        self,
        entries: torch.Tensor,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Entry numbers each query attends to, ``[B, S, entries]``, -1 for none."""
        numbers = torch.arange(entries.shape[1], device=entries.device)
        visible = self.visible(position_ids).unsqueeze(-1)
        chosen = torch.where(numbers < visible, numbers, -1)
        return chosen.expand(hidden_states.shape[0], -1, -1)

    def select_paged(
        self, hidden_states: torch.Tensor, q_residual: torch.Tensor, step: CacheStep, layer_idx: int
    ) -> torch.Tensor:
        """Slots of all closed entries, ``[T, k]``, -1 beyond them."""
        layer = step.cache.layers[layer_idx]
        batch = step.batch
        visible = self.visible(batch.positions)
        return layer.compressed_prefix_slots(batch.sequence_of_token, visible)


class DeepseekV4IndexerScorer(nn.Module):
    """The weights with which the indexer's heads are summed (specification section 6, step 4)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.softmax_scale = config.index_head_dim**-0.5
        self.weights_scaling = config.index_n_heads**-0.5
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads)

    def weights(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to ``[..., heads]`` float32, both scales included."""
        weights = self.weights_proj(hidden_states)
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        return wide * (self.softmax_scale * self.weights_scaling)

    def forward(
        self, q: torch.Tensor, compressed_kv: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Scores ``[B, S, n]`` of entries ``[B, n, d]`` for queries ``[B, S, heads, d]``."""
        weights = self.weights(hidden_states)
        dots = torch.einsum("bshd,bnd->bshn", q.to(weights.dtype), compressed_kv.to(weights.dtype))
        return (dots.relu() * weights.unsqueeze(-1)).sum(2)


class DeepseekV4Indexer(_Compressor):
    """Chooses the ``index_topk`` entries each query of a CSA layer attends to (section 6).

    With DeepSeek's numerics queries and keys go through a Hadamard transform and FP4.
    """

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

    def queries(self, q_residual: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Index queries ``[..., heads, d]``: projected, rotated, quantised; no norm per head."""
        q = self.q_b_proj(q_residual).unflatten(-1, (self.num_heads, self.head_dim))
        cos, sin = self.rotary_emb(q, position_ids, self.rope_layer_type)
        return self._stored(rope(q, cos.unsqueeze(-2), sin.unsqueeze(-2)))

    def write_pages(self, hidden_states: torch.Tensor, step: CacheStep, layer_idx: int) -> None:
        """Update the indexer's state and store the keys that closed."""
        layer = step.cache.layers[layer_idx]
        assert layer.indexer_state is not None
        assert layer.indexer_pages is not None
        keys, sequences, numbers = self._paged_entries(hidden_states, step, layer.indexer_state)
        slots = layer.compressed_write_slots(sequences, numbers)
        write_kv(layer.indexer_pages, self._stored(keys), slots)

    def select_paged(
        self, hidden_states: torch.Tensor, q_residual: torch.Tensor, step: CacheStep, layer_idx: int
    ) -> torch.Tensor:
        """Entry numbers for each token of a flat batch, ``[T, k]``, -1 for none."""
        layer, batch = step.cache.layers[layer_idx], step.batch
        assert layer.indexer_pages is not None
        assert layer.compressed_table is not None
        return indexer_select(
            self.queries(q_residual, batch.positions),
            self.scorer.weights(hidden_states),
            layer.indexer_pages,
            layer.compressed_table,
            batch.sequence_of_token,
            self.visible(batch.positions),
            top_k=self.index_topk,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Entry numbers ``[B, S, min(index_topk, n)]`` int64, -1 where fewer are visible.

        Args:
            hidden_states: ``[B, S, H]``.
            q_residual: ``[B, S, q_lora_rank]``.
            position_ids: ``[B, S]`` or ``[1, S]``.
            past_key_values: None or a transformers cache.
            layer_idx: The layer's place in that cache.
        """
        batch, queries, _ = hidden_states.shape
        keys = self.dense_entries(hidden_states, past_key_values, layer_idx)
        entries = keys.shape[1]
        if entries == 0:
            return torch.empty((batch, queries, 0), dtype=torch.long, device=keys.device)
        rows = torch.arange(batch, device=keys.device)
        position_ids = position_ids.expand(batch, queries)
        ids = indexer_select(
            self.queries(q_residual, position_ids).flatten(0, 1),
            self.scorer.weights(hidden_states).flatten(0, 1),
            plain_pages(keys),
            rows.unsqueeze(1),
            rows.repeat_interleave(queries),
            self.visible(position_ids).reshape(-1),
            top_k=self.index_topk,
        )
        return ids.long().view(batch, queries, -1)


class DeepseekV4CSACompressor(_AttentionCompressor):
    """Compressed sparse attention: overlapping windows, the indexer chooses among the entries."""

    def __init__(self, config: Any) -> None:
        config = ModelConfig.of(config)
        super().__init__(config, CSA, config.head_dim)
        self.indexer = DeepseekV4Indexer(config)

    def select(
        self,
        entries: torch.Tensor,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Entry numbers each query attends to, ``[B, S, k]``, -1 for none."""
        return self.indexer(hidden_states, q_residual, position_ids, past_key_values, layer_idx)

    def write_pages(self, hidden_states: torch.Tensor, step: CacheStep, layer_idx: int) -> None:
        """Store the entries and the index keys that closed."""
        super().write_pages(hidden_states, step, layer_idx)
        self.indexer.write_pages(hidden_states, step, layer_idx)

    def select_paged(
        self, hidden_states: torch.Tensor, q_residual: torch.Tensor, step: CacheStep, layer_idx: int
    ) -> torch.Tensor:
        """Cache slots each token attends to, ``[T, k]``, -1 for none."""
        ids = self.indexer.select_paged(hidden_states, q_residual, step, layer_idx)
        layer = step.cache.layers[layer_idx]
        return layer.compressed_slots_of(step.batch.sequence_of_token, ids)
