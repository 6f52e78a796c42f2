"""Kernels of ``dsv4.ops.fp8_token``: rounding to FP8 behind a norm, SwiGLU and a gather."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.fp8_token import MoeGatherFp8Args, RmsNormFp8Args, SwigluFp8Args
from dsv4.ops.quantize import empty_fp8_token
from dsv4.quant.formats import FRAGMENTS
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.fp8_token import WIDTH, fp8_token_tile, fragment_order
from dsv4.triton._lib.numerics import narrow, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import rounded
from dsv4.triton._lib.nvfp4_tile import as_bytes
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._lib.row_tiles import target_rows
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.norm import inverse_rms_of
from dsv4.triton.swiglu import flags, flat, load_pairs, swiglu_of

_ROWS = 8  # of a program of SwiGLU: 16 pieces of 8 outputs of each row
_BLOCKS = 8  # of a program of a gather: 1024 columns of a token


@triton.jit
def _store_blocks(
    codes, scales, values, row, block, columns, blocks, inside, FRAGMENTS: tl.constexpr
):
    """Round ``values [N, 128]`` to FP8, and store what is block ``block [N]`` of row ``row [N]``.

    ``inside [N]`` tells which blocks there are; the last of a row may be ragged.
    """
    bits, byte = fp8_token_tile(values)
    if FRAGMENTS:
        bits = fragment_order(bits)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    address = codes + (row * columns)[:, None] + column
    tl.store(address, bits, mask=inside[:, None] & (column < columns))
    tl.store(scales + row * blocks + block, byte, mask=inside)


@fast_launch
@triton.jit(do_not_specialize=["rows"])
def _norm_fp8_kernel(
    x,
    weight,
    out,
    codes,
    scales,
    stride,
    rows,
    columns,
    blocks,
    eps,
    FRAGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS whole rows, as the kernel of the norm alone takes them."""
    if tl.program_id(0) == 0:
        prefetch_row(weight, columns, BLOCK)
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        first = tl.program_id(0).to(tl.int64) * ROWS
        row = first + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (column < columns)
        values = tl.load(x + row * stride + column, mask=inside, other=0.0)
        factor = widen(tl.load(weight + column, mask=column < columns, other=0.0))
        values = widen(values)
        values = factor * (values * inverse_rms_of(values, columns, eps, x.dtype.element_ty))
        tl.store(out + row * columns + column, narrow(values, out.dtype.element_ty), mask=inside)
        N: tl.constexpr = ROWS * (BLOCK // WIDTH)
        number = tl.arange(0, N)
        own_row, block = first + number // (BLOCK // WIDTH), number % (BLOCK // WIDTH)
        tile = rounded(tl.reshape(values, [N, WIDTH]), out.dtype.element_ty)
        # Past the last column there are zeros, unless the row is NaN.
        beyond = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :] >= columns
        tile = tl.where(beyond, 0.0, tile)
        exists = (own_row < rows) & (block < blocks)
        _store_blocks(codes, scales, tile, own_row, block, columns, blocks, exists, FRAGMENTS)


def rms_norm_fp8(args: RmsNormFp8Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.fp8_token.rms_norm_fp8``."""
    x = args.x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    codes, scales = empty_fp8_token(x, x.shape)
    if x.numel() == 0:
        return out, codes, scales
    rows = row_tiles.as_rows(x)
    count, columns = rows.shape
    tile = row_tiles.tile(count, columns, x.element_size())
    programs, warps = triton.cdiv(count, tile["ROWS"]), tile["num_warps"]
    small = warps < 16 and launch_options.is_small(programs, warps)
    with launch_options.on(x):
        _norm_fp8_kernel[(programs,)](
            rows,
            args.weight.contiguous(),
            out,
            as_bytes(codes),
            as_bytes(scales),
            rows.stride(0),
            count,
            columns,
            scales.shape[-1],
            args.eps,
            FRAGMENTS=args.result_layout == FRAGMENTS,
            BLOCK=max(128, launch_options.power_of_two(columns)),
            **tile,
            **launch_options.options(x, small=small),
        )
    return out, codes, scales


@fast_launch
@triton.jit
def _swiglu_fp8_kernel(
    x,
    weight,
    codes,
    scales,
    stride,
    rows,
    half,
    blocks,
    limit,
    INTERLEAVED: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """128 outputs of ROWS rows, in pieces of 8."""
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        start = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
        block = tl.program_id(0) % blocks
        piece = tl.arange(0, ROWS * 16)
        row, first = start + piece // 16, block * WIDTH + piece % 16 * 8
        gate, up = load_pairs(x, row * stride, first, half, row < rows, INTERLEAVED)
        if WEIGHTED:
            factor = widen(tl.load(weight + row, mask=row < rows, other=0.0))
        values = swiglu_of(gate, up, limit, CLAMPED, UNBOUNDED)
        if WEIGHTED:
            values = values * factor[:, None]
        values = tl.reshape(rounded(values, x.dtype.element_ty), [ROWS, WIDTH])
        beyond = block * WIDTH + tl.arange(0, WIDTH)[None, :] >= half
        values = tl.where(beyond, 0.0, values)  # which a weight that is no number made NaN
        own_row = start + tl.arange(0, ROWS)
        own_block = tl.zeros([ROWS], tl.int32) + block
        exists = own_row < rows
        _store_blocks(codes, scales, values, own_row, own_block, half, blocks, exists, FRAGMENTS)


def swiglu_fp8(args: SwigluFp8Args) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.fp8_token.swiglu_fp8``."""
    half = args.gate_up.shape[-1] // 2
    codes, scales = empty_fp8_token(args.gate_up, (*args.gate_up.shape[:-1], half))
    if codes.numel() == 0:
        return codes, scales
    x, blocks = row_tiles.as_rows(args.gate_up), scales.shape[-1]
    bound, options = flags(args.limit, args.layout, args.row_weight)
    tall = min(_ROWS, launch_options.power_of_two(x.shape[0]))
    programs, warps = triton.cdiv(x.shape[0], tall) * blocks, max(1, tall // 2)
    with launch_options.on(x):
        _swiglu_fp8_kernel[(programs,)](
            x,
            flat(args.row_weight),
            as_bytes(codes),
            as_bytes(scales),
            x.stride(0),
            x.shape[0],
            half,
            blocks,
            bound,
            **options,
            FRAGMENTS=args.result_layout == FRAGMENTS,
            ROWS=tall,
            num_warps=warps,
            **launch_options.options(x, small=launch_options.is_small(programs, warps)),
        )
    return codes, scales


@fast_launch
@triton.jit
def _gather_fp8_kernel(
    x,
    rows,
    weights,
    codes,
    scales,
    row_weight,
    stride,
    columns,
    blocks,
    chunks,
    K: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCKS blocks of a token to all of its K sorted rows, and what these rows weigh."""
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    block = tl.program_id(0) % chunks * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = column < columns
    targets = target_rows(rows + token * K, K)
    weighed = ()
    for j in tl.static_range(K):
        weighed += (tl.load(weights + token * K + j),)  # type: ignore[assignment]
    loaded = tl.load(x + token * stride + column, mask=inside, other=0.0)
    bits, byte = fp8_token_tile(widen(loaded))
    if FRAGMENTS:
        bits = fragment_order(bits)
    for j in tl.static_range(K):
        target = codes + targets[j] * columns
        tl.store(target + column, bits, mask=inside)
        target = scales + targets[j] * blocks
        tl.store(target + block, byte, mask=block < blocks)
        alone = tl.program_id(0) % chunks == 0
        tl.store(row_weight + targets[j], weighed[j], mask=alone)


def moe_gather_fp8(args: MoeGatherFp8Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.fp8_token.moe_gather_fp8``."""
    (tokens, top_k), columns = args.rows.shape, args.x.shape[1]
    codes, scales = empty_fp8_token(args.x, (tokens * top_k, columns))
    row_weight = args.weights.new_empty(tokens * top_k)
    if codes.numel() == 0:
        return codes, scales, row_weight
    source, blocks = row_tiles.as_rows(args.x), scales.shape[1]
    across = min(_BLOCKS, launch_options.power_of_two(blocks))
    chunks = triton.cdiv(blocks, across)
    with launch_options.on(args.x):
        _gather_fp8_kernel[(tokens * chunks,)](
            source,
            args.rows.contiguous(),
            args.weights.contiguous(),
            as_bytes(codes),
            as_bytes(scales),
            row_weight,
            source.stride(0),
            columns,
            blocks,
            chunks,
            K=top_k,
            FRAGMENTS=args.result_layout == FRAGMENTS,
            BLOCKS=across,
            num_warps=max(1, across // 2),
            **launch_options.options(args.x),
        )
    return codes, scales, row_weight
