"""Reference implementation of ``dsv4.ops.gemm_swiglu``."""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.swiglu import SwigluArgs
from dsv4.quant.formats import LINEAR
from dsv4.reference._precision import compute_dtype
from dsv4.reference.gemm import gemm
from dsv4.reference.quantize import code_values
from dsv4.reference.swiglu import swiglu


def gemm_swiglu(args: GemmSwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``."""
    if args.x_scales is not None:
        x = code_values(args.x, args.x_scales, args.x_layout, args.out_dtype)
        args = args._replace(x=x, x_scales=None, x_layout=LINEAR)
    wide = compute_dtype(args.x)
    gate_up = gemm(as_record(GemmArgs, args, groups=1, out_dtype=wide))
    return swiglu(SwigluArgs(gate_up, args.limit, "interleaved", None, args.out_dtype))
