"""Meaning of ``dsv4.ops.grouped_gemm``, all its operators."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from dsv4 import formats
from dsv4.reference._precision import compute_dtype
from dsv4.reference.gemm import product
from dsv4.reference.quantize import operand, quantize_nvfp4
from dsv4.reference.swiglu import swiglu


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    segments: Sequence[int],
    offsets: torch.Tensor,
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    x_scales: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    settled: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    Reads the offsets on the host and loops over the experts that have rows. Only the reference may
    do that: it synchronises and cannot be captured in a CUDA graph.
    """
    bounds = _bounds(offsets, x.shape[0])
    x = _values(x, x_scales, out_dtype)
    if out is None:
        out = x.new_empty((x.shape[0], weight.shape[1]), dtype=out_dtype)
    out.zero_()
    compute = compute_dtype(x)
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        if scales is None:
            matrix = weight[expert].to(compute)
        else:
            matrix = operand(weight[expert], scales[expert], format, layout, compute)
        row = None
        if global_scale is not None:
            row = formats.expand_segments(global_scale[expert], segments, weight.shape[1])
            row = row.to(compute)
        scale = None if input_scale is None else input_scale[expert : expert + 1]
        of_rows = None if row_scale is None else row_scale[start:end]
        found = product(x[start:end], matrix, row, activation, scale, of_rows)
        out[start:end] = found.to(out_dtype)
    return out


def grouped_gemm_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    segments: Sequence[int],
    offsets: torch.Tensor,
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    x_scales: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    limit: float | None,
    row_weight: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm_swiglu``. Reads the offsets on the host."""
    x = _values(x, x_scales, out_dtype)
    stored = (weight, scales, global_scale, segments, offsets, format, layout)
    gate_up = grouped_gemm(x, *stored, activation, input_scale, None, row_scale, compute_dtype(x))
    result = swiglu(gate_up, limit, "interleaved", row_weight, out_dtype)
    result[int(offsets[-1]) :] = 0  # whatever such a row weighs
    return result if out is None else out.copy_(result)


def grouped_gemm_swiglu_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    segments: Sequence[int],
    offsets: torch.Tensor,
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    x_scales: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    limit: float | None,
    row_weight: torch.Tensor | None,
    result_scale: torch.Tensor,
    scale_layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm_swiglu_quantize``. Reads the offsets on the host."""
    x = _values(x, x_scales, torch.bfloat16)
    stored = (weight, scales, global_scale, segments, offsets, format, layout)
    options = (activation, input_scale, None, row_scale, limit, row_weight, x.dtype)
    inner = grouped_gemm_swiglu(x, *stored, *options)
    total = torch.ones(x.shape[0], dtype=torch.float32, device=x.device)
    for expert, (start, end) in enumerate(itertools.pairwise(_bounds(offsets, x.shape[0]))):
        total[start:end] = result_scale[expert]
    codes, scales, total = quantize_nvfp4(inner, total, "static", formats.LINEAR)
    if scale_layout == formats.SWIZZLED_EXPERTS:
        scales = formats.swizzle_expert_scales(scales, offsets)
    return codes, scales, total


def _values(x: torch.Tensor, scales: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """The rows, of codes without their global scales: in bfloat16, which is exact."""
    if scales is None:
        return x
    dtype = torch.float64 if out_dtype == torch.float64 else torch.bfloat16
    compute = torch.promote_types(dtype, torch.float32)
    return operand(x, scales, formats.NVFP4.name, formats.LINEAR, compute).to(dtype)


def _bounds(offsets: torch.Tensor, rows: int) -> list[int]:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or bounds != sorted(bounds):
        raise ValueError(
            f"grouped_gemm: offsets are {bounds}, wanted 0, then non-decreasing, at most {rows}"
        )
    return bounds
