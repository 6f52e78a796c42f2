"""Models and layers on the meta device whose weights have a format and a layout, but no values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4.config import ModelConfig
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.layers.pack import join_packed_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.quant.formats import FRAGMENTS, NVFP4, SWIZZLED, QuantizedTensor, swizzled_size


def of_each_kind(config: ModelConfig) -> ModelConfig:
    """Return the configuration with one layer of each kind."""
    kinds = dict.fromkeys(zip(config.layer_types, config.mlp_layer_types, strict=True))
    types, routers = zip(*kinds, strict=True)
    return config.replace(
        num_hidden_layers=len(kinds), layer_types=types, mlp_layer_types=routers, dspark=None
    )


def packed_model(config: ModelConfig, layout: str = FRAGMENTS) -> DeepseekV4ForCausalLM:
    """A bfloat16 model on the meta device as ``pack_`` leaves one in NVFP4."""
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config, mtp=False).to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, Linear | DeepseekV4Experts):
                declare_packed(module, layout if module.activation == NVFP4.name else FRAGMENTS)
        join_packed_(model)
    return model


def declare_packed(
    layer: Linear | DeepseekV4Experts, layout: str, exact: Sequence[bool] = ()
) -> None:
    """Give a layer on the meta device NVFP4 weights, in a layout if that can be.

    Args:
        layer: The layer.
        layout: A layout.
        exact: Whether its matrix, or each of its stacks, is exact in FP8; empty: none is.
    """
    if isinstance(layer, Linear):
        _declare_linear(layer, layout, any(exact[:1]))
    else:
        _declare_experts(layer, layout, exact)


def _declare_linear(layer: Linear, layout: str, exact: bool) -> None:
    rows, columns = layer.out_features, layer.in_features
    codes, scales = (
        torch.empty((rows, columns // n), dtype=torch.uint8, device="meta") for n in (2, 16)
    )
    if layout == SWIZZLED:
        scales = torch.empty(
            swizzled_size(rows, columns // 16), dtype=torch.float8_e4m3fn, device="meta"
        )
    exponent = torch.empty(rows, dtype=torch.int8, device="meta") if exact else None
    scale = torch.empty(1, dtype=torch.float32, device="meta")
    try:
        layer.set_weight(QuantizedTensor(codes, scales, scale, NVFP4, layout, (), exponent))
    except ValueError:  # no whole number of tiles: pack_ leaves it
        layer.to_format(NVFP4)


def _declare_experts(layer: DeepseekV4Experts, layout: str, exact: Sequence[bool]) -> None:
    try:
        layer.declare_packed(layout, exact)
    except ValueError:  # no whole number of tiles: pack_ leaves them
        layer.to_format(NVFP4)
