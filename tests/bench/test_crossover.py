"""``python -m dsv4.bench crossover``: what it says, its files, and the kernels that it compiles."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.bench import environment, results
from dsv4.bench.cli import main
from dsv4.bench.content import load
from dsv4.bench.measure import Options
from dsv4.bench.pages.folder import ResultsFolder
from dsv4.bench.pages.index import gpu_page
from dsv4.bench.problem import Verdict
from dsv4.bench.suites import crossover
from dsv4.bench.suites import crossover_results as of
from dsv4.cute import e4m3_costs, gemm_e4m3, grouped_gemm_e4m3

RATES = environment.Rates(0.02, 0.01, 0.1)
TIME = st.floats(0.1, 1e5).map(lambda us: float(f"{us:.4g}"))
HEADER = {"gpu": "NVIDIA H200", "date": "2026-11-29T12:00:00+00:00"}


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "rates", lambda device: RATES)


@st.composite
def times(draw) -> of.Times:
    tokens = tuple(sorted(draw(st.sets(st.integers(1, 9999), min_size=1, max_size=8))))
    count = len(tokens)
    measured = st.lists(st.none() | TIME, min_size=count, max_size=count)
    estimated = st.lists(TIME, min_size=count, max_size=count)
    return of.Times(
        "flash q_b",
        {"N": 128, "K": 256},
        tokens,
        *(tuple(draw(kind)) for kind in (measured, measured, estimated, estimated)),
    )


@given(drawn=times())
def test_fp8_is_faster_from_there_on_and_not_just_before(drawn: of.Times):
    measured = [count for count in drawn.tokens if drawn.speedup(count) is not None]
    first = drawn.measured_from()
    if first is None:
        assert not measured or drawn.speedup(measured[-1]) <= 1
        return
    assert all(drawn.speedup(count) > 1 for count in measured if count >= first)
    before = [count for count in measured if count < first]
    assert not before or drawn.speedup(before[-1]) <= 1


@given(drawn=times())
def test_a_choice_loses_what_the_other_form_would_have_gained(drawn: of.Times):
    for count, lost in drawn.losses().items():
        index = drawn.tokens.index(count)
        both = drawn.fp8[index], drawn.bfloat16[index]
        takes_fp8 = drawn.fp8_estimate[index] < drawn.bfloat16_estimate[index]
        assert lost * min(both) == pytest.approx(both[0] if takes_fp8 else both[1])
        assert lost >= 1
    assert set(drawn.losses()) == {c for c in drawn.tokens if drawn.speedup(c) is not None}


@given(gemms=st.lists(times(), max_size=4))
def test_a_file_gives_back_what_was_written(gemms: list[of.Times]):
    text = results.text_of(of.document(HEADER, gemms))
    assert of.parse(json.loads(text)) == tuple(gemms)
    rows = of.rows(gemms)
    assert len(rows) == sum(len(drawn.tokens) for drawn in gemms)
    assert all((row.us is None) == (row.match is False) for row in rows)
    assert text.count('"name"') == len(gemms)
    assert all(line.count('"name"') <= 1 for line in text.splitlines())


@given(gemms=st.lists(times(), min_size=1, max_size=4))
def test_a_table_has_a_column_for_each_number_of_tokens(gemms: list[of.Times]):
    assert {len(row) for row in of.body(gemms)} == {len(of.headings(gemms))}
    assert all(line for line in of.lines(gemms) if line)


def test_what_the_table_says():
    drawn = of.Times(
        "pro o_b",
        {"N": 7168, "K": 16384},
        (64, 256, 1024),
        (20.0, 30.0, 50.0),
        (10.0, 33.0, 75.0),
        (9.0, 40.0, 50.0),
        (10.0, 30.0, 60.0),
    )
    row = dict(zip(of.headings([drawn]), of.body([drawn])[0], strict=True))
    assert row["FP8 from"] == "256"
    assert row["estimate"] == "1024"
    assert row["lost"] == "100 % (64)"
    assert [row[str(count)] for count in drawn.tokens] == ["0.50", "1.10", "1.50"]
    slow = dataclasses.replace(drawn, fp8=(99.0, 99.0, 99.0), fp8_estimate=(99.0, 99.0, 99.0))
    assert of.body([slow])[0][2:5] == ["> 1024", "> 1024", "0 %"]
    fast = dataclasses.replace(drawn, fp8=(1.0, 1.0, 1.0), fp8_estimate=(1.0, 1.0, 1.0))
    assert of.body([fast])[0][2:5] == ["<= 64", "<= 64", "0 %"]
    none = of.Times("pro o_b", {}, message="not here")
    assert of.body([none])[0][2:5] == ["-", "-", "-"]
    assert "pro o_b: not here" in of.lines([none])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1]}, r"gemms\[0\].fp8 has 2, wanted 1"),
        ({"extra": 1}, r"gemms\[0\].extra is unknown"),
        ({"name": None}, r"gemms\[0\].name is missing"),
    ],
)
def test_a_damaged_file_is_refused(change: dict, message: str):
    drawn = of.Times("q", {}, (1, 2), *(((1.0, 2.0),) * 4))
    content = of.document(HEADER, [drawn])
    line = content["gemms"][0]
    content["gemms"] = [{k: v for k, v in {**line, **change}.items() if v is not None}]
    with pytest.raises(ValueError, match=message):
        of.parse(content)


def command(path: object, *more: str) -> int:
    quick = ["--tokens", "4,1", "--repeat", "1", "--device", "cpu", "--json", str(path)]
    return main(["crossover", *quick, *more])


def test_a_run_on_the_cpu(tmp_path: Path, capsys):
    path = tmp_path / "c.json"
    assert command(path) == 0
    content = load(path)
    names = [drawn.name for drawn in content.crossovers]
    expected = ["gate_up", "down", "q_a+kv", "experts gate_up", "experts down"]
    assert names == [f"tiny {name}" for name in expected]
    for drawn in content.crossovers:
        assert drawn.tokens == (1, 4)
        assert all(us > 0 for us in (*drawn.fp8, *drawn.bfloat16, *drawn.fp8_estimate))
    assert [row.case for row in content.rows] == [name for name in names for _ in range(2)]
    assert path.stat().st_size < 3000
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 200
    assert printed[-1] == "PASSED: 10 checks passed"
    assert main(["compare", str(path), str(path)]) == 0


def test_markdown_has_the_crossovers(tmp_path: Path, capsys):
    assert command(tmp_path / "c.json", "--cases", "tiny down", "--markdown") == 0
    printed = capsys.readouterr().out.splitlines()
    table = [line for line in printed if line.startswith("|")]
    assert table[0] == "| GEMM | sizes | FP8 from | estimate | lost | 1 | 4 |"
    assert table[2].startswith("| tiny down | N=128 K=128 |")
    assert of.EXPLAINED in printed


def test_a_page_shows_the_file(tmp_path: Path, monkeypatch):
    assert command(f"{tmp_path}/", "--cases", "tiny gate_up,*experts down") == 0
    root = tmp_path / "results"
    (folder,) = root.iterdir()
    page = gpu_page(ResultsFolder.read(root), folder.name)
    assert "## FP8 and bfloat16 GEMMs by tokens" in page
    assert "| GEMM | sizes | FP8 from | estimate | lost | 1 | 4 |" in page
    assert "| tiny experts gate_up |" not in page


def test_a_wrong_form_has_no_time(tmp_path: Path, monkeypatch, capsys):
    right = crossover.verify

    def verify(problem, backend):
        verdict = right(problem, backend)
        is_codes = not isinstance(problem.args[0], torch.Tensor)
        return Verdict(False, None, "it is off") if is_codes else verdict

    monkeypatch.setattr(crossover, "verify", verify)
    assert command(tmp_path / "c.json", "--cases", "*down") == 1
    dense, experts = load(tmp_path / "c.json").crossovers
    assert (dense.fp8, dense.bfloat16) == ((None, None), (None, None))
    assert "1 tokens: it is off" in dense.message
    assert None not in (*experts.fp8, *experts.bfloat16)
    assert "it is off" in capsys.readouterr().out


def test_a_wrong_form_of_experts_has_no_time(tmp_path: Path, monkeypatch):
    from dsv4.bench.checks import moe

    right = moe._whole

    def damaged(parts, gemm):
        whole = right(parts, gemm)
        if isinstance(whole, torch.Tensor):
            return whole * 1.1
        return dataclasses.replace(whole, codes=(whole.codes.float() * 1.2).to(whole.codes.dtype))

    monkeypatch.setattr(moe, "_whole", damaged)
    assert command(tmp_path / "c.json", "--cases", "*experts*") == 1
    for drawn in load(tmp_path / "c.json").crossovers:
        assert set(drawn.fp8) == {None}


def test_what_cannot_run_says_why(tmp_path: Path, monkeypatch, capsys):
    reason = SimpleNamespace(chosen=None, reason="the GPU is no Hopper")
    monkeypatch.setattr(crossover, "explained", lambda problem, backend: reason)
    assert command(tmp_path / "c.json", "--cases", "*gate_up") == 0
    for drawn in load(tmp_path / "c.json").crossovers:
        assert drawn.tokens == ()
        assert drawn.message == "FP8 arithmetic: the GPU is no Hopper"
    assert "the GPU is no Hopper" in capsys.readouterr().out


def test_nothing_begins_after_its_time(tmp_path: Path, monkeypatch, capsys):
    clock = iter(range(100))
    monkeypatch.setattr(crossover.time, "monotonic", lambda: next(clock))
    assert command(tmp_path / "c.json", "--seconds", "2") == 130
    first, *others = load(tmp_path / "c.json").crossovers
    assert others == []
    assert len(first.tokens) == 1
    assert first.message == "the time was over before 4 tokens"
    last = capsys.readouterr().out.splitlines()[-1]
    assert "the time was over before tiny down, tiny q_a+kv" in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "huge"], "shapes are 'huge', wanted one of tiny, flash, pro"),
        (["--cases", "q_z"], "--cases matches none of tiny gate_up, tiny down"),
        (["--experts", "1"], "--experts has 1, a token has 2 experts: wanted as many"),
        (["--tokens", "0"], "0 is below 1"),
        (["--baselines", "cublas"], "unrecognized arguments: --baselines cublas"),
    ],
)
def test_bad_commands_say_what_to_write(arguments: list[str], message: str, capsys):
    assert main(["crossover", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def request(**changes) -> crossover.Request:
    on_gpu = Options(torch.device("cuda"))
    return crossover.Request(
        **{
            "presets": ["flash", "pro"],
            "experts": None,
            "tokens": crossover.TOKENS,
            "patterns": ["*"],
            "seconds": math.inf,
            "options": on_gpu,
            **changes,
        }
    )


def test_gemms_of_published_models():
    every = crossover.subjects(request())
    assert [s.name for s in every][:3] == ["flash q_b", "flash o_b", "flash gate_up"]
    assert {s.shape["E"] for s in every if "experts" in s.name} == {64, 256, 384}
    own = crossover.subjects(request(experts=[32], patterns=["pro experts *"]))
    assert [(s.name, s.shape["E"], s.shape["k"]) for s in own] == [
        ("pro experts gate_up", 32, 6),
        ("pro experts down", 32, 6),
    ]


@pytest.mark.parametrize("tokens", crossover.TOKENS)
def test_the_kernels_that_are_compiled_are_those_that_run(tokens: int):
    """A kernel that were left out would compile in the timed process."""
    for subject in crossover.subjects(request()):
        sizes, plans = subject.shape, subject.plans(tokens)
        if "E" not in sizes:
            groups = sizes.get("G", 1)
            dense = gemm_e4m3.Problem(
                *(groups * sizes["N"], sizes["K"], groups, tokens, (), 1, False, 0),
                float32_out=False,
                swiglu=False,
                limit=math.inf,
            )
            assert gemm_e4m3.choose(dense) in plans
            estimate = e4m3_costs.estimate(groups * sizes["N"], sizes["K"], tokens)
        else:
            first = subject.name.endswith("gate_up")
            rows = tokens * sizes["k"]
            grouped = grouped_gemm_e4m3.GroupedProblem(
                *(sizes["N"], sizes["K"], sizes["E"], rows, (), 1, False),
                swiglu=first,
                row_weighted=first,
                quantized_out=first,
                limit=10.0,
            )
            assert grouped_gemm_e4m3.choose(grouped) in plans
            estimate = e4m3_costs.estimate_experts(
                sizes["N"], sizes["K"], sizes["E"], rows, quantized_out=first
            )
        assert len(plans) >= 2
        assert subject.estimate(tokens) == estimate


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path):
    path = tmp_path / "c.json"
    quick = ["--tokens", "64,1024", "--experts", "8", "--repeat", "2", "--json", str(path)]
    assert main(["crossover", "--shapes", "flash", "--cases", "*down", *quick]) == 0
    for drawn in load(path).crossovers:
        assert not drawn.message
        assert None not in (*drawn.fp8, *drawn.bfloat16)
