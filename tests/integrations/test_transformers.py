"""transformers' models on this package's layers: swapped, undone, generated with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsv4.config import CSA, HCA, LAYER_TYPES, MLP_LAYER_TYPES, SLIDING, CompressRates, ModelConfig
from dsv4.integrations.transformers import PARTS, apply
from dsv4.testing.models import random_model, transformers_twin

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": None}


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    count = draw(st.integers(1, 4))
    types = draw(st.lists(st.sampled_from(LAYER_TYPES), min_size=count, max_size=count))
    routing = draw(st.lists(st.sampled_from(MLP_LAYER_TYPES), min_size=count, max_size=count))
    head_dim = draw(st.sampled_from([32, 64]))
    experts = draw(st.sampled_from([4, 8]))
    return ModelConfig.tiny(
        numerics="transformers",
        layer_types=tuple(types),
        mlp_layer_types=tuple(routing),
        num_hidden_layers=count,
        compress_rates=CompressRates(
            draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([5, 8, 16]))
        ),
        num_attention_heads=draw(st.sampled_from([2, 4])),
        head_dim=head_dim,
        qk_rope_head_dim=draw(st.sampled_from([8, 16])),
        o_groups=draw(st.sampled_from([1, 2])),
        sliding_window=draw(st.integers(2, 12)),
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        index_topk=draw(st.integers(1, 6)),
        hc_mult=draw(st.sampled_from([2, 4])),
        hc_sinkhorn_iters=draw(st.sampled_from([1, 3, 20])),
        swiglu_limit=draw(st.sampled_from([0.3, 10.0])),
    )


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig.tiny(numerics="transformers", **changes)


def model_of(config: ModelConfig, seed: int = 0) -> Any:
    """A transformers model with random weights."""
    return transformers_twin(random_model(config, seed))


def ids_of(config: ModelConfig, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (batch, length), generator=generator)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def logits_in_chunks(model: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of all positions, computed in pieces over a cache."""
    cache = transformers.DynamicCache(config=model.config)
    pieces = ids.split(sizes, dim=1)
    return torch.cat([model(p, past_key_values=cache, use_cache=True).logits for p in pieces], 1)


def modules_of(model: nn.Module) -> dict[str, int]:
    return {name: id(module) for name, module in model.named_modules()}


@pytest.mark.costly(4)
@given(config=configs(), seed=st.integers(0, 2**16), data=st.data())
def test_prefill_chunks_and_single_tokens_equal_transformers(
    config: ModelConfig, seed: int, data: st.DataObject
) -> None:
    model = model_of(config, seed)
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    ids = ids_of(config, batch, length, seed)
    sizes = []
    while sum(sizes) < length:
        sizes.append(data.draw(st.integers(1, length - sum(sizes))))
    parts = data.draw(st.sampled_from([None, *[(part,) for part in PARTS]]))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        chunked = logits_in_chunks(model, ids, sizes)
        single = logits_in_chunks(model, ids, [1] * length)
        apply(model, parts=parts)
        assert relative(model(ids, use_cache=False).logits, whole) <= TOLERANCE
        assert relative(logits_in_chunks(model, ids, sizes), chunked) <= TOLERANCE
        assert relative(logits_in_chunks(model, ids, [1] * length), single) <= TOLERANCE


@pytest.mark.costly(3)
@given(
    parts=st.one_of(st.none(), st.lists(st.sampled_from(PARTS), min_size=1, unique=True)),
    seed=st.integers(0, 100),
)
@settings(max_examples=15)
def test_tensors_are_shared_and_undo_restores_everything(parts: Any, seed: int) -> None:
    config = tiny()
    model = model_of(config, seed)
    ids = ids_of(config, 2, 19, seed)
    with torch.no_grad():
        before = model(ids).logits
        state = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        parameters = {name: id(p) for name, p in model.named_parameters()}
        report = apply(model, parts=parts)
        assert report.replaced
        assert {n: t.data_ptr() for n, t in model.state_dict().items()} == state
        assert list(model.state_dict()) == list(state)
        assert {name: id(p) for name, p in model.named_parameters()} == parameters
        assert {r.part for r in report.replaced} == set(parts or PARTS)
        assert relative(model(ids).logits, before) <= TOLERANCE
        report.undo()
        report.undo()
        assert torch.equal(model(ids).logits, before)
        assert {n: t.data_ptr() for n, t in model.state_dict().items()} == state


@pytest.mark.parametrize("parts", [None, *[(part,) for part in PARTS]], ids=str)
def test_undo_gives_back_the_same_modules(parts: Any) -> None:
    model = model_of(tiny())
    before = modules_of(model)
    report = apply(model, parts=parts)
    for replaced in report.replaced:
        module = model.get_submodule(replaced.name)
        assert type(module).__module__.startswith("dsv4."), replaced
        assert id(module) != before[replaced.name]
    report.undo()
    assert modules_of(model) == before


def test_every_module_with_weights_is_replaced_but_the_embedding() -> None:
    model = model_of(tiny())
    apply(model)
    left = [
        name
        for name, module in model.named_modules()
        if not type(module).__module__.startswith("dsv4.")
        and (module._parameters or module._buffers)
    ]
    assert left == ["model.embed_tokens"]


def test_a_second_apply_replaces_nothing_and_says_so() -> None:
    model = model_of(tiny())
    first = apply(model)
    before = modules_of(model)
    second = apply(model)
    assert second.replaced == ()
    assert {entry.name for entry in second.kept} == {replaced.name for replaced in first.replaced}
    assert all("already" in entry.reason for entry in second.kept)
    assert modules_of(model) == before
    second.undo()
    assert modules_of(model) == before


def test_parts_can_be_added_and_are_undone_in_reverse() -> None:
    config = tiny()
    model = model_of(config)
    ids = ids_of(config, 1, 17)
    before = modules_of(model)
    with torch.no_grad():
        expected = model(ids).logits
        first = apply(model, parts=["hyper_connection"])
        second = apply(model, parts=["attention", "experts"])
        assert relative(model(ids).logits, expected) <= TOLERANCE
        with pytest.raises(RuntimeError, match="replaced since; undo that first"):
            first.undo()
        assert relative(model(ids).logits, expected) <= TOLERANCE
        second.undo()
        first.undo()
        assert torch.equal(model(ids).logits, expected)
    assert modules_of(model) == before


def test_the_report_reads_well() -> None:
    model = model_of(tiny())
    text = str(apply(model, parts=["attention"]))
    assert text.startswith("dsv4 in DeepseekV4ForCausalLM, numerics transformers, activation bf16")
    assert "replaced 5" in text
    assert "model.layers.0.self_attn, model.layers.1.self_attn and 2 more" in text
    assert "'experts' was not asked for" in text
    assert "output_attentions=True raises" in text


def test_the_bare_model_can_be_swapped() -> None:
    config = tiny()
    model = model_of(config).model
    ids = ids_of(config, 1, 9)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        report = apply(model)
        assert relative(model(ids).last_hidden_state, expected) <= TOLERANCE
    assert "lm_head" not in {replaced.part for replaced in report.replaced}


# What must stay ------------------------------------------------------------------------------


def test_modules_changed_by_others_stay_and_the_report_says_why() -> None:
    model = model_of(tiny())
    layers = model.model.layers

    class OtherMLP(type(layers[0].mlp.shared_experts)):  # type: ignore[misc]
        pass

    layers[0].mlp.shared_experts.__class__ = OtherMLP
    layers[1].self_attn.register_forward_hook(lambda module, args, output: None)
    layers[2].mlp.gate.forward = layers[2].mlp.gate.forward
    layers[3].self_attn.q_a_proj.register_parameter("lora", nn.Parameter(torch.zeros(1)))
    layers[2].self_attn = nn.Identity()
    layers[3].mlp.experts.down_proj = nn.Parameter(torch.zeros(1, 2, 3))
    reasons = {entry.name: entry.reason for entry in apply(model).kept}
    assert reasons["model.layers.2.self_attn"] == "it is a torch.nn.modules.linear.Identity"
    assert "OtherMLP" in reasons["model.layers.0.mlp.shared_experts"]
    assert "hooks" in reasons["model.layers.1.self_attn"]
    assert "forward was replaced" in reasons["model.layers.2.mlp.gate"]
    assert "q_a_proj.lora is not expected" in reasons["model.layers.3.self_attn"]
    assert "down_proj has shape [1, 2, 3]" in reasons["model.layers.3.mlp.experts"]
    assert "its experts was not replaced" in reasons["model.layers.3.mlp"]
    for name in reasons:
        assert not type(model.get_submodule(name)).__module__.startswith("dsv4.")
    # What lies inside a module that stays is still looked at.
    assert type(layers[1].self_attn.q_a_norm).__module__ == "dsv4.layers.norm"


def test_undo_refuses_what_it_cannot_do_and_changes_nothing() -> None:
    from dsv4.layers import quantize_

    model = model_of(tiny())
    report = apply(model)
    quantize_(model, "nvfp4", ["*.mlp.experts"])
    before = modules_of(model)
    with pytest.raises(RuntimeError, match=r"mlp.experts has other tensors since"):
        report.undo()
    assert modules_of(model) == before


def test_undo_after_a_move_keeps_the_values() -> None:
    config = tiny()
    model = model_of(config)
    ids = ids_of(config, 1, 21)
    with torch.no_grad():
        report = apply(model)
        model.to(torch.float64)
        expected = model(ids).logits
        report.undo()
        assert model.lm_head.weight.dtype == torch.float64
        buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
        assert buffers["model.layers.3.mlp.gate.e_score_correction_bias"] == torch.float64
        assert relative(model(ids).logits, expected) <= TOLERANCE


def test_a_copy_of_a_swapped_model_is_independent() -> None:
    config = tiny()
    model = model_of(config)
    apply(model)
    ids = ids_of(config, 1, 9)
    with torch.no_grad():
        expected = model(ids).logits
        twin = copy.deepcopy(model)
        twin.lm_head.weight.zero_()
        assert torch.equal(model(ids).logits, expected)
        assert not twin(ids).logits.any()


# Outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded_before", [False, True])
def test_recorded_outputs_are_those_of_transformers(recorded_before: bool) -> None:
    config = tiny()
    model, twin = model_of(config), model_of(config)
    ids = ids_of(config, 2, 13)
    asked = {"output_hidden_states": True, "output_router_logits": True}
    with torch.no_grad():
        if recorded_before:
            model(ids, **asked)
        report = apply(model)
        for _ in range(2):
            actual, expected = model(ids, **asked), twin(ids, **asked)
            assert len(actual.hidden_states) == len(expected.hidden_states) == 5
            assert len(actual.router_logits) == len(expected.router_logits) == 2
            for a, b in zip(
                (*actual.hidden_states, *actual.router_logits),
                (*expected.hidden_states, *expected.router_logits),
                strict=True,
            ):
                assert relative(a, b) <= TOLERANCE
            assert relative(actual.aux_loss, expected.aux_loss) <= TOLERANCE
            report.undo()


def test_attention_weights_are_an_error_and_not_an_empty_answer() -> None:
    config = tiny()
    model = model_of(config)
    ids = ids_of(config, 1, 5)
    report = apply(model)
    with torch.no_grad():
        with pytest.raises(ValueError, match="output_attentions is True, wanted False"):
            model(ids, output_attentions=True)
        model.config.output_attentions = True
        with pytest.raises(ValueError, match="output_attentions is True, wanted False"):
            model(ids)
        report.undo()
        assert len(model(ids).attentions) == 4
        model.config.output_attentions = False
        apply(model, parts=[part for part in PARTS if part != "attention"])
        assert len(model(ids, output_attentions=True).attentions) == 4


@pytest.mark.parametrize("part", PARTS)
def test_a_backward_pass_is_an_error_and_not_a_missing_gradient(part: str) -> None:
    config = tiny()
    model = model_of(config).requires_grad_(True)
    apply(model, parts=[part])
    with pytest.raises(RuntimeError, match="inference only"):
        model(ids_of(config, 1, 9)).logits.sum().backward()


def test_other_implementations_of_the_experts_do_no_harm() -> None:
    config = tiny()
    model = model_of(config)
    ids = ids_of(config, 1, 9)
    with torch.no_grad():
        apply(model)
        expected = model(ids).logits
        model.set_experts_implementation("batched_mm")
        assert torch.equal(model(ids).logits, expected)


# Generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sample", [False, True])
def test_generate_gives_the_tokens_of_transformers(batch: int, sample: bool) -> None:
    config = tiny()
    model, twin = model_of(config), model_of(config)
    apply(model)
    options = {**GREEDY, "do_sample": sample, "output_logits": True}
    outputs = []
    for candidate in (model, twin):
        torch.manual_seed(5)
        ids = ids_of(config, batch, 11)
        outputs.append(candidate.generate(ids, return_dict_in_generate=True, **options))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for actual, expected in zip(outputs[0].logits, outputs[1].logits, strict=True):
        assert relative(actual, expected) <= TOLERANCE


def _padded(layer_types: tuple[str, ...], pad: int) -> tuple[list[torch.Tensor], ...]:
    """Logits of every step by transformers and by a swapped model; row 0 is padded on the left."""
    config = tiny(layer_types=layer_types, num_hidden_layers=len(layer_types))
    ids = ids_of(config, 2, 23)
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    model, twin = model_of(config), model_of(config)
    apply(model)
    options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    return tuple(
        list(m.generate(ids, attention_mask=mask, pad_token_id=0, **options).logits)
        for m in (model, twin)
    )


@pytest.mark.parametrize("pad", [1, 3, 9])
def test_left_padding_equals_transformers_without_heavily_compressed_layers(pad: int) -> None:
    for actual, expected in zip(*_padded((SLIDING, CSA, CSA), pad), strict=True):
        assert relative(actual, expected) <= TOLERANCE


def test_left_padding_with_heavily_compressed_layers_differs_where_documented() -> None:
    actual, expected = _padded((SLIDING, HCA), 9)
    # Prefill is equal, and so is the row without padding. In decode transformers shows a padded
    # row the entries that its prefill would hide.
    assert relative(actual[0], expected[0]) <= TOLERANCE
    for a, b in zip(actual, expected, strict=True):
        assert relative(a[1], b[1]) <= TOLERANCE
    assert any(relative(a[0], b[0]) > 1e-3 for a, b in zip(actual[1:], expected[1:], strict=True))


# Dtypes --------------------------------------------------------------------------------------


def test_a_model_as_transformers_loads_it_in_bfloat16() -> None:
    """Dtypes are bfloat16 but for the names that transformers keeps in float32, norms among them.

    transformers 5.17 loads norms in float32 and then cannot run them; a swapped model runs.
    """
    config = tiny()
    model, wide, narrow = (model_of(config) for _ in range(3))
    wide_names = set(model.model._keep_in_fp32_modules_strict)
    model.to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if wide_names & set(name.split(".")):
            parameter.data = parameter.data.float()
    ids = ids_of(config, 2, 21)
    with torch.no_grad():
        truth = wide(ids).logits.double()
        theirs = narrow.to(torch.bfloat16)(ids).logits.double()
        for numerics in ("transformers", "deepseek"):
            report = apply(model, numerics=numerics)
            ours = model(ids).logits.double()
            report.undo()
            # Near float32, as transformers itself in bfloat16 is; FP8 keys add to it.
            assert ours.isfinite().all()
            assert (ours - truth).norm() < 3 * (theirs - truth).norm() + 0.2 * truth.norm()


def test_a_cast_leaves_what_is_float32_by_definition() -> None:
    model = model_of(tiny())
    apply(model)
    model.to(torch.bfloat16)
    layer = model.model.layers[0]
    assert layer.self_attn.q_a_proj.weight.dtype == torch.bfloat16
    for parameter in (layer.attn_hc.fn, layer.ffn_hc.base, layer.self_attn.sinks):
        assert parameter.dtype == torch.float32


# Errors --------------------------------------------------------------------------------------


def test_what_is_not_a_deepseek_v4_model_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"model is a torch.*Linear, wanted .*DeepseekV4ForCausalLM"
    ):
        apply(nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match=r"dsv4\.model\.causal_lm\.DeepseekV4ForCausalLM, wanted transformers'"
    ):
        apply(random_model(tiny()))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"parts": ["attention", "moe"]}, ValueError, r"'moe'\), wanted some of attention"),
        ({"parts": []}, ValueError, r"parts is \(\)"),
        ({"parts": "norm"}, TypeError, "parts is the string 'norm'"),
        ({"numerics": "exact"}, ValueError, "numerics is 'exact', wanted one of deepseek"),
        ({"activation": "int8"}, ValueError, "activation is 'int8', wanted one of bf16, nvfp4"),
    ],
)
def test_unknown_options_are_refused_and_nothing_changes(
    options: Any, error: type[Exception], words: str
) -> None:
    model = model_of(tiny())
    before = modules_of(model)
    with pytest.raises(error, match=words):
        apply(model, **options)
    assert modules_of(model) == before
