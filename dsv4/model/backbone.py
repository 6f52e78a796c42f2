"""The layers of the whole model, from token ids to normalised hidden states.

The module tree has transformers' names, so that one checkpoint map serves both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.kv_cache.paged_cache import CacheStep
from dsv4.layers.attention import following_positions
from dsv4.layers.decoder import DeepseekV4DecoderLayer, may_join
from dsv4.layers.dspark import Taps
from dsv4.layers.early_experts import fetch_early
from dsv4.layers.hyper_connection import DeepseekV4HyperHead, PreResult
from dsv4.layers.moe import UNROUTED
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.layers.rotary import DeepseekV4RotaryEmbedding
from dsv4.layers.seam import Seam
from dsv4.parallel.context import ParallelContext, has_own_tokens, tensor_parallel
from dsv4.parallel.reduce import all_reduce
from dsv4.parallel.split import LocalSizes
from dsv4.serving.arguments import INTEGERS, check_vocabulary


def _embedding(rows: int, columns: int) -> nn.Embedding:
    """An embedding that draws nothing on the meta device: that would import torch's compiler."""
    if torch.get_default_device().type != "meta":
        return nn.Embedding(rows, columns)
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


class DeepseekV4Model(nn.Module):
    """Embedding, layers, head collapse and final norm (specification, section 2)."""

    def __init__(self, config: Any, parallel: ParallelContext | None = None) -> None:
        super().__init__()
        self.config = ModelConfig.of(config)
        config = self.config
        self.parallel = tensor_parallel(parallel)
        self.own_tokens = has_own_tokens(parallel)
        self.vocabulary = LocalSizes.of(config, parallel).vocabulary
        self.embed_tokens = _embedding(len(self.vocabulary), config.hidden_size)
        self.layers = nn.ModuleList(
            DeepseekV4DecoderLayer(config, i, parallel) for i in range(config.num_hidden_layers)
        )
        self.norm = DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        self.hc_head = DeepseekV4HyperHead(config)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        taps: Taps | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers.

        Args:
            input_ids: ``[B, S]`` int64; ``[1, T]`` with a ``CacheStep``.
            position_ids: ``[B, S]`` or ``[1, S]``; by default those that follow the tokens of a
                cache. A step has its own.
            past_key_values: None, the paged cache with this batch, or a transformers cache.
            taps: Gets what a DSpark draft reads from some layers; None: nothing is computed.

        Returns:
            Normalised hidden states ``[B, S, H]`` and the streams before the head ``[B, S, n, H]``.

        Raises:
            TypeError: if ``input_ids`` are not integers.
            ValueError: if their shape is wrong, or a step comes with ``position_ids``.
        """
        check_ids(input_ids, self.config.vocab_size)
        step = isinstance(past_key_values, CacheStep)
        positions = self._positions(input_ids, position_ids, past_key_values)
        embedded = self.embed(input_ids)
        tables = {
            label: self.rotary_emb(embedded, positions, label) for label in ("main", "compress")
        }
        routed = input_ids
        if step and self.own_tokens:
            is_padding = past_key_values.batch.sequence_of_token < 0
            routed = input_ids.masked_fill(is_padding, UNROUTED)
        if step and self._hosts_experts:
            past_key_values = _without_padding(past_key_values)
            fetch_early(self.layers, input_ids, past_key_values)
        options = {
            "position_embeddings": tables,
            "position_ids": None if step else positions,
            "past_key_values": past_key_values,
        }
        streams = self._run_layers(embedded, routed, options, taps)
        return self.norm(self.hc_head(streams)), streams

    def _run_layers(
        self,
        embedded: torch.Tensor,
        input_ids: torch.Tensor,
        options: dict[str, Any],
        taps: Taps | None,
    ) -> torch.Tensor:
        """Run all layers; each also runs the beginning of the next one, if nobody watches them.

        The streams begin here, so that no caller keeps the first ones in memory.
        """
        streams = embedded.unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        opened: PreResult | None = None
        layers: list[Any] = list(self.layers)
        for number, layer in enumerate(layers):
            following = layers[number + 1] if number + 1 < len(layers) else None
            joins = following is not None and may_join(layer, following)
            if joins or opened is not None:
                seam = Seam(opened, following if joins else None)
                streams, opened = layer.run_joined(streams, input_ids, options, seam)
            else:
                streams = layer(streams, input_ids, **options)
            if taps is not None:
                taps.take(number, streams)
        return streams

    @property
    def _hosts_experts(self) -> bool:
        """Return whether experts lie in host memory: of all layers or of none."""
        experts = getattr(self.layers[0].mlp, "experts", None)
        return getattr(experts, "hosted", None) is not None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[..., H]`` of token ids, on several ranks those of all."""
        if self.parallel is None:
            return self.embed_tokens(input_ids)
        own = input_ids - self.vocabulary.start
        outside = (own < 0) | (own >= len(self.vocabulary))
        embedded = self.embed_tokens(own.masked_fill(outside, 0))
        # One rank has the embedding, the others add zeros: nothing is rounded.
        partial = embedded.masked_fill(outside.unsqueeze(-1), 0)
        return all_reduce(self.parallel, partial)

    def _positions(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, past: Any
    ) -> torch.Tensor:
        if isinstance(past, CacheStep):
            if position_ids is not None:
                raise ValueError(
                    "position_ids beside a CacheStep, wanted None: "
                    "a step has the positions of its tokens"
                )
            return past.batch.positions.unsqueeze(0)
        return following_positions(input_ids, past) if position_ids is None else position_ids


def _without_padding(step: CacheStep) -> CacheStep:
    """Return a step whose padding goes to no routed expert, so that it loads none."""
    row = step.batch.sequence_of_token  # negative for padding
    routed = row if step.routed is None else torch.minimum(step.routed, row)
    return CacheStep(step.cache, step.batch, routed)


def check_ids(ids: torch.Tensor, vocabulary: int, name: str = "input_ids") -> None:
    """Check token ids of a forward.

    Raises:
        TypeError: if they are not integers.
        ValueError: if their shape is wrong or, on a CPU, one is not of the vocabulary.
    """
    if ids.dtype not in INTEGERS:
        raise TypeError(f"{name} have dtype {ids.dtype}, wanted int64")
    if ids.dim() != 2:
        raise ValueError(f"{name} have shape {list(ids.shape)}, wanted [B, S]")
    check_vocabulary(name, ids, vocabulary)
