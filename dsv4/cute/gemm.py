"""Launchers of the CuTeDSL GEMMs with NVFP4 weights in the layout ``fragments_16x64``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from dsv4.cute import gemm_fp8
from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Kernel, Launch, Matrix
from dsv4.cute.runtime.launch import (
    aligned,
    architecture,
    current_device,
    cuts,
    loaded,
    run_noted,
    stream_of,
)
from dsv4.cute.sm90.gemm_small_m_plan import SMALL_M_ABI, TOKENS, SmallMPlan
from dsv4.cute.sm90.gemm_wgmma_plan import WGMMA_ABI, WgmmaPlan
from dsv4.cute.sm90.plans import GemmProblem, Plan, choose, token_counts
from dsv4.device import launches
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.quantize import bfloat16_operand, fp8_operand
from dsv4.quant.formats import FP8_BLOCK

# Tokens whose tiles follow one another before the next block of rows does: their X stays in L2.
_SPAN = 1024

_small_m_pointers, _wgmma_pointers = SMALL_M_ABI.pointers, WGMMA_ABI.pointers

# A launch for some of the tokens: the launch, whether it is of the small-M kernel, and bytes from
# the first token's X, scale of X and result to those of the first of these tokens. A plain tuple,
# because unpacking a named one takes 0.1 us more in every launch (CPython 3.11).
_Part = tuple[Launch, bool, int, int, int]

_Problem = tuple[int, int, int, bool, bool, bool]  # a GemmProblem's fields, without its name
_ROW_SCALED = 4


def gemm(args: GemmArgs, reserve_sms: int = 0) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    FP8 weights are ``gemm_fp8``'s. Activations that are to be quantised are multiplied as bfloat16.
    Nothing but the result is allocated for bfloat16 activations whose rows begin at multiples of 16
    bytes and whose groups follow one another.
    """
    x, groups = args.x, args.groups
    if args.format == FP8_BLOCK.name:
        return gemm_fp8.gemm(args)
    assert args.global_scale is not None
    rows, half = args.codes.shape
    kind = (args.out_dtype == torch.float32, args.activation == "nvfp4", False)
    problem = (rows, 2 * half, groups, *kind)
    shape = (x.shape[0], rows) if groups == 1 else (x.shape[0], groups, rows // groups)
    out = x.new_empty(shape, dtype=args.out_dtype)
    weight = (args.codes, args.scales, args.global_scale)
    scale, x = args.input_scale, fp8_operand(args)
    return _multiply(problem, x, weight, args.segments, scale, math.inf, out, shape[0], reserve_sms)


def gemm_swiglu(args: GemmSwigluArgs, reserve_sms: int = 0) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``; allocates as ``gemm`` does."""
    assert args.global_scale is not None
    tokens, (rows, half) = args.x.shape[0], args.codes.shape
    problem = (rows, 2 * half, 1, args.out_dtype == torch.float32, args.activation == "nvfp4", True)
    out = args.x.new_empty((tokens, rows // 2), dtype=args.out_dtype)
    weight = (args.codes, args.scales, args.global_scale)
    bound = math.inf if args.limit is None else args.limit
    scale = args.input_scale
    x = fp8_operand(args)
    return _multiply(problem, x, weight, args.segments, scale, bound, out, tokens, reserve_sms)


def _multiply(
    problem: _Problem,
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    segments: Sequence[int],
    input_scale: torch.Tensor | None,
    limit: float,
    out: torch.Tensor,
    tokens: int,
    reserve_sms: int,
) -> torch.Tensor:
    """Fill and return ``out``.

    The kernel for many tokens leaves ``reserve_sms`` SMs to other streams. None of its CTAs then
    begins before the preceding kernel has ended: waiting for it, they would hold these SMs.
    """
    if not tokens:
        return out
    device = x.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return _multiply(
                problem, x, weight, segments, input_scale, limit, out, tokens, reserve_sms
            )
    row_scale = None
    if problem[_ROW_SCALED]:
        x, row_scale = bfloat16_operand(x, input_scale)
    x, _, token_stride = aligned(x, tokens)
    codes, scales, global_scale = weight
    kind = (
        problem,
        tokens,
        token_stride,
        tuple(segments),
        global_scale.numel(),
        limit,
        device,
        reserve_sms,
    )
    operands = (x, codes, scales, global_scale, row_scale, out)
    run_noted(functools.partial(_launch, kind), stream_of(device), operands)
    return out


def _launch(kind: tuple[Any, ...], stream: int, addresses: Sequence[int]) -> None:
    """Launch a GEMM on the current GPU.

    Args:
        kind: First arguments of ``_prepared``.
        stream: The driver's handle.
        addresses: Addresses of X, codes, block scales, global scales, scales of the rows of X or 0,
            and the result.
    """
    x, codes, scales, global_scale, row_scale, out = addresses
    for launch, is_small_m, of_x, of_scale, of_out in _prepared(*kind, get_ident()):
        part_x, part_scale = x + of_x, row_scale and row_scale + of_scale
        if is_small_m:
            pointers = _small_m_pointers(
                codes=codes,
                scales=scales,
                global_scale=global_scale,
                x=part_x,
                token_scale=part_scale,
                out=out + of_out,
            )
            launch(stream, pointers)
        else:
            pointers = _wgmma_pointers(
                global_scale=global_scale, x=part_x, token_scale=part_scale, out=out + of_out
            )
            launch(stream, pointers, described=(part_x, codes, scales))


@launches
def _prepared(
    problem: _Problem,
    tokens: int,
    token_stride: int,
    segments: tuple[int, ...],
    scales: int,
    limit: float,
    device: int,
    reserve_sms: int,
    thread: int,
) -> tuple[_Part, ...]:
    """The launches of a GEMM.

    Made once in every thread, because it takes longer than a launch.
    """
    gemm_problem = GemmProblem(*problem)
    arch = architecture(device)
    plan = choose(gemm_problem, tokens, arch)
    assert plan is not None
    kernel = loaded(plan, arch)
    resident = kernel.prepare(device)
    inputs = (token_stride, segments, scales, limit)
    if isinstance(plan, SmallMPlan):
        return _small_m(kernel, resident, gemm_problem, plan, tokens, *inputs)
    launch = _large_m(kernel, max(1, resident - reserve_sms), gemm_problem, plan, tokens, *inputs)
    if reserve_sms:
        launch.begin_late()
    return ((launch, False, 0, 0, 0),)


def _small_m(
    kernel: Kernel,
    resident: int,
    problem: GemmProblem,
    plan: SmallMPlan,
    tokens: int,
    token_stride: int,
    segments: tuple[int, ...],
    scales: int,
    limit: float,
) -> tuple[_Part, ...]:
    """Launches for ``TOKENS`` tokens each."""
    row_tiles, groups = problem.rows // 16, problem.groups
    cut0, cut1, cut2 = cuts(segments)
    clusters = -(-row_tiles // plan.warps)
    if plan.ctas == groups == 1:
        clusters = min(clusters, resident)  # persistent CTAs: each takes row tiles in turn
    out_bytes = problem.rows // (2 if problem.swiglu else 1) * (4 if problem.float32_out else 2)
    parts = []
    for first in range(0, tokens, TOKENS):
        launch = SMALL_M_ABI.launch(
            kernel,
            clusters * plan.ctas,
            tokens=min(TOKENS, tokens - first),
            row_tiles=row_tiles,
            group_tiles=row_tiles // groups,
            token_stride=token_stride,
            group_stride=0 if groups == 1 else problem.columns,
            cut0=cut0,
            cut1=cut1,
            cut2=cut2,
            scale_rows=not segments and scales > 1,
            groups=groups,
            opaque_16=16,
            limit=limit,
        )
        of_x, of_scale, of_out = 2 * first * token_stride, 4 * first * groups, first * out_bytes
        parts.append((launch, True, of_x, of_scale, of_out))
    return tuple(parts)


def _large_m(
    kernel: Kernel,
    resident: int,
    problem: GemmProblem,
    plan: WgmmaPlan,
    tokens: int,
    token_stride: int,
    segments: tuple[int, ...],
    scales: int,
    limit: float,
) -> Launch:
    """The launch for any number of tokens; persistent CTAs, or one tile for every cluster."""
    groups, row_tiles, k_blocks = problem.groups, problem.rows // 16, problem.columns // 64
    token_tiles, row_blocks = -(-tokens // plan.token_block), -(-problem.rows // plan.rows)
    cut0, cut1, cut2 = cuts(segments)
    tiles = token_tiles * row_blocks
    of_x = Matrix(tokens, problem.columns * groups, token_stride, plan.token_block)
    return WGMMA_ABI.launch(
        kernel,
        plan.ctas * (tiles if plan.ctas > 1 else min(tiles, resident)),
        (of_x, *packed_matrices(plan, row_tiles, k_blocks)),
        tokens=tokens,
        token_tiles=token_tiles,
        token_span=max(1, _SPAN // plan.token_block),
        k_blocks=k_blocks,
        row_tiles=row_tiles,
        row_blocks=row_blocks,
        group_blocks=max(1, row_blocks // groups),
        token_stride=token_stride,
        group_stride=0 if groups == 1 else problem.columns,
        cut0=cut0,
        cut1=cut1,
        cut2=cut2,
        scale_rows=not segments and scales > 1,
        groups=groups,
        opaque_16=16,
        limit=limit,
    )


def packed_matrices(plan: WgmmaPlan, row_tiles: int, k_blocks: int) -> tuple[Matrix, Matrix]:
    """Codes and block scales of the weight, as the TMA copies of a CTA's stage read them."""
    codes, scales = k_blocks * 128, k_blocks * 16
    return (
        Matrix(row_tiles, codes, codes, plan.cta_row_tiles, plan.code_bytes // 4, True),
        Matrix(row_tiles, scales, scales, plan.cta_row_tiles, plan.scale_bytes // 4, True),
    )


def warmup(plans: Sequence[Plan], device: torch.device) -> None:
    """Compile or load kernels now, so that no later call does, e.g. while a graph is captured."""
    with torch.cuda.device(device):
        for plan in plans:
            loaded(plan, architecture(device.index)).prepare(device.index)


def plans(
    rows: int,
    columns: int,
    groups: int,
    activation: str,
    out_dtype: torch.dtype,
    max_tokens: int,
    *,
    swiglu: bool = False,
    arch: str = HOPPER,
) -> list[Plan]:
    """The configurations that a GEMM takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups, a multiple of 16 in each.
        columns: K, a multiple of 64.
        groups: Groups of rows with an input each.
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``.
        out_dtype: bfloat16 or float32.
        max_tokens: At least 1.
        swiglu: Whether for ``gemm_swiglu``, else for ``gemm``.
        arch: What they are compiled for.
    """
    kind = (out_dtype == torch.float32, activation == "nvfp4", swiglu)
    problem = GemmProblem(rows, columns, groups, *kind)
    chosen = (choose(problem, tokens, arch) for tokens in token_counts(max_tokens))
    return list(dict.fromkeys(plan for plan in chosen if plan is not None))
