"""Rewrite one expert's NVFP4 bytes to a packed layout and back, in their own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dsv4.quant import fragments
from dsv4.quant.scales import swizzle_scales, unswizzle_scales
from dsv4.reference.fragments import deinterleaved, interleaved

Writes = Iterator[tuple[torch.Tensor, torch.Tensor]]
_CODES = 1 << 22  # codes that are moved at once


def packing(codes: torch.Tensor, scales: torch.Tensor, *, pairs: bool) -> Writes:
    """Yield the copies that, made one after another, leave the bytes packed.

    Args:
        codes: uint8 ``[N, K/2]``, contiguous, as are the scales.
        scales: uint8 ``[N, K/16]``.
        pairs: Whether the first half of the rows are gate rows and the others up rows, which are to
            be interleaved.

    Yields:
        A view of the codes or scales, and its new bytes.
    """
    if fragments.by_kernel(codes):
        new, moved = fragments.pack(codes, scales.view(torch.float8_e4m3fn), pairs=pairs)
        yield codes, new
        yield scales, moved
        return
    if pairs:
        yield codes, interleaved(codes)
        yield scales, interleaved(scales)
    yield from _pieces(fragments.pack, codes, scales, torch.float8_e4m3fn)


def unpacking(codes: torch.Tensor, scales: torch.Tensor, *, pairs: bool) -> Writes:
    """The inverse of ``packing``."""
    if fragments.by_kernel(codes):
        new, moved = fragments.unpack(codes, scales, pairs=pairs)
        yield codes, new
        yield scales, moved.view(torch.uint8)
        return
    yield from _pieces(fragments.unpack, codes, scales, torch.uint8)
    if pairs:
        yield codes, deinterleaved(codes)
        yield scales, deinterleaved(scales)


def swizzling(codes: torch.Tensor, scales: torch.Tensor, *, pairs: bool) -> Writes:
    """Like ``packing``, with scales in whole blocks of 128 rows and 4 columns.

    Args:
        codes: uint8 ``[N, K/2]``, contiguous, as are the scales.
        scales: uint8 ``[N, K/16]``.
        pairs: See ``packing``.
    """
    if pairs:
        yield codes, interleaved(codes)
        yield scales, interleaved(scales)
    yield scales, swizzle_scales(scales).view(scales.shape)


def unswizzling(codes: torch.Tensor, scales: torch.Tensor, *, pairs: bool) -> Writes:
    """The inverse of ``swizzling``; the scales are ``[N K/16]``."""
    linear = scales.view(codes.shape[0], -1)
    yield linear, unswizzle_scales(scales, *linear.shape)
    if pairs:
        yield codes, deinterleaved(codes)
        yield linear, deinterleaved(linear)


def _pieces(
    move: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    codes: torch.Tensor,
    scales: torch.Tensor,
    scale_dtype: torch.dtype,
) -> Writes:
    """Yield a few whole rows of tiles at a time, which every layout keeps in their place."""
    columns = 2 * codes.shape[1]
    height = max(1, _CODES // (fragments.ROWS * columns)) * fragments.ROWS
    for code_rows, scale_rows in zip(codes.split(height), scales.split(height), strict=True):
        new_codes, new_scales = move(code_rows, scale_rows.view(scale_dtype))
        yield code_rows, new_codes
        yield scale_rows, new_scales.view(torch.uint8)
