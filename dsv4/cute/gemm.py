"""CuTeDSL products with NVFP4 weights in the layout ``"fragments_16x64"``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from dsv4.cute._driver import Kernel
from dsv4.cute._images import image
from dsv4.cute.sm90.few_plan import TOKENS, FewPlan, few_plan
from dsv4.ops.quantize import bfloat16_operand

_NEVER = 2**31 - 1
_CUTS = 3


@functools.cache
def _kernel(plan: Any, arch: str) -> Kernel:
    return Kernel(image(plan, arch))


def gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    segments: Sequence[int],
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    groups: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Nothing but the result is allocated for bfloat16 activations whose rows begin at multiples of
    16 bytes.
    """
    assert global_scale is not None
    tokens, rows = x.shape[0], codes.shape[0]
    shape = (tokens, rows // groups) if groups == 1 else (tokens, groups, rows // groups)
    out = torch.empty(shape, dtype=out_dtype, device=x.device)
    if tokens == 0:
        return out
    row_scale = None
    if activation == "nvfp4":
        x, row_scale = bfloat16_operand(x, input_scale)
    x = _aligned(x)
    with torch.cuda.device(x.device):
        for first in range(0, tokens, TOKENS):
            part = slice(first, first + TOKENS)
            scale = None if row_scale is None else row_scale[part]
            _few(x[part], codes, scales, global_scale, segments, scale, groups, out[part])
    return out


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself if bulk copies can read its rows, else a copy."""
    strides = x.stride()
    fits = x.data_ptr() % 16 == 0 and strides[-1] == 1 and all(s % 8 == 0 for s in strides[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _few(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    segments: Sequence[int],
    row_scale: torch.Tensor | None,
    groups: int,
    out: torch.Tensor,
) -> None:
    """One launch for at most 16 tokens."""
    tokens, columns, row_tiles = x.shape[0], x.shape[-1], codes.shape[0] // 16
    plan = few_plan(
        row_tiles,
        row_tiles // groups,
        columns,
        tokens,
        out.dtype == torch.float32,
        row_scale is not None,
    )
    assert plan is not None
    kernel = _kernel(plan, "sm_90a")
    kernel.prepare(x.device.index)
    kernel.launch(
        -(-row_tiles // plan.warps) * plan.blocks,
        torch.cuda.current_stream(x.device).cuda_stream,
        _arguments(x, codes, scales, global_scale, segments, row_scale, groups, out),
    )


def _arguments(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    segments: Sequence[int],
    row_scale: torch.Tensor | None,
    groups: int,
    out: torch.Tensor,
) -> list[Any]:
    """The kernel's arguments, in the order of ``FewKernel.kernel``."""
    word, long = ctypes.c_int32, ctypes.c_int64
    row_tiles = codes.shape[0] // 16
    cuts = [sum(segments[: i + 1]) for i in range(len(segments) - 1)]
    cuts += [_NEVER] * (_CUTS - len(cuts))
    per_row = not segments and global_scale.shape[-1] > 1
    return [
        long(codes.data_ptr()),
        long(scales.data_ptr()),
        long(global_scale.data_ptr()),
        long(x.data_ptr()),
        long(0 if row_scale is None else row_scale.data_ptr()),
        long(out.data_ptr()),
        word(x.shape[0]),
        word(row_tiles),
        word(row_tiles // groups),
        long(x.stride(0)),
        long(0 if groups == 1 else x.stride(1)),
        *map(word, cuts),
        word(per_row),
        word(groups),
        word(16),
    ]


def warmup(plans: Sequence[FewPlan], device: torch.device) -> None:
    """Compile or load kernels now, so that no later call does, e.g. while a graph is captured."""
    with torch.cuda.device(device):
        for plan in plans:
            _kernel(plan, "sm_90a").prepare(device.index)


def plans(
    rows: int,
    columns: int,
    groups: int,
    activation: str,
    out_dtype: torch.dtype,
    max_tokens: int,
) -> list[FewPlan]:
    """The configurations that ``gemm`` takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups, a multiple of 16 in each.
        columns: K, a multiple of 64.
        groups: Groups of rows with an input each.
        activation: ``"bf16"`` or ``"nvfp4"``.
        out_dtype: bfloat16 or float32.
        max_tokens: At least 1. Above ``TOKENS`` there are several launches.
    """
    tiles, wide = rows // 16, out_dtype == torch.float32
    found = (
        few_plan(tiles, tiles // groups, columns, tokens, wide, activation == "nvfp4")
        for tokens in range(1, min(max_tokens, TOKENS) + 1)
    )
    return list(dict.fromkeys(plan for plan in found if plan is not None))
