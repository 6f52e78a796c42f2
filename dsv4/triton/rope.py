"""Kernels of ``dsv4.ops.rope``: a few rows per program; copied and rotated columns apart."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton import _launch, _rotation, _rows
from dsv4.triton._numerics import narrow, wait_for_inputs, widen
from dsv4.triton._rotation import load_angles, rotate


@triton.jit(do_not_specialize=["count"])
def _rope_kernel(
    x,
    stride,
    cos,
    sin,
    table_stride,
    sharing,
    out,
    count,
    kept,
    half,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = row < count
    source = x + row.to(tl.int64) * stride
    target = out + row.to(tl.int64) * (kept + 2 * half)
    column, pair = tl.arange(0, 2 * HALF)[None, :], tl.arange(0, HALF)[None, :]
    turning = inside & (column < 2 * half)
    angles = inside & (pair < half)
    start = (row // sharing).to(tl.int64) * table_stride
    values = tl.load(source + kept + column, mask=turning, other=0.0)
    c, s = load_angles(cos, sin, start, pair, angles, INVERSE)
    if KEPT > 0:
        left = tl.arange(0, KEPT)[None, :]
        copied = inside & (left < kept)
        same = tl.load(source + left, mask=copied)
        tl.store(target + left, same, mask=copied)
    turned = narrow(rotate(widen(values), c, s), out.dtype.element_ty)
    tl.store(target + kept + column, turned, mask=turning)


def _tile(rows: int) -> dict[str, int]:
    """Rows per program: one while there are few, so that as many programs as rows run."""
    return {"ROWS": 1, "num_warps": 2} if rows < 4096 else {"ROWS": 16, "num_warps": 4}


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    """See ``dsv4.ops.rope.rope``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = _rows.as_rows(x)
    count, half = rows.shape[0], cos.shape[-1]
    kept = rows.shape[1] - 2 * half
    cos, sin, sharing = _rotation.tables(x, cos, sin)
    tile = _tile(count)
    with _launch.on(x):
        _rope_kernel[(triton.cdiv(count, tile["ROWS"]),)](
            rows,
            rows.stride(0),
            cos,
            sin,
            cos.stride(0),
            sharing,
            out,
            count,
            kept,
            half,
            INVERSE=inverse,
            KEPT=_launch.power_of_two(kept) if kept else 0,
            HALF=_launch.power_of_two(half),
            **tile,
            **_launch.options(x),
        )
    return out
