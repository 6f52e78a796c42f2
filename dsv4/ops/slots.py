"""Slots: the places of a sequence's entries in pages, given by page tables."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned

__all__ = ["entry_slots", "prefix_slots", "window_slots"]


class EntrySlotsArgs(NamedTuple):
    """Arguments of ``entry_slots``: slots of given entries.

    Attributes:
        page_table: ``[S, P]`` int: page of the entries ``p * page_size`` and on.
        page_size: Entries of a page.
        sequences: ``[T]`` int, rows of the table; negative: none.
        entries: ``[T]`` or ``[T, k]`` int, entries of the sequence.
    """

    page_table: torch.Tensor
    page_size: int
    sequences: torch.Tensor
    entries: torch.Tensor


class PrefixSlotsArgs(NamedTuple):
    """Arguments of ``prefix_slots``: slots of the first entries.

    Attributes:
        page_table: ``[S, P]`` int: page of the entries ``p * page_size`` and on.
        page_size: Entries of a page.
        sequences: ``[T]`` int, rows of the table; negative: none.
        counts: ``[T]`` int, entries of each token.
    """

    page_table: torch.Tensor
    page_size: int
    sequences: torch.Tensor
    counts: torch.Tensor


class WindowSlotsArgs(NamedTuple):
    """Arguments of ``window_slots``: slots of the last positions.

    Attributes:
        page_table: ``[S, P]`` int: page of the entries ``p * page_size`` and on.
        page_size: Entries of a page.
        sequences: ``[T]`` int, rows of the table; negative: none.
        positions: ``[T]`` int.
        window: Positions per token.
    """

    page_table: torch.Tensor
    page_size: int
    sequences: torch.Tensor
    positions: torch.Tensor
    window: int


def _entry_fake(args: EntrySlotsArgs) -> torch.Tensor:
    return args.entries.new_empty(args.entries.shape, dtype=torch.int64)


def _prefix_fake(args: PrefixSlotsArgs) -> torch.Tensor:
    shape = (args.counts.shape[0], args.page_table.shape[1] * args.page_size)
    return args.counts.new_empty(shape, dtype=torch.int64)


def _window_fake(args: WindowSlotsArgs) -> torch.Tensor:
    return args.positions.new_empty((args.positions.shape[0], args.window), dtype=torch.int64)


def _check_rows(op: str, args: EntrySlotsArgs | PrefixSlotsArgs | WindowSlotsArgs) -> None:
    _check.below(op, "sequences", args.sequences, args.page_table.shape[0])


_entry_slots = define("entry_slots", EntrySlotsArgs, _entry_fake, _check_rows)
_prefix_slots = define("prefix_slots", PrefixSlotsArgs, _prefix_fake, _check_rows)
_window_slots = define("window_slots", WindowSlotsArgs, _window_fake, _check_rows)


@planned
def entry_slots(
    page_table: torch.Tensor,
    page_size: int,
    sequences: torch.Tensor,
    entries: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Return the slots of given entries.

    The slot is ``page * page_size + entry % page_size`` with ``page = page_table[sequence, entry //
    page_size]``. It is -1 for a negative sequence or entry, or an entry past the table, and
    negative if there is no page.

    Args:
        page_table: ``[S, P]`` int: page of the entries ``p * page_size`` and on; -1: none.
        page_size: Entries per page.
        sequences: ``[T]`` int, rows of the table; negative: none.
        entries: ``[T]`` or ``[T, k]`` int, entries of the sequence.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        int64, the shape of ``entries``.

    Raises:
        TypeError: if a tensor is not int32 or int64.
        ValueError: if a shape differs, ``page_size < 1`` or a tensor is on another device.
        IndexError: if a sequence is no row of the table (on the CPU; undefined on a GPU).
    """
    _check_table("entry_slots", page_table, page_size, sequences, "entries", entries)
    if not torch.compiler.is_compiling() and entries.dim() not in (1, 2):
        raise ValueError(
            f"entry_slots: entries has shape {list(entries.shape)}, wanted [T] or [T, k]"
        )
    return _entry_slots(EntrySlotsArgs(page_table, page_size, sequences, entries), backend)


@planned
def prefix_slots(
    page_table: torch.Tensor,
    page_size: int,
    sequences: torch.Tensor,
    counts: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Return slots of the entries ``0 .. counts - 1`` of each token's sequence, then -1.

    Args:
        page_table: ``[S, P]`` int.
        page_size: Entries per page.
        sequences: ``[T]`` int, rows of the table; -1 gives a row of -1.
        counts: ``[T]`` int.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T, P * page_size]`` int64; negative where there is no page.

    Raises:
        TypeError: if a tensor is not int32 or int64.
        ValueError: if a shape differs, ``page_size < 1`` or a tensor is on another device.
        IndexError: if a sequence is no row of the table (on the CPU; undefined on a GPU).
    """
    _check_table("prefix_slots", page_table, page_size, sequences, "counts", counts, ("T",))
    return _prefix_slots(PrefixSlotsArgs(page_table, page_size, sequences, counts), backend)


@planned
def window_slots(
    page_table: torch.Tensor,
    page_size: int,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    window: int,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Return slots of the last ``window`` positions up to each token's own, ascending.

    A sequence's pages are a ring: position p is entry ``p % (P * page_size)``. The last column is
    the slot of the token itself.

    Args:
        page_table: ``[S, P]`` int.
        page_size: Entries per page.
        sequences: ``[T]`` int, rows of the table; -1 gives a row of -1.
        positions: ``[T]`` int.
        window: Positions per token.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T, window]`` int64, -1 where the position would be negative, negative where there is no
        page.

    Raises:
        TypeError: if a tensor is not int32 or int64.
        ValueError: if a shape differs, ``page_size`` or ``window`` is below 1, or a tensor is on
            another device.
        IndexError: if a sequence is no row of the table (on the CPU; undefined on a GPU).
    """
    op = "window_slots"
    _check_table(op, page_table, page_size, sequences, "positions", positions, ("T",))
    if window < 1:
        raise ValueError(f"window_slots: window is {window}, wanted >= 1")
    return _window_slots(
        WindowSlotsArgs(page_table, page_size, sequences, positions, window), backend
    )


def _check_table(
    op: str,
    page_table: torch.Tensor,
    page_size: int,
    sequences: torch.Tensor,
    name: str,
    numbers: torch.Tensor,
    dims: _check.Dims | None = None,
) -> None:
    """Check the arguments that all operators here share, and one's numbers for each token."""
    _check.tensors(
        op,
        ("page_table", page_table, _check.INTEGERS, ("S", "P")),
        ("sequences", sequences, _check.INTEGERS, ("T",)),
        (name, numbers, _check.INTEGERS, None),
    )
    if page_size < 1:
        raise ValueError(f"{op}: page_size is {page_size}, wanted >= 1")
    if not torch.compiler.is_compiling() and numbers.shape[:1] != sequences.shape:
        raise ValueError(
            f"{op}: {name} has shape {list(numbers.shape)} for {sequences.shape[0]} sequences"
        )
    if dims is not None:
        _check.shape(op, name, numbers, [sequences.shape[0]])
