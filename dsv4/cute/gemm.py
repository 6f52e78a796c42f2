"""CuTeDSL products with NVFP4 weights in the layout ``"fragments_16x64"``."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.cute._driver import Kernel, tensor_map
from dsv4.cute._images import image
from dsv4.cute.sm90.few_plan import TOKENS, FewPlan
from dsv4.cute.sm90.many_plan import ManyPlan
from dsv4.cute.sm90.plans import Plan, Product, choose, token_counts
from dsv4.ops.quantize import bfloat16_operand

_ARCH = "sm_90a"
_NEVER = 2**31 - 1
_CUTS = 3
_SPAN = 1024  # tokens that come one after another before the next rows: X of them stays in cache


@functools.cache
def _kernel(plan: Plan, arch: str) -> Kernel:
    return Kernel(image(plan, arch))


@dataclass(frozen=True)
class _Weight:
    """What a kernel is told of the weight."""

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    segments: Sequence[int]
    groups: int

    @property
    def row_tiles(self) -> int:
        return self.codes.shape[0] // 16

    def cuts(self) -> list[int]:
        """First rows of the second to fourth segment."""
        found = [sum(self.segments[: i + 1]) for i in range(len(self.segments) - 1)]
        return found + [_NEVER] * (_CUTS - len(found))

    def scale_rows(self) -> bool:
        """Whether every row has a global scale of its own."""
        return not self.segments and self.global_scale.shape[-1] > 1


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
    16 bytes and whose groups follow one another.
    """
    assert global_scale is not None
    tokens, rows, columns = x.shape[0], codes.shape[0], x.shape[-1]
    shape = (tokens, rows // groups) if groups == 1 else (tokens, groups, rows // groups)
    out = torch.empty(shape, dtype=out_dtype, device=x.device)
    if tokens == 0:
        return out
    row_scale = None
    if activation == "nvfp4":
        x, row_scale = bfloat16_operand(x, input_scale)
    x = _aligned(x)
    weight = _Weight(codes, scales, global_scale, segments, groups)
    product = Product(rows, columns, groups, out_dtype == torch.float32, row_scale is not None)
    plan = choose(product, tokens)
    assert plan is not None
    with torch.cuda.device(x.device):
        if isinstance(plan, ManyPlan):
            _many(plan, x, weight, row_scale, out)
            return out
        for first in range(0, tokens, TOKENS):
            part = slice(first, first + TOKENS)
            scale = None if row_scale is None else row_scale[part]
            some = choose(product, min(TOKENS, tokens - first))
            assert isinstance(some, FewPlan)
            _few(some, x[part], weight, scale, out[part])
    return out


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself if bulk and tensor copies can read its rows, else a copy."""
    strides = x.stride()
    fits = x.data_ptr() % 16 == 0 and strides[-1] == 1 and strides[0] > 0 == strides[0] % 8
    fits = fits and (x.dim() == 2 or strides[1] == x.shape[2])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _few(
    plan: FewPlan,
    x: torch.Tensor,
    weight: _Weight,
    row_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One launch for at most 16 tokens; arguments in the order of ``FewKernel.kernel``."""
    word, kernel = ctypes.c_int32, _kernel(plan, _ARCH)
    kernel.prepare(x.device.index)
    kernel.launch(
        -(-weight.row_tiles // plan.warps) * plan.blocks,
        torch.cuda.current_stream(x.device).cuda_stream,
        [
            *_addresses(x, weight, row_scale, out),
            word(x.shape[0]),
            word(weight.row_tiles),
            word(weight.row_tiles // weight.groups),
            *_rest(x, weight),
        ],
    )


def _many(
    plan: ManyPlan,
    x: torch.Tensor,
    weight: _Weight,
    row_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One launch for any number of tokens; arguments in the order of ``ManyKernel.kernel``.

    Before them come what tensor copies need, the sizes of X and a layout without any content.
    """
    word, tokens = ctypes.c_int32, x.shape[0]
    columns = x.shape[-1] * weight.groups
    token_tiles = -(-tokens // plan.token_block)
    row_blocks = -(-weight.row_tiles * 16 // plan.rows)
    kernel = _kernel(plan, _ARCH)
    resident, tiles = kernel.prepare(x.device.index), token_tiles * row_blocks
    box = (plan.token_block, 64)
    kernel.launch(
        (tiles if plan.blocks > 1 else min(tiles, resident)) * plan.blocks,
        torch.cuda.current_stream(x.device).cuda_stream,
        [
            tensor_map(x.data_ptr(), (tokens, columns), x.stride(0), box),
            (word * 2)(tokens, columns),
            ctypes.c_int64(0),
            *_addresses(x, weight, row_scale, out),
            word(tokens),
            word(token_tiles),
            word(max(1, _SPAN // plan.token_block)),
            word(x.shape[-1] // 64),
            word(weight.row_tiles),
            word(row_blocks),
            word(max(1, row_blocks // weight.groups)),
            *_rest(x, weight),
        ],
    )


def _addresses(
    x: torch.Tensor, weight: _Weight, row_scale: torch.Tensor | None, out: torch.Tensor
) -> list[Any]:
    tensors = (weight.codes, weight.scales, weight.global_scale, x, row_scale, out)
    return [ctypes.c_int64(0 if t is None else t.data_ptr()) for t in tensors]


def _rest(x: torch.Tensor, weight: _Weight) -> list[Any]:
    """Strides of X, segments, groups, and the 16 that a kernel must not know."""
    word, long = ctypes.c_int32, ctypes.c_int64
    return [
        long(x.stride(0)),
        long(0 if weight.groups == 1 else x.stride(1)),
        *map(word, weight.cuts()),
        word(weight.scale_rows()),
        word(weight.groups),
        word(16),
    ]


def warmup(plans: Sequence[Plan], device: torch.device) -> None:
    """Compile or load kernels now, so that no later call does, e.g. while a graph is captured."""
    with torch.cuda.device(device):
        for plan in plans:
            _kernel(plan, _ARCH).prepare(device.index)


def plans(
    rows: int,
    columns: int,
    groups: int,
    activation: str,
    out_dtype: torch.dtype,
    max_tokens: int,
) -> list[Plan]:
    """The configurations that ``gemm`` takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups, a multiple of 16 in each.
        columns: K, a multiple of 64.
        groups: Groups of rows with an input each.
        activation: ``"bf16"`` or ``"nvfp4"``.
        out_dtype: bfloat16 or float32.
        max_tokens: At least 1.
    """
    product = Product(rows, columns, groups, out_dtype == torch.float32, activation == "nvfp4")
    found = (choose(product, tokens) for tokens in token_counts(max_tokens))
    return list(dict.fromkeys(plan for plan in found if plan is not None))
