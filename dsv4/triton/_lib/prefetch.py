"""Prefetch weights into L2 while the preceding kernel still runs (PDL)."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.numerics import INTERPRETED

_LINE = tl.constexpr(128)


@triton.jit
def prefetch_row(row, columns, BLOCK: tl.constexpr):
    """Prefetch ``columns`` of a row, of at most BLOCK; nothing where it is interpreted.

    For weights that are used late: the compiler moves their load behind the sum before it, where
    it would be a second trip to memory. As ``prefetch_tile``, before ``wait_for_inputs``.
    """
    if not INTERPRETED:
        BYTES: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
        LINES: tl.constexpr = triton.next_power_of_2((BLOCK * BYTES + 127) // 128)
        column = tl.minimum(tl.arange(0, LINES) * (_LINE // BYTES), columns - 1)
        prefetch_lines(row + column)


@triton.jit
def prefetch_lines(address):
    """Prefetch the line of 128 bytes of each address; compiled code only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_tile(matrix, stride, row, start, COLUMNS: tl.constexpr):
    """Prefetch columns ``start`` to ``start + COLUMNS`` of rows ``row [N]``; compiled code only.

    Nothing is read into the kernel, so this is allowed before ``wait_for_inputs``. Addresses must
    be inside the matrix: the caller clamps ``row`` and ``start``.
    """
    BYTES: tl.constexpr = matrix.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2((COLUMNS * BYTES + 127) // 128)
    column = tl.minimum(tl.arange(0, LINES) * (_LINE // BYTES), COLUMNS - 1)
    prefetch_lines(matrix + row[:, None].to(tl.int64) * stride + (start + column)[None, :])
