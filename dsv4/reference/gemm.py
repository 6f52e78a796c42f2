"""Reference implementation of ``dsv4.ops.gemm``."""

from __future__ import annotations

import torch

from dsv4.ops.gemm import GemmArgs
from dsv4.quant import formats
from dsv4.reference._precision import compute_dtype
from dsv4.reference.quantize import code_values, fake_quantized, fp8_rounded, operand


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    activation: str,
    input_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x [R, K] @ weight [N, K].T`` with the scales applied after the sum.

    Args:
        x: ``[R, K]``.
        weight: ``[N, K]`` in the compute dtype, without its global scale.
        weight_scale: Global scale of every row of the weight, ``[N]``, or None.
        activation: ``"bf16"`` (x as it is), ``"nvfp4"`` or ``"fp8"`` (x quantised first).
        input_scale: ``[1]``, ``[R]`` or None (dynamic, per row of x); NVFP4 only.
        row_scale: Global scale of every row of x, ``[R]``, or None; only with ``"bf16"``.
    """
    finite = torch.isfinite(x).all(-1, keepdim=True)
    values, alpha = x.to(weight.dtype), weight_scale
    if activation == "nvfp4":
        values, row_scale = fake_quantized(x, input_scale, weight.dtype)
    elif activation == "fp8":
        values = fp8_rounded(x, weight.dtype)
    if row_scale is not None:
        row = row_scale.to(weight.dtype)[:, None]
        alpha = row if weight_scale is None else row * weight_scale
    out = values @ weight.T
    out = out if alpha is None else out * alpha
    return torch.where(finite, out, torch.nan)


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups."""
    x = args.x
    if args.x_scales is not None:
        x = code_values(x, args.x_scales, args.x_layout, args.out_dtype)
    compute = compute_dtype(x)
    weight = operand(args.codes, args.scales, args.format, args.layout, compute)
    row = None
    if args.global_scale is not None:
        row = formats.expand_segments(args.global_scale, args.segments, args.codes.shape[0])
        row = row.to(compute)
    if args.groups == 1:
        return matmul(x, weight, row, args.activation, args.input_scale).to(args.out_dtype)
    rows = args.codes.shape[0] // args.groups
    parts = []
    for g in range(args.groups):
        part = slice(g * rows, (g + 1) * rows)
        scale = None if row is None else row[part]
        parts.append(matmul(x[:, g], weight[part], scale, args.activation, args.input_scale))
    return torch.stack(parts, 1).to(args.out_dtype)
