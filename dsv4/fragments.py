"""The layout in which Hopper's tensor cores take NVFP4 weights: ``"fragments_16x64"``.

A matrix is cut into tiles of 16 rows and 64 columns, stored row of tiles by row of tiles. In a tile
every lane of a warp finds its own operands of four ``m16n8k16`` products in 16 consecutive bytes,
and needs no shift by a lane number to take them apart:

* Lane ``l`` owns rows ``l // 4`` and ``l // 4 + 8`` (``h`` = 0, 1). Word ``j`` of its four 32-bit
  words holds columns ``16 j + 8 k + 2 (l % 4) + e`` for ``k``, ``e`` in 0, 1: one block of 16
  columns, so one scale for each of the two rows.
* The code of ``(h, k, e)`` stands in half-word ``e``, at bits ``_PLACES[2 k + h]`` (sign, two
  exponent bits, mantissa bit). The first place is where a bfloat16 has its sign, its two lowest
  exponent bits and its highest mantissa bit: masked, it is the bfloat16 ``code * 2^-126``, the
  subnormal 0.5 included. The second is the same, 3 bits lower. The others keep exponent and
  mantissa together, and their signs where there is room.

Scales are re-biased so that ``(byte << 4) + 0x7600`` is the bfloat16 ``scale * 2^119``: E4M3's
subnormals become normal, NaN stays NaN (0x9C), and zero is the byte that overflows to -0 (0xA0).
The product of the two bfloat16 is exactly ``code * scale * 2^-7``. A tile keeps its 64 scales as
``[l // 4][j][h]``.

Nothing is lost: ``unpack`` gives back every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

ROWS, COLUMNS = 16, 64
SCALE_BIAS = 0x7600
_ZERO, _NAN = 0xA0, 0x9C
_PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (14, 2, 1, 0), (13, 11, 10, 9))
_CHUNK = 1 << 22


def fits(rows: int, columns: int) -> bool:
    """Whether a matrix is a whole number of tiles."""
    return rows % ROWS == 0 and columns % COLUMNS == 0


def pack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear NVFP4 codes and scales to fragments, on the device of ``codes``.

    Beside the result, it needs memory for about 100 MB of intermediate values.

    Args:
        codes: uint8 ``[*batch, N, K/2]``, low nibble = even column.
        scales: float8_e4m3fn ``[*batch, N, K/16]``.

    Returns:
        uint8 ``[*batch, N, K/2]`` and uint8 ``[*batch, N, K/16]``.

    Raises:
        ValueError: if N or K is not a whole number of tiles, or a scale has its sign bit set.
    """
    _check(codes)
    encode = _scale_bytes().to(codes.device)
    bytes_ = scales.contiguous().view(torch.uint8)
    if bool((bytes_ > 0x7F).any()):
        raise ValueError("nvfp4: a block scale is negative, wanted scales with their sign bit 0")
    packed = torch.empty_like(codes, memory_format=torch.contiguous_format)
    moved = torch.empty_like(bytes_)
    for source, target, scale_source, scale_target in _chunks(codes, packed, bytes_, moved):
        target.copy_(_pack_codes(source))
        scale_target.copy_(_move_scales(encode[scale_source.int()], inverse=False))
    return packed, moved


def unpack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of ``pack``.

    Args:
        codes: uint8 ``[*batch, N, K/2]``.
        scales: uint8 ``[*batch, N, K/16]``.

    Returns:
        Linear codes, and scales as float8_e4m3fn.

    Raises:
        ValueError: if N or K is not a whole number of tiles.
    """
    _check(codes)
    decode = torch.zeros(256, dtype=torch.uint8)
    decode[_scale_bytes().long()] = torch.arange(128, dtype=torch.uint8)
    decode = decode.to(codes.device)
    linear, moved = torch.empty_like(codes), torch.empty_like(scales)
    for source, target, scale_source, scale_target in _chunks(codes, linear, scales, moved):
        target.copy_(_unpack_codes(source))
        scale_target.copy_(decode[_move_scales(scale_source, inverse=True).int()])
    return linear, moved.view(torch.float8_e4m3fn)


def _check(codes: torch.Tensor) -> None:
    rows, columns = codes.shape[-2], codes.shape[-1] * 2
    if not fits(rows, columns):
        raise ValueError(
            f"nvfp4: a matrix of {rows} x {columns}, wanted multiples of {ROWS} x {COLUMNS} "
            "for the layout 'fragments_16x64'"
        )


@cache
def _scale_bytes() -> torch.Tensor:
    """Re-biased byte of each of E4M3's bytes 0 to 127, uint8 ``[128]``."""
    table = []
    for byte in range(128):
        exponent, mantissa = byte >> 3, byte & 7
        if byte == 0x7F:
            table.append(_NAN)
        elif byte == 0:
            table.append(_ZERO)
        elif exponent == 0:
            shift = 4 - mantissa.bit_length()
            table.append(((4 - shift) << 3) | ((mantissa << shift) & 7))
        else:
            table.append(((exponent + 3) << 3) | mantissa)
    return torch.tensor(table, dtype=torch.uint8)


def _chunks(
    codes: torch.Tensor, other_codes: torch.Tensor, scales: torch.Tensor, other_scales: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Corresponding whole rows of tiles of the four, few enough for little intermediate memory."""
    width = codes.shape[-1]
    height = max(1, _CHUNK // max(1, width * 2 * ROWS)) * ROWS
    flat = [t.reshape(-1, t.shape[-1]) for t in (codes, other_codes, scales, other_scales)]
    for start in range(0, flat[0].shape[0], height):
        yield tuple(t[start : start + height] for t in flat)


def _place(code: torch.Tensor, place: tuple[int, int, int, int]) -> torch.Tensor:
    bits = torch.zeros_like(code)
    for i, bit in enumerate(place):
        bits |= ((code >> (3 - i)) & 1) << bit
    return bits


def _take(word: torch.Tensor, place: tuple[int, int, int, int]) -> torch.Tensor:
    code = torch.zeros_like(word)
    for i, bit in enumerate(place):
        code |= ((word >> bit) & 1) << (3 - i)
    return code


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    rows, width = codes.shape
    # Axes: tile row, h, l // 4, tile column, j, k, l % 4; a byte holds e = 0 and e = 1.
    tiles = codes.reshape(rows // 16, 2, 8, width // 32, 4, 2, 4).to(torch.int32)
    halves = []
    for nibbles in (tiles & 15, tiles >> 4):
        half = torch.zeros_like(nibbles[:, 0, :, :, :, 0])
        for k in range(2):
            for h in range(2):
                half |= _place(nibbles[:, h, :, :, :, k], _PLACES[2 * k + h])
        halves.append(half)
    words = torch.stack(halves, -1).to(torch.int16)  # tile row, l // 4, tile column, j, l % 4, e
    return words.permute(0, 2, 1, 4, 3, 5).contiguous().view(torch.uint8).reshape(rows, width)


def _unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    rows, width = packed.shape
    halves = packed.contiguous().view(torch.int16).reshape(rows // 16, width // 32, 8, 4, 4, 2)
    words = halves.permute(0, 2, 1, 4, 3, 5).to(torch.int32)  # tile row, l//4, column, j, l%4, e
    tiles = torch.empty(
        (rows // 16, 2, 8, width // 32, 4, 2, 4), dtype=torch.uint8, device=packed.device
    )
    for k in range(2):
        for h in range(2):
            code = _take(words, _PLACES[2 * k + h])
            tiles[:, h, :, :, :, k] = (code[..., 0] | (code[..., 1] << 4)).to(torch.uint8)
    return tiles.reshape(rows, width)


def _move_scales(scales: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    rows, width = scales.shape
    if inverse:
        tiles = scales.reshape(rows // 16, width // 4, 8, 4, 2).permute(0, 4, 2, 1, 3)
    else:
        tiles = scales.reshape(rows // 16, 2, 8, width // 4, 4).permute(0, 3, 2, 4, 1)
    return tiles.reshape(rows, width)
