"""Row-wise kernels: how a tensor becomes rows, and how many threads take one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton._runtime import launch_options

_WARP = 32
_VECTOR_BYTES = 16
_PROGRAM_BYTES = 8192
_MANY_ROWS = 1024

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``[..., D]`` as ``[R, D]`` with unit stride along D: a view where one exists, else a copy."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def tile(rows: int, columns: int, itemsize: int = 2) -> dict[str, int]:
    """Rows of one program, and its warps, for kernels that add up each row in registers.

    Few rows: one to a program, a vector of 16 bytes to a thread. Many: up to 8 KiB to a program, 4
    of rows of 1 KiB or less, because a GPU starts no more than some 0.8 programs per nanosecond.
    """
    width = launch_options.power_of_two(columns * itemsize)
    if rows < _MANY_ROWS:
        # A row of 1 KiB or less is left to one warp, whose sum needs no barrier.
        warps = 1 if width <= 1024 else min(16, width // (_WARP * _VECTOR_BYTES))
        return {"ROWS": 1, "num_warps": warps}
    most = _PROGRAM_BYTES if width > 1024 else _PROGRAM_BYTES // 2
    shared = min(max(1, most // width), launch_options.power_of_two(2 * rows // _MANY_ROWS))
    warps = max(4, min(8, width // 1024), width // 4096)
    return {"ROWS": shared, "num_warps": min(32, warps)}


def column_chunks(tokens: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Columns per program, and programs per token: small ones while there are few tokens."""
    block = 1024 if tokens * columns >= 1024 * 4 * launch_options.sm_count(device) else 256
    block = min(block, launch_options.power_of_two(columns))
    return block, max(1, triton.cdiv(columns, block))


def chunk_warps(block: int) -> int:
    """A thread takes 8 columns."""
    return max(1, block // 256)


@triton.jit
def target_rows(rows, COUNT: tl.constexpr):
    """Load COUNT row numbers as a tuple of int64.

    A kernel calls it before its first store, because the compiler moves no load across a store.
    """
    targets = ()
    for j in tl.static_range(COUNT):
        targets += (tl.load(rows + j).to(tl.int64),)  # type: ignore[assignment]
    return targets
