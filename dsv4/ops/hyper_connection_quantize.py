"""Hyper-connections with the norm that follows, in the dtype of the streams and in NVFP4."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._hyper_connection_operands import empty_pre, expected_post, expected_pre
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.quantize import empty_nvfp4, given_scale
from dsv4.quant.formats import LINEAR, NVFP4, QuantizedTensor

PreQuantized = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]
PostPreQuantized = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]


class HcPreNormQuantizeArgs(NamedTuple):
    """Arguments of ``hc_pre_norm_quantize``: ``hc_pre_norm`` with an NVFP4 norm.

    Attributes:
        streams: ``[T, n, H]`` floating.
        fn: ``[(2 + n) n, n H]`` floating.
        scale: ``[3]`` floating.
        base: ``[(2 + n) n]`` floating.
        norm_weight: ``[H]`` floating.
        global_scale: float32, static global scale of the codes; None: one per row.
        norm_eps: Epsilon of the norm, added to mean squares.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations, at least 1.
        scaling: ``"token"`` or ``"static"``.
    """

    streams: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    global_scale: torch.Tensor | None
    norm_eps: float
    hc_eps: float
    iterations: int
    scaling: str


class HcPostPreNormQuantizeArgs(NamedTuple):
    """Arguments of ``hc_post_pre_norm_quantize``: ``hc_post_pre_norm`` with an NVFP4 norm.

    Attributes:
        y: ``[..., H]`` floating, output of the sublayer before.
        streams: ``[..., n, H]`` floating.
        post: ``[..., n]`` floating.
        comb: ``[..., n, n]`` floating.
        fn: ``[(2 + n) n, n H]`` floating.
        scale: ``[3]`` floating.
        base: ``[(2 + n) n]`` floating.
        norm_weight: ``[H]`` floating.
        global_scale: float32, static global scale of the codes; None: one per row.
        norm_eps: Epsilon of the norm, added to mean squares.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations, at least 1.
        scaling: ``"token"`` or ``"static"``.
    """

    y: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    global_scale: torch.Tensor | None
    norm_eps: float
    hc_eps: float
    iterations: int
    scaling: str


def _fake_pre_quantize(args: HcPreNormQuantizeArgs) -> PreQuantized:
    return _empty_pre_quantized(args.streams, args.global_scale, args.scaling)


def _empty_pre_quantized(
    streams: torch.Tensor, global_scale: torch.Tensor | None, scaling: str
) -> PreQuantized:
    normed, post, comb = empty_pre(streams)
    return normed, *empty_nvfp4(normed, global_scale, scaling, LINEAR), post, comb


def _fake_quantize(args: HcPostPreNormQuantizeArgs) -> PostPreQuantized:
    mixed = torch.empty_like(args.streams, memory_format=torch.contiguous_format)
    return mixed, *_empty_pre_quantized(args.streams, args.global_scale, args.scaling)


_hc_pre_norm_quantize = define("hc_pre_norm_quantize", HcPreNormQuantizeArgs, _fake_pre_quantize)
_hc_post_pre_norm_quantize = define(
    "hc_post_pre_norm_quantize", HcPostPreNormQuantizeArgs, _fake_quantize
)


@planned
def hc_pre_norm_quantize(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    global_scale: torch.Tensor | float | None = None,
    scaling: str = "token",
    backend: str = "auto",
) -> tuple[torch.Tensor, QuantizedTensor, torch.Tensor, torch.Tensor]:
    """Run ``hc_pre_norm``, and quantise the norm to NVFP4 for the sublayer's projections.

    ``quantize(normed, "nvfp4", ...)`` with linear scales, bit for bit of the norm that is returned,
    which the router and the compressors read.

    Args:
        streams: ``[T, n, H]``; H is a multiple of 16.
        fn: ``[(2 + n) n, n H]``.
        scale: ``[3]``.
        base: ``[(2 + n) n]``.
        norm_weight: ``[H]``.
        norm_eps: See ``hc_pre_norm``.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations in total.
        global_scale: See ``quantize``, for ``scaling="static"``.
        scaling: ``"token"`` or ``"static"``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(normed [T, H], QuantizedTensor [T, H], post [T, n], comb [T, n, n])``.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape, ``scaling`` or the global scale does not fit, ``iterations`` is
            below 1, or a tensor is on another device.
    """
    op = "hc_pre_norm_quantize"
    _check.shape(op, "streams", streams, [None, None, None])
    _check.tensors(op, *expected_pre(op, streams, fn, scale, base, iterations, norm_weight))
    static_scale = _check_quantize(op, streams, global_scale, scaling)
    normed, codes, scales, total, post, comb = _hc_pre_norm_quantize(
        HcPreNormQuantizeArgs(
            streams,
            fn,
            scale,
            base,
            norm_weight,
            static_scale,
            norm_eps,
            hc_eps,
            iterations,
            scaling,
        ),
        backend,
    )
    return normed, QuantizedTensor(codes, scales, total, NVFP4), post, comb


@planned
def hc_post_pre_norm_quantize(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    global_scale: torch.Tensor | float | None = None,
    scaling: str = "token",
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, QuantizedTensor, torch.Tensor, torch.Tensor]:
    """Run ``hc_post_pre_norm``, and quantise the norm to NVFP4 for the sublayer's projections.

    ``quantize(normed, "nvfp4", ...)`` with linear scales, bit for bit of the norm that is returned,
    which the router and the compressors read.

    Args:
        y: ``[T, H]``, the output of the sublayer before; H is a multiple of 16.
        streams: ``[T, n, H]`` that its ``hc_pre`` saw.
        post: ``[T, n]`` from there.
        comb: ``[T, n, n]`` from there.
        fn: ``[(2 + n) n, n H]`` of the next sublayer, like the following arguments.
        scale: ``[3]``.
        base: ``[(2 + n) n]``.
        norm_weight: ``[H]``.
        norm_eps: See ``hc_pre_norm``.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations in total.
        global_scale: See ``quantize``, for ``scaling="static"``.
        scaling: ``"token"`` or ``"static"``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(streams [T, n, H], normed [T, H], QuantizedTensor [T, H], post [T, n],
        comb [T, n, n])``, all new.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape, ``scaling`` or the global scale does not fit, ``iterations`` is
            below 1, or a tensor is on another device.
    """
    op = "hc_post_pre_norm_quantize"
    _check.shape(op, "streams", streams, [None, None, None])
    pre = expected_pre(op, streams, fn, scale, base, iterations, norm_weight)
    _check.tensors(op, *expected_post(y, streams, post, comb), *pre)
    static_scale = _check_quantize(op, streams, global_scale, scaling)
    mixed, normed, codes, scales, total, post, comb = _hc_post_pre_norm_quantize(
        HcPostPreNormQuantizeArgs(
            y,
            streams,
            post,
            comb,
            fn,
            scale,
            base,
            norm_weight,
            static_scale,
            norm_eps,
            hc_eps,
            iterations,
            scaling,
        ),
        backend,
    )
    return mixed, normed, QuantizedTensor(codes, scales, total, NVFP4), post, comb


def _check_quantize(
    op: str, streams: torch.Tensor, global_scale: torch.Tensor | float | None, scaling: str
) -> torch.Tensor | None:
    """Check the options of the codes; return the given global scales."""
    _check.one_of(op, "scaling", scaling, ("token", "static"))
    hidden = streams.shape[-1]
    if not torch.compiler.is_compiling() and (hidden == 0 or hidden % 16):
        raise ValueError(f"{op}: streams has {hidden} columns, wanted a positive multiple of 16")
    return given_scale(op, streams[:, 0], global_scale, scaling)
