"""Helpers for tests of routed experts: the truth in float64 and the error allowed."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dsv4.ops.quantize import quantize
from dsv4.quant.formats import LINEAR, NVFP4
from dsv4.testing.assertions import unit_roundoff


def truth_and_budget(experts, x, ids, weights, shared=None, *, eager=False):
    """Float64 result, and how far a float32 one that rounds to the inputs' dtype may be off.

    A product in float32 is off by ``(K + 4) u S`` (``gemm_budget``), SwiGLU has a slope of at most
    1.1 in the gate, and exp is within 1e-5. transformers' eager experts round SiLU, every weighted
    row and every sum of two as well.
    """
    wide, u = unit_roundoff(torch.float32), unit_roundoff(x.dtype)
    known = (ids >= 0) & (ids < experts.num_experts)
    which, factor = ids.clamp(0, experts.num_experts - 1), weights.double().unsqueeze(-1)
    first, last = (
        experts.dense_weight(n, torch.float64)[which] for n in ("gate_up_proj", "down_proj")
    )
    x = x.double()

    def rounded(value, error):
        return error + 1.01 * u * (value.abs() + error) + 1e-37

    def product(weight, value, error):
        sizes = torch.einsum("tknc,tkc->tkn", weight.abs(), value.abs() + error)
        spread = torch.einsum("tknc,tkc->tkn", weight.abs(), error)
        sums = 1.01 * (value.shape[-1] + 4) * wide * sizes
        return torch.einsum("tknc,tkc->tkn", weight, value), spread + sums

    rows = x.unsqueeze(1).expand(-1, ids.shape[1], -1)
    both, error = product(first, rows, torch.zeros_like(rows))
    if experts.layout == LINEAR:
        error = rounded(both, error)
    (gate, up), (gate_error, up_error) = both.chunk(2, -1), error.chunk(2, -1)
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    inner = F.silu(gate) * up
    error = 1.1 * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
    error = error + 1e-5 * inner.abs()
    if eager:
        error = error + 1.01 * u * (inner.abs() + error)
    if experts.numerics == "deepseek":
        inner, error = inner * factor, error * factor
    out, error = product(last, inner, rounded(inner, error))
    error = rounded(out, error)
    if experts.numerics == "transformers":
        out, error = out * factor, error * factor
    if eager:
        error = rounded(out, error)
    out, error = (torch.where(known.unsqueeze(-1), t, 0.0) for t in (out, error))
    sizes = (out.abs() + error).sum(1)
    out, error = out.sum(1), error.sum(1) + (1.01 * ids.shape[1] * u * sizes if eager else 0.0)
    if shared is not None:
        out, sizes = out + shared.double(), sizes + shared.double().abs()
    return out, rounded(out, error + (ids.shape[1] + 3) * wide * sizes)


def quantize_apart(experts):
    """Quantise routed experts in NVFP4, gate and up with a global scale each.

    ``quantize`` gives both the same one; checkpoints of other tools do not always.
    """
    inner = experts.intermediate_dim
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    experts.to_format("nvfp4")
    for e in range(experts.num_local_experts):
        parts = (gate_up[e, :inner], gate_up[e, inner:], down[e])
        experts.set_expert(e, *(quantize(part, NVFP4, scaling="weight") for part in parts))
