"""Grouped GEMM with gate and up weights, followed by SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._grouped_operands import check_step, checked_rows, checked_weight
from dsv4.ops._library import define, define_out
from dsv4.ops._plans import planned
from dsv4.ops.quantize import positive
from dsv4.quant.formats import (
    LINEAR,
    NVFP4,
    SWIZZLED_EXPERTS,
    QuantizedTensor,
    expert_tiles,
)


class GroupedGemmSwigluArgs(NamedTuple):
    """Arguments of ``grouped_gemm_swiglu``: ``grouped_gemm``, and SwiGLU of the result.

    Attributes:
        x: ``[R, K]`` sorted rows, floating, or their codes: NVFP4 ``[R, K/2]`` uint8, or FP8
            ``[R, K]`` float8_e4m3fn.
        weight: ``[E, N, K]`` floating, or codes ``[E, N, K/2]``.
        scales: Block scales of codes in the weight's layout, else None.
        global_scale: float32, of each expert's weight ``[E, 1]``, or of each of its parts; or None.
        row_exponent: int8 ``[E, N]`` of a weight that is exact in E4M3, or None; changes no value.
        segments: Rows of each part of a fused weight; empty: one part.
        offsets: int32 ``[E + 1]``: expert e owns the rows ``offsets[e]`` to ``offsets[e + 1]``.
        format: Name of the weight's format, or ``"plain"``.
        layout: Layout of the weight's codes and block scales.
        activation: ``"bf16"``, or ``"nvfp4"`` or ``"fp8"``: ``x`` is quantised first.
        input_scale: float32 ``[E]``, static global scales of quantised ``x``, or None.
        x_scales: Linear block scales where ``x`` is codes: float8_e4m3fn ``[R, K/16]`` of NVFP4,
            float8_e8m0fnu ``[R, ceil(K/128)]`` of FP8; else None.
        x_layout: Order of the columns of FP8 codes, ``"linear"`` of others.
        row_scale: float32 ``[R]``, global scale of each row of NVFP4 codes, else None.
        limit: Clamp bound above 0, or None for no clamp.
        row_weight: ``[R]`` floating, multiplies the rows of the result; or None.
        out_dtype: Dtype of the result, floating.
        step_rows: See ``GroupedGemmArgs``.
        step_experts: Likewise.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    row_exponent: torch.Tensor | None
    segments: Sequence[int]
    offsets: torch.Tensor
    format: str
    layout: str
    activation: str
    input_scale: torch.Tensor | None
    x_scales: torch.Tensor | None
    x_layout: str
    row_scale: torch.Tensor | None
    limit: float | None
    row_weight: torch.Tensor | None
    out_dtype: torch.dtype
    step_rows: int = 0
    step_experts: int = 0


class GroupedGemmSwigluQuantizeArgs(NamedTuple):
    """Arguments of ``grouped_gemm_swiglu_quantize``: ``grouped_gemm_swiglu`` with an NVFP4 result.

    Attributes:
        x: ``[R, K]`` sorted rows, floating, or their codes: NVFP4 ``[R, K/2]`` uint8, or FP8
            ``[R, K]`` float8_e4m3fn.
        weight: ``[E, N, K]`` floating, or codes ``[E, N, K/2]``.
        scales: Block scales of codes in the weight's layout, else None.
        global_scale: float32, of each expert's weight ``[E, 1]``, or of each of its parts; or None.
        row_exponent: int8 ``[E, N]`` of a weight that is exact in E4M3, or None; changes no value.
        segments: Rows of each part of a fused weight; empty: one part.
        offsets: int32 ``[E + 1]``: expert e owns the rows ``offsets[e]`` to ``offsets[e + 1]``.
        format: Name of the weight's format, or ``"plain"``.
        layout: Layout of the weight's codes and block scales.
        activation: ``"bf16"``, or ``"nvfp4"`` or ``"fp8"``: ``x`` is quantised first.
        input_scale: float32 ``[E]``, static global scales of quantised ``x``, or None.
        x_scales: Linear block scales where ``x`` is codes: float8_e4m3fn ``[R, K/16]`` of NVFP4,
            float8_e8m0fnu ``[R, ceil(K/128)]`` of FP8; else None.
        x_layout: Order of the columns of FP8 codes, ``"linear"`` of others.
        row_scale: float32 ``[R]``, global scale of each row of NVFP4 codes, else None.
        limit: Clamp bound above 0, or None for no clamp.
        row_weight: ``[R]`` floating, multiplies the rows of the result; or None.
        result_scale: float32 ``[E]``, static global scale of each expert's results.
        scale_layout: Layout of the result's block scales.
        step_rows: See ``GroupedGemmArgs``.
        step_experts: Likewise.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    row_exponent: torch.Tensor | None
    segments: Sequence[int]
    offsets: torch.Tensor
    format: str
    layout: str
    activation: str
    input_scale: torch.Tensor | None
    x_scales: torch.Tensor | None
    x_layout: str
    row_scale: torch.Tensor | None
    limit: float | None
    row_weight: torch.Tensor | None
    result_scale: torch.Tensor
    scale_layout: str
    step_rows: int = 0
    step_experts: int = 0


def _fake_swiglu(args: GroupedGemmSwigluArgs) -> torch.Tensor:
    return args.x.new_empty((args.x.shape[0], args.weight.shape[1] // 2), dtype=args.out_dtype)


def _fake_swiglu_quantize(
    args: GroupedGemmSwigluQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_codes(args.x, args.weight, args.scale_layout)


def empty_codes(
    x: torch.Tensor, weight: torch.Tensor, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate codes, block scales and rows' scales for ``grouped_gemm_swiglu_quantize``.

    Args:
        x: Sorted rows, ``[R, any]``.
        weight: Weight of the experts, ``[E, 2 I, any]``.
        scale_layout: Layout of the block scales.
    """
    (experts, high, _), rows = weight.shape, x.shape[0]
    columns = high // 2
    shape = [rows, columns // 16]
    if scale_layout == SWIZZLED_EXPERTS:
        shape = [expert_tiles(rows, experts) * 128 * (columns // 16)]
    return (
        x.new_empty((rows, columns // 2), dtype=torch.uint8),
        x.new_empty(shape, dtype=torch.float8_e4m3fn),
        x.new_empty((rows,), dtype=torch.float32),
    )


_grouped_gemm_swiglu = define("grouped_gemm_swiglu", GroupedGemmSwigluArgs, _fake_swiglu)
_grouped_gemm_swiglu_out = define_out("grouped_gemm_swiglu", GroupedGemmSwigluArgs, _fake_swiglu)


_grouped_gemm_swiglu_quantize = define(
    "grouped_gemm_swiglu_quantize", GroupedGemmSwigluQuantizeArgs, _fake_swiglu_quantize
)


@planned
def grouped_gemm_swiglu(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    limit: float | None,
    *,
    row_weight: torch.Tensor | None = None,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    step_rows: int = 0,
    step_experts: int = 0,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``swiglu(x[r] @ weight[e].T)``, gate in a weight's even rows, up in odd ones.

    The result is that of ``grouped_gemm`` and ``swiglu`` (specification, section 8.2) without a
    rounding between them: the intermediate result stays float32 (float64 for float64 ``x``).

    Args:
        x: See ``grouped_gemm``.
        weight: ``[E, 2 I, K]``, likewise.
        offsets: Likewise.
        limit: Clamp bound, greater than 0, or None for no clamp.
        row_weight: ``[R]``, floating: multiplies its row before the rounding, as DeepSeek's routing
            weight does. None for no weight.
        activation: See ``grouped_gemm``.
        input_scale: Likewise.
        out_dtype: Likewise.
        step_rows: Likewise.
        step_experts: Likewise.
        out: Likewise.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[R, I]``; ``out`` if it was given.

    Raises:
        TypeError: as ``grouped_gemm``, and if ``row_weight`` is not floating.
        ValueError: as ``grouped_gemm``, and if a weight has an odd number of rows, ``limit`` is not
            above 0, or ``row_weight`` has another shape or device.
    """
    op = "grouped_gemm_swiglu"
    rows, out_dtype = checked_rows(op, x, activation, out_dtype)
    parts = checked_weight(op, rows, weight, offsets, activation, input_scale)
    if step_rows or step_experts:
        check_step(op, step_rows, step_experts)
    high = parts.codes.shape[1]
    if high % 2:
        raise ValueError(f"{op}: weight has {high} rows, wanted an even number")
    check_grouped_swiglu(op, rows.x, limit, row_weight)
    args = GroupedGemmSwigluArgs(
        rows.x,
        parts.codes,
        parts.scales,
        parts.global_scale,
        parts.row_exponent,
        parts.segments,
        offsets,
        parts.format,
        parts.layout,
        activation,
        input_scale,
        rows.scales,
        rows.layout,
        rows.row_scale,
        limit,
        row_weight,
        out_dtype,
        step_rows,
        step_experts,
    )
    if out is None:
        return _grouped_gemm_swiglu(args, backend)
    _check.result(op, out, (x.shape[0], high // 2), out_dtype, rows.x)
    _grouped_gemm_swiglu_out(args, backend, out)
    return out


@planned
def grouped_gemm_swiglu_quantize(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    limit: float | None,
    result_scale: torch.Tensor,
    *,
    row_weight: torch.Tensor | None = None,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    scale_layout: str = LINEAR,
    step_rows: int = 0,
    step_experts: int = 0,
    backend: str = "auto",
) -> QuantizedTensor:
    """Compute ``grouped_gemm_swiglu`` in its default dtype and ``quantize`` the result to NVFP4.

    A second GEMM with ``activation="nvfp4"`` and these input scales would quantise its rows to the
    same codes. The bits are those of the two operators of the same implementation, one after the
    other.

    ``grouped_gemm`` takes linear block scales. ``"swizzled_128x4_experts"`` is the layout that
    other grouped GEMMs take: each expert's scales are in the layout of ``swizzle_scales`` from tile
    ``sum(ceil(n / 128) for the n rows of each expert before)`` on, padding is zeros, and there are
    as many tiles as any offsets can need (``dsv4.quant.formats.swizzle_expert_scales``; the inverse
    is ``unswizzle_expert_scales``).

    Args:
        x: See ``grouped_gemm``.
        weight: ``[E, 2 I, K]``, as in ``grouped_gemm_swiglu``; I is a multiple of 16, of 64 for
            ``"swizzled_128x4_experts"``.
        offsets: See ``grouped_gemm``.
        limit: See ``grouped_gemm_swiglu``.
        result_scale: float32 ``[E]``, the static global scale of each expert's results, finite and
            above 0.
        row_weight: See ``grouped_gemm_swiglu``.
        activation: Activation of ``x``, as in ``grouped_gemm``.
        input_scale: Likewise.
        scale_layout: Layout of the block scales, ``"linear"`` or ``"swizzled_128x4_experts"``.
        step_rows: See ``grouped_gemm``.
        step_experts: Likewise.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        NVFP4 ``[R, I]`` with a global scale per row, that of its expert. Rows past ``offsets[E]``
        are zeros, of global scale 1.

    Raises:
        TypeError: as ``grouped_gemm_swiglu``, and if ``result_scale`` is not float32.
        ValueError: as ``grouped_gemm_swiglu``, and if a weight's rows are no multiple of 32 (of
            128), ``scale_layout`` is unknown, or ``result_scale`` has another shape or device or is
            not finite and above 0.
    """
    op = "grouped_gemm_swiglu_quantize"
    rows, _ = checked_rows(op, x, activation, None)
    parts = checked_weight(op, rows, weight, offsets, activation, input_scale)
    if step_rows or step_experts:
        check_step(op, step_rows, step_experts)
    high = parts.codes.shape[1]
    _check.one_of(op, "scale_layout", scale_layout, (LINEAR, SWIZZLED_EXPERTS))
    multiple = 32 if scale_layout == LINEAR else 128
    if high == 0 or high % multiple:
        raise ValueError(f"{op}: weight has {high} rows, wanted a positive multiple of {multiple}")
    check_grouped_swiglu(op, rows.x, limit, row_weight)
    _check.tensors(
        op,
        ("weight", parts.codes, (parts.codes.dtype,), ("E", "N", None)),
        ("result_scale", result_scale, (torch.float32,), ("E",)),
    )
    positive(f"{op}: result_scale", result_scale)
    args = GroupedGemmSwigluQuantizeArgs(
        rows.x,
        parts.codes,
        parts.scales,
        parts.global_scale,
        parts.row_exponent,
        parts.segments,
        offsets,
        parts.format,
        parts.layout,
        activation,
        input_scale,
        rows.scales,
        rows.layout,
        rows.row_scale,
        limit,
        row_weight,
        result_scale,
        scale_layout,
        step_rows,
        step_experts,
    )
    codes, scales, total = _grouped_gemm_swiglu_quantize(args, backend)
    return QuantizedTensor(codes, scales, total, NVFP4, scale_layout)


def check_grouped_swiglu(
    op: str, x: torch.Tensor, limit: float | None, row_weight: torch.Tensor | None
) -> None:
    """Check the arguments of SwiGLU behind a grouped GEMM of the rows ``x``."""
    if limit is not None and not limit > 0:
        raise ValueError(f"{op}: limit is {limit}, wanted one above 0 or None")
    if row_weight is not None:
        _check.tensors(
            op,
            ("x", x, (x.dtype,), ("R", "K")),
            ("row_weight", row_weight, _check.FLOATS, ("R",)),
        )
