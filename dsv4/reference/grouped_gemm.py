"""Reference implementation of ``dsv4.ops.grouped_gemm``: all its operators."""

from __future__ import annotations

import itertools

import torch

from dsv4.ops._library import as_record
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args
from dsv4.ops.quantize import QuantizeFp8TokenArgs, QuantizeNvfp4Args
from dsv4.ops.swiglu import SwigluArgs
from dsv4.quant import formats
from dsv4.reference._precision import compute_dtype
from dsv4.reference.gemm import matmul
from dsv4.reference.quantize import code_values, operand, quantize_fp8_token, quantize_nvfp4
from dsv4.reference.swiglu import swiglu

_AnyArgs = (
    GroupedGemmArgs
    | GroupedGemmSwigluArgs
    | GroupedGemmSwigluQuantizeArgs
    | GroupedGemmSwigluFp8Args
)
_PLAIN = {"x_scales": None, "x_layout": formats.LINEAR}  # of rows that are no codes


def grouped_gemm(args: GroupedGemmArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    Reads the offsets on the host and loops over the experts that have rows. Only the reference may
    do that: it synchronises and cannot be captured in a CUDA graph.
    """
    bounds = _bounds(args.offsets, args.x.shape[0])
    x = _values(args, args.out_dtype)
    high = args.weight.shape[1]
    if out is None:
        out = x.new_empty((x.shape[0], high), dtype=args.out_dtype)
    out.zero_()
    compute = compute_dtype(x)
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        if args.scales is None:
            matrix = args.weight[expert].to(compute)
        else:
            matrix = operand(
                args.weight[expert], args.scales[expert], args.format, args.layout, compute
            )
        row = None
        if args.global_scale is not None:
            row = formats.expand_segments(args.global_scale[expert], args.segments, high)
            row = row.to(compute)
        scale = None if args.input_scale is None else args.input_scale[expert : expert + 1]
        of_rows = None if args.row_scale is None else args.row_scale[start:end]
        group = matmul(x[start:end], matrix, row, args.activation, scale, of_rows)
        out[start:end] = group.to(args.out_dtype)
    return out


def grouped_gemm_swiglu(
    args: GroupedGemmSwigluArgs, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu``. Reads the offsets on the host."""
    x = _values(args, args.out_dtype)
    wide = {"x": x, **_PLAIN, "out_dtype": compute_dtype(x), "settled": False}
    gate_up = grouped_gemm(as_record(GroupedGemmArgs, args, **wide))
    result = swiglu(SwigluArgs(gate_up, args.limit, "interleaved", args.row_weight, args.out_dtype))
    result[int(args.offsets[-1]) :] = 0  # whatever such a row weighs
    return result if out is None else out.copy_(result)


def grouped_gemm_swiglu_quantize(
    args: GroupedGemmSwigluQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu_quantize``.

    Reads the offsets on the host.
    """
    x = _values(args, torch.bfloat16)
    rows = {"x": x, **_PLAIN, "out_dtype": x.dtype}
    inner = grouped_gemm_swiglu(as_record(GroupedGemmSwigluArgs, args, **rows))
    total = torch.ones(x.shape[0], dtype=torch.float32, device=x.device)
    for expert, (start, end) in enumerate(itertools.pairwise(_bounds(args.offsets, x.shape[0]))):
        total[start:end] = args.result_scale[expert]
    codes, scales, total = quantize_nvfp4(QuantizeNvfp4Args(inner, total, "static", formats.LINEAR))
    if args.scale_layout == formats.SWIZZLED_EXPERTS:
        scales = formats.swizzle_expert_scales(scales, args.offsets)
    return codes, scales, total


def grouped_gemm_swiglu_fp8(args: GroupedGemmSwigluFp8Args) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm_swiglu_fp8.grouped_gemm_swiglu_fp8``.

    Reads the offsets on the host.
    """
    x = _values(args, torch.bfloat16)
    rows = {"x": x, **_PLAIN, "out_dtype": x.dtype}
    inner = grouped_gemm_swiglu(as_record(GroupedGemmSwigluArgs, args, **rows))
    return quantize_fp8_token(QuantizeFp8TokenArgs(inner, args.result_layout))


def _values(args: _AnyArgs, out_dtype: torch.dtype) -> torch.Tensor:
    """The rows, of codes without their global scales: in bfloat16, which is exact."""
    if args.x_scales is None:
        return args.x
    return code_values(args.x, args.x_scales, args.x_layout, out_dtype)


def _bounds(offsets: torch.Tensor, rows: int) -> list[int]:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or bounds != sorted(bounds):
        raise ValueError(
            f"grouped_gemm: offsets are {bounds}, wanted 0, then non-decreasing, at most {rows}"
        )
    return bounds
