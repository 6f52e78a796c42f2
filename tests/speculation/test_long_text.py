"""Greedy text of real draft modules in float32 is that without drafts, over all borders."""

from __future__ import annotations

import functools

import pytest
import torch

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner
from dsv4.testing.models import random_model
from tests.serving.cases import assert_empty
from tests.speculation.dspark_cases import model_of, small
from tests.speculation.mixed_drafts import mix

METHODS = ("mtp", "dspark")
# So that a short text passes the ends of windows, of pages of 64 entries and of 256 tokens.
LENGTHS = (3, 59, 121, 252)


@functools.cache
def model(method: str) -> DeepseekV4ForCausalLM:
    """Every type of layer; no rounding to codes, which the order of a sum could move."""
    common = {"numerics": "transformers", "max_position_embeddings": 2048}
    if method == "dspark":
        return model_of(small(**common), 0, torch.float32)
    config = ModelConfig.tiny(
        layer_types=(SLIDING, CSA, HCA), num_nextn_predict_layers=1, sliding_window=8, **common
    )
    return random_model(config, 4, torch.float32, mtp=True)


def prompts(method: str) -> list[list[int]]:
    vocabulary = model(method).config.vocab_size
    fill = torch.Generator().manual_seed(7)
    return [torch.randint(vocabulary, (n,), generator=fill).tolist() for n in LENGTHS]


def check(method: str, count: int) -> None:
    served, asked = model(method), prompts(method)
    plain = served.generate(asked, count, stop_ids=(), speculate=None)
    runner = Runner(served, max_sequences=3, max_tokens=1300, max_chunk=150, speculate=method)
    mix(runner, {i: [*asked[i], *plain[i]] for i in range(len(asked))}, 0.7, 1)
    requests = [runner.add(prompt, max_new_tokens=count, stop_ids=()) for prompt in asked]
    runner.run()
    for request, text in zip(requests, plain, strict=True):
        assert request.tokens == text
    counts = runner.draft_counts
    assert 1.3 < counts.length < 1 + counts.drafted / counts.steps
    assert_empty(runner)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_that_without_drafts(method: str) -> None:
    check(method, 24)


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
def test_a_thousand_tokens_are_those_without_drafts(method: str) -> None:
    check(method, 1000)
