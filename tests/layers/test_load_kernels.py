"""Loading compiles the kernels of all steps, and a model loads where that fails."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsv4
from dsv4 import layers
from dsv4.checkpoint import preparing
from dsv4.compilation import warmup
from dsv4.compilation.ahead import KernelsAhead
from dsv4.layers import HostExperts
from dsv4.layers._expert_staging import STAGED_STEP_TOKENS
from dsv4.layers.step_tokens import STEP_TOKENS
from dsv4.testing.models import random_model

GPU = torch.device("cuda", 0)


def on_gpu() -> Any:
    """The attributes that ``warm_loaded`` reads of a model on a GPU."""
    return SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=GPU)]))


@pytest.mark.parametrize(("reserve", "most"), [(0, STEP_TOKENS), (9000, 9000)])
def test_kernels_of_a_step_are_compiled_unless_refused(
    reserve: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(warmup, "warm_loaded", lambda model, *rest: asked.append(rest))
    dsv4.save(random_model(dsv4.ModelConfig.tiny(), 0), tmp_path / "model")
    dsv4.load(tmp_path / "model", reserve_tokens=reserve, progress=False)
    assert asked == [(most, False)]
    dsv4.load(tmp_path / "model", prepare=False, progress=False)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("placement", "reserve", "most"),
    [
        (HostExperts(2, 3), None, STEP_TOKENS),
        (HostExperts(2, 3, staged=1), None, STAGED_STEP_TOKENS),
        (HostExperts(2, 3, staged=1), 0, STAGED_STEP_TOKENS),
        (HostExperts(2, 3, staged=1), 20_000, 20_000),
    ],
)
def test_kernels_and_memory_of_steps_with_a_buffer(
    placement: HostExperts,
    reserve: int | None,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels are those of the longest step by default; memory is what is asked for."""
    asked: list[tuple[int, bool]] = []
    reserved: list[int | None] = []
    monkeypatch.setattr(warmup, "warm_loaded", lambda model, *rest: asked.append(rest))
    monkeypatch.setattr(
        preparing, "warm_allocator", lambda model, tokens, dtype: reserved.append(tokens)
    )
    dsv4.save(random_model(dsv4.ModelConfig.tiny(), 0), tmp_path / "model")
    options: Any = {} if reserve is None else {"reserve_tokens": reserve}
    dsv4.load(tmp_path / "model", host_experts=placement, progress=False, **options)
    assert asked == [(most, False)]
    assert reserved[0] == reserve
    assert reserved[1] == (most if reserve is None else reserve)


@pytest.mark.parametrize("free", [0, 5_000_000_000, 1 << 40])
def test_a_model_with_little_memory_has_shorter_steps(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left when all weights are in their places decides, before kernels are compiled."""
    model = random_model(dsv4.ModelConfig.tiny(), 0)
    layers.host_experts_(model, HostExperts(2, 3, staged=1))
    sizes: dict[str, Any] = {"config": dsv4.ModelConfig.flash(), "device": GPU}
    for name, value in sizes.items():
        monkeypatch.setattr(type(model), name, value, raising=False)
    del model.config
    monkeypatch.setattr(preparing, "free_bytes", lambda device: free)
    seen: list[int] = []
    monkeypatch.setattr(preparing, "warm_allocator", lambda model, *rest: None)
    monkeypatch.setattr(warmup, "warm_loaded", lambda model, most, progress: seen.append(most))
    request: Any = SimpleNamespace(
        reserve_tokens=None, prepare=True, values=SimpleNamespace(progress=False)
    )
    preparing.make_ready(model, request, None, KernelsAhead())
    assert seen == [{0: 4096, 5_000_000_000: 8192}.get(free, 16384)]


def test_nothing_is_compiled_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "warmup", lambda *args, **kwargs: pytest.fail("it is called"))
    model = random_model(dsv4.ModelConfig.tiny(), 0)
    assert warmup.warm_loaded(model, 7, progress=False) is None


def test_a_model_loads_where_kernels_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(model: Any, device: torch.device, *, max_tokens: int, progress: bool) -> Any:
        assert (device, max_tokens, progress) == (GPU, 7, True)
        raise RuntimeError("nvidia-cutlass-dsl is not installed")

    monkeypatch.setattr(warmup, "warmup", fail)
    with caplog.at_level(logging.WARNING):
        assert warmup.warm_loaded(on_gpu(), 7, progress=True) is None
    assert "at their first launch: nvidia-cutlass-dsl is not installed" in caplog.text
