"""GEMM with a quantised gate and up projection, followed by SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.gemm import check_codes, check_gemm
from dsv4.quant.formats import LINEAR, QuantizedTensor


class GemmSwigluArgs(NamedTuple):
    """Arguments of ``gemm_swiglu``: GEMM with a quantised gate and up weight, and SwiGLU.

    Attributes:
        x: ``[T, K]``, bfloat16, float16, float32 or float64, or FP8 codes, float8_e4m3fn.
        codes: ``[N, K/2]`` uint8 (NVFP4, MXFP4) or ``[N, K]`` float8_e4m3fn, of all groups.
        scales: Block scales in the weight's layout.
        global_scale: float32 ``[1]`` or one per segment or row; None where the format has none.
        row_exponent: int8 ``[N]`` of a weight that is exact in E4M3, else None; changes no value.
        segments: Rows of each part of a fused weight; empty: one part.
        format: Name of the weight's format.
        layout: Layout of the weight's codes and block scales.
        activation: ``"bf16"``, or ``"nvfp4"`` or ``"fp8"``: ``x`` is quantised first.
        input_scale: float32 ``[1]``, static global scale of quantised ``x``, or None.
        limit: Clamp bound above 0, or None for no clamp.
        out_dtype: Dtype of the result, floating.
        x_scales: float8_e8m0fnu ``[T, ceil(K/128)]``, block scales where ``x`` is codes, else None.
        x_layout: Order of the columns of codes, ``"linear"`` of others.
    """

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    row_exponent: torch.Tensor | None
    segments: Sequence[int]
    format: str
    layout: str
    activation: str
    input_scale: torch.Tensor | None
    limit: float | None
    out_dtype: torch.dtype
    x_scales: torch.Tensor | None = None
    x_layout: str = LINEAR


def _fake(args: GemmSwigluArgs) -> torch.Tensor:
    return args.x.new_empty((args.x.shape[0], args.codes.shape[0] // 2), dtype=args.out_dtype)


_gemm_swiglu = define("gemm_swiglu", GemmSwigluArgs, _fake)


@planned
def gemm_swiglu(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor,
    limit: float | None,
    *,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    reserve_sms: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``swiglu(x @ weight.T)``, gate in the weight's even rows, up in the odd ones.

    The result is that of ``gemm`` and ``swiglu`` (specification, sections 4.4, 8.2 and 11) without
    a rounding between them: the intermediate result stays float32 (float64 for float64 ``x``).

    Args:
        x: ``[..., K]``. bfloat16, float16, float32 or float64, or ``"fp8_token"``, see ``gemm``.
        weight: ``[2 I, K]``.
        limit: Clamp bound, greater than 0, or None for no clamp.
        activation: See ``gemm``.
        input_scale: See ``gemm``.
        out_dtype: Floating; if None ``x.dtype``, bfloat16 for codes.
        reserve_sms: See ``gemm``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., I]``.

    Raises:
        TypeError: as ``gemm``.
        ValueError: as ``gemm``, and if the weight has an odd number of rows or ``limit`` is not
            above 0.
    """
    op, scales, x_layout = "gemm_swiglu", None, LINEAR
    if not isinstance(x, torch.Tensor):
        check_codes(op, x, activation)
        scales, x_layout, x = x.scales, x.layout, x.codes
    coded = scales is not None
    input_scale = check_gemm(op, x, weight, activation, input_scale, out_dtype, coded=coded)
    _check_swiglu(weight, limit)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if scales is not None and flat is not x:
        scales = scales.reshape(flat.shape[0], scales.shape[-1])
    if out_dtype is None:
        out_dtype = torch.bfloat16 if coded else x.dtype
    args = GemmSwigluArgs(
        flat,
        weight.codes,
        weight.scales,
        weight.global_scale,
        weight.row_exponent,
        list(weight.segments),
        weight.format.name,
        weight.layout,
        activation,
        input_scale,
        limit,
        out_dtype,
        scales,
        x_layout,
    )
    out = _gemm_swiglu(args, backend, reserve_sms=reserve_sms)
    return out if flat is x else out.reshape(*x.shape[:-1], weight.rows // 2)


def _check_swiglu(weight: QuantizedTensor, limit: float | None) -> None:
    if weight.rows % 2:
        raise ValueError(f"gemm_swiglu: weight has {weight.rows} rows, wanted an even number")
    if limit is not None and not limit > 0:
        raise ValueError(f"gemm_swiglu: limit is {limit}, wanted one above 0 or None")
