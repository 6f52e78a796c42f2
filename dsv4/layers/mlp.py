"""The shared expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers._rounded import Values, rounded_swiglu
from dsv4.layers.fusion import concatenated_linear, fused_swiglu
from dsv4.layers.linear import Linear
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.split import LocalSizes


class DeepseekV4MLP(nn.Module):
    """``down(silu(min(gate, limit)) * clamp(up, -limit, limit))`` (specification, section 8.2).

    In a packed layer (``dsv4.layers.pack_``), gate and up rows are interleaved in one matrix, and
    nothing is rounded between the first GEMM and SwiGLU. In others the GEMM's result is rounded to
    the dtype of ``x``.

    With ``parallel`` it has this rank's part of the intermediate size, and its result is a part of
    the sum over ranks.
    """

    joined_interleaved = (("gate_proj", "up_proj"),)

    def __init__(self, config: Any, parallel: ParallelContext | None = None) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        hidden, inner, activation = (
            config.hidden_size,
            LocalSizes.of(config, parallel).inner,
            config.activation,
        )
        self.hidden_size = hidden
        self.intermediate_size = inner
        self.limit = config.swiglu_limit
        self.gate_proj = Linear(hidden, inner, activation=activation)
        self.up_proj = Linear(hidden, inner, activation=activation)
        self.down_proj = Linear(inner, hidden, activation=activation)

    def forward(self, x: torch.Tensor, *, reserve_sms: int = 0) -> torch.Tensor:
        """Apply it to ``[..., H]``; the result has the same shape.

        Args:
            x: The input.
            reserve_sms: SMs that its GEMMs leave to other streams, see ``dsv4.ops.gemm``.
        """
        inner, down = self.inner(x, reserve_sms=reserve_sms), self.down_proj
        if reserve_sms and type(down) is Linear:  # another module may not take the argument
            return down(inner, reserve_sms=reserve_sms)
        return down(inner)

    def inner(self, x: torch.Tensor, *, reserve_sms: int = 0) -> Values:
        """Map ``[..., H]`` to ``[..., I]``, the down projection's input, which may be codes."""
        gate, up = self.gate_proj, self.up_proj
        inner = fused_swiglu(gate, up, x, self.limit, reserve_sms=reserve_sms)
        if inner is None:
            gate_up = concatenated_linear((gate, up), x, reserve_sms=reserve_sms)
            return rounded_swiglu(gate_up, self.limit, self.down_proj)
        return inner
