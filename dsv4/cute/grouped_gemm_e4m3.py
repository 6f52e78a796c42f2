"""Launchers of the CuTeDSL grouped GEMMs with FP8 arithmetic and exact NVFP4 weights, on Hopper.

Weights are dequantized in the main loop or, for many rows per expert, converted to E4M3 first: one
range of experts at a time, as many as scratch memory holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple

import torch

from dsv4.cute.e4m3_costs import estimate_experts, experts_at_once, experts_plan
from dsv4.cute.gemm_e4m3 import contiguous_codes, convert, packed_weights
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime.driver import Launch, Matrix
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
    GROUPED_CONVERTED_E4M3_ABI,
    ConvertE4m3Plan,
    GroupedConvertedE4m3Plan,
)
from dsv4.cute.sm90.gemm_e4m3_plan import GROUPED_E4M3_ABI, K_BLOCK, ROWS, GroupedE4m3Plan
from dsv4.device import launches
from dsv4.ops._grouped_operands import result_of
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args
from dsv4.ops.quantize import empty_fp8_token, quantize
from dsv4.quant.formats import FP8_TOKEN, FRAGMENTS

_AnyArgs = GroupedGemmArgs | GroupedGemmSwigluArgs | GroupedGemmSwigluFp8Args
_pointers = GROUPED_E4M3_ABI.pointers


class Range(NamedTuple):
    """Experts that one launch multiplies.

    Attributes:
        first: The first one.
        end: The one after the last.
    """

    first: int
    end: int


class GroupedProblem(NamedTuple):
    """The facts that a launch depends on, except addresses.

    Attributes:
        rows: N of an expert; a multiple of 16, of 256 where results are quantised.
        columns: K, a multiple of 128.
        experts: How many.
        rows_of_x: At least 1.
        segments: Rows of each of several fused weights; none for one weight.
        expert_scales: Global scales of an expert.
        float32_out: Whether the result is float32.
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
        row_weighted: Whether that is multiplied by a weight of the row of X.
        quantized_out: Whether the result is FP8 codes, in fragments, and their scales.
        limit: Clamp of SwiGLU; infinity for none.
    """

    rows: int
    columns: int
    experts: int
    rows_of_x: int
    segments: tuple[int, ...]
    expert_scales: int
    float32_out: bool
    swiglu: bool
    row_weighted: bool
    quantized_out: bool
    limit: float


def grouped_gemm(args: GroupedGemmArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``; rows that are no codes yet are quantised."""
    out = result_of(args, out, args.weight.shape[1])
    problem = _problem(args, args.out_dtype == torch.float32, swiglu=False, limit=None)
    _multiply(problem, args, None, out, None)
    return out


def grouped_gemm_swiglu(
    args: GroupedGemmSwigluArgs, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu``; as ``grouped_gemm``."""
    out = result_of(args, out, args.weight.shape[1] // 2)
    problem = _problem(args, args.out_dtype == torch.float32, swiglu=True, limit=args.limit)
    problem = problem._replace(row_weighted=args.row_weight is not None)
    _multiply(problem, args, args.row_weight, out, None)
    return out


def grouped_gemm_swiglu_fp8(args: GroupedGemmSwigluFp8Args) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm_swiglu_fp8``; ``result_layout`` is that of fragments."""
    codes, scales = empty_fp8_token(args.x, (args.x.shape[0], args.weight.shape[1] // 2))
    problem = _problem(args, False, swiglu=True, limit=args.limit)
    problem = problem._replace(row_weighted=args.row_weight is not None, quantized_out=True)
    _multiply(problem, args, args.row_weight, codes, scales)
    return codes, scales


def _problem(
    args: _AnyArgs, float32_out: bool, *, swiglu: bool, limit: float | None
) -> GroupedProblem:
    """What ``args`` ask for, with a result that has no weights and is no codes."""
    experts, rows, half = args.weight.shape
    assert args.global_scale is not None
    return GroupedProblem(
        rows=rows,
        columns=2 * half,
        experts=experts,
        rows_of_x=args.x.shape[0],
        segments=tuple(args.segments),
        expert_scales=args.global_scale.shape[-1],
        float32_out=float32_out,
        swiglu=swiglu,
        row_weighted=False,
        quantized_out=False,
        limit=math.inf if limit is None else limit,
    )


def _multiply(
    problem: GroupedProblem,
    args: _AnyArgs,
    row_weight: torch.Tensor | None,
    out: torch.Tensor,
    out_scales: torch.Tensor | None,
) -> None:
    """Fill the result, and its scales if there are any."""
    if not problem.rows_of_x:
        return
    device = args.x.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            _multiply(problem, args, row_weight, out, out_scales)
        return
    codes, scales = args.x, args.x_scales
    if scales is None:
        rows = quantize(args.x, FP8_TOKEN, layout=FRAGMENTS)
        codes, scales = rows.codes, rows.scales
    if row_weight is not None:
        row_weight = row_weight.float().contiguous()
    scratch = None
    if isinstance(choose(problem), GroupedConvertedE4m3Plan):
        matrices = min(problem.experts, experts_at_once(problem.rows, problem.columns))
        shape = (matrices, problem.rows, problem.columns)
        scratch = codes.new_empty(shape, dtype=torch.uint8)
    operands = (
        *(contiguous_codes(codes), scales.contiguous(), args.weight, args.scales),
        *(args.global_scale, args.row_exponent, row_weight, args.offsets, out, out_scales),
        scratch,
    )
    run_noted(functools.partial(_launch, problem, device), stream_of(device), operands)


def _launch(problem: GroupedProblem, device: int, stream: int, addresses: Sequence[int]) -> None:
    """Launch a grouped GEMM on the current GPU.

    Args:
        problem: What is multiplied.
        device: Index of the current GPU.
        stream: The driver's handle.
        addresses: Addresses of ``operands`` in ``_multiply``; 0 for those that there are not.
    """
    if not addresses[-1]:
        _launch_range(problem, device, stream, addresses, Range(0, problem.experts))
        return
    step = experts_at_once(problem.rows, problem.columns)
    for first in range(0, problem.experts, step):
        experts = Range(first, min(first + step, problem.experts))
        _launch_range(problem, device, stream, addresses, experts)


def _launch_range(
    problem: GroupedProblem, device: int, stream: int, addresses: Sequence[int], experts: Range
) -> None:
    """Launch the GEMMs of a range of experts; arguments as in ``_launch``."""
    x, x_scales, codes, scales, global_scale, row_exponent, *others = addresses
    row_weight, offsets, out, out_scales, scratch = others
    matrix, first = problem.rows * problem.columns, experts.first
    codes += first * matrix // 2
    scales += first * matrix // 16
    row_exponent += first * problem.rows
    pointers = _pointers(
        global_scale=global_scale + first * problem.expert_scales * 4,
        row_exponent=row_exponent,
        x_scales=x_scales,
        row_weight=row_weight,
        out=out,
        out_scales=out_scales,
        offsets=offsets + first * 4,
    )
    launch = _prepared(problem, experts, device, get_ident())
    if scratch:
        rows = (experts.end - first) * problem.rows
        weight = (codes, scales, row_exponent)
        convert(rows, problem.columns, device, stream, weight, scratch)
        launch(stream, pointers, described=(x, scratch))
    else:
        launch(stream, pointers, described=(x, codes, scales))


@launches
def choose(problem: GroupedProblem) -> GroupedE4m3Plan:
    """The configuration of a grouped GEMM."""
    kind = (problem.float32_out, problem.swiglu, problem.row_weighted, problem.quantized_out)
    sizes = (problem.rows, problem.columns, problem.experts, problem.rows_of_x)
    return experts_plan(*sizes, kind)


@launches
def _prepared(problem: GroupedProblem, experts: Range, device: int, thread: int) -> Launch:
    """The launch, made once in every thread, because that takes longer than a launch."""
    columns, rows_of_x = problem.columns, problem.rows_of_x
    plan, count = choose(problem), experts.end - experts.first
    kernel = loaded(plan, architecture(device))
    cut0, cut1, cut2 = cuts(problem.segments)
    abi = GROUPED_E4M3_ABI
    weights = packed_weights(plan, count * problem.rows // 16, columns // 64)
    if isinstance(plan, GroupedConvertedE4m3Plan):
        abi = GROUPED_CONVERTED_E4M3_ABI
        weights = (Matrix(count * problem.rows, columns // 2, columns // 2, ROWS),)
    x = Matrix(rows_of_x, columns // 2, columns // 2, plan.tma_tokens)
    return abi.launch(
        kernel,
        kernel.prepare(device),  # as many as the GPU holds: the kernel finds its tiles
        (x, *weights),
        # The last range clears the rows of no expert.
        clear_end=rows_of_x if experts.end == problem.experts else 0,
        experts=count,
        stages=columns // K_BLOCK,
        rows=problem.rows,
        row_blocks=-(-problem.rows // plan.unit_rows),
        scale_stride=columns // K_BLOCK,
        expert_scales=problem.expert_scales,
        cut0=cut0,
        cut1=cut1,
        cut2=cut2,
        scale_rows=not problem.segments and problem.expert_scales > 1,
        opaque_16=16,
        limit=problem.limit,
    )


def plans(
    experts: Experts, max_rows: int, *, quantized_out: bool = False
) -> list[GroupedE4m3Plan | ConvertE4m3Plan]:
    """The configurations taken for up to ``max_rows`` rows, each once; see ``gemm_e4m3.plans``.

    Args:
        experts: Sizes and kind; there are none unless its columns are a multiple of 128.
        max_rows: At least 1.
        quantized_out: Whether results of SwiGLU are FP8 codes.
    """
    if experts.columns % K_BLOCK or (quantized_out and experts.rows % (2 * ROWS)):
        return []
    kind = (experts.float32_out, experts.swiglu, experts.row_weighted, quantized_out)
    sizes = (experts.rows, experts.columns, experts.experts)
    # Tiles change above 128 rows per expert. The form, and whether FP8 is faster, change elsewhere.
    most, step = max(max_rows, 1), 64 * experts.experts
    counts = {1, 2 * step, 2 * step + 1, *range(step, min(most, 64 * step), step), most}
    chosen: list[GroupedE4m3Plan | ConvertE4m3Plan] = [
        experts_plan(*sizes, rows, kind)
        for rows in sorted(counts)
        if rows <= most and estimate_experts(*sizes, rows, quantized_out=quantized_out).is_faster
    ]
    if any(isinstance(plan, GroupedConvertedE4m3Plan) for plan in chosen):
        chosen.append(CONVERT)
    return list(dict.fromkeys(chosen))
