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
from dsv4.triton._lib.expert_tiles import store_zeros, tile_of_expert
from dsv4.triton._lib.gemm_tiles import store_result
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._lib.packed_plan import Weight, grouped_plan
from dsv4.triton._lib.packed_weights import FRAGMENTS, packed_sum, sums_in_turn
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
    PDL: tl.constexpr,
):
    """16 TILES rows of one expert's weight by TOKENS of its rows of ``x``, or those of no expert.

    ``code_blocks``, ``scale_blocks`` and ``scale_count`` are an expert's codes in blocks of 128
    words, its block scales in blocks of 16 words, and its number of global scales. Blocks tell the
    compiler the alignment: of counts in words it loads 4 bytes at a time, not 16. EXPERTS is a
    power of two above ``experts``.
    """
    wait_for_inputs(PDL)
    ROWS: tl.constexpr = 16 * TILES
    first, position = tl.program_id(0) * ROWS, tl.program_id(1)
    expert, start, end = tile_of_expert(offsets, position, tokens, experts, EXPERTS, TOKENS)
    if expert <= experts:
        token = start + tl.arange(0, TOKENS)
        inside = token < end
        # Tokens past the end repeat the expert's last one, so that no load is masked.
        token = tl.minimum(token, end - 1).to(tl.int64)
        if expert < experts:
            mine = expert.to(tl.int64)
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
                (global_scale + mine * scale_count if SCALES else global_scale, cut0, cut1, cut2),
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


@triton.jit
def _find(offsets, position, tokens, experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Results of ``tile_of_expert``, by two loads in place of two sums over experts."""
    number = tl.arange(0, EXPERTS)
    starts = tl.load(offsets + number, mask=number <= experts, other=0)
    ends = tl.load(offsets + number + 1, mask=number < experts, other=tokens)
    counts = tl.where(number <= experts, (ends - starts + (TOKENS - 1)) // TOKENS, 0)
    tiles_to = tl.cumsum(counts, 0)
    is_before = tiles_to <= position
    expert = tl.sum(is_before.to(tl.int32), 0)
    start, end = 0, 0
    if expert <= experts:
        before = tl.max(tl.where(is_before, tiles_to, 0), 0)
        start = tl.load(offsets + expert) + (position - before) * TOKENS
        end = tl.load(offsets + expert + 1, mask=expert < experts, other=tokens)
    return expert, start, end


@triton.jit
def _store_in_turn(
    matrix,
    weight_scale,
    operands,
    tokens,
    inside,
    sizes,
    tile,
    limit,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    PINNED: tl.constexpr,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Multiply an expert's row tiles by groups of its tokens, and store the results."""
    codes, scales = matrix
    x, x_stride, row_scale, row_weight, out = operands
    rows, k_tiles = sizes
    GROUPS: tl.constexpr = len(tokens)
    offset = ()
    for group in tl.static_range(GROUPS):
        offset += (tokens[group] * x_stride,)  # type: ignore[assignment]
    totals = sums_in_turn(
        codes,
        scales,
        x,
        offset,
        inside,
        tile,
        rows // 16,
        k_tiles,
        TILES,
        PARTS,
        STAGES,
        MASKED,
        PINNED,
    )
    for number in tl.static_range(PARTS * GROUPS):
        group = number % GROUPS
        store_result(
            totals[number] * 128.0,
            weight_scale,
            (16 * (tile + number // GROUPS * (TILES // PARTS)), rows, 0),
            (x, offset[number % GROUPS], k_tiles * 64),
            (row_scale, row_weight),
            (out, tokens[number % GROUPS], inside[number % GROUPS]),
            limit,
            SCALES,
            SWIGLU,
            CLAMPED,
            UNBOUNDED,
        )


@triton.jit
def _wide_tile(
    matrix,
    weight_scale,
    operands,
    offsets,
    sizes,
    counts,
    program,
    position,
    limit,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    NARROW: tl.constexpr,
    MASKED: tl.constexpr,
    PINNED: tl.constexpr,
    QUICK: tl.constexpr,
):
    codes, scales = matrix
    global_scale, cut0, cut1, cut2 = weight_scale
    x, x_stride, row_scale, row_weight, out = operands
    rows, k_tiles = sizes
    tokens, experts, code_blocks, scale_blocks, scale_count = counts
    if QUICK:
        expert, start, end = _find(offsets, position, tokens, experts, EXPERTS, TOKENS)
    else:
        expert, start, end = tile_of_expert(offsets, position, tokens, experts, EXPERTS, TOKENS)
    if expert < experts:
        mine = expert.to(tl.int64)
        own = (codes + mine * (code_blocks * 128), scales + mine * (scale_blocks * 16))
        own_scale = global_scale + mine * scale_count if SCALES else global_scale
        if NARROW and end - start <= TOKENS * 3 // 4:
            low = start + tl.arange(0, TOKENS // 2)
            high = start + TOKENS // 2 + tl.arange(0, TOKENS // 4)
            _store_in_turn(
                own,
                (own_scale, cut0, cut1, cut2),
                operands,
                (tl.minimum(low, end - 1).to(tl.int64), tl.minimum(high, end - 1).to(tl.int64)),
                (low < end, high < end),
                sizes,
                program * TILES,
                limit,
                PARTS,
                TILES,
                STAGES,
                MASKED,
                PINNED,
                SCALES,
                SWIGLU,
                CLAMPED,
                UNBOUNDED,
            )
        else:
            token = start + tl.arange(0, TOKENS)
            _store_in_turn(
                own,
                (own_scale, cut0, cut1, cut2),
                operands,
                (tl.minimum(token, end - 1).to(tl.int64),),
                (token < end,),
                sizes,
                program * TILES,
                limit,
                PARTS,
                TILES,
                STAGES,
                MASKED,
                PINNED,
                SCALES,
                SWIGLU,
                CLAMPED,
                UNBOUNDED,
            )
    elif expert == experts:
        token = start + tl.arange(0, TOKENS)
        at = tl.minimum(token, end - 1).to(tl.int64)
        store_zeros(out, at, token < end, program, rows, 16 * TILES, SWIGLU)


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
def _wide_kernel(
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
    PDL: tl.constexpr,
    HALVES: tl.constexpr,
    NARROW: tl.constexpr,
    MASKED: tl.constexpr,
    PINNED: tl.constexpr,
    QUICK: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    """``_grouped_kernel`` for many rows of each expert and weights in fragments, for Hopper."""
    wait_for_inputs(PDL)
    matrix, operands = (codes, scales), (x, x_stride, row_scale, row_weight, out)
    weight_scale, sizes = (global_scale, cut0, cut1, cut2), (rows, k_tiles)
    counts = (tokens, experts, code_blocks, scale_blocks, scale_count)
    if PERSISTENT:
        number = tl.arange(0, EXPERTS)
        starts = tl.load(offsets + number, mask=number <= experts, other=0)
        ends = tl.load(offsets + number + 1, mask=number < experts, other=tokens)
        filled = tl.where(number <= experts, (ends - starts + (TOKENS - 1)) // TOKENS, 0)
        high = (rows // 16 + TILES - 1) // TILES
        works = tl.sum(filled, 0) * high
        for work in tl.range(tl.program_id(0), works, tl.num_programs(0), num_stages=1):
            _wide_tile(
                matrix,
                weight_scale,
                operands,
                offsets,
                sizes,
                counts,
                work % high,
                work // high,
                limit,
                SCALES,
                SWIGLU,
                CLAMPED,
                UNBOUNDED,
                EXPERTS,
                TILES,
                TOKENS,
                STAGES,
                HALVES,
                NARROW,
                MASKED,
                PINNED,
                QUICK,
            )
    else:
        _wide_tile(
            matrix,
            weight_scale,
            operands,
            offsets,
            sizes,
            counts,
            tl.program_id(0),
            tl.program_id(1),
            limit,
            SCALES,
            SWIGLU,
            CLAMPED,
            UNBOUNDED,
            EXPERTS,
            TILES,
            TOKENS,
            STAGES,
            HALVES,
            NARROW,
            MASKED,
            PINNED,
            QUICK,
        )


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
            num_warps=cut.warps,
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
