"""The plan cache: a repeated call gives what the function gives, for tensors that are alike."""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import struct
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import dispatch, explain, ops, use_backend
from dsv4.bench.cases import MAKERS
from dsv4.bench.problem import Draw
from dsv4.device import interpret_triton
from dsv4.ops import _guards, _library, _plans
from dsv4.plans import recorder as _recorder
from dsv4.plans import tape as _tape
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.strategies import strided
from tests.ops.test_captured_operators import CPU, WIDE, assert_follows, assert_same, called_again

REPLAYED = (
    *("rms_norm", "head_norm_rope_", "rope", "hc_post", "hc_pre_norm", "moe_sort", "moe_combine"),
    *("hc_combine_post", "hc_combine_post_pre_norm"),
    *("window_slots", "norm_rope_write_kv", "compress_write", "route_topk", "rms_norm_quantize"),
    *(
        "head_norm_rope_write_kv",
        "compressor_projections",
        "mark_nonfinite_",
        "verify_greedy",
        "verify_sampled",
        "draw_draft",
        "expert_decide",
    ),
)


@contextlib.contextmanager
def planning() -> Iterator[_plans.PlanCache]:
    """Calls with CPU tensors are planned as on a GPU, in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plans, "PLANNED_DEVICES", frozenset({"cpu"}))
        patch.setattr(_plans, "PLANS", _plans.PlanCache())
        yield _plans.PLANS


def plans_of(cache: _plans.PlanCache) -> list[_plans.Plan]:
    return [plan for plans in cache._plans.values() for plan in plans]


def kinds(cache: _plans.PlanCache) -> set[str]:
    return {type(plan.again).__name__ for plan in plans_of(cache) if plan.again is not None}


def normal(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# What these run depends on the group's mailboxes, not on arguments alone.
UNPLANNED = {"all_reduce", "hc_reduce_post", "hc_reduce_post_pre_norm", "moe_return", "moe_send"}


def test_every_public_operator_is_planned() -> None:
    for name in set(ops.__all__) - UNPLANNED:
        function = getattr(ops, name)
        if callable(function) and function.__module__.startswith("dsv4.ops."):
            assert hasattr(function, "__wrapped__"), name


@pytest.mark.parametrize("op", MAKERS)
def test_repeated_calls_follow_their_inputs(op: str) -> None:
    """Every operator runs by the reference as without plans, bit for bit, with other tensors."""
    for case in MAKERS[op](WIDE, 5):
        with planning():
            assert_follows(case, CPU, called_again)


@pytest.mark.parametrize("op", REPLAYED)
def test_replayed_launches_are_the_function(op: str, monkeypatch) -> None:
    """Kernels in Triton's interpreter: launches and allocations of one call, with other tensors.

    Values are not checked, as on a GPU: a plan that checks them calls the implementation.
    """
    monkeypatch.setattr(_library.Operation, "check_values", lambda self, args: None)
    sorting = importlib.import_module("dsv4.triton.moe_sort")
    monkeypatch.setattr(sorting, "check_ids", lambda *_: None)
    with planning() as cache, interpret_triton():
        case = next(c for c in MAKERS[op](WIDE, 3) if chooses_triton(c))
        for seed in range(4):
            problem = case.build(Draw(seed, CPU))
            actual = problem.fresh().run()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_plans, "PLANNED_DEVICES", frozenset())
                expected = problem.fresh().run()
            assert_same(actual, expected, f"{op}, call {seed}")
        assert "Interpreted" in kinds(cache), "nothing was replayed"


def chooses_triton(case) -> bool:
    problem = case.build(Draw(0, CPU))
    return explain(problem.function, *problem.args, **problem.kwargs).chosen == "triton"


# Tensors of one shape whose metadata differ otherwise, by what has to tell them apart.
ALIKE = {
    "as it is": lambda x: x,
    "of another seed": lambda x: x.flip(0).contiguous(),
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "transposed": lambda x: x.t().contiguous().t(),
    "rows apart": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "4 bytes on": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "12 bytes on": lambda x: torch.cat((x.new_zeros(3), x.flatten()))[3:].view(x.shape),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "wants a gradient": lambda x: x.clone().requires_grad_(),
    "negated view": lambda x: torch._neg_view(-x),
    "another size": lambda x: x[:-1],
    "without rows": lambda x: x[:0],
}


@given(
    st.lists(st.tuples(st.sampled_from(sorted(ALIKE)), st.sampled_from([1e-6, 0.0, -0.0, 1e-2]),
                       st.booleans(), st.sampled_from(["grad", "no_grad", "inference"])),
             min_size=2, max_size=12)
)  # fmt: skip
@example([("as it is", 1e-6, True, "grad")] * 3 + [("wants a gradient", 1e-6, True, "grad")] * 3)
@example([("as it is", 0.0, False, "grad")] * 3 + [("negated view", 0.0, False, "grad")] * 3)
@example([("as it is", 0.0, False, "inference")] * 3 + [("4 bytes on", 0.0, False, "grad")] * 3)
def test_whatever_came_before_a_call_is_the_function(calls) -> None:
    """Same implementation, same bits, for any sequence of metadata."""
    x, weight = normal(0, 3, 64), normal(1, 64)
    modes = {
        "grad": contextlib.nullcontext,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
    }
    with planning(), logged() as ran:
        for how, eps, weighted, mode in calls:
            with modes[mode]():
                variant = ALIKE[how](x)
                of_row = weight.to(variant.dtype) if weighted else None
                ran.clear()
                actual = ops.rms_norm(variant, of_row, eps)
                by = list(ran)
                ran.clear()
                expected = ops.rms_norm.__wrapped__(variant, of_row, eps)
                assert by == ran == ["rms_norm reference"]
                assert actual.requires_grad == expected.requires_grad
                assert torch.equal(actual, expected)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Operators and implementations that ran, planned or not."""
    ran: list[str] = []
    load = dispatch.load
    names = {row.target: f"{row.op} {row.name}" for row in dispatch.IMPLEMENTATIONS}

    def logging(target: str):
        function = load(target)

        def call(*args, **kwargs):
            ran.append(names[target])
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "load", logging)
        yield ran


def warm(function, *args, **kwargs):
    for _ in range(3):
        result = function(*args, **kwargs)
    return result


@given(st.data())
def test_bad_arguments_raise_as_ever(data) -> None:
    """An error in one argument of a planned call has the same words."""
    x, weight = normal(0, 3, 64), normal(1, 64)
    wrong = data.draw(
        st.sampled_from(
            [
                (x, weight[:32]),
                (x.long(), weight),
                (x, weight.to("meta")),
                (x[0, 0], weight),
                (x, weight.long()),
            ]
        )
    )
    with planning():
        warm(ops.rms_norm, x, weight)
        with pytest.raises((TypeError, ValueError)) as expected:
            ops.rms_norm.__wrapped__(*wrong)
        for _ in range(3):
            with pytest.raises(expected.type) as actual:
                ops.rms_norm(*wrong)
            assert str(actual.value) == str(expected.value)


def test_values_on_the_cpu_are_checked_each_time() -> None:
    x, rows = normal(0, 4, 8), torch.arange(8, dtype=torch.int32).view(4, 2)
    with planning():
        warm(ops.moe_gather, x, rows)
        with pytest.raises(IndexError, match="wanted from 0 on, below 8"):
            ops.moe_gather(x, rows + 1)
        weight = ops.quantize(normal(0, 32, 64), "nvfp4", scaling="tensor")
        scale = torch.ones(1)
        warm(ops.gemm, normal(1, 3, 64), weight, activation="nvfp4", input_scale=scale)
        with pytest.raises(ValueError, match="input_scale"):
            ops.gemm(normal(1, 3, 64), weight, activation="nvfp4", input_scale=-scale)


def test_a_choice_by_name_is_heard(monkeypatch) -> None:
    x = normal(0, 3, 64)
    with planning(), logged() as ran:
        warm(ops.rms_norm, x)
        with pytest.raises(NotImplementedError), use_backend("triton"):
            ops.rms_norm(x)
        with pytest.raises(NotImplementedError):
            ops.rms_norm(x, backend="triton")
        monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "nobody")
        with pytest.raises(ValueError, match="backend is 'nobody'"):
            ops.rms_norm(x)
        monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE)
        assert explain(ops.rms_norm, x).chosen == "reference"
        with interpret_triton():
            assert explain(ops.rms_norm, x).chosen == "triton"
            ran.clear()
            ops.rms_norm(x)
            assert ran == ["rms_norm triton"]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A class of its own, which sees operators."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_who_watches_sees_the_operator() -> None:
    x, weight = normal(0, 3, 64), normal(1, 64)
    quantized = ops.quantize(normal(2, 32, 64), "nvfp4", scaling="tensor")
    with planning():
        expected, product = warm(ops.rms_norm, x, weight), warm(ops.gemm, x, quantized)
        with Seen() as seen:
            ops.rms_norm(x, weight)
            ops.gemm(x, quantized)
        assert {"dsv4.rms_norm.default", "dsv4.gemm.default"} <= set(seen.names)
        with torch.autograd.profiler.profile() as profile:
            ops.rms_norm(x, weight)
        assert "dsv4::rms_norm" in {event.name for event in profile.function_events}
        assert ops.rms_norm(x.to("meta"), weight.to("meta")).is_meta
        compiled = torch.compile(lambda x: ops.rms_norm(x, weight), fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)
        other = replace(quantized, codes=quantized.codes.as_subclass(Wrapped))
        assert torch.equal(warm(ops.gemm, x, other), product)


def test_of_the_fallback_guards_the_same(monkeypatch) -> None:
    monkeypatch.setattr(_guards, "_compiled", lambda tensors: None)
    test_whatever_came_before_a_call_is_the_function.hypothesis.inner_test(
        [(how, eps, True, mode) for mode in ("grad", "inference") for how in sorted(ALIKE)
         for eps in (0.0, 0.0, 0.0)]
    )  # fmt: skip
    test_who_watches_sees_the_operator()


METADATA = [lambda x: x, lambda x: x.half(), lambda x: x[:, ::2], lambda x: x[:1]]


@pytest.mark.parametrize("make", [_guards._compiled, _guards._interpreted])
def test_guards_tell_metadata_apart(make) -> None:
    x = normal(0, 3, 64)
    is_like = make([x, x.double()])
    assert is_like is not None
    assert is_like(x + 1, x.double())
    for other in ALIKE:
        same = other in ("as it is", "of another seed", "4 bytes on", "12 bytes on")
        assert is_like(ALIKE[other](x), x.double()) == same, other
    assert not is_like(x, x)
    assert not is_like(x.to("meta"), x.double())


def test_a_tensor_given_twice_and_then_two() -> None:
    x = normal(0, 3, 64)
    with planning():
        warm(ops.rope, x, x[:, :32], x[:, :32])
        warm(ops.rope, x, cos := x[:, :32], cos)
        other = normal(1, 3, 64)[:, :32]
        result = ops.rope(x, x[:, :32], other)
        assert torch.equal(result, ops.rope.__wrapped__(x, x[:, :32], other))


def test_equal_values_of_other_types_and_signs_are_apart() -> None:
    names = [(1, 1.0), (0.0, -0.0), (True, 1)]
    x = normal(0, 2, 4)
    for first, other in names:
        keys = []
        for value in (first, other):
            arguments = _plans.Arguments(None, (x, value))
            keys.append((type(value), *arguments.constants((x, value))))
        assert repr(keys[0]) != repr(keys[1])
        assert keys[0] != keys[1] or hash(keys[0]) != hash(keys[1])


@pytest.mark.parametrize("value", [[1], (1, [2]), (torch.zeros(2),), {}, object()])
def test_arguments_of_other_types_are_not_planned(value) -> None:
    @_plans.planned
    def norm(x: torch.Tensor, other: object) -> torch.Tensor:
        return ops.rms_norm(x)

    with planning() as cache:
        x = normal(0, 3, 64)
        assert torch.equal(warm(norm, x, value), ops.rms_norm(x))
        assert {plan_of[0].function.__name__ for plan_of in cache._plans} == {"rms_norm"}


def test_the_cache_is_bounded() -> None:
    with planning() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_plans, "_MOST", 20)
        for rows in range(1, 60):
            ops.rms_norm(normal(0, rows, 8))
        for stride in range(8, 60):
            ops.rms_norm(torch.zeros(3, stride)[:, :8])
        assert 0 < len(cache._plans) <= 20
        assert all(len(plans) <= _plans._MOST_OF_KEY for plans in cache._plans.values())
        cache.forget()
        assert not cache._plans
        assert not cache._arguments


@pytest.mark.parametrize("how", ["4 bytes on", "12 bytes on"])
def test_alignment_has_plans_of_its_own(how: str) -> None:
    x = normal(0, 3, 64)
    with planning() as cache:
        warm(ops.rms_norm, x)
        warm(ops.rms_norm, ALIKE[how](x))
        first, second = plans_of(cache)
        assert {str(first.remainders), str(second.remainders)} == {"0", f"[{how.split()[0]}]"}


def test_only_plain_tensors_are_planned() -> None:
    x = normal(0, 3, 64)
    with planning() as cache:
        for how in ("wants a gradient", "negated view"):
            warm(ops.rms_norm, ALIKE[how](x))
        warm(ops.rms_norm, x.to("meta"))
        warm(ops.rms_norm, x.as_subclass(Wrapped))
        assert not plans_of(cache)
        with torch.no_grad():
            warm(ops.rms_norm, ALIKE["wants a gradient"](x))
        assert len(plans_of(cache)) == 1


def test_views_are_found_again() -> None:
    """Parts of arguments and of memory, where they begin, in every dtype."""
    x = normal(0, 4, 8)
    recorder = _recorder.Recorder([x], lambda name, args: None)
    with recorder.watching():
        made = torch.empty(6, 16, dtype=torch.uint8)
        views = [x[1:], x[2:, 4:], x[3].view(torch.int32), made[2:4], made[1].view(torch.float32)]
        views += [x.flatten()[5:].view(3, 9).t(), made.unflatten(1, (4, 4))[2, 1:]]
    other, buffer = normal(1, 4, 8), torch.arange(96, dtype=torch.uint8).view(6, 16)
    made.copy_(buffer)
    x.copy_(other)
    for view in views:
        again = recorder.view(view)([other, buffer])
        assert again.dtype == view.dtype
        assert again.stride() == view.stride()
        assert_bitwise(again.contiguous(), view.contiguous())


@pytest.mark.parametrize("shape", [(1,), (9,), (3, 5)])
@pytest.mark.parametrize("which", ["positions", "frequencies", "both"])
def test_copies_of_strided_arguments_are_made_again(
    shape: tuple[int, ...], which: str, monkeypatch
) -> None:
    """torch calls ``contiguous`` a view below autograd, also where it copies."""
    monkeypatch.setattr(_library.Operation, "check_values", lambda self, args: None)
    drawn = torch.Generator().manual_seed(0)
    with planning() as cache, interpret_triton():
        for _ in range(4):
            positions = torch.randint(0, 2**20, shape, generator=drawn)
            frequencies = torch.rand(32, generator=drawn)
            expected = ops.rope_tables.__wrapped__(positions, frequencies, backend="triton")
            given_positions = positions if which == "frequencies" else strided(positions)
            given_frequencies = frequencies if which == "positions" else strided(frequencies)
            actual = ops.rope_tables(given_positions, given_frequencies)
            for table, expected_tensor in zip(actual, expected, strict=True):
                assert_bitwise(table, expected_tensor)
        copies = which != "positions" or len(shape) > 1 or shape[0] > 1
        assert kinds(cache) == {"Direct" if copies else "Interpreted"}


def test_plans_keep_no_tensors() -> None:
    with planning():
        x = normal(0, 3, 64)
        warm(ops.rms_norm, x)
        with interpret_triton():
            warm(ops.rms_norm, x)
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("inside", [True, False])
def test_a_recording_keeps_no_temporary_tensors(inside: bool) -> None:
    """Work that only torch can repeat, such as a reference implementation, takes no more memory."""
    x = normal(0, 3)

    def chain() -> torch.Tensor:
        actual, before = x, weakref.ref(x)
        for _ in range(4):
            actual = actual + 1
            assert before() is None or before() is x
            before = weakref.ref(actual)
            actual = actual.neg()
        return actual

    recorder = _recorder.Recorder([x], lambda name, args: chain())
    with recorder.watching():
        if inside:
            expected = torch.ops.dsv4.rms_norm.default
            recorder.__torch_dispatch__(expected, (), (x, x, 1e-6))
        else:
            chain()
    assert (recorder.outside is None) == inside
    assert recorder.inside is not None


def test_threads_have_calls_of_their_own() -> None:
    inputs = [normal(seed, 3, 64) for seed in range(4)]
    expected = [ops.rms_norm.__wrapped__(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(100):
            if not torch.equal(ops.rms_norm(inputs[i]), expected[i]):
                wrong.append(i)

    with planning():
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_what_reads_or_changes_values_is_not_repeated() -> None:
    """A function that does more with tensors than allocate and view them runs each time."""
    count, checked = [], []

    @_plans.planned
    def of_positive(x: torch.Tensor) -> torch.Tensor:
        checked.append(bool((x > 0).all()))
        return ops.rms_norm(x)

    @_plans.planned
    def doubled(x: torch.Tensor) -> torch.Tensor:
        count.append(1)
        return ops.rms_norm(2 * x)

    with planning() as cache:
        x = normal(0, 3, 64)
        for seed in range(4):
            x = normal(seed, 3, 64)
            assert torch.equal(doubled(x), ops.rms_norm.__wrapped__(2 * x))
            of_positive(x.abs() + 1 if seed % 2 else x)
        assert len(count) == 4
        assert checked == [False, True, False, True]
        assert sum(plan.is_final and plan.again is None for plan in plans_of(cache)) == 2


def test_nothing_is_planned_on_the_cpu() -> None:
    before = len(_plans.PLANS._plans)
    warm(ops.rms_norm, normal(0, 5, 7 * 11))
    assert len(_plans.PLANS._plans) == before
    assert math.isfinite(before)


def test_a_kernel_that_the_recorder_does_not_know_rules_out_a_replay() -> None:
    """A tape without it would leave its launch out."""
    seen, tensors = [], [normal(0, 3, 64)]

    def record(run) -> _recorder.Recorder:
        recorder = _recorder.Recorder(tensors, lambda name, args: None)
        with recorder.watching():
            run(torch.empty_like(tensors[0]))
        return recorder

    def unseen(out: torch.Tensor) -> None:
        _recorder.current_recorder().driver_launched()

    def noted(out: torch.Tensor) -> None:
        recorder = _recorder.current_recorder()
        with recorder.noting(lambda stream, addresses: seen.append(addresses), (out, None)):
            recorder.driver_launched()

    def of_others(out: torch.Tensor) -> None:
        recorder = _recorder.current_recorder()
        with recorder.noting(lambda stream, addresses: None, (out + 1,)):
            recorder.driver_launched()

    assert _tape.tape_of(record(unseen), None) is None
    assert _tape.tape_of(record(of_others), None) is None
    recorder = record(noted)
    tape = _tape.tape_of(recorder, (tensors[0], recorder.allocated[0]))
    first, second = tape([other := normal(1, 3, 64)], [other.data_ptr()], 0)
    assert first is other
    assert seen == [[second.data_ptr(), 0]] or seen == [(second.data_ptr(), 0)]


def test_driver_launches_tell_the_recorder(monkeypatch) -> None:
    from dsv4.cute.runtime import driver as cuda_driver
    from tests.cute.test_launch import Driver

    monkeypatch.setattr(Driver, "cuLaunchKernelEx", lambda *args: 0)
    monkeypatch.setattr(cuda_driver, "_driver", Driver)
    kinds = cuda_driver.Parameters("q")
    kernel = cuda_driver.Kernel(cuda_driver.Image(b"code", "name", 32, 1, 0))
    launch = cuda_driver.Launch(kernel, 1, kinds, b"", struct.Struct("@q"), b"")
    recorder = _recorder.Recorder([normal(0, 3)], lambda name, args: None)
    with recorder.watching():
        launch(0, (0,))
    assert recorder.inside is not None


def test_views_around_an_operator_are_made_again() -> None:
    """Products of inputs with more axes: the same implementation, of the same matrix of tokens."""
    weight = ops.quantize(normal(0, 32, 64), "nvfp4", scaling="tensor")
    with planning() as cache, logged() as ran:
        for seed in range(4):
            x = normal(seed, 2, 3, 64, dtype=torch.bfloat16)
            result = ops.gemm(x, weight)
            assert torch.equal(result, ops.gemm.__wrapped__(x, weight))
        assert kinds(cache) == {"Direct"}
        assert set(ran) == {"gemm reference"}


def test_results_go_where_they_are_asked_to() -> None:
    """``out`` of operators that take it, one tensor after another, and without one."""
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    weight, rows = normal(0, 2, 8, 16), torch.arange(10, dtype=torch.int32).view(5, 2)
    with planning() as cache:
        for seed in range(5):
            x = normal(seed, 5, 16)
            out, gathered = torch.full((5, 8), math.nan), torch.full((10, 16), math.nan)
            assert ops.grouped_gemm(x, weight, offsets, out=out) is out
            assert torch.equal(out, ops.grouped_gemm(x, weight, offsets))
            assert torch.equal(out, ops.grouped_gemm.__wrapped__(x, weight, offsets))
            assert ops.moe_gather(x, rows, out=gathered) is gathered
            assert torch.equal(gathered, ops.moe_gather.__wrapped__(x, rows))
        assert kinds(cache) == {"Direct"}
        with pytest.raises(ValueError, match="out has shape"):
            ops.grouped_gemm(x, weight, offsets, out=out[:4])
        moved = torch.empty(41)[1:].view(5, 8)
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            ops.grouped_gemm(x, weight, offsets, out=moved)
