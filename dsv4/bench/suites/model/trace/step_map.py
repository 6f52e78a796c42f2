"""The map of a step as a table and as a Chrome trace, which Perfetto opens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.bench.suites.model.trace.critical_path import Visit, critical_path, idle, length
from dsv4.bench.suites.model.trace.matching import Launch
from dsv4.bench.tables import plain, short, wrapped

_NAME = 44  # characters of a kernel's name in a line


@dataclass(frozen=True)
class OperatorPart:
    """Share of one operator in a step.

    Attributes:
        operator: Name of the operator.
        launches: Number of its launches.
        us: Sum of the launches' microseconds.
        path: Microseconds of the launches on the critical path.
        gap: Microseconds of gaps on the path before the launches.
        bytes: Sum of the bytes of launches with known bytes.
        known: Number of launches with known bytes.
    """

    operator: str
    launches: int
    us: float
    path: float
    gap: float
    bytes: int
    known: int

    @property
    def hidden(self) -> float:
        """Microseconds of its launches that are not on the critical path."""
        return self.us - self.path


@dataclass(frozen=True)
class StepMap:
    """Launches of one replayed step.

    Attributes:
        title: Description of the step.
        launches: In the order of launches.
    """

    title: str
    launches: tuple[Launch, ...]

    @property
    def path(self) -> tuple[Visit, ...]:
        """The critical path."""
        return critical_path(self.launches)

    def parts(self) -> list[OperatorPart]:
        """Return every operator, sorted by its time on the critical path, the largest first."""
        return _parts(self.launches, self.path, lambda launch: launch.operator)

    def of_layers(self) -> dict[str, float]:
        """Return launches per layer, by type of layer."""
        launches = Counter(launch.layer_type for launch in self.launches if launch.layer_type)
        layers = {kind: set[int | None]() for kind in launches}
        for launch in self.launches:
            if launch.layer_type:
                layers[launch.layer_type].add(launch.layer)
        return {kind: launches[kind] / len(layers[kind]) for kind in launches}

    def write(self, path: Path) -> None:
        """Write the Chrome trace."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(chrome_trace(self), indent=0) + "\n")


def _parts(
    launches: Sequence[Launch], path: Sequence[Visit], key: Callable[[Launch], str]
) -> list[OperatorPart]:
    visits = {visit.launch.number: visit for visit in path}
    groups: dict[str, list[Launch]] = {}
    for launch in launches:
        groups.setdefault(key(launch), []).append(launch)
    parts = []
    for name, own in groups.items():
        on_path = [visits[launch.number] for launch in own if launch.number in visits]
        known = [launch.bytes for launch in own if launch.bytes is not None]
        parts.append(
            OperatorPart(
                operator=name,
                launches=len(own),
                us=sum(launch.duration for launch in own),
                path=sum(visit.time for visit in on_path),
                gap=sum(visit.gap for visit in on_path),
                bytes=sum(known),
                known=len(known),
            )
        )
    return sorted(parts, key=lambda part: -(part.path + part.gap))


def lines_of(step_map: StepMap) -> list[str]:
    """Return the table."""
    headings = ["operator", "launches", "sum us", "path us", "hidden us", "gap us", "MB"]
    body = [_row(part) for part in step_map.parts()]
    busy = dict.fromkeys(sorted({launch.stream for launch in step_map.launches}), 0.0)
    for launch in step_map.launches:
        busy[launch.stream] += launch.duration
    path, total = step_map.path, length(step_map.launches)
    return [
        f"{step_map.title}: launches, and the critical path through streams",
        *plain(headings, body),
        *wrapped(
            f"step {total:.1f} us by the profiler; path: {len(path)} of {len(step_map.launches)} "
            f"launches, {sum(visit.time for visit in path):.1f} us in them and "
            f"{sum(visit.gap for visit in path):.1f} us between; nothing runs for "
            f"{idle(step_map.launches):.1f} us"
        ),
        *wrapped(_coverage(step_map.launches)),
        *wrapped("busy us by stream: " + ", ".join(f"{s}: {us:.1f}" for s, us in busy.items())),
        *wrapped(
            "launches per layer: "
            + ", ".join(f"{kind} {count:.1f}" for kind, count in step_map.of_layers().items())
        ),
        *_one_layer(step_map),
    ]


def _row(part: OperatorPart) -> list[str]:
    moved = f"{1e-6 * part.bytes:.1f}" if part.known else "-"
    figures = [f"{us:.1f}" for us in (part.us, part.path, part.hidden, part.gap)]
    return [part.operator, str(part.launches), *figures, moved]


def _coverage(launches: Sequence[Launch]) -> str:
    """Say of how many launches the bytes are known."""
    known = [launch for launch in launches if launch.bytes is not None]
    calls = sum(launch.call != "" for launch in launches)
    return (
        f"bytes: {1e-6 * sum(launch.bytes or 0 for launch in known):.1f} MB of {len(known)} calls, "
        f"{calls - len(known)} other launches of calls, {len(launches) - calls} of no call"
    )


def _one_layer(step_map: StepMap) -> Iterator[str]:
    """Yield the launches of the middle layer of each type: these show which launches to merge."""
    visits = {visit.launch.number: visit for visit in step_map.path}
    for kind in step_map.of_layers():
        layers = sorted({launch.layer for launch in step_map.launches if launch.layer_type == kind
                         and launch.layer is not None})  # fmt: skip
        own = [launch for launch in step_map.launches if launch.layer == layers[len(layers) // 2]]
        begin, end = min(x.start for x in own), max(x.end for x in own)
        yield ""
        yield f"layer {own[0].layer}, {kind}: {len(own)} launches, {end - begin:.1f} us"
        headings = ["#", "stream", "start", "us", "path us", "gap us", "grid", "MB", "kernel"]
        rows = [_launch_row(launch, visits.get(launch.number), begin) for launch in own]
        yield from plain(headings, rows)


def _launch_row(launch: Launch, visit: Visit | None, begin: float) -> list[str]:
    return [
        str(launch.number),
        str(launch.stream),
        f"{launch.start - begin:.1f}",
        f"{launch.duration:.2f}",
        "-" if visit is None else f"{visit.time:.2f}",
        "-" if visit is None else f"{visit.gap:.2f}",
        "x".join(map(str, launch.grid)),
        "-" if launch.bytes is None else f"{1e-6 * launch.bytes:.2f}",
        short(launch.name, _NAME),
    ]


def chrome_trace(step_map: StepMap) -> dict[str, Any]:
    """Return a Chrome trace: a row for each stream and one for the critical path."""
    streams = sorted({launch.stream for launch in step_map.launches})
    rows = {stream: i + 1 for i, stream in enumerate(streams)}
    named = [("critical path", 0), *((f"stream {stream}", row) for stream, row in rows.items())]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
        for name, row in named
    ]
    visits = {visit.launch.number: visit for visit in step_map.path}
    for launch in step_map.launches:
        event = _slice(launch, rows[launch.stream], launch.start, launch.duration)
        event["args"] = _details(launch, visits.get(launch.number))
        events.append(event)
    for visit in step_map.path:
        begin = visit.launch.end - visit.time
        events.append(_slice(visit.launch, 0, begin, visit.time))
    events += _arrows(step_map.launches, rows)
    return {"displayTimeUnit": "ns", "otherData": {"step": step_map.title}, "traceEvents": events}


def _slice(launch: Launch, row: int, start: float, duration: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": row,
        "name": launch.name,
        "cat": launch.operator,
        "ts": round(start, 3),
        "dur": round(duration, 3),
    }


def _details(launch: Launch, visit: Visit | None) -> dict[str, Any]:
    return {
        "launch": launch.number,
        "layer": launch.layer,
        "layer type": launch.layer_type,
        "operator": launch.operator,
        "call": launch.call,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "bytes": launch.bytes,
        "waits for": list(launch.after),
        "on the critical path us": None if visit is None else round(visit.time, 3),
        "gap before us": None if visit is None else round(visit.gap, 3),
    }


def _arrows(launches: Sequence[Launch], rows: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield arrows of waits across streams."""
    by_number = {launch.number: launch for launch in launches}
    number = 0
    for launch in launches:
        for i in launch.after:
            source = by_number[i]
            if source.stream == launch.stream:
                continue
            number += 1
            common = {"pid": 0, "name": "waits", "cat": "waits", "id": number}
            begin = round(source.start + source.duration / 2, 3)
            yield {**common, "ph": "s", "tid": rows[source.stream], "ts": begin}
            end = round(launch.start, 3)
            yield {**common, "ph": "f", "bp": "e", "tid": rows[launch.stream], "ts": end}
