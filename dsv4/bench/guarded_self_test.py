"""The self-test in other processes: families compile side by side, and a crash fails one alone.

A kernel that reads outside of its memory takes the whole CUDA context with it, and one that hangs
its process. So each family that was wrong, crashed or hung ends its process, and the next one gets
a new process.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from dsv4 import dispatch, self_test
from dsv4.bench.child import Child, FailedError, KilledError
from dsv4.bench.self_test import TOKENS, Tested, tested
from dsv4.self_check import verdicts

_MOST_WORKERS = 8
# Bytes of a GPU for a process: a context takes 0.5 to 1 GB, the cases' tensors less.
_BYTES_OF_WORKER = 3 << 30
# Seconds for a family, most of which are compilation. The slowest family takes 18 s alone on a fast
# CPU. On a slow CPU, with other families at the same time, it takes several times as long.
_SECONDS = 900.0


@dataclass(frozen=True)
class Tester:
    """The part that runs in a process.

    Attributes:
        device: Where the kernels run.
        tokens: Numbers of tokens.
    """

    device: torch.device
    tokens: tuple[int, ...] = TOKENS

    def test(self, op: str, name: str) -> Tested | None:
        """Test a family; None: the device supports no case of it."""
        return tested(op, name, self.device, self.tokens, keep=False)


@dataclass(frozen=True)
class Making:
    """Makes a ``Tester``, in its process."""

    device: torch.device

    def __call__(self) -> Tester:
        """Make it."""
        return Tester(self.device)


def run_guarded(
    device: torch.device,
    make: Callable[[], Any] | None = None,
    *,
    families: Sequence[dispatch.Implementation] | None = None,
    workers: int | None = None,
    seconds: float = _SECONDS,
) -> Iterator[Tested]:
    """Test all kernels that a device supports, as ``run_all`` does, in other processes.

    Args:
        device: Where they run.
        make: Makes the object whose method ``test`` does it; None: a ``Tester``.
        families: What to test; None: every row that has to be seen right.
        workers: Number of processes; None: by the CPUs and the free memory of the GPU.
        seconds: Time limit of a family.
    """
    rows = _rows() if families is None else families
    count = _workers(device) if workers is None else workers
    children = [Child(Making(device) if make is None else make) for _ in range(count)]
    idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
    for child in children:
        idle.put(child)

    def test(row: dispatch.Implementation) -> Tested | None:
        child = idle.get()
        try:
            return _asked(child, row, seconds)
        finally:
            idle.put(child)

    with ThreadPoolExecutor(count) as executor:
        futures = [executor.submit(test, row) for row in rows]
        try:
            for row, future in zip(rows, futures, strict=True):
                result = future.result()
                if result is not None:
                    _keep(row, result, device)
                    yield result
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.stop()  # ends the calls that still wait
    for child in children:
        child.end()


def _rows() -> list[dispatch.Implementation]:
    operators = dispatch.operators()
    return [r for op in operators for r in dispatch.implementations(op) if r.proven is not None]


def _asked(child: Child, row: dispatch.Implementation, seconds: float) -> Tested | None:
    """Test a family in a process, which ends if the family is wrong."""
    try:
        result = child.call("test", row.op, row.name, seconds=seconds)
    except KilledError as error:
        why = f"its test {error}, as a host ends processes when its memory is full"
        return Tested(row.op, row.name, None, why, 0.0)
    except FailedError as error:
        return Tested(row.op, row.name, f"its test {error}", None, 0.0)
    if result is not None and result.wrong is not None:
        child.end()  # its context may be lost
    return result


def _keep(row: dispatch.Implementation, result: Tested, device: torch.device) -> None:
    """Make a result the verdict on a family that is tested before its first use."""
    if row.self_test is not None and result.untested is None:
        verdicts().replace(self_test.family(row.op, row.name, device), result.wrong)


def _workers(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)), free // _BYTES_OF_WORKER))
