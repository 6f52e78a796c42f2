"""Reference implementation of ``dsv4.ops.fp8_token``."""

from __future__ import annotations

import torch

from dsv4.ops.fp8_token import MoeGatherFp8Args, RmsNormFp8Args, SwigluFp8Args
from dsv4.ops.moe import MoeGatherArgs
from dsv4.ops.norm import RmsNormArgs
from dsv4.ops.quantize import QuantizeFp8TokenArgs
from dsv4.ops.swiglu import SwigluArgs
from dsv4.reference.moe import moe_gather
from dsv4.reference.norm import rms_norm
from dsv4.reference.quantize import quantize_fp8_token
from dsv4.reference.swiglu import swiglu


def rms_norm_fp8(args: RmsNormFp8Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.fp8_token.rms_norm_fp8``."""
    y = rms_norm(RmsNormArgs(args.x, args.weight, args.eps))
    return y, *quantize_fp8_token(QuantizeFp8TokenArgs(y, args.result_layout))


def swiglu_fp8(args: SwigluFp8Args) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.fp8_token.swiglu_fp8``."""
    inner = swiglu(
        SwigluArgs(args.gate_up, args.limit, args.layout, args.row_weight, args.gate_up.dtype)
    )
    return quantize_fp8_token(QuantizeFp8TokenArgs(inner, args.result_layout))


def moe_gather_fp8(args: MoeGatherFp8Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.fp8_token.moe_gather_fp8``."""
    gathered = moe_gather(MoeGatherArgs(args.x, args.rows))
    row_weight = torch.empty_like(args.weights, memory_format=torch.contiguous_format).flatten()
    row_weight[args.rows.flatten().long()] = args.weights.flatten()
    codes = quantize_fp8_token(QuantizeFp8TokenArgs(gathered, args.result_layout))
    return *codes, row_weight
