"""Kernels that never ran on a GPU are tested there, family by family, before they are used."""

from __future__ import annotations

import threading

import pytest
import torch

from dsv4 import device, dispatch, self_check, self_test
from dsv4.bench import self_test as cases
from dsv4.commands import env
from dsv4.commands.checkpoints import own_gpus
from dsv4.cute.runtime import cubin_cache
from dsv4.ops.norm import rms_norm
from dsv4.reference import norm as reference

CPU = torch.device("cpu")
ADA, H200 = (8, 9), (9, 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path))
    self_check.verdicts.cache_clear()
    dispatch._warn_unproven.cache_clear()
    yield
    self_check.verdicts.cache_clear()


@pytest.fixture
def kernel(monkeypatch):
    """Makes the Triton kernel of ``rms_norm`` what a test wants, on a GPU of a capability."""

    def install(implement, capability=ADA):
        calls = []

        def counted(args):
            calls.append(args)
            return implement(args)

        [row, last] = dispatch.implementations("rms_norm")
        row = dispatch.Implementation(
            *("rms_norm", "triton", "fake:norm"), proven=row.proven, self_test=row.self_test
        )
        rows, load = dispatch.implementations, dispatch._load
        monkeypatch.setattr(
            dispatch, "implementations", lambda op: (row, last) if op == "rms_norm" else rows(op)
        )
        monkeypatch.setattr(
            dispatch, "_load", lambda target: counted if target == "fake:norm" else load(target)
        )
        monkeypatch.setattr(dispatch.Call, "capability", capability)
        monkeypatch.setattr(cases, "TOKENS", (1, 3))
        return calls

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
    rms_norm(*args)
    assert len(calls) == 1, "the verdict is kept for the next process"


def test_a_kernel_that_raises_is_passed_over(kernel, caplog):
    def raising(args):
        raise RuntimeError("out of resource: shared memory, Required: 147480")

    kernel(raising)
    rms_norm(*operands())
    assert "it raises RuntimeError: out of resource" in caplog.text


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), RuntimeError("capture")]
)
def test_what_is_no_fault_of_the_kernel_is_no_verdict(kernel, error, tmp_path):
    def raising(args):
        raise error

    calls = kernel(raising)
    rms_norm(*operands())
    assert not list(tmp_path.glob("*.verdict"))
    rms_norm(*operands())
    assert len(calls) == 2


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


def test_on_hopper_nothing_is_tested(kernel, monkeypatch):
    calls = kernel(wrong, H200)
    monkeypatch.setattr(self_test, "unsupported", None)
    args = operands()
    assert not torch.equal(rms_norm(*args), rms_norm(*args, backend="reference"))
    assert len(calls) == 1


def test_every_row_is_proven_on_hopper():
    rows = [row for row in dispatch.IMPLEMENTATIONS if row.self_test is not None]
    assert {"triton", "cublas", "parts"} >= {row.name for row in rows}
    assert all(row.proven == {H200} for row in rows)
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


def test_explain_says_the_mark(kernel):
    kernel(reference.rms_norm, H200)
    assert dispatch.explain(rms_norm, *operands()).mark == self_test.MEASURED
    assert "on GPUs like this one: measured" in str(dispatch.explain(rms_norm, *operands()))


def test_every_family_has_cases():
    """The reference takes them all, so that those of a GPU are a part of these."""
    for op in dict.fromkeys(row.op for row in dispatch.IMPLEMENTATIONS if row.self_test):
        assert any(cases.problems(op, "reference", CPU, (1,))), op
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
def test_the_status_is_0_only_where_something_is_right(monkeypatch, wrong, untested, status):
    tested = cases.Tested("rms_norm", "triton", wrong, untested, 0.1)
    monkeypatch.setattr(cases, "run_all", lambda device: [tested])
    with device.pretend(capability=ADA):
        assert env._test_gpu(0) == status


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
    assert "NVIDIA L40S: kernels for such GPUs are compiled and interpreted; python" in line
    with device.pretend(capability=H200):
        [line] = own_gpus()
    assert line.endswith("are measured")
