"""One transformer block, and the multi-token-prediction block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers.attention import DeepseekV4Attention
from dsv4.layers.hyper_connection import DeepseekV4HyperConnection, DeepseekV4HyperHead
from dsv4.layers.linear import Linear
from dsv4.layers.moe import DeepseekV4SparseMoeBlock
from dsv4.layers.norm import DeepseekV4RMSNorm


class DeepseekV4DecoderLayer(nn.Module):
    """Attention and experts, each between the two halves of a hyper-connection (section 2)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.layer_idx = layer_idx
        self.self_attn = DeepseekV4Attention(config, layer_idx)
        self.mlp = DeepseekV4SparseMoeBlock(config, layer_idx)
        self.input_layernorm = DeepseekV4RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV4RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )
        self.attn_hc = DeepseekV4HyperConnection(config)
        self.ffn_hc = DeepseekV4HyperConnection(config)

    def forward(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """``[B, S, n, H]`` streams to the same.

        Args:
            hidden_states: The residual streams.
            input_ids: ``[B, S]``; needed where the layer routes by hash.
            **kwargs: For ``DeepseekV4Attention.forward``.
        """
        post, comb, normed = self.attn_hc.collapse(hidden_states, self.input_layernorm)
        output, _ = self.self_attn(normed, **kwargs)
        hidden_states, (post, comb, normed) = self.attn_hc.hand_over(
            output, hidden_states, post, comb, self.ffn_hc, self.post_attention_layernorm
        )
        output = self.mlp(normed, input_ids=input_ids)
        return self.ffn_hc.spread(output, hidden_states, post, comb)


class DeepseekV4MTP(nn.Module):
    """Multi-token prediction: one block that drafts the token after the next (section 9).

    Shares the embedding and the output head of the main model, which pass through the arguments.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = Linear(hidden, hidden, activation=config.activation)
        self.h_proj = Linear(hidden, hidden, activation=config.activation)
        self.enorm = DeepseekV4RMSNorm(hidden, eps=eps)
        self.hnorm = DeepseekV4RMSNorm(hidden, eps=eps)
        self.layer = DeepseekV4DecoderLayer(config, layer_idx)
        self.hc_head = DeepseekV4HyperHead(config)
        self.norm = DeepseekV4RMSNorm(hidden, eps=eps)

    def forward(
        self, streams: torch.Tensor, next_embeddings: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft.

        Args:
            streams: ``[B, S, n, H]``, the main model's residual streams before its head collapse.
            next_embeddings: ``[B, S, H]``, embeddings of the tokens that follow each position.
            **kwargs: For the block.

        Returns:
            Hidden states for the output head ``[B, S, H]``, and the new streams ``[B, S, n, H]``.
        """
        embedded = self.e_proj(self.enorm(next_embeddings)).unsqueeze(-2)
        streams = embedded + self.h_proj(self.hnorm(streams))
        streams = self.layer(streams, **kwargs)
        return self.norm(self.hc_head(streams)), streams
