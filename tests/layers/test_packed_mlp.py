"""The shared expert with packed weights: gate and up interleaved, one operator, nothing lost."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from dsv4 import dispatch, layers
from dsv4.config import ModelConfig
from dsv4.layers._fused_weight import FusedWeight
from dsv4.layers.observer import LARGEST
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.swiglu import swiglu
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_
from tests.layers.packed_cases import normal, raw, same_state

PARTS = ("gate_proj", "up_proj", "down_proj")
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])
SCALES = st.tuples(*[st.sampled_from([None, 0.01, 0.1])] * 3)  # of activations, of each part
RATIOS = st.floats(0.1, 10)  # of up's global scale to gate's


def close(actual, expected, relative=1e-12):
    return bool((actual.double() - expected.double()).norm() <= relative * expected.double().norm())


def shared(seed, activation="bf16", scales=(None,) * 3, ratio=3.0, hidden=64, inner=64):
    """An NVFP4 shared expert."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inner}
    config = ModelConfig.tiny(activation=activation, **sizes)
    mlp = randomize_(layers.DeepseekV4MLP(config).requires_grad_(False), seed)
    mlp.up_proj.weight *= ratio
    for name in PARTS:  # apart: together gate and up would get one global scale
        mlp.get_submodule(name).quantize()
    for name, scale in zip(PARTS, scales, strict=True):
        part = mlp.get_submodule(name)
        if scale is not None:
            part.set_weight(part.quantized_weight(), torch.tensor(scale))
    return mlp


def packed_copy(mlp):
    other = copy.deepcopy(mlp)
    report = layers.pack_(other)
    assert report.joined == [("gate_proj", "up_proj")]
    assert report.kept == {}
    assert other.gate_proj.fused is other.up_proj.fused
    return other


def interleaved(mlp):
    """Gate and up of an unpacked MLP as one matrix, rows interleaved, each with its own scale."""
    pair = [mlp.get_submodule(name).quantized_weight() for name in PARTS[:2]]
    codes, scales = (
        torch.stack([raw(getattr(part, name)) for part in pair], 1).flatten(0, 1)
        for name in ("codes", "scales")
    )
    scale = torch.cat([part.global_scale for part in pair]).repeat(pair[0].rows)
    return QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), scale, NVFP4)


class TestValues:
    @given(strategies.seeds(), st.integers(0, 5), ACTIVATIONS, SCALES, RATIOS)
    def test_gives_the_same(self, seed, tokens, activation, scales, ratio):
        """Results are equal but for the rounding of the first GEMM, which float64 does not see."""
        plain = shared(seed, activation, scales, ratio)
        x = normal(seed + 1, tokens, 64)
        result = packed_copy(plain)(x)
        assert result.dtype == x.dtype
        assert close(result, plain(x))

    @given(strategies.seeds(), st.integers(0, 5), ACTIVATIONS, SCALES)
    def test_the_difference_is_one_rounding(self, seed, tokens, activation, scales):
        """bfloat16: of the first GEMM, which stays float32 where the layer is packed."""
        plain = shared(seed, activation, scales)
        packed, weight = packed_copy(plain), interleaved(plain)
        x = (5 * normal(seed + 1, tokens, 64)).bfloat16()
        known = [scale for scale in scales[:2] if scale is not None]
        common = max(known) if len(known) == 2 and activation == "nvfp4" else None
        scale = None if common is None else torch.tensor([common])
        both = gemm(x, weight, activation=activation, input_scale=scale, out_dtype=torch.float32)
        for mlp, product in ((packed, both), (plain, both.bfloat16())):
            inner = swiglu(product, plain.limit, layout="interleaved", out_dtype=torch.bfloat16)
            assert_bitwise(mlp(x), plain.down_proj(inner), mlp.gate_proj.layout)

    @given(strategies.seeds(), RATIOS)
    @settings(max_examples=10)
    def test_pitfall_32_the_clamp_acts_on_real_values(self, seed, ratio):
        """One-sided for gate, two-sided for up, whatever the global scales of both."""
        plain = shared(seed, ratio=ratio)
        assert max(part.weight_scale_2 for part in (plain.gate_proj, plain.up_proj)) < 0.01
        x = 40 * max(1, 1 / ratio) * normal(seed, 12, 64)
        gate, up = (x @ plain.get_submodule(n).dense_weight(torch.float64).T for n in PARTS[:2])
        limit = plain.limit
        assert (gate > limit).any()
        assert (gate < -limit).any()
        assert (up.abs() > limit).any()
        inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        expected = inner @ plain.down_proj.dense_weight(torch.float64).T
        assert close(packed_copy(plain)(x), expected, 1e-6)

    @given(strategies.seeds(), st.integers(0, 5), ACTIVATIONS, SCALES)
    def test_a_layer_alone_is_as_before(self, seed, tokens, activation, scales):
        plain = shared(seed, activation, scales)
        packed, x = packed_copy(plain), normal(seed + 1, tokens, 64).float()
        for name in PARTS:
            first, two = packed.get_submodule(name), plain.get_submodule(name)
            assert torch.equal(first(x), two(x))
            assert first.quantized_weight().validate().layout == first.layout == FRAGMENTS
            assert torch.equal(first.dense_weight(), two.dense_weight())

    def test_a_leading_shape(self):
        mlp = packed_copy(shared(1))
        x = normal(1, 2, 3, 64).float()
        assert torch.equal(mlp(x), mlp(x.flatten(0, 1)).view(2, 3, 64))

    def test_one_operator_and_no_copy(self, monkeypatch):
        mlp, result = packed_copy(shared(1)), []
        monkeypatch.setattr(FusedWeight, "part", lambda *_: pytest.fail("took a part"))
        monkeypatch.delattr("dsv4.layers.fusion.cat_rows")
        monkeypatch.setattr(
            dispatch,
            "run",
            lambda op, *rest, run=dispatch.run: (result.append(op), run(op, *rest))[1],
        )
        mlp(normal(1, 3, 64).float())
        assert result == ["gemm_swiglu", "gemm"]


class TestStorage:
    @given(strategies.seeds(), RATIOS, SCALES)
    @settings(max_examples=20)
    def test_every_bit_comes_back(self, seed, ratio, scales):
        """Any codes, any scales of sign 0, NaN too."""
        plain, generator = shared(seed, "nvfp4", scales, ratio), strategies.generator(seed)
        for name in PARTS:
            part = plain.get_submodule(name)
            for tensor, top in ((part.weight, 256), (raw(part.weight_scale), 128)):
                tensor.copy_(torch.randint(0, top, tensor.shape, generator=generator))
        packed = packed_copy(plain)
        same_state(packed.state_dict(), plain.state_dict())
        assert not {t for t in packed.state_dict().values() if not t.is_contiguous()}
        layers.unpack_(packed)
        assert {packed.get_submodule(name).layout for name in PARTS} == {LINEAR}
        same_state(dict(packed.named_parameters()), dict(plain.named_parameters()))
        assert dict(packed.named_buffers()) == {}

    def test_the_matrix_is_held_once(self):
        plain = shared(1)
        packed, first = packed_copy(plain), interleaved(plain)
        fused = packed.gate_proj.fused.whole()
        assert torch.equal(raw(fused.with_layout(LINEAR).codes), first.codes)
        assert torch.equal(fused.global_scale, first.global_scale)
        assert sum(t.nbytes for t in packed.buffers()) == first.nbytes
        assert {name for name, _ in packed.named_parameters()} == {
            f"down_proj.{name}" for name in ("weight", "weight_scale", "weight_scale_2")
        }

    def test_packing_twice_is_once(self):
        mlp = packed_copy(shared(1))
        fused = mlp.gate_proj.fused
        assert layers.pack_(mlp).joined == [("gate_proj", "up_proj")]
        assert mlp.gate_proj.fused is fused

    @pytest.mark.parametrize("how", ["deepcopy", "save", "cast"])
    def test_copies_and_casts(self, how):
        plain = shared(1, "nvfp4", (0.1, 0.2, 0.3))
        mlp, x = packed_copy(plain), normal(1, 5, 64).float()
        expected = mlp(x)
        if how == "deepcopy":
            mlp, old = copy.deepcopy(mlp), mlp
            layers.unpack_(old)
        elif how == "save":
            file = io.BytesIO()
            torch.save(mlp, file)
            file.seek(0)
            mlp = torch.load(file, weights_only=False)
        else:
            mlp.to(torch.bfloat16).double().type(torch.float32)
        assert mlp.gate_proj.fused is mlp.up_proj.fused
        assert torch.equal(mlp(x), expected)
        same_state(mlp.state_dict(), plain.state_dict())

    def test_moves(self):
        mlp = packed_copy(shared(1)).to("meta")
        assert mlp.gate_proj.fused is mlp.up_proj.fused
        assert {t.device.type for t in mlp.state_dict().values()} == {"meta"}
        assert {part.device.type for part in (mlp.gate_proj, mlp.up_proj)} == {"meta"}
        assert mlp(torch.zeros(3, 64, device="meta")).shape == (3, 64)

    def test_a_packed_one_refuses_to_load(self):
        mlp = packed_copy(shared(1))
        before = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"gate_proj\.weight: the layer is packed.*unpack_"):
            mlp.load_state_dict(shared(2).state_dict())
        same_state(mlp.state_dict(), before)


class TestJoining:
    @pytest.mark.parametrize("leave", ["unpack", "set", "plain"])
    @pytest.mark.parametrize("name", PARTS[:2])
    def test_a_layer_can_leave(self, leave, name):
        plain = shared(1)
        packed = packed_copy(plain)
        first, two = (mlp.get_submodule(name) for mlp in (packed, plain))
        if leave == "unpack":
            first.unpack()
        elif leave == "set":
            first.set_weight(first.quantized_weight(), torch.tensor(1.0))
            two.set_weight(two.quantized_weight(), torch.tensor(1.0))
        else:
            for layer in (first, two):
                layer.set_weight(normal(9, 64, 64))
        x = normal(3, 4, 64)
        assert close(packed(x), plain(x))
        same_state(packed.state_dict(), plain.state_dict())
        if leave != "plain":
            assert layers.pack_(packed).joined
            assert packed.gate_proj.fused.interleaved
            assert close(packed(x), plain(x))

    def test_from_one_after_another_to_interleaved_and_back(self):
        plain = shared(1)
        packed, x = packed_copy(plain), normal(3, 4, 64)
        pair = [packed.gate_proj, packed.up_proj]
        for is_interleaved in (False, True, False):
            assert layers.join_weights(pair, interleaved=is_interleaved)
            assert pair[0].fused.interleaved == is_interleaved
            assert close(packed(x), plain(x))
            # Not bitwise: a BLAS may sum in another order for another number of rows.
            separate = torch.cat([layer(x) for layer in pair], -1)
            torch.testing.assert_close(
                layers.concatenated_linear(pair, x), separate, rtol=0, atol=1e-13
            )
            same_state(packed.state_dict(), plain.state_dict())

    def test_up_before_gate_is_not_taken_for_gate_before_up(self):
        plain = shared(1)
        packed, x = packed_copy(plain), normal(3, 4, 64)
        assert layers.join_weights([packed.up_proj, packed.gate_proj], interleaved=True)
        assert close(packed(x), plain(x))

    def test_layers_that_quantise_differently(self):
        plain, x = shared(1), normal(3, 4, 64)
        plain.up_proj.activation = "nvfp4"
        assert close(packed_copy(plain)(x), plain(x))

    def test_only_layers_of_one_shape(self):
        pair = [layers.Linear(64, rows).requires_grad_(False) for rows in (32, 48)]
        for layer in pair:
            layer.quantize()
            layer.pack()
        assert not layers.join_weights(pair, interleaved=True)
        assert pair[0].fused is None
        assert layers.join_weights(pair)

    @pytest.mark.parametrize("only", [None, "gate_proj"])
    def test_calibration_sees_the_same(self, only):
        plain = shared(1, "nvfp4")
        packed, x = packed_copy(plain), normal(1, 30, 64)
        results = []
        for mlp in (plain, packed):
            with layers.calibrate(mlp if only is None else mlp.get_submodule(only)):
                results.append(mlp(x))
            assert mlp.gate_proj.input_scale.item() == pytest.approx(x.abs().max().item() / LARGEST)
        if only is None:
            assert close(*results)
        same_state(packed.state_dict(), plain.state_dict())
        assert close(packed(x), plain(x))

    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    def test_compiles_to_one_graph(self, activation):
        mlp, x = packed_copy(shared(1, activation)), normal(1, 5, 64).bfloat16()
        torch._dynamo.reset()
        compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), mlp(x))


@pytest.mark.gpu
class TestOnGpu:
    """Layers of sizes that the kernels support: K is a multiple of 128."""

    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    @pytest.mark.parametrize("tokens", [0, 1, 9, 40, 300])
    def test_is_its_operators(self, tokens, activation):
        plain = shared(1, activation, hidden=256, inner=128).cuda()
        packed, weight = packed_copy(plain), interleaved(plain).with_layout(FRAGMENTS)
        x = (5 * normal(1, tokens, 256)).bfloat16().cuda()
        inner = gemm_swiglu(x, weight, plain.limit, activation=activation)
        down = packed.down_proj.quantized_weight()
        assert_bitwise(packed(x), gemm(inner, down, activation=activation), "result")
        assert close(packed(x), plain(x), 0.02 if activation == "bf16" else 0.1)

    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    @pytest.mark.parametrize("tokens", [1, 40])
    def test_a_captured_graph_takes_new_data(self, tokens, activation):
        mlp = packed_copy(shared(1, activation, hidden=256, inner=128)).cuda()
        x = torch.zeros(tokens, 256, dtype=torch.bfloat16, device="cuda")
        with torch.inference_mode():
            mlp(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = mlp(x)
            for seed in range(20):
                x.copy_(normal(seed, tokens, 256))
                out.fill_(math.nan)
                graph.replay()
                assert_bitwise(out, mlp(x), f"input {seed}")
