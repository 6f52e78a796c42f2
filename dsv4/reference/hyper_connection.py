"""Meaning of ``dsv4.ops.hyper_connection``."""

from __future__ import annotations

import torch

from dsv4.formats import LINEAR
from dsv4.reference._precision import compute_dtype
from dsv4.reference._rms import inverse_rms
from dsv4.reference.norm import rms_norm
from dsv4.reference.quantize import quantize_nvfp4


def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_pre``."""
    n = streams.shape[-2]
    wide = streams.to(compute_dtype(streams))
    mixes = _mixes(wide, fn, norm_eps)
    scale, base = scale.to(wide.dtype), base.to(wide.dtype)
    pre = torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = mixes[..., 2 * n :] * scale[2] + base[2 * n :]
    comb = _sinkhorn(logits.unflatten(-1, (n, n)), hc_eps, iterations)
    return _collapse(wide, pre, streams.dtype), post.contiguous(), comb.contiguous()


def hc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection.hc_post``."""
    wide = compute_dtype(streams, y)
    # The first index of comb is summed over: comb^T times the streams.
    mixed = comb.to(wide).transpose(-1, -2) @ streams.to(wide)
    out = post.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(-2) + mixed
    return out.to(streams.dtype).contiguous()


def hc_pre_norm(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_pre_norm``."""
    collapsed, post, comb = hc_pre(streams, fn, scale, base, norm_eps, hc_eps, iterations)
    return rms_norm(collapsed, norm_weight, norm_eps), post, comb


def hc_pre_norm_quantize(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    scaling: str,
) -> tuple[torch.Tensor, ...]:
    """See ``dsv4.ops.hyper_connection.hc_pre_norm_quantize``."""
    parameters = (fn, scale, base, norm_weight, norm_eps, hc_eps, iterations)
    normed, post, comb = hc_pre_norm(streams, *parameters)
    return normed, *quantize_nvfp4(normed, global_scale, scaling, LINEAR), post, comb


def hc_post_pre_norm(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.hyper_connection.hc_post_pre_norm``."""
    mixed = hc_post(y, streams, post, comb)
    pre = hc_pre_norm(mixed, fn, scale, base, norm_weight, norm_eps, hc_eps, iterations)
    return mixed, *pre


def hc_post_pre_norm_quantize(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    scaling: str,
) -> tuple[torch.Tensor, ...]:
    """See ``dsv4.ops.hyper_connection.hc_post_pre_norm_quantize``."""
    parameters = (fn, scale, base, norm_weight, norm_eps, hc_eps, iterations)
    mixed, normed, post, comb = hc_post_pre_norm(y, streams, post, comb, *parameters)
    return mixed, normed, *quantize_nvfp4(normed, global_scale, scaling, LINEAR), post, comb


def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
) -> torch.Tensor:
    """See ``dsv4.ops.hyper_connection.hc_head``."""
    wide = streams.to(compute_dtype(streams))
    mixes = _mixes(wide, fn, norm_eps)
    pre = torch.sigmoid(mixes * scale.to(wide.dtype) + base.to(wide.dtype)) + hc_eps
    return _collapse(wide, pre, streams.dtype)


def _mixes(wide: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """``fn`` times the flattened streams, over their root mean square."""
    flat = wide.flatten(-2)
    return torch.nn.functional.linear(flat, fn.to(wide.dtype)) * inverse_rms(flat, norm_eps)


def _collapse(wide: torch.Tensor, pre: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (pre.unsqueeze(-1) * wide).sum(-2).to(dtype).contiguous()


def _sinkhorn(logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
