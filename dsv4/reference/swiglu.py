"""Meaning of ``dsv4.ops.swiglu``."""

from __future__ import annotations

import torch

from dsv4.reference._precision import compute_dtype
from dsv4.reference.quantize import quantize_nvfp4


def swiglu(
    gate_up: torch.Tensor,
    limit: float | None,
    layout: str,
    row_weight: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.swiglu.swiglu``."""
    wide = gate_up.to(compute_dtype(gate_up))
    if layout == "interleaved":
        gate, up = wide.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate, up = wide.chunk(2, -1)
    # Before the clamp, which would turn an infinity into a plausible number.
    finite = gate.isfinite() & up.isfinite()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out = torch.nn.functional.silu(gate) * up
    out = torch.where(finite, out, torch.nan)
    if row_weight is not None:
        out = out * row_weight.to(out.dtype).unsqueeze(-1)
    return out.to(out_dtype).contiguous()


def swiglu_quantize(
    gate_up: torch.Tensor,
    limit: float | None,
    layout: str,
    row_weight: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    scaling: str,
    scale_layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.swiglu.swiglu_quantize``."""
    inner = swiglu(gate_up, limit, layout, row_weight, gate_up.dtype)
    return quantize_nvfp4(inner, global_scale, scaling, scale_layout)
