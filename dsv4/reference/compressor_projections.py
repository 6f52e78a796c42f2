"""Reference implementation of ``dsv4.ops.compressor_projections``."""

from __future__ import annotations

import torch
from torch.nn import functional

from dsv4.ops.compressor_projections import CompressorProjectionsArgs
from dsv4.reference._precision import compute_dtype


def compressor_projections(args: CompressorProjectionsArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.compressor_projections.compressor_projections``."""
    wide = compute_dtype(args.x, *args.pooled, args.heads)
    x = args.x.to(wide)
    pooled = [functional.linear(x, weight.to(wide)) for weight in args.pooled]
    if args.heads is None:
        heads = args.x.new_empty((x.shape[0], 0))
    else:
        heads = functional.linear(x, args.heads.to(wide)).to(args.x.dtype)
    return torch.cat(pooled, -1).to(args.out_dtype), heads
