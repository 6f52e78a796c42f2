"""Runners of several ranks take the same steps and give the tokens of one."""

from __future__ import annotations

import re
from threading import BrokenBarrierError

import pytest
import torch

from dsv4.parallel.context import RankError
from dsv4.parallel.local_model import local_model
from dsv4.serving import Runner
from dsv4.testing.ranks import run_ranks
from tests.parallel.cases import CONFIG, model

PROMPTS = [[5, 9, 2], list(range(1, 31)), [7]]
OPTIONS = [
    {"max_new_tokens": 6},
    {"max_new_tokens": 9, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3},
    {"max_new_tokens": 4, "temperature": 1.2, "repetition_penalty": 1.3, "seed": 4, "logprobs": 3},
]


@pytest.fixture(scope="module")
def whole():
    return model(CONFIG.replace(num_nextn_predict_layers=0), torch.float64)


def runner_of(model, **changes):
    options = {"max_sequences": 2, "max_tokens": 64, "max_chunk": 16, **changes}
    return Runner(model, **options)


def texts(model, **changes):
    with runner_of(model, **changes) as runner:
        requests = [runner.add(p, stop_ids=(), **o) for p, o in zip(PROMPTS, OPTIONS, strict=True)]
        runner.run()
        return [request.result() for request in requests], [
            request.logprobs for request in requests
        ]


@pytest.mark.parametrize(
    ("size", "changes"),
    [(4, {}), (2, {"deterministic": True}), (2, {"pool_tokens": 128})],
)
def test_texts_are_those_of_one_rank(whole, size, changes):
    """Three requests for two rows, prompts in chunks, preemption; float64, without close calls."""
    expected, reports = texts(whole, **changes)
    for tokens, logprobs in run_ranks(size, lambda c: texts(local_model(whole, c), **changes)):
        assert tokens == expected
        for ours, theirs in zip(logprobs[2], reports[2], strict=True):
            assert ours.token == theirs.token
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]


def test_generate_is_that_of_one_rank(whole):
    expected = whole.generate(PROMPTS, 5, stop_ids=[])
    for tokens in run_ranks(2, lambda c: local_model(whole, c).generate(PROMPTS, 5, stop_ids=[])):
        assert tokens == expected


def test_requests_of_rank_0_alone(whole):
    """Other ranks have none and follow; a request that is cancelled ends on all."""
    expected, _ = texts(whole)

    def work(context):
        with runner_of(local_model(whole, context)) as runner:
            if context.rank:
                runner.follow()
                assert runner.cache.lengths.sum() == 0
                return None
            early = runner.add([3], max_new_tokens=50)
            requests = [
                runner.add(p, stop_ids=(), **o) for p, o in zip(PROMPTS, OPTIONS, strict=True)
            ]
            late = runner.add([1, 2, 3], max_new_tokens=50)
            runner.cancel(early)
            runner.step()
            runner.step()
            runner.cancel(late)
            runner.run()
            assert (late.finish_reason, early.tokens) == ("cancelled", [])
            return [request.result() for request in requests]

    assert run_ranks(2, work) == [expected, None]


def test_a_random_seed_is_that_of_rank_0(whole):
    def work(context):
        with runner_of(local_model(whole, context)) as runner:
            request = runner.add([1, 2], temperature=2.0, max_new_tokens=12, stop_ids=())
            return request.result(), request.seed

    first, second = run_ranks(2, work)
    assert first == second


class TestErrors:
    def test_other_requests_on_a_rank(self, whole):
        def work(context):
            with runner_of(local_model(whole, context)) as runner:
                runner.add([1, 2 + context.rank], max_new_tokens=2)
                runner.run()

        with pytest.raises(ValueError, match=r"request 0 has 2 prompt tokens .* on rank 1, 2 and"):
            run_ranks(2, work)

    def test_other_prompts_of_generate_on_a_rank(self, whole):
        def work(context):
            local_model(whole, context).generate([[1, 2 + context.rank]], 2)

        with pytest.raises(ValueError, match=r"a hash of the prompts is .* on rank 0 and .* on ra"):
            run_ranks(2, work)

    def test_other_limits_on_a_rank(self, whole):
        def work(context):
            runner_of(local_model(whole, context), max_sequences=1 + context.rank)

        with pytest.raises(ValueError, match=r"limits of the runner is .*max_sequences=1"):
            run_ranks(2, work)

    def test_a_wrong_argument_on_a_rank(self, whole):
        """The other ranks raise instead of waiting, and all can try again."""

        def work(context):
            local = local_model(whole, context)
            try:
                runner_of(local, max_sequences=2 * context.rank - 1)
            except (ValueError, RankError) as error:
                seen = repr(error)
            with runner_of(local) as runner:
                request = runner.add([1, 2], max_new_tokens=3, stop_ids=())
                return seen, request.result()

        (first, tokens), (second, others) = run_ranks(2, work)
        assert re.match("ValueError.*max_sequences is -1", first)
        assert re.match("RankError.*rank 0: ValueError: .*max_sequences is -1", second)
        assert tokens == others

    @pytest.mark.parametrize(
        ("name", "values"),
        [("index_format", ("plain", "index_mxfp4")), ("window_pages", (None, 40))],
    )
    def test_another_cache_on_a_rank(self, whole, name, values):
        """An index in another format chooses other entries on its rank."""

        def work(context):
            runner_of(local_model(whole, context), **{name: values[context.rank]})

        with pytest.raises(ValueError, match=f"{name} is .* on rank 0 and .* on rank 1"):
            run_ranks(2, work)

    def test_tokens_that_differ_between_ranks(self, whole):
        """A rank whose streams are others is seen at its tokens, if nowhere before."""

        def work(context):
            with runner_of(local_model(whole, context)) as runner:
                request = runner.add([1, 2], max_new_tokens=8, stop_ids=())
                while not request.done:
                    if context.rank and request.tokens:
                        request._emitted[-1] = type(request._emitted[-1])(99)
                    runner.step()

        with pytest.raises(RuntimeError, match="the sequences of rank 1 are not those of rank 0"):
            run_ranks(2, work)

    def test_an_error_in_a_step_ends_the_others(self, whole):
        def work(context):
            local = local_model(whole, context)
            if context.rank:
                local.model.norm.register_forward_pre_hook(_fail)
            return texts(local)

        with pytest.raises(ZeroDivisionError):
            run_ranks(2, work)

    def test_after_an_error_a_rank_does_not_wait_for_its_device(self, whole, monkeypatch):
        """Whose kernels may wait for the rank that failed; the group ends what it can end."""
        abandoned = []

        def work(context):
            local = local_model(whole, context)
            monkeypatch.setattr(
                type(context.group), "abandon", lambda group, device: abandoned.append(group.rank)
            )
            runner = runner_of(local)

            def run_all(runner):
                with runner:
                    runner.add(PROMPTS[0], max_new_tokens=4)
                    runner.run()

            monkeypatch.setattr(runner, "_recover", lambda: pytest.fail("it would wait"))
            if context.rank:
                local.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises((ZeroDivisionError, BrokenBarrierError)):
                run_all(runner)
            return runner.step()

        with pytest.raises(BrokenBarrierError):
            run_ranks(2, lambda context: [work(context), context.group.exchange(None)])
        assert sorted(abandoned) == [0, 1]

    def test_follow_is_for_other_ranks(self, whole):
        with pytest.raises(ValueError, match=r"Runner.follow is for other ranks than 0"):
            runner_of(whole).follow()


def _fail(*arguments):
    raise ZeroDivisionError


def test_no_logits_are_gathered(whole):
    """Embeddings and partial sums [T, H], and candidates: nothing as wide as the vocabulary."""

    def work(context):
        texts(local_model(whole, context))
        return set(context.group.gathered)

    hidden, width = CONFIG.hidden_size, CONFIG.vocab_size // 2
    for shapes in run_ranks(2, work):
        assert not [s for s in shapes if s[-1] in (width, 2 * width) and s[-1] != hidden]
