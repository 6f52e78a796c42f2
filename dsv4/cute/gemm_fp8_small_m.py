"""Launcher of the CuTeDSL GEMM of few tokens with an FP8 weight, 128 x 128 blocks, on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from dsv4.cute import gemm_fp8
from dsv4.cute.runtime.driver import Kernel, Launch
from dsv4.cute.runtime.launch import (
    architecture,
    loaded,
)
from dsv4.cute.sm90.gemm_fp8_small_m_plan import (
    SMALL_M_FP8_ABI,
    TOKENS,
    SmallMFp8Plan,
    fp8_small_m_plan,
    launches_of,
)
from dsv4.cute.sm90.plans import GemmProblem
from dsv4.cute.supports import MOST_FEW_TOKENS
from dsv4.device import launches
from dsv4.ops.gemm import GemmArgs

_pointers = SMALL_M_FP8_ABI.pointers

# A launch for some of the tokens, and bytes from the first token's X, scale of X and result to
# those of the first of these tokens.
_Part = tuple[Launch, int, int, int]


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Nothing but the result is allocated for bfloat16 activations whose rows begin at multiples of
    16 bytes and whose groups follow one another.
    """
    return gemm_fp8.multiply(args, _launch)


def _launch(kind: tuple[Any, ...], stream: int, addresses: Sequence[int]) -> None:
    """Launch a GEMM on the current GPU.

    Args:
        kind: First arguments of ``_prepared``.
        stream: The driver's handle.
        addresses: Addresses of X, codes, scales, scales of the rows of X or 0, and the result.
    """
    x, codes, scales, row_scale, out = addresses
    for launch, of_x, of_scale, of_out in _prepared(*kind, get_ident()):
        pointers = _pointers(
            codes=codes,
            scales=scales,
            x=x + of_x,
            token_scale=row_scale and row_scale + of_scale,
            out=out + of_out,
        )
        launch(stream, pointers)


@launches
def _prepared(
    problem: GemmProblem,
    tokens: int,
    strides: tuple[int, int],
    folded: bool,
    device: int,
    thread: int,
) -> tuple[_Part, ...]:
    """The launches of a GEMM, for up to ``TOKENS`` tokens each.

    Made once in every thread, because it takes longer than a launch.
    """
    arch = architecture(device)
    parts = []
    for number, count in enumerate(launches_of(tokens)):
        plan = fp8_small_m_plan(problem, count, folded)
        assert plan is not None
        kernel = loaded(plan, arch)
        kernel.prepare(device)
        first, width = number * TOKENS, 4 if problem.float32_out else 2
        starts = (2 * first * strides[0], 4 * first * problem.groups, width * first * problem.rows)
        parts.append((_prepare(kernel, problem, plan, count, strides), *starts))
    return tuple(parts)


def _prepare(
    kernel: Kernel,
    problem: GemmProblem,
    plan: SmallMFp8Plan,
    tokens: int,
    strides: tuple[int, int],
) -> Launch:
    row_tiles, groups, (token_stride, codes_stride) = problem.rows // 16, problem.groups, strides
    return SMALL_M_FP8_ABI.launch(
        kernel,
        -(-row_tiles // plan.warps) * plan.ctas,
        tokens=tokens,
        row_tiles=row_tiles,
        group_tiles=row_tiles // groups,
        token_stride=token_stride,
        group_stride=0 if groups == 1 else problem.columns,
        codes_stride=codes_stride,
        groups=groups,
    )


def plans(
    rows: int,
    columns: int,
    groups: int,
    activation: str,
    out_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    max_tokens: int,
) -> list[SmallMFp8Plan]:
    """The configurations that a GEMM takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups.
        columns: K; there are none unless it is a multiple of 128.
        groups: Groups of rows with an input each.
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``.
        out_dtype: bfloat16 or float32.
        scale_dtype: Dtype of the block scales: float8_e8m0fnu or float32.
        max_tokens: At least 1.
    """
    kind = (out_dtype == torch.float32, activation == "nvfp4")
    problem = GemmProblem(rows, columns, groups, *kind)
    folded = scale_dtype == torch.float8_e8m0fnu
    counts = range(1, min(max_tokens, MOST_FEW_TOKENS, TOKENS) + 1)
    chosen = (fp8_small_m_plan(problem, count, folded) for count in counts)
    return list(dict.fromkeys(plan for plan in chosen if plan is not None))
