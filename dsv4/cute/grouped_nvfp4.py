"""CuTeDSL products of sorted rows with experts, both operands in NVFP4, on Blackwell.

The weights are in the layout ``"swizzled_128x4"``, each expert's scales from a border of 128 rows;
the rows' scales are linear.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import torch

from dsv4 import dispatch
from dsv4.cute.grouped_gemm import of_rows
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime.driver import Kernel, Parameters
from dsv4.cute.runtime.launch import architecture, cuts, loaded, on, stream_of
from dsv4.cute.sm100._maps import tensor_map
from dsv4.cute.sm100.dense_plan import Box
from dsv4.cute.sm100.grouped_plan import GroupedPlan, choose
from dsv4.cute.sm100.grouped_plan import plans as _plans
from dsv4.ops.grouped_gemm import (
    GroupedGemmArgs,
    GroupedGemmSwigluArgs,
    GroupedGemmSwigluQuantizeArgs,
    empty_codes,
)
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant.formats import LINEAR, SWIZZLED_EXPERTS

# Parameters of the kernel, in the order of ``GroupedKernel.kernel``: descriptions of the weights'
# codes and scales and of the rows' codes, addresses of the other tensors, and the rest.
PARAMETERS = Parameters(*["128s"] * 3, *"q" * 9, *"i" * 10, "f")
_ADDRESSES, _AFTER = struct.Struct("@9q"), struct.Struct("@10if")

# Codes or values of the rows, block scales and global scales of codes, and the experts' scales by
# which values are quantised.
_OfX = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class _Prepared(NamedTuple):
    """A launch but for its addresses and stream."""

    kernel: Kernel
    blocks: int
    boxes: tuple[Box, Box, Box]
    after: bytes


def grouped_gemm(args: GroupedGemmArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    Allocates the quantised rows, unless they are given so. Block scales of the weights must not
    have their sign bit set: the tensor cores take them as unsigned.
    """
    wanted = _wanted(args.weight, args.out_dtype)
    if out is None:
        out = args.x.new_empty((args.x.shape[0], wanted.rows), dtype=args.out_dtype)
    assert args.scales is not None
    assert args.global_scale is not None
    parts = (args.weight, args.scales, args.global_scale, args.offsets)
    of_x = (args.x, args.x_scales, args.row_scale, args.input_scale)
    _product(wanted, of_x, parts, tuple(args.segments), None, math.inf, (out,))
    return out


def grouped_gemm_swiglu(
    args: GroupedGemmSwigluArgs, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm_swiglu``; allocates as ``grouped_gemm`` does."""
    wanted = _wanted(args.weight, args.out_dtype)._replace(
        swiglu=True, row_weighted=args.row_weight is not None
    )
    if out is None:
        out = args.x.new_empty((args.x.shape[0], wanted.rows // 2), dtype=args.out_dtype)
    assert args.scales is not None
    assert args.global_scale is not None
    parts = (args.weight, args.scales, args.global_scale, args.offsets)
    of_x = (args.x, args.x_scales, args.row_scale, args.input_scale)
    bound = math.inf if args.limit is None else args.limit
    _product(wanted, of_x, parts, tuple(args.segments), args.row_weight, bound, (out,))
    return out


def grouped_gemm_swiglu_quantize(
    args: GroupedGemmSwigluQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm_swiglu_quantize``; allocates likewise."""
    wanted = _wanted(args.weight, torch.bfloat16)._replace(
        swiglu=True,
        row_weighted=args.row_weight is not None,
        quantized_out=True,
        swizzled_out=args.scale_layout == SWIZZLED_EXPERTS,
    )
    out = empty_codes(args.x, args.weight, args.scale_layout)
    assert args.scales is not None
    assert args.global_scale is not None
    parts = (args.weight, args.scales, args.global_scale, args.offsets)
    of_x = (args.x, args.x_scales, args.row_scale, args.input_scale)
    bound = math.inf if args.limit is None else args.limit
    results = (*out, args.result_scale.contiguous())
    _product(wanted, of_x, parts, tuple(args.segments), args.row_weight, bound, results)
    return out


def _wanted(weight: torch.Tensor, out_dtype: torch.dtype) -> Experts:
    experts, rows, half = weight.shape
    return Experts(rows, 2 * half, experts, out_dtype == torch.float32, True)


def _product(
    wanted: Experts,
    of_x: _OfX,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    segments: tuple[int, ...],
    row_weight: torch.Tensor | None,
    limit: float,
    results: tuple[torch.Tensor, ...],
) -> None:
    """Fills the results: one, or codes, block scales and rows' scales, of each expert's scale."""
    x = of_x[0]
    if x.shape[0] == 0:
        return
    with on(x.get_device()):
        codes, scales, global_scale, offsets = parts
        x_codes, x_scales, token_scale = quantized(of_x, offsets)
        if row_weight is not None:
            row_weight = row_weight.float().contiguous()
        launch = _prepared(
            wanted, x.shape[0], segments, global_scale.shape[-1], limit, x.device.index
        )
        out, *of_codes = [result.data_ptr() for result in results]
        block_scales, row_scale, codes_scale = of_codes or (0, 0, 0)
        places = (
            x_scales.data_ptr(),
            global_scale.data_ptr(),
            token_scale.data_ptr(),
            0 if row_weight is None else row_weight.data_ptr(),
            out,
            offsets.data_ptr(),
            codes_scale,
            block_scales,
            row_scale,
        )
        operands = zip((codes, scales, x_codes), launch.boxes, strict=True)
        packed = [tensor_map(tensor.data_ptr(), box) for tensor, box in operands]
        packed += [_ADDRESSES.pack(*places), launch.after]
        launch.kernel.launch(launch.blocks, stream_of(x.device.index), PARAMETERS, b"".join(packed))


def quantized(of_x: _OfX, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, linear scales and global scales of the rows, at multiples of 16 bytes."""
    x, scales, total, input_scale = of_x
    if scales is None:
        each = None if input_scale is None else of_rows(input_scale, offsets, x.shape[0])
        scaling = "token" if each is None else "static"
        x, scales, total = dispatch.first(
            "quantize_nvfp4", QuantizeNvfp4Args(x, each, scaling, LINEAR)
        )
    assert scales is not None
    assert total is not None
    return _aligned(x), _aligned(scales), total.contiguous()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@functools.lru_cache(maxsize=4096)
def _prepared(
    wanted: Experts,
    tokens: int,
    segments: tuple[int, ...],
    scales_each: int,
    limit: float,
    device: int,
) -> _Prepared:
    """Made once, because it takes longer than a launch."""
    plan = choose(wanted, tokens)
    assert plan is not None
    kernel = loaded(plan, architecture(device))
    rows, columns, experts = wanted[:3]
    row_blocks = -(-rows // plan.rows)
    after = _AFTER.pack(
        tokens,
        experts,
        plan.steps(columns),
        rows,
        row_blocks,
        scales_each,
        *cuts(segments),
        not segments and scales_each > 1,
        limit,
    )
    # More tiles than these there cannot be, however the rows are dealt out.
    most = (min(tokens, experts) + tokens // plan.token_block) * row_blocks
    clusters = min(most, kernel.prepare(device))
    boxes = plan.operands(rows, columns, tokens, experts)
    return _Prepared(kernel, clusters * plan.blocks, boxes, after)


def plans(experts: Experts, max_tokens: int) -> list[GroupedPlan]:
    """The configurations taken for 1 to ``max_tokens`` rows of X, each once."""
    return _plans(experts._replace(row_scaled=True), max_tokens)
