"""Launchers of the CuTeDSL GEMMs with FP8 arithmetic on Hopper.

Weights are NVFP4 that is exact in E4M3, packed, or FP8 with one scale per 128 x 128 block. NVFP4
weights are dequantized in the main loop or, for many tokens, converted to E4M3 first, into scratch
memory that PyTorch's allocator gives for the call (``dsv4.layers.warm_allocator`` knows its size).
Results of both are equal bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple

import torch

from dsv4.cute.e4m3_costs import block_plan, estimate, nvfp4_plan
from dsv4.cute.runtime.driver import Kernel, Launch, Matrix
from dsv4.cute.runtime.launch import (
    architecture,
    current_device,
    cuts,
    loaded,
    run_noted,
    stream_of,
)
from dsv4.cute.sm90.e4m3_converted_plan import (
    CONVERT,
    CONVERT_ABI,
    CONVERTED_E4M3_ABI,
    ConvertE4m3Plan,
    ConvertedE4m3Plan,
    convert_grid,
)
from dsv4.cute.sm90.gemm_e4m3_plan import (
    BLOCK_E4M3_ABI,
    E4M3_ABI,
    K_BLOCK,
    ROWS,
    E4m3Plan,
)
from dsv4.device import launches
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, FRAGMENTS, LINEAR, QuantizedTensor

# Tokens whose tiles follow one another before the next block of rows does: their X stays in L2.
_SPAN = 1024

_pointers, _block_pointers = E4M3_ABI.pointers, BLOCK_E4M3_ABI.pointers
_convert_pointers = CONVERT_ABI.pointers


class Problem(NamedTuple):
    """The facts that a launch depends on, except addresses.

    Attributes:
        rows: N, of all groups; a multiple of 128 in each group if there are several.
        columns: K, a multiple of 128.
        groups: Groups of rows with an input each.
        tokens: At least 1.
        segments: Rows of each of several fused weights; none for one weight.
        global_scales: How many global scales the weight has; 0 for FP8 weights.
        e8m0_scales: Whether block scales of FP8 weights are E8M0.
        codes_stride: Bytes from a row of FP8 codes to the next.
        float32_out: Whether the result is float32.
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
        limit: Clamp of SwiGLU; infinity for none.
    """

    rows: int
    columns: int
    groups: int
    tokens: int
    segments: tuple[int, ...]
    global_scales: int
    e8m0_scales: bool
    codes_stride: int
    float32_out: bool
    swiglu: bool
    limit: float


def gemm(args: GemmArgs, reserve_sms: int = 0) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is quantised first unless it is codes."""
    return multiply(_codes(args), args, math.inf, swiglu=False, reserve_sms=reserve_sms)


def gemm_swiglu(args: GemmSwigluArgs, reserve_sms: int = 0) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``; as ``gemm``."""
    limit = math.inf if args.limit is None else args.limit
    return multiply(_codes(args), args, limit, swiglu=True, reserve_sms=reserve_sms)


def _codes(args: GemmArgs | GemmSwigluArgs) -> QuantizedTensor:
    """Return the activations in FP8, in the order of the weight's columns."""
    if args.x_scales is not None:
        return QuantizedTensor(args.x, args.x_scales, None, FP8_TOKEN, args.x_layout)
    is_block = args.format == FP8_BLOCK.name
    return quantize(args.x, FP8_TOKEN, layout=LINEAR if is_block else FRAGMENTS)


def multiply(
    x: QuantizedTensor,
    args: GemmArgs | GemmSwigluArgs,
    limit: float,
    *,
    swiglu: bool,
    reserve_sms: int = 0,
) -> torch.Tensor:
    """Multiply activations that are quantised already.

    Args:
        x: ``"fp8_token"`` ``[T, K]``, or ``[T, G, K]`` with several groups, K a multiple of 128;
            in fragments for NVFP4 weights, else linear.
        args: The weight and the result's dtype; ``args.x`` is not read.
        limit: Clamp of SwiGLU; infinity for none.
        swiglu: Whether the result is SwiGLU.
        reserve_sms: SMs to leave to work on other streams.
    """
    tokens, rows = x.codes.shape[0], args.codes.shape[0]
    groups = args.groups if isinstance(args, GemmArgs) else 1
    per_group = rows // groups // (2 if swiglu else 1)
    out = x.codes.new_empty((*x.codes.shape[:-1], per_group), dtype=args.out_dtype)
    if not tokens:
        return out
    device = x.codes.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return multiply(x, args, limit, swiglu=swiglu, reserve_sms=reserve_sms)
    codes = contiguous_codes(x.codes)
    problem = Problem(
        rows=rows,
        columns=x.codes.shape[-1],
        groups=groups,
        tokens=tokens,
        segments=tuple(args.segments),
        global_scales=0 if args.global_scale is None else args.global_scale.numel(),
        e8m0_scales=args.global_scale is None and args.scales.dtype == torch.float8_e8m0fnu,
        codes_stride=args.codes.stride(0),
        float32_out=args.out_dtype == torch.float32,
        swiglu=swiglu,
        limit=limit,
    )
    scratch = None
    if isinstance(choose(problem), ConvertedE4m3Plan):
        scratch = codes.new_empty((rows, problem.columns), dtype=torch.uint8)
    operands = (
        *(codes, x.scales.contiguous(), args.codes, args.scales),
        *(args.global_scale, args.row_exponent, out, scratch),
    )
    kind = functools.partial(_launch, problem, device, reserve_sms)
    run_noted(kind, stream_of(device), operands)
    return out


def contiguous_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes as TMA copies read them: rows one after another, from a multiple of 16 bytes on."""
    if codes.is_contiguous() and codes.data_ptr() % 16 == 0:
        return codes
    return codes.clone(memory_format=torch.contiguous_format)


def _launch(
    problem: Problem, device: int, reserve_sms: int, stream: int, addresses: Sequence[int]
) -> None:
    """Launch a GEMM on the current GPU.

    Args:
        problem: What is multiplied.
        device: Index of the current GPU.
        reserve_sms: SMs to leave to other streams.
        stream: The driver's handle.
        addresses: Addresses of X, its scales, codes and block scales of the weight, global scales,
            exponents of rows, the result, and of memory for converted weights; 0 for a missing
            one.
    """
    x, x_scales, codes, scales, global_scale, row_exponent, out, scratch = addresses
    launch = _prepared(problem, device, reserve_sms, get_ident())
    if not problem.global_scales:
        pointers = _block_pointers(scales=scales, x_scales=x_scales, out=out)
        launch(stream, pointers, described=(x, codes))
        return
    pointers = _pointers(
        global_scale=global_scale, row_exponent=row_exponent, x_scales=x_scales, out=out
    )
    if scratch:
        convert(
            problem.rows, problem.columns, device, stream, (codes, scales, row_exponent), scratch
        )
        launch(stream, pointers, described=(x, scratch))
    else:
        launch(stream, pointers, described=(x, codes, scales))


def convert(
    rows: int, columns: int, device: int, stream: int, weight: tuple[int, int, int], out: int
) -> None:
    """Convert NVFP4 weights in fragments to E4M3 on the current GPU.

    Args:
        rows: Rows, of all matrices that follow one another; a multiple of 16.
        columns: K, a multiple of 128.
        device: Index of the current GPU.
        stream: The driver's handle.
        weight: Addresses of codes, block scales and exponents of rows.
        out: Address of the result, ``[rows, K]`` with columns in the order of fragments.
    """
    codes, scales, row_exponent = weight
    pointers = _convert_pointers(codes=codes, scales=scales, row_exponent=row_exponent, out=out)
    _prepared_conversion(rows, columns, device, get_ident())(stream, pointers)


@functools.lru_cache(maxsize=1024)
def _prepared_conversion(rows: int, columns: int, device: int, thread: int) -> Launch:
    """Return the launch of a conversion; each thread prepares it once."""
    kernel = loaded(CONVERT, architecture(device))
    kernel.prepare(device)
    ctas, chunks = convert_grid(rows, columns)
    return CONVERT_ABI.launch(
        kernel, ctas, k_blocks=columns // K_BLOCK, chunks=chunks, opaque_16=16
    )


@launches
def choose(problem: Problem) -> E4m3Plan:
    """Return the configuration of a GEMM with the least estimated time in two forms."""
    rows, columns, _, tokens, *_ = problem
    if not problem.global_scales:
        return block_plan(rows, columns, tokens, problem.float32_out, problem.e8m0_scales)
    return nvfp4_plan(rows, columns, tokens, problem.float32_out, problem.swiglu)


@launches
def _prepared(problem: Problem, device: int, reserve_sms: int, thread: int) -> Launch:
    """The launch of a GEMM, made once in every thread, because that takes longer than a launch."""
    plan = choose(problem)
    kernel = loaded(plan, architecture(device))
    launch = _prepare(kernel, max(1, kernel.prepare(device) - reserve_sms), problem, plan)
    if reserve_sms:  # see ``dsv4.cute.gemm``
        launch.begin_late()
    return launch


def _prepare(kernel: Kernel, resident: int, problem: Problem, plan: E4m3Plan) -> Launch:
    rows, columns, groups, tokens, *_ = problem
    token_tiles, row_blocks = -(-tokens // plan.token_block), -(-rows // ROWS)
    ctas = min(token_tiles * row_blocks, resident)
    x = Matrix(tokens, columns * groups // 2, columns * groups // 2, plan.tma_tokens)
    common = {
        "tokens": tokens,
        "token_tiles": token_tiles,
        "token_span": max(1, _SPAN // plan.token_block),
        "stages": columns // K_BLOCK,
        "rows": rows,
        "row_blocks": row_blocks,
        "group_blocks": max(1, row_blocks // groups),
        "scale_stride": groups * columns // K_BLOCK,
    }
    if not problem.global_scales:
        codes = Matrix(rows, columns // 2, problem.codes_stride // 2, ROWS)
        return BLOCK_E4M3_ABI.launch(kernel, ctas, (x, codes), **common)
    cut0, cut1, cut2 = cuts(problem.segments)
    abi, weights = E4M3_ABI, packed_weights(plan, rows // 16, columns // 64)
    if isinstance(plan, ConvertedE4m3Plan):
        abi, weights = CONVERTED_E4M3_ABI, (Matrix(rows, columns // 2, columns // 2, ROWS),)
    return abi.launch(
        kernel,
        ctas,
        (x, *weights),
        expert_scales=0,
        cut0=cut0,
        cut1=cut1,
        cut2=cut2,
        scale_rows=not problem.segments and problem.global_scales > 1,
        opaque_16=16,
        limit=problem.limit,
        **common,
    )


def packed_weights(plan: E4m3Plan, row_tiles: int, k_blocks: int) -> tuple[Matrix, ...]:
    """Codes and block scales of the weight, as the TMA copies of a CTA's stage read them."""
    codes, scales = k_blocks * 128, k_blocks * 16
    return (
        Matrix(row_tiles, codes, codes, plan.cta_row_tiles, plan.code_bytes // 4, True),
        Matrix(row_tiles, scales, scales, plan.cta_row_tiles, plan.scale_bytes // 4, True),
    )


def plans(
    rows: int,
    columns: int,
    groups: int,
    out_dtype: torch.dtype,
    max_tokens: int,
    *,
    swiglu: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> list[E4m3Plan | ConvertE4m3Plan]:
    """The configurations that a GEMM takes for up to ``max_tokens`` tokens, each once.

    The list leaves out configurations for numbers of tokens where the bfloat16 kernel is faster.

    Args:
        rows: N, of all groups.
        columns: K; there are none unless it is a multiple of 128.
        groups: Groups of rows with an input each; there are none for several groups unless they
            have a multiple of 128 rows.
        out_dtype: bfloat16 or float32.
        max_tokens: At least 1.
        swiglu: Whether for ``gemm_swiglu``, else for ``gemm``.
        scale_dtype: Dtype of block scales of an FP8 weight; None for NVFP4.
    """
    if columns % K_BLOCK or (groups > 1 and rows // groups % ROWS):
        return []
    is_wide = out_dtype == torch.float32
    chosen: list[E4m3Plan | ConvertE4m3Plan] = []
    for tokens in range(128, max(max_tokens, 1) + 128, 128):  # a configuration's tiles are of 128s
        times = estimate(rows, columns, tokens, is_block=scale_dtype is not None)
        if not times.of_codes(tokens, tokens * groups * columns).is_faster:
            continue
        if scale_dtype is None:
            chosen.append(nvfp4_plan(rows, columns, tokens, is_wide, swiglu))
        else:
            folded = scale_dtype == torch.float8_e8m0fnu
            chosen.append(block_plan(rows, columns, tokens, is_wide, folded))
    if any(isinstance(plan, ConvertedE4m3Plan) for plan in chosen):
        chosen.append(CONVERT)
    return list(dict.fromkeys(chosen))
