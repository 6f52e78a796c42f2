"""Programs in forks are as programs in interpreters of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests._tools import forked


def test_a_program_has_its_arguments_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    source = "import os, sys; print(sys.argv, [os.environ.get(n) for n in {}])"
    for value in ("a", "b"):
        monkeypatch.setenv("DSV4_OF_A_TEST", value)
        done = forked.run_source(source.format(["TRITON_INTERPRET", "DSV4_OF_A_TEST"]), "x y")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"['-c', 'x y'] [None, '{value}']\n"


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("raise ValueError('why')", 1, "ValueError: why"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_a_program_that_fails_fails_alone(source: str, status: int, said: str) -> None:
    done = forked.run_source(source)
    assert done.returncode == status
    assert said in done.stderr
    assert forked.run_source("print(1)").stdout == "1\n"


def test_nothing_of_a_program_is_left_for_the_next() -> None:
    """Nor has a kernel been hashed, which its key could depend on, or torch been used on a GPU."""
    source = """
import sys, torch
from dsv4.triton.norm import _rms_norm_kernel as kernel
print(hasattr(torch, "_left"), kernel.kernel.hash, torch.cuda.is_initialized(), __name__)
print(any(name in sys.modules for name in ("tests._tools.compile_kernels", "tests.conftest")))
torch._left, kernel.kernel.hash = True, "a hash"
"""
    for _ in range(2):
        done = forked.run_source(source)
        assert done.stdout == "False None False __main__\nFalse\n", done.stderr
