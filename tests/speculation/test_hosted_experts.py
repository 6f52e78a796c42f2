"""Drafts with experts in host memory: the text without either, over the borders of waves."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4 import layers
from dsv4.checkpoint import load, save
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import HostExperts
from dsv4.layers.host_experts import experts_of
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner
from dsv4.testing.models import random_model
from tests.speculation.dspark_cases import DSPARK
from tests.speculation.mixed_drafts import mix
from tests.speculation.packed_models import METHODS

EXPERTS, TOP_K, NEW = 8, 2, 6
PROMPTS = ((5,) * 9, (7, 8, 9, 4, 1), (1, 2, 3))


def model_of(method: str) -> DeepseekV4ForCausalLM:
    """Without rounding of activations, so that no order of a sum moves a code."""
    drafts = {"num_nextn_predict_layers": 1} if method == "mtp" else {"dspark": DSPARK}
    config = ModelConfig.tiny(
        layer_types=(SLIDING, CSA, HCA), hidden_size=32, moe_intermediate_size=32,
        n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, sliding_window=8, vocab_size=48,
        numerics="transformers", **drafts,
    )  # fmt: skip
    model = random_model(config, 4, torch.float32, mtp=True)
    layers.quantize_(model, "nvfp4", names=["model.*.mlp.experts"])
    draft_format = "nvfp4" if method == "mtp" else "mxfp4"  # as published
    layers.quantize_(model, draft_format, names=["mtp.*.mlp.experts"])
    return model


@functools.cache
def plain(method: str) -> list[list[int]]:
    return model_of(method).generate(PROMPTS, NEW, stop_ids=(), speculate=None)


def served(
    runner: Runner, expected: Sequence[Sequence[int]], share: float, repin: bool
) -> list[list[int]]:
    """Return the texts of a runner whose drafts are right in a share of the steps."""
    if runner.drafting.plan is not None:
        known = [[*prompt, *text] for prompt, text in zip(PROMPTS, expected, strict=True)]
        mix(runner, dict(enumerate(known)), share, seed=1)
    texts = []
    for prompts in (PROMPTS[:2], PROMPTS[2:]) if repin else (PROMPTS,):
        requests = [runner.add(prompt, max_new_tokens=NEW, stop_ids=()) for prompt in prompts]
        runner.run()
        texts += [request.tokens for request in requests]
        if repin:
            layers.repin_(runner.model)
    return texts


@pytest.mark.costly(8)
@given(
    method=st.sampled_from(METHODS),
    named=st.booleans(),
    drafts=st.sampled_from([None, 1, 2, 5]),
    share=st.sampled_from([0.0, 0.8]),
    sequences=st.integers(1, 3),
    chunk=st.sampled_from([3, 64]),
    static=st.integers(0, EXPERTS - 1),
    spare=st.integers(0, EXPERTS),
    staged=st.integers(0, 3),
    streamed=st.booleans(),
    repin=st.booleans(),
)
@settings(max_examples=8)
@example("mtp", True, None, 0.8, 1, 64, 2, 2, 0, False, False)  # a draft fits the slots
@example("mtp", True, 5, 0.8, 3, 3, 0, 0, 2, True, True)  # 18 tokens, slots for one
@example("dspark", True, 5, 0.8, 3, 64, 3, 1, 1, False, False)  # waves
def test_text_is_that_without_drafts_and_host_memory(
    method, named, drafts, share, sequences, chunk, static, spare, staged, streamed, repin
):
    """Steps that fit the slots, steps in waves, and steps through the buffer."""
    model, others = model_of(method), EXPERTS - static
    slots = min(others, TOP_K + spare)
    layers.host_experts_(model, HostExperts(static, slots, staged=min(staged, others)))
    for _, experts in experts_of(model):
        if experts.hosted.staging is not None and streamed:
            experts.hosted.staging.choices_per_expert = 0
    sizes = {"max_sequences": sequences, "max_chunk": chunk, "prefix_sequences": 0}
    with Runner(
        model,
        max_tokens=64,
        speculate=method if named else "auto",
        draft_tokens=drafts,
        **sizes,
    ) as runner:
        assert served(runner, plain(method), share, repin) == plain(method)
        counts, plan = runner.draft_counts, runner.drafting.plan
    assert plan is not None or not named
    if named:
        usual = 1 if slots < others else {"mtp": 2, "dspark": 5}[method]
        assert plan.tokens == (drafts or usual)
        assert counts.drafted > 0
        assert counts.accepted > 0 or share == 0
    assert all(getattr(part, "hosted", None) is None for part in model.mtp.modules())


@pytest.mark.parametrize("method", METHODS)
def test_a_loaded_checkpoint_drafts(method, tmp_path, caplog):
    """Packed, so that the draft's MXFP4 experts are converted; one draft by default, in waves."""
    save(model_of(method).to(torch.bfloat16), tmp_path, layout="nvidia")
    options = {"numerics": "transformers", "pack": "fragments_16x64", "progress": False}
    expected = load(tmp_path, **options).generate(PROMPTS[1:], 5, stop_ids=(), speculate=None)
    model = load(tmp_path, host_experts=HostExperts(2, TOP_K), **options)
    assert model.generate(PROMPTS[1:], 5, stop_ids=(), speculate=method) == expected
    assert model.generate(PROMPTS[1:], 5, stop_ids=()) == expected
    assert "experts in host memory have slots for 1 token of a step" in caplog.text
    assert 0 < layers.cache_use(model).hit_rate < 1


@pytest.mark.parametrize("method", METHODS)
def test_padding_loads_nothing(method):
    """Nor where drafts of low confidence go to no expert, and padding has an anchor."""
    counts, texts = [], []
    threshold = 0.01 if method == "dspark" else None
    for buckets in (None, (4,)):
        model = model_of(method)
        layers.host_experts_(model, HostExperts(0, EXPERTS))
        with Runner(
            model, max_sequences=4, max_tokens=32, buckets=buckets, prefix_sequences=0,
            speculate=method, draft_tokens=2, confidence_threshold=threshold,
        ) as runner:  # fmt: skip
            requests = [runner.add(p, max_new_tokens=4, stop_ids=()) for p in ([1, 2], [3])]
            while not all(request.done for request in requests):
                runner.step()
            texts.append([request.tokens for request in requests])
        counts.append(layers.expert_counts(model).tolist())
    assert texts[0] == texts[1]
    assert counts[0] == counts[1]
