"""Reference implementation of ``dsv4.ops.norm``."""

from __future__ import annotations

import torch

from dsv4.ops.norm import HeadNormRopeArgs, RmsNormArgs, RmsNormPairArgs, RmsNormQuantizeArgs
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.ops.rope import RopeArgs
from dsv4.reference._precision import compute_dtype
from dsv4.reference._rms import inverse_rms
from dsv4.reference.quantize import quantize_nvfp4
from dsv4.reference.rope import rope


def rms_norm(args: RmsNormArgs) -> torch.Tensor:
    """See ``dsv4.ops.norm.rms_norm``."""
    wide = args.x.to(compute_dtype(args.x))
    out = wide * inverse_rms(wide, args.eps)
    if args.weight is not None:
        out = args.weight.to(out.dtype) * out
    return out.to(args.x.dtype).contiguous()


def rms_norm_pair(args: RmsNormPairArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.norm.rms_norm_pair``."""
    first, second = args.x.split((args.first_weight.shape[0], args.second_weight.shape[0]), dim=-1)
    return (
        rms_norm(RmsNormArgs(first, args.first_weight, args.eps)),
        rms_norm(RmsNormArgs(second, args.second_weight, args.eps)),
    )


def head_norm_rope_(args: HeadNormRopeArgs) -> None:
    """See ``dsv4.ops.norm.head_norm_rope_``."""
    normed = rms_norm(RmsNormArgs(args.q, None, args.eps))
    args.q.copy_(rope(RopeArgs(normed, args.cos.unsqueeze(1), args.sin.unsqueeze(1), False)))


def rms_norm_quantize(
    args: RmsNormQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.norm.rms_norm_quantize``."""
    y = rms_norm(RmsNormArgs(args.x, args.weight, args.eps))
    return y, *quantize_nvfp4(QuantizeNvfp4Args(y, args.global_scale, args.scaling, args.layout))
