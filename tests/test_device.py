"""Facts about the machine: asked once, all of them forgotten at once, others pretended in tests."""

from __future__ import annotations

import pytest
import torch

from dsv4 import device, dispatch, ops
from tests.project.test_imports import run

GPU = torch.device("cuda", 0)


def test_a_fact_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda gpu: asked.append(gpu) or (9, 0)
    )
    device.MACHINE.forget()
    assert [device.capability(GPU), device.capability(GPU)] == [(9, 0)] * 2
    assert asked == [GPU]
    device.MACHINE.forget()
    assert device.dotted(GPU) == "9.0"
    assert len(asked) == 2
    device.MACHINE.forget()


def test_pretended_facts_hold_inside_the_block() -> None:
    before = device.MACHINE.pretended
    with device.pretend(capability=(7, 5), sms=3, packages=True) as be:
        assert (device.capability(GPU), device.sms(GPU)) == ((7, 5), 3)
        assert device.has("no such package")
        assert "8.0 or newer, the GPU has 7.5" in str(device.no_triton(GPU))
        be(capability=(12, 0))
        assert (device.capability(GPU), device.sms(GPU)) == ((12, 0), 3)
        assert device.no_triton(GPU) is None
        with device.pretend(packages=False):
            assert device.no_triton(GPU) == "the package triton is not installed"
            assert device.capability(GPU) == (12, 0)
        assert device.no_triton(GPU) is None
    assert device.MACHINE.pretended == before
    assert not device.has("no such package")


def test_a_block_that_raises_ends_the_pretence() -> None:
    before = device.MACHINE.pretended
    with pytest.raises(KeyError), device.pretend(packages=True):
        raise KeyError
    assert device.MACHINE.pretended == before
    assert not device.has("no such package")


def test_the_choice_follows_the_pretence() -> None:
    """Values that are cached by device, by size or by weight are forgotten, too."""
    weight = ops.quantize(torch.ones(64, 256), scaling="weight").with_layout("fragments_16x64")
    call = dispatch.arguments(ops.gemm, torch.ones(65, 256).bfloat16(), weight)
    call = call._replace(device=GPU)
    cute = next(row for row in dispatch.implementations("gemm") if row.name == "cute")
    result = []
    with device.pretend(packages=True) as be:
        for capability in ((9, 0), (10, 0), (11, 0), (9, 0)):
            be(capability=capability)
            result.append(cute.unsupported_reason(call))
    assert [reason is None for reason in result] == [True, False, False, True]
    assert "sm_100a lacks" in result[1]
    assert "the GPU has 11.0" in result[2]


def test_sms_of_a_cpu() -> None:
    assert device.sms(torch.device("cpu")) == 1


def test_reasons_need_no_backend() -> None:
    code = """
import dsv4.triton.supports, dsv4.cute.supports, dsv4.blas.supports
import sys
print([name for name in ("triton", "cutlass") if sys.modules[name] is not None])
"""
    assert run(code) == "[]\n"


def test_the_dispatcher_imports_no_backend() -> None:
    code = """
import sys, dsv4.dispatch
backends = ("dsv4.triton", "dsv4.cute.supports", "dsv4.blas", "dsv4.reference")
print([name for name in sys.modules if name.startswith(backends)])
"""
    assert run(code) == "[]\n"


def test_every_row_names_what_there_is() -> None:
    for row in dispatch.IMPLEMENTATIONS:
        for name in (row.supports, row.slower_than_later):
            assert name is None or callable(dispatch.reason_of(name)), row
        assert (row.supports is None) == (row.name == "reference"), row
