"""Data files of plans: values that are read, values that are refused, and unchanged choices."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.plan_origins import gemm as gemm_origin
from dsv4.cute.sm90 import gemm_wgmma_plan
from dsv4.cute.sm90 import tuned as module
from dsv4.cute.sm90.attention_plan import NarrowPlan, attention_plan
from dsv4.cute.sm90.costs import Costs, WgmmaCosts
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan
from dsv4.cute.sm90.grouped_gemm_plans import launch_plans
from dsv4.cute.sm90.plans import GemmProblem, choose, counted_as
from dsv4.cute.sm90.topk_plan import topk_plan
from dsv4.cute.sm90.tuned import read, tuned
from dsv4.cute.sm90.tuned_file import OF_KEY, TunedFileError, decode, encode
from dsv4.cute.sm90.tuned_records import (
    RULE,
    SHIPPED,
    TUNED,
    Entry,
    Origin,
    Residual,
    SmallMConfiguration,
    SmallMKey,
    WgmmaConfiguration,
    WgmmaKey,
    by_rule,
    merged,
)
from dsv4.device import Gpu
from dsv4.implementations import reason_of
from dsv4.ops.gemm import gemm
from dsv4.quant.formats import FRAGMENTS, NVFP4, QuantizedTensor

FILE = module._FOLDER / module._H200
# N, K and groups of matrices of Pro and Flash, and of two matrices without measurements.
MATRICES = (
    *((2048, 7168, 1), (65536, 1536, 1), (7168, 16384, 1), (6144, 7168, 1), (16384, 4096, 16)),
    *((32768, 1024, 1), (4096, 8192, 1), (4096, 2048, 1), (8192, 4096, 8)),
    *((512, 512, 1), (1024, 640, 2)),
)
EXPERTS = ((6144, 7168, 384), (7168, 3072, 384), (4096, 4096, 256), (4096, 2048, 256))
KINDS = ((False, False), (True, False), (False, True))  # float32 results, scales of rows
TOKENS = (1, 8, 9, 16, 17, 64, 200, 1000, 4096)


def digest(plan) -> int:
    return zlib.crc32(repr(plan).encode())


def test_choices_are_those_that_are_recorded(snapshots):
    """A change of a plan changes times and can change bits, so a diff must show it."""
    figures = {
        f"{rows}x{columns}, {groups} groups, {kind}": {
            str(tokens): digest(choose(GemmProblem(rows, columns, groups, *kind), tokens))
            for tokens in TOKENS
        }
        for rows, columns, groups in MATRICES
        for kind in KINDS
    }
    figures |= {
        f"{count} experts of {rows}x{columns}, {kind}": {
            str(tokens): digest(launch_plans(Experts(rows, columns, count, *kind), 6 * tokens))
            for tokens in TOKENS
        }
        for rows, columns, count in EXPERTS
        for kind in KINDS
    }
    snapshots.check("choices", figures)


def test_the_file_of_the_h200():
    data = read(FILE)
    assert (data.gpu, data.sms, data.clusters[1]) == ("NVIDIA H200", 132, 132)
    assert tuned().entries == data.entries
    assert tuned().costs == data.costs == Costs()
    fastest = data.plan_of(SmallMKey(1, 512, 64, 4096))
    assert fastest == SmallMConfiguration(2, 8, 16, 1, True)
    assert data.plan_of(SmallMKey(1, 1, 1, 64)) is None
    assert [str(tuned().origins[name]) for name in ("gemm_small_m", "attention")] == [
        "shipped, 2026-11-23, nvidia_h200.json",
        "rule, constants fitted on NVIDIA H200",
    ]


def changed(content, path, value):
    """The content with another value at a path; None removes the last name of the path."""
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


SMALL = ("families", "gemm_small_m")
FIRST = (*SMALL, "plans", 0)
REFUSALS = [
    (("schema",), "dsv4 plans 1", r"the schema is 'dsv4 plans 1', wanted 'dsv4 plans 2'"),
    (("gpu",), None, r"the file has \['bandwidth_tbs', .*, wanted"),
    (("extra",), 1, r"the file has .*'extra'"),
    (("sms",), 0, r"sms is 0, wanted 1 or more"),
    (("bandwidth_tbs",), -1.0, r"bandwidth_tbs is -1.0, wanted 0.01 or more"),
    (("clusters", "8"), None, r"clusters has .* wanted"),
    (("clusters", "8"), 1.5, r"clusters.8 is 1.5, wanted 1 or more"),
    (("families", "other"), {}, r"families has 'other', wanted of"),
    ((*SMALL, "date"), None, r"gemm_small_m has .*, wanted"),
    ((*SMALL, "constants", "few_tokens"), "8", r"few_tokens is '8', wanted 0 or more"),
    ((*SMALL, "constants", "few_tokens"), math.nan, r"few_tokens is nan, wanted 0 or more"),
    ((*SMALL, "constants", "few_tokens"), None, r"constants differs in \['few_tokens'\]"),
    ((*SMALL, "residual"), {"points": 1}, r"gemm_small_m.residual has \['points'\], wanted"),
    ((*FIRST, "warps"), True, r"plans\[0\].warps is True, wanted 1 or more"),
    ((*FIRST, "warps"), 64, r"plans\[0\] is .*warps=64.*, which no kernel has for"),
    ((*FIRST, "ring"), 0, r"plans\[0\].ring is 0, wanted true or false"),
    ((*FIRST, "columns"), None, r"plans\[0\] has \['ctas', "),
    ((*FIRST, "us"), 0, r"plans\[0\].us is 0, wanted a time"),
]


def text_with(path, value):
    return json.dumps(changed(json.loads(FILE.read_text()), path, value))


@pytest.mark.parametrize(("path", "value", "message"), REFUSALS)
def test_what_is_wrong_is_named(path, value, message, tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text(text_with(path, value))
    with pytest.raises(TunedFileError, match=message) as caught:
        read(file)
    assert file.name in str(caught.value)


def test_a_key_stands_once(tmp_path):
    content = json.loads(FILE.read_text())
    plans = content["families"]["gemm_small_m"]["plans"]
    plans.append({**plans[0], "warps": 8})
    with pytest.raises(TunedFileError, match="has the key of an earlier one"):
        decode(json.dumps(content), "shipped", "x")


H200 = Gpu("NVIDIA H200", 132, 4.8)
H20 = Gpu("NVIDIA H20", 78, 4.0)
PCIE = Gpu("NVIDIA H100 PCIe", 114, 2.04)
GH200 = Gpu("NVIDIA GH200 480GB", 132, 4.02)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 3.35)
WGMMA = WgmmaKey(4096, 1, 4096, 64)


def on(gpu):
    facts = {
        "packages": True,
        "capability": (9, 0),
        "sms": gpu.sms,
        "name": gpu.name,
        "bandwidth": gpu.bandwidth,
    }
    return machine.pretend(**facts)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    machine.MACHINE.forget()
    yield tmp_path / "plans"
    machine.MACHINE.forget()


def measured(gpu, plan, family="gemm_wgmma", date="2026-11-29"):
    """Figures of a GPU as ``bench tune`` writes them, with one plan."""
    with machine.pretend(packages=True):
        base = module.resolve(gpu, user=False)
    costs = dataclasses.replace(base.costs, gemm_wgmma=WgmmaCosts(launch=1111.0))
    return dataclasses.replace(
        base,
        gpu=gpu.name,
        sms=gpu.sms,
        costs=costs,
        entries={WGMMA: Entry(plan, 10.0, 11.0)},
        residuals={family: Residual(30, 0.02, 0.05)},
        families=(family,),
        origins={family: Origin(TUNED, date, date)},
    )


OTHER = WgmmaConfiguration(32, 4, 2, 2, 1)
PROBLEM = GemmProblem(4096, 4096, 1, False, False)


def test_a_file_comes_back_as_it_was_written(folder):
    data = measured(H200, OTHER)
    module.write(data, folder / "x.json")
    again = decode((folder / "x.json").read_text(), TUNED, "x.json")
    origins = {"gemm_wgmma": Origin(TUNED, "2026-11-29, x.json", "2026-11-29")}
    # A file has the constants of its families alone.
    assert again == dataclasses.replace(data, origins=origins)
    assert [file.name for file in folder.iterdir()] == ["x.json"]


def test_the_users_file_comes_first_then_the_shipped_one_then_the_rule(folder):
    with on(H200):
        usual, digest = choose(PROBLEM, 64), tuned().digest
        assert tuned().origins["gemm_small_m"].kind == SHIPPED
        assert tuned().origins["gemm_wgmma"].kind == RULE
    assert gemm_wgmma_plan.configuration_of(usual) != OTHER
    module.write(measured(H200, OTHER), module.user_path(H200))
    with on(H200):
        assert gemm_wgmma_plan.configuration_of(choose(PROBLEM, 64)) == OTHER
        assert tuned().costs.gemm_wgmma.launch == 1111.0
        assert tuned().plan_of(SmallMKey(1, 512, 64, 4096)) is not None  # of the shipped file
        assert tuned().digest != digest
        assert module.said("gemm_wgmma") == (
            f"plans: tuned on this machine, 2026-11-29, {module.user_path(H200)}"
        )
        assert module.said("attention") == "plans: rule, constants fitted on NVIDIA H200"
        # Scaled tokens and float32 results were not measured: the model ranks their plans.
        scaled = choose(PROBLEM._replace(row_scaled=True), 64)
        assert gemm_wgmma_plan.configuration_of(scaled) != OTHER
    with on(H100):
        assert choose(PROBLEM, 64) == usual
    assert choose(PROBLEM, 64) == usual  # without a GPU, as a list of kernels is made


def test_without_cutedsl_plans_are_those_that_wheels_have(folder):
    module.write(measured(H200, OTHER), module.user_path(H200))
    for gpu in (H200, H20):
        with on(gpu) as pretend:
            pretend(packages=False)
            assert tuned().digest == module.resolve(None).digest
            assert "without CuTeDSL" in module.said("gemm_wgmma")


def test_without_a_user_file_nothing_is_created(folder):
    with on(H200):
        tuned()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lambda: "{", "is no JSON"),
        (lambda: "[" * 100_000, "is no JSON"),
        (lambda: "[]", "the schema is 'list'"),
        (lambda: text_with(("schema",), "dsv4 plans 3"), "the schema is 'dsv4 plans 3'"),
        (lambda: text_with((*FIRST, "warps"), 64), "which no kernel has"),
        (lambda: text_with(("gpu",), "NVIDIA H20"), "is of 'NVIDIA H20' with 132 SMs, wanted"),
        (lambda: text_with(("sms",), 114), "is of 'NVIDIA H200' with 114 SMs, wanted"),
        (lambda: "\0" * (5 << 20), "bytes, above"),
    ],
)
def test_a_bad_file_is_refused_whole_and_said(text, reason, folder, caplog):
    folder.mkdir()
    module.user_path(H200).write_text(text())
    with on(H200):
        assert tuned() == module.resolve(H200, user=False)
        assert tuned().origins["gemm_small_m"].kind == SHIPPED
    assert reason in caplog.text
    assert "are not used" in caplog.text


def test_a_file_that_others_can_write_is_refused(folder, caplog):
    module.write(measured(H200, OTHER), module.user_path(H200))
    module.user_path(H200).chmod(0o666)
    with on(H200):
        assert tuned().origins["gemm_wgmma"].kind == RULE
    assert "can be written by every user" in caplog.text


def test_nothing_is_written_that_could_not_be_read(folder):
    bad = measured(H200, WgmmaConfiguration(33, 4, 2, 2, 1))
    with pytest.raises(TunedFileError, match="which no kernel has"):
        module.write(bad, folder / "x.json")
    assert not folder.exists()


def test_families_of_an_earlier_run_stay():
    before = measured(H200, OTHER)
    now = dataclasses.replace(
        before,
        costs=dataclasses.replace(before.costs, gemm_wgmma=WgmmaCosts()),
        entries={},
        residuals={},
        families=("attention",),
        origins={"attention": Origin(TUNED, "2026-12-01", "2026-12-01")},
    )
    both = merged(before, now, OF_KEY)
    assert both.families == ("gemm_wgmma", "attention")
    assert (both.entries, both.costs.gemm_wgmma) == (before.entries, before.costs.gemm_wgmma)
    assert [both.origins[name].date for name in both.families] == ["2026-11-29", "2026-12-01"]
    assert decode(encode(both), TUNED, "x").digest == both.digest


@pytest.mark.parametrize("gpu", [H100, GH200], ids=str)
def test_gpus_with_as_many_sms_as_an_h200_choose_as_it_does(gpu):
    """H100 and H200 were measured with these plans; nothing changes there without a file."""
    with on(gpu):
        assert tuned().digest == module.resolve(None).digest
        assert tuned().origins["gemm_small_m"].kind == RULE
        assert "132 SMs as NVIDIA H200" in str(tuned().origins["attention"])


@pytest.mark.parametrize("gpu", [H20, PCIE], ids=str)
def test_plans_of_other_gpus_follow_from_sms_and_bandwidth(gpu):
    base = module.resolve(None)
    with on(gpu):
        data = tuned()
        assert (data.gpu, data.sms, data.bandwidth) == (gpu.name, gpu.sms, gpu.bandwidth)
        assert data.clusters[1] == gpu.sms
        assert all(1 <= ctas * n <= gpu.sms for ctas, n in data.clusters.items())
        assert data.entries == {}
        enough = data.costs.gemm_small_m.enough_warps
        assert enough == pytest.approx(1024 * gpu.sms / 132, abs=1)
        memory = data.costs.grouped_gemm.memory / base.costs.grouped_gemm.memory
        assert memory == pytest.approx(gpu.sms / 132 * 4.8 / gpu.bandwidth)
        words = f"from {gpu.sms} SMs and {gpu.bandwidth:.1f} TB/s, constants of NVIDIA H200"
        assert {str(origin) for origin in data.origins.values()} == {f"rule, {words}"}
        for rows, columns, groups in MATRICES:
            problem = GemmProblem(rows, columns, groups, False, False)
            for tokens in TOKENS:
                plan = choose(problem, tokens)
                if isinstance(plan, WgmmaPlan):
                    able = gemm_wgmma_plan.candidates(
                        rows, rows // groups, columns, counted_as(tokens), False, False
                    )
                    costs, cycles = data.costs.gemm_wgmma, gemm_wgmma_plan.estimated_cycles
                    sizes = (rows, columns, counted_as(tokens), costs, data)
                    assert cycles(plan, *sizes) == min(cycles(c, *sizes) for c in able)
        # Clusters of top-k selection and of attention are as many as the GPU holds.
        assert topk_plan(data.clusters[8], 16).ctas == 8
        assert topk_plan(data.clusters[8] + 1, 16).ctas == 4
        assert topk_plan(data.clusters[4] + 1, 16).ctas == 1
        narrow, clusters = attention_plan(3, 64, (128, 512), gpu.sms)
        assert clusters * 3 * 4 <= gpu.sms or not isinstance(narrow, NarrowPlan)


@given(sms=st.integers(16, 264), bandwidth=st.floats(0.6, 12.0) | st.none())
def test_the_rule_gives_a_plan_on_every_gpu(sms, bandwidth):
    data = by_rule(module.resolve(None), Gpu("some GPU", sms, bandwidth))
    with machine.pretend(plans=data):
        assert choose(PROBLEM, 64) is not None
        assert choose(PROBLEM, 1) is not None
        assert launch_plans(Experts(4096, 2048, 64, False, False), 64 * 256)


@pytest.mark.parametrize(
    ("clock", "bits", "expected"),
    [(3_201_000, 6144, 4.917), (0, 6144, None), (3_201_000, 0, None)],
)
def test_bandwidth_is_of_the_memorys_clock_and_width(clock, bits, expected):
    facts = {"name": "x", "multi_processor_count": 132, "memory_clock_rate": clock}
    gpu = machine.gpu_of(types.SimpleNamespace(**facts, memory_bus_width=bits))
    assert gpu.bandwidth == (None if expected is None else pytest.approx(expected, abs=1e-3))
    assert (gpu.name, gpu.sms) == ("x", 132)


def test_explain_says_where_plans_are_from(folder):
    weight = QuantizedTensor(
        torch.zeros(4096, 2048, dtype=torch.uint8),
        torch.zeros(4096, 256, dtype=torch.uint8),
        torch.ones(1),
        NVFP4,
        layout=FRAGMENTS,
    )
    call = dispatch.arguments(gemm, torch.zeros(64, 4096).bfloat16(), weight)
    call = call._replace(device=torch.device("cuda", 0))
    with on(H200):
        assert gemm_origin(call) == "plans: rule, constants fitted on NVIDIA H200"
        single = call._replace(args=call.args._replace(x=call.args.x[:1]))
        assert gemm_origin(single) == "plans: shipped, 2026-11-23, nvidia_h200.json"
    module.write(measured(H200, OTHER), module.user_path(H200))
    with on(H200):
        assert "tuned on this machine, 2026-11-29" in str(gemm_origin(call))
        explained = dispatch.Explanation(
            "gemm", "auto", "cute", (("cute", None),), plans="plans: x"
        )
        assert "     plans: x" in str(explained)
    with machine.pretend(capability=(10, 0), sms=148):
        assert gemm_origin(call) is None


def test_every_row_with_plans_names_a_function():
    rows = [row for row in dispatch.IMPLEMENTATIONS if row.plans is not None]
    assert {row.name for row in rows} == {"cute", "small_m", "fp8"}
    assert all(callable(reason_of(row.plans)) for row in rows)
