"""``generate`` over a runner: as the plain loop, and what a model keeps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from dsv4.serving import Runner, SamplingOptions, kept_runner, release
from dsv4.serving.drafting import same_draws
from dsv4.serving.generation import generate
from dsv4.serving.kept_runner import KeptRunner
from dsv4.serving.sampling import Sampler
from tests.serving.cases import ToyModel, last_hash, packed, plain_text

GREEDY = SamplingOptions(max_new_tokens=9, stop_ids=())


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> ToyModel:
    """A model that keeps its runner, as one on a GPU does."""
    monkeypatch.setattr(kept_runner, "_keeps", lambda model: True)
    return ToyModel()


def runner_of(model: ToyModel) -> KeptRunner:
    return KeptRunner.of(model)


def test_generate_is_the_plain_loop() -> None:
    model, prompts = ToyModel(), [[1, 2, 3], [4], [5] * 40]
    result = generate(model, prompts, 9, stop_ids=())
    assert result == [plain_text(model, prompt, GREEDY, 0) for prompt in prompts]
    assert generate(model, prompts, 9, stop_ids=(), chunk=5) == result
    stop = result[0][3]
    assert (
        generate(model, [[1, 2, 3]], 9, stop_ids=[stop])[0]
        == result[0][: result[0].index(stop) + 1]
    )
    assert generate(model, [], 9) == []
    with pytest.raises(TypeError, match="sampler is function, wanted a Sampler"):
        generate(model, [[1]], 2, sampler=lambda logits: logits.argmax(-1))


def test_a_verification_without_drafts_is_refused() -> None:
    with pytest.raises(TypeError, match="verify is 'x', wanted a function or None"):
        Runner(ToyModel(), max_sequences=1, max_tokens=8, verify="x")
    with pytest.raises(ValueError, match="verify is given and speculate None, wanted a method"):
        Runner(ToyModel(), max_sequences=1, max_tokens=8, verify=same_draws, speculate=None)


def test_a_generator_decides_what_is_drawn() -> None:
    model = ToyModel()

    def drawn(seed: int) -> list[list[int]]:
        sampler = Sampler(1.0, 0.9, torch.Generator().manual_seed(seed))
        return generate(model, [[1, 2], [1, 2]], 12, sampler=sampler, stop_ids=())

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1]


def test_logits_that_are_not_finite_raise() -> None:
    model = ToyModel()
    model.lm_head.weight.zero_()
    cache = model.new_cache(1, 8)
    model.prefill([[1, 2]], cache, [cache.allocate()])
    model.failing = {last_hash(cache, 0)}
    with pytest.raises(RuntimeError, match="the logits of prompt 1 for new token 1 have no finite"):
        generate(model, [[5], [1, 2]], 4, stop_ids=())


def test_a_kept_runner_serves_what_fits_it_until_a_weight_changes(keeping: ToyModel) -> None:
    model = keeping

    def runner_after(prompts: list[list[int]], count: int, **options: Any) -> Any:
        actual = generate(model, prompts, count, stop_ids=(), **options)
        expected = SamplingOptions(max_new_tokens=count, stop_ids=())
        assert actual == [plain_text(model, p, expected, 0) for p in prompts]
        return runner_of(model).runner

    first = runner_after([[1, 2], [3]], 4)
    assert first.limits.max_tokens == 1024  # as many as the model has positions
    assert runner_after([[7]], 30) is first
    more = runner_after([[1], [2], [3]], 3)
    assert more is not first
    assert runner_after([[1, 2], [3]], 4) is more
    assert runner_after([[1, 2], [3]], 4, chunk=2) is not more
    again = runner_after([[1]], 2)
    assert again.limits.max_sequences == 1
    model.lm_head.weight.add_(1)
    changed = runner_after([[1]], 2)
    assert changed is not again
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    assert runner_after([[1]], 2) is not changed
    release(model)
    assert runner_of(model).runner is None


def test_an_interrupted_call_leaves_nothing_behind(keeping: ToyModel) -> None:
    model, calls = keeping, []
    forward = model.model.forward

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args)

    model.model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1, 2], [3]], 9, stop_ids=())
    expected = [plain_text(ToyModel(), p, GREEDY, 0) for p in ([1, 2], [3])]
    assert generate(model, [[1, 2], [3]], 9, stop_ids=()) == expected
    runner = runner_of(model).runner
    assert not runner._scheduler.running
    assert not runner.has_work or not runner.step()


def test_copies_do_not_get_the_runner(keeping: ToyModel) -> None:
    generate(keeping, [[1]], 2, stop_ids=())
    assert runner_of(keeping).runner is not None
    assert copy.deepcopy(runner_of(keeping)).runner is None
    assert pickle.loads(pickle.dumps(runner_of(keeping))).runner is None


@pytest.mark.gpu
def test_a_model_on_a_gpu_keeps_its_graphs() -> None:
    model, prompts = packed("deepseek").cuda(), [[1, 2, 3], [4]]
    first = generate(model, prompts, 20, stop_ids=())
    runner = runner_of(model).runner
    captures = runner.captures
    assert captures > 1
    assert generate(model, prompts, 20, stop_ids=()) == first
    assert runner_of(model).runner is runner
    assert runner.captures == captures
    sizes = {"buckets": (1, 2), "prompt_buckets": (32,)}
    eager = Runner(model, max_sequences=2, max_tokens=1024, capture=False, **sizes)
    requests = [eager.add(prompt, max_new_tokens=20, stop_ids=()) for prompt in prompts]
    eager.run()
    assert first == [request.tokens for request in requests]
    release(model)
    assert generate(model, prompts, 20, stop_ids=()) == first
