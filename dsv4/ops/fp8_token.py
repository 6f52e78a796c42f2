"""Operators whose results are FP8 by tokens, the operands of a GEMM of FP8 activations."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.moe import check_slots
from dsv4.ops.quantize import empty_fp8_token
from dsv4.ops.swiglu import check_swiglu
from dsv4.quant.formats import (
    FP8_TOKEN,
    FRAGMENTS,
    LINEAR,
    QuantizedTensor,
    check_scale_layout,
    check_token_columns,
)

Codes = tuple[torch.Tensor, torch.Tensor]


class RmsNormFp8Args(NamedTuple):
    """Arguments of ``rms_norm_fp8``: RMS norm, and the same in FP8.

    Attributes:
        x: ``[T, D]`` floating.
        weight: ``[D]`` floating.
        eps: Added to the mean square.
        result_layout: Order of the columns of codes, ``"linear"`` or ``"fragments_16x64"``.
    """

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    result_layout: str


class SwigluFp8Args(NamedTuple):
    """Arguments of ``swiglu_fp8``: ``swiglu`` with an FP8 result.

    Attributes:
        gate_up: ``[*batch, N, 2 I]`` floating.
        limit: Clamp bound above 0, or None for no clamp.
        layout: ``"concatenated"`` or ``"interleaved"``.
        row_weight: ``[*batch, N]`` floating, or None.
        result_layout: Order of the columns of codes, ``"linear"`` or ``"fragments_16x64"``.
    """

    gate_up: torch.Tensor
    limit: float | None
    layout: str
    row_weight: torch.Tensor | None
    result_layout: str


class MoeGatherFp8Args(NamedTuple):
    """Arguments of ``moe_gather_fp8``: sorted rows in FP8, and their weights.

    Attributes:
        x: ``[T, H]`` floating.
        rows: int32 ``[T, k]``, sorted row of each slot.
        weights: ``[T, k]`` floating, of each slot.
        result_layout: Order of the columns of codes, ``"linear"`` or ``"fragments_16x64"``.
    """

    x: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    result_layout: str


def _fake_norm(args: RmsNormFp8Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.empty_like(args.x, memory_format=torch.contiguous_format)
    return y, *empty_fp8_token(args.x, args.x.shape)


def _fake_swiglu(args: SwigluFp8Args) -> tuple[torch.Tensor, torch.Tensor]:
    *rows, columns = args.gate_up.shape
    return empty_fp8_token(args.gate_up, (*rows, columns // 2))


def _fake_gather(args: MoeGatherFp8Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, top_k = args.rows.shape
    codes = empty_fp8_token(args.x, (tokens * top_k, args.x.shape[1]))
    return *codes, args.weights.new_empty(tokens * top_k)


def _check_permuted(op: str, args: MoeGatherFp8Args) -> None:
    _check.within(op, "rows", args.rows, args.rows.numel())


_rms_norm_fp8 = define("rms_norm_fp8", RmsNormFp8Args, _fake_norm)
_swiglu_fp8 = define("swiglu_fp8", SwigluFp8Args, _fake_swiglu)
_moe_gather_fp8 = define("moe_gather_fp8", MoeGatherFp8Args, _fake_gather, _check_permuted)


@planned
def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    result_layout: str = LINEAR,
    backend: str = "auto",
) -> tuple[torch.Tensor, QuantizedTensor]:
    """Norm a sublayer's input, and round the result to FP8 for its projections.

    ``y = rms_norm(x, weight, eps)`` and ``quantize(y, "fp8_token")``; y is returned as well because
    the router and the compressors read it.

    Args:
        x: ``[T, D]``, bfloat16, float16, float32 or float64.
        weight: ``[D]``.
        eps: Added to the mean square.
        result_layout: Layout of the codes, see ``quantize``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(y [T, D] in x.dtype, QuantizedTensor [T, D])``.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape or the layout does not fit.
    """
    op = "rms_norm_fp8"
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("T", "D")),
        ("weight", weight, _check.FLOATS, ("D",)),
    )
    check_result_layout(op, result_layout, x.shape[1])
    y, *parts = _rms_norm_fp8(RmsNormFp8Args(x, weight, eps, result_layout), backend)
    return y, _result(parts[0], parts[1], result_layout)


@planned
def swiglu_fp8(
    gate_up: torch.Tensor,
    limit: float | None,
    *,
    layout: str = "concatenated",
    row_weight: torch.Tensor | None = None,
    result_layout: str = LINEAR,
    backend: str = "auto",
) -> QuantizedTensor:
    """Compute ``swiglu`` in the dtype of ``gate_up``, and ``quantize`` the result by tokens.

    The bits are those of the two operators of the same implementation, one after the other.

    Args:
        gate_up: ``[*batch, N, 2 I]``, bfloat16, float16, float32 or float64.
        limit: See ``swiglu``.
        layout: See ``swiglu``.
        row_weight: ``[*batch, N]``, as for ``swiglu``.
        result_layout: Layout of the codes, see ``quantize``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``"fp8_token"`` ``[*batch, N, I]``.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: as ``swiglu`` and ``quantize`` do.
    """
    op = "swiglu_fp8"
    check_swiglu(op, gate_up, limit, layout, row_weight)
    if gate_up.ndim < 2:
        raise ValueError(f"{op}: gate_up has shape {list(gate_up.shape)}, wanted [..., N, 2 I]")
    check_result_layout(op, result_layout, gate_up.shape[-1] // 2)
    args = SwigluFp8Args(gate_up, limit, layout, row_weight, result_layout)
    return _result(*_swiglu_fp8(args, backend), result_layout)


@planned
def moe_gather_fp8(
    x: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    *,
    result_layout: str = LINEAR,
    backend: str = "auto",
) -> tuple[QuantizedTensor, torch.Tensor]:
    """Gather the sorted rows in FP8, for the experts' first GEMM, and sort the slots' weights.

    ``quantize(moe_gather(x, rows), "fp8_token")``, bit for bit; a token is rounded once.

    Args:
        x: ``[T, H]``, bfloat16, float16, float32 or float64.
        rows: ``[T, k]`` int32 from ``moe_permute``.
        weights: ``[T, k]``, bfloat16, float16, float32 or float64.
        result_layout: Layout of the codes, see ``quantize``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``("fp8_token" [T k, H], weights of these rows [T k])``.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape or the layout does not fit, or a tensor is on another device.
        IndexError: if one of ``rows`` is no sorted row (on the CPU; undefined on a GPU).
    """
    op = "moe_gather_fp8"
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("T", "H")),
        ("rows", rows, (torch.int32,), ("T", "k")),
        ("weights", weights, _check.FLOATS, ("T", "k")),
    )
    check_slots(op, "rows", rows)
    check_result_layout(op, result_layout, x.shape[1])
    args = MoeGatherFp8Args(x, rows, weights, result_layout)
    codes, scales, row_weight = _moe_gather_fp8(args, backend)
    return _result(codes, scales, result_layout), row_weight


def code_layout(weight: QuantizedTensor) -> str:
    """Return the layout in which FP8 tensor cores take the rows that a weight multiplies.

    That of weights in fragments which are exact in FP8; a GEMM takes rows in either layout.
    """
    fits = weight.row_exponent is not None and weight.layout == FRAGMENTS
    return FRAGMENTS if fits and weight.columns % FP8_TOKEN.block[1] == 0 else LINEAR


def check_result_layout(op: str, layout: str, columns: int) -> None:
    """Raise ValueError unless FP8 results of as many columns can have a layout."""
    check_scale_layout(FP8_TOKEN, layout)
    if torch.compiler.is_compiling():
        return
    if columns == 0:
        raise ValueError(f"{op}: the result has 0 columns, wanted at least 1")
    check_token_columns(layout, columns)


def _result(codes: torch.Tensor, scales: torch.Tensor, layout: str) -> QuantizedTensor:
    return QuantizedTensor(codes, scales, None, FP8_TOKEN, layout)
