"""Models with draft layers are served as without: MTP and DSpark in a runner, sampled text too."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.batch import Batch, CacheStep
from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Request, Runner, SamplingOptions
from dsv4.serving.drafters import Drafter, DSparkDrafter
from dsv4.serving.drafting import DraftPlan, drafting_of
from dsv4.serving.graphs import Graphs, SamplerStep
from dsv4.serving.kept_runner import prepare
from dsv4.serving.readback import NOTHING
from dsv4.serving.row_state import RowState
from dsv4.serving.sampler import Variant
from dsv4.serving.speculative import SpeculativeStep
from dsv4.speculation.forced import ForcedAcceptance
from dsv4.speculation.mtp import Drafts
from dsv4.speculation.verify import draw_draft, verify_sampled
from dsv4.testing.models import random_model
from tests._tools.taped import taped
from tests.serving import test_graphs
from tests.serving.cases import assert_empty
from tests.serving.test_sampler import chi_square
from tests.speculation import test_mtp
from tests.speculation.dspark_cases import DSPARK, Sequences, model_of, small
from tests.speculation.packed_models import METHODS, on_gpu
from tests.speculation.table_drafts import (
    KINDS,
    Comparison,
    Tie,
    compare,
    counted,
    draft_from_tables,
    greedy,
    proposed,
)
from tests.speculation.test_verify import request as sampled

PROMPTS = ([1, 2, 3], [5] * 21, [7, 8, 9, 4, 1])


@functools.cache
def model(method: str) -> DeepseekV4ForCausalLM:
    """Windows of 8, 4 and 8 tokens; no rounding, so that no order of a sum moves a code."""
    types = (SLIDING, CSA, HCA)
    if method == "dspark":
        return model_of(small(numerics="transformers"), 0, torch.float32)
    config = ModelConfig.tiny(
        layer_types=types, num_nextn_predict_layers=1, sliding_window=8,
        numerics="transformers",
    )  # fmt: skip
    return random_model(config, 4, torch.float32, mtp=True)


@functools.cache
def plain(method: str) -> list[list[int]]:
    return model(method).generate(PROMPTS, 24, stop_ids=(), speculate=None)


@pytest.mark.parametrize("method", METHODS)
def test_generate_drafts_and_has_the_same_text(method) -> None:
    served = model(method)
    assert served.generate(PROMPTS, 24, stop_ids=()) == plain(method)
    single = served.generate(PROMPTS[:1], 9, stop_ids=(), speculate=method, draft_tokens=1)
    assert single == [plain(method)[0][:9]]


@pytest.mark.parametrize("method", METHODS)
def test_captured_parts_read_nothing_on_the_host(monkeypatch, method) -> None:
    """Torch's operations alone are repeated; drafts, lengths and tokens are in tensors."""
    served = model(method)
    kinds = [
        SamplingOptions(max_new_tokens=16, stop_ids=()),
        SamplingOptions(
            max_new_tokens=16, stop_ids=(), temperature=0.8, top_p=0.9, seed=5, logprobs=2,
            repetition_penalty=1.2,
        ),
    ]  # fmt: skip
    results = []
    for captured in (False, True):
        if captured:
            monkeypatch.setattr(Graphs, "captured", taped)
        runner = Runner(
            served, max_sequences=2, max_tokens=64, max_chunk=24, prompt_buckets=(24,),
            buckets=(2,), prefix_sequences=0,
        )  # fmt: skip
        runner._steps.is_captured = runner._steps.speculative._captures_drafts = captured
        requests = [runner.add(p, kinds[i % 2]) for i, p in enumerate(PROMPTS)]
        runner.run()
        results.append([(r.tokens, r.logprobs) for r in requests])
        assert_empty(runner)
    assert results[0] == results[1]
    assert results[0][0][0] == plain(method)[0][:16]
    assert runner.captures > 5


def poisoned(method: str) -> DeepseekV4ForCausalLM:
    """The model, whose draft makes NaN."""
    import copy

    broken = copy.deepcopy(model(method))
    with torch.no_grad():
        if method == "mtp":
            broken.mtp[0].norm.weight[0] = torch.nan
        else:
            broken.dspark.last.norm.weight[0] = torch.nan
    return broken


@pytest.mark.parametrize("method", METHODS)
def test_nan_in_the_draft_costs_drafts_alone(method) -> None:
    with Runner(poisoned(method), max_sequences=3, max_tokens=64) as runner:
        greedy = SamplingOptions(max_new_tokens=10, stop_ids=())
        drawn = SamplingOptions(max_new_tokens=6, stop_ids=(), temperature=1.0, seed=2)
        requests = [runner.add(PROMPTS[0], greedy), runner.add(PROMPTS[2], drawn)]
        runner.run()
        assert runner.draft_counts.accepted == 0
    assert requests[0].tokens == plain(method)[0][:10]
    with Runner(model(method), max_sequences=3, max_tokens=64, speculate=None) as runner:
        assert runner.add(PROMPTS[2], drawn).result() == requests[1].tokens


def whole_mtp(text: list[int], count: int) -> list[int]:
    """Drafts after a text over the whole sequence, without a cache."""
    return test_mtp.expected_drafts(text, count)


def whole_dspark(text: list[int], count: int) -> list[int]:
    """Drafts after a text that was processed in one step."""
    sequences = Sequences.of(wide_dspark(), 1)
    sequences.step({0: text[:-1]})
    return sequences.propose({0: text[-1]}).tokens[0, :count].tolist()


@functools.cache
def wide_dspark() -> DeepseekV4ForCausalLM:
    return model_of(small(numerics="transformers"), 0, torch.float64)


@pytest.mark.parametrize("method", METHODS)
def test_a_runner_drafts_what_whole_sequences_draft(method) -> None:
    """After chunks of prompts, accepted and rejected drafts, and a step without drafts."""
    served = test_mtp.model() if method == "mtp" else wide_dspark()
    expected = whole_mtp if method == "mtp" else whole_dspark
    runner = Runner(served, max_sequences=2, max_tokens=64, max_chunk=6, draft_tokens=3)
    assert runner._steps.speculative is not None
    drafter: Any = runner._steps.speculative._drafter
    inner, seen = drafter.draft, list[tuple[Any, int, list[int]]]()

    def recorded(anchors: Any, rows: Any, lengths: Any, *rest: Any) -> Drafts:
        drafts = inner(anchors, rows, lengths, *rest)
        request_of = {s.row: s.request for s in runner._scheduler.running}
        for row, length, tokens in zip(
            rows.tolist(), lengths.tolist(), drafts.tokens.tolist(), strict=True
        ):
            if row >= 0:
                seen.append((request_of[row], length, tokens))
        return drafts

    drafter.draft = recorded
    requests = [runner.add(prompt, max_new_tokens=11, stop_ids=()) for prompt in PROMPTS[1:]]
    steps = 0
    while runner.step():
        steps += 1
        runner._steps.drafts_of = lambda count, now=steps: 0 if now == 8 else 3
    checked = 0
    for request, length, tokens in seen:
        text = [*request.prompt, *request.tokens]
        if length < len(text):
            assert tokens == expected(text[: length + 1], 3)
            checked += 1
    assert checked > 12
    assert all(len(request.tokens) == 11 for request in requests)


def test_dspark_draws_each_row_by_its_own_random_numbers() -> None:
    """Each draft is drawn at its own position, and kept with what it was drawn from."""
    served, count = wide_dspark(), 3
    cache = served.new_cache(2, 64, max_chunk=8)
    rows = torch.tensor([cache.allocate(), cache.allocate()])
    drafter, seen = DSparkDrafter(served, cache), list[torch.Tensor]()
    with torch.inference_mode():
        served.prefill([[1, 2, 3], [4, 5]], cache, rows.tolist())
        assert served.dspark is not None
        head: Any = served.dspark.last.markov_head
        hook = head.register_forward_hook(lambda *call: seen.append(call[-1]))
        at = sampled(2, top_k=served.config.vocab_size)._replace(position=cache.lengths[rows] + 1)
        drafts = drafter.draft(
            torch.tensor([7, 8]), rows, cache.lengths[rows], count, at, Variant(draw=True)
        )
        hook.remove()
    assert drafts.probabilities is not None
    for j in range(count):
        drawn = draw_draft(seen[j], at._replace(position=at.position + j), Variant(draw=True))
        assert torch.equal(drafts.tokens[:, j], drawn.tokens)
        assert torch.equal(drafts.probabilities[:, j], drawn.probabilities)


# Which drafts ---------------------------------------------------------------------------------


def test_auto_takes_the_draft_that_is_there(caplog) -> None:
    none = random_model(ModelConfig.tiny(num_nextn_predict_layers=0))
    assert drafting_of(none, "auto").plan is None
    assert drafting_of(none, "auto").reason == "the model holds no draft layers"
    assert str(drafting_of(none, None)) == "no drafts: none are asked for"
    assert drafting_of(model("mtp"), "auto").plan == DraftPlan("mtp", 2, by_size=True)
    most = DSPARK.block_size
    assert drafting_of(model("dspark"), "auto").plan == DraftPlan("dspark", most, by_size=True)
    assert drafting_of(model("mtp"), "mtp", 8).plan == DraftPlan("mtp", 8)
    assert str(drafting_of(model("mtp"), "mtp", 1)) == "1 mtp draft a step"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            runner = Runner(model("mtp"), max_sequences=1, max_tokens=64, deterministic=True)
            assert "bits of a deterministic runner would depend" in str(runner.drafting)
    assert caplog.text.count("tokens are generated without drafts") == 1


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("mtp", {"speculate": "dspark"}, "'dspark', but the model holds layers of multi-token"),
        ("dspark", {"speculate": "mtp"}, "'mtp', but the model holds a DSpark draft"),
        ("mtp", {"speculate": "eagle"}, "speculate is 'eagle', wanted 'auto', 'mtp', 'dspark'"),
        ("mtp", {"draft_tokens": 9}, "draft_tokens is 9, wanted 1 to 8 of mtp"),
        ("dspark", {"draft_tokens": 6}, "draft_tokens is 6, wanted 1 to 5 of dspark"),
        ("mtp", {"draft_tokens": 0}, "draft_tokens is 0, wanted 1 or more"),
        ("mtp", {"speculate": None, "draft_tokens": 2}, "2 and speculate None, wanted a method"),
    ],
)
def test_what_is_not_possible_raises_with_the_reason(method, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        model(method).generate(PROMPTS, 4, **options)
    with pytest.raises(ValueError, match=words):
        Runner(model(method), max_sequences=1, max_tokens=64, **options)


def test_other_reasons() -> None:
    with pytest.raises(ValueError, match=r"on a CPU products of torch\.float32 treat the last"):
        Runner(model("mtp"), max_sequences=1, max_tokens=64, deterministic=True, speculate="mtp")
    with pytest.raises(TypeError, match="draft_tokens is True, wanted an int or None"):
        model("mtp").generate(PROMPTS, 4, draft_tokens=True)
    plain_model = random_model(ModelConfig.tiny(num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="'mtp', but the model holds no draft layers; wanted"):
        plain_model.generate(PROMPTS, 4, speculate="mtp")


@pytest.mark.parametrize("options", [{"draft_tokens": 2}, {"confidence_threshold": 0.5}])
def test_auto_refuses_options_of_drafts_that_the_model_does_not_have(options) -> None:
    """Otherwise they would be accepted and do nothing."""
    plain_model = random_model(ModelConfig.tiny(num_nextn_predict_layers=0))
    ((name, value),) = options.items()
    words = f"{name} is {value}, wanted None: the model holds no draft layers"
    with pytest.raises(ValueError, match=words):
        plain_model.generate(PROMPTS, 4, **options)
    with pytest.raises(ValueError, match=words):
        Runner(plain_model, max_sequences=1, max_tokens=64, **options)
    with pytest.raises(ValueError, match=words):
        prepare(plain_model, sequences=1, tokens=64, **options)


# Greedy text, by drafts that are right or wrong -------------------------------------------------


def assert_greedy_text_is_plain(
    served: DeepseekV4ForCausalLM, method: str, prompts: list[list[int]], count: int,
    kinds: Sequence[str] = KINDS, **sizes: Any,
) -> dict[str, Comparison]:  # fmt: skip
    """Compare texts and counts of drafts of each kind with those that must be."""
    sizes = {"max_sequences": len(prompts), "prefix_sequences": 0, **sizes}

    def answers(runner: Runner, asked: list[tuple[list[int], int]]) -> list[Request]:
        requests = [runner.add(prompt, greedy(most)) for prompt, most in asked]
        runner.run()
        return requests

    results = dict[str, Comparison]()
    with Runner(served, speculate=None, **sizes) as plain:
        # Longer than the texts with drafts, whose last steps draft behind the end.
        expected = answers(plain, [(prompt, count + ROLLBACK) for prompt in prompts])
        for kind in kinds:
            tables = [
                proposed([*r.prompt, *r.tokens], kind, served.config.vocab_size, i)
                for i, r in enumerate(expected)
            ]
            with Runner(served, speculate=method, confidence_threshold=None, **sizes) as runner:
                draft_from_tables(runner, tables)
                requests = answers(runner, [(prompt, count) for prompt in prompts])
                counts, drafts = runner.draft_counts, runner.drafting.drafts_at(len(prompts))
            results[kind] = compare(lambda asked: answers(plain, asked), requests, expected)
            texts = [[*r.prompt, *r.tokens] for r in requests]
            steps = counted(texts, prompts, tables, drafts)
            assert (counts.steps, counts.drafted) == (steps.steps, steps.steps * drafts)
            assert steps.accepted[0] <= counts.accepted <= steps.accepted[1]
            if kind == "right" and not results[kind].ties:
                assert counts.accepted == counts.drafted
            if kind == "wrong" and not results[kind].ties:
                assert counts.accepted == 0
    return results


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_plain_by_right_wrong_and_mixed_drafts(method) -> None:
    results = assert_greedy_text_is_plain(
        model(method), method, list(PROMPTS), 9, max_tokens=64, max_chunk=24
    )
    for result in results.values():
        assert not result.ties
        assert result.tokens == 9 * len(PROMPTS)


def test_texts_are_compared_behind_ties(monkeypatch) -> None:
    """Logits of several tokens of a sequence differ from those of one by some noise."""
    served, inner = model("mtp"), DeepseekV4ForCausalLM.logits

    def noisy(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = inner(self, hidden)
        return logits + 0.1 * (1e4 * logits).sin() if hidden.shape[0] > len(PROMPTS) else logits

    monkeypatch.setattr(DeepseekV4ForCausalLM, "logits", noisy)
    sizes = {"max_tokens": 64, "max_chunk": 24}
    result = assert_greedy_text_is_plain(
        served, "mtp", list(PROMPTS), 12, kinds=("mixed",), **sizes
    )["mixed"]
    assert len({tie.request for tie in result.ties}) > 1
    assert result.tokens == 12 * len(PROMPTS)
    result.check(share=0.5)


def test_a_comparison_refuses_what_is_no_tie() -> None:
    """Texts that differ where margins are wide, and texts that differ at many ties."""
    expected = Comparison(100, [0.01, 0.001], [Tie(0, 5, (1, 2), 0.015)])
    expected.check(0.01)
    with pytest.raises(AssertionError, match=r"no ties at a difference of logits of 1\.00e-02"):
        replace(expected, ties=[Tie(0, 5, (1, 2), 0.025)]).check(0.01)
    with pytest.raises(AssertionError):
        replace(expected, ties=2 * expected.ties).check(0.01)


# Sampled text ---------------------------------------------------------------------------------


VOCAB, DRAWS = 6, 20_000


class _Lengths:
    """What a step needs of a cache: the lengths of its rows."""

    def __init__(self, rows: int) -> None:
        self.lengths, self.max_sequences = torch.ones(rows, dtype=torch.int64), rows

    def advance(self, batch: Batch, accepted: torch.Tensor) -> None:
        self.lengths += accepted


class _Chain(Drafter):
    """A model whose next token depends on the last one alone, and a draft that is another one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = (2, VOCAB, VOCAB)
        self.target, self.proposal = 1.3 * torch.randn(
            shape, generator=generator, dtype=torch.float64
        )
        self.config = ModelConfig.tiny(vocab_size=VOCAB, hidden_size=VOCAB)
        self.device, self.dtype = torch.device("cpu"), torch.float64

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def draft(self, anchors, rows, lengths, count, parameters, variant) -> Drafts:
        tokens, q = [anchors], []
        for i in range(count):
            at = parameters._replace(position=parameters.position + i)
            drawn = draw_draft(self.proposal[tokens[-1]], at, variant)
            tokens.append(drawn.tokens)
            q.append(drawn.probabilities)
        return Drafts(torch.stack(tokens[1:], 1), torch.stack(q, 1))

    def skip(self, anchors, rows, lengths) -> None:
        pass

    def forward(self, ids, following, step: CacheStep, stored=None) -> tuple[Any, Any]:
        hidden = self.target[ids[0]].unsqueeze(0)
        assert step.batch.positions.shape[0] == ids.shape[1]
        return hidden, torch.zeros(1, ids.shape[1], self.config.hc_mult, VOCAB)

    def keep(self, rows, streams) -> None:
        pass


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "temperature": 0.7}])
def test_sampled_text_has_the_distribution_of_plain_sampling(options) -> None:
    """Three tokens after the first of 20,000 requests, by their joint distribution."""
    chain = _Chain()
    state, cache = RowState(DRAWS, VOCAB, chain.device), _Lengths(DRAWS)
    sampling = SamplingOptions(**{"temperature": 1.0, **options})
    variant = Variant.of(sampling)
    state.numbers[:DRAWS] = torch.tensor(
        [sampling.temperature, 1.0, -math.inf, 1.0], dtype=torch.float64
    )
    state.integers[:DRAWS, 0] = sampling.top_k or VOCAB
    state.integers[:DRAWS, 1] = torch.arange(DRAWS)
    state.tokens[:DRAWS] = 2
    sampler = SamplerStep(chain, cache, state, (DRAWS,), Graphs())
    step = SpeculativeStep(chain, cache, state, sampler, Graphs(), chain, 2, verify_sampled)
    texts = [list[int]() for _ in range(DRAWS)]
    for _ in range(3):  # at least one token each
        chosen = step.run(range(DRAWS), 2, variant, captured=False)
        for text, new in zip(texts, chosen.tokens.view(DRAWS, 3).tolist(), strict=True):
            text.extend(token for token in new if token != NOTHING)
    assert state.tokens[:DRAWS].tolist() == [text[-1] for text in texts]
    assert cache.lengths.tolist() == [1 + len(text) for text in texts]
    assert 1.1 < sum(map(len, texts)) / DRAWS / 3 < 2.8
    scaled = chain.target / sampling.temperature
    if sampling.top_k is not None:
        smallest = scaled.topk(sampling.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < smallest, -math.inf)
    p = scaled.softmax(-1)
    expected = (p[2].view(-1, 1, 1) * p.unsqueeze(2) * p.unsqueeze(0)).flatten()
    drawn = torch.tensor([text[:3] for text in texts])
    cells = (drawn * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    assert chi_square(torch.bincount(cells, minlength=VOCAB**3).double(), expected) < 4.5


# On a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_with_drafts_are_the_eager_ones(method) -> None:
    """Bit for bit, log-probabilities too, while requests join, leave, fork and wait."""
    served, results = on_gpu(method), []
    size = test_graphs.sizes(buckets=(1, 2, 4, 6), max_chunk=64, prompt_buckets=(8, 64))
    for capture in (False, None):
        runner = Runner(
            served, **size, capture=capture, speculate=method, verify=ForcedAcceptance(0.6)
        )
        results.append(test_graphs.results_of(test_graphs.story(runner, 250)))
    assert results[0] == results[1]
    assert sum(len(tokens) for _, tokens, _ in results[0]) > 400
    assert 0.4 < runner.draft_counts.accepted / runner.draft_counts.drafted < 0.8
    assert runner._steps.speculative is not None
    assert runner._steps.speculative._captures_drafts
    assert runner._steps.speculative.captures > 12


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_captured_greedy_text_of_a_thousand_tokens_is_plain(method, capsys) -> None:
    """Four sequences over the borders of windows and pages; ties are named in the output."""
    served, fill = on_gpu(method), torch.Generator().manual_seed(7)
    prompts = [
        torch.randint(served.config.vocab_size, (length,), generator=fill).tolist()
        for length in (3, 59, 121, 252)
    ]
    sizes = {"max_tokens": 1400, "max_chunk": 64, "buckets": (4,), "prompt_buckets": (64,)}
    results = assert_greedy_text_is_plain(served, method, prompts, 1000, **sizes)
    with capsys.disabled():
        for kind, result in results.items():
            print(f"\n{method}, {kind} drafts: {result}", *result.ties[:5], sep="\n  ")
    for result in results.values():
        assert result.tokens == 1000 * len(prompts)
        # Logits have a deviation of 1. A rounding may choose another expert or code, and then
        # logits of a token differ by more, but those of half of the tokens by roundings alone.
        assert result.median < 0.1
        result.check(share=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_captured_drafts_that_are_nan_change_no_text(method) -> None:
    served = on_gpu(method)
    norm = (served.mtp[0] if method == "mtp" else served.dspark.last).norm.weight
    number, options = float(norm[0]), SamplingOptions(max_new_tokens=20, stop_ids=())
    sizes = {"max_sequences": 2, "max_tokens": 64, "buckets": (2,), "prompt_buckets": (32,)}
    with Runner(served, **sizes, speculate=method) as runner:
        expected = [runner.add(prompt, options) for prompt in PROMPTS[:2]]
        runner.run()
        norm[0] = torch.nan
        try:
            requests = [runner.add(prompt, options) for prompt in PROMPTS[:2]]
            before = runner.draft_counts.accepted
            runner.run()
        finally:
            norm[0] = number
    assert runner.captures > 0
    assert runner.draft_counts.accepted == before
    assert [r.tokens for r in requests] == [r.tokens for r in expected]
