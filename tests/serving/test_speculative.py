"""Text with drafts is text without, whichever drafts are right, whatever else runs or waits."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.kv_cache import rollback
from dsv4.kv_cache.paged_cache import Batch, CacheFullError
from dsv4.serving import LogitsError, SamplingOptions, speculative
from dsv4.serving.drafting import same_draws
from dsv4.serving.graphs import Graphs
from tests._tools.taped import replayed
from tests.serving import test_graphs
from tests.serving.cases import ToyModel, assert_empty, option_sets, plain_text
from tests.serving.drafts import drafting, mixed, text_of
from tests.serving.test_recovery import Interrupts
from tests.serving.test_runner import prompts, sizes

GREEDY = SamplingOptions(max_new_tokens=60, stop_ids=())


@functools.cache
def toy() -> ToyModel:
    return ToyModel(max_position_embeddings=2048)


def right(position: int, number: int) -> str:
    return "right"


@pytest.mark.costly(8)
@given(
    st.data(),
    sizes(),
    st.lists(st.tuples(prompts(), option_sets(30)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 5, 8]),
    st.sampled_from([0.0, 0.6, 0.9, 1.0]),
)
def test_the_text_of_a_request_is_that_without_drafts(monkeypatch, data, size, asked, count, share):
    """Stop tokens and ends amid accepted drafts, all options, over all borders, full pools."""
    runner, _ = drafting(monkeypatch, toy(), mixed(share, 0.05), count, **size, verify=same_draws)
    requests = []
    for prompt, options in asked:
        requests.append(runner.add(prompt, options))
        for _ in range(data.draw(st.integers(0, 4), label="steps before the next")):
            runner.step()
    runner.run()
    for request, (_, options) in zip(requests, asked, strict=True):
        assert request.tokens == text_of(toy(), request), request
        assert request.finish_reason in ("stop", "length")
        assert len(request.logprobs) == (0 if options.logprobs is None else len(request.tokens))
        assert [report.token for report in request.logprobs] in ([], request.tokens)
    assert_empty(runner)


@pytest.mark.costly(8)
@given(st.data(), st.lists(option_sets(30), min_size=2, max_size=4), st.sampled_from([1, 3, 5]))
def test_a_conversation_goes_on_where_accepted_tokens_ended(monkeypatch, data, options, count):
    """Kept rows hold confirmed tokens alone, also of requests cancelled amid steps."""
    runner, _ = drafting(
        monkeypatch, toy(), mixed(0.7), count, max_sequences=2, max_tokens=900,
        prefix_sequences=2, verify=same_draws,
    )  # fmt: skip
    prompt = [(3 * i + 1) % 128 for i in range(250)]
    for sampling in options:
        request = runner.add(prompt, sampling)
        for _ in range(data.draw(st.sampled_from([0, 2, 5, 99]), label="steps")):
            runner.step()
        if data.draw(st.booleans(), label="cancel"):
            runner.cancel(request)
        runner.run()
        text = text_of(toy(), request)
        assert request.tokens == text[: len(request.tokens)]
        assert request.finish_reason == "cancelled" or len(request.tokens) == len(text)
        held = len(prompt) + len(request.tokens) - data.draw(st.integers(-1, 2), label="less")
        prompt = [*prompt, *request.tokens, 7, 7][: max(250, held)]
    assert_empty(runner)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_right_drafts_are_all_accepted(monkeypatch, count) -> None:
    runner, drafts = drafting(
        monkeypatch, toy(), right, count, max_sequences=3, max_tokens=200, max_chunk=64
    )
    asked = [[1], [5] * 90, [9, 8, 7]]
    requests = [runner.add(prompt, GREEDY) for prompt in asked]
    runner.run()
    for request in requests:
        assert request.tokens == text_of(toy(), request)
    assert runner.draft_counts.accepted == runner.draft_counts.drafted
    assert runner.draft_counts.length == count + 1
    # The first token is the prompt's; a step more may be under way when the last arrives.
    needed = -(-(GREEDY.max_new_tokens - 1) // (count + 1))
    assert len(drafts.steps) <= needed + 3
    assert_empty(runner)


def test_wrong_drafts_cost_steps_and_nothing_else(monkeypatch) -> None:
    runner, _ = drafting(monkeypatch, toy(), lambda *_: "wrong", 4, max_sequences=1, max_tokens=120)
    request = runner.add([3, 1], GREEDY)
    assert request.result() == text_of(toy(), request)
    assert (runner.draft_counts.accepted, runner.draft_counts.length) == (0, 1.0)


def test_a_long_run_is_the_plain_one(monkeypatch) -> None:
    """A thousand tokens of one request beside others that come and go."""
    model, options = toy(), SamplingOptions(max_new_tokens=1000, stop_ids=())
    runner, drafts = drafting(
        monkeypatch, model, mixed(0.75, 0.1), 3, max_sequences=3, max_tokens=1100,
        pool_tokens=2048, verify=same_draws,
    )  # fmt: skip
    long, draw, others = runner.add([2, 7, 1], options), random.Random(1), []
    while not long.done:
        if draw.random() < 0.1:
            prompt = [draw.randrange(128) for _ in range(draw.choice((2, 70, 260)))]
            seed = draw.randrange(3)
            drawn = SamplingOptions(temperature=0.8, seed=seed, max_new_tokens=30, stop_ids=())
            others.append(runner.add(prompt, drawn))
        if others and draw.random() < 0.02:
            runner.cancel(draw.choice(others))
        runner.step()
    runner.run()
    assert len(drafts.steps) < 700
    assert long.tokens == text_of(model, long)
    assert len(others) > 10
    for request in others:
        assert request.tokens == text_of(model, request)[: len(request.tokens)]
    assert_empty(runner)


@pytest.mark.costly(8)
@example([replace(GREEDY, max_new_tokens=80)] * 3, 8)
@given(st.lists(option_sets(80), min_size=3, max_size=3), st.sampled_from([2, 5, 8]))
def test_a_full_pool_drops_drafts_or_preempts(monkeypatch, options, count) -> None:
    """Three sequences that outgrow their pages, where there are four."""
    runner, drafts = drafting(
        monkeypatch, toy(), mixed(0.8), count, max_sequences=3, max_tokens=512, pool_tokens=1024,
        max_chunk=512, prefix_sequences=0, verify=same_draws,
    )  # fmt: skip
    requests = [runner.add([i] * 230, sampling) for i, sampling in enumerate(options)]
    runner.run()
    for request in requests:
        assert request.tokens == text_of(toy(), request)
    if min(len(request.tokens) for request in requests) > 60:
        assert 0 in {drafted for _, drafted in drafts.steps}
    assert_empty(runner)


def test_a_request_may_fill_the_cache_to_its_last_token(monkeypatch) -> None:
    """Drafts and steps under way reach beyond ``max_tokens``, where nothing is stored."""
    runner, _ = drafting(monkeypatch, toy(), right, 8, max_sequences=2, max_tokens=128)
    options = SamplingOptions(max_new_tokens=100, stop_ids=())
    requests = [runner.add([i] * 28, options) for i in range(3)]
    runner.run()
    for request in requests:
        assert request.tokens == text_of(toy(), request)
    small, _ = drafting(monkeypatch, toy(), right, 1, max_sequences=1, max_tokens=2)
    assert len(small.add([5], max_new_tokens=1).result()) == 1


def test_logits_that_are_not_finite_end_their_request_alone(monkeypatch) -> None:
    """At an accepted draft, and at a rejected one, which nobody may notice."""
    model = ToyModel()
    text = plain_text(model, [4, 4], GREEDY, 0)
    other = plain_text(model, [6], GREEDY, 0)
    seen: list[int] = []
    hidden_of = model.logits
    model.logits = lambda hidden: seen.extend(map(int, hidden[:, 0])) or hidden_of(hidden)
    plain_text(model, [4, 4], GREEDY, 0)
    model.logits = hidden_of
    model.failing = {seen[17]}  # of the row that chooses token 17
    for share in (1.0, 0.0):
        runner, _ = drafting(monkeypatch, model, mixed(share), 4, max_sequences=2, max_tokens=90)
        runner_drafts = runner._steps.speculative._drafter
        runner_drafts._texts = {0: [4, 4, *text], 1: [6, *other]}
        requests = [runner.add([4, 4], GREEDY), runner.add([6], GREEDY)]
        runner.run()
        assert isinstance(requests[0].error, LogitsError)
        assert "position 19 are not finite" in str(requests[0].error)
        assert requests[0].tokens == text[:17]
        assert requests[1].tokens == other
        assert_empty(runner)


@pytest.mark.costly(10)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    st.lists(option_sets(12), min_size=2, max_size=3),
)
@example([1500, 900], [GREEDY, GREEDY])
def test_an_interrupt_anywhere_changes_no_text(monkeypatch, gaps, options):
    """Also between the tokens of a step, and between their number and the cache's."""
    model = toy()
    runner, drafts = drafting(
        monkeypatch, model, mixed(0.7), 3, max_sequences=3, max_tokens=600, max_chunk=200,
        pool_tokens=1024, verify=same_draws,
    )  # fmt: skip
    stem = [(7 * i + 3) % 128 for i in range(250)]
    requests = [runner.add([*stem, i], sampling) for i, sampling in enumerate(options)]
    for request in requests:
        drafts.know(request)
    files = (speculative.__file__.removesuffix("speculative.py"), rollback.__file__)
    interrupts = Interrupts(gaps, files)
    while interrupts.run(runner.step) is not False:
        pass
    for request in requests:
        assert request.tokens == text_of(model, request)
    assert_empty(runner)


def results_of(requests: list[Any]) -> list[tuple[object, ...]]:
    return [(r.finish_reason, r.tokens, r.logprobs) for r in requests]


@pytest.mark.parametrize("ahead", [False, True])
def test_replayed_steps_are_the_eager_ones(monkeypatch, ahead) -> None:
    """Captures between the steps of running requests, buckets and padding change no token."""
    model = toy()
    size = test_graphs.sizes(buckets=(1, 2, 4, 6), prompt_buckets=(8, 64, 200), verify=same_draws)
    eager, _ = drafting(monkeypatch, model, mixed(0.8), 2, **size)
    eager_results = results_of(test_graphs.story(eager, 60, seed=1))
    monkeypatch.setattr(Graphs, "captured", replayed)
    runner, _ = drafting(monkeypatch, model, mixed(0.8), 2, **size)
    runner._steps.is_captured = runner._steps.speculative._captures_drafts = True
    if ahead:
        kinds = [SamplingOptions(**kind) for kind in test_graphs._KINDS]
        assert runner.warm_up(kinds) == runner.warm_up(kinds)
    assert results_of(test_graphs.story(runner, 60, seed=1)) == eager_results
    assert runner.captures > 10


def sometimes_full(prepare: Any) -> Any:
    """A cache's ``prepare`` that has no pages for every third step with drafts."""
    steps = itertools.count(1)

    def prepared(rows: Any, counts: Any, *rest: Any, certain: Any = None, **more: Any) -> None:
        if certain is not None and sum(counts) > sum(certain) and not next(steps) % 3:
            raise CacheFullError("no page is left")
        prepare(rows, counts, *rest, certain=certain, **more)

    return prepared


@pytest.mark.parametrize(
    "scarce",
    [{}, {"pool_tokens": 1024}, {"window_pages": 7}],
    ids=["enough", "compressed", "raw"],
)
def test_after_a_warm_up_no_step_is_captured(monkeypatch, scarce) -> None:
    """Sequences that wait, end and are preempted; buckets have drafts of their own."""
    monkeypatch.setattr(Graphs, "captured", replayed)
    runner, drafts = drafting(
        monkeypatch, toy(), mixed(0.7), 5, max_sequences=4, max_tokens=512, max_chunk=64,
        buckets=(1, 2, 4), prompt_buckets=(8, 64), verify=same_draws, **scarce,
    )  # fmt: skip
    steps = runner._steps
    steps.is_captured = steps.speculative._captures_drafts = True
    steps._drafts = {1: 5, 2: 3, 4: 1}
    before = runner.warm_up([GREEDY])
    drafts.steps.clear()
    if scarce:
        monkeypatch.setattr(runner.cache, "prepare", sometimes_full(runner.cache.prepare))
    for number, length in enumerate((225, 1, 230, 7, 229, 235)):
        runner.add([number] * length, replace(GREEDY, max_new_tokens=70))
        for _ in range(4):
            runner.step()
    runner.run()
    counts = {drafted for _, drafted in drafts.steps}
    assert counts >= {1, 3, 5}
    assert (0 in counts) == bool(scarce)
    assert runner.captures == before


def test_equal_batches_are_ragged_ones() -> None:
    starts, rows = torch.tensor([5, 0, 9]), torch.tensor([2, -1, 0])
    for count in (1, 4):
        equal, ragged = (
            Batch.equal(starts, rows, count),
            Batch.from_lengths([count] * 3, starts, rows),
        )
        for name in ("cu_seqlens", "starts", "sequences", "positions", "sequence_of_token"):
            assert torch.equal(getattr(equal, name), getattr(ragged, name))
