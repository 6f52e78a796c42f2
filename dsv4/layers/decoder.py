"""The transformer block, and the multi-token-prediction block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.kv_cache.batch import CacheStep
from dsv4.layers import _layer_plan
from dsv4.layers._module import is_unwatched
from dsv4.layers._pooling import one_cache
from dsv4.layers._rounded import rounded_norm
from dsv4.layers.attention import DeepseekV4Attention, Tables
from dsv4.layers.early_experts import arrival_of
from dsv4.layers.hyper_connection import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    PreResult,
)
from dsv4.layers.linear import Linear
from dsv4.layers.moe import DeepseekV4SparseMoeBlock, gives_rows
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.layers.seam import NO_SEAM, Seam
from dsv4.overlap import is_launch_bound
from dsv4.parallel.context import ParallelContext, tensor_parallel


class DeepseekV4DecoderLayer(nn.Module):
    """Attention and experts, each in a hyper-connection (specification, section 2).

    With ``parallel`` its sublayers return this rank's parts, which hyper-connections sum over the
    ranks, so that a hook on a sublayer sees a part.
    """

    def __init__(
        self,
        config: Any,
        layer_idx: int,
        parallel: ParallelContext | None = None,
        attention: Callable[..., DeepseekV4Attention] = DeepseekV4Attention,
    ) -> None:
        """Make the block's modules, with the default class of attention or another."""
        super().__init__()
        config = ModelConfig.of(config)
        self.layer_idx = layer_idx
        self.parallel = tensor_parallel(parallel)
        self.self_attn = attention(config, layer_idx, self.parallel)
        self.mlp = DeepseekV4SparseMoeBlock(config, layer_idx, parallel=parallel)
        self.input_layernorm = DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV4RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )
        self.attn_hc = DeepseekV4HyperConnection(config)
        self.ffn_hc = DeepseekV4HyperConnection(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        position_embeddings: dict[str, Tables] | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        cache: Any = None,
    ) -> torch.Tensor:
        """Run the block on streams ``[B, S, n, H]``; return the new ones.

        Args:
            hidden_states: The residual streams.
            input_ids: ``[B, S]``; needed where the layer routes by hash.
            position_embeddings: See ``DeepseekV4Attention.forward``.
            position_ids: See there.
            attention_mask: See there.
            past_key_values: See there.
            cache: See there.
        """
        options = {
            "position_embeddings": position_embeddings,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "past_key_values": one_cache(self, past_key_values, cache),
        }
        return self.run(hidden_states, input_ids, options)

    def run_joined(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None,
        options: Mapping[str, Any],
        seam: Seam,
    ) -> tuple[torch.Tensor, PreResult | None]:
        """Do what ``forward`` does, in a row of layers of which ``may_join`` holds.

        Args:
            hidden_states: See ``forward``.
            input_ids: See there.
            options: Keyword arguments of the attention.
            seam: What is shared with the layers before and behind this one.

        Returns:
            The new streams, and ``seam.opened`` for the next layer, None without one.
        """
        return _layer_plan.run(self, self._run, hidden_states, input_ids, options, seam)

    def run(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Do what ``forward`` does, with the attention's keyword arguments in one record.

        Plans repeat it in steps of few tokens on a GPU, see ``dsv4.layers._layer_plan``.
        """
        return self.run_joined(hidden_states, input_ids, options, NO_SEAM)[0]

    def _run(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None,
        options: Mapping[str, Any],
        seam: Seam,
    ) -> tuple[torch.Tensor, PreResult | None]:
        attn_hc, ffn_hc, parallel = self.attn_hc, self.ffn_hc, self.parallel
        of_rank: dict[str, Any] = {} if parallel is None else {"reduce": False}
        step = options.get("past_key_values")
        routed: dict[str, Any] = {}
        if isinstance(step, CacheStep):
            if step.routed is not None:
                routed["routed"] = step.routed
            hosted = getattr(self.mlp.experts, "hosted", None)
            arrival = None if hosted is None else arrival_of(step, self.layer_idx)
            if arrival is not None:
                routed["slots"] = arrival.joined
        opened = seam.opened
        if opened is None:
            opened = attn_hc.pre(hidden_states, self.input_layernorm)
        post, comb, normed = opened
        output, _ = self.self_attn(normed, **options, **of_rank)
        hidden_states, (post, comb, normed) = attn_hc.post_pre(
            output, hidden_states, post, comb, ffn_hc, self.post_attention_layernorm, parallel
        )
        # Rows of many tokens are added up first, and their memory is free when streams are written.
        launch_bound = is_launch_bound(normed.numel() // normed.shape[-1])
        if launch_bound and parallel is None and gives_rows(self.mlp):
            output = self.mlp.routed_rows(normed, input_ids, **routed)
        else:
            output = self.mlp(normed, input_ids=input_ids, **of_rank, **routed)
        back = (output, hidden_states, post, comb)
        following = seam.following
        if following is None:
            return ffn_hc.post(*back, parallel), None
        return ffn_hc.post_pre(*back, following.attn_hc, following.input_layernorm, parallel)


def may_join(layer: nn.Module, following: nn.Module) -> bool:
    """Return whether a layer may run the beginning of the next one, by ``run_joined`` of both.

    Not if somebody watches one of them, who then sees or changes what is between them.
    """
    kind = DeepseekV4DecoderLayer
    return is_unwatched(layer, kind) and is_unwatched(following, kind)


class DeepseekV4MTP(nn.Module):
    """Multi-token prediction, a block that drafts a second token (specification, section 9).

    It shares the embedding and the output head of the main model, which the caller applies.
    """

    def __init__(
        self, config: Any, layer_idx: int, parallel: ParallelContext | None = None
    ) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = Linear(hidden, hidden, activation=config.activation)
        self.h_proj = Linear(hidden, hidden, activation=config.activation)
        self.enorm = DeepseekV4RMSNorm(hidden, eps=eps)
        self.hnorm = DeepseekV4RMSNorm(hidden, eps=eps)
        self.layer = DeepseekV4DecoderLayer(config, layer_idx, parallel)
        self.hc_head = DeepseekV4HyperHead(config)
        self.norm = DeepseekV4RMSNorm(hidden, eps=eps)

    def forward(
        self,
        streams: torch.Tensor,
        next_embeddings: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        position_embeddings: dict[str, Tables] | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft one token per position.

        Args:
            streams: ``[B, S, n, H]``, the main model's residual streams before its head collapse.
            next_embeddings: ``[B, S, H]``, embeddings of the tokens that follow each position.
            input_ids: See ``DeepseekV4DecoderLayer.forward``.
            position_embeddings: See there.
            position_ids: See there.
            attention_mask: See there.
            past_key_values: See there.

        Returns:
            Hidden states for the output head ``[B, S, H]``, and the new streams ``[B, S, n, H]``.
        """
        streams = self.combine(streams, next_embeddings)
        streams = self.layer(
            streams, input_ids, position_embeddings, position_ids, attention_mask, past_key_values
        )
        return self.norm(self.hc_head(streams)), streams

    def combine(self, streams: torch.Tensor, next_embeddings: torch.Tensor) -> torch.Tensor:
        """Return the block's input ``[B, S, n, H]``; see ``forward`` for the arguments."""
        embedded = self.e_proj(rounded_norm(self.enorm, next_embeddings, [self.e_proj]))
        normed = rounded_norm(self.hnorm, streams, [self.h_proj])
        return embedded.unsqueeze(-2) + self.h_proj(normed)

    def write_window(
        self, streams: torch.Tensor, next_embeddings: torch.Tensor, step: CacheStep
    ) -> None:
        """Write the KV entries of a step's tokens, which later drafts read; draft nothing.

        Entries of a block depend on its input alone, so queries, experts and head are left out.

        Args:
            streams: ``[1, T, n, H]``, see ``forward``.
            next_embeddings: ``[1, T, H]``.
            step: The cache and the batch.
        """
        layer = self.layer
        _, _, normed = layer.attn_hc.pre(
            self.combine(streams, next_embeddings), layer.input_layernorm
        )
        layer.self_attn.write_window(normed[0], step)
