"""Meaning of ``dsv4.ops.swiglu``."""

from __future__ import annotations

import torch

from dsv4.reference._precision import compute_dtype


def swiglu(
    gate_up: torch.Tensor, limit: float | None, layout: str, out_dtype: torch.dtype
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
    return torch.where(finite, out, torch.nan).to(out_dtype).contiguous()
