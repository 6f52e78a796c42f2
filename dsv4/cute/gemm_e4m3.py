"""Launcher of the CuTeDSL GEMM with FP8 arithmetic and exact NVFP4 weights, on Hopper."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple

import torch

from dsv4.cute.runtime.driver import Launch, Matrix
from dsv4.cute.runtime.launch import (
    architecture,
    current_device,
    cuts,
    loaded,
    run_noted,
    stream_of,
)
from dsv4.cute.sm90.gemm_e4m3_plan import E4M3_ABI, K_BLOCK, ROWS, E4m3Plan, e4m3_plan

# Tokens whose tiles follow one another before the next block of rows does: their X stays in L2.
_SPAN = 1024

_pointers = E4M3_ABI.pointers


class ExactWeight(NamedTuple):
    """An NVFP4 weight that is exact in E4M3.

    Attributes:
        codes: uint8 ``[N, K/2]``, packed (``dsv4.quant.fragments``).
        scales: uint8 ``[N, K/16]``, packed; every one a power of two.
        global_scale: float32: one, one per segment, or one per row.
        row_exponent: int8 ``[N]``, in the order of the packed rows.
        segments: Rows of each of several fused weights; none for one weight.
        groups: Groups of rows with an input each.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    row_exponent: torch.Tensor
    segments: Sequence[int] = ()
    groups: int = 1


class _Problem(NamedTuple):
    """The facts that a launch depends on, except addresses.

    Attributes:
        rows: N, of all groups.
        columns: K.
        groups: Groups of rows with an input each.
        tokens: At least 1.
        strides: Bytes from a token's codes to the next's, and of its scales.
        segments: See ``ExactWeight``.
        global_scales: How many global scales there are.
        float32_out: Whether the result is float32.
        swiglu: Whether rows are interleaved gate and up.
        limit: Clamp of SwiGLU; infinity for none.
    """

    rows: int
    columns: int
    groups: int
    tokens: int
    strides: tuple[int, int]
    segments: tuple[int, ...]
    global_scales: int
    float32_out: bool
    swiglu: bool
    limit: float


def multiply(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: ExactWeight,
    out_dtype: torch.dtype,
    *,
    swiglu: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` with FP8 arithmetic, or the SwiGLU of it.

    Args:
        x: float8_e4m3fn ``[T, K]``, or ``[T, G, K]`` with several groups, columns in fragment order
            (``dsv4.quant.fragments.fragment_columns``), K a multiple of 128.
        x_scales: float8_e8m0fnu ``[T, K/128]`` or ``[T, G, K/128]``, contiguous.
        weight: N rows; a multiple of 128 in each group if there are several.
        out_dtype: bfloat16 or float32.
        swiglu: Whether rows of the weight are interleaved gate and up.
        limit: Clamp of SwiGLU.

    Returns:
        ``[T, N]``, ``[T, N/2]`` of SwiGLU, or ``[T, G, N/G]`` with several groups.
    """
    tokens, rows, groups = x.shape[0], weight.codes.shape[0], weight.groups
    columns = 2 * weight.codes.shape[1]
    per_group = rows // groups // (2 if swiglu else 1)
    shape = (tokens, per_group) if groups == 1 else (tokens, groups, per_group)
    out = torch.empty(shape, dtype=out_dtype, device=x.device)
    if not tokens:
        return out
    device = x.get_device()
    if current_device() != device:
        with torch.cuda.device(device):
            return multiply(x, x_scales, weight, out_dtype, swiglu=swiglu, limit=limit)
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    problem = _Problem(
        rows=rows,
        columns=columns,
        groups=groups,
        tokens=tokens,
        strides=(groups * columns, groups * columns // K_BLOCK),
        segments=tuple(weight.segments),
        global_scales=weight.global_scale.numel(),
        float32_out=out_dtype == torch.float32,
        swiglu=swiglu,
        limit=math.inf if limit is None else limit,
    )
    operands = (
        x, x_scales, weight.codes, weight.scales, weight.global_scale, weight.row_exponent, out,
    )  # fmt: skip
    run_noted(functools.partial(_launch, problem, device), stream_of(device), operands)
    return out


def _launch(problem: _Problem, device: int, stream: int, addresses: Sequence[int]) -> None:
    """Launch a GEMM on the current GPU.

    Args:
        problem: What is multiplied.
        device: Index of the current GPU.
        stream: The driver's handle.
        addresses: Addresses of X, its scales, codes, block scales, global scales, exponents of
            rows, and the result.
    """
    x, x_scales, codes, scales, global_scale, row_exponent, out = addresses
    pointers = _pointers(
        global_scale=global_scale, row_exponent=row_exponent, x_scales=x_scales, out=out
    )
    launch = _prepared(problem, device, get_ident())
    launch(stream, pointers, described=(x, codes, scales))


@functools.lru_cache(maxsize=4096)
def _prepared(problem: _Problem, device: int, thread: int) -> Launch:
    """The launch of a GEMM, made once in every thread, because that takes longer than a launch."""
    plan = e4m3_plan(
        problem.rows, problem.columns, problem.tokens, problem.float32_out, problem.swiglu
    )
    kernel = loaded(plan, architecture(device))
    token_tiles, row_blocks = -(-problem.tokens // plan.token_block), -(-problem.rows // ROWS)
    cut0, cut1, cut2 = cuts(problem.segments)
    of_x = Matrix(
        problem.tokens, problem.columns * problem.groups // 2, problem.strides[0] // 2,
        plan.token_block,
    )  # fmt: skip
    weights = _packed_matrices(plan, problem.rows // 16, problem.columns // 64)
    return E4M3_ABI.launch(
        kernel,
        min(token_tiles * row_blocks, kernel.prepare(device)),
        (of_x, *weights),
        tokens=problem.tokens,
        token_tiles=token_tiles,
        token_span=max(1, _SPAN // plan.token_block),
        stages=problem.columns // K_BLOCK,
        rows=problem.rows,
        row_blocks=row_blocks,
        group_blocks=max(1, row_blocks // problem.groups),
        scale_stride=problem.strides[1],
        cut0=cut0,
        cut1=cut1,
        cut2=cut2,
        scale_rows=not problem.segments and problem.global_scales > 1,
        opaque_16=16,
        limit=problem.limit,
    )


def _packed_matrices(plan: E4m3Plan, row_tiles: int, k_blocks: int) -> tuple[Matrix, Matrix]:
    """Codes and block scales of the weight, as the TMA copies of a CTA's stage read them."""
    codes, scales = k_blocks * 128, k_blocks * 16
    return (
        Matrix(row_tiles, codes, codes, plan.cta_row_tiles, plan.code_bytes // 4, True),
        Matrix(row_tiles, scales, scales, plan.cta_row_tiles, plan.scale_bytes // 4, True),
    )
