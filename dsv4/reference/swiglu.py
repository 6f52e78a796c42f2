"""Reference implementation of ``dsv4.ops.swiglu``."""

from __future__ import annotations

import torch

from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.ops.swiglu import SwigluArgs, SwigluQuantizeArgs
from dsv4.reference._precision import compute_dtype
from dsv4.reference.quantize import quantize_nvfp4


def swiglu(args: SwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.swiglu.swiglu``."""
    wide = args.gate_up.to(compute_dtype(args.gate_up))
    if args.layout == "interleaved":
        gate, up = wide.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        gate, up = wide.chunk(2, -1)
    # Before the clamp, which would turn an infinity into a plausible number.
    finite = gate.isfinite() & up.isfinite()
    if args.limit is not None:
        gate, up = gate.clamp(max=args.limit), up.clamp(-args.limit, args.limit)
    out = torch.nn.functional.silu(gate) * up
    out = torch.where(finite, out, torch.nan)
    if args.row_weight is not None:
        out = out * args.row_weight.to(out.dtype).unsqueeze(-1)
    return out.to(args.out_dtype).contiguous()


def swiglu_quantize(args: SwigluQuantizeArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.swiglu.swiglu_quantize``."""
    inner = swiglu(
        SwigluArgs(args.gate_up, args.limit, args.layout, args.row_weight, args.gate_up.dtype)
    )
    return quantize_nvfp4(
        QuantizeNvfp4Args(inner, args.global_scale, args.scaling, args.scale_layout)
    )
