"""Row-wise kernels: how a tensor becomes rows, and how many threads take one."""

from __future__ import annotations

import torch
import triton.language as tl

from dsv4.triton import _launch

_WARP = 32
_VECTOR_BYTES = 16

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` as ``[R, D]`` with unit stride along D: a view where one exists, else a copy."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def warps(columns: int, itemsize: int = 2) -> int:
    """Warps for one row: each thread loads one vector of 16 bytes, up to 16 warps."""
    vectors = columns * itemsize // _VECTOR_BYTES
    return min(16, max(1, _launch.power_of_two(vectors // _WARP)))
