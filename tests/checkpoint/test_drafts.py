"""Draft layers of a checkpoint: found in the tensors, and said; and values that are refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import Checkpoint, CheckpointError, fill, load, save
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops.quantize import dequantize
from tests.checkpoint.cases import SMALL, assert_same_state, edit, make_model, saved, state


def _without_mtp(tensors):
    for name in [n for n in tensors if n.startswith("mtp.")]:
        del tensors[name]


def _configured(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return saved(make_model(), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def main(tmp_path_factory, whole) -> Path:
    folder = tmp_path_factory.mktemp("main") / "x"
    shutil.copytree(whole, folder)
    return edit(folder, _without_mtp)


def test_mtp_is_found_out_and_said(whole, caplog):
    caplog.set_level(logging.INFO, "dsv4.checkpoint")
    model = load(whole, progress=False)
    assert len(model.mtp) == 1
    assert (model.load_report.mtp_layers, model.load_report.draft) == (1, "mtp")
    assert model.load_report.left_out == {}
    assert "1 MTP layers loaded, draft: mtp" in caplog.text


def test_a_checkpoint_without_mtp_loads_and_it_is_said(main, caplog):
    model = load(main, progress=False)
    assert len(model.mtp) == model.config.num_nextn_predict_layers == 0
    assert (model.load_report.mtp_layers, model.load_report.draft) == (0, "none")
    assert "is 1, but tensors of 0 MTP layers were found" in caplog.text
    with pytest.raises(CheckpointError, match=r"tensors of 0 MTP layers .* mtp=True demands"):
        load(main, mtp=True, progress=False)
    assert len(load(main, mtp=False, progress=False).mtp) == 0


def test_mtp_without_a_configuration_of_it_loads(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "x")
    folder = _configured(tmp_path / "x", num_nextn_predict_layers=0)
    for mtp in (None, True):
        assert_same_state(
            state(load(folder, mtp=mtp, progress=False)), state(load(whole, progress=False))
        )


def test_fewer_layers_than_demanded_are_refused(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "x")
    folder = _configured(
        tmp_path / "x", num_nextn_predict_layers=2, compress_ratios=[0, 4, 8, 0, 0]
    )
    with pytest.raises(
        CheckpointError, match=r"tensors of 1 MTP layers .* num_nextn_predict_layers is 2"
    ):
        load(folder, mtp=True, progress=False)
    assert len(load(folder, progress=False).mtp) == 1


def test_mtp_that_is_left_out_is_said(whole, caplog):
    model = load(whole, mtp=False, progress=False)
    [(reason, count)] = model.load_report.left_out.items()
    assert reason == "MTP layers (mtp.*)"
    assert count > 20
    assert model.load_report.draft == "mtp"
    assert f"{count} tensors left out: {reason}" in caplog.text


def test_a_damaged_mtp_layer_is_still_an_error(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "x")
    edit(tmp_path / "x", lambda tensors: tensors.pop("mtp.0.enorm.weight"))
    with pytest.raises(CheckpointError, match=r"mtp\.0\.enorm\.weight is missing"):
        load(tmp_path / "x", progress=False)


def test_a_model_that_load_did_not_make_has_no_report():
    assert DeepseekV4ForCausalLM(SMALL).load_report is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("check", [load, lambda f, **_: Checkpoint.open(f).read(SINKS)])
def test_sinks_of_nan_and_infinity_are_refused(whole, tmp_path, value, check):
    shutil.copytree(whole, tmp_path / "x")

    def change(tensors):
        tensors["layers.1.attn.attn_sink"][2] = value

    with pytest.raises(CheckpointError, match=r"attn_sink .*1 values .* the first at \[2\]"):
        check(edit(tmp_path / "x", change), progress=False)


SINKS = "model.layers.1.self_attn.sinks"


def test_a_sink_of_minus_infinity_is_a_head_without_one(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "x")

    def change(tensors):
        tensors["layers.1.attn.attn_sink"][2] = -float("inf")

    model = load(edit(tmp_path / "x", change), progress=False)
    assert model.model.layers[1].self_attn.sinks[2] == -float("inf")


@pytest.mark.parametrize("name", ["embed.weight", "layers.0.ffn.experts.0.w1.weight"])
def test_a_value_beyond_the_dtype_asked_for_is_refused(tmp_path, name):
    folder = saved(make_model(), tmp_path, layout="bf16", plain_dtype=torch.float32)
    edit(folder, lambda tensors: tensors[name].view(-1)[3].fill_(1e6))
    with pytest.raises(CheckpointError, match=r"holds 1e\+06, which torch.float16 cannot"):
        load(folder, dtype=torch.float16, progress=False)
    load(folder, dtype=torch.bfloat16, progress=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_fp8_block_scales_multiply_exactly(tmp_path, dtype):
    """llm-compressor writes the scales in the model's dtype: 1.0 must not become 2^0 by bytes."""
    model = make_model(SMALL.replace(moe_intermediate_size=128))
    for layer in model.model.layers:
        layer.mlp.experts.quantize("fp8_block")
    save(model, tmp_path, layout="compressed-tensors")
    scales = {}

    def change(tensors):
        for name in [n for n in tensors if n.endswith(".weight_scale")]:
            if tensors[name].dtype == torch.float32:
                tensors[name] = (tensors[name] * 1.2890625).to(dtype)
                scales[name] = tensors[name].float()

    edit(tmp_path, change)
    loaded = load(tmp_path, progress=False)
    name = "model.layers.1.self_attn.q_b_proj"
    weight = loaded.get_submodule(name).quantized_weight()
    assert weight.scales.dtype == torch.float32
    assert torch.equal(weight.scales, scales[f"{name}.weight_scale"])
    expert = loaded.model.layers[0].mlp.experts.get_expert(2)[1]
    assert torch.equal(expert.scales, scales["model.layers.0.mlp.experts.2.up_proj.weight_scale"])
    wide = expert.codes.double() * expert.scales.double().item()
    assert torch.equal(dequantize(expert).double(), wide)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_bad_bf16_scales_are_refused(tmp_path, value):
    folder = saved(make_model(), tmp_path, layout="compressed-tensors")
    name = "model.layers.0.self_attn.q_b_proj.weight_scale"

    def change(tensors):
        tensors[name] = tensors[name].bfloat16()
        tensors[name][0, 0] = value

    with pytest.raises(CheckpointError, match=r"weight_scale \(BF16 .*\) holds 1 values"):
        load(edit(folder, change), progress=False)


def test_options_that_are_unknown_are_refused(whole):
    with pytest.raises(ValueError, match="input_scales is 'row', wanted 'stored' or 'token'"):
        load(whole, input_scales="row", progress=False)
    with pytest.raises(TypeError, match="mtp is 'yes', wanted None, True or False"):
        load(whole, mtp="yes", progress=False)  # type: ignore[arg-type]
    for dtype in ("int8", torch.int64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"dtype is .*, wanted one of torch\.float16"):
            load(whole, dtype=dtype, progress=False)
        with pytest.raises(ValueError, match=r"dtype is .*, wanted one of torch\.float16"):
            fill(make_model(), Checkpoint.open(whole), dtype=dtype, progress=False)


def test_a_name_of_a_hub_is_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder 'nvidia/x'.*A name on a hub"):
        load("nvidia/x", progress=False)
    with pytest.raises(ValueError, match="source is Linear, wanted a Deepseek"):
        save(torch.nn.Linear(2, 2), tmp_path / "x")
