"""Kernels of ``"fp8_token"``, FP8 by tokens and 128 columns: see ``dsv4.ops.quantize``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.quantize import QuantizeFp8TokenArgs, empty_fp8_token
from dsv4.quant import formats
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.fp8_token import WIDTH, fp8_token_tile, fragment_order
from dsv4.triton._lib.numerics import once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4_tile import as_bytes
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_ROWS = 8  # of a program: 128 columns of 8 rows are 8 values for each of 128 threads


@fast_launch
@triton.jit
def _fp8_token_kernel(
    x,
    codes,
    scales,
    stride,
    rows,
    columns,
    blocks,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """128 columns of ROWS rows. WHOLE: no block is ragged. FRAGMENTS: in the order of fragments."""
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        block = tl.program_id(0) % blocks
        row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = block * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = (row < rows)[:, None]
        if not WHOLE:
            inside = inside & (column < columns)
        loaded = tl.load(x + row[:, None] * stride + column, mask=inside, other=0.0)
        bits, byte = fp8_token_tile(widen(loaded))
        if FRAGMENTS:
            bits = fragment_order(bits)
        tl.store(codes + row[:, None] * columns + column, bits, mask=inside)
        tl.store(scales + row * blocks + block, byte, mask=row < rows)


def quantize_fp8_token(args: QuantizeFp8TokenArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    x = args.x
    codes, scales = empty_fp8_token(x, x.shape)
    if codes.numel() == 0:
        return codes, scales
    matrix = row_tiles.as_rows(x)
    rows, columns = matrix.shape
    blocks = triton.cdiv(columns, 128)
    tall = min(_ROWS, launch_options.power_of_two(rows))
    programs, warps = triton.cdiv(rows, tall) * blocks, max(1, tall // 2)
    with launch_options.on(x):
        _fp8_token_kernel[(programs,)](
            matrix,
            as_bytes(codes),
            as_bytes(scales),
            matrix.stride(0),
            rows,
            columns,
            blocks,
            ROWS=tall,
            WHOLE=columns % 128 == 0,
            FRAGMENTS=args.layout == formats.FRAGMENTS,
            num_warps=warps,
            **launch_options.options(x, small=launch_options.is_small(programs, warps)),
        )
    return codes, scales
