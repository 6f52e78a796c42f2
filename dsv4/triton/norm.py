"""Kernels of ``dsv4.ops.norm``: one program per row, the row in registers, one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton import _launch, _rows
from dsv4.triton._numerics import narrow, wait_for_inputs, widen


@triton.jit
def inverse_rms(total, columns, eps):
    """``rsqrt(total / columns + eps)``; NaN where the mean overflows, as the reference says."""
    mean = total / columns
    return tl.where(mean == float("inf"), float("nan"), tl.rsqrt(mean + eps))


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    out,
    stride,
    columns,
    eps,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    values = widen(tl.load(x + row * stride + column, mask=inside, other=0.0))
    scale = inverse_rms(tl.sum(values * values, 0), columns, eps)
    values = values * scale
    if WEIGHTED:
        values = widen(tl.load(weight + column, mask=inside, other=0.0)) * values
    tl.store(out + row * columns + column, narrow(values, out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """See ``dsv4.ops.norm.rms_norm``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = _rows.as_rows(x)
    columns = rows.shape[1]
    weight = None if weight is None else weight.contiguous()
    with _launch.on(x):
        _rms_norm_kernel[(rows.shape[0],)](
            rows,
            weight,
            out,
            rows.stride(0),
            columns,
            eps,
            WEIGHTED=weight is not None,
            BLOCK=_launch.power_of_two(columns),
            num_warps=_rows.warps(columns, x.element_size()),
            **_launch.options(x),
        )
    return out
