"""Rules of imports between modules: no cycles, and nothing that a lower part does not need."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "tools" / "metrics.py"


@functools.cache
def _metrics():
    spec = importlib.util.spec_from_file_location("metrics", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_modules_import_each_other() -> None:
    """Imports for types alone are included."""
    assert _metrics().cycles() == []


@functools.cache
def _imports() -> dict[str, set[str]]:
    """Modules that each module imports, inside functions too; reading them all takes seconds."""
    return _metrics().imports(inside_functions=True)


def test_the_dispatcher_knows_no_backend() -> None:
    result = _imports()
    backends = ("dsv4.triton", "dsv4.blas", "dsv4.reference", "dsv4.cute.supports")
    assert [name for name in result["dsv4.dispatch"] if name.startswith(backends)] == []
    assert [name for name in result["dsv4.device"] if name.startswith("dsv4.")] == []


def test_supports_import_no_kernels() -> None:
    result = _imports()
    for backend in ("triton", "cute", "blas"):
        own = result[f"dsv4.{backend}.supports"]
        allowed = ("_plan", "plans", "supports", "architectures", "grouped_problem")
        kernels = [name for name in own if name.startswith(f"dsv4.{backend}.")]
        assert [name for name in kernels if not name.endswith(allowed)] == []
