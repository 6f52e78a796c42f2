"""Captured decode steps are the eager ones, while requests join, leave, fork and wait.

On a CPU the steps run eagerly; there the same story checks that padding changes no token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4 import dispatch
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Request, Runner, SamplingOptions
from dsv4.serving._setup import is_compiled
from dsv4.serving.graphs import Graphs, default_buckets
from tests._tools.taped import replayed
from tests._tools.warmed import warmed
from tests.serving.cases import ToyModel, assert_empty, packed

_LENGTHS = (1, 3, 61, 64, 124, 127, 129, 250, 255, 257, 300)  # around windows and pages
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "logprobs": 4},
    {"repetition_penalty": 1.2},
    {"temperature": 0.6, "repetition_penalty": 1.1, "top_p": 0.8, "logprobs": 0},
)


def arrivals(seed: int, vocab: int) -> Iterator[tuple[list[int], SamplingOptions]]:
    """Prompts, most of which begin alike, and options of every kind."""
    draw = random.Random(seed)
    stem = [draw.randrange(vocab) for _ in range(max(_LENGTHS))]
    while True:
        tail = [draw.randrange(vocab) for _ in range(draw.randint(1, 6))]
        prompt = (stem if draw.random() < 0.7 else tail * 60)[: draw.choice(_LENGTHS)] + tail
        kind = draw.choice(_KINDS)
        new = draw.choice((1, 5, 40, 140))
        yield prompt, SamplingOptions(**kind, seed=draw.randrange(99), max_new_tokens=new)


def story(runner: Runner, steps: int, seed: int = 0) -> list[Request]:
    """Requests that arrive, some of them cancelled, over that number of steps and to the end."""
    draw, requests = random.Random(seed), []
    source = arrivals(seed, runner.model.config.vocab_size)
    for _ in range(steps):
        if draw.random() < 0.15:
            prompt, options = next(source)
            requests.append(runner.add(prompt, options, stop_ids=(5,)))
        if draw.random() < 0.01 and requests:
            runner.cancel(draw.choice(requests))
        runner.step()
    runner.run()
    assert_empty(runner)
    return requests


def results_of(requests: list[Request]) -> list[tuple[object, ...]]:
    return [(r.finish_reason, r.tokens, r.logprobs) for r in requests]


def sizes(**changes: Any) -> dict[str, Any]:
    common = {"max_sequences": 6, "max_tokens": 460, "max_chunk": 200, "pool_tokens": 1536}
    return {**common, **changes}


def test_padding_changes_no_token() -> None:
    model = ToyModel()
    plain = story(Runner(model, **sizes()), 150)
    assert sum(len(request.tokens) for request in plain) > 100
    for buckets, prompts in (((6,), ()), ((2, 4, 6), (16, 200)), ((1, 6), (200,))):
        size = sizes(buckets=buckets, prompt_buckets=prompts)
        assert results_of(story(Runner(model, **size), 150)) == results_of(plain)


@pytest.mark.parametrize("ahead", [False, True])
def test_replayed_steps_are_the_eager_ones(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Captures between the steps of running requests change none of them."""

    monkeypatch.setattr(Graphs, "captured", replayed)
    model, size = ToyModel(), sizes(buckets=(1, 2, 4, 6), prompt_buckets=(8, 64, 200))
    eager = story(Runner(model, **size), 150, seed=1)
    runner = Runner(model, **size)
    runner._steps.is_captured = True
    if ahead:
        kinds = [SamplingOptions(**kind) for kind in _KINDS]
        assert runner.warm_up(kinds) == 3 * 2 + 4 * (1 + len(_KINDS))
        assert runner.warm_up(kinds) == 3 * 2 + 4 * (1 + len(_KINDS))
    assert results_of(story(runner, 150, seed=1)) == results_of(eager)
    assert runner.captures > 12


def test_default_buckets() -> None:
    assert default_buckets(1) == (1,)
    assert default_buckets(6) == (1, 2, 4, 6)
    assert default_buckets(32) == (1, 2, 4, 8, 16, 24, 32)


def test_a_compiled_model_is_not_captured() -> None:
    whole, part, plain = (torch.nn.Sequential(torch.nn.Linear(1, 1)) for _ in range(3))
    part[0].compile(backend="eager")
    assert is_compiled(torch.compile(whole, backend="eager"))
    assert is_compiled(part)
    assert not is_compiled(plain)


def on_gpu(numerics: str) -> DeepseekV4ForCausalLM:
    """A packed model whose kernels are compiled, of steps of up to 256 tokens."""
    return warmed(packed(numerics).cuda(), 256)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_captured_steps_are_the_eager_ones(numerics: str) -> None:
    """Bit for bit, log-probabilities too, over 1000 steps; captured ahead and at first use."""
    model = on_gpu(numerics)
    size = sizes(buckets=(1, 2, 4, 6), prompt_buckets=(8, 64, 200))
    eager = results_of(story(Runner(model, **size, capture=False), 1000))
    assert sum(len(tokens) for _, tokens, _ in eager) > 1000
    for ahead in (False, True):
        runner = Runner(model, **size)
        if ahead:
            kinds = [SamplingOptions(**kind) for kind in _KINDS]
            runner.warm_up(kinds)
        assert results_of(story(runner, 1000)) == eager
        assert runner._steps.decode.captures == 4
        assert runner._steps.prompts.captures >= 3


@pytest.mark.gpu
def test_a_capture_changes_no_sequence() -> None:
    """Graphs captured between two steps of running requests."""
    model = on_gpu("deepseek")
    texts = []
    for ahead in (False, True):
        runner = Runner(model, **sizes())
        requests = [runner.add([i, 7, 9], max_new_tokens=40, stop_ids=()) for i in range(5)]
        for _ in range(10):
            runner.step()
        if ahead:
            runner.warm_up([SamplingOptions(**kind) for kind in _KINDS])
        runner.run()
        texts.append(results_of(requests))
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_a_backend_by_name_runs_eagerly() -> None:
    model = on_gpu("deepseek")
    runner = Runner(model, **sizes())
    with dispatch.use_backend("reference"):
        request = runner.add([1, 2, 3], max_new_tokens=4, stop_ids=())
        assert len(request.result()) == 4
    assert runner.captures == 0


@pytest.mark.gpu
def test_a_row_of_nan_ends_alone_in_a_captured_step() -> None:
    model, options = on_gpu("deepseek"), SamplingOptions(max_new_tokens=12, stop_ids=())
    runner = Runner(model, **sizes())
    expected = [runner.add([4, i], options).result() for i in range(2)]
    used = {4, 0, 1, *expected[0], *expected[1]}  # 0 is also the token of padding
    poison = next(i for i in range(model.config.vocab_size) if i not in used)
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    requests = [runner.add([4, i], options) for i in range(2)]
    for _ in range(4):
        runner.step()
    broken = runner._scheduler.running[0]
    runner._steps.state.tokens[broken.row] = poison
    runner.run()
    assert "not finite" in str(requests[0].error)
    assert 0 < len(requests[0].tokens) < 12
    assert requests[1].tokens == expected[1]
    assert_empty(runner)
