"""At how many sequences drafts pay follows from sizes, and changes no token."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.layers.host_experts import HostExperts, host_experts_
from dsv4.serving import Runner, SamplingOptions
from dsv4.serving.drafting import Drafting, DraftPlan, drafting_of
from dsv4.speculation import draft_costs
from dsv4.speculation.draft_costs import DraftCosts, Part, accepted
from dsv4.testing.models import random_model
from tests.speculation.dspark_cases import DSPARK, small

RESULTS = Path(__file__).parents[2] / "results/nvidia-h100/2026-11-28-model_flash_nvfp4.json"
# Flash in NVFP4: all but the routed experts, one expert of 43 layers; the drafts' likewise.
FLASH = Part(4.78e9, 608.7e6, 256, 6, 43, 25.3e9)
MTP = DraftCosts(FLASH, Part(1.16e9, 14.16e6, 256, 6, 1, 0.63e9), 1, accepted("mtp", 2))
BLOCK = Part(1.73e9, 42.5e6, 256, 6, 3, 1.87e9)
DSPARK_FLASH = DraftCosts(FLASH, BLOCK, 5, accepted("dspark", 5), has_confidence=True)


def test_times_are_those_that_were_measured() -> None:
    """Steps of 1, 8 and 64 sequences and prompts of 512 and 4096 tokens on one H100."""
    text = RESULTS.read_text()
    steps = [json.loads(line.rstrip(",")) for line in text.splitlines() if '"step_ms": ' in line]
    assert [row["tokens"] for row in steps] == [1, 8, 64]
    for row in steps:
        whole = Part(row["bytes"], 0.0, 64, 6, row["model"]["layers"], row["flops"] / row["tokens"])
        assert whole.ms(row["tokens"]) == pytest.approx(row["step_ms"], rel=0.15)
    prompts = [json.loads(line.rstrip(",")) for line in text.splitlines() if '"prompt": ' in line]
    for row in prompts[1:3]:
        part = Part(steps[-1]["bytes"], 0.0, 64, 6, 43, row["flops"] / row["prompt"])
        assert part.ms(row["prompt"]) == pytest.approx(row["first_ms"], rel=0.05)


def test_flash_drafts_where_its_experts_are_few_or_all_read() -> None:
    """Between, each token more reads experts more; with very many, operations bound the step."""
    drafts = {n: MTP.best(n).drafts for n in (1, 2, 8, 64, 4096)}
    assert drafts == {1: 2, 2: 2, 8: 1, 64: 2, 4096: 0}
    assert [DSPARK_FLASH.best(n).drafts for n in (1, 8, 64, 4096)] == [5, 0, 5, 0]
    assert 0.25 < DSPARK_FLASH.choice(1, 5).theta < 0.31, "about 0.3 at batch 1 on one GPU"
    assert DSPARK_FLASH.choice(1, 5).verified == 2
    assert DSPARK_FLASH.choice(64, 5).theta < 0.02, "all experts are read anyway"
    assert MTP.choice(1, 2).theta is None


def test_limits_are_those_that_the_guide_names() -> None:
    """In docs/speculation.md: the numbers of sequences at which Flash makes no drafts."""
    none = {n: (MTP.best(n).drafts == 0, DSPARK_FLASH.best(n).drafts == 0)
            for n in (1, 4, 5, 8, 13, 14, 1233, 1234, 2428, 2429, 5000)}  # fmt: skip
    assert [n for n, (mtp, _) in none.items() if mtp] == [2429, 5000]
    assert [n for n, (_, dspark) in none.items() if dspark] == [5, 8, 13, 1234, 2428, 2429, 5000]


@given(
    st.integers(1, 5000),
    st.sampled_from([MTP, DSPARK_FLASH, replace(DSPARK_FLASH, threshold=0.3)]),
)
def test_the_most_drafts_that_are_not_slower(sequences: int, costs: DraftCosts) -> None:
    best = costs.best(sequences)
    assert best.gain >= 1
    assert best.gain == pytest.approx(best.length * costs.main.ms(sequences) / best.ms)
    for drafts in range(best.drafts + 1, len(costs.accepted) + 1):
        assert costs.choice(sequences, drafts).gain < 1
    if costs.threshold is not None and best.drafts:
        assert best.theta == 0.3
        assert best.verified == min(2, best.drafts)
    elif best.theta is not None:
        assert best.theta >= 0
        assert 1 <= best.verified <= best.drafts
        for verified in range(1, best.drafts + 1):
            assert costs._gain(sequences, best.drafts, verified) <= best.gain


def test_shares_go_on_falling() -> None:
    shares = accepted("mtp", 6)
    assert shares[:2] == (0.70, 0.287)
    assert all(b / a == pytest.approx(0.41) for a, b in itertools.pairwise(shares))


def test_bytes_of_a_model_are_counted_once() -> None:
    model = random_model(small(), 0, torch.float32, mtp=True)
    costs, config = DraftCosts.of(model, "dspark", 5), model.config
    main, draft = costs.main, costs.draft
    expert = 3 * config.hidden_size * config.moe_intermediate_size * 4
    assert (main.expert, draft.expert) == (3 * expert, DSPARK.stages * expert)
    assert (main.layers, main.experts, main.chosen) == (3, config.n_routed_experts, 2)
    table = config.vocab_size * config.hidden_size * 4
    held = sum(t.nbytes for t in (*model.model.parameters(), *model.model.buffers()))
    # The head is as large as the embedding.
    assert main.dense == held - config.n_routed_experts * main.expert - table + table
    stages = sum(t.nbytes for t in (*model.mtp.parameters(), *model.mtp.buffers()))
    markov = config.vocab_size * DSPARK.markov_rank * 4
    dense = stages - config.n_routed_experts * draft.expert + table
    assert draft.dense == dense + (DSPARK.block_size - 1) * markov - markov


def test_an_expert_in_host_memory_has_the_bytes_of_another() -> None:
    model = random_model(small(), 0, torch.float32)
    before = Part.of(model.model)
    host_experts_(model, HostExperts(1, 2))
    after = Part.of(model.model)
    assert after.expert == pytest.approx(before.expert)
    assert after.operations == before.operations
    assert after.dense == pytest.approx(before.dense)


@given(st.integers(7, 256), st.sampled_from([1, 2, 8]))
def test_loads_of_experts_make_drafts_dearer(slots: int, sequences: int) -> None:
    """What a step loads over PCIe grows with its tokens, as its experts do."""
    hosted = replace(MTP, main=replace(FLASH, missed=1 - slots / 256))
    for drafts in (1, 2):
        plain, here = (costs.choice(sequences, drafts) for costs in (MTP, hosted))
        assert here.gain <= plain.gain
        assert here.ms - hosted.main.ms(sequences) >= plain.ms - MTP.main.ms(sequences) - 1e-9
    assert hosted.best(sequences).drafts <= MTP.best(sequences).drafts
    fewer = replace(hosted, most_tokens=2 * sequences).best(sequences)
    assert fewer.drafts <= 1
    assert replace(hosted, most_tokens=sequences).best(sequences).drafts == 0


def test_flash_on_one_h200_drafts_nothing_that_it_would_have_to_load() -> None:
    """217 of 256 experts are in slots: a token loads 39 experts of 14 MB in 11 ms."""
    hosted = replace(MTP, main=replace(FLASH, missed=1 - 217 / 256))
    assert hosted.main.ms(1) - FLASH.ms(1) == pytest.approx(11.0, abs=0.3)
    assert MTP.best(1).drafts == 2
    assert hosted.best(1).drafts == 0
    assert hosted.choice(1, 1).gain == pytest.approx(0.97, abs=0.03)
    text = hosted.explain([(1, 0)])
    assert text.endswith("15 % of those that a step chooses are loaded, if routing is uniform")
    assert "host memory" not in MTP.explain([(1, 2)])


def test_a_step_without_drafts_says_what_one_would_bring() -> None:
    dear = MTP.choice(4096, 1).gain
    assert dear < 1
    assert MTP.explain([(4096, 0)]).endswith(f"   (1 draft: {dear:.2f})")
    assert "(1 draft" not in MTP.explain([(1, 2)])
    slots = replace(MTP, most_tokens=3)
    assert slots.explain([(2, 0)]).endswith("   (slots have experts for 3 tokens)")


def test_with_experts_in_host_memory_one_draft_is_usual() -> None:
    """A named method drafts one token, "auto" at most one. No step exceeds the slots."""
    model = mtp_model()
    top_k = model.config.num_experts_per_tok
    assert drafting_of(model, "mtp").plan == DraftPlan("mtp", 2)
    host_experts_(model, HostExperts(1, 3 * top_k))
    assert drafting_of(model, "mtp").plan == DraftPlan("mtp", 1)
    assert drafting_of(model, "mtp", 2).plan == DraftPlan("mtp", 2)
    assert drafting_of(model, "auto").plan == DraftPlan("mtp", 1, by_size=True)
    costs = DraftCosts.of(model, "mtp", 2)
    experts = model.config.n_routed_experts
    assert costs.main.missed == pytest.approx(1 - (1 + 3 * top_k) / experts)
    assert costs.draft.missed == 0
    assert costs.most_tokens == 3
    assert [costs.best(n).drafts <= 3 // n - 1 for n in (1, 2, 3)] == [True] * 3
    prompts = [[1, 2, 3], [7, 8, 9, 4, 1]]
    plain = model.generate(prompts, 8, stop_ids=(), speculate=None)
    assert model.generate(prompts, 8, stop_ids=(), speculate="mtp") == plain


def mtp_model():
    config = ModelConfig.tiny(num_nextn_predict_layers=1, numerics="transformers")
    return random_model(config, 4, torch.float32, mtp=True)


def test_steps_of_many_sequences_go_without(monkeypatch, caplog) -> None:
    """Operations that take long make drafts of three sequences slower than none."""
    model = mtp_model()
    main = Part.of(model.model)
    monkeypatch.setattr(draft_costs, "_OPERATIONS_PER_MS", main.operations / 0.1)  # two layers'
    options = SamplingOptions(max_new_tokens=12, stop_ids=())
    prompts = [[1, 2, 3], [5] * 21, [7, 8, 9, 4, 1]]
    plain = model.generate(prompts, 12, stop_ids=(), speculate=None)
    with caplog.at_level(logging.INFO, "dsv4"):
        runner = Runner(model, max_sequences=3, max_tokens=64)
    counts = {size: runner._steps.drafts_of(size) for size in (1, 2, 3)}
    assert counts[1] > 0
    assert counts[3] == 0
    assert "sequences   drafts" in caplog.text
    table = runner.drafting.explain().splitlines()[1:]
    assert [tuple(map(int, line.split()[:2])) for line in table] == list(counts.items())
    requests = [runner.add(prompt, options) for prompt in prompts]
    runner.run()
    assert [request.tokens for request in requests] == plain
    before = runner.draft_counts.steps
    assert runner.add(prompts[0], options).result() == plain[0]
    assert runner.draft_counts.steps > before


def test_a_named_draft_is_made_at_any_size(monkeypatch, caplog) -> None:
    model = mtp_model()
    monkeypatch.setattr(draft_costs, "_OPERATIONS_PER_MS", 1e-3)
    with Runner(model, max_sequences=2, max_tokens=64, speculate="mtp") as runner:
        assert [runner._steps.drafts_of(size) for size in (1, 2)] == [2, 2]
        assert runner.drafting.explain() == "2 mtp drafts a step"
    with Runner(model, max_sequences=2, max_tokens=64) as runner:
        assert runner.drafting.plan is None
        assert "drafts would be slower at 1 to 2 sequences" in str(runner.drafting)
        assert runner._steps.speculative is None
    words = "tokens are generated without drafts: drafts would be slower at 1 to 2 sequences"
    Runner(model, max_sequences=2, max_tokens=64, draft_tokens=1).close()
    assert caplog.text.count(words) == 1


def test_a_plan_gives_the_arguments_that_make_it() -> None:
    model = mtp_model()
    for arguments in ({"speculate": "auto"}, {"speculate": "mtp", "draft_tokens": 3}):
        plan = drafting_of(model, **arguments).plan
        assert plan is not None
        assert plan.arguments().items() >= arguments.items()
    assert str(DraftPlan("mtp", 2, by_size=True)) == "up to 2 mtp drafts a step"
    assert Drafting().drafts_at(5) == 0
