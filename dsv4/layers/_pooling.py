"""Pooling of many tokens into one entry, shared by the compressors and the indexer.

Each module runs in two ways. Dense: hidden states ``[B, S, H]`` with no cache or with one of
transformers' cache objects, whose protocol it speaks. Paged: a flat ragged batch whose state and
entries live in a ``PagedCache``. Both call the same operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import CSA, ModelConfig
from dsv4.kv_cache.paged_cache import CacheStep
from dsv4.layers._module import FixedDtypeModule, wide_dtype, wider
from dsv4.layers._projections import Pooled, are_merged, projections_of
from dsv4.layers.fusion import fused_linear
from dsv4.layers.linear import Linear
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.layers.rotary import DeepseekV4RotaryEmbedding
from dsv4.ops.compressor import compress_write, pool_windows
from dsv4.ops.kv_cache import Pages, fake_quantize_kv
from dsv4.ops.rope import rope


class PoolingModule(FixedDtypeModule):
    """Projection, pooling, norm and rotation shared by the three compressors.

    Attributes:
        cache_name: Name under which transformers' cache objects keep this compressor's state.
        compress_rate: Tokens per entry.
        overlap: Whether a window also pools the first half of the window before it.
        paged: Two fields of a layer's cache (``LayerCache``): the state and the pages of entries.
        rotates: Whether DeepSeek's numerics transform and round entries before they are stored.
    """

    wide = frozenset({"position_bias"})
    joined = (("kv_proj", "gate_proj"),)
    rope_layer_type = "compress"
    paged = ("state", "compressed")
    rotates = False

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
        self.position_bias = nn.Parameter(
            torch.zeros(self.compress_rate, channels, dtype=wide_dtype())
        )
        self.kv_norm = DeepseekV4RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)

    def pooled_dtype(self, x: torch.Tensor) -> torch.dtype | None:
        """Return the dtype of values and scores of ``x``, None for that of ``x``.

        Both are float32 in DeepSeek's numerics (specification, section 5.1).
        """
        return wider(x.dtype, torch.float32) if self.numerics == "deepseek" else None

    def _project(self, hidden_states: torch.Tensor) -> Pooled:
        """Project to the KV cache's values and scores."""
        layers = [self.kv_proj, self.gate_proj]
        dtype = self.pooled_dtype(hidden_states)
        if self.kv_proj.format is None and are_merged(layers, hidden_states):
            return projections_of(layers, hidden_states, dtype).pooled
        kv, score = fused_linear(layers, hidden_states, dtype)
        return kv, score

    def _finish(
        self, pooled: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Apply the norm, then rotate at the position of the window's first token (pitfall 3)."""
        entries = self.kv_norm(pooled.to(dtype))
        cos, sin = self.rotary_emb(entries, positions, self.rope_layer_type)
        return rope(entries, cos, sin)

    def _stored(self, entries: torch.Tensor) -> torch.Tensor:
        """Return what reading an entry back from the cache would give."""
        return fake_quantize_kv(entries, self.rope_dim) if self.numerics == "deepseek" else entries

    def dense_entries(
        self, hidden_states: torch.Tensor, past_key_values: Any, layer_idx: int
    ) -> torch.Tensor:
        """Return all entries so far, ``[B, entries, head_dim]``."""
        if past_key_values is not None and layer_idx < 0:
            raise TypeError(f"{type(self).__name__}: a cache without layer_idx, wanted both")
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

    def write_pages(
        self,
        hidden_states: torch.Tensor,
        step: CacheStep,
        layer_idx: int,
        projected: Pooled | None = None,
    ) -> None:
        """Update the state with ``hidden_states [T, H]`` and store the entries that closed.

        Args:
            hidden_states: The tokens.
            step: The step.
            layer_idx: The layer's place in its cache.
            projected: Values and scores of the tokens; None: this method computes them.
        """
        layer, batch = step.cache.layers[layer_idx], step.batch
        state, pages = getattr(layer, self.paged[0]), getattr(layer, self.paged[1])
        assert state is not None
        assert pages is not None
        assert layer.compressed_table is not None
        kv, score = self._project(hidden_states) if projected is None else projected
        dtype, norm, rotary = hidden_states.dtype, self.kv_norm, self.rotary_emb
        compress_write(
            kv,
            score,
            self.position_bias,
            state,
            batch.cu_seqlens,
            batch.starts,
            batch.sequences,
            norm.weight,
            rotary.inv_freq(kv.device, self.rope_layer_type),
            pages,
            layer.compressed_table,
            overlap=self.overlap,
            eps=norm.variance_epsilon,
            rotate_quantize=self.rotates and self.numerics == "deepseek",
            dtype=dtype,
            table_dtype=rotary.table_dtype(dtype),
        )

    def visible(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return how many entries a token at each position may see, itself included in the last."""
        return (position_ids + 1).div(self.compress_rate, rounding_mode="floor")

    def visible_in(self, step: CacheStep) -> torch.Tensor:
        """Return the same for each token of a step, ``[T]``; layers share it."""
        return step.once(
            ("visible", self.compress_rate), lambda: self.visible(step.batch.positions)
        )


def plain_pages(entries: torch.Tensor) -> Pages:
    """Return entries ``[B, n, d]``, n > 0, as pages: slot ``b * n + i`` has entry i of row b.

    A page has one entry, because kernels are compiled for each size of a page, and n grows with
    every step.
    """
    width = entries.shape[2]
    return Pages(entries.reshape(-1, 1, width), 1, "plain", width, 0)


def one_cache(module: nn.Module, past_key_values: Any, cache: Any) -> Any:
    """Return the cache of a forward, which transformers calls ``cache`` from 5.24 on.

    Raises:
        TypeError: if both names have a value, and not the same one.
    """
    if cache is None or past_key_values is cache:
        return past_key_values
    if past_key_values is not None:
        raise TypeError(
            f"{type(module).__name__}: cache and past_key_values are two names of one argument, "
            "wanted one of them"
        )
    return cache
