"""A small model with a DSpark draft, and steps of it that fill the draft's context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsv4.config import CSA, HCA, SLIDING, DSparkConfig, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.speculation.dspark import DSparkDraft
from dsv4.testing.models import random_model

DSPARK = DSparkConfig(block_size=5, noise_token_id=47, target_layer_ids=(0, 1, 2), markov_rank=8)


def small(dspark: DSparkConfig = DSPARK, **changes: Any) -> ModelConfig:
    """A main layer of each type, all of which the draft reads."""
    fixed = {
        "layer_types": (SLIDING, CSA, HCA), "hidden_size": 32, "num_attention_heads": 2,
        "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 16, "vocab_size": 48,
        "n_routed_experts": 4, "moe_intermediate_size": 16, "dspark": dspark,
    }  # fmt: skip
    return ModelConfig.tiny(**{**fixed, **changes})


def model_of(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64
) -> DeepseekV4ForCausalLM:
    return random_model(config, seed, dtype, mtp=True)


@dataclass
class Sequences:
    """Sequences in a cache of which the draft knows every token.

    Attributes:
        draft: The draft of the model.
        cache: The model's cache.
    """

    draft: DSparkDraft
    cache: PagedCache

    @classmethod
    def of(cls, model: DeepseekV4ForCausalLM, count: int = 1, **options: Any) -> Sequences:
        sizes = {"max_chunk": 64, "max_sequences": count, "max_tokens": 256, **options}
        cache = PagedCache(model.config, dtype=model.dtype, **sizes)
        for _ in range(count):
            cache.allocate()
        return cls(DSparkDraft(model), cache)

    @torch.inference_mode()
    def step(
        self, pieces: dict[int, list[int]], accepted: dict[int, int] | None = None
    ) -> torch.Tensor:
        """Process new tokens of some rows and commit their context; taps ``[T, layers * H]``."""
        rows, lengths = list(pieces), [len(piece) for piece in pieces.values()]
        starts = self.cache.lengths[torch.tensor(rows)]
        self.cache.prepare(rows, lengths, None if self.cache.pooled else starts.tolist())
        batch = Batch.from_lengths(lengths, starts, torch.tensor(rows))
        ids = torch.tensor([[token for piece in pieces.values() for token in piece]])
        taps = self.draft.taps()
        self.draft.model.model(ids, None, CacheStep(self.cache, batch), taps=taps)
        counts = None if accepted is None else torch.tensor([accepted[row] for row in rows])
        self.cache.advance(batch)
        self.draft.commit(taps, self.cache, batch, counts)
        return taps.joined()[0]

    def propose(self, anchors: dict[int, int], **options: Any):
        """Draft after an anchor of each row, at its end."""
        rows = torch.tensor(list(anchors))
        positions = self.cache.lengths[rows.clamp(min=0)]
        return self.draft.draft(
            torch.tensor(list(anchors.values())), self.cache, rows, positions, **options
        )
