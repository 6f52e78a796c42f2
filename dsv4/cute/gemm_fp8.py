"""Launcher of the CuTeDSL GEMM with an FP8 weight, one scale per 128 x 128 block, on Hopper."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch

from dsv4.cute.runtime.driver import Kernel, Launch, Matrix
from dsv4.cute.runtime.launch import (
    aligned,
    architecture,
    current_device,
    loaded,
    run_noted,
    stream_of,
)
from dsv4.cute.sm90.gemm_fp8_wgmma_plan import FP8_WGMMA_ABI, Fp8WgmmaPlan, fp8_plan
from dsv4.cute.sm90.plans import GemmProblem, token_counts
from dsv4.device import launches
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.quantize import bfloat16_operand, fp8_operand

# Tokens whose tiles follow one another before the next block of rows does: their X stays in L2.
_SPAN = 1024

_pointers = FP8_WGMMA_ABI.pointers


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Nothing but the result is allocated for bfloat16 activations whose rows begin at multiples of
    16 bytes and whose groups follow one another.
    """
    return multiply(args, _launch)


def multiply(
    args: GemmArgs, launch: Callable[[tuple[Any, ...], int, Sequence[int]], None]
) -> torch.Tensor:
    """Return the GEMM of FP8 weights in bfloat16 by one of its kernels; see ``gemm``.

    Args:
        args: The operator's arguments.
        launch: Launches a kernel, see ``_launch``.
    """
    x, codes, groups = args.x, args.codes, args.groups
    tokens, rows = x.shape[0], codes.shape[0]
    out = x.new_empty((*x.shape[:-1], rows // groups), dtype=args.out_dtype)
    if not tokens:
        return out
    device = x.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return multiply(args, launch)
    row_scale = None
    if args.activation == "nvfp4":
        x, row_scale = bfloat16_operand(x, args.input_scale)
    else:
        x = fp8_operand(args)
    x, _, token_stride = aligned(x, tokens)
    form = (args.out_dtype == torch.float32, args.activation == "nvfp4")
    problem = GemmProblem(rows, codes.shape[1], groups, *form)
    folded = args.scales.dtype == torch.float8_e8m0fnu
    kind = (problem, tokens, (token_stride, codes.stride(0)), folded, device)
    operands = (x, codes, args.scales, row_scale, out)
    run_noted(functools.partial(launch, kind), stream_of(device), operands)
    return out


def _launch(kind: tuple[Any, ...], stream: int, addresses: Sequence[int]) -> None:
    """Launch a GEMM on the current GPU.

    Args:
        kind: First arguments of ``_prepared``.
        stream: The driver's handle.
        addresses: Addresses of X, codes, scales, scales of the rows of X or 0, and the result.
    """
    x, codes, scales, row_scale, out = addresses
    launch = _prepared(*kind, get_ident())
    pointers = _pointers(codes=codes, scales=scales, x=x, token_scale=row_scale, out=out)
    launch(stream, pointers, described=(x, codes))


@launches
def _prepared(
    problem: GemmProblem,
    tokens: int,
    strides: tuple[int, int],
    folded: bool,
    device: int,
    thread: int,
) -> Launch:
    """The launch of a GEMM, made once in every thread, because that takes longer than a launch."""
    plan = fp8_plan(problem, tokens, folded)
    assert plan is not None
    kernel = loaded(plan, architecture(device))
    return _prepare(kernel, kernel.prepare(device), problem, plan, tokens, strides)


def _prepare(
    kernel: Kernel,
    resident: int,
    problem: GemmProblem,
    plan: Fp8WgmmaPlan,
    tokens: int,
    strides: tuple[int, int],
) -> Launch:
    rows, columns, groups, *_ = problem
    token_tiles, row_blocks = -(-tokens // plan.token_block), -(-rows // plan.rows)
    tiles, (token_stride, codes_stride) = token_tiles * row_blocks, strides
    matrices = (
        Matrix(tokens, columns * groups, token_stride, plan.token_block),
        Matrix(rows, columns // 2, codes_stride // 2, plan.rows),
    )
    return FP8_WGMMA_ABI.launch(
        kernel,
        plan.ctas * (tiles if plan.ctas > 1 else min(tiles, resident)),
        matrices,
        tokens=tokens,
        token_tiles=token_tiles,
        token_span=max(1, _SPAN // plan.token_block),
        k_blocks=columns // 64,
        row_tiles=rows // 16,
        row_blocks=row_blocks,
        group_blocks=max(1, row_blocks // groups),
        token_stride=token_stride,
        group_stride=0 if groups == 1 else columns,
        codes_stride=codes_stride,
        groups=groups,
        scale_blocks=-(-rows // 128),
    )


def plans(
    rows: int,
    columns: int,
    groups: int,
    activation: str,
    out_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    max_tokens: int,
) -> list[Fp8WgmmaPlan]:
    """The configurations that a GEMM takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups.
        columns: K; there are none unless it is a multiple of 128.
        groups: Groups of rows with an input each.
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``.
        out_dtype: bfloat16 or float32.
        scale_dtype: Dtype of the weight: float8_e8m0fnu or float32.
        max_tokens: At least 1.
    """
    kind = (out_dtype == torch.float32, activation == "nvfp4")
    problem = GemmProblem(rows, columns, groups, *kind)
    folded = scale_dtype == torch.float8_e8m0fnu
    chosen = (fp8_plan(problem, tokens, folded) for tokens in token_counts(max_tokens))
    return list(dict.fromkeys(plan for plan in chosen if plan is not None))
