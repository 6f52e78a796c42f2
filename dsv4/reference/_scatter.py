"""Scatter with rows to skip, without a host synchronisation."""

from __future__ import annotations

import torch


def put_rows(target: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """``target[index[i]] = rows[i]`` in place, except where ``index[i] < 0``.

    A skipped row repeats the write of the first row that is not skipped (or, if there is none,
    rewrites target row 0 with itself): equal values to one place, so the result is defined, and no
    boolean mask has to be counted on the host.

    Args:
        target: ``[S, ...]``.
        index: ``[M]`` int, distinct where not negative.
        rows: ``[M, ...]`` of ``target``'s dtype.
    """
    if index.shape[0] == 0 or target.shape[0] == 0:
        return
    target_row, rows = merge_skipped(index, rows, target[:1])
    target[target_row] = rows


def merge_skipped(
    index: torch.Tensor, rows: torch.Tensor, row_zero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and rows for ``put_rows``; ``row_zero`` is ``[1, ...]``, what row 0 holds now."""
    index = index.to(torch.int64)
    keep = index >= 0
    first = keep.to(torch.int8).argmax(0, keepdim=True)
    wide = [-1] + [1] * (rows.ndim - 1)
    instead = torch.where(keep[first].view(wide), rows[first], row_zero)
    target_row = torch.where(keep, index, index[first].clamp(min=0))
    return target_row, torch.where(keep.view(wide), rows, instead)
