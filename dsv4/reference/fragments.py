"""Move NVFP4 codes and scales to fragments and back (layout: ``dsv4.quant.fragments``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

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


def _bit_positions() -> Iterator[tuple[int, int]]:
    """Yield where each bit of a word in fragments stands there, and in the codes' four bytes.

    Bytes are in the order of ``h``, then ``k``.
    """
    for h, k, odd in itertools.product(range(2), repeat=3):
        for i, bit in enumerate(BIT_POSITIONS[2 * k + h]):
            yield (bit + 16 * odd) % 32, 8 * (2 * h + k) + 4 * odd + 3 - i


def _moves(positions: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """By how much bits move to the left, each time with a mask of where they arrive, signed."""
    masks: dict[int, int] = {}
    for source, target in positions:
        masks[target - source] = masks.get(target - source, 0) | 1 << target
    return tuple((by, mask - ((mask >> 31) << 32)) for by, mask in masks.items())


_UNPACK = _moves(_bit_positions())
_PACK = _moves((there, here) for here, there in _bit_positions())


def _moved(words: torch.Tensor, moves: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Move bits of int32 words; all that move by as much move together."""
    result = torch.zeros_like(words)
    for by, mask in moves:
        result |= (words << by if by >= 0 else words >> -by) & mask
    return result


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    rows, width = codes.shape
    # Axes: tile row, h, l // 4, tile column, j, k, l % 4; a byte holds e = 0 and e = 1.
    tiles = codes.reshape(rows // 16, 2, 8, width // 32, 4, 2, 4)
    tiles = tiles.permute(0, 3, 2, 6, 4, 1, 5).contiguous()
    words = tiles.flatten(-2).view(torch.int32)  # tile row, tile column, l // 4, l % 4, j
    return _moved(words, _PACK).view(torch.uint8).reshape(rows, width)


def _unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    rows, width = packed.shape
    words = packed.contiguous().view(torch.int32)
    tiles = _moved(words, _UNPACK).view(torch.uint8)
    tiles = tiles.reshape(rows // 16, width // 32, 8, 4, 4, 2, 2)
    return tiles.permute(0, 5, 2, 1, 4, 6, 3).reshape(rows, width)


def _move_scales(scales: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    rows, width = scales.shape
    if inverse:
        tiles = scales.reshape(rows // 16, width // 4, 8, 4, 2).permute(0, 4, 2, 1, 3)
    else:
        tiles = scales.reshape(rows // 16, 2, 8, width // 4, 4).permute(0, 3, 2, 4, 1)
    return tiles.reshape(rows, width)
