"""Sizes of the published models and of a tiny one; see specification, section 1."""

from __future__ import annotations

from typing import Any

from dsv4.config.layer_types import CompressRates
from dsv4.config.rope_parameters import RopeParameters

# Pro's and the tiny model's differences from Flash.
PRO: dict[str, Any] = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
}
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "index_n_heads": 16,  # with fewer, ReLU leaves ties at 0 for the top-k to break
    "index_head_dim": 32,
    "index_topk": 4,
    "compress_rates": CompressRates(4, 8),
    "max_position_embeddings": 1024,
}


def flash_sizes(layer_types: tuple[str, ...], hash_layers: int = 3) -> dict[str, Any]:
    """Return the fields of Flash with a schedule.

    Args:
        layer_types: Attention type of each layer.
        hash_layers: Layers at the beginning that route by token id.
    """
    count = len(layer_types)
    return {
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": count,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "layer_types": layer_types,
        "mlp_layer_types": (*["hash_moe"] * min(hash_layers, count), *["moe"] * count)[:count],
        "rope_main": RopeParameters(10000.0),
        "rope_compress": RopeParameters(160000.0, factor=16.0),
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 1,
    }
