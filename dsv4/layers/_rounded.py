"""Inputs of projections rounded to FP8 once: behind a norm, or for several projections.

A layer with ``activation="fp8"`` rounds its input itself, so two layers of one input would round it
twice. The functions here return codes that all of them take, with the bits that each would make,
or the values where a layer wants these: a layer that is plain, calibrated, hooked, or of another
package, or inputs that are not bfloat16, which no kernel multiplies as FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from dsv4.layers.linear import DeepseekV4GroupedLinear, Linear
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.ops.fp8_token import code_layout, rms_norm_fp8, swiglu_fp8
from dsv4.ops.quantize import quantize
from dsv4.ops.swiglu import swiglu
from dsv4.quant.formats import FP8_TOKEN, QuantizedTensor

Values = torch.Tensor | QuantizedTensor
# A narrower norm adds up its row in another order when it is fused with the quantiser.
_LEAST_COLUMNS = 128


def rounded_norm(norm: nn.Module, x: torch.Tensor, layers: Sequence[nn.Module]) -> Values:
    """Return ``norm(x)``, rounded in the same launch if all layers that read it take codes.

    Args:
        norm: The norm.
        x: ``[..., D]``.
        layers: All that read the result.
    """
    layout = _common_layout(layers, x)
    if layout is None or x.shape[-1] % _LEAST_COLUMNS or not is_own(norm, DeepseekV4RMSNorm):
        values: torch.Tensor = norm(x)
        return values
    assert isinstance(norm, DeepseekV4RMSNorm)
    flat = x.reshape(-1, x.shape[-1])
    _, codes = rms_norm_fp8(flat, norm.weight, norm.variance_epsilon, result_layout=layout)
    return _shaped(codes, x.shape[:-1])


def rounded_swiglu(gate_up: torch.Tensor, limit: float | None, layer: nn.Module) -> Values:
    """Return ``swiglu(gate_up, limit)``, rounded in the same launch if its reader takes codes."""
    layout = _common_layout([layer], gate_up)
    if layout is None:
        return swiglu(gate_up, limit)
    flat = gate_up.reshape(-1, gate_up.shape[-1])
    return _shaped(swiglu_fp8(flat, limit, result_layout=layout), gate_up.shape[:-1])


def rounded_once(x: torch.Tensor, layers: Sequence[nn.Module]) -> Values:
    """Return ``x``, rounded if several layers that read it take codes of one layout."""
    layout = _common_layout(layers, x) if len(layers) > 1 else None
    if layout is None:
        return x
    codes = quantize(x.reshape(-1, x.shape[-1]), FP8_TOKEN, layout=layout)
    return _shaped(codes, x.shape[:-1])


def _shaped(codes: QuantizedTensor, rows: Sequence[int]) -> QuantizedTensor:
    """Return codes ``[T, K]`` with other leading axes."""
    if len(rows) == 1:
        return codes
    whole = codes.codes.view(*rows, codes.columns)
    return replace(codes, codes=whole, scales=codes.scales.view(*rows, codes.scales.shape[-1]))


def _common_layout(layers: Sequence[nn.Module], x: torch.Tensor) -> str | None:
    """Return the layout of codes of ``x`` that all layers take; None if one takes values."""
    if x.dtype != torch.bfloat16:
        return None
    layouts = {_layout_of(layer) for layer in layers}
    return layouts.pop() if len(layouts) == 1 else None


def _layout_of(layer: nn.Module) -> str | None:
    if not (is_own(layer, Linear) or is_own(layer, DeepseekV4GroupedLinear)):
        return None
    assert isinstance(layer, Linear)
    return code_layout(layer.quantized_weight()) if layer.takes_codes else None


def is_own(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module is of this very class and nobody watches it, who is to see values."""
    return type(module) is kind and not (module._forward_pre_hooks or module._forward_hooks)
