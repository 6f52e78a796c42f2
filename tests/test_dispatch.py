"""Which implementation runs, and why."""

from __future__ import annotations

import pytest
import torch

from dsv4 import dispatch, ops
from dsv4.dispatch import Implementation, explain, use_backend

X = torch.ones(2, 4)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """rms_norm with a picky first implementation and the reference behind it."""

    def picky(call: dispatch.Call) -> str | None:
        width = call.args[0].shape[-1]
        return None if width % 8 == 0 else f"width is {width}, wanted a multiple of 8"

    rows = (Implementation("rms_norm", "picky", "tests.test_dispatch:marked", picky),)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", rows + dispatch.IMPLEMENTATIONS)
    for cached in (dispatch.implementations, dispatch.operators):
        cached.cache_clear()
        monkeypatch.setattr(dispatch, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(dispatch, "_load", lambda target: _resolve(target))


def _resolve(target: str):
    if target == "tests.test_dispatch:marked":
        return lambda x, weight, eps: torch.full_like(x, 42.0)
    return dispatch_load(target)


dispatch_load = dispatch._load


def test_every_operator_has_a_reference_and_implementations_with_its_arguments() -> None:
    import inspect

    for op in dispatch.operators():
        rows = dispatch.implementations(op)
        assert rows[-1].name == "reference"
        schema = getattr(torch.ops.dsv4, op).default._schema
        wanted = [argument.name for argument in schema.arguments][:-1]
        if hasattr(torch.ops.dsv4, f"{op}_out"):
            wanted.append("out")
        for row in rows:
            found = inspect.signature(dispatch._load(row.target)).parameters
            assert list(found) == wanted, (op, row.name)


@pytest.mark.usefixtures("table")
def test_auto_takes_the_first_that_supports_the_call() -> None:
    assert ops.rms_norm(torch.ones(2, 8)).eq(42).all()
    assert torch.allclose(ops.rms_norm(X), X, atol=1e-5)


@pytest.mark.usefixtures("table")
def test_an_explicit_choice_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "rms_norm: picky: width is 4, wanted a multiple of 8"
    with pytest.raises(NotImplementedError, match=message):
        ops.rms_norm(X, backend="picky")
    with use_backend("picky"), pytest.raises(NotImplementedError, match=message):
        ops.rms_norm(X)
    monkeypatch.setenv("DSV4_BACKEND", "picky")
    with pytest.raises(NotImplementedError, match=message):
        ops.rms_norm(X)
    # The argument outranks the block, the block outranks the environment.
    with use_backend("reference"):
        assert not ops.rms_norm(torch.ones(2, 8)).eq(42).any()
        assert ops.rms_norm(torch.ones(2, 8), backend="picky").eq(42).all()


@pytest.mark.usefixtures("table")
def test_explain_says_why_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_load", lambda target: pytest.fail("ran an implementation"))
    found = explain(ops.rms_norm, X)
    assert found.chosen == "reference"
    assert "width is 4, wanted a multiple of 8" in found.reason
    assert str(found).splitlines() == [
        "rms_norm (backend='auto')",
        "   picky: width is 4, wanted a multiple of 8",
        "   triton: Triton kernels run on a CUDA GPU, the tensors are on cpu",
        "-> reference: supported",
    ]
    assert explain(ops.rms_norm, torch.ones(2, 8)).chosen == "picky"
    refused = explain(ops.rms_norm, X, backend="picky")
    assert refused.chosen is None
    assert "nothing can run it" in refused.reason
    assert "asked for by name" in explain(ops.rms_norm, X, backend="reference").reason


def test_arguments_are_those_of_the_schema_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_load", lambda target: pytest.fail("ran an implementation"))
    call = dispatch.arguments(ops.rms_norm, X, eps=0.25, backend="reference")
    assert call.op == "rms_norm"
    assert call.device == X.device
    x, weight, eps = call.args
    assert x.data_ptr() == X.data_ptr()
    assert (weight, eps) == (None, 0.25)
    with pytest.raises(ValueError, match="called no dsv4 operator"):
        dispatch.arguments(torch.add, X, X)


def test_arguments_are_what_an_implementation_takes() -> None:
    call = dispatch.arguments(ops.rms_norm, X)
    reference = dispatch.implementations(call.op)[-1]
    assert torch.equal(dispatch._load(reference.target)(*call.args), ops.rms_norm(X))


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="backend is 'fast', wanted 'auto' or one of triton"):
        ops.rms_norm(X, backend="fast")
    with pytest.raises(KeyError, match="no operator named 'norm'"):
        dispatch.implementations("norm")
    with pytest.raises(ValueError, match="called no dsv4 operator"):
        explain(torch.add, X, X)


def test_a_compiled_call_keeps_the_explicit_choice() -> None:
    compiled = torch.compile(
        lambda x: ops.rms_norm(x, backend="reference"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(X), ops.rms_norm(X))


def test_a_backward_pass_warns_and_passes_no_gradient() -> None:
    x = X.clone().requires_grad_()
    out = ops.rms_norm(x)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        out.sum().backward()
    assert x.grad is None
