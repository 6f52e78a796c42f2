"""Capture a decode step in a graph that can be inspected, and map one of its replays."""

from __future__ import annotations

import torch

from dsv4.bench.suites.model.trace.events import recorded_replays, typical
from dsv4.bench.suites.model.trace.graph_nodes import nodes_of, nodes_so_far
from dsv4.bench.suites.model.trace.marks import Marks, marking
from dsv4.bench.suites.model.trace.matching import launches_of
from dsv4.bench.suites.model.trace.step_map import StepMap
from dsv4.bench.suites.whole_model import DecodeStep


def captured_with_marks(step: DecodeStep) -> tuple[torch.cuda.CUDAGraph, Marks]:
    """Capture a step in a graph that is kept, with marks of its layers and operator calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        stream = torch.cuda.current_stream().cuda_stream
        with marking(step.model, lambda: nodes_so_far(stream)) as marks:
            step.logits = step()
    return graph, marks


def mapped(step: DecodeStep, title: str) -> StepMap:
    """Map a step: capture it, profile replays, join the typical one with the graph's nodes.

    Args:
        step: The step.
        title: Which step it is, in words.

    Raises:
        RuntimeError: if the driver cannot list the graph.
        ValueError: if the profiler's record does not fit the graph.
    """
    graph, marks = captured_with_marks(step)
    nodes = nodes_of(graph.raw_cuda_graph())
    graph.replay()
    events = typical(recorded_replays(graph.replay))
    torch.cuda.synchronize()
    return StepMap(title, launches_of(nodes, events, marks.counted()))
