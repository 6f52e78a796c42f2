"""Meaning of ``dsv4.ops.rope``."""

from __future__ import annotations

import torch

from dsv4.reference._precision import compute_dtype
from dsv4.reference.quantize import quantize_nvfp4


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.rope.rope_tables``."""
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
    return angles.cos(), angles.sin()


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """See ``dsv4.ops.rope.rope``."""
    wide = compute_dtype(x, cos, sin)
    cos, sin = cos.to(wide), sin.to(wide)
    if inverse:
        sin = -sin
    kept = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., kept:].to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((x[..., :kept], turned.flatten(-2).to(x.dtype)), -1)


def rope_quantize(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    inverse: bool,
    groups: int,
    global_scale: torch.Tensor | None,
    scaling: str,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.rope.rope_quantize``."""
    tokens, heads, dims = x.shape
    turned = rope(x, cos.unsqueeze(1), sin.unsqueeze(1), inverse)
    grouped = turned.reshape(tokens, groups, heads * dims // groups)
    return quantize_nvfp4(grouped, global_scale, scaling, layout)
