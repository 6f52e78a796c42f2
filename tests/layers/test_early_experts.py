"""Experts of hash layers are loaded at the start of a step: the same bits, counts and loads."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager

import pytest
import torch

import dsv4
from dsv4 import layers
from dsv4.bench.suites.hosted_steps import DrawnRouter, draw_experts, drawn_routing
from dsv4.config import CSA, SLIDING, ModelConfig
from dsv4.layers import DeepseekV4HashRouter, HostExperts, early_experts
from dsv4.layers.host_experts import experts_of
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.overlap import Streams, distant_streams
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_

TYPES = ("hash_moe", "moe", "hash_moe")


class Noted(Streams):
    """Run work in order, and record launches and joins with their predecessors."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []

    @contextmanager
    def on(self, name, *, behind=None):
        self.events.append(("on", name, behind or ""))
        yield

    def join(self, name, *results):
        assert [tuple(result.shape) for result in results] == [(results[0].shape[0], 2)]
        self.events.append(("join", name))


@pytest.fixture(scope="module")
def resident() -> DeepseekV4ForCausalLM:
    config = ModelConfig.tiny(
        num_hidden_layers=3,
        layer_types=(SLIDING, CSA, SLIDING),
        mlp_layer_types=TYPES,
        n_routed_experts=8,
        num_experts_per_tok=2,
        vocab_size=64,
        hidden_size=256,
        moe_intermediate_size=128,
    )
    model = DeepseekV4ForCausalLM(config, mtp=False).requires_grad_(False)
    randomize_(model, 3)
    table = torch.rand(64, 8, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :2]
    for block in (model.model.layers[0].mlp, model.model.layers[2].mlp):
        block.gate.tid2eid.copy_(table)
    return model.eval()


def hosted(resident, slots: int = 4) -> DeepseekV4ForCausalLM:
    model = copy.deepcopy(resident)
    layers.host_experts_(model, HostExperts(1, slots))
    return model


def decoded(model, steps) -> list[torch.Tensor]:
    """Logits of decode steps of two sequences, one of them padding in every third step."""
    cache = model.new_cache(2, 32)
    rows = [cache.allocate(), cache.allocate()]
    result = [model.prefill([[1, 2, 3], [4]], cache, rows)]
    for step in range(steps):
        active = rows if step % 3 else [rows[0], -1]
        ids = torch.tensor([7 * step % 64, 11 * step % 64])
        result.append(model.decode(ids, cache, active)[: 2 if step % 3 else 1])
    return result


def test_steps_have_the_bits_and_counts_without(resident, monkeypatch):
    late, early, noted = hosted(resident), hosted(resident), Noted()
    expected = decoded(late, 9)
    monkeypatch.setattr(early_experts, "distant_streams", lambda _: noted)
    for number, (got, truth) in enumerate(zip(decoded(early, 9), expected, strict=True)):
        assert_bitwise(got, truth, f"step {number}")
    assert torch.equal(layers.expert_counts(early), layers.expert_counts(late))
    assert layers.cache_use(early) == layers.cache_use(late)
    first, last = "experts of layer 0", "experts of layer 2"
    of_step = [("on", first, ""), ("on", last, first), ("join", first), ("join", last)]
    assert noted.events == of_step * 9, "the prompt, of more tokens than slots, is in waves"


def test_only_what_token_ids_choose_is_loaded_early(resident, monkeypatch):
    model, noted = hosted(resident), Noted()
    monkeypatch.setattr(early_experts, "distant_streams", lambda _: noted)
    cache = model.new_cache(1, 32)
    row = cache.allocate()
    model.prefill([[1, 2, 3]], cache, [row])
    block = model.model.layers[0].mlp
    block.gate = DrawnRouter(block.gate, torch.tensor([[3, 5]]))
    model.decode(torch.tensor([4]), cache, [row])
    assert {event[1] for event in noted.events} == {"experts of layer 2"}
    noted.events.clear()
    decoded(hosted(resident, 7), 2)
    decoded(resident, 2)
    assert noted.events == [], "nothing is ever missing"


def test_drawn_experts_of_hash_layers_are_loaded_early(resident, monkeypatch):
    """What the bench draws is loaded early where token ids choose, with the bits of a late load."""
    models, noted, results = [hosted(resident), hosted(resident)], Noted(), []
    drawn = draw_experts(1.0, 6, 3, 2, 2, 8)
    for model, streams in zip(models, (None, noted), strict=True):
        monkeypatch.setattr(early_experts, "distant_streams", lambda _, own=streams: own)
        cache = model.new_cache(2, 32)
        rows = [cache.allocate(), cache.allocate()]
        model.prefill([[1, 2, 3], [4]], cache, rows)
        noted.events.clear()
        with drawn_routing(model, 2) as chosen:
            assert early_experts.early_layers(model.model.layers, 2) == 2
            for step, experts in enumerate(drawn):
                chosen.copy_(experts)
                active = rows if step % 3 else [rows[0], -1]
                logits = model.decode(torch.tensor([step, 7]), cache, active)
                results.append(logits[: 2 if step % 3 else 1])
    for number in range(6):
        assert_bitwise(results[number], results[6 + number], f"step {number}")
    of_step = [("on", "experts of layer 0", ""), ("on", "experts of layer 2", "experts of layer 0")]
    assert [event for event in noted.events if event[0] == "on"] == of_step * 6
    counts = [layers.expert_counts(model) for model in models]
    assert torch.equal(*counts)
    asked = torch.zeros(3, 8, dtype=torch.int64)
    for step, experts in enumerate(drawn):
        for layer in range(3):
            asked[layer] += torch.bincount(
                experts[layer, : 2 if step % 3 else 1].flatten(), minlength=8
            )
    before = torch.stack([m.hosted.state.totals for _, m in experts_of(prefilled(resident))])
    assert torch.equal(counts[1] - before, asked), "the drawn experts, not those of the table"


def prefilled(resident) -> DeepseekV4ForCausalLM:
    model = hosted(resident)
    cache = model.new_cache(2, 32)
    model.prefill([[1, 2, 3], [4]], cache, [cache.allocate(), cache.allocate()])
    return model


def test_a_derived_hash_router_may_choose_otherwise(resident):
    class Other(DeepseekV4HashRouter):
        pass

    model = hosted(resident)
    assert early_experts.early_layers(model.model.layers, 2) == 2
    model.model.layers[0].mlp.gate.__class__ = Other
    assert early_experts.early_layers(model.model.layers, 2) == 1
    assert early_experts.early_layers(model.model.layers, 3) == 0, "more experts than slots"


def test_nothing_is_early_outside_of_a_capture():
    assert distant_streams(torch.zeros(1, 1)) is None


def test_experts_that_are_all_resident_fetch_none(resident):
    with pytest.raises(ValueError, match="no expert is in host memory, wanted some"):
        resident.model.layers[0].mlp.experts.fetch(torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("is_drawn", [False, True])
@torch.inference_mode()
def test_captured_steps_have_the_bits_of_all_resident_experts(resident, is_drawn, monkeypatch):
    """Replays with other tokens or drawn experts, whose hash layers load on a branch."""
    from dsv4.bench.suites.whole_model import DecodeStep

    models = [copy.deepcopy(resident).to("cuda", torch.bfloat16) for _ in range(2)]
    for model in models:
        layers.quantize_(model)
        layers.pack_(model)
    layers.host_experts_(models[1], HostExperts(1, 4))
    dsv4.warmup(models[1], max_tokens=32, progress=False)  # in parallel processes
    joined = []
    join = early_experts.Arrival.joined
    monkeypatch.setattr(
        early_experts.Arrival, "joined", lambda self: joined.append(self.work) or join(self)
    )
    steps = [DecodeStep(model, 2, 16) for model in models]
    drawn = draw_experts(1.0, 100, 3, 2, 2, 8).to("cuda")
    with ExitStack() as stack:
        chosen = [stack.enter_context(drawn_routing(m, 2)) for m in models if is_drawn]
        graphs = [step.captured() for step in steps]
        assert joined == ["experts of layer 0", "experts of layer 2"], "loaded late"
        for number in range(100):
            tokens = torch.tensor([7 * number % 64, 11 * number % 64])
            for own in chosen:
                own.copy_(drawn[number])
            for step, graph in zip(steps, graphs, strict=True):
                step.tokens.copy_(tokens)
                graph.replay()
            assert_bitwise(steps[1].logits, steps[0].logits, f"replay {number}")
    use = layers.cache_use(models[1])
    assert 0 < use.loaded < use.asked
