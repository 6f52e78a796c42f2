"""Join a graph's nodes with the events of one of its replays."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.bench.suites.model.operators import operator_of
from dsv4.bench.suites.model.trace.events import Event
from dsv4.bench.suites.model.trace.graph_nodes import KERNEL, RUNNING, GraphNode
from dsv4.bench.suites.model.trace.marks import Mark, Marks, mark_of


@dataclass(frozen=True)
class Launch:
    """A launch of a step: its kernel, its times and its dependencies.

    Attributes:
        number: Its place in the order of launches.
        name: The kernel.
        operator: A name of ``dsv4.bench.suites.model.operators``.
        call: The operator call that launched it; empty where none did.
        layer: Number of its decoder layer; None outside of layers.
        layer_type: Type of the layer's attention; empty outside of layers.
        stream: The profiler's number of the stream.
        start: Microseconds from the step's begin.
        duration: Microseconds.
        grid: Blocks by axis.
        block: Threads of a block by axis.
        bytes: Bytes that its call has to read and write (``traffic``). One launch of the call has
            them all, that with the most blocks times microseconds; None: unknown, or another has
            them.
        after: Numbers of the launches that it waits for.
    """

    number: int
    name: str
    operator: str
    call: str
    layer: int | None
    layer_type: str
    stream: int
    start: float
    duration: float
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    bytes: int | None
    after: tuple[int, ...]

    @property
    def end(self) -> float:
        """When it ended, in microseconds from the step's begin."""
        return self.start + self.duration


# Keys that a node and its event share, the most specific first. A profiler may write a name
# differently, and may show a copy as the kernel by which the driver copies.
_KEYS: tuple[tuple[Callable[[GraphNode], Hashable], Callable[[Event], Hashable]], ...] = (
    (lambda node: (node.name, node.grid, node.block), lambda e: (e.name, e.grid, e.block)),
    (lambda node: (node.grid, node.block, operator_of(node.name)),
     lambda e: (e.grid, e.block, operator_of(e.name))),
    (lambda node: (node.grid, node.block), lambda e: (e.grid, e.block)),
    (lambda node: None, lambda e: None),
)  # fmt: skip


def pairs_of(nodes: Sequence[GraphNode], events: Sequence[Event]) -> list[tuple[GraphNode, Event]]:
    """Return each node that ran, with its event.

    Layers run one after another. Launches with equal keys are therefore paired in order.

    Args:
        nodes: Nodes in the order of launches.
        events: Events by start.

    Raises:
        ValueError: if an event has no node, or a node that launches a kernel has no event.
    """
    left_nodes = [node for node in nodes if node.kind in RUNNING]
    left_events = list(events)
    pairs: list[tuple[GraphNode, Event]] = []
    for node_key, event_key in _KEYS:
        by_node, by_event = _grouped(left_nodes, node_key), _grouped(left_events, event_key)
        for key, alike in by_event.items():
            same = by_node.get(key, [])
            if len(same) == len(alike):
                pairs += zip(same, alike, strict=True)
        taken_nodes = {node.index for node, _ in pairs}
        taken_events = {id(event) for _, event in pairs}
        left_nodes = [node for node in left_nodes if node.index not in taken_nodes]
        left_events = [event for event in left_events if id(event) not in taken_events]
    kernels = [node for node in left_nodes if node.kind == KERNEL]
    if left_events or kernels:
        names = sorted({e.name for e in left_events} | {n.name for n in kernels})
        raise ValueError(
            f"{len(left_events)} events and {len(kernels)} kernels of the graph have no "
            f"counterpart: {', '.join(name[:40] for name in names[:4])}"
        )
    return sorted(pairs, key=lambda pair: pair[0].index)


def _grouped(items: Sequence[Any], key: Callable[[Any], Hashable]) -> dict[Hashable, list[Any]]:
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def launches_of(
    nodes: Sequence[GraphNode], events: Sequence[Event], marks: Marks
) -> tuple[Launch, ...]:
    """Return the launches of a step in their order.

    Args:
        nodes: Nodes of the step's graph.
        events: Events of one replay, by start.
        marks: Marks of the capture.

    Raises:
        ValueError: like ``pairs_of``.
    """
    pairs = pairs_of(nodes, events)
    begin = min(event.start for _, event in pairs)
    present = {node.index for node, _ in pairs}
    after = _contracted(nodes, present)
    bytes_of = _bytes_by_node(pairs, marks.calls)
    launches = []
    for node, event in pairs:
        layer, call = mark_of(marks.layers, node.index), mark_of(marks.calls, node.index)
        launches.append(
            Launch(
                number=node.index,
                name=event.name,
                operator=operator_of(event.name),
                call="" if call is None else call.name,
                layer=None if layer is None else layer.layer,
                layer_type="" if layer is None else layer.name,
                stream=event.stream,
                start=event.start - begin,
                duration=event.duration,
                grid=event.grid,
                block=event.block,
                bytes=bytes_of.get(node.index),
                after=after[node.index],
            )
        )
    return tuple(launches)


def _contracted(nodes: Sequence[GraphNode], present: set[int]) -> dict[int, tuple[int, ...]]:
    """Map each node to the nodes that it waits for, through nodes that did not run."""
    after: dict[int, tuple[int, ...]] = {}
    for node in nodes:  # a node waits for earlier ones
        waits: set[int] = set()
        for i in node.after:
            waits.update((i,) if i in present else after[i])
        after[node.index] = tuple(sorted(waits))
    return after


def _bytes_by_node(
    pairs: Sequence[tuple[GraphNode, Event]], calls: Sequence[Mark]
) -> dict[int, int]:
    """Map the largest launch of each call to the bytes of the call.

    The longest one need not be it: a small launch that begins early is there while it waits.
    """
    sizes = {node.index: event.duration * math.prod(event.grid) for node, event in pairs}
    bytes_of = {}
    for call in calls:
        own = [i for i in range(call.first, call.end) if i in sizes]
        if own and call.bytes is not None:
            bytes_of[max(own, key=lambda i: sizes[i])] = call.bytes
    return bytes_of
