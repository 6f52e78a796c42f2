"""Scales of rows that are sorted by expert: where a row's are, and zeros behind every expert's.

PADDED: the layout ``swizzled_128x4_experts``, in which each expert's rows end in a tile of 128
that is its own. ``offsets`` are the first sorted rows of the experts, and the end of the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.nvfp4_tile import store_halves, store_scales, sum_of_all


@triton.jit
def expert_of(offsets, row, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """The expert that owns a sorted row: the number of those that end before it or at it."""
    expert = tl.arange(0, BLOCK)
    end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0x7FFFFFFF)
    return tl.sum((end <= row).to(tl.int32), 0)


@triton.jit
def scale_row_of(offsets, row, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """The row of a sorted row's scales: PADDED, behind the rows that pad every expert's to 128."""
    scale_row = row
    if PADDED:
        expert = tl.arange(0, BLOCK)
        start = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
        end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0x7FFFFFFF)
        scale_row += tl.sum(tl.where(end <= row, (start - end) & 127, 0), 0)
    return scale_row


@triton.jit
def _clear_part(
    scales,
    offsets,
    number,
    WORDS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Zeros behind an expert's rows in a part, of CLEARED words, of a tile of 128 rows' scales.

    WORDS are in such a tile.
    """
    parts: tl.constexpr = (WORDS + CLEARED - 1) // CLEARED
    tile = number // parts
    expert = tl.arange(0, BLOCK)
    start = tl.load(offsets + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(offsets + 1 + expert, mask=expert < EXPERTS, other=0)
    tiles = (end - start + 127) // 128
    before = tl.cumsum(tiles, 0) - tiles
    # Rows that the tile's owner has from this tile on; 0 of a tile that no expert has.
    own = (before <= tile) & (tile < before + tiles) & (expert < EXPERTS)
    rows = sum_of_all(tl.where(own, end - start - (tile - before) * 128, 0).to(tl.int32))
    word = number % parts * CLEARED + tl.arange(0, CLEARED)
    row = word % 128 // 4 + word % 4 * 32
    address = scales.to(tl.pointer_type(tl.uint32)) + tile * WORDS + word
    empty = tl.zeros([CLEARED], tl.uint32)
    tl.store(address, empty, mask=(word < WORDS) & (row >= rows))


@triton.jit
def clear_row(
    codes,
    scales,
    row,
    count,
    padded,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Zeros in a row; from row ``count`` on there are scale bytes alone."""
    line = row + tl.zeros([BLOCKS], tl.int64)
    nothing = tl.zeros([BLOCKS], tl.uint8)
    empty = tl.zeros([BLOCKS, 4], tl.uint8)
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        real = (block < COLUMNS // 16) & (line < count)
        store_halves(codes, line, COLUMNS // 16, block, empty, empty, real)
        store_scales(scales, nothing, line, block, real, padded, SCALE_COLUMNS, SWIZZLED)


@triton.jit
def clear_padding(
    codes,
    scales,
    offsets,
    number,
    count,
    padded,
    COLUMNS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """Zeros in the padding rows of the scales, by program ``number`` past those of slots."""
    if PADDED:
        _clear_part(scales, offsets, number, 32 * SCALE_COLUMNS, EXPERTS, EXPERT_BLOCK, CLEARED)
    else:
        row, end = count + number, padded
        clear_row(codes, scales, row, count, end, COLUMNS, SCALE_COLUMNS, SWIZZLED, BLOCKS, CHUNKS)
