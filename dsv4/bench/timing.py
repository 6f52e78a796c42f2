"""Time a call, in microseconds; always a median.

Timed runs follow one another (sustained), or each begins after a rest (cooled down). A GPU at its
power limit lowers its clock within milliseconds, so calls of milliseconds take longer sustained
than cooled down, on an H200 10 to 20 %. Every printed time says which of the two it is, and only
times of the same kind are compared.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
_WARM_UP_SECONDS = 0.005


@dataclass(frozen=True)
class Timing:
    """A measured time.

    Attributes:
        us: Median microseconds of one call.
        timer: ``"graph"`` (replays of a CUDA graph), ``"events"`` (eager launches between CUDA
            events) or ``"clock"`` (the host's clock, on a CPU).
        note: Why not a graph, where it is not.
    """

    us: float
    timer: str
    note: str = ""


def measure(calls: Sequence[Call], device: torch.device, repeat: int, rest: float = 0.0) -> Timing:
    """Time one call; ``calls`` are the same one on different inputs, one after another.

    Args:
        calls: At least one.
        device: Where they run.
        repeat: Timed runs over all of ``calls``.
        rest: Seconds of rest before each of these; 0: they follow one another.
    """
    if device.type == "cuda":
        return _on_gpu(calls, repeat, rest)
    for call in calls:
        call()
    times = []
    for _ in range(repeat):
        time.sleep(rest)
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return Timing(1e6 * statistics.median(times), "clock")


def empty_node_us(device: torch.device, repeat: int) -> float:
    """Measure an empty kernel in a CUDA graph of 64; 0 where there is no graph."""
    if device.type != "cuda":
        return 0.0
    from dsv4.bench._empty_kernel import launch

    with torch.cuda.device(device):
        return _on_gpu([launch] * 64, repeat).us


def _on_gpu(calls: Sequence[Call], repeat: int, rest: float = 0.0) -> Timing:
    """A graph of all calls, replayed with the L2 cleared before each replay.

    Every call has inputs of its own, so within a replay each finds them out of cache.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with warnings.catch_warnings(), torch.cuda.graph(graph):
            # Follows a failed capture, which the row tells already.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            for call in calls:
                call()
    except RuntimeError as error:
        # An implementation that waits for the device cannot be captured. Said in the row.
        torch.cuda.synchronize()
        note = f"not capturable: {str(error).splitlines()[0]}"
        us = _median_us(lambda: [call() for call in calls], len(calls), repeat, rest)
        return Timing(us, "events", note)
    return Timing(_median_us(graph.replay, len(calls), repeat, rest), "graph")


def _median_us(run: Call, calls: int, repeat: int, rest: float) -> float:
    """Time a call: ``repeat`` runs, each after a rest and with the cache cleared."""
    from triton import runtime

    driver = runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()
    begin = time.perf_counter()
    while time.perf_counter() < begin + _WARM_UP_SECONDS:
        run()
        torch.cuda.synchronize()
    timed = []
    for _ in range(repeat):
        if rest:
            torch.cuda.synchronize()
            time.sleep(rest)
        # Written and then read: what is only written goes back to memory while the run reads.
        driver.clear_cache(cache)
        cache.amax()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        timed.append((start, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in timed) / calls
