"""Choice of implementations, and the reasons for it."""

from __future__ import annotations

from typing import ClassVar, get_type_hints

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import dispatch, ops
from dsv4.dispatch import Implementation, explain, use_backend
from dsv4.ops import _library
from dsv4.ops.norm import RmsNormArgs

X = torch.ones(2, 4)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """rms_norm with a picky first implementation and the reference behind it."""

    rows = (Implementation("rms_norm", "picky", f"{__name__}:marked", f"{__name__}:picky"),)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", rows + dispatch.IMPLEMENTATIONS)
    for cached in (dispatch.implementations, dispatch.operators):
        cached.cache_clear()
        monkeypatch.setattr(dispatch, cached.__name__, cached.__wrapped__)


def marked(args: RmsNormArgs) -> torch.Tensor:
    return torch.full_like(args.x, 42.0)


def picky(call: dispatch.Call) -> str | None:
    width = call.args.x.shape[-1]
    return None if width % 8 == 0 else f"width is {width}, wanted a multiple of 8"


def test_every_operator_has_a_reference_and_implementations_with_its_arguments() -> None:
    import inspect

    for op in dispatch.operators():
        rows = dispatch.implementations(op)
        assert rows[-1].name == "reference"
        record = _library.OPERATIONS[op].record
        arguments = ["args", "out"] if hasattr(torch.ops.dsv4, f"{op}_out") else ["args"]
        for row in rows:
            function = dispatch.load(row.target)
            declared = [*arguments, *["reserve_sms"] * row.reserves_sms]
            assert list(inspect.signature(function).parameters) == declared, (op, row.name)
            assert get_type_hints(function)["args"] is record, (op, row.name)


# Files with Triton kernels for operators of several modules of ``dsv4.ops``.
SHARED_FILES = {"gemm_packed", "grouped_gemm", "hyper_connection"}


def test_triton_kernels_lie_in_files_named_like_their_operators() -> None:
    """A file has the operator's name, its module's, or its module's and a further word."""
    for row in dispatch.IMPLEMENTATIONS:
        if row.name == "triton":
            file = row.target.partition(":")[0].rpartition(".")[2]
            module = _library.OPERATIONS[row.op].record.__module__.rpartition(".")[2]
            names = {row.op, module, *SHARED_FILES}
            assert file in names or file.startswith(f"{module}_"), (row.op, file)


@pytest.mark.parametrize("op", ["gemm", "gemm_swiglu"])
def test_reserved_sms_reach_implementations_that_can(op, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same as without; no other implementation, and no traced call, gets them."""
    result: list[dict[str, int]] = []
    weight, x = ops.quantize(torch.randn(32, 64), scaling="weight"), torch.randn(2, 64)
    load = dispatch.load

    def reserving(args, **options):
        result.append(options)
        return load(f"dsv4.reference.{op}:{op}")(args)

    row = Implementation(op, "reserving", "test:reserving", reserves_sms=True)
    rows = (row, *dispatch.implementations(op))
    monkeypatch.setattr(dispatch, "implementations", lambda name: rows)
    monkeypatch.setattr(
        dispatch, "load", lambda target: reserving if target == row.target else load(target)
    )
    limit = () if op == "gemm" else (10.0,)
    call = getattr(ops, op)
    plain = call(x, weight, *limit)
    assert torch.equal(call(x, weight, *limit, reserve_sms=20), plain)
    assert torch.equal(call(x, weight, *limit, reserve_sms=20, backend="reference"), plain)
    assert result == [{}, {"reserve_sms": 20}]
    compiled = torch.compile(
        lambda x: call(x, weight, *limit, reserve_sms=20), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), plain)
    assert result[2:] == [{}]


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
    monkeypatch.setattr(dispatch, "load", lambda target: pytest.fail("ran an implementation"))
    result = explain(ops.rms_norm, X)
    assert result.chosen == "reference"
    assert "width is 4, wanted a multiple of 8" in result.reason
    assert str(result).splitlines() == [
        "rms_norm (backend='auto')",
        "   picky: width is 4, wanted a multiple of 8",
        "   triton: Triton kernels run on a CUDA GPU, the tensors are on cpu",
        "-> reference: supported",
    ]
    assert explain(ops.rms_norm, torch.ones(2, 8)).chosen == "picky"
    refused = explain(ops.rms_norm, X, backend="picky")
    assert refused.chosen is None
    assert refused.reason == "'picky' cannot run it: width is 4, wanted a multiple of 8"
    assert "asked for by name" in explain(ops.rms_norm, X, backend="reference").reason


def test_arguments_are_those_of_the_schema_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "load", lambda target: pytest.fail("ran an implementation"))
    call = dispatch.arguments(ops.rms_norm, X, eps=0.25, backend="reference")
    assert call.op == "rms_norm"
    assert call.device == X.device
    assert isinstance(call.args, RmsNormArgs)
    assert call.args.x.data_ptr() == X.data_ptr()
    assert (call.args.weight, call.args.eps) == (None, 0.25)
    with pytest.raises(ValueError, match="called no dsv4 operator"):
        dispatch.arguments(torch.add, X, X)


def test_arguments_are_what_an_implementation_takes() -> None:
    call = dispatch.arguments(ops.rms_norm, X)
    reference = dispatch.implementations(call.op)[-1]
    assert torch.equal(dispatch.load(reference.target)(call.args), ops.rms_norm(X))


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="backend is 'fast', wanted 'auto' or one of triton"):
        ops.rms_norm(X, backend="fast")
    with pytest.raises(ValueError, match="backend is 'fast', wanted 'auto' or one of triton"):
        dispatch.explain(ops.rms_norm, X, backend="fast")
    with pytest.raises(KeyError, match="no operator named 'norm'"):
        dispatch.implementations("norm")
    with pytest.raises(ValueError, match="called no dsv4 operator"):
        explain(torch.add, X, X)


def test_a_compiled_call_keeps_the_explicit_choice() -> None:
    compiled = torch.compile(
        lambda x: ops.rms_norm(x, backend="reference"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(X), ops.rms_norm(X))


def test_a_backward_pass_raises_and_passes_no_gradient() -> None:
    x = X.clone().requires_grad_()
    out = ops.rms_norm(x)
    with pytest.raises(RuntimeError, match="rms_norm: a backward pass reached this operator"):
        out.sum().backward()
    assert x.grad is None


def test_a_backward_pass_that_reaches_a_tensor_written_in_place_raises() -> None:
    q = torch.rand(3, 2, 8).requires_grad_() * 1
    ops.head_norm_rope_(q, torch.ones(3, 4), torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="head_norm_rope_: a backward pass reached"):
        q.sum().backward()


def test_a_backward_pass_beside_an_operator_works() -> None:
    x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
    ops.rms_norm(x)
    (2 * other).sum().backward()
    assert torch.equal(other.grad, torch.full_like(X, 2))
    with torch.no_grad():
        assert not ops.rms_norm(x).requires_grad


EPS = float("1.5e-3")  # an object of its own: the dispatcher would hand over another one


@pytest.fixture
def given_eps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The values of eps that reached ``dispatch.run``."""
    seen, run = [], dispatch.run

    def record(op, args, *rest):
        seen.append(args.eps)
        return run(op, args, *rest)

    monkeypatch.setattr(dispatch, "run", record)
    return seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_plain_call_runs_at_once(mode, given_eps: list[float]) -> None:
    with mode():
        weight = torch.nn.Parameter(torch.rand(4), requires_grad=False)
        actual = ops.rms_norm(X, weight, EPS)
        expected = torch.ops.dsv4.rms_norm(X, weight, EPS, "auto")
    assert [eps is EPS for eps in given_eps] == [True, False]
    assert torch.equal(actual, expected)
    assert (actual.requires_grad, actual.is_inference()) == (False, mode is torch.inference_mode)


class Seen(TorchDispatchMode):
    """Keeps the names of the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """Keeps the names of the functions that it was given to."""

    names: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


NAME = "dsv4.rms_norm.default"


@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
def test_modes_see_every_operator(mode, given_eps: list[float]) -> None:
    with mode() as seen:
        ops.rms_norm(X, None, EPS)
    assert NAME in seen.names
    assert given_eps[0] is not EPS


@pytest.mark.parametrize("first", [True, False])
def test_subclasses_see_every_operator(first: bool, given_eps: list[float]) -> None:
    Wrapped.names.clear()
    x, weight = X, torch.ones(4)
    arguments = [x.as_subclass(Wrapped), weight] if first else [x, weight.as_subclass(Wrapped)]
    ops.rms_norm(*arguments, EPS)
    assert NAME in Wrapped.names
    assert given_eps[0] is not EPS


def test_what_traces_finds_the_operator() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, None, EPS)

    traced = make_fx(norm)(X)
    assert NAME in [str(node.target) for node in traced.graph.nodes]

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return norm(x)

    for strict in (False, True):
        exported = torch.export.export(Norm(), (X,), strict=strict)
        assert NAME in [str(node.target) for node in exported.graph.nodes]
    assert "dsv4::rms_norm" in str(torch.jit.trace(norm, (X,), check_trace=False).graph)
    graphs = []
    torch.compile(norm, fullgraph=True, backend=lambda g, _: graphs.append(g) or g)(X)
    assert NAME in [str(node.target) for node in graphs[0].graph.nodes]


def test_tensors_without_data_have_shapes() -> None:
    result = ops.rms_norm(torch.empty(2, 4, device="meta"))
    assert (result.device.type, result.shape) == ("meta", (2, 4))
    with FakeTensorMode():
        assert isinstance(ops.rms_norm(torch.empty(2, 4)), FakeTensor)


def test_transforms_find_the_operator(given_eps: list[float]) -> None:
    for transform in (torch.vmap, torch.func.functionalize):
        result = transform(lambda x: ops.rms_norm(x, None, EPS))(X)
        assert torch.equal(result, torch.ops.dsv4.rms_norm(X, None, EPS, "auto"))
    assert not any(eps is EPS for eps in given_eps)


def test_a_profile_has_the_operator() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.rms_norm(X)
    assert "dsv4::rms_norm" in {event.key for event in profile.key_averages()}


def test_what_the_dispatcher_would_change_is_changed(given_eps: list[float]) -> None:
    """A number becomes a float, a lazily negated view becomes what it stands for."""
    assert torch.equal(ops.rms_norm(X, None, 1), ops.rms_norm(X, None, 1.0))
    assert [type(eps) for eps in given_eps] == [float, float]
    negated = torch.view_as_complex(torch.rand(2, 4, 2)).conj().imag
    assert negated.is_neg()
    given_eps.clear()
    assert torch.equal(ops.rms_norm(negated, None, EPS), ops.rms_norm(negated.clone(), None, EPS))
    assert [eps is EPS for eps in given_eps] == [False, True]
    with pytest.raises(RuntimeError, match="rms_norm"):
        ops.rms_norm(X, None, "small")


def test_the_variable_is_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.requested_backend() == "auto"
    monkeypatch.setenv("DSV4_BACKEND", "reference")
    assert dispatch.requested_backend() == "reference"
    monkeypatch.delenv("DSV4_BACKEND")
    assert dispatch.requested_backend() == "auto"
