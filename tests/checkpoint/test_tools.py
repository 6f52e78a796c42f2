"""Checkpoints that other tools wrote: they load, and mean what the tools say they mean."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from pathlib import Path

import pytest
import torch

from dsv4._checkpoint import names
from dsv4.checkpoint import CheckpointError, load
from dsv4.ops.quantize import dequantize
from dsv4.quant.formats import QuantizedTensor

FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"
TOOLS = sorted(path.name.removesuffix(".tar.xz") for path in FIXTURES.glob("*.tar.xz"))
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_PARTS = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tools")
    for tool in TOOLS:
        with tarfile.open(FIXTURES / f"{tool}.tar.xz") as archive:
            for member in archive.getmembers():
                assert member.isfile()
                assert Path(member.name).name == member.name
                (out / tool).mkdir(exist_ok=True)
                stream = archive.extractfile(member)
                assert stream is not None
                (out / tool / member.name).write_bytes(stream.read())
    return out


def _record(tool: str) -> dict:
    return json.loads((FIXTURES / f"{tool}.json").read_text())


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"


def _weight(model: torch.nn.Module, name: str) -> QuantizedTensor:
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        parts = model.get_submodule(expert.group(1)).get_expert(int(expert.group(2)))
        return parts[_PARTS.index(expert.group(3))]
    return model.get_submodule(name.removesuffix(".weight")).quantized_weight()


def test_the_fixtures_are_there_and_small():
    tools = {tool.partition("-")[0] for tool in TOOLS}
    assert tools == {"transformers", "modelopt", "llmcompressor", "quark"}
    assert sum(path.stat().st_size for path in FIXTURES.iterdir()) < 3e6


@pytest.mark.parametrize("tool", TOOLS)
def test_weights_are_bitwise_what_the_tool_dequantises(folders, tool):
    model = load(folders / tool, progress=False)
    record = _record(tool)
    assert record["dequantised"] or record["loaded"]
    for stored, expected in record["dequantised"].items():
        name = names.canonical(stored.replace(".weight_packed", ".weight"))
        dtype = getattr(torch, expected.split()[0])
        # Adding 0 takes the sign from zeros, which ModelOpt's own table does not have.
        assert _digest(dequantize(_weight(model, name), dtype) + 0.0) == expected, stored
    state = model.state_dict()
    for name, expected in record["loaded"].items():
        # transformers widens some parameters that the file holds in bfloat16.
        assert _digest(state[name].to(getattr(torch, expected.split()[0]))) == expected, name
    assert model.load_report.mtp_layers == len(model.mtp) == 0
    assert model.load_report.draft == "none"


@torch.inference_mode()
def test_a_loaded_model_runs(folders):
    model = load(folders / "llmcompressor-mixed", progress=False)
    assert bool(torch.isfinite(model(torch.tensor([[3, 5, 7]]))).all())


@pytest.mark.parametrize("tool", ["modelopt-nvfp4", "llmcompressor-nvfp4"])
def test_calibrated_scales_are_taken(folders, tool):
    model = load(folders / tool, activation="nvfp4", progress=False)
    for layer in model.model.layers:
        assert bool((layer.mlp.experts.gate_up_proj_input_scale > 0).all())
        assert float(layer.mlp.shared_experts.down_proj.input_scale) > 0


def test_input_scale_2_of_quark_is_an_input_scale(folders):
    model = load(folders / "quark-nvfp4-calibrated", progress=False)
    scale = model.model.layers[2].mlp.shared_experts.down_proj.input_scale
    assert float(scale) == pytest.approx(0.00127, rel=0.02)


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("modelopt-w4a16-nvfp4", r"ffn\.experts\.\d\.w\d\.input_scale is missing"),
        ("llmcompressor-nvfp4a16-late", r"experts\.\d\.\w+\.input_global_scale is missing"),
    ],
)
def test_uncalibrated_experts_name_the_way_out(folders, tool, name):
    with pytest.raises(CheckpointError, match=name) as error:
        load(folders / tool, activation="nvfp4", progress=False)
    assert "input_scales='token'" in str(error.value)
    assert "dsv4.layers.calibrate" in str(error.value)
    assert len(str(error.value).splitlines()) < 12
    model = load(folders / tool, activation="nvfp4", input_scales="token", progress=False)
    assert model.model.layers[0].mlp.experts.gate_up_proj_input_scale is None
    with torch.inference_mode():
        assert bool(torch.isfinite(model(torch.tensor([[3, 5]]))).all())


def test_stored_input_scales_are_left_out_on_demand_and_it_is_said(folders, caplog):
    model = load(
        folders / "modelopt-nvfp4", activation="nvfp4", input_scales="token", progress=False
    )
    assert model.model.layers[0].mlp.experts.down_proj_input_scale is None
    assert model.model.layers[0].self_attn.q_a_proj.input_scale is None
    [(reason, count)] = model.load_report.left_out.items()
    assert "input_scales='token'" in reason
    assert count > 50
    assert f"{count} tensors left out: {reason}" in caplog.text


def test_scales_of_a_kv_cache_are_accepted_and_it_is_said(folders, caplog):
    model = load(folders / "modelopt-nvfp4-fp8-kv", progress=False)
    [(reason, count)] = model.load_report.left_out.items()
    assert "quantised KV cache" in reason
    assert count == 6
    assert len([r for r in caplog.records if "quantised KV cache" in r.message]) == 1
