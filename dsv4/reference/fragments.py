"""Move NVFP4 codes and scales to fragments and back (layout: ``dsv4.quant.fragments``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4.quant.fragments import BIT_POSITIONS, ROWS, scale_bytes

_CHUNK = 1 << 22


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """``[*batch, 2 I, columns]``, gate rows first, to interleaved gate and up rows."""
    return rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


def deinterleaved(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of ``interleaved``."""
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)


def pack(
    codes: torch.Tensor, scales: torch.Tensor, pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.quant.fragments.pack``; scales are uint8."""
    if pairs:
        codes, scales = interleaved(codes), interleaved(scales)
    encode = scale_bytes().to(codes.device)
    packed, moved = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (codes, scales))
    for source, target, scale_source, scale_target in _chunks(codes, packed, scales, moved):
        target.copy_(_pack_codes(source))
        scale_target.copy_(_move_scales(encode[scale_source.int()], inverse=False))
    return packed, moved


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.quant.fragments.unpack``; scales are uint8. A byte that no scale has becomes 0."""
    if codes.storage_offset() % 4:
        codes = codes.clone()  # words are read
    decode = torch.zeros(256, dtype=torch.uint8, device="cpu")
    decode[scale_bytes().long()] = torch.arange(128, dtype=torch.uint8, device="cpu")
    decode = decode.to(codes.device)
    linear, moved = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (codes, scales))
    for source, target, scale_source, scale_target in _chunks(codes, linear, scales, moved):
        target.copy_(_unpack_codes(source))
        scale_target.copy_(decode[_move_scales(scale_source, inverse=True).int()])
    return (deinterleaved(linear), deinterleaved(moved)) if pairs else (linear, moved)


def _chunks(
    codes: torch.Tensor, other_codes: torch.Tensor, scales: torch.Tensor, other_scales: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Corresponding whole rows of tiles of the four, few enough for little intermediate memory."""
    width = codes.shape[-1]
    height = max(1, _CHUNK // max(1, width * 2 * ROWS)) * ROWS
    flat = [t.reshape(-1, t.shape[-1]) for t in (codes, other_codes, scales, other_scales)]
    for start in range(0, flat[0].shape[0], height):
        yield tuple(t[start : start + height] for t in flat)


def _bits(index: tuple[int, int, int, int], odd: int) -> list[int]:
    """Return where the bits of a column's code stand in a word, the sign first."""
    return [(bit + 16 * odd) % 32 for bit in index]


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    rows, width = codes.shape
    # Axes: tile row, h, l // 4, tile column, j, k, l % 4; a byte holds e = 0 and e = 1.
    tiles = codes.reshape(rows // 16, 2, 8, width // 32, 4, 2, 4)
    # Tile row, l // 4, tile column, j, l % 4.
    words = torch.zeros_like(tiles[:, 0, :, :, :, 0], dtype=torch.int32)
    for k in range(2):
        for h in range(2):
            for odd in range(2):
                code = tiles[:, h, :, :, :, k] >> 4 * odd
                for i, bit in enumerate(_bits(BIT_POSITIONS[2 * k + h], odd)):
                    words |= ((code >> (3 - i)) & 1).to(torch.int32) << bit
    return words.permute(0, 2, 1, 4, 3).contiguous().view(torch.uint8).reshape(rows, width)


def _unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    rows, width = packed.shape
    words = packed.contiguous().view(torch.int32).reshape(rows // 16, width // 32, 8, 4, 4)
    words = words.permute(0, 2, 1, 4, 3)  # tile row, l // 4, tile column, j, l % 4
    tiles = torch.zeros(
        (rows // 16, 2, 8, width // 32, 4, 2, 4), dtype=torch.uint8, device=packed.device
    )
    for k in range(2):
        for h in range(2):
            for odd in range(2):
                for i, bit in enumerate(_bits(BIT_POSITIONS[2 * k + h], odd)):
                    of_code = ((words >> bit) & 1) << (3 - i + 4 * odd)
                    tiles[:, h, :, :, :, k] |= of_code.to(torch.uint8)
    return tiles.reshape(rows, width)


def _move_scales(scales: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    rows, width = scales.shape
    if inverse:
        tiles = scales.reshape(rows // 16, width // 4, 8, 4, 2).permute(0, 4, 2, 1, 3)
    else:
        tiles = scales.reshape(rows // 16, 2, 8, width // 4, 4).permute(0, 3, 2, 4, 1)
    return tiles.reshape(rows, width)
