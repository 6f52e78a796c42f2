"""Events of a graph's replays, read from the record of torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4.bench.suites.model.trace.graph_nodes import KERNEL, Sizes

_KINDS = {"kernel": KERNEL, "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_REPLAYS = 5


@dataclass(frozen=True)
class Event:
    """Something that ran on the GPU.

    Attributes:
        kind: ``"kernel"``, ``"memcpy"`` or ``"memset"``.
        name: As the profiler writes it.
        start: Microseconds.
        duration: Microseconds.
        stream: The profiler's number of the stream.
        correlation: Number of the launch; all of a replayed graph have one.
        grid: Blocks by axis, zeros of other kinds than kernels.
        block: Threads of a block by axis.
    """

    kind: str
    name: str
    start: float
    duration: float
    stream: int
    correlation: int
    grid: Sizes
    block: Sizes

    @property
    def end(self) -> float:
        """When it ended, in microseconds."""
        return self.start + self.duration


def events_of(content: Mapping[str, Any]) -> list[Event]:
    """Return the GPU events of a Chrome trace of torch's profiler, by start."""
    events = []
    for entry in content["traceEvents"]:
        kind = _KINDS.get(entry.get("cat", ""))
        if kind is None or entry.get("ph") != "X":
            continue
        args = entry.get("args", {})
        events.append(
            Event(
                kind=kind,
                name=entry["name"],
                start=float(entry["ts"]),
                duration=float(entry["dur"]),
                stream=int(args.get("stream", entry.get("tid", 0))),
                correlation=int(args.get("correlation", 0)),
                grid=_sizes(args.get("grid")),
                block=_sizes(args.get("block")),
            )
        )
    return sorted(events, key=lambda event: event.start)


def _sizes(values: Sequence[int] | None) -> Sizes:
    if values is None:
        return (0, 0, 0)
    x, y, z = (int(value) for value in values)
    return x, y, z


def replays_of(events: Sequence[Event], count: int) -> list[list[Event]]:
    """Divide the events of successive equal replays into one list per replay.

    Raises:
        ValueError: if they are not ``count`` times as many as those of one replay.
    """
    if not events or len(events) % count:
        raise ValueError(f"{len(events)} events of {count} replays, wanted equally many per replay")
    size = len(events) // count
    parts = [list(events[i * size : (i + 1) * size]) for i in range(count)]
    counts = [sorted(event.name for event in part) for part in parts]
    if any(names != counts[0] for names in counts):
        raise ValueError("replays differ in their kernels, wanted the same kernels in each")
    return parts


def typical(replays: Sequence[list[Event]]) -> list[Event]:
    """Return the replay of median length."""
    return sorted(replays, key=length_of)[len(replays) // 2]


def length_of(events: Sequence[Event]) -> float:
    """Microseconds from the first start to the last end."""
    return max(event.end for event in events) - min(event.start for event in events)


def recorded_replays(replay: Callable[[], Any]) -> list[list[Event]]:
    """Profile replays of a graph, each of which ends before the next begins."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_REPLAYS):
            replay()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return replays_of(events_of(json.loads(path.read_text())), _REPLAYS)
