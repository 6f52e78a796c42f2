"""Manifold-constrained hyper-connections: collapse n streams, mix them back, and the head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._hyper_connection_operands import (
    Pre,
    check_rank,
    empty_pre,
    expected_post,
    expected_pre,
)
from dsv4.ops._library import define
from dsv4.ops._plans import planned

# These were here before they had a module of their own.
from dsv4.ops.hyper_connection_quantize import (
    HcPostPreNormQuantizeArgs as HcPostPreNormQuantizeArgs,
)
from dsv4.ops.hyper_connection_quantize import HcPreNormQuantizeArgs as HcPreNormQuantizeArgs
from dsv4.ops.hyper_connection_quantize import (
    hc_post_pre_norm_quantize as hc_post_pre_norm_quantize,
)
from dsv4.ops.hyper_connection_quantize import hc_pre_norm_quantize as hc_pre_norm_quantize


class HcPreArgs(NamedTuple):
    """Arguments of ``hc_pre``: collapse of the residual streams.

    Attributes:
        streams: ``[..., n, H]`` floating.
        fn: ``[(2 + n) n, n H]`` floating.
        scale: ``[3]`` floating.
        base: ``[(2 + n) n]`` floating.
        norm_eps: Epsilon of the norm, added to mean squares.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations, at least 1.
    """

    streams: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_eps: float
    hc_eps: float
    iterations: int


class HcPostArgs(NamedTuple):
    """Arguments of ``hc_post``: writing a sublayer's output back to the streams.

    Attributes:
        y: ``[..., H]`` floating, output of the sublayer before.
        streams: ``[..., n, H]`` floating.
        post: ``[..., n]`` floating.
        comb: ``[..., n, n]`` floating.
    """

    y: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class HcPreNormArgs(NamedTuple):
    """Arguments of ``hc_pre_norm``: ``hc_pre`` with the norm that follows.

    Attributes:
        streams: ``[..., n, H]`` floating.
        fn: ``[(2 + n) n, n H]`` floating.
        scale: ``[3]`` floating.
        base: ``[(2 + n) n]`` floating.
        norm_weight: ``[H]`` floating.
        norm_eps: Epsilon of the norm, added to mean squares.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations, at least 1.
    """

    streams: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    hc_eps: float
    iterations: int


class HcPostPreNormArgs(NamedTuple):
    """Arguments of ``hc_post_pre_norm``: ``hc_post`` of one sublayer, ``hc_pre_norm`` of the next.

    Attributes:
        y: ``[..., H]`` floating, output of the sublayer before.
        streams: ``[..., n, H]`` floating.
        post: ``[..., n]`` floating.
        comb: ``[..., n, n]`` floating.
        fn: ``[(2 + n) n, n H]`` floating.
        scale: ``[3]`` floating.
        base: ``[(2 + n) n]`` floating.
        norm_weight: ``[H]`` floating.
        norm_eps: Epsilon of the norm, added to mean squares.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations, at least 1.
    """

    y: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    hc_eps: float
    iterations: int


class HcHeadArgs(NamedTuple):
    """Arguments of ``hc_head``: collapse of the streams after the last layer.

    Attributes:
        streams: ``[..., n, H]`` floating.
        fn: ``[n, n H]`` floating.
        scale: ``[1]`` floating.
        base: ``[n]`` floating.
        norm_eps: Epsilon of the norm, added to mean squares.
        hc_eps: Added to the weights.
    """

    streams: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_eps: float
    hc_eps: float


def _fake_pre(args: HcPreArgs | HcPreNormArgs) -> Pre:
    return empty_pre(args.streams)


def _fake_post(args: HcPostArgs) -> torch.Tensor:
    return torch.empty_like(args.streams, memory_format=torch.contiguous_format)


def _fake_post_pre_norm(
    args: HcPostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mixed = torch.empty_like(args.streams, memory_format=torch.contiguous_format)
    return mixed, *empty_pre(args.streams)


def _fake_head(args: HcHeadArgs) -> torch.Tensor:
    return args.streams.new_empty([*args.streams.shape[:-2], args.streams.shape[-1]])


_hc_pre = define("hc_pre", HcPreArgs, _fake_pre)
_hc_post = define("hc_post", HcPostArgs, _fake_post)
_hc_pre_norm = define("hc_pre_norm", HcPreNormArgs, _fake_pre)
_hc_post_pre_norm = define("hc_post_pre_norm", HcPostPreNormArgs, _fake_post_pre_norm)
_hc_head = define("hc_head", HcHeadArgs, _fake_head)


@planned
def hc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    backend: str = "auto",
) -> Pre:
    """Collapse the residual streams before a sublayer (specification, section 3.2).

    ``m = (fn @ x) * rsqrt(mean(x^2) + norm_eps)`` of the flattened streams gives, in the row order
    of ``fn``, n collapse weights ``sigmoid(.) + hc_eps``, n write-back weights ``2 sigmoid(.)`` and
    the n x n mixing matrix, made doubly stochastic by Sinkhorn: a row softmax, ``+ hc_eps``, the
    columns divided by their sum ``+ hc_eps``, then ``iterations - 1`` times rows and columns.
    Columns are normalised last. Everything is computed in float32 (float64 for float64 streams).

    Args:
        streams: ``[..., n, H]``, bfloat16, float16, float32 or float64.
        fn: ``[(2 + n) n, n H]``, floating.
        scale: ``[3]``, floating: factors of the collapse, write-back and mixing parts.
        base: ``[(2 + n) n]``, floating.
        norm_eps: Added to the mean square.
        hc_eps: The Sinkhorn epsilon, also added to the collapse weights.
        iterations: Column normalisations in total, at least 1.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(collapsed [..., H] in streams.dtype, post [..., n], comb [..., n, n])``; post and comb in
        float32 (float64 for float64 streams). ``comb[j, k]`` is the weight of stream j in stream k.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit, ``iterations`` is below 1, or a tensor is on another
            device.
    """
    _check.tensors("hc_pre", *expected_pre("hc_pre", streams, fn, scale, base, iterations))
    return _hc_pre(HcPreArgs(streams, fn, scale, base, norm_eps, hc_eps, iterations), backend)


@planned
def hc_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Write a sublayer's output back: ``X'_k = post_k y + sum_j comb[j, k] X_j``.

    Specification, section 3.3.

    The sum is over the FIRST index of ``comb``. In float32 (float64 if ``streams`` or ``y`` is),
    one rounding at the end.

    Args:
        y: ``[..., H]``, floating, the sublayer's output.
        streams: ``[..., n, H]``, floating, the streams that ``hc_pre`` saw.
        post: ``[..., n]``, floating, from ``hc_pre``.
        comb: ``[..., n, n]``, floating, from ``hc_pre``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., n, H]`` in ``streams.dtype``, contiguous.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit or a tensor is on another device.
    """
    if streams.ndim < 2:  # while torch.compile traces, too
        check_rank("hc_post", streams)
    _check.tensors("hc_post", *expected_post(y, streams, post, comb))
    return _hc_post(HcPostArgs(y, streams, post, comb), backend)


@planned
def hc_pre_norm(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    backend: str = "auto",
) -> Pre:
    """Run ``hc_pre`` and the next sublayer's RMS norm (specification, sections 3.2 and 2).

    Args:
        streams: See ``hc_pre``, also for ``fn``, ``scale``, ``base``, ``hc_eps``, ``iterations``.
        fn: ``[(2 + n) n, n H]``.
        scale: ``[3]``.
        base: ``[(2 + n) n]``.
        norm_weight: ``[H]``, floating, of the norm.
        norm_eps: Added to both mean squares, that of the streams and that of the norm.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations in total.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(normed [..., H], post [..., n], comb [..., n, n])``: the collapsed streams, rounded to
        their dtype, then their norm, rounded again; post and comb as in ``hc_pre``.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit, ``iterations`` is below 1, or a tensor is on another
            device.
    """
    op = "hc_pre_norm"
    _check.tensors(op, *expected_pre(op, streams, fn, scale, base, iterations, norm_weight))
    return _hc_pre_norm(
        HcPreNormArgs(streams, fn, scale, base, norm_weight, norm_eps, hc_eps, iterations), backend
    )


@planned
def hc_post_pre_norm(
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
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run what is between two sublayers: ``hc_post`` of the one, ``hc_pre_norm`` of the next.

    Args:
        y: ``[..., H]``, the output of the sublayer before.
        streams: ``[..., n, H]`` that its ``hc_pre`` saw.
        post: ``[..., n]`` from there.
        comb: ``[..., n, n]`` from there.
        fn: ``[(2 + n) n, n H]`` of the next sublayer, like the following arguments.
        scale: ``[3]``.
        base: ``[(2 + n) n]``.
        norm_weight: ``[H]``.
        norm_eps: See ``hc_pre_norm``.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations in total.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(streams [..., n, H], normed [..., H], post [..., n], comb [..., n, n])``, all new; ``fn``
        multiplies the streams as they are returned, after rounding.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit, ``iterations`` is below 1, or a tensor is on another
            device.
    """
    op = "hc_post_pre_norm"
    pre = expected_pre(op, streams, fn, scale, base, iterations, norm_weight)
    _check.tensors(op, *expected_post(y, streams, post, comb), *pre)
    return _hc_post_pre_norm(
        HcPostPreNormArgs(
            y, streams, post, comb, fn, scale, base, norm_weight, norm_eps, hc_eps, iterations
        ),
        backend,
    )


@planned
def hc_head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Collapse the streams after the last layer (specification, section 3.4).

    This is the collapse of ``hc_pre`` alone: its weights ``sigmoid(.) + hc_eps`` do not sum to 1.

    Args:
        streams: ``[..., n, H]``, bfloat16, float16, float32 or float64.
        fn: ``[n, n H]``, floating.
        scale: ``[1]``, floating.
        base: ``[n]``, floating.
        norm_eps: Added to the mean square.
        hc_eps: Added to the weights.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., H]`` in ``streams.dtype``, contiguous.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit or a tensor is on another device.
    """
    n = check_rank("hc_head", streams)
    _check.tensors(
        "hc_head",
        ("streams", streams, _check.FLOATS, ("...", "n", "H")),
        ("fn", fn, _check.FLOATS, (n, n * streams.shape[-1])),
        ("scale", scale, _check.FLOATS, (1,)),
        ("base", base, _check.FLOATS, (n,)),
    )
    return _hc_head(HcHeadArgs(streams, fn, scale, base, norm_eps, hc_eps), backend)
