"""Kernels that move NVFP4 codes and scales to fragments and back; see ``dsv4.quant.fragments``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_TILES = 8  # tiles of a program, side by side: 256 bytes of codes of each of 16 rows


@triton.jit
def _linear_row(row_tile, row, rows, PAIRS: tl.constexpr):
    """Return where row ``row`` of a row of tiles is in linear matrices of ``rows`` rows, int64."""
    below = row_tile % (rows // 16) * 16 + row
    first = (row_tile // (rows // 16)).to(tl.int64) * rows
    if PAIRS:
        below = below % 2 * (rows // 2) + below // 2
    return first + below


@triton.jit
def _both_halves(byte):
    """The codes of a byte: one in the low half of a word, the other in the high half."""
    return (byte & 15) | ((byte & 0xF0) << 12)


@triton.jit
def _first(byte):
    """Both codes of a byte at the layout's first place."""
    both = _both_halves(byte)
    return ((both & 0x70007) << 6) | ((both & 0x80008) << 12)


@triton.jit
def _last(byte):
    """Return the code bits at their last place."""
    both = _both_halves(byte)
    return ((both & 0x30003) << 3) | ((both & 0xC000C) >> 2)


@triton.jit
def _taken(word, index):
    """Both codes that stand at a place (0 to 3), as a byte; ``word`` is uint32."""
    rotated = _rotated(word, index % 3 * 3)
    both = ((rotated >> 6) & 0x70007) | ((rotated >> 12) & 0x80008)
    last = ((word >> 3) & 0x30003) | ((word << 2) & 0xC000C)
    both = tl.where(index == 3, last, both)
    return (both & 15) | ((both >> 12) & 0xF0)


@triton.jit
def _unsigned(words, inside):
    """Words as uint32."""
    return tl.load(words, mask=inside, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _rotated(word, bits):
    """A uint32 rotated to the right by 0 to 31 bits."""
    return (word >> bits) | (word << ((32 - bits) % 32))


@triton.jit
def _biased(byte):
    """Byte of fragments for one of E4M3 (sign 0)."""
    small = tl.where(byte < 4, byte * 4 + 8, byte * 2 + 16)
    small = tl.where(byte == 1, 8, tl.where(byte == 0, 0xA0, small))
    return tl.where(byte < 8, small, tl.where(byte == 0x7F, 0x9C, byte + 24))


@triton.jit
def _unbiased(byte):
    """The inverse of ``_biased``; 0 for every other byte."""
    small = tl.where((byte >= 24) & (byte % 2 == 0), (byte - 16) // 2, 0)
    small = tl.where((byte == 16) | (byte == 20), (byte - 8) // 4, small)
    small = tl.where(byte == 8, 1, small)
    large = tl.where(byte == 0x9C, 0x7F, tl.where(byte < 0x97, byte - 24, 0))
    return tl.where(byte < 32, small, large)


@fast_launch
@triton.jit
def _pack_kernel(
    codes,
    scales,
    packed,
    moved,
    rows,
    tiles,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
):
    """TILES tiles of a row of them; ``packed`` as int32."""
    row_tile, first = tl.program_id(0), tl.program_id(1) * TILES
    index = tl.arange(0, TILES * 128)
    tile, lane, j = first + index // 128, index % 128 // 4, index % 4
    inside, width = tile < tiles, tiles * 32
    column = tile * 32 + j * 8 + lane % 4
    above = codes + _linear_row(row_tile, lane // 4, rows, PAIRS) * width + column
    below = codes + _linear_row(row_tile, lane // 4 + 8, rows, PAIRS) * width + column
    # By 2 k + h, as in the layout; 29 bits to the right are 3 to the left.
    word = _first(tl.load(above, mask=inside, other=0).to(tl.uint32))
    word |= _rotated(_first(tl.load(below, mask=inside, other=0).to(tl.uint32)), 29)
    word |= _rotated(_first(tl.load(above + 4, mask=inside, other=0).to(tl.uint32)), 26)
    word |= _last(tl.load(below + 4, mask=inside, other=0).to(tl.uint32))
    start = row_tile.to(tl.int64) * tiles
    tl.store(packed + (start + first) * 128 + index, word, mask=inside)

    index = tl.arange(0, TILES * 64)
    tile, row = first + index // 64, index % 64 // 8 + index % 2 * 8
    source = _linear_row(row_tile, row, rows, PAIRS) * (tiles * 4) + tile * 4 + index % 8 // 2
    byte = tl.load(scales + source, mask=tile < tiles, other=0).to(tl.int32)
    target = moved + (start + first) * 64 + index
    tl.store(target, _biased(byte).to(tl.uint8), mask=tile < tiles)


@fast_launch
@triton.jit
def _unpack_kernel(
    packed,
    moved,
    codes,
    scales,
    rows,
    tiles,
    PAIRS: tl.constexpr,
    TILES: tl.constexpr,
):
    """TILES tiles of a row of them; ``packed`` and ``codes`` as int32."""
    row_tile, first = tl.program_id(0), tl.program_id(1) * TILES
    row = tl.arange(0, 16)[:, None]
    linear = _linear_row(row_tile, row, rows, PAIRS)
    start = row_tile.to(tl.int64) * tiles
    eight = tl.arange(0, TILES * 8)[None, :]
    tile, j, k, low = first + eight // 8, eight % 8 // 2, eight % 2, row < 8
    part = 2 * k + tl.where(low, 0, 1)
    inside = (tile < tiles) & (row < 16)
    source = packed + (start + tile) * 128 + row % 8 * 16 + j
    word = _taken(_unsigned(source, inside), part)
    word |= _taken(_unsigned(source + 4, inside), part) << 8
    word |= _taken(_unsigned(source + 8, inside), part) << 16
    word |= _taken(_unsigned(source + 12, inside), part) << 24
    tl.store(codes + linear * (tiles * 8) + first * 8 + eight, word, mask=inside)

    four = tl.arange(0, TILES * 4)[None, :]
    tile = first + four // 4
    inside = (tile < tiles) & (row < 16)
    source = moved + (start + tile) * 64 + row % 8 * 8 + four % 4 * 2 + row // 8
    byte = _unbiased(tl.load(source, mask=inside, other=0).to(tl.int32)).to(tl.uint8)
    tl.store(scales + linear * (tiles * 4) + first * 4 + four, byte, mask=inside)


def pack(
    codes: torch.Tensor, scales: torch.Tensor, pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.quant.fragments.pack``; scales are uint8."""
    codes, scales = codes.contiguous(), scales.contiguous()
    packed, moved = torch.empty_like(codes), torch.empty_like(scales)
    if codes.numel():
        with launch_options.on(codes):
            _pack_kernel[_grid(codes)](
                codes,
                scales,
                packed.view(torch.int32),
                moved,
                codes.shape[-2],
                codes.shape[-1] // 32,
                PAIRS=pairs,
                TILES=_TILES,
                **launch_options.in_order(codes),
            )
    return packed, moved


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.quant.fragments.unpack``; scales are uint8."""
    codes, scales = codes.contiguous(), scales.contiguous()
    if codes.storage_offset() % 4 or codes.data_ptr() % 4:
        codes = codes.clone()  # words are read
    linear, moved = torch.empty_like(codes), torch.empty_like(scales)
    if codes.numel():
        with launch_options.on(codes):
            _unpack_kernel[_grid(codes)](
                codes.view(torch.int32),
                scales,
                linear.view(torch.int32),
                moved,
                codes.shape[-2],
                codes.shape[-1] // 32,
                PAIRS=pairs,
                TILES=_TILES,
                **launch_options.in_order(codes),
            )
    return linear, moved


def _grid(codes: torch.Tensor) -> tuple[int, int]:
    return codes.numel() // codes.shape[-1] // 16, -(-codes.shape[-1] // (32 * _TILES))
