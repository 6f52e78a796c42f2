"""The program that compares activations by the KL divergence of a random model."""

from __future__ import annotations

import re

from tests._tools import divergence


def test_finer_activations_are_nearer_to_the_reference(capsys):
    divergence.main(["--seeds", "1", "--tokens", "48", "--layers", "4"])
    rows = re.findall(r"\| (\w+) \| (\w+) \| (\S+) \|", capsys.readouterr().out)
    means = {(activation, dtype): float(mean) for activation, dtype, mean in rows}
    assert len(means) == 6
    floor = means["bf16", "float32"]
    assert 0 < floor < means["bf16", "bfloat16"]
    for dtype in ("bfloat16", "float32"):
        assert means["bf16", dtype] < means["fp8", dtype] < means["nvfp4", dtype]


def test_all_layers_of_flash_are_there():
    config = divergence.small_flash()
    assert config.num_hidden_layers == len(config.layer_types) == 43
