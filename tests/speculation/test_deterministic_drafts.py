"""A deterministic runner with drafts: bits depend on no draft, right, wrong or missing."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Request, Runner, SamplingOptions
from dsv4.serving.drafting import drafting_of, same_draws
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.verify import NO_DRAFT, Verified
from dsv4.testing.models import random_model
from tests.serving.cases import assert_empty
from tests.speculation.dspark_cases import DSPARK
from tests.speculation.mixed_drafts import mix
from tests.speculation.packed_models import METHODS, on_gpu

REPORT = {"logprobs": 3, "stop_ids": ()}
ASKED = (
    ([1, 2, 3], SamplingOptions(max_new_tokens=12, **REPORT)),
    ([5] * 61, SamplingOptions(temperature=0.9, seed=4, max_new_tokens=9, **REPORT)),
    ([7, 8, 9, 4] * 8, SamplingOptions(max_new_tokens=10, repetition_penalty=1.2, **REPORT)),
)
Result = list[tuple[list[int], Any]]


@functools.cache
def model(method: str) -> DeepseekV4ForCausalLM:
    """In bfloat16, whose products have the same bits in each row of a matrix on a CPU."""
    config = ModelConfig.tiny(
        layer_types=(SLIDING, CSA, HCA), sliding_window=8,
        num_nextn_predict_layers=int(method == "mtp"),
        dspark=DSPARK if method == "dspark" else None,
    )  # fmt: skip
    return random_model(config, 5, torch.bfloat16, mtp=True)


def none_accepted(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parameters: Parameters,
    variant: Variant,
    draft_probabilities: torch.Tensor | None,
) -> Verified:
    """Every draft counts as wrong."""
    nothing = torch.full_like(drafts, NO_DRAFT)
    return same_draws(logits, nothing, parameters, variant, draft_probabilities)


def runner_of(served: DeepseekV4ForCausalLM, **options: Any) -> Runner:
    sizes = {"max_sequences": 3, "max_tokens": 128, "max_chunk": 32, "prefix_sequences": 0}
    return Runner(served, **{**sizes, "deterministic": True, **options})


def results_of(requests: list[Request]) -> Result:
    return [(request.tokens, request.logprobs) for request in requests]


def alone(served: DeepseekV4ForCausalLM, **options: Any) -> Result:
    results = []
    for asked in ASKED:
        runner = runner_of(served, max_sequences=1, **options)
        request = runner.add(*asked)
        runner.run()
        results.append(request)
    return results_of(results)


@functools.cache
def expected(method: str) -> Result:
    """Without a draft that is accepted."""
    return alone(model(method), verify=none_accepted)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=2)
@given(seed=st.integers(0, 999), most=st.integers(1, 3), share=st.sampled_from([0.5, 1.0]))
@example(seed=1, most=3, share=1.0)
def test_bits_are_those_of_wrong_drafts_alone(
    method: str, seed: int, most: int, share: float
) -> None:
    """Whatever is accepted, whoever else runs, and where pages are too few for drafts."""
    runner = runner_of(
        model(method), max_sequences=most, pool_tokens=256, prefix_sequences=1, speculate=method
    )
    draw = random.Random(seed)
    order = draw.sample(range(len(ASKED)), len(ASKED))
    texts = {i: [*ASKED[j][0], *expected(method)[j][0]] for i, j in enumerate(order)}
    mix(runner, texts, share, seed)
    requests = {}
    for number in order:
        requests[number] = runner.add(*ASKED[number])
        for _ in range(draw.randrange(4)):
            runner.step()
    runner.run()
    assert results_of([requests[i] for i in range(len(ASKED))]) == expected(method)
    assert runner.draft_counts.accepted > 3
    assert_empty(runner)


@pytest.mark.parametrize("method", METHODS)
def test_steps_whose_drafts_are_dropped_have_the_same_bits(method: str) -> None:
    """As where the pool is full: the rows of drafts are padding then."""
    runner = runner_of(model(method), speculate=method)
    runner._steps.drafts_of = lambda count: 0
    requests = [runner.add(*asked) for asked in ASKED]
    runner.run()
    assert results_of(requests) == expected(method)
    assert runner.draft_counts.drafted == 0


def test_drafts_whose_bits_could_differ_are_not_made() -> None:
    wide = random_model(ModelConfig.tiny(num_nextn_predict_layers=1), 1, torch.float32, mtp=True)
    reason = drafting_of(wide, "auto", deterministic=True).reason
    assert "on a CPU products of torch.float32 treat the last rows of a matrix otherwise" in reason
    with pytest.raises(ValueError, match="speculate is 'mtp', but the bits of a deterministic"):
        runner_of(wide, speculate="mtp")
    narrow = drafting_of(model("mtp"), "auto", deterministic=True).plan
    assert narrow is not None
    assert replace(narrow, by_size=False) == drafting_of(model("mtp"), "mtp").plan


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_bits_are_those_of_wrong_drafts_alone_on_a_gpu(method: str) -> None:
    served = on_gpu(method)
    plain = alone(served, verify=none_accepted, speculate=method)
    for capture in (False, None):
        assert alone(served, verify=none_accepted, speculate=method, capture=capture) == plain
        runner = runner_of(served, capture=capture, speculate=method)
        requests = [runner.add(*asked) for asked in ASKED]
        runner.run()
        assert results_of(requests) == plain
        dropped = runner_of(served, capture=capture, speculate=method)
        dropped._steps.drafts_of = lambda count: 0
        requests = [dropped.add(*asked) for asked in ASKED]
        dropped.run()
        assert results_of(requests) == plain
        assert (dropped.captures > 0) == (capture is None)
