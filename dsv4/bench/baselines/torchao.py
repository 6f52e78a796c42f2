"""torchao: its quantisers in PyTorch, compiled.

torchao's own kernel for NVFP4 is MSLK's, a package of its own that needs a GPU with the FP4
conversion instruction; everywhere else its definition in PyTorch runs, which is meant to be
compiled. Seen with torchao 0.18, against ours:

- It multiplies by the reciprocal of the block scale where we divide, so a code on the border
  between two values may be the other one.
- Block scales are at least 2^-6, the smallest normal number of E4M3; ours may be subnormal or 0.
- A block with a NaN or an infinity is not handled separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4.bench.baselines._prepare import Call, FromLibrary, Table
from dsv4.bench.baselines.inductor import compiled
from dsv4.ops.quantize import QuantizeMxfp4Args, QuantizeNvfp4Args
from dsv4.quant.formats import SWIZZLED

NAME = "torchao (compiled)"
_LARGEST = 448.0 * 6.0
_MODULE = "torchao.prototype.mx_formats"


def _nvfp4(library: Any, args: QuantizeNvfp4Args) -> Call:
    """Quantise one matrix; its global scale is given, or made for the matrix or for each row."""
    x, scaling = args.x, args.scaling
    if x.ndim != 2 or scaling == "weight":
        raise ValueError(f"x has {x.ndim} axes, scaling is {scaling!r}")
    if args.global_scale is not None:
        # One number, or one for each row.
        shape = () if args.global_scale.numel() == 1 else (-1, 1)
        scale = args.global_scale.view(shape)
        return compiled(_given_scale(args.layout), (x, scale))
    return compiled(_own_scale(scaling, args.layout), (x,))


@functools.cache
def _given_scale(layout: str) -> Callable[..., Any]:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
    from torchao.prototype.mx_formats.utils import to_blocked

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales, codes = nvfp4_quantize(x, 16, scale)
        return codes, to_blocked(scales) if layout == SWIZZLED else scales, scale

    return quantize


@functools.cache
def _own_scale(scaling: str, layout: str) -> Callable[..., Any]:
    quantize = _given_scale(layout)

    def measure_and_quantize(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = x.abs()
        amax = size.amax(-1, keepdim=True) if scaling == "token" else size.amax()
        return quantize(x, amax.float() / _LARGEST)

    return measure_and_quantize


def _mxfp4(library: Any, args: QuantizeMxfp4Args) -> Call:
    return compiled(_powers_of_two(args.layout), (args.x,))


@functools.cache
def _powers_of_two(layout: str) -> Callable[..., Any]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    swizzled = layout == SWIZZLED

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales, codes = to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL, swizzled)
        return codes, scales

    return quantize


BASELINES: Table = {
    "quantize_nvfp4": {NAME: FromLibrary(_MODULE, _nvfp4)},
    "quantize_mxfp4": {NAME: FromLibrary(_MODULE, _mxfp4)},
}
