"""Attention over a window of raw tokens and over compressed entries, in one softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import CSA, HCA, ModelConfig
from dsv4.kv_cache.paged_cache import CacheStep
from dsv4.kv_cache.pages import Pages
from dsv4.layers._mask import masked_slots, window_slots
from dsv4.layers._module import FixedDtypeModule, wide_dtype
from dsv4.layers._pooling import one_cache, plain_pages
from dsv4.layers._rounded import Values, is_own, rounded_norm
from dsv4.layers.compressor import DeepseekV4CSACompressor, DeepseekV4HCACompressor
from dsv4.layers.fusion import fused_linear
from dsv4.layers.indexer import DeepseekV4Indexer
from dsv4.layers.linear import DeepseekV4GroupedLinear, Linear
from dsv4.layers.norm import DeepseekV4RMSNorm, DeepseekV4UnweightedRMSNorm
from dsv4.layers.rotary import DeepseekV4RotaryEmbedding
from dsv4.ops.attention import sparse_attention
from dsv4.ops.head_norm_rope_write_kv import head_norm_rope_write_kv
from dsv4.ops.kv_cache import fake_quantize_kv, norm_rope_write_kv
from dsv4.ops.norm import head_norm_rope_
from dsv4.ops.rope import rope
from dsv4.overlap import IN_ORDER, side_streams
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.reduce import all_reduce
from dsv4.parallel.split import LocalSizes

Tables = tuple[torch.Tensor, torch.Tensor]
# Up to this many tokens of a step queries are projected on a side stream during the top-k
# selection. GEMMs of more tokens fill the GPU by themselves.
_OVERLAPPED_QUERIES = 64


class DeepseekV4Attention(FixedDtypeModule):
    """Attention of one layer, of any of the three types (specification, section 4).

    ``past_key_values`` decides where earlier tokens come from: None (there are none), one of
    transformers' cache objects, a ``CacheStep`` of a ``PagedCache``, or a cache that
    ``dsv4.integrations.transformers.paged_cache`` makes of both.

    With ``parallel`` it has this rank's heads and groups of the output projection
    (``dsv4.parallel.split``), and its result is the sum over the ranks.
    """

    wide = frozenset({"sinks"})
    joined = (("q_a_proj", "kv_proj"),)

    def __init__(
        self, config: Any, layer_idx: int, parallel: ParallelContext | None = None
    ) -> None:
        super().__init__()
        self.config = ModelConfig.of(config)
        config = self.config
        self.layer_idx = layer_idx
        self.parallel = parallel
        sizes = LocalSizes.of(config, parallel)
        self.layer_type = config.layer_type(layer_idx)
        self.rope_layer_type = "compress" if config.compress_rate(layer_idx) else "main"
        self.num_heads = sizes.heads
        self.head_dim = config.head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.sliding_window = config.sliding_window
        self.numerics = config.numerics
        self.scaling = config.head_dim**-0.5
        self._add_projections(config, sizes.groups)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads, dtype=wide_dtype()))
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        self.compressor: DeepseekV4CSACompressor | DeepseekV4HCACompressor | None = None
        if self.layer_type == CSA:
            self.compressor = DeepseekV4CSACompressor(config)
        elif self.layer_type == HCA:
            self.compressor = DeepseekV4HCACompressor(config)

    def _add_projections(self, config: ModelConfig, groups: int) -> None:
        activation = config.activation
        hidden, rank, inner = config.hidden_size, config.q_lora_rank, self.num_heads * self.head_dim
        o_inner = groups * config.o_lora_rank
        self.q_a_proj = Linear(hidden, rank, activation=activation)
        self.q_a_norm = DeepseekV4RMSNorm(rank, eps=config.rms_norm_eps)
        self.q_b_proj = Linear(rank, inner, activation=activation)
        self.q_b_norm = DeepseekV4UnweightedRMSNorm(eps=config.rms_norm_eps)
        self.kv_proj = Linear(hidden, self.head_dim, activation=activation)
        self.kv_norm = DeepseekV4RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.o_a_proj = DeepseekV4GroupedLinear(
            inner // groups, o_inner, groups, activation=activation
        )
        self.o_b_proj = Linear(o_inner, hidden, activation=activation)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, Tables] | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        cache: Any = None,
        reduce: bool = True,
    ) -> tuple[torch.Tensor, None]:
        """Attend.

        Args:
            hidden_states: ``[B, S, H]``; with a ``CacheStep``, ``[1, T, H]``: all its tokens.
            position_embeddings: cos and sin by ``"main"`` and ``"compress"``; made here if None.
            position_ids: ``[B, S]`` or ``[1, S]``; by default the positions after the tokens of a
                cache. A step has its own.
            attention_mask: ``[B or 1, 1, S, L]`` over the L raw keys, bool or additive; it alone
                decides which of them a query sees. An entry of 0 shows its key, an entry of -1e4 or
                less hides it. None: the window that ends with the query.
            past_key_values: See the class.
            cache: transformers' name of ``past_key_values`` from 5.24 on.
            reduce: Whether to sum over the ranks, where there are several; else the result is this
                rank's part of the sum.

        Returns:
            ``[B, S, H]`` and None: attention weights are never materialised.

        Raises:
            TypeError: if the cache is given twice.
            ValueError: if a shape is wrong, the mask has other entries, or a step comes with
                positions or a mask.
        """
        past = one_cache(self, past_key_values, cache)
        self._check(hidden_states, attention_mask)
        if hasattr(past, "packed_rows"):
            out = self._forward_packed(hidden_states, position_ids, attention_mask, past)
            return all_reduce(self.parallel, out) if reduce else out, None
        label = self.rope_layer_type
        tables = None if position_embeddings is None else position_embeddings[label]
        if isinstance(past, CacheStep):
            _refuse_with_step(position_ids, attention_mask)
            out = self._up(self._attend_paged(hidden_states[0], tables, past)).unsqueeze(0)
        else:
            if position_ids is None:
                position_ids = following_positions(hidden_states, past, self.layer_idx)
            _check_positions(position_ids, hidden_states)
            tables = tables or self.rotary_emb(hidden_states, position_ids, label)
            out = self._up(
                self._attend_dense(hidden_states, tables, position_ids, attention_mask, past)
            )
        return all_reduce(self.parallel, out) if reduce else out, None

    def _forward_packed(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        past: Any,
    ) -> torch.Tensor:
        """Attend for ``[B, S]`` as the flat batch of a paged cache, at the cache's positions."""
        rows = past.packed_rows(self.layer_idx, hidden_states, mask, position_ids)
        packed = rows.pack(hidden_states)
        out, _ = DeepseekV4Attention.forward(self, packed, past_key_values=rows.step, reduce=False)
        past.finished(self.layer_idx, hidden_states)
        return rows.unpack(out, hidden_states)

    def _check(self, hidden_states: torch.Tensor, mask: torch.Tensor | None) -> None:
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"DeepseekV4Attention: hidden_states has shape {list(hidden_states.shape)}, "
                f"wanted [B, S, {self.config.hidden_size}]"
            )
        if mask is not None and mask.dim() != 4:
            raise ValueError(
                f"DeepseekV4Attention: attention_mask has shape {list(mask.shape)}, "
                "wanted [B or 1, 1, S, L]"
            )

    def _up(self, out: torch.Tensor) -> torch.Tensor:
        """Project ``[..., heads, D]`` to ``[..., H]``, this rank's part of the sum."""
        o_a_proj = self.o_a_proj
        grouped = out.reshape(*out.shape[:-2], o_a_proj.n_groups, o_a_proj.in_features)
        return self.o_b_proj(o_a_proj(grouped).flatten(-2))

    def _down(self, x: torch.Tensor) -> tuple[Values, torch.Tensor]:
        """Return q_residual ``[..., q_lora]``, normed, and kv ``[..., D]``, as projected.

        With FP8 activations q_residual is codes, if all projections of it take them.
        """
        q_a, kv = fused_linear([self.q_a_proj, self.kv_proj], x)
        if getattr(self._modules["q_b_proj"], "activation", None) != "fp8":
            return self.q_a_norm(q_a), kv
        return rounded_norm(self.q_a_norm, q_a, self._query_projections()), kv

    def _query_projections(self) -> list[nn.Module]:
        """Return all layers that read q_residual; modules of somebody else get values."""
        layers: list[nn.Module] = [self.q_b_proj]
        if isinstance(self.compressor, DeepseekV4CSACompressor):
            indexer = self.compressor.indexer
            layers.append(indexer.q_b_proj if is_own(indexer, DeepseekV4Indexer) else indexer)
        return layers

    def _projected_queries(self, q_residual: Values) -> torch.Tensor:
        """Return q ``[T, heads, D]`` before norm and rotation from ``q_residual [..., q_lora]``."""
        return self.q_b_proj(q_residual).reshape(-1, self.num_heads, self.head_dim)

    def _queries(self, q_residual: Values, tables: Tables) -> torch.Tensor:
        """Return rotated q ``[T, heads, D]`` from ``q_residual [..., q_lora]``, by T-row tables."""
        q = self._projected_queries(q_residual)
        head_norm_rope_(q, *tables, self.q_b_norm.eps)
        return q

    def _queries_and_entries(
        self, down: tuple[Values, torch.Tensor], tables: Tables, pages: Pages, slots: torch.Tensor
    ) -> torch.Tensor:
        """Return rotated q ``[T, heads, D]``, and store the tokens' raw KV entries.

        Args:
            down: Result of ``_down`` for ``[T, H]``.
            tables: cos and sin of the T tokens.
            pages: Pages of the entries.
            slots: ``[T]`` int, see ``norm_rope_write_kv``.
        """
        q_residual, kv = down
        q, norm = self._projected_queries(q_residual), self.kv_norm
        head_norm_rope_write_kv(
            q,
            pages,
            kv,
            norm.weight,
            *tables,
            slots,
            q_eps=self.q_b_norm.eps,
            kv_eps=norm.variance_epsilon,
        )
        return q

    @staticmethod
    def _flat(tables: Tables, q: Values) -> Tables:
        """Return a row of both tables for each token of ``q [B, S, ...]``."""
        cos, sin = (table.expand(*q.shape[:2], -1).flatten(0, 1) for table in tables)
        return cos, sin

    def shared_in(
        self, step: CacheStep, x: torch.Tensor, position_embeddings: dict[str, Tables] | None
    ) -> tuple[torch.Tensor, ...]:
        """Make everything that a forward reads from the step: slots, tables, counts.

        Args:
            step: See ``forward``.
            x: A tensor with the dtype and on the device of the hidden states.
            position_embeddings: See ``forward``.
        """
        label, layer = self.rope_layer_type, step.cache.layers[self.layer_idx]
        tables = None if position_embeddings is None else position_embeddings[label]
        tables = self.rotary_emb.of_step(x, step, label, tables)
        slots = step.read_slots(layer), step.write_slots(layer)
        if self.compressor is None:
            return (*tables, *slots)
        return (*tables, *slots, *self.compressor.shared_in(step, self.layer_idx))

    def write_window(self, hidden_states: torch.Tensor, step: CacheStep) -> None:
        """Write the raw KV entries of a batch ``[T, H]`` to the cache, and attend to nothing.

        Raises:
            ValueError: if the layer has a compressor, which would miss these tokens.
        """
        if self.compressor is not None:
            raise ValueError(
                f"write_window: layer {self.layer_idx} is {self.layer_type}, wanted "
                "sliding_attention"
            )
        if not torch.compiler.is_compiling():
            step.cache.check_model(self.config, hidden_states.dtype)
        _, kv = self._down(hidden_states)
        cos, sin = self.rotary_emb.of_step(hidden_states, step, self.rope_layer_type)
        layer, norm = step.cache.layers[self.layer_idx], self.kv_norm
        norm_rope_write_kv(
            layer.window,
            kv,
            norm.weight,
            cos,
            sin,
            step.write_slots(layer),
            eps=norm.variance_epsilon,
        )

    def _attend_paged(
        self, hidden_states: torch.Tensor, tables: Tables | None, step: CacheStep
    ) -> torch.Tensor:
        """Write a batch ``[T, H]`` to the cache, then attend to keys from there: ``[T, heads, D]``.

        Values that layers share are made on the current stream. For few tokens of a CSA layer the
        GEMM of the index queries comes first, and attention's queries are made on a side stream
        during the top-k selection, which takes as long and leaves most of the GPU idle.
        """
        if not torch.compiler.is_compiling():
            step.cache.check_model(self.config, hidden_states.dtype)
        layer, compressor = step.cache.layers[self.layer_idx], self.compressor
        streams = side_streams(hidden_states)
        if compressor is not None:
            begun = compressor.begin_paged(hidden_states, step, self.layer_idx, streams)
        q_residual, kv = self._down(hidden_states)
        tables = self.rotary_emb.of_step(hidden_states, step, self.rope_layer_type, tables)
        cos, sin = tables
        seen, written = step.read_slots(layer), step.write_slots(layer)
        index_q = None if compressor is None else compressor.index_queries(q_residual)
        overlaps = self.layer_type == CSA and q_residual.shape[0] <= _OVERLAPPED_QUERIES
        query_streams = streams if overlaps else IN_ORDER
        with query_streams.on("queries"):
            q = self._queries_and_entries((q_residual, kv), tables, layer.window, written)
        slots = None
        if compressor is not None:
            slots = compressor.paged_slots(begun, index_q, step, self.layer_idx, streams)
        query_streams.join("queries", q)
        return sparse_attention(
            q,
            layer.window,
            seen,
            layer.compressed,
            slots,
            self.sinks,
            scale=self.scaling,
            cos=cos,
            sin=sin,
        )

    def _attend_dense(
        self,
        hidden_states: torch.Tensor,
        tables: Tables,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past: Any,
    ) -> torch.Tensor:
        q_residual, kv = self._down(hidden_states)
        batch, queries = q_residual.shape[:2]
        cos, sin = self._flat(tables, q_residual)
        q = self._queries(q_residual, (cos, sin))
        kv = rope(self.kv_norm(kv), *tables)
        if batch * queries == 0:
            return q.unflatten(0, (batch, queries))
        if self.numerics == "deepseek":
            kv = fake_quantize_kv(kv, self.rope_dim)
        if attention_mask is not None:  # raises, if it is not supported, before the cache changes
            keys = queries if past is None else past.get_mask_sizes(queries, self.layer_idx)[0]
            shown = masked_slots(attention_mask, batch, queries, keys, self.sliding_window)
        if past is not None:
            key = kv.unsqueeze(1)
            kv = past.update(key, key, self.layer_idx)[0].squeeze(1)
        if attention_mask is None:
            shown = window_slots(batch, queries, kv.shape[1], self.sliding_window, kv.device)
        compressed, slots = None, None
        if self.compressor is not None:
            entries = self.compressor.dense_entries(hidden_states, past, self.layer_idx)
            chosen = self.compressor.select(
                entries, hidden_states, q_residual, position_ids, past, self.layer_idx
            )
            if entries.shape[1] > 0:
                compressed = plain_pages(entries)
                slots = _flat_slots(chosen, entries.shape[1])
        out = sparse_attention(
            q,
            plain_pages(kv),
            _flat_slots(shown, kv.shape[1]),
            compressed,
            slots,
            self.sinks,
            scale=self.scaling,
            cos=cos,
            sin=sin,
        )
        return out.unflatten(0, (batch, queries))


def following_positions(x: torch.Tensor, past: Any, layer_idx: int = 0) -> torch.Tensor:
    """Return positions ``[1, S]`` of the tokens ``x [B, S, ...]``, after a transformers cache's."""
    seen = 0 if past is None else past.get_seq_length(layer_idx)
    return (torch.arange(x.shape[1], device=x.device) + seen).unsqueeze(0)


def _check_positions(position_ids: torch.Tensor, hidden_states: torch.Tensor) -> None:
    batch, tokens = hidden_states.shape[:2]
    shape = tuple(position_ids.shape)
    if shape not in ((batch, tokens), (1, tokens), (tokens,)):
        raise ValueError(
            f"DeepseekV4Attention: position_ids has shape {list(shape)}, wanted [{batch}, {tokens}]"
            f" or [1, {tokens}], one for each token"
        )


def _refuse_with_step(position_ids: torch.Tensor | None, mask: torch.Tensor | None) -> None:
    for name, tensor in (("position_ids", position_ids), ("attention_mask", mask)):
        if tensor is not None:
            raise ValueError(
                f"DeepseekV4Attention: {name} beside a CacheStep, wanted None: "
                "a step has the positions of its tokens, and each sees those before it"
            )


def _flat_slots(numbers: torch.Tensor, per_sequence: int) -> torch.Tensor:
    """Map ``[B, S, k]`` numbers within a sequence to slots ``[B * S, k]`` over all sequences."""
    batch = numbers.shape[0]
    base = per_sequence * torch.arange(batch, device=numbers.device).view(batch, 1, 1)
    return torch.where(numbers < 0, -1, numbers + base).flatten(0, 1)
