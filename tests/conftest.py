"""Hypothesis profiles, the device fixture, and the marker for tests that need a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from dsv4 import dispatch
from dsv4.device import interpret_triton
from tests._tools import quick_interpreter
from tests._tools.snapshots import Snapshots

# Collecting makes a million objects and no garbage: looking for it took a quarter of the time.
# ``pytest_collection_finish`` enables it again.
gc.disable()

_HAS_GPU = torch.cuda.is_available()
_GPUS = torch.cuda.device_count() if _HAS_GPU else 0
# Compute capability, 90 say, for which what the interpreter would run is compiled instead, and its
# PTX run on the CPU by tests/_tools/ptx/grid.py.
_COMPILED = os.environ.get("DSV4_TESTS_COMPILED")
if not _HAS_GPU and not _COMPILED:
    # Before any kernel is imported: it decides whether kernels are compiled or interpreted.
    os.environ["TRITON_INTERPRET"] = "1"

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        # A method that several places parametrise runs on an instance of its class for each.
        HealthCheck.differing_executors,
    ],
}
settings.register_profile("dev", max_examples=25, **_COMMON)
settings.register_profile("ci", max_examples=50, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=1000, **_COMMON)
# For ``make quick``, which runs each test with one set of parameters; see ``_once``. Tests that set
# their own number of examples get no more than these.
_QUICK_EXAMPLES = 4
settings.register_profile(
    "quick", max_examples=_QUICK_EXAMPLES, derandomize=True, database=None, **_COMMON
)
# For tests._tools.mutants: a failure is expected, its smallest form is not needed.
settings.register_profile(
    "mutants",
    max_examples=25,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    **_COMMON,
)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
settings.load_profile(_PROFILE)
# Those that are run most and watch no mutant do without what the markers in pyproject.toml name.
_REDUCED = _PROFILE in ("dev", "ci", "quick")


# Of the examples a profile asks for, how many the interpreter gets: it is a hundred times slower. A
# module whose kernels take seconds there sets its own ``INTERPRETED_SHARE``.
_INTERPRETED_SHARE = 12 if _REDUCED else 6


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update``: see ``tests/_tools/snapshots.py``."""
    parser.addoption(
        "--update",
        action="store_true",
        help="record what snapshots find, instead of comparing it with what they have",
    )


@pytest.fixture
def snapshots(request: pytest.FixtureRequest) -> Snapshots:
    """Recorded figures of the module of a test."""
    return Snapshots(request.path, update=request.config.getoption("--update"), complete=_REDUCED)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    if _COMPILED:
        from tests._tools import run_compiled

        run_compiled.install(int(_COMPILED))
    elif not _HAS_GPU:
        quick_interpreter.install()


def _interpreted(item: pytest.Item) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return str(params.get("device", "")).startswith("cpu-")


def _share(item: pytest.Function) -> int:
    """One of how many examples a test gets; see the markers in pyproject.toml."""
    share = 1
    if _interpreted(item):
        share = getattr(item.module, "INTERPRETED_SHARE", _INTERPRETED_SHARE)
    if _REDUCED:
        costly = item.get_closest_marker("costly")
        share *= costly.args[0] if costly else 1
        share *= 2 if item.get_closest_marker("slow") else 1
    return share


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Fewer examples where each takes long, and in ``make quick``; the explicit ones all run."""
    test = getattr(item, "obj", None)
    chosen = getattr(test, "_hypothesis_internal_use_settings", None)
    most = 0 if chosen is None else max(1, chosen.max_examples // _share(item))
    if _PROFILE == "quick":
        most = min(most, _QUICK_EXAMPLES)
    if chosen is None or most == chosen.max_examples:
        return (yield)
    function = getattr(test, "__func__", test)
    function._hypothesis_internal_use_settings = settings(chosen, max_examples=most)
    try:
        return (yield)
    finally:
        function._hypothesis_internal_use_settings = chosen


def _once(items: list[pytest.Item]) -> list[pytest.Item]:
    """Choose one set of parameters of each test for each device, the middle one; no slow tests.

    Nor operators in the interpreter, which takes most of the time of all tests; ``tests/triton``
    has what is of the kernels alone.
    """
    variants: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        of_operator = _interpreted(item) and not item.nodeid.startswith("tests/triton/")
        if not of_operator and not {"slow", "nightly"} & set(item.keywords):
            params = getattr(getattr(item, "callspec", None), "params", {})
            test = item.nodeid.partition("[")[0]
            variants.setdefault((test, str(params.get("device", ""))), []).append(item)
    return [same[len(same) // 2] for same in variants.values()]


def _need_gpus(items: list[pytest.Item]) -> None:
    """Mark the tests of several GPUs as tests of a GPU, and skip what this machine cannot run."""
    alone = pytest.mark.skip(reason="needs a CUDA GPU; this machine has none")
    several = pytest.mark.skip(reason=f"needs two CUDA GPUs; this machine has {_GPUS}")
    for item in items:
        if "multi_gpu" in item.keywords:
            item.add_marker(pytest.mark.gpu)
            if _GPUS == 1:
                item.add_marker(several)
        if "gpu" in item.keywords and not _HAS_GPU:
            item.add_marker(alone)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _PROFILE == "quick":
        chosen = _once(items)
        others = set(items) - set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = chosen
    # Modules with slow tests first, so that all workers end with quick tests, which they can share.
    # Whole modules, because a fixture of a module would be made once more for each of its parts.
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: ("first" not in item.keywords, item.path not in slow))
    if _REDUCED:
        rare = pytest.mark.skip(reason="takes long; runs in the nightly profile")
        for item in items:
            interpreted = "rarely_interpreted" in item.keywords and _interpreted(item)
            if interpreted or "nightly" in item.keywords:
                item.add_marker(rare)
    _need_gpus(items)
    if _HAS_GPU:
        return
    wrong = None if _COMPILED else quick_interpreter.departures()
    if wrong:
        other = pytest.mark.skip(reason=f"Triton's interpreter is too old: {wrong}")
        for item in filter(_interpreted, items):
            item.add_marker(other)


def pytest_collection_finish() -> None:
    """A million objects stay until the end: no garbage collection looks at them again."""
    gc.freeze()
    # Compilers and models make objects by the thousand: as often as by default costs 1.5 % more.
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``device``; in a module that sets ``KERNELS``, once per implementation.

    A module that sets ``REFERENCE = False`` tests kernels alone.

    ``"cpu"``: the reference. ``"cpu-triton"``: what has a Triton kernel runs it in Triton's
    interpreter. ``"cuda"``: what dispatch chooses, or the reference in a module with ``KERNELS``.
    ``"cuda-triton"``: what dispatch chooses.
    """
    if "device" not in metafunc.fixturenames:
        return
    names = ["cpu", "cuda"] if getattr(metafunc.module, "REFERENCE", True) else []
    for kernel in getattr(metafunc.module, "KERNELS", ()):
        names += [f"cpu-{kernel}", f"cuda-{kernel}"]
    marks = [[pytest.mark.gpu] if name.startswith("cuda") else [] for name in names]
    params = [pytest.param(n, marks=m) for n, m in zip(names, marks, strict=True)]
    metafunc.parametrize("device", params, indirect=True)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory of new tensors is NaN, or all ones."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(64, dtype=torch.float8_e4m3fn).float().isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.fixture
def wide(request: pytest.FixtureRequest) -> torch.dtype:
    """The widest dtype of the implementation that a test is for: kernels compute no float64.

    Of float64 inputs dispatch chooses the reference, whatever ``device`` is.
    """
    kernel = request.node.callspec.params["device"].endswith("-triton")
    return torch.float32 if kernel else torch.float64


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of an operator test and its implementation; see ``pytest_generate_tests``."""
    device_type, _, kernel = request.param.partition("-")
    if kernel and device_type == "cpu":
        pytest.importorskip("triton")
        if _HAS_GPU:
            pytest.skip("kernels are compiled in this process, not interpreted")
        with interpret_triton():
            yield torch.device(device_type)
    elif device_type == "cuda" and not kernel and hasattr(request.module, "KERNELS"):
        with dispatch.use_backend("reference"):
            yield torch.device(device_type)
    else:
        yield torch.device(device_type)
