"""Every kind of damage is one clear error, and the existing checkpoint keeps every bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dsv4.checkpoint import Checkpoint, CheckpointError, fill, load, save
from tests.checkpoint.cases import (
    SMALL,
    assert_same_state,
    calibrated,
    edit,
    make_model,
    state,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return calibrated(tmp_path_factory.mktemp("sound"))


def _byte(name: str, value: int):
    def change(tensors):
        tensors[name].view(torch.uint8).view(-1)[-1] = value

    return change


def _set(name: str, value: float):
    return lambda tensors: tensors[name].fill_(value)


def _replace(name: str, tensor: torch.Tensor):
    return lambda tensors: tensors.update({name: tensor})


def _drop(*dropped: str):
    def change(tensors):
        for name in dropped:
            del tensors[name]

    return change


W1, W2 = "layers.0.ffn.experts.1.w1", "layers.2.ffn.experts.3.w2"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
DAMAGE = {
    "missing": (
        _drop("layers.1.attn.wq_a.weight", "layers.1.attn.wq_a.scale"),
        r"q_a_proj\.weight is missing \(layers\.1\.attn\.wq_a\.weight",
    ),
    "missing norm": (_drop("norm.weight"), r"model\.norm\.weight is missing"),
    "missing expert": (
        _drop(*(f"{W1}.{p}" for p in ("weight", "weight_scale", "weight_scale_2", "input_scale"))),
        r"experts\.1\.gate_proj\.weight is missing",
    ),
    "missing down of an expert": (
        _drop(*(f"{W2}.{p}" for p in ("weight", "weight_scale", "weight_scale_2", "input_scale"))),
        r"layers\.2\.mlp\.experts\.3\.down_proj\.weight is missing "
        r"\(layers\.2\.ffn\.experts\.3\.w2\.weight in",
    ),
    "missing whole expert": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.1.ffn.experts.2.")],
        r"(?s)3 problems.*layers\.1\.mlp\.experts\.2\.gate_proj\.weight is missing"
        r".*experts\.2\.up_proj\.weight is missing.*experts\.2\.down_proj\.weight is missing",
    ),
    "an expert too many": (
        lambda t: t.update(
            {n.replace("experts.3.", "experts.4."): t[n].clone() for n in list(t) if W2[:-3] in n}
        ),
        r"layers\.2\.ffn\.experts\.4\.w1\.weight is not part of the model",
    ),
    "experts of several shapes": (
        lambda t: t.update(
            {
                W1 + ".weight": torch.zeros(48, 32, dtype=torch.uint8),
                W1 + ".weight_scale": torch.ones(48, 4).to(E4M3),
            }
        ),
        r"layers\.0\.ffn\.experts\.1\.w1\.weight has shape \[48, 64\], wanted \[32, 64\]",
    ),
    "mxfp4 scales of another dtype": (
        _replace("mtp.0.ffn.experts.1.w2.scale", torch.ones(64, 1)),
        r"mtp\.0\.ffn\.experts\.1\.w2\.scale \(F32 \[64, 1\]\): wanted",
    ),
    "missing codes": (_drop(W1 + ".weight"), r"w1\.weight_scale is not part of the model"),
    "missing scales": (_drop(W1 + ".weight_scale"), "needs one tensor of block scales"),
    "missing fp8 scales": (_drop("layers.1.attn.wq_a.scale"), "needs one tensor of block scales"),
    "missing global": (_drop(W1 + ".weight_scale_2"), "is nvfp4 but has no weight_scale_2"),
    "missing input_scale (pitfall 26)": (
        _drop(W1 + ".input_scale", "layers.2.ffn.experts.3.w2.input_scale"),
        r"(?s)2 problems.*layers\.0\.ffn\.experts\.1\.w1\.input_scale is missing"
        r".*layers\.2\.ffn\.experts\.3\.w2\.input_scale is missing",
    ),
    "extra": (_replace("layers.0.attn.extra", torch.ones(3)), r"attn\.extra is not part of"),
    "extra layer": (
        _replace("layers.7.attn_norm.weight", torch.ones(64)),
        r"layers\.7\.attn_norm\.weight is not part of the model",
    ),
    "mis-shaped": (
        _replace("norm.weight", torch.ones(65)),
        r"norm\.weight has shape \[65\], wanted \[64\]",
    ),
    "mis-shaped scales": (
        _replace(W1 + ".weight_scale", torch.ones(32, 5).to(E4M3)),
        r"w1\.weight_scale \(F8_E4M3 \[32, 5\]\): wanted shape \[32, 4\]",
    ),
    "transposed scales (pitfall 35)": (
        _replace(W1 + ".weight_scale", torch.ones(4, 32).to(E4M3)),
        r"wanted shape \[32, 4\]",
    ),
    "mis-shaped global": (
        _replace(W1 + ".weight_scale_2", torch.ones(2)),
        r"weight_scale_2 \(F32 \[2\]\): wanted one F32 value",
    ),
    "wrong dtype of scales": (
        _replace(W1 + ".weight_scale", torch.ones(32, 4)),
        r"wanted U8 with F8_E4M3 scales",
    ),
    "wrong dtype of global": (
        _replace(W1 + ".weight_scale_2", torch.ones(()).bfloat16()),
        "wanted one F32 value",
    ),
    "wrong dtype of norm": (
        _replace("norm.weight", torch.ones(64, dtype=torch.int64)),
        r"norm\.weight \(I64 \[64\]\): wrong dtype, wanted a floating dtype",
    ),
    "wrong dtype of codes": (
        _replace(W1 + ".weight", torch.zeros(32, 32, dtype=torch.int64)),
        r"w1\.weight \(I64 \[32, 32\]\)",
    ),
    "wrong dtype of table": (
        _replace("layers.0.ffn.gate.tid2eid", torch.zeros(64, 2)),
        r"tid2eid \(F32 \[64, 2\]\): wrong dtype, wanted I64",
    ),
    "wrong dtype of linear": (
        _replace("head.weight", torch.zeros(64, 64, dtype=torch.int64)),
        r"head\.weight \(I64 \[64, 64\]\): wrong dtype",
    ),
    "plain bytes": (
        _replace("norm.weight", torch.ones(64, dtype=torch.uint8)),
        "needs one tensor of block scales",
    ),
    "experts of two formats": (
        lambda t: (
            [t.pop(f"{W1}.{p}") for p in ("weight_scale", "weight_scale_2", "input_scale")]
            and t.update({W1 + ".weight": torch.zeros(32, 64)})
        ),
        r"model\.layers\.0\.mlp\.experts: experts are F32, nvfp4, wanted one format in a layer; "
        r"layers\.0\.ffn\.experts\.1\.w1\.weight \(F32 \[32, 64\]\) is F32",
    ),
    "zero global": (_set(W1 + ".weight_scale_2", 0.0), r"w1\.weight_scale_2 .*is 0\.0, wanted"),
    "negative global": (_set(W1 + ".weight_scale_2", -1.0), r"is -1\.0, wanted a finite value"),
    "nan global": (_set(W1 + ".weight_scale_2", float("nan")), "is nan, wanted a finite value"),
    "inf global": (_set(W1 + ".weight_scale_2", float("inf")), "is inf, wanted a finite value"),
    "zero input_scale": (_set(W1 + ".input_scale", 0.0), r"w1\.input_scale .*is 0\.0, wanted"),
    "nan e4m3 scale": (_byte(W1 + ".weight_scale", 0x7F), "1 values that are NaN, infinite or neg"),
    "negative e4m3 scale": (_byte(W1 + ".weight_scale", 0x81), r"the first at \[31, 3\]"),
    "nan e8m0 of fp8": (_byte("layers.1.attn.wq_a.scale", 255), r"wq_a\.scale .*1 values .*NaN"),
    "nan e8m0 of mxfp4": (
        _byte("mtp.0.ffn.experts.1.w2.scale", 255),
        r"w2\.scale .*1 values that are NaN",
    ),
    "nan fp8 code": (_byte("layers.1.attn.wq_a.weight", 0xFF), r"wq_a\.weight .*NaN"),
    "nan norm": (_set("norm.weight", float("nan")), r"norm\.weight .*64 values that are NaN"),
    "inf bias": (_set("layers.2.ffn.gate.bias", float("inf")), r"gate\.bias .*NaN or infinite"),
    "table past the experts": (_set("layers.0.ffn.gate.tid2eid", 4), "holds 4 to 4, wanted 0 to 3"),
    "table below zero": (_set("layers.0.ffn.gate.tid2eid", -1), "holds -1 to -1, wanted 0 to 3"),
}


def _refused(folder: Path, message: str) -> None:
    """Both ways in refuse, and a model that was there keeps every bit."""
    with pytest.raises(CheckpointError, match=message):
        load(folder, activation="nvfp4", progress=False)
    model = make_model(SMALL.replace(activation="nvfp4"), seed=1)
    before = state(model)
    with pytest.raises(CheckpointError, match=message):
        fill(model, Checkpoint.open(folder), activation="nvfp4", progress=False)
    assert_same_state(state(model), before)


def test_the_sound_checkpoint_is_accepted(sound):
    model = make_model(SMALL.replace(activation="nvfp4"), seed=1)
    fill(model, Checkpoint.open(sound), activation="nvfp4", progress=False)
    assert_same_state(state(model), state(load(sound, activation="nvfp4", progress=False)))


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_tensor_is_refused_and_nothing_overwritten(sound, tmp_path, case):
    change, message = DAMAGE[case]
    folder = tmp_path / "damaged"
    shutil.copytree(sound, folder)
    _refused(edit(folder, change), message)


def test_experts_with_block_scales_of_several_dtypes_are_refused(tmp_path):
    config = SMALL.replace(moe_intermediate_size=128, activation="bf16")
    model = make_model(config)
    for layer in model.model.layers:
        layer.mlp.experts.quantize("fp8_block")
    save(model, tmp_path, layout="deepseek")
    name = "layers.1.ffn.experts.2.w3.scale"

    def change(tensors):
        dtype = torch.float32 if tensors[name].dtype == E8M0 else E8M0
        tensors[name] = torch.ones(tensors[name].shape).to(dtype)

    message = r"layers\.1\.mlp\.experts: experts have block scales of several dtypes, .*"
    with pytest.raises(
        CheckpointError, match=message + r"layers\.1\.ffn\.experts\.2\.w3\.scale \("
    ):
        load(edit(tmp_path, change), progress=False)


def test_several_problems_are_one_error(sound, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(sound, folder)
    edit(folder, _drop("norm.weight", "embed.weight"))
    with pytest.raises(CheckpointError, match=r"(?s)2 problems.*embed_tokens.*model\.norm"):
        load(folder, progress=False)


def test_a_missing_input_scale_matters_only_to_nvfp4_activations(sound, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(sound, folder)
    edit(folder, _drop(W1 + ".input_scale"))
    experts = load(folder, progress=False).model.layers[0].mlp.experts
    assert experts.gate_up_proj_input_scale is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 128),
        ("vocab_size", 65),
        ("n_routed_experts", 5),
        ("head_dim", 128),
        ("q_lora_rank", 64),
        ("index_n_heads", 8),
        ("moe_intermediate_size", 64),
        ("num_hidden_layers", 2),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(sound, tmp_path, field, value):
    folder = tmp_path / "damaged"
    shutil.copytree(sound, folder)
    values = json.loads((folder / "config.json").read_text())
    values[field] = value
    if field == "num_hidden_layers":
        values["compress_ratios"] = [*values["compress_ratios"][:2], 0]
        values["num_hash_layers"] = 2
    (folder / "config.json").write_text(json.dumps(values))
    message = "has shape|is missing|is not part of the model|are those of 4 routed experts"
    with pytest.raises(CheckpointError, match=message):
        load(folder, progress=False)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return calibrated(tmp_path_factory.mktemp("sharded"), max_shard_bytes=60_000)


@pytest.fixture
def shards(sharded, tmp_path) -> Path:
    shutil.copytree(sharded, tmp_path / "s")
    return tmp_path / "s"


def _index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_shards_give_the_same_model(sharded, sound):
    assert len(list(sharded.glob("*.safetensors"))) > 4
    assert_same_state(state(load(sharded, progress=False)), state(load(sound, progress=False)))


def test_a_missing_shard_is_refused(shards):
    victim = sorted(shards.glob("*.safetensors"))[2]
    victim.unlink()
    _refused(shards, rf"{victim.name}: the shard is missing")


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_shard_is_refused(shards, length):
    victim = sorted(shards.glob("*.safetensors"))[2]
    victim.write_bytes(victim.read_bytes()[:length])
    _refused(shards, rf"{victim.name}: truncated")


def test_a_header_that_is_none_is_refused(shards):
    victim = sorted(shards.glob("*.safetensors"))[0]
    data = bytearray(victim.read_bytes())
    data[8:12] = b"????"
    victim.write_bytes(data)
    _refused(shards, rf"{victim.name}: .*not a safetensors file .*JSON in header")


def _shift(row):
    row["data_offsets"] = [end + 8 for end in row["data_offsets"]]


@pytest.mark.parametrize(
    "change",
    [
        _shift,
        lambda row: row["shape"].append(2),
        lambda row: row.update(dtype="F7"),
        lambda row: row.pop("shape"),
    ],
)
def test_a_header_that_contradicts_its_data_is_refused(shards, change):
    victim = sorted(shards.glob("*.safetensors"))[1]
    data = victim.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(list(header.values())[-1])
    victim.write_bytes(data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :])
    _refused(shards, rf"{victim.name}: .*not a safetensors file")


def test_a_shard_with_bytes_left_over_is_refused(shards):
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes() + b"more")
    _refused(shards, rf"{victim.name}: .*not fully covered")


def test_a_folder_in_place_of_a_shard_is_refused(shards):
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.unlink()
    victim.mkdir()
    _refused(shards, rf"{victim.name}: cannot be opened")


def test_a_dtype_that_no_model_has_is_refused(sound, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(sound, folder)
    edit(folder, _replace("norm.weight", torch.ones(64, dtype=torch.uint16)))
    _refused(folder, r"model\.safetensors: norm\.weight has dtype U16, wanted F64, ")


def test_a_shard_that_changes_after_opening_is_refused(sound, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(sound, folder)
    checkpoint = Checkpoint.open(folder)
    checkpoint.read("model.norm.weight")
    checkpoint.close()
    edit(folder, lambda tensors: tensors["norm.weight"].add_(1))  # the same shape
    changed = r"model\.safetensors: has changed since it was opened, when norm\.weight"
    with pytest.raises(CheckpointError, match=changed):
        checkpoint.read("model.norm.weight")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=changed):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize(
    "path", ["../stolen.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", "..", ""]
)
def test_an_index_that_leaves_the_folder_is_refused(shards, path):
    shutil.copy(next(shards.glob("*.safetensors")), shards.parent / "stolen.safetensors")
    _index(shards, lambda table: table.update({"norm.weight": path}))
    _refused(shards, "points to .*wanted the name of a file")


def test_an_index_that_disagrees_with_the_shards_is_refused(shards):
    first = sorted(p.name for p in shards.glob("*.safetensors"))[0]
    last = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    name, shard = next((n, s) for n, s in last.items() if s != first)
    _index(shards, lambda table: table.update({name: first}))
    _refused(shards, f"{name} is in {shard}, the index says {first}")
    _index(shards, lambda table: table.pop(name))
    _refused(shards, f"{name} is in {shard}, the index says None")
    _index(shards, lambda table: table.update({name: shard, "ghost": shard}))
    _refused(shards, f"ghost is not in {shard}, where the index puts it")


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL.to_dict()))
    with pytest.raises(CheckpointError, match="neither"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        load(tmp_path)


def test_reading_does_not_depend_on_the_file_staying(tmp_path):
    """Every value is a copy: the folder may be removed."""
    model = make_model()
    save(model, tmp_path, layout="bf16", plain_dtype=None)
    loaded = load(tmp_path, progress=False)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4_000_000)
    assert_same_state(state(loaded), state(model))
