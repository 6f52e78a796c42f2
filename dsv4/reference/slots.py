"""Meaning of ``dsv4.ops.slots``."""

from __future__ import annotations

import torch


def entry_slots(
    page_table: torch.Tensor, page_size: int, sequences: torch.Tensor, entries: torch.Tensor
) -> torch.Tensor:
    """See ``dsv4.ops.slots.entry_slots``."""
    if entries.dim() == 2:
        sequences = sequences.unsqueeze(-1)
    return _slots(page_table, page_size, sequences, entries)


def prefix_slots(
    page_table: torch.Tensor, page_size: int, sequences: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """See ``dsv4.ops.slots.prefix_slots``."""
    entry = torch.arange(page_table.shape[1] * page_size, device=counts.device)
    shown = torch.where(entry < counts.unsqueeze(-1), entry, -1)
    return _slots(page_table, page_size, sequences.unsqueeze(-1), shown)


def window_slots(
    page_table: torch.Tensor,
    page_size: int,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """See ``dsv4.ops.slots.window_slots``."""
    back = torch.arange(1 - window, 1, device=positions.device)
    seen = positions.to(torch.int64).unsqueeze(-1) + back
    ring = torch.where(seen < 0, -1, seen % max(1, page_table.shape[1] * page_size))
    return _slots(page_table, page_size, sequences.unsqueeze(-1), ring)


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
