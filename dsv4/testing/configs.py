"""Hypothesis strategies for whole configurations, and for ways to cut a sequence into chunks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from dsv4.config import CSA, HCA, SLIDING, CompressRates, ModelConfig


def tiny_configs(**fixed: Any) -> st.SearchStrategy[ModelConfig]:
    """Small random models: any order of the layer types, either router, odd sizes.

    Args:
        **fixed: Fields that are not drawn, e.g. ``numerics="transformers"``.
    """
    return st.builds(
        _tiny,
        layer_types=st.permutations((SLIDING, CSA, HCA)),
        hash_layers=st.integers(0, 3),
        rates=st.sampled_from([(4, 8), (2, 4), (4, 16), (3, 5)]),
        window=st.integers(1, 9),
        heads=st.sampled_from([(2, 1), (4, 2), (6, 3)]),
        topk=st.integers(1, 6),
        experts=st.sampled_from([(4, 1), (8, 2), (5, 3)]),
        fixed=st.just(fixed),
    )


def _tiny(
    layer_types: list[str],
    hash_layers: int,
    rates: tuple[int, int],
    window: int,
    heads: tuple[int, int],
    topk: int,
    experts: tuple[int, int],
    fixed: dict[str, Any],
) -> ModelConfig:
    drawn: dict[str, Any] = {
        "layer_types": tuple(layer_types),
        "mlp_layer_types": ("hash_moe",) * hash_layers + ("moe",) * (3 - hash_layers),
        "compress_rates": CompressRates(*rates),
        "sliding_window": window,
        "num_attention_heads": heads[0],
        "o_groups": heads[1],
        "index_topk": topk,
        "n_routed_experts": experts[0],
        "num_experts_per_tok": experts[1],
    }
    return ModelConfig.tiny(**{**drawn, **fixed})


def chunkings(total: int) -> st.SearchStrategy[list[int]]:
    """Ways to write ``total`` as a sum of positive chunk lengths."""
    cuts = st.lists(st.integers(1, max(1, total - 1)), unique=True, max_size=total)
    return cuts.map(lambda inner: _lengths(sorted({c for c in inner if c < total}), total))


def _lengths(cuts: list[int], total: int) -> list[int]:
    edges = [0, *cuts, total]
    return [b - a for a, b in pairwise(edges) if b > a]
