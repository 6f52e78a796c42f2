"""The program that compares layers with experts in host memory, at a small size on a CPU."""

from __future__ import annotations

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.layers import HostExperts
from dsv4.layers._hosted_experts import HostedExperts
from tests._tools import host_layers

CPU = torch.device("cpu")
CONFIG = ModelConfig.tiny(
    hidden_size=64, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2
)
SIZES = host_layers.Sizes(CONFIG, 2, HostExperts(2, 3, staged=2), steps=4)


def test_layers_are_equal():
    said: list[str] = []
    host_layers.compare(SIZES, CPU, said.append)
    assert len(said) == 2
    assert "layer 1: 4 steps of one token" in said[1]
    assert "4 tokens in waves, 65 through the buffer: all equal" in said[1]


@pytest.mark.parametrize(("part", "name"), [("fetch", "step 0"), ("_stream", "prompt through")])
def test_a_wrong_byte_is_found(part, name, monkeypatch):
    """A byte of an expert that was loaded differs, in a slot or behind the buffer's waves."""
    original = getattr(HostedExperts, part)

    def changed(self, *arguments):
        result = original(self, *arguments)
        self.tensors["gate_up_proj"].view(torch.uint8).bitwise_xor_(0x40)
        return result

    monkeypatch.setattr(HostedExperts, part, changed)
    with pytest.raises(AssertionError, match=name):
        host_layers.compare(SIZES, CPU, lambda line: None)
