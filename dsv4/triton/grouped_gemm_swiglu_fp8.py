"""Grouped GEMM with SwiGLU, and rounding to FP8, as two operators."""

from __future__ import annotations

import torch

from dsv4 import dispatch
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args, gemm_record
from dsv4.ops.quantize import QuantizeFp8TokenArgs


def grouped_gemm_swiglu_fp8(args: GroupedGemmSwigluFp8Args) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm_swiglu_fp8.grouped_gemm_swiglu_fp8``.

    Allocates the result of the GEMM in the dtype that it has by default.
    """
    inner = dispatch.first("grouped_gemm_swiglu", gemm_record(args))
    return dispatch.first("quantize_fp8_token", QuantizeFp8TokenArgs(inner, args.result_layout))
