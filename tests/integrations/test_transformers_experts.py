"""transformers' own experts on this package's operators: ``experts_implementation="dsv4"``."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsv4 import layers
from dsv4.config import ModelConfig
from dsv4.debug import count_dropped
from dsv4.integrations.transformers import apply, register_experts
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from dsv4.testing.models import random_model, randomize_, transformers_twin
from tests.layers.experts_cases import truth_and_budget

transformers = pytest.importorskip("transformers")

DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
EXPERTS = 9


@pytest.fixture(autouse=True)
def registered() -> None:
    register_experts()


def config_of(**changes: Any) -> ModelConfig:
    sizes = {"n_routed_experts": EXPERTS, "hidden_size": 64, "moe_intermediate_size": 32}
    return ModelConfig.tiny(numerics="transformers", **{**sizes, **changes})


def their_experts(seed: int, dtype: torch.dtype, implementation: str = "dsv4", **changes: Any):
    """transformers' module with random weights, and this package's with the same ones."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = config_of(**changes)
    theirs = transformers.DeepseekV4Config(**config.to_transformers_dict())
    theirs._experts_implementation = implementation
    module = DeepseekV4Experts(theirs).requires_grad_(False)
    randomize_(module, seed).to(dtype)
    twin = layers.DeepseekV4Experts(config).requires_grad_(False)
    twin.load_state_dict(module.state_dict())
    return module, twin


def eager(module: nn.Module) -> nn.Module:
    """A copy that transformers' own code runs."""
    other = copy.deepcopy(module)
    other.config._experts_implementation = "eager"
    return other


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Seed, ids, weights: 0 tokens and one among them, duplicates, experts without tokens, and
    ``num_experts``, which is no expert.
    """
    seed, tokens, top_k = draw(fuzz.seeds()), draw(st.integers(0, 9)), draw(st.integers(1, 8))
    low, high = draw(st.sampled_from([(0, EXPERTS), (0, EXPERTS + 1), (3, 4), (EXPERTS, 10)]))
    generator = fuzz.generator(seed)
    ids = torch.randint(low, high, (tokens, top_k), generator=generator)
    return seed, ids, torch.rand(tokens, top_k, generator=generator)


def without_strangers(
    ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same sums of finite outputs with ids that every transformers takes.

    5.23 skips ``num_experts``; 5.17 counts to it, which a GPU answers by an assertion.
    """
    known = ids < EXPERTS
    return ids.where(known, 0), weights.where(known, 0.0)


@given(routing=routings(), dtype=DTYPES, size=st.sampled_from([1, 30]))
def test_equals_transformers_eager_experts(device, routing, dtype, size) -> None:
    seed, ids, weights = routing
    module, twin = their_experts(seed, dtype)
    x = (size * fuzz.normal(seed, (ids.shape[0], 64))).to(dtype)
    inputs = [t.to(device) for t in (x, ids, weights)]
    module.to(device)
    result = module(*inputs).cpu()
    theirs = eager(module)(inputs[0], *without_strangers(*inputs[1:])).cpu()
    module.cpu()
    assert result.dtype == theirs.dtype == dtype
    wide = eager(module).double()(x.double(), *without_strangers(ids, weights.double()))
    truth, budget = truth_and_budget(twin, x, ids, weights)
    assert bool((wide - truth).abs().le(1e-9 * (1 + budget)).all())
    assert_within_budget(result, wide, budget, "dsv4's")
    truth, loose = truth_and_budget(twin, x, ids, weights, eager=True)
    assert_within_budget(theirs, wide, loose, "transformers'")
    assert_within_budget(result, theirs.double(), budget + loose, "dsv4's beside transformers'")


@given(seed=fuzz.seeds(), dtype=DTYPES)
@settings(max_examples=10)
def test_pitfalls_9_32_the_clamp_is_applied(seed, dtype) -> None:
    """One that forgets it, or clamps the gate below, is far outside the budget."""
    module, twin = their_experts(seed, dtype)
    generator = fuzz.generator(seed)
    x = (40 * fuzz.normal(seed, (12, 64))).to(dtype)
    ids = torch.randint(0, EXPERTS, (12, 2), generator=generator)
    weights = torch.rand(12, 2, generator=generator) + 0.1
    truth, budget = truth_and_budget(twin, x, ids, weights)
    assert_within_budget(module(x, ids, weights), truth, budget)
    module.limit = 1e9
    assert bool(((module(x, ids, weights).double() - truth).abs() > 100 * budget).any())


@given(routing=routings(), dtype=DTYPES)
def test_has_the_bits_of_this_packages_experts(routing, dtype) -> None:
    """These run the same operators: sums in slot order, tokens alone, run to run."""
    seed, ids, weights = routing
    module, twin = their_experts(seed, dtype)
    x = (10 * fuzz.normal(seed, (ids.shape[0], 64))).to(dtype)
    assert_bitwise(module(x, ids, weights), twin(x, ids, weights))


def test_the_routing_weight_comes_after_the_down_projection() -> None:
    """Where the weight itself is lost before it, in a float32 product that overflows, and not
    after.
    """
    module, _ = their_experts(0, torch.float32)
    module.gate_up_proj.fill_(0.0)
    module.gate_up_proj[:, 0, 0] = module.gate_up_proj[:, 32, 0] = 1.0
    module.down_proj.fill_(1e38)
    x = torch.zeros(1, 64)
    x[0, 0] = 9.0
    ids, weights = torch.tensor([[0]]), torch.tensor([[1e-3]])
    assert module(x, ids, weights).isinf().all()
    assert eager(module)(x, ids, weights).isinf().all()


def test_runs_a_rank_of_transformers_expert_parallelism() -> None:
    """The ids that transformers gives a rank: local ones, and its count for those of others."""
    module, _ = their_experts(0, torch.float64)
    x, ids = fuzz.normal(0, (6, 64), torch.float64), torch.arange(12).view(6, 2) % EXPERTS
    weights = fuzz.normal(1, (6, 2), torch.float64).abs()
    total = torch.zeros_like(x)
    for first, last in ((0, 4), (4, EXPERTS)):
        rank = copy.deepcopy(module)
        rank.num_experts, rank._is_expert_parallel = last - first, True
        rank.gate_up_proj = nn.Parameter(module.gate_up_proj[first:last], requires_grad=False)
        rank.down_proj = nn.Parameter(module.down_proj[first:last], requires_grad=False)
        away = (ids < first) | (ids >= last)
        local = torch.where(away, last - first, ids - first)
        total += rank(x, local, weights.masked_fill(away, 0.0))
    torch.testing.assert_close(total, eager(module)(x, ids, weights), rtol=1e-12, atol=1e-12)


def test_ids_out_of_range_raise_and_are_counted() -> None:
    module, _ = their_experts(0, torch.float32)
    with count_dropped(module) as dropped:
        with pytest.raises(ValueError, match=r"ids\[1, 0\] is 10, wanted an expert, 0 to 8, or"):
            module(torch.zeros(2, 64), torch.tensor([[9], [10]]), torch.ones(2, 1))
        assert dropped.total == 1


# The whole model -----------------------------------------------------------------------------


def model_of(seed: int = 0, **changes: Any) -> Any:
    return transformers_twin(random_model(config_of(**changes), seed))


def ids_of(model: Any, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=fuzz.generator(1))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every call of the operators by transformers' experts, its tokens."""
    from dsv4.integrations import _experts

    calls: list[int] = []
    permute = _experts.moe_permute

    def counted(ids: torch.Tensor, *args: Any) -> Any:
        calls.append(ids.shape[0])
        return permute(ids, *args)

    monkeypatch.setattr(_experts, "moe_permute", counted)
    return calls


@pytest.mark.parametrize("limit", [0.05, 10.0])
def test_a_whole_model_equals_itself_run_by_transformers(monkeypatch, limit) -> None:
    model = model_of(swiglu_limit=limit, num_experts_per_tok=6)
    ids = ids_of(model, 2, 19)
    with torch.no_grad():
        expected = model(ids).logits
        tokens = model.generate(ids, do_sample=False, max_new_tokens=6, eos_token_id=None)
        calls = count_calls(monkeypatch)
        model.set_experts_implementation("dsv4")
        assert relative(model(ids).logits, expected) <= 1e-5
        assert calls == [2 * 19] * len(model.model.layers)
        actual = model.generate(ids, do_sample=False, max_new_tokens=6, eos_token_id=None)
        assert torch.equal(actual, tokens)
        model.set_experts_implementation("eager")
        assert torch.equal(model(ids).logits, expected)


def test_loads_with_it(tmp_path, monkeypatch) -> None:
    model = model_of()
    ids = ids_of(model, 1, 9)
    model.save_pretrained(tmp_path)
    calls = count_calls(monkeypatch)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="dsv4", attn_implementation="eager"
    )
    assert other.config._experts_implementation == "dsv4"
    with torch.no_grad():
        assert relative(other(ids).logits, model(ids).logits) <= 1e-5
    assert calls == [9] * len(model.model.layers)


def test_beside_swapped_parts(monkeypatch) -> None:
    """apply registers it; what it leaves to transformers runs on the operators."""
    model = model_of()
    ids = ids_of(model, 1, 9)
    with torch.no_grad():
        expected = model(ids).logits
        apply(model, parts=["attention", "router", "norm"])
        model.set_experts_implementation("dsv4")
        calls = count_calls(monkeypatch)
        assert relative(model(ids).logits, expected) <= 1e-5
    assert calls


def test_swapped_experts_work_under_any_setting() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    model = model_of()
    ids = ids_of(model, 1, 9)
    with torch.no_grad():
        model.set_experts_implementation("dsv4")
        apply(model)
        expected = model(ids).logits
        assert "dsv4" in ALL_EXPERTS_FUNCTIONS
        for name in ("eager", *ALL_EXPERTS_FUNCTIONS):
            model.set_experts_implementation(name)
            assert torch.equal(model(ids).logits, expected), name


def test_undo_gives_the_setting_back_its_effect(monkeypatch) -> None:
    model = model_of()
    ids = ids_of(model, 1, 9)
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        report = apply(model)
        model.set_experts_implementation("dsv4")
        model(ids)
        assert not calls
        report.undo()
        model(ids)
    assert calls


# Refusals ------------------------------------------------------------------------------------


class OtherGate:
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up.chunk(2, -1)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "has_bias", True), "has_bias is True, wanted False"),
        (lambda m: setattr(m, "is_transposed", True), "is_transposed is True, wanted False"),
        (lambda m: setattr(m, "has_gate", False), "has_gate is False, wanted True"),
        (lambda m: setattr(m, "is_concatenated", False), "is_concatenated is False, wanted True"),
        (
            lambda m: setattr(m, "has_post_expert_norm", True),
            "has_post_expert_norm is True, wanted False",
        ),
        (lambda m: setattr(m, "act_fn", nn.GELU()), "act_fn is a GELU, wanted SiLU"),
        (
            lambda m: setattr(m, "__class__", type("Other", (OtherGate, type(m)), {})),
            "_apply_gate of Other is its own, wanted that of transformers' DeepseekV4Experts",
        ),
        (
            lambda m: setattr(
                m, "down_proj", nn.Parameter(m.down_proj.to(torch.float8_e4m3fn), False)
            ),
            "down_proj is a Parameter of torch.float8_e4m3fn, wanted plain weights",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(change, words) -> None:
    module, _ = their_experts(0, torch.float32)
    change(module)
    with pytest.raises(ValueError, match=f"experts_implementation='dsv4': .*{words}"):
        module(torch.zeros(2, 64), torch.zeros(2, 2).long(), torch.ones(2, 2))


def test_another_models_experts_are_refused() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=16, num_local_experts=2, num_hidden_layers=1
    )
    config._experts_implementation = "dsv4"
    with pytest.raises(ValueError, match="_apply_gate of MixtralExperts is its own, wanted"):
        MixtralExperts(config)(torch.zeros(2, 16), torch.zeros(2, 2).long(), torch.ones(2, 2))


def test_a_backward_pass_is_refused() -> None:
    module, _ = their_experts(0, torch.float32)
    module.requires_grad_(True)
    out = module(torch.ones(2, 64), torch.zeros(2, 2).long(), torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="inference only"):
        out.sum().backward()


def test_compiles_without_graph_breaks() -> None:
    module, _ = their_experts(0, torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, ids = fuzz.normal(0, (5, 64)), torch.arange(10).view(5, 2) % EXPERTS
    with torch.no_grad():
        assert_bitwise(compiled(x, ids, torch.ones(5, 2)), module(x, ids, torch.ones(5, 2)))


@pytest.mark.slow
def test_importing_registers_nothing() -> None:
    code = """
import sys
import dsv4.integrations.transformers as ours
assert "transformers" not in sys.modules
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
assert "dsv4" not in ALL_EXPERTS_FUNCTIONS
ours.register_experts()
ours.register_experts()
assert "dsv4" in ALL_EXPERTS_FUNCTIONS
"""
    subprocess.run([sys.executable, "-c", code], check=True)
