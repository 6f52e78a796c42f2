"""Kernel of ``moe_combine`` of ``dsv4.ops.moe``: the sum of a token's sorted rows.

A program owns columns of a token (``_lib/combined_rows.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.moe import MoeCombineArgs
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.combined_rows import CombinedRows, sum_rows
from dsv4.triton._lib.numerics import once, wait_for_inputs
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
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of a token. Compiled without contraction: a product is rounded, then added."""
    token = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        inside = column < columns
        total = sum_rows(
            y,
            rows,
            offsets,
            weights,
            shared,
            stride,
            shared_stride,
            EXPERTS,
            token,
            column,
            inside,
            K,
            out.dtype.element_ty,
        )
        tl.store(out + token * columns + column, total, mask=inside)


def moe_combine(args: MoeCombineArgs) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_combine``."""
    (tokens, top_k), columns = args.rows.shape, args.y.shape[1]
    out = args.y.new_empty((tokens, columns), dtype=args.out_dtype)
    if out.numel() == 0:
        return out
    source = CombinedRows.of(args)
    y, shared = source.y, source.shared
    block, chunks = row_tiles.column_chunks(tokens, columns, y.device)
    options = launch_options.options(
        y, small=launch_options.is_small(tokens * chunks, row_tiles.chunk_warps(block))
    )
    if "enable_fp_fusion" in options:
        options["enable_fp_fusion"] = False
    with launch_options.on(y):
        _combine_kernel[(tokens * chunks,)](
            y,
            source.rows,
            source.offsets,
            source.weights,
            shared,
            out,
            y.stride(0),
            0 if shared is None else shared.stride(0),
            columns,
            chunks,
            EXPERTS=args.offsets.shape[0] - 1,
            K=top_k,
            BLOCK=block,
            num_warps=row_tiles.chunk_warps(block),
            **options,
        )
    return out
