"""What ``explain`` adds where FP8 activations are not multiplied by FP8 tensor cores."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.implementations import Call
from dsv4.quant.exact_fp8 import examine
from dsv4.quant.formats import FP8_TOKEN, FRAGMENTS, LINEAR, NVFP4, QuantizedTensor

_ROUNDED = "activations have FP8's values and are multiplied as bfloat16, at its rate"


def multiplied_as_bfloat16(call: Call) -> str | None:
    """Return how a GEMM of FP8 activations runs and whether its weight is exact in FP8; or None.

    Counts the block scales of the weight, unless it is on the meta device.
    """
    args: Any = call.args
    coded = args.x_scales is not None and args.x.dtype == FP8_TOKEN.codes_dtype
    if args.activation != "fp8" and not coded:
        return None
    codes = args.codes if hasattr(args, "codes") else args.weight
    reason = _inexact(codes, args.scales, args)
    return _ROUNDED if reason is None else f"{_ROUNDED}; {reason}"


def _inexact(codes: torch.Tensor, scales: torch.Tensor | None, args: Any) -> str | None:
    """Return why FP8 tensor cores would round a weight, or None."""
    if args.format != NVFP4.name:
        return None
    if args.row_exponent is not None:
        return "the weight is exact in FP8"
    if args.layout not in (LINEAR, FRAGMENTS) or scales is None or codes.is_meta:
        return None
    weight = QuantizedTensor(codes, scales, args.global_scale, NVFP4, args.layout)
    reason = examine(weight).exactness.reason
    if reason is None:
        return "the weight is exact in FP8, but was not packed by its layer, which notes that"
    return f"the weight is not exact in FP8: {reason}"
