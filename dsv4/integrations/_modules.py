"""Layers as transformers' models call them: with arguments that they pass on to every layer."""

from __future__ import annotations

from typing import Any

import torch

from dsv4 import layers
from dsv4.integrations._arguments import check_options


class DeepseekV4Attention(layers.DeepseekV4Attention):
    """The attention, which accepts options of transformers' models that have no effect on it."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        cache: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; see ``dsv4.layers.DeepseekV4Attention``.

        Raises:
            TypeError: if an option is none of ``WITHOUT_EFFECT``.
            ValueError: if a shape is wrong or the mask is not supported.
        """
        check_options(self, options)
        return super().forward(
            hidden_states,
            position_embeddings,
            position_ids,
            attention_mask,
            past_key_values,
            cache=cache,
        )


class DeepseekV4DecoderLayer(layers.DeepseekV4DecoderLayer):
    """The decoder layer; its attention, which may be transformers', checks other arguments."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Run the layer on streams ``[B, S, n, H]``; return the new ones.

        Args:
            hidden_states: The residual streams.
            input_ids: ``[B, S]``; needed where the layer routes by hash.
            **options: Arguments of the attention, which raises for unknown ones.
        """
        return self.run(hidden_states, input_ids, options)


class OutputHead(layers.Linear):
    """Output head with float32 logits whatever the model's dtype (specification, section 2)."""

    def forward(  # type: ignore[override]  # takes values, no codes
        self,
        x: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        *,
        reserve_sms: int = 0,
    ) -> torch.Tensor:
        """Map ``[..., H]`` to logits ``[..., vocab]``."""
        dtype = out_dtype or torch.promote_types(x.dtype, torch.float32)
        return super().forward(x, dtype, reserve_sms=reserve_sms)
