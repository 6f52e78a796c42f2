"""Routers: which experts a token goes to, and with what weight (specification, section 8.1)."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.config import ModelConfig
from dsv4.layers._module import FixedDtypeModule, empty_weight, wide_dtype, wider
from dsv4.ops.router import route_hash, route_topk


class _Router(FixedDtypeModule):
    def __init__(self, config: Any) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.n_routed_experts
        self.hidden_dim = config.hidden_size
        self.routed_scaling_factor = config.routed_scaling_factor
        self.numerics = config.numerics
        self.weight = empty_weight(self.num_experts, self.hidden_dim)

    def _flat(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[-1] != self.hidden_dim:
            raise ValueError(
                f"{type(self).__name__}: hidden_states has shape {list(hidden_states.shape)}, "
                f"wanted [..., {self.hidden_dim}]"
            )
        return hidden_states.reshape(-1, self.hidden_dim)

    def _logits_dtype(self, x: torch.Tensor) -> torch.dtype:
        """Return float32 or wider for DeepSeek's numerics, the model's dtype for transformers'."""
        if self.numerics == "transformers":
            return x.dtype
        return wider(x.dtype, torch.float32)


class DeepseekV4TopKRouter(_Router):
    """Top-k of ``sqrt(softplus(logit)) + bias``; the weights come from the unbiased scores."""

    wide = frozenset({"e_score_correction_bias"})
    e_score_correction_bias: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        bias = torch.zeros(self.num_experts, dtype=wide_dtype())
        self.register_buffer("e_score_correction_bias", bias)

    def forward(
        self, hidden_states: torch.Tensor, *, routed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits ``[T, E]``, weights ``[T, k]`` and int64 expert ids ``[T, k]``.

        ``routed``: ``[T]`` int64, negative for a token whose ids are all -1; None: there is none.
        """
        flat = self._flat(hidden_states)
        return route_topk(
            flat,
            self.weight,
            self.e_score_correction_bias,
            top_k=self.top_k,
            scaling_factor=self.routed_scaling_factor,
            logits_dtype=self._logits_dtype(flat),
            routed=routed,
        )


class DeepseekV4HashRouter(_Router):
    """Expert ids from a table indexed by the input token; weights from the learned scores."""

    tid2eid: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vocab = ModelConfig.of(config).vocab_size
        self.register_buffer("tid2eid", torch.zeros(vocab, self.top_k, dtype=torch.long))

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor | None,
        *,
        routed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route like the top-k router, with ``input_ids [...]`` of as many tokens.

        Raises:
            ValueError: if ``input_ids`` is None or of another length.
        """
        flat = self._flat(hidden_states)
        if input_ids is None:
            raise ValueError(
                "DeepseekV4HashRouter: input_ids is None, wanted the token ids: "
                "hash layers choose experts by token"
            )
        return route_hash(
            flat,
            self.weight,
            self.tid2eid,
            input_ids.reshape(-1),
            scaling_factor=self.routed_scaling_factor,
            logits_dtype=self._logits_dtype(flat),
            routed=routed,
        )
