"""Output of the bench: tables that fit, the verdict in the last line, versions, comparisons."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.bench import baselines, cli, environment, measure, report, results, tables, verdict
from dsv4.bench.cases import MAKERS, PRESETS, cases
from dsv4.bench.cli import main
from dsv4.bench.measure import Options
from dsv4.bench.problem import UsageError
from dsv4.bench.results import Row
from dsv4.bench.suites import attention, main_job
from dsv4.bench.verdict import Check

CPU = torch.device("cpu")
RATES = environment.Rates(0.02, 0.01, 0.1)
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


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Put an implementation before all others of an operator."""
    load = dispatch.load

    def add(op: str, function) -> None:
        row = dispatch.Implementation(op, "wrong", f"wrong:{op}")
        monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (row, *dispatch.IMPLEMENTATIONS))
        monkeypatch.setattr(
            dispatch, "load", lambda target: function if target == row.target else load(target)
        )
        dispatch.implementations.cache_clear()

    yield add
    monkeypatch.undo()
    dispatch.implementations.cache_clear()
    dispatch.operators.cache_clear()


def last_line(capsys) -> str:
    return capsys.readouterr().out.splitlines()[-1]


class TestTables:
    @pytest.mark.parametrize("preset", PRESETS)
    @pytest.mark.parametrize("rest", ["", " cooled"])
    def test_rows_of_every_case_fit(self, preset: str, rest: str):
        every = [case for op in MAKERS for case in cases(op, preset, 4096)]
        for group in (attention.attention, attention.indexer):
            every += group(preset, 1)
        names = {name for known in baselines.BASELINES.values() for name in known}
        backends = [row.name for row in dispatch.IMPLEMENTATIONS]
        rows = [
            Row(
                *(case.op, case.name + rest, case.shape, case.tokens, max(backends, key=len)),
                *("why " * 50, 123456.0, 54321.0, 1 << 30, 1 << 40, dict.fromkeys(names, 98765.0)),
                error="bitwise",
                match=None,
                copy_share=1.0,
                message="said " * 40,
            )
            for case in every
        ]
        lines = report.lines(rows)
        assert max(map(len, lines)) <= tables.WIDTH == 120
        text = "\n".join(lines)
        for case in every:
            assert case.op in text
            assert f"[{case.name}{rest}]" in text or not case.name
        assert max(map(len, attention.lines(rows))) <= 120

    @given(
        parts=st.lists(st.text("abc =", max_size=70), min_size=1, max_size=3),
        others=st.lists(st.text("xyz", max_size=15), min_size=1, max_size=5),
    )
    @example(parts=["grouped_gemm", "[gate_up]", "E=384 " * 9], others=["x" * 15] * 5)
    @example(parts=["", "", ""], others=["x"])
    def test_a_label_takes_what_is_left(self, parts, others):
        headings = ["label", *(f"h{i}" for i in range(len(others)))]
        lines = tables.labelled(headings, [(parts, others), (["b"], others)])
        assert max(map(len, lines)) <= 120
        printed = " ".join(lines[2:]).split()
        for word in " ".join(parts).split():
            assert word in printed or len(word) > 20

    @given(
        st.integers(1, 8).flatmap(
            lambda n: st.lists(
                st.lists(st.text("ab ", max_size=30), min_size=n, max_size=n), max_size=4
            ).map(lambda body: (n, body))
        ),
        st.integers(0, 2),
    )
    def test_a_plain_table_fits(self, sized, keys):
        columns, body = sized
        headings = [f"h{i}" for i in range(columns)]
        keys = min(keys, columns - 1)
        if not keys and columns > 3:
            return  # the other columns of a table that is wrapped are short
        lines = tables.plain(headings, body, keys)
        assert max(map(len, lines)) <= 120
        words = " ".join(lines).split()
        assert all(word in words for row in body for text in row for word in text.split())

    def test_columns_that_do_not_fit_follow_below(self):
        headings = ["key", *(f"column {i}" for i in range(20))]
        body = [["a", *("x" * 9 for _ in range(20))], ["b", *("y" * 9 for _ in range(20))]]
        lines = tables.plain(headings, body, keys=1)
        assert [line.split()[0] for line in lines if line and line[0] != "-"] == (
            ["key", "a", "b"] * 2
        )
        assert lines.count("") == 1

    @given(st.text(max_size=200), st.integers(10, 80))
    def test_short_is_short(self, text: str, most: int):
        shortened = tables.short(text, most)
        assert len(shortened) <= most
        line = " ".join(text.split())
        assert shortened == line or (shortened.endswith("...") and line.startswith(shortened[:-3]))

    def test_each_row_has_one_short_reason(self):
        rows = [dataclasses.replace(ROW, reason=why) for why in ("first " * 30, "second", "second")]
        lines = report.lines(rows)
        assert [line.split()[-1] for line in lines[2:5]] == ["1", "2", "2"]
        index = next(i for i, line in enumerate(lines) if line.startswith("why this"))
        assert lines[index + 2] == "  2  second"
        assert lines[index + 1].endswith("...")
        assert len(lines[index + 1]) <= report.REASON + 5

    def test_microseconds_are_in_headings_alone(self):
        row = dataclasses.replace(ROW, baselines={"torch": 3.0})
        lines = report.lines([row])
        headings = [line for line in lines if line.startswith("operator")]
        assert len(headings) == 2
        assert all(heading.split().count("us") >= 1 for heading in headings)
        others = [line for line in lines if line not in headings]
        assert not any("us" in line.split() or "/ us" in line for line in others)
        assert not any("/ us" in name for name in report.HEADINGS)

    def test_without_rich_or_terminal_it_is_plain(self, capsys):
        report.table([ROW])
        heading, rule, line = capsys.readouterr().out.splitlines()[:3]
        assert heading.startswith("operator")
        assert set(rule) <= {"-", " "}
        assert "1.0e-03" in line

    def test_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch):
        pytest.importorskip("rich")
        monkeypatch.setenv("COLUMNS", "200")
        written: list[str] = []
        stream = SimpleNamespace(isatty=lambda: True, write=written.append, flush=lambda: None)
        report.table([dataclasses.replace(WRONG, op="op[x]")], stream)
        assert "op[x]" in "".join(written)
        assert "WRONG" in "".join(written)

    def test_the_fastest_baseline_is_set_against_ours(self, tmp_path: Path):
        base = dataclasses.replace(ROW, baselines={"slow": 9.0, "fast": 3.0})
        assert base.baseline_ratio == 1.5
        alone = dataclasses.replace(base, baselines={})
        wrong = dataclasses.replace(base, us=None, baselines={})
        assert alone.baseline_ratio is None
        assert wrong.baseline_ratio is None
        rows = [base, alone]
        index = report.HEADINGS.index("speedup")
        assert [report.cells(row)[index] for row in rows] == ["1.50", "-"]
        listed = [line.split()[-3:] for line in report.baseline_table(rows)[-2:]]
        assert listed == [["slow", "9.00", "4.50"], ["fast", "3.00", "1.50"]]
        path = report.write_csv(str(tmp_path / "x.csv"), rows)
        with path.open() as stream:
            assert [row["baseline_ratio"] for row in csv.DictReader(stream)] == ["1.5", ""]
        results.validate(results.document(HEADER, rows))


class TestVerdict:
    def test_all_passed(self):
        checks = [Check("check", "x", True), Check("check", "y", True), Check("model", "z", True)]
        assert verdict.line(checks) == "PASSED: 2 checks, 1 model passed"

    def test_what_failed_and_where(self):
        row = dataclasses.replace(WRONG, op="gemm", case="q_b", shape={"N": 256, "K": 32})
        checks = [verdict.of_row(ROW), verdict.of_row(row), Check("generation", "drop-in", True)]
        assert verdict.line(checks) == (
            "FAILED: 1 of 2 checks: gemm [q_b] N=256 K=32, 1 token, reference: "
            "error 3.25 times its budget"
        )
        where = "codes differs at 3 of 64 places, first at [0, 1]: "
        bits = dataclasses.replace(row, ratio=float("inf"), message=where + "250, wanted 17")
        assert verdict.line([verdict.of_row(bits)]).endswith(f"{where}250,...")

    def test_many_failures_are_counted(self):
        checks = [Check("check", f"place {i}", False, "bad") for i in range(5)]
        line = verdict.line([*checks, Check("check", "unknown", None)], "interrupted after 5 rows")
        assert line == (
            "FAILED: 5 of 5 checks: place 0: bad; place 1: bad; place 2: bad; and 2 more"
            "; 1 not checked; interrupted after 5 rows"
        )

    def test_nothing_checked_is_not_passed(self):
        checks = [Check("check", "x", None)]
        assert verdict.line(checks) == "NOT CHECKED: nothing was checked; 1 not checked"
        assert verdict.line([], "interrupted").startswith("STOPPED: nothing was checked")

    @given(
        st.lists(
            st.builds(
                Check,
                st.sampled_from(["check", "generation"]),
                st.sampled_from(["here", "there"]),
                st.sampled_from([True, False, None]),
                st.just("bad"),
            ),
            max_size=8,
        )
    )
    def test_one_line_whose_first_word_is_the_result(self, checks):
        line = verdict.line(checks)
        assert "\n" not in line
        results = {check.passed for check in checks}
        word = "FAILED" if False in results else "PASSED" if True in results else "NOT CHECKED"
        assert line.startswith(f"{word}: ")

    def test_the_error_is_kept_in_units_of_its_budget(self, register, tmp_path: Path, capsys):
        load = dispatch.load(dispatch.implementations("swiglu")[-1].target)
        register("swiglu", lambda args: load(args) * 1.1)
        path = tmp_path / "x.json"
        assert main(["run", "swiglu", "--device", "cpu", "--json", str(path)]) == 1
        (row,) = results.read_json(str(path)).rows
        assert 1 < row.ratio < 1000
        assert last_line(capsys) == (
            f"FAILED: 1 of 1 check: swiglu I=32, 16 tokens, wrong: "
            f"error {row.ratio:.3g} times its budget"
        )

    def test_an_operator_that_raises_is_named_and_the_others_are_measured(self, register, capsys):
        def broken(*args):
            raise RuntimeError("no kernel image")

        register("swiglu", broken)
        command = ["run", "swiglu", "rms_norm", "--repeat", "1", "--device", "cpu"]
        assert main(command) == 1
        printed = capsys.readouterr()
        assert printed.out.splitlines()[-1] == (
            "FAILED: 1 of 3 checks: swiglu I=32, 16 tokens, auto: "
            "raised RuntimeError: no kernel image"
        )
        assert "Traceback" in printed.err

    def test_unchecked_rows_are_not_passed(self, capsys):
        assert main(["run", "swiglu", "--no-check", "--repeat", "1", "--device", "cpu"]) == 0
        assert last_line(capsys) == "NOT CHECKED: nothing was checked; 1 not checked"


class TestMainJob:
    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path):
        find = main_job.importlib.util.find_spec
        monkeypatch.setattr(
            main_job.importlib.util,
            "find_spec",
            lambda name, *rest: None if name == "transformers" else find(name, *rest),
        )
        path = tmp_path / "all.json"
        assert main(["--repeat", "1", "--json", str(path), "--device", "cpu"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert any("transformers is not installed" in line for line in printed)
        assert max(len(line) for line in printed if not line.startswith("wrote ")) <= 120
        document = json.loads(path.read_text())
        results.validate(document)
        assert {row["op"] for row in document["rows"]} == set(MAKERS)
        assert printed[-1] == f"PASSED: {len(document['rows'])} checks passed; 2 not checked"

    def test_generation_equals_transformers(self, capsys):
        pytest.importorskip("transformers")
        checks = main_job.generation(CPU)
        assert [(check.where, check.passed) for check in checks] == [
            ("our model", True),
            ("drop-in", True),
        ]
        printed = capsys.readouterr().out
        assert printed.count("tokens equal") == 2
        assert "fp8_block" in printed
        assert "nvfp4" in printed

    def test_a_wrong_operator_is_found_by_generation(self, register, capsys):
        pytest.importorskip("transformers")
        target = dispatch.load(dispatch.implementations("rope")[-1].target)
        register("rope", lambda args: target(args._replace(sin=1.001 * args.sin)))
        assert [check.passed for check in main_job.generation(CPU)] == [False, False]
        assert capsys.readouterr().out.count("WRONG") == 2

    def test_generation_that_differs_fails_the_job(self, monkeypatch, capsys):
        monkeypatch.setattr(main_job, "operators", lambda options, rates, rows: rows.append(ROW))
        check = Check("generation", "drop-in", False, "11 of 12 tokens differ")
        monkeypatch.setattr(main_job, "generation", lambda device, seed: [check])
        assert main(["--device", "cpu"]) == 1
        assert last_line(capsys) == ("FAILED: 1 of 1 generation: drop-in: 11 of 12 tokens differ")

    @pytest.mark.parametrize("step", ["_write", "_load", "_compare"])
    def test_a_step_that_raises_fails_the_job_and_operators_follow(self, step, monkeypatch, capsys):
        def fail(*arguments):
            raise KeyError("a name")

        monkeypatch.setattr(main_job, step, fail)
        monkeypatch.setattr(main_job, "operators", lambda options, rates, rows: rows.append(ROW))
        assert main(["--device", "cpu"]) == 1
        printed = capsys.readouterr()
        name = step.strip("_")
        assert printed.out.splitlines()[-1] == (
            f"FAILED: 1 of 1 generation: {name}: raised KeyError: 'a name'"
        )
        assert "Traceback" in printed.err

    def test_an_interrupt_keeps_what_was_measured(self, monkeypatch, capsys):
        def stop(options, rates, rows):
            rows.append(ROW)
            raise KeyboardInterrupt

        monkeypatch.setattr(main_job, "operators", stop)
        monkeypatch.setattr(main_job, "generation", lambda device, seed: [])
        assert main(["--device", "cpu"]) == 130
        assert last_line(capsys) == "STOPPED: 1 check passed; interrupted after 1 rows"

    def test_a_difference_in_tokens_or_logits_is_wrong(self, capsys):
        logits = torch.ones(1, 2, 3)
        assert main_job._agree("x", [1, 2], [1, 2], logits, logits).passed
        tokens = main_job._agree("x", [1, 3], [1, 2], logits, logits)
        assert (tokens.passed, tokens.detail) == (False, "1 of 2 tokens differ, logits 0.0e+00 off")
        assert not main_job._agree("x", [1], [1, 2], logits, logits).passed
        assert not main_job._agree("x", [1], [1], logits * 1.001, logits).passed
        assert capsys.readouterr().out.count("WRONG") == 3


def test_usage_errors_are_not_failed_checks():
    options = Options(CPU, "no such backend")
    with pytest.raises(UsageError):
        measure.attempt(cases("swiglu", "tiny", 1)[0], options, RATES)
    assert cli.OK == 0
