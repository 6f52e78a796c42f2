"""transformers' own routed experts on this package's operators, weights where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.integrations._guards import no_gradient
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.moe import moe_combine, moe_gather, moe_permute
from dsv4.ops.swiglu import swiglu

# What transformers' use_experts_implementation says of a module, and what these operators take.
_LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
_SILU = ("SiLU", "SiLUActivation")
EXPERTS_IMPLEMENTATION = "dsv4"


def register_forward() -> None:
    """Make ``experts_implementation="dsv4"`` known to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, experts_forward)


def experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the sum of the chosen experts' outputs: ``experts_implementation="dsv4"``.

    As transformers does, the routing weight multiplies after the down projection; the sum is in
    float32, in the order of the choices, and rounded once.

    Args:
        self: transformers' ``DeepseekV4Experts``, plain weights.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, k]`` int64; ``num_experts``, with which transformers marks the experts of
            other ranks, and -1 choose none.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, H]`` in ``hidden_states.dtype``.

    Raises:
        ValueError: if the module is one that these operators cannot express.
    """
    reason = _unsupported_reason(self)
    if reason is not None:
        raise ValueError(f"experts_implementation='dsv4': {reason}")
    _, offsets, positions = moe_permute(top_k_index, self.num_experts)
    gate_up = grouped_gemm(moe_gather(hidden_states, positions), self.gate_up_proj, offsets)
    out = grouped_gemm(swiglu(gate_up, self.limit), self.down_proj, offsets)
    out = moe_combine(out, positions, offsets, top_k_weights)
    no_gradient(self, None, out)
    return out


def _unsupported_reason(experts: Any) -> str | None:
    """Return why the operators cannot run a module, or None."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    for name, expected in _LAYOUT.items():
        if getattr(experts, name, expected) is not expected:
            return f"{name} is {getattr(experts, name)}, wanted {expected}"
    activation = type(experts.act_fn).__name__
    if activation not in _SILU:
        return f"act_fn is a {activation}, wanted SiLU"
    if type(experts)._apply_gate is not DeepseekV4Experts._apply_gate:
        return (
            f"_apply_gate of {type(experts).__name__} is its own, wanted that of transformers' "
            "DeepseekV4Experts, whose clamp is known"
        )
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)
        if type(weight) not in (nn.Parameter, torch.Tensor) or weight.element_size() < 2:
            return f"{name} is a {type(weight).__name__} of {weight.dtype}, wanted plain weights"
    return None
