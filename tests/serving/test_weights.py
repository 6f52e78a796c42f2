"""A change of any tensor or module of a model is seen; what changes nothing is not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dsv4.serving._weights import Weights


def model() -> nn.Module:
    part = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Module())
    part[2].register_buffer("table", torch.zeros(4))
    return nn.ModuleDict({"part": part, "head": nn.Linear(3, 2)}).requires_grad_(False)


def _replace_data(m: nn.Module) -> None:
    m["head"].weight.data = m["head"].weight.data.clone()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "written": lambda m: m["head"].weight.add_(1),
    "another parameter": lambda m: setattr(m["head"], "bias", nn.Parameter(torch.ones(2))),
    "no parameter": lambda m: setattr(m["head"], "bias", None),
    "other memory": _replace_data,
    "a buffer is written": lambda m: m["part"][2].table.zero_(),
    "a first parameter": lambda m: m["part"][1].register_parameter(
        "a", nn.Parameter(torch.ones(1))
    ),
    "a first buffer": lambda m: m["head"].register_buffer("a", torch.ones(1)),
    "another module": lambda m: m["part"].__setitem__(1, nn.ReLU()),
    "a further module": lambda m: m["part"].append(nn.Linear(1, 1)),
    "a first module": lambda m: m["head"].add_module("a", nn.ReLU()),
    "another dtype": lambda m: m.to(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change: Callable[[nn.Module], object]) -> None:
    first = model()
    weights = Weights(first)
    change(first)
    assert not weights.are_those_of(first)
    assert Weights(first).are_those_of(first)


def test_what_changes_nothing_is_not_seen() -> None:
    first = model()
    weights = Weights(first)
    first["head"](first["part"][0](torch.ones(1, 2)))
    first.eval()
    first["head"].weight.requires_grad_(True)
    assert weights.are_those_of(first)
    assert not weights.are_those_of(copy.deepcopy(first))
    with torch.inference_mode():
        assert Weights(model()).are_those_of(first) is False


MOVES = ("another parameter", "no parameter", "other memory", "another dtype")


@pytest.mark.parametrize("name", CHANGES)
def test_memory_that_is_no_longer_the_models_is_seen(name: str) -> None:
    """A change is seen before graphs that read it are launched; other changes after that."""
    first = model()
    weights = Weights(first)
    assert weights.are_in_place(first)
    CHANGES[name](first)
    assert weights.are_in_place(first) == (name not in MOVES)


def test_memory_of_modules_that_were_replaced_is_held() -> None:
    first = model()
    weights, old = Weights(first), weakref.ref(first["head"].weight)
    first["head"] = nn.Linear(3, 2)
    assert old() is not None
    assert weights.are_in_place(first)
    assert not weights.are_those_of(first)
    del weights
    gc.collect()
    assert old() is None


def test_inference_tensors_are_compared_by_place() -> None:
    with torch.inference_mode():
        first = model()
    weights = Weights(first)
    assert weights.are_those_of(first)
    with torch.inference_mode():
        first["head"].weight.add_(1)
        assert weights.are_those_of(first)
        _replace_data(first)
    assert not weights.are_those_of(first)
