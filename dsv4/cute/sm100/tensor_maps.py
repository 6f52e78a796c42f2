"""Operands as TMA copies read them, and their tensor maps, made by the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from dsv4.cute.runtime import driver as cuda_driver

STAGE_K = 256  # columns of K in a pipeline stage: 128 bytes of codes, the widest swizzle
MMA_K = 64  # columns of one MMA instruction
SCALE_TILE_BYTES = 512  # scales of 128 rows and 64 columns
# Values of the driver's enumerations: data type, swizzle, L2 promotion.
_UINT8, _UINT16, _SWIZZLE_128, _PROMOTE_256 = 0, 1, 3, 3
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64  # of the driver's result


class Box(NamedTuple):
    """An operand in global memory and the box of one TMA copy; the innermost axis first.

    Attributes:
        item_bytes: Bytes of an element, 1 or 2.
        sizes: Elements of each axis; what lies beyond is read as zeros.
        strides: Bytes between elements of each axis but the innermost.
        box: Elements of a copy, which lie in shared memory one after another.
        swizzled: Whether 16-byte pieces of 128-byte rows are swizzled there (``SWIZZLE_128B``).
    """

    item_bytes: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool


def code_box(rows: int, columns: int, copied_rows: int) -> Box:
    """Box of ``copied_rows`` rows of a stage of codes ``[rows, columns / 2]``."""
    return Box(1, (columns // 2, rows), (columns // 2,), (STAGE_K // 2, copied_rows), True)


def scale_box(row_tiles: int, columns: int, copied_tiles: tuple[int, int]) -> Box:
    """Box of swizzled scales ``[row_tiles, columns / 64, 512 bytes]``.

    Elements are words of 16 bits, because a box has at most 256 elements along an axis.

    Args:
        row_tiles: Tiles of 128 rows.
        columns: K.
        copied_tiles: Tiles of 128 rows and of 64 columns of one copy.
    """
    k_tiles = -(-columns // MMA_K)
    copied_row_tiles, copied_k_tiles = copied_tiles
    return Box(
        item_bytes=2,
        sizes=(SCALE_TILE_BYTES // 2, k_tiles, row_tiles),
        strides=(SCALE_TILE_BYTES, k_tiles * SCALE_TILE_BYTES),
        box=(SCALE_TILE_BYTES // 2, copied_k_tiles, copied_row_tiles),
        swizzled=False,
    )


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, box: Box) -> bytes:
    """The tensor map of an operand: 128 bytes, a kernel parameter.

    It holds numbers alone, so the same arguments give the same bytes.

    Args:
        address: A multiple of 16.
        box: What lies there.

    Raises:
        RuntimeError: if the driver refuses.
    """
    buffer = (ctypes.c_uint8 * (_MAP_BYTES + _MAP_ALIGNMENT))()
    gap = -ctypes.addressof(buffer) % _MAP_ALIGNMENT
    encoded = (ctypes.c_uint8 * _MAP_BYTES).from_buffer(buffer, gap)
    rank = len(box.sizes)
    status = cuda_driver._driver().cuTensorMapEncodeTiled(
        encoded,
        _UINT8 if box.item_bytes == 1 else _UINT16,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*box.sizes),
        (ctypes.c_uint64 * rank)(*box.strides),
        (ctypes.c_uint32 * rank)(*box.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),  # no gaps between elements
        0,  # no interleaving
        _SWIZZLE_128 if box.swizzled else 0,
        _PROMOTE_256,
        0,  # beyond the end: zeros
    )
    cuda_driver.check(status, f"describing {box} at {address:#x}")
    return bytes(encoded)
