"""Differences of transformers' numbers from DeepSeek's, one test for each.

Specification, section 10.3, lists them. Each test shows the two numerics of this package apart in
that place, in which direction, and equal where the departure has nothing to act on. In two places
both numerics behave alike here (softmax, sum of the routing scores): the test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dsv4 import layers
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.ops import (
    fake_quantize_kv,
    indexer_rotate_quantize,
    route_topk,
    sparse_attention,
)
from dsv4.ops.kv_cache import Pages
from dsv4.testing.models import randomize_

transformers = pytest.importorskip("transformers")

seeds = st.integers(0, 2**16)
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def pair(
    build: Callable[[ModelConfig], nn.Module],
    dtype: torch.dtype,
    seed: int = 0,
    **changes: Any,
) -> tuple[Any, Any]:
    """A layer with DeepSeek's and with transformers' numerics and the same weights."""
    result = []
    for numerics in ("deepseek", "transformers"):
        module = build(ModelConfig.tiny(numerics=numerics, **changes))
        result.append(randomize_(module, seed).to(dtype).eval().requires_grad_(False))
    result[1].load_state_dict(result[0].state_dict())
    return result[0], result[1]


def theirs(name: str, ours: nn.Module, *args: Any) -> Any:
    """transformers' module with the weights of one of this package's."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    config = transformers.DeepseekV4Config(**ModelConfig.tiny().to_transformers_dict())
    config._experts_implementation = "eager"
    module = getattr(modeling, name)(config, *args).eval().requires_grad_(False)
    state = ours.state_dict()
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if key in state:
            tensor.data = state[key].clone()
    return module


def draw(seed: int, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=F64)).to(dtype)


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return float((result.double() - truth).norm() / truth.norm())


class Recording:
    """The part of a cache that attention calls: records the keys, and may change them."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.change = change
        self.keys: torch.Tensor | None = None

    def get_seq_length(self, layer: int) -> int:
        return 0

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> Any:
        self.keys = keys if self.change is None else self.change(keys)
        return self.keys, self.keys


# 1 -------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_keys_are_stored_in_fp8_by_deepseek_only(seed: int) -> None:
    def build(config: ModelConfig) -> nn.Module:
        return layers.DeepseekV4Attention(config, config.layer_types.index(SLIDING))

    deepseek, plain = pair(build, F32, seed)  # in float32 no other departure acts here
    x = draw(seed, 1, 9, 64, dtype=F32)
    stored, unrounded = Recording(), Recording()
    out, _ = deepseek(x, past_key_values=stored)
    other, _ = plain(x, past_key_values=unrounded)
    assert stored.keys is not None
    assert unrounded.keys is not None
    rope_dim = deepseek.rope_dim
    assert torch.equal(stored.keys, fake_quantize_kv(unrounded.keys, rope_dim))
    assert not torch.equal(stored.keys, unrounded.keys)
    assert not torch.equal(out, other)
    # FP8 with 3 mantissa bits is off by 1/16 at most, or by a step of its subnormals.
    nope = slice(0, deepseek.head_dim - rope_dim)
    gap = (stored.keys - unrounded.keys)[..., nope].abs()
    amax = unrounded.keys[..., nope].abs().amax(-1, keepdim=True)
    assert (gap <= unrounded.keys[..., nope].abs() / 16 + amax * 2.0**-17).all()
    # Nothing else differs: with the keys rounded the outputs are the same bits.
    rounded = Recording(lambda keys: fake_quantize_kv(keys, rope_dim))
    assert torch.equal(plain(x, past_key_values=rounded)[0], out)


@given(seed=seeds)
@pytest.mark.parametrize("layer_type", [CSA, HCA])
def test_entries_are_stored_in_fp8_by_deepseek_only(layer_type: str, seed: int) -> None:
    kinds = {CSA: layers.DeepseekV4CSACompressor, HCA: layers.DeepseekV4HCACompressor}
    deepseek, plain = pair(kinds[layer_type], F32, seed)
    x = draw(seed, 2, 17, 64, dtype=F32)
    entries, unrounded = (m.dense_entries(x, None, 0) for m in (deepseek, plain))
    assert torch.equal(entries, fake_quantize_kv(unrounded, deepseek.rope_dim))
    assert not torch.equal(entries, unrounded)


# 2 -------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_the_indexer_turns_and_rounds_to_fp4_by_deepseek_only(seed: int) -> None:
    deepseek, plain = pair(layers.DeepseekV4Indexer, F32, seed)
    x, residual = draw(seed, 2, 17, 64, dtype=F32), draw(seed + 1, 2, 17, 32, dtype=F32)
    positions = torch.arange(17).expand(2, -1)
    for rotated, straight in (
        (deepseek.queries(residual, positions), plain.queries(residual, positions)),
        (deepseek.dense_entries(x, None, 0), plain.dense_entries(x, None, 0)),
    ):
        assert torch.equal(rotated, indexer_rotate_quantize(straight))
        # FP4 leaves at most 15 values in each group of 32.
        assert all(group.unique().numel() <= 15 for group in rotated.reshape(-1, 32))
        assert any(group.unique().numel() > 15 for group in straight.reshape(-1, 32))
    # The transform alone would change no score: the weights of the heads are the same bits.
    assert torch.equal(deepseek.scorer.weights(x), plain.scorer.weights(x))
    reference = theirs("DeepseekV4Indexer", plain)
    expected = reference(x, residual, positions, None, 0)
    actual = plain(x, residual, positions, None, 0)
    assert torch.equal(actual.sort(-1).values, expected.sort(-1).values)


# 3 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["main", "compress"])
def test_cosines_are_rounded_to_the_models_dtype_by_transformers_only(label: str) -> None:
    deepseek, plain = pair(layers.DeepseekV4RotaryEmbedding, BF16)
    reference = theirs("DeepseekV4RotaryEmbedding", plain)
    positions = torch.arange(0, 900, 7).unsqueeze(0)
    x = draw(0, 1, 1, 64)
    exact = deepseek(x, positions, label)
    rounded = plain(x, positions, label)
    for wide, narrow, expected in zip(exact, rounded, reference(x, positions, label), strict=True):
        assert wide.dtype == F32
        assert narrow.dtype == BF16
        assert torch.equal(narrow, wide.to(BF16))
        assert not torch.equal(narrow.float(), wide)
        # Half a unit in the last of 8 bits, for values within 1.
        assert (narrow.float() - wide).abs().max() <= 2.0**-9
        assert (narrow.float() - expected.float()).abs().max() <= 2.0**-8
    for wide, same in zip(
        deepseek(x.float(), positions, label), plain(x.float(), positions, label), strict=True
    ):
        assert torch.equal(wide, same)


# 4 -------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_the_softmax_is_in_float32_here_whatever_the_numerics(seed: int) -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    tokens, keys, heads, dim = 4, 24, 4, 32
    q, kv = draw(seed, tokens, heads, dim), draw(seed + 1, 1, keys, dim)
    sink = draw(seed + 2, heads)

    class Module(nn.Module):
        num_key_value_groups = heads
        sinks = sink

    def eager(dtype: torch.dtype) -> torch.Tensor:
        module = Module().eval()
        module.sinks = sink.to(dtype)
        query, key = q.transpose(0, 1)[None].to(dtype), kv[None].to(dtype)
        return eager_attention_forward(module, query, key, key, None, dim**-0.5)[0][0]

    def ours(dtype: torch.dtype) -> torch.Tensor:
        slots = torch.arange(keys).expand(tokens, keys)
        pages = Pages(kv.to(dtype), keys, "plain", dim, 0)
        return sparse_attention(
            q.to(dtype), pages, slots, None, None, sink.to(dtype), scale=dim**-0.5
        )

    truth = eager(F64)
    assert error(ours(F64), truth) < 1e-13
    assert error(ours(F32), truth) < 1e-6
    assert error(eager(F32), truth) < 1e-6
    # In bfloat16 this package rounds once, at the end: at most half a unit in the last of 8 bits
    # per element. transformers rounds logits, probabilities and the result.
    assert error(ours(BF16), truth) <= 2.0**-9 * 1.001
    assert error(eager(BF16), truth) > error(ours(BF16), truth)


# 5 -------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_stream_mixing_weights_are_rounded_by_transformers_only(seed: int) -> None:
    deepseek, plain = pair(layers.DeepseekV4HyperConnection, BF16, seed)
    streams, output = draw(seed, 1, 6, 4, 64), draw(seed + 1, 1, 6, 64)
    post, comb, mixed = deepseek(streams)
    for a, b in zip((post, comb, mixed), plain(streams), strict=True):
        assert torch.equal(a, b), "what comes before the sublayer is the same"
    assert post.dtype == comb.dtype == F32
    result = deepseek.post(output, streams, post, comb)
    rounded = plain.post(output, streams, post, comb)
    assert torch.equal(
        rounded, deepseek.post(output, streams, post.to(BF16).float(), comb.to(BF16).float())
    )
    assert not torch.equal(result, rounded)
    wide = [t.double() for t in (output, streams, post, comb)]
    truth = wide[2][..., None] * wide[0][..., None, :] + wide[3].transpose(-1, -2) @ wide[1]
    assert error(result, truth) <= 2.0**-9 * 1.001
    assert error(rounded, truth) > error(result, truth)
    in_f32 = [t.float() for t in (output, streams, post, comb)]
    assert torch.equal(deepseek.post(*in_f32), plain.post(*in_f32))


# 6 -------------------------------------------------------------------------------------------


@given(seed=seeds)
@pytest.mark.parametrize("kind", ["CSACompressor", "HCACompressor", "Indexer"])
def test_compressor_projections_are_rounded_by_transformers_only(kind: str, seed: int) -> None:
    deepseek, plain = pair(getattr(layers, "DeepseekV4" + kind), BF16, seed)
    x = draw(seed, 1, 9, 64)
    for wide, narrow, layer in zip(
        deepseek._project(x), plain._project(x), (plain.kv_proj, plain.gate_proj), strict=True
    ):
        truth = x.double() @ layer.weight.double().T
        assert wide.dtype == F32
        assert narrow.dtype == BF16
        assert error(wide, truth) < 1e-6
        assert 1e-4 < error(narrow, truth) <= 2.0**-8
        assert torch.equal(narrow, F.linear(x, layer.weight)), "as transformers computes it"
    for module in (deepseek, plain):
        module.to(F32)
    for a, b in zip(deepseek._project(x.float()), plain._project(x.float()), strict=True):
        assert torch.equal(a, b)


# 7 -------------------------------------------------------------------------------------------


@given(seed=seeds)
@pytest.mark.parametrize("kind", ["TopKRouter", "HashRouter"])
def test_routing_logits_are_rounded_by_transformers_only(kind: str, seed: int) -> None:
    deepseek, plain = pair(getattr(layers, "DeepseekV4" + kind), BF16, seed)
    x = draw(seed, 32, 64)
    tokens = torch.arange(32)
    arguments = (x, tokens) if kind == "HashRouter" else (x,)
    truth = x.double() @ deepseek.weight.double().T
    wide, narrow = deepseek(*arguments)[0], plain(*arguments)[0]
    assert wide.dtype == F32
    assert error(wide, truth) < 1e-6
    assert 1e-4 < error(narrow, truth) <= 2.0**-8
    reference = theirs("DeepseekV4" + kind, plain)
    assert torch.equal(narrow.to(BF16), reference(*arguments)[0])
    for module in (deepseek, plain):
        module.to(F32)
    same = tuple(a.float() if a.is_floating_point() else a for a in arguments)
    for a, b in zip(deepseek(*same), plain(*same), strict=True):
        assert torch.equal(a, b)


# 8 -------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_the_routing_weight_comes_before_the_last_projection_by_deepseek_only(seed: int) -> None:
    deepseek, plain = pair(layers.DeepseekV4Experts, BF16, seed)
    x = draw(seed, 16, 64)
    expert = torch.randint(0, 8, (16, 1), generator=torch.Generator().manual_seed(seed))
    weight = draw(seed + 1, 16, 1, dtype=F32).abs() + 0.3
    before, after = deepseek(x, expert, weight), plain(x, expert, weight)
    assert not torch.equal(before, after)
    # A power of two passes through every rounding.
    half = torch.full_like(weight, 0.5)
    assert torch.equal(deepseek(x, expert, half), plain(x, expert, half))
    # Against the two orders of operation, each rounded where that order rounds.
    early = _one_expert(deepseek, x, expert, weight, early=True)
    late = _one_expert(deepseek, x, expert, weight, early=False)
    assert error(before, early.double()) < error(before, late.double())
    assert error(after, late.double()) < error(after, early.double())
    truth = _one_expert(deepseek, x.double(), expert, weight.double(), early=False)
    for module in (deepseek, plain):
        result = module.to(F64)(x.double(), expert, weight.double())
        assert error(result, truth) < 1e-12


def _one_expert(
    experts: Any, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, *, early: bool
) -> torch.Tensor:
    """Each row through its one expert; the activation is in float32, other steps in ``x.dtype``."""
    rows = []
    for row, e, w in zip(x, expert[:, 0], weight, strict=True):
        gate_up = (experts.gate_up_proj[e].to(x.dtype) @ row).to(torch.promote_types(x.dtype, F32))
        gate, up = gate_up.chunk(2)
        inner = F.silu(gate.clamp(max=experts.limit)) * up.clamp(-experts.limit, experts.limit)
        down = experts.down_proj[e].to(x.dtype)
        if early:
            rows.append(down @ (inner * w).to(x.dtype))
        else:
            rows.append(((down @ inner.to(x.dtype)).to(w.dtype) * w).to(x.dtype))
    return torch.stack(rows)


# 9 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_the_sum_of_routing_scores_has_a_floor_in_both_numerics(numerics: str) -> None:
    config = ModelConfig.tiny(numerics=numerics)
    router = randomize_(layers.DeepseekV4TopKRouter(config)).requires_grad_(False)
    router.weight.fill_(-40.0)
    logits, weights, _ = router(torch.full((2, 64), 1.0))
    scores = F.softplus(logits).sqrt()
    assert not scores.any(), "all scores underflow"
    # DeepSeek's own 0 / 0 would make the whole token NaN. Here it gets no routed expert.
    assert (scores / scores.sum(-1, keepdim=True)).isnan().all()
    assert torch.equal(weights, torch.zeros_like(weights))


@given(seed=seeds)
def test_the_floor_changes_no_other_routing_weight(seed: int) -> None:
    x, weight = draw(seed, 16, 64, dtype=F32), draw(seed + 1, 8, 64, dtype=F32, scale=0.125)
    logits, weights, ids = route_topk(x, weight, None, top_k=2, scaling_factor=1.0)
    scores = F.softplus(logits.double()).sqrt().gather(1, ids)
    assert torch.allclose(weights.double(), scores / scores.sum(-1, keepdim=True), rtol=1e-6)
    total = scores.float().sum(-1)
    assert torch.equal(total + 1e-20, total)
