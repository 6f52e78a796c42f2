"""Attention layers alone, of each type, over a paged cache and over whole sequences without one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers import DeepseekV4Attention
from dsv4.testing.models import randomize_
from dsv4.testing.strategies import normal

TYPES = (SLIDING, CSA, HCA)


def small(**changes: object) -> ModelConfig:
    """A layer of each type, as narrow as they come."""
    fixed = {
        "layer_types": TYPES, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 32,
        "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_groups": 1, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    return ModelConfig.tiny(**{**fixed, **changes})


class Stack(nn.Module):
    """Attention layers that all see the same hidden states; no layer feeds another."""

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.config = config
        self.attention = nn.ModuleList(
            DeepseekV4Attention(config, i) for i in range(config.num_hidden_layers)
        )
        randomize_(self.to(dtype), seed)
        self.eval().requires_grad_(False)

    def cache(self, max_sequences: int, max_tokens: int, **changes: object) -> PagedCache:
        weight = self.attention[0].kv_proj.weight
        return PagedCache(
            self.config, max_sequences=max_sequences, max_tokens=max_tokens,
            device=weight.device, dtype=weight.dtype, **changes,
        )  # fmt: skip

    @torch.no_grad()
    def run(
        self,
        hidden: torch.Tensor,
        cache: PagedCache,
        batch: Batch,
        accepted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step: ``[T, H]`` to ``[T, layers, H]``; ``accepted``: see ``PagedCache.advance``."""
        step = CacheStep(cache, batch)
        out = [layer(hidden[None], past_key_values=step)[0][0] for layer in self.attention]
        cache.advance(batch, accepted)
        return torch.stack(out, 1)

    def step(
        self, cache: PagedCache, rows: Sequence[int], pieces: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Prepare and run a ragged step; the output of each piece."""
        lengths = [len(piece) for piece in pieces]
        cache.prepare(rows, lengths)
        there = torch.tensor(rows, device=cache.lengths.device)
        batch = Batch.from_lengths(lengths, cache.lengths[there], there)
        return list(self.run(torch.cat(list(pieces)), cache, batch).split(lengths))

    @torch.no_grad()
    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """A whole sequence at once, without a cache: ``[S, H]`` to ``[S, layers, H]``."""
        return torch.stack([layer(hidden[None])[0][0] for layer in self.attention], 1)


def shuffled(cache: PagedCache, seed: int) -> PagedCache:
    """The same cache with the free pages of every pool in another order."""
    for table in cache._tables.values():
        random.Random(seed).shuffle(table.pool._free)
    return cache


def tokens(seed: int, count: int, config: ModelConfig) -> torch.Tensor:
    """Hidden states of that number of tokens."""
    return normal(seed, (count, config.hidden_size), torch.float64)
