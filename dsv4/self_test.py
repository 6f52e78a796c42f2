"""Test each family of kernels once before ``"auto"`` takes it on a GPU where it never ran.

A family is an operator and an implementation of it. If a GPU is not among those where the family
was seen right (``implementations.Implementation.proven``), the first use of the family runs small
cases (``Implementation.self_test``) and compares them with the reference. If the family is wrong,
an error that names it is logged once, and ``"auto"`` passes it over. Verdicts are stored on disk,
like those of ``dsv4.self_check``, which checks each configuration of a kernel on the user's
operands.

A test runs in its own thread, so that no mode, stream or recorder of the caller takes part. If the
caller already runs a check, the test runs in the caller's thread, which holds the lock of verdicts.
No test can run while a CUDA graph is captured: ``"auto"`` then passes the family over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch

from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE
from dsv4.device import capability
from dsv4.implementations import IMPLEMENTATIONS, Implementation, load
from dsv4.self_check import Configuration, gpu, is_capturing, is_checking, verdicts

MEASURED, RUN = "measured", "run"
COMPILED, NEVER = "compiled and interpreted", "compiled for no such GPU"
# Takes operator, implementation and device; returns the error that it found, or None.
Test = Callable[[str, str, torch.device], str | None]
_OPERANDS = "the self-test's"
_BEFORE_CAPTURE = (
    "the kernel never ran on such a GPU, and its self-test cannot run while a CUDA graph is "
    "captured; call it once before the capture, or run python -m dsv4 env --selftest"
)
_under_test: ContextVar[tuple[Configuration, ...]] = ContextVar("dsv4_under_test", default=())


class Unfinished(Exception):  # noqa: N818  (no error of the kernel)
    """A self-test that could not come to a verdict; the text says why."""


def family(op: str, name: str, device: torch.device) -> Configuration:
    """Return the configuration that a verdict has."""
    return Configuration(op, name, _OPERANDS, gpu(device))


def is_under_test(op: str, name: str, device: torch.device) -> bool:
    """Return whether this thread is testing a family; its kernels then run without a check."""
    return family(op, name, device) in _under_test.get()


def unsupported(op: str, name: str, device: torch.device, test: Test) -> str | None:
    """Return why a family is not used on a GPU, or None; the first call tests the family.

    Args:
        op: The operator.
        name: Name of the implementation.
        device: The GPU.
        test: Runs the cases.
    """
    tested = family(op, name, device)
    if tested in verdicts().known:
        return verdicts().known[tested]
    if tested in _under_test.get():
        return None
    if device.type == "cuda" and not torch.cuda.is_available():
        return None  # the GPU is emulated: nothing runs
    if is_capturing(device):
        return _BEFORE_CAPTURE
    if is_checking() or _under_test.get():  # this thread holds the lock: another one would wait
        return _verdict(tested, device, test)
    return _in_a_thread(lambda: _verdict(tested, device, test))


def retested(op: str, name: str, device: torch.device, test: Test, *, keep: bool) -> str | None:
    """Test a family again; return the error that the test found, or None.

    Args:
        op: The operator.
        name: Name of the implementation.
        device: The GPU.
        test: Runs the cases.
        keep: Whether the result becomes the verdict on the family.
    """
    tested = family(op, name, device)

    def run() -> str | None:
        with _testing(tested, device):
            reason = test(op, name, device)
        if keep:
            verdicts().replace(tested, reason)
        return reason

    return _in_a_thread(run)


@contextmanager
def _testing(tested: Configuration, device: torch.device) -> Iterator[None]:
    """Let this thread run the kernels of a family without a check."""
    token = _under_test.set((*_under_test.get(), tested))
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        _under_test.reset(token)


def _verdict(tested: Configuration, device: torch.device, test: Test) -> str | None:
    try:
        with _testing(tested, device):
            return verdicts().reason(tested, lambda: test(tested.op, tested.implementation, device))
    except Unfinished as reason:
        return str(reason)


def _in_a_thread(function: Callable[[], str | None]) -> str | None:
    """Call a function in another thread; return its result, or raise its error."""
    results: list[str | None] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="dsv4 self-test")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def mark(subject: Configuration | None, compute: tuple[int, int]) -> str:
    """Return how well a kernel is known on a GPU on which it was not measured.

    Args:
        subject: Configuration of a verdict on this GPU; None: there is no such GPU.
        compute: Compute capability of the GPU.
    """
    if subject is not None and verdicts().look_up(subject, "unknown") is None:
        return RUN
    return COMPILED if compute in EVERY_ARCHITECTURE else NEVER


def families(device: torch.device) -> list[Implementation]:
    """Return the rows whose self-test decides on a GPU, where they were never seen right."""
    return [
        row
        for row in IMPLEMENTATIONS
        if row.self_test is not None
        and not row.is_always_proven(capability(device))
        and (row.lacks is None or load(row.lacks)(device) is None)
    ]


def mark_of_gpu(device: torch.device) -> str:
    """Return how well the kernels are known on a GPU, or how many of its self-tests passed."""
    compute, tested = capability(device), families(device)
    if compute == (9, 0):
        return MEASURED
    marks = [mark(family(row.op, row.name, device), compute) for row in tested]
    passed = marks.count(RUN)
    if not passed:
        return mark(None, compute)
    return RUN if passed == len(marks) else f"{passed} of {len(marks)} {RUN}"
