"""Operands of the grouped GEMMs in the form that operators take, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops.gemm import check_columns, check_options, refuse_format
from dsv4.ops.quantize import positive
from dsv4.quant.formats import FP8_TOKEN, LINEAR, NVFP4, QuantizedTensor

PLAIN = "plain"


class Weight(NamedTuple):
    """A weight in the form that operators take; see ``GroupedGemmArgs``."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    row_exponent: torch.Tensor | None
    segments: list[int]
    format: str
    layout: str


class Rows(NamedTuple):
    """Sorted rows in the form that operators take.

    Attributes:
        x: ``[R, K]``, or codes: NVFP4 ``[R, K/2]``, FP8 ``[R, K]``.
        columns: K.
        scales: Linear block scales of codes, else None.
        row_scale: float32 ``[R]``, the global scale of each row of NVFP4 codes, else None.
        layout: Order of the columns of FP8 codes, linear of others.
    """

    x: torch.Tensor
    columns: int
    scales: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    layout: str = LINEAR


def check_step(op: str, rows: int, experts: int) -> None:
    """Check the numbers of rows and experts of a step; a call multiplies a part of them."""
    for name, value in (("step_rows", rows), ("step_experts", experts)):
        if value < 0:
            raise ValueError(f"{op}: {name} is {value}, wanted 0 or more")


def chosen_for(args: Any) -> tuple[int, int]:
    """Return the rows and experts for which the kernels of a grouped GEMM's record are chosen."""
    return args.step_rows or args.x.shape[0], args.step_experts or args.weight.shape[0]


def result_of(args: Any, out: torch.Tensor | None, columns: int) -> torch.Tensor:
    """Return ``out``, or where it is None a tensor for the result ``[R, columns]`` of a record."""
    if out is None:
        return args.x.new_empty((args.x.shape[0], columns), dtype=args.out_dtype)
    return out


def checked_rows(
    op: str, x: torch.Tensor | QuantizedTensor, activation: str, out_dtype: torch.dtype | None
) -> tuple[Rows, torch.dtype]:
    """Check the rows and return them with the dtype of the result."""
    if isinstance(x, torch.Tensor):
        check_options(op, activation, out_dtype)
        columns = x.shape[-1] if x.dim() else 0  # a number is refused with the other shapes
        return Rows(x, columns), x.dtype if out_dtype is None else out_dtype
    if x.format not in (NVFP4, FP8_TOKEN) or len(x.shape) != 2:
        raise ValueError(f"{op}: x is {x!r}, wanted a matrix in nvfp4 or fp8_token")
    if activation != "bf16":
        raise ValueError(f"{op}: x is quantised, but activation is {activation!r}")
    if not torch.compiler.is_compiling():
        x.validate()
    if x.format == NVFP4:
        linear = x.with_layout(LINEAR)
        row_scale = linear.row_scale().contiguous()
        rows = Rows(linear.codes, x.columns, linear.scales, row_scale)
    else:
        rows = Rows(x.codes, x.columns, x.scales, None, x.layout)
    check_options(op, activation, out_dtype)
    return rows, torch.bfloat16 if out_dtype is None else out_dtype


def checked_weight(
    op: str,
    rows: Rows,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    activation: str,
    input_scale: torch.Tensor | None,
) -> Weight:
    """Check that the operands fit; return the weight in the form that operators take."""
    x, compiling = rows.x, torch.compiler.is_compiling()
    if isinstance(weight, torch.Tensor) or compiling:
        shape: Sequence[int] = weight.shape
    else:
        shape = weight.valid_shape
    if len(shape) != 3:
        raise ValueError(f"{op}: weight has shape {list(shape)}, wanted [E, N, K]")
    if isinstance(weight, torch.Tensor):
        parts = Weight(weight, None, None, None, [], PLAIN, LINEAR)
        dtypes: Sequence[torch.dtype] = _check.FLOATS
    else:
        if weight.format.name == FP8_TOKEN.name:
            refuse_format(op)
        parts = Weight(
            weight.codes,
            weight.scales,
            weight.global_scale,
            weight.row_exponent,
            list(weight.segments),
            weight.format.name,
            weight.layout,
        )
        dtypes = (weight.codes.dtype,)
    x_dtypes = _check.FLOATS if rows.scales is None else (x.dtype,)
    if input_scale is not None and activation != "nvfp4":
        raise ValueError(f"{op}: input_scale is given, but activation is {activation!r}")
    _check.tensors(
        op,
        ("x", x, x_dtypes, ("R", "K")),
        ("weight", parts.codes, dtypes, None),
        ("offsets", offsets, (torch.int32,), (shape[0] + 1,)),
        ("input_scale", input_scale, (torch.float32,), (shape[0],)),
    )
    columns = rows.columns
    if not compiling and (columns != shape[2] or (activation == "nvfp4" and columns % 16)):
        check_columns(op, columns, shape[2], activation)
    if input_scale is not None:
        positive(f"{op}: input_scale", input_scale)
    return parts


def of_rows(values: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return each expert's value for its rows, ``[rows]``, without reading offsets on the host.

    Rows of no expert get the value of the last expert; any value would do.
    """
    numbers = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    expert = torch.bucketize(numbers, offsets[1:], right=True)
    return values[expert.clamp_(max=values.shape[0] - 1)]
