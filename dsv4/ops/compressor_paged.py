"""Compression of windows of tokens whose open windows lie in pages, by position."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.kv_cache.pages import PAGE_FORMATS, Pages
from dsv4.ops import _check
from dsv4.ops._library import Written, define
from dsv4.ops._plans import planned
from dsv4.ops.kv_cache import expected_pages

_ENTRY_FLOATS = (torch.bfloat16, torch.float32, torch.float64)
_STATE_FLOATS = (torch.float32, torch.float64)


class CompressWritePagedArgs(NamedTuple):
    """Arguments of ``compress_write_paged``: compression of tokens with their state in pages.

    Attributes:
        kv: ``[T, c*d]`` floating; c is 2 with overlap, else 1.
        score: ``[T, c*d]`` floating, without ape.
        ape: ``[m, c*d]`` floating.
        state: float32 or float64 ``[blocks, block_size, 2*c*d]``.
        positions: ``[T]`` int.
        sequences: ``[T]`` int, rows of the table.
        state_slots: ``[T]`` int, ``block * block_size + row``; negative: padding.
        state_table: ``[S, P]`` int: block of the positions ``p * block_size`` and on.
        slots: ``[T]`` int, where the entry that closes with a token goes; negative: nowhere.
        norm_weight: ``[d]`` floating.
        angles: ``[N, R]`` floating: R/2 cosines, then R/2 sines of each position.
        data: ``[pages, ...]``, the pages' storage.
        page_size: Entries of a page.
        entry_format: Of the pages, see ``dsv4.kv_cache.pages``.
        head_dim: D, dims of an entry.
        rope_dim: Trailing dims that ``"fp8"`` entries keep in bfloat16.
        overlap: Whether windows overlap.
        eps: Added to mean squares.
        dtype: Of the entries before they are stored.
    """

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    state: Written
    positions: torch.Tensor
    sequences: torch.Tensor
    state_slots: torch.Tensor
    state_table: torch.Tensor
    slots: torch.Tensor
    norm_weight: torch.Tensor
    angles: torch.Tensor
    data: Written
    page_size: int
    entry_format: str
    head_dim: int
    rope_dim: int
    overlap: bool
    eps: float
    dtype: torch.dtype


def _fake(args: CompressWritePagedArgs) -> None:
    return None


def _check_values(op: str, args: CompressWritePagedArgs) -> None:
    blocks, size = args.state.shape[:2]
    written = args.state_slots >= 0
    _check.below(op, "state_slots", args.state_slots, blocks * size)
    closed = args.slots.where(written, -1)
    _check.below(op, "slots", closed, args.data.shape[0] * args.page_size)
    rows, limit = args.sequences.where(written, 0), args.state_table.shape[0]
    _check.none_bad(op, "sequences", rows, (rows < 0) | (rows >= limit), f"from 0 to {limit - 1}")
    closes = closed >= 0
    last = args.positions.where(closes, 0)
    _check.none_bad(op, "positions", last, last < 0, "from 0 on")
    _check.below(op, "positions", last, min(args.angles.shape[0], size * args.state_table.shape[1]))


_compress_write_paged = define("compress_write_paged", CompressWritePagedArgs, _fake, _check_values)


@planned
def compress_write_paged(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    state_slots: torch.Tensor,
    state_table: torch.Tensor,
    slots: torch.Tensor,
    norm_weight: torch.Tensor,
    angles: torch.Tensor,
    pages: Pages,
    *,
    overlap: bool,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> None:
    """``compress_write`` for a serving engine that keeps states in pages and gives slots per token.

    Each token t with ``state_slots[t] >= 0`` is stored there: kv, then score plus the row of ape of
    its position. With ``slots[t] >= 0`` and a position p of which ``p + 1`` is a multiple of m, the
    window that ends with it is pooled as ``compressor_update`` pools it, from the tokens of this
    call and from the state; then norm, rotation at the window's first position and storing follow
    as in ``compress_write`` without ``rotate_quantize``. Mutates ``state`` and the pages.

    Tokens of a sequence are neighbours in ascending order, and those of a window that are not in
    the call lie in the state where ``state_table`` says: position p in block
    ``state_table[sequence, p // block_size]``, row ``p % block_size``. What a call reads of the
    state it does not write.

    Args:
        kv: ``[T, c*d]``; c is 2 with overlap, else 1.
        score: ``[T, c*d]``, WITHOUT ape.
        ape: ``[m, c*d]``; m is the ratio.
        state: float32 or float64 ``[blocks, block_size, 2*c*d]``, the dtype of the computation: kv,
            then score with ape.
        positions: ``[T]`` int, of each token in its sequence.
        sequences: ``[T]`` int, rows of ``state_table``; anything for padding.
        state_slots: ``[T]`` int, distinct where not negative; negative: padding, left alone.
        state_table: ``[S, P]`` int.
        slots: ``[T]`` int, of the pages; negative: no entry is stored.
        norm_weight: ``[d]``.
        angles: ``[N, R]``, ``R <= d``: R/2 cosines, then R/2 sines, of all positions.
        pages: Where to; ``pages.head_dim`` is d.
        overlap: Whether windows overlap.
        eps: Of the norm.
        dtype: Of the entries before they are stored: bfloat16, float32 or float64.
        backend: Implementation name, see ``dsv4.dispatch``.

    Raises:
        TypeError: if a dtype is none of these.
        ValueError: if a shape differs, the width is odd with overlap, R is odd or more than d, the
            tensors are on different devices, or ``state`` or the pages' data overlaps itself.
        IndexError: if a slot, a sequence or a position lies outside (on the CPU; undefined on a
            GPU).
    """
    op, halves = "compress_write_paged", 2 if overlap else 1
    width = kv.shape[-1] if kv.dim() else 0
    _check.tensors(
        op,
        ("kv", kv, _check.FLOATS, ("T", "c d")),
        ("score", score, _check.FLOATS, ("T", "c d")),
        ("ape", ape, _check.FLOATS, ("m", "c d")),
        ("state", state, _STATE_FLOATS, (None, None, 2 * width)),
        ("positions", positions, _check.INTEGERS, ("T",)),
        ("sequences", sequences, _check.INTEGERS, ("T",)),
        ("state_slots", state_slots, _check.INTEGERS, ("T",)),
        ("state_table", state_table, _check.INTEGERS, ("S", "P")),
        ("slots", slots, _check.INTEGERS, ("T",)),
        ("norm_weight", norm_weight, _check.FLOATS, (pages.head_dim,)),
        ("angles", angles, _check.FLOATS, ("N", "R")),
        expected_pages(op, "pages", pages, PAGE_FORMATS),
    )
    for name, tensor in (("state", state), ("pages.data", pages.data)):
        if not tensor.is_contiguous():
            _check.no_overlap(op, name, tensor)
    if not torch.compiler.is_compiling():
        _check_sizes(op, (width, halves, pages.head_dim), ape, angles)
    if dtype not in _ENTRY_FLOATS:
        raise TypeError(f"{op}: dtype is {dtype}, wanted bfloat16, float32 or float64")
    _compress_write_paged(
        CompressWritePagedArgs(
            kv,
            score,
            ape,
            state,
            positions,
            sequences,
            state_slots,
            state_table,
            slots,
            norm_weight,
            angles,
            pages.data,
            pages.page_size,
            pages.entry_format,
            pages.head_dim,
            pages.rope_dim,
            overlap,
            eps,
            dtype,
        ),
        backend,
    )


def _check_sizes(
    op: str, widths: tuple[int, int, int], ape: torch.Tensor, angles: torch.Tensor
) -> None:
    width, halves, dims = widths
    if width != halves * dims:
        raise ValueError(
            f"{op}: kv has {width} columns, wanted {halves} x {dims} (dims of an entry)"
        )
    if ape.shape[0] < 1:
        raise ValueError(f"{op}: ape has shape {list(ape.shape)}, wanted a row at least")
    rotated = angles.shape[1]
    if rotated % 2 or rotated > dims:
        raise ValueError(
            f"{op}: angles has shape {list(angles.shape)}, wanted [N, R] with an even R <= {dims}"
        )
