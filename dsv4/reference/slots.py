"""Reference implementation of ``dsv4.ops.slots``."""

from __future__ import annotations

import torch

from dsv4.ops.slots import EntrySlotsArgs, PrefixSlotsArgs, WindowSlotsArgs


def entry_slots(args: EntrySlotsArgs) -> torch.Tensor:
    """See ``dsv4.ops.slots.entry_slots``."""
    sequences = args.sequences
    if args.entries.dim() == 2:
        sequences = sequences.unsqueeze(-1)
    return _slots(args.page_table, args.page_size, sequences, args.entries)


def prefix_slots(args: PrefixSlotsArgs) -> torch.Tensor:
    """See ``dsv4.ops.slots.prefix_slots``."""
    entry = torch.arange(args.page_table.shape[1] * args.page_size, device=args.counts.device)
    shown = torch.where(entry < args.counts.unsqueeze(-1), entry, -1)
    return _slots(args.page_table, args.page_size, args.sequences.unsqueeze(-1), shown)


def window_slots(args: WindowSlotsArgs) -> torch.Tensor:
    """See ``dsv4.ops.slots.window_slots``."""
    back = torch.arange(1 - args.window, 1, device=args.positions.device)
    seen = args.positions.to(torch.int64).unsqueeze(-1) + back
    ring = torch.where(seen < 0, -1, seen % max(1, args.page_table.shape[1] * args.page_size))
    return _slots(args.page_table, args.page_size, args.sequences.unsqueeze(-1), ring)


def _slots(
    table: torch.Tensor, page_size: int, sequence: torch.Tensor, entry: torch.Tensor
) -> torch.Tensor:
    sequence, entry = sequence.to(torch.int64), entry.to(torch.int64)
    if table.numel() == 0:
        return torch.full(entry.shape, -1, dtype=torch.int64, device=entry.device)
    inside = (sequence >= 0) & (entry >= 0) & (entry < table.shape[1] * page_size)
    entry = torch.where(inside, entry, 0)
    page = table[sequence.clamp(min=0), entry // page_size].to(torch.int64)
    return torch.where(inside, page * page_size + entry % page_size, -1)
