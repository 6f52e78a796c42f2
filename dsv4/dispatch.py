"""Choose which implementation of an operator runs, and explain why.

An implementation is data: a row of ``dsv4.implementations``. ``"auto"`` takes the first row of the
operator, in table order, for which ``supports`` returns no reason against it and no later row is
faster. A name given explicitly, by ``backend=``, by ``use_backend`` or by the environment variable
``DSV4_BACKEND``, never falls back: that implementation runs or the call raises with the reason.
The functions that a row names are imported when they are first needed, so this module imports no
backend. If a row was never seen to be right on the GPU's architecture (``proven``), ``"auto"``
takes it only after a check on that GPU: a test of the family (``dsv4.self_test``) or of each
configuration (``dsv4.self_check``). A row requested by name runs without it, with a warning.

The choice looks at shapes, dtypes, devices and plain arguments, never at tensor contents, so it is
the same inside ``torch.compile`` and CUDA-graph capture.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from dsv4 import self_check, self_test
from dsv4.device import capability
from dsv4.implementations import AUTO as AUTO
from dsv4.implementations import IMPLEMENTATIONS as IMPLEMENTATIONS
from dsv4.implementations import Call as Call
from dsv4.implementations import Implementation as Implementation
from dsv4.implementations import load, reason_of

ENVIRONMENT_VARIABLE = "DSV4_BACKEND"


@dataclass(frozen=True)
class Explanation:
    """The result of ``explain``: every candidate in order, why it is not taken, and the choice.

    Attributes:
        op: Name of the operator.
        requested: Requested implementation, or ``"auto"``.
        chosen: Name of the implementation that would run.
        candidates: Names of all, and why each is not taken.
        note: What else to know of how the chosen one runs the call.
        mark: How well the chosen kernel is known on the GPU (``self_test.mark``); None if the
            implementation does not depend on the GPU.
        plans: Where the plans of the chosen kernel are from: the rule, a file of the package, or
            the file that ``python -m dsv4.bench tune`` wrote; None if it has none that are tuned.
    """

    op: str
    requested: str
    chosen: str | None
    candidates: tuple[tuple[str, str | None], ...]
    note: str | None = None
    mark: str | None = None
    plans: str | None = None

    @property
    def reason(self) -> str:
        """Return why ``chosen`` was taken, in one sentence."""
        if self.chosen is None:
            why = dict(self.candidates).get(self.requested)
            if why is not None:
                return f"{self.requested!r} cannot run it: {why}"
            refused = [f"{name}: {why}" for name, why in self.candidates if why]
            return f"nothing can run it: {'; '.join(refused)}"
        if self.requested != AUTO:
            return f"asked for by name ({self.requested!r})"
        refused = [f"{name}: {why}" for name, why in self.candidates if why and name != self.chosen]
        return "; ".join(refused) if refused else "first in the table that supports the call"

    def __str__(self) -> str:
        lines = [f"{self.op} (backend={self.requested!r})"]
        for name, why in self.candidates:
            mark = "->" if name == self.chosen else "  "
            lines.append(f"{mark} {name}: {'supported' if why is None else why}")
            if name == self.chosen:
                lines += [f"     {said}" for said in self._more() if said]
        return "\n".join(lines)

    def _more(self) -> tuple[str | None, ...]:
        return self.note, self.mark and f"on GPUs like this one: {self.mark}", self.plans


# The dictionary inside ``os.environ``, where Python has it, and the variable's name in it.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_VARIABLE: Any = ENVIRONMENT_VARIABLE
if _ENVIRONMENT is not os.environ:
    _VARIABLE = os.environ.encodekey(ENVIRONMENT_VARIABLE)
_override: ContextVar[str] = ContextVar("dsv4_backend", default=AUTO)
_explaining: ContextVar[bool] = ContextVar("dsv4_explaining", default=False)
# Gets every call of the thread with the row that runs it; see ``watching``.
Watcher = Callable[[Call, Implementation], None]
_watcher: ContextVar[Watcher | None] = ContextVar("dsv4_watcher", default=None)


class _Explained(Exception):  # noqa: N818  (control flow, not an error)
    def __init__(self, call: Call, requested: str) -> None:
        super().__init__(call.op)
        self.call = call
        self.requested = requested


@functools.cache
def implementations(op: str) -> tuple[Implementation, ...]:
    """Rows of one operator in the order in which ``"auto"`` tries them.

    Raises:
        KeyError: if no row has that operator.
    """
    rows = tuple(row for row in IMPLEMENTATIONS if row.op == op)
    if not rows:
        raise KeyError(f"no operator named {op!r}; known: {', '.join(operators())}")
    return rows


@functools.cache
def operators() -> tuple[str, ...]:
    """Names of all operators, in table order."""
    return tuple(dict.fromkeys(row.op for row in IMPLEMENTATIONS))


def requested_backend(backend: str = AUTO) -> str:
    """The name that decides: the argument, else ``use_backend``, else ``DSV4_BACKEND``."""
    if backend != AUTO:
        return backend
    override = _override.get()
    if override != AUTO:
        return override
    # A test for membership comes first: os.environ itself would raise and catch a KeyError.
    return os.environ[ENVIRONMENT_VARIABLE] if _VARIABLE in _ENVIRONMENT else AUTO


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Request an implementation by name for every operator called inside the block.

    An operator that has no such implementation, or whose implementation cannot run it, raises.
    """
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


@contextmanager
def watching(seen: Watcher) -> Iterator[None]:
    """Call ``seen`` before each operator call of this thread in the block, which no plan repeats.

    An operator that is made of others is seen first, then these.
    """
    token = _watcher.set(seen)
    try:
        yield
    finally:
        _watcher.reset(token)


def choose(call: Call, backend: str = AUTO) -> Implementation:
    """Pick the implementation that runs ``call``.

    Raises:
        ValueError: if ``backend`` names no implementation of the operator.
        NotImplementedError: if the named implementation, or every one, cannot run it; with the
            reasons.
    """
    return _first(call, requested_backend(backend))


def _first(call: Call, requested: str) -> Implementation:
    """Return the first row named ``requested`` that runs a call; see ``choose``."""
    reasons = []
    for row in implementations(call.op):
        if requested not in (AUTO, row.name):
            continue
        reason = None if row.supports is None else reason_of(row.supports)(call)
        if reason is None and row.slower_than_later is not None:
            reason = row.slower_reason(call, requested)
        if reason is None and row.proven is not None and not row.is_proven(call):
            reason = _unproven(row, call, requested)
        if reason is None and row.waits and self_check.is_capturing(call.device):
            reason = "it reads tensors on the host, so no CUDA graph can be captured of it"
        if reason is None:
            return row
        reasons.append(f"{row.name}: {reason}")
    if not reasons:
        raise _unknown(call.op, requested)
    raise NotImplementedError(f"{call.op}: " + "; ".join(reasons))


class UnknownBackendError(ValueError):
    """The name of an implementation that an operator does not have."""


def _unknown(op: str, requested: str) -> UnknownBackendError:
    """Return the error that names what an operator's ``backend`` may be."""
    known = ", ".join(row.name for row in implementations(op))
    return UnknownBackendError(f"{op}: backend is {requested!r}, wanted 'auto' or one of {known}")


def _unproven(row: Implementation, call: Call, requested: str) -> str | None:
    """Return why ``"auto"`` does not take a row on a GPU where it was never seen right, or None."""
    if call.is_meta or self_test.is_under_test(row.op, row.name, call.device):
        return None
    if requested != AUTO:
        _warn_unproven(row.op, row.name, call.capability)
        return None
    if row.self_test is not None:
        return self_test.unsupported(row.op, row.name, call.device, load(row.self_test))
    reference = implementations(row.op)[-1]
    return self_check.unsupported(
        row.op, row.name, call.args, load(row.target), load(reference.target)
    )


def _known_wrong(row: Implementation, call: Call, requested: str) -> str | None:
    """Return what an earlier check found wrong, or None; a check that is due is left to calls."""
    if row.is_proven(call) or requested != AUTO:
        return None
    if row.self_test is not None:
        return self_check.verdicts().look_up(_subject(row, call))
    return self_check.known(row.op, row.name, call.args)


def _subject(row: Implementation, call: Call) -> self_check.Configuration:
    """Return the configuration that a verdict on a row would have."""
    if row.self_test is not None:
        return self_test.family(row.op, row.name, call.device)
    operands = self_check.describe(call.args)
    return self_check.Configuration(row.op, row.name, operands, self_check.gpu(call.device))


def _mark(row: Implementation | None, call: Call) -> str | None:
    """Return how well a row's kernel is known on the GPU of a call; see ``self_test.mark``."""
    if row is None or row.proven is None or call.capability is None:
        return None
    if row.is_proven(call):
        return self_test.MEASURED
    return self_test.mark(None if call.is_meta else _subject(row, call), call.capability)


def self_tested(op: str, name: str, device: torch.device) -> str | None:
    """Run the self-test of a row if it is due; return why ``"auto"`` passes the row over, or None.

    The result is None if the row is right, is proven on such GPUs, or has no self-test.
    """
    row = next(row for row in implementations(op) if row.name == name)
    if row.self_test is None or row.is_always_proven(capability(device)):
        return None
    return self_test.unsupported(op, name, device, load(row.self_test))


@functools.cache
def _warn_unproven(op: str, name: str, capability: tuple[int, int] | None) -> None:
    version = "None" if capability is None else ".".join(map(str, capability))
    warnings.warn(
        f"{op}: the implementation {name!r} was never seen right on compute capability "
        f"{version}, and asked for by name it is not checked; backend='auto' checks it first",
        RuntimeWarning,
        stacklevel=2,
    )


def run(
    op: str,
    args: Any,
    backend: str = AUTO,
    out: torch.Tensor | None = None,
    reserve_sms: int = 0,
) -> Any:
    """Run an operator.

    Args:
        op: Name of the operator.
        args: The operator's arguments, see ``Call.args``.
        backend: Name of an implementation, or ``"auto"``.
        out: Takes the first result, for operators with ``_library.define_out``.
        reserve_sms: SMs to leave to work on other streams, if the implementation can.
    """
    call, requested = Call(op, args, args[0].device), backend
    if backend == AUTO and (_override.get() != AUTO or _VARIABLE in _ENVIRONMENT):
        requested = requested_backend()
    if _explaining.get():
        raise _Explained(call, requested)
    row = _first(call, requested)
    watcher = _watcher.get()
    if watcher is not None:
        watcher(call, row)
    implementation = load(row.target)
    if reserve_sms and row.reserves_sms:
        return implementation(args, reserve_sms=reserve_sms)
    return implementation(args) if out is None else implementation(args, out=out)


def is_free(backend: str) -> bool:
    """Return whether ``"auto"`` decides, and the call is to run, not to be explained or watched."""
    chosen = backend != AUTO or _override.get() != AUTO or _VARIABLE in _ENVIRONMENT
    return not (chosen or _explaining.get() or _watcher.get() is not None)


def implementation(op: str, args: Any) -> Callable[..., Any]:
    """Return the implementation that ``"auto"`` gives a call to; ``args`` as in ``Call``."""
    return load(choose(Call(op, args, args[0].device)).target)


def wait_of(call: Call) -> str | None:
    """Return why the implementation that ``"auto"`` takes waits for the host, or None."""
    explanation = _explanation(call, AUTO)
    row = next(row for row in implementations(call.op) if row.name == explanation.chosen)
    return f"{call.op} runs as {row.name!r} ({explanation.reason})" if row.waits else None


def first(op: str, args: Any) -> Any:
    """Run the implementation that ``"auto"`` takes, whatever was requested by name.

    For implementations that are made of other operators; ``args`` as in ``Call``.
    """
    call = Call(op, args, args[0].device)
    row, watcher = _first(call, AUTO), _watcher.get()
    if watcher is not None:
        watcher(call, row)
    return load(row.target)(args)


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say which implementation a call would run, and why not the others; run nothing.

    Args:
        op: A public function of ``dsv4.ops``, e.g. ``dsv4.ops.gemm``.
        *args: What it would be called with.
        **kwargs: Likewise.

    Raises:
        ValueError: if ``op`` calls no operator, or ``backend`` names no implementation of it.
    """
    caught = _caught(op, args, kwargs)
    if caught.requested not in (AUTO, *(row.name for row in implementations(caught.call.op))):
        raise _unknown(caught.call.op, caught.requested)
    return _explanation(caught.call, caught.requested)


def arguments(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Return the operator call that a public function would make; run nothing.

    Its ``args`` is what every implementation of the operator takes.

    Args:
        op: A public function of ``dsv4.ops``, e.g. ``dsv4.ops.gemm``.
        *args: What it would be called with.
        **kwargs: Likewise.

    Raises:
        ValueError: if ``op`` calls no operator.
    """
    return _caught(op, args, kwargs).call


def _caught(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Explained:
    token = _explaining.set(True)
    try:
        op(*args, **kwargs)
    except _Explained as explained:
        return explained
    finally:
        _explaining.reset(token)
    raise ValueError(f"{op!r} called no dsv4 operator")


def _explanation(call: Call, requested: str) -> Explanation:
    candidates = tuple(
        (row.name, row.unsupported_reason(call, requested) or _known_wrong(row, call, requested))
        for row in implementations(call.op)
    )
    able = [name for name, why in candidates if why is None and requested in (AUTO, name)]
    chosen = able[0] if able else None
    row = next((row for row in implementations(call.op) if row.name == chosen), None)
    note = None if row is None or row.note is None else reason_of(row.note)(call)
    plans = None if row is None or row.plans is None else reason_of(row.plans)(call)
    return Explanation(call.op, requested, chosen, candidates, note, _mark(row, call), plans)
