"""Requests that end alone, and steps that end in the middle."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dsv4.kv_cache.page_tables
import dsv4.kv_cache.sequence_rows
import dsv4.kv_cache.step_preparation
import dsv4.serving
from dsv4.serving import Request, RequestError, Runner, SamplingOptions, release
from tests.serving.cases import (
    ToyModel,
    assert_empty,
    last_hash,
    option_sets,
    packed,
    plain_text,
)

_SERVING = dsv4.serving.__file__.removesuffix("__init__.py")
_INTERRUPTED = (
    dsv4.kv_cache.page_tables.__file__,
    dsv4.kv_cache.sequence_rows.__file__,
    dsv4.kv_cache.step_preparation.__file__,
    _SERVING,
)
_GREEDY = SamplingOptions(max_new_tokens=10, stop_ids=())


@functools.cache
def toy() -> ToyModel:
    return ToyModel()


def small(model: ToyModel, **changes: Any) -> Runner:
    sizes = {"max_sequences": 3, "max_tokens": 600, "max_chunk": 200, "pool_tokens": 1024}
    return Runner(model, **{**sizes, **changes})


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line of the runner and of its cache."""

    def __init__(self, gaps: list[int], files: tuple[str, ...] = _INTERRUPTED) -> None:
        self.gaps, self.files = list(gaps), files
        self.left = self.gaps.pop(0)
        self.raised = 0

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.left = self.gaps.pop(0) if self.gaps else 0
                self.raised += 1
                raise KeyboardInterrupt
        return self.trace

    def run(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """The call's result, or None if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return call(*args, **kwargs)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)


@pytest.mark.costly(3)
@given(
    st.lists(st.integers(1, 6000), min_size=1, max_size=3),
    st.lists(option_sets(8), min_size=2, max_size=3),
)
@example([3], [_GREEDY, _GREEDY])
@example([120, 1], [_GREEDY, _GREEDY])
def test_an_interrupt_anywhere_changes_no_text(gaps: list[int], options: list[Any]) -> None:
    """Interrupts come in ``add``, ``step`` and ``cancel``, also in the recovery from another."""
    model = toy()
    runner = small(model)
    stem = [(7 * i + 3) % 128 for i in range(256)]
    asked = [([*stem, i], sampling) for i, sampling in enumerate([*options, *options])]
    interrupts, requests = Interrupts(gaps), []
    for prompt, sampling in asked:
        request = interrupts.run(runner.add, prompt, sampling)
        requests.append(runner.add(prompt, sampling) if request is None else request)
        interrupts.run(runner.step)
    gone = requests.pop(1)
    asked.pop(1)
    interrupts.run(runner.cancel, gone)
    while interrupts.run(runner.step) is not False:
        pass
    for request, (prompt, sampling) in zip(requests, asked, strict=True):
        assert request.tokens == plain_text(model, prompt, sampling, request.seed), request
    assert len(runner._scheduler.running) == len(runner._scheduler.waiting) == 0
    assert_empty(runner)
    interrupts.run(runner.close)
    runner.close()
    assert_empty(runner)


def test_an_interrupt_at_any_line_of_a_short_run() -> None:
    """Every line of the runner's files, so that no place between two of them is left out."""
    model, options = toy(), SamplingOptions(max_new_tokens=2, stop_ids=(), repetition_penalty=1.1)
    expected, line, raised = plain_text(model, [5], options, 0), 0, 1
    while raised:
        line += 1
        runner, interrupts = (
            small(model, max_sequences=2, max_tokens=8),
            Interrupts([line], (_SERVING,)),
        )
        request = runner.add([5], options)
        while interrupts.run(runner.step) is not False:
            pass
        assert request.tokens == expected
        assert not runner.has_work
        assert_empty(runner)
        raised = interrupts.raised
    assert line > 200


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_interrupt_of_captured_steps_leaves_a_usable_runner(deterministic: bool) -> None:
    """Deterministic text is that without interrupts; other text may be rounded differently."""
    model, options = packed().cuda(), SamplingOptions(max_new_tokens=20, stop_ids=())
    stem = [(7 * i + 3) % 128 for i in range(256)]
    prompts = [[*stem, 1], [5], [*stem, 9, 4]]
    runner = small(model, deterministic=deterministic, prefix_sequences=0)
    runner.warm_up()
    captures = runner.captures
    before = [runner.add(prompt, options).result() for prompt in prompts]
    interrupts = Interrupts([30, 400, 90, 700, 250, 1100, 600, 2000])
    requests = [runner.add(prompt, options) for prompt in prompts]
    while interrupts.run(runner.step) is not False:
        pass
    assert interrupts.raised >= 5
    assert [(r.finish_reason, len(r.tokens)) for r in requests] == [("length", 20)] * 3
    if deterministic:
        assert [request.tokens for request in requests] == before
    assert [runner.add(prompt, options).result() for prompt in prompts] == before
    assert runner.captures == captures > 0
    assert_empty(runner)


@pytest.mark.costly(3)
@given(st.integers(0, 40), st.integers(1, 3))
def test_cancelling_ends_one_request(steps: int, victim: int) -> None:
    model, runner = toy(), small(toy(), max_sequences=2)
    requests = [runner.add([i + 1, 5], _GREEDY) for i in range(4)]
    for _ in range(steps):
        runner.step()
    before = requests[victim].done
    runner.cancel(requests[victim])
    assert requests[victim].done
    tokens_before = requests[victim].tokens
    runner.run()
    assert (requests[victim].finish_reason == "cancelled") != before
    assert requests[victim].tokens == tokens_before
    for request in requests:
        text = plain_text(model, list(request.prompt), _GREEDY, 0)
        assert request.tokens == text[: len(request.tokens)]
        assert request.finish_reason == "length" or request is requests[victim]
    assert_empty(runner)


@pytest.mark.costly(3)
@given(st.integers(0, 9), st.booleans())
def test_a_row_of_nan_ends_its_request_alone(position: int, draw: bool) -> None:
    model = ToyModel()
    options = SamplingOptions(temperature=float(draw), seed=3, max_new_tokens=10, stop_ids=())
    text = plain_text(model, [3, 4], options, 3)
    cache = model.new_cache(1, 64)
    row = cache.allocate()
    for token in ([3, 4], *([t] for t in text[:position])):
        model.prefill([token], cache, [row])
    model.failing = {last_hash(cache, row)}
    runner = small(model)
    first, broken, last = (runner.add(p, options) for p in ([5], [3, 4], [6, 7, 8]))
    runner.run()
    assert broken.finish_reason == "error"
    assert broken.tokens == text[:position]
    assert f"position {2 + position} are not finite" in str(broken.error)
    with pytest.raises(RequestError, match="request 1: the logits of position"):
        broken.result()
    for request in (first, last):
        assert request.tokens == plain_text(model, list(request.prompt), options, 3)
        assert len(request.tokens) == 10
    assert_empty(runner)


def test_an_error_in_the_model_leaves_a_usable_runner() -> None:
    model = ToyModel()
    runner, fails = small(model), iter([False, True, False, False, True])
    forward = model.model.forward

    def failing(*args: Any) -> Any:
        if next(fails, False):
            raise RuntimeError("out of memory")
        return forward(*args)

    model.model.forward = failing
    requests = [runner.add([1, 2, i], _GREEDY) for i in range(3)]
    raised = 0
    while runner.has_work:
        try:
            runner.step()
        except RuntimeError:
            raised += 1
    assert raised == 2
    for request in requests:
        assert request.tokens == plain_text(toy(), list(request.prompt), _GREEDY, 0)
    assert_empty(runner)


def test_iterating_streams_tokens_while_others_run() -> None:
    model = toy()
    with small(model) as runner:
        slow, quick = runner.add([1, 2], _GREEDY), runner.add([3], _GREEDY, max_new_tokens=3)
        stream = iter(slow)
        tokens = [next(stream)]
        assert not slow.done
        assert len(slow.tokens) == 1
        assert quick.result() == plain_text(model, [3], quick.options, 0)
        runner.cancel(quick)
        assert quick.finish_reason == "length"
        tokens += stream
        assert tokens == slow.tokens == plain_text(model, [1, 2], _GREEDY, 0)
        assert list(slow) == tokens
        left = runner.add([4], _GREEDY)
        next(iter(left))
    assert left.finish_reason == "cancelled"
    assert not runner.step()
    assert_empty(runner)
    with pytest.raises(RuntimeError, match="runner is closed"):
        runner.add([1])


def test_a_stop_token_belongs_to_the_answer_and_a_stop_drops_the_surplus() -> None:
    model, runner = toy(), small(toy())
    text = plain_text(model, [9], _GREEDY, 0)
    stop = runner.add([9], _GREEDY, stop_ids=[text[4]])
    runner.run()
    assert stop.tokens == text[: text.index(text[4]) + 1]
    assert stop.finish_reason == "stop"
    assert_empty(runner)


def test_a_stop_of_the_configuration_is_the_default() -> None:
    model = ToyModel(eos_token_id=plain_text(toy(), [9], _GREEDY, 0)[2])
    runner = small(model)
    request: Request = runner.add([9])
    assert request.result()[-1] == model.config.eos_token_id
    assert request.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "changes", "error", "message"),
    [
        ([], {}, ValueError, "prompt is empty"),
        ("hello", {}, TypeError, "prompt is 'hello', wanted a sequence of token ids"),
        (7, {}, TypeError, "prompt is 7, wanted a sequence of token ids"),
        ([[1, 2]], {}, TypeError, r"prompt\[0\] is \[1, 2\], wanted an integer"),
        ([1, 1.5], {}, TypeError, r"prompt\[1\] is 1.5, wanted an integer"),
        ([1, 128], {}, ValueError, r"prompt\[1\] is 128, wanted 0 to 127"),
        ([1, -1], {}, ValueError, r"prompt\[1\] is -1, wanted 0 to 127"),
        ([1], {"max_new_tokens": 600}, ValueError, r"at most max_tokens \(600\)"),
        ([1], {"stop_ids": [128]}, ValueError, r"stop_ids\[0\] is 128"),
        ([1], {"stop_ids": "abc"}, TypeError, "stop_ids is 'abc'"),
        ([1], {"heat": 1}, TypeError, "option 'heat' is unknown, wanted one of temperature"),
        ([1], {"options": 1}, TypeError, "options is int, wanted SamplingOptions"),
        ([1], {"temperature": -1}, ValueError, "temperature is -1, wanted 0 or more"),
        ([1], {"temperature": float("nan")}, ValueError, "temperature is nan"),
        ([1], {"temperature": "hot"}, TypeError, "temperature is 'hot', wanted a number"),
        ([1], {"top_k": 0}, ValueError, "top_k is 0, wanted 1 or more"),
        ([1], {"top_k": 2.0}, TypeError, "top_k is 2.0, wanted an integer"),
        ([1], {"top_p": 0}, ValueError, "top_p is 0, wanted more than 0 and at most 1"),
        ([1], {"min_p": 1.5}, ValueError, "min_p is 1.5, wanted 0 to 1"),
        ([1], {"repetition_penalty": 0}, ValueError, "repetition_penalty is 0, wanted more than"),
        ([1], {"seed": -1}, ValueError, "seed is -1, wanted 0 to 9223372036854775807"),
        ([1], {"logprobs": 21}, ValueError, "logprobs is 21, wanted 0 to 20"),
        ([1], {"logprobs": True}, TypeError, "logprobs is True, wanted an integer"),
        ([1], {"max_new_tokens": 0}, ValueError, "max_new_tokens is 0, wanted 1 or more"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(prompt, changes, error, message) -> None:
    runner = small(toy())
    with pytest.raises(error, match=message):
        runner.add(prompt, **changes)
    assert not runner.has_work


def test_only_what_can_never_fit_is_refused() -> None:
    """A pool of two pages takes 512 tokens of one request, and others wait for it."""
    model = toy()
    runner = small(model, pool_tokens=512, max_sequences=3, prefix_sequences=0)
    with pytest.raises(ValueError, match="needs 3 compressed pages, and the cache has 2"):
        runner.add([1] * 540, max_new_tokens=60)
    options = SamplingOptions(max_new_tokens=20, stop_ids=())
    requests = [runner.add([i] * 490, options) for i in range(3)]
    runner.run()
    for request in requests:
        assert request.tokens == plain_text(model, list(request.prompt), options, 0)
    assert_empty(runner)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_sequences": 0}, ValueError, "max_sequences is 0, wanted 1 or more"),
        ({"max_sequences": 1.0}, TypeError, "max_sequences is 1.0, wanted an integer"),
        ({"max_tokens": 1025}, ValueError, r"at most 1024 \(max_position_embeddings"),
        ({"max_chunk": 0}, ValueError, "max_chunk is 0, wanted 1 or more"),
        ({"prefix_sequences": -1}, ValueError, "prefix_sequences is -1, wanted 0 or more"),
        ({"buckets": [1, 2]}, ValueError, r"buckets are \[1, 2\], wanted numbers from 1 to"),
        ({"buckets": [0, 3]}, ValueError, r"buckets are \[0, 3\]"),
        ({"prompt_buckets": [0]}, ValueError, r"prompt_buckets are \[0\], wanted numbers from 1"),
        ({"prompt_buckets": [9, 201]}, ValueError, r"to max_chunk \(200\)"),
        (
            {"prompt_buckets": ["9"]},
            TypeError,
            r"is \['9'\], wanted a sequence of integers or None",
        ),
        ({"buckets": 2}, TypeError, "Runner: buckets is 2, wanted a sequence of integers or None"),
        ({"prompt_buckets": 9}, TypeError, "prompt_buckets is 9, wanted a sequence of integers"),
        ({"capture": True}, ValueError, "capture is True, but the model is on cpu"),
        ({"window_pages": 1}, ValueError, "window_pages is 1, wanted at least 4 for"),
    ],
)
def test_a_runner_that_cannot_be_is_refused(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        small(toy(), **changes)
    with pytest.raises(TypeError, match="model is Linear"):
        Runner(torch.nn.Linear(1, 1), max_sequences=1, max_tokens=2)
    with pytest.raises(TypeError, match=r"release: model is Linear, wanted a dsv4\.model\.Deep"):
        release(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="request is int"):
        small(toy()).cancel(1)
