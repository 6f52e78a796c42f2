"""Layers with packed NVFP4 weights: nothing lost, nothing changed, one matrix where they join."""

from __future__ import annotations

import copy
import io
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import layers
from dsv4.checkpoint import Checkpoint, CheckpointError, fill, save
from dsv4.config import ModelConfig
from dsv4.layers._pooling import PoolingModule
from dsv4.layers.observer import LARGEST
from dsv4.ops import quantize
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.ops.moe import moe_combine, moe_gather, moe_permute
from dsv4.ops.quantize import dequantize
from dsv4.quant import fragments
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, QuantizedTensor, cat_rows
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from dsv4.testing.models import random_model, randomize_
from tests.layers.experts_cases import quantize_apart, truth_and_budget
from tests.layers.packed_cases import normal, raw, same_state

SIZES = {"moe_intermediate_size": 64, "q_lora_rank": 64, "o_lora_rank": 32}
KINDS = (layers.Linear, layers.DeepseekV4Experts)
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])


def linear(seed, rows, columns, activation="bf16", groups=0, scale=None):
    """An NVFP4 layer; ``groups`` above 0 makes it a grouped one, of ``rows`` rows each."""
    kwargs = {"activation": activation}
    module = (
        layers.DeepseekV4GroupedLinear(columns, groups * rows, groups, **kwargs)
        if groups
        else layers.Linear(columns, rows, **kwargs)
    )
    module.set_weight(quantize(normal(seed, max(groups, 1) * rows, columns), scaling="weight"))
    if scale is not None:
        module.set_weight(module.quantized_weight(), torch.tensor([scale]))
    return module.requires_grad_(False)


def packed_and_not(activation="bf16", seed=1, **changes):
    """A packed model, the same one unpacked, and the report."""
    config = ModelConfig.tiny(activation=activation, **{**SIZES, **changes})
    plain = random_model(config, seed, mtp=True)
    layers.quantize_(plain)
    model = copy.deepcopy(plain)
    return model, plain, layers.pack_(model)


def pair(seed=1, activation="bf16", scales=(None, None)):
    """Two layers of one input that share a matrix, and the same two as they were."""
    plain = [linear(seed + i, 32, 64, activation, 0, s) for i, s in enumerate(scales)]
    joined = copy.deepcopy(plain)
    for layer in joined:
        layer.pack()
    assert layers.join_weights(joined)
    return joined, plain


def shares(parts):
    """Return whether the layers' weights are one matrix, rows after rows."""
    fused = parts[0].fused
    return fused is not None and all(p.fused is fused for p in parts)


class TestLinear:
    @given(
        strategies.seeds(),
        st.integers(0, 5),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(0, 3),
        ACTIVATIONS,
        DTYPES,
        st.booleans(),
    )
    def test_gives_the_same_bits(
        self, seed, tokens, rows, columns, groups, activation, dtype, static
    ):
        scale = 4 / LARGEST if static else None
        layer = linear(seed, 16 * rows, 64 * columns, activation, groups, scale)
        x = normal(seed + 1, tokens, *([groups] if groups else []), 64 * columns).to(dtype)
        for out_dtype in (None, torch.float32):
            expected = layer(x, out_dtype)
            layer.pack()
            assert layer.layout == FRAGMENTS
            assert torch.equal(layer(x, out_dtype), expected)
            layer.unpack()

    @given(strategies.seeds(), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
    def test_every_bit_comes_back(self, seed, rows, columns, per_row, static):
        """Any codes and any scales of sign 0, NaN too, and global scales of every shape."""
        generator = strategies.generator(seed)
        shape = (16 * rows, 64 * columns)
        layer = layers.Linear(shape[1], shape[0])
        codes, scales = (
            torch.randint(0, top, (shape[0], shape[1] // n), generator=generator).to(torch.uint8)
            for top, n in ((256, 2), (128, 16))
        )
        scale = torch.rand(shape[0] if per_row else 1, generator=generator)
        weight = QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), scale, NVFP4)
        layer.set_weight(weight, torch.tensor(0.5) if static else None)
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        dense = layer.dense_weight()
        layer.pack()
        assert layer.weight_scale.dtype == torch.uint8
        assert torch.equal(raw(layer.dense_weight()), raw(dense))
        same_state(layer.state_dict(), before)
        layer.unpack()
        assert layer.layout == LINEAR
        same_state(layer.state_dict(), before)
        same_state(dict(layer.named_parameters()), before)

    def test_twice_is_once(self):
        layer = linear(1, 32, 64)
        layer.unpack()
        layer.pack()
        weight = layer.weight
        layer.pack()
        assert layer.weight is weight

    def test_the_old_parameters_are_freed(self):
        layer = linear(1, 32, 64)
        for change in (layer.pack, layer.unpack):
            old = [weakref.ref(t) for t in (layer.weight, layer.weight_scale)]
            change()
            assert all(ref() is None for ref in old)

    def test_a_packed_weight_can_be_set(self):
        layer, other = linear(1, 32, 64), layers.Linear(64, 32)
        layer.pack()
        other.set_weight(layer.quantized_weight(), torch.tensor(2.0))
        assert other.layout == FRAGMENTS
        assert other.input_scale.tolist() == [2.0]
        assert torch.equal(other.dense_weight(), layer.dense_weight())
        other.set_weight(torch.ones(32, 64))
        assert (other.layout, other.format, other.weight_scale) == (LINEAR, None, None)
        grouped = layers.DeepseekV4GroupedLinear(64, 32, 4)
        with pytest.raises(ValueError, match="the weight is 8 x 64 per group"):
            grouped.set_weight(layer.quantized_weight())
        assert grouped.format is None

    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            (layers.Linear(64, 32), "is plain, wanted nvfp4"),
            (linear(1, 32, 96), "is 32 x 96, wanted multiples of 16 x 64"),
            (linear(1, 24, 64), "is 24 x 64, wanted multiples of 16 x 64"),
            (linear(1, 8, 64, groups=4), "is 8 x 64 per group, wanted multiples of 16 x 64"),
        ],
    )
    def test_refuses_and_changes_nothing(self, layer, message):
        before = dict(layer.named_parameters())
        with pytest.raises(ValueError, match=message):
            layer.pack()
        assert layer.layout == LINEAR
        assert all(layer.get_parameter(name) is tensor for name, tensor in before.items())

    def test_refuses_other_formats_negative_scales_and_meta(self):
        layer = layers.Linear(64, 32).requires_grad_(False)
        layer.quantize("mxfp4")
        with pytest.raises(ValueError, match="is mxfp4, wanted nvfp4"):
            layer.pack()
        layer = linear(1, 32, 64)
        layer.weight_scale.view(torch.uint8)[0, 0] |= 0x80
        weight = layer.weight
        with pytest.raises(ValueError, match="block scale is negative"):
            layer.pack()
        assert layer.weight is weight
        with pytest.raises(ValueError, match="meta"):
            linear(1, 32, 64).to("meta").pack()

    def test_casting_changes_nothing(self):
        layer = linear(1, 32, 64, "nvfp4", 0, 0.25)
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.pack()
        for dtype in (torch.bfloat16, torch.float64):
            layer.to(dtype)
        layer.type(torch.float32)
        same_state(layer.state_dict(), before)

    def test_says_its_layout(self):
        layer = linear(1, 32, 64)
        assert "layout" not in repr(layer)
        layer.pack()
        assert "nvfp4, activation=bf16, layout=fragments_16x64" in repr(layer)


class TestFusedWeights:
    @given(strategies.seeds(), ACTIVATIONS, st.tuples(*[st.sampled_from([None, 0.01, 0.1])] * 2))
    def test_gives_the_same_bits_without_a_copy(self, seed, activation, scales):
        joined, plain = pair(seed, activation, scales)
        x = normal(seed + 5, 3, 64).float()
        expected = layers.concatenated_linear(plain, x)
        alone = [layer(x) for layer in plain]
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr("dsv4.layers.fusion.cat_rows")
            assert torch.equal(layers.concatenated_linear(joined, x), expected)
            for layer, out in zip(joined, alone, strict=True):
                assert torch.equal(layer(x), out)

    def test_the_order_matters(self):
        joined, plain = pair()
        x = normal(3, 4, 64)
        for order in ((1, 0), (0,), (0, 1, 0)):
            actual, expected = (
                layers.concatenated_linear([parts[i] for i in order], x)
                for parts in (joined, plain)
            )
            assert torch.equal(actual, expected)

    def test_every_bit_comes_back(self):
        joined, plain = pair(scales=(0.5, None))
        for layer, other in zip(joined, plain, strict=True):
            same_state(layer.state_dict(), other.state_dict())
            layer.unpack()
            same_state(dict(layer.named_parameters()), other.state_dict())
            assert "FusedWeight" not in repr(layer)

    @pytest.mark.parametrize("leave", ["unpack", "set", "plain"])
    def test_a_layer_can_leave(self, leave):
        joined, plain = pair()
        if leave == "unpack":
            joined[0].unpack()
        elif leave == "set":
            joined[0].set_weight(joined[0].quantized_weight(), torch.tensor(1.0))
            plain[0].set_weight(plain[0].quantized_weight(), torch.tensor(1.0))
        else:
            for parts in (joined, plain):
                parts[0].set_weight(normal(9, 32, 64).float())
        assert joined[0].fused is None
        x = normal(3, 4, 64).float()
        assert torch.equal(
            layers.concatenated_linear(joined, x), layers.concatenated_linear(plain, x)
        )
        for layer, other in zip(joined, plain, strict=True):
            same_state(layer.state_dict(), other.state_dict())
        if leave != "plain":
            joined[0].pack()
            assert layers.join_weights(joined)
            assert torch.equal(
                layers.concatenated_linear(joined, x), layers.concatenated_linear(plain, x)
            )

    def test_only_like_layers_join(self):
        plain, other, wide = linear(1, 32, 64), linear(2, 32, 64), linear(3, 32, 128)
        row_scaled = linear(4, 32, 64)
        weight = row_scaled.quantized_weight()
        rows = QuantizedTensor(weight.codes, weight.scales, weight.row_scale(), NVFP4)
        row_scaled.set_weight(rows)
        for layer in (other, wide, row_scaled):
            layer.pack()
            assert not layers.join_weights([other, plain])
        assert not layers.join_weights([other, wide])
        assert not layers.join_weights([other, row_scaled])
        assert not layers.join_weights([row_scaled, other])

    @pytest.mark.parametrize("how", ["deepcopy", "save", "move", "cast"])
    def test_stays_fused(self, how):
        model, plain, _ = packed_and_not()
        if how == "deepcopy":
            model, old = copy.deepcopy(model), model
            assert old.model.layers[0].self_attn.q_a_proj.fused is not None
            layers.unpack_(old)
        elif how == "save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            model = torch.load(file, weights_only=False)
        elif how == "cast":
            for dtype in (torch.bfloat16, torch.float32):
                model.to(dtype)
                plain.to(dtype)
        elif torch.cuda.is_available():
            model.to("cuda").to("cpu")
        for layer in model.model.layers:
            assert shares([layer.self_attn.q_a_proj, layer.self_attn.kv_proj])
            assert shares([layer.mlp.shared_experts.gate_proj, layer.mlp.shared_experts.up_proj])
        ids = torch.arange(20)[None]
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))
        same_state(model.state_dict(), plain.state_dict())

    def test_moves_with_the_layers(self):
        joined, _ = pair()
        both = torch.nn.ModuleList(joined).to("meta")
        assert shares(joined)
        assert {t.device.type for t in both.buffers()} == {"meta"}
        assert {layer.device.type for layer in joined} == {"meta"}
        assert joined[0].quantized_weight().device.type == "meta"

    def test_holds_its_bytes_once(self):
        joined, plain = pair()
        result = sum(t.nbytes for t in torch.nn.ModuleList(joined).buffers())
        assert result == sum(layer.quantized_weight().nbytes for layer in plain)
        assert not any(name for layer in joined for name, _ in layer.named_parameters())


CHOICES = st.tuples(st.integers(0, 9), st.integers(1, 3))  # tokens, experts of each
NUMERICS = st.sampled_from(["deepseek", "transformers"])


def routed(seed, *, hidden=64, inner=64, count=5, activation="bf16", numerics="deepseek", static=0):
    """NVFP4 experts, with activation scales if ``static`` is above 0."""
    config = ModelConfig.tiny(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        n_routed_experts=count,
        activation=activation,
        numerics=numerics,
    )
    experts = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), seed)
    experts.gate_up_proj[:, :inner] *= 3  # else gate and up might do with one global scale
    quantize_apart(experts)
    if static:
        drawn = torch.rand(2, count, generator=strategies.generator(seed)) + 0.5
        for name, scale in zip(("gate_up_proj", "down_proj"), drawn, strict=True):
            scale = torch.nn.Parameter(static * scale / LARGEST, requires_grad=False)
            setattr(experts, name + "_input_scale", scale)
    return experts


def packed_copy(experts):
    other = copy.deepcopy(experts)
    other.pack()
    assert other.layout == FRAGMENTS
    return other


def routing(seed, tokens, top_k, count):
    """Any experts: twice the same, none at all, and what is no expert's number."""
    generator = strategies.generator(seed)
    ids = torch.randint(-1, count + 1, (tokens, top_k), generator=generator)
    if seed % 3 == 0:
        ids %= 2
    return ids, torch.rand(tokens, top_k, generator=generator)


def random_bytes(seed, **sizes):
    """Experts of any codes, any scales of sign 0, NaN too, and any global scales."""
    experts, generator = routed(seed, static=1, **sizes), strategies.generator(seed)
    for name in ("gate_up_proj", "down_proj"):
        for suffix, top in (("", 256), ("_scale", 128)):
            tensor = raw(getattr(experts, name + suffix))
            tensor.copy_(torch.randint(0, top, tensor.shape, generator=generator))
        scale = getattr(experts, name + "_scale_2")
        scale.copy_(torch.rand(scale.shape, generator=generator))
    return experts


def close(actual, expected, relative):
    return bool((actual.double() - expected.double()).norm() <= relative * expected.double().norm())


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in old:
            self.bytes = max(self.bytes, out.nbytes)
        return out


class TestExperts:
    @given(strategies.seeds(), CHOICES, ACTIVATIONS, NUMERICS, st.sampled_from([0, 4]))
    def test_gives_the_same(self, seed, choices, activation, numerics, static):
        """Results are equal but for the rounding of the first GEMM, which float64 does not see."""
        plain = routed(seed, activation=activation, numerics=numerics, static=static)
        packed = packed_copy(plain)
        x = 10 * normal(seed, choices[0], 64)
        ids, weights = routing(seed, *choices, 5)
        shared = normal(seed + 1, choices[0], 64)
        for extra in ((), (shared,)):
            actual, expected = (m(x, ids, weights.double(), *extra) for m in (packed, plain))
            assert actual.dtype == expected.dtype
            assert actual.shape == expected.shape
            assert close(actual, expected, 1e-12)

    @given(strategies.seeds(), CHOICES, NUMERICS)
    def test_both_are_within_their_budgets(self, seed, choices, numerics):
        """The packed one within that of one rounding less."""
        plain = routed(seed, numerics=numerics)
        x = (10 * normal(seed, choices[0], 64)).bfloat16()
        ids, weights = routing(seed, *choices, 5)
        shared = normal(seed + 1, choices[0], 64).bfloat16()
        for experts in (plain, packed_copy(plain)):
            truth, budget = truth_and_budget(experts, x, ids, weights, shared)
            assert_within_budget(experts(x, ids, weights, shared), truth, budget, experts.layout)

    @given(strategies.seeds(), CHOICES, ACTIVATIONS, NUMERICS, DTYPES, st.sampled_from([0, 4]))
    def test_it_is_its_operators(self, seed, choices, activation, numerics, dtype, static):
        """The truth of the unpacked weights, gate and up interleaved, each row with its scale."""
        plain = routed(seed, activation=activation, numerics=numerics, static=static)
        x = (10 * normal(seed, choices[0], 64)).to(dtype)
        ids, weights = routing(seed, *choices, 5)
        actual = packed_copy(plain)(x, ids, weights)
        parts = [plain.get_expert(e) for e in range(5)]

        def interleaved(name):
            both = ([raw(getattr(p, name)) for p in gate_and_up[:2]] for gate_and_up in parts)
            return torch.stack([torch.stack(two, 1).flatten(0, 1) for two in both])

        scale = torch.stack([torch.cat([p.global_scale for p in e[:2]]).repeat(64) for e in parts])
        scales = interleaved("scales").view(torch.float8_e4m3fn)
        first = QuantizedTensor(interleaved("codes"), scales, scale, NVFP4)
        order, offsets, positions = moe_permute(ids, 5)
        row_weight = weights.flatten()[order.long()] if numerics == "deepseek" else None
        quantised = activation == "nvfp4"
        of_first, of_last = (
            {"activation": activation, "input_scale": getattr(plain, n) if quantised else None}
            for n in ("gate_up_proj_input_scale", "down_proj_input_scale")
        )
        rows = moe_gather(x, positions)
        inner = grouped_gemm_swiglu(
            rows, first, offsets, plain.limit, row_weight=row_weight, **of_first
        )
        out = grouped_gemm(inner, plain.quantized_weight("down_proj"), offsets, **of_last)
        expected = moe_combine(out, positions, offsets, None if row_weight is not None else weights)
        assert_bitwise(actual, expected, "result")

    @given(strategies.seeds())
    @settings(max_examples=10)
    def test_pitfall_32_the_clamp_acts_on_real_values(self, seed):
        """Packed ones clamp, and not products that still lack their global scale."""
        plain = routed(seed)
        packed = packed_copy(plain)
        x, ids = 40 * normal(seed, 12, 64), torch.arange(12).remainder(5).unsqueeze(1)
        gate, up = torch.einsum(
            "tnk,tk->tn", plain.dense_weight("gate_up_proj", torch.float64)[ids[:, 0]], x
        ).chunk(2, -1)
        limit = plain.limit
        assert (gate > limit).any()
        assert (up.abs() > limit).any()
        inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        down = plain.dense_weight("down_proj", torch.float64)[ids[:, 0]]
        expected = torch.einsum("tnk,tk->tn", down, inner)
        assert close(packed(x, ids, torch.ones(12, 1)), expected, 1e-6)

    @given(strategies.seeds())
    @settings(max_examples=20)
    def test_every_bit_comes_back(self, seed):
        experts = random_bytes(seed)
        before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
        dense = [experts.dense_weight(name) for name in ("gate_up_proj", "down_proj")]
        parts = [part.to("cpu") for e in range(5) for part in copy.deepcopy(experts).get_expert(e)]
        experts.pack()
        assert experts.gate_up_proj_scale.dtype == experts.down_proj_scale.dtype == torch.uint8
        for name, expected in zip(("gate_up_proj", "down_proj"), dense, strict=True):
            assert torch.equal(raw(experts.dense_weight(name)), raw(expected))
            assert experts.quantized_weight(name).validate().layout == FRAGMENTS
        actual = [part for e in range(5) for part in experts.get_expert(e)]
        for first, two in zip(actual, parts, strict=True):
            assert torch.equal(first.validate().codes, two.codes)
            assert torch.equal(raw(first.scales), raw(two.scales))
            assert torch.equal(first.global_scale, two.global_scale)
        same_state(experts.state_dict(), before)
        experts.unpack()
        assert experts.layout == LINEAR
        same_state(experts.state_dict(), before)
        same_state(dict(experts.named_parameters()), before)
        assert dict(experts.named_buffers()) == {}

    def test_the_packed_value_has_gate_and_up_interleaved(self):
        plain = routed(1)
        result = packed_copy(plain).quantized_weight("gate_up_proj")
        assert result.segments == ()
        dense = plain.dense_weight("gate_up_proj")
        assert torch.equal(dequantize(result)[:, 0::2], dense[:, :64])
        assert torch.equal(dequantize(result)[:, 1::2], dense[:, 64:])

    def test_in_place(self):
        experts = routed(1)
        names = ("gate_up_proj", "gate_up_proj_scale", "down_proj", "down_proj_scale")
        codes = [experts.gate_up_proj, experts.down_proj]
        addresses = [getattr(experts, name).data_ptr() for name in names]
        for change in (experts.pack, experts.pack, experts.unpack, experts.unpack):
            change()
            assert [getattr(experts, name).data_ptr() for name in names] == addresses
            assert experts.gate_up_proj is codes[0]
            assert experts.down_proj is codes[1]

    @pytest.mark.parametrize("pieces", [1, 3])
    def test_one_expert_at_a_time(self, pieces, monkeypatch):
        """Nothing near the size of the stack is made; an expert in pieces is the same."""
        experts = routed(1, inner=256, count=24)
        expected = packed_copy(experts)
        expert = experts.gate_up_proj[0].nbytes
        monkeypatch.setattr("dsv4.layers._in_place._CODES", 2 * expert // pieces)
        with Largest() as seen:
            experts.pack()
        assert expert <= seen.bytes <= 4 * expert  # of one, as int32
        for name, tensor in expected.named_parameters():
            assert torch.equal(raw(experts.get_parameter(name)), raw(tensor)), name
        with Largest() as seen:
            experts.unpack()
        assert seen.bytes <= 4 * expert

    def test_what_cannot_be_written_is_copied(self):
        expected = packed_copy(routed(1))
        experts = routed(1)
        strided = experts.gate_up_proj.detach().mT.contiguous().mT
        experts.gate_up_proj = torch.nn.Parameter(strided, requires_grad=False)
        with torch.inference_mode():
            copied = experts.down_proj.detach().clone()
        experts.down_proj = torch.nn.Parameter(copied, requires_grad=False)
        experts.pack()
        assert torch.equal(experts.gate_up_proj, expected.gate_up_proj)
        assert torch.equal(experts.down_proj, expected.down_proj)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"hidden": 96}, "gate_up_proj is 128 x 96, wanted multiples of 16 x 64"),
            ({"inner": 32}, "down_proj is 64 x 32, wanted multiples of 16 x 64"),
        ],
    )
    def test_refuses_what_is_not_whole_tiles(self, sizes, message):
        self.check_refused(routed(1, **sizes), message)

    def test_refuses_other_weights(self):
        config = ModelConfig.tiny(**SIZES)
        experts = layers.DeepseekV4Experts(config).requires_grad_(False)
        self.check_refused(experts, "are plain, wanted nvfp4")
        experts.quantize("mxfp4")
        self.check_refused(experts, "are mxfp4, wanted nvfp4")
        for name in ("gate_up_proj", "down_proj"):
            experts = routed(1)
            raw(getattr(experts, name + "_scale"))[4, 2, 1] |= 0x80
            self.check_refused(experts, f"block scale of {name} is negative")
        with pytest.raises(ValueError, match="meta device"):
            routed(1).to("meta").pack()

    @staticmethod
    def check_refused(experts, message):
        parameters = dict(experts.named_parameters())
        before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            experts.pack()
        assert experts.layout == LINEAR
        assert all(experts.get_parameter(name) is t for name, t in parameters.items())
        same_state(experts.state_dict(), before)

    @pytest.mark.parametrize("change", ["pack", "unpack"])
    def test_half_packed_ones_say_so(self, change, monkeypatch):
        experts, run, calls = routed(1), getattr(fragments, change), []
        if change == "unpack":
            experts.pack()

        def fails(codes, scales):
            calls.append(codes)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return run(codes, scales)

        monkeypatch.setattr(fragments, change, fails)
        with pytest.raises(KeyboardInterrupt):
            getattr(experts, change)()
        for again in (experts.pack, experts.unpack):
            with pytest.raises(ValueError, match=r"half packed.*interrupted"):
                again()
        with pytest.raises(ValueError, match="half packed"):
            experts(torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
        with pytest.raises(ValueError, match="half packed"):
            experts.state_dict()
        experts.to_format("nvfp4")
        assert experts.layout == LINEAR
        experts.load_state_dict(routed(1).state_dict())
        monkeypatch.undo()
        experts.pack()
        assert torch.equal(experts.gate_up_proj, packed_copy(routed(1)).gate_up_proj)

    def test_what_a_packed_layer_refuses(self):
        experts = packed_copy(routed(1))
        before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
        with pytest.raises(ValueError, match=r"the layer is packed.*unpack_ first"):
            experts.set_expert(0, *routed(2).get_expert(0))
        with pytest.raises(ValueError, match="are nvfp4 already"):
            experts.quantize()
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=r"gate_up_proj: the layer is packed.*unpack_"):
                experts.load_state_dict(before, assign=assign)
        same_state(experts.state_dict(), before)
        experts.to_format(None)
        assert (experts.layout, experts.gate_up_row_scale) == (LINEAR, None)
        experts.load_state_dict(dict(layers.DeepseekV4Experts(config_of(experts)).state_dict()))

    def test_copies_moves_and_casts(self):
        plain = routed(1, activation="nvfp4", static=4)
        packed = packed_copy(plain)
        file = io.BytesIO()
        torch.save(packed, file)
        file.seek(0)
        x, (ids, weights) = normal(1, 7, 64), routing(1, 7, 2, 5)
        expected = packed(x, ids, weights)
        for other in (copy.deepcopy(packed), torch.load(file, weights_only=False)):
            packed.unpack()
            for dtype in (torch.bfloat16, torch.float64):
                other.to(dtype)
            other.type(torch.float32)
            assert other.gate_up_row_scale.dtype == torch.float32
            assert torch.equal(other(x, ids, weights), expected)
            same_state(other.state_dict(), plain.state_dict())
        other.to("meta")
        assert {t.device.type for t in (*other.parameters(), *other.buffers())} == {"meta"}
        assert other.quantized_weight("gate_up_proj").device.type == "meta"

    def test_row_scales_are_made_once(self):
        experts = packed_copy(routed(1))
        held = experts.gate_up_row_scale
        assert torch.equal(held, experts.gate_up_proj_scale_2.repeat(1, 64))
        assert experts.quantized_weight("gate_up_proj").global_scale is held
        assert not [name for name in experts.state_dict() if "row_scale" in name]

    def test_says_its_layout(self):
        experts = routed(1)
        assert "layout" not in repr(experts)
        assert "nvfp4, activation=bf16, layout=fragments_16x64" in repr(packed_copy(experts))

    def test_calibration_sees_the_same(self):
        plain = routed(1, activation="nvfp4")
        packed = packed_copy(plain)
        x, (ids, weights) = normal(1, 30, 64), routing(1, 30, 2, 5)
        for experts in (plain, packed):
            with layers.calibrate(experts):
                experts(x, ids, weights)
        same_state(packed.state_dict(), plain.state_dict())
        assert close(packed(x, ids, weights), plain(x, ids, weights), 1e-12)


def config_of(experts):
    return ModelConfig.tiny(
        hidden_size=experts.hidden_dim,
        moe_intermediate_size=experts.intermediate_dim,
        n_routed_experts=experts.num_experts,
    )


def part_of(experts, first, count):
    """The experts ``first`` to ``first + count - 1`` of packed ones, packed, on their device."""
    config = config_of(experts).replace(numerics=experts.numerics)
    part = layers.DeepseekV4Experts(config, first, count).requires_grad_(False)
    part.to_format("nvfp4")
    for i in range(count):
        part.set_expert(i, *(matrix.to("cpu") for matrix in experts.get_expert(first + i)))
    part.pack()
    return part.to(experts.gate_up_proj.device)


ROUTINGS = {
    "seed": strategies.seeds(),
    "tokens": st.integers(0, 24),
    "top_k": st.integers(1, 8),
    "lone": st.booleans(),
}


class TestAnyRouting:
    """Packed experts of sizes that the kernels can have, bfloat16; on a GPU by its kernels."""

    COUNT = 16

    @staticmethod
    def drawn(seed, tokens, top_k, lone, device):
        """Tokens, ids and weights; with ``lone`` every token's first choice is one expert."""
        ids, weights = routing(seed, tokens, top_k, TestAnyRouting.COUNT)
        if lone:
            ids[:, 0] = seed % TestAnyRouting.COUNT
        x = (4 * normal(seed, tokens, 256)).bfloat16()
        return tuple(t.to(device) for t in (x, ids, weights))

    @staticmethod
    def experts(numerics, device):
        sizes = {"hidden": 256, "inner": 128, "count": TestAnyRouting.COUNT}
        return packed_copy(routed(1, numerics=numerics, **sizes)).to(device)

    @pytest.mark.slow
    @pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
    @given(**ROUTINGS)
    @settings(max_examples=15)
    def test_is_the_truth_within_its_budget(self, device, numerics, seed, tokens, top_k, lone):
        experts = self.experts(numerics, device)
        inputs = self.drawn(seed, tokens, top_k, lone, device)
        truth, budget = truth_and_budget(experts.cpu(), *(t.cpu() for t in inputs))
        experts.to(device)
        result = experts(*inputs)
        assert_within_budget(result.cpu(), truth, budget)
        assert_bitwise(experts(*inputs), result, "again")

    @pytest.mark.costly(2)
    @given(**ROUTINGS)
    @settings(max_examples=15)
    def test_tokens_in_another_order(self, device, seed, tokens, top_k, lone):
        experts = self.experts("deepseek", device)
        inputs = self.drawn(seed, tokens, top_k, lone, device)
        order = torch.randperm(tokens, generator=strategies.generator(seed)).to(device)
        result = experts(*(t[order] for t in inputs))
        assert_bitwise(result, experts(*inputs)[order], "permuted")

    @pytest.mark.costly(2)
    @given(**{**ROUTINGS, "tokens": st.integers(2, 24)})
    @settings(max_examples=15)
    def test_a_bad_token_is_alone(self, device, seed, tokens, top_k, lone):
        experts = self.experts("deepseek", device)
        x, ids, weights = self.drawn(seed, tokens, top_k, lone, device)
        clean, bad = experts(x, ids, weights), seed % tokens
        x[bad, seed % 256] = (math.nan, math.inf, -math.inf)[seed % 3]
        result = experts(x, ids, weights)
        others = torch.arange(tokens, device=device) != bad
        assert_bitwise(result[others], clean[others], "the others")
        chosen = ((ids[bad] >= 0) & (ids[bad] < self.COUNT)).any()
        assert bool(result[bad].isfinite().all()) != bool(chosen)

    @pytest.mark.costly(2)
    @given(**ROUTINGS, cut=st.integers(1, COUNT - 1))
    @settings(max_examples=6)
    def test_a_range_is_the_part_of_the_sum(self, device, seed, tokens, top_k, lone, cut):
        """The sum over ranges is the whole, each part rounded once."""
        experts = self.experts("deepseek", device)
        x, ids, weights = self.drawn(seed, tokens, top_k, lone, device)
        for first, count in ((0, cut), (cut, self.COUNT - cut)):
            part = part_of(experts, first, count)
            held = (ids >= first) & (ids < first + count)
            own = ids.where(held, -1)
            truth, budget = truth_and_budget(experts.cpu(), *(t.cpu() for t in (x, own, weights)))
            experts.to(device)
            assert_within_budget(part(x, ids, weights).cpu(), truth, budget, f"from {first} on")


@pytest.mark.gpu
class TestExpertsOnGpu:
    """Layers of sizes that the kernels support: K is a multiple of 128."""

    @staticmethod
    def pair(activation, numerics):
        sizes = {"hidden": 256, "inner": 128, "count": 16}
        packed = packed_copy(routed(1, activation=activation, numerics=numerics, **sizes))
        return packed, copy.deepcopy(packed).to("cuda")

    @pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    @pytest.mark.parametrize("tokens", [0, 1, 9, 40])
    def test_equals_the_cpu(self, tokens, activation, numerics):
        experts, there = self.pair(activation, numerics)
        for seed in range(5):
            x = (4 * normal(seed, tokens, 256)).bfloat16()
            shared = normal(seed + 1, tokens, 256).bfloat16()
            ids, weights = routing(seed, tokens, 4, 16)
            inputs = (x, ids, weights, shared)
            result = there(*(t.cuda() for t in inputs)).cpu()
            if activation == "bf16":
                truth, budget = truth_and_budget(experts, *inputs)
                assert_within_budget(result, truth, budget, f"routing {seed}")
            else:
                # A last bit of the largest value of a row moves all its codes near a boundary.
                assert close(result, experts(*inputs), 0.05)

    @pytest.mark.parametrize("change", ["pack", "unpack"])
    def test_is_packed_there_as_here(self, change):
        experts, there = self.pair("bf16", "deepseek")
        if change == "pack":
            experts.unpack()
            there = copy.deepcopy(experts).cuda()
        for module in (experts, there):
            getattr(module, change)()
        same_state(
            {n: t.cpu() for n, t in there.named_parameters()}, dict(experts.named_parameters())
        )

    @pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    @pytest.mark.parametrize("tokens", [3, 60])
    def test_one_graph_serves_any_routing(self, tokens, activation, numerics):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("grouped GEMMs of other GPUs are the reference, which reads offsets")
        _, experts = self.pair(activation, numerics)
        x = torch.zeros(tokens, 256, dtype=torch.bfloat16, device="cuda")
        ids, weights = (t.cuda() for t in routing(0, tokens, 4, 16))
        with torch.inference_mode():
            experts(x, ids, weights)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = experts(x, ids, weights)
            for seed in range(1000):
                routes = routing(seed, tokens, 4, 16)
                ids.copy_(routes[0])
                weights.copy_(routes[1])
                x.copy_(normal(seed, tokens, 256))
                out.fill_(math.nan)
                graph.replay()
                assert_bitwise(out, experts(x, ids, weights), f"routing {seed}")


class TestModel:
    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    def test_everything_is_packed_and_gives_the_same_bits(self, activation):
        model, plain, report = packed_and_not(activation)
        assert report.kept == {}
        assert report.packed == [n for n, m in plain.named_modules() if isinstance(m, KINDS)]
        inner = "model.layers.0.mlp.shared_experts"
        assert (f"{inner}.gate_proj", f"{inner}.up_proj") in report.joined
        attention = "mtp.0.layer.self_attn"
        assert (f"{attention}.q_a_proj", f"{attention}.kv_proj") in report.joined
        pooling = [n for n, m in plain.named_modules() if isinstance(m, PoolingModule)]
        assert pooling
        assert all((f"{n}.kv_proj", f"{n}.gate_proj") in report.joined for n in pooling)
        blocks = len(plain.model.layers) + len(plain.mtp)
        assert len(report.joined) == 2 * blocks + len(pooling)
        ids = torch.arange(37)[None]
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))
            streams = normal(2, 1, 37, model.config.hc_mult, model.config.hidden_size).float()
            for first, two in zip(
                model.draft(ids, streams), plain.draft(ids, streams), strict=True
            ):
                assert torch.equal(first, two)

    @pytest.mark.slow
    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    def test_generates_the_same_tokens(self, activation):
        model, plain, _ = packed_and_not(activation)
        prompts = [list(range(11)), [5, 3], list(range(40, 70))]
        result = model.generate(prompts, 6, stop_ids=(), chunk=8)
        assert result == plain.generate(prompts, 6, stop_ids=(), chunk=8)

    def test_what_cannot_be_packed_stays_and_says_why(self):
        config = ModelConfig.tiny()
        plain = random_model(config, 1)
        layers.quantize_(plain, "nvfp4", ["*.self_attn.*", "*.shared_experts.*"])
        model = copy.deepcopy(plain)
        report = layers.pack_(model)
        result = {n for n, m in plain.named_modules() if isinstance(m, KINDS)}
        assert set(report.packed) | set(report.kept) == result
        assert not set(report.packed) & set(report.kept)
        assert "wanted nvfp4" in report.kept["lm_head"]
        assert "is 64 x 32, wanted" in report.kept["model.layers.0.mlp.shared_experts.down_proj"]
        assert "model.layers.0.self_attn.q_b_proj" in report.kept
        assert "are plain, wanted nvfp4" in report.kept["model.layers.0.mlp.experts"]
        ids = torch.arange(20)[None]
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))
        again = layers.pack_(model)
        assert (again.packed, again.joined, again.kept) == (
            report.packed,
            report.joined,
            report.kept,
        )

    def test_every_bit_comes_back(self):
        model, plain, report = packed_and_not()
        same_state(model.state_dict(), plain.state_dict())
        assert list(layers.unpack_(model)) == report.packed
        assert layers.unpack_(model) == ()
        same_state(dict(model.named_parameters()), dict(plain.named_parameters()))
        same_state(dict(model.named_buffers()), dict(plain.named_buffers()))

    def test_one_layer_is_a_model(self):
        layer = linear(1, 32, 64)
        assert layers.pack_(layer).packed == [""]
        mlp = layers.DeepseekV4MLP(ModelConfig.tiny(**SIZES)).requires_grad_(False)
        layers.quantize_(mlp)
        assert layers.pack_(mlp).joined == [("gate_proj", "up_proj")]

    def test_calibration_sees_the_same(self):
        model, plain, _ = packed_and_not("nvfp4")
        ids = torch.arange(30)[None]
        for candidate in (model, plain):
            with torch.no_grad(), layers.calibrate(candidate):
                candidate(ids)
        same_state(model.state_dict(), plain.state_dict())
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "activation", [pytest.param("bf16", marks=pytest.mark.nightly), "nvfp4"]
    )
    def test_compiles_to_one_graph(self, activation):
        model, _, _ = packed_and_not(activation)
        ids = torch.arange(20)[None]
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(ids), model(ids))


class TestStorage:
    def test_a_state_dict_loads_into_an_unpacked_model_only(self):
        model, plain, _ = packed_and_not()
        state = model.state_dict()
        other = random_model(plain.config, 2, mtp=True)
        layers.quantize_(other)
        other.load_state_dict(state)
        same_state(other.state_dict(), state)
        layers.pack_(other)
        before = other.model.layers[0].self_attn.q_a_proj.fused.codes.clone()
        message = r"q_a_proj\.weight: the layer is packed.*unpack_ first"
        with pytest.raises(RuntimeError, match=message):
            other.load_state_dict(state)
        assert torch.equal(other.model.layers[0].self_attn.q_a_proj.fused.codes, before)

    @pytest.mark.parametrize("layout", ["nvidia", "transformers", "bf16"])
    def test_a_checkpoint_is_the_same_file_by_file(self, tmp_path, layout):
        model, plain, _ = packed_and_not()
        for name, candidate in (("packed", model), ("plain", plain)):
            save(candidate, tmp_path / name, layout=layout)
        files = sorted(path.name for path in (tmp_path / "plain").iterdir())
        assert files == sorted(path.name for path in (tmp_path / "packed").iterdir())
        for name in files:
            actual, expected = ((tmp_path / k / name).read_bytes() for k in ("packed", "plain"))
            assert actual == expected, name

    def test_filling_a_packed_model_is_refused_before_anything_is_written(self, tmp_path):
        model, plain, _ = packed_and_not()
        save(plain, tmp_path / "all", layout="transformers")
        other = random_model(plain.config, 5, mtp=True)
        layers.quantize_(other)
        layers.pack_(other)
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with Checkpoint.open(tmp_path / "all") as checkpoint:
            with pytest.raises(CheckpointError, match=r"the layer is packed, call .*unpack_ first"):
                fill(other, checkpoint, progress=False)
            same_state(other.state_dict(), before)
            layers.unpack_(other)
            fill(other, checkpoint, dtype=torch.float32, progress=False)
        layers.pack_(other)
        name = "model.layers.0.self_attn.q_a_proj"
        assert torch.equal(
            other.get_submodule(name).dense_weight(), model.get_submodule(name).dense_weight()
        )


class TestCatRows:
    @given(strategies.seeds(), st.lists(st.integers(0, 3), min_size=1, max_size=4))
    @settings(max_examples=20)
    def test_keeps_fragments(self, seed, tiles):
        plain = [
            quantize(normal(seed + i, 16 * n, 64), scaling="weight") for i, n in enumerate(tiles)
        ]
        packed = [part.with_layout(FRAGMENTS) for part in plain]
        expected = cat_rows(plain)
        for parts in (packed, [packed[0], *plain[1:]], [plain[0], *packed[1:]]):
            actual = cat_rows(parts).validate()
            layouts = {part.layout for part in parts}
            assert actual.layout == (FRAGMENTS if layouts == {FRAGMENTS} else LINEAR)
            assert actual.segments == expected.segments
            assert torch.equal(actual.global_scale, expected.global_scale)
            linear = actual.with_layout(LINEAR)
            assert torch.equal(raw(linear.codes), raw(expected.codes))
            assert torch.equal(raw(linear.scales), raw(expected.scales))


class TestFormerNames:
    def test_work_with_a_warning(self):
        from dsv4.layers import linear

        joined, plain = pair()
        with pytest.warns(DeprecationWarning, match="joint is now"):
            assert joined[0].joint is joined[0].fused
        with pytest.warns(DeprecationWarning, match="concatenated_linear"):
            assert layers.joint_linear is layers.concatenated_linear
        for name in ("joint_linear", "joint_swiglu", "fused_linear", "join_weights"):
            with pytest.warns(DeprecationWarning, match="layers.fusion"):
                assert callable(getattr(linear, name))
        for layer in plain:
            layer.pack()
        with pytest.warns(DeprecationWarning, match="interleaved"):
            assert layers.join_weights(plain, in_turn=False)
        with pytest.raises(AttributeError):
            linear.no_such_name  # noqa: B018
        with pytest.raises(AttributeError):
            layers.no_such_name  # noqa: B018
