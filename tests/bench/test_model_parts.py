"""Parts of the bench's command ``model``: operators, marks, report, files."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dsv4
from dsv4.bench import environment
from dsv4.bench.pages import models
from dsv4.bench.results import text_of
from dsv4.bench.suites.model import operators, report
from dsv4.bench.suites.model.document import (
    DecodeRow,
    HostedRow,
    ModelResults,
    Named,
    ProfileRow,
    PromptRow,
    document,
    parse,
    validate,
)
from dsv4.bench.suites.model.marks import Mark, decode_ms, marked
from dsv4.bench.suites.model.profile import Launch, Profile
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.config import ModelConfig

CPU = torch.device("cpu")
NAMED = Named("flash", 64, 256, 43, 43, "random", "nvfp4", "random")


class TestOperators:
    def functions(self) -> dict[str, list[str]]:
        """Triton kernels that are launched, with the files that hold them."""
        by_file: dict[str, list[str]] = {}
        for path in sorted((Path(dsv4.__file__).parent / "triton").rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                jitted = isinstance(node, ast.FunctionDef) and any(
                    "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
                )
                if jitted and node.name.endswith("kernel"):
                    by_file.setdefault(node.name, []).append(path.stem)
        return by_file

    def test_every_triton_kernel_has_an_operator(self):
        by_file = self.functions()
        assert set(by_file) == set(operators.FUNCTIONS)
        several = {name: files for name, files in by_file.items() if len(files) > 1}
        assert set(several) <= {"_unpack_kernel"}, "one name, one operator"

    def test_every_cute_kernel_has_an_operator(self):
        classes = set()
        for path in (Path(dsv4.__file__).parent / "cute").glob("sm*/*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name.endswith("Kernel"):
                    classes.add(node.name)
        assert classes == set(operators.CLASSES)

    @pytest.mark.parametrize(
        ("kernel", "operator"),
        [
            (
                "kernel_cutlass_kernel_SmallMKernelSmallMPlancolumns64",
                operators.NVFP4_GEMM,
            ),
            ("kernel_cutlass_kernel__AttentionKernelheads64", operators.ATTENTION),
            (
                "kernel_cutlass_kernel_GroupedSmallMKernelGroupedSmallMPlanctas1",
                operators.EXPERTS,
            ),
            ("kernel_cutlass_kernel_NewKernelcolumns64", operators.OTHER),
            ("_small_m_logits_kernel", operators.ROUTER),
            ("_mixing_small_m_kernel", operators.HYPER),
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
        profile = Profile.of([Launch(*launch) for launch in launches], steps)
        assert profile.ms == pytest.approx(1e-3 * sum(us for _, us in launches) / steps)
        assert sum(operator.ms for operator in profile.operators) == pytest.approx(profile.ms)
        counts = [operator.launches for operator in profile.operators]
        assert sum(counts) == pytest.approx(profile.launches)
        times = [operator.ms for operator in profile.operators]
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
    @example(tokens=1, figures=[1e5, 1e6, 1e6, 1.0, 1.0])  # the table of steps in two parts
    def test_every_line_fits(self, tokens, figures):
        names = ("bytes_ms", "flops_ms", "step_ms", "runner_ms", "generate_ms")
        row = row_of(tokens, **dict(zip(names, figures, strict=True)))
        row.missing["kernels_ms"] = 30 * "a long reason "
        prompts = [PromptRow(NAMED, prompt=tokens, first_ms=figures[0], generate_ms=figures[1])]
        lines = report.lines(ModelResults(rows=[row], prompts=prompts), profile=True)
        assert max(map(len, lines)) <= 120
        tables = sum("experts  layers  recipe" in line for line in lines)
        assert tables >= 2, "steps, in as many parts as they take, and prompts"
        count = sum("64/256" in line for line in lines)
        assert count == 1 + tables, "the model's line and the row of each table name the experts"


def test_kernels_that_were_compiled_ahead_are_named():
    results = ModelResults(rows=[row_of(1, step_ms=5.0)])
    assert "kernels" not in " ".join(report.lines(results, profile=False)[:2])
    results.start.kernels, results.start.kernels_compiled, results.start.kernels_s = 5, 2, 1.25
    results.start.compiled_later = {"a": 2, "b": 1}
    text = " ".join(report.lines(results, profile=False))
    assert ", 5 kernels 1.2 s (2 compiled, 3 more later)" in text


class TestDocument:
    def document(self) -> dict[str, Any]:
        row = dataclasses.asdict(row_of(1, step_ms=5.0))
        start = dataclasses.asdict(ModelResults().start)
        document = {"rows": [row], "prompts": [], "profiles": [], "stopped": "", "start": start}
        return {"schema": "dsv4.bench.model/1", "header": {}, **document}

    def test_what_is_complete_is_valid(self):
        validate(self.document())

    def test_what_is_written_is_read(self):
        profile = Profile.of([Launch("_rope_kernel", 3.0)], 2)
        row = row_of(1, step_ms=5.0)
        first = PromptRow(NAMED, prompt=5, flops_ms=1.0, first_ms=2.0, generate_ms=3.0)
        first.missing["runner_ms"] = "why"
        results = ModelResults(rows=[row], prompts=[first])
        results.profiles = [ProfileRow(NAMED, 1, 4096, profile)]
        content = json.loads(text_of(document({"gpu": "g"}, results)))
        assert content["header"] == {"gpu": "g"}
        read = parse(content)
        assert read.rows == results.rows
        assert read.prompts == results.prompts
        assert json.loads(json.dumps(dataclasses.asdict(read))) == json.loads(
            json.dumps(dataclasses.asdict(results))
        )

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
        document = self.document()
        change(document)
        with pytest.raises(ValueError, match=message):
            validate(document)


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


class TestHosted:
    """Memory of experts on both sides, and the rate of the kernels that load them."""

    ROW = HostedRow(NAMED, routing="uniform", static=2, slots=3, step_ms=2.0, hit_rate=0.5)

    def test_memory_and_the_rate_are_shown(self):
        sizes = {"host_bytes": 60 * 10**9, "static_bytes": 90 * 10**9, "slot_bytes": 40 * 10**9}
        row = dataclasses.replace(
            self.ROW, **sizes, buffer_bytes=10**9, gather_rate=44.2, loaded_bytes=1e9
        )
        results = parse(document({}, ModelResults(hosted=[row])))
        sentence = (
            "Experts of 2+3: 60.0 GB in host memory; on the GPU 90.0 GB static, 40.0 GB of slots "
            "and 1.0 GB of buffer for long prompts."
        )
        for lines in (report.lines(results, profile=False), models.sections(results)):
            text = " ".join(" ".join(lines).split())
            assert sentence in text
            assert "44.2" in text
            assert "alone" in text

    def test_older_files_have_neither(self):
        content = document({}, ModelResults(hosted=[dataclasses.replace(self.ROW, loaded_bytes=1)]))
        for name in ("host_bytes", "static_bytes", "slot_bytes", "buffer_bytes"):
            del content["hosted"][0][name]
        for name in ("gather_bytes", "gather_rate"):
            del content["hosted"][0][name]
        results = parse(content)
        assert "alone" not in " ".join(models.sections(results))
        assert "in host memory; on the GPU" not in " ".join(report.lines(results, profile=False))
