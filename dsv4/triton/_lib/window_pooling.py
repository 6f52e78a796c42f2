"""Pool the slots of a window in registers.

Tiles are ``[slots, channels]``, a slot per token of a window; a thread holds four neighbouring
channels of some slots. Whatever is loaded or stored is such a tile, so that all have one layout,
and threads exchange nothing but sums over slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import INTERPRETED, widen
from dsv4.triton._runtime import launch_options

ABSENT = tl.constexpr(float("-inf"))
_LOG2E = tl.constexpr(1.4426950408889634)
_VECTOR = tl.constexpr(4)  # channels of a thread: 16 bytes of float32
_WARPS = 2048  # warps of all programs up to which rows count as few
_FAR = 1 << 31  # elements that 32-bit offsets reach


@triton.jit
def channels_of(piece, WIDTH: tl.constexpr):
    """Channels ``[1, WIDTH]`` of a program.

    Declared contiguous by four alone: loads of 2-byte numbers then take as many as those of 4-byte
    ones and stores, and no tile changes its layout. ``piece`` must not be known to be 0 when the
    kernel is compiled, or the sum that carries the declaration is gone.
    """
    channel = piece * WIDTH + tl.arange(0, WIDTH)
    if WIDTH >= _VECTOR:
        channel = tl.max_contiguous(tl.multiple_of(channel, _VECTOR), _VECTOR)
    return channel[None, :]


@triton.jit
def pool_slots(kv, score, earlier_kv, earlier_score, RATIO: tl.constexpr, OVERLAP: tl.constexpr):
    """Return means ``[WIDTH]`` of the slots of a tile, and with overlap of an earlier one.

    Weights are divided by more than the slots, so that a sum of finite products is finite. A
    channel without a finite score has weights of 0, and 0 / 0 makes it NaN. A maximum passes NaN
    over; the weight of a NaN is NaN.
    """
    LESS: tl.constexpr = RATIO.bit_length() + OVERLAP
    top = tl.max(tl.maximum(score, earlier_score) if OVERLAP else score, 0)
    base = tl.where(top == ABSENT, 0.0, top)[None, :]
    weight = power((score - base) * _LOG2E, LESS)
    total, mean = weight, weight * kv
    if OVERLAP:
        weight = power((earlier_score - base) * _LOG2E, LESS)
        total, mean = total + weight, mean + weight * earlier_kv
    # Side by side: warps hand both to each other at once.
    mean, total = tl.split(tl.sum(tl.join(mean, total), 0))
    return mean / total


@triton.jit
def power(x, LESS: tl.constexpr):
    """``2 ** (x - LESS)`` for ``x <= 0``; what is below 2^-126 may be 0."""
    if INTERPRETED:
        return tl.exp2(x - LESS)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x - LESS], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def score_of(s, a):
    """Score of a token in its slot of a window: as projected, plus ``ape``."""
    return widen(s) + widen(a)


@triton.jit
def store_pooled(row, values, slot, channel, CHANNELS: tl.constexpr):
    """Values ``[WIDTH]``, sums over the slots of a tile, stored as the tile's slot 0.

    Every thread of a channel holds its sum. One of them stores it, and none hands it to another.
    """
    address = row + (channel + tl.zeros_like(slot))
    values = tl.broadcast_to(values[None, :], address.shape)
    tl.store(address, values, mask=(slot == 0) & (channel < CHANNELS))


def pooling_tiles(slots: int, channels: int, rows: int) -> tuple[int, int, int]:
    """Channels of a head and of a tail, and warps of either, for that many rows.

    Few rows: a thread has little of a tile, because its instructions take longer than a load. Many:
    as much as its registers hold, because a warp's instructions per tile count, too;
    heads, which hold more for each number, are narrow.
    """
    limit = launch_options.power_of_two(channels)
    narrow = min(limit, max(16, 128 // slots))
    warps = _warps(slots * narrow, 512)
    if rows * triton.cdiv(channels, narrow) * warps <= _WARPS:
        return narrow, narrow, warps
    wide = min(limit, max(32, 1024 // slots))
    warps = _warps(slots * wide, 1024)
    return min(limit, max(16, 128 * warps // slots)), wide, warps


def _warps(numbers: int, share: int) -> int:
    return min(16, max(1, numbers // share))


def with_stride(x: torch.Tensor, slots: int) -> tuple[torch.Tensor, int]:
    """Rows and their stride; copied where 32-bit offsets do not reach over ``slots`` of them."""
    rows = row_tiles.as_rows(x)
    if slots * rows.stride(0) >= _FAR:
        rows = rows.contiguous()
    return rows, rows.stride(0)
