"""Programs of grouped GEMMs: each finds its expert and rows from the offsets on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _of_expert(values, is_mine):
    return tl.sum(tl.where(is_mine, values, 0), 0)


@triton.jit
def tile_of_expert(offsets, position, tokens, experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Expert, first row and end of the expert's rows, of the tile ``position`` of TOKENS rows.

    Rows after the last expert's belong to one further expert, ``experts``. Positions after all
    tiles get a larger number. EXPERTS is a power of two above ``experts``.
    """
    number = tl.arange(0, EXPERTS)
    starts = tl.load(offsets + number, mask=number <= experts, other=0)
    ends = tl.load(offsets + number + 1, mask=number < experts, other=tokens)
    counts = tl.where(number <= experts, (ends - starts + (TOKENS - 1)) // TOKENS, 0)
    tiles_to = tl.cumsum(counts, 0)
    expert = tl.sum((tiles_to <= position).to(tl.int32), 0)
    is_mine = number == expert
    tile = position - _of_expert(tiles_to - counts, is_mine)
    return expert, _of_expert(starts, is_mine) + tile * TOKENS, _of_expert(ends, is_mine)


@triton.jit
def find_tile_of_expert(
    offsets, position, tokens, experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr
):
    """Results of ``tile_of_expert``, of which the last two are loaded, not summed over experts.

    Without a tile, they are 0.
    """
    number = tl.arange(0, EXPERTS)
    starts = tl.load(offsets + number, mask=number <= experts, other=0)
    ends = tl.load(offsets + number + 1, mask=number < experts, other=tokens)
    counts = tl.where(number <= experts, (ends - starts + (TOKENS - 1)) // TOKENS, 0)
    tiles_to = tl.cumsum(counts, 0)
    is_before = tiles_to <= position
    expert = tl.sum(is_before.to(tl.int32), 0)
    start, end = 0, 0
    if expert <= experts:
        before = tl.max(tl.where(is_before, tiles_to, 0), 0)
        start = tl.load(offsets + expert) + (position - before) * TOKENS
        end = tl.load(offsets + expert + 1, mask=expert < experts, other=tokens)
    return expert, start, end


@triton.jit
def store_zeros(out, token, inside, tile, rows, ROWS: tl.constexpr, SWIGLU: tl.constexpr):
    """Store zeros as the results of ROWS rows of the weight: those of rows of no expert.

    Args:
        out: The output.
        token: int64 ``[TOKENS]``, its rows.
        inside: Which of them exist.
        tile: Number of the tile of ROWS rows.
        rows: Rows of the weight.
        ROWS: Rows of a tile.
        SWIGLU: Whether two rows make one result.
    """
    TOKENS: tl.constexpr = token.shape[0]
    HIGH: tl.constexpr = ROWS // 2 if SWIGLU else ROWS
    high = rows // 2 if SWIGLU else rows
    row = tile * HIGH + tl.arange(0, HIGH)
    zeros = tl.zeros((TOKENS, HIGH), out.dtype.element_ty)
    stored = inside[:, None] & (row < high)[None, :]
    tl.store(out + (token * high)[:, None] + row[None, :], zeros, mask=stored)
