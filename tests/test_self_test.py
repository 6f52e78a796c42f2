"""Kernels that never ran on a GPU are tested there, family by family, before they are used."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from dsv4 import device, dispatch, self_check, self_test
from dsv4 import implementations as table
from dsv4.bench import guarded_self_test
from dsv4.bench import self_test as cases
from dsv4.commands import env
from dsv4.commands.checkpoints import own_gpus
from dsv4.ops.gemm import gemm
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.norm import rms_norm
from dsv4.ops.quantize import quantize
from dsv4.ops.swiglu import SwigluArgs
from dsv4.reference import norm as reference
from dsv4.reference.swiglu import swiglu as reference_swiglu
from dsv4.triton import nvfp4_supports
from tests._tools import fake_kernel

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ADA, H200 = (8, 9), (9, 0)
SELF_TESTED = [row for row in dispatch.IMPLEMENTATIONS if row.self_test is not None]


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    yield from fake_kernel.no_verdicts(monkeypatch, tmp_path)


@pytest.fixture
def kernel(monkeypatch):
    """Replaces the Triton kernel of ``rms_norm`` on a GPU of a compute capability."""

    def install(implement, capability=ADA):
        row = replace(dispatch.implementations("rms_norm")[0], target="fake:norm", supports=None)
        monkeypatch.setattr(cases, "TOKENS", (1, 3))
        return fake_kernel.install(monkeypatch, row, implement, capability)

    return install


def operands():
    return torch.randn(3, 64).bfloat16(), torch.ones(64).bfloat16(), 1e-6


def wrong(args):
    out = reference.rms_norm(args)
    out[-1] *= 1.1
    return out


def test_a_right_kernel_is_tested_once_and_taken(kernel):
    calls = kernel(reference.rms_norm)
    args = operands()
    rms_norm(*args)
    tested = len(calls) - 1
    assert tested > 1
    assert calls[-1].x is args[0]
    rms_norm(torch.randn(70, 128).bfloat16(), torch.ones(128).bfloat16(), 1e-6)
    assert len(calls) == tested + 2, "the family was tested, not the configuration"


def test_a_broken_kernel_is_passed_over_and_named(kernel, caplog):
    calls = kernel(wrong)
    args = operands()
    for _ in range(2):
        assert torch.equal(rms_norm(*args), rms_norm(*args, backend="reference"))
    assert len(calls) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "rms_norm: the kernel 'triton' is wrong on this GPU and is not used" in caplog.text
    assert "tokens:" in str(dispatch.explain(rms_norm, *args))
    self_check.verdicts.cache_clear()
    assert dispatch.explain(rms_norm, *args).chosen == "reference", "as a call in this process"
    rms_norm(*args)
    assert len(calls) == 1, "the verdict is kept for the next process"


def test_a_kernel_that_raises_is_passed_over(kernel, caplog):
    def raising(args):
        raise RuntimeError("out of resource: shared memory, Required: 147480")

    kernel(raising)
    rms_norm(*operands())
    assert "it raises RuntimeError: out of resource" in caplog.text


def with_code(code):
    error = torch.AcceleratorError("CUDA error: something")
    error.error_code = code
    return error


REFUSED = "operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (with_code(900), True),
        (with_code(700), False),
        (RuntimeError(f"Triton Error [CUDA]: {REFUSED}"), True),
        (RuntimeError(f"loading a kernel: CUDA error 900, {REFUSED}"), True),
        (RuntimeError("the kernel's tile is captured twice"), False),
        (ValueError(f"CUDA error: {REFUSED}"), False),
    ],
)
def test_only_cudas_errors_speak_of_a_capture(error, expected):
    assert self_check.is_of_a_capture(error) == expected


NO_FAULTS = [
    torch.OutOfMemoryError("out of memory"),
    MemoryError(),
    with_code(2),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError(f"Triton Error [CUDA]: {REFUSED}"),
]


@pytest.mark.parametrize("error", NO_FAULTS)
def test_what_is_no_fault_of_the_kernel_is_no_verdict(kernel, error, tmp_path):
    def raising(args):
        raise error

    calls = kernel(raising)
    rms_norm(*operands())
    assert not list(tmp_path.glob("*.verdict"))
    rms_norm(*operands())
    assert len(calls) == 2


@pytest.mark.parametrize("error", NO_FAULTS)
def test_a_case_that_cannot_be_built_is_no_verdict(kernel, monkeypatch, error, tmp_path):
    """Its error does not reach the call that started the self-test."""
    calls = kernel(reference.rms_norm)

    def draw(*args):
        raise error

    monkeypatch.setattr(cases, "Draw", draw)
    args = operands()
    assert torch.equal(rms_norm(*args), rms_norm(*args, backend="reference"))
    assert calls == []
    [tested] = cases.run_all(CPU, (1,), ["rms_norm"])
    assert tested.wrong is None
    assert tested.untested
    assert not list(tmp_path.glob("*.verdict"))


def test_while_a_graph_is_captured_it_is_not_used_and_not_tested(kernel, monkeypatch):
    calls = kernel(reference.rms_norm)
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "is_capturing", lambda device: True)
        call = dispatch.arguments(rms_norm, *operands())
        assert dispatch.choose(call).name == "reference"
        assert "env --selftest" in self_test.unsupported("rms_norm", "triton", CPU, None)
        assert calls == []
    rms_norm(*operands())
    monkeypatch.setattr(self_test, "is_capturing", lambda device: True)
    assert dispatch.choose(call).name == "triton"


def grouped_operands(device):
    """Operands of ``grouped_gemm``: rows, an MXFP4 weight of four experts, and offsets."""
    x = torch.randn(6, 128, device=device).bfloat16()
    weight = quantize(torch.randn(4, 64, 128, device=device), "mxfp4", backend="reference")
    return x, weight, torch.tensor([0, 2, 2, 3, 6], dtype=torch.int32, device=device)


def of_triton(op):
    """The row of an operator's Triton kernel, as if it had never run anywhere."""
    row = next(row for row in dispatch.implementations(op) if row.name == "triton")
    return replace(row, proven=frozenset())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_capture_is_refused_where_only_a_kernel_that_waits_is_left(monkeypatch, backend):
    row = replace(of_triton("grouped_gemm"), target="fake:grouped", supports=None)
    calls = fake_kernel.install(monkeypatch, row, row.run, ADA)
    for module in (self_test, self_check):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    with pytest.raises(NotImplementedError, match=r"^grouped_gemm: ") as refused:
        grouped_gemm(*grouped_operands("cpu"), backend=backend)
    assert "reference: it reads tensors on the host" in str(refused.value)
    if backend == "auto":
        assert "triton: the kernel never ran on such a GPU" in str(refused.value)
        assert "call it once before the capture, or run python -m dsv4 env --selftest" in str(
            refused.value
        )
    assert calls == []


@pytest.mark.gpu
def test_a_refused_capture_goes_on_and_later_holds_the_kernel(monkeypatch):
    row = of_triton("grouped_gemm")
    fake_kernel.install(monkeypatch, row, row.run, torch.cuda.get_device_capability())
    operands, count = grouped_operands("cuda"), torch.zeros(1, device="cuda")
    graph, again = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        count += 1
        with pytest.raises(NotImplementedError, match="--selftest; reference: it reads tensors"):
            grouped_gemm(*operands)
    graph.replay()
    assert int(count) == 1
    expected = grouped_gemm(*operands)
    family = self_test.family("grouped_gemm", "triton", operands[0].device)
    assert self_check.verdicts().known == {family: None}
    with torch.cuda.graph(again):
        out = grouped_gemm(*operands)
    again.replay()
    assert torch.equal(out, expected)


def test_on_hopper_nothing_is_tested(kernel, monkeypatch):
    calls = kernel(wrong, H200)
    monkeypatch.setattr(self_test, "unsupported", None)
    args = operands()
    assert not torch.equal(rms_norm(*args), rms_norm(*args, backend="reference"))
    assert len(calls) == 1


def test_rows_are_proven_on_hopper_that_were_right_there():
    assert {"triton", "cublas", "parts", "fp4"} >= {row.name for row in SELF_TESTED}
    assert {row.name for row in SELF_TESTED if not row.is_always_proven(H200)} == {"fp4"}
    assert not [row for row in SELF_TESTED if row.is_always_proven(ADA)]
    over_ranks = {"hc_reduce_post", "hc_reduce_post_pre_norm"}
    assert not [
        row
        for row in dispatch.IMPLEMENTATIONS
        if row.name in ("triton", "parts") and row.self_test is None and row.op not in over_ranks
    ]


def test_threads_wait_for_one_test(kernel):
    calls = kernel(reference.rms_norm)
    threads = [threading.Thread(target=rms_norm, args=operands()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    xs = [tuple(call.x.shape) for call in calls]
    assert xs.count((3, 64)) == 4


def test_a_test_that_needs_another_family_does_not_wait_for_itself():
    """A kernel made of others is tested while it is under test."""

    def inner(op, name, device):
        return self_test.unsupported("outer", "triton", device, outer)

    def outer(op, name, device):
        return self_test.unsupported("inner", "triton", device, inner)

    results = []
    thread = threading.Thread(
        target=lambda: results.append(self_test.unsupported("outer", "triton", CPU, outer))
    )
    thread.start()
    thread.join(60)
    assert results == [None]


def test_a_check_of_a_configuration_may_need_a_family():
    """A GEMM of quantised activations does this; the check holds the lock of verdicts."""
    checked = self_check.Configuration("gemm", "cute", "operands", "gpu")
    tested = []

    def test(op, name, device):
        tested.append(self_test.is_under_test(op, name, device))

    def check():
        return self_test.unsupported("quantize_nvfp4", "triton", CPU, test)

    results = []
    thread = threading.Thread(
        target=lambda: results.append(self_check.verdicts().reason(checked, check)), daemon=True
    )
    thread.start()
    thread.join(30)
    assert results == [None]
    assert tested == [True]


def test_marks():
    gpu = torch.device("cuda", 0)
    with device.pretend(capability=H200):
        assert self_test.mark_of_gpu(gpu) == self_test.MEASURED
    with device.pretend(capability=(12, 0)):
        assert self_test.mark_of_gpu(gpu) == self_test.COMPILED
        subject = self_test.family("rms_norm", "triton", gpu)
        self_check.verdicts().known[subject] = None
        assert self_test.mark(subject, (12, 0)) == self_test.RUN
        self_check.verdicts().known[subject] = "wrong"
        assert self_test.mark(subject, (12, 0)) == self_test.COMPILED
    with device.pretend(capability=(11, 0)):
        assert self_test.mark_of_gpu(gpu) == self_test.NEVER


@pytest.mark.parametrize(("version", "number"), [("3.6.0", 0), (nvfp4_supports.VERSIONS[0], 5)])
def test_a_gpu_is_marked_run_when_every_family_is_right(monkeypatch, version, number):
    monkeypatch.setattr(nvfp4_supports, "triton_version", lambda: version)
    with device.pretend(capability=(12, 0)):
        rows = self_test.families(GPU)
        assert [row.name for row in rows].count("fp4") == number
        subjects = [self_test.family(row.op, row.name, GPU) for row in rows]
        known = self_check.verdicts().known
        known.update(dict.fromkeys(subjects))
        assert self_test.mark_of_gpu(GPU) == self_test.RUN
        known[subjects[0]] = "wrong"
        of_all = f"{len(rows) - 1} of {len(rows)} run"
        assert self_test.mark_of_gpu(GPU) == of_all
        del known[subjects[0]]
        assert self_test.mark_of_gpu(GPU) == of_all


@pytest.mark.parametrize("op", ["gemm", "gemm_swiglu", "grouped_gemm", "grouped_gemm_swiglu"])
def test_four_bit_weights_in_triton_are_marked_as_measured_on_hopper(calls, op):
    call = next(call for call in calls[op] if call.args.format == "mxfp4")
    with device.pretend(capability=H200, packages=True):
        explanation = dispatch._explanation(call, "triton")
    assert (explanation.chosen, explanation.mark) == ("triton", self_test.MEASURED)


def test_another_process_knows_what_ran(kernel):
    kernel(reference.rms_norm)
    rms_norm(*operands())
    self_check.verdicts.cache_clear()
    assert dispatch.explain(rms_norm, *operands()).mark == self_test.RUN


def test_explain_says_the_mark(kernel):
    kernel(reference.rms_norm, H200)
    assert dispatch.explain(rms_norm, *operands()).mark == self_test.MEASURED
    assert "on GPUs like this one: measured" in str(dispatch.explain(rms_norm, *operands()))


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_block"])
def test_gemm_is_proven_on_hopper(fmt):
    weight = quantize(torch.ones(128, 128), fmt)
    call = dispatch.arguments(gemm, torch.ones(1, 128).bfloat16(), weight)
    call = call._replace(device=GPU)
    row = next(row for row in dispatch.implementations("gemm") if row.name == "triton")
    with device.pretend(capability=H200):
        assert row.is_proven(call)
    with device.pretend(capability=ADA):
        assert not row.is_proven(call)


@pytest.fixture(scope="module")
def calls():
    """Calls of the cases of each operator."""
    made = {}
    for op in dict.fromkeys(row.op for row in SELF_TESTED):
        for _, problem in cases.problems(op, "reference", CPU, (1,)):
            call = dispatch.arguments(problem.function, *problem.args, **problem.kwargs)
            made.setdefault(op, []).append(call._replace(device=GPU))
    return made


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), ADA, H200, (12, 0)])
def test_no_family_is_lost_for_want_of_a_case(calls, monkeypatch, capability):
    monkeypatch.setattr(nvfp4_supports, "triton_version", lambda: nvfp4_supports.VERSIONS[0])
    with device.pretend(capability=capability, packages=True):
        for row in SELF_TESTED:
            if row.op == "expert_gather":  # takes rows in pinned memory, which needs a GPU
                continue
            reasons = [row.unsupported_reason(call) for call in calls[row.op]]
            has_case = None in reasons
            runs = row.name != "fp4" or capability in nvfp4_supports.GPUS
            assert has_case == runs, (row.op, reasons)


@pytest.mark.parametrize("op", ["gemm", "gemm_swiglu", "grouped_gemm", "grouped_gemm_swiglu"])
def test_weights_of_four_bits_have_cases_in_every_format(calls, op):
    row = next(row for row in dispatch.implementations(op) if row.name == "triton")
    with device.pretend(capability=ADA, packages=True):
        taken = [call.args for call in calls[op] if row.unsupported_reason(call) is None]
    assert {"nvfp4", "mxfp4"} <= {args.format for args in taken}


@pytest.mark.parametrize("op", ["swiglu_quantize", "swiglu_fp8"])
def test_a_fused_kernel_is_compared_with_its_own_parts(monkeypatch, op):
    """Such a kernel rounds differently from the reference."""

    def coarse(args):
        return reference_swiglu(args).to(torch.float8_e5m2).to(torch.bfloat16)

    def fused(args):
        fmt = "nvfp4" if op == "swiglu_quantize" else "fp8_token"
        how = {"scaling": "token"} if fmt == "nvfp4" else {}
        inner = coarse(SwigluArgs(args.gate_up, args.limit, args.layout, None, torch.bfloat16))
        made = quantize(inner, fmt, backend="reference", **how)
        parts = (made.codes, made.scales, made.global_scale)
        return tuple(part for part in parts if part is not None)

    rows, load = dispatch.implementations, dispatch.load
    fakes = {"swiglu": coarse, op: fused}

    def listed(name):
        [*_, last] = rows(name)
        fake = dispatch.Implementation(name, "triton", f"fake:{name}", proven=frozenset())
        return (fake, last) if name in fakes else rows(name)

    monkeypatch.setattr(dispatch, "implementations", listed)
    for module in (dispatch, table):
        monkeypatch.setattr(
            module, "load", lambda target: fakes.get(target.removeprefix("fake:")) or load(target)
        )
    assert cases.wrong(op, "triton", CPU, (3,)) is None
    fakes["swiglu"] = reference_swiglu
    assert cases.wrong(op, "triton", CPU, (3,)) is not None


def test_every_family_has_cases():
    """The reference takes them all, so that those of a GPU are a part of these."""
    for op in dict.fromkeys(row.op for row in SELF_TESTED):
        assert cases.wrong(op, "reference", CPU, (2,)) is None, op


def test_all_of_a_device(kernel, monkeypatch):
    kernel(wrong)
    listed = list(cases.run_all(CPU, (1,), ["rms_norm", "rope"]))
    assert [(tested.op, tested.name) for tested in listed] == [("rms_norm", "triton")]
    assert listed[0].wrong is not None
    assert str(listed[0]).startswith("WRONG rms_norm")
    verdict = self_check.verdicts().known[self_test.family("rms_norm", "triton", CPU)]
    assert verdict == listed[0].wrong


def test_a_kernel_of_many_tokens_alone_is_tested(kernel, monkeypatch):
    kernel(reference.rms_norm)
    problems = cases.problems

    def of_many(op, name, device, tokens):
        return problems(op, name, device, tuple(count for count in tokens if count > 1))

    monkeypatch.setattr(cases, "problems", of_many)
    [tested] = cases.run_all(CPU, (1, 3), ["rms_norm"])
    assert (tested.op, tested.wrong, tested.untested) == ("rms_norm", None, None)


@pytest.mark.parametrize(("wrong", "untested", "status"), [(None, None, 0), (None, "no memory", 1),
                                                           ("NaN", None, 1)])  # fmt: skip
def test_the_status_is_0_only_where_something_is_right(
    monkeypatch, capsys, wrong, untested, status
):
    tested = cases.Tested("rms_norm", "triton", wrong, untested, 0.1)
    monkeypatch.setattr(guarded_self_test, "run_guarded", lambda device: [tested])
    with device.pretend(capability=ADA):
        assert env._test_gpu(0) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("kernels on such a GPU: compiled and interpreted")


def test_the_command_and_inspect_say_that_every_kernel_ran(monkeypatch, capsys):
    def run_guarded(device):
        for row in self_test.families(device):
            self_check.verdicts().replace(self_test.family(row.op, row.name, device), None)
            yield cases.Tested(row.op, row.name, None, None, 0.1)

    monkeypatch.setattr(guarded_self_test, "run_guarded", run_guarded)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA RTX")
    with device.pretend(capability=(12, 0)):
        assert env._test_gpu(0) == 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(self_test, "gpu", lambda device: "cuda")
        [line] = own_gpus()
    assert capsys.readouterr().out.splitlines()[-1].endswith("kernels on such a GPU: run")
    assert line.endswith("NVIDIA RTX; kernels on it: run")


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert env.test_gpus() == 1
    assert "there is no CUDA GPU" in capsys.readouterr().out


def test_inspect_says_the_mark_of_this_machines_gpus(monkeypatch):
    assert list(own_gpus()) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA L40S")
    with device.pretend(capability=ADA):
        [line] = own_gpus()
    assert "NVIDIA L40S; kernels on it: compiled and interpreted; python" in line
    with device.pretend(capability=H200):
        [line] = own_gpus()
    assert line.endswith("kernels on it: measured")
