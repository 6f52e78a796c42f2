"""The program that writes, loads and compares a checkpoint, at a small size on a CPU."""

from __future__ import annotations

import re

import pytest
import torch

import dsv4
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import HostExperts
from dsv4.testing.assertions import assert_bitwise
from tests._tools import host_files

CPU = torch.device("cpu")
CONFIG = ModelConfig.tiny(
    layer_types=(SLIDING, CSA, HCA), hidden_size=128, moe_intermediate_size=128,
    q_lora_rank=128, o_lora_rank=128, num_nextn_predict_layers=0,
)  # fmt: skip


def small(tmp_path, seconds: float = 60.0) -> list[str]:
    said: list[str] = []
    sizes = host_files.Sizes(CONFIG, HostExperts(3, 3), (3, 9), new_tokens=4, steps=3, context=5)
    host_files.run(tmp_path / "model", sizes, CPU, seconds, host_files.Report(said.append))
    return said


def test_a_small_model_is_equal_both_ways(tmp_path):
    said = "\n".join(small(tmp_path))
    assert "written: 3 layers" in said
    assert said.count("4 greedy tokens") == 2
    assert re.search(r"3 captured steps .* logits equal; .* % of \d+ experts", said)
    assert "the logits are the same" in said
    assert not list(tmp_path.iterdir())


def test_a_slow_disk_gets_fewer_layers(tmp_path):
    assert "written: 1 layers" in "\n".join(small(tmp_path, seconds=0.0))


def test_the_files_are_the_model(tmp_path):
    model = random_model(CONFIG, CPU, Weights(recipe="nvidia"), pack=False)
    host_files.write_checkpoint(tmp_path, model, 60.0, host_files.Report(lambda line: None))
    loaded = dsv4.load(tmp_path, progress=False).state_dict()
    for name, tensor in model.state_dict().items():
        assert_bitwise(loaded[name], tensor, name)


def test_a_wrong_bit_is_found(tmp_path, monkeypatch):
    """Logits that differ in the last bit of one number stop the program."""
    original = host_files.step_logits

    def changed(model, sizes, expected):
        if expected is not None:
            expected = expected.clone()
            expected[1, 7] = torch.nextafter(expected[1, 7].float(), torch.tensor(9.0))
        return original(model, sizes, expected)

    monkeypatch.setattr(host_files, "step_logits", changed)
    with pytest.raises(AssertionError, match="logits of step 1"):
        small(tmp_path)
