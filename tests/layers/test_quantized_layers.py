"""Quantised linear layers, experts, fused projections and calibration."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import layers
from dsv4.checkpoint.expert_slots import ExpertsSlot
from dsv4.config import ModelConfig
from dsv4.layers.observer import LARGEST
from dsv4.ops import dequantize, gemm, quantize
from dsv4.quant.formats import FORMATS, SWIZZLED, QuantizedTensor, cat_rows
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, gemm_budget
from dsv4.testing.models import dense_state_dict, random_model, randomize_, transformers_twin
from tests.layers.experts_cases import quantize_apart

EXACT = 1e-12
FORMAT_NAMES = st.sampled_from(sorted(FORMATS))


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor, relative: float = EXACT) -> bool:
    return bool((a - b).norm() <= relative * b.norm())


def linear(seed: int, rows: int, columns: int, format: str | None, **kwargs) -> layers.Linear:
    module = layers.Linear(columns, rows, **kwargs).requires_grad_(False)
    module.set_weight(normal(seed, rows, columns).float())
    if format is not None:
        module.quantize(format)
    return module


@given(FORMAT_NAMES, st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 40))
def test_a_quantised_linear_multiplies_by_its_dense_weight(
    format: str, seed: int, tokens: int, rows: int
) -> None:
    module = linear(seed, rows, 64, format)
    x = normal(seed + 1, tokens, 64)
    assert module.format == FORMATS[format]
    assert close(module(x), x @ module.dense_weight(torch.float64).T)


@given(FORMAT_NAMES, st.integers(0, 2**31))
def test_a_quantised_grouped_linear_is_one_linear_per_group(format: str, seed: int) -> None:
    module = layers.DeepseekV4GroupedLinear(64, 3 * 10, 3).requires_grad_(False)
    module.set_weight(normal(seed, 30, 64))
    x = normal(seed + 1, 2, 5, 3, 64)
    for _ in range(2):
        parts = module.dense_weight(torch.float64).chunk(3)
        expected = torch.stack([x[..., g, :] @ w.T for g, w in enumerate(parts)], -2)
        assert close(module(x), expected)
        if module.format is None:
            module.quantize(format)


@given(st.integers(0, 2**31), st.booleans())
def test_nvfp4_activations_are_quantised_before_the_product(seed: int, static: bool) -> None:
    module = linear(seed, 24, 64, "nvfp4", activation="nvfp4")
    x = normal(seed + 1, 6, 64)
    scale = (x.abs().amax() / LARGEST).float().reshape(1)
    if static:
        module.set_weight(module.quantized_weight(), scale)
        rounded = quantize(x, global_scale=scale, scaling="static")
    else:
        rounded = quantize(x, scaling="token")
    dense = dequantize(rounded, torch.float64)
    assert not close(dense, x, 1e-3)
    assert close(module(x), dense @ module.dense_weight(torch.float64).T)


def test_plain_weights_leave_activations_alone() -> None:
    module = linear(1, 24, 64, None, activation="nvfp4").double()
    x = normal(2, 6, 64)
    assert torch.equal(module(x), x @ module.weight.T)


def test_set_weight_refuses_and_changes_nothing() -> None:
    module = linear(1, 24, 64, "nvfp4")
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"weight has shape \[24, 32\], wanted \[24, 64\]"):
        module.set_weight(torch.zeros(24, 32))
    fused = cat_rows([linear(s, 12, 64, "nvfp4").quantized_weight() for s in (1, 2)])
    with pytest.raises(ValueError, match="has segments"):
        module.set_weight(fused)
    with pytest.raises(ValueError, match="nvfp4 already"):
        module.quantize()
    with pytest.raises(ValueError, match="weight is plain"):
        linear(1, 24, 64, None).quantized_weight()
    for name, value in module.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8))


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3), st.sampled_from(["bf16", "nvfp4"]))
def test_pitfall_28_fused_parts_keep_their_own_global_scale(
    seed: int, ratio: float, activation: str
) -> None:
    """q_a and kv in one product, with global scales that differ by any ratio."""
    q_a = linear(seed, 32, 64, "nvfp4", activation=activation)
    kv = layers.Linear(64, 16, activation=activation).requires_grad_(False)
    kv.set_weight(ratio * normal(seed + 1, 16, 64).float())
    kv.quantize()
    assert float(q_a.weight_scale_2) != float(kv.weight_scale_2)
    x = normal(seed + 2, 5, 64)
    fused = layers.fused_linear([q_a, kv], x)
    for result, alone in zip(fused, (q_a(x), kv(x)), strict=True):
        assert close(result, alone)
    # One shared maximum, what pitfall 28 warns of, is far off.
    joined = cat_rows([q_a.quantized_weight(), kv.quantized_weight()])
    assert joined.segments == (32, 16)
    shared = QuantizedTensor(
        joined.codes, joined.scales, joined.global_scale.amax(0, keepdim=True), joined.format
    )
    wrong = gemm(x, shared, activation=activation)
    if not 0.5 < ratio < 2:
        assert not close(wrong, torch.cat(fused, -1), 1e-2)


def test_pitfall_27_fused_parts_take_the_larger_input_scale() -> None:
    """The smaller one would clip what the other part was calibrated to see."""
    parts = [linear(s, 16, 64, "nvfp4", activation="nvfp4") for s in (1, 2)]
    x = normal(3, 4, 64)
    scale = (x.abs().amax() / LARGEST).float().reshape(1)
    for part, factor in zip(parts, (1.0, 0.1), strict=True):
        part.set_weight(part.quantized_weight(), scale * factor)
    rounded = dequantize(quantize(x, global_scale=scale, scaling="static"), torch.float64)
    for result, part in zip(layers.fused_linear(parts, x), parts, strict=True):
        assert close(result, rounded @ part.dense_weight(torch.float64).T)


@pytest.mark.parametrize("without", [0, 1])
def test_pitfall_26_a_fused_part_without_an_input_scale_does_not_borrow_one(without: int) -> None:
    """The other part's scale says nothing about it: the input is quantised per token."""
    parts = [linear(s, 16, 64, "nvfp4", activation="nvfp4") for s in (1, 2)]
    x = normal(3, 4, 64) * torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    scale = (x.abs().amax() / LARGEST).float().reshape(1)
    parts[1 - without].set_weight(parts[1 - without].quantized_weight(), scale)
    rounded = dequantize(quantize(x, scaling="token"), torch.float64)
    for result, part in zip(layers.fused_linear(parts, x), parts, strict=True):
        assert result.isfinite().all()
        assert close(result, rounded @ part.dense_weight(torch.float64).T)


@given(FORMAT_NAMES, st.integers(0, 2**31), st.integers(0, 9), st.sampled_from([1, 2, 3]))
@settings(max_examples=20)
def test_quantised_experts_are_their_dense_weights(
    format: str, seed: int, tokens: int, top_k: int
) -> None:
    config = ModelConfig.tiny(
        num_experts_per_tok=top_k, moe_intermediate_size=128, numerics="transformers"
    )
    experts = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), seed)
    dense = layers.DeepseekV4Experts(config).requires_grad_(False).double()
    experts.quantize(format)
    dense.load_state_dict(dense_state_dict(experts, torch.float64))
    generator = torch.Generator().manual_seed(seed)
    x = normal(seed, tokens, config.hidden_size)
    ids = torch.randint(0, config.n_routed_experts + 1, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    actual = experts(x, ids, weights)
    assert close(actual, dense(x, ids, weights))
    expected = torch.zeros_like(x)
    for t in range(tokens):
        for j in range(top_k):
            e = int(ids[t, j])
            if e == config.n_routed_experts:
                continue  # the "no expert" index
            gate, up = (dense.gate_up_proj[e] @ x[t]).chunk(2)
            gate, up = gate.clamp(max=10), up.clamp(-10, 10)
            h = gate * torch.sigmoid(gate) * up
            expected[t] += weights[t, j] * (dense.down_proj[e] @ h)
    assert close(actual, expected)


@given(st.integers(0, 2**31))
@settings(max_examples=5)
def test_pitfall_32_the_clamp_acts_on_real_values(seed: int) -> None:
    """The clamp does not act on sums that still lack their global scale, about 1e-3 here."""
    config = ModelConfig.tiny(num_experts_per_tok=1, numerics="transformers")
    experts = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), seed)
    experts.quantize()
    assert experts.gate_up_proj_scale_2.max() < 0.01
    x = 20 * normal(seed, 12, config.hidden_size)
    ids = torch.arange(12).remainder(config.n_routed_experts).unsqueeze(1)
    result = experts(x, ids, torch.ones(12, 1, dtype=torch.float64))
    gate_up, down = (
        experts.dense_weight(name, torch.float64)[ids[:, 0]]
        for name in ("gate_up_proj", "down_proj")
    )
    gate, up = torch.einsum("tnk,tk->tn", gate_up, x).chunk(2, -1)
    assert (gate > config.swiglu_limit).any()
    assert (up.abs() > config.swiglu_limit).any()
    assert (gate.abs() < 1).any()
    gate = gate.clamp(max=config.swiglu_limit)
    inner = gate * gate.sigmoid() * up.clamp(-config.swiglu_limit, config.swiglu_limit)
    assert close(result, torch.einsum("tnk,tk->tn", down, inner))


@given(st.integers(0, 2**31), st.floats(0.1, 10))
@settings(max_examples=5)
def test_pitfall_32_the_shared_expert_clamps_real_values(seed: int, ratio: float) -> None:
    """This holds with quantised weights, and with one limit for gate and up of any scales."""
    config = ModelConfig.tiny()
    mlp = randomize_(layers.DeepseekV4MLP(config).requires_grad_(False), seed)
    mlp.up_proj.weight *= ratio
    for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        part.quantize()
        assert part.weight_scale_2.max() < 0.01
    x = 20 * normal(seed, 12, config.hidden_size)
    gate, up = (x @ part.dense_weight(torch.float64).T for part in (mlp.gate_proj, mlp.up_proj))
    limit = config.swiglu_limit
    assert (gate > limit).any()
    assert (gate < -limit).any()
    gate = gate.clamp(max=limit)
    inner = gate * gate.sigmoid() * up.clamp(-limit, limit)
    assert close(mlp(x), inner @ mlp.down_proj.dense_weight(torch.float64).T)


def test_gate_and_up_keep_their_own_global_scale() -> None:
    config = ModelConfig.tiny()
    experts = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), 1)
    experts.gate_up_proj[:, : config.moe_intermediate_size] *= 100
    plain = copy.deepcopy(experts)
    quantize_apart(experts)
    scales = experts.gate_up_proj_scale_2
    assert scales.shape == (config.n_routed_experts, 2)
    assert (scales[:, 0] > 10 * scales[:, 1]).all()
    plain.quantize()
    assert torch.equal(plain.gate_up_proj_scale_2, scales.amax(1, keepdim=True).expand(-1, 2))


@given(FORMAT_NAMES, st.integers(0, 2**31))
@settings(max_examples=10)
def test_stacking_expert_by_expert_copies_bits(format: str, seed: int) -> None:
    config = ModelConfig.tiny(moe_intermediate_size=128, hidden_size=128, n_routed_experts=3)
    experts = layers.DeepseekV4Experts(config).requires_grad_(False)
    experts.to_format(format, input_scale=format == "nvfp4")
    matrices = {}
    for e in range(3):
        matrices[e] = [
            quantize(normal(seed + 3 * e + i, 128, 128).float(), format) for i in range(3)
        ]
        scales = (torch.tensor(1.0 + e), torch.tensor(2.0 + e)) if format == "nvfp4" else None
        experts.set_expert(e, *matrices[e], input_scales=scales)
    for e, (gate, up, down) in matrices.items():
        dense = dequantize(experts.quantized_weight("gate_up_proj"))[e]
        assert torch.equal(dense, torch.cat([dequantize(gate), dequantize(up)]))
        assert torch.equal(experts.dense_weight("down_proj")[e], dequantize(down))
    if format == "nvfp4":
        assert experts.gate_up_proj_input_scale.tolist() == [1.0, 2.0, 3.0]
        assert experts.down_proj_input_scale.tolist() == [2.0, 3.0, 4.0]


def a_range(whole: layers.DeepseekV4Experts, config: ModelConfig, first: int, count: int | None):
    """The experts of a range, quantised as they are in the whole."""
    part = layers.DeepseekV4Experts(config, first, count).requires_grad_(False)
    if whole.format is None:
        held = slice(first, first + part.num_local_experts)
        part.gate_up_proj = torch.nn.Parameter(whole.gate_up_proj[held], requires_grad=False)
        part.down_proj = torch.nn.Parameter(whole.down_proj[held], requires_grad=False)
        return part
    part.to_format(whole.format)
    for i in range(part.num_local_experts):
        part.set_expert(i, *whole.get_expert(first + i))
    return part


@given(
    seed=st.integers(0, 2**31),
    cut=st.integers(1, 4),
    tokens=st.integers(0, 9),
    numerics=st.sampled_from(["deepseek", "transformers"]),
    kind=st.sampled_from(["plain", "nvfp4", "packed"]),
)
@settings(max_examples=20)
def test_ranges_of_experts_add_up_to_the_whole(
    seed: int, cut: int, tokens: int, numerics: str, kind: str
) -> None:
    config = ModelConfig.tiny(
        n_routed_experts=5, hidden_size=64, moe_intermediate_size=64, numerics=numerics
    )
    whole = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False).double(), seed)
    if kind != "plain":
        whole.quantize()
    parts = [a_range(whole, config, 0, cut), a_range(whole, config, cut, None)]
    if kind == "packed":
        for layer in (whole, *parts):
            layer.pack()
    generator = torch.Generator().manual_seed(seed)
    x, shared = normal(seed, tokens, 64), normal(seed + 1, tokens, 64)
    ids = torch.randint(-1, 6, (tokens, 3), generator=generator)
    weights = torch.rand(tokens, 3, generator=generator, dtype=torch.float64)
    sums = parts[0](x, ids, weights, shared) + parts[1](x, ids, weights)
    assert close(sums, whole(x, ids, weights, shared))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
@pytest.mark.parametrize("tokens", [0, 1, 9, 300])
def test_packed_ranges_add_up_on_a_gpu(tokens: int, activation: str) -> None:
    """They are equal up to the rounding of each range's result, and between the GEMMs."""
    config = ModelConfig.tiny(
        n_routed_experts=16, hidden_size=256, moe_intermediate_size=128, activation=activation
    )
    whole = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), 1)
    whole.quantize()
    parts = [a_range(whole, config, 0, 5), a_range(whole, config, 5, None)]
    for layer in (whole, *parts):
        layer.pack()
        layer.cuda()
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = normal(seed, tokens, 256).bfloat16().cuda()
        ids = torch.randint(-1, 17, (tokens, 3), generator=generator).cuda()
        weights = torch.rand(tokens, 3, generator=generator).cuda()
        sums = sum(part(x, ids, weights).double() for part in parts)
        expected = whole(x, ids, weights).double()
        assert (sums - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (5, None), (3, 3), (0, 0)])
def test_a_range_of_no_experts_is_refused(first: int, count: int | None) -> None:
    config = ModelConfig.tiny(n_routed_experts=5)
    with pytest.raises(ValueError, match=rf"first_expert is {first} .* wanted a range of 0\.\.4"):
        layers.DeepseekV4Experts(config, first, count)


def test_a_range_is_named_and_read_by_its_experts_numbers() -> None:
    config = ModelConfig.tiny(n_routed_experts=5)
    part = layers.DeepseekV4Experts(config, 2, 3)
    assert repr(part).startswith("DeepseekV4Experts(2 to 4 of 5 experts")
    assert part.gate_up_proj.shape[0] == 3
    slot = ExpertsSlot("layers.3.ffn.experts", part)
    assert slot.names_of(0)[0] == "layers.3.ffn.experts.2.gate_proj.weight"


def test_fp8_blocks_may_not_straddle_gate_and_up() -> None:
    experts = layers.DeepseekV4Experts(ModelConfig.tiny()).requires_grad_(False)
    with pytest.raises(ValueError, match="intermediate size is 32, wanted a multiple of 128"):
        experts.quantize("fp8_block")
    assert experts.format is None
    assert experts.gate_up_proj.dtype == torch.float32


def test_set_expert_refuses_and_changes_nothing() -> None:
    config = ModelConfig.tiny()
    experts = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), 1)
    experts.quantize()
    before = {k: v.clone() for k, v in experts.state_dict().items()}
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    good = quantize(torch.randn(inner, hidden))
    down = quantize(torch.randn(hidden, inner))
    with pytest.raises(ValueError, match=r"expert is 8, wanted 0\.\.7"):
        experts.set_expert(8, good, good, down)
    with pytest.raises(ValueError, match=r"down has shape \[32, 64\], wanted \[64, 32\]"):
        experts.set_expert(0, good, good, good)
    with pytest.raises(ValueError, match="up is plain, wanted nvfp4"):
        experts.set_expert(0, good, torch.randn(inner, hidden), down)
    unit_scale = torch.ones(())
    for changes, words in (
        (
            {"layout": SWIZZLED, "scales": good.with_layout(SWIZZLED).scales},
            "layout 'swizzled_128x4', wanted 'linear'",
        ),
        ({"scales": good.scales[:, :1]}, r"gate has scales \[32, 1\] of .*, wanted \[32, 4\]"),
        ({"scales": good.scales.float()}, "of torch.float32, wanted .* of torch.float8_e4m3fn"),
        ({"global_scale": torch.ones(inner)}, r"gate's global scale has shape \[32\], wanted one"),
        ({"global_scale": None}, "gate's global scale is missing, wanted one"),
        ({"global_scale": unit_scale * torch.nan}, "gate's global scale"),
        ({"global_scale": unit_scale * 0}, "gate's global scale"),
    ):
        parts = {f.name: getattr(good, f.name) for f in dataclasses.fields(good)}
        with pytest.raises(ValueError, match=words):
            experts.set_expert(0, QuantizedTensor(**{**parts, **changes}), good, down)
    with pytest.raises(ValueError, match="input scale of gate_up_proj is given, wanted none"):
        experts.set_expert(0, good, good, down, (unit_scale, unit_scale))
    for name, value in experts.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8))


def test_set_expert_takes_input_scales_where_they_are_declared() -> None:
    config = ModelConfig.tiny()
    experts = layers.DeepseekV4Experts(config).requires_grad_(False)
    experts.to_format("nvfp4", input_scale=True)
    gate = quantize(torch.randn(config.moe_intermediate_size, config.hidden_size))
    down = quantize(torch.randn(config.hidden_size, config.moe_intermediate_size))
    unit_scale = torch.ones(())
    before = {k: v.clone() for k, v in experts.state_dict().items()}
    for scales, words in (
        (None, "input scale of gate_up_proj is missing, wanted one"),
        (
            (unit_scale, torch.ones(2)),
            r"input scale of down_proj has shape \[2\], wanted one value",
        ),
        ((unit_scale, unit_scale * 0), "input scale of down_proj"),
        ((unit_scale * torch.inf, unit_scale), "input scale of gate_up_proj"),
    ):
        with pytest.raises(ValueError, match=words):
            experts.set_expert(0, gate, gate, down, scales)
    for name, value in experts.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8))
    experts.set_expert(0, gate, gate, down, (unit_scale, 2 * unit_scale))
    assert experts.down_proj_input_scale[0] == 2


def test_quantize_by_name() -> None:
    model = random_model(ModelConfig.tiny(), 1)
    names = layers.quantize_(model, "nvfp4", ["*.mlp.experts"])
    assert names == tuple(f"model.layers.{i}.mlp.experts" for i in range(4))
    assert model.model.layers[0].self_attn.q_a_proj.format is None
    with pytest.raises(ValueError, match="no plain layer matches"):
        layers.quantize_(model, "nvfp4", ["*.mlp.experts"])


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_mixed_model_equals_transformers_with_dense_weights(format: str) -> None:
    model = random_model(ModelConfig.tiny(numerics="transformers"), 3)
    layers.quantize_(model, "nvfp4", ["*.mlp.experts", "*.kv_proj"])
    layers.quantize_(model, format, ["*.self_attn.*", "*.shared_experts.*"])
    ids = torch.arange(37)[None]
    with torch.no_grad():
        actual, expected = model(ids), transformers_twin(model)(ids).logits
    assert close(actual, expected, 1e-5)


def test_calibration_sets_scales_from_the_largest_activation_and_freezes_them() -> None:
    config = ModelConfig.tiny(activation="nvfp4")
    model = random_model(config, 1)
    layers.quantize_(model)
    probe = model.model.layers[1].mlp.shared_experts.gate_proj
    seen = []
    hook = probe.register_forward_pre_hook(lambda m, a: seen.append(a[0].abs().max()))
    batches = [torch.arange(30)[None], torch.arange(30, 60)[None], torch.arange(30)[None]]
    with torch.no_grad(), layers.calibrate(model) as report:
        for batch in batches:
            model(batch)
    hook.remove()
    assert seen[-1] < max(seen)  # the last batch alone would give another scale
    assert probe.input_scale.item() == pytest.approx(float(max(seen)) / LARGEST, rel=1e-6)
    assert "model.layers.1.mlp.experts" in report.calibrated
    assert report.unseen == []
    frozen = {k: v.clone() for k, v in model.state_dict().items() if k.endswith("input_scale")}
    assert len(frozen) > 40
    with torch.no_grad():
        out = model(torch.arange(60, 90)[None])
    assert out.isfinite().all()
    for name, value in frozen.items():
        assert torch.equal(model.state_dict()[name], value)
        assert value.isfinite().all()
        assert (value > 0).all()


def test_calibration_does_not_quantise_while_it_looks() -> None:
    config = ModelConfig.tiny(activation="nvfp4")
    model = random_model(config, 1)
    layers.quantize_(model)
    plain = random_model(config.replace(activation="bf16"), 1)
    layers.quantize_(plain)
    ids = torch.arange(30)[None]
    with torch.no_grad(), layers.calibrate(model):
        assert torch.equal(model(ids), plain(ids))
    with torch.no_grad():
        assert not torch.equal(model(ids), plain(ids))


def test_an_expert_without_tokens_takes_the_largest_scale() -> None:
    config = ModelConfig.tiny()
    experts = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), 1)
    experts.quantize()
    x = normal(1, 4, config.hidden_size).float()
    x[1] *= 7
    ids = torch.tensor([[0, 1], [1, 0], [2, 0], [0, 2]])
    with layers.calibrate(experts):
        experts(x, ids, torch.ones(4, 2))
    scale = experts.gate_up_proj_input_scale
    assert scale[2] == pytest.approx(float(x[2:].abs().max()) / LARGEST, rel=1e-6)
    assert (scale[3:] == scale.max()).all()
    assert scale.max() == scale[1]


def test_a_calibration_that_fails_changes_nothing() -> None:
    model = random_model(ModelConfig.tiny(), 1)
    with pytest.raises(ValueError, match="no NVFP4 layer"), layers.calibrate(model):
        pass
    layers.quantize_(model)
    bad = torch.full((1, 3), model.config.vocab_size)
    with pytest.raises(ValueError, match="the vocabulary"), layers.calibrate(model):
        model(torch.cat([torch.arange(30)[None], bad], 1))
    assert not any(k.endswith("input_scale") for k in model.state_dict())
    with (
        pytest.raises(ValueError, match="being calibrated already"),
        layers.calibrate(model),
        layers.calibrate(model),
    ):
        pass
    assert all(getattr(m, "observer", None) is None for m in model.modules())
    with layers.calibrate(model) as report:
        pass
    assert report.calibrated == []
    assert len(report.unseen) > 40


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(96,), (0, 96), (1, 96), (2, 5, 96), (300, 96)])
def test_a_plain_weight_in_bfloat16_gives_sums_of_float32(where, shape):
    """Compressors need this of the weights that checkpoints leave in bfloat16."""
    generator = torch.Generator().manual_seed(len(shape))
    linear = layers.Linear(96, 40).to(torch.bfloat16).to(where).requires_grad_(False)
    linear.weight.copy_(torch.randn(40, 96, generator=generator))
    x = torch.randn(*shape, generator=generator).bfloat16().to(where)
    result = linear(x, torch.float32)
    assert result.dtype == torch.float32
    assert result.shape == (*shape[:-1], 40)
    left, right = x.double().reshape(-1, 96), linear.weight.double()
    budget = gemm_budget(left, right, torch.float32)
    assert_within_budget(result.reshape(-1, 40), left @ right.T, budget, "product")
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(x, torch.float32), result)
