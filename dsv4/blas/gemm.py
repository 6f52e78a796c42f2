"""GEMM of quantised activations with an NVFP4 weight by torch's block-scaled GEMM.

``torch.nn.functional.scaled_mm`` calls cuBLAS, which has it on Blackwell. Its float32 sums
are multiplied by the global scales here, row by row and segment by segment: its own global scale
is one number for a whole matrix.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from dsv4 import dispatch
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant import formats
from dsv4.quant.formats import SWIZZLED, swizzle_scales


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Allocates the quantised activations and float32 results, and for a weight with linear scales a
    swizzled copy of them. Block scales must not have their sign bit set: the tensor cores take them
    as unsigned.
    """
    x, groups = args.x, args.groups
    assert args.global_scale is not None
    tokens, rows = x.shape[0], args.codes.shape[0] // groups
    alpha = formats.expand_segments(args.global_scale, args.segments, groups * rows)
    alpha = alpha.reshape(groups, rows)
    out = x.new_empty((tokens, groups, rows), dtype=args.out_dtype)
    for g in range(groups if tokens else 0):
        part = slice(g * rows, (g + 1) * rows)
        if args.layout == SWIZZLED:
            block = args.scales.reshape(groups, -1)[g]
        else:
            block = swizzle_scales(args.scales[part])
        group = x if groups == 1 else x[:, g]
        out[:, g] = _scaled_mm(group, args.codes[part], block, alpha[g], args.input_scale)
    return out if x.dim() == 3 else out[:, 0]


def _scaled_mm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    alpha: torch.Tensor,
    input_scale: torch.Tensor | None,
) -> torch.Tensor:
    """float32 ``[T, N]`` of ``x [T, K]``, codes ``[N, K/2]``, swizzled scales, alpha ``[N]``."""
    scaling = "token" if input_scale is None else "static"
    left, left_scales, row = dispatch.first(
        "quantize_nvfp4", QuantizeNvfp4Args(x, input_scale, scaling, SWIZZLED)
    )
    sums = functional.scaled_mm(
        left.view(torch.float4_e2m1fn_x2),
        codes.view(torch.float4_e2m1fn_x2).t(),
        left_scales,
        ScalingType.BlockWise1x16,
        scales,
        ScalingType.BlockWise1x16,
        SwizzleType.SWIZZLE_32_4_4,
        SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.float32,
    )
    finite = torch.isfinite(x).all(-1, keepdim=True)
    return torch.where(finite, sums.mul_(row.reshape(-1, 1) * alpha), torch.nan)
