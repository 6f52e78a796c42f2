"""SwiGLU of products in the registers of a matrix instruction's result.

Of a tile of 16 interleaved rows, gate in the even and up in the odd ones, lanes with an even
``lane // 4`` hold two gates of a token, their neighbours at ``lane ^ 4`` two ups. Each gives one
away and keeps one, so that every lane has one pair: one exchange for an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute

from dsv4.cute import _ptx as ptx

Value = Any


def activated(values: Sequence[Value], limit: Value, lane: Value) -> list[Value]:
    """The lane's outputs for its two tokens, of the output row that ``output_row`` names.

    Args:
        values: Row ``lane // 4`` of both tokens, then row ``lane // 4 + 8``.
        limit: The clamp's bound, or infinity.
        lane: Of the warp.
    """
    odd = lane // 4 % 2 == 1
    outputs = []
    for token in range(2):
        low, high = values[token], values[2 + token]
        received = cute.arch.shuffle_sync_bfly(ptx.choose(odd, low, high), 4)
        gate, up = ptx.choose(odd, received, low), ptx.choose(odd, high, received)
        outputs.append(ptx.swiglu(gate, up, limit))
    return outputs


def output_row(lane: Value) -> Value:
    """Which of a tile's 8 outputs a lane has."""
    return lane // 4 % 2 * 4 + lane // 8
