"""Functions for the baselines of all libraries: find one, get arguments, try a call."""

from __future__ import annotations

import importlib
import logging
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dsv4 import dispatch
from dsv4.bench.problem import Problem

Call = Callable[[], Any]
Baseline = Callable[[Problem], "Call | None"]
Table = dict[str, dict[str, Baseline]]

_log = logging.getLogger(__name__)
_reasons: ContextVar[list[str] | None] = ContextVar("reasons", default=None)
# How libraries say that they cannot do something: TileKernels by assertions, compilers by
# RuntimeError and its subclasses, bindings by TypeError and ValueError, a compiler that is missing
# or fails by OSError and SubprocessError.
_REFUSALS = (
    RuntimeError,
    AssertionError,
    TypeError,
    ValueError,
    AttributeError,
    ImportError,
    OSError,
    subprocess.SubprocessError,
)


@contextmanager
def reasons() -> Iterator[list[str]]:
    """Collects why baselines that are prepared inside cannot be timed."""
    collected: list[str] = []
    token = _reasons.set(collected)
    try:
        yield collected
    finally:
        _reasons.reset(token)


def refuse(reason: str) -> None:
    """Log a reason at level INFO, and give it to ``reasons``."""
    _log.info("%s", reason)
    collected = _reasons.get()
    if collected is not None:
        collected.append(reason)


def captured(problem: Problem) -> dispatch.Call:
    """The operator's arguments, with copies of its own of what it changes in place."""
    own = problem.fresh()
    return dispatch.arguments(own.function, *own.args, **own.kwargs)


@dataclass(frozen=True)
class FromLibrary:
    """A baseline out of a library of GPU kernels.

    Attributes:
        module: What ``prepare`` needs, imported when a problem on a CUDA device first asks.
        prepare: Takes the module and the operator's arguments; returns the call. It may
            raise what it cannot do, as may the first run of the call.
    """

    module: str
    prepare: Callable[..., Call]

    def __call__(self, problem: Problem) -> Call | None:
        """The prepared call, or None."""
        call = captured(problem)
        if call.device.type != "cuda":
            refuse(f"{self.module}: runs on a CUDA GPU, the tensors are on {call.device.type}")
            return None
        library = _imported(self.module)
        if library is None:
            return None
        return attempt(lambda: self.prepare(library, call.args), f"{self.module}: {call.op}")


def attempt(prepare: Callable[[], Call], what: str) -> Call | None:
    """The prepared call after a first run, which compiles it; None if either fails."""
    try:
        call = prepare()
        call()
    except _REFUSALS as refusal:
        refuse(f"{what}: {type(refusal).__name__}: {refusal}")
        return None
    return call


def _imported(module: str) -> Any | None:
    try:
        return importlib.import_module(module)
    except Exception as missing:  # whatever it is that another's library does not find
        refuse(f"{module}: {type(missing).__name__}: {missing}")
        return None
