"""The layout in which Hopper's tensor cores take NVFP4 weights: ``"fragments_16x64"``.

A matrix is cut into tiles of 16 rows and 64 columns, stored row of tiles by row of tiles. In a tile
every lane of a warp finds its own operands of four ``m16n8k16`` MMAs in 16 consecutive bytes,
and needs no shift by a lane number to separate them:

* Lane ``l`` owns rows ``l // 4`` and ``l // 4 + 8`` (``h`` = 0, 1). Word ``j`` of its four 32-bit
  words holds columns ``16 j + 8 k + 2 (l % 4) + e`` for ``k``, ``e`` in 0, 1: one block of 16
  columns, so one scale for each of the two rows.
* The code of ``(h, k, 0)`` has bits ``BIT_POSITIONS[2 k + h]`` of the word (sign, two exponent
  bits, mantissa bit), that of ``(h, k, 1)`` 16 bits further on, wrapping around the word's end.
  The first position is where a bfloat16 has its sign, its two lowest exponent bits and its highest
  mantissa bit: masked, it is the bfloat16 ``code * 2^-126``, the subnormal 0.5 included. The second
  and the third are the same, once the word is rotated to the right by 3 and by 6 bits. What is left
  are four bits in each half-word that one multiplication moves there without carries.

Scales are re-biased so that ``(byte << 4) + 0x7600`` is the bfloat16 ``scale * 2^119``: E4M3's
subnormals become normal, NaN stays NaN (0x9C), and zero is the byte that overflows to -0 (0xA0).
The product of the two bfloat16 is exactly ``code * scale * 2^-7``. A tile keeps its 64 scales as
``[l // 4][j][h]``.

FP8 tensor cores take the codes of a lane as operands of 128 columns. Activations in FP8 then have
their columns in the order in which a lane has those of the weight (``fragment_columns``): with u,
k, e in 0, 1 and j, q in 0 to 3, the column ``64 u + 16 j + 8 k + 2 q + e`` of 128 is at place
``32 q + 16 u + 4 j + 2 e + (1 - k)``.

Nothing is lost: ``unpack`` gives back every bit. With ``pairs`` the first half of the linear rows
(gate) and the second (up) are interleaved in the tiles: row ``2 i`` is row ``i`` of the first half.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch

from dsv4.device import no_triton

ROWS, COLUMNS = 16, 64
SCALE_BIAS = 0x7600
BIT_POSITIONS = ((15, 8, 7, 6), (18, 11, 10, 9), (21, 14, 13, 12), (1, 0, 4, 3))
ZERO, NAN = 0xA0, 0x9C


def fits(rows: int, columns: int) -> bool:
    """Return whether a matrix is a whole number of tiles."""
    return rows % ROWS == 0 and columns % COLUMNS == 0


def by_kernel(tensor: torch.Tensor) -> bool:
    """Return whether Triton moves the bytes of such a tensor.

    This holds wherever Triton runs, unless the reference is requested by name.
    """
    from dsv4 import dispatch  # which knows the layouts

    asked = dispatch.requested_backend() == "reference"
    return not asked and no_triton(tensor.device) is None


def pack(
    codes: torch.Tensor, scales: torch.Tensor, *, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear NVFP4 codes and scales to fragments, on the device of ``codes``.

    Besides the result and contiguous arguments, the reference needs memory for about 100 MB of
    intermediate values, with ``pairs`` for a copy of the arguments; Triton for nothing.

    Args:
        codes: uint8 ``[*batch, N, K/2]``, low nibble = even column.
        scales: float8_e4m3fn ``[*batch, N, K/16]``.
        pairs: Whether to interleave the rows of both halves.

    Returns:
        uint8 ``[*batch, N, K/2]`` and uint8 ``[*batch, N, K/16]``.

    Raises:
        ValueError: if N or K is not a whole number of tiles, or a scale has its sign bit set.
    """
    _check(codes)
    if scales.numel() and int(scales.view(torch.int8).amin()) < 0:
        raise ValueError("nvfp4: a block scale is negative, wanted scales with their sign bit 0")
    return _mover(codes).pack(codes, scales.view(torch.uint8), pairs)


def unpack(
    codes: torch.Tensor, scales: torch.Tensor, *, pairs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of ``pack``.

    Args:
        codes: uint8 ``[*batch, N, K/2]``.
        scales: uint8 ``[*batch, N, K/16]``.
        pairs: The ``pairs`` that they were packed with.

    Returns:
        Linear codes, and scales as float8_e4m3fn.

    Raises:
        ValueError: if N or K is not a whole number of tiles.
    """
    _check(codes)
    linear, moved = _mover(codes).unpack(codes, scales, pairs)
    return linear, moved.view(torch.float8_e4m3fn)


def fragment_columns(codes: torch.Tensor) -> torch.Tensor:
    """Columns ``[..., K]`` of 8-bit codes in the order of fragments, K a multiple of 128."""
    parts = codes.view(torch.uint8).unflatten(-1, (codes.shape[-1] // 128, 2, 4, 2, 4, 2))
    u, j, k, q, e = range(-5, 0)
    rest = range(-parts.dim(), -5)
    return parts.permute(*rest, q, u, j, e, k).flip(-1).flatten(-6).view(codes.dtype)


def linear_columns(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of ``fragment_columns``."""
    parts = codes.view(torch.uint8).unflatten(-1, (codes.shape[-1] // 128, 4, 2, 4, 2, 2))
    q, u, j, e, k = range(-5, 0)
    rest = range(-parts.dim(), -5)
    return parts.flip(-1).permute(*rest, u, j, k, q, e).flatten(-6).view(codes.dtype)


def _mover(codes: torch.Tensor) -> Any:
    name = "triton" if by_kernel(codes) else "reference"
    return importlib.import_module(f"dsv4.{name}.fragments")


def _check(codes: torch.Tensor) -> None:
    rows, columns = codes.shape[-2], codes.shape[-1] * 2
    if not fits(rows, columns):
        raise ValueError(
            f"nvfp4: a matrix of {rows} x {columns}, wanted multiples of {ROWS} x {COLUMNS} "
            "for the layout 'fragments_16x64'"
        )


@cache
def scale_bytes() -> torch.Tensor:
    """Re-biased byte of each of E4M3's bytes 0 to 127, uint8 ``[128]``."""
    table = []
    for byte in range(128):
        exponent, mantissa = byte >> 3, byte & 7
        if byte == 0x7F:
            table.append(NAN)
        elif byte == 0:
            table.append(ZERO)
        elif exponent == 0:
            shift = 4 - mantissa.bit_length()
            table.append(((4 - shift) << 3) | ((mantissa << shift) & 7))
        else:
            table.append(((exponent + 3) << 3) | mantissa)
    return torch.tensor(table, dtype=torch.uint8, device="cpu")
