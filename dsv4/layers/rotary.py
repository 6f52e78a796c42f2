"""Rotary tables of the two kinds of layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.kv_cache.paged_cache import CacheStep
from dsv4.ops.rope import rope_tables

LABELS = ("main", "compress")


class DeepseekV4RotaryEmbedding(nn.Module):
    """Cosines and sines for ``"main"`` (sliding layers) and ``"compress"`` (compressed layers).

    The two differ in base and in YaRN (specification, section 4.3; pitfall 1). The module has no
    parameters and no buffers: the frequencies follow from the configuration, so building on the
    meta device loses nothing. Each device on which they were used keeps a copy, because nothing can
    be copied from the host while a CUDA graph is captured.

    Args:
        config: ``ModelConfig``, or transformers' ``DeepseekV4Config``.
        device: Device that gets its copy now; None: each gets one when it is used first.
    """

    def __init__(self, config: Any, device: torch.device | str | None = None) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.parameters_of = {"main": config.rope_main, "compress": config.rope_compress}
        self.numerics = config.numerics
        self._own_values: dict[str, torch.Tensor] = {}
        self._frequencies: dict[tuple[torch.device, str], torch.Tensor] = {}
        if device is not None:
            for label in LABELS:
                self.inv_freq(torch.device(device), label)

    def set_inv_freq(self, layer_type: str, values: torch.Tensor) -> None:
        """Use these inverse frequencies instead of the configuration's.

        Args:
            layer_type: ``"main"`` or ``"compress"``.
            values: ``[rope_dim / 2]``.

        Raises:
            ValueError: if ``layer_type`` is neither or the shape is wrong.
        """
        present = self.inv_freq(values.device, layer_type)
        if values.shape != present.shape:
            raise ValueError(
                f"rotary: inverse frequencies have shape {list(values.shape)}, "
                f"wanted {list(present.shape)}"
            )
        self._own_values[layer_type] = values.detach().float().cpu().clone()
        self._frequencies.clear()

    def inv_freq(self, device: torch.device, layer_type: str) -> torch.Tensor:
        """Return the inverse frequencies ``[rope_dim / 2]`` in float32 on ``device``.

        Raises:
            ValueError: if ``layer_type`` is neither ``"main"`` nor ``"compress"``.
        """
        if layer_type not in LABELS:
            raise ValueError(f"rotary: layer_type is {layer_type!r}, wanted one of {LABELS}")
        known = self._frequencies.get((device, layer_type))
        if known is not None:
            return known
        values = self._own_values.get(layer_type)
        if values is None:
            values = self.parameters_of[layer_type].inv_freq()
        made = torch.as_tensor(values, dtype=torch.float32, device="cpu").to(device)
        if type(made) is torch.Tensor:  # a tracer's stand-in must not outlive the trace
            self._frequencies[device, layer_type] = made
        return made

    def table_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of cosines and sines in a model of ``dtype``: its own, or float32 always."""
        return dtype if self.numerics == "transformers" else torch.float32

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "main"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables at given positions.

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
        frequencies = self.inv_freq(x.device, layer_type)
        cos, sin = rope_tables(position_ids.to(x.device), frequencies)
        dtype = self.table_dtype(x.dtype)
        return cos.to(dtype), sin.to(dtype)

    def of_step(
        self,
        x: torch.Tensor,
        step: CacheStep,
        layer_type: str,
        tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables ``[T, rope_dim / 2]`` of a step's tokens, which its layers share.

        Args:
            x: See ``forward``.
            step: The step, which has the positions.
            layer_type: See ``forward``.
            tables: The same tables as ``[1, T, rope_dim / 2]``, if they are made already.
        """

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            if tables is not None:
                return tables[0][0], tables[1][0]
            return self(x, step.batch.positions, layer_type)

        return step.once(("rotary", layer_type, x.dtype), make)
