"""The tool that compares machine code: names do not matter, instructions do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from dsv4.cute.runtime import cubin_cache
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan

PLAN = SmallMPlan(128, 1, 2, 1, False, False, 2)


@pytest.fixture(scope="module")
def tool():
    file = Path(__file__).parents[2] / "tools" / "kernel_code.py"
    spec = importlib.util.spec_from_file_location("kernel_code", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class RenamedPlan(SmallMPlan):
    """Another name for the same kernel."""


def test_names_do_not_matter_and_code_does(tool):
    plans = (PLAN, RenamedPlan(*dataclasses.astuple(PLAN)), dataclasses.replace(PLAN, warps=3))
    images = [cubin_cache.compile_image(plan, "sm_90a") for plan in plans]
    first, renamed, other = (tool.code_hash(image.cubin) for image in images)
    assert images[0].name != images[1].name
    assert first == renamed != other


def test_a_request_survives_the_file(tool):
    """A record keeps requests as JSON, which choose the same plans again."""
    for request in tool.sample()[::20]:
        assert tool.plan_of(json.loads(json.dumps(request))) == tool.plan_of(request) is not None


def test_a_difference_is_reported(tool, tmp_path, monkeypatch, capsys):
    file, hashes = tmp_path / "record.json", iter(["a", "b", "a", "c"])
    monkeypatch.setattr(tool, "sample", lambda: [("attention", "sm_90a", n) for n in range(2)])
    monkeypatch.setattr(tool, "compiled_hash", lambda request: next(hashes))
    assert tool._write(file, []) == 0
    assert tool._compare(file, []) == 1
    out = capsys.readouterr().out
    assert 'differs: ["attention", "sm_90a", 1]: b -> c' in out
    assert "1 of 2 kernels have the recorded machine code" in out
