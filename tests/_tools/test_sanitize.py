"""The calls that compute-sanitizer checks: each exists, and names an implementation."""

from __future__ import annotations

import pytest
import torch

from dsv4 import dispatch
from tests._tools.sanitize import FUSED, fused


@pytest.mark.parametrize("op", FUSED)
def test_every_call_resolves(op):
    calls = list(FUSED[op]())
    assert calls
    names = {row.name for row in dispatch.implementations(op)} | {dispatch.AUTO}
    for call in calls:
        assert call.case.op == op
        assert call.backend in names
    assert any(row.name != "reference" for row in dispatch.implementations(op))


@pytest.mark.parametrize("op", FUSED)
def test_the_smallest_call_runs(op):
    """Also its options are arguments of the operator."""
    smallest = min(FUSED[op](), key=lambda call: call.case.tokens)
    assert smallest.run(torch.device("cpu"), "reference")


def test_tokens_with_code_of_their_own():
    """One and two tokens are multiplied by vectors, five by tensor cores."""
    assert {call.case.tokens for call in FUSED["compressor_projections"]()} == {1, 2, 5}


def test_dry_run(capsys):
    assert fused(["indexer_select"], dry_run=True) > 1
    assert "slots=True" in capsys.readouterr().out


def test_gemms_of_few_tokens_have_a_plan():
    plans = pytest.importorskip("dsv4.cute.sm90.gemm_fp8_small_m_plan")
    from dsv4.cute.sm90.plans import GemmProblem

    for call in FUSED["gemm"]():
        rows, columns, groups = (call.case.shape.get(name, 1) for name in ("N", "K", "G"))
        problem = GemmProblem(rows * groups, columns, groups, False, False)
        assert plans.fp8_small_m_plan(problem, call.case.tokens, True) is not None
