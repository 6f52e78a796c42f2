"""The self-test in other processes: what crashes, hangs or is wrong fails alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from dsv4 import dispatch, self_check
from dsv4.bench import guarded_self_test
from dsv4.bench import self_test as cases
from dsv4.bench.problem import Case
from tests._tools import fake_kernel

CPU = torch.device("cpu")
FAMILY = ("rms_norm", "reference")
SIGNALS = {"crashes": signal.SIGABRT, "killed": signal.SIGKILL}


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    yield from fake_kernel.no_verdicts(monkeypatch, tmp_path)


class Imposter:
    """Tests families in a process as their names say, without a kernel."""

    def test(self, op, name):
        if op in SIGNALS:
            os.kill(os.getpid(), SIGNALS[op])
        if op == "hangs":
            time.sleep(60)
        if op == "raises":
            raise ZeroDivisionError("by the test")
        wrong = f"in process {os.getpid()}" if op == "wrong" else None
        untested = f"in process {os.getpid()}" if op == "untested" else None
        return None if op == "unsupported" else cases.Tested(op, name, wrong, untested, 0.5)


def guarded(*ops, seconds=30.0, workers=1):
    rows = [
        dispatch.Implementation(
            op, "triton", "none:none", proven=frozenset(), self_test="none:none"
        )
        for op in ops
    ]
    options = {"families": rows, "seconds": seconds, "workers": workers}
    return guarded_self_test.run_guarded(CPU, Imposter, **options)


def test_a_kernel_that_ends_its_process_or_is_wrong_fails_alone(monkeypatch):
    """After it comes another process, because its CUDA context may be lost."""
    known = self_check.Verdicts()
    monkeypatch.setattr(guarded_self_test, "verdicts", lambda: known)
    ops = ("untested", "right", "unsupported", "untested", "wrong", "untested", "crashes", "raises")
    results = list(guarded(*ops))
    assert [tested.op for tested in results] == [op for op in ops if op != "unsupported"]
    first, _, second, wrong, third, crashed, raised = results
    assert first.untested == second.untested == wrong.wrong != third.untested
    assert crashed.wrong == "its test crashed: its process ended with signal SIGABRT"
    assert raised.wrong == "its test raised ZeroDivisionError: by the test"
    verdicts = {configuration.op: reason for configuration, reason in known.known.items()}
    expected = {"wrong": wrong.wrong, "crashes": crashed.wrong, "raises": raised.wrong}
    assert verdicts == {"right": None, **expected}


def test_a_process_that_the_host_kills_is_no_verdict(monkeypatch, tmp_path):
    """Linux does that when memory is full."""
    known = self_check.Verdicts()
    monkeypatch.setattr(guarded_self_test, "verdicts", lambda: known)
    killed, right = guarded("killed", "right")
    assert (killed.wrong, right.wrong, right.untested) == (None, None, None)
    assert "its process ended with signal SIGKILL, as a host ends processes" in killed.untested
    assert [configuration.op for configuration in known.known] == ["right"]


def test_a_family_whose_cases_need_too_much_memory_is_no_verdict(monkeypatch, tmp_path):
    def build(draw):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(cases.MAKERS, "rms_norm", lambda *_: [Case("rms_norm", "", {}, 1, build)])
    result = guarded_self_test.Tester(CPU).test(*FAMILY)
    assert (result.wrong, result.untested) == (None, "too little free memory for the self-test")
    [*_, row] = dispatch.implementations("rms_norm")
    row = replace(row, proven=frozenset(), self_test="none:none")
    guarded_self_test._keep(row, result, CPU)
    assert not list(tmp_path.glob("*.verdict"))


@pytest.mark.nightly
def test_a_kernel_that_hangs_is_given_up():
    first, second = guarded("hangs", "right", seconds=12.0)
    assert first.wrong == "its test hung: test has no result after 12 seconds"
    assert second.wrong is None


@pytest.mark.nightly
def test_an_interrupted_self_test_ends_its_processes():
    results = guarded("untested", "hangs", "hangs", "hangs", seconds=60.0, workers=2)
    assert next(results).untested
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 30
    assert multiprocessing.active_children() == []


def test_a_real_family_in_a_process():
    [*_, row] = dispatch.implementations("rms_norm")
    [tested] = guarded_self_test.run_guarded(CPU, families=[row], workers=1)
    assert (tested.op, tested.name, tested.wrong, tested.untested) == (*FAMILY, None, None)


@pytest.mark.gpu
def test_families_of_a_gpu_are_right():
    rows = [row for row in dispatch.implementations("quantize_nvfp4") if row.proven is not None]
    results = list(guarded_self_test.run_guarded(torch.device("cuda", 0), families=rows))
    assert results
    assert [tested.wrong for tested in results] == [None] * len(results)
