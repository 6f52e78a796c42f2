"""Grouped GEMM with four-bit weights of experts, on every GPU from 8.0 on.

Weights are NVFP4 in fragments, NVFP4 with swizzled scales, or MXFP4. A program multiplies some row
tiles of one expert by a tile of its rows of x, as ``dsv4.triton.gemm_packed`` does. Every program
reads the offsets, and finds its expert and rows from them and from its number; the host does not
read them. Rows after the last expert's belong to one further expert; its programs store zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4 import dispatch
from dsv4.ops._grouped_operands import chosen_for, of_rows, result_of
from dsv4.ops._library import as_record
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.quantize import QuantizeNvfp4Args, bfloat16_operand, block_values, fp8_values
from dsv4.quant import formats
from dsv4.triton._lib.expert_tiles import find_tile_of_expert, store_zeros, tile_of_expert
from dsv4.triton._lib.gemm_tiles import store_result
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._lib.packed_plan import Weight, grouped_plan
from dsv4.triton._lib.packed_weights import FRAGMENTS, packed_sum, sums_of_groups
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.gemm_packed import (
    GlobalScale,
    aligned,
    has_wgmma,
    layout_of,
    scale_words,
    swiglu_options,
)

_AnyArgs = GroupedGemmArgs | GroupedGemmSwigluArgs
# Fills a result; takes the weights of its rows, the clamp of SwiGLU and constants of the kernel.
Multiply = Callable[
    [_AnyArgs, torch.Tensor, torch.Tensor | None, float | None, dict[str, Any]], None
]


# Registers of a thread of an overlapped tile: two programs of 256 threads fit on an SM.
_REGISTERS = 128


@triton.jit
def _store_products(
    matrix,
    weight_scale,
    activations,
    out,
    sizes,
    tile,
    rows_of_x,
    limit,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Multiply TILES row tiles from ``tile`` on by groups of rows of x, and store the products.

    Args:
        matrix: Pointers to the expert's codes and scales.
        weight_scale: The weight's global scales, their number before the expert's, and the first
            rows of its second, third and fourth segments.
        activations: x, its stride, and scales and weights of its rows.
        out: The output.
        sizes: Rows of the matrix, and its columns by 64.
        tile: First row tile.
        rows_of_x: First row, and the row after the expert's last.
        limit: Clamp of SwiGLU.
        GROUPS: Rows of x in each group.
    """
    codes, scales = matrix
    global_scale, scales_before, cut0, cut1, cut2 = weight_scale
    x, x_stride, row_scale, row_weight = activations
    rows, k_tiles = sizes
    start, end = rows_of_x
    tokens, offsets, inside = (), (), ()
    for i in tl.static_range(len(GROUPS)):
        token = start + tl.arange(0, GROUPS[i])
        inside += (token < end,)  # type: ignore[assignment]
        token = tl.minimum(token, end - 1).to(tl.int64)
        tokens += (token,)  # type: ignore[assignment]
        offsets += (token * x_stride,)  # type: ignore[assignment]
        start += GROUPS[i]
    totals = sums_of_groups(codes, scales, x, offsets, tile, rows // 16, k_tiles, TILES, STAGES)
    for i in tl.static_range(len(GROUPS)):
        store_result(
            totals[i],
            (global_scale + scales_before if SCALES else global_scale, cut0, cut1, cut2),
            (16 * tile, rows, 0),
            (x, offsets[i], k_tiles * 64),
            (row_scale, row_weight),
            (out, tokens[i], inside[i]),
            limit,
            SCALES,
            SWIGLU,
            CLAMPED,
            UNBOUNDED,
        )


@fast_launch
@triton.jit(
    do_not_specialize=[
        "tokens",
        "experts",
        "k_tiles",
        "code_blocks",
        "scale_blocks",
        "scale_count",
        "cut0",
        "cut1",
        "cut2",
    ]
)
def _grouped_kernel(
    x,
    x_stride,
    codes,
    scales,
    global_scale,
    row_scale,
    row_weight,
    out,
    offsets,
    tokens,
    experts,
    rows,
    k_tiles,
    code_blocks,
    scale_blocks,
    scale_count,
    cut0,
    cut1,
    cut2,
    limit,
    LAYOUT: tl.constexpr,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """16 TILES rows of one expert's weight by TOKENS of its rows of ``x``, or those of no expert.

    ``code_blocks``, ``scale_blocks`` and ``scale_count`` are an expert's codes in blocks of 128
    words, its block scales in blocks of 16 words, and its number of global scales. Blocks tell the
    compiler the alignment: of counts in words it loads 4 bytes at a time, not 16. EXPERTS is a
    power of two above ``experts``. OVERLAPPED is ``PackedPlan.is_overlapped``.
    """
    wait_for_inputs(PDL)
    ROWS: tl.constexpr = 16 * TILES
    first, position = tl.program_id(0) * ROWS, tl.program_id(1)
    if OVERLAPPED:
        expert, start, end = find_tile_of_expert(
            offsets, position, tokens, experts, EXPERTS, TOKENS
        )
    else:
        expert, start, end = tile_of_expert(offsets, position, tokens, experts, EXPERTS, TOKENS)
    if expert <= experts:
        token = start + tl.arange(0, TOKENS)
        inside = token < end
        # Tokens past the end repeat the expert's last one, so that no load is masked.
        token = tl.minimum(token, end - 1).to(tl.int64)
        if expert < experts:
            mine = expert.to(tl.int64)
            if OVERLAPPED:
                matrix = (codes + mine * (code_blocks * 128), scales + mine * (scale_blocks * 16))
                weight_scale = (global_scale, mine * scale_count, cut0, cut1, cut2)
                activations, sizes = (x, x_stride, row_scale, row_weight), (rows, k_tiles)
                if end - start <= TOKENS // 2 + TOKENS // 4:
                    _store_products(
                        matrix,
                        weight_scale,
                        activations,
                        out,
                        sizes,
                        tl.program_id(0) * TILES,
                        (start, end),
                        limit,
                        (TOKENS // 2, TOKENS // 4),
                        TILES,
                        STAGES,
                        SCALES,
                        SWIGLU,
                        CLAMPED,
                        UNBOUNDED,
                    )
                else:
                    _store_products(
                        matrix,
                        weight_scale,
                        activations,
                        out,
                        sizes,
                        tl.program_id(0) * TILES,
                        (start, end),
                        limit,
                        (TOKENS,),
                        TILES,
                        STAGES,
                        SCALES,
                        SWIGLU,
                        CLAMPED,
                        UNBOUNDED,
                    )
            else:
                total = packed_sum(
                    codes + mine * (code_blocks * 128),
                    scales + mine * (scale_blocks * 16),
                    x,
                    token * x_stride,
                    tl.program_id(0) * TILES,
                    rows // 16,
                    k_tiles,
                    0,
                    k_tiles,
                    LAYOUT,
                    TILES,
                    TOKENS,
                    PARTS,
                    BLOCKS,
                    STAGES,
                )
                store_result(
                    total,
                    (
                        global_scale + mine * scale_count if SCALES else global_scale,
                        cut0,
                        cut1,
                        cut2,
                    ),
                    (first, rows, 0),
                    (x, token * x_stride, k_tiles * 64),
                    (row_scale, row_weight),
                    (out, token, inside),
                    limit,
                    SCALES,
                    SWIGLU,
                    CLAMPED,
                    UNBOUNDED,
                )
        else:
            store_zeros(out, token, inside, tl.program_id(0), rows, ROWS, SWIGLU)


def grouped_gemm(args: GroupedGemmArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    For bfloat16 activations with rows at multiples of 32 bytes, only the result is allocated. Codes
    are dequantized first.
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


def plain_result(
    args: GroupedGemmArgs, out: torch.Tensor | None, multiply: Multiply
) -> torch.Tensor:
    """Return the result of a grouped GEMM, filled by the launcher ``multiply``."""
    out = result_of(args, out, args.weight.shape[1])
    multiply(args, out, None, None, {"SWIGLU": False, **swiglu_options(None)})
    return out


def swiglu_result(
    args: GroupedGemmSwigluArgs, out: torch.Tensor | None, multiply: Multiply
) -> torch.Tensor:
    """Return the result of a grouped GEMM with SwiGLU, filled by the launcher ``multiply``."""
    out = result_of(args, out, args.weight.shape[1] // 2)
    row_weight = args.row_weight
    if row_weight is not None:
        row_weight = row_weight.float().contiguous()
    options = {"SWIGLU": True, **swiglu_options(args.limit)}
    multiply(args, out, row_weight, args.limit, options)
    return out


def quantized_result(
    args: GroupedGemmSwigluQuantizeArgs, inner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scales and global scales of a result ``inner``, each expert by its scale."""
    # Rows of no expert have the scale of one further expert.
    own = torch.cat([args.result_scale, args.result_scale.new_ones(1)])
    total = of_rows(own, args.offsets, inner.shape[0])
    quantized = QuantizeNvfp4Args(inner, total, "static", formats.LINEAR)
    codes, scales, total = dispatch.first("quantize_nvfp4", quantized)
    if args.scale_layout == formats.SWIZZLED_EXPERTS:
        scales = formats.swizzle_expert_scales(scales, args.offsets)
    return codes, scales, total


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
    x, row_scale = _operand(args)
    x = aligned(x.unsqueeze(1)).squeeze(1)
    tokens, columns = x.shape
    experts, rows, _ = args.weight.shape
    layout = layout_of(args.layout)
    weight = Weight(rows, columns, layout == FRAGMENTS)
    sms = launch_options.sm_count(x.device)
    cut = grouped_plan(weight, *chosen_for(args), sms, has_wgmma(x))
    assert weight.is_fragments or not cut.is_overlapped
    scale = GlobalScale.of(args.global_scale, args.segments, rows)
    assert args.scales is not None
    scales = scale_words(args.scales, layout)
    # Each expert with rows has at most one further tile, and so have the rows of no expert.
    positions = min(experts + 1, tokens) + tokens // cut.tokens
    with launch_options.on(x):
        _grouped_kernel[(-(-weight.row_tiles // cut.tiles), positions)](
            x,
            x.stride(0) if tokens > 1 else columns,
            args.weight.view(torch.int32),
            scales,
            scale.values,
            row_scale,
            row_weight,
            out,
            args.offsets,
            tokens,
            experts,
            rows,
            weight.k_tiles,
            weight.row_tiles * weight.k_tiles,
            scales.numel() // experts // 16,
            1 if scale.values is None else scale.values.shape[-1],
            *scale.cuts,
            float("inf") if limit is None else float(limit),
            LAYOUT=layout,
            SCALES=scale.kind,
            EXPERTS=launch_options.power_of_two(experts + 1),
            TILES=cut.tiles,
            TOKENS=cut.tokens,
            PARTS=cut.parts,
            BLOCKS=cut.blocks,
            STAGES=cut.stages,
            OVERLAPPED=cut.is_overlapped,
            num_warps=cut.warps,
            **({"maxnreg": _REGISTERS} if cut.is_overlapped else {}),
            **options,
            **launch_options.options(x),
        )


def _operand(args: _AnyArgs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows as the kernel multiplies them, in bfloat16, and their global scales or None."""
    if args.x_scales is not None:
        return block_values(args.x, args.x_scales, torch.bfloat16, args.x_layout), args.row_scale
    if args.activation == "fp8":
        return fp8_values(args.x), args.row_scale
    if args.activation == "nvfp4":
        static = args.input_scale
        by_row = None if static is None else of_rows(static, args.offsets, args.x.shape[0])
        return bfloat16_operand(args.x, by_row)
    return args.x, args.row_scale
