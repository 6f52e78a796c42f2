"""The command ``model`` of the bench: options, memory, times, kernels by operator, files."""

from __future__ import annotations

import ast
import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dsv4
from dsv4 import checkpoint
from dsv4.bench import environment, whole_model
from dsv4.bench.cli import main
from dsv4.bench.model import measure, memory, operators, profile, report
from dsv4.bench.model.chart import Chart, Group
from dsv4.bench.model.document import DecodeRow, ModelResults, Named, PromptRow, validate
from dsv4.bench.model.marks import Mark, decode_ms, marked
from dsv4.bench.model.memory import ModelBytes, model_bytes
from dsv4.bench.model.profile import Launch, Profile
from dsv4.bench.model.request import COLUMNS, Budget, ModelRequest
from dsv4.bench.random_model import RECIPES, Weights, random_model
from dsv4.bench.whole_model import DecodeStep
from dsv4.config import ModelConfig
from dsv4.testing.models import random_model as plain_model

CPU = torch.device("cpu")
RATES = environment.Rates(0.02, 0.01, 0.1)
NAMED = Named("flash", 64, 256, 43, 43, "random", "nvfp4", "random")
FEW = ["--steps", "2", "--repeat", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "rates", lambda device: RATES)


def run(*arguments: str) -> int:
    return main(["model", *FEW, *arguments])


def document_of(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    validate(found)
    return found


def request_of(**changes: Any) -> ModelRequest:
    values = {
        "preset": "tiny",
        "config": ModelConfig.tiny(),
        "weights": Weights(),
        "checkpoint": None,
        "tokens": (1,),
        "contexts": (8,),
        "prompts": (),
        "columns": COLUMNS,
        "steps": 2,
        "replays": 1,
        "prefill_limit": 1000,
        "budget": Budget(),
        "device": CPU,
    }
    return ModelRequest(**{**values, **changes})


class TestOnCpu:
    def test_a_model_is_measured_and_written(self, tmp_path: Path, capsys):
        path = tmp_path / "out" / "m.json"
        sizes = ["--experts", "2", "--layers", "3", "--tokens", "1,5", "--context", "17"]
        stored = ["--recipe", "nvidia", "--weights", "mxfp4-cast"]
        assert run(*sizes, "--prompts", "7", "--out", str(path), *stored) == 0
        found = document_of(path)
        assert found["header"]["command"].startswith("python -m dsv4.bench model")
        assert [(row["tokens"], row["context"]) for row in found["rows"]] == [(1, 17), (5, 17)]
        wanted = {
            "preset": "tiny",
            "experts": 2,
            "experts_of_model": 8,
            "layers": 3,
            "layers_of_model": 4,
        }
        wanted |= {"weights": "mxfp4-cast", "recipe": "nvidia", "routing": "random"}
        for row in (*found["rows"], *found["prompts"]):
            assert row["model"] == wanted
            assert row["failed"] == []
        for row in found["rows"]:
            assert row["experts_read"] == 2, "two experts are all that a token can choose"
            assert min(row[name] for name in ("eager_ms", "runner_ms", "generate_ms")) > 0
            without = {"step_ms", "kernels_ms", "launches", "capture_s"}
            assert set(row["missing"]) == {*without, "deterministic_ms"}
            assert row["missing"]["step_ms"] == "needs a CUDA GPU, the device is cpu"
            assert row["bytes_ms"] == pytest.approx(row["bytes"] / (RATES.read_tbs * 1e9))
        (prompt,) = found["prompts"]
        assert prompt["prompt"] == 7
        assert min(prompt[name] for name in ("first_ms", "generate_ms", "runner_ms")) > 0
        printed = capsys.readouterr().out.splitlines()
        assert printed[-1] == "MEASURED: 2 rows, 1 prompts"
        assert max(map(len, printed)) <= 120
        assert {f"wrote {path}", f"wrote {path.with_suffix('.svg')}"} <= set(printed)
        ET.parse(path.with_suffix(".svg"))

    def test_a_folder_is_named_after_the_device(self, tmp_path: Path):
        assert run("--prompts", "none", "--columns", "eager", "--out", f"{tmp_path}/") == 0
        folder = tmp_path / "results" / environment.slug(environment.device_name(CPU))
        assert sorted(path.name for path in folder.iterdir()) == [
            "model_tiny_nvfp4.json",
            "model_tiny_nvfp4.svg",
        ]
        (row, _) = document_of(folder / "model_tiny_nvfp4.json")["rows"]
        assert row["missing"]["runner_ms"] == "not in --columns"

    def test_nothing_begins_after_the_limit(self, tmp_path: Path, capsys):
        path = tmp_path / "m.json"
        assert run("--limit", "0", "--prompts", "5", "--out", str(path)) == 0
        found = document_of(path)
        for row in (*found["rows"], *found["prompts"]):
            reasons = {*row["missing"].values()} - {"not in --columns"}
            assert reasons == {"not begun: --limit is 0 s, which had passed"}
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "MEASURED: 2 rows, 1 prompts; 19 figures not begun (--limit)"

    def test_long_contexts_share_a_prompt_in_the_runner(self, monkeypatch, tmp_path: Path):
        tokens: list[int] = []
        path = tmp_path / "m.json"
        row_prompts = measure.Measurement._row_prompts

        def counted(self: Any, *arguments: Any) -> Any:
            def count(module: Any, inputs: Any) -> None:
                tokens.append(inputs[0].numel())

            self.model.model.register_forward_pre_hook(count)
            return row_prompts(self, *arguments)

        monkeypatch.setattr(measure.Measurement, "_row_prompts", counted)
        sizes = ["--tokens", "3", "--context", "400", "--prefill-limit", "500"]
        columns = ["--prompts", "none", "--columns", "runner,generate"]
        assert run(*sizes, *columns, "--out", str(path)) == 0
        (row,) = document_of(path)["rows"]
        assert row["runner_fill"] == "1 prompt of 384 tokens, its pages shared"
        assert row["runner_ms"] > 0
        assert sum(tokens) < 500, "one prompt, and 16 tokens of each sequence"
        reason = "3 prompts of 400 tokens are 1200 tokens to process, --prefill-limit is 500"
        assert row["missing"]["generate_ms"] == reason

    def test_a_deterministic_runner_is_a_column_of_its_own(self, tmp_path: Path, capsys):
        path = tmp_path / "m.json"
        sizes = ["--tokens", "3", "--context", "9", "--layers", "1", "--prompts", "none"]
        assert run(*sizes, "--columns", "runner,deterministic", "--out", str(path)) == 0
        (row,) = document_of(path)["rows"]
        assert row["deterministic_ms"] > row["runner_ms"], "three steps of one sequence"
        printed = capsys.readouterr().out.splitlines()
        assert sum("deterministic" in line.split() for line in printed) == 1
        assert max(map(len, printed)) <= 120

    def test_a_checkpoint_is_loaded(self, tmp_path: Path, capsys):
        folder = tmp_path / "weights"
        config = ModelConfig.tiny(num_hidden_layers=2)
        checkpoint.save(plain_model(config, mtp=True), folder, layout="nvidia")
        out = tmp_path / "m.json"
        columns = ["--prompts", "5", "--columns", "eager", "--tokens", "1", "--context", "9"]
        assert run("--checkpoint", str(folder), *columns, "--out", str(out)) == 0
        found = document_of(out)
        assert found["start"]["source"] == "checkpoint loaded"
        (row,) = found["rows"]
        assert row["eager_ms"] > 0
        assert row["model"]["preset"] == "weights"
        assert row["model"]["routing"] == row["model"]["recipe"] == "checkpoint"

    def test_an_interrupt_keeps_what_was_measured(self, monkeypatch, tmp_path: Path, capsys):
        decode = measure.Measurement.decode

        def interrupted(self: Any, tokens: int, context: int) -> DecodeRow:
            if tokens > 1:
                raise KeyboardInterrupt
            return decode(self, tokens, context)

        monkeypatch.setattr(measure.Measurement, "decode", interrupted)
        path = tmp_path / "m.json"
        assert run("--prompts", "none", "--columns", "eager", "--out", str(path)) == 130
        assert len(document_of(path)["rows"]) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "STOPPED: 1 rows, 0 prompts; interrupted after 1 of 2 rows"

    def test_a_figure_that_raises_is_a_reason_and_a_failure(self, monkeypatch, tmp_path, capsys):
        def broken(*arguments: Any) -> None:
            raise RuntimeError("out of beans")

        monkeypatch.setattr(measure.Measurement, "_runner_steps", broken)
        path = tmp_path / "m.json"
        arguments = ["--prompts", "none", "--tokens", "1", "--context", "9"]
        assert run(*arguments, "--out", str(path)) == 2
        (row,) = document_of(path)["rows"]
        assert row["missing"]["runner_ms"] == "RuntimeError: out of beans"
        assert row["failed"] == ["runner_ms", "capture_s"]
        assert row["generate_ms"] > 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("FAILED: 2 figures of 1 rows, 0 prompts: 1 at 9: runner_ms: Runtime")


class FakeGraph:
    """Replays a decode step on the CPU, as a graph would on a GPU."""

    def __init__(self, step: DecodeStep) -> None:
        self.step = step

    def replay(self) -> None:
        self.step.logits.copy_(self.step())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CPU whose steps are captured; ``error`` is added to the logits of a capture."""
    launches = [Launch("_few_kernel", 5e3), Launch("nvjet", 15e3)]
    fake = SimpleNamespace(error=0.0, captures=2, launches=launches)

    def captured(step: DecodeStep) -> Any:
        step.logits = torch.zeros_like(step())
        graph = FakeGraph(step)
        if fake.error:
            graph.replay = lambda: step.logits.copy_(step() + fake.error)  # type: ignore
        return graph

    monkeypatch.setattr(measure, "has_graphs", lambda device: True)
    monkeypatch.setattr(DecodeStep, "captured", captured)
    monkeypatch.setattr(measure.Runner, "warm_up", lambda runner: fake.captures)
    monkeypatch.setattr(whole_model, "replay_ms", lambda graph, replays: 5.0)
    monkeypatch.setattr(profile, "recorded", lambda call: (call(), 5 * fake.launches)[1])
    return fake


class TestWithGraphs:
    def test_steps_and_kernels(self, graphs, tmp_path: Path, capsys):
        path = tmp_path / "m.json"
        sizes = ["--prompts", "none", "--tokens", "2", "--context", "9", "--layers", "2"]
        assert run(*sizes, "--profile", "--out", str(path)) == 0
        found = document_of(path)
        (row,) = found["rows"]
        assert (row["step_ms"], row["kernels_ms"], row["launches"]) == (5.0, 20.0, 2.0)
        assert row["missing"] == {"deterministic_ms": "not in --columns"}
        assert row["capture_s"] >= 0
        (kernels,) = found["profiles"]
        by_operator = [(one["operator"], one["ms"]) for one in kernels["profile"]["operators"]]
        assert by_operator == [(operators.CUBLAS, 15.0), (operators.ROUTER, 5.0)]
        printed = capsys.readouterr().out
        assert "kernels of the captured step, 20.000 ms in 2 launches" in printed
        last = printed.splitlines()[-1]
        assert last.startswith("MEASURED: 1 rows, 0 prompts; over the step at most: generate ")
        assert len(last) <= 120
        assert last.endswith(" (at 2)")

    def test_a_runner_without_graphs_is_said_to_decode_eagerly(self, graphs, tmp_path: Path):
        graphs.captures = 0
        path = tmp_path / "m.json"
        arguments = ["--prompts", "none", "--columns", "runner", "--context", "9", "--tokens", "1"]
        assert run(*arguments, "--layers", "1", "--out", str(path)) == 0
        (row,) = document_of(path)["rows"]
        assert row["runner_ms"] > 0
        reason = "the runner decodes eagerly, for the reason that it logged"
        assert row["missing"]["capture_s"] == reason

    def test_a_captured_step_that_is_wrong_is_not_timed(self, graphs, tmp_path: Path):
        graphs.error = 1e-3
        path = tmp_path / "m.json"
        arguments = ["--prompts", "none", "--columns", "step,kernels,eager", "--context", "9"]
        assert run(*arguments, "--out", str(path)) == 2
        for row in document_of(path)["rows"]:
            assert row["step_ms"] is None
            assert "not bitwise those of the eager step" in row["missing"]["step_ms"]
            assert row["eager_ms"] > 0

    def test_nothing_is_timed_after_the_profiler_was_used(self, graphs, monkeypatch):
        order: list[str] = []
        monkeypatch.setattr(
            whole_model, "replay_ms", lambda *arguments: (order.append("time"), 5.0)[1]
        )
        monkeypatch.setattr(
            profile, "recorded", lambda call: (order.append("profile"), graphs.launches)[1]
        )
        arguments = ["--prompts", "none", "--columns", "step,kernels", "--context", "9"]
        assert run(*arguments, "--layers", "1") == 0
        assert order == ["time", "time", "profile", "profile"]

    def test_without_a_profiler_the_column_says_why(self, graphs, tmp_path: Path):
        graphs.launches = []
        path = tmp_path / "m.json"
        arguments = ["--prompts", "none", "--columns", "step,kernels", "--context", "9"]
        assert run(*arguments, "--out", str(path)) == 0
        for row in document_of(path)["rows"]:
            assert row["step_ms"] == 5.0
            assert row["missing"]["kernels_ms"] == (
                "torch.profiler recorded no kernels: CUPTI is not available"
            )


class TestOptions:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--preset", "huge"], "--preset is 'huge', wanted one of tiny, flash, pro"),
            (["--experts", "1"], "--experts is 1, wanted 2 (chosen per token) to 8, which tiny"),
            (["--experts", "9"], "--experts is 9, wanted 2"),
            (["--layers", "5"], "--layers is 5, wanted 1 to 4, which tiny has"),
            (["--layers", "0"], "argument --layers: 0 is below 1"),
            (["--tokens", "1,x"], "argument --tokens: 'x' is no integer, wanted 1 or more"),
            (["--limit", "-1"], "argument --limit: '-1' is no time, wanted 0 seconds or more"),
            (["--limit", "nan"], "argument --limit: 'nan' is no time"),
            (["--tokens", "1,1"], "--tokens is 1,1, wanted distinct numbers"),
            (["--weights", "zero"], "--weights is 'zero', wanted one of random, mxfp4-cast"),
            (["--recipe", "fp8"], "--recipe is 'fp8', wanted one of nvfp4, nvidia"),
            (["--columns", "step,speed"], "--columns has 'speed', wanted some of step, kernels"),
            (["--prompts", "0"], "--prompts is '0', wanted numbers of tokens"),
            (["--prompts", "5,x"], "--prompts is '5,x', wanted numbers of tokens"),
            (["--prompts", "1023"], "--prompts has 1023, wanted at most 1022"),
            (["--context", "1020"], "--context is 1020, which needs 1029 positions with 1 seq"),
            (["--columns", "step", "--profile"], "--profile: --columns is step, wanted kernels"),
            (["--csv", "x.csv"], "--csv is not for model"),
            (["--markdown"], "--markdown is not for model"),
            (["--chart", "x.png"], "--chart is 'x.png', wanted a name that ends with .svg"),
            (["--out", "x.svg"], "--out is 'x.svg', wanted a JSON file"),
            (["--checkpoint", "/nowhere"], "--checkpoint is '/nowhere': "),
            (["--checkpoint", "x", "--preset", "tiny"], "--preset is beside --checkpoint"),
        ],
    )
    def test_errors_name_argument_value_and_what_was_wanted(self, arguments, message, capsys):
        assert run(*arguments) == 1
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.out == "", "nothing was built"

    @given(sequences=st.integers(1, 128), context=st.integers(1, 20000), steps=st.integers(1, 64))
    @example(sequences=64, context=4096, steps=32)
    @example(sequences=64, context=64, steps=4)
    def test_no_sequence_ends_before_all_of_them_were_timed(self, sequences, context, steps):
        new = request_of(steps=steps).new_tokens(sequences, context)
        chunk = min(2048, context + new)  # of a runner for such sequences
        prompt_steps = -(-sequences * context // chunk)
        assert new > prompt_steps + steps


class TestMemory:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_the_bytes_are_those_of_the_model(self, recipe):
        config = ModelConfig.tiny(n_routed_experts=4)
        request = request_of(config=config, weights=Weights(recipe=recipe))
        size = model_bytes(request)
        model = random_model(config, CPU, request.weights, pack=False)
        found = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert size.other + size.experts * size.expert == found
        assert size.layer_expert == size.expert // config.num_hidden_layers

    @given(
        expert=st.integers(1, 10**9),
        layers=st.integers(1, 61),
        other=st.integers(0, 10**10),
        room=st.integers(0, 10**11),
    )
    def test_the_largest_number_of_experts_fits_and_one_more_does_not(
        self, expert, layers, other, room
    ):
        size = ModelBytes(layers * expert, expert, other, 1)
        most = size.experts_within(room)
        if most >= 0:
            assert dataclasses.replace(size, experts=most).peak <= room
        assert dataclasses.replace(size, experts=most + 1).peak > room

    def test_what_does_not_fit_is_refused_before_it_is_built(self, monkeypatch, capsys):
        monkeypatch.setattr(memory, "free_bytes", lambda device: 60_000_000_000)
        arguments = ["--preset", "flash", "--tokens", "1", "--context", "4096", "--prompts", "none"]
        assert run(*arguments) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "and 60.0 GB are free on cpu: weights 165.7 GB with --preset flash" in printed.err
        most = int(printed.err.split("wanted --experts ")[1].split()[0])
        assert 80 < most < 90
        monkeypatch.setattr(memory, "free_bytes", lambda device: 5_000_000_000)
        assert run(*arguments) == 1
        assert "no number of experts fits, wanted fewer --layers" in capsys.readouterr().err


class TestOperators:
    def functions(self) -> dict[str, list[str]]:
        """Triton kernels that are launched, with the files that hold them."""
        found: dict[str, list[str]] = {}
        for path in sorted((Path(dsv4.__file__).parent / "triton").glob("*.py")):
            for node in ast.parse(path.read_text()).body:
                jitted = isinstance(node, ast.FunctionDef) and any(
                    "triton.jit" in ast.unparse(one) for one in node.decorator_list
                )
                if jitted and node.name.endswith("kernel"):
                    found.setdefault(node.name, []).append(path.stem)
        return found

    def test_every_triton_kernel_has_an_operator(self):
        found = self.functions()
        assert set(found) == set(operators.FUNCTIONS)
        several = {name: files for name, files in found.items() if len(files) > 1}
        assert set(several) <= {"_unpack_kernel"}, "one name, one operator"

    def test_every_cute_kernel_has_an_operator(self):
        found = set()
        for path in (Path(dsv4.__file__).parent / "cute").glob("sm*/*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name.endswith("Kernel"):
                    found.add(node.name)
        assert found == set(operators.CLASSES)

    @pytest.mark.parametrize(
        ("kernel", "operator"),
        [
            ("kernel_cutlass_kernel_FewKernelcolumns64_blocks1_warps8", operators.NVFP4_GEMM),
            ("kernel_cutlass_kernel__AttentionKernelheads64", operators.ATTENTION),
            ("kernel_cutlass_kernel_GroupedFewKernelcolumns64", operators.EXPERTS),
            ("kernel_cutlass_kernel_NewKernelcolumns64", operators.OTHER),
            ("_few_kernel", operators.ROUTER),
            ("_product_few_kernel", operators.HYPER),
            ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", operators.CUBLAS),
            ("void cublasLt::splitKreduce_kernel<32, 16, int>", operators.CUBLAS),
            ("void at::native::vectorized_elementwise_kernel<4>", operators.TORCH),
            ("Memcpy DtoD (Device -> Device)", operators.COPIES),
            ("something", operators.OTHER),
        ],
    )
    def test_by_name(self, kernel, operator):
        assert operators.operator_of(kernel) == operator

    names = st.sampled_from([*operators.FUNCTIONS, "nvjet", "x"])

    @given(
        launches=st.lists(st.tuples(names, st.floats(0, 1e4)), min_size=1), steps=st.integers(1, 9)
    )
    def test_the_operators_add_up(self, launches, steps):
        found = Profile.of([Launch(*one) for one in launches], steps)
        assert found.ms == pytest.approx(1e-3 * sum(us for _, us in launches) / steps)
        assert sum(one.ms for one in found.operators) == pytest.approx(found.ms)
        assert sum(one.launches for one in found.operators) == pytest.approx(found.launches)
        times = [one.ms for one in found.operators]
        assert times == sorted(times, reverse=True)


class TestMarks:
    def test_generate_leaves_a_mark_for_every_step(self):
        model = random_model(ModelConfig.tiny(), CPU, Weights())
        with marked() as marks:
            model.generate([[3, 4, 5], [6]], 5, stop_ids=())
        assert [mark.sequences for mark in marks] == [2] * 4
        assert decode_ms(marks, 2, 0, 3) > 0
        assert decode_ms(marks, 2, 1, 3) is None
        with marked() as others:
            pass
        assert others == []

    @given(step=st.floats(1e-3, 1.0), skip=st.integers(0, 3), ramp=st.integers(0, 5))
    def test_only_full_batches_count(self, step, skip, ramp):
        prompts = [Mark(i, 7.0 * i) for i in range(1, 1 + ramp)]
        begin = 7.0 * ramp
        full = [Mark(9, begin + step * i) for i in range(8)]
        assert decode_ms([*prompts, *full], 9, skip, 4) == pytest.approx(1e3 * step, rel=1e-6)


def row_of(tokens: int = 1, **figures: float) -> DecodeRow:
    row = DecodeRow(NAMED, tokens=tokens, context=4096, **figures)
    for field in dataclasses.fields(row):
        if field.default is None and getattr(row, field.name) is None:
            row.missing[field.name] = "why"
    return row


class TestReport:
    def test_verdict_compares_with_the_captured_step(self):
        rows = [
            row_of(1, step_ms=5.0, generate_ms=5.1, runner_ms=5.05),
            row_of(8, step_ms=10.0, generate_ms=11.0),
            row_of(64, generate_ms=99.0),
        ]
        assert report.verdict(ModelResults(rows=rows)) == (
            "MEASURED: 3 rows, 0 prompts; over the step at most: generate 1.1 (at 8), "
            "runner 1.01 (at 1)"
        )

    @given(
        tokens=st.integers(1, 4096),
        figures=st.lists(st.floats(0.001, 1e6), min_size=5, max_size=5),
    )
    def test_every_line_fits(self, tokens, figures):
        names = ("bytes_ms", "flops_ms", "step_ms", "runner_ms", "generate_ms")
        row = row_of(tokens, **dict(zip(names, figures, strict=True)))
        row.missing["kernels_ms"] = 30 * "a long reason "
        prompts = [PromptRow(NAMED, prompt=tokens, first_ms=figures[0], generate_ms=figures[1])]
        lines = report.lines(ModelResults(rows=[row], prompts=prompts), profile=True)
        assert max(map(len, lines)) <= 120
        assert sum("64/256" in line for line in lines) == 3, "model, row and prompt name experts"


class TestChart:
    values = st.lists(st.one_of(st.none(), st.floats(1e-3, 1e5)), min_size=3, max_size=3)

    @given(groups=st.lists(values, max_size=4))
    @example(groups=[[5.0, None, 842.0]])
    @example(groups=[[None, None, None]])
    def test_bars_are_as_high_as_their_values(self, groups):
        groups = [Group(("a <b>", "c"), tuple(values)) for values in groups]
        text = Chart("T & t", ("note",), "ms", ("x", "y", "z"), groups).svg()
        root = ET.fromstring(text)
        space = "{http://www.w3.org/2000/svg}"
        bars = [r for r in root.iter(f"{space}rect") if r.find(f"{space}title") is not None]
        found = [value for group in groups for value in group.values if value is not None]
        assert len(bars) == len(found)
        heights = [float(bar.get("height")) for bar in bars]
        for value, height in zip(found, heights, strict=True):
            assert 0 <= height <= 300
            for other, lower in zip(found, heights, strict=True):
                assert value < other or height >= lower - 0.1
        if found and max(found) <= 30 * min(found):
            unit = max(heights) / max(found)
            assert heights == pytest.approx([unit * value for value in found], abs=0.11)
        assert ("logarithmic" in text) == bool(found and max(found) > 30 * min(found))


class TestDocument:
    def document(self) -> dict[str, Any]:
        row = dataclasses.asdict(row_of(1, step_ms=5.0))
        start = dataclasses.asdict(ModelResults().start)
        found = {"rows": [row], "prompts": [], "profiles": [], "stopped": "", "start": start}
        return {"schema": "dsv4.bench.model/1", "header": {}, **found}

    def test_what_is_complete_is_valid(self):
        validate(self.document())

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d.update(schema="other"), "wanted a file of dsv4.bench.model/1"),
            (lambda d: d.pop("stopped"), "results.stopped is missing"),
            (lambda d: d["rows"][0].pop("context"), "rows.0..context is missing"),
            (lambda d: d["rows"][0].update(speed=1), "rows.0..speed is unknown"),
            (lambda d: d["rows"][0]["model"].pop("experts"), "rows.0..model.experts is missing"),
            (lambda d: d["rows"][0].update(step_ms=None), "step_ms is None, wanted why"),
            (lambda d: d["rows"][0].update(runner_ms=1.0), "runner_ms is 1.0, and missing has"),
        ],
    )
    def test_what_is_wrong_is_named(self, change, message):
        found = self.document()
        change(found)
        with pytest.raises(ValueError, match=message):
            validate(found)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("NVIDIA H100 PCIe", "nvidia-h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "nvidia-h100-mig-1g-10gb"),
        ("NVIDIA GeForce RTX 5090", "nvidia-geforce-rtx-5090"),
        ("80GB", "unknown"),
    ],
)
def test_folders_of_devices(name, folder):
    assert environment.slug(name) == folder


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_measured_in_every_column(tmp_path: Path, monkeypatch):
    """Flash's sizes, so that every kernel is the one of a whole model."""
    monkeypatch.undo()  # rates of this GPU
    path = tmp_path / "m.json"
    sizes = ["--preset", "flash", "--experts", "8", "--layers", "4", "--steps", "8"]
    rows = ["--tokens", "1,9", "--context", "300", "--prompts", "21"]
    assert main(["model", *sizes, *rows, "--profile", "--out", str(path)]) == 0
    results = document_of(path)
    for row in results["rows"]:
        assert set(row["missing"]) == {"deterministic_ms"}
        assert row["bytes_ms"] < row["step_ms"] < row["eager_ms"]
        assert 0.5 * row["step_ms"] < row["kernels_ms"]
    for row in results["profiles"]:
        times = {entry["operator"]: entry["ms"] for entry in row["profile"]["operators"]}
        assert times.get(operators.OTHER, 0.0) < 0.02 * row["profile"]["ms"]
        assert {operators.NVFP4_GEMM, operators.EXPERTS, operators.ATTENTION} <= set(times)
