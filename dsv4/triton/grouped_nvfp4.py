"""Grouped GEMM of NVFP4 weights of experts and NVFP4 rows on the tensor cores of 12.0 and 12.1.

``dsv4.triton.gemm_nvfp4`` has the arithmetic and ``dsv4.triton.grouped_gemm`` the order of
programs: each reads the offsets and finds its expert and rows; the host does not read them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.ops._grouped_operands import chosen_for, of_rows
from dsv4.ops._library import as_record
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.quant import formats
from dsv4.triton._lib.block_scaled import block_scaled_sum
from dsv4.triton._lib.block_scaled_plan import grouped_plan
from dsv4.triton._lib.expert_tiles import store_zeros, tile_of_expert
from dsv4.triton._lib.gemm_tiles import store_result
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.gemm_nvfp4 import quantized
from dsv4.triton.gemm_packed import GlobalScale
from dsv4.triton.grouped_gemm import plain_result, quantized_result, swiglu_result

_AnyArgs = GroupedGemmArgs | GroupedGemmSwigluArgs


@fast_launch
@triton.jit(
    do_not_specialize=[
        "tokens",
        "experts",
        "k_tiles",
        "code_bytes",
        "scale_bytes",
        "scale_count",
        "cut0",
        "cut1",
        "cut2",
    ]
)
def _grouped_nvfp4_kernel(
    codes,
    scales,
    x_codes,
    x_scales,
    global_scale,
    row_scale,
    row_weight,
    out,
    offsets,
    tokens,
    experts,
    rows,
    k_tiles,
    code_bytes,
    scale_bytes,
    scale_count,
    cut0,
    cut1,
    cut2,
    limit,
    SWIZZLED: tl.constexpr,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of one expert's weight by TOKENS of its rows of x, or zeros of rows of no expert.

    ``code_bytes``, ``scale_bytes`` and ``scale_count`` are an expert's codes and block scales, by
    32 and by 4 bytes, and its global scales. EXPERTS is a power of two above ``experts``.
    """
    wait_for_inputs(PDL)
    row_tile = tl.program_id(0)
    expert, start, end = tile_of_expert(offsets, tl.program_id(1), tokens, experts, EXPERTS, TOKENS)
    if expert <= experts:
        token = start + tl.arange(0, TOKENS)
        inside = token < end
        # Rows and tokens past the end repeat the last one, so that no load is masked.
        token = tl.minimum(token, end - 1).to(tl.int64)
        if expert < experts:
            mine = expert.to(tl.int64)
            first = row_tile * ROWS
            row = tl.minimum(first + tl.arange(0, ROWS), rows - 1).to(tl.int64)
            total = block_scaled_sum(
                (codes + mine * code_bytes * 32, scales + mine * scale_bytes * 4),
                (x_codes, x_scales),
                row,
                token,
                k_tiles,
                SWIZZLED,
                COLUMNS,
                STAGES,
            )
            store_result(
                total,
                (global_scale + mine * scale_count, cut0, cut1, cut2),
                (first, rows, 0),
                None,
                (row_scale, row_weight),
                (out, token, inside),
                limit,
                SCALES,
                SWIGLU,
                CLAMPED,
                UNBOUNDED,
            )
        else:
            store_zeros(out, token, inside, row_tile, rows, ROWS, SWIGLU)


def grouped_gemm(args: GroupedGemmArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    Allocates the quantised rows, unless the caller passes codes. Block scales must not have their
    sign bit set: the tensor cores take them as unsigned.
    """
    return plain_result(args, out, _multiply)


def grouped_gemm_swiglu(
    args: GroupedGemmSwigluArgs, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu``; allocates like ``grouped_gemm``."""
    return swiglu_result(args, out, _multiply)


def grouped_gemm_swiglu_quantize(
    args: GroupedGemmSwigluQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu_quantize``.

    The result in bfloat16 is allocated, and the best implementation of ``quantize_nvfp4`` reads it.
    """
    inner = grouped_gemm_swiglu(as_record(GroupedGemmSwigluArgs, args, out_dtype=torch.bfloat16))
    return quantized_result(args, inner)


def _operand(args: _AnyArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and linear block scales of the rows as bytes, and a global scale per row."""
    if args.x_scales is None:
        static = args.input_scale
        by_row = None if static is None else of_rows(static, args.offsets, args.x.shape[0])
        return quantized(args.x, by_row)
    assert args.row_scale is not None
    codes, scales = args.x.contiguous(), args.x_scales.view(torch.uint8).contiguous()
    return _aligned(codes), _aligned(scales), args.row_scale


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _multiply(
    args: _AnyArgs,
    out: torch.Tensor,
    row_weight: torch.Tensor | None,
    limit: float | None,
    options: dict[str, Any],
) -> None:
    """Fill ``out``; ``options`` are constants of the kernel."""
    if out.numel() == 0:
        return
    assert args.scales is not None
    x_codes, x_scales, row_scale = _operand(args)
    tokens = x_codes.shape[0]
    experts, rows, half = args.weight.shape
    scales = args.scales.view(torch.uint8)
    cut = grouped_plan(2 * half, *chosen_for(args))
    scale = GlobalScale.of(args.global_scale, args.segments, rows)
    assert scale.values is not None
    # Each expert with rows has at most one further tile, and so have the rows of no expert.
    positions = min(experts + 1, tokens) + tokens // cut.tokens
    with launch_options.on(args.x):
        _grouped_nvfp4_kernel[(-(-rows // cut.rows), positions)](
            args.weight,
            scales,
            x_codes,
            x_scales,
            scale.values,
            row_scale,
            row_weight,
            out,
            args.offsets,
            tokens,
            experts,
            rows,
            half // 32,
            rows * (half // 32),
            scales.numel() // experts // 4,
            scale.values.shape[-1],
            *scale.cuts,
            float("inf") if limit is None else float(limit),
            SWIZZLED=args.layout == formats.SWIZZLED,
            SCALES=scale.kind,
            EXPERTS=launch_options.power_of_two(experts + 1),
            ROWS=cut.rows,
            TOKENS=cut.tokens,
            COLUMNS=cut.columns,
            STAGES=cut.stages,
            num_warps=cut.warps,
            **options,
            **launch_options.options(args.x),
        )
