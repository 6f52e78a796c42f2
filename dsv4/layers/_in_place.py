"""One expert's NVFP4 bytes to fragments and back, where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dsv4 import fragments
from dsv4.reference.fragments import apart, in_turns

Writes = Iterator[tuple[torch.Tensor, torch.Tensor]]
_CODES = 1 << 22  # that are moved at once


def packing(codes: torch.Tensor, scales: torch.Tensor, *, pairs: bool) -> Writes:
    """What to copy where, one after another, so that the bytes are packed in the end.

    Args:
        codes: uint8 ``[N, K/2]``, contiguous, as are the scales.
        scales: uint8 ``[N, K/16]``.
        pairs: Whether the first half of the rows are gate rows, the others up rows, which are to
            stand in turn.

    Yields:
        A view of the codes or scales, and its new bytes.
    """
    if fragments.by_kernel(codes):
        new, moved = fragments.pack(codes, scales.view(torch.float8_e4m3fn), pairs=pairs)
        yield codes, new
        yield scales, moved
        return
    if pairs:
        yield codes, in_turns(codes)
        yield scales, in_turns(scales)
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
        yield codes, apart(codes)
        yield scales, apart(scales)


def _pieces(
    move: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    codes: torch.Tensor,
    scales: torch.Tensor,
    scale_dtype: torch.dtype,
) -> Writes:
    """A few whole rows of tiles at a time: they stay in their place, whatever the layout."""
    columns = 2 * codes.shape[1]
    height = max(1, _CODES // (fragments.ROWS * columns)) * fragments.ROWS
    for some, theirs in zip(codes.split(height), scales.split(height), strict=True):
        new, moved = move(some, theirs.view(scale_dtype))
        yield some, new
        yield theirs, moved.view(torch.uint8)
