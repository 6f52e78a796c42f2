"""Convert a cache entry in registers to and from its bytes in a page.

The layout is ``dsv4.kv_cache.pages.EntryLayout``.

A tile of entries is ``[ROWS, BLOCK]``: one entry per row, ``BLOCK = block(head_dim)`` columns, what
lies past ``head_dim`` ignored. The format follows from the type of the pages: bytes are ``"fp8"``,
floats are ``"plain"``. A negative slot is skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.kv_cache.pages import GROUP
from dsv4.triton._lib.numerics import convert, e4m3_bits, e4m3_value, widen
from dsv4.triton._lib.nvfp4 import largest, rounded
from dsv4.triton._lib.nvfp4_tile import of_block
from dsv4.triton._runtime import launch_options

GROUP_WIDTH = tl.constexpr(GROUP)
# float32 bits of 1e-4, the smallest maximum a group is scaled by.
_FLOOR = tl.constexpr(0x38D1B717)
_INFINITY = tl.constexpr(0x7F800000)


def block(head_dim: int) -> int:
    """Columns of a tile: a power of two with at least 8 groups, which the padded scales fill."""
    return max(8 * GROUP, launch_options.power_of_two(head_dim))


def page_stride(data: torch.Tensor) -> int:
    """Elements of ``data`` (bytes of ``"fp8"`` pages) from one page to the next."""
    return data.stride(0)


@triton.jit
def group_scales(amax):
    """E8M0 bytes (int32) and factors of groups, by the bits of their largest magnitudes."""
    finite = amax < _INFINITY
    scale = ((tl.maximum(amax, _FLOOR) + 0x1FFFFF) >> 23) - 8
    scale = tl.where(finite, scale, 255)
    factor = tl.where(finite, (254 - scale) << 23, 0x7FC00000).to(tl.float32, bitcast=True)
    return scale, factor


@triton.jit
def encode_groups(values, NOPE: tl.constexpr):
    """E4M3 codes of ``values [ROWS, BLOCK]`` (float32) and E8M0 bytes ``[ROWS, BLOCK / 64]``.

    448 is 1.75 * 2^8, so ``ceil(log2(amax / 448))`` is the exponent of amax less 8, and one more
    where its mantissa passes 1.75: a carry out of the mantissa bits. The maximum of the magnitudes
    is taken as integers, where NaN is above Inf and Inf above every number.
    """
    ROWS: tl.constexpr = values.shape[0]
    BLOCK: tl.constexpr = values.shape[1]
    if NOPE // GROUP_WIDTH * GROUP_WIDTH != NOPE:  # a short last group
        values = tl.where(tl.arange(0, BLOCK)[None, :] < NOPE, values, 0.0)
    groups = tl.reshape(values, [ROWS, BLOCK // GROUP_WIDTH, GROUP_WIDTH])
    scale, factor = group_scales(tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2))
    # The factor of a group with a NaN or an Inf is NaN, and so are all its codes.
    return e4m3_bits(tl.reshape(groups * factor[:, :, None], [ROWS, BLOCK])), scale


@triton.jit
def decode_groups(codes, scale):
    """float32 values of codes ``[ROWS, BLOCK]`` and scale bytes ``[ROWS, BLOCK / 64]``."""
    ROWS: tl.constexpr = codes.shape[0]
    BLOCK: tl.constexpr = codes.shape[1]
    byte = scale.to(tl.int32)
    # Byte 0 is 2^-127, a subnormal number; byte 255 is NaN.
    bits = tl.where(byte == 0, 1 << 22, byte << 23)
    factor = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    groups = tl.reshape(e4m3_value(codes), [ROWS, BLOCK // GROUP_WIDTH, GROUP_WIDTH])
    return tl.reshape(groups * factor[:, :, None], [ROWS, BLOCK])


@triton.jit
def bfloat16_bits(values):
    """Bits (uint16) of ``values`` (any float) rounded to bfloat16; every NaN is 0x7FC0."""
    wide = rounded(widen(values), tl.bfloat16)
    bits = wide.to(tl.uint32, bitcast=True) >> 16
    return tl.where(wide != wide, 0x7FC0, bits).to(tl.uint16)


@triton.jit
def data_start(slots, stride, NOPE: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Byte at which the data of each ``"fp8"`` entry begins, int64 ``[ROWS, 1]``."""
    page, entry = slots // PAGE_SIZE, slots % PAGE_SIZE
    return (page * stride + entry * (NOPE + 2 * ROPE))[:, None]


@triton.jit
def scale_start(slots, stride, NOPE: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Byte at which the scales of each ``"fp8"`` entry begin, int64 ``[ROWS, 1]``."""
    SCALES: tl.constexpr = (NOPE + 8 * GROUP_WIDTH - 1) // (8 * GROUP_WIDTH) * 8
    page, entry = slots // PAGE_SIZE, slots % PAGE_SIZE
    return (page * stride + PAGE_SIZE * (NOPE + 2 * ROPE) + entry * SCALES)[:, None]


@triton.jit
def plain_start(slots, stride, NOPE: tl.constexpr, ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Element at which each ``"plain"`` entry begins, int64 ``[ROWS, 1]``."""
    page, entry = slots // PAGE_SIZE, slots % PAGE_SIZE
    return (page * stride + entry * (NOPE + ROPE))[:, None]


@triton.jit
def store_entries(
    data,
    stride,
    slots,
    values,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Store a tile of entries in their slots, in the format of the pages.

    Args:
        data: Pointer to the pages, uint8 or a float type.
        stride: ``page_stride(data)``.
        slots: int64 ``[ROWS]``; a row with a negative slot is not stored.
        values: ``[ROWS, BLOCK]``, float32, bfloat16 or float16.
        NOPE: ``head_dim - rope_dim``.
        ROPE: ``rope_dim``.
        PAGE_SIZE: Entries per page.
    """
    dim = tl.arange(0, values.shape[1])[None, :] - NOPE
    store_nope(data, stride, slots, values, NOPE, ROPE, PAGE_SIZE)
    store_rope(data, stride, slots, values, dim, NOPE, ROPE, PAGE_SIZE)


@triton.jit
def store_nope(
    data,
    stride,
    slots,
    values,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """The part of ``store_entries`` for the first ``NOPE`` columns; no other is looked at."""
    BLOCK: tl.constexpr = values.shape[1]
    written = (slots >= 0)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    if data.dtype.element_ty == tl.uint8:
        GROUPS: tl.constexpr = (NOPE + GROUP_WIDTH - 1) // GROUP_WIDTH
        codes, scale = encode_groups(widen(values), NOPE)
        address = data + data_start(slots, stride, NOPE, ROPE, PAGE_SIZE) + column
        tl.store(address, codes, mask=written & (column < NOPE))
        group = tl.arange(0, BLOCK // GROUP_WIDTH)[None, :]
        scale = tl.where(group < GROUPS, scale, 0).to(tl.uint8)
        address = data + scale_start(slots, stride, NOPE, ROPE, PAGE_SIZE) + group
        tl.store(address, scale, mask=written & (group < (GROUPS + 7) // 8 * 8))
    else:
        address = data + plain_start(slots, stride, NOPE, ROPE, PAGE_SIZE) + column
        stored = convert(values, data.dtype.element_ty)
        tl.store(address, stored, mask=written & (column < NOPE))


@triton.jit
def store_pieces(
    data,
    stride,
    slot,
    values,
    piece,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """``store_nope`` of one entry's pieces ``piece [N]`` of 8 columns, ``values [N, 8]``.

    A thread has a piece. NOPE is a multiple of 8, and so is N; ``slot [1]``.
    """
    column = (piece * 8)[:, None] + tl.arange(0, 8)[None, :]
    inside = (slot >= 0) & (piece < NOPE // 8)
    if data.dtype.element_ty == tl.uint8:
        GROUPS: tl.constexpr = (NOPE + GROUP_WIDTH - 1) // GROUP_WIDTH
        PIECES: tl.constexpr = GROUP_WIDTH // 8
        peak = tl.where(piece < NOPE // 8, largest(values), 0.0)
        scale, factor = group_scales(of_block(peak, PIECES).to(tl.int32, bitcast=True))
        codes = e4m3_bits(widen(values) * factor[:, None])
        address = data + data_start(slot, stride, NOPE, ROPE, PAGE_SIZE) + column
        tl.store(address, codes, mask=inside[:, None])
        group = piece // PIECES
        scale = tl.where(group < GROUPS, scale, 0).to(tl.uint8)
        address = data + tl.reshape(scale_start(slot, stride, NOPE, ROPE, PAGE_SIZE), [1]) + group
        first = (piece % PIECES == 0) & (group < (GROUPS + 7) // 8 * 8)
        tl.store(address, scale, mask=first & (slot >= 0))
    else:
        address = data + plain_start(slot, stride, NOPE, ROPE, PAGE_SIZE) + column
        tl.store(address, convert(values, data.dtype.element_ty), mask=inside[:, None])


@triton.jit
def store_rope(
    data,
    stride,
    slots,
    values,
    dim,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """The part of ``store_entries`` for RoPE dims; those below 0 and from ``ROPE`` on are skipped.

    Args:
        data: See ``store_entries``.
        stride: Likewise.
        slots: Likewise.
        values: ``[ROWS, N]``.
        dim: int32 ``[1, N]``, which of the RoPE dims each column is.
        NOPE: See ``store_entries``.
        ROPE: Likewise.
        PAGE_SIZE: Likewise.
    """
    written = (slots >= 0)[:, None] & (dim >= 0) & (dim < ROPE)
    if data.dtype.element_ty == tl.uint8:
        bits = bfloat16_bits(values)
        start = data + data_start(slots, stride, NOPE, ROPE, PAGE_SIZE) + NOPE
        if NOPE % 2 == 0:
            tl.store(start.to(tl.pointer_type(tl.uint16)) + dim, bits, mask=written)
        else:  # at odd addresses, where only bytes can be stored
            tl.store(start + 2 * dim, (bits & 0xFF).to(tl.uint8), mask=written)
            tl.store(start + 2 * dim + 1, (bits >> 8).to(tl.uint8), mask=written)
    else:
        address = data + plain_start(slots, stride, NOPE, ROPE, PAGE_SIZE) + NOPE + dim
        tl.store(address, convert(values, data.dtype.element_ty), mask=written)


@triton.jit
def load_entries(
    data,
    stride,
    slots,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the entries of ``slots`` (int64 ``[ROWS]``) as ``[ROWS, BLOCK]``; see ``store_entries``.

    float32 from ``"fp8"`` pages, the pages' type from ``"plain"`` ones. A negative slot and the
    columns past ``head_dim`` give zeros.
    """
    read = (slots >= 0)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    if data.dtype.element_ty == tl.uint8:
        return _load_fp8(data, stride, slots, NOPE, ROPE, PAGE_SIZE, BLOCK)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        address = data + plain_start(slots, stride, NOPE, ROPE, PAGE_SIZE) + column
        return tl.load(address, mask=read & (column < NOPE + ROPE), other=0.0)


@triton.jit
def _load_fp8(
    data,
    stride,
    slots,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    GROUPS: tl.constexpr = (NOPE + GROUP_WIDTH - 1) // GROUP_WIDTH
    read = (slots >= 0)[:, None]
    start = data + data_start(slots, stride, NOPE, ROPE, PAGE_SIZE)
    # Eight columns to a thread, of codes too: then they lie as results are stored.
    column = tl.max_contiguous(tl.arange(0, BLOCK), 8)[None, :]
    codes = tl.load(start + column, mask=read & (column < NOPE), other=0)
    group = tl.arange(0, BLOCK // GROUP_WIDTH)[None, :]
    address = data + scale_start(slots, stride, NOPE, ROPE, PAGE_SIZE) + group
    scale = tl.load(address, mask=read & (group < GROUPS), other=0)
    dim = column - NOPE
    rotated = read & (dim >= 0) & (dim < ROPE)
    if NOPE % 2 == 0:
        address = (start + NOPE).to(tl.pointer_type(tl.uint16)) + dim
        bits = tl.load(address, mask=rotated, other=0).to(tl.uint32)
    else:  # at odd addresses, where only bytes can be loaded
        address = start + NOPE + 2 * dim
        low, high = (tl.load(address, rotated, 0), tl.load(address + 1, rotated, 0))
        bits = low.to(tl.uint32) | (high.to(tl.uint32) << 8)
    rope = (bits << 16).to(tl.float32, bitcast=True)
    return tl.where(column < NOPE, decode_groups(codes, scale), rope)
