"""Products that are not checked again: what is kept with a weight, and when it is not used."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import sys
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import dispatch, explain, use_backend
from dsv4.layers import Linear
from dsv4.ops import _again, gemm, gemm_swiglu, quantize


@pytest.fixture
def kept(monkeypatch):
    """As on a GPU; calls that the reference ran."""
    monkeypatch.setattr(_again, "_is_worth_it", lambda x: True)
    ran = []
    right = dispatch._load(dispatch.implementations("gemm")[-1].target)

    def counted(*args):
        ran.append(len(args))
        return right(*args)

    load = dispatch._load.__wrapped__
    rows = dispatch.implementations("gemm")
    own = rows[-1].target
    monkeypatch.setattr(dispatch, "_load", lambda t: counted if t == own else load(t))
    return ran


def operands(tokens=3, rows=32, columns=64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    weight = quantize(torch.randn(rows, columns, generator=draw), "nvfp4", scaling="tensor")
    return torch.randn(tokens, columns, generator=draw).bfloat16(), weight


def unchecked(monkeypatch):
    """From now on a checked product fails."""

    def fail(*args, **options):
        raise AssertionError("checked")

    monkeypatch.setattr(sys.modules["dsv4.ops.gemm"], "check_product", fail)


@given(
    tokens=st.integers(0, 5),
    activation=st.sampled_from(["bf16", "nvfp4"]),
    out_dtype=st.sampled_from([None, torch.float32]),
    more=st.booleans(),
)
def test_the_second_product_is_the_first(tokens, activation, out_dtype, more):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_again, "_is_worth_it", lambda x: True)
        x, weight = operands(tokens)
        x = x.unsqueeze(0) if more else x
        options = {"activation": activation, "out_dtype": out_dtype}
        first = gemm(x, weight, **options)
        unchecked(monkeypatch)
        second = gemm(x, weight, **options)
    assert second.dtype == first.dtype
    assert second.shape == first.shape
    assert torch.equal(second, first)


def test_nothing_is_kept_on_the_cpu():
    x, weight = operands()
    gemm(x, weight)
    assert _again._NAME not in vars(weight)


@pytest.mark.parametrize(
    "other",
    [
        {"x": lambda x: torch.cat((x, x))},
        {"x": lambda x: x.float()},
        {"x": lambda x: x[:, ::2].contiguous().repeat(1, 2)[:, ::1].t().contiguous().t()},
        {"out_dtype": torch.float32},
        {"activation": "nvfp4"},
        {"backend": "reference"},
        {"input_scale": torch.ones(1), "activation": "nvfp4"},
    ],
    ids=["tokens", "dtype", "strides", "out_dtype", "activation", "backend", "input_scale"],
)
def test_another_product_is_checked(kept, monkeypatch, other):
    x, weight = operands()
    gemm(x, weight)
    options = {name: value for name, value in other.items() if name != "x"}
    changed = other.get("x", lambda x: x)(x)
    wanted = gemm(changed, weight, **options, backend="reference") if "backend" not in other else 0
    unchecked(monkeypatch)
    with pytest.raises(AssertionError, match="checked"):
        gemm(changed, weight, **options)
    assert wanted is not None


def test_bad_operands_are_refused_whatever_is_kept(kept):
    x, weight = operands()
    gemm(x, weight)
    with pytest.raises(ValueError, match="x has 32 columns, wanted 64"):
        gemm(x[:, :32].contiguous(), weight)
    with pytest.raises(ValueError, match="groups is 3"):
        gemm(x, weight, groups=3)
    with pytest.raises(TypeError, match="weight is Tensor"):
        gemm(x, x)


def test_a_choice_by_name_is_heard(kept, monkeypatch):
    x, weight = operands()
    gemm(x, weight)
    with pytest.raises(NotImplementedError, match="layout 'linear'"), use_backend("cute"):
        gemm(x, weight)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "nobody")
    with pytest.raises(ValueError, match="backend is 'nobody'"):
        gemm(x, weight)
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE)
    assert explain(gemm, x, weight).chosen == "reference"
    assert len(kept) == 1


def test_the_fused_product_likewise(monkeypatch):
    monkeypatch.setattr(_again, "_is_worth_it", lambda x: True)
    x, weight = operands()
    first = gemm_swiglu(x, weight, 10.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dsv4.ops.gemm_swiglu"], "check_product", None)
        assert torch.equal(gemm_swiglu(x, weight, 10.0), first)
        with pytest.raises(TypeError, match="not callable"):
            gemm_swiglu(x, weight, 7.0)
    with pytest.raises(ValueError, match="limit is -1"):
        gemm_swiglu(x, weight, -1.0)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_whoever_watches_sees_the_operator(kept):
    x, weight = operands()
    wanted = gemm(x, weight)
    with Seen() as seen:
        gemm(x, weight)
    assert "dsv4.gemm.default" in seen.names
    with torch.autograd.profiler.profile() as profile:
        gemm(x, weight)
    assert "dsv4::gemm" in {event.name for event in profile.function_events}
    assert gemm(x.to("meta"), weight.to("meta")).is_meta
    compiled = torch.compile(lambda x: gemm(x, weight), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), wanted)


def test_a_weight_that_wants_a_gradient_is_not_passed_by(kept):
    x, weight = operands()
    assert not gemm(x, weight).requires_grad
    assert not gemm(x, weight).requires_grad
    weight.global_scale.requires_grad_()
    with Seen() as seen, torch.inference_mode():
        gemm(x, weight)
    assert gemm(x, weight).requires_grad == gemm(x, copy.copy(weight)).requires_grad
    assert seen.names


class Wrapped(torch.Tensor):
    """Codes of a class of their own, which sees the operator."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_codes_of_another_class_are_not_passed_by(kept):
    x, weight = operands()
    weight = dataclasses.replace(weight, codes=weight.codes.as_subclass(Wrapped))
    gemm(x, weight)
    assert _again._NAME not in vars(weight)


def test_what_is_kept_stays_with_the_weight_and_is_bounded(kept):
    x, weight = operands()
    for tokens in range(2 * _again._MOST):
        gemm(x[:1].expand(tokens, -1).contiguous(), weight)
    assert 0 < len(vars(weight)[_again._NAME]) <= _again._MOST
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for other in (copy.copy(weight), copy.deepcopy(weight), saved):
        assert _again._NAME not in vars(other)
        assert torch.equal(gemm(x, other), gemm(x, weight))


class TestLayer:
    def make(self):
        x, weight = operands()
        layer = Linear(64, 32)
        layer.set_weight(weight)
        return layer, x

    def test_its_weight_is_one_value(self, kept, monkeypatch):
        layer, x = self.make()
        first = layer(x)
        unchecked(monkeypatch)
        assert torch.equal(layer(x), first)

    def test_another_weight_is_another_value(self, kept):
        layer, x = self.make()
        layer(x)
        _, other = operands(seed=1)
        layer.set_weight(other)
        assert torch.equal(layer(x), gemm(x, other))
        layer.weight = torch.nn.Parameter(torch.zeros_like(other.codes), requires_grad=False)
        assert not layer(x).any()

    def test_old_tensors_are_let_go(self, kept):
        layer, x = self.make()
        layer(x)
        old = weakref.ref(layer.weight)
        layer.set_weight(operands(seed=1)[1])
        gc.collect()
        assert old() is None

    def test_moving_lets_go(self, kept):
        layer, x = self.make()
        layer(x)
        layer.to("cpu")
        assert "_kept" not in vars(layer)

    def test_copies_are_apart(self, kept):
        layer, x = self.make()
        wanted = layer(x)
        other = copy.deepcopy(layer)
        layer.weight.data.zero_()
        assert torch.equal(other(x), wanted)
        assert not layer(x).any()


@pytest.mark.gpu
def test_a_weight_elsewhere_is_refused():
    x, weight = operands()
    on_gpu = weight.to("cuda")
    gemm(x.cuda(), on_gpu)
    assert vars(on_gpu)[_again._NAME]
    with pytest.raises(ValueError, match="different devices"):
        gemm(x, on_gpu)
    on_gpu.codes.data, on_gpu.scales.data = on_gpu.codes.cpu(), on_gpu.scales.cpu()
    with pytest.raises(ValueError, match="different devices"):
        gemm(x.cuda(), on_gpu)
