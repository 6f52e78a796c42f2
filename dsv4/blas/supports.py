"""Reasons why GEMMs of torch's BLAS libraries cannot run a call; None where they can.

Named in ``dsv4.implementations``.
"""

from __future__ import annotations

import torch

from dsv4.cute.runtime.architectures import BLACKWELL
from dsv4.device import capability, dotted
from dsv4.implementations import Call
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.unsupported import ONLY_REFERENCE, gapped, misaligned, ragged_groups
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, SWIZZLED


def scaled_mm(call: Call) -> str | None:
    """Return why torch's block-scaled GEMM cannot run ``gemm``, or None."""
    args: GemmArgs = call.args
    reason = _operands(args) or _not_blackwell(call.device)
    if reason:
        return reason
    rows, columns = args.codes.shape[0] // args.groups, args.codes.shape[1] * 2
    reason = ragged_groups(rows, columns)
    if reason is None and args.layout == SWIZZLED and args.groups > 1 and rows % 128:
        reason = f"a group has {rows} rows, and swizzled scales of groups begin at multiples of 128"
    return (
        reason
        or gapped("codes or scales", args.codes, args.scales)
        or misaligned(args.codes, args.scales)
    )


def _operands(args: GemmArgs) -> str | None:
    if args.format != NVFP4.name:
        return f"the weight is {args.format!r}, wanted {NVFP4.name!r}"
    if args.x_scales is not None:
        return "x is FP8 codes, and both operands have to be NVFP4"
    if args.activation != NVFP4.name:
        return f"activations are {args.activation!r}, and both operands have to be NVFP4"
    if args.layout == FRAGMENTS:
        return f"the weight has layout {args.layout!r}, wanted {LINEAR!r} or {SWIZZLED!r}"
    if torch.float64 in (args.x.dtype, args.out_dtype):
        return f"x or the result is float64, {ONLY_REFERENCE}"
    return None


def _not_blackwell(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"block-scaled GEMMs run on a CUDA GPU, the tensors are on {device}"
    if capability(device) not in BLACKWELL:
        version = dotted(device)
        return f"block-scaled GEMMs run on compute capability 10.0 and 10.3, not {version}"
    return None
