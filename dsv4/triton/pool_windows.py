"""Kernel of ``pool_windows`` of ``dsv4.ops.compressor``: a program pools one window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.compressor import PoolWindowsArgs
from dsv4.triton._lib.numerics import once, wait_for_inputs, widen
from dsv4.triton._lib.window_pooling import (
    ABSENT,
    channels_of,
    pool_slots,
    pooling_tiles,
    store_pooled,
    with_stride,
)
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch


@triton.jit
def _load_window(source, first, slot, column, mask):
    """kv and score as stored of rows ``first + slot``; elsewhere 0, -inf."""
    kv, kv_stride, score, score_stride = source
    k = tl.load(kv + first * kv_stride + (slot * kv_stride + column), mask=mask, other=0.0)
    address = score + first * score_stride + (slot * score_stride + column)
    return k, tl.load(address, mask=mask, other=ABSENT)


@fast_launch
@triton.jit(do_not_specialize=["slices"])
def _windows_kernel(
    source,
    previous,
    out,
    windows,
    slices,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per window and slice of channels. ``previous``: pointers, or None twice."""
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        row = (tl.program_id(0) // slices).to(tl.int64)
        slot = tl.arange(0, SLOTS)[:, None]
        channel = channels_of(tl.program_id(0) % slices, WIDTH)
        inside = channel < CHANNELS
        own = channel + (CHANNELS if OVERLAP else 0)
        k, s = _load_window(source, row * RATIO, slot, own, (slot < RATIO) & inside)
        if OVERLAP:
            # The window before: a neighbour, the one given, or absent.
            first = row % windows == 0
            inner = (slot < tl.where(first, 0, RATIO)) & inside
            k0, s0 = _load_window(source, (row - 1) * RATIO, slot, channel, inner)
            if previous is not None:
                outer = (slot < tl.where(first, RATIO, 0)) & inside
                strides = previous[0], CHANNELS, previous[1], CHANNELS
                k1, s1 = _load_window(strides, row // windows * RATIO, slot, channel, outer)
        kv, score = widen(k), widen(s)
        kv0, score0 = kv, score
        if OVERLAP:
            kv0, score0 = widen(k0), widen(s0)
            if previous is not None:
                kv0, score0 = tl.where(outer, widen(k1), kv0), tl.where(outer, widen(s1), score0)
        values = pool_slots(kv, score, kv0, score0, RATIO, OVERLAP)
        store_pooled(out + row * CHANNELS, values, slot, channel, CHANNELS)


def pool_windows(args: PoolWindowsArgs) -> torch.Tensor:
    """See ``dsv4.ops.compressor.pool_windows``."""
    kv = args.kv
    sequences, windows, ratio, columns = kv.shape
    channels = columns // (1 + args.overlap)
    out = torch.empty((sequences, windows, channels), dtype=torch.float32, device=kv.device)
    if out.numel() == 0:
        return out
    previous = None
    if args.previous_kv is not None and args.previous_score is not None:
        previous = args.previous_kv.contiguous(), args.previous_score.contiguous()
    slots, rows = launch_options.power_of_two(ratio), sequences * windows
    _, width, warps = pooling_tiles(slots, channels, rows)
    slices = triton.cdiv(channels, width)
    with launch_options.on(kv):
        _windows_kernel[(rows * slices,)](
            (*with_stride(kv, ratio), *with_stride(args.score, ratio)),
            previous,
            out,
            windows,
            slices,
            RATIO=ratio,
            OVERLAP=args.overlap,
            CHANNELS=channels,
            SLOTS=slots,
            WIDTH=width,
            num_warps=max(warps, width // 128),  # numbers of 4 bytes take more registers
            **launch_options.options(kv, small=launch_options.is_small(rows * slices, warps)),
        )
    return out
