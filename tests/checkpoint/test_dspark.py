"""DSpark drafts in checkpoints: found, loaded in the format they are stored in, and written."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.checkpoint import Checkpoint, CheckpointError, convert, load, save, verify
from dsv4.commands.checkpoints import lines
from dsv4.config import DSparkConfig, ModelConfig
from dsv4.layers.linear import Linear
from dsv4.ops.quantize import dequantize
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor
from tests.checkpoint.cases import (
    LAYOUTS,
    SMALL,
    assert_same_state,
    edit,
    make_model,
    raw,
    saved,
    state,
)

DSPARK = DSparkConfig(block_size=5, noise_token_id=63, target_layer_ids=(0, 1, 2), markov_rank=8)
CONFIG = SMALL.replace(dspark=DSPARK)
OWN = (
    *("mtp.0.main_proj.weight", "mtp.0.main_norm.weight"),
    *("mtp.2.norm.weight", "mtp.2.hc_head.hc_fn", "mtp.2.confidence_head.proj.weight"),
    *("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w2.weight"),
)


def _configured(folder: Path, **changes) -> Path:
    """Change config.json; None removes a field."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The same model in both layouts in which such checkpoints are published."""
    root, model = tmp_path_factory.mktemp("dspark"), make_model(CONFIG)
    return {name: saved(model, root / name, layout=name) for name in ("deepseek", "nvidia")}


def copied(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "x")
    return tmp_path / "x"


@pytest.mark.parametrize("layout", ["deepseek", "nvidia"])
def test_the_files_are_those_of_the_published_ones(folders, layout):
    tensors = load_file(folders[layout] / "model.safetensors")
    values = json.loads((folders[layout] / "config.json").read_text())
    assert values["num_nextn_predict_layers"] == 1
    assert values["dspark_target_layer_ids"] == [0, 1, 2]
    assert values["compress_ratios"][-3:] == [0, 0, 0]
    assert len(values["compress_ratios"]) == 6
    draft = {name: t for name, t in tensors.items() if name.startswith("mtp.")}
    for stage in range(3):
        for projection in ("w1", "w2", "w3"):
            stem = f"mtp.{stage}.ffn.experts.3.{projection}"
            assert draft[f"{stem}.weight"].dtype == torch.int8
            assert draft[f"{stem}.scale"].dtype == torch.float8_e8m0fnu
    assert not [n for n in draft if n.endswith(("weight_scale", "weight_scale_2", "tid2eid"))]
    assert draft["mtp.0.main_proj.weight"].dtype == torch.float8_e4m3fn
    assert tuple(draft["mtp.0.main_proj.weight"].shape) == (64, 192)
    assert draft["mtp.0.main_proj.scale"].dtype == torch.float8_e8m0fnu
    assert draft["mtp.2.confidence_head.proj.weight"].dtype == torch.bfloat16
    assert "mtp.2.hc_head_fn" in draft
    only = {0: ("main_proj", "main_norm"), 2: ("norm.", "hc_head", "markov_head", "confidence")}
    for name in draft:
        _, stage, rest = name.split(".", 2)
        for number, parts in only.items():
            assert not rest.startswith(parts) or int(stage) == number, name
    # Published stages have 1568, 1565 and 1572 tensors, 6 of each of 256 experts among them.
    for stage, count in enumerate((1568, 1565, 1572)):
        others = count - 6 * 256 + 6 * CONFIG.n_routed_experts
        assert sum(n.startswith(f"mtp.{stage}.") for n in draft) == others
    experts = "layers.1.ffn.experts.3.w1"
    main = tensors[f"{experts}.weight"].dtype, f"{experts}.weight_scale_2" in tensors
    assert main == ((torch.uint8, True) if layout == "nvidia" else (torch.int8, False))


@pytest.mark.parametrize("mxfp4", ["keep", "lossless"])
@pytest.mark.parametrize("layout", ["deepseek", "nvidia"])
def test_the_draft_is_loaded_as_it_is_stored(folders, layout, mxfp4, caplog):
    caplog.set_level(logging.INFO, "dsv4.checkpoint")
    folder = folders[layout]
    model = load(folder, mxfp4=mxfp4, progress=False)
    report = model.load_report
    assert (report.mtp_layers, report.dspark_stages, report.draft) == (0, 3, "dspark")
    assert report.left_out == {}
    assert "3 DSpark stages loaded, draft: dspark" in caplog.text
    assert len(model.dspark) == 3
    assert model.config == CONFIG
    format = NVFP4 if mxfp4 == "lossless" else MXFP4
    with Checkpoint.open(folder) as checkpoint:
        for stage, module in enumerate(model.dspark):
            assert module.layer.mlp.experts.format == format
            for expert in range(4):
                parts = module.layer.mlp.experts.get_expert(expert)
                for name, part in zip(("gate", "up", "down"), parts, strict=True):
                    source = f"mtp.{stage}.layer.mlp.experts.{expert}.{name}_proj.weight"
                    stored = checkpoint.read(source)
                    assert isinstance(stored, QuantizedTensor)
                    assert stored.format == MXFP4
                    wide = torch.float64
                    assert torch.equal(dequantize(part, wide), dequantize(stored, wide))
        for name in OWN:
            value, loaded = checkpoint.read(name), _value(model, name)
            for matrix in (value, loaded):
                assert isinstance(matrix, QuantizedTensor) == name.endswith("main_proj.weight")
            if isinstance(value, QuantizedTensor):
                value, loaded = dequantize(value), dequantize(loaded)
            assert torch.equal(value.float(), loaded.float()), name


def _value(model, name: str):
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, Linear) and module.format is not None:
        return module.quantized_weight()
    return getattr(module, name.rpartition(".")[2])


@pytest.mark.parametrize("mxfp4", ["keep", "lossless"])
@pytest.mark.parametrize("layout", ["deepseek", "nvidia"])
def test_loading_and_saving_gives_the_same_bytes(folders, layout, mxfp4, tmp_path):
    model = load(folders[layout], mxfp4=mxfp4, progress=False)
    save(model, tmp_path, layout=layout)
    assert _same_files(folders[layout], tmp_path)
    assert verify(tmp_path, progress=False) > 0


def _same_files(left: Path, right: Path, prefix: str = "") -> bool:
    """Whether the tensors whose names begin so are equal in every byte, and the configurations."""
    first, second = (
        {n: t for n, t in load_file(folder / "model.safetensors").items() if n.startswith(prefix)}
        for folder in (left, right)
    )
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(raw(first[name]), raw(second[name])), name
    return ModelConfig.from_path(left) == ModelConfig.from_path(right)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convert_writes_the_whole_draft(folders, layout, tmp_path):
    source = folders["nvidia"]
    if layout in ("compressed-tensors", "deepseek"):
        # The one has no MXFP4, the other no NVFP4 for the main experts.
        with pytest.raises(ValueError, match=layout):
            convert(source, tmp_path / "x", layout=layout, progress=False)
        return
    convert(source, tmp_path / "x", layout=layout, progress=False)
    with Checkpoint.open(source) as left, Checkpoint.open(tmp_path / "x") as right:
        assert left.entries.keys() == right.entries.keys()
        assert not right.stray
        for name in left.entries:
            if name.startswith("mtp."):
                values = [checkpoint.read(name) for checkpoint in (left, right)]
                dense = [dequantize(v) if isinstance(v, QuantizedTensor) else v for v in values]
                assert torch.equal(dense[0].float(), dense[1].float()), name
    assert ModelConfig.from_path(tmp_path / "x") == CONFIG
    if layout != "bf16":
        convert(tmp_path / "x", tmp_path / "y", layout="nvidia", progress=False)
        assert _same_files(source, tmp_path / "y", "mtp.")


def test_a_draft_that_became_nvfp4_is_converted_back_for_nvidias_layout(folders, tmp_path):
    """Engines take MXFP4 for granted where ``ignore`` names mtp.*, whatever the file has."""
    model = load(folders["nvidia"], mxfp4="lossless", progress=False)
    save(model, tmp_path / "x", layout="transformers")
    convert(tmp_path / "x", tmp_path / "y", layout="nvidia", progress=False)
    with Checkpoint.open(tmp_path / "x") as between:
        assert between.entries["mtp.1.layer.mlp.experts.0.up_proj.weight"].format == NVFP4
    assert _same_files(folders["nvidia"], tmp_path / "y", "mtp.")


def test_the_number_of_stages_is_that_of_the_target_layers(folders, tmp_path):
    folder = copied(folders["deepseek"], tmp_path)
    for count in (0, 1, 3):
        _configured(folder, num_nextn_predict_layers=count)
        model = load(folder, progress=False)
        assert len(model.dspark) == 3
        assert model.config.total_layers == 6
    _configured(folder, dspark_target_layer_ids=[1, 2], compress_ratios=[0, 4, 8, 0, 0])
    with pytest.raises(CheckpointError, match="not part of the model"):
        load(folder, progress=False)
    four = [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"dspark_target_layer_ids is \[0, 1, 2, 3\]"):
        load(
            _configured(
                folder, dspark_target_layer_ids=four, compress_ratios=[0, 4, 8, 0, 0, 0, 0]
            ),
            progress=False,
        )


def test_a_missing_confidence_head_is_allowed_and_said(folders, tmp_path, caplog):
    name = "mtp.2.confidence_head.proj.weight"
    folder = edit(copied(folders["nvidia"], tmp_path), lambda tensors: tensors.pop(name))
    model = load(folder, progress=False)
    assert model.dspark.last.confidence_head is None
    assert model.config.dspark == replace(DSPARK, confidence_head=False)
    assert "the DSpark draft has no confidence head" in caplog.text
    assert model.load_report.left_out == {}
    assert "3 DSpark stages, without a confidence head" in "\n".join(_inspected(folder))
    save(model, tmp_path / "y")
    assert ModelConfig.from_path(tmp_path / "y").dspark == model.config.dspark


def test_a_confidence_head_that_is_switched_off_is_left_out_and_said(folders, tmp_path, caplog):
    folder = _configured(copied(folders["nvidia"], tmp_path), enable_confidence_head=False)
    model = load(folder, progress=False)
    assert model.dspark.last.confidence_head is None
    reason = "the confidence head, because enable_confidence_head is false"
    assert model.load_report.left_out == {reason: 1}
    assert f"1 tensors left out: {reason}" in caplog.text


def test_a_draft_can_be_left_out(folders, caplog):
    model = load(folders["nvidia"], mtp=False, progress=False)
    assert len(model.mtp) == model.config.draft_layers == 0
    assert model.dspark is None
    [(reason, count)] = model.load_report.left_out.items()
    assert reason == "a DSpark draft (mtp.*)"
    with Checkpoint.open(folders["nvidia"]) as checkpoint:
        assert count == sum(name.startswith("mtp.") for name in checkpoint.entries)
    assert f"{count} tensors left out: {reason}" in caplog.text
    whole = state(load(folders["nvidia"], progress=False))
    main = {name: tensor for name, tensor in whole.items() if not name.startswith("mtp.")}
    assert_same_state(state(model), main)
    assert len(load(folders["nvidia"], mtp=True, progress=False).dspark) == 3


def test_a_draft_without_its_fields_is_left_out_and_said(folders, tmp_path):
    names = ("block_size", "noise_token_id", "target_layer_ids", "markov_rank")
    folder = copied(folders["nvidia"], tmp_path)
    _configured(folder, **{f"dspark_{name}": None for name in names})
    model = load(folder, progress=False)
    [(reason, _)] = model.load_report.left_out.items()
    assert reason == "a DSpark draft (mtp.*), because config.json has no dspark_block_size"
    assert model.load_report.draft == "dspark"
    with pytest.raises(CheckpointError, match="no dspark_block_size, and mtp=True demands"):
        load(folder, mtp=True, progress=False)


def test_fields_without_a_draft_are_said(folders, tmp_path, caplog):
    def without(tensors):
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    folder = edit(copied(folders["nvidia"], tmp_path), without)
    model = load(folder, progress=False)
    assert model.config.dspark is None
    assert "fields of a DSpark draft, but no tensor is one of its heads" in caplog.text
    with pytest.raises(CheckpointError, match="mtp=True demands draft layers"):
        load(folder, mtp=True, progress=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("mtp.0.main_norm.weight"), r"mtp\.0\.main_norm\.weight is missing"),
        (lambda t: t.pop("mtp.1.attn.wkv.weight"), r"mtp\.1\.attn\.wkv\.scale|wkv"),
        (
            lambda t: t.update({"mtp.0.norm.weight": torch.ones(64)}),
            r"mtp\.0\.norm\.weight is not part of the model",
        ),
        (
            lambda t: t.update({"mtp.2.markov_head.markov_w1.weight": torch.zeros(64, 9)}),
            r"markov_w1\.weight has shape \[64, 9\], wanted \[64, 8\]",
        ),
        (
            lambda t: t.update({"mtp.0.main_proj.bias": torch.zeros(64)}),
            r"mtp\.0\.main_proj\.bias is not part of the model",
        ),
    ],
    ids=["missing", "torn", "extra", "shape", "unknown"],
)
def test_a_damaged_draft_is_an_error(folders, tmp_path, change, words):
    folder = edit(copied(folders["nvidia"], tmp_path), change)
    for check in (load, verify):
        with pytest.raises(CheckpointError, match=words):
            check(folder, progress=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dspark_markov_rank": 1 << 20}, "dspark_markov_rank asks for 1048576 columns"),
        ({"dspark_n_routed_experts": 9}, "asks for 9 routed experts, but the tensors have 4"),
    ],
)
def test_a_draft_larger_than_its_tensors_is_refused_before_it_is_built(
    folders, tmp_path, changes, words
):
    folder = _configured(copied(folders["nvidia"], tmp_path), **changes)
    with pytest.raises(CheckpointError, match=words):
        load(folder, progress=False)


def test_inspect_says_what_the_draft_is(folders):
    text = "\n".join(_inspected(folders["nvidia"]))
    assert "for speculation: 3 DSpark stages, with a confidence head" in text


def _inspected(folder: Path) -> list[str]:
    with Checkpoint.open(folder) as checkpoint:
        return list(lines(checkpoint))


def test_packed_stages_compute_what_unpacked_ones_do(tmp_path):
    config = CONFIG.replace(hidden_size=128, moe_intermediate_size=128, q_lora_rank=64)
    folder = saved(make_model(config), tmp_path, layout="nvidia")
    layout = "fragments_16x64"
    packed = load(folder, pack=layout, mxfp4="lossless", progress=False)
    experts = packed.dspark[1].layer.mlp.experts
    assert (experts.layout, experts.format) == (layout, NVFP4)
    plain = load(folder, progress=False).dspark[1].layer.mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(experts.dense_weight(name), plain.dense_weight(name))
