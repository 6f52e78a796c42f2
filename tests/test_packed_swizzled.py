"""Weights packed for Blackwell's tensor cores: scales moved, codes as they were, nothing lost."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_cases import normal, raw, same_state
from test_packed_layers import linear, shares

from dsv4 import layers
from dsv4.config import ModelConfig
from dsv4.formats import FRAGMENTS, LINEAR, SWIZZLED, cat_rows
from dsv4.layers.linear import fused_linear, joint_swiglu
from dsv4.testing import strategies
from dsv4.testing.models import random_model

rows_ = st.sampled_from([16, 48, 128, 144])
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4"])


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
    assert joined[0].joint.layout == SWIZZLED
    x = normal(seed + 5, 3, 64)
    for part, wanted in zip(fused_linear(joined, x), fused_linear(plain, x), strict=True):
        assert torch.equal(part, wanted)
    for layer, old in zip(joined, plain, strict=True):
        assert torch.equal(layer(x), old(x))
        assert torch.equal(raw(layer.dense_weight()), raw(old.dense_weight()))
        same_state(layer.state_dict(), old.state_dict())
    joined[0].unpack()
    assert joined[0].joint is None
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
def test_gate_and_up_in_turn(seed, rows, activation):
    plain = [linear(seed + i, rows, 64, activation) for i in range(2)]
    turned, linear_ones = copy.deepcopy(plain), copy.deepcopy(plain)
    for layer in turned:
        layer.pack(SWIZZLED)
    for layer in linear_ones:
        layer.pack(FRAGMENTS)
    assert layers.join_weights(turned, in_turn=True)
    assert layers.join_weights(linear_ones, in_turn=True)
    assert turned[0].joint.layout == SWIZZLED
    x = normal(seed + 5, 3, 64)
    assert torch.equal(joint_swiglu(*turned, x, 10.0), joint_swiglu(*linear_ones, x, 10.0))
    for layer, old in zip(turned, plain, strict=True):
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
    layouts = {m.layout for m in model.modules() if isinstance(m, layers.Linear) and m.format}
    assert SWIZZLED in layouts
    assert FRAGMENTS not in layouts
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(ids), plain(ids), rtol=0, atol=1e-11)
    assert set(layers.unpack_(model)) == set(report.packed)


def test_what_cannot_be_is_said():
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
