"""Projections of a compressor, and of its indexer, as one operator for few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.layers.linear import Linear
from dsv4.ops.compressor_projections import compressor_projections

# Most tokens for which one launch multiplies all weights. GEMMs of more tokens fill the GPU by
# themselves; they run on side streams.
_MOST_TOKENS = 64

Pooled = tuple[torch.Tensor, torch.Tensor]


class Projections(NamedTuple):
    """Results of all projections of a compressor and an indexer.

    Attributes:
        pooled: Values and scores of the compressor, ``[T, C]`` each.
        keys: Those of the indexer's compressor, ``[T, c]`` each; empty without an indexer.
        heads: Weights of the indexer's heads, ``[T, n]``; n is 0 without an indexer.
    """

    pooled: Pooled
    keys: tuple[torch.Tensor, ...]
    heads: torch.Tensor


def are_merged(layers: Sequence[Linear], x: torch.Tensor) -> bool:
    """Return whether ``projections_of`` takes the layers and ``x [T, H]``.

    It takes few tokens, and plain weights of the dtype of ``x`` that are not being calibrated.
    """
    if x.dim() != 2 or x.shape[0] > _MOST_TOKENS:
        return False
    for layer in layers:
        if layer.format is not None or layer.observer is not None:
            return False
        if layer.weight.dtype != x.dtype:
            return False
    return True


def projections_of(
    layers: Sequence[Linear], x: torch.Tensor, out_dtype: torch.dtype | None
) -> Projections:
    """Multiply ``x [T, H]`` by all weights of a compressor and its indexer in one operator.

    Args:
        layers: Values and scores of the compressor; then, with an indexer, those of its compressor
            and the weights of its heads.
        x: Hidden states, for which ``are_merged`` holds.
        out_dtype: Dtype of values and scores; None for that of ``x``.
    """
    weights = [layer.weight for layer in layers]
    out, heads = compressor_projections(x, *weights, out_dtype=out_dtype)
    columns = [layer.out_features for layer in layers[:4]]
    kv, score, *index = out.split_with_sizes(columns, dim=-1)
    return Projections((kv, score), tuple(index), heads)
