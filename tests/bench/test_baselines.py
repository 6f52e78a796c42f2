"""Baselines of the bench: listed without their libraries, prepared on copies, compiled by name."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dsv4 import dispatch, ops
from dsv4.bench import baselines
from dsv4.bench.baselines import (
    _prepare,
    flash_mla,
    fp8,
    inductor,
    liger,
    packed,
    plain,
    tile_kernels,
    torchao,
)
from dsv4.bench.cases import MAKERS, cases
from dsv4.bench.problem import Draw, Problem
from dsv4.ops.norm import RmsNormArgs

CPU = torch.device("cpu")
LIBRARIES = (liger, packed, tile_kernels, torchao, flash_mla)
# Their reference reads values on a CPU to check them, so it is no single graph there.
READS_VALUES = ("route_hash",)


def _problem(op: str, tokens: int = 5) -> Problem:
    return cases(op, "tiny", tokens)[0].build(Draw(0, CPU))


def _norm(*args: torch.Tensor) -> Problem:
    return Problem(ops.rms_norm, args, {"eps": 1e-6}, lambda *_: pytest.fail("judged"), 0)


@pytest.mark.slow
def test_importing_the_baselines_imports_no_library():
    code = """
import sys
import dsv4.bench.baselines
names = ("triton", "liger_kernel", "torchao", "tile_kernels", "tilelang", "torch._inductor")
names += ("quack", "humming", "cutlass")
print([name for name in names if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_baselines_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(baselines, "BASELINES", {})
    asked = []

    def of(name: str, call):
        return lambda problem: asked.append(name) or call

    baselines.register("rope", "quick")(of("quick", lambda: 1))
    baselines.register("rope", "unable")(of("unable", None))
    baselines.register("rope", baselines.SLOW[0])(of("slow", lambda: 2))
    problem = _problem("rope")
    assert {
        name: call() for name, call in baselines.prepare_baselines("rope", problem).items()
    } == {"quick": 1}
    assert asked == ["quick", "unable"]
    chosen = baselines.prepare_baselines("rope", problem, ("inductor", "unable", "unknown"))
    assert {name: call() for name, call in chosen.items()} == {"inductor": 2}
    assert baselines.prepare_baselines("swiglu", problem) == {}


@pytest.mark.parametrize("asked", ["Quick (no norm)", "quick", "QUICK"])
def test_a_baseline_is_named_without_its_note_too(asked: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(baselines, "BASELINES", {})
    for name in ("Quick (no norm)", "Quick (in place)", "Quicker"):
        baselines.register("rope", name)(lambda problem: lambda: 1)
    chosen = list(baselines.prepare_baselines("rope", _problem("rope"), (asked,)))
    exact = asked == "Quick (no norm)"
    assert chosen == (["Quick (no norm)"] if exact else ["Quick (no norm)", "Quick (in place)"])


@pytest.mark.parametrize("op", sorted(MAKERS))
def test_without_libraries_and_gpu_only_pytorch_is_left(op: str):
    problem = _problem(op)
    able = baselines.prepare_baselines(op, problem)
    own = {fp8.OWN} if problem.args and fp8.takes_fp8(problem) else set()
    assert set(able) == own | set(plain.BASELINES.get(op, {}))
    for call in able.values():
        call()


def test_names_do_not_collide():
    tables = [source.BASELINES for source in (plain, inductor, fp8, *LIBRARIES)]
    for op, known in baselines.BASELINES.items():
        assert len(known) == sum(len(table.get(op, {})) for table in tables)
        # The command line separates names with commas.
        assert not any("," in name for name in known)


@pytest.mark.parametrize("source", LIBRARIES, ids=lambda source: source.__name__.split(".")[-1])
def test_libraries_take_the_arguments_of_the_schema(source):
    for op, known in source.BASELINES.items():
        for baseline in known.values():
            assert list(inspect.signature(baseline.prepare).parameters) == ["library", "args"], op


def test_a_library_is_asked_on_its_device_alone(monkeypatch: pytest.MonkeyPatch):
    asked = []
    library = SimpleNamespace(double=lambda x: 2 * x)
    monkeypatch.setattr(_prepare, "_imported", lambda name: asked.append(name) or library)
    baseline = _prepare.FromLibrary("library", lambda library, args: lambda: library.double(args.x))
    x = torch.ones(2, 4)
    assert baseline(_norm(x, None)) is None
    assert asked == []
    call = dispatch.Call("rms_norm", RmsNormArgs(x, None, 1e-6), torch.device("cuda"))
    monkeypatch.setattr(_prepare, "captured", lambda problem: call)
    prepared = baseline(_norm(x, None))
    assert prepared is not None
    assert torch.equal(prepared(), 2 * x)
    assert asked == ["library"]


@pytest.mark.parametrize("error", [NotImplementedError, AssertionError, TypeError, ValueError])
@pytest.mark.parametrize("late", [False, True])
def test_what_is_refused_is_no_baseline(error: type[Exception], late: bool, caplog):
    def run():
        raise error("a shape of mine")

    caplog.set_level("INFO")
    assert _prepare.attempt(lambda: run if late else run(), "library: op") is None
    assert f"library: op: {error.__name__}: a shape of mine" in caplog.text


def test_an_error_of_a_baseline_is_not_a_refusal():
    def run():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        _prepare.attempt(lambda: run, "")


def test_a_missing_library_is_said(caplog):
    caplog.set_level("INFO")
    assert _prepare._imported("dsv4.no_such_module") is None
    assert "dsv4.no_such_module" in caplog.text


def test_arguments_are_captured_with_copies_of_what_changes():
    problem = _problem("write_kv")
    call = _prepare.captured(problem)
    assert call.op == "write_kv"
    pages = problem.args[0].data
    copied = call.args[0]
    assert torch.equal(copied.view(torch.uint8), pages.view(torch.uint8))
    assert copied.data_ptr() != pages.data_ptr()


def test_products_have_no_compiled_reference():
    named = {op for op, known in baselines.BASELINES.items() if inductor.NAME in known}
    assert named == set(dispatch.operators()) - set(inductor.GEMMS)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "write_kv", "moe_permute", "hc_post"])
def test_a_compiled_reference_gives_what_the_operator_gives(op: str):
    problem = _problem(op)
    call = inductor.of_reference("aot_eager")(problem)
    assert call is not None
    before = problem.fresh()
    results = call()
    assert all(
        torch.equal(a, b)
        for i in problem.mutates
        for a, b in [(problem.args[i].data, before.args[i].data)]
    ), "changed the problem's own inputs"
    if problem.mutates:
        return
    results = results if isinstance(results, tuple) else (results,)
    for actual, expected in zip(results, problem.run("reference"), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.slow
def test_sizes_without_end_are_compiled():
    # Past PyTorch's own limit of 8 a function is compiled no more.
    baseline = inductor.of_reference("aot_eager")
    for tokens in range(1, 20):
        assert baseline(_norm(torch.randn(tokens, 8), None)) is not None


def test_what_cannot_be_compiled_is_no_baseline():
    for op in READS_VALUES:
        assert inductor.of_reference("aot_eager")(_problem(op)) is None


def test_equal_sizes_are_compiled_once():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def double(x):
        return 2 * x

    for _ in range(3):
        assert inductor.compiled(double, (torch.ones(3),), backend)().eq(2).all()
    assert len(compiled) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_inductor_itself(tmp_path, monkeypatch):
    """With a folder of its own: by default all processes of a user share what is compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    problem = _problem("swiglu")
    with baselines.reasons() as reasons:
        able = baselines.prepare_baselines("swiglu", problem, ("inductor",))
    assert set(able) == {"inductor"}, reasons
    assert any(tmp_path.iterdir()), "compiled elsewhere"
    torch.testing.assert_close(able["inductor"](), problem.run("reference")[0])


def _case(name: str, tokens: int = 5) -> Problem:
    (case,) = (case for case in cases("gemm", "tiny", tokens) if case.name == name)
    return case.build(Draw(0, CPU))


def _multiplier(log: list, wrong: float = 0.0):
    """A stand-in for a library that multiplies with packed weights."""

    def make(library, weight):
        log.append(weight)
        dense = ops.dequantize(weight, torch.bfloat16) * (1 + wrong)
        return lambda x: x @ dense.T

    return packed._checked(make)


def test_packed_baselines_get_the_weight_once_in_rows_with_one_scale():
    log: list = []
    prepare, library = _multiplier(log), SimpleNamespace(__name__="fake")
    for tokens in (5, 9, 3):
        problem = _case("q_a+kv", tokens)
        result = prepare(library, _prepare.captured(problem).args)()
        assert result.shape == problem.run("reference")[0].shape
    (weight,) = log
    assert weight.layout == "linear"
    assert weight.segments == ()
    torch.testing.assert_close(weight.global_scale, problem.args[1].global_scale[:1])


def test_a_wrong_packed_baseline_is_left_out(caplog):
    prepare, library = _multiplier([], wrong=0.05), SimpleNamespace(__name__="other")
    args = _prepare.captured(_case("q_a+kv")).args
    assert _prepare.attempt(lambda: prepare(library, args), "") is None
    assert "other" in caplog.text
    assert "left out" in caplog.text


@pytest.mark.parametrize("name", ["q_a+kv w4a4", "o_a", "q_b fp8"])
def test_packed_baselines_refuse_what_they_do_not_do(name: str):
    prepare, library = _multiplier([]), SimpleNamespace(__name__="fake")
    with pytest.raises(ValueError, match=r"to torch\.bfloat16"):
        prepare(library, _prepare.captured(_case(name)).args)


@pytest.mark.parametrize("name", ["q_a+kv", "o_a", "q_b fp8", "gate_up w4a4"])
def test_cublas_multiplies_the_dequantised_weight(name: str):
    problem = _case(name)
    result = packed._cublas(torch, _prepare.captured(problem).args)()
    truth = problem.run("reference")[0]
    result = result.transpose(0, 1) if result.dim() == 3 else result
    error = float((result.double() - truth.double()).norm() / truth.double().norm())
    assert error < (0.2 if name.endswith("w4a4") else 0.01)


def test_what_is_made_of_a_weight_goes_with_it():
    codes, made = torch.ones(3), []
    for _ in range(2):
        assert packed.once(codes, "x", lambda: made.append(1) or 7) == 7
    assert made == [1]
    assert codes in packed._made
    held = len(packed._made)
    del codes
    assert len(packed._made) == held - 1
