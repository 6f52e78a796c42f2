"""GEMM with a packed NVFP4 weight: dequantized to bfloat16, then multiplied by cuBLAS.

For large M, where writing the dequantized weight takes little time compared with the GEMM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.gemm import GemmArgs
from dsv4.ops.quantize import bfloat16_operand, fp8_operand, fp8_values
from dsv4.quant import formats
from dsv4.triton._lib.numerics import narrow, wait_for_inputs
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_TILES = 4  # tiles of 16 x 64 in a row that one program dequantizes


@fast_launch
@triton.jit
def _dequantize_kernel(codes, scales, out, columns, TILES: tl.constexpr, PDL: tl.constexpr):
    """``code * block scale`` of 16 rows and 64 TILES columns (layout: ``dsv4.quant.fragments``).

    The bits of a code, shifted to where a bfloat16 has them, are the float32 ``code * 2^-126``, a
    subnormal number for 0.5; times ``scale * 2^119`` times 2^7, all exact.
    """
    wait_for_inputs(PDL)
    row_tile, strip = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, 16)[:, None]
    column = strip * (64 * TILES) + tl.arange(0, 64 * TILES)[None, :]
    inside = column < columns
    tile = row_tile * (columns // 64) + column // 64
    block, lane = column % 64 // 16, row % 8 * 4 + column % 8 // 2
    word = tl.load(codes + (tile * 32 + lane) * 4 + block, mask=inside, other=0)
    # With the column's half below, an offset is that of an even column.
    word = tl.where(column % 2 == 1, ((word >> 16) & 0xFFFF) | (word << 16), word)
    second, high = column // 8 % 2 == 1, row // 8 == 1
    rotated = word >> (tl.where(second, 6, 0) + tl.where(high, 3, 0))
    code = tl.where(second & high, (word & 0x1B) * 0x4108, rotated) & 0x81C0
    byte = tl.load(scales + tile * 64 + row % 8 * 8 + block * 2 + row // 8, mask=inside, other=0)
    scale = ((byte.to(tl.int32) << 4) + 0x7600) << 16
    values = (code << 16).to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)
    offset = (row_tile * 16 + row) * columns + column
    tl.store(out + offset, narrow(values * 128.0, tl.bfloat16), mask=inside)


def dequantize_packed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 ``[N, K]`` of ``code * block scale``, exact, from fragments."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=codes.device)
    grid = (rows // 16, -(-columns // (64 * _TILES)))
    with launch_options.on(codes):
        _dequantize_kernel[grid](
            codes.view(torch.int32),
            scales,
            out,
            columns,
            TILES=_TILES,
            **launch_options.options(codes),
        )
    return out


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Allocates the dequantized weight and the float32 sums.
    """
    assert args.global_scale is not None
    rows, columns = args.codes.shape[0], args.x.shape[-1]
    alpha = formats.expand_segments(args.global_scale, args.segments, rows).reshape(args.groups, -1)
    weight = dequantize_packed(args.codes, args.scales).reshape(
        args.groups, rows // args.groups, columns
    )
    values = args.x if args.x_scales is None else fp8_operand(args)
    tokens = values.reshape(args.x.shape[0], args.groups, columns)
    finite = torch.isfinite(tokens).all(-1, keepdim=True)
    if args.activation == "nvfp4":
        tokens, row_scale = bfloat16_operand(tokens, args.input_scale)
        alpha = row_scale[..., None] * alpha
    elif args.activation == "fp8":
        tokens = fp8_values(tokens)
    out = torch.where(finite, _matmul(tokens, weight) * alpha, torch.nan).to(args.out_dtype)
    return out if args.x.dim() == 3 else out[:, 0]


def _matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 ``[T, G, N]`` of bfloat16 ``[T, G, K]`` and ``[G, N, K]``."""
    if x.device.type != "cuda":
        return torch.einsum("tgk,gnk->tgn", x.float(), weight.float())
    parts = [
        torch.mm(x[:, g], weight[g].t(), out_dtype=torch.float32) for g in range(weight.shape[0])
    ]
    return torch.stack(parts, 1)
