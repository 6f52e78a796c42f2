"""Loading compiles the kernels of all steps, and a model loads where that fails."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsv4
from dsv4.compilation import warmup
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
