"""Checkpoints: every layout bitwise there and back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from fnmatch import fnmatch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv4.checkpoint import Checkpoint, load, save, write
from dsv4.checkpoint.shards import DTYPES, read_header
from dsv4.config import ModelConfig
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor
from tests.checkpoint.cases import (
    LAYOUTS,
    SMALL,
    assert_same_state,
    make_model,
    quantised_modules,
    saved,
    state,
)


@pytest.mark.costly(3)
@given(st.data())
@settings(max_examples=15)
def test_any_mixture_of_formats_comes_back_bitwise(tmp_path_factory, data):
    """Whatever is quantised is stored as it is, in every layout that can hold it."""
    layout = data.draw(st.sampled_from(["nvidia", "transformers", "compressed-tensors"]))
    model = make_model(seed=data.draw(st.integers(0, 100)))
    held = ["nvfp4", "fp8_block"] if layout == "compressed-tensors" else None
    for name, module in quantised_modules(model):
        formats = held or ["nvfp4", "mxfp4", "fp8_block"]
        if isinstance(module, DeepseekV4Experts):
            formats = [f for f in formats if f != "fp8_block"]  # needs I of 128 rows
            if layout == "nvidia" and not name.startswith("mtp."):
                formats = ["nvfp4"]  # MXFP4 would be converted
        chosen = data.draw(st.sampled_from([None, *formats]), label=name)
        if chosen is not None:
            module.quantize(chosen)
    folder = tmp_path_factory.mktemp("model")
    save(model, folder, layout=layout, plain=("*",), plain_dtype=None)
    loaded = load(folder, progress=False)
    expected = state(model)
    if layout == "compressed-tensors":
        for name in expected:
            fp8 = name.endswith("weight_scale") and expected[name].dtype == torch.float8_e8m0fnu
            if fp8:
                expected[name] = expected[name].float()
            if name.endswith("_scale_2"):  # stored as the reciprocal, so twice rounded
                expected[name] = expected[name].reciprocal().reciprocal()
    assert_same_state(state(loaded), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_stable(tmp_path, layout):
    """A layout that is read and written again gives the same file, byte for byte."""
    save(make_model(), tmp_path / "a", layout=layout)
    first = load(tmp_path / "a", progress=False)
    save(first, tmp_path / "b", layout=layout)
    left, right = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
    if layout != "compressed-tensors":  # its reciprocals round twice
        assert left == right
    assert Checkpoint.open(tmp_path / "b").config() == SMALL


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_do_not_depend_on_the_device(tmp_path, device, layout):
    save(make_model(), tmp_path, layout=layout)
    loaded = load(tmp_path, device=device, mxfp4="keep", progress=False)
    assert {t.device.type for t in loaded.state_dict().values()} == {device.type}
    assert_same_state(state(loaded), state(load(tmp_path, progress=False)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mtp_is_not_dropped(tmp_path, layout):
    """Pitfall 36: every MTP tensor of the model is in the file and comes back."""
    model = make_model()
    save(model, tmp_path, layout=layout, plain=("mtp.*",), plain_dtype=None)
    loaded = load(tmp_path, progress=False)
    expected = {n: t for n, t in state(model).items() if n.startswith("mtp.")}
    assert len(expected) > 20
    assert_same_state({n: t for n, t in state(loaded).items() if n.startswith("mtp.")}, expected)
    assert len(load(tmp_path, mtp=False, progress=False).mtp) == 0


EXPECTED = {
    # layout: {original name or transformers name: dtypes of weight and companions}
    "nvidia": {
        "layers.0.ffn.experts.0.w1.weight": "U8",
        "layers.0.ffn.experts.0.w1.weight_scale": "F8_E4M3",
        "layers.0.ffn.experts.0.w1.weight_scale_2": "F32",
        "layers.0.attn.wq_a.weight": "F8_E4M3",
        "layers.0.attn.wq_a.scale": "F8_E8M0",
        "layers.0.attn.wo_a.weight": "F8_E4M3",
        "layers.0.ffn.shared_experts.w2.scale": "F8_E8M0",
        "layers.1.attn.indexer.wq_b.scale": "F8_E8M0",
        "layers.1.attn.compressor.wkv.weight": "BF16",
        "layers.1.attn.compressor.ape": "F32",
        "layers.1.attn.indexer.weights_proj.weight": "BF16",
        "layers.0.attn.attn_sink": "F32",
        "layers.0.hc_attn_fn": "F32",
        "layers.0.attn_norm.weight": "BF16",
        "layers.0.ffn.gate.weight": "BF16",
        "layers.0.ffn.gate.tid2eid": "I64",
        "layers.2.ffn.gate.bias": "F32",
        "mtp.0.ffn.experts.0.w1.weight": "I8",
        "mtp.0.ffn.experts.0.w1.scale": "F8_E8M0",
        "mtp.0.e_proj.weight": "F8_E4M3",
        "embed.weight": "BF16",
        "head.weight": "BF16",
    },
    "deepseek": {
        "layers.0.ffn.experts.0.w2.weight": "I8",
        "layers.0.ffn.experts.0.w2.scale": "F8_E8M0",
        "layers.0.attn.wkv.scale": "F8_E8M0",
    },
    "transformers": {
        "model.layers.0.self_attn.q_a_proj.weight": "U8",
        "model.layers.0.self_attn.q_a_proj.weight_scale_2": "F32",
        "model.layers.0.self_attn.o_a_proj.weight": "BF16",
        "model.layers.1.self_attn.compressor.kv_proj.weight": "U8",
        "model.layers.0.mlp.experts.0.gate_proj.weight": "U8",
        "model.layers.0.mlp.gate.weight": "BF16",
        "model.layers.0.mlp.shared_experts.down_proj.weight_scale": "F8_E4M3",
    },
    "compressed-tensors": {
        "model.layers.0.mlp.experts.0.gate_proj.weight_packed": "U8",
        "model.layers.0.mlp.experts.0.gate_proj.weight_scale": "F8_E4M3",
        "model.layers.0.mlp.experts.0.gate_proj.weight_global_scale": "F32",
        "model.layers.0.self_attn.q_a_proj.weight": "F8_E4M3",
        "model.layers.0.self_attn.q_a_proj.weight_scale": "F32",
        "mtp.0.layer.mlp.experts.0.up_proj.weight": "BF16",
    },
    "bf16": {"layers.0.ffn.experts.0.w1.weight": "BF16", "layers.0.attn.wq_a.weight": "BF16"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_has_the_dtypes_of_the_specification(tmp_path, layout):
    save(make_model(), tmp_path, layout=layout)
    headers = read_header(tmp_path / "model.safetensors")
    for name, dtype in EXPECTED[layout].items():
        assert headers[name].dtype == DTYPES[dtype], name
    # weight_scale_2 is [] in NVIDIA's files and [1] in compressed-tensors'.
    scalars = [i for n, i in headers.items() if n.endswith(("weight_scale_2", "global_scale"))]
    assert {i.shape for i in scalars} <= {(1,) if layout == "compressed-tensors" else ()}
    # A matrix that is quantised has no second set of scales.
    assert not (layout == "nvidia" and "layers.0.ffn.experts.0.w1.scale" in headers)


def test_nvidias_gate_and_up_share_their_global_scale(tmp_path):
    save(make_model(), tmp_path, layout="nvidia")
    tensors = load_file(tmp_path / "model.safetensors")
    values = set()
    for e in range(SMALL.n_routed_experts):
        stem = f"layers.0.ffn.experts.{e}"
        gate, up = (tensors[f"{stem}.{w}.weight_scale_2"] for w in ("w1", "w3"))
        assert torch.equal(gate, up)
        values.add(float(gate))
    assert len(values) == SMALL.n_routed_experts


@pytest.mark.parametrize("stays_nvfp4", [False, True])
def test_a_reader_finds_the_format_of_a_drafts_experts(tmp_path, stays_nvfp4):
    """Engines build MXFP4 for experts that a pattern of ``ignore`` names, NVFP4 for others."""
    model = make_model()
    if stays_nvfp4:
        model.mtp[0].layer.mlp.experts.quantize("nvfp4")
    save(model, tmp_path, layout="nvidia")
    with Checkpoint.open(tmp_path) as stored:
        stored_format = stored.entries["mtp.0.layer.mlp.experts.0.up_proj.weight"].format
    assert stored_format == (NVFP4 if stays_nvfp4 else MXFP4)
    table = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    note = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert note["exclude_modules"] == table["ignore"]
    assert ("mtp.0.ffn.experts" in table["quantized_layers"]) == stays_nvfp4

    def is_ignored(name):
        return any(fnmatch(name, pattern) for pattern in table["ignore"])

    assert is_ignored("mtp.0.ffn.experts") == (not stays_nvfp4)
    for name in ("mtp.0.e_proj", "mtp.0.attn.wq_a", "mtp.0.ffn.shared_experts.w1"):
        assert is_ignored(name)
    assert load(tmp_path, progress=False).mtp[0].layer.mlp.experts.format == stored_format


def test_what_a_layout_cannot_hold_is_refused(tmp_path):
    model = make_model()
    model.model.layers[0].mlp.experts.quantize("mxfp4")
    with pytest.raises(ValueError, match="is mxfp4, which layout compressed-tensors cannot hold"):
        save(model, tmp_path / "a", layout="compressed-tensors")
    with pytest.raises(ValueError, match="layout is 'gguf'"):
        save(model, tmp_path / "a", layout="gguf")
    with pytest.raises(ValueError, match="config is None"):
        write([], tmp_path / "a")


def test_mxfp4_becomes_nvfp4_without_loss(tmp_path):
    save(make_model(), tmp_path, layout="deepseek")
    unconverted = load(tmp_path, progress=False)
    converted = load(tmp_path, mxfp4="nvfp4", activation="nvfp4", progress=False)
    for left, right in zip(unconverted.model.layers, converted.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            assert right.mlp.experts.format is NVFP4
            wide = [x.mlp.experts.dense_weight(name) for x in (left, right)]
            assert torch.equal(*wide)


_MEASURE = """
import sys, re, torch
from dsv4 import checkpoint
import dsv4.model
from tests.checkpoint.cases import loaded_ahead
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
load = loaded_ahead if sys.argv[3] == "True" else checkpoint.load
load(sys.argv[2])  # what torch itself loads on first use
base = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
model = load(sys.argv[1])
size = sum(t.nbytes for t in model.state_dict().values())
print(size, status("VmHWM") - base, status("VmRSS") - base)
"""


def random_items(config: ModelConfig):
    """A stream of random tensors in NVIDIA's formats; holds one tensor at a time."""
    with torch.device("meta"):
        shapes = DeepseekV4ForCausalLM(config).state_dict()
    for name, tensor in shapes.items():
        if name.endswith("tid2eid"):
            yield name, torch.zeros(tensor.shape, dtype=torch.long), None
        elif ".mlp.experts." not in name:
            yield name, torch.randn(tensor.shape), None
        elif name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            inner, hidden = tensor.shape[1] // 2, tensor.shape[2]
            for e in range(config.n_routed_experts):
                for p in ("gate_proj", "up_proj", "down_proj"):
                    rows, columns = (hidden, inner) if p == "down_proj" else (inner, hidden)
                    yield f"{stem}{e}.{p}.weight", _random_nvfp4(rows, columns), torch.ones(1)


def _random_nvfp4(rows: int, columns: int) -> QuantizedTensor:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (rows, columns // 16), dtype=torch.uint8)
    return QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), torch.ones(1), NVFP4)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """The folder of a checkpoint of 200 MB, and its configuration."""
    config = ModelConfig.tiny(
        num_hidden_layers=8,
        hidden_size=512,
        moe_intermediate_size=512,
        n_routed_experts=64,
        num_nextn_predict_layers=0,
    )
    folder = tmp_path_factory.mktemp("big")
    write(random_items(config), folder, layout="nvidia", config=config)
    assert sum(p.stat().st_size for p in folder.glob("*.safetensors")) > 200e6
    yield folder, config
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("ahead", [False, True])
def test_loading_holds_the_model_and_at_most_a_layer(big, tmp_path, ahead):
    (big, config), small = big, saved(make_model(), tmp_path / "small")
    command = [sys.executable, "-c", _MEASURE, str(big), str(small), str(ahead)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    size, peak, after = map(int, out.split())
    layer = size / config.num_hidden_layers
    assert size * 0.98 < peak < size + layer, (size, peak, after)
