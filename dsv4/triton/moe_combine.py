"""Kernel of ``moe_combine`` of ``dsv4.ops.moe``: the sum of a token's sorted rows.

A program owns columns of a token: it reads those of the token's sorted rows, whose positions are in
``rows``, and sums them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.moe import MoeCombineArgs
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import narrow, once, wait_for_inputs, widen
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch


@fast_launch
@triton.jit
def _combine_kernel(
    y,
    rows,
    offsets,
    weights,
    shared,
    out,
    stride,
    shared_stride,
    columns,
    chunks,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of a token. Compiled without contraction: a product is rounded, then added."""
    token = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        inside = column < columns
        local = tl.load(offsets + EXPERTS)
        total = tl.zeros([BLOCK], tl.float32)
        for j in tl.range(0, K, loop_unroll_factor=min(K, 8)):
            row = tl.load(rows + token * K + j).to(tl.int64)
            # A condition per column: the interpreter takes a mask & a single one for no mask.
            used = (row + tl.zeros([BLOCK], tl.int64)) < local
            term = widen(tl.load(y + row * stride + column, mask=inside & used, other=0.0))
            if WEIGHTED:
                term *= widen(tl.load(weights + token * K + j))
            total = tl.where(used, total + term, total)
        if SHARED:
            address = shared + token * shared_stride + column
            total += widen(tl.load(address, mask=inside, other=0.0))
        tl.store(out + token * columns + column, narrow(total, out.dtype.element_ty), mask=inside)


def moe_combine(args: MoeCombineArgs) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_combine``."""
    y, shared = args.y, args.shared
    (tokens, top_k), columns = args.rows.shape, y.shape[1]
    out = y.new_empty((tokens, columns), dtype=args.out_dtype)
    if out.numel() == 0:
        return out
    y = row_tiles.as_rows(y)
    shared = None if shared is None else row_tiles.as_rows(shared)
    block, chunks = row_tiles.column_chunks(tokens, columns, y.device)
    options = launch_options.options(
        y, small=launch_options.is_small(tokens * chunks, row_tiles.chunk_warps(block))
    )
    if "enable_fp_fusion" in options:
        options["enable_fp_fusion"] = False
    with launch_options.on(y):
        _combine_kernel[(tokens * chunks,)](
            y,
            args.rows.contiguous(),
            args.offsets.contiguous(),
            None if args.weights is None else args.weights.contiguous(),
            shared,
            out,
            y.stride(0),
            0 if shared is None else shared.stride(0),
            columns,
            chunks,
            EXPERTS=args.offsets.shape[0] - 1,
            K=top_k,
            WEIGHTED=args.weights is not None,
            SHARED=shared is not None,
            BLOCK=block,
            num_warps=row_tiles.chunk_warps(block),
            **options,
        )
    return out
