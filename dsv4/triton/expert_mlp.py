"""Routed experts of sorted rows as two operators."""

from __future__ import annotations

import torch

from dsv4 import dispatch
from dsv4.ops.expert_mlp import ExpertMlpArgs, down_record, gate_up_record


def expert_mlp(args: ExpertMlpArgs) -> torch.Tensor:
    """See ``dsv4.ops.expert_mlp.expert_mlp``. Allocates what the operators allocate."""
    inner = dispatch.first("grouped_gemm_swiglu", gate_up_record(args))
    result: torch.Tensor = dispatch.first("grouped_gemm", down_record(args, inner))
    return result
