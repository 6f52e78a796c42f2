"""``python -m dsv4.bench layer``: a decode step of one layer without its GEMMs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from dsv4.bench.suites import layer
from dsv4.config import ModelConfig


def test_a_step_runs_with_buffers_for_the_results_of_its_gemms(monkeypatch: pytest.MonkeyPatch):
    """On the CPU, without the graph, every replaced function exists and takes its arguments."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a GEMM ran")

    steps = []

    def captured(step):
        step()
        steps.append(step)
        return SimpleNamespace(replay=None)

    for name in ("gemm", "gemm_swiglu", "grouped_gemm"):
        monkeypatch.setattr(importlib.import_module(f"dsv4.ops.{name}"), f"_{name}", refuse)
    monkeypatch.setattr(layer, "_captured", captured)
    monkeypatch.setattr(layer, "_replay_us", lambda graph: 2.0)
    monkeypatch.setattr(layer, "_kernels", lambda replay: [])
    sizes = ModelConfig.tiny(), 2, 64, torch.device("cpu")
    assert layer.between_gemms("tiny", *sizes) == (2.0, [])
    assert len(steps) == 1
