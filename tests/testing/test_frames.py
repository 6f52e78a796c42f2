"""Python frames of a decode step outside implementations, per layer: bounds that hold."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.ops.norm import rms_norm
from dsv4.testing.frames import frames_outside_implementations
from dsv4.testing.models import random_model
from tests.plans.layer_plan_cases import WARM, switch, tiny

KINDS = (SLIDING, HCA, CSA)
_MOST = 310  # of a layer; a CSA layer has 304, and had 1588
_MOST_PACKED = 390  # a CSA layer has 384


def plain(*types: str) -> DeepseekV4ForCausalLM:
    config = ModelConfig.tiny(
        num_hidden_layers=len(types), layer_types=types, mlp_layer_types=("moe",) * len(types),
        num_nextn_predict_layers=0,
    )  # fmt: skip
    return random_model(config, 0, torch.bfloat16, mtp=False)


@torch.inference_mode()
def frames_of_step(model: DeepseekV4ForCausalLM, warm: int) -> Counter[str]:
    """Frames of a decode step of one sequence, after ``warm`` steps."""
    cache = model.new_cache(1, 64, 32)
    row = cache.allocate()
    model.prefill([[1, 2, 3, 4, 5]], cache, [row])
    rows, ids = torch.tensor([row]), torch.tensor([7])
    for _ in range(warm):
        cache.prepare([row], [1])
        model.decode(ids, cache, rows)
    cache.prepare([row], [1])
    return frames_outside_implementations(lambda: model.decode(ids, cache, rows))


def frames_per_layer(
    model: Callable[..., DeepseekV4ForCausalLM], kind: str, warm: int = 2
) -> Counter[str]:
    """Count what a third layer of a kind adds: the first makes what layers share."""
    added = frames_of_step(model(*[kind] * 3), warm)
    added.subtract(frames_of_step(model(*[kind] * 2), warm))
    return added


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_layer(kind: str) -> None:
    added = frames_per_layer(plain, kind)
    assert 100 < added.total() < _MOST, added.most_common(20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_packed_layer(kind: str) -> None:
    """Its projections are operators, too: 9 more calls in a CSA layer."""
    added = frames_per_layer(tiny, kind)
    assert 100 < added.total() < _MOST_PACKED, added.most_common(20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_layer(kind: str) -> None:
    """Its plan calls implementations: checks of the layer and nothing of its parts."""
    with switch() as plans, plans.on():
        added = frames_per_layer(tiny, kind, WARM)
    assert 0 < added.total() < 250, added.most_common(20)


def test_frames_of_implementations_are_left_out() -> None:
    """The reference, what it calls, and frames of others; everything else counts."""
    x = torch.ones(2, 4)
    rms_norm(x)
    result = frames_outside_implementations(lambda: rms_norm(x))
    assert result["ops/norm.py:rms_norm"] == 1
    assert not any(name.startswith(("reference/", "triton/")) for name in result)
    called: list[str] = []

    def see(frame, event, arg):
        if event == "call" and "dsv4/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_filename)

    sys.setprofile(see)
    rms_norm(x)
    sys.setprofile(None)
    assert any("dsv4/reference/norm" in file for file in called)
    assert result.total() < len(called)
