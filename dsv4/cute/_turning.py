"""Results of fragments of 16 rows and 8 tokens, turned in shared memory into lines of a token."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from dsv4.cute import _ptx as ptx
from dsv4.cute.sm90._activate import output_row

Value = Any


@cute.jit
def turn(values: Value, room: Value, line: int, part: Value, lane: Value) -> None:
    """A warp's results of 8 tokens, bfloat16, into its part of their lines.

    Args:
        values: What a lane has: of a product, row ``lane // 4`` of tokens ``2 (lane % 4)`` and the
            next and row ``lane // 4 + 8`` of the same; of SwiGLU, what ``activated`` gives.
        room: Where the first token's line begins.
        line: Bytes from one token's line to the next, an odd multiple of 16.
        part: Which 16 rows of a line these are.
        lane: Of the warp.
    """
    if cutlass.const_expr(len(values) == 2):
        for i in cutlass.range_constexpr(2):
            at = room + Uint32((lane % 4 * 2 + i) * line)
            ptx.store_shared_bfloat16(at + Uint32(part * 16 + output_row(lane) * 2), values[i])
    else:
        at = room + Uint32(lane % 8 * line + part * 32 + lane // 8 % 2 * 16)
        low = ptx.bfloat16_pair(values[0], values[1])
        ptx.store_matrices2_turned(at, low, ptx.bfloat16_pair(values[2], values[3]))
