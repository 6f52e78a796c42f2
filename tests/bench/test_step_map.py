"""The map of a step: join of graph and replay, the critical path, and the written output."""

from __future__ import annotations

import ctypes
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.bench import arguments
from dsv4.bench.cli import main
from dsv4.bench.problem import UsageError
from dsv4.bench.suites import whole_model
from dsv4.bench.suites.model import command
from dsv4.bench.suites.model.document import ModelResults
from dsv4.bench.suites.model.request import ModelRequest
from dsv4.bench.suites.model.trace.critical_path import critical_path, idle, length
from dsv4.bench.suites.model.trace.events import events_of, replays_of, typical
from dsv4.bench.suites.model.trace.graph_nodes import (
    GraphNode,
    _KernelParameters,
    demangled,
    nodes_of,
    nodes_so_far,
)
from dsv4.bench.suites.model.trace.marks import Mark, Marks, mark_of, marking
from dsv4.bench.suites.model.trace.matching import Launch, launches_of, pairs_of
from dsv4.bench.suites.model.trace.step_map import StepMap, chrome_trace, lines_of
from dsv4.bench.suites.random_model import Weights
from dsv4.bench.suites.random_model import random_model as packed_model
from dsv4.config import CSA, HCA, ModelConfig
from dsv4.testing.models import random_model

NONE = (0, 0, 0)


def launch(number, start, duration, after=(), stream=7, **changes):
    made = Launch(
        number, f"kernel {number}", "norm", "rms_norm", 0, "sliding_attention", stream, start,
        duration, (1, 1, 1), (32, 1, 1), None, tuple(after),
    )  # fmt: skip
    return replace(made, **changes)


@st.composite
def schedules(draw):
    """Launches on a few streams. Each waits for some earlier ones; some begin before these end.

    A launch always waits for its predecessor on the same stream.
    """
    launches: list[Launch] = []
    for number in range(draw(st.integers(1, 14))):
        stream = draw(st.integers(1, 3))
        before = [x.number for x in launches if x.stream == stream][-1:]
        others = st.sets(st.sampled_from(range(number)), max_size=2) if number else st.just(set())
        after = {*before, *draw(others)} or set(range(number)[-1:])
        ready = max((launches[i].end for i in after), default=0.0)
        early = draw(st.sampled_from((0.0, 0.0, 0.5)))  # programmatic dependent launch
        start = max(0.0, ready + draw(st.integers(0, 3)) - early)
        launches.append(launch(number, start, draw(st.integers(1, 9)), sorted(after), stream))
    return launches


class TestCriticalPath:
    @given(schedules())
    def test_gaps_and_times_are_the_step(self, launches):
        path = critical_path(launches)
        assert sum(v.gap + v.time for v in path) == pytest.approx(length(launches))
        for visit in path:
            assert visit.gap >= 0
            assert 0 <= visit.time <= visit.launch.duration

    @given(schedules())
    def test_it_is_as_long_as_any_stream_is_busy(self, launches):
        """Launches of a stream overlap if one begins early; the overlap counts once."""
        total = sum(v.gap + v.time for v in critical_path(launches))
        for stream in {x.stream for x in launches}:
            own = [x for x in launches if x.stream == stream]
            assert length(own) - idle(own) <= total + 1e-9

    @given(schedules())
    def test_each_waits_for_the_one_before(self, launches):
        path = [visit.launch for visit in critical_path(launches)]
        assert path[0].after == ()
        for first, second in itertools.pairwise(path):
            assert first.number in second.after

    @given(schedules())
    def test_idle_time_is_no_more_than_the_gaps(self, launches):
        """The path has a gap wherever nothing runs."""
        assert idle(launches) <= sum(v.gap for v in critical_path(launches)) + 1e-9

    def test_a_chain_is_all_of_it(self):
        chain = [launch(i, 3.0 * i, 2.0, range(i)[-1:]) for i in range(4)]
        assert [v.launch.number for v in critical_path(chain)] == [0, 1, 2, 3]
        assert [v.gap for v in critical_path(chain)] == [0, 1, 1, 1]

    def test_the_shorter_branch_is_hidden(self):
        fork = [launch(0, 0, 1), launch(1, 1, 5, [0]), launch(2, 1, 2, [0], 8)]
        fork.append(launch(3, 6.5, 1, [1, 2]))
        assert [v.launch.number for v in critical_path(fork)] == [0, 1, 3]
        assert idle(fork) == 0.5

    def test_nothing_has_none(self):
        assert critical_path(()) == ()
        assert (idle(()), length(())) == (0.0, 0.0)


def entry(name, ts, dur, stream=7, correlation=1, cat="kernel", grid=(2, 1, 1)):
    """A record as torch's profiler writes it."""
    args = {"device": 0, "stream": stream, "correlation": correlation}
    if cat == "kernel":
        args |= {"grid": list(grid), "block": [128, 1, 1]}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": stream, "args": args}


def recorded(begin, correlation, longer=0.0):
    """One replay: a copy, a norm and, on a side stream, a compressor; attention."""
    return [
        entry("Memcpy DtoD (Device -> Device)", begin, 1.0, 7, correlation, "gpu_memcpy"),
        entry("_rms_norm_kernel", begin + 1.5, 2.0, 7, correlation),
        entry("_update_kernel", begin + 1.6, 6.0 + longer, 13, correlation),
        entry("_attend_kernel", begin + 8 + longer, 4.0, 7, correlation, grid=(8, 2, 1)),
    ]


def node(index, name, after, kind="kernel", grid=(2, 1, 1)):
    if kind != "kernel":
        return GraphNode(index, kind, "", NONE, NONE, tuple(after))
    return GraphNode(index, kind, name, grid, (128, 1, 1), tuple(after))


NODES = [
    node(0, "", (), "memcpy"),
    node(1, "", (0,), "empty"),
    node(2, "_update_kernel", (1,)),
    node(3, "_rms_norm_kernel", (1,)),
    node(4, "_attend_kernel", (2, 3), grid=(8, 2, 1)),
]
MARKS = Marks(
    [Mark("compressed_sparse_attention", 2, 5, layer=0)],
    [Mark("compress_write", 2, 3), Mark("rms_norm", 3, 4, 4096), Mark("sparse_attention", 4, 5)],
)


def events(*replays):
    noise = [{"ph": "M", "name": "process_name"}, {"ph": "X", "cat": "cpu_op", "ts": 0, "dur": 9}]
    return events_of({"traceEvents": noise + [e for replay in replays for e in replay]})


class TestEvents:
    def test_replays_are_told_apart(self):
        step_map = replays_of(events(recorded(0, 1), recorded(100, 2, 1), recorded(200, 3, 9)), 3)
        assert [[e.correlation for e in replay] for replay in step_map] == [
            [1] * 4,
            [2] * 4,
            [3] * 4,
        ]
        assert typical(step_map)[0].correlation == 2

    def test_replays_that_differ(self):
        other = recorded(100, 2)
        other[1]["name"] = "_rope_kernel"
        with pytest.raises(ValueError, match=r"replays differ"):
            replays_of(events(recorded(0, 1), other), 2)

    def test_replays_of_other_lengths(self):
        with pytest.raises(ValueError, match=r"7 events of 2 replays, wanted equally many"):
            replays_of(events(recorded(0, 1), recorded(100, 2)[1:]), 2)


class TestMatching:
    def test_launches(self):
        copy, update, norm, attention = launches_of(NODES, events(recorded(50, 1)), MARKS)
        assert (copy.layer, copy.operator, copy.call) == (None, "copies", "")
        assert (update.layer, update.call, update.stream, update.after) == (
            *(0, "compress_write", 13),
            (0,),  # the empty node is passed over
        )
        assert (norm.bytes, update.bytes, norm.operator) == (4096, None, "norm")
        assert attention.after == (2, 3)
        assert (copy.start, attention.start) == (0, pytest.approx(8))

    def test_the_largest_launch_has_the_bytes_of_its_call(self):
        """A launch of one block is there for long, because it waits."""
        nodes = [node(0, "_update_kernel", (), grid=(16, 1, 1)), node(1, "_entry_kernel", (0,))]
        made = events(
            [entry("_update_kernel", 0, 2.5, grid=(16, 1, 1)), entry("_entry_kernel", 1, 3.5)]
        )
        marks = Marks([], [Mark("compress_write", 0, 2, 64)])
        assert [x.bytes for x in launches_of(nodes, made, marks)] == [64, None]

    def test_launches_that_look_alike_follow_their_order(self):
        nodes = [node(i, "_rms_norm_kernel", range(i)[-1:]) for i in range(3)]
        made = [entry("_rms_norm_kernel", ts, 1.0) for ts in (4, 0, 2)]
        assert [e.start for _, e in pairs_of(nodes, events(made))] == [0, 2, 4]

    def test_a_copy_that_a_kernel_does(self):
        made = recorded(0, 1)
        made[0] = entry("memcpy32_post", 0, 1.0, grid=(4, 1, 1))
        assert next(e.name for _, e in pairs_of(NODES, events(made))) == "memcpy32_post"

    def test_a_kernel_that_did_not_run(self):
        with pytest.raises(ValueError, match=r"1 kernels of the graph have no counterpart: _att"):
            pairs_of(NODES, events(recorded(0, 1)[:3]))

    def test_an_event_of_nothing(self):
        made = [*recorded(0, 1), entry("_rope_kernel", 20, 1)]
        with pytest.raises(ValueError, match=r"1 events and 0 kernels .*: _rope_kernel"):
            pairs_of(NODES, events(made))


class TestStepMap:
    @pytest.fixture
    def step_map(self):
        return StepMap("1 at 64", launches_of(NODES, events(recorded(50, 1)), MARKS))

    def test_parts_add_up(self, step_map):
        parts = {part.operator: part for part in step_map.parts()}
        assert parts["norm"].path == 0
        assert parts["norm"].hidden == 2
        assert parts["norm"].bytes == 4096
        assert sum(p.path + p.gap for p in parts.values()) == pytest.approx(12)
        assert parts["attention"].gap == pytest.approx(0.4)
        assert step_map.of_layers() == {"compressed_sparse_attention": 3}

    def test_table(self, step_map):
        text = "\n".join(lines_of(step_map))
        assert "step 12.0 us by the profiler; path: 3 of 4 launches" in text
        assert "layer 0, compressed_sparse_attention: 3 launches" in text
        assert "bytes: 0.0 MB of 1 calls, 2 other launches of calls, 1 of no call" in text

    def test_what_cannot_be_written_loses_no_row(self, step_map, tmp_path):
        (tmp_path / "file").write_text("")
        measurement, results = SimpleNamespace(map=lambda row: step_map), ModelResults(rows=[None])
        command._map_step(measurement, results, tmp_path / "file" / "trace.json")
        assert results.stopped.startswith("the step was not mapped: ")

    def test_chrome_trace(self, step_map, tmp_path):
        step_map.write(tmp_path / "new" / "trace.json")
        content = json.loads((tmp_path / "new" / "trace.json").read_text())
        slices = [e for e in content["traceEvents"] if e["ph"] == "X"]
        assert sum(e["tid"] > 0 for e in slices) == 4
        on_path = [e for e in slices if e["tid"] == 0]
        assert [e["name"] for e in on_path][1:] == ["_update_kernel", "_attend_kernel"]
        for first, second in itertools.pairwise(on_path):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-6
        arrows = [e for e in content["traceEvents"] if e["ph"] in "sf"]
        assert len(arrows) == 4  # to the other stream and back
        assert chrome_trace(step_map)["otherData"] == {"step": "1 at 64"}


class _Driver:
    """A driver with a graph of a copy and two kernels."""

    names = (None, b"_rms_norm_kernel", b"_Z3addPfi")
    edges = ((0, 1), (1, 2))
    status = 1

    def cuStreamGetCaptureInfo_v3(self, stream, status, number, graph, *none):  # noqa: N802
        assert none == (None, None, None)
        status._obj.value, graph._obj.value = self.status, 77
        return 0

    def cuGraphGetNodes(self, graph, nodes, count):  # noqa: N802
        assert graph.value == 77
        count._obj.value = len(self.names)
        for i in range(len(self.names) if nodes else 0):
            nodes[i] = 100 + i
        return 0

    def cuGraphGetEdges_v2(self, graph, sources, targets, data, count):  # noqa: N802
        count._obj.value = len(self.edges)
        for i, (source, target) in enumerate(self.edges if sources else ()):
            sources[i], targets[i] = 100 + source, 100 + target
        return 0

    def cuGraphNodeGetType(self, node, kind):  # noqa: N802
        kind._obj.value = 0 if self.names[node.value - 100] else 1
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, step_map):  # noqa: N802
        step_map._obj.func, step_map._obj.grid[:], step_map._obj.block[:] = (
            node.value,
            (3, 2, 1),
            (64, 1, 1),
        )
        return 0

    def cuFuncGetName(self, name, function):  # noqa: N802
        name._obj.value = self.names[function.value - 100]
        return 0


class TestGraphNodes:
    def test_nodes(self):
        copy, norm, add = nodes_of(77, _Driver())
        assert copy == GraphNode(0, "memcpy", "", NONE, NONE, ())
        assert norm == GraphNode(1, "kernel", "_rms_norm_kernel", (3, 2, 1), (64, 1, 1), (0,))
        assert (add.name, add.after) == ("add(float*, int)", (1,))

    def test_nodes_in_another_order(self):
        driver = _Driver()
        driver.edges = ((2, 1),)
        with pytest.raises(RuntimeError, match=r"node 1 waits for node 2, wanted an earlier one"):
            nodes_of(77, driver)

    def test_nodes_so_far(self):
        assert nodes_so_far(5, _Driver()) == 3

    def test_nothing_is_captured(self):
        driver = _Driver()
        driver.status = 0
        with pytest.raises(RuntimeError, match=r"no graph is being captured"):
            nodes_so_far(5, driver)

    def test_parameters_have_the_layout_of_the_driver(self):
        """CUDA_KERNEL_NODE_PARAMS_v2: a pointer, seven words and a gap, four pointers."""
        assert ctypes.sizeof(_KernelParameters) == 72
        assert _KernelParameters.parameters.offset == 40

    def test_names(self):
        assert demangled("_rms_norm_kernel") == "_rms_norm_kernel"
        assert demangled("_Znot_a_name") == "_Znot_a_name"


def test_layers_and_calls_are_marked():
    """A step by the reference: every call within a layer belongs to it."""
    config = ModelConfig.tiny(num_nextn_predict_layers=0)
    model = random_model(config)
    calls = iter(range(1 << 20))
    with torch.inference_mode():
        step = whole_model.DecodeStep(model, 1, 8)
        with marking(model, lambda: next(calls)) as marks:
            step()
        seen = len(marks.calls)
        step()
    assert len(marks.calls) == seen, "marks are still made"
    assert [mark.layer for mark in marks.layers] == list(range(config.num_hidden_layers))
    assert [mark.name for mark in marks.layers] == list(config.layer_types)
    attention = [mark for mark in marks.calls if mark.name == "sparse_attention"]
    assert [mark_of(marks.layers, mark.first).layer for mark in attention] == list(
        range(config.num_hidden_layers)
    )
    head = marks.calls[-1]
    assert (head.name, mark_of(marks.layers, head.first)) == ("linear", None)
    assert head.bytes >= config.vocab_size * config.hidden_size * 2
    assert all(mark.bytes is None for mark in attention)
    assert all(mark.bytes > 0 for mark in marks.counted().calls)


def test_a_cpu_has_no_captured_step(capsys):
    assert main(["model", "--preset", "tiny", "--tokens", "1", "--trace", "t.json"]) != 0
    assert "--trace is 't.json' on cpu, wanted a CUDA GPU" in capsys.readouterr().err


def test_a_trace_needs_a_file(tmp_path):
    options = arguments.parser().parse_args(["model", "--preset", "tiny"])
    request = ModelRequest.of(options, torch.device("cpu"))
    with pytest.raises(UsageError, match="a folder, wanted a file"):
        replace(request, device=torch.device("cuda", 0), trace=tmp_path).check_trace()


@pytest.mark.gpu
def test_a_captured_step_is_mapped():
    from dsv4.bench.suites.model.trace.capture import mapped

    # Of published widths: kernels multiply all its weights, and no operator asks the host.
    config = ModelConfig.flash().replace(
        num_hidden_layers=2,
        layer_types=(CSA, HCA),
        mlp_layer_types=("moe", "moe"),
        n_routed_experts=8,
        num_nextn_predict_layers=0,
    )
    model = packed_model(config, torch.device("cuda", 0), Weights())
    with torch.inference_mode():
        step_map = mapped(whole_model.DecodeStep(model, 1, 8), "two layers")
    layers = {launch.layer for launch in step_map.launches if launch.layer is not None}
    assert layers == set(range(config.num_hidden_layers))
    assert sum(v.gap + v.time for v in step_map.path) == pytest.approx(length(step_map.launches))
    assert len({launch.stream for launch in step_map.launches}) > 1
    known = {launch.call for launch in step_map.launches if launch.bytes is not None}
    assert known >= {"grouped_gemm_swiglu", "grouped_gemm", "sparse_attention", "compress_write"}
    assert known == {launch.call for launch in step_map.launches if launch.call}
    experts = [x.bytes or 0 for x in step_map.launches if x.call.startswith("grouped_gemm")]
    weights = config.num_experts_per_tok * whole_model.expert_bytes(model)
    assert weights <= sum(experts) <= 1.05 * weights
