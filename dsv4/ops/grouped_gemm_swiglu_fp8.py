"""Grouped GEMM with gate and up weights, SwiGLU, and the result in FP8 by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.ops._grouped_operands import check_step, checked_rows, checked_weight
from dsv4.ops._library import as_record, define
from dsv4.ops._plans import planned
from dsv4.ops.fp8_token import check_result_layout
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, check_grouped_swiglu
from dsv4.ops.quantize import empty_fp8_token
from dsv4.quant.formats import FP8_TOKEN, LINEAR, QuantizedTensor


class GroupedGemmSwigluFp8Args(NamedTuple):
    """Arguments of ``grouped_gemm_swiglu_fp8``: ``grouped_gemm_swiglu`` with an FP8 result.

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
        result_layout: Order of the columns of the result's codes.
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
    result_layout: str
    step_rows: int = 0
    step_experts: int = 0


def _fake(args: GroupedGemmSwigluFp8Args) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_fp8_token(args.x, (args.x.shape[0], args.weight.shape[1] // 2))


_grouped_gemm_swiglu_fp8 = define("grouped_gemm_swiglu_fp8", GroupedGemmSwigluFp8Args, _fake)


def gemm_record(args: GroupedGemmSwigluFp8Args) -> GroupedGemmSwigluArgs:
    """Return the arguments of the same GEMM with a result that is not rounded to FP8."""
    dtype = torch.bfloat16 if args.x_scales is not None else args.x.dtype
    return as_record(GroupedGemmSwigluArgs, args, out_dtype=dtype)


@planned
def grouped_gemm_swiglu_fp8(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    limit: float | None,
    *,
    row_weight: torch.Tensor | None = None,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    result_layout: str = LINEAR,
    step_rows: int = 0,
    step_experts: int = 0,
    backend: str = "auto",
) -> QuantizedTensor:
    """Compute ``grouped_gemm_swiglu`` in its default dtype and ``quantize`` the result by tokens.

    A second GEMM with ``activation="fp8"`` would round its rows to the same codes. The bits are
    those of the two operators of the same implementation, one after the other.

    Args:
        x: See ``grouped_gemm``.
        weight: ``[E, 2 I, K]``, as in ``grouped_gemm_swiglu``.
        offsets: See ``grouped_gemm``.
        limit: See ``grouped_gemm_swiglu``.
        row_weight: See ``grouped_gemm_swiglu``.
        activation: Activation of ``x``, as in ``grouped_gemm``.
        input_scale: Likewise.
        result_layout: Layout of the codes, see ``quantize``.
        step_rows: See ``grouped_gemm``.
        step_experts: Likewise.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``"fp8_token"`` ``[R, I]``; rows past ``offsets[E]`` are zeros.

    Raises:
        TypeError: as ``grouped_gemm_swiglu``.
        ValueError: as ``grouped_gemm_swiglu``, and if the layout does not fit.
    """
    op = "grouped_gemm_swiglu_fp8"
    rows, _ = checked_rows(op, x, activation, None)
    parts = checked_weight(op, rows, weight, offsets, activation, input_scale)
    if step_rows or step_experts:
        check_step(op, step_rows, step_experts)
    high = parts.codes.shape[1]
    if high % 2:
        raise ValueError(f"{op}: weight has {high} rows, wanted an even number")
    check_grouped_swiglu(op, rows.x, limit, row_weight)
    check_result_layout(op, result_layout, high // 2)
    args = GroupedGemmSwigluFp8Args(
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
        result_layout,
        step_rows,
        step_experts,
    )
    codes, scales = _grouped_gemm_swiglu_fp8(args, backend)
    return QuantizedTensor(codes, scales, None, FP8_TOKEN, result_layout)
