"""The runner: the text of a request is its own, whatever else runs, waits or leaves."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.serving import Runner, SamplingOptions
from dsv4.testing.models import random_model
from tests.serving.cases import ToyModel, assert_empty, option_sets, plain_text


@functools.cache
def toy() -> ToyModel:
    return ToyModel()


@functools.cache
def tiny(numerics: str) -> object:
    """A real model; in float64, so that no order of a sum changes a token."""
    return random_model(ModelConfig.tiny(numerics=numerics), 3, torch.float64)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts of which many begin alike, some beyond a page."""
    stem = draw(st.sampled_from([0, 0, 5, 256, 300, 512]))
    tail = draw(st.lists(st.integers(0, 127), min_size=0 if stem else 1, max_size=20))
    return [(7 * i + 3) % 128 for i in range(stem)] + tail


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, object]:
    most = draw(st.integers(1, 5))
    chunk = draw(st.sampled_from([64, 100, 600]))
    buckets = draw(st.sampled_from([None, (most,), tuple({1, 2, most} & set(range(1, most + 1)))]))
    return {
        "max_sequences": most,
        "max_tokens": 600,
        "max_chunk": chunk,
        "pool_tokens": draw(st.sampled_from([None, 768, 1100])),
        "buckets": buckets,
        "prompt_buckets": draw(st.sampled_from([None, (), (16, chunk), (chunk,)])),
        "prefix_sequences": draw(st.integers(0, 3)),
    }


@pytest.mark.costly(3)
@given(st.data(), sizes(), st.lists(st.tuples(prompts(), option_sets()), min_size=1, max_size=6))
def test_the_text_of_a_request_is_its_own(data, size, asked) -> None:
    model = toy()
    runner = Runner(model, **size)
    requests = []
    for prompt, options in asked:
        requests.append(runner.add(prompt, options))
        for _ in range(data.draw(st.integers(0, 4), label="steps before the next")):
            runner.step()
    runner.run()
    for request, (prompt, options) in zip(requests, asked, strict=True):
        assert request.tokens == plain_text(model, prompt, options, request.seed), request
        assert request.finish_reason in ("stop", "length")
        assert len(request.logprobs) == (0 if options.logprobs is None else len(request.tokens))
    assert_empty(runner)


@pytest.mark.costly(3)
@given(st.data(), st.lists(option_sets(), min_size=2, max_size=5), st.integers(1, 3))
def test_a_conversation_goes_on_where_it_ended(data, options, retained) -> None:
    """Prompts that are what an earlier request held, or a part of it, or go beyond it."""
    model = toy()
    runner = Runner(model, max_sequences=2, max_tokens=900, prefix_sequences=retained)
    prompt = [(3 * i + 1) % 128 for i in range(250)]
    for sampling in options:
        request = runner.add(prompt, sampling)
        for _ in range(data.draw(st.sampled_from([0, 2, 5, 99]), label="steps")):
            runner.step()
        if data.draw(st.booleans(), label="cancel"):
            runner.cancel(request)
        runner.run()
        text = plain_text(model, prompt, sampling, request.seed)
        assert request.tokens == text[: len(request.tokens)]
        assert request.finish_reason == "cancelled" or len(request.tokens) == len(text)
        held = len(prompt) + len(request.tokens) - data.draw(st.integers(-1, 2), label="less")
        prompt = [*prompt, *request.tokens, 7, 7][: max(250, held)]
    assert_empty(runner)


LAST = SamplingOptions(max_new_tokens=3, stop_ids=())


@pytest.mark.costly(3)
@given(st.lists(option_sets(80), min_size=3, max_size=3), st.sampled_from([None, (3,)]))
@example([SamplingOptions(repetition_penalty=1.4, max_new_tokens=80, stop_ids=())] * 3, None)
def test_a_preempted_request_has_the_same_text(options, buckets) -> None:
    """Three sequences that outgrow their pages, where there are four, and one that waits."""
    model = toy()
    runner = Runner(
        model, max_sequences=3, max_tokens=512, pool_tokens=1024, buckets=buckets, max_chunk=512
    )
    asked = [([i] * 230, sampling) for i, sampling in enumerate([*options, LAST])]
    requests = [runner.add(prompt, sampling) for prompt, sampling in asked]
    while runner.step():  # who came first goes on first
        order = [sequence.request.number for sequence in runner._scheduler.running]
        order += [request.number for request in runner._scheduler.waiting]
        assert order == sorted(order)
    for request, (prompt, sampling) in zip(requests, asked, strict=True):
        assert request.tokens == plain_text(model, prompt, sampling, request.seed)
    assert_empty(runner)


def test_no_step_is_wasted_where_the_end_is_known() -> None:
    model, sizes = ToyModel(), []
    forward = model.model.forward
    model.model.forward = lambda ids, *rest: sizes.append(ids.shape[1]) or forward(ids, *rest)
    runner = Runner(model, max_sequences=2, max_tokens=64)
    runner.add([1, 2, 3], max_new_tokens=1, stop_ids=())
    runner.add([4, 5], max_new_tokens=4, stop_ids=())
    runner.run()
    assert sizes == [5, 1, 1, 1]


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_real_model_serves_as_it_decodes_alone(numerics) -> None:
    """Padding, prefixes that fork, preemption and chunks, over page and window borders."""
    model = tiny(numerics)
    stem = [(5 * i + 1) % 128 for i in range(260)]
    drawn = SamplingOptions(temperature=0.9, top_p=0.9, seed=4, max_new_tokens=8, stop_ids=())
    asked = [
        ([1, 2, 3], SamplingOptions(max_new_tokens=20, stop_ids=())),
        ([*stem, 9], drawn),
        ([*stem, 10, 11], SamplingOptions(max_new_tokens=8, stop_ids=(), repetition_penalty=1.2)),
        (stem, drawn),
    ]
    runner = Runner(
        model,
        max_sequences=3,
        max_tokens=300,
        max_chunk=100,
        pool_tokens=600,
        buckets=(1, 3),
        prompt_buckets=(16, 100),
    )
    requests = [runner.add(prompt, options) for prompt, options in asked]
    runner.run()
    for request, (prompt, options) in zip(requests, asked, strict=True):
        assert request.tokens == plain_text(model, prompt, options, request.seed), request
    assert_empty(runner)
