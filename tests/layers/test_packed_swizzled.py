"""Weights packed for Blackwell's tensor cores: scales moved, codes as they were, nothing lost."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import layers
from dsv4.config import ModelConfig
from dsv4.layers.fusion import fused_linear, fused_swiglu
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED, cat_rows
from dsv4.testing import strategies
from dsv4.testing.models import random_model
from tests.layers.packed_cases import normal, raw, same_state
from tests.layers.test_packed_layers import config_of, linear, random_bytes, routed, routing, shares

rows_ = st.sampled_from([16, 48, 128, 144])
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])


@given(strategies.seeds(), st.integers(0, 3), rows_, st.integers(2, 9), ACTIVATIONS)
def test_a_layer_gives_the_same_bits_and_comes_back(seed, tokens, rows, blocks, activation):
    layer = linear(seed, rows, 16 * blocks, activation)
    x = normal(seed + 1, tokens, 16 * blocks)
    expected, before = layer(x), {k: v.clone() for k, v in layer.state_dict().items()}
    layer.pack(SWIZZLED)
    assert layer.layout == SWIZZLED
    assert torch.equal(layer(x), expected)
    same_state(layer.state_dict(), before)
    layer.pack(SWIZZLED)
    layer.unpack()
    assert layer.layout == LINEAR
    same_state(layer.state_dict(), before)


@given(strategies.seeds())
def test_from_one_packed_layout_to_the_other(seed):
    layer = linear(seed, 32, 64, "nvfp4")
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    for layout in (FRAGMENTS, SWIZZLED, FRAGMENTS):
        layer.pack(layout)
        assert layer.layout == layout
        same_state(layer.state_dict(), before)


@given(strategies.seeds(), st.sampled_from([(128, 16), (256, 128), (128, 384)]), ACTIVATIONS)
def test_layers_after_each_other_share_a_matrix(seed, rows, activation):
    plain = [linear(seed + i, n, 64, activation) for i, n in enumerate(rows)]
    joined = copy.deepcopy(plain)
    for layer in joined:
        layer.pack(SWIZZLED)
    assert layers.join_weights(joined)
    assert shares(joined)
    assert joined[0].fused.layout == SWIZZLED
    x = normal(seed + 5, 3, 64)
    for part, expected in zip(fused_linear(joined, x), fused_linear(plain, x), strict=True):
        assert torch.equal(part, expected)
    for layer, old in zip(joined, plain, strict=True):
        assert torch.equal(layer(x), old(x))
        assert torch.equal(raw(layer.dense_weight()), raw(old.dense_weight()))
        same_state(layer.state_dict(), old.state_dict())
    joined[0].unpack()
    assert joined[0].fused is None
    assert torch.equal(joined[0](x), plain[0](x))


def test_layers_that_would_share_a_block_of_scales_do_not():
    parts = [linear(i, n, 64) for i, n in enumerate((48, 128))]
    for layer in parts:
        layer.pack(SWIZZLED)
    assert not layers.join_weights(parts)
    assert cat_rows([layer.quantized_weight() for layer in parts]).layout == LINEAR
    assert cat_rows([layer.quantized_weight() for layer in parts[::-1]]).layout == SWIZZLED
    parts[0].pack(FRAGMENTS)
    assert not layers.join_weights(parts)


@given(strategies.seeds(), st.sampled_from([16, 80, 128]), ACTIVATIONS)
def test_gate_and_up_interleaved(seed, rows, activation):
    plain = [linear(seed + i, rows, 64, activation) for i in range(2)]
    packed, linear_ones = copy.deepcopy(plain), copy.deepcopy(plain)
    for layer in packed:
        layer.pack(SWIZZLED)
    for layer in linear_ones:
        layer.pack(FRAGMENTS)
    assert layers.join_weights(packed, interleaved=True)
    assert layers.join_weights(linear_ones, interleaved=True)
    assert packed[0].fused.layout == SWIZZLED
    x = normal(seed + 5, 3, 64)
    assert torch.equal(fused_swiglu(*packed, x, 10.0), fused_swiglu(*linear_ones, x, 10.0))
    for layer, old in zip(packed, plain, strict=True):
        assert torch.equal(layer(x), old(x))


@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
def test_a_model_means_the_same(activation):
    sizes = {"moe_intermediate_size": 64, "q_lora_rank": 64, "o_lora_rank": 128}
    plain = random_model(ModelConfig.tiny(activation=activation, **sizes), 1)
    layers.quantize_(plain)
    plain = plain.double()
    model = copy.deepcopy(plain)
    report = layers.pack_(model, SWIZZLED)
    assert report.packed
    result = [m for m in model.modules() if isinstance(m, layers.Linear) and m.format]
    layouts = {m.layout for m in result if m.activation == "nvfp4"}
    assert layouts == ({SWIZZLED} if activation == "nvfp4" else set())
    assert SWIZZLED not in {m.layout for m in result if m.activation == "bf16"}
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(ids), plain(ids), rtol=0, atol=1e-11)
    assert set(layers.unpack_(model)) == set(report.packed)


SIZES = {"hidden": 128, "inner": 64}  # gate and up, and down, have whole blocks of 128 rows


@given(
    strategies.seeds(),
    st.tuples(st.integers(0, 9), st.integers(1, 3)),
    st.sampled_from(["deepseek", "transformers"]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from([0, 4]),
    ACTIVATIONS,
)
def test_experts_give_the_bits_of_those_in_fragments(
    seed, choices, numerics, dtype, static, activation
):
    """Return whether rows are quantised where they are gathered or by the product."""
    kind = {"activation": activation, "numerics": numerics, "static": static}
    experts, other = (routed(seed, **SIZES, **kind) for _ in range(2))
    experts.pack(SWIZZLED)
    other.pack()
    x = (10 * normal(seed, choices[0], 128)).to(dtype)
    ids, weights = routing(seed, *choices, 5)
    result = experts(x, ids, weights)
    assert result.dtype == dtype
    assert torch.equal(raw(result), raw(other(x, ids, weights)))


@settings(max_examples=4)
@given(strategies.seeds())
def test_every_bit_of_experts_comes_back(seed):
    experts = random_bytes(seed, **SIZES)
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    dense = [experts.dense_weight(name) for name in ("gate_up_proj", "down_proj")]
    addresses = [t.data_ptr() for t in experts.parameters()]
    parts = [part.to("cpu") for e in range(5) for part in copy.deepcopy(experts).get_expert(e)]
    for layout in (SWIZZLED, FRAGMENTS, SWIZZLED):
        experts.pack(layout)
        assert [t.data_ptr() for t in experts.parameters()] == addresses, "in place"
        for name, expected in zip(("gate_up_proj", "down_proj"), dense, strict=True):
            weight = experts.quantized_weight(name).validate()
            assert weight.layout == experts.layout == layout
            assert torch.equal(raw(experts.dense_weight(name)), raw(expected))
        same_state(experts.state_dict(), before)
    for expert in range(5):
        linear_one = experts.quantized_weight("down_proj")[expert].with_layout(LINEAR)
        assert torch.equal(raw(linear_one.scales), raw(parts[3 * expert + 2].scales))
    actual = [part for e in range(5) for part in experts.get_expert(e)]
    for first, two in zip(actual, parts, strict=True):
        assert torch.equal(first.validate().codes, two.codes)
        assert torch.equal(raw(first.scales), raw(two.scales))
        assert torch.equal(first.global_scale, two.global_scale)
    experts.unpack()
    assert experts.layout == LINEAR
    same_state(experts.state_dict(), before)
    same_state(dict(experts.named_parameters()), before)


def test_experts_see_an_observer_and_say_what_they_are():
    experts = routed(1, activation="nvfp4", **SIZES)
    other = copy.deepcopy(experts)
    other.pack()
    experts.pack(SWIZZLED)
    assert "layout=swizzled_128x4" in repr(experts)
    x, (ids, weights) = normal(1, 30, 128).bfloat16(), routing(1, 30, 2, 5)
    for module in (other, experts):
        with layers.calibrate(module):
            module(x, ids, weights)
    same_state(experts.state_dict(), other.state_dict())
    declared = layers.DeepseekV4Experts(config_of(experts))
    declared.declare_packed(SWIZZLED)
    assert [p.shape for p in declared.parameters()] == [
        p.shape for n, p in experts.named_parameters() if "input_scale" not in n
    ]


@pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
def test_experts_of_a_model_take_the_layout_of_their_activations(activation):
    experts = torch.nn.Sequential(routed(1, activation=activation, **SIZES))
    assert layers.pack_(experts, SWIZZLED).packed == ["0"]
    assert experts[0].layout == (SWIZZLED if activation == "nvfp4" else FRAGMENTS)


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="layout is 'linear', wanted one of"):
        routed(0).pack(LINEAR)
    with pytest.raises(ValueError, match=r"down_proj is 64 x 64, wanted multiples of 128 x 64"):
        routed(0).pack(SWIZZLED)
    with pytest.raises(ValueError, match="layout is 'linear', wanted one of"):
        linear(0, 16, 64).pack(LINEAR)
    with pytest.raises(ValueError, match="layout is 'blocked', wanted one of"):
        layers.pack_(linear(0, 16, 64), "blocked")
    with pytest.raises(ValueError, match=r"32 x 64 per group, wanted multiples of 128 x 16"):
        linear(0, 32, 64, groups=2).pack(SWIZZLED)
    grouped = linear(0, 128, 64, groups=2)
    x = normal(1, 3, 2, 64)
    expected = grouped(x)
    grouped.pack(SWIZZLED)
    assert torch.equal(grouped(x), expected)
