"""Graphs share a pool of the allocator as long as one of them lives, and never use one after that.

PyTorch's allocator counts the graphs of a pool. It asserts that there is one when a capture begins
in a pool that it knows.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.serving import Runner, SamplingOptions
from dsv4.serving._capture import CaptureError
from dsv4.serving.graphs import Graphs
from tests._tools.taped import Again
from tests.serving.cases import ToyModel, assert_empty, plain_text

OPTIONS = SamplingOptions(max_new_tokens=6, stop_ids=())
DRAWN = SamplingOptions(max_new_tokens=6, stop_ids=(), temperature=0.9, seed=4)
SIZES: dict[str, Any] = {
    "max_sequences": 4, "max_tokens": 64, "buckets": (1, 4), "prompt_buckets": (2, 8),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_objects() -> None:
    """Keep other tests' objects out of the garbage collections here, which take most of the time.

    In a process that ran other tests before, they took 160 of 165 s.
    """
    gc.collect()
    gc.freeze()


class Allocator:
    """Pools of an allocator that counts their graphs, with stand-ins for PyTorch's captures."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.graphs: dict[Any, int] = {}  # number of graphs of each pool with a capture
        self.pools: list[Any] = []  # pool of each capture that has ended
        graphs, handles = self.graphs, itertools.count()

        class Stream:
            device_index, device = 0, torch.device("cpu")

            def wait_stream(self, other: Any) -> None:
                pass

        class Graph:
            pool: Any = None

            def __del__(self) -> None:
                if self.pool is not None:
                    graphs[self.pool] -= 1

        class Capture:
            def __init__(self, graph: Graph, pool: Any = None, **options: Any) -> None:
                self.graph, self.pool = graph, pool

            def __enter__(self) -> None:
                gc.collect()  # as PyTorch may do
                if self.pool is not None:
                    assert graphs.get(self.pool, 1) > 0, "use_count > 0 INTERNAL ASSERT FAILED"
                    graphs[self.pool] = graphs.get(self.pool, 0) + 1
                    self.graph.pool = self.pool

            def __exit__(self, *error: Any) -> None:
                pass

        def nothing(*arguments: Any) -> None:
            pass

        for name, value in {
            "current_stream": Stream,
            "Stream": Stream,
            "stream": lambda side: contextlib.nullcontext(),
            "set_stream": nothing,
            "synchronize": nothing,
            "CUDAGraph": Graph,
            "graph": Capture,
            "graph_pool_handle": lambda: next(handles),
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", nothing, raising=False)


STEPS = st.lists(
    st.one_of(
        st.just("capture"),
        st.tuples(st.sampled_from(["free", "lose"]), st.integers(0, 5)),
        st.sampled_from(["fail", "release"]),
    ),
    max_size=24,
)


@example(steps=["capture", ("free", 0), "capture"])
@example(steps=["capture", "capture", ("free", 0), ("lose", 0), "capture"])
@example(steps=["capture", "fail", "capture", ("free", 1), "capture"])
@given(steps=STEPS)
def test_a_pool_is_used_as_long_as_one_of_its_graphs_lives(steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        allocator, graphs = Allocator(patch), Graphs()
        living = list[Any]()
        current = None  # the pool that the next capture is to share
        for step in steps:
            if step == "capture":
                living.append(graphs.captured(lambda: None)[0])
                pool = living[-1].pool
                assert current in (None, pool)
                assert sum(graph.pool == pool for graph in living) == allocator.graphs[pool]
                current = pool
            elif step == "fail":
                with pytest.raises(CaptureError, match="ValueError: broken"):
                    graphs.captured(_failing())
                current = None
            elif step == "release":
                graphs.release()
                current = None
            elif living:
                lost: list[Any] = [living.pop(step[1] % len(living))]
                if step[0] == "lose":  # it lives until a collection, with which a capture begins
                    lost.append(lost)
                del lost
            if all(graph.pool != current for graph in living):
                current = None


def _failing() -> Callable[[], None]:
    """Work that fails when it is captured, which is its second run."""
    runs = itertools.count()

    def work() -> None:
        if next(runs):
            raise ValueError("broken")

    return work


def test_each_graph_may_be_freed_before_the_next_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, graphs = Allocator(monkeypatch), Graphs()
    for _ in range(3):
        graphs.captured(lambda: None)
    assert allocator.graphs == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize("failing", range(8))
def test_no_capture_of_a_runner_begins_in_a_pool_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Whichever capture fails, of prompts, decode steps or the sampler, now and in later runners.

    A failed one of prompts frees the graphs of prompts; one of another step frees all of them.
    """
    allocator, captures = Allocator(monkeypatch), itertools.count()
    real = torch.cuda.graph

    class Capture(real):  # type: ignore[valid-type, misc]
        def __enter__(self) -> None:
            super().__enter__()
            if next(captures) % 9 == failing:
                raise OSError("broken")

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None, raising=False)
    captured = Graphs.captured

    def replayed(graphs: Graphs, work: Any) -> Any:
        graph, out = captured(graphs, work)
        again = Again(work, out)
        again.graph = graph  # type: ignore[attr-defined]
        return again, out

    monkeypatch.setattr(Graphs, "captured", replayed)
    model = ToyModel()
    for _ in range(2):
        runner = Runner(model, **SIZES)
        runner._steps.is_captured = True
        for _ in range(2):
            runner.warm_up([OPTIONS, DRAWN])
            requests = [runner.add([i, 7], o) for i in range(3) for o in (OPTIONS, DRAWN)]
            runner.run()
            for request in requests:
                text = plain_text(model, list(request.prompt), request.options, request.seed)
                assert request.tokens == text
        assert_empty(runner)
    assert next(captures) > failing
    assert sum(allocator.graphs.values()) <= 2 * 20


@pytest.mark.gpu
def test_a_capture_after_the_last_graph_is_freed_on_a_gpu() -> None:
    """The allocator keeps the pool for what outlives its graphs, as workspaces of libraries do."""
    graphs, workspaces = Graphs(), list[torch.Tensor]()
    x = torch.ones(1 << 20, dtype=torch.float32, device="cuda")

    def work() -> torch.Tensor:
        doubled = 2 * x
        if torch.cuda.is_current_stream_capturing():
            workspaces.append(doubled)
        return doubled + 1

    for value in (1.0, 2.0, 3.0):
        graph, out = graphs.captured(work)
        x.fill_(value)
        graph.replay()
        assert bool((out == 2 * value + 1).all())
        del graph, out
    first, _ = graphs.captured(work)
    second, out = graphs.captured(work)
    assert first.pool() == second.pool()
    del first
    third, _ = graphs.captured(work)
    assert third.pool() == second.pool()
    second.replay()
    assert bool((out == 7).all())
