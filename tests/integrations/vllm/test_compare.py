"""examples/vllm/compare.py with an engine on a CPU: dsv4's model under vLLM's scheduler."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from dsv4.checkpoint import save
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.testing.models import random_model
from tests.integrations.vllm import compare_process, engine_process

pytest.importorskip("vllm", reason="vLLM is not installed")


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A small checkpoint; the engines' environment has what a CPU needs."""
    rates, types = {CSA: 4, HCA: 128}, (SLIDING, CSA, HCA)
    config = ModelConfig.tiny(layer_types=types, compress_rates=rates, sliding_window=128)
    save(random_model(config, 3), tmp_path / "model", layout="nvidia")
    root = str(Path(__file__).resolve().parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    return tmp_path / "model"


def serve_as_on(runner, monkeypatch):
    """Give engines a CPU's environment, with a model runner of vLLM's."""
    changed = engine_process.environment(runner) | {"DSV4_VLLM_CHECK": "0"}
    for name, value in changed.items():
        monkeypatch.setenv(name, value)


FLOAT32 = [f"additional_config={json.dumps(engine_process.FLOAT32)}"]


@pytest.mark.slow
def test_a_nan_is_found_where_it_was_made(checkpoint, tmp_path, monkeypatch, capsys):
    """Model Runner V2 knows the requests."""
    serve_as_on("V2", monkeypatch)
    find_nan = compare_process.load("find_nan")
    options = argparse.Namespace(
        folder=checkpoint,
        random=None,
        design="model",
        seconds=800.0,
        steps=2,
        out=tmp_path / "nan",
        option=FLOAT32,
    )
    status = find_nan.run(options, "cpu", 64, compare_process.__file__)
    printed = capsys.readouterr().out
    assert status == 0, printed + (tmp_path / "nan.model-checked.log").read_text()[-6000:]
    assert printed.count("as expected") == 3
    assert "every NaN was found where it was made" in printed
    assert "decode step of 8:" in printed


@pytest.mark.slow
def test_an_engine_does_every_phase(checkpoint, tmp_path, monkeypatch, capsys):
    compare = compare_process.load()
    serve_as_on("V1", monkeypatch)
    options = argparse.Namespace(
        folder=checkpoint,
        random=None,
        engines=["model"],
        draft="mtp",
        draft_tokens=1,
        seconds=800.0,
        rounds=1,
        steps=2,
        out=tmp_path / "compared.json",
        option=FLOAT32,
    )
    status = compare.run(options, "cpu", 64, compare_process.__file__)
    printed = capsys.readouterr().out
    assert status == 0, printed + (tmp_path / "compared.model.log").read_text()[-6000:]
    results = json.loads((tmp_path / "compared.json").read_text())
    for requests, _ in compare.DECODES:
        assert results[f"decode {requests}, round 0"]["model"]["ms"] > 0
        assert results[f"decode {requests}, round 0"]["model"]["tokens"] == 1
    assert len(results["texts"]["model"]["texts"]) == 8
    assert len(results["scores"]["model"]["logprobs"]) > 20
    assert "many requests, model: 24 texts, all log-probabilities finite" in printed
    assert "model: 0 kernels of dsv4 compiled after the start" in printed
    assert "foreign kernels none" in printed
