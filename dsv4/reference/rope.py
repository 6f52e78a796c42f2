"""Reference implementation of ``dsv4.ops.rope``."""

from __future__ import annotations

import torch

from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.ops.rope import RopeArgs, RopeQuantizeArgs, RopeTablesArgs
from dsv4.reference._precision import compute_dtype
from dsv4.reference.quantize import quantize_nvfp4


def rope_tables(args: RopeTablesArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.rope.rope_tables``."""
    angles = args.positions.to(torch.float32).unsqueeze(-1) * args.inv_freq
    return angles.cos(), angles.sin()


def rope(args: RopeArgs) -> torch.Tensor:
    """See ``dsv4.ops.rope.rope``."""
    x, cos, sin = args.x, args.cos, args.sin
    wide = compute_dtype(x, cos, sin)
    cos, sin = cos.to(wide), sin.to(wide)
    if args.inverse:
        sin = -sin
    unrotated = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., unrotated:].to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((x[..., :unrotated], rotated.flatten(-2).to(x.dtype)), -1)


def rope_quantize(args: RopeQuantizeArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.rope.rope_quantize``."""
    tokens, heads, dims = args.x.shape
    rotated = rope(RopeArgs(args.x, args.cos.unsqueeze(1), args.sin.unsqueeze(1), args.inverse))
    grouped = rotated.reshape(tokens, args.groups, heads * dims // args.groups)
    return quantize_nvfp4(QuantizeNvfp4Args(grouped, args.global_scale, args.scaling, args.layout))
