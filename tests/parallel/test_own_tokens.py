"""Ranks with tokens of their own and a range of the experts each (``parallel="dp"``)."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import dsv4
from dsv4.checkpoint import Checkpoint, save
from dsv4.config import CSA, SLIDING, ModelConfig
from dsv4.layers import reserve_experts
from dsv4.layers.reserve import step_buffers
from dsv4.layers.step_tokens import STEP_TOKENS
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import DATA, ParallelContext
from dsv4.parallel.expert_exchange import ExpertExchange
from dsv4.parallel.guard import guard
from dsv4.parallel.local_model import local_model
from dsv4.parallel.split import LocalSizes, local_bytes
from dsv4.quant.formats import FRAGMENTS
from dsv4.serving import Runner, SamplingOptions
from dsv4.serving.graphs import Graphs
from dsv4.serving.request import LogitsError
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.ranks import run_ranks
from tests._tools.taped import replayed
from tests.checkpoint.cases import assert_same_state
from tests.parallel.cases import CONFIG, WIDE, model, prompt

# Requests of ranks: several, none, one.
PROMPTS = ([[5, 9, 2], list(range(1, 31)), [7]], [], [[11, 3]], [list(range(40, 60)), [8]])
OPTIONS = (
    {"max_new_tokens": 6},
    {"max_new_tokens": 9, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3},
    {"max_new_tokens": 4, "temperature": 1.2, "repetition_penalty": 1.3, "seed": 4, "logprobs": 3},
)


OPTIONS_OF = [SamplingOptions(stop_ids=(), **options) for options in OPTIONS]
SMALL = ModelConfig.tiny(
    layer_types=(SLIDING, CSA),
    n_routed_experts=8,
    num_experts_per_tok=3,
    num_nextn_predict_layers=0,
)


def own(context: ParallelContext) -> ParallelContext:
    return replace(context, mode=DATA)


def ranks_of(whole: Any, size: int, work: Any) -> list[Any]:
    """Call ``work(local model, rank)`` on each rank."""
    return run_ranks(size, lambda c: work(local_model(whole, own(c)), c.rank))


@pytest.fixture(scope="module")
def whole():
    return model(SMALL, torch.float64)


class TestSums:
    @pytest.mark.parametrize(("size", "numerics"), [(4, "deepseek"), (2, "transformers")])
    def test_logits_are_those_of_one_process(self, size, numerics):
        """Another prompt on each rank; drafts of multi-token prediction, too."""
        large = model(CONFIG.replace(numerics=numerics))

        @torch.no_grad()
        def logits(model, rank):
            ids = prompt(large, 9, rank)
            hidden, streams = model.model(ids)
            return torch.cat([model.logits(hidden), model.draft(ids, streams)[0]])

        for rank, result in enumerate(ranks_of(large, size, logits)):
            torch.testing.assert_close(result, logits(large, rank), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_sums_are_bitwise_those_of_ranges_in_one_process(self, size, dtype):
        """All tokens of all ranks through one range after another, added in order."""
        config = SMALL.replace(n_routed_experts=24)
        large = model(config, dtype)
        ranges = ranks_of(large, size, lambda m, rank: m.model.layers[0].mlp.experts)
        generator = torch.Generator().manual_seed(size)
        x = torch.randn(size, 5, config.hidden_size, generator=generator).to(dtype)
        ids = torch.randint(-1, 25, (size, 5, 3), generator=generator)
        ids[0] = -1  # a rank without tokens
        ids[1:2].clamp_(max=24 // size - 1)  # and one whose tokens all go to rank 0
        weights = torch.rand(size, 5, 3, generator=generator)
        shared = torch.randn(size, 5, config.hidden_size, generator=generator).to(dtype)
        total = torch.zeros(size * 5, config.hidden_size)
        for experts in ranges:
            total += experts(x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1))
        expected = (total + shared.flatten(0, 1)).to(dtype).view_as(x)

        def work(context):
            exchange, r = ExpertExchange(own(context), 24), context.rank
            return exchange.run(ranges[r], x[r], ids[r], weights[r], shared[r])

        for rank, result in enumerate(run_ranks(size, work)):
            assert_bitwise(result, expected[rank])

    def test_long_prompts_go_in_pieces(self, whole, monkeypatch):
        monkeypatch.setattr("dsv4.parallel.expert_exchange.ROWS", 8)

        @torch.no_grad()
        def work(model, rank):
            rows = []
            experts = model.model.layers[0].mlp.experts
            experts.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
            return model(prompt(whole, 11, rank)), rows

        for rank, (logits, rows) in enumerate(ranks_of(whole, 2, work)):
            assert rows == [8, 8, 6]
            torch.testing.assert_close(logits, whole(prompt(whole, 11, rank)), rtol=0, atol=1e-12)

    def test_no_tokens_at_all(self, whole):
        empty = torch.zeros(1, 0, dtype=torch.long)
        for logits in ranks_of(whole, 2, lambda m, rank: m(empty)):
            assert logits.shape == (1, 0, SMALL.vocab_size)

    def test_other_numbers_of_tokens_on_a_rank(self, whole):
        with pytest.raises(ValueError, match="a step has 3 tokens on rank 0 and 4 on rank 1, want"):
            ranks_of(whole, 2, lambda m, rank: m(prompt(whole, 3 + rank)))


def runner_of(model, **changes):
    return Runner(model, **{"max_sequences": 2, "max_tokens": 64, "max_chunk": 16, **changes})


def texts(model, prompts, **changes):
    """Requests with other options each, and their log-probabilities."""
    with runner_of(model, **changes) as runner:
        requests = [runner.add(p, stop_ids=(), **OPTIONS[i % 3]) for i, p in enumerate(prompts)]
        return [(r.result(), [entry.logprob for entry in r.logprobs]) for r in requests]


class TestRunner:
    @pytest.mark.parametrize(
        ("size", "changes"),
        [
            (4, {}),
            (2, {"pool_tokens": 128}),
            (2, {"buckets": [2], "prompt_buckets": [8, 16], "prefix_sequences": 0}),
        ],
    )
    def test_texts_are_those_of_one_process(self, whole, size, changes):
        """Chunks, waiting requests, preemption; ranks with more, fewer and no requests.

        All ranks take the same steps, also those that have nothing to do.
        """

        def work(model, rank):
            sizes = []
            model.model.register_forward_pre_hook(lambda m, args: sizes.append(args[0].shape[1]))
            return texts(model, PROMPTS[rank], **changes), sizes

        results = ranks_of(whole, size, work)
        assert all(sizes == results[0][1] for _, sizes in results)
        assert len(set(results[0][1])) > 1
        for rank, (answers, _) in enumerate(results):
            expected = texts(whole, PROMPTS[rank], **changes)
            assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
            for (_, ours), (_, theirs) in zip(answers, expected, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)

    def test_padding_goes_to_no_expert(self, whole):
        """Rank 1 has no requests; rank 0 has one token of two in each decode step."""

        def work(model, rank):
            chosen = []
            for layer in model.model.layers:
                layer.mlp.experts.register_forward_pre_hook(lambda m, args: chosen.append(args[1]))
            texts(model, [[5, 9, 2]] if rank == 0 else [], buckets=[2], prompt_buckets=[4, 16])
            return chosen

        for chosen in ranks_of(whole, 2, work):
            assert {len(ids) for ids in chosen} == {4, 8}
            for ids in chosen:
                tokens = 3 if len(ids) == 8 else 1
                assert bool((ids[tokens:] == -1).all())

    def test_run_ends_when_the_requests_of_all_ranks_have(self, whole):
        """And again with requests of another rank; requests that are cancelled; a follower."""

        def work(model, rank):
            with runner_of(model) as runner:
                if rank > 1:
                    runner.follow()
                    assert not runner.step()
                    return []
                mine = [runner.add([3 + rank], max_new_tokens=2 + 4 * rank, stop_ids=())]
                runner.run()
                if rank == 0:
                    mine.append(runner.add([9], max_new_tokens=3, stop_ids=()))
                    late = runner.add([1, 2], max_new_tokens=50, stop_ids=())
                    runner.step()
                    runner.cancel(late)
                runner.run()
                assert not runner.has_work
                return [request.tokens for request in mine]

        lengths = [[len(t) for t in tokens] for tokens in ranks_of(whole, 4, work)]
        assert lengths == [[2, 3], [6], [], []]

    def test_generate_with_prompts_of_ones_own(self, whole):
        def work(model, rank):
            none = model.generate([], 3)
            return model.generate(PROMPTS[rank], 0 if rank == 3 else 5, stop_ids=[]), none

        for rank, (tokens, none) in enumerate(ranks_of(whole, 4, work)):
            new = 0 if rank == 3 else 5
            assert tokens == whole.generate(PROMPTS[rank], new, stop_ids=[])
            assert none == []

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompts": [[]]}, "a prompt is empty"),
            ({"prompts": [[1000]]}, "1000, wanted 0 to"),
            ({"max_new_tokens": -1}, "max_new_tokens is -1"),
            ({"max_new_tokens": 10**9}, "the longest prompt has 2 tokens and max_new_tokens is"),
            ({"stop_ids": [-5]}, "-5, wanted 0 to"),
        ],
    )
    def test_prompts_that_are_wrong_end_no_other_rank(self, whole, changes, message):
        arguments = {"prompts": PROMPTS[2], "max_new_tokens": 3, "stop_ids": []}

        def work(model, rank):
            if rank == 0:
                with pytest.raises(ValueError, match=message):
                    model.generate(**arguments | changes)
                return None
            return model.generate(**arguments)

        assert ranks_of(whole, 2, work)[1] == whole.generate(**arguments)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"sampler": 3}, "sampler is int, wanted a Sampler"),
            ({"speculate": "mtp"}, "speculate is 'mtp'"),
            ({"chunk": 0}, "chunk is 0"),
        ],
    )
    def test_other_arguments_that_are_wrong_end_all(self, whole, changes, message):
        """The others would wait for ever; here the group passes the error on."""
        waited = []

        def work(model, rank):
            try:
                model.generate([[1]], 2, **changes if rank == 0 else {})
            except threading.BrokenBarrierError:
                waited.append(rank)
                raise
            except (TypeError, ValueError):
                time.sleep(0.2)  # the other's end does not depend on this thread's
                assert waited == [1]
                raise

        with pytest.raises((TypeError, ValueError), match=message):
            ranks_of(whole, 2, work)

    @pytest.mark.parametrize("ahead", [False, True])
    def test_replayed_steps_are_the_eager_ones(self, whole, monkeypatch, ahead):
        """Ranks capture the same steps at the same time, those without requests too."""
        sizes = {"buckets": (1, 2), "prompt_buckets": (8, 16)}
        monkeypatch.setattr(Graphs, "captured", replayed)

        def work(model, rank):
            with runner_of(model, **sizes) as runner:
                runner._steps.is_captured = True
                if ahead:
                    assert runner.warm_up() == 2 * 2 + 2 * 2
                    assert runner.warm_up([OPTIONS_OF[1]]) >= 2 * 2
                asked = [runner.add(p, OPTIONS_OF[i]) for i, p in enumerate(PROMPTS[rank])]
                runner.run()
                sizes_of_steps = (
                    set(runner._steps.decode._captured),
                    set(runner._steps.prompts._captured),
                )
                return [request.result() for request in asked], sizes_of_steps

        results = ranks_of(whole, 2, work)  # the second one has no requests
        for rank, (answers, captured) in enumerate(results):
            assert captured == results[0][1]
            eager = texts(whole, PROMPTS[rank], **sizes)
            assert answers == [tokens for tokens, _ in eager]
        assert results[0][1][0] == {1, 2}

    def test_a_request_that_fails_ends_no_other_rank(self, whole):
        """Logits that are not finite, on one rank."""

        def work(model, rank):
            if rank == 0:
                model.lm_head.register_forward_hook(lambda m, args, out: out * float("nan"))
                with pytest.raises(LogitsError, match="position 2 are not finite"):
                    texts(model, [[1, 2]])
                return None
            return texts(model, PROMPTS[2])

        assert ranks_of(whole, 2, work)[1] == texts(whole, PROMPTS[2])

    def test_an_error_in_a_step_ends_the_others(self, whole):
        def work(model, rank):
            if rank:
                model.model.norm.register_forward_pre_hook(_fail)
            return texts(model, PROMPTS[0])

        with pytest.raises(ZeroDivisionError):
            ranks_of(whole, 2, work)

    def test_what_is_refused(self, whole):
        def deterministic(model, rank):
            runner_of(model, deterministic=True)

        def limits(model, rank):
            runner_of(model, max_sequences=1 + rank)

        def late(model, rank):
            with runner_of(model) as runner:
                runner.follow()
                runner.add([1])

        def guarded(model, rank):
            with guard(model):
                pass

        for work, message in (
            (deterministic, "deterministic is True, wanted False with parallel='dp'"),
            (limits, r"limits of the runner is .*max_sequences=1"),
            (guarded, "guard: the model has parallel='dp', wanted 'tp'"),
            (lambda m, rank: reserve_experts(m, 8), "reserve_experts: the model has parallel='dp'"),
        ):
            with pytest.raises(ValueError, match=message):
                ranks_of(whole, 2, work)
        with pytest.raises(RuntimeError, match="the runner is closed"):
            ranks_of(whole, 2, late)


def _fail(*arguments):
    raise ZeroDivisionError


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory):
    """Experts are packed; the shared expert would be cut by parallel="tp"."""
    folder = tmp_path_factory.mktemp("nvidia")
    config = WIDE.replace(moe_intermediate_size=128, vocab_size=1024)
    save(model(config, torch.bfloat16), folder, layout="nvidia")
    return folder


class TestLoad:
    def ranks(self, path, size, **options) -> list[DeepseekV4ForCausalLM]:
        options = {"progress": False, "parallel": "dp", **options}
        return run_ranks(size, lambda c: dsv4.load(path, device_mesh=c, **options))

    @pytest.mark.parametrize("options", [{}, {"pack": FRAGMENTS}])
    def test_ranks_hold_parts_of_what_one_process_loads(self, nvidia, options):
        whole = dsv4.load(nvidia, progress=False, **options)
        expected = run_ranks(2, lambda c: local_model(whole, own(c)))
        for rank, local in enumerate(self.ranks(nvidia, 2, **options)):
            assert repr(local.parallel) == f"ParallelContext(mode='dp', rank={rank}, size=2)"
            assert copy.deepcopy(local).parallel is local.parallel
            assert_same_state(local.state_dict(), expected[rank].state_dict())

    def test_a_rank_reads_and_holds_its_share_alone(self, nvidia):
        """Within 5 % of the rule: routed experts over N, and the rest once."""
        with Checkpoint.open(nvidia) as checkpoint:
            sizes = {name: entry.nbytes for name, entry in checkpoint.entries.items()}
        rule = local_bytes(sizes, 4, DATA)
        routed = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
        assert rule == pytest.approx(sum(sizes.values()) - 0.75 * routed)
        for local in self.ranks(nvidia, 4):
            assert local.load_report.bytes_read == pytest.approx(rule, rel=0.05)
            held = sum(t.nbytes for t in local.state_dict().values())
            assert held == pytest.approx(rule, rel=0.05)

    def test_kernels_are_ready_before_the_first_step(self, nvidia, monkeypatch):
        """Those that a rank's own model needs, as ``load`` of one process does."""
        warmed = []

        def seen(model, max_tokens, progress):
            warmed.append((model.parallel.rank, model.parallel.mode, max_tokens))

        monkeypatch.setattr("dsv4.compilation.warmup.warm_ranks", seen)
        self.ranks(nvidia, 2)
        assert sorted(warmed) == [(0, DATA, STEP_TOKENS), (1, DATA, STEP_TOKENS)]
        self.ranks(nvidia, 2, prepare=False)
        assert len(warmed) == 2

    def test_memory_of_a_step_is_for_the_tokens_of_all_ranks(self, whole):
        [local, _] = ranks_of(whole, 2, lambda m, rank: m)
        [shapes] = step_buffers(local, 100).values()
        assert shapes[0] == (200 * SMALL.num_experts_per_tok, SMALL.hidden_size)
        [shapes] = step_buffers(local, 100_000).values()
        assert shapes[0][0] == 8192 * SMALL.num_experts_per_tok

    def test_what_is_refused(self, nvidia, tmp_path):
        with pytest.raises(ValueError, match=r"3 ranks, wanted a number that divides n_routed_exp"):
            self.ranks(nvidia, 3)
        modes = ("tp", "dp")
        with pytest.raises(ValueError, match="parallel is 'tp' on rank 0 and 'dp' on rank 1"):
            run_ranks(
                2,
                lambda c: dsv4.load(nvidia, device_mesh=c, parallel=modes[c.rank], progress=False),
            )
        with pytest.raises(ValueError, match="parallel is 'dp' and device_mesh is None"):
            dsv4.load(tmp_path, parallel="dp")
        with pytest.raises(ValueError, match="mode is 'ep', wanted one of"):
            ParallelContext(0, 1, None, "ep")


def test_published_models_are_split_by_experts_alone():
    for config in (ModelConfig.flash(), ModelConfig.pro()):
        for size in (2, 4, 8, 16, 32):
            sizes = LocalSizes.of(config, ParallelContext(size - 1, size, None, DATA))
            assert sizes.groups == config.o_groups
            assert sizes.inner == config.moe_intermediate_size
            assert sizes.experts.stop == config.n_routed_experts == len(sizes.experts) * size
            assert len(sizes.vocabulary) == config.vocab_size
