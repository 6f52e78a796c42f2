"""Helpers for tests of loading with packing and conversion."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import DeepseekV4Experts, Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.testing.assertions import assert_bitwise
from tests.checkpoint.cases import make_model, quantised_modules

# Experts, attention and the rest are whole tiles of both layouts.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "n_routed_experts": 4,
    "vocab_size": 64,
}
CONFIG = ModelConfig.tiny(layer_types=(SLIDING, CSA, HCA), **SIZES)


def packable(model: torch.nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, (Linear, DeepseekV4Experts))]


def mixed(seed: int, formats: list[str | None]) -> DeepseekV4ForCausalLM:
    """A model whose layers have these formats, one after another."""
    model = make_model(CONFIG, seed)
    for number, (_, module) in enumerate(quantised_modules(model)):
        chosen = formats[number % len(formats)]
        if chosen is not None:
            module.quantize(chosen)
    return model


def experts_of(model: torch.nn.Module) -> dict[str, DeepseekV4Experts]:
    result = {n: m for n, m in model.named_modules() if isinstance(m, DeepseekV4Experts)}
    return {name.removesuffix(".mlp.experts"): module for name, module in result.items()}


def same_values(left: torch.nn.Module, right: torch.nn.Module) -> None:
    for first, other in zip(packable(left), packable(right), strict=True):
        if isinstance(first, Linear):
            assert_bitwise(first.dense_weight(), other.dense_weight(), "weight")
            continue
        for name in ("gate_up_proj", "down_proj"):
            assert_bitwise(first.dense_weight(name), other.dense_weight(name), name)
