"""Reference implementation of ``dsv4.ops.expert_mlp``."""

from __future__ import annotations

import torch

from dsv4.ops.expert_mlp import ExpertMlpArgs, down_record, gate_up_record
from dsv4.reference.grouped_gemm import grouped_gemm, grouped_gemm_swiglu


def expert_mlp(args: ExpertMlpArgs) -> torch.Tensor:
    """See ``dsv4.ops.expert_mlp.expert_mlp``. Reads the offsets on the host."""
    return grouped_gemm(down_record(args, grouped_gemm_swiglu(gate_up_record(args))))
