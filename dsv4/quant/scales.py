"""Block scales: value of E8M0 and E4M3 bytes, and the 128x4-swizzled layouts.

Scale bytes are moved by ``view``, never by a value cast: a cast of ``float8_e8m0fnu`` to ``uint8``
rounds 2^-7 to 0 instead of giving the byte 120.
"""

from __future__ import annotations

import torch


def e8m0_to_float(scales: torch.Tensor) -> torch.Tensor:
    """float32 ``2^(byte - 127)`` of float8_e8m0fnu scales; byte 255 is NaN, byte 0 is 2^-127.

    Raises:
        TypeError: if the dtype is not float8_e8m0fnu. Bytes of that format held as uint8 must be
            reinterpreted with ``view(torch.float8_e8m0fnu)`` first.
    """
    if scales.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"scales have dtype {scales.dtype}, wanted float8_e8m0fnu (use .view)")
    byte = scales.contiguous().view(torch.uint8).to(torch.int32)
    bits = torch.where(byte == 0, 1 << 22, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)


def e8m0_from_bytes(exponents: torch.Tensor) -> torch.Tensor:
    """float8_e8m0fnu whose byte is the integer ``exponents`` (0..255), by view."""
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)


def scales_to_float(scales: torch.Tensor) -> torch.Tensor:
    """float32 value of block scales of any dtype of any format."""
    if scales.dtype == torch.float8_e8m0fnu:
        return e8m0_to_float(scales)
    return scales.to(torch.float32)


def swizzled_size(rows: int, columns: int) -> int:
    """Entries of the swizzled form of ``rows x columns`` scales: padded to 128 and to 4."""
    return (-(-rows // 128) * 128) * (-(-columns // 4) * 4)


def scale_offset(row: int, column: int, columns: int) -> int:
    """Offset of scale ``[row][column]`` in the swizzled form (specification, section 11.3).

    Args:
        row: m.
        column: k, counted in blocks.
        columns: Number of scale columns before padding.
    """
    tiles = -(-columns // 4)
    tile = (row // 128) * tiles + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Linear one-byte scales ``[*batch, M, Kb]`` to the 128x4 layout ``[*batch, bytes]``.

    Every matrix of the batch starts on its own 128-row boundary. The padding is written with
    zeros: bytes left over from earlier use may be NaN (0x7F, 0xFF) and reach the result.

    Raises:
        TypeError: if the scales are not one byte wide.
    """
    _check_bytes(scales)
    *batch, rows, columns = scales.shape
    high, wide = -(-rows // 128), -(-columns // 4)
    padded = torch.zeros((*batch, high * 128, wide * 4), dtype=torch.uint8, device=scales.device)
    padded[..., :rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(*batch, high, 4, 32, wide, 4)
    moved = tiles.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    return moved.reshape(*batch, high * wide * 512).view(scales.dtype)


def _check_bytes(scales: torch.Tensor) -> None:
    if scales.element_size() != 1:
        raise TypeError(f"scales have dtype {scales.dtype}, wanted one byte per scale")


def unswizzle_scales(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of ``swizzle_scales``: ``[*batch, bytes]`` to linear ``[*batch, rows, columns]``.

    Raises:
        ValueError: if the last axis does not hold a padded ``rows x columns`` matrix.
    """
    *batch, size = swizzled.shape
    if size != swizzled_size(rows, columns):
        expected = swizzled_size(rows, columns)
        raise ValueError(f"swizzled scales have {size} entries, wanted {expected}")
    high, wide = -(-rows // 128), -(-columns // 4)
    tiles = swizzled.view(torch.uint8).reshape(*batch, high, wide, 32, 4, 4)
    moved = tiles.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    padded = moved.reshape(*batch, high * 128, wide * 4)
    return padded[..., :rows, :columns].contiguous().view(swizzled.dtype)


def expert_tiles(rows: int, experts: int) -> int:
    """Tiles of 128 rows that sorted rows need at most, each expert's beginning with a tile.

    An expert of n rows has ``ceil(n / 128) <= (n + 127) / 128`` tiles, and none without rows, so
    that at most ``min(experts, rows)`` have any. One row for each of that number of experts,
    and all other rows for one of them, need the maximum.
    """
    return (rows + 127 * min(experts, rows)) // 128


def expert_rows(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return where each sorted row is when every expert's rows begin at a multiple of 128.

    Nothing is read by the host.

    Args:
        offsets: int32 ``[E + 1]``, the first sorted row of each expert and the end.
        rows: Sorted rows, R; rows from ``offsets[E]`` on are no expert's.

    Returns:
        int64 ``[R]``; ``128 expert_tiles(R, E)``, behind all tiles, for a row of no expert.
    """
    experts, row = offsets.shape[0] - 1, torch.arange(rows, device=offsets.device)
    padding = -offsets.long().diff() % 128
    before = padding.cumsum(0) - padding
    expert = torch.searchsorted(offsets[1:].long().contiguous(), row, right=True)
    placed = row + before[expert.clamp(max=experts - 1)]
    return torch.where(row < offsets[-1], placed, 128 * expert_tiles(rows, experts))


def swizzle_expert_scales(scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Linear one-byte scales of sorted rows ``[R, Kb]`` to ``swizzle_scales`` expert by expert.

    The result is as large as any offsets need. Expert e's scales begin at tile ``sum(ceil(n / 128)
    for the n rows of each expert before)``; padding is zeros, and so are tiles that no expert has.
    Nothing is read by the host.

    Args:
        scales: ``[R, Kb]``; what rows from ``offsets[E]`` on hold is dropped.
        offsets: int32 ``[E + 1]``, as for ``expert_rows``.

    Returns:
        ``[expert_tiles(R, E) * 128 * 4 ceil(Kb / 4)]``.

    Raises:
        TypeError: if the scales are not one byte wide.
    """
    _check_bytes(scales)
    rows, columns = scales.shape
    tiles = expert_tiles(rows, offsets.shape[0] - 1)
    # One row more, for those of no expert.
    padded = torch.zeros((128 * tiles + 1, columns), dtype=torch.uint8, device=scales.device)
    padded[expert_rows(offsets, rows)] = scales.view(torch.uint8)
    return swizzle_scales(padded[:-1].view(scales.dtype))


def unswizzle_expert_scales(
    swizzled: torch.Tensor, offsets: torch.Tensor, rows: int, columns: int
) -> torch.Tensor:
    """The inverse of ``swizzle_expert_scales``: ``[R, Kb]``, zeros for rows of no expert.

    Nothing is read by the host.

    Raises:
        ValueError: if the size of the scales is not that of the rows, experts and columns.
    """
    tiles = expert_tiles(rows, offsets.shape[0] - 1)
    padded = unswizzle_scales(swizzled, 128 * tiles, columns).view(torch.uint8)
    nothing = torch.zeros((1, columns), dtype=torch.uint8, device=swizzled.device)
    gathered = torch.cat([padded, nothing])[expert_rows(offsets, rows)]
    return gathered.view(swizzled.dtype)
