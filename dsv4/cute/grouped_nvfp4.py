"""Launchers of the ``tcgen05`` grouped GEMM with both operands in NVFP4, on Blackwell.

The weights are in the layout ``"swizzled_128x4"``, each expert's scales padded to a multiple of 128
rows; the scales of X are linear.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple

import torch

from dsv4 import dispatch
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime.driver import Launch
from dsv4.cute.runtime.launch import architecture, cuts, loaded, on, run_noted, stream_of
from dsv4.cute.sm100.grouped_gemm_plan import GROUPED_TCGEN05_ABI, GroupedTcgen05Plan, choose
from dsv4.cute.sm100.grouped_gemm_plan import plans as _plans
from dsv4.cute.sm100.tensor_maps import tensor_map
from dsv4.ops._grouped_operands import of_rows, result_of
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import (
    GroupedGemmSwigluArgs,
    GroupedGemmSwigluQuantizeArgs,
    empty_codes,
)
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant.formats import LINEAR, SWIZZLED_EXPERTS

_pointers = GROUPED_TCGEN05_ABI.pointers
_Args = GroupedGemmArgs | GroupedGemmSwigluArgs | GroupedGemmSwigluQuantizeArgs


class _Results(NamedTuple):
    """Tensors that a grouped GEMM fills, and what it quantizes them by.

    Attributes:
        out: Results, or their codes.
        block_scales: Block scales of codes.
        row_scale: Global scales of the rows of codes.
        result_scale: The global scale of each expert's codes.
    """

    out: torch.Tensor
    block_scales: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    result_scale: torch.Tensor | None = None


class _Call(NamedTuple):
    """The values that determine every scalar of a launch.

    Attributes:
        experts: The grouped GEMM.
        tokens: Rows of X, at least 1.
        segments: Rows of each segment of an expert's weight, if it has several.
        expert_scales: Global scales of an expert.
        limit: Clamp of SwiGLU; infinity for none.
        device: Index of the GPU.
    """

    experts: Experts
    tokens: int
    segments: tuple[int, ...]
    expert_scales: int
    limit: float
    device: int


def grouped_gemm(args: GroupedGemmArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    Allocates the quantised rows, unless the caller passes codes. Block scales of the weights must
    not have their sign bit set: the tensor cores take them as unsigned.
    """
    experts = _experts(args.weight, args.out_dtype)
    out = result_of(args, out, experts.rows)
    _gemm(experts, args, None, math.inf, _Results(out))
    return out


def grouped_gemm_swiglu(
    args: GroupedGemmSwigluArgs, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu``; allocates like ``grouped_gemm``."""
    experts = _experts(args.weight, args.out_dtype)._replace(
        swiglu=True, row_weighted=args.row_weight is not None
    )
    out = result_of(args, out, experts.rows // 2)
    limit = math.inf if args.limit is None else args.limit
    _gemm(experts, args, args.row_weight, limit, _Results(out))
    return out


def grouped_gemm_swiglu_quantize(
    args: GroupedGemmSwigluQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu_quantize``; allocates likewise."""
    experts = _experts(args.weight, torch.bfloat16)._replace(
        swiglu=True,
        row_weighted=args.row_weight is not None,
        quantized_out=True,
        swizzled_out=args.scale_layout == SWIZZLED_EXPERTS,
    )
    out = empty_codes(args.x, args.weight, args.scale_layout)
    limit = math.inf if args.limit is None else args.limit
    _gemm(experts, args, args.row_weight, limit, _Results(*out, args.result_scale.contiguous()))
    return out


def _experts(weight: torch.Tensor, out_dtype: torch.dtype) -> Experts:
    experts, rows, half = weight.shape
    return Experts(rows, 2 * half, experts, out_dtype == torch.float32, True)


def _gemm(
    experts: Experts,
    args: _Args,
    row_weight: torch.Tensor | None,
    limit: float,
    results: _Results,
) -> None:
    """Fill the results."""
    x, scales, global_scale = args.x, args.scales, args.global_scale
    assert scales is not None
    assert global_scale is not None
    if x.shape[0] == 0:
        return
    with on(x.get_device()):
        x_codes, x_scales, token_scale = quantized(
            x, args.x_scales, args.row_scale, args.input_scale, args.offsets
        )
        if row_weight is not None:
            row_weight = row_weight.float().contiguous()
        call = _Call(
            experts=experts,
            tokens=x.shape[0],
            segments=tuple(args.segments),
            expert_scales=global_scale.shape[-1],
            limit=limit,
            device=x.device.index,
        )
        inputs = (args.weight, scales, x_codes, x_scales, global_scale, token_scale)
        operands = (*inputs, row_weight, args.offsets, *results)
        run_noted(functools.partial(_launch, call), stream_of(call.device), operands)


def quantized(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, linear scales and global scales of the rows, at multiples of 16 bytes.

    Args:
        x: Values, or codes.
        x_scales: Block scales of codes.
        row_scale: Global scales of the rows of codes.
        input_scale: Each expert's global scale, by which values are quantised; None to quantise
            every row by its own largest magnitude.
        offsets: First row of each expert, and the end.
    """
    if x_scales is None:
        static = None if input_scale is None else of_rows(input_scale, offsets, x.shape[0])
        scaling = "token" if static is None else "static"
        x, x_scales, row_scale = dispatch.first(
            "quantize_nvfp4", QuantizeNvfp4Args(x, static, scaling, LINEAR)
        )
    assert x_scales is not None
    assert row_scale is not None
    return _aligned(x), _aligned(x_scales), row_scale.contiguous()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _launch(call: _Call, stream: int, addresses: Sequence[int]) -> None:
    """Launch a grouped GEMM on the current GPU.

    Args:
        call: Its scalars.
        stream: The driver's handle.
        addresses: Addresses of codes and block scales of the weights and of X, global scales of
            both, weights of rows, offsets, and ``_Results``; 0 for None.
    """
    codes, scales, x_codes, x_scales, global_scale, token_scale, row_weight, *rest = addresses
    offsets, out, block_scales, row_scale, result_scale = rest
    pointers = _pointers(
        x_scales=x_scales,
        global_scale=global_scale,
        token_scale=token_scale,
        row_weight=row_weight,
        out=out,
        offsets=offsets,
        result_scale=result_scale,
        block_scales=block_scales,
        row_scale=row_scale,
    )
    _prepared(call, get_ident())(stream, pointers, described=(codes, scales, x_codes))


@functools.lru_cache(maxsize=4096)
def _prepared(call: _Call, thread: int) -> Launch:
    """The launch of a GEMM, made once in every thread, because that takes longer than a launch."""
    tokens, experts = call.tokens, call.experts
    plan = choose(experts, tokens)
    assert plan is not None
    kernel = loaded(plan, architecture(call.device))
    row_blocks = -(-experts.rows // plan.rows)
    # There are never more tiles than this, whatever the offsets are.
    most = (min(tokens, experts.experts) + tokens // plan.token_block) * row_blocks
    clusters = min(most, kernel.prepare(call.device))
    cut0, cut1, cut2 = cuts(call.segments)
    return GROUPED_TCGEN05_ABI.launch(
        kernel,
        clusters * plan.ctas,
        plan.operands(experts.rows, experts.columns, tokens, experts.experts),
        tensor_map,
        tokens=tokens,
        experts=experts.experts,
        k_stages=plan.k_stages(experts.columns),
        rows=experts.rows,
        row_blocks=row_blocks,
        expert_scales=call.expert_scales,
        cut0=cut0,
        cut1=cut1,
        cut2=cut2,
        scale_rows=not call.segments and call.expert_scales > 1,
        limit=call.limit,
    )


def plans(experts: Experts, max_tokens: int) -> list[GroupedTcgen05Plan]:
    """The configurations taken for 1 to ``max_tokens`` rows of X, each once."""
    return _plans(experts._replace(row_scaled=True), max_tokens)
