"""GEMM and SwiGLU as two operators, each by the best of its own implementations."""

from __future__ import annotations

import torch

from dsv4 import dispatch
from dsv4.ops._library import as_record
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.swiglu import SwigluArgs


def gemm_swiglu(args: GemmSwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``. Allocates the float32 result of the GEMM."""
    wide = torch.float64 if args.x.dtype == torch.float64 else torch.float32
    gate_up = dispatch.first("gemm", as_record(GemmArgs, args, groups=1, out_dtype=wide))
    return dispatch.first(
        "swiglu", SwigluArgs(gate_up, args.limit, "interleaved", None, args.out_dtype)
    )
