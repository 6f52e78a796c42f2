"""Helpers for the tests of plans of whole layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from dsv4 import layers
from dsv4.config import CSA, ModelConfig
from dsv4.kv_cache.paged_cache import PagedCache
from dsv4.layers import DeepseekV4DecoderLayer
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops import _plans
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model

ROWS, TOKENS = 5, 96


WARM = 4  # steps until one is replayed: the modules are looked at, the call begun, recorded


def tiny(*types: str, **changes: Any) -> DeepseekV4ForCausalLM:
    """Packed as far as it can be, with fused weights."""
    config = ModelConfig.tiny(
        layer_types=types, mlp_layer_types=("moe",) * len(types), num_nextn_predict_layers=0,
        **changes,
    )  # fmt: skip
    model = random_model(config, 3, torch.bfloat16)
    layers.quantize_(model)
    layers.pack_(model)
    return model


@dataclass
class Switch:
    """Plans of layers on a CPU, on or off; and how many layers ran although they are on."""

    is_on: bool = False
    ran: int = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self.is_on, self.ran = True, 0
        try:
            yield
        finally:
            self.is_on = False

    def __contains__(self, device: str) -> bool:
        """It stands for ``PLANNED_DEVICES``."""
        return self.is_on


@contextlib.contextmanager
def switch() -> Iterator[Switch]:
    made, run = Switch(), DeepseekV4DecoderLayer._run

    def counted(*args: Any) -> torch.Tensor:
        made.ran += made.is_on
        return run(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plans, "PLANS", _plans.PlanCache())
        patch.setattr(_plans, "PLANNED_DEVICES", made)
        patch.setattr(DeepseekV4DecoderLayer, "_run", counted)
        yield made


@dataclass
class Twins:
    """One model and two caches: one of steps with plans, one of steps without."""

    model: DeepseekV4ForCausalLM
    plans: Switch
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.caches = [self.new_cache() for _ in range(2)]

    def new_cache(self) -> PagedCache:
        return self.model.new_cache(ROWS, TOKENS, 16, **self.options)

    def both(self, call: Callable[[PagedCache], Any]) -> Any:
        with self.plans.on():
            actual = call(self.caches[0])
        expected = call(self.caches[1])
        if isinstance(actual, torch.Tensor):
            assert_bitwise(actual, expected)
        else:
            assert actual == expected
        return actual

    def begin(self, *prompts: list[int]) -> list[int]:
        rows = [self.both(PagedCache.allocate) for _ in prompts]
        self.both(lambda cache: self.model.prefill([*prompts], cache, rows))
        return rows

    def decode(self, tokens: list[int], rows: list[int]) -> torch.Tensor:
        ids = torch.tensor(tokens, device=self.model.device)
        return self.both(lambda cache: self.model.decode(ids, cache, rows))

    def same_caches(self) -> None:
        first, other = self.caches
        assert_bitwise(first.lengths, other.lengths)
        for pair in zip(first.layers, other.layers, strict=True):
            for (tensor, _), (expected, _) in zip(
                *(layer.tensors() for layer in pair), strict=True
            ):
                assert_bitwise(tensor, expected)

    def warm(self) -> list[int]:
        """A row whose step was replayed last."""
        rows = self.begin([1, 2, 3])
        for token in range(WARM):
            self.decode([token], rows)
        assert self.plans.ran == 0, "nothing was replayed"
        return rows


@contextlib.contextmanager
def warmed(**changes: Any) -> Iterator[tuple[Twins, list[int]]]:
    """A model of one layer of every kind of tensor, whose steps of one row are replayed."""
    with switch() as made:
        twins = Twins(tiny(CSA, **changes), made)
        yield twins, twins.warm()


def plans_of(model: nn.Module) -> list[Any]:
    return [
        plan
        for layer in model.modules()
        if isinstance(layer, DeepseekV4DecoderLayer)
        for plans in layer.__dict__["_plans"].plans.values()
        for plan in plans
    ]


def layer_of(model: DeepseekV4ForCausalLM) -> Any:
    return model.model.layers[0]
