"""Commands of the bench: baselines by name, versions, own sizes, comparisons of two files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4.bench import environment, results
from dsv4.bench.baselines import experts as moe_baselines
from dsv4.bench.cli import main
from dsv4.bench.compare import Comparison
from dsv4.bench.results import Row
from dsv4.bench.suites.model.document import (
    DecodeRow,
    ModelResults,
    Named,
    PromptRow,
    document,
    write,
)

RATES = environment.Rates(0.02, 0.01, 0.1)
MODEL = {
    "preset": "flash",
    "experts": 64,
    "experts_of_model": 256,
    "layers": 43,
    "layers_of_model": 43,
    "weights": "random",
    "recipe": "nvfp4",
    "routing": "random",
}
HEADER = {
    "gpu": "g",
    "driver": "d",
    "versions": {"torch": "1"},
    "commit": "c",
    "command": "x",
    "date": "d",
    "copy_tbs": 1.0,
    "read_tbs": 1.0,
    "bf16_tflops": 1.0,
    "node_us": 0.9,
}
ROW = Row("op", "case", {"N": 1}, 1, "reference", "why", 2.0, 0.5, 8, 0, match=True, error=1e-3)
WRONG = dataclasses.replace(ROW, us=None, match=False, ratio=3.25, message="off by a lot")


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "rates", lambda device: RATES)


def last_line(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


class TestBaselines:
    @pytest.mark.parametrize("option", ["--baselines", "--rivals"])
    @pytest.mark.parametrize(
        ("arguments", "known"),
        [
            (["run", "rms_norm"], "torch rms_norm, Liger"),
            (["run", "quantize"], "TileKernels (no global scale)"),
            (["run", "gemm", "--n", "16", "--k", "16"], "torch bf16, cuBLAS (bf16 weight)"),
            (["run"], "QuACK (one global scale)"),
            (["run", "attention"], "FlashMLA (no rotation)"),
            (["run", "indexer"], "inductor"),
            (["run", "attention_layer"], "transformers eager, transformers inductor, inductor"),
            (["moe"], next(iter(moe_baselines.BASELINES))),
        ],
    )
    def test_unknown_names_are_errors(self, option, arguments, known, capsys):
        assert main([*arguments, option, "foo", "--device", "cpu"]) == 2
        printed = capsys.readouterr()
        assert "--baselines has 'foo', wanted some of " in printed.err
        assert known in printed.err
        assert "operator [case]" not in printed.out, "nothing was measured"

    def test_names_of_other_operators_are_errors(self, capsys):
        assert main(["run", "rms_norm", "--baselines", "quack", "--device", "cpu"]) == 2
        assert "--baselines has 'quack', wanted some of torch rms_norm" in capsys.readouterr().err
        assert main(["run", "rope_tables", "--baselines", "liger", "--device", "cpu"]) == 2
        assert "--baselines has 'liger', wanted some of inductor" in capsys.readouterr().err

    def test_those_asked_for_are_timed_or_it_is_said_why_not(self, capsys):
        command = ["run", "gemm", "--cases", "q_b", "--repeat", "1", "--device", "cpu"]
        assert main([*command, "--baselines", "torch bf16,QUACK"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "torch bf16" in printed
        reason = "quack.gemm_w4: runs on a CUDA GPU, the tensors are on cpu"
        assert f"baseline QuACK (one global scale) was not timed: {reason}" in printed
        assert main(command) == 0
        assert "was not timed" not in capsys.readouterr().out

    def test_none_at_all(self, tmp_path: Path):
        path = tmp_path / "x.json"
        command = ["run", "swiglu", "--baselines", "none", "--repeat", "1", "--device", "cpu"]
        assert main([*command, "--json", str(path)]) == 0
        assert results.read_json(str(path)).rows[0].baselines == {}


class TestVersion:
    def test_versions_one_to_a_line(self, capsys):
        assert main(["--version"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"dsv4 {dsv4.__version__}"
        assert f"torch {torch.__version__}" in lines
        names = [line.split()[0] for line in lines]
        assert {"triton", "transformers", "nvidia-cutlass-dsl", "python"} <= set(names)

    def test_what_is_missing_is_said(self, monkeypatch):
        monkeypatch.setattr(environment, "versions", lambda: {"python": "3", "dsv4": "1"})
        assert environment.version_lines()[:3] == ["dsv4 1", "python 3", "torch not installed"]

    @pytest.mark.slow
    def test_from_the_shell(self):
        command = [sys.executable, "-m", "dsv4.bench", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"dsv4 {dsv4.__version__}\n")


class TestOwnSizes:
    def test_gemm(self, tmp_path: Path):
        path = tmp_path / "x.json"
        sizes = ["--n", "48", "--k", "80", "--tokens", "1,5"]
        command = ["run", "gemm", *sizes, "--repeat", "1", "--device", "cpu", "--json", str(path)]
        assert main(command) == 0
        rows = results.read_json(str(path)).rows
        assert [(row.case, row.tokens) for row in rows] == [
            (name, tokens)
            for name in ("own", "own w4a4", "own fp8", "own w4a8 (mxfp4 cast)", "own w8a8")
            for tokens in (1, 5)
        ]
        assert all(row.shape == {"N": 48, "K": 80} and row.match for row in rows)
        assert [row.flops for row in rows[:2]] == [2 * 48 * 80, 10 * 48 * 80]

    def test_explain(self, capsys):
        assert main(["explain", "gemm", "--n", "48", "--k", "80", "--device", "cpu"]) == 0
        assert "gemm [own w4a4] N=48 K=80, 16 tokens" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["gemm", "--n", "48"], "--n and --k go together"),
            (["rope", "--n", "48", "--k", "80"], "for gemm alone"),
            (["--n", "48", "--k", "80"], "for gemm alone"),
            (["gemm", "--n", "48", "--k", "81"], "K is 81, wanted a multiple of 16"),
            (["gemm", "--n", "0", "--k", "80"], "0 is below 1"),
            (["gemm", "--n", "48", "--k", "80", "--shapes", "pro"], "in place of --shapes"),
            (["gemm", "--n", "48", "--k", "80", "--check"], "--check has sizes of its own"),
            (["attention", "--n", "48"], "for gemm alone"),
        ],
    )
    def test_what_cannot_be(self, arguments, message, capsys):
        assert main(["run", *arguments, "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err


def row_of(case: str, us: float | None, **changes) -> Row:
    return dataclasses.replace(ROW, **{"case": case, "us": us, **changes})


class TestCompare:
    def compared(self, tmp_path, a, b, *more, header=HEADER) -> int:
        results.write_json(str(tmp_path / "a.json"), HEADER, a)
        results.write_json(str(tmp_path / "b.json"), header, b)
        return main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *more])

    def test_faster_slower_and_the_same(self, tmp_path, capsys):
        a = [row_of("x", 10.0), row_of("y", 10.0), row_of("z", 10.0), row_of("old", 1.0)]
        b = [row_of("z", 10.4), row_of("x", 5.0), row_of("y", 20.0)]
        assert self.compared(tmp_path, a, b) == 1
        lines = capsys.readouterr().out.splitlines()
        body = {line.split()[1]: line.split()[-2:] for line in lines[2:5]}
        assert body == {
            "[z]": ["1.040", "same"],
            "[x]": ["0.500", "faster"],
            "[y]": ["2.000", "slower"],
        }
        assert lines[-1] == (
            "SLOWER: 3 rows: 1 same, 1 faster, 1 slower (within 5 %); "
            "B / A 1.013 (geometric mean); 1 rows in A alone, 0 in B alone"
        )

    @given(
        us=st.floats(1e-3, 1e6),
        ratio=st.floats(0.01, 100),
        threshold=st.sampled_from([0.0, 5.0, 50.0]),
    )
    def test_words_mirror(self, us, ratio, threshold):
        comparison = Comparison(None, None, threshold)
        a, b = row_of("x", us), row_of("x", us * ratio)
        opposite = {"slower": "faster", "faster": "slower", "same": "same"}
        assert comparison.word(b, a) == opposite[comparison.word(a, b)]
        assert comparison.word(a, a) == "same"

    def test_a_failure_in_the_second_file_fails(self, tmp_path, capsys):
        assert self.compared(tmp_path, [ROW], [WRONG]) == 1
        printed = capsys.readouterr().out
        assert "WRONG, was ok" in printed
        assert printed.splitlines()[-1].startswith("FAILED: 1 of 1 check: op [case] N=1")
        assert self.compared(tmp_path, [WRONG], [ROW]) == 0
        assert "ok, was WRONG" in capsys.readouterr().out

    @pytest.mark.parametrize(("more", "status"), [((), 1), (("--threshold", "12"), 0)])
    def test_a_regression_is_what_the_threshold_says(self, more, status, tmp_path):
        assert self.compared(tmp_path, [row_of("x", 10.0)], [row_of("x", 11.0)], *more) == status

    @pytest.mark.parametrize("threshold", ["-1", "x", "nan", "1000"])
    def test_thresholds_that_are_none(self, threshold, tmp_path, capsys):
        assert self.compared(tmp_path, [ROW], [ROW], "--threshold", threshold) == 2
        assert "is not within 0 to 1000 percent" in capsys.readouterr().err

    def test_nothing_in_common_is_one_sentence(self, tmp_path, capsys):
        assert self.compared(tmp_path, [row_of("x", 1.0)], [row_of("y", 1.0)]) == 2
        a, b = tmp_path / "a.json", tmp_path / "b.json"
        said = "wanted the same cases, sizes and numbers of tokens"
        assert capsys.readouterr().err == f"error: no row of {a} is in {b}, {said}\n"

    def test_other_suites_are_one_sentence(self, tmp_path, capsys):
        assert self.compared(tmp_path, [ROW], [dataclasses.replace(ROW, op="rope")]) == 2
        a, b = tmp_path / "a.json", tmp_path / "b.json"
        said = f"error: {a} has op, {b} has rope: wanted files of one suite\n"
        assert capsys.readouterr().err == said
        assert self.compared(tmp_path, [ROW], []) == 2
        assert "has op, " in capsys.readouterr().err

    def model(self, path: Path, factor: float, **named: str) -> None:
        model = {**MODEL, **named}
        row = DecodeRow(Named(**model), tokens=8, context=64, generate_ms=2.0 * factor)
        prompt = PromptRow(Named(**model), prompt=5, first_ms=3.0)
        for measured in (row, prompt):
            for field in dataclasses.fields(measured):
                if field.default is None and getattr(measured, field.name) is None:
                    measured.missing[field.name] = "why"
        write(path, document(HEADER, ModelResults(rows=[row], prompts=[prompt])))

    def test_whole_models(self, tmp_path, capsys):
        a, b = tmp_path / "a.json", tmp_path / "b.json"
        self.model(a, 1.0)
        self.model(b, 1.5, recipe="nvidia")
        assert main(["compare", str(a), str(b)]) == 1
        printed = capsys.readouterr().out.splitlines()
        assert printed[0] == "recipe: nvfp4 -> nvidia"
        (line,) = [line for line in printed if line.startswith("step")]
        assert "[flash generate] experts=64 layers=43 context=64" in line
        assert line.split()[-6:] == ["nvfp4", "nvidia", "2000", "3000", "1.500", "slower"]
        assert printed[-1].startswith("SLOWER: 2 rows: 1 slower, 1 same (within 5 %); B / A 1.225")
        assert main(["compare", str(a), str(a)]) == 0
        results.write_json(str(b), HEADER, [ROW])
        assert main(["compare", str(a), str(b)]) == 2
        assert f"{a} has a whole model, {b} has op: wanted" in capsys.readouterr().err
        self.model(b, 1.0, preset="pro")
        assert main(["compare", str(a), str(b)]) == 2
        assert "no row of" in capsys.readouterr().err

    def test_other_machines_are_named(self, tmp_path, capsys):
        header = {**HEADER, "gpu": "h", "versions": {"torch": "2", "triton": "3"}}
        assert self.compared(tmp_path, [ROW], [ROW], header=header) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["gpu: g -> h", "versions: torch 1 -> 2, triton None -> 3"]

    def test_several_backends_are_matched_in_order(self, tmp_path, capsys):
        rows = [row_of("x", 1.0), row_of("x", 2.0, backend="triton")]
        assert self.compared(tmp_path, rows, rows) == 0
        assert "COMPARED: 2 rows: 2 same" in last_line(capsys)

    @pytest.mark.parametrize("content", ["", "{}", "[1]", '{"header": 1, "rows": []}', "[" * 9999])
    def test_what_is_no_file_of_results(self, content, tmp_path, capsys):
        path = tmp_path / "x.json"
        path.write_text(content)
        assert main(["compare", str(path), str(path)]) == 2
        assert f"error: {path}: " in capsys.readouterr().err
        assert main(["compare", str(tmp_path / "missing"), str(path)]) == 2
        assert "No such file" in capsys.readouterr().err

    def test_what_is_written_is_read(self, tmp_path):
        rows = (dataclasses.replace(WRONG, error=float("inf"), ratio=float("inf")), ROW)
        results.write_json(str(tmp_path / "x.json"), HEADER, list(rows))
        document = results.read_json(str(tmp_path / "x.json"))
        assert (document.header, document.rows) == (HEADER, rows)

    def test_files_without_ratios_are_read(self, tmp_path):
        document = results.document(HEADER, [ROW])
        del document["rows"][0]["ratio"]
        (tmp_path / "x.json").write_text(json.dumps(document))
        assert results.read_json(str(tmp_path / "x.json")).rows == (ROW,)
        document["rows"][0]["ratio"] = "large"
        with pytest.raises(ValueError, match="ratio is 'large'"):
            results.validate(document)
