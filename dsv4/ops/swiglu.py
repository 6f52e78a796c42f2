"""SwiGLU with DeepSeek-V4's clamp."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.quantize import empty_nvfp4, given_scale
from dsv4.quant.formats import LINEAR, NVFP4, QuantizedTensor, check_scale_layout

LAYOUTS = ("concatenated", "interleaved")


class SwigluArgs(NamedTuple):
    """Arguments of ``swiglu``: SwiGLU.

    Attributes:
        gate_up: ``[..., 2 I]`` floating.
        limit: Clamp bound above 0, or None for no clamp.
        layout: ``"concatenated"`` or ``"interleaved"``.
        row_weight: ``[...]`` floating, or None.
        out_dtype: Dtype of the result, floating.
    """

    gate_up: torch.Tensor
    limit: float | None
    layout: str
    row_weight: torch.Tensor | None
    out_dtype: torch.dtype


class SwigluQuantizeArgs(NamedTuple):
    """Arguments of ``swiglu_quantize``: ``swiglu`` with an NVFP4 result.

    Attributes:
        gate_up: ``[*batch, N, 2 I]`` floating.
        limit: Clamp bound above 0, or None for no clamp.
        layout: ``"concatenated"`` or ``"interleaved"``.
        row_weight: ``[*batch, N]`` floating, or None.
        global_scale: float32 global scale, ``[*batch, 1]`` or ``[*batch, N]``; None: computed.
        scaling: ``"token"`` or ``"static"``.
        scale_layout: Layout of the block scales.
    """

    gate_up: torch.Tensor
    limit: float | None
    layout: str
    row_weight: torch.Tensor | None
    global_scale: torch.Tensor | None
    scaling: str
    scale_layout: str


def _fake(args: SwigluArgs) -> torch.Tensor:
    return args.gate_up.new_empty(
        [*args.gate_up.shape[:-1], args.gate_up.shape[-1] // 2], dtype=args.out_dtype
    )


def _fake_quantize(args: SwigluQuantizeArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inner = args.gate_up.new_empty([*args.gate_up.shape[:-1], args.gate_up.shape[-1] // 2])
    return empty_nvfp4(inner, args.global_scale, args.scaling, args.scale_layout)


_swiglu = define("swiglu", SwigluArgs, _fake)
_swiglu_quantize = define("swiglu_quantize", SwigluQuantizeArgs, _fake_quantize)


@planned
def swiglu(
    gate_up: torch.Tensor,
    limit: float | None,
    *,
    layout: str = "concatenated",
    row_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``silu(min(gate, limit)) * clamp(up, -limit, limit)`` (specification, section 8.2).

    The gate has an upper clamp only, and both clamps come before the multiplication. Computed in
    float32 (float64 for float64 input), with one rounding to ``out_dtype`` at the end. A NaN or an
    infinity in gate or up gives NaN in its own element: no clamp turns an infinity into a number.

    Args:
        gate_up: ``[..., 2 I]``, bfloat16, float16, float32 or float64.
        limit: Clamp bound, greater than 0, or None for no clamp.
        layout: ``"concatenated"``: I gate columns, then I up columns; ``"interleaved"``: gate in
            the even columns, up in the odd ones.
        row_weight: ``[...]``, floating: multiplies its row before the rounding, as DeepSeek's
            routing weight does (specification, section 8.2). None for no weight.
        out_dtype: Dtype of the result; None for ``gate_up.dtype``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., I]`` in ``out_dtype``, contiguous.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if the last size is odd, ``limit`` is not a positive number, ``layout`` is
            unknown, or ``row_weight`` has another shape or device.
    """
    check_swiglu("swiglu", gate_up, limit, layout, row_weight)
    out_dtype = gate_up.dtype if out_dtype is None else out_dtype
    if out_dtype not in _check.FLOATS:
        raise TypeError(f"swiglu: out_dtype is {out_dtype}, wanted a floating type of 16 bits up")
    return _swiglu(SwigluArgs(gate_up, limit, layout, row_weight, out_dtype), backend)


@planned
def swiglu_quantize(
    gate_up: torch.Tensor,
    limit: float | None,
    *,
    layout: str = "concatenated",
    row_weight: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    scaling: str = "token",
    scale_layout: str = LINEAR,
    backend: str = "auto",
) -> QuantizedTensor:
    """Compute ``swiglu`` in the dtype of ``gate_up``, and ``quantize`` the result to NVFP4.

    The bits are those of the two operators of the same implementation, one after the other.

    Args:
        gate_up: ``[*batch, N, 2 I]``, bfloat16, float16, float32 or float64; I is a multiple of 16.
        limit: See ``swiglu``.
        layout: See ``swiglu``.
        row_weight: ``[*batch, N]``, as for ``swiglu``.
        global_scale: See ``quantize``; required for ``"static"``, an error for ``"token"``.
        scaling: ``"static"``, or ``"token"`` for one dynamic scale per row.
        scale_layout: Layout of the block scales, ``"linear"`` or ``"swizzled_128x4"``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        NVFP4 ``[*batch, N, I]``.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: as ``swiglu`` and ``quantize`` do.
    """
    op = "swiglu_quantize"
    check_swiglu(op, gate_up, limit, layout, row_weight)
    _check.one_of(op, "scaling", scaling, ("static", "token"))
    check_scale_layout(NVFP4, scale_layout)
    if gate_up.ndim < 2:
        raise ValueError(f"{op}: gate_up has shape {list(gate_up.shape)}, wanted [..., N, 2 I]")
    if not torch.compiler.is_compiling() and (gate_up.shape[-1] == 0 or gate_up.shape[-1] % 32):
        raise ValueError(
            f"{op}: gate_up has {gate_up.shape[-1]} columns, wanted a positive multiple of 32"
        )
    scale = given_scale(op, gate_up, global_scale, scaling)
    codes, scales, total = _swiglu_quantize(
        SwigluQuantizeArgs(gate_up, limit, layout, row_weight, scale, scaling, scale_layout),
        backend,
    )
    return QuantizedTensor(codes, scales, total, NVFP4, scale_layout)


def check_swiglu(
    op: str,
    gate_up: torch.Tensor,
    limit: float | None,
    layout: str,
    row_weight: torch.Tensor | None,
) -> None:
    """Check the arguments of ``swiglu`` and of its forms that quantise."""
    rows = gate_up.shape[:-1]
    _check.tensors(
        op,
        ("gate_up", gate_up, _check.FLOATS, None),
        ("row_weight", row_weight, _check.FLOATS, rows),
    )
    _check.one_of(op, "layout", layout, LAYOUTS)
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"{op}: gate_up has shape {list(gate_up.shape)}, wanted an even last size")
    if limit is not None and not (0 < limit < math.inf):
        raise ValueError(f"{op}: limit is {limit}, wanted a finite number above 0, or None")
