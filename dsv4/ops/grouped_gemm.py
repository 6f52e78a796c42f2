"""GEMM of sorted rows with the weights of their experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._grouped_operands import check_step, checked_rows, checked_weight
from dsv4.ops._library import define, define_out
from dsv4.ops._plans import planned

# These were here before they had a module of their own.
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs as GroupedGemmSwigluArgs
from dsv4.ops.grouped_gemm_swiglu import (
    GroupedGemmSwigluQuantizeArgs as GroupedGemmSwigluQuantizeArgs,
)
from dsv4.ops.grouped_gemm_swiglu import empty_codes as empty_codes
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu as grouped_gemm_swiglu
from dsv4.ops.grouped_gemm_swiglu import (
    grouped_gemm_swiglu_quantize as grouped_gemm_swiglu_quantize,
)
from dsv4.quant.formats import QuantizedTensor


class GroupedGemmArgs(NamedTuple):
    """Arguments of ``grouped_gemm``: GEMM of sorted rows with the weights of their experts.

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
        out_dtype: Dtype of the result, floating.
        settled: Whether another GEMM already waited for the offsets.
        step_rows: Rows for which kernels are chosen and configured; 0: R.
        step_experts: Experts for which they are; 0: E.
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
    out_dtype: torch.dtype
    settled: bool
    step_rows: int = 0
    step_experts: int = 0


def _fake(args: GroupedGemmArgs) -> torch.Tensor:
    return args.x.new_empty((args.x.shape[0], args.weight.shape[1]), dtype=args.out_dtype)


_grouped_gemm = define("grouped_gemm", GroupedGemmArgs, _fake)
_grouped_gemm_out = define_out("grouped_gemm", GroupedGemmArgs, _fake)


@planned
def grouped_gemm(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    *,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    settled: bool = False,
    out_dtype: torch.dtype | None = None,
    step_rows: int = 0,
    step_experts: int = 0,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``out[r] = x[r] @ weight[e].T`` for ``offsets[e] <= r < offsets[e + 1]``.

    Each expert's GEMM has the numerics of ``gemm``. Rows past ``offsets[E]`` give zeros, whatever
    they hold. An expert without rows costs nothing (specification, section 8.2).

    Args:
        x: ``[R, K]``, rows sorted by expert (``moe_permute``). Rows in NVFP4 or ``"fp8_token"`` are
            equal to rows that the GEMM quantises itself; ``activation`` is ``"bf16"`` then.
        weight: ``[E, N, K]``, quantised or a plain floating tensor.
        offsets: int32 ``[E + 1]`` on the device of ``x``: 0, then non-decreasing, at most R. Its
            values are data: the reference checks them, a kernel need not.
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``; see ``gemm``.
        input_scale: float32 ``[E]``, one per expert, finite and above 0, or None (dynamic, per
            row); only with ``"nvfp4"``.
        settled: Promises that another GEMM with these offsets was launched between the kernel that
            wrote them and this one: a kernel may then read them, and their experts' weights, while
            that GEMM still runs. The second GEMM of the experts passes True.
        out_dtype: Floating; ``x.dtype`` if None, bfloat16 for quantised rows.
        step_rows: Number of rows of the whole step if ``x`` is a part of them. Kernels are chosen
            and configured for that number, so each expert's results have the bits of a call with
            all of the step's rows. 0: R.
        step_experts: Likewise the number of experts of the step if ``weight`` has another one. 0:
            E.
        out: Tensor for the result, of ``out_dtype``, contiguous, at a multiple of 16 bytes, sharing
            no memory with the other tensors; None to allocate it.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[R, N]``; ``out`` if it was given.

    Raises:
        TypeError: if a dtype is not as stated.
        ValueError: if shapes or devices do not fit, offsets are out of order, ``step_rows`` or
            ``step_experts`` is negative, or ``input_scale`` is not finite and above 0 or is given
            with ``"bf16"``, or ``out`` is not as stated.
    """
    rows, out_dtype = checked_rows("grouped_gemm", x, activation, out_dtype)
    parts = checked_weight("grouped_gemm", rows, weight, offsets, activation, input_scale)
    if step_rows or step_experts:
        check_step("grouped_gemm", step_rows, step_experts)
    args = GroupedGemmArgs(
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
        out_dtype,
        settled,
        step_rows,
        step_experts,
    )
    if out is None:
        return _grouped_gemm(args, backend)
    _check.result("grouped_gemm", out, (x.shape[0], parts.codes.shape[1]), out_dtype, rows.x)
    _grouped_gemm_out(args, backend, out)
    return out
