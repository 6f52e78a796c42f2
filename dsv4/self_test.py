"""Test kernels once, family by family, before ``"auto"`` takes them on a GPU where none ever ran.

A family is an operator and an implementation of it. On a GPU where the family was never seen right
(``dispatch.Implementation.proven``) its first use runs small cases (``Implementation.self_test``)
and compares them with the reference. A family that is wrong is named in an error that is logged
once, and passed over. Verdicts are kept on disk like those of ``dsv4.self_check``, which instead
checks each configuration of a kernel on the user's own operands.

A test runs in a thread of its own, so that no mode, stream or recorder of the caller takes part;
in the caller's where that runs a check already, which holds the lock of verdicts.
While a CUDA graph is captured no test can run: the family is passed over with that reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch

from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE
from dsv4.device import capability
from dsv4.self_check import Configuration, gpu, is_capturing, is_checking, verdicts

MEASURED, RUN = "measured", "run"
COMPILED, NEVER = "compiled and interpreted", "compiled for no such GPU"
# Takes operator, implementation and device; says what is wrong, or None.
Test = Callable[[str, str, torch.device], str | None]
_OPERANDS = "the self-test's"
_BEFORE_CAPTURE = (
    "it never ran on such a GPU, and its self-test cannot run while a CUDA graph is captured; "
    "call it once before, or run python -m dsv4 env --selftest"
)
_under_test: ContextVar[tuple[Configuration, ...]] = ContextVar("dsv4_under_test", default=())


class Unfinished(Exception):  # noqa: N818  (no error of the kernel)
    """A self-test that could not come to a verdict; the text says why."""


def family(op: str, name: str, device: torch.device) -> Configuration:
    """Return what a verdict is about."""
    return Configuration(op, name, _OPERANDS, gpu(device))


def is_under_test(op: str, name: str, device: torch.device) -> bool:
    """Return whether this thread is testing a family, whose kernels then run unseen."""
    return family(op, name, device) in _under_test.get()


def unsupported(op: str, name: str, device: torch.device, test: Test) -> str | None:
    """Return why a family is not used on a GPU, or None; its first use tests it.

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
        return None  # a GPU that is pretended, on which nothing runs
    if is_capturing(device):
        return _BEFORE_CAPTURE
    if is_checking() or _under_test.get():  # another thread would wait for this one's lock
        return _verdict(tested, device, test)
    return _in_a_thread(lambda: _verdict(tested, device, test))


def retested(op: str, name: str, device: torch.device, test: Test, *, keep: bool) -> str | None:
    """Test a family, whatever was found before; what is wrong, or None.

    Args:
        op: The operator.
        name: Name of the implementation.
        device: The GPU.
        test: Runs the cases.
        keep: Whether what is found is the family's verdict from now on.
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
    """Let this thread run the kernels of a family unseen."""
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
    """Return what a function returns, or raise what it raises, in another thread."""
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
        subject: What a verdict of this GPU would be about; None: there is none.
        compute: Compute capability of the GPU.
    """
    if subject is not None and verdicts().look_up(subject, "unknown") is None:
        return RUN
    return COMPILED if compute in EVERY_ARCHITECTURE else NEVER


def mark_of_gpu(device: torch.device) -> str:
    """Return how well kernels are known on GPUs of a compute capability."""
    return MEASURED if capability(device) == (9, 0) else mark(None, capability(device))
