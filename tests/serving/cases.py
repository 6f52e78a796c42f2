"""Requests, a model that costs nothing, and the text that each request must have."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from dsv4 import layers
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.paged_cache import CacheStep, LayerCache, PagedCache
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.quant.formats import FRAGMENTS
from dsv4.serving import Request, Runner, SamplingOptions
from dsv4.serving.sampler import Parameters, Variant, sample
from dsv4.testing.models import random_model

_PRIME = 1_000_003


class Recurrence(nn.Module):
    """A replacement of the layers: a hash of all tokens, kept where the layers keep theirs.

    The hashes of a sequence lie in the compressor state of its row, where those of the layers lie,
    and its tokens in the window pages and the compressed entries. A wrong fork, a stale row, a lost
    page or a rollback that takes back too little changes the text.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, 1, dtype=torch.float64)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor | None, step: CacheStep
    ) -> tuple[torch.Tensor, None]:
        layer, batch, tokens = step.cache.layers[1], step.batch, ids[0].tolist()
        assert layer.state is not None
        window, state = layer.window.data.flatten(0, 1).numpy(), layer.state.numpy()
        owners = batch.sequence_of_token.tolist()
        written = step.write_slots(layer).tolist()
        for owner, slot, token in zip(owners, written, tokens, strict=True):
            if owner >= 0:
                assert 0 <= slot < len(window)
                window[slot, 0] = token
        hashes = torch.zeros(len(tokens), dtype=torch.float64)
        cu, starts, indices = (
            x.tolist() for x in (batch.cu_seqlens, batch.starts, batch.positions)
        )
        read = step.read_slots(layer).tolist()
        for b, row in enumerate(batch.sequences.tolist()):
            if row < 0 or cu[b] == cu[b + 1]:
                continue
            slots = state.shape[1]
            value = int(state[row, (starts[b] - 1) % slots, 0, 0]) if starts[b] else 0
            for t in range(cu[b], cu[b + 1]):
                seen = [int(window[slot, 0]) for slot in read[t] if slot >= 0]
                assert seen[-1] == tokens[t]
                value = value * 31 + tokens[t] + sum(i * x for i, x in enumerate(seen, 1))
                value = (value + self._entries(layer, row, indices[t], value)) % _PRIME
                hashes[t] = state[row, indices[t] % slots, 0, 0] = value
        return hashes.view(1, -1, 1), None

    def _entries(self, layer: LayerCache, row: int, position: int, value: int) -> int:
        """Store an entry where one closes, and read the first and the last."""
        assert layer.compressed is not None
        assert layer.compressed_table is not None
        count = (position + 1) // layer.ratio
        if not count or count > layer.compressed_capacity:  # of a draft beyond the longest text
            return 0
        size, data = layer.compressed.page_size, layer.compressed.data.numpy()
        first, last = (
            (int(layer.compressed_table[row, e // size]), e % size) for e in (0, count - 1)
        )
        assert first[0] >= 0
        assert last[0] >= 0
        if (position + 1) % layer.ratio == 0:
            data[(*last, 0)] = value % _PRIME
        return int(data[(*first, 0)] + data[(*last, 0)])


class ToyModel(DeepseekV4ForCausalLM):
    """The cache and the interface of a model, without its arithmetic; exact in float64."""

    def __init__(self, **changes: Any) -> None:
        types = (SLIDING, CSA, HCA)
        config = ModelConfig.tiny(layer_types=types, numerics="transformers", **changes)
        super().__init__(config, mtp=False)
        self.model = Recurrence(config)  # type: ignore[assignment]
        self.to(torch.float64).eval().requires_grad_(False)
        self.failing: set[int] = set()  # hashes whose logits are NaN

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        number = torch.arange(1, self.config.vocab_size + 1, dtype=torch.float64)
        logits = 3 * torch.sin(hidden * number)
        broken = torch.tensor([int(value) in self.failing for value in hidden[:, 0]])
        return logits.masked_fill(broken.unsqueeze(1), torch.nan)


def last_hash(cache: PagedCache, row: int) -> int:
    """The toy's hash of all tokens of a row."""
    state = cache.layers[1].state
    assert state is not None
    return int(state[row, (int(cache.lengths[row]) - 1) % state.shape[1], 0, 0])


def wide(
    numerics: str = "deepseek", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> DeepseekV4ForCausalLM:
    """Small, but wide enough for the kernels that dispatch would choose for a published model."""
    config = ModelConfig.tiny(
        numerics=numerics, layer_types=(SLIDING, CSA, HCA), hidden_size=128, head_dim=512,
        qk_rope_head_dim=64, num_attention_heads=16, index_head_dim=128, q_lora_rank=64,
        o_groups=2, o_lora_rank=32, moe_intermediate_size=128, sliding_window=128,
        compress_rates={CSA: 4, HCA: 128},
    )  # fmt: skip
    return random_model(config.replace(**changes), 3, dtype)


def packed(
    numerics: str = "deepseek", layout: str = FRAGMENTS, **changes: Any
) -> DeepseekV4ForCausalLM:
    """``wide`` in NVFP4 and packed: its decode steps can be captured."""
    model = wide(numerics, **changes)
    layers.quantize_(model)
    assert layers.pack_(model, layout).kept == {}
    return model


def plain_logits(model: DeepseekV4ForCausalLM, tokens: list[int], cache: Any, row: int) -> Any:
    """Logits after one more step of an eager loop."""
    if int(cache.lengths[row]) == 0:
        return model.prefill([tokens], cache, [row])
    return model.decode(torch.tensor(tokens[-1:]), cache, [row])


def plain_text(
    model: DeepseekV4ForCausalLM, prompt: list[int], options: SamplingOptions, seed: int
) -> list[int]:
    """The answer by a plain loop of prefill and decode with the definition of the sampler."""
    total = len(prompt) + options.max_new_tokens
    cache = model.new_cache(1, total)
    row = cache.allocate()
    tokens, stops = list(prompt), set(options.stop_ids or ())
    while len(tokens) < total:
        logits = plain_logits(model, tokens, cache, row)
        present = torch.zeros(1, model.config.vocab_size, dtype=torch.bool)
        present[0, tokens] = True
        token = int(sample(logits, parameters(options, seed, len(tokens), present), _ALL))
        if token < 0:
            break
        tokens.append(token)
        if token in stops:
            break
    return tokens[len(prompt) :]


_ALL = Variant(draw=True, filters=True, penalty=True)


def parameters(
    options: SamplingOptions, seed: int, position: int, present: torch.Tensor
) -> Parameters:
    """State of one row."""
    wide = {"dtype": torch.float64}
    min_p = torch.tensor([options.min_p], **wide)
    return Parameters(
        temperature=torch.tensor([options.temperature], **wide),
        top_p=torch.tensor([options.top_p], **wide),
        log_min_p=min_p.log(),
        penalty=torch.tensor([options.repetition_penalty], **wide),
        top_k=torch.tensor([options.top_k or present.shape[1]]),
        seed=torch.tensor([seed]),
        position=torch.tensor([position]),
        present=present,
    )


def option_sets(max_new_tokens: int = 12) -> st.SearchStrategy[SamplingOptions]:
    """Options of every kind, alone and together."""
    return st.builds(
        SamplingOptions,
        temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
        top_k=st.sampled_from([None, 1, 5, 40]),
        top_p=st.sampled_from([1.0, 0.5, 0.9]),
        min_p=st.sampled_from([0.0, 0.1, 0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        seed=st.integers(0, 2**63 - 1),
        stop_ids=st.sampled_from([(), (), tuple(range(0, 128, 16))]),
        logprobs=st.sampled_from([None, None, 0, 3]),
        max_new_tokens=st.integers(1, max_new_tokens),
    )


def assert_empty(runner: Runner) -> None:
    """Every page is free once the kept prefixes are given back."""
    runner._prefixes.clear()
    sizes = {table.pool.name: table.pool.size for table in runner.cache._tables.values()}
    assert runner.cache.free_pages == sizes
    assert not any(runner.cache._live)


def ended(requests: list[Request]) -> bool:
    return all(request.done for request in requests)
