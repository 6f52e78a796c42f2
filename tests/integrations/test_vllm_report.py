"""``python -m dsv4 vllm-report``, with and without vLLM."""

from __future__ import annotations

import importlib.util
import os

import pytest

from dsv4 import __main__ as program
from dsv4.integrations.vllm import command_line, places
from dsv4.integrations.vllm.report import Report, path_of_stage

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("DSV4_VLLM", "DSV4_VLLM_STRICT", "DSV4_VLLM_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    if not HAS_VLLM:
        return
    # Importing vLLM's model takes a minute; tests/integrations/vllm compares the signatures.
    monkeypatch.setattr(places, "mismatches", lambda known: ["x.y is missing"] if known else [])


def saved(stages=1, when=0):
    for stage in range(stages):
        report = Report()
        report.replaced("experts", f"layers.{stage}.ffn.experts", "grouped_gemm")
        report.left("linear", f"layers.{stage}.attn.wo_a", "Fp8LinearMethod", "a reason")
        path = path_of_stage(stage, stages)
        report.save(path)
        os.utime(path, (1_000_000_000 + when, 1_000_000_000 + when))


def run(capsys, *arguments):
    status = program.main(["vllm-report", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_it_says_versions_switches_and_places(capsys, monkeypatch):
    monkeypatch.setenv("DSV4_VLLM", "linear,experts")
    monkeypatch.setenv("DSV4_VLLM_CHECK", "1")
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert "DSV4_VLLM: parts of vLLM's model: experts, linear\n" in out
    assert "DSV4_VLLM_STRICT: off, DSV4_VLLM_CHECK: on\n" in out
    assert "No report was saved in" in out
    if HAS_VLLM:
        assert "supported" in out.splitlines()[0]
        assert f"experts: {len(places.EXPERTS)} functions and classes of vLLM, 1 differ\n" in out
        assert "  x.y is missing\n" in out
    else:
        assert out.splitlines()[0] == "vLLM: not installed; supported: 0.33.x"


@pytest.mark.parametrize(
    ("value", "words"),
    [("off", "off, vLLM stays as it is"), ("model", "this package's model under vLLM's engine")],
)
def test_it_says_the_design(capsys, monkeypatch, value, words):
    monkeypatch.setenv("DSV4_VLLM", value)
    assert f"DSV4_VLLM: {words}\n" in run(capsys)[1]


def test_an_unknown_release_is_left_untouched(capsys, monkeypatch):
    monkeypatch.setattr(command_line, "_installed", lambda: "0.34.0")
    monkeypatch.setattr(places, "mismatches", lambda _: [])
    first = run(capsys)[1].splitlines()[0]
    assert first == "vLLM: 0.34.0, not supported (0.33.x is): the plugin leaves it untouched"


def test_the_last_table_is_of_all_stages_of_the_engine_that_was_started_last(capsys):
    saved(stages=1, when=0)
    saved(stages=2, when=60)
    status, out, err = run(capsys, "--last")
    assert (status, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith("report-")] == [
        line for line in out.splitlines() if "-of-2.json, 2001-09-" in line
    ]
    assert out.count("grouped_gemm") == 2
    assert out.count("a reason") == 2
    saved(stages=1, when=120)
    assert run(capsys, "--last")[1].count("grouped_gemm") == 1
    assert "report-0-of-1.json" in run(capsys)[1]


def test_bad_input_is_said_in_a_sentence(capsys, monkeypatch):
    status, out, err = run(capsys, "--last")
    assert (status, out) == (2, "")
    assert "--last: there is no report in" in err
    path_of_stage(0, 1).parent.mkdir(parents=True)
    for content in ("{", '[{"part": 1}]', "[1]"):
        path_of_stage(0, 1).write_text(content)
        status, out, err = run(capsys, "--last")
        assert (status, out) == (2, "")
        assert "report-0-of-1.json is damaged" in err
    monkeypatch.setenv("DSV4_VLLM", "everything")
    status, out, err = run(capsys)
    assert (status, out) == (2, "")
    assert "DSV4_VLLM is 'everything', expected all, off, model or" in err
    with pytest.raises(SystemExit) as stopped:
        program.main(["vllm-report", "last"])
    assert stopped.value.code == 2
