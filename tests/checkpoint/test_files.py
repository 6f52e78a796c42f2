"""The container and the names of tensors in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from dsv4.checkpoint import Checkpoint, names, save, write
from dsv4.checkpoint.shard_writer import ShardWriter
from dsv4.checkpoint.shards import DTYPES, Shards, read_header
from dsv4.config import ModelConfig
from dsv4.model import DeepseekV4ForCausalLM
from tests.checkpoint.cases import (
    SMALL,
    make_model,
    raw,
)


def expert_names(config: ModelConfig) -> list[str]:
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    out = []
    for name in model.state_dict():
        if ".mlp.experts." not in name:
            out.append(name)
        elif name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for p in ("gate_proj", "up_proj", "down_proj"):
                out += [f"{stem}{e}.{p}.weight" for e in range(config.n_routed_experts)]
    return out


def test_the_name_map_is_a_bijection():
    ours = expert_names(SMALL)
    theirs = [names.to_original(name) for name in ours]
    assert None not in theirs
    assert len(set(theirs)) == len(ours)
    assert [names.canonical(name) for name in theirs] == ours
    assert not any("self_attn" in name or "mlp" in name for name in theirs)


@pytest.mark.parametrize(
    ("original", "ours"),
    [
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
        ("layers.3.hc_attn_scale", "model.layers.3.attn_hc.scale"),
        ("layers.3.attn.attn_sink", "model.layers.3.self_attn.sinks"),
        ("layers.60.attn.wo_a.weight", "model.layers.60.self_attn.o_a_proj.weight"),
        ("layers.2.attn.compressor.ape", "model.layers.2.self_attn.compressor.position_bias"),
        (
            "layers.2.attn.indexer.compressor.wgate.weight",
            "model.layers.2.self_attn.compressor.indexer.gate_proj.weight",
        ),
        (
            "layers.2.attn.indexer.weights_proj.weight",
            "model.layers.2.self_attn.compressor.indexer.scorer.weights_proj.weight",
        ),
        (
            "layers.2.attn.indexer.wq_b.weight",
            "model.layers.2.self_attn.compressor.indexer.q_b_proj.weight",
        ),
        ("layers.9.ffn.gate.bias", "model.layers.9.mlp.gate.e_score_correction_bias"),
        ("layers.9.ffn.experts.383.w1.weight", "model.layers.9.mlp.experts.383.gate_proj.weight"),
        ("layers.9.ffn.experts.0.w3.weight", "model.layers.9.mlp.experts.0.up_proj.weight"),
        (
            "layers.9.ffn.shared_experts.w2.weight",
            "model.layers.9.mlp.shared_experts.down_proj.weight",
        ),
        ("mtp.0.e_proj.weight", "mtp.0.e_proj.weight"),
        ("mtp.0.hc_head_base", "mtp.0.hc_head.hc_base"),
        ("mtp.0.attn.wkv.weight", "mtp.0.layer.self_attn.kv_proj.weight"),
        ("mtp.0.hc_ffn_fn", "mtp.0.layer.ffn_hc.fn"),
        ("mtp.0.ffn.experts.1.w2.weight", "mtp.0.layer.mlp.experts.1.down_proj.weight"),
    ],
)
def test_names_of_the_specification(original, ours):
    assert names.canonical(original) == ours
    assert names.to_original(ours) == original


@pytest.mark.parametrize("name", ["layers.0.attn.wq.weight", "blocks.0.x", "mtp.0.ffn.w1.weight"])
def test_unknown_names_have_no_counterpart(name):
    assert names.canonical(name) is None


def test_copies_of_embedding_and_head_under_mtp_are_told_apart():
    for name in ("mtp.0.emb.tok_emb.weight", "mtp.0.embed.weight", "mtp.1.head.weight"):
        assert names.is_mtp_copy(name)
    for name in ("mtp.0.hc_head_fn", "mtp.0.enorm.weight", "head.weight", "embed.weight"):
        assert not names.is_mtp_copy(name)


tables = st.dictionaries(
    st.text("abc.xé_0", min_size=1, max_size=12),
    st.tuples(
        st.sampled_from(sorted(DTYPES.values(), key=str)),
        st.lists(st.integers(0, 7), max_size=3),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=12,
)


def _tensors(table):
    out = {}
    for name, (dtype, shape, seed) in table.items():
        generator = torch.Generator().manual_seed(seed)
        count = torch.Size(shape).numel() * dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        data = torch.randint(0, high, (count,), generator=generator, dtype=torch.uint8)
        out[name] = data.view(dtype).reshape(shape)
    return out


@given(tables, st.integers(1, 500))
@settings(max_examples=20)
def test_any_tensors_survive_and_the_safetensors_package_reads_them(tmp_path_factory, table, limit):
    folder = tmp_path_factory.mktemp("shards")
    tensors = _tensors(table)
    with ShardWriter(folder, max_shard_bytes=limit) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish({"config.json": {}})
    shards = sorted(folder.glob("*.safetensors"))
    result: dict[str, torch.Tensor] = {}
    for shard in shards:
        headers = read_header(shard)
        total = sum(info.nbytes for info in headers.values())
        assert total <= limit or sum(info.nbytes > 0 for info in headers.values()) == 1
        with safe_open(shard, "pt") as file:
            mapped = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # A map begins with a page, so an address is as aligned as the place in the file.
        assert all(tensor.data_ptr() % tensor.dtype.itemsize == 0 for tensor in mapped.values())
        result |= mapped
    assert result.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert result[name].dtype == tensor.dtype
        assert result[name].shape == tensor.shape
        assert torch.equal(raw(result[name]), raw(tensor))
    if len(shards) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert not list(folder.glob(".writing*"))


@given(tables)
@settings(max_examples=20)
def test_files_of_the_safetensors_package_are_read_bitwise(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("shards")
    tensors = _tensors(table)
    save_file(tensors, folder / "model.safetensors")
    shards = Shards(folder)
    for name, info in read_header(folder / "model.safetensors").items():
        tensor = shards.read(info)
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(raw(tensor), raw(tensors[name]))
    shards.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_file_is_never_mapped(tmp_path):
    """Pages of a map count as memory of the process, and an error of the disk would end it."""
    path = tmp_path / "model.safetensors"
    save_file({"small": torch.rand(10), "large": torch.rand(10_000)}, path)
    headers = read_header(path)
    shards = Shards(tmp_path)
    tensors = [shards.read(headers[name]) for name in ("small", "large")]
    assert str(path) not in Path("/proc/self/maps").read_text()
    shards.close()
    assert [tensor.numel() for tensor in tensors] == [10, 10_000]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path):
    save(make_model(), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def broken():
        yield "model.norm.weight", torch.ones(64), None
        raise RuntimeError("the stream broke")

    with pytest.raises(FileExistsError, match=r"holds a checkpoint .*overwrite=True"):
        save(make_model(), tmp_path)
    with pytest.raises(RuntimeError, match="the stream broke"):
        write(broken(), tmp_path, config=SMALL, overwrite=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    write([("model.norm.weight", torch.ones(64), None)], tmp_path, config=SMALL, overwrite=True)
    assert list(Checkpoint.open(tmp_path).entries) == ["model.norm.weight"]


def test_overwriting_leaves_no_old_shard(tmp_path):
    save(make_model(), tmp_path, max_shard_bytes=100_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    save(make_model(), tmp_path, overwrite=True)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_a_name_written_twice_is_refused(tmp_path):
    item = ("model.norm.weight", torch.ones(64), None)
    with pytest.raises(ValueError, match=r"norm\.weight is written twice"):
        write([item, item], tmp_path, config=SMALL)
    assert not list(tmp_path.iterdir())
