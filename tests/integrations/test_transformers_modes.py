"""Every way to run a model over a cache, with every subset of its parts swapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.integrations.transformers import PARTS, apply, paged_cache
from dsv4.testing.models import random_model, transformers_twin

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
PROMPT, NEW = 11, 6
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True},
    "beam": {"num_beams": 2},
    "chunked": {"prefill_chunk_size": 4},
}
subsets = st.lists(st.sampled_from(PARTS), min_size=1, unique=True).map(
    lambda parts: tuple(part for part in PARTS if part in parts)
)


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers; narrower than float32 with what it keeps in float32 so."""
    model: Any = transformers_twin(random_model(ModelConfig.tiny(numerics="transformers"), seed))
    names = set(model.model._keep_in_fp32_modules_strict)
    wide = type(model.model.norm)(4)(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype
    if wide != torch.bfloat16:  # transformers 5.17 cannot run its norms in float32
        names = {name for name in names if "norm" not in name}
    parameters = {
        name: p.data for name, p in model.named_parameters() if names & set(name.split("."))
    }
    model.to(dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameters.get(name, parameter.data)
    return model


def ids_of(batch: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 128, (batch, length), generator=generator)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def generated(model: Any, ids: torch.Tensor, mode: str, **cache: Any) -> torch.Tensor:
    torch.manual_seed(7)
    options = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, **{**options, **MODES[mode]}, **cache)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@given(parts=subsets, seed=st.integers(0, 50))
@example(parts=("attention",), seed=0)
@example(parts=PARTS, seed=1)
@settings(max_examples=3)
def test_generates_the_tokens_of_transformers(mode: str, parts: Any, seed: int) -> None:
    model, twin = model_of(seed), model_of(seed)
    apply(model, parts=parts)
    ids = ids_of(2, PROMPT, seed)
    expected = generated(twin, ids, mode)
    assert torch.equal(generated(model, ids, mode), expected)
    if "attention" in parts and mode != "beam":
        pages = paged_cache(model, max_tokens=PROMPT + NEW, max_sequences=2)
        assert torch.equal(generated(model, ids, mode, past_key_values=pages), expected)


@torch.no_grad()
def stepped(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    pieces = (ids[:, :7], *ids[:, 7:].split(1, dim=1))
    logits = [model(p, past_key_values=cache, use_cache=True).logits for p in pieces]
    return torch.cat(logits, 1).double()


@pytest.mark.slow
@given(parts=subsets, seed=st.integers(0, 50))
@example(parts=("attention",), seed=0)
@example(parts=PARTS, seed=1)
@settings(max_examples=3)
def test_steps_in_bfloat16_are_as_near_the_truth_as_transformers(parts: Any, seed: int) -> None:
    """Medians of the tokens: where another expert is chosen, a token may be far off in either."""
    ids = ids_of(2, 23, seed)
    truth_model, twin, model = (
        model_of(seed),
        model_of(seed, torch.bfloat16),
        model_of(seed, torch.bfloat16),
    )
    apply(model, parts=parts)
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    truth = stepped(truth_model, ids, transformers.DynamicCache(config=model.config))
    theirs = stepped(twin, ids, caches[0])
    result = [stepped(model, ids, caches[1])]
    if "attention" in parts:
        result.append(stepped(model, ids, paged_cache(model, max_tokens=23, max_sequences=2)))
    off = (theirs - truth).norm(dim=-1).median()
    for logits in result:
        assert (logits - truth).norm(dim=-1).median() <= 1.5 * off
