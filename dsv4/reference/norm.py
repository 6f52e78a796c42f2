"""Meaning of ``dsv4.ops.norm``."""

from __future__ import annotations

import torch

from dsv4.reference._precision import compute_dtype
from dsv4.reference._rms import inverse_rms


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See ``dsv4.ops.norm.rms_norm``."""
    wide = x.to(compute_dtype(x))
    out = wide * inverse_rms(wide, eps)
    if weight is not None:
        out = weight.to(out.dtype) * out
    return out.to(x.dtype).contiguous()
