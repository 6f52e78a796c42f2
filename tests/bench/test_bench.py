"""The bench: all operators have cases, wrong implementations are found, files fit their schema."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import dispatch, ops
from dsv4.bench import baselines, cli, environment, measure, report, results, timing
from dsv4.bench.cases import MAKERS, PRESETS, cases, operators
from dsv4.bench.cases.gemm import matrices
from dsv4.bench.checks import budgets, judge
from dsv4.bench.cli import main
from dsv4.bench.measure import verify
from dsv4.bench.problem import Draw, Problem, UsageError, Verdict, nbytes
from dsv4.bench.suites import crossover_results
from dsv4.bench.suites.model import document as model_document
from dsv4.config import ModelConfig
from dsv4.quant import fragments

CPU = torch.device("cpu")
OPERATORS = dispatch.operators()


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are measured once in their own test."""
    monkeypatch.setattr(environment, "rates", lambda device: environment.Rates(0.02, 0.01, 0.1))


def _damaged(op: str):
    """The reference with one value of its result, or of what it changes, off by a little."""
    target = dispatch.load(dispatch.implementations(op)[-1].target)

    arguments = getattr(torch.ops.dsv4, op).default._schema.arguments
    changed = [a.name for a in arguments if a.alias_info and a.alias_info.is_write]

    def run(args):
        result = target(args)
        tensor = getattr(args, changed[0]) if result is None else result
        tensor = tensor if isinstance(tensor, torch.Tensor) else tensor[0]
        flat = tensor.view(-1)
        if tensor.dtype.is_floating_point and tensor.element_size() > 1:
            row = tensor.reshape(-1, tensor.shape[-1])[0].float()
            flat[0] += 0.05 * float(row.norm()) + 0.01
        else:
            codes = flat.view(torch.uint8) if tensor.element_size() == 1 else flat
            codes[0] ^= 1
        return result

    return run


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Put an implementation before all others of an operator."""
    load = dispatch.load

    def add(op: str, function, name: str = "wrong") -> None:
        row = dispatch.Implementation(op, name, f"{name}:{op}")
        monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (row, *dispatch.IMPLEMENTATIONS))
        monkeypatch.setattr(
            dispatch, "load", lambda target: function if target == row.target else load(target)
        )
        dispatch.implementations.cache_clear()

    yield add
    monkeypatch.undo()
    dispatch.implementations.cache_clear()
    dispatch.operators.cache_clear()


def test_every_operator_has_cases():
    assert sorted(name for op in MAKERS for name in operators(op)) == sorted(OPERATORS)
    assert set(MAKERS) == set(ops.__all__) - {"Pages"}, "names are those of dsv4.ops"
    for op in MAKERS:
        for preset in PRESETS:
            made = cases(op, preset, 3)
            assert made
            assert any(case.brief for case in made)
            assert {case.op for case in made} == {op}
            assert len({case.name for case in made}) == len(made)


def test_matrices_have_the_published_shapes():
    pro, flash = matrices(ModelConfig.pro()), matrices(ModelConfig.flash())
    assert pro["q_a+kv"][:2] == (2048, 7168)
    assert pro["q_b"][:2] == (65536, 1536)
    assert pro["o_a"][:3] == (1024, 4096, 16)
    assert pro["o_b"][:2] == (7168, 16384)
    assert pro["gate_up"][:2] == (6144, 7168)
    assert pro["down"][:2] == (7168, 3072)
    assert flash["q_a+kv"][:2] == (1536, 4096)
    assert flash["o_a"][:3] == (1024, 4096, 8)
    assert flash["indexer_q"][:2] == (8192, 1024)
    assert flash["csa_kv+gate"][:2] == (2048, 4096)
    assert flash["hca_kv+gate"][:2] == (1024, 4096)
    assert flash["indexer_kv+gate"][:2] == (512, 4096)


def test_products_are_packed_wherever_groups_are_whole_tiles():
    for name, (rows, columns, groups, segments) in matrices(ModelConfig.tiny()).items():
        for suffix in ("", " w4a4"):
            (case,) = (c for c in cases("gemm", "tiny", 3) if c.name == name + suffix)
            problem = case.build(Draw(0, CPU))
            whole = rows % 16 == 0 and columns % 64 == 0
            assert (problem.args[1].layout == "fragments_16x64") == whole
            assert problem.args[1].shape == (groups * rows, columns)
            assert problem.args[1].segments == segments
            assert problem.kwargs["activation"] == ("nvfp4" if suffix else "bf16")
            assert problem.reads == sum(map(nbytes, problem.args))
            assert problem.writes == nbytes(*problem.run("reference"))
    layouts = {
        case.build(Draw(0, CPU)).args[1].layout for case in cases("gemm", "tiny", 1) if case.brief
    }
    assert layouts == {"fragments_16x64", "linear"}, "the main job runs both"


@pytest.mark.parametrize("name", ["q_a+kv", "o_a w4a4"])
def test_the_budget_of_a_packed_gemm_is_that_of_the_weight_in_rows(name: str):
    (case,) = (c for c in cases("gemm", "tiny", 3) if c.name == name)
    packed = case.build(Draw(0, CPU))
    rows = dataclasses.replace(packed, args=(packed.args[0], packed.args[1].with_layout("linear")))
    (truth,) = packed.widened().run("reference")
    assert torch.equal(budgets.gemm(packed, truth), budgets.gemm(rows, truth))


def test_every_published_matrix_can_be_packed():
    for config in (ModelConfig.flash(), ModelConfig.pro()):
        for rows, columns, _, _ in matrices(config).values():
            assert fragments.fits(rows, columns)


def test_a_weight_is_drawn_once_for_all_token_counts():
    def draw(tokens: int, seed: int) -> Problem:
        return cases("gemm", "tiny", tokens)[0].build(Draw(seed, CPU))

    assert draw(1, 0).args[1].codes is draw(9, 0).args[1].codes
    assert not torch.equal(draw(1, 0).args[1].codes, draw(1, 1).args[1].codes)


@pytest.mark.parametrize("op", MAKERS)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**31 - 1), tokens=st.integers(1, 40))
def test_reference_is_inside_its_budget(op: str, seed: int, tokens: int):
    for case in cases(op, "tiny", tokens):
        if case.brief:
            verdict = verify(case.build(Draw(seed, CPU)), "reference")
            assert verdict.match, f"{case.name}: {verdict.message}"


@pytest.mark.parametrize("op", OPERATORS)
def test_a_slightly_wrong_implementation_is_found(op: str, register, capsys, tmp_path: Path):
    register(op, _damaged(op))
    path = tmp_path / "out.json"
    function = next(name for name in MAKERS if op in operators(name))
    only = ["--cases", op.removeprefix(f"{function}_")] if function != op else []
    options = [*only, "--tokens", "5", "--repeat", "1", "--json", str(path)]
    assert main(["run", function, *options]) == 1
    document = json.loads(path.read_text())
    results.validate(document)
    for row in document["rows"]:
        assert row["backend"] == "wrong"
        assert row["match"] is False
        assert row["us"] is None
        assert row["baselines"] == {}
        assert row["message"]
    printed = capsys.readouterr()
    assert "WRONG" in printed.out
    last, count = printed.out.splitlines()[-1], len(document["rows"])
    assert last.startswith(f"FAILED: {count} of {count} check")
    assert f": {function} " in last
    assert ", 5 tokens, wrong: " in last


@pytest.mark.parametrize("channel", [0, 1])
def test_a_wrong_state_is_found(channel: int, register, capsys):
    target = dispatch.load(dispatch.implementations("compressor_update")[-1].target)

    def run(args):
        result = target(args)
        args.state[:, 0, channel] *= 1.001
        return result

    register("compressor_update", run)
    assert main(["run", "compressor_update", "--tokens", "9", "--repeat", "1"]) == 1
    assert ("state kv", "state scores")[channel] in capsys.readouterr().out


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("op", ["route_topk", "hc_pre"])
def test_every_output_is_checked(op: str, index: int, register):
    target = dispatch.load(dispatch.implementations(op)[-1].target)

    def run(args):
        result = list(target(args))
        result[index] = result[index].roll(1, -1)
        return tuple(result)

    register(op, run)
    assert main(["run", op, "--repeat", "1"]) == 1


def test_wrong_rows_print_no_time_and_right_ones_do(register, capsys):
    register("moe_gather", _damaged("moe_gather"))
    assert main(["run", "moe_gather", "rms_norm", "--repeat", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if line.startswith("operator"))
    times = slice(heading.index("check") + 5, heading.index("bound us"))
    wrong = next(line for line in lines if line.startswith("moe_gather"))
    right = next(line for line in lines if line.startswith("rms_norm"))
    assert wrong[times].split() == ["-"]
    assert float(right[times]) > 0


def test_unchecked_rows_are_timed_and_say_so(register, tmp_path: Path):
    register("moe_gather", _damaged("moe_gather"))
    path = tmp_path / "out.json"
    assert main(["run", "moe_gather", "--no-check", "--repeat", "1", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["match"] is None
    assert row["error"] is None
    assert row["us"] > 0


def test_cases_are_chosen_by_pattern_and_stand_next_to_their_other_token_counts(tmp_path: Path):
    path = tmp_path / "out.json"
    arguments = ["run", "gemm", "--cases", "o_a*,down", "--tokens", "1,3", "--repeat", "1"]
    assert main([*arguments, "--device", "cpu", "--json", str(path)]) == 0
    measured = [(row["case"], row["tokens"]) for row in json.loads(path.read_text())["rows"]]
    names = ("o_a", "o_a w4a4", "down", "o_a fp8")
    assert measured == [(n, t) for n in names for t in (1, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "gemm", "--cases", "nonsense"], "--cases matches none of q_a+kv, q_a+kv w4a4"),
        (["run", "nonsense"], "operator is 'nonsense', wanted one of quantize, dequantize"),
        (["run", "gemm", "--shapes", "huge"], "shapes are 'huge', wanted one of tiny, flash, pro"),
        (["run", "gemm", "--tokens", "0"], "0 is below 1"),
        (["run", "gemm", "--tokens", "x"], "'x' is no integer, wanted 1 or more"),
        (["run", "gemm", "--backend", "nonsense"], "gemm: backend is 'nonsense', wanted 'auto' or"),
        (
            ["explain", "gemm", "--backend", "foo"],
            "gemm: backend is 'foo', wanted 'auto' or one of",
        ),
        (["run", "gemm", "--device", "nonsense"], "--device is 'nonsense'"),
        (["run", "gemm", "--device", "cuda:99"], "--device is 'cuda:99'"),
        (["explain", "nonsense"], "operator is 'nonsense'"),
        (["nonsense"], "invalid choice"),
        (["layer", "--repeat", "3"], "--repeat is not for layer, whose inputs and runs are fixed"),
        (["--seed", "1", "layer"], "--seed is not for layer"),
        (["--json", "x.json", "env"], "--json is not for env, which measures no rows"),
        (["--markdown", "list"], "--markdown is not for list"),
    ],
)
def test_bad_commands_say_what_to_write(arguments: list[str], message: str, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said", "hidden"),
    [
        ("model", ["--out PATH", "default 5, on a GPU 50"], ["--csv", "--markdown"]),
        ("layer", ["--csv PATH"], ["--repeat", "--seed"]),
        ("crossover", ["default 1, on a GPU 10"], []),
        ("all_reduce", ["default 20, on a GPU 50"], []),
    ],
)
def test_help_lists_the_options_that_a_command_takes(command, said, hidden, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert all(text in printed for text in said)
    assert not any(option in printed for option in hidden)


def never(call):
    return "it is not Tuesday"


def test_an_explicit_backend_that_cannot_run_is_an_error(monkeypatch, register, capsys):
    register("rms_norm", None, "picky")
    rows = dispatch.IMPLEMENTATIONS
    picky = dataclasses.replace(rows[0], supports=f"{__name__}:never")
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (picky, *rows[1:]))
    dispatch.implementations.cache_clear()
    assert main(["run", "rms_norm", "--backend", "picky"]) == 2
    assert "it is not Tuesday" in capsys.readouterr().err


def test_list_names_every_operator(capsys):
    assert main(["list"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[2:] if line[0] != " "]
    assert [line.split()[0] for line in lines] == list(MAKERS)


@pytest.mark.parametrize("op", MAKERS)
def test_explain_names_the_choice(op: str, capsys):
    assert main(["explain", op, "--tokens", "2"]) == 0
    printed = capsys.readouterr().out
    assert "-> reference: supported" in printed
    assert printed.count(f"\n{op} (backend='auto')\n") == len(cases(op, "tiny", 2))


def test_env_prints_the_machine(capsys):
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert environment.device_name(environment.default_device()) in printed


def test_the_folder_results_gets_no_other_inside(tmp_path: Path):
    row = results.Row("op", "", {}, 1, "b", "w", 1.0, 0.5, 8, 0)
    date = _document()["header"]["date"][:10]
    for target in (f"{tmp_path}/", f"{tmp_path}/results/"):
        written = results.write_json(target, _document()["header"], [row])
        assert written == [tmp_path / "results" / "g" / f"{date}-op.json"]


def test_json_has_one_file_per_operator_in_a_folder(tmp_path: Path):
    arguments = ["run", "swiglu", "rope", "--tokens", "1,3", "--repeat", "1"]
    assert main([*arguments, "--device", "cpu", "--json", f"{tmp_path}/"]) == 0
    folder = tmp_path / "results" / environment.slug(environment.device_name(CPU))
    files = sorted(folder.iterdir(), key=lambda path: path.name[11:])
    document = json.loads(files[1].read_text())
    date = document["header"]["date"][:10]
    assert [path.name for path in files] == [f"{date}-rope.json", f"{date}-swiglu.json"]
    results.validate(document)
    assert [row["tokens"] for row in document["rows"]] == [1, 3]
    assert document["header"]["command"].startswith("python -m dsv4.bench run swiglu rope")
    for row in document["rows"]:
        assert row["match"] is True
        assert row["us"] > 0
        assert set(row["baselines"]) == {"torch bf16"}
        # [T, 2I] and [T, I] of bfloat16, at 0.01 TB/s.
        assert row["bytes"] == 2 * 3 * row["shape"]["I"] * row["tokens"]
        assert row["bound_us"] == pytest.approx(row["bytes"] / 0.01e6)


def test_options_before_the_command_count(tmp_path: Path):
    path = tmp_path / "out.json"
    assert main(["--json", str(path), "run", "swiglu", "--repeat", "1"]) == 0
    content = json.loads(path.read_text())
    of_model = content.get("schema") == model_document.SCHEMA
    (model_document if of_model else results).validate(content)


def test_csv_and_markdown(tmp_path: Path, capsys):
    path = tmp_path / "out.csv"
    arguments = ["run", "rms_norm", "moe_permute", "--repeat", "1", "--markdown"]
    assert main([*arguments, "--csv", str(path)]) == 0
    with path.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["op"] for row in rows] == ["rms_norm", "rms_norm", "moe_permute"]
    assert rows[2]["error"] == "bitwise"
    assert float(rows[0]["us"]) > 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(rows)
    assert {line.count(" | ") for line in lines} == {len(report.HEADINGS) - 1}


def _document() -> dict:
    header = {"gpu": "g", "driver": "d", "versions": {}, "commit": "c", "command": "x"}
    header |= {"date": "d", "copy_tbs": 1.0, "read_tbs": 1.0, "bf16_tflops": 1.0, "node_us": 0.9}
    row = results.Row("op", "", {"N": 1}, 1, "reference", "why", 1.0, 0.5, 8, 0, {"torch": 2.0})
    return results.document(header, [row])


def test_schema_accepts_what_it_should():
    results.validate(_document())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("rows"), "wanted exactly"),
        (lambda d: d["header"].pop("commit"), "header.commit is missing"),
        (lambda d: d["header"].update(more=1), "header.more is unknown"),
        (lambda d: d["rows"][0].pop("us"), r"rows\[0\].us is missing"),
        (lambda d: d["rows"][0].update(us="1"), r"rows\[0\].us is '1'"),
        (lambda d: d["rows"][0].update(bytes=True), r"rows\[0\].bytes is True"),
        (lambda d: d["rows"][0]["shape"].update(N=1.5), r"rows\[0\].shape.N is 1.5"),
        (lambda d: d["rows"][0]["baselines"].update(t=None), r"rows\[0\].baselines.t is None"),
        (lambda d: d["rows"][0].update(error="large"), "error is 'large'"),
        (lambda d: d["rows"][0].update(match=False), "has a time although its check failed"),
    ],
)
def test_schema_refuses(change, message: str):
    document = _document()
    change(document)
    with pytest.raises(ValueError, match=message):
        results.validate(document)


def test_infinite_error_is_still_json(tmp_path: Path):
    row = results.Row("op", "", {}, 1, "b", "w", None, 0.5, 8, 0, error=float("inf"), match=False)
    path = tmp_path / "x.json"
    results.write_json(str(path), _document()["header"], [row])
    assert json.loads(path.read_text())["rows"][0]["error"] == "inf"


def test_inputs_depend_on_the_seed_alone():
    def draw(seed: int) -> Problem:
        return cases("gemm", "tiny", 4)[0].build(Draw(seed, CPU))

    assert torch.equal(draw(1).args[0], draw(1).args[0])
    assert not torch.equal(draw(1).args[0], draw(2).args[0])


def test_checking_changes_no_input():
    for op in ("write_kv", "compressor_update"):
        for case in cases(op, "tiny", 9):
            problem, before = case.build(Draw(0, CPU)), case.build(Draw(0, CPU))
            assert verify(problem, "reference").match
            for i in problem.mutates:
                left, right = (getattr(p.args[i], "data", p.args[i]) for p in (before, problem))
                assert torch.equal(left.nan_to_num(), right.nan_to_num())


def test_judges_get_the_name_of_the_implementation_that_ran():
    """The budget of FP8 tensor cores was the reference's if the backend was chosen by itself."""
    problem, names = cases("gemm", "tiny", 4)[0].build(Draw(0, CPU)), []

    def judged(problem: Problem, *outputs: Any) -> Verdict:
        names.append(problem.backend)
        return Verdict(True)

    for backend in ("auto", "reference"):
        verify(dataclasses.replace(problem, judge=judged), backend)
    assert names == [dispatch.explain(ops.gemm, *problem.args).chosen, "reference"]
    assert "auto" not in names


def test_ranked_allows_ties_and_nothing_else():
    scores = torch.tensor([[3.0, 2.0, 2.0 + 1e-9, 0.0]], dtype=torch.float64)
    expected, error = torch.tensor([[0, 2]]), torch.tensor([[1e-6]], dtype=torch.float64)

    def judged(ids: list[int]) -> bool:
        return judge.ranked(scores, torch.tensor([ids]), expected, error).match

    assert judged([0, 2])
    assert judged([0, 1])
    assert judge.ranked(scores, expected, expected, error).error is None
    tied = judge.ranked(scores, torch.tensor([[0, 1]]), expected, error)
    assert tied.error == pytest.approx(1e-9)
    assert not judged([2, 0])
    assert not judged([0, 3])
    assert not judged([0, 0])
    assert not judged([0, 4])
    assert not judged([0, -1])


def test_nan_never_passes():
    truth = torch.ones(2, 3, dtype=torch.float64)
    bad = truth.clone()
    bad[1, 2] = torch.nan
    verdict = judge.compare(bad, truth, 1e9, "x")
    assert not verdict.match
    assert verdict.error == float("inf")
    assert not judge.same(bad, truth, "x").match


def test_timing_is_the_median_of_single_calls():
    counted: list[int] = []
    taken = timing.measure([lambda: counted.append(0), lambda: counted.append(1)], CPU, 3)
    assert counted == [0, 1] * 4
    assert taken.timer == "clock"
    assert 0 < taken.us < 1e5


def test_a_rest_comes_before_every_timed_run(monkeypatch: pytest.MonkeyPatch):
    done: list[object] = []
    monkeypatch.setattr(timing.time, "sleep", done.append)
    timing.measure([lambda: done.append("a"), lambda: done.append("b")], CPU, 2, 0.25)
    assert done == ["a", "b", 0.25, "a", "b", 0.25, "a", "b"]


def test_cooled_times_follow_sustained_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    rests = []
    taken = timing.Timing(1.0, "clock")
    monkeypatch.setattr(timing, "measure", lambda *arguments: rests.append(arguments[3:]) or taken)
    monkeypatch.setattr(baselines, "BASELINES", {})
    baselines.register("rope", "sleepy")(lambda problem: lambda: None)
    path = tmp_path / "out.json"
    assert main(["run", "rope", "--rest", "0.5", "--json", str(path)]) == 0
    cases = [row["case"] for row in json.loads(path.read_text())["rows"]]
    assert cases[1::2] == [f"{case} cooled".strip() for case in cases[::2]]
    assert rests == [(0.0,), (0.0,), (0.5,), (0.5,)] * (len(cases) // 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rope", "--rest", "-1"], "-1 is not within 0 to 60 seconds"),
        (["gemm", "--check", "--rest", "1"], "--rest is for operators, not for --check"),
        (["attention", "--rest", "1"], "--rest is for operators"),
    ],
)
def test_a_rest_that_cannot_be_taken_is_refused(arguments: list[str], message: str, capsys):
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    rates = environment.rates(CPU)
    assert min(rates.copy_tbs, rates.read_tbs, rates.bf16_tflops) > 0
    assert rates.node_us == 0  # a CPU has no graphs
    assert rates.copy_share(10**6, 1.0) == pytest.approx(1 / rates.copy_tbs)
    assert rates.bound_us(10**6, 0) == pytest.approx(1 / rates.read_tbs)
    assert rates.bound_us(0, 10**6) == pytest.approx(1 / rates.bf16_tflops)


def test_baselines_can_be_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(baselines, "BASELINES", {})
    baselines.register("rope", "sleepy")(lambda problem: lambda: None)
    baselines.register("rope", "unable")(lambda problem: None)
    path = tmp_path / "out.json"
    assert main(["run", "rope", "--repeat", "1", "--json", str(path)]) == 0
    assert set(json.loads(path.read_text())["rows"][0]["baselines"]) == {"sleepy"}


def test_a_baseline_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """However many inputs there are: a compiler takes seconds to refuse each of them."""
    asked: list[str] = []
    monkeypatch.setattr(measure, "copies", lambda case, options, problem: [problem] * 3)
    monkeypatch.setattr(baselines, "BASELINES", {})
    baselines.register("rms_norm_pair", "able (note)")(
        lambda problem: asked.append("able") or (lambda: None)
    )
    baselines.register("rms_norm_pair", "unable")(lambda problem: asked.append("unable"))
    path = tmp_path / "out.json"
    run = ["run", "rms_norm_pair", "--repeat", "1", "--json", str(path)]
    assert main([*run, "--baselines", "able,unable"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert all(set(row["baselines"]) == {"able (note)"} for row in rows)
    assert [asked.count(name) for name in ("able", "unable")] == [4 * len(rows), len(rows)]


def test_unknown_names_are_errors():
    with pytest.raises(UsageError, match="operator is 'x'"):
        cases("x", "tiny", 1)
    with pytest.raises(UsageError, match="tokens is 0"):
        cases("gemm", "tiny", 0)


def test_an_interrupted_run_keeps_its_rows(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path):
    rows = iter([cli.attempt])

    def once(*arguments):
        for take in rows:
            return take(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "attempt", once)
    file = tmp_path / "rows.json"
    arguments = ["run", "rms_norm", "--tokens", "1,2", "--repeat", "1", "--json", str(file)]
    assert cli.main([*arguments, "--device", "cpu"]) == 130
    assert len(json.loads(file.read_text())["rows"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "STOPPED: 1 check passed; interrupted after 1 of 4 rows"


RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*/*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_fit_the_schema(path: Path):
    content = json.loads(path.read_text())
    if content.get("schema") == model_document.SCHEMA:
        model_document.validate(content)
        return
    if content.get("schema") == crossover_results.SCHEMA:
        gemms = crossover_results.parse(content)
        again = crossover_results.document(content["header"], gemms)
        assert json.loads(json.dumps(again)) == content
        return
    rows = results.read_json(str(path)).rows
    for row, line in zip(rows, content["rows"], strict=True):
        times = line.get("baselines", line.get("rivals"))
        assert [*row.baselines.values()] == [*times.values()]
        assert row.bound_us == line.get("bound_us", line.get("floor_us"))
    results.validate(results.document(content["header"], rows))


def test_files_of_earlier_versions_are_read(tmp_path: Path):
    row = results.Row("op", "", {}, 1, "b", "w", 2.0, bound_us=1.0, baselines={"a": 3.0})
    rows = [dataclasses.replace(row, case=case) for case in ("q", "q cooled", "cooled")]
    text = json.dumps(results.document(_document()["header"], rows))
    for new, former in (("baselines", "rivals"), ("bound_us", "floor_us")):
        text = text.replace(f'"{new}"', f'"{former}"')
    file = tmp_path / "rows.json"
    file.write_text(text.replace("cooled", "rested"))
    assert list(results.read_json(str(file)).rows) == rows


def test_a_file_with_both_names_of_a_field_is_refused(tmp_path: Path):
    content = _document()
    content["rows"][0]["rivals"] = {}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"rows\[0\].rivals is unknown"):
        results.read_json(str(file))


def test_a_former_name_of_the_baselines_warns():
    with pytest.warns(DeprecationWarning, match=r"RIVALS is now dsv4\.bench\.baselines\.BASELINES"):
        assert baselines.RIVALS is baselines.BASELINES


def test_times_of_a_cpu_say_that_no_kernel_ran(capsys):
    assert cli.main(["run", "swiglu", "--repeat", "1", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert output.count(environment.WITHOUT_GPU) == 2  # above the times and below
    assert "reference implementation" in environment.WITHOUT_GPU
