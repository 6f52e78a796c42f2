"""State of a transformers model beside weights: settings, dtypes, and how it is saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.checkpoint import load, save
from dsv4.config import ModelConfig
from dsv4.integrations.transformers import PARTS, apply, from_pretrained, paged_cache
from dsv4.layers import quantize_
from dsv4.testing.models import random_model, transformers_twin

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
LABELS = ("main", "compress")


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig.tiny(numerics="transformers", **changes)


def model_of(seed: int = 0, **changes: Any) -> Any:
    return transformers_twin(random_model(tiny(**changes), seed))


def ids_of(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 128, (batch, length), generator=generator)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def rotaries(model: Any) -> list[Any]:
    kind = "DeepseekV4RotaryEmbedding"
    return [m for m in model.modules() if type(m).__name__ == kind]


# Settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["note", "my_table"])
def test_attributes_of_the_user_do_no_harm(name: str) -> None:
    model = model_of()
    setattr(model.config, name, {"any": "thing"})
    assert apply(model).replaced
    with torch.no_grad():
        assert relative(model(ids_of(1, 9)).logits, model_of()(ids_of(1, 9)).logits) <= TOLERANCE


def test_a_clamp_at_zero_is_refused() -> None:
    """DeepSeek writes no clamp as 0, and transformers clamps at it."""
    model = model_of()
    model.config.swiglu_limit = 0.0
    with pytest.raises(ValueError, match=r"swiglu_limit is 0\.0, wanted a number > 0, or inf"):
        apply(model)


@pytest.mark.parametrize("parts", [None, ("attention",), ("experts",), ("mlp",)])
def test_no_clamp_is_none_in_all_parts(tmp_path: Path, parts: Any) -> None:
    source = random_model(tiny(swiglu_limit=None), 1)
    for layer in source.model.layers:
        layer.mlp.experts.gate_up_proj *= 20
        layer.mlp.shared_experts.up_proj.weight *= 20
    save(source, tmp_path / "c", layout="bf16", plain_dtype=None)
    model = from_pretrained(tmp_path / "c", parts=parts, progress=False)
    with torch.no_grad():
        assert relative(model(ids_of(1, 9)).logits, source(ids_of(1, 9))) <= TOLERANCE


@pytest.mark.parametrize(
    ("path", "inner", "name", "value", "words"),
    [
        ("model.layers.0.mlp.experts", "", "limit", 0.05, "limit is 0.05, by the configuration 10"),
        ("model.layers.1.mlp.shared_experts", "", "limit", 0.0, "limit is 0.0, by the config"),
        ("model.layers.3.mlp.gate", "", "routed_scaling_factor", 7.0, "factor is 7.0, by the"),
        ("model.layers.3.mlp.gate", "", "top_k", 1, "top_k is 1, by the configuration 2"),
        ("model.layers.1.self_attn", "", "scaling", 1.0, "scaling is 1.0, by the configuration"),
        ("model.layers.1.self_attn", "compressor.indexer", "index_topk", 1, "index_topk is 1, by"),
        ("model.layers.2.self_attn", "kv_norm", "variance_epsilon", 1.0, "kv_norm.variance_eps"),
        ("model.layers.0.attn_hc", "", "hc_eps", 0.1, "hc_eps is 0.1, by the configuration"),
        ("model.layers.0.mlp.experts", "", "act_fn", torch.nn.GELU(), "act_fn is a GELU, wanted"),
        ("model.layers.3.mlp.gate", "", "score_fn", torch.nn.Sigmoid(), "score_fn is a Sigmoid"),
        ("model.rotary_emb", "", "compress_attention_scaling", 1.3, "scaling is 1.3, wanted 1.0"),
    ],
)
def test_a_module_whose_settings_were_changed_stays(
    path: str, inner: str, name: str, value: Any, words: str
) -> None:
    model, twin = model_of(), model_of()
    for changed in (model, twin):
        setattr(changed.get_submodule(f"{path}.{inner}".strip(".")), name, value)
    reasons = {entry.name: entry.reason for entry in apply(model).kept}
    assert words in reasons[path]
    ids = ids_of(1, 21)
    with torch.no_grad():
        assert relative(model(ids).logits, twin(ids).logits) <= TOLERANCE


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("label", LABELS)
@torch.no_grad()
def test_rotary_buffers_mean_what_they_mean_in_transformers(label: str, paged: bool) -> None:
    model, twin = model_of(), model_of()
    ids = ids_of(2, 33)
    usual = twin(ids).logits
    for changed in (model, twin):
        for rotary in rotaries(changed):
            rotary._buffers[f"{label}_inv_freq"].mul_(0.25)
    report = apply(model)
    expected = twin(ids).logits
    assert relative(usual, expected) > 1e-3
    cache = paged_cache(model, max_tokens=33, max_sequences=2) if paged else None
    assert relative(model(ids, past_key_values=cache).logits, expected) <= TOLERANCE
    twice = copy.deepcopy(model)
    assert relative(twice(ids).logits, expected) <= TOLERANCE
    report.undo()
    assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
def test_rotary_buffers_that_differ_in_a_model_are_refused() -> None:
    model = model_of()
    rotaries(model)[1].main_inv_freq.mul_(0.5)
    with pytest.raises(ValueError, match=r"main_inv_freq differs from .*main_inv_freq, wanted"):
        apply(model)


@pytest.mark.parametrize("numerics", ["transformers", "deepseek"])
def test_rotary_buffers_rounded_by_a_cast(numerics: str) -> None:
    """transformers rotates by the rounded ones; DeepSeek's tables are float32."""
    model = model_of().to(torch.bfloat16)
    buffer = model.model.rotary_emb.main_inv_freq
    exact = tiny().rope_main.inv_freq()
    assert not torch.equal(buffer.float(), exact)
    apply(model, numerics=numerics)
    result = model.model.rotary_emb.inv_freq(torch.device("cpu"), "main")
    assert torch.equal(result, buffer.float() if numerics == "transformers" else exact)


def test_another_attention_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    name = "dsv4_test_attention"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, modeling.eager_attention_forward)
    model, ids = model_of(), ids_of(1, 9)
    report = apply(model)
    model.set_attn_implementation(name)
    with torch.no_grad():
        with pytest.raises(ValueError, match=f"attn_implementation is '{name}', wanted 'eager"):
            model(ids)
        report.undo()
        model(ids)
    with pytest.raises(ValueError, match=f"attn_implementation is '{name}', wanted 'eager"):
        apply(model)
    assert apply(model, parts=[p for p in PARTS if p != "attention"]).replaced


# Dtypes --------------------------------------------------------------------------------------


def float32_names(model: Any) -> set[str]:
    return {
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.dtype == torch.float32 and "rotary" not in name
    }


@pytest.mark.parametrize("stored", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [None, ("attention",), ("norm", "lm_head"), ("mlp",)], ids=str)
def test_what_transformers_keeps_in_float32_stays_so(
    tmp_path: Path, parts: Any, stored: Any
) -> None:
    """A bfloat16 model of transformers, loaded by it and swapped, or loaded by this package."""
    truth = model_of(3)
    truth.save_pretrained(tmp_path / "theirs")
    save(random_model(tiny(), 3), tmp_path / "ours", layout="bf16", plain_dtype=stored)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", dtype=torch.bfloat16, **options
    ).requires_grad_(False)
    expected = float32_names(theirs)
    assert any(name.endswith("input_layernorm.weight") for name in expected)
    loaded = from_pretrained(tmp_path / "ours", dtype=torch.bfloat16, parts=parts, progress=False)
    norm = type(theirs.model.norm)(4)
    runs = norm(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    stay = {n for n in expected if not runs and type(loaded.get_submodule(n.rpartition(".")[0])) is
            type(theirs.model.norm)}  # fmt: skip
    assert float32_names(loaded) == expected - stay
    ids = ids_of(2, 21)
    with torch.no_grad():
        exact = truth(ids).logits.double()
        actual = [loaded(ids).logits]
        if runs or parts is None:
            apply(theirs, parts=parts)
            assert float32_names(theirs) == expected
            actual.append(theirs(ids).logits)
        for logits in actual:
            assert (logits.double() - exact).norm() < 0.2 * exact.norm()
        if len(actual) == 2 and stored is None:  # else its norms were rounded when it was saved
            assert (actual[0] - actual[1]).norm() < 0.1 * exact.norm()


@given(seed=st.integers(0, 100))
@example(seed=0)
@settings(max_examples=3)
def test_loading_in_bfloat16_rounds_no_norm(tmp_path_factory: Any, seed: int) -> None:
    path = tmp_path_factory.mktemp("c") / "c"
    source = random_model(tiny(), seed)
    save(source, path, layout="bf16", plain_dtype=None)
    model = load(path, dtype=torch.bfloat16, mtp=False, progress=False)
    before, after = source.state_dict(), model.state_dict()
    for name, tensor in after.items():
        if name.endswith("norm.weight"):
            assert torch.equal(tensor, before[name]), name
    save(source, path, layout="bf16", overwrite=True)
    for dtype in (None, torch.bfloat16):
        narrow = load(path, dtype=dtype, mtp=False, progress=False)
        assert narrow.model.norm.weight.dtype == torch.bfloat16, "as stored"


# Saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [None, ("attention", "experts")])
def test_a_plain_swapped_model_saves_what_transformers_reads(tmp_path: Path, parts: Any) -> None:
    model, ids = model_of(), ids_of(1, 17)
    report = apply(model, parts=parts)
    with torch.no_grad():
        for number, saved in enumerate((model, copy.deepcopy(model))):
            saved.lm_head.weight += number
            saved.save_pretrained(tmp_path / str(number))
            again = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / str(number), attn_implementation="eager"
            )
            assert relative(again(ids).logits, saved(ids).logits) <= TOLERANCE
    report.undo()
    assert "save_pretrained" not in vars(model)


def test_a_quantised_swapped_model_refuses_to_be_saved_by_transformers(tmp_path: Path) -> None:
    model = model_of(hidden_size=128, moe_intermediate_size=64)
    apply(model)
    apply(model)
    quantize_(model, "nvfp4", ["*.mlp.experts"])
    for module in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"mlp.experts has nvfp4 weights.* Use dsv4\.save"):
            module.save_pretrained(tmp_path / "c")
    assert not (tmp_path / "c").exists()
    save(model, tmp_path / "d", layout="transformers", plain=["*"])
    again = from_pretrained(tmp_path / "d", dtype=torch.float32, progress=False)
    with pytest.raises(ValueError, match=r"has nvfp4 weights.* Use dsv4\.save"):
        again.save_pretrained(tmp_path / "c")
