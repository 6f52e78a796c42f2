"""Reference implementation of ``dsv4.ops.hyper_connection``."""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.hyper_connection import (
    HcHeadArgs,
    HcPostArgs,
    HcPostPreNormArgs,
    HcPreArgs,
    HcPreNormArgs,
)
from dsv4.ops.hyper_connection_quantize import HcPostPreNormQuantizeArgs, HcPreNormQuantizeArgs
from dsv4.ops.norm import RmsNormArgs
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant.formats import LINEAR
from dsv4.reference._precision import compute_dtype
from dsv4.reference._rms import inverse_rms
from dsv4.reference.norm import rms_norm
from dsv4.reference.quantize import quantize_nvfp4


def hc_pre(args: HcPreArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_pre``."""
    n = args.streams.shape[-2]
    wide = args.streams.to(compute_dtype(args.streams))
    mixes = _mixes(wide, args.fn, args.norm_eps)
    scale, base = args.scale.to(wide.dtype), args.base.to(wide.dtype)
    pre = torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + args.hc_eps
    post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = mixes[..., 2 * n :] * scale[2] + base[2 * n :]
    comb = _sinkhorn(logits.unflatten(-1, (n, n)), args.hc_eps, args.iterations)
    return _mix_streams(wide, pre, args.streams.dtype), post.contiguous(), comb.contiguous()


def hc_post(args: HcPostArgs) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection.hc_post``."""
    wide = compute_dtype(args.streams, args.y)
    # The first index of comb is summed over: comb^T times the streams.
    mixed = args.comb.to(wide).transpose(-1, -2) @ args.streams.to(wide)
    out = args.post.to(wide).unsqueeze(-1) * args.y.to(wide).unsqueeze(-2) + mixed
    return out.to(args.streams.dtype).contiguous()


def hc_pre_norm(args: HcPreNormArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_pre_norm``."""
    mixed, post, comb = hc_pre(as_record(HcPreArgs, args))
    return rms_norm(RmsNormArgs(mixed, args.norm_weight, args.norm_eps)), post, comb


def hc_pre_norm_quantize(args: HcPreNormQuantizeArgs) -> tuple[torch.Tensor, ...]:
    """See ``dsv4.ops.hyper_connection_quantize.hc_pre_norm_quantize``."""
    normed, post, comb = hc_pre_norm(as_record(HcPreNormArgs, args))
    quantized = QuantizeNvfp4Args(normed, args.global_scale, args.scaling, LINEAR)
    return normed, *quantize_nvfp4(quantized), post, comb


def hc_post_pre_norm(
    args: HcPostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_post_pre_norm``."""
    mixed = hc_post(as_record(HcPostArgs, args))
    return mixed, *hc_pre_norm(as_record(HcPreNormArgs, args, streams=mixed))


def hc_post_pre_norm_quantize(args: HcPostPreNormQuantizeArgs) -> tuple[torch.Tensor, ...]:
    """See ``dsv4.ops.hyper_connection_quantize.hc_post_pre_norm_quantize``."""
    mixed, normed, post, comb = hc_post_pre_norm(as_record(HcPostPreNormArgs, args))
    quantized = QuantizeNvfp4Args(normed, args.global_scale, args.scaling, LINEAR)
    return mixed, normed, *quantize_nvfp4(quantized), post, comb


def hc_head(args: HcHeadArgs) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection.hc_head``."""
    wide = args.streams.to(compute_dtype(args.streams))
    mixes = _mixes(wide, args.fn, args.norm_eps)
    pre = torch.sigmoid(mixes * args.scale.to(wide.dtype) + args.base.to(wide.dtype)) + args.hc_eps
    return _mix_streams(wide, pre, args.streams.dtype)


def _mixes(wide: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """``fn`` times the flattened streams, over their root mean square."""
    flat = wide.flatten(-2)
    return torch.nn.functional.linear(flat, fn.to(wide.dtype)) * inverse_rms(flat, norm_eps)


def _mix_streams(wide: torch.Tensor, pre: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (pre.unsqueeze(-1) * wide).sum(-2).to(dtype).contiguous()


def _sinkhorn(logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
