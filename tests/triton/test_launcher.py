"""Own launches of Triton kernels: as Triton's, with mock drivers here and on a GPU."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4.triton
from dsv4 import dispatch
from dsv4.bench.cases import MAKERS
from dsv4.bench.problem import Draw, Outputs, Problem
from tests._tools import forked
from tests.ops.test_captured_operators import WIDE, assert_same

pytest.importorskip("triton")
from dsv4.ops import _plans
from dsv4.triton._runtime.launcher import integer_class, parameter_sizes, scalar_class

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def test_launches_are_tritons_own() -> None:
    done = forked.run_module("tests._tools.launch_differential", "300" if NIGHTLY else "40")
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout)
    assert counts["ours"] > counts["triton's"] > 0
    assert counts["specialisations"] > 20


@pytest.mark.slow
def test_a_decode_step_is_launched_by_ourselves() -> None:
    """No kernel of a step is one that only Triton can launch, and no call does more than it must.

    Python calls are counted, which time on a busy machine is not: a layer made 3900 of them, and
    1536 with plans of operators alone.
    """
    done = forked.run_module("tests._tools.host_time", "--layers", "5", "--count")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "is launched by Triton" not in done.stderr
    result = json.loads(done.stdout)
    assert result["by_triton"] == 0
    assert set(result["plans"]) == {"Replay"}, "an operator is not planned"
    assert result["layer_plans"] == {"Replay": 5}, "a layer is not replayed"
    assert result["calls_per_layer"] < 600


def test_tritons_launcher_is_made_when_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 compiles C for each: 16 s of a start went there."""
    import triton

    from dsv4.triton._runtime import kernel_store

    made, launched = [], []

    class Driver:
        def launcher_cls(self, source: Any, metadata: Any) -> Any:
            made.append((source, metadata))
            return lambda *args: launched.append(args)

    class Kernel:
        module, run = None, None

        def _init_handles(self) -> None:
            self.run = triton.runtime.driver.active.launcher_cls("source", "metadata")
            self.module = 1

    driver = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    kernel: Any = Kernel()
    for _ in range(2):
        kernel_store.load(kernel)
    assert (kernel.module, made, vars(driver)) == (1, [], {})
    for i in range(3):
        kernel.run(i)
    assert made == [("source", "metadata")]
    assert launched == [(0,), (1,), (2,)]


def test_every_kernel_that_is_launched_is_launched_fast() -> None:
    """A launch that a tape did not see would be missing when the tape is replayed."""
    launched, fast = set(), set()
    for path in Path(dsv4.triton.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
            if isinstance(node, ast.FunctionDef):
                decorators = list(map(ast.unparse, node.decorator_list))
                fast |= {node.name} if "fast_launch" in decorators else set()
    assert launched - fast == {"self.kernel"}
    assert fast <= launched


def test_classes_of_scalars() -> None:
    alike = [(3, 5), (16, 48), (0, -16), (2**31, 2**40), (1.0, -0.0)]
    unlike = [(1, 3), (3, 16), (16, 2**32), (2**32 + 1, 2**63 + 1), (1, True), (1, 1.0), (0, None),
             (True, False), (0, 0.0)]  # fmt: skip
    assert all(scalar_class(a) == scalar_class(b) for a, b in alike)
    assert all(scalar_class(a) != scalar_class(b) for a, b in unlike)
    assert integer_class.cache_info().maxsize is not None


def test_parameter_sizes() -> None:
    ptx = """
.visible .entry _a_kernel(
	.param .u64 .ptr .global .align 16 _a_kernel_param_0,
	.param .u32 _a_kernel_param_1,
	.param .f32 _a_kernel_param_2,
	.param .u8 _a_kernel_param_3,
	.param .b64 _a_kernel_param_4
)
.reqntid 128
"""
    assert parameter_sizes(ptx) == [8, 4, 4, 1, 8]
    assert parameter_sizes(".visible .entry k()\n{") == []
    with pytest.raises(ValueError, match="parameter"):
        parameter_sizes(".entry k(\n .param .align 64 .b8 k_param_0[128]\n)")
    with pytest.raises(ValueError, match="no entry"):
        parameter_sizes(".func k()")


def by_triton(problem: Problem) -> Outputs:
    """Return the problem's result when Triton launches every kernel, and nothing is planned."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda self, *a, **k: run(self, *a, **k))
        patch.setattr(_plans, "PLANNED_DEVICES", frozenset())
        return problem.fresh().run()


def has_triton(problem: Problem) -> bool:
    result = dispatch.explain(problem.function, *problem.args, **problem.kwargs)
    return result.chosen == "triton"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("op", MAKERS)
def test_own_launches_give_the_bits_of_tritons(op: str, tokens: int) -> None:
    """Eagerly, the first time and replayed, and in a captured graph."""
    device = torch.device("cuda")
    cases = [c for c in MAKERS[op](WIDE, tokens) if has_triton(c.build(Draw(0, device)))]
    if not cases:
        pytest.skip("no case of it runs a Triton kernel here")
    for case in cases:
        for seed in range(4):
            problem = case.build(Draw(seed, device))
            expected = by_triton(problem)
            assert_same(problem.fresh().run(), expected, f"{op} {case.name}: call {seed}")
        held = problem.fresh()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outputs = held.run()
        graph.replay()
        assert_same(outputs, expected, f"{op} {case.name}: in a graph")


@pytest.mark.gpu
def test_plans_of_a_gpu_are_replayed() -> None:
    from dsv4.ops import rms_norm

    _plans.PLANS.forget()
    x = torch.randn(3, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(4):
        rms_norm(x, None)
    plans = [p for result in _plans.PLANS._plans.values() for p in result]
    assert any(isinstance(plan.again, _plans.Replay) for plan in plans)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        result = rms_norm(x, None)
    stream.synchronize()
    assert torch.equal(result, rms_norm.__wrapped__(x, None))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_gpu_need_not_be_that_of_the_tensors() -> None:
    from dsv4.ops import rms_norm

    for device in (1, 0, 1):
        x = torch.randn(3, 4096, device=f"cuda:{device}", dtype=torch.bfloat16)
        for current in (0, 1):
            with torch.cuda.device(current):
                assert torch.equal(rms_norm(x, None), rms_norm.__wrapped__(x, None))
