"""Checkpoints of each producer, and transformers' own models."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from dsv4.checkpoint import Checkpoint, CheckpointError, fill, load, save, write
from dsv4.checkpoint.shards import Shards, read_header
from dsv4.config import ModelConfig
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import FP8_BLOCK, MXFP4, QuantizedTensor
from tests.checkpoint.cases import (
    LAYOUTS,
    SMALL,
    assert_same_state,
    calibrated,
    edit,
    make_model,
    raw,
    saved,
    state,
)
from tests.layers.experts_cases import quantize_apart


def test_reciprocal_global_scales_are_inverted(tmp_path):
    """Pitfall 25: compressed-tensors stores 2688/amax; both scales multiply in memory."""
    model = make_model()
    for layer in model.model.layers:
        quantize_apart(layer.mlp.experts)
        for name, low in (("gate_up_proj", 1e-4), ("down_proj", 3e-3)):
            scale = low * torch.arange(1.0, 5.0)
            setattr(layer.mlp.experts, name + "_input_scale", torch.nn.Parameter(scale, False))
    save(model, tmp_path, layout="compressed-tensors")
    tensors = load_file(tmp_path / "model.safetensors")
    stem = "model.layers.1.mlp.experts.2."
    experts = model.model.layers[1].mlp.experts
    stored = tensors[stem + "up_proj.weight_global_scale"]
    assert torch.equal(stored, 1 / experts.gate_up_proj_scale_2[2, 1:])
    assert torch.equal(
        tensors[stem + "down_proj.input_global_scale"], 1 / experts.down_proj_input_scale[2:3]
    )
    loaded = load(tmp_path, activation="nvfp4", progress=False).model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        for suffix in ("_scale_2", "_input_scale"):
            left, right = (getattr(m, name + suffix) for m in (loaded, experts))
            torch.testing.assert_close(left, right, rtol=2**-23, atol=0)


def test_nvfp4_of_compressed_tensors_own_code(tmp_path):
    """The values equal what compressed-tensors' functions make of the same matrix."""
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)) * 0.1
    quantised = quantize(weight, "nvfp4", scaling="weight")
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    write([(name, quantised, None)], tmp_path, layout="compressed-tensors", config=SMALL)
    stem = name.removesuffix(".weight")
    tensors = load_file(tmp_path / "model.safetensors")
    codes = helpers.unpack_fp4_from_uint8(
        tensors[stem + ".weight_packed"], 32, 64, dtype=torch.float32
    )
    scale = tensors[stem + ".weight_scale"].float() / tensors[stem + ".weight_global_scale"]
    theirs = codes * scale.repeat_interleave(16, 1)
    ours = Checkpoint.open(tmp_path).read(name)
    torch.testing.assert_close(dequantize(ours), theirs, rtol=4 * 2**-24, atol=0)


def test_uncalibrated_experts_take_the_largest_scale(tmp_path):
    """compressed-tensors writes 1.0 where there was no data: unknown, not an amax of 2688."""
    model = make_model()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        quantize_apart(experts)
        experts.gate_up_proj_input_scale = torch.nn.Parameter(
            torch.tensor([1e-4, 1.0, 5e-4, 2e-4]), False
        )
        experts.down_proj_input_scale = torch.nn.Parameter(torch.full((4,), 1e-3), False)
    save(model, tmp_path, layout="compressed-tensors")
    loaded = load(tmp_path, activation="nvfp4", progress=False).model.layers[0].mlp.experts
    torch.testing.assert_close(
        loaded.gate_up_proj_input_scale.data, torch.tensor([1e-4, 5e-4, 5e-4, 2e-4])
    )


def test_gate_and_up_use_the_larger_input_scale(tmp_path):
    """Pitfall 27: the smaller one would clip the other's range."""
    folder = calibrated(tmp_path)

    def change(tensors):
        tensors["layers.0.ffn.experts.1.w1.input_scale"].fill_(0.5)
        tensors["layers.0.ffn.experts.2.w3.input_scale"].fill_(0.25)

    experts = load(edit(folder, change), progress=False).model.layers[0].mlp.experts
    assert experts.gate_up_proj_input_scale[1:3].tolist() == [0.5, 0.25]


def test_a_range_of_experts_takes_its_own_input_scales(tmp_path):
    folder = calibrated(tmp_path)

    def change(tensors):
        for name in tensors:
            if name.startswith("layers.0.") and name.endswith(".input_scale"):
                tensors[name].fill_((int(name.split(".")[4]) + 1) / (16 if ".w2." in name else 4))

    model = make_model()
    model.model.layers[0].mlp.experts = part = DeepseekV4Experts(SMALL, 2, 2)
    others = [f"model.layers.0.mlp.experts.{e}.*" for e in (0, 1)]
    fill(model, Checkpoint.open(edit(folder, change)), ignore=others, progress=False)
    assert part.gate_up_proj_input_scale.tolist() == [0.75, 1.0]
    assert part.down_proj_input_scale.tolist() == [3 / 16, 4 / 16]


def test_every_e8m0_byte_survives(tmp_path):
    """Pitfall 33: viewed, never cast. A cast of 2^-7 to uint8 gives 0 instead of 120."""
    codes = torch.randint(0, 256, (255, 16), dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8).reshape(255, 1).view(torch.float8_e8m0fnu)

    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    blocks = torch.zeros(128, 255 * 128).to(torch.float8_e4m3fn)
    items = [
        (name, QuantizedTensor(codes, scales, None, MXFP4), None),
        (
            "model.layers.0.self_attn.q_a_proj.weight",
            QuantizedTensor(
                blocks, scales.view(torch.uint8).T.contiguous().view(scales.dtype), None, FP8_BLOCK
            ),
            None,
        ),
    ]
    write(items, tmp_path, layout="deepseek", config=SMALL)
    with Checkpoint.open(tmp_path) as checkpoint:
        for key, value, _ in items:
            read = checkpoint.read(key)
            assert read.scales.dtype == torch.float8_e8m0fnu
            assert torch.equal(raw(read.scales), raw(value.scales))
            assert torch.equal(raw(read.codes), raw(value.codes))


def test_packed_codes_stay_bytes(tmp_path):
    """Pitfall 35: uint8 in, uint8 out; low nibble = even column; I8 of MXFP4 is viewed."""
    codes = torch.full((1, 16), 0x21, dtype=torch.uint8)
    codes[0, 1] = 0xF9  # negative: an int8 byte below zero
    scales = torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    value = QuantizedTensor(codes, scales, None, MXFP4)
    write([(name, value, None)], tmp_path, layout="deepseek", config=SMALL)
    header = read_header(tmp_path / "model.safetensors")
    assert header["layers.0.ffn.experts.0.w1.weight"].dtype == torch.int8
    read = Checkpoint.open(tmp_path).read(name)
    assert read.codes.dtype == torch.uint8
    assert dequantize(read)[0, :6].tolist() == [0.5, 1.0, -0.5, -6.0, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float32])
@pytest.mark.parametrize("last", ["scale", "weight_scale", "weight_scale_inv"])
def test_fp8_scales_are_found_by_dtype_whatever_their_name(tmp_path, dtype, last):
    folder = saved(make_model(), tmp_path, layout="deepseek")

    def change(tensors):
        for name in [n for n in tensors if n.endswith(".attn.wq_b.scale")]:
            stem = name.removesuffix("scale")
            tensors[stem + last] = tensors.pop(name).float().to(dtype)

    before = load(folder, progress=False).model.layers[0].self_attn.q_b_proj
    after = load(edit(folder, change), progress=False).model.layers[0].self_attn.q_b_proj
    assert after.weight_scale.dtype == dtype
    assert torch.equal(before.dense_weight(), after.dense_weight())


def test_an_older_indexer_spelling_is_known(tmp_path):
    folder = saved(make_model(), tmp_path, layout="transformers")

    def change(tensors):
        for name in [n for n in tensors if ".scorer." in n]:
            tensors[name.replace(".scorer.", ".")] = tensors.pop(name)

    load(edit(folder, change), progress=False)


def test_stacked_plain_experts_are_read(tmp_path):
    """A state dict of transformers holds [E, 2I, H] and [E, H, I]."""
    model = make_model()
    items = [(n, t, None) for n, t in model.state_dict().items()]
    write(items, tmp_path, layout="transformers", config=SMALL, plain=("*",), plain_dtype=None)
    assert_same_state(state(load(tmp_path, progress=False)), state(model))


def test_stacked_plain_experts_are_read_expert_by_expert(tmp_path, monkeypatch):
    model = make_model()
    items = [(n, t, None) for n, t in model.state_dict().items()]
    write(items, tmp_path, layout="transformers", config=SMALL, plain=("*",), plain_dtype=None)
    stacks = {t.shape for n, t, _ in items if n.endswith(("experts.gate_up_proj", ".down_proj"))}
    stacks = {tuple(shape) for shape in stacks if len(shape) == 3}
    assert len(stacks) == 2
    read, shapes = Shards.read, set()

    def read_shape(*args, **options):
        tensor = read(*args, **options)
        shapes.add(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(Shards, "read", read_shape)
    load(tmp_path, progress=False)
    assert shapes >= {shape[1:] for shape in stacks}
    assert not shapes & stacks


def test_a_stack_with_nan_names_the_matrix(tmp_path):
    model = make_model()
    name = next(n for n, _ in model.named_parameters() if n.endswith("experts.down_proj"))
    with torch.no_grad():
        model.get_parameter(name)[2, 1, 3] = float("nan")
    items = [(n, t, None) for n, t in model.state_dict().items()]
    write(items, tmp_path, layout="transformers", config=SMALL, plain=("*",), plain_dtype=None)
    with pytest.raises(CheckpointError, match=r"down_proj .*, matrix 2, holds 1 .* at \[1, 3\]"):
        load(tmp_path, progress=False)


def test_copies_under_mtp_are_skipped(tmp_path):
    folder = saved(make_model(), tmp_path)

    def change(tensors):
        tensors["mtp.0.emb.tok_emb.weight"] = tensors["embed.weight"].clone()
        tensors["mtp.0.head.weight"] = tensors["head.weight"].clone()

    load(edit(folder, change), progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_float32_by_definition_is_never_narrower(tmp_path, dtype):
    save(make_model(), tmp_path, layout="bf16")
    model = load(tmp_path, dtype=dtype, progress=False)
    scale_dtype = torch.promote_types(dtype, torch.float32)
    layer = model.model.layers[2]
    for tensor in (
        layer.attn_hc.fn,
        layer.ffn_hc.base,
        layer.self_attn.sinks,
        layer.self_attn.compressor.position_bias,
        layer.mlp.gate.e_score_correction_bias,
        model.model.hc_head.hc_scale,
        model.mtp[0].hc_head.hc_fn,
    ):
        assert tensor.dtype == scale_dtype
    assert layer.mlp.gate.weight.dtype == layer.mlp.experts.down_proj.dtype == dtype
    assert model.model.layers[0].mlp.gate.tid2eid.dtype == torch.int64


def _theirs(config: ModelConfig = SMALL):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    values = config.to_transformers_dict()
    return modeling.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**values))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_transformers_model_is_filled_with_the_dequantised_weights(tmp_path, layout):
    save(make_model(), tmp_path, layout=layout)
    ours = load(tmp_path, progress=False)
    theirs = _theirs()
    with Checkpoint.open(tmp_path) as checkpoint:
        fill(theirs, checkpoint, ignore=("mtp.*",), dtype=torch.float32, progress=False)
    for name, module in ours.model.named_modules():
        if isinstance(module, Linear):
            other = theirs.model.get_submodule(name)
            assert torch.equal(module.dense_weight(), other.weight), name
        elif isinstance(module, DeepseekV4Experts):
            other = theirs.model.get_submodule(name)
            for part in ("gate_up_proj", "down_proj"):
                assert torch.equal(module.dense_weight(part), getattr(other, part)), name


def test_transformers_loads_the_bf16_layout_by_itself(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make_model()
    save(model, tmp_path, layout="bf16", plain_dtype=torch.float32)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    # Its own reader of compress_ratios knows 0, 4 and 128 and no MTP entry.
    path.write_text(json.dumps({**SMALL.to_transformers_dict(), "dtype": "float32"}))
    assert values["compress_ratios"] == [0, 4, 8, 0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        if not name.startswith("mtp."):
            assert torch.equal(tensor, theirs[name]), name


def test_a_transformers_model_is_saved(tmp_path):
    theirs = _theirs()
    for layer in theirs.model.layers:
        if hasattr(layer.mlp.gate, "tid2eid"):
            layer.mlp.gate.tid2eid.zero_()
    save(theirs, tmp_path, layout="bf16", plain_dtype=None)
    model = load(tmp_path, mtp=False, progress=False)
    assert_same_state(state(model), {n: t.clone() for n, t in theirs.state_dict().items()})
