"""Rotary tables of the two kinds of layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.ops.rope import rope_tables

LABELS = ("main", "compress")


class DeepseekV4RotaryEmbedding(nn.Module):
    """Cosines and sines for ``"main"`` (sliding layers) and ``"compress"`` (compressed layers).

    The two differ in base and in YaRN (specification section 4.3, trap T1). Holds no state: the
    tables follow from the configuration, so building on the meta device loses nothing.
    """

    def __init__(self, config: Any, device: torch.device | None = None) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.parameters_of = {"main": config.rope_main, "compress": config.rope_compress}
        self.numerics = config.numerics

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "main"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables at given positions.

        Args:
            x: Any tensor; gives the device and, with ``numerics="transformers"``, the dtype.
            position_ids: ``[...]`` int64.
            layer_type: ``"main"`` or ``"compress"``.

        Returns:
            cos and sin ``[..., rope_dim / 2]``: float32, or ``x.dtype`` with
            transformers' numerics.

        Raises:
            ValueError: if ``layer_type`` is neither.
        """
        if layer_type not in LABELS:
            raise ValueError(f"rotary: layer_type is {layer_type!r}, wanted one of {LABELS}")
        cos, sin = rope_tables(position_ids.to(x.device), self.parameters_of[layer_type])
        if self.numerics == "transformers":
            return cos.to(x.dtype), sin.to(x.dtype)
        return cos, sin
