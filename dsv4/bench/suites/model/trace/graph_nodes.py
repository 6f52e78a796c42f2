"""Nodes and edges of a captured CUDA graph, read from the driver with ``ctypes``.

A profiler's record of a replay has times, but not the order of launches. The graph has the order
and the dependencies, but no times. ``dsv4.bench.suites.model.trace.matching`` joins the two.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.cute.runtime.driver import check

KERNEL = "kernel"
RUNNING = frozenset((KERNEL, "memcpy", "memset"))  # nodes that a profiler sees
_TYPES = {0: KERNEL, 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 6: "wait event"}
_OTHER = "other"
_CAPTURING = 1
_LONGEST_NAME = 1 << 16

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class GraphNode:
    """One node of a graph.

    Attributes:
        index: Its place in the order of launches.
        kind: ``"kernel"``, ``"memcpy"``, ``"memset"``, or another kind of node.
        name: The kernel's name, as a profiler writes it; empty of other kinds.
        grid: Blocks of a kernel by axis; zeros of other kinds.
        block: Threads of a block by axis.
        after: Nodes that it waits for, by index: those before it on its stream, and by events.
    """

    index: int
    kind: str
    name: str
    grid: Sizes
    block: Sizes
    after: tuple[int, ...]


class _KernelParameters(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS`` of version 2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def nodes_so_far(stream: int, driver: Any = None) -> int:
    """Return the number of nodes of the graph that is being captured on a stream.

    Args:
        stream: The driver's handle of the stream.
        driver: The CUDA driver; None: the installed one.

    Raises:
        RuntimeError: if the driver refuses, or nothing is being captured there.
    """
    driver = _driver() if driver is None else driver
    status, graph, number = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    # Dependencies are not requested: the driver lists programmatic ones only with their data.
    failed = driver.cuStreamGetCaptureInfo_v3(
        *(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)),
        *(ctypes.byref(graph), None, None, None),
    )
    check(failed, "reading the graph that is captured on a stream")
    if status.value != _CAPTURING:
        raise RuntimeError("no graph is being captured on the stream, wanted a capture")
    return _count(graph, driver)


def _count(graph: ctypes.c_void_p, driver: Any) -> int:
    count = ctypes.c_size_t()
    check(driver.cuGraphGetNodes(graph, None, ctypes.byref(count)), "counting a graph's nodes")
    return count.value


def nodes_of(graph: int, driver: Any = None) -> list[GraphNode]:
    """Return the nodes of a graph in the order in which they were added.

    Args:
        graph: The driver's handle, ``torch.cuda.CUDAGraph.raw_cuda_graph``.
        driver: The CUDA driver; None: the installed one.

    Raises:
        RuntimeError: if the driver refuses, or gives nodes in another order.
    """
    driver = _driver() if driver is None else driver
    handle = ctypes.c_void_p(graph)
    count = ctypes.c_size_t(_count(handle, driver))
    nodes = (ctypes.c_void_p * count.value)()
    check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)), "listing a graph's nodes")
    before = _edges(handle, list(nodes), driver)
    late = next((i for i, after in enumerate(before) if after and after[-1] >= i), None)
    if late is not None:
        raise RuntimeError(f"node {late} waits for node {before[late][-1]}, wanted an earlier one")
    return [_node(i, node, before[i], driver) for i, node in enumerate(nodes)]


def _edges(graph: ctypes.c_void_p, nodes: Sequence[Any], driver: Any) -> list[tuple[int, ...]]:
    """Return the nodes that each node waits for."""
    count, what = ctypes.c_size_t(), "listing a graph's edges"
    # The driver lists a programmatic edge only if there is a buffer for the edges' data.
    check(driver.cuGraphGetEdges_v2(graph, None, None, None, ctypes.byref(count)), what)
    sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    data = (ctypes.c_uint64 * count.value)()
    if count.value:
        check(driver.cuGraphGetEdges_v2(graph, sources, targets, data, ctypes.byref(count)), what)
    index_of = {node: i for i, node in enumerate(nodes)}
    before: list[set[int]] = [set() for _ in nodes]
    for source, target in zip(sources, targets, strict=True):
        before[index_of[target]].add(index_of[source])
    return [tuple(sorted(earlier)) for earlier in before]


def _node(index: int, node: Any, after: tuple[int, ...], driver: Any) -> GraphNode:
    handle, kind = ctypes.c_void_p(node), ctypes.c_int()
    check(driver.cuGraphNodeGetType(handle, ctypes.byref(kind)), f"type of node {index}")
    name = _TYPES.get(kind.value, _OTHER)
    if name != KERNEL:
        return GraphNode(index, name, "", (0, 0, 0), (0, 0, 0), after)
    values = _KernelParameters()
    failed = driver.cuGraphKernelNodeGetParams_v2(handle, ctypes.byref(values))
    check(failed, f"parameters of node {index}")
    grid: Sizes = tuple(values.grid)
    block: Sizes = tuple(values.block)
    return GraphNode(index, KERNEL, demangled(_name_of(values, driver)), grid, block, after)


def _name_of(values: _KernelParameters, driver: Any) -> str:
    """Return a kernel's name; a node has a function or, loaded as a library, a kernel."""
    name = ctypes.c_char_p()
    if values.func:
        failed = driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(values.func))
    else:
        failed = driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(values.kern))
    check(failed, "a kernel's name")
    return (name.value or b"").decode()


@functools.cache
def demangled(name: str) -> str:
    """Return a C++ name demangled, and any other name unchanged."""
    if not name.startswith("_Z"):
        return name
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return name
    demangle = library.__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value or not address:
        return name
    text = ctypes.string_at(address).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
    return text
