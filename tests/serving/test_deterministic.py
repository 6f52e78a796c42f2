"""A deterministic runner: the bits of a request are its own, whatever else runs or waits."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.serving import Request, Runner, SamplingOptions
from dsv4.serving.scheduler import Scheduler
from dsv4.testing.models import random_model
from tests.serving.cases import ToyModel, assert_empty, option_sets, packed, plain_text

REPORT = {"logprobs": 4, "stop_ids": ()}
STEM = [(5 * i + 1) % 128 for i in range(260)]
ASKED = (
    ([1, 2, 3], SamplingOptions(max_new_tokens=9, **REPORT)),
    ([*STEM, 9], SamplingOptions(temperature=0.9, seed=4, max_new_tokens=6, **REPORT)),
    ([*STEM, 10, 11], SamplingOptions(max_new_tokens=7, repetition_penalty=1.2, **REPORT)),
    ([*STEM, 9, 4], SamplingOptions(temperature=1.1, top_k=9, seed=1, max_new_tokens=5, **REPORT)),
    (STEM[:130], SamplingOptions(max_new_tokens=6, **REPORT)),
)


@functools.cache
def real(dtype: torch.dtype) -> Any:
    return random_model(ModelConfig.tiny(), 3, dtype)


def small(model: Any, **changes: Any) -> Runner:
    sizes = {"max_sequences": 1, "max_tokens": 300, "max_chunk": 128, "prefix_sequences": 0}
    return Runner(model, **{**sizes, "deterministic": True, **changes})


def result_of(request: Request) -> tuple[object, ...]:
    return request.finish_reason, request.tokens, request.logprobs


def alone(model: Any, prompt: list[int], options: SamplingOptions) -> tuple[object, ...]:
    runner = small(model)
    request = runner.add(prompt, options)
    runner.run()
    return result_of(request)


def together(model: Any, seed: int, **sizes: Any) -> tuple[list[tuple[object, ...]], Runner]:
    """``ASKED``, in a drawn order and with other requests in between."""
    draw, runner = random.Random(seed), small(model, **sizes)
    order = draw.sample(range(len(ASKED)), len(ASKED))
    requests = {}
    for i in order:
        requests[i] = runner.add(*ASKED[i])
        other = runner.add([draw.randrange(128)] * draw.choice((1, 40, 290)), max_new_tokens=9)
        for _ in range(draw.randrange(4)):
            runner.step()
        if draw.random() < 0.3:
            runner.cancel(other)
    runner.run()
    assert_empty(runner)
    return [result_of(requests[i]) for i in range(len(ASKED))], runner


@functools.cache
def expected_of(dtype: torch.dtype) -> list[tuple[object, ...]]:
    return [alone(real(dtype), *asked) for asked in ASKED]


@pytest.mark.slow
@pytest.mark.costly(25)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 2**32), most=st.integers(1, 5), cached_prompts=st.integers(0, 3))
@example(seed=0, most=5, cached_prompts=3)
def test_a_request_has_the_bits_it_has_alone(
    dtype: torch.dtype, seed: int, most: int, cached_prompts: int
) -> None:
    """Batches, preemptions and pages that prompts share change nothing."""
    sizes = {"max_sequences": most, "prefix_sequences": cached_prompts, "pool_tokens": 600}
    result, _ = together(real(dtype), seed, **sizes)
    assert result == expected_of(dtype)


@pytest.mark.slow
def test_other_runners_do_not_promise_it() -> None:
    """Without it the text differs, so the test above can fail."""
    model = real(torch.float32)
    result, _ = together(model, 0, max_sequences=5, prefix_sequences=3, deterministic=False)
    assert result != expected_of(torch.float32)


@pytest.mark.costly(3)
@given(
    st.data(),
    st.lists(st.tuples(st.lists(st.integers(0, 127), min_size=1), option_sets()), min_size=1),
    st.sampled_from([64, 100, 600]),
)
def test_the_text_is_that_of_a_plain_loop(data: Any, asked: Any, chunk: int) -> None:
    model = ToyModel()
    sizes = {"max_sequences": data.draw(st.integers(1, 4)), "max_tokens": 600, "max_chunk": chunk}
    runner = small(model, **sizes, pool_tokens=768, prefix_sequences=2)
    asked = [(prompt * data.draw(st.sampled_from([1, 9])), sampling) for prompt, sampling in asked]
    asked = [(prompt[:500], sampling) for prompt, sampling in asked]
    requests = [runner.add(*sampling) for sampling in asked]
    runner.run()
    for request, (prompt, options) in zip(requests, asked, strict=True):
        assert request.tokens == plain_text(model, prompt, options, request.seed)
    assert_empty(runner)


PREEMPTED = SamplingOptions(max_new_tokens=80, stop_ids=(), temperature=0.7, seed=3, logprobs=2)


def preempted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Three sequences that outgrow their pages, where there are four."""
    resumed, start = [], Scheduler._start

    def noted(self: Scheduler, *args: Any) -> Any:
        sequence = start(self, *args)
        resumed.append(sequence.repeats)
        assert len(sequence.fill) == 230
        return sequence

    monkeypatch.setattr(Scheduler, "_start", noted)
    runner = small(model, max_sequences=3, max_tokens=512, pool_tokens=1024, max_chunk=512)
    requests = [runner.add([i] * 230, PREEMPTED) for i in range(3)]
    runner.run()
    assert max(resumed) > 0
    assert_empty(runner)
    return requests


def test_answers_are_decoded_again_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel()
    for i, request in enumerate(preempted(model, monkeypatch)):
        assert request.tokens == plain_text(model, [i] * 230, request.options, request.seed)
        assert len(request.logprobs) == 80


def test_a_model_that_changed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel()
    logits, calls = model.logits, []

    def other(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(hidden)
        return logits(hidden + (len(calls) > 150))

    monkeypatch.setattr(model, "logits", other)
    *_, last = preempted(model, monkeypatch)
    assert "when decoded again: the model has changed" in str(last.error)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_preempted_request_of_captured_steps_has_its_bits(
    numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed(numerics).cuda()
    together = list(map(result_of, preempted(model, monkeypatch)))
    for i, (reason, tokens, logprobs) in enumerate(together):
        runner = small(model, max_tokens=512, max_chunk=512)
        request = runner.add([i] * 230, PREEMPTED)
        runner.run()
        assert (reason, tokens, logprobs) == result_of(request)
        assert len(request.tokens) == 80
        assert runner._steps.decode.captures > 0


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
@pytest.mark.parametrize("capture", [True, False])
def test_a_request_has_the_bits_it_has_alone_on_a_gpu(
    caplog: pytest.LogCaptureFixture, numerics: str, capture: bool
) -> None:
    model = packed(numerics).cuda()
    plain = [alone(model, *asked) for asked in ASKED]
    for seed in range(4):
        sizes = {"max_sequences": 1 + seed, "prefix_sequences": seed, "pool_tokens": 600}
        result, runner = together(model, seed, **sizes, capture=capture)
        assert result == plain
        assert (runner._steps.decode.captures > 0) == capture, caplog.text


def test_what_cannot_be_deterministic_is_refused() -> None:
    model = ToyModel()
    with pytest.raises(ValueError, match=r"buckets are \[1\], wanted None with deterministic=True"):
        small(model, buckets=[1])
    with pytest.raises(ValueError, match=r"prompt_buckets are \[8\], wanted None with determin"):
        small(model, prompt_buckets=[8])
    with pytest.raises(TypeError, match="deterministic is 1, wanted True or False"):
        small(model, deterministic=1)
    options = dataclasses.replace(SamplingOptions(), max_new_tokens=3)
    assert len(small(model).add([1], options).result()) <= 3
