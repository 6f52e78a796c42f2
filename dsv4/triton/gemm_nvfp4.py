"""GEMM of an NVFP4 weight and NVFP4 activations on the FP4 tensor cores of 12.0 and 12.1.

The weight lies as in a checkpoint: codes row by row, block scales linear or swizzled. Activations
are quantised first. Tensor cores multiply codes and block scales
(``dsv4.triton._lib.block_scaled``); the global scales of a token and of a row of the weight, the
clamps of SwiGLU and the rounding follow the float32 sum. A sum of finite operands is below 2^23
times the columns, so only a NaN scale, which marks a value that was not finite, makes NaN.

Compiled, and run by ``tests/_tools/ptx``; no GPU has run it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4 import dispatch
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant import formats
from dsv4.triton._lib.block_scaled import block_scaled_sum
from dsv4.triton._lib.block_scaled_plan import dense_plan
from dsv4.triton._lib.gemm_tiles import store_result, tile_of_program
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.gemm_packed import GlobalScale, swiglu_options

_TOGETHER = 8  # token tiles before the next row tile, in the order of programs


@fast_launch
@triton.jit(
    do_not_specialize=[
        "tokens",
        "k_tiles",
        "tiles",
        "token_tiles",
        "cut0",
        "cut1",
        "cut2",
    ]
)
def _nvfp4_gemm_kernel(
    codes,
    scales,
    x_codes,
    x_scales,
    global_scale,
    row_scale,
    out,
    tokens,
    rows,
    k_tiles,
    tiles,
    token_tiles,
    cut0,
    cut1,
    cut2,
    limit,
    SWIZZLED: tl.constexpr,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of one group's weight by TOKENS tokens; x is ``[T, G, K]``, ``out [T, G, N]``."""
    wait_for_inputs(PDL)
    row_tile, token_tile = tile_of_program(tiles, token_tiles, TOGETHER)
    group, groups = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    first = row_tile * ROWS
    # Rows and tokens past the end repeat the last one, so that no load is masked.
    row = group * rows + tl.minimum(first + tl.arange(0, ROWS), rows - 1)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    position = tl.minimum(token, tokens - 1).to(tl.int64) * groups + group
    total = block_scaled_sum(
        (codes, scales), (x_codes, x_scales), row, position, k_tiles, SWIZZLED, COLUMNS, STAGES
    )
    store_result(
        total,
        (global_scale, cut0, cut1, cut2),
        (first, rows, group * rows),
        None,
        (row_scale, None),
        (out, position, inside),
        limit,
        SCALES,
        SWIGLU,
        CLAMPED,
        UNBOUNDED,
    )


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Allocates the quantised activations. Block scales must not have their sign bit set: the tensor
    cores take them as unsigned.
    """
    rows = args.codes.shape[0] // args.groups
    out = args.x.new_empty((*args.x.shape[:-1], rows), dtype=args.out_dtype)
    options = {"SWIGLU": False, **swiglu_options(None)}
    return _multiply(args, args.groups, out, options, None)


def gemm_swiglu(args: GemmSwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``; allocates as ``gemm`` does."""
    shape = (args.x.shape[0], args.codes.shape[0] // 2)
    out = args.x.new_empty(shape, dtype=args.out_dtype)
    options = {"SWIGLU": True, **swiglu_options(args.limit)}
    return _multiply(args, 1, out, options, args.limit)


def quantized(
    x: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and linear block scales of rows ``x [R, K]`` as bytes, and a global scale per row.

    Args:
        x: The rows.
        global_scale: float32 ``[1]`` or ``[R]``; None for each row's own.
    """
    scaling = "token" if global_scale is None else "static"
    codes, scales, total = dispatch.first(
        "quantize_nvfp4", QuantizeNvfp4Args(x, global_scale, scaling, formats.LINEAR)
    )
    return codes, scales.view(torch.uint8), total.expand(x.shape[0]).contiguous()


def _multiply(
    args: GemmArgs | GemmSwigluArgs,
    groups: int,
    out: torch.Tensor,
    options: dict[str, Any],
    limit: float | None,
) -> torch.Tensor:
    """Fill and return ``out``; ``options`` are constants of the kernel."""
    if out.numel() == 0:
        return out
    tokens, columns = args.x.shape[0], args.x.shape[-1]
    high = args.codes.shape[0]
    rows = high // groups
    cut = dense_plan(rows, columns, tokens, groups, launch_options.sm_count(args.x.device))
    scale = GlobalScale.of(args.global_scale, args.segments, high)
    x_codes, x_scales, row_scale = quantized(args.x.reshape(-1, columns), args.input_scale)
    tiles, token_tiles = -(-rows // cut.rows), -(-tokens // cut.tokens)
    with launch_options.on(args.x):
        _nvfp4_gemm_kernel[(tiles * token_tiles, groups)](
            args.codes,
            args.scales.view(torch.uint8),
            x_codes,
            x_scales,
            scale.values,
            row_scale,
            out,
            tokens,
            rows,
            columns // 64,
            tiles,
            token_tiles,
            *scale.cuts,
            float("inf") if limit is None else float(limit),
            SWIZZLED=args.layout == formats.SWIZZLED,
            SCALES=scale.kind,
            ROWS=cut.rows,
            TOKENS=cut.tokens,
            COLUMNS=cut.columns,
            STAGES=cut.stages,
            TOGETHER=_TOGETHER,
            num_warps=cut.warps,
            **options,
            **launch_options.options(args.x),
        )
    return out
