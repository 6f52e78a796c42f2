"""Descriptions of operands by which tensor copies read them, made by the driver."""

from __future__ import annotations

import ctypes
import functools

from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.sm100.dense_plan import Box

_BYTES, _WORDS, _SWIZZLE_128, _PROMOTE_256 = 0, 1, 3, 3


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, box: Box) -> bytes:
    """The 128 bytes that a kernel is given of an operand, the same for the same numbers.

    Args:
        address: A multiple of 16.
        box: What lies there. Beyond its sizes zeros are read.

    Raises:
        RuntimeError: if the driver refuses.
    """
    room = (ctypes.c_uint8 * 192)()
    place = (ctypes.c_uint8 * 128).from_buffer(room, -ctypes.addressof(room) % 64)
    rank = len(box.sizes)
    sizes, strides = (ctypes.c_uint64 * rank)(*box.sizes), (ctypes.c_uint64 * rank)(*box.strides)
    boxes, steps = (ctypes.c_uint32 * rank)(*box.box), (ctypes.c_uint32 * rank)(*[1] * rank)
    kind = _BYTES if box.item_bytes == 1 else _WORDS
    swizzle = _SWIZZLE_128 if box.swizzled else 0
    status = cuda_driver._driver().cuTensorMapEncodeTiled(
        place, kind, rank, ctypes.c_void_p(address), sizes, strides, boxes, steps,
        0, swizzle, _PROMOTE_256, 0,
    )  # fmt: skip
    cuda_driver.check(status, f"describing {box} at {address:#x}")
    return bytes(place)
