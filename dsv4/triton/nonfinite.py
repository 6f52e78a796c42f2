"""Kernel of ``dsv4.ops.nonfinite``: a program per row, which reads it in pieces.

Programs of finite rows store nothing. The others lower the mark atomically, so that the smallest
row remains whichever program comes first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.nonfinite import MarkNonfiniteArgs
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import wait_for_inputs, widen
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_WIDEST = 4096  # columns that a program reads at once
_EXPONENT = tl.constexpr(0x7F800000)  # of float32: all ones in a NaN or an infinity, in no number


@fast_launch
@triton.jit(do_not_specialize=["first_row"])
def _mark_kernel(
    mark,
    x,
    padding,
    stride,
    columns,
    first_row,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    counts = True
    if padding is not None:
        counts = tl.load(padding + row) == 0
    if counts:
        bad = tl.zeros([BLOCK], tl.int32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(x + row * stride + column, mask=column < columns, other=0.0)
            bits = widen(value).to(tl.int32, bitcast=True)
            bad |= ((bits & _EXPONENT) == _EXPONENT).to(tl.int32)
        if tl.max(bad, 0) > 0:
            tl.atomic_min(mark, (row + first_row).to(tl.int32))


def mark_nonfinite_(args: MarkNonfiniteArgs) -> None:
    """See ``dsv4.ops.nonfinite.mark_nonfinite_``."""
    if args.x.numel() == 0:
        return
    rows = row_tiles.as_rows(args.x.flatten(1) if args.x.ndim > 1 else args.x.unsqueeze(1))
    block = min(_WIDEST, launch_options.power_of_two(rows.shape[1]))
    padding = None if args.padding is None else args.padding.contiguous().view(torch.uint8)
    with launch_options.on(rows):
        _mark_kernel[(rows.shape[0],)](
            args.mark,
            rows,
            padding,
            rows.stride(0),
            rows.shape[1],
            args.first_row,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            **launch_options.options(rows),
        )
