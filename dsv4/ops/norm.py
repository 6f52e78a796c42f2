"""RMS normalisation with or without a weight, alone and fused with the next step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import Written, define
from dsv4.ops._plans import planned
from dsv4.ops.quantize import empty_nvfp4, given_scale
from dsv4.quant.formats import LINEAR, NVFP4, QuantizedTensor, check_scale_layout


class RmsNormArgs(NamedTuple):
    """Arguments of ``rms_norm``: RMS norm.

    Attributes:
        x: ``[..., D]`` floating.
        weight: ``[D]`` floating, or None.
        eps: Added to the mean square.
    """

    x: torch.Tensor
    weight: torch.Tensor | None
    eps: float


class RmsNormPairArgs(NamedTuple):
    """Arguments of ``rms_norm_pair``: RMS norms of both parts of a row.

    Attributes:
        x: ``[..., D1 + D2]`` floating.
        first_weight: ``[D1]`` floating.
        second_weight: ``[D2]`` floating.
        eps: Added to the mean squares.
    """

    x: torch.Tensor
    first_weight: torch.Tensor
    second_weight: torch.Tensor
    eps: float


class HeadNormRopeArgs(NamedTuple):
    """Arguments of ``head_norm_rope_``: norm and rotation of heads in place.

    Attributes:
        q: ``[T, h, D]`` floating, unit stride along D.
        cos: ``[T, R/2]``, floating, see ``rope_tables``.
        sin: Like ``cos``.
        eps: Added to the mean square.
    """

    q: Written
    cos: torch.Tensor
    sin: torch.Tensor
    eps: float


class RmsNormQuantizeArgs(NamedTuple):
    """Arguments of ``rms_norm_quantize``: RMS norm, and the same in NVFP4.

    Attributes:
        x: ``[T, D]`` floating.
        weight: ``[D]`` floating.
        global_scale: float32 global scale, ``[*batch, 1]`` or ``[*batch, N]``; None: computed.
        eps: Added to the mean square.
        scaling: ``"token"`` or ``"static"``.
        layout: Layout of the block scales.
    """

    x: torch.Tensor
    weight: torch.Tensor
    global_scale: torch.Tensor | None
    eps: float
    scaling: str
    layout: str


def _fake(args: RmsNormArgs) -> torch.Tensor:
    return torch.empty_like(args.x, memory_format=torch.contiguous_format)


def _fake_pair(args: RmsNormPairArgs) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        args.x.new_empty((*args.x.shape[:-1], args.first_weight.shape[0])),
        args.x.new_empty((*args.x.shape[:-1], args.second_weight.shape[0])),
    )


def _fake_head(args: HeadNormRopeArgs) -> None:
    return None


def _fake_quantize(
    args: RmsNormQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty_like(args.x, memory_format=torch.contiguous_format)
    return y, *empty_nvfp4(args.x, args.global_scale, args.scaling, args.layout)


_rms_norm = define("rms_norm", RmsNormArgs, _fake)
_rms_norm_pair = define("rms_norm_pair", RmsNormPairArgs, _fake_pair)
_head_norm_rope_ = define("head_norm_rope_", HeadNormRopeArgs, _fake_head)
_rms_norm_quantize = define("rms_norm_quantize", RmsNormQuantizeArgs, _fake_quantize)


@planned
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``weight * x * rsqrt(mean(x^2) + eps)`` over the last axis.

    Computed in float32 (float64 for float64 input), with one rounding to ``x.dtype`` at the end
    (specification, section 2).
    Without a weight this is the per-head norm of q (specification, section 4.2, step 2). A row that
    holds a non-finite value, or whose mean square overflows, is NaN throughout.

    Args:
        x: ``[..., D]``, bfloat16, float16, float32 or float64.
        weight: ``[D]`` or None.
        eps: Added to the mean square.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., D]`` in ``x.dtype``, contiguous.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if ``x`` has no axis, or ``weight`` another shape than ``[D]`` or device.
    """
    _check.tensors(
        "rms_norm",
        ("x", x, _check.FLOATS, ("...", "D")),
        ("weight", weight, _check.FLOATS, ("D",)),
    )
    return _rms_norm(RmsNormArgs(x, weight, eps), backend)


@planned
def rms_norm_pair(
    x: torch.Tensor,
    first_weight: torch.Tensor,
    second_weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm both parts of a row, q_a and kv (specification, section 4.4).

    Args:
        x: ``[..., D1 + D2]``, bfloat16, float16, float32 or float64.
        first_weight: ``[D1]``.
        second_weight: ``[D2]``.
        eps: Added to the mean squares.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``rms_norm`` of the first D1 columns, ``[..., D1]``, and of the others, ``[..., D2]``.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if the weights do not add up to a row, or are on another device.
    """
    op = "rms_norm_pair"
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("...", "D")),
        ("first_weight", first_weight, _check.FLOATS, ("D1",)),
        ("second_weight", second_weight, _check.FLOATS, ("D2",)),
    )
    widths = first_weight.shape[0], second_weight.shape[0]
    if not torch.compiler.is_compiling() and x.shape[-1] != sum(widths):
        raise ValueError(f"{op}: x has {x.shape[-1]} columns, wanted {widths[0]} + {widths[1]}")
    return _rms_norm_pair(RmsNormPairArgs(x, first_weight, second_weight, eps), backend)


@planned
def head_norm_rope_(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str = "auto",
) -> None:
    """Norm each head without weight, then rotate (specification, section 4.2, steps 2 and 3).

    This is ``rope(rms_norm(q, None, eps), cos, sin)``, with the norm rounded to ``q.dtype``.

    Args:
        q: ``[T, h, D]``, bfloat16, float16, float32 or float64; changed.
        cos: ``[T, R/2]``, R at most D.
        sin: Like ``cos``.
        eps: Added to the mean square.
        backend: Implementation name, see ``dsv4.dispatch``.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit, q overlaps itself or has no unit stride along D, or a
            tensor is on another device.
    """
    op = "head_norm_rope_"
    _check.tensors(
        op,
        ("q", q, _check.FLOATS, ("T", "h", "D")),
        ("cos", cos, _check.FLOATS, ("T", "R/2")),
        ("sin", sin, _check.FLOATS, ("T", "R/2")),
    )
    if not q.is_contiguous():
        _check.no_overlap(op, "q", q)
    if not torch.compiler.is_compiling():
        if 2 * cos.shape[1] > q.shape[2]:
            raise ValueError(
                f"{op}: cos has {cos.shape[1]} columns, wanted at most {q.shape[2] // 2}"
            )
        if q.numel() and q.stride(2) != 1:
            raise ValueError(f"{op}: q has strides {list(q.stride())}, wanted 1 along the heads")
    _head_norm_rope_(HeadNormRopeArgs(q, cos, sin, eps), backend)


@planned
def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    global_scale: torch.Tensor | float | None = None,
    scaling: str = "token",
    layout: str = LINEAR,
    backend: str = "auto",
) -> tuple[torch.Tensor, QuantizedTensor]:
    """Norm a sublayer's input, and quantise the result to NVFP4 for its projections.

    ``y = rms_norm(x, weight, eps)`` and ``quantize(y, "nvfp4", ...)``; y is returned as well
    because the router and the compressors read it.

    Args:
        x: ``[T, D]``, bfloat16, float16, float32 or float64; D is a multiple of 16.
        weight: ``[D]``.
        eps: Added to the mean square.
        global_scale: See ``quantize``, for ``scaling="static"``.
        scaling: ``"token"`` or ``"static"``.
        layout: Layout of the block scales, see ``quantize``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(y [T, D] in x.dtype, QuantizedTensor [T, D])``.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape, ``scaling``, ``layout`` or the global scale does not fit.
    """
    op = "rms_norm_quantize"
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("T", "D")),
        ("weight", weight, _check.FLOATS, ("D",)),
    )
    _check.one_of(op, "scaling", scaling, ("token", "static"))
    check_scale_layout(NVFP4, layout)
    if not torch.compiler.is_compiling() and (x.shape[1] == 0 or x.shape[1] % 16):
        raise ValueError(f"{op}: x has {x.shape[1]} columns, wanted a positive multiple of 16")
    scale = given_scale(op, x, global_scale, scaling)
    y, codes, scales, total = _rms_norm_quantize(
        RmsNormQuantizeArgs(x, weight, scale, eps, scaling, layout), backend
    )
    return y, QuantizedTensor(codes, scales, total, NVFP4, layout)
