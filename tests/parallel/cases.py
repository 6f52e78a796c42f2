"""Models that can be split over four ranks."""

from __future__ import annotations

from typing import Any

import torch

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.testing.models import random_model

SIZES: dict[str, Any] = {
    "layer_types": (SLIDING, CSA, HCA),
    "num_attention_heads": 32,
    "head_dim": 32,
    "o_groups": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_nextn_predict_layers": 1,
}
CONFIG = ModelConfig.tiny(**SIZES)
# Whole blocks of every format, and whole tiles, on each of two ranks.
WIDE = ModelConfig.tiny(
    **{**SIZES, "o_groups": 2, "num_attention_heads": 8},
    hidden_size=128, q_lora_rank=128, o_lora_rank=128, moe_intermediate_size=256, vocab_size=256,
)  # fmt: skip


def model(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64, seed: int = 1) -> Any:
    """A random model with its MTP layer."""
    return random_model(config, seed, dtype, mtp=True)


def prompt(model: DeepseekV4ForCausalLM, tokens: int = 21, seed: int = 0) -> torch.Tensor:
    """Token ids ``[1, tokens]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, tokens), generator=generator)
