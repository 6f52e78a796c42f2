"""Epilogue steps that GEMM kernels share: SwiGLU of accumulators, and transposes.

Accumulators are fragments of 16 rows of the weight and 8 tokens: a lane holds row ``lane // 4`` of
tokens ``2 (lane % 4)`` and the next, then row ``lane // 4 + 8`` of the same tokens. Results are
stored by token, so the epilogue transposes them through shared memory: every token has a line there
that whole warps then read by 16 bytes a lane.

All lanes of a warp call these functions together. The caller orders them with the readers of the
lines, by ``sync_warp`` or a named barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from dsv4.cute.device import ptx


class Vector(NamedTuple):
    """The place of eight results of a token, which are 16 bytes of bfloat16.

    Attributes:
        token: Token of the result.
        row: First of the eight rows of the result.
        rows: Rows of the whole result.
    """

    token: Int32
    row: Int32
    rows: Int32


def swiglu_outputs(values: Sequence[Float32], limit: Float32, lane: Int32) -> list[Float32]:
    """The lane's SwiGLU outputs for its two tokens, of output row ``swiglu_output_row``.

    Rows are interleaved: gate in the even, up in the odd ones. So lanes with an even ``lane // 4``
    hold two gates of a token, their neighbours at ``lane ^ 4`` the two ups. Each sends one and
    keeps one, which makes one exchange for an output.

    Args:
        values: The four accumulators of a fragment.
        limit: The clamp's bound, or infinity.
        lane: Lane of the warp.
    """
    odd = lane // 4 % 2 == 1
    outputs = []
    for token in range(2):
        low, high = values[token], values[2 + token]
        received = cute.arch.shuffle_sync_bfly(ptx.select_float(odd, low, high), 4)
        gate, up = ptx.select_float(odd, received, low), ptx.select_float(odd, high, received)
        outputs.append(ptx.swiglu(gate, up, limit))
    return outputs


def swiglu_output_row(lane: Int32) -> Int32:
    """Return which of a fragment's 8 outputs a lane has."""
    return lane // 4 % 2 * 4 + lane // 8


@cute.jit
def transpose(
    values: Sequence[Float32], lines: Uint32, line_bytes: int, part: Int32, lane: Int32
) -> None:
    """Write a fragment's results, as bfloat16, to their part of the lines of 8 tokens.

    Args:
        values: Four accumulators, written by ``stmatrix``, or two outputs of ``swiglu_outputs``.
        lines: Shared-memory address of the first token's line.
        line_bytes: From a token's line to the next: an odd multiple of 16, so that eight lines lie
            in different banks.
        part: Which 16 rows of a line these are.
        lane: Lane of the warp.
    """
    if cutlass.const_expr(len(values) == 2):
        for i in cutlass.range_constexpr(2):
            at = lines + Uint32((lane % 4 * 2 + i) * line_bytes)
            row = Uint32(part * 16 + swiglu_output_row(lane) * 2)
            ptx.store_shared_bfloat16(at + row, values[i])
    else:
        at = lines + Uint32(lane % 8 * line_bytes + part * 32 + lane // 8 % 2 * 16)
        low = ptx.pack_bfloat16x2(values[0], values[1])
        ptx.stmatrix_x2_transposed(at, low, ptx.pack_bfloat16x2(values[2], values[3]))


@cute.jit
def transpose_outputs(
    tiles: Sequence[Sequence[Float32]], lines: Uint32, line_bytes: int, part: Int32, lane: Int32
) -> None:
    """Write SwiGLU outputs of several tiles of 8 tokens, 16 bytes of each token's line.

    ``stmatrix`` leaves a token's outputs in the order in which lanes hold them, which
    ``outputs_in_order`` undoes when they are read.

    Args:
        tiles: ``swiglu_outputs`` of each tile.
        lines: Shared-memory address of the first token's line.
        line_bytes: See ``transpose``.
        part: Which 8 outputs of a line these are.
        lane: Lane of the warp.
    """
    words = [ptx.pack_bfloat16x2(*pair) for pair in tiles]
    at = lines + Uint32(lane * line_bytes + part * 16)
    for first in cutlass.range_constexpr(0, len(words), 4):
        four = words[first : first + 4]
        here = at + Uint32(first * 8 * line_bytes)
        if cutlass.const_expr(len(four) == 4):
            ptx.stmatrix_x4_transposed(here, four)
        else:
            for i in cutlass.range_constexpr(0, len(four), 2):
                if cutlass.const_expr(i + 1 < len(four)):
                    two = four[i : i + 2]
                    ptx.stmatrix_x2_transposed(here + Uint32(i * 8 * line_bytes), *two)
                else:  # the last one twice, to the same place
                    alone = here + Uint32((i * 8 - lane // 8 * 8) * line_bytes)
                    ptx.stmatrix_x2_transposed(alone, four[i], four[i])


def outputs_in_order(words: Sequence[Uint32]) -> list[Uint32]:
    """Eight outputs of a token, which ``transpose_outputs`` left as 0, 4, 1, 5, 2, 6, 3, 7."""
    return [
        ptx.select_halves(words[i], words[i + 1], half) for half in range(2) for i in range(0, 4, 2)
    ]


@cute.jit
def transpose_quad(words: list[Uint32], lane: Int32) -> list[Uint32]:
    """Transpose 4 words of 4 neighbouring lanes: lane i gets word i of each.

    Two exchanges of two words each.
    """
    for bit in cutlass.range_constexpr(2):
        odd = (lane >> bit) & 1
        own, received = [], []
        for j in cutlass.range_constexpr(2):
            a = words[j if bit else 2 * j]
            b = words[j + 2 if bit else 2 * j + 1]
            own.append(ptx.select_word(odd, b, a))
            received.append(cute.arch.shuffle_sync_bfly(ptx.select_word(odd, a, b), 1 << bit))
        pairs = [
            (
                ptx.select_word(odd, received[j], own[j]),
                ptx.select_word(odd, own[j], received[j]),
            )
            for j in range(2)
        ]
        if cutlass.const_expr(bit == 0):
            words = [pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]]
        else:
            words = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
    return words
