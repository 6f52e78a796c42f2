"""Drafts of too little confidence are left out on the device: no experts, never accepted."""

from __future__ import annotations

import functools

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.kv_cache.batch import Batch, CacheStep
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner, SamplingOptions
from dsv4.serving.graphs import Graphs
from dsv4.testing.models import random_model
from tests._tools.taped import taped
from tests.serving.cases import assert_empty
from tests.speculation.dspark_cases import DSPARK, model_of, small
from tests.speculation.packed_models import on_gpu

PROMPTS = ([1, 2, 3], [5] * 21, [7, 8, 9, 4, 1])
OPTIONS = SamplingOptions(max_new_tokens=16, stop_ids=())


@functools.cache
def model() -> DeepseekV4ForCausalLM:
    return model_of(small(numerics="transformers", mlp_layer_types=("hash_moe", "moe", "moe")))


@functools.cache
def plain() -> list[list[int]]:
    return model().generate(PROMPTS, 16, stop_ids=(), speculate=None)


def served(threshold: float | None, **options: object) -> Runner:
    sizes = {"max_sequences": 3, "max_tokens": 64, "speculate": "dspark"}
    return Runner(model(), **{**sizes, **options}, confidence_threshold=threshold)


@pytest.mark.parametrize("threshold", [0.0, 0.12, 0.3, 1.0, None])
def test_text_is_that_without_drafts_at_any_threshold(threshold: float | None) -> None:
    runner = served(threshold)
    requests = [runner.add(prompt, OPTIONS) for prompt in PROMPTS]
    runner.run()
    assert [request.tokens for request in requests] == plain()
    counts = runner.draft_counts
    assert counts.accepted <= counts.drafted <= DSPARK.block_size * counts.steps
    if threshold == 1.0:
        assert counts.drafted == 0
    elif threshold in (0.0, None):  # a token more costs such a small model next to nothing
        assert counts.drafted > 0.9 * DSPARK.block_size * counts.steps
    else:
        assert 0 < counts.drafted < 0.9 * DSPARK.block_size * counts.steps
    assert_empty(runner)


def test_what_is_left_out_reads_no_experts() -> None:
    """In hash layers, too; a step has a row for each draft all the same."""
    runner, seen = served(0.3), list[torch.Tensor]()
    inner = runner._steps.speculative._drafter.draft
    drafted = list[torch.Tensor]()

    def noted(*arguments):
        drafts = inner(*arguments)
        drafted.append(drafts.tokens.clone())
        return drafts

    runner._steps.speculative._drafter.draft = noted
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: seen.append(out[2]))
        for layer in model().model.layers
    ]
    requests = [runner.add(prompt, OPTIONS) for prompt in PROMPTS]
    while not drafted:
        seen.clear()
        runner.step()
    for hook in hooks:
        hook.remove()
    missing = torch.nn.functional.pad(drafted[0], (1, 0)).flatten() < 0
    assert missing.any()
    assert not missing.all()
    assert len(seen) == 6, "prompts, then the step with drafts"
    for ids in seen[3:]:
        assert len(ids) == len(missing)
        assert ((ids < 0).all(1) == missing).all()
        assert ((ids < 0).any(1) == missing).all()
    runner.run()
    assert [request.tokens for request in requests] == plain()


def test_rows_without_experts_change_no_other_row() -> None:
    config = ModelConfig.tiny(numerics="transformers", sliding_window=8)
    other = random_model(config, 2, torch.float64)
    cache = other.new_cache(2, 64)
    rows = torch.tensor([cache.allocate(), cache.allocate()])
    ids = torch.arange(10).unsqueeze(0)
    outputs = []
    with torch.inference_mode():
        for routed in (None, torch.tensor([0, 3, 1, -1, -1, 2, -1, -1, -1, -1])):
            step = CacheStep(cache, Batch.equal(cache.lengths[rows], rows, 5), routed)
            outputs.append(other.model(ids, None, step)[0][0])
    live = [0, 1, 2, 5]
    assert torch.allclose(outputs[0][live], outputs[1][live], atol=1e-12)
    assert not torch.allclose(outputs[0][[3, 6]], outputs[1][[3, 6]], atol=1e-3)


def test_captured_steps_cut_drafts_on_the_device(monkeypatch) -> None:
    """Nothing is read on the host, and buckets have thresholds of their own."""
    results = []
    for captured in (False, True):
        if captured:
            monkeypatch.setattr(Graphs, "captured", taped)
        runner = served(
            0.3, max_sequences=2, max_chunk=24, prompt_buckets=(24,), buckets=(1, 2),
            prefix_sequences=0,
        )  # fmt: skip
        steps = runner._steps
        steps.is_captured = steps.speculative._captures_drafts = captured
        requests = [runner.add(prompt, OPTIONS, max_new_tokens=8) for prompt in PROMPTS]
        runner.run()
        results.append(([r.tokens for r in requests], str(runner.draft_counts)))
    assert results[0] == results[1]
    assert results[0][0] == [tokens[:8] for tokens in plain()]


@pytest.mark.gpu
def test_captured_steps_cut_drafts_on_a_gpu() -> None:
    """As eager ones do, bit for bit, and with the text of all drafts verified."""
    other, results = on_gpu("dspark"), []
    options = SamplingOptions(max_new_tokens=40, stop_ids=(), logprobs=2)
    for threshold, capture in ((0.3, False), (0.3, None), (0.0, None)):
        runner = Runner(
            other, max_sequences=3, max_tokens=128, max_chunk=64, buckets=(1, 3),
            prompt_buckets=(32,), speculate="dspark", capture=capture,
            confidence_threshold=threshold,
        )  # fmt: skip
        requests = [runner.add(prompt, options) for prompt in PROMPTS]
        runner.run()
        results.append(([(r.tokens, r.logprobs) for r in requests], str(runner.draft_counts)))
        assert (runner.captures > 0) == (capture is None)
        cut = runner.draft_counts.drafted < DSPARK.block_size * runner.draft_counts.steps
        assert cut == (threshold > 0)
    assert results[0] == results[1]
    assert [tokens for tokens, _ in results[2][0]] == [tokens for tokens, _ in results[0][0]]


def test_a_threshold_needs_a_confidence() -> None:
    mtp = random_model(ModelConfig.tiny(num_nextn_predict_layers=1), mtp=True)
    bare = model_of(small(DSPARK.__class__(**{**vars(DSPARK), "confidence_head": False})))
    for other, name in ((mtp, "mtp"), (bare, "dspark")):
        with pytest.raises(ValueError, match=f"is 0.5, wanted None: the {name} draft has no"):
            other.generate([[1]], 2, confidence_threshold=0.5)
    for value, error, words in (
        (True, TypeError, "confidence_threshold is True, wanted a number or None"),
        (1.5, ValueError, "confidence_threshold is 1.5, wanted 0 to 1"),
    ):
        with pytest.raises(error, match=words):
            served(value)
    with pytest.raises(ValueError, match=r"0\.5 and speculate None, wanted a method, too"):
        served(0.5, speculate=None)
    with Runner(bare, max_sequences=1, max_tokens=32, speculate="dspark") as runner:
        assert runner._steps.speculative._drafter.thetas == {}
