"""PyTorch modules with the names, constructors and parameters of transformers' DeepSeek-V4.

Constructors take a ``dsv4.ModelConfig`` or transformers' ``DeepseekV4Config``. Inference only.
"""

from __future__ import annotations

import warnings
from typing import Any

from dsv4.layers.attention import DeepseekV4Attention
from dsv4.layers.calibrate import Calibration, calibrate
from dsv4.layers.compressor import DeepseekV4CSACompressor, DeepseekV4HCACompressor
from dsv4.layers.decoder import DeepseekV4DecoderLayer, DeepseekV4MTP
from dsv4.layers.dspark import DeepseekV4DSpark
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.fusion import concatenated_linear, fused_linear, join_weights
from dsv4.layers.host_experts import (
    CacheUse,
    HostExperts,
    cache_use,
    expert_counts,
    host_experts_,
    repin_,
)
from dsv4.layers.hyper_connection import DeepseekV4HyperConnection, DeepseekV4HyperHead
from dsv4.layers.indexer import DeepseekV4Indexer, DeepseekV4IndexerScorer
from dsv4.layers.linear import DeepseekV4GroupedLinear, Linear
from dsv4.layers.mlp import DeepseekV4MLP
from dsv4.layers.moe import DeepseekV4SparseMoeBlock
from dsv4.layers.norm import DeepseekV4RMSNorm, DeepseekV4UnweightedRMSNorm
from dsv4.layers.pack import Packing, pack_, unpack_
from dsv4.layers.quantize import quantize_
from dsv4.layers.reserve import reserve_experts, warm_allocator
from dsv4.layers.rotary import DeepseekV4RotaryEmbedding
from dsv4.layers.router import DeepseekV4HashRouter, DeepseekV4TopKRouter

__all__ = [
    "CacheUse",
    "Calibration",
    "DeepseekV4Attention",
    "DeepseekV4CSACompressor",
    "DeepseekV4DSpark",
    "DeepseekV4DecoderLayer",
    "DeepseekV4Experts",
    "DeepseekV4GroupedLinear",
    "DeepseekV4HCACompressor",
    "DeepseekV4HashRouter",
    "DeepseekV4HyperConnection",
    "DeepseekV4HyperHead",
    "DeepseekV4Indexer",
    "DeepseekV4IndexerScorer",
    "DeepseekV4MLP",
    "DeepseekV4MTP",
    "DeepseekV4RMSNorm",
    "DeepseekV4RotaryEmbedding",
    "DeepseekV4SparseMoeBlock",
    "DeepseekV4TopKRouter",
    "DeepseekV4UnweightedRMSNorm",
    "HostExperts",
    "Linear",
    "Packing",
    "cache_use",
    "calibrate",
    "concatenated_linear",
    "expert_counts",
    "fused_linear",
    "host_experts_",
    "join_weights",
    "pack_",
    "quantize_",
    "repin_",
    "reserve_experts",
    "unpack_",
    "warm_allocator",
]


def __getattr__(name: str) -> Any:
    """Return functions by their former names, for one release."""
    if name != "joint_linear":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "dsv4.layers.joint_linear is now dsv4.layers.concatenated_linear"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return concatenated_linear
