"""``python -m dsv4 inspect`` and ``verify`` on small checkpoints, sound and damaged."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest
import torch

import dsv4
from dsv4 import __main__ as command_line
from dsv4.checkpoint import Checkpoint, CheckpointError, save, verify
from dsv4.checkpoint.shards import read_header
from dsv4.commands import checkpoints
from dsv4.config import ModelConfig
from dsv4.layers import _host_memory
from dsv4.speculation.checkpoint_costs import costs_of
from dsv4.speculation.draft_costs import DraftCosts, weight_bytes
from dsv4.testing.models import random_model
from tests.checkpoint.cases import make_model
from tests.speculation.dspark_cases import DSPARK


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "checkpoint"
    save(make_model(), path)
    return path


def test_inspect(folder, capsys):
    (folder / "tokenizer.json").write_text("{}")
    assert command_line.main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    for words in (
        "quantised by nvidia",
        "nvfp4: ",
        "bfloat16: ",
        "tokenizer: tokenizer.json",
        "reasoning efforts: unknown",
        "H100 (80 GB): 80.0 GB left",
    ):
        assert words in text


@pytest.mark.parametrize("method", ["mtp", "dspark"])
def test_inspect_says_when_auto_drafts(method, tmp_path, capsys):
    """Costs from headers are those of the loaded model."""
    drafts = {"num_nextn_predict_layers": 1} if method == "mtp" else {"dspark": DSPARK}
    config = ModelConfig.tiny(**{"num_nextn_predict_layers": 0, **drafts})
    save(random_model(config, 0, torch.bfloat16, mtp=True), tmp_path / "drafts")
    assert command_line.main(["inspect", str(tmp_path / "drafts")]) == 0
    text = capsys.readouterr().out
    assert "drafts of speculate='auto' on one GPU with all experts, as computed for an H1" in text
    assert "sequences   drafts" in text
    loaded = dsv4.load(tmp_path / "drafts", device="cpu", progress=False)
    with Checkpoint.open(tmp_path / "drafts") as checkpoint:
        costs, sizes = costs_of(checkpoint), checkpoints._sizes_in(checkpoint)
    expected = DraftCosts.of(loaded, method, len(costs.accepted))
    assert replace(costs, main=expected.main, draft=expected.draft) == expected
    assert sizes.total == pytest.approx(weight_bytes(loaded), rel=0.1)
    assert sizes.other_bytes > weight_bytes(loaded.mtp), "load loads the draft, too"
    assert command_line.main(["inspect", str(tmp_path / "drafts"), "--gpus", "H200"]) == 0
    for mine, other in ((costs.main, expected.main), (costs.draft, expected.draft)):
        for field in fields(mine):
            near = pytest.approx(getattr(other, field.name), rel=0.1)
            assert getattr(mine, field.name) == near, field.name


def test_inspect_says_what_does_not_fit(folder, monkeypatch, capsys):
    monkeypatch.setattr(checkpoints, "_GPUS", {"Small": -1})
    assert command_line.main(["inspect", str(folder)]) == 0
    assert "Small (-1 GB): 1.0 GB too few" in capsys.readouterr().out


def test_inspect_says_how_much_goes_to_host_memory(capsys):
    assert command_line.main(["inspect", "--preset", "flash", "--gpus", "H200"]) == 0
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert re.search(
        "host_experts='auto': fits if the host has 66\\.\\d GB free: of 256 experts", text
    )
    assert "GB of weights and 0.6 GB for experts of long prompts on the GPU" in text


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (90, "fits this machine, whose host has 90.0 GB free: of 256 experts of each layer 15"),
        # Fewer slots, more static experts.
        (50, "fits this machine, whose host has 50.0 GB free: of 256 experts of each layer 18"),
        (20, "does not fit this machine: host_experts: a model of 16"),
    ],
)
def test_inspect_counts_the_host_memory_of_its_own_machine(free, words, monkeypatch, capsys):
    monkeypatch.setattr(checkpoints, "_is_here", lambda machine: machine.name == "H200")
    monkeypatch.setattr(_host_memory, "available_bytes", lambda: free * 10**9)
    assert command_line.main(["inspect", "--preset", "flash", "--gpus", "H200"]) == 0
    assert words in capsys.readouterr().out


def test_a_sound_checkpoint(folder, capsys):
    assert command_line.main(["verify", str(folder)]) == 0
    assert "of tensors are there, fit config.json, finite" in capsys.readouterr().out


def damage(folder, name, value):
    """Write a value over the first one of a plain tensor."""
    file = folder / "model.safetensors"
    info = read_header(file, "model.safetensors")[name]
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    start = 8 + length + header[name]["data_offsets"][0]
    raw = torch.tensor([value], dtype=info.dtype).view(torch.uint8).tolist()
    content[start : start + len(raw)] = bytes(raw)
    file.write_bytes(content)


def test_a_damaged_value_is_status_1(folder, capsys):
    name = next(n for n in read_header(folder / "model.safetensors", "x") if "norm" in n)
    damage(folder, name, float("nan"))
    with pytest.raises(CheckpointError, match="norm"):
        verify(folder, progress=False)
    assert command_line.main(["verify", str(folder)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m dsv4 verify: ")


def test_a_missing_tensor_is_status_1(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    config["moe_intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    assert command_line.main(["verify", str(folder)]) == 1
    assert "python -m dsv4 verify: " in capsys.readouterr().err


def test_one_gpu_cuts_nothing(folder, capsys):
    """The blocks of a small matrix need not be whole."""
    assert command_line.main(["inspect", str(folder), "--gpus", "H200"]) == 0
    assert "tp: fits, " in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--gpus", "H200"]])
def test_a_recipe_beside_weights_is_refused(folder, more, capsys):
    assert command_line.main(["inspect", str(folder), "--recipe", "nvfp4", *more]) == 2
    assert "has weights, wanted --preset, or --gpus and a PATH with con" in capsys.readouterr().err


def test_a_recipe_of_what_is_not_there(capsys):
    for recipe in ("nvidia", "nvfp4"):
        arguments = ["inspect", "--preset", "flash", "--gpus", "2xH200", "--recipe", recipe]
        assert command_line.main(arguments) == 0
        assert f"formats as '{recipe}'" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_is_status_2(command, folder, capsys):
    assert command_line.main([command, str(folder / "config.json")]) == 2
    assert "config.json is a file, wanted a folder" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["file", "file/below"])
def test_a_target_that_is_a_file_is_named(folder, target, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert command_line.main(["convert", str(folder), str(tmp_path / target)]) == 2
    assert f"{target} or a part of it is a file, wanted a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_checkpoint_is_status_2(command, tmp_path, capsys):
    assert command_line.main([command, str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
