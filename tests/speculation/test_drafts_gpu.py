"""Drafts, verification and rollback inside captured graphs are the eager ones, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dsv4
from dsv4.config import CSA, HCA, SLIDING, DSparkConfig, ModelConfig
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.supports import few_token_gemm
from dsv4.debug import compilations
from dsv4.device import pretend
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers.dspark import Taps
from dsv4.layers.pack import pack_
from dsv4.layers.quantize import quantize_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving._capture import draft_obstacle, obstacle
from dsv4.serving._setup import default_index_format
from dsv4.serving.graphs import Graphs
from dsv4.serving.sampler import Parameters, Variant
from dsv4.speculation.dspark import DSparkDraft
from dsv4.speculation.mtp import MtpDraft
from dsv4.speculation.verify import draw_draft, verify_greedy, verify_sampled
from dsv4.testing.models import random_model
from tests.speculation.packed_models import METHODS, on_gpu, packed

gpu = pytest.mark.gpu
SIZES = {
    "hidden_size": 128, "q_lora_rank": 64, "moe_intermediate_size": 128, "o_lora_rank": 32,
    "vocab_size": 512, "sliding_window": 16,
}  # fmt: skip
DSPARK = DSparkConfig(block_size=5, noise_token_id=47, target_layer_ids=(0, 1, 2), markov_rank=16)
DRAWN = Variant(draw=True, filters=True)
ROWS, FILLED = 3, 21


def model_of(device: str = "cuda", **changes: Any) -> DeepseekV4ForCausalLM:
    """A packed bfloat16 model whose head is plain."""
    config = ModelConfig.tiny(**{**SIZES, "layer_types": (SLIDING, CSA, HCA), **changes})
    model = random_model(config, 4, torch.bfloat16, mtp=True).to(device)
    quantize_(model, names=["*.experts", "*.shared_experts.*", "*.self_attn.*_proj"])
    pack_(model)
    return model


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run once, then capture as a runner does: no garbage is collected inside."""
    return Graphs().captured(run)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


def equal_batch(starts: torch.Tensor, rows: torch.Tensor, count: int) -> Batch:
    """``count`` new tokens of each row, without a number of the host."""
    cu = torch.arange(len(rows) + 1, device=rows.device) * count
    positions = starts.unsqueeze(1) + torch.arange(count, device=rows.device)
    return Batch(cu, starts, rows, positions.flatten(), rows.repeat_interleave(count))


def parameters(batch: int, vocab: int, position: int = 50) -> Parameters:
    wide = {"dtype": torch.float64, "device": "cuda"}
    ones = torch.ones(batch, **wide)
    return Parameters(
        ones * 0.8, ones * 0.9, torch.full_like(ones, -5.0), ones,
        numbers(*[vocab - 9] * batch), numbers(*range(batch)), numbers(*[position] * batch), None,
    )  # fmt: skip


@torch.inference_mode()
def filled(model: DeepseekV4ForCausalLM) -> tuple[PagedCache, torch.Tensor, torch.Tensor]:
    """A cache with some tokens of each row, the streams of their last ones, and the rows."""
    index_format = default_index_format(model.config)  # a runner's, for which kernels are listed
    cache = model.new_cache(ROWS, 256, max_chunk=64, index_format=index_format)
    rows = numbers(*[cache.allocate() for _ in range(ROWS)])
    fill = torch.Generator("cuda").manual_seed(1)
    vocab = model.config.vocab_size
    ids = torch.randint(vocab, (1, ROWS * FILLED), generator=fill, device="cuda")
    batch = Batch.from_lengths([FILLED] * ROWS, cache.lengths[rows], rows)
    step = CacheStep(cache, batch)
    taps = DSparkDraft(model).taps() if model.dspark is not None else None
    _, streams = model.model(ids, None, step, taps=taps)
    if taps is not None:
        DSparkDraft(model).commit(taps, cache, batch)
    else:
        MtpDraft(model).write(ids[0], streams, step)
    cache.advance(batch)
    return cache, streams[0].view(ROWS, FILLED, *streams.shape[2:])[:, -1].clone(), rows


def assert_holds_no_memory(replay: Callable[[], Any]) -> None:
    """Replays allocate nothing that stays."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize(
    "changes",
    [{"num_nextn_predict_layers": 1}, {"dspark": DSPARK}, {"layer_types": (CSA,) * 3}],
    ids=["mtp", "dspark", "plain"],
)
def test_on_hopper_no_step_of_these_models_reads_the_host(changes: dict) -> None:
    """Sizes too small for a kernel would make every capture below fail."""
    assert_has_kernels(model_of("cpu", **changes))


@pytest.mark.parametrize("method", METHODS)
def test_on_hopper_no_draft_with_a_head_of_its_own_reads_the_host(method: str) -> None:
    assert_has_kernels(packed(method, plain_head=True))


def assert_has_kernels(model: DeepseekV4ForCausalLM) -> None:
    """Steps of the model can be captured on Hopper, and its head is worth an NVFP4 copy there."""
    device, tokens = torch.device("cuda", 0), [1, ROWS * 9]
    with pretend(capability=(9, 0), sms=132, packages=True):
        assert obstacle(model, tokens, device) is None
        assert draft_obstacle(model, tokens, device) is None
        head = model.lm_head
        assert head.format is None
        assert few_token_gemm(device, head.out_features, head.in_features) is None


def drafting_model(method: str, head: str) -> DeepseekV4ForCausalLM:
    """A model on the GPU whose draft may have a head of its own."""
    model = on_gpu(method, plain_head=True)
    size = model.lm_head.out_features, model.lm_head.in_features
    if head == "nvfp4" and few_token_gemm(model.device, *size):
        pytest.skip("the copy has no kernel here")
    return model


@gpu
@pytest.mark.parametrize("head", ["model", "nvfp4"])
@pytest.mark.parametrize("variant", [None, DRAWN], ids=["greedy", "drawn"])
@torch.inference_mode()
def test_a_captured_mtp_draft_is_the_eager_one(head: str, variant: Variant | None) -> None:
    model = drafting_model("mtp", head)
    cache, streams, rows = filled(model)
    draft = MtpDraft(model, head)
    anchors, positions = numbers(3, 4, 5), numbers(*[FILLED - 1] * ROWS)
    chosen = None if variant is None else parameters(ROWS, model.config.vocab_size)

    def run():
        return draft.draft(anchors, streams, cache, rows, positions, 3, chosen, variant)

    graph, result = captured(run)
    for number in range(5):
        anchors.copy_(numbers(number, number + 7, 2 * number))
        streams.mul_(1.25)
        graph.replay()
        # The rows of the graph are provisional, so that the eager ones overwrite the same.
        got = [None if x is None else x.clone() for x in result]
        eager = run()
        assert torch.equal(got[0], eager.tokens)
        if variant is not None:
            assert torch.equal(got[1], eager.probabilities)
    assert_holds_no_memory(graph.replay)


@gpu
@pytest.mark.parametrize("head", ["model", "nvfp4"])
@torch.inference_mode()
def test_a_captured_dspark_draft_is_the_eager_one(head: str) -> None:
    """Commit of some tokens, then a draft whose length follows from its confidence."""
    model = drafting_model("dspark", head)
    cache, _, rows = filled(model)
    draft = DSparkDraft(model, head)
    anchors, lengths = numbers(3, 4, 5), numbers(*[FILLED] * ROWS)
    accepted, theta = numbers(1, 2, 3), torch.tensor(0.2, device="cuda")
    values = torch.randn(3, 1, ROWS * 4, 128, device="cuda").bfloat16()

    def run():
        batch = equal_batch(lengths, rows, 4)
        draft.commit(Taps(DSPARK.target_layer_ids, list(values)), cache, batch, accepted)
        return draft.draft(anchors, cache, rows, lengths + accepted, theta=theta)

    graph, result = captured(run)
    seen = set()
    for number in range(6):
        anchors.copy_(numbers(number, number + 7, 2 * number))
        accepted.copy_(numbers(number % 4, 4 - number % 4, 2))
        theta.fill_(number / 6)
        values.mul_(-1.25)
        graph.replay()
        got = [x.clone() for x in (result.tokens, result.logits, result.survival)]
        eager = run()
        for mine, other in zip(got, (eager.tokens, eager.logits, eager.survival), strict=True):
            assert torch.equal(mine, other)
        seen |= set(eager.lengths.tolist())
    assert len(seen) > 1, "theta has to cut some drafts"
    assert_holds_no_memory(graph.replay)


@gpu
@torch.inference_mode()
def test_captured_verification_is_the_eager_one() -> None:
    batch, drafted, vocab = 4, 3, 5000
    fill = torch.Generator("cuda").manual_seed(2)
    logits = torch.randn(batch, drafted + 1, vocab, generator=fill, device="cuda")
    q = torch.randn(batch, drafted, vocab, generator=fill, device="cuda").softmax(-1)
    drafts = logits[:, :-1].argmax(-1)
    chosen = parameters(batch, vocab)

    def run():
        drawn = draw_draft(logits[:, 0], chosen, DRAWN)
        sampled = verify_sampled(logits, drafts, chosen, DRAWN, q)
        return (*verify_greedy(logits, drafts), *sampled, *drawn)

    graph, result = captured(run)
    for _ in range(4):
        logits.normal_()
        drafts.copy_(logits[:, :-1].argmax(-1))
        drafts[:, 1] = 7
        chosen.position.add_(3)
        graph.replay()
        got = [x.clone() for x in result]
        assert all(torch.equal(a, b) for a, b in zip(got, run(), strict=True))
    assert_holds_no_memory(graph.replay)


@gpu
@pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
@pytest.mark.parametrize("count", [2, 5, 9])
@torch.inference_mode()
def test_a_rollback_in_a_graph_is_never_having_stepped(kind: str, count: int) -> None:
    """Steps of wrong tokens that are all taken back, over the borders of windows."""
    model = model_of(
        layer_types=(kind,) * 2, num_hidden_layers=2, num_nextn_predict_layers=0,
        mlp_layer_types=("moe",) * 2,
    )  # fmt: skip
    fill = torch.Generator("cuda").manual_seed(3)
    text = torch.randint(512, (30, ROWS * count), generator=fill, device="cuda")

    def story(wrong: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        cache, _, rows = filled_plain(model)
        ids = torch.zeros(1, ROWS * count, dtype=torch.int64, device="cuda")
        accepted = torch.zeros(ROWS, dtype=torch.int64, device="cuda")

        def run() -> torch.Tensor:
            batch = equal_batch(cache.lengths[rows], rows, count)
            hidden, _ = model.model(ids, None, CacheStep(cache, batch))
            cache.advance(batch, accepted)
            return model.logits(hidden[0])

        graph, logits = captured(run)
        seen = []
        for step in range(12):
            for other in range(wrong):
                ids.copy_(text[29 - other])
                accepted.zero_()
                graph.replay()
            ids.copy_(text[step])
            accepted.copy_(numbers(1 + step % count, count, 1))
            graph.replay()
            by_row = logits.view(ROWS, count, -1)
            stay = torch.arange(count, device="cuda") < accepted.unsqueeze(1)
            seen.append(by_row[stay].clone())
        return seen, cache.lengths.clone()

    (plain, lengths), (taken_back, same) = story(0), story(3)
    assert torch.equal(lengths, same)
    assert all(torch.equal(a, b) for a, b in zip(plain, taken_back, strict=True))


@torch.inference_mode()
def filled_plain(model: DeepseekV4ForCausalLM) -> tuple[PagedCache, None, torch.Tensor]:
    """A cache with some tokens of each row, of a model without a draft."""
    cache = model.new_cache(ROWS, 512, max_chunk=64)
    rows = [cache.allocate() for _ in range(ROWS)]
    model.prefill([[7, 1, 5] * 11, [3] * 12, [8, 2] * 20], cache, rows)
    return cache, None, numbers(*rows)


@gpu
@pytest.mark.parametrize("changes", [{"num_nextn_predict_layers": 1}, {"dspark": DSPARK}],
                         ids=["mtp", "dspark"])  # fmt: skip
@torch.inference_mode()
def test_after_a_warm_up_no_draft_compiles(changes: dict, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
    model = model_of(**changes)
    dsv4.warmup(model, max_tokens=ROWS * FILLED, progress=False)
    before = compilations()
    cache, streams, rows = filled(model)
    at = numbers(*[FILLED] * ROWS)
    for count in (2, 3, 6, 9):
        batch = equal_batch(at, rows, count)
        ids = torch.zeros(1, ROWS * count, dtype=torch.int64, device="cuda")
        taps = DSparkDraft(model).taps() if model.dspark is not None else None
        hidden, after = model.model(ids, None, CacheStep(cache, batch), taps=taps)
        logits = model.logits(hidden[0]).view(ROWS, count, -1)
        drafts = ids.view(ROWS, count)[:, 1:]
        verify_greedy(logits, drafts)
        verify_sampled(logits, drafts, parameters(ROWS, 512), DRAWN, logits[:, 1:].softmax(-1))
        if taps is not None:
            draft = DSparkDraft(model)
            draft.commit(taps, cache, batch, numbers(1, 1, 2))
            draft.draft(rows, cache, rows, at)
        else:
            mtp = MtpDraft(model)
            mtp.write(ids[0], after, CacheStep(cache, batch))
            mtp.draft(rows, streams, cache, rows, at - 1, 2, parameters(ROWS, 512), DRAWN)
    assert compilations() - before == {}
