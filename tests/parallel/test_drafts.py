"""Drafts of ranks that process the same tokens: the text of one process, and the same counts."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import dsv4
from dsv4.checkpoint import Checkpoint, save
from dsv4.config import CSA, HCA, SLIDING, DSparkConfig
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.local_model import local_model
from dsv4.parallel.split import local_bytes
from dsv4.serving import Runner, SamplingOptions
from dsv4.serving.drafting import drafting_of
from dsv4.speculation.draft_costs import DraftCosts
from dsv4.speculation.forced import ForcedAcceptance
from dsv4.testing.models import random_model
from dsv4.testing.ranks import run_ranks
from tests.checkpoint.cases import assert_same_state
from tests.parallel.cases import CONFIG

METHODS = ("mtp", "dspark")
PROMPTS = [[5, 9, 2], list(range(1, 31)), [7]]
OPTIONS = [
    SamplingOptions(max_new_tokens=9, stop_ids=(), seed=2),
    SamplingOptions(max_new_tokens=7, stop_ids=(), temperature=0.9, top_p=0.9, seed=3),
    SamplingOptions(
        max_new_tokens=6, stop_ids=(), temperature=1.1, repetition_penalty=1.3, seed=4, logprobs=3
    ),
]


@functools.cache
def whole(method: str) -> Any:
    """A model whose head repeats itself, so that some drafts are right; without rounding."""
    changes: dict[str, Any] = {"numerics": "transformers", "vocab_size": 64}
    if method == "dspark":
        dspark = DSparkConfig(
            block_size=4, noise_token_id=63, target_layer_ids=(0, 1, 2), markov_rank=8
        )
        changes |= {"num_nextn_predict_layers": 0, "dspark": dspark}
    config = CONFIG.replace(layer_types=(SLIDING, CSA, HCA), **changes)
    return random_model(config, 3, torch.float64, mtp=True)


def served(model: Any, **changes: Any) -> tuple[list[list[int]], list[Any], tuple[int, int]]:
    """Texts, log-probabilities, and counts of drafts."""
    options = {"max_sequences": 2, "max_tokens": 64, "max_chunk": 16, **changes}
    with Runner(model, **options) as runner:
        requests = [runner.add(p, o) for p, o in zip(PROMPTS, OPTIONS, strict=True)]
        runner.run()
        counts = runner.draft_counts.drafted, runner.draft_counts.accepted
        return [r.result() for r in requests], [r.logprobs for r in requests], counts


@pytest.mark.parametrize(("method", "share"), [("mtp", 0.6), ("dspark", None)])
def test_texts_are_those_of_one_process(method, share):
    """Greedy and drawn, with a penalty and log-probabilities; in float64, without close calls.

    With ``share`` that share of drafts is accepted by a seed, and there are few pages.
    """
    changes = {"speculate": method, "draft_tokens": 2}
    if share is not None:
        changes |= {"verify": ForcedAcceptance(share), "pool_tokens": 128}
    texts, reports, counts = served(whole(method), **changes)
    assert counts[0] > 10
    assert counts[1] > 5 or share is None
    if share is None:
        plain, _, _ = served(whole(method), speculate=None)
        assert texts[0] == plain[0]
    for of_rank in run_ranks(2, lambda c: served(local_model(whole(method), c), **changes)):
        assert of_rank[0] == texts
        assert of_rank[2] == counts
        for ours, theirs in zip(of_rank[1][2], reports[2], strict=True):
            assert ours.token == theirs.token
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_the_default_of_generate(method):
    expected = whole(method).generate(PROMPTS, 6, stop_ids=(), speculate=None)

    def work(context: ParallelContext) -> Any:
        local = local_model(whole(method), context)
        assert drafting_of(local, "auto").plan.method == method
        return local.generate(PROMPTS, 6, stop_ids=(), speculate=method)

    assert run_ranks(2, work) == [expected] * 2


@pytest.mark.parametrize("method", METHODS)
def test_ranks_with_tokens_of_their_own_draft_nothing(method):
    def work(context: ParallelContext) -> Any:
        own = ParallelContext(context.rank, context.size, context.group, "dp")
        local = local_model(whole(method), own)
        assert "each rank has tokens of its own" in drafting_of(local, "auto").reason
        with pytest.raises(ValueError, match="speculate is 'mtp', but each rank has tokens of it"):
            drafting_of(local, "mtp")
        return True

    if method == "mtp":
        assert all(run_ranks(2, work))
        return
    with pytest.raises(ValueError, match="wanted 'tp': with tokens of their own they draft nothi"):
        run_ranks(2, work)


def test_the_drafts_of_a_rank_are_its_share():
    """Of the stages' blocks, that is; what they read and their heads are on every rank."""
    model = whole("dspark")
    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    for local in run_ranks(2, lambda context: local_model(model, context)):
        held = sum(tensor.nbytes for tensor in local.state_dict().values())
        assert held == pytest.approx(local_bytes(sizes, 2))
        assert local.dspark is not None


def test_a_rank_loads_its_share_of_the_drafts(tmp_path):
    """With ``"tp"``; ranks with tokens of their own leave them out."""
    model = copy.deepcopy(whole("dspark")).float()
    save(model, tmp_path, layout="bf16")
    with Checkpoint.open(tmp_path) as checkpoint:
        sizes = {name: entry.nbytes for name, entry in checkpoint.entries.items()}

    def loaded(parallel: str, mtp: bool | None = None) -> list[Any]:
        options: dict[str, Any] = {"parallel": parallel, "mtp": mtp, "progress": False}
        return run_ranks(2, lambda context: dsv4.load(tmp_path, device_mesh=context, **options))

    with pytest.raises(ValueError, match="with parallel='dp' ranks have no DSpark draft"):
        loaded("dp", True)
    assert [local.dspark for local in loaded("dp")] == [None, None]
    stored = dsv4.load(tmp_path, progress=False)
    for local in loaded("tp"):
        assert local.load_report.bytes_read == pytest.approx(local_bytes(sizes, 2), rel=0.05)
        assert_same_state(local.state_dict(), local_model(stored, local.parallel).state_dict())


def test_all_ranks_draft_as_rank_0_computes(monkeypatch):
    """With other bytes, another number of drafts pays, or another confidence is enough."""
    of = DraftCosts.of

    def differing(model: Any, *arguments: Any) -> DraftCosts:
        costs = of(model, *arguments)
        main = replace(costs.main, dense=costs.main.dense + 1e9 * model.parallel.rank)
        return replace(costs, main=main)

    def work(context: ParallelContext) -> Any:
        model = local_model(whole("dspark"), context)
        with Runner(model, max_sequences=2, max_tokens=64, speculate="dspark") as runner:
            return [runner.drafting.theta_at(size) for size in (1, 2)]

    monkeypatch.setattr(DraftCosts, "of", differing)
    first, second = run_ranks(2, work)
    assert None not in first
    assert first == second


def test_other_drafts_on_a_rank():
    def work(context: ParallelContext) -> Any:
        return served(local_model(whole("mtp"), context), draft_tokens=1 + context.rank)

    with pytest.raises(ValueError, match=r"drafts is DraftPlan.* on rank 0 and DraftPlan"):
        run_ranks(2, work)
