"""Packed models with a draft for tests on a GPU, as wide as kernels of published models need."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import pack_, quantize_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.testing.models import random_model
from tests._tools.warmed import warmed
from tests.speculation.dspark_cases import DSPARK

METHODS = ("mtp", "dspark")
MAX_TOKENS = 64  # of a step of these tests


def packed(method: str, plain_head: bool = False) -> DeepseekV4ForCausalLM:
    """A small model in NVFP4, its draft layers too; its head may stay bfloat16."""
    config = ModelConfig.tiny(
        layer_types=(SLIDING, CSA, HCA), hidden_size=128, head_dim=512, qk_rope_head_dim=64,
        num_attention_heads=16, index_head_dim=128, q_lora_rank=64, o_groups=2, o_lora_rank=32,
        moe_intermediate_size=128, sliding_window=128, compress_rates={CSA: 4, HCA: 128},
        num_nextn_predict_layers=int(method == "mtp"), max_position_embeddings=2048,
        dspark=replace(DSPARK, markov_rank=32) if method == "dspark" else None,
    )  # fmt: skip
    model = random_model(config, 3, dtype=torch.bfloat16, mtp=True)
    if plain_head:
        quantize_(model, names=["*.experts", "*.shared_experts.*", "*.self_attn.*_proj"])
    else:
        quantize_(model)
    pack_(model)
    return model


@functools.cache
def on_gpu(method: str, plain_head: bool = False) -> DeepseekV4ForCausalLM:
    """``packed`` on a GPU, with the kernels of steps of ``MAX_TOKENS``; tests do not change it."""
    with torch.inference_mode(False):  # a test may be inside it, and others change weights
        return warmed(packed(method, plain_head).cuda(), MAX_TOKENS)
