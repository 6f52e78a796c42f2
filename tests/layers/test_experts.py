"""The layer of routed experts: what holds of any routing, with plain, NVFP4 and packed weights."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import layers
from dsv4.config import ModelConfig
from dsv4.ops.quantize import quantize
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_
from tests.layers.experts_cases import quantize_apart

EXPERTS, HIDDEN = 6, 64
KINDS = ("plain", "nvfp4", "packed")
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])
NUMERICS = st.sampled_from(["deepseek", "transformers"])


def experts_of(kind: str, activation: str = "bf16", numerics: str = "deepseek", seed: int = 0):
    """The same weights for every kind, but for the rounding to NVFP4."""
    config = ModelConfig.tiny(
        n_routed_experts=EXPERTS,
        hidden_size=HIDDEN,
        moe_intermediate_size=64,
        activation=activation,
        numerics=numerics,
    )
    experts = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), seed)
    if kind != "plain":
        quantize_apart(experts)
    if kind == "packed":
        experts.pack()
    return experts


@st.composite
def batches(draw: st.DrawFn, smallest: int = 0):
    """Tokens, ids, weights in float64: duplicates, experts without tokens, one for all, no expert
    (-1 and the number of experts), any top-k from 1 to 8.
    """
    seed, tokens = draw(fuzz.seeds()), draw(st.integers(smallest, 7))
    top_k = draw(st.integers(1, 8))
    low, high = draw(st.sampled_from([(0, EXPERTS), (-1, EXPERTS + 1), (0, 2), (4, 5), (-1, 0)]))
    generator = fuzz.generator(seed)
    ids = torch.randint(low, high, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
    x = 5 * fuzz.normal(seed, (tokens, HIDDEN), torch.float64)
    return x, ids, weights, seed


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).norm() <= 1e-12 * expected.norm())


@pytest.mark.costly(2)
@pytest.mark.parametrize("kind", KINDS)
class TestProperties:
    @given(batch=batches(), activation=ACTIVATIONS, numerics=NUMERICS)
    def test_is_the_sum_of_its_choices(self, kind, batch, activation, numerics):
        """Compute each choice alone, with a top-k of 1: duplicates count twice."""
        experts = experts_of(kind, activation, numerics)
        x, ids, weights, _ = batch
        parts = [experts(x, ids[:, [j]], weights[:, [j]]) for j in range(ids.shape[1])]
        expected = sum(parts)
        assert close(experts(x, ids, weights), expected)
        nobody = ((ids < 0) | (ids == EXPERTS)).all(1)
        assert not experts(x, ids, weights)[nobody].any()

    @given(batch=batches(1), activation=ACTIVATIONS, numerics=NUMERICS)
    def test_a_duplicate_is_one_choice_of_both_weights(self, kind, batch, activation, numerics):
        if activation != "bf16":  # DeepSeek quantises a row after it was weighted
            numerics = "transformers"
        experts = experts_of(kind, activation, numerics)
        x, ids, weights, _ = batch
        both = experts(x, ids[:, :1].expand(-1, 2), torch.cat((weights[:, :1], weights[:, -1:]), 1))
        assert close(both, experts(x, ids[:, :1], weights[:, :1] + weights[:, -1:]))

    @given(batch=batches(), activation=ACTIVATIONS, numerics=NUMERICS)
    def test_same_bits_run_to_run(self, kind, batch, activation, numerics):
        experts = experts_of(kind, activation, numerics)
        x, ids, weights, _ = batch
        assert_bitwise(experts(x, ids, weights), experts(x, ids, weights))

    @given(batch=batches(), activation=ACTIVATIONS, numerics=NUMERICS)
    def test_permuted_tokens_give_permuted_results(self, kind, batch, activation, numerics):
        experts = experts_of(kind, activation, numerics)
        x, ids, weights, seed = batch
        moved = torch.randperm(x.shape[0], generator=fuzz.generator(seed))
        assert close(experts(x[moved], ids[moved], weights[moved]), experts(x, ids, weights)[moved])

    @given(batch=batches(), activation=ACTIVATIONS, numerics=NUMERICS)
    def test_permuted_choices_give_the_same(self, kind, batch, activation, numerics):
        experts = experts_of(kind, activation, numerics)
        x, ids, weights, seed = batch
        moved = torch.randperm(ids.shape[1], generator=fuzz.generator(seed))
        assert close(experts(x, ids[:, moved], weights[:, moved]), experts(x, ids, weights))

    @given(batch=batches(), activation=ACTIVATIONS, numerics=NUMERICS)
    @settings(max_examples=6)
    def test_relabelled_experts_give_the_same(self, kind, batch, activation, numerics):
        experts = experts_of(kind, activation, numerics)
        x, ids, weights, seed = batch
        order = torch.randperm(EXPERTS, generator=fuzz.generator(seed))
        other = experts_of(kind, activation, numerics)
        for name, tensor in experts.named_parameters():
            setattr(other, name, torch.nn.Parameter(tensor[order], requires_grad=False))
        if kind == "packed":
            other.gate_up_row_scale = experts.gate_up_row_scale[order]
        new = torch.cat((order.argsort(), torch.tensor([EXPERTS, -1])))  # ids -1 take the last
        assert close(other(x, new[ids], weights), experts(x, ids, weights))

    @given(
        batch=batches(1),
        activation=ACTIVATIONS,
        numerics=NUMERICS,
        bad=st.sampled_from([math.nan, math.inf]),
        where=st.sampled_from(["token", "weight"]),
    )
    def test_a_bad_token_stays_alone(self, kind, batch, activation, numerics, bad, where):
        experts = experts_of(kind, activation, numerics)
        x, ids, weights, seed = batch
        clean = experts(x, ids, weights)
        token = seed % x.shape[0]
        (x if where == "token" else weights)[token, 0] = bad
        result = experts(x, ids, weights)
        keep = torch.arange(x.shape[0]) != token
        assert_bitwise(result[keep], clean[keep], "the other tokens")
        chosen = (ids[token] >= 0) & (ids[token] < EXPERTS)
        if chosen[0] or (where == "token" and chosen.any()):
            assert not result[token].isfinite().any()
        else:
            assert_bitwise(result[token], clean[token], "a token of no expert")

    @given(batch=batches(), activation=ACTIVATIONS, numerics=NUMERICS)
    @settings(max_examples=6)
    def test_ranges_add_up_to_the_whole(self, kind, batch, activation, numerics):
        """Any ranges, of one expert too, and what others hold adds nothing to one."""
        experts = experts_of(kind, activation, numerics)
        x, ids, weights, seed = batch
        cut = [0, *sorted({1 + seed % 5, 1 + seed % 3}), EXPERTS]
        total = torch.zeros_like(x)
        for first, last in pairwise(cut):
            part = self.part(experts, kind, first, last - first)
            total += part(x, ids, weights)
            others = (ids < first) | (ids >= last)
            assert not part(x, ids, weights)[others.all(1)].any()
        assert close(total, experts(x, ids, weights))

    @staticmethod
    def part(whole, kind, first, count):
        part = layers.DeepseekV4Experts(
            ModelConfig.tiny(
                n_routed_experts=EXPERTS,
                hidden_size=HIDDEN,
                moe_intermediate_size=64,
                activation=whole.activation,
                numerics=whole.numerics,
            ),
            first,
            count,
        ).requires_grad_(False)
        if kind == "plain":
            held = slice(first, first + count)
            for name in ("gate_up_proj", "down_proj"):
                weight = torch.nn.Parameter(getattr(whole, name)[held], requires_grad=False)
                setattr(part, name, weight)
            return part
        part.to_format(whole.format)
        for i in range(count):
            part.set_expert(i, *whole.get_expert(first + i))
        if kind == "packed":
            part.pack()
        return part


@given(st.sampled_from(["nvfp4", "packed"]), batches(), NUMERICS)
def test_stacked_weights_are_taken_without_a_copy(kind, batch, numerics):
    source = experts_of("nvfp4", numerics=numerics)
    gate_up, down = (source.quantized_weight(name) for name in ("gate_up_proj", "down_proj"))
    with torch.device("meta"):
        experts = layers.DeepseekV4Experts(_config_of(source))
    experts.set_stacks(gate_up, down)
    assert experts.gate_up_proj.data_ptr() == source.gate_up_proj.data_ptr()
    x, ids, weights, _ = batch
    x, weights = x.float(), weights.float()
    expected = experts_of(kind, numerics=numerics)(x, ids, weights)
    if kind == "packed":
        experts.pack()
    assert_bitwise(experts(x, ids, weights), expected)


def _config_of(experts):
    return ModelConfig.tiny(
        n_routed_experts=EXPERTS,
        hidden_size=HIDDEN,
        moe_intermediate_size=64,
        numerics=experts.numerics,
    )


def test_stacks_of_other_shapes_scales_or_formats_change_nothing():
    experts, other = experts_of("nvfp4"), experts_of("nvfp4", seed=1)
    gate_up, down = (other.quantized_weight(name) for name in ("gate_up_proj", "down_proj"))
    before = {name: tensor.clone() for name, tensor in experts.named_parameters()}
    tied = replace(gate_up, global_scale=gate_up.global_scale[:, :1], segments=())
    mxfp4 = quantize(torch.randn(EXPERTS, HIDDEN, 64), "mxfp4")
    for stacks, words in (
        ((down, down), r"gate_up_proj has shape .*64, 64\], wanted .*128, 64\]"),
        ((tied, down), r"gate_up_proj has segments \(\) of global scales, wanted \(64, 64\)"),
        ((gate_up.with_layout("swizzled_128x4"), down), "has layout 'swizzled_128x4', wanted"),
        ((gate_up, mxfp4), "the formats are nvfp4 and mxfp4, wanted the same"),
    ):
        with pytest.raises(ValueError, match=words):
            experts.set_stacks(*stacks)
    for name, tensor in experts.named_parameters():
        assert_bitwise(tensor, before[name])
