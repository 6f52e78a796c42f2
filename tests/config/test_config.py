"""ModelConfig: what it reads, what it refuses, and that nothing is lost on the way."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.config import (
    CSA,
    HCA,
    LAYER_TYPES,
    SLIDING,
    CompressRates,
    DSparkConfig,
    ModelConfig,
    RopeParameters,
)
from dsv4.config.config_json import producer

PRESETS = {"tiny": ModelConfig.tiny(), "flash": ModelConfig.flash(), "pro": ModelConfig.pro()}


def _ropes(dim: int) -> st.SearchStrategy[RopeParameters]:
    thetas = st.sampled_from([40000.0, 160000.0])
    factors, contexts = st.sampled_from([4.0, 16.0]), st.sampled_from([64, 4096, 65536])
    plain = st.builds(RopeParameters, thetas, st.just(dim))
    return plain | st.builds(RopeParameters, thetas, st.just(dim), factors, contexts)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    layers = draw(st.integers(1, 6))
    types = draw(st.lists(st.sampled_from(LAYER_TYPES), min_size=layers, max_size=layers))
    kinds = st.sampled_from(["hash_moe", "moe"])
    routing = draw(st.lists(kinds, min_size=layers, max_size=layers))
    groups = draw(st.integers(1, 4))
    rope = 2 * draw(st.integers(1, 16))
    rates = draw(st.sampled_from([(4, 128), (4, 8), (2, 16), (128, 4)]))
    return ModelConfig.tiny(
        layer_types=tuple(types),
        mlp_layer_types=tuple(routing),
        o_groups=groups,
        num_attention_heads=groups * draw(st.integers(1, 4)),
        head_dim=rope + draw(st.integers(0, 100)),
        qk_rope_head_dim=rope,
        compress_rates=CompressRates(*rates),
        swiglu_limit=draw(st.sampled_from([10.0, 7.5, None])),
        num_nextn_predict_layers=draw(st.integers(0, 2)),
        routed_scaling_factor=draw(st.floats(0.5, 3.0)),
        eos_token_id=draw(st.sampled_from([None, 1, (1, 2)])),
        rope_compress=draw(_ropes(rope)),
    )


@given(configs())
def test_every_style_of_file_gives_the_same_configuration_back(config):
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert ModelConfig.from_dict(config.to_transformers_dict()) == config
    assert ModelConfig.from_json(json.dumps(config.to_dict())) == config
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert hash(config) == hash(copy.deepcopy(config))


@given(configs())
def test_transformers_accepts_it_and_gives_it_back(config):
    transformers = pytest.importorskip("transformers")
    if config.swiglu_limit is None:
        config = config.replace(swiglu_limit=10.0)
    theirs = transformers.DeepseekV4Config(**config.to_transformers_dict())
    assert theirs.qk_rope_head_dim == config.qk_rope_head_dim
    assert ModelConfig.of(theirs) == config.replace(numerics="transformers")
    assert ModelConfig.of(theirs, numerics="deepseek") == config
    values = config.to_dict()
    if "mlp_layer_types" in values or "compress_rates" in values:
        return  # transformers' legacy compress_ratios knows 0, 4 and 128 only
    if values["rope_scaling"] is None:
        del values["rope_scaling"]
    count = config.num_hidden_layers
    values["compress_ratios"] = values["compress_ratios"][:count]
    assert transformers.DeepseekV4Config(**values).layer_types == list(config.layer_types)


def test_the_published_schedules():
    pro, flash = PRESETS["pro"], PRESETS["flash"]
    assert [pro.layer_types.count(t) for t in LAYER_TYPES] == [0, 30, 31]
    assert [flash.layer_types.count(t) for t in LAYER_TYPES] == [2, 21, 20]
    assert pro.layer_types[:4] == (HCA, HCA, CSA, HCA)
    assert flash.layer_types[:4] == (SLIDING, SLIDING, CSA, HCA)
    assert pro.layer_types[-1] == flash.layer_types[-1] == CSA
    assert pro.to_dict()["compress_ratios"] == [128, 128, *[4, 128] * 29, 4, 0]
    assert flash.to_dict()["compress_ratios"] == [0, 0, *[4, 128] * 20, 4, 0]
    assert [pro.is_hash(i) for i in range(5)] == [True] * 3 + [False] * 2


def test_pro_and_flash_have_the_published_parameter_counts():
    for name, billions in (("pro", 1573.0), ("flash", 284.3)):
        assert _parameters(PRESETS[name].replace(num_nextn_predict_layers=0)) / 1e9 == (
            pytest.approx(billions, rel=5e-4)
        )


def _parameters(c: ModelConfig) -> int:
    total = 2 * c.vocab_size * c.hidden_size
    for i in range(c.num_hidden_layers):
        total += 3 * (c.n_routed_experts + 1) * c.moe_intermediate_size * c.hidden_size
        total += c.n_routed_experts * c.hidden_size
        total += 2 * 24 * c.hc_mult * c.hidden_size
        total += (c.q_lora_rank + c.head_dim) * c.hidden_size
        total += c.num_attention_heads * c.head_dim * (c.q_lora_rank + c.o_lora_rank)
        total += c.o_groups * c.o_lora_rank * c.hidden_size
        if c.layer_type(i) == CSA:
            index = c.index_n_heads * c.index_head_dim * c.q_lora_rank
            total += index + (c.index_n_heads + 4 * c.index_head_dim) * c.hidden_size
        if c.compress_rate(i):
            total += (4 if c.compress_rate(i) == 4 else 2) * c.head_dim * c.hidden_size
    return total


@pytest.mark.parametrize("name", PRESETS)
def test_rope_follows_the_layer_type(name):
    """Pitfall 1: base 10000 without YaRN on sliding layers and MTP only."""
    config = PRESETS[name]
    for i in range(config.total_layers):
        sliding = i >= config.num_hidden_layers or config.layer_types[i] == SLIDING
        rope = config.rope(i)
        assert (rope.theta, rope.factor) == ((10000.0, None) if sliding else (160000.0, 16.0))


def test_mtp_layers_are_sliding_and_route_by_score():
    config = ModelConfig.tiny(mlp_layer_types=("hash_moe",) * 4)
    assert config.layer_type(4) == SLIDING
    assert config.compress_rate(4) == 0
    assert not config.is_hash(4)
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=rf"layer_idx is {wrong}, wanted 0 to 4"):
            config.layer_type(wrong)


def test_the_yarn_ramp_of_the_published_models():
    rope = PRESETS["pro"].rope_compress
    assert rope.correction_range() == (15, 25)
    plain = RopeParameters(160000.0).frequencies()
    scaled = rope.frequencies()
    assert scaled[:16] == plain[:16]
    assert scaled[25:] == [f / 16 for f in plain[25:]]
    assert scaled[20] == pytest.approx(plain[20] * 0.5 + plain[20] / 16 * 0.5, rel=1e-14)


@given(configs())
def test_float32_tables_are_within_rounding_of_double_precision(config):
    for rope in (config.rope_main, config.rope_compress):
        exact = torch.tensor(rope.frequencies(), dtype=torch.float64)
        table = rope.inv_freq()
        assert table.dtype == torch.float32
        assert table.shape == (rope.dim // 2,)
        # The exponent's rounding is multiplied by ln(theta) <= 12; then power, division, ramp.
        budget = (math.log(rope.theta) + 8) * 2.0**-24
        assert ((table.double() - exact).abs() <= budget * exact).all()


def test_float32_tables_equal_those_of_transformers_bitwise():
    """The amplitude of cos and sin is 1, too (pitfall 2)."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    transformers = pytest.importorskip("transformers")
    for config in PRESETS.values():
        theirs = transformers.DeepseekV4Config(**config.to_transformers_dict())
        rotary = modeling.DeepseekV4RotaryEmbedding(theirs)
        assert torch.equal(rotary.main_inv_freq, config.rope_main.inv_freq())
        assert torch.equal(rotary.compress_inv_freq, config.rope_compress.inv_freq())
        assert rotary.compress_attention_scaling == 1.0


def _with(**changes):
    return {**PRESETS["flash"].to_dict(), **changes}


def _without(*names, **changes):
    return {k: v for k, v in _with(**changes).items() if k not in names}


REFUSED = {
    "no schedule (pitfall 42)": (
        _without("compress_ratios"),
        "compress_ratios and layer_types are both missing",
    ),
    "no routing schedule": (
        _without("num_hash_layers"),
        "num_hash_layers and mlp_layer_types are both missing",
    ),
    "no rope width": (_without("qk_rope_head_dim"), "qk_rope_head_dim and partial_rotary_factor"),
    "missing": (_without("q_lora_rank", "o_groups"), "q_lora_rank is missing; o_groups is missing"),
    "unknown": (_with(kv_lora_rank=512), "unknown field kv_lora_rank"),
    "another model": (_with(model_type="deepseek_v41"), "model_type is 'deepseek_v41'"),
    "scoring": (_with(scoring_func="sigmoid"), "scoring_func is 'sigmoid', wanted 'sqrtsoftplus'"),
    "topk": (_with(topk_method="greedy"), "topk_method is 'greedy'"),
    "norm": (_with(norm_topk_prob=False), "norm_topk_prob is False, wanted True"),
    "activation": (_with(hidden_act="gelu"), "hidden_act is 'gelu', wanted 'silu'"),
    "bias": (_with(attention_bias=True), "attention_bias is True"),
    "tied": (_with(tie_word_embeddings=True), "tie_word_embeddings is True"),
    "dense layers": (_with(first_k_dense_replace=3), "first_k_dense_replace is 3"),
    "kv heads": (_with(num_key_value_heads=8), "num_key_value_heads is 8, wanted 1"),
    "shared": (_with(n_shared_experts=2), "n_shared_experts is 2, wanted 1"),
    "ratio": (_with(compress_ratios=[0, 0] + [16] * 42), "compress_ratios holds 16"),
    "short": (
        _with(compress_ratios=[0] * 43),
        "compress_ratios has 43 entries, wanted at least 44",
    ),
    "mtp ratio": (_with(compress_ratios=[0] * 43 + [4]), r"\[4\] after the main layers"),
    "two schedules": (_with(layer_types=[SLIDING] * 43), "layer_types contradicts compress_ratios"),
    "two routings": (
        _with(mlp_layer_types=["moe"] * 43),
        "mlp_layer_types contradicts num_hash_layers",
    ),
    "two rates": (
        _with(compress_rates={CSA: 4, HCA: 128}, compress_rate_csa=8),
        "compress_rate_csa is 8, which contradicts",
    ),
    "two widths": (_with(partial_rotary_factor=0.25), "partial_rotary_factor is 0.25"),
    "two thetas": (
        _with(rope_parameters={"main": {"rope_theta": 5.0}, "compress": {}}),
        "rope_theta is 10000.0, which contradicts",
    ),
    "two names": (_with(num_local_experts=8), "num_local_experts is 8, which contradicts"),
    "rope kind": (
        _with(rope_scaling={"type": "linear", "factor": 2}),
        "type is linear, wanted yarn",
    ),
    "rope lacks": (
        _with(rope_scaling={"type": "yarn", "factor": 2}),
        "rope_scaling lacks original",
    ),
    "amplitude (pitfall 2)": (
        _with(rope_scaling={**_with()["rope_scaling"], "attention_factor": 1.2773}),
        "attention_factor is 1.2773, wanted 1.0",
    ),
    "mscale (pitfall 2)": (
        _with(rope_scaling={**_with()["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 0.5}),
        "mscale is 1.0 and mscale_all_dim 0.5",
    ),
    "rope unknown": (
        _with(rope_scaling={**_with()["rope_scaling"], "long_factor": 1}),
        "unknown field rope_scaling.long_factor",
    ),
    "groups": (_with(o_groups=7), "num_attention_heads is 64, wanted a multiple of o_groups"),
    "experts": (_with(num_experts_per_tok=300), "wanted at most n_routed_experts"),
    "hadamard": (_with(index_head_dim=96), "index_head_dim is 96, wanted a power of two"),
    "negative": (_with(hidden_size=-1), "hidden_size is -1, wanted an integer >= 1"),
    "layers": (_with(num_hidden_layers=42), "after the main layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_file_is_refused_by_name(case):
    values, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(values)


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match=r"kv_lora_rank.*hidden_act.*head_dim is missing"):
        ModelConfig.from_dict(_without("head_dim", kv_lora_rank=1, hidden_act="relu"))


@pytest.mark.parametrize("value", [True, 64.0, "64", None])
def test_a_field_of_the_wrong_type_is_refused(value):
    with pytest.raises(ValueError, match=r"hidden_size is .*, wanted an integer"):
        ModelConfig.from_dict(_with(hidden_size=value))
    with pytest.raises(TypeError, match=r"hidden_size is .*, wanted an integer"):
        PRESETS["flash"].replace(hidden_size=value)


_YARN = PRESETS["flash"].to_dict()["rope_scaling"]


def _nested(**compress):
    """transformers' two tables, with changes of that of compressed layers."""
    tables = PRESETS["flash"].to_transformers_dict()["rope_parameters"]
    return {"main": tables["main"], "compress": {**tables["compress"], **compress}}


STRICT = {
    "rope_scaling": (
        *("", [], {}, False, True, 0, "yarn", [_YARN]),
        {"factor": 16, "original_max_position_embeddings": 65536},  # no type: YaRN was dropped
        {**_YARN, "type": None},
        {**_YARN, "type": "default"},
        {**_YARN, "type": 3},
        {**_YARN, "type": ["yarn"]},
        {**_YARN, "rope_type": "default"},
        {**_YARN, "factor": None},
        {**_YARN, "factor": "16"},
        {**_YARN, "factor": True},
        {**_YARN, "factor": 0.5},
        {**_YARN, "original_max_position_embeddings": 65536.5},
        {**_YARN, "original_max_position_embeddings": 0},
        {**_YARN, "beta_fast": 0},
        {**_YARN, "beta_slow": "1"},
        {**_YARN, "attention_factor": True},
        {**_YARN, "truncate": 1},
        {**_YARN, "rope_theta": 500},
    ),
    "rope_parameters": (
        *("", [], {}, False, 3, {"main": {}, "compress": {}}, {"main": [], "compress": 3}),
        {**_nested(), "extra": 1},
    ),
    "swiglu_limit": ("", [], {}, False, True, 0, 0.0, -1.0, float("nan"), float("inf"), "10"),
    "rms_norm_eps": (None, "", 0, -1e-6, False, [], float("nan"), 10**400),
    "hc_eps": (None, "", 0, True, [1e-6]),
    "routed_scaling_factor": (None, 0, "1.5", True, {}),
    "initializer_range": (None, "0.02"),
    "eos_token_id": (1.5, True, "1", [], [1.5], [1, None], -1, {"id": 1}, 2**31),
    "bos_token_id": (0.0, False, [0], "0", -1),
    "hidden_size": (None, 64.0, True, "64", [64], 2**31, 10**30),
    "num_nextn_predict_layers": (None, 0.0, False, -1, "1"),
    "compress_ratios": ("", 3, {}, [0.0] * 44, [False] * 44, ["0"] * 44, [[0]] * 44, [None] * 44),
    "layer_types": ("", 3, [None] * 43, [["x"]] * 43, [SLIDING] * 42),
    "mlp_layer_types": ("moe", 3, [None] * 43, ["moe"] * 42),
    "num_hash_layers": (3.0, True, "3", [3], -1),
    "compress_rates": ("", [], {}, False, {CSA: 4.7, HCA: 128}, {CSA: "4", HCA: 128}, {CSA: 4}),
    "compress_rate_csa": (0, False, "", [], 4.5, "4"),
    "rope_theta": ("10000", None, True, 1, float("inf"), [1e4]),
    "compress_rope_theta": ("", False, 0.5, {}),
    "qk_rope_head_dim": (64.0, True, "64", 63, 0, [64]),
    "partial_rotary_factor": ("0.125", True, [], 0, -0.125),
    "norm_topk_prob": (1, None, "true", [True]),
    "num_key_value_heads": (True, 1.5, None),
    "model_type": (None, 3, ["deepseek_v4"], {}),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in STRICT.items() for v in vs])
def test_a_value_of_the_wrong_kind_is_refused_by_field_and_value(field, value):
    with pytest.raises(ValueError, match=r"^config\.json: ") as caught:
        ModelConfig.from_dict(_with(**{field: value}))
    words = str(caught.value)
    assert field.removeprefix("compress_") in words or "rope" in words
    assert len(words) < 1000
    assert type(caught.value) is ValueError


@given(
    field=st.sampled_from(sorted({*PRESETS["flash"].to_dict(), *STRICT})),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
)
@example(field="compress_rates", value={CSA: 4, HCA: [128]})
@example(field="quantization_config", value=[])
@example(field="num_attention_heads", value=1)
def test_any_value_of_any_field_is_read_or_refused_by_name(field, value):
    """A file that is read is equal to what was written: no value stands for another."""
    try:
        config = ModelConfig.from_dict(_with(**{field: value}))
    except ValueError as error:
        if not str(error).startswith("config.json: "):
            raise
        return
    if field in ("swiglu_limit", "bos_token_id", "eos_token_id"):
        result = getattr(config, field)
        assert (list(result) if isinstance(result, tuple) else result) == value
        return
    effect = config != PRESETS["flash"]
    assert not effect or getattr(config, field, value) == value or "rope" in field


NULLS = ("rope_scaling", "eos_token_id", "bos_token_id", "swiglu_limit", "compress_rate_csa")


@pytest.mark.parametrize("field", [*NULLS, "rope_parameters", "layer_types", "attention_dropout"])
def test_null_where_files_have_null(field):
    config = ModelConfig.from_dict(_with(**{field: None}))
    if field == "rope_scaling":
        assert config.rope_compress.factor is None
    elif field in ("eos_token_id", "bos_token_id", "swiglu_limit"):
        assert getattr(config, field) is None
        assert ModelConfig.from_dict(config.to_dict()) == config
        assert json.loads(json.dumps(config.to_transformers_dict()))[field] is None
    else:
        assert config == PRESETS["flash"]


def test_a_limit_of_zero_is_not_taken_for_no_limit():
    words = "swiglu_limit is 0.0, wanted a number > 0, or null for no clamp: DeepSeek's code reads"
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(_with(swiglu_limit=0.0))


def test_tables_of_transformers_files():
    flash = PRESETS["flash"].to_transformers_dict()
    flat = {**flash, "rope_parameters": {**_YARN, "rope_theta": 160000.0}}
    assert ModelConfig.from_dict(flat) == PRESETS["flash"]
    both = {**flash, "rope_scaling": _YARN}
    assert ModelConfig.from_dict(both) == PRESETS["flash"]
    for change, words in (
        ({"rope_scaling": {**_YARN, "factor": 8}}, "rope_scaling contradicts rope_parameters"),
        ({"rope_parameters": _nested(rope_type=None)}, "has no type"),
        ({"rope_parameters": _nested(rope_type="linear")}, "type is linear, wanted yarn"),
        ({"rope_parameters": {"main": _nested()["main"]}}, "rope_parameters.compress is None"),
    ):
        with pytest.raises(ValueError, match=words):
            ModelConfig.from_dict({**flash, **change})


@pytest.mark.parametrize("version", ["deepseek_v41", "deepseek_v41_text"])
def test_the_next_architecture_is_refused_in_one_sentence(version):
    differs = (
        r"DeepSeek-V4\.1 is another architecture \(40 layers, hidden size 5120, 384 experts, "
        r"single-pass hyper-connections, Engram tables\), which is not implemented here$"
    )
    nested = {"model_type": version, "text_config": {"hidden_size": 5120}, "vision_config": {}}
    for values in (nested, _with(model_type=version)):
        with pytest.raises(
            ValueError, match=rf"^config\.json: model_type is '{version}'.*{differs}"
        ):
            ModelConfig.from_dict(values)
    for field in ("engram_layer_ids", "kv_source_layer_ids", "candidate_source_layer_id"):
        with pytest.raises(ValueError, match=rf"^config\.json: {field} is a field of .*{differs}"):
            ModelConfig.from_dict(_with(**{field: [1, 14]}))


def test_another_model_is_one_clause():
    for values, words in (
        ({"model_type": "llama", "hidden_size": 4096}, "model_type is 'llama', wanted"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architectures is \['LlamaForCausalLM'\], wanted",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^config\.json: {words} '?[dD]eepseek\w+'?$"):
            ModelConfig.from_dict(values)
    assert ModelConfig.from_dict(_with(architectures=["MyOwnName"])) == PRESETS["flash"]


@pytest.mark.parametrize(
    "field",
    [
        *("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "rope_interleave", "index_topk_freq"),
        *("num_experts", "n_experts", "attn_logit_softcapping", "final_logit_softcapping"),
        *("sliding_window_pattern", "router_scale", "text_config.hidden_size", "logitsScale"),
        *("kHeads", "layerNormEps", "use_qk_norm", "embedding_multiplier", "rope_local_base_freq"),
    ],
)
def test_an_unknown_field_that_speaks_of_the_model_is_refused(field):
    with pytest.raises(ValueError, match=rf"unknown field {field} \(by its name it may change"):
        ModelConfig.from_dict(_with(**{field: 2}))
    assert ModelConfig.from_dict(_with(**{field: None})) == PRESETS["flash"]  # not set


def test_any_other_unknown_field_is_named_in_a_warning():
    mine = {"run_name": "a", "my_note": {"x": 1}, "experiment_id": 3, "": 1, 5: 2, "x" * 9999: 1}
    with pytest.warns(
        UserWarning, match="ignored without effect: .*experiment_id.*run_name"
    ) as log:
        assert (
            ModelConfig.from_dict(_with(**{str(k): v for k, v in mine.items()})) == PRESETS["flash"]
        )
    assert len(str(log[0].message)) < 500
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = dict.fromkeys(("sep_token_id", "packed_modules_mapping", "unsloth_version"), 3)
        assert ModelConfig.from_dict(_with(**quiet)) == PRESETS["flash"]


@pytest.mark.parametrize("with_yarn", [True, False])
def test_what_transformers_saves_today_is_read_without_a_warning(tmp_path, with_yarn):
    transformers = pytest.importorskip("transformers")
    config = PRESETS["tiny"]
    if not with_yarn:
        config = config.replace(rope_compress=RopeParameters(160000.0, config.qk_rope_head_dim))
    theirs = transformers.DeepseekV4Config(**config.to_transformers_dict())
    theirs.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModelConfig.from_path(tmp_path) == config
        assert ModelConfig.of(theirs, numerics="deepseek") == config
    theirs.run_name = "a user's own"
    with pytest.warns(UserWarning, match="'run_name'"):
        assert ModelConfig.of(theirs, numerics="deepseek") == config


def test_a_quantisation_table_of_the_wrong_kind():
    for table, words in (
        ("fp8", "quantization_config is 'fp8', wanted a table"),
        ({"quant_method": ["fp8"]}, "quant_method is"),
        ({"moe_quant_algo": ["NVFP4"]}, "moe_quant_algo is"),
    ):
        with pytest.raises(ValueError, match=words):
            producer({"quantization_config": table})


def test_fields_without_effect_are_accepted():
    values = _with(
        compress_ratios=[*_with()["compress_ratios"], 0, 0],
        dspark_block_size=None,
        torch_dtype="bfloat16",
        use_cache=True,
        transformers_version="5.8.0",
        attention_dropout=0.0,
        quantization_config={"quant_method": "fp8"},
        swiglu_limit=10.0,
        expert_dtype="fp4",
    )
    assert ModelConfig.from_dict(values) == PRESETS["flash"]


DSPARK = DSparkConfig(
    block_size=5, noise_token_id=128799, target_layer_ids=(40, 41, 42), markov_rank=256
)


def _draft(**changes):
    """DeepSeek's file of Flash with a DSpark draft."""
    values = ModelConfig.flash(dspark=DSPARK).to_dict()
    return {k: v for k, v in {**values, **changes}.items() if v is not None}


@pytest.mark.parametrize(
    "dspark",
    [
        DSPARK,
        replace(DSPARK, n_routed_experts=128, num_experts_per_tok=3),
        replace(DSPARK, target_layer_ids=(3,), confidence_head=False),
    ],
)
def test_a_dspark_draft_is_read_and_written(dspark):
    config = ModelConfig.flash(dspark=dspark)
    for values in (config.to_dict(), config.to_transformers_dict()):
        assert ModelConfig.from_json(json.dumps(values)) == config
    assert ModelConfig.of(transformers.DeepseekV4Config(**config.to_transformers_dict())) == (
        config.replace(numerics="transformers")
    )
    assert hash(config) != hash(ModelConfig.flash())


def test_stages_are_counted_by_the_target_layers():
    config = ModelConfig.from_dict(_draft())
    assert config.num_nextn_predict_layers == 1
    assert (config.draft_layers, config.total_layers) == (3, 46)
    assert config.to_dict()["compress_ratios"] == _draft()["compress_ratios"]
    assert [config.layer_type(i) for i in (43, 44, 45)] == [SLIDING] * 3
    assert config.rope(45) == config.rope_main
    assert not config.is_hash(43)
    assert (config.raw_history, ModelConfig.flash().raw_history) == (128, 127)
    assert config.without_draft().total_layers == 43
    assert ModelConfig.flash().dspark is ModelConfig.pro().dspark is None
    other = ModelConfig.flash(dspark=replace(DSPARK, n_routed_experts=9, num_experts_per_tok=2))
    assert (other.stage.n_routed_experts, other.stage.num_experts_per_tok) == (9, 2)
    with pytest.raises(ValueError, match="stage: dspark is None"):
        _ = ModelConfig.flash().stage


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dspark_block_size": None}, "dspark_block_size missing beside dspark_noise_token_id"),
        ({"dspark_block_size": 0}, "dspark_block_size is 0, wanted an integer >= 1"),
        ({"dspark_block_size": 65}, "dspark_block_size is 65, wanted at most 64"),
        ({"dspark_noise_token_id": 129280}, "noise_token_id is 129280, wanted a token of the voc"),
        ({"dspark_noise_token_id": True}, "noise_token_id is True, wanted an integer >= 0"),
        ({"dspark_markov_rank": "256"}, "dspark_markov_rank is '256', wanted an integer >= 1"),
        ({"dspark_target_layer_ids": [41, 42, 43]}, r"\[41, 42, 43\], wanted layers 0 to 42"),
        ({"dspark_target_layer_ids": [42, 41, 40]}, "wanted a list of ascending layer numbers"),
        ({"dspark_target_layer_ids": []}, "wanted a list of ascending layer numbers"),
        ({"dspark_target_layer_ids": 40}, "wanted a list of ascending layer numbers"),
        (
            {"dspark_target_layer_ids": [41, 42]},
            r"compress_ratios has 46 entries, which contradicts num_hidden_layers \(43\) and the 2",
        ),
        ({"dspark_n_routed_experts": 5}, "a DSpark stage chooses 6 of 5 experts"),
        ({"enable_confidence_head": 1}, "enable_confidence_head is 1, wanted true or false"),
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated', wanted 'vanilla'"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False, wanted True"),
        ({"dspark_gamma": 2}, "unknown field dspark_gamma"),
    ],
)
def test_contradictory_fields_of_a_dspark_draft(changes, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig.from_dict(_draft(**changes))


def test_modes_and_replacement():
    config = ModelConfig.tiny(numerics="transformers", activation="nvfp4")
    assert (config.numerics, config.activation) == ("transformers", "nvfp4")
    assert ModelConfig.of(config) is config
    assert config.replace(qk_rope_head_dim=8).rope_compress.dim == 8
    assert len(ModelConfig.tiny(num_hidden_layers=7).layer_types) == 7
    for name in ("numerics", "activation"):
        with pytest.raises(ValueError, match=f"{name} is 'fp3'"):
            config.replace(**{name: "fp3"})
    with pytest.raises(AttributeError):
        config.hidden_size = 1  # type: ignore[misc]


def test_tiny_covers_every_kind_of_layer():
    config = ModelConfig.tiny()
    assert set(config.layer_types) == set(LAYER_TYPES)
    assert set(config.mlp_layer_types) == {"hash_moe", "moe"}
    assert config.num_nextn_predict_layers == 1


def test_a_file_on_disk(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PRESETS["pro"].to_dict()))
    assert ModelConfig.from_path(tmp_path) == ModelConfig.from_path(file) == PRESETS["pro"]
    file.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelConfig.from_path(tmp_path)
    file.write_text("[]")
    with pytest.raises(ValueError, match="holds list, wanted a table"):
        ModelConfig.from_path(tmp_path)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (None, "none"),
        ({"quant_method": "fp8"}, "deepseek"),
        ({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, "nvidia"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "modelopt"}, "modelopt"),
    ],
)
def test_moe_quant_algo_first_names_the_producer(table, name):
    assert producer({"quantization_config": table}) == name


def test_an_unknown_producer_is_refused():
    with pytest.raises(ValueError, match="quant_method is 'awq'"):
        producer({"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ValueError, match="moe_quant_algo is 'W4A8'"):
        producer({"quantization_config": {"moe_quant_algo": "W4A8"}})
