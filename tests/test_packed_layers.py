"""Layers with packed NVFP4 weights: nothing lost, nothing changed, one matrix where they join."""

from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import layers
from dsv4.checkpoint import Checkpoint, CheckpointError, fill, save
from dsv4.config import ModelConfig
from dsv4.formats import FRAGMENTS, LINEAR, NVFP4, QuantizedTensor, cat_rows
from dsv4.layers.observer import LARGEST
from dsv4.ops import quantize
from dsv4.testing import strategies
from dsv4.testing.models import random_model

SIZES = {"moe_intermediate_size": 64, "q_lora_rank": 64, "o_lora_rank": 32}
KINDS = (layers.Linear, layers.DeepseekV4Experts)
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4"])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])


def normal(seed, *shape):
    return torch.randn(shape, generator=strategies.generator(seed), dtype=torch.float64)


def raw(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def same_state(one, two):
    assert list(one) == list(two)
    for name in one:
        assert one[name].dtype == two[name].dtype, name
        assert one[name].shape == two[name].shape, name
        assert torch.equal(raw(one[name]), raw(two[name])), name


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
    """Whether the layers' weights are one matrix, rows after rows."""
    joint = parts[0].joint
    return joint is not None and all(p.joint is joint for p in parts)


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


class TestJoint:
    @given(strategies.seeds(), ACTIVATIONS, st.tuples(*[st.sampled_from([None, 0.01, 0.1])] * 2))
    def test_gives_the_same_bits_without_a_copy(self, seed, activation, scales):
        joined, plain = pair(seed, activation, scales)
        x = normal(seed + 5, 3, 64).float()
        expected = layers.joint_linear(plain, x)
        alone = [layer(x) for layer in plain]
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr("dsv4.layers.linear.cat_rows")
            assert torch.equal(layers.joint_linear(joined, x), expected)
            for layer, out in zip(joined, alone, strict=True):
                assert torch.equal(layer(x), out)

    def test_the_order_matters(self):
        joined, plain = pair()
        x = normal(3, 4, 64)
        for order in ((1, 0), (0,), (0, 1, 0)):
            found, expected = (
                layers.joint_linear([parts[i] for i in order], x) for parts in (joined, plain)
            )
            assert torch.equal(found, expected)

    def test_every_bit_comes_back(self):
        joined, plain = pair(scales=(0.5, None))
        for one, two in zip(joined, plain, strict=True):
            same_state(one.state_dict(), two.state_dict())
            one.unpack()
            same_state(dict(one.named_parameters()), two.state_dict())
            assert "JointWeight" not in repr(one)

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
        assert joined[0].joint is None
        x = normal(3, 4, 64).float()
        assert torch.equal(layers.joint_linear(joined, x), layers.joint_linear(plain, x))
        for one, two in zip(joined, plain, strict=True):
            same_state(one.state_dict(), two.state_dict())
        if leave != "plain":
            joined[0].pack()
            assert layers.join_weights(joined)
            assert torch.equal(layers.joint_linear(joined, x), layers.joint_linear(plain, x))

    def test_only_like_layers_join(self):
        plain, other, wide = linear(1, 32, 64), linear(2, 32, 64), linear(3, 32, 128)
        many = linear(4, 32, 64)
        weight = many.quantized_weight()
        rows = QuantizedTensor(weight.codes, weight.scales, weight.row_scale(), NVFP4)
        many.set_weight(rows)
        for layer in (other, wide, many):
            layer.pack()
            assert not layers.join_weights([other, plain])
        assert not layers.join_weights([other, wide])
        assert not layers.join_weights([other, many])
        assert not layers.join_weights([many, other])

    @pytest.mark.parametrize("how", ["deepcopy", "save", "move", "cast"])
    def test_stays_joint(self, how):
        model, plain, _ = packed_and_not()
        if how == "deepcopy":
            model, old = copy.deepcopy(model), model
            assert old.model.layers[0].self_attn.q_a_proj.joint is not None
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
        found = sum(t.nbytes for t in torch.nn.ModuleList(joined).buffers())
        assert found == sum(layer.quantized_weight().nbytes for layer in plain)
        assert not any(name for layer in joined for name, _ in layer.named_parameters())


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
        assert len(report.joined) == 2 * (len(plain.model.layers) + len(plain.mtp))
        ids = torch.arange(37)[None]
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))
            streams = normal(2, 1, 37, model.config.hc_mult, model.config.hidden_size).float()
            for one, two in zip(model.draft(ids, streams), plain.draft(ids, streams), strict=True):
                assert torch.equal(one, two)

    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    def test_generates_the_same_tokens(self, activation):
        model, plain, _ = packed_and_not(activation)
        prompts = [list(range(11)), [5, 3], list(range(40, 70))]
        found = model.generate(prompts, 6, stop_ids=(), chunk=8)
        assert found == plain.generate(prompts, 6, stop_ids=(), chunk=8)

    def test_what_cannot_be_packed_stays_and_says_why(self):
        config = ModelConfig.tiny()
        plain = random_model(config, 1)
        layers.quantize_(plain, "nvfp4", ["*.self_attn.*", "*.shared_experts.*"])
        model = copy.deepcopy(plain)
        report = layers.pack_(model)
        found = {n for n, m in plain.named_modules() if isinstance(m, KINDS)}
        assert set(report.packed) | set(report.kept) == found
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
        for one in (model, plain):
            with torch.no_grad(), layers.calibrate(one):
                one(ids)
        same_state(model.state_dict(), plain.state_dict())
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))

    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
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
        before = other.model.layers[0].self_attn.q_a_proj.joint.codes.clone()
        message = r"q_a_proj\.weight: the layer is packed.*unpack_ first"
        with pytest.raises(RuntimeError, match=message):
            other.load_state_dict(state)
        assert torch.equal(other.model.layers[0].self_attn.q_a_proj.joint.codes, before)

    @pytest.mark.parametrize("layout", ["nvidia", "transformers", "bf16"])
    def test_a_checkpoint_is_the_same_file_by_file(self, tmp_path, layout):
        model, plain, _ = packed_and_not()
        for name, one in (("packed", model), ("plain", plain)):
            save(one, tmp_path / name, layout=layout)
        files = sorted(path.name for path in (tmp_path / "plain").iterdir())
        assert files == sorted(path.name for path in (tmp_path / "packed").iterdir())
        for name in files:
            found, expected = ((tmp_path / k / name).read_bytes() for k in ("packed", "plain"))
            assert found == expected, name

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
            found = cat_rows(parts).validate()
            layouts = {part.layout for part in parts}
            assert found.layout == (FRAGMENTS if layouts == {FRAGMENTS} else LINEAR)
            assert found.segments == expected.segments
            assert torch.equal(found.global_scale, expected.global_scale)
            linear = found.with_layout(LINEAR)
            assert torch.equal(raw(linear.codes), raw(expected.codes))
            assert torch.equal(raw(linear.scales), raw(expected.scales))
