"""Dequantise tiles of NVFP4 and MXFP4 weights into operands of bfloat16 tensor cores.

A tile is ``[PARTS, 16 TILES, 64]``: TILES row tiles of 16 rows, PARTS neighbours along the columns.
From fragments (``dsv4.quant.fragments``) each lane loads its own operands, so that nothing moves
between threads. The loaded tensor has a dimension for each bit of a lane's words, with the lanes
outermost; the reshape at the end only renames registers. Two facts of Triton's compiler shape the
code. First, ``tl.join`` before a ``tl.dot`` makes it permute the columns (``computeOrigBitWidth``),
and the operand would pass through shared memory. The code therefore broadcasts words, and each
register picks its bits by constants. Second, lanes follow the last axis only if loads are
contiguous along it. Each lane that needs a scale word therefore loads it once.

One instruction, ``fma.rn.bf16x2``, multiplies two weights by their scale. Compute capability 8.0
has it (``mul`` came with 9.0); adding -0 changes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.numerics import INTERPRETED, dot, finished, narrow
from dsv4.triton._lib.prefetch import prefetch_lines

# Layout of a weight in memory: NVFP4 in fragments, NVFP4 with swizzled scales, MXFP4 row by row.
FRAGMENTS, SWIZZLED, MXFP4 = range(3)
_FRAGMENTS, _MXFP4 = tl.constexpr(FRAGMENTS), tl.constexpr(MXFP4)

_CODES = tl.constexpr(
    0x81C081C0
)  # where a bfloat16 has sign, two exponent bits and one of mantissa
_LAST = tl.constexpr(0x001B001B)  # code of (h, k) = (1, 1); a multiplication moves it there
_MINUS_ZEROS = tl.constexpr(-2147450880)  # 0x80008000
_FIRST_STEP = tl.constexpr(0x7E807E80)  # 2^126 twice: of a code's bits it makes the code


@triton.jit
def _times(code, scale):
    """Word of two bfloat16 products: of the halves of both words."""
    if INTERPRETED:
        low = (code << 16).to(tl.float32, bitcast=True) * (scale << 16).to(tl.float32, bitcast=True)
        high = (code & 0xFFFF0000).to(tl.float32, bitcast=True)
        high *= (scale & 0xFFFF0000).to(tl.float32, bitcast=True)
        low = narrow(low, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = narrow(high, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        return low | (high << 16)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        product = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [code.to(tl.int32, bitcast=True), scale.to(tl.int32, bitcast=True), _MINUS_ZEROS],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return product.to(tl.uint32, bitcast=True)


@triton.jit
def _half(words, e):
    """bfloat16 half ``e`` of words that are the same for both; no instruction once compiled."""
    return (words >> (16 * e)).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _axis(SIZE: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """``arange(SIZE)`` with BEFORE and AFTER axes of length 1 around it."""
    return tl.reshape(tl.arange(0, SIZE), (1,) * BEFORE + (SIZE,) + (1,) * AFTER)


@triton.jit
def _fragment_words(codes, scales, tile):
    """Words of codes and of scales of tiles ``tile [PARTS, TILES, BLOCKS, 1]`` from ``codes`` on.

    ``codes`` and ``scales`` are pointers to int32.
    """
    index = tl.arange(0, 128)[None, None, None, :]
    word = tl.load(codes + tile * 128 + index)
    # A row has 8 bytes of scales; all four lanes of the row load them.
    index = tl.arange(0, 64)[None, None, None, :]
    return word, tl.load(scales + tile * 16 + index // 8 * 2 + index % 2)


@triton.jit
def _fragments(word, both, PARTS: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr):
    """``code * scale * 2^-7`` of the words of codes and of scales of ``_fragment_words``."""
    word, both = word.to(tl.uint32, bitcast=True), both.to(tl.uint32, bitcast=True)
    # Axes: part, tile, blocks, lane, the two bits of j, h, k, e.
    word = tl.broadcast_to(
        tl.reshape(word, (PARTS, TILES, BLOCKS, 32, 2, 2, 1, 1, 1)),
        (PARTS, TILES, BLOCKS, 32, 2, 2, 2, 2, 2),
    )
    both = tl.reshape(both, (PARTS, TILES, BLOCKS, 32, 2, 1, 1, 1, 1))
    second, h, k, e = _axis(2, 5, 3), _axis(2, 6, 2), _axis(2, 7, 1), _axis(2, 8, 0)
    byte = (both >> (16 * second + 8 * h)) & 255
    scale = tl.broadcast_to(
        byte * 0x00100010 + 0x76007600, (PARTS, TILES, BLOCKS, 32, 2, 2, 2, 2, 2)
    )
    bits = 6 * k + 3 * h
    rotated = (word >> bits) | (word << ((32 - bits) & 31))
    code = tl.where(h + k == 2, (word & _LAST) * 0x4108, rotated) & _CODES
    values = _half(_times(code, scale), e)
    # Axes: part, tile, blocks, row, quad, j, h, k, e.
    values = tl.reshape(values, (PARTS, TILES, BLOCKS, 8, 4, 4, 2, 2, 2))
    values = tl.permute(values, (0, 1, 6, 3, 2, 5, 7, 4, 8))
    return tl.reshape(values, (PARTS, 16 * TILES, 64 * BLOCKS))


@triton.jit
def _e8m0_word(byte):
    """E8M0 as a bfloat16, twice: 0 is the subnormal 2^-127, and 255 is NaN."""
    bits = tl.where(byte == 0, 0x40, byte << 7)
    return tl.where(byte == 255, 0x7FC0, bits) * 0x00010001


@triton.jit
def _e4m3_word(byte):
    """E4M3 times 2^119 as a bfloat16, twice, by integers: compute capability 8.0 has no E4M3."""
    magnitude = byte & 127
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 2.0**120 * 2.0**119
    high = value.to(tl.uint32, bitcast=True) >> 16
    high = tl.where(magnitude == 127, 0x7FC0, high) | ((byte & 128) << 8)
    return high * 0x00010001


@triton.jit
def _linear(
    codes,
    scales,
    row,
    k_tile,
    k_tiles,
    LAYOUT: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Values of MXFP4, or of NVFP4 times 2^-7: rows ``row``, and 64 columns of each ``k_tile``.

    ``codes`` is a pointer to int32; ``scales`` to int32, of MXFP4 to int16: those of 64 columns.
    """
    row, k_tile = row[None, :, None], k_tile[:, None, None]
    index = tl.arange(0, 8)[None, None, :]
    word = tl.load(codes + (row * k_tiles + k_tile) * 8 + index).to(tl.uint32, bitcast=True)
    if LAYOUT == _MXFP4:
        of_row = tl.load(scales + row * k_tiles + k_tile).to(tl.uint16, bitcast=True).to(tl.uint32)
        scale = _e8m0_word((of_row >> (index // 4 * 8)) & 255)
    else:
        own = (row // 128 * k_tiles + k_tile) * 128 + row % 32 * 4 + row // 32 % 4
        of_row = tl.load(scales + own).to(tl.uint32, bitcast=True)
        scale = _e4m3_word((of_row >> (index // 2 * 8)) & 255)
    # Axes: part, row, word, byte, e.
    scale = tl.broadcast_to(tl.reshape(scale, (PARTS, ROWS, 8, 1, 1)), (PARTS, ROWS, 8, 4, 2))
    word = tl.broadcast_to(tl.reshape(word, (PARTS, ROWS, 8, 1, 1)), (PARTS, ROWS, 8, 4, 2))
    byte, e = _axis(4, 3, 1), _axis(2, 4, 0)
    two = (word >> (8 * byte)) & 255
    code = ((two & 8) << 12) | ((two & 7) << 6) | ((two & 0x80) << 24) | ((two & 0x70) << 18)
    if LAYOUT == _MXFP4:
        code = _times(code, tl.full(code.shape, _FIRST_STEP, tl.uint32))
    values = _half(_times(code, scale), e)
    return tl.reshape(values, (PARTS, ROWS, 64))


@triton.jit
def _multiplied(weight, values, total, PARTS: tl.constexpr):
    """``total`` plus the product of a tile ``weight [PARTS, R, C]`` and ``values``."""
    if PARTS == 1:
        weight = tl.reshape(weight, (weight.shape[1], weight.shape[2]))
        return finished(dot(weight, values, total))
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return dot(weight, values, total)


@triton.jit
def _loaded(codes, scales, first, k, BLOCKS: tl.constexpr):
    """Words of codes of BLOCKS blocks of 64 columns from ``k`` on, then those of scales."""
    words, both = (), ()
    for block in tl.static_range(BLOCKS):
        word, scale = _fragment_words(codes, scales, first + (k + block))
        words += (word,)  # type: ignore[assignment]
        both += (scale,)  # type: ignore[assignment]
    return words + both


@triton.jit
def _stacked(words, FIRST: tl.constexpr, BLOCKS: tl.constexpr):
    """``words[FIRST]`` and those after it along the axis of blocks; compiled, no instruction."""
    result = words[FIRST]
    shape: tl.constexpr = (result.shape[0], result.shape[1], BLOCKS, result.shape[3])
    number = _axis(BLOCKS, 2, 1)
    result = tl.broadcast_to(result, shape)
    for block in tl.static_range(1, BLOCKS):
        result = tl.where(number == block, tl.broadcast_to(words[FIRST + block], shape), result)
    return result


@triton.jit
def _sum_from_registers(
    codes,
    scales,
    addresses,
    tiles,
    part,
    k_tiles,
    begin,
    end,
    total,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """``total`` plus the sums of ``packed_sum``; registers hold what the next iteration multiplies.

    A load then is one instruction, where one through shared memory is two and their addresses.
    """
    STEP: tl.constexpr = PARTS * BLOCKS
    # One load for each block of columns: Triton 3.9 would share an axis of blocks out
    # between warps, and the words would move through shared memory.
    first = (tiles[None, :] * k_tiles + part[:, None])[:, :, None, None]
    words = _loaded(codes, scales, first, begin, BLOCKS)
    values = tl.load(addresses + begin * 64)
    # Unrolled, so that no register is copied to another.
    for k in tl.range(begin + STEP, end, STEP, num_stages=1, loop_unroll_factor=2):
        next_words = _loaded(codes, scales, first, k, BLOCKS)
        next_values = tl.load(addresses + k * 64)
        word, both = _stacked(words, 0, BLOCKS), _stacked(words, BLOCKS, BLOCKS)
        weight = _fragments(word, both, PARTS, TILES, BLOCKS)
        total = _multiplied(weight, values, total, PARTS)
        words, values = next_words, next_values
    word, both = _stacked(words, 0, BLOCKS), _stacked(words, BLOCKS, BLOCKS)
    weight = _fragments(word, both, PARTS, TILES, BLOCKS)
    return _multiplied(weight, values, total, PARTS)


@triton.jit
def sums_of_groups(
    codes,
    scales,
    x,
    token_offsets,
    tile,
    row_tiles,
    k_tiles,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums of ``packed_sum`` of several groups of tokens; a weight is dequantized once for all.

    The weight is in fragments. ``token_offsets`` has the offsets of each group; the other arguments
    are those of ``packed_sum``.
    """
    GROUPS: tl.constexpr = len(token_offsets)
    totals = ()
    for i in tl.static_range(GROUPS):
        totals += (tl.zeros((16 * TILES, token_offsets[i].shape[0]), tl.float32),)  # type: ignore[assignment]
    tiles = tl.minimum(tile + tl.arange(0, TILES), row_tiles - 1)
    first = (tiles * k_tiles)[None, :, None, None]
    column = tl.arange(0, 64)[:, None]
    for k in tl.range(0, k_tiles, num_stages=STAGES):
        word, both = _fragment_words(codes + k * 128, scales + k * 16, first)
        weight = tl.reshape(_fragments(word, both, 1, TILES, 1), (16 * TILES, 64))
        sums = ()
        for i in tl.static_range(GROUPS):
            values = tl.load(x + token_offsets[i][None, :] + column + k * 64)
            sums += (finished(dot(weight, values, totals[i])),)  # type: ignore[assignment]
        totals = sums
    results = ()
    for i in tl.static_range(GROUPS):
        results += (totals[i] * 128.0,)  # type: ignore[assignment]
    return results


@triton.jit
def prefetch_fragments(
    codes,
    scales,
    tile,
    row_tiles,
    k_tiles,
    begin,
    end,
    TILES: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    """Prefetch the first PREFETCHED blocks of 64 columns that ``packed_sum`` multiplies.

    Arguments are those of ``packed_sum``. Nothing is read, so this is allowed before
    ``wait_for_inputs``: memory then delivers weights while the preceding kernel ends.
    """
    tiles = tl.minimum(tile + tl.arange(0, TILES), row_tiles - 1)[:, None] * k_tiles
    # A block has four lines of 128 bytes of codes, and half a line of scales.
    line = tl.minimum(begin * 4 + tl.arange(0, 4 * PREFETCHED), end * 4 - 1)[None, :]
    prefetch_lines(codes + tiles * 128 + line * 32)
    block = tl.minimum(begin + tl.arange(0, PREFETCHED), end - 1)[None, :]
    prefetch_lines(scales + (tiles + block) * 16)


@triton.jit
def packed_sum(
    codes,
    scales,
    x,
    token_offset,
    tile,
    row_tiles,
    k_tiles,
    begin,
    end,
    LAYOUT: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """float32 sums ``[16 TILES, TOKENS]`` of row tiles from ``tile`` on, and tokens.

    The loop takes blocks of 64 columns from ``begin`` to ``end``, whose distance is a multiple of
    PARTS BLOCKS. With PARTS above 1, each of PARTS warps sums its own columns, and the sums are
    added at the end. This is for small M: one row tile does not fill several warps, and the number
    of bytes in flight decides. BLOCKS blocks are multiplied in one iteration, so that its
    instructions for addresses and barriers count once; fragments alone have BLOCKS above 1.

    With one stage, registers hold the next iteration's fragments and values of x: a load takes one
    instruction, where a load through shared memory takes two and their addresses.

    Args:
        codes: Pointer to int32, the first code of the matrix.
        scales: Pointer to int32 (MXFP4: int16), its first scale.
        x: Pointer to bfloat16.
        token_offset: int64 ``[TOKENS]``, offset of each token's row of ``x``.
        tile: First row tile, 0 or more.
        row_tiles: Row tiles of the matrix; tiles past the end read the last one.
        k_tiles: Blocks of 64 columns of the matrix.
        begin: First block.
        end: Block after the last.
    """
    STEP: tl.constexpr = PARTS * BLOCKS
    column = tl.arange(0, 64 * BLOCKS)
    if PARTS > 1:
        part = tl.arange(0, PARTS) * BLOCKS
        addresses = (
            x + token_offset[None, None, :] + (part[:, None] * 64 + column[None, :])[:, :, None]
        )
        total = tl.zeros((PARTS, 16 * TILES, TOKENS), tl.float32)
    else:
        part = tl.zeros((1,), tl.int32)
        addresses = x + token_offset[None, :] + column[:, None]
        total = tl.zeros((16 * TILES, TOKENS), tl.float32)
    tiles = tl.minimum(tile + tl.arange(0, TILES), row_tiles - 1)
    rows = tl.minimum(tile * 16 + tl.arange(0, 16 * TILES), row_tiles * 16 - 1)
    if LAYOUT == _FRAGMENTS and STAGES == 1:
        total = _sum_from_registers(
            codes, scales, addresses, tiles, part, k_tiles, begin, end, total, TILES, PARTS, BLOCKS
        )
    else:
        blocks = tl.arange(0, BLOCKS)[None, None, :]
        first = (tiles[None, :, None] * k_tiles + part[:, None, None] + blocks)[:, :, :, None]
        for k in tl.range(begin, end, STEP, num_stages=STAGES):
            if LAYOUT == _FRAGMENTS:
                word, both = _fragment_words(codes + k * 128, scales + k * 16, first)
                weight = _fragments(word, both, PARTS, TILES, BLOCKS)
            else:
                weight = _linear(codes, scales, rows, part + k, k_tiles, LAYOUT, PARTS, 16 * TILES)
            values = tl.load(addresses + k * 64)
            total = _multiplied(weight, values, total, PARTS)
    if PARTS > 1:
        total = tl.sum(total, 0)
    if LAYOUT != _MXFP4:
        total *= 128.0
    return total
