"""Reference implementation of ``dsv4.ops.nonfinite``."""

from __future__ import annotations

import torch

from dsv4.ops.nonfinite import NO_ROW, MarkNonfiniteArgs


def mark_nonfinite_(args: MarkNonfiniteArgs) -> None:
    """See ``dsv4.ops.nonfinite.mark_nonfinite_``."""
    rows = args.x.shape[0]
    if args.x.numel() == 0:
        return
    bad = ~args.x.reshape(rows, -1).isfinite().all(-1)
    if args.padding is not None:
        bad &= ~args.padding
    number = torch.arange(args.first_row, args.first_row + rows, device=args.x.device)
    first = torch.where(bad, number, NO_ROW).amin().to(torch.int32)
    args.mark.copy_(torch.minimum(args.mark, first))
