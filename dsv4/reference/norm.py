"""Meaning of ``dsv4.ops.norm``."""

from __future__ import annotations

import torch

from dsv4.reference._precision import compute_dtype
from dsv4.reference._rms import inverse_rms
from dsv4.reference.quantize import quantize_nvfp4
from dsv4.reference.rope import rope


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See ``dsv4.ops.norm.rms_norm``."""
    wide = x.to(compute_dtype(x))
    out = wide * inverse_rms(wide, eps)
    if weight is not None:
        out = weight.to(out.dtype) * out
    return out.to(x.dtype).contiguous()


def rms_norm_pair(
    x: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.norm.rms_norm_pair``."""
    first, second = x.split((first_weight.shape[0], second_weight.shape[0]), dim=-1)
    return rms_norm(first, first_weight, eps), rms_norm(second, second_weight, eps)


def head_norm_rope_(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float) -> None:
    """See ``dsv4.ops.norm.head_norm_rope_``."""
    q.copy_(rope(rms_norm(q, None, eps), cos.unsqueeze(1), sin.unsqueeze(1), False))


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    eps: float,
    scaling: str,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.norm.rms_norm_quantize``."""
    y = rms_norm(x, weight, eps)
    return y, *quantize_nvfp4(y, global_scale, scaling, layout)
