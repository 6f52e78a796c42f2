"""Layers through pickle, deepcopy and torch.save, in every format and layout."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers import Linear, pack_, quantize_
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: tuple[Callable[[Any], Any], ...] = (pickled, copy.deepcopy, saved)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", [None, "nvfp4", "mxfp4", "fp8_block"])
def test_a_layer_comes_back(way, format) -> None:
    layer = Linear(128, 64)
    if format is not None:
        layer.quantize(format)
    layer(torch.ones(1, 128))  # leaves what is kept of the weight
    found = way(layer)
    assert type(found) is Linear
    assert found.format == layer.format
    for name, tensor in layer.named_parameters():
        other = found.get_parameter(name)
        assert_bitwise(other.detach(), tensor.detach(), name)
        assert other.requires_grad == tensor.requires_grad
        assert other is not tensor
    x = torch.randn(3, 128)
    assert_bitwise(found(x).detach(), layer(x).detach())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packs", [False, True])
def test_a_model_comes_back(way, packs) -> None:
    model = random_model(ModelConfig.tiny(), 1, torch.bfloat16)
    quantize_(model)
    if packs:
        pack_(model)
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        assert_bitwise(way(model)(ids), model(ids))


def test_a_copy_shares_what_was_shared() -> None:
    pair = nn.ModuleList([Linear(64, 64), Linear(64, 64)])
    pair[0].quantize("nvfp4")
    pair[1].quantize("nvfp4")
    pair[1].weight_scale = pair[0].weight_scale
    assert pair[1].weight_scale is pair[0].weight_scale
    found = copy.deepcopy(pair)
    assert found[1].weight_scale is found[0].weight_scale
    assert found[1].weight_scale is not pair[0].weight_scale
