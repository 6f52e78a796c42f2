"""Epilogue steps of GEMMs: SwiGLU of accumulators, and their transpose through shared memory.

Accumulators are fragments of 16 rows and 8 tokens; the transpose makes lines of a token of them.

SwiGLU: of a tile of 16 interleaved rows, gate in the even and up in the odd ones, lanes with an
even ``lane // 4`` hold two gates of a token, their neighbours at ``lane ^ 4`` two ups. Each gives
one away and keeps one, so that every lane has one pair: one exchange for an output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from dsv4.cute.device import ptx

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
        received = cute.arch.shuffle_sync_bfly(ptx.select_float(odd, low, high), 4)
        gate, up = ptx.select_float(odd, received, low), ptx.select_float(odd, high, received)
        outputs.append(ptx.swiglu(gate, up, limit))
    return outputs


def output_row(lane: Value) -> Value:
    """Which of a tile's 8 outputs a lane has."""
    return lane // 4 % 2 * 4 + lane // 8


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
        low = ptx.pack_bfloat16x2(values[0], values[1])
        ptx.stmatrix_x2_transposed(at, low, ptx.pack_bfloat16x2(values[2], values[3]))


@cute.jit
def turn_outputs(tiles: Value, room: Value, line: int, part: Value, lane: Value) -> None:
    """A warp's outputs of SwiGLU of tiles of 8 tokens, into its 16 bytes of each token's line.

    There they lie as lanes have them, which ``outputs_in_order`` reads.

    Args:
        tiles: What ``activated`` gives, of each tile.
        room: Where the first token's line begins.
        line: Bytes from one token's line to the next, an odd multiple of 16.
        part: Which 8 outputs of a line these are.
        lane: Of the warp.
    """
    words = [ptx.pack_bfloat16x2(*pair) for pair in tiles]
    at = room + Uint32(lane * line + part * 16)
    for first in cutlass.range_constexpr(0, len(words), 4):
        some = words[first : first + 4]
        here = at + Uint32(first * 8 * line)
        if cutlass.const_expr(len(some) == 4):
            ptx.stmatrix_x4_transposed(here, some)
        else:
            for i in cutlass.range_constexpr(0, len(some), 2):
                if cutlass.const_expr(i + 1 < len(some)):
                    ptx.stmatrix_x2_transposed(here + Uint32(i * 8 * line), *some[i : i + 2])
                else:  # the last one twice, to the same place
                    alone = here + Uint32((i * 8 - lane // 8 * 8) * line)
                    ptx.stmatrix_x2_transposed(alone, some[i], some[i])


def outputs_in_order(words: Sequence[Value]) -> list[Value]:
    """Eight outputs of a token, which ``turn_outputs`` left as 0, 4, 1, 5, 2, 6, 3, 7."""
    return [
        ptx.select_halves(words[i], words[i + 1], half) for half in range(2) for i in range(0, 4, 2)
    ]


@cute.jit
def turn_quad(words: Value, lane: Value) -> Value:
    """Lane i of four gets word i of each: two exchanges of two words."""
    for bit in cutlass.range_constexpr(2):
        odd = (lane >> bit) & 1
        kept, given = [], []
        for j in cutlass.range_constexpr(2):
            a = words[j if bit else 2 * j]
            b = words[j + 2 if bit else 2 * j + 1]
            kept.append(ptx.select_word(odd, b, a))
            given.append(cute.arch.shuffle_sync_bfly(ptx.select_word(odd, a, b), 1 << bit))
        pairs = [
            (ptx.select_word(odd, given[j], kept[j]), ptx.select_word(odd, kept[j], given[j]))
            for j in range(2)
        ]
        if cutlass.const_expr(bit == 0):
            words = [pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]]
        else:
            words = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
    return words
