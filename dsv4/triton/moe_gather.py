"""Kernel of ``moe_gather`` of ``dsv4.ops.moe``: tokens to their sorted rows.

A program owns columns of a token: it reads them once and writes them to the token's sorted rows,
whose positions are in ``rows``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.moe import MoeGatherArgs
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._lib.row_tiles import target_rows
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch


@fast_launch
@triton.jit
def _gather_kernel(
    x,
    rows,
    out,
    weights,
    row_weight,
    stride,
    columns,
    chunks,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK columns of a token to SHARE of its K sorted rows; maybe what its slots weigh, too."""
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    first = token * K + tl.program_id(1) * SHARE
    targets = target_rows(rows + first, SHARE)
    values = tl.load(x + token * stride + column, mask=column < columns)
    for j in tl.static_range(SHARE):
        offset = targets[j] * columns + column
        tl.store(out + offset, values, mask=column < columns)
        if WEIGHTED:
            alone = tl.program_id(0) % chunks == 0
            tl.store(row_weight + targets[j], tl.load(weights + first + j), mask=alone)


def moe_gather(args: MoeGatherArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_gather``."""
    out = args.x.new_empty((args.rows.numel(), args.x.shape[1])) if out is None else out
    if out.numel():
        gather_rows(args.x, args.rows.contiguous(), out, None, None)
    return out


def gather_rows(
    x: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    row_weight: torch.Tensor | None,
) -> None:
    """Copy tokens to their sorted rows in ``out`` and, unless None, weights to ``row_weight``."""
    (tokens, columns), source = x.shape, row_tiles.as_rows(x)
    block, chunks = row_tiles.column_chunks(tokens, columns, x.device)
    # While programs do not fill the GPU, every row of a token has a program of its own.
    share = 1 if tokens * chunks < launch_options.sm_count(x.device) else rows.shape[1]
    with launch_options.on(x):
        _gather_kernel[(tokens * chunks, rows.shape[1] // share)](
            source,
            rows,
            out,
            weights,
            row_weight,
            source.stride(0),
            columns,
            chunks,
            K=rows.shape[1],
            SHARE=share,
            BLOCK=block,
            WEIGHTED=weights is not None,
            num_warps=row_tiles.chunk_warps(block),
            **launch_options.options(x),
        )
