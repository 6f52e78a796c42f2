"""Steps of prompts that are padded to buckets, and replayed: the same bits, in text and cache."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.layers import reserve_experts
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Request, Runner, SamplingOptions
from dsv4.serving._setup import check_prompt_buckets
from dsv4.serving.graphs import Graphs
from dsv4.serving.prompts import Inputs, Part, Size
from dsv4.serving.sampler import Variant
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model
from tests._tools.taped import replayed, taped
from tests.serving.cases import ToyModel, option_sets, packed, plain_text

SIZES: dict[str, Any] = {
    "max_sequences": 3,
    "max_tokens": 340,
    "max_chunk": 40,
    "pool_tokens": 1024,
    "prefix_sequences": 2,
}


@functools.cache
def tiny(numerics: str) -> DeepseekV4ForCausalLM:
    return random_model(ModelConfig.tiny(numerics=numerics), 3, torch.float32)


def replaying(runner: Runner) -> Runner:
    """The same, as on a GPU, where steps are captured."""
    runner._steps.is_captured = True
    return runner


def state_of(runner: Runner) -> list[torch.Tensor]:
    """All that the device remembers between steps."""
    result = [runner.cache.lengths, runner._steps.state.tokens]
    for layer in runner.cache.layers:
        for tensor, table in layer.tensors():
            result += [tensor] if table is None else [tensor, table]
    return result


def rehearsed(runner: Runner) -> Runner:
    """The same after the sequence that ``warm_up`` processes where steps are captured.

    That one took pages and gave them back, so later sequences have others than in a new runner.
    """
    with torch.inference_mode():
        variants = sorted({Variant.of(SHORT), Variant.of(DRAWN)}, key=repr)
        runner._steps.rehearse(variants, runner._launched.wait_for)
    return runner


def assert_same_state(runner: Runner, other: Runner) -> None:
    for tensor, expected in zip(state_of(runner), state_of(other), strict=True):
        assert_bitwise(tensor, expected)


def outcomes(requests: list[Request]) -> list[tuple[Any, Any]]:
    """What requests gave: tokens and log-probabilities."""
    return [(request.tokens, request.logprobs) for request in requests]


Story = list[tuple[list[int], SamplingOptions, int]]


def run_story(runner: Runner, story: Story) -> list[Request]:
    """Requests, with some steps after each."""
    requests = []
    for prompt, options, steps in story:
        requests.append(runner.add(prompt, options, stop_ids=()))
        for _ in range(steps):
            runner.step()
    runner.run()
    return requests


@st.composite
def stories(draw: st.DrawFn, most: int = 5) -> Story:
    """Prompts of any length, of which many begin alike, some beyond what is kept."""
    stem = [(5 * i + 1) % 128 for i in range(300)]
    result = []
    for _ in range(draw(st.integers(1, most))):
        tail = draw(st.lists(st.integers(0, 127), min_size=1, max_size=24))
        prompt = stem[: draw(st.sampled_from([0, 0, 0, 20, 257, 270]))] + tail
        result.append((prompt, draw(option_sets(4)), draw(st.integers(0, 4))))
    return result


SHORT = SamplingOptions(max_new_tokens=4)
DRAWN = SamplingOptions(temperature=0.9, seed=4, logprobs=2, max_new_tokens=3)
BUCKETS = (32, 64, 128, 200)
ONE_TOKEN = SamplingOptions(max_new_tokens=1)
SHARED: Story = [
    ([(5 * i + 1) % 128 for i in range(260)] + [tail], SHORT, steps)
    for tail, steps in ((7, 9), (9, 0), (11, 3), (7, 0))
]


@pytest.mark.slow
@pytest.mark.costly(20)
@given(stories(3), st.sampled_from(["deepseek", "transformers"]))
@example([([3], SHORT, 0), ([4, 5], SHORT, 0), ([6] * 33, SHORT, 0)], "deepseek")
@example(SHARED, "deepseek")
@example(SHARED, "transformers")
@example([([0], ONE_TOKEN, 0), ([0], SHORT, 0), ([0, 0], SHORT, 0)], "deepseek")  # padding's token
def test_replayed_prompts_are_the_eager_ones(story: Story, numerics: str) -> None:
    """A real model is bitwise equal: tokens, log-probabilities, lengths, tables and all pages."""
    model, sizes = tiny(numerics), SIZES | {"prompt_buckets": (8, 40), "buckets": (1, 3)}
    eager, runner = Runner(model, **sizes), replaying(Runner(model, **sizes))
    expected = run_story(eager, story)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "captured", taped)
        actual = run_story(runner, story)
    assert runner._steps.prompts.captures > 0
    assert outcomes(actual) == outcomes(expected)
    assert_same_state(runner, eager)


@pytest.mark.slow
def test_prompts_after_a_warm_up_are_the_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, too: tokens as in any eager runner, pages as in one that has rehearsed."""
    sizes = SIZES | {"max_chunk": 140, "prompt_buckets": (140,), "buckets": (3,)}  # several pages
    model, story = tiny("deepseek"), [([3] * 150, DRAWN, 1), ([4, 5], SHORT, 0)]
    new, eager = (Runner(model, **sizes) for _ in range(2))
    runner = replaying(Runner(model, **sizes))
    monkeypatch.setattr(Graphs, "captured", taped)
    runner.warm_up([SHORT, DRAWN])
    assert runner._steps.prompts.captures == len(runner._steps.prompts.sizes)
    actual = outcomes(run_story(runner, story))
    assert actual == outcomes(run_story(new, story))
    assert actual == outcomes(run_story(rehearsed(eager), story))
    assert_same_state(runner, eager)
    with pytest.raises(AssertionError, match="differs in its bits"):
        assert_same_state(runner, new)


@given(stories(), st.sampled_from([(40,), (1, 8, 40), (5, 17), ()]), st.booleans())
@example(SHARED, (8, 40), True)
def test_padding_of_prompts_changes_no_token(
    story: Story, buckets: tuple[int, ...], replays: bool
) -> None:
    """The model's arithmetic is exact, so that its text does not depend on the padding."""
    model = toy()
    runner = Runner(model, **SIZES, prompt_buckets=buckets)
    runner._steps.is_captured = replays
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "captured", replayed)
        result = run_story(runner, story)
    for request, (prompt, options, _) in zip(result, story, strict=True):
        options = request.options
        assert request.tokens == plain_text(model, prompt, options, request.seed)


@functools.cache
def toy() -> ToyModel:
    return ToyModel()


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_step_of_padding_changes_nothing(numerics: str) -> None:
    """Captures happen like this: between the steps of sequences that go on."""
    runner = Runner(tiny(numerics), **SIZES, prompt_buckets=(8, 40))
    runner.add([(3 * i) % 128 for i in range(70)], max_new_tokens=9, stop_ids=())
    for _ in range(4):
        runner.step()
    before = [tensor.clone() for tensor in state_of(runner)]
    for size in (*runner._steps.prompts.sizes, Size(5, 2)):
        inputs = Inputs.of_size(size, torch.device("cpu"))
        inputs.write([])
        runner._steps.prompts._forward(inputs, logits=True)
    for tensor, old in zip(state_of(runner), before, strict=True):
        assert_bitwise(tensor, old)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 99), min_size=1)), max_size=4),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_inputs_say_where_each_token_belongs(
    prompts: list[tuple[int, list[int]]], more: int, others: int
) -> None:
    parts = [Part(row, start, ids, True) for row, (start, ids) in enumerate(prompts)]
    count = sum(len(part.tokens) for part in parts)
    size = Size(count + more, len(parts) + others)
    inputs = Inputs.of_size(size, torch.device("cpu"))
    inputs.memory.fill_(-77)
    inputs.write(parts)
    batch, ids = inputs.batch, inputs.ids[0].tolist()
    bounds, rows = batch.cu_seqlens.tolist(), batch.sequences.tolist()
    for b, part in enumerate(parts):
        here = slice(bounds[b], bounds[b + 1])
        assert ids[here] == list(part.tokens)
        ends = part.start + len(part.tokens)
        assert batch.positions[here].tolist() == list(range(part.start, ends))
        assert batch.sequence_of_token[here].tolist() == [part.row] * len(part.tokens)
        assert (batch.starts[b], rows[b]) == (part.start, part.row)
        assert inputs.ends[b] == bounds[b + 1] - 1
    assert bounds[0] == 0
    assert set(bounds[len(parts) :]) == {count}
    assert set(rows[len(parts) :]) <= {-1}
    assert set(batch.sequence_of_token[count:].tolist()) <= {-1}
    assert len(ids) == size.tokens
    for tensor in (inputs.ids, inputs.ends, *vars(batch).values()):
        assert tensor.storage_offset() % 2 == 0  # 16 bytes: what kernels are compiled for
        assert tensor.is_contiguous()


@pytest.mark.parametrize(
    ("max_chunk", "captured", "reserved", "expected"),
    [
        (2048, True, None, (32, 64, 128, 256, 512, 768, 1024, 1536)),
        (200, True, None, (32, 64, 128, 200)),
        (20, True, None, (20,)),
        (2048, True, 100, (32, 64, 100)),
        (2048, False, None, ()),
    ],
)
def test_default_buckets(
    max_chunk: int, captured: bool, reserved: int | None, expected: tuple[int, ...]
) -> None:
    model = random_model(ModelConfig.tiny(), 3, torch.float32)
    reserve_experts(model, reserved, torch.float32)
    assert check_prompt_buckets(model, None, max_chunk, captured, False) == expected
    if captured:  # bits depend on the padding
        assert check_prompt_buckets(model, None, max_chunk, False, True) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_captured_prompts_are_the_eager_ones(numerics: str) -> None:
    """Bit for bit: tokens, log-probabilities and all that the device remembers."""
    model, sizes = packed(numerics).cuda(), SIZES | {"max_chunk": 200, "buckets": (1, 3)}
    stem = [(5 * i + 1) % 128 for i in range(300)]
    story = [
        ([*stem[: (37 * i) % 290], i], DRAWN if i % 3 else SHORT, i % 4 if i % 5 else 9)
        for i in range(60)
    ]
    plain = Runner(model, **sizes, capture=False, prompt_buckets=BUCKETS)
    expected = outcomes(run_story(plain, story))
    for ahead in (False, True):
        runner, eager = Runner(model, **sizes), plain
        if ahead:
            runner.warm_up([SHORT, DRAWN])
            assert runner._steps.prompts.captures == 8
            eager = rehearsed(Runner(model, **sizes, capture=False, prompt_buckets=BUCKETS))
            assert outcomes(run_story(eager, story)) == expected
        assert outcomes(run_story(runner, story)) == expected
        assert runner._steps.prompts.captures >= 4
        assert_same_state(runner, eager)
