"""Facts of this machine: capability and SMs of its GPUs, and installed packages.

``MACHINE`` caches each fact, and results that follow from facts alone (``cached``).
``MACHINE.forget`` clears these caches; ``pretend`` replaces facts for a while, for tests and for
lists of what another GPU would run.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

_MOST_CACHED = 1 << 16  # entries of a cache whose arguments are sizes
# KiB of shared memory that a CTA can have, by compute capability (CUDA C++ Programming Guide).
_SHARED_KIB = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
_MOST_LAUNCHES = 4096  # of a function
_HOPPER = (9, 0)
# TB/s within which the memory of a Hopper GPU can be; drivers report 0 where they do not know.
_LEAST_BANDWIDTH, _MOST_BANDWIDTH = 0.5, 20.0


@dataclass(frozen=True)
class Pretended:
    """Facts that replace those of the machine; None keeps one.

    Attributes:
        capability: Compute capability of every CUDA device.
        sms: SMs of every CUDA device.
        packages: Whether every package is installed.
        name: Name of every CUDA device; read where ``sms`` is pretended, too.
        bandwidth: Terabytes per second of every CUDA device's memory; read likewise.
        plans: Figures that plans of kernels are chosen by (``dsv4.cute.sm90.tuned.TunedData``).
    """

    capability: tuple[int, int] | None = None
    sms: int | None = None
    packages: bool | None = None
    name: str = ""
    bandwidth: float | None = None
    plans: Any = None


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that decide plans of kernels.

    Attributes:
        name: The name that CUDA reports, such as ``"NVIDIA H200"``.
        sms: Its SMs.
        bandwidth: Terabytes per second between its memory and its chip, by the memory's clock and
            width; None if the driver does not report them.
    """

    name: str
    sms: int
    bandwidth: float | None = None


@dataclass(eq=False)
class Machine:
    """Facts of this process, all of them cached.

    Attributes:
        pretended: Facts that hold in place of the machine's.
        caches: Caches of all functions whose results follow from facts.
    """

    pretended: Pretended = field(default_factory=Pretended)
    caches: list[Any] = field(default_factory=list)

    def cached(self, function: F, most: int = _MOST_CACHED) -> F:
        """Decorator: cache results, which may depend on facts, until ``forget``; ``most`` of them.

        Launches depend on facts, too, because they hold plans.
        """
        memo = functools.lru_cache(maxsize=most)(function)
        self.caches.append(memo)
        return memo  # type: ignore[return-value]

    def pretend(self, **facts: Any) -> None:
        """Replace facts from now on; see ``Pretended``."""
        self.pretended = replace(self.pretended, **facts)
        self.forget()

    def forget(self) -> None:
        """Clear all caches."""
        for cache in self.caches:
            cache.cache_clear()


MACHINE = Machine()
cached = MACHINE.cached


def launches(function: Callable[..., R]) -> Callable[..., R]:
    """Decorator of functions that return launches: ``cached``, with fewer entries."""
    return cached(function, _MOST_LAUNCHES)


@cached
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    pretended = MACHINE.pretended.capability
    return torch.cuda.get_device_capability(device) if pretended is None else pretended


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a CTA can have; of an unknown GPU the least of all known."""
    return 1024 * _SHARED_KIB.get(capability, min(_SHARED_KIB.values()))


@cached
def sms(device: torch.device) -> int:
    """SMs of a CUDA device; 1 of another device."""
    if device.type != "cuda":
        return 1
    pretended = MACHINE.pretended.sms
    if pretended is not None:
        return pretended
    return torch.cuda.get_device_properties(device).multi_processor_count


@cached
def hopper() -> Gpu | None:
    """Return the first GPU of this process that has compute capability 9.0, or None.

    Plans of kernels are chosen for it. Other Hopper GPUs of the process take the same plans.
    """
    facts = MACHINE.pretended
    if facts.capability is not None:
        known = facts.capability == _HOPPER and facts.sms is not None
        return Gpu(facts.name, facts.sms or 0, facts.bandwidth) if known else None
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = map(torch.cuda.get_device_properties, range(count))
        return next((gpu_of(p) for p in gpus if (p.major, p.minor) == _HOPPER), None)
    except RuntimeError:  # a fork of a process that uses CUDA cannot
        return None


def gpu_of(properties: Any) -> Gpu:
    """Return the facts of a GPU that ``torch.cuda.get_device_properties`` describes."""
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    terabytes = 2 * kilohertz * 1e3 * bits / 8 / 1e12  # two transfers a clock
    known = _LEAST_BANDWIDTH < terabytes < _MOST_BANDWIDTH
    bandwidth = terabytes if known else None
    return Gpu(properties.name, properties.multi_processor_count, bandwidth)


@cached
def has(package: str) -> bool:
    """Return whether a package is installed; it is not imported."""
    pretended = MACHINE.pretended.packages
    return importlib.util.find_spec(package) is not None if pretended is None else pretended


@contextmanager
def pretend(**facts: Any) -> Iterator[Callable[..., None]]:
    """Replace facts inside the block, in all threads.

    Args:
        **facts: Fields of ``Pretended``; others stay as they are.

    Yields:
        A function that replaces more facts, until the block ends.
    """
    before = MACHINE.pretended
    MACHINE.pretend(**facts)
    try:
        yield MACHINE.pretend
    finally:
        MACHINE.pretended = before
        MACHINE.forget()


_interpreting: ContextVar[bool] = ContextVar("dsv4_interpreting", default=False)
is_interpreting = _interpreting.get


@contextmanager
def interpret_triton() -> Iterator[None]:
    """Run Triton kernels on the CPU, in Triton's interpreter: for tests, very slow.

    The environment variable ``TRITON_INTERPRET=1`` has to be set before the first kernel is
    imported; without it the calls inside the block fail.
    """
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def no_triton(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device, or None."""
    if _interpreting.get() and device.type == "cpu" and has("triton"):
        return None
    return _no_triton(device)


@cached
def _no_triton(device: torch.device) -> str | None:
    if not has("triton"):
        return "the package triton is not installed"
    if device.type != "cuda":
        return f"Triton kernels run on a CUDA GPU, the tensors are on {device}"
    if capability(device) < (8, 0):
        return f"Triton kernels need compute capability 8.0 or newer, the GPU has {dotted(device)}"
    return None


def dotted(device: torch.device) -> str:
    """Compute capability of a CUDA device as text, e.g. ``"9.0"``."""
    major, minor = capability(device)
    return f"{major}.{minor}"
