"""Compressors: pool many tokens to one cache entry, and select a query's entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dsv4.config import CSA, HCA, ModelConfig
from dsv4.kv_cache.paged_cache import CacheStep
from dsv4.layers._pooling import PoolingModule, one_cache
from dsv4.layers._projections import are_merged, projections_of
from dsv4.layers._rounded import Values
from dsv4.layers.indexer import DeepseekV4Indexer
from dsv4.layers.linear import Linear
from dsv4.overlap import Streams


def _bias_of(slots: torch.Tensor, entries: int, dtype: torch.dtype) -> torch.Tensor:
    """Convert entry numbers ``[B, S, k]``, -1 for none, to an additive ``[B, 1, S, entries]``."""
    batch, queries = slots.shape[:2]
    shape = (batch, queries, entries + 1)
    bias = torch.full(shape, float("-inf"), dtype=dtype, device=slots.device)
    bias.scatter_(-1, torch.where(slots < 0, entries, slots), 0.0)
    return bias[:, None, :, :entries]


class _AttentionCompressor(PoolingModule):
    """A compressor whose entries the attention reads; subclasses differ in the entries chosen."""

    def select(
        self,
        entries: torch.Tensor,
        hidden_states: torch.Tensor,
        q_residual: Values,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Return the entry numbers each query attends to, ``[B, S, k]``, -1 for none."""
        raise NotImplementedError

    def begin_paged(
        self, hidden_states: torch.Tensor, step: CacheStep, layer_idx: int, streams: Streams
    ) -> torch.Tensor:
        """Launch all work that needs no query on side streams; ``hidden_states`` are ``[T, H]``.

        Returns:
            A tensor, the argument ``begun`` of ``paged_slots``.
        """
        raise NotImplementedError

    def index_queries(self, q_residual: Values) -> torch.Tensor | None:
        """Return index queries of ``q_residual [T, q_lora]`` or codes; None without an indexer."""
        return None

    def paged_slots(
        self,
        begun: torch.Tensor,
        queries: torch.Tensor | None,
        step: CacheStep,
        layer_idx: int,
        streams: Streams,
    ) -> torch.Tensor:
        """Return the cache slots that each token attends to, ``[T, k]``, -1 for none.

        This joins the work of ``begin_paged``, after which closed entries are stored.

        Args:
            begun: Result of ``begin_paged``.
            queries: Result of ``index_queries``.
            step: See ``begin_paged``.
            layer_idx: See ``begin_paged``.
            streams: See ``begin_paged``.
        """
        raise NotImplementedError

    def shared_in(self, step: CacheStep, layer_idx: int) -> tuple[torch.Tensor, ...]:
        """All that ``begin_paged`` and ``paged_slots`` ask the step for, made if missing."""
        return (self.visible_in(step),)

    def forward(
        self,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any = None,
        layer_idx: int = -1,
        *,
        cache: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all entries and the additive mask over them, as transformers' module does.

        Args:
            hidden_states: ``[B, S, H]``.
            q_residual: ``[B, S, q_lora_rank]``, the input of the indexer.
            position_ids: ``[B, S]`` or ``[1, S]``.
            past_key_values: None or a transformers cache.
            layer_idx: The layer's place in that cache.
            cache: transformers' name of ``past_key_values`` from 5.24 on.

        Returns:
            Entries ``[B, 1, n, head_dim]`` and mask ``[B, 1, S, n]`` of 0 and -inf.
        """
        past_key_values = one_cache(self, past_key_values, cache)
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
        q_residual: Values,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Return the entry numbers each query attends to, ``[B, S, entries]``, -1 for none."""
        numbers = torch.arange(entries.shape[1], device=entries.device)
        visible = self.visible(position_ids).unsqueeze(-1)
        chosen = torch.where(numbers < visible, numbers, -1)
        return chosen.expand(hidden_states.shape[0], -1, -1)

    def begin_paged(
        self, hidden_states: torch.Tensor, step: CacheStep, layer_idx: int, streams: Streams
    ) -> torch.Tensor:
        """Store the entries that closed; return the slots of all closed entries, then -1."""
        with streams.on("entries"):
            self.write_pages(hidden_states, step, layer_idx)
            return self._prefix_in(step, layer_idx)

    def paged_slots(
        self,
        begun: torch.Tensor,
        queries: torch.Tensor | None,
        step: CacheStep,
        layer_idx: int,
        streams: Streams,
    ) -> torch.Tensor:
        """Return the slots of all closed entries, which ``begin_paged`` made."""
        streams.join("entries", begun)
        return begun

    def shared_in(self, step: CacheStep, layer_idx: int) -> tuple[torch.Tensor, ...]:
        """All that ``begin_paged`` and ``paged_slots`` ask the step for, made if missing."""
        return (self._prefix_in(step, layer_idx),)

    def _prefix_in(self, step: CacheStep, layer_idx: int) -> torch.Tensor:
        """Return the slots of all closed entries of each token of a step; layers share them."""
        layer = step.cache.layers[layer_idx]
        return step.once(
            ("prefix", id(layer.compressed_table), self.compress_rate),
            lambda: layer.compressed_prefix_slots(
                step.batch.sequence_of_token, self.visible_in(step)
            ),
        )


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
        q_residual: Values,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        """Return the entry numbers each query attends to, ``[B, S, k]``, -1 for none."""
        return self.indexer(hidden_states, q_residual, position_ids, past_key_values, layer_idx)

    def begin_paged(
        self, hidden_states: torch.Tensor, step: CacheStep, layer_idx: int, streams: Streams
    ) -> torch.Tensor:
        """Store index keys and the entries that closed; return the weights of the index heads.

        Index keys have a stream of their own. On the other stream the weights come before the
        entries, because the top-k selection needs the weights and not the entries. For few tokens
        one launch computes all projections, and a single stream runs all of this work: keys before
        entries, for the same reason.
        """
        indexer = self.indexer
        layers = [self.kv_proj, self.gate_proj, indexer.kv_proj, indexer.gate_proj]
        layers.append(indexer.scorer.weights_proj)
        if self.kv_proj.format is None and are_merged(layers, hidden_states):
            return self._begin_merged(layers, hidden_states, step, layer_idx, streams)
        with streams.on("index keys"):
            indexer.write_pages(hidden_states, step, layer_idx)
        with streams.on("head weights"):
            weights = indexer.head_weights(hidden_states, step, layer_idx)
        with streams.on("entries", behind="head weights"):
            self.write_pages(hidden_states, step, layer_idx)
        return weights

    def _begin_merged(
        self,
        layers: Sequence[Linear],
        x: torch.Tensor,
        step: CacheStep,
        layer_idx: int,
        streams: Streams,
    ) -> torch.Tensor:
        with streams.on("head weights"):
            made = projections_of(layers, x, self.pooled_dtype(x))
            weights = self.indexer.head_weights(x, step, layer_idx, made.heads)
        with streams.on("index keys", behind="head weights"):
            kv, score = made.keys
            self.indexer.write_pages(x, step, layer_idx, (kv, score))
        with streams.on("entries", behind="head weights"):
            self.write_pages(x, step, layer_idx, made.pooled)
        return weights

    def index_queries(self, q_residual: Values) -> torch.Tensor:
        """Return the index queries ``[T, heads, d]`` before rotation."""
        return self.indexer.project_queries(q_residual)

    def paged_slots(
        self,
        begun: torch.Tensor,
        queries: torch.Tensor | None,
        step: CacheStep,
        layer_idx: int,
        streams: Streams,
    ) -> torch.Tensor:
        """Return the slots of the entries that the indexer chooses."""
        assert queries is not None
        streams.join("index keys")
        streams.join("head weights", begun)
        slots = self.indexer.select_paged(begun, queries, step, layer_idx)
        streams.join("entries")
        return slots
