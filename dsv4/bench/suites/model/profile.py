"""Kernels of a captured step: their sum, and what each operator takes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.bench.suites.model.operators import operator_of

_REPLAYS = 5


class NoKernelsError(RuntimeError):
    """The profiler recorded nothing."""


@dataclass(frozen=True)
class Launch:
    """One kernel that ran: its name and microseconds."""

    kernel: str
    us: float


@dataclass(frozen=True)
class OperatorTime:
    """Kernels of one operator in a step.

    Attributes:
        operator: A name of ``dsv4.bench.suites.model.operators``.
        ms: Sum over its kernels.
        launches: How many.
        kernels: Their names, the longest in sum first.
    """

    operator: str
    ms: float
    launches: float
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """Kernels of a step; those on several streams overlap, so the sum can exceed the step.

    Attributes:
        ms: Sum over all kernels.
        launches: How many.
        operators: The longest first.
    """

    ms: float
    launches: float
    operators: tuple[OperatorTime, ...]

    @classmethod
    def of(cls, launches: Sequence[Launch], steps: int) -> Profile:
        """Averages over some equal steps."""
        by_operator: dict[str, dict[str, list[float]]] = {}
        for launch in launches:
            kernels = by_operator.setdefault(operator_of(launch.kernel), {})
            kernels.setdefault(launch.kernel, []).append(launch.us)
        operators = []
        for operator, kernels in by_operator.items():
            names = sorted(kernels, key=lambda name: -sum(kernels[name]))
            us = sum(map(sum, kernels.values()))
            count = sum(map(len, kernels.values()))
            operators.append(OperatorTime(operator, 1e-3 * us / steps, count / steps, tuple(names)))
        operators.sort(key=lambda operator: -operator.ms)
        total = 1e-3 * sum(launch.us for launch in launches) / steps
        return cls(total, len(launches) / steps, tuple(operators))


def profile_replays(replay: Callable[[], Any]) -> Profile:
    """Profile some replays of a captured step.

    Raises:
        NoKernelsError: if the profiler cannot record kernels here.
    """

    def run() -> None:
        for _ in range(_REPLAYS):
            replay()

    launches = recorded(run)
    if not launches:
        raise NoKernelsError("torch.profiler recorded no kernels: CUPTI is not available")
    return Profile.of(launches, _REPLAYS)


def recorded(run: Callable[[], Any]) -> list[Launch]:
    """Kernels that ran on the GPU within a call."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    return [Launch(event.name, float(event.device_time)) for event in events]
