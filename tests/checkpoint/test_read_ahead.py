"""Loading reads ahead: the same bytes in any order, within its memory, and nothing left behind."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dsv4.checkpoint import (
    Checkpoint,
    CheckpointError,
    fill,
    load,
    shards,
    verify,
)
from dsv4.checkpoint.filling import FillRequest, check_module, fill_module
from dsv4.checkpoint.read_ahead import _LEAST_SLAB_BYTES, _MOST_BYTES, ReadAhead, Slabs, Span
from dsv4.checkpoint.shards import Reading, ShardReader, Shards, read_header
from dsv4.checkpoint.slots import LinearSlot
from dsv4.parallel.windows import Window
from dsv4.testing import strategies
from dsv4.testing.ranks import run_ranks
from tests.checkpoint.cases import (
    LAYOUTS,
    assert_same_state,
    calibrated,
    loaded_ahead,
    make_model,
    raw,
    saved,
    state,
)
from tests.parallel.cases import WIDE
from tests.parallel.cases import model as model_of_ranks

CPU = torch.device("cpu")
AHEAD = FillRequest(progress=False, read_ahead=True)
SECONDS = 20  # after which a wait for another thread has failed
FILES = {name: bytes(random.Random(name).randbytes(3000)) for name in "abc"}


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("dsv4 reader")]


def verified(path: Path) -> int:
    """Do as ``verify``, with files read ahead."""
    with Checkpoint.open(path) as checkpoint:
        return check_module(make_model(), checkpoint, AHEAD)


class FakeReader:
    """Reads from ``FILES``, and passes each run to ``before`` first."""

    def __init__(self, before: Callable[[Sequence[Span]], Any] = lambda run: None) -> None:
        self.before = before
        self.lock = threading.Lock()
        self.nbytes = 0

    def __call__(self) -> FakeReader:
        return self

    def __enter__(self) -> FakeReader:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read(self, run: Sequence[Span], memory: torch.Tensor) -> None:
        with self.lock:
            self.nbytes += memory.nbytes
        self.before(run)
        memory.copy_(torch.cat([contents(span) for span in run]))


def contents(span: Span) -> torch.Tensor:
    data = torch.frombuffer(bytearray(FILES[span.file]), dtype=torch.uint8)[span.offset :]
    return data.as_strided((span.rows, span.row_bytes), (span.stride, 1)).reshape(-1)


def taken(ahead: ReadAhead, span: Span) -> torch.Tensor | None:
    target = torch.zeros(span.nbytes, dtype=torch.uint8)
    return target if ahead.copy_to(span, target) else None


@contextmanager
def reading(plan: Sequence[Span], slabs: Slabs, reader: Any, **options: Any) -> Iterator[ReadAhead]:
    with ReadAhead(plan, slabs, reader, device=CPU, **options) as ahead:
        yield ahead
    assert not readers()


def in_rows(count: int, size: int = 50) -> list[Span]:
    return [Span("abc"[i % 3], 100 * (i // 3), size) for i in range(count)]


@st.composite
def spans(draw) -> Span:
    rows, row_bytes = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    stride = row_bytes + draw(st.integers(1, 30)) if rows > 1 else 0
    offset = draw(st.sampled_from([0, 40, 80, *range(7)]))  # some follow one another
    return Span(draw(st.sampled_from("abc")), offset, row_bytes, rows, stride)


class TestReadAhead:
    @given(
        plan=st.lists(spans(), max_size=30),
        count=st.integers(2, 4),
        size=st.sampled_from([200, 300, 1000]),
        threads=st.integers(1, 4),
        seed=strategies.seeds(),
        data=st.data(),
    )
    @settings(max_examples=60)
    def test_any_order_of_requests_gives_the_bytes(self, plan, count, size, threads, seed, data):
        """In order, in another, some never, some that the plan does not have."""
        rng = random.Random(seed)
        requests = [span for span in plan if rng.random() < 0.8]
        requests += data.draw(st.lists(spans(), max_size=3))
        if data.draw(st.booleans()):
            rng.shuffle(requests)
        with reading(plan, Slabs(count, size), FakeReader(), threads=threads) as ahead:
            for span in requests:
                copy = taken(ahead, span)
                assert copy is not None or requests != plan
                assert copy is None or torch.equal(copy, contents(span)), span

    @given(
        plan=st.lists(spans(), min_size=1, max_size=30),
        count=st.integers(2, 4),
        threads=st.integers(1, 4),
    )
    @settings(max_examples=40)
    def test_its_memory_is_never_exceeded(self, plan, count, threads):
        slabs, requested = Slabs(count, 200), 0
        exceeded = []

        def before(run: Sequence[Span]) -> None:
            if reader.nbytes > requested + slabs.nbytes:
                exceeded.append(run)

        reader = FakeReader(before)
        with reading(plan, slabs, reader, threads=threads) as ahead:
            for span in plan:
                requested += span.nbytes  # before: the slab is free at once
                assert taken(ahead, span) is not None
            assert ahead._memory is not None
            assert ahead._memory.nbytes == slabs.nbytes
        assert not exceeded
        assert reader.nbytes <= requested

    @given(layer=st.integers(0, 40_000_000_000))
    @example(layer=0)
    @example(layer=14_500_000_000)
    def test_its_memory_is_a_small_part_of_a_layer(self, layer):
        slabs = Slabs.of_layer(layer)
        assert slabs.count >= 2
        assert slabs.nbytes <= max(2 * _LEAST_SLAB_BYTES, min(_MOST_BYTES, layer // 16))

    @given(span=spans(), most=st.integers(1, 300))
    def test_pieces_are_the_span(self, span, most):
        pieces = list(span.pieces(most))
        assert all(piece.nbytes <= most for piece in pieces)
        assert torch.equal(torch.cat([contents(p) for p in pieces]), contents(span))

    def test_adjacent_bytes_are_read_at_once_and_in_the_order_of_the_file(self):
        runs: list[Sequence[Span]] = []
        parts = [Span("a", start, 10) for start in (20, 0, 10, 50)]
        with reading(parts, Slabs(2, 100), FakeReader(runs.append), threads=1) as ahead:
            assert all(taken(ahead, part) is not None for part in parts)
        assert [[span.offset for span in run] for run in runs] == [[0, 10, 20], [50]]

    @pytest.mark.parametrize("threads", [1, 4])
    @pytest.mark.parametrize("bad", [0, 7, 29])
    def test_an_error_of_a_reader_reaches_the_caller(self, bad, threads):
        plan, thread = in_rows(30), threading.current_thread()

        def before(run: Sequence[Span]) -> None:
            assert threading.current_thread() is not thread
            if plan[bad] in run:
                raise CheckpointError(f"cannot read {plan[bad].offset}")

        requested: list[int] = []

        def request_all() -> None:
            with reading(plan, Slabs(3, 60), FakeReader(before), threads=threads) as ahead:
                for number, span in enumerate(plan):
                    requested.append(number)
                    assert taken(ahead, span) is not None

        with pytest.raises(CheckpointError, match=f"cannot read {plan[bad].offset}"):
            request_all()
        assert requested[-1] == bad
        assert not readers()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
    def test_an_error_of_the_caller_ends_the_threads(self, error):
        """While readers read, and while they wait for a slab."""
        begun = threading.Event()
        reader, plan = FakeReader(lambda run: begun.set()), in_rows(30)
        ended: list[ReadAhead] = []

        def fail(waits: bool) -> None:
            with ReadAhead(plan, Slabs(3, 60), reader, device=CPU) as ahead:
                ended.append(ahead)
                assert len(readers()) >= 2
                if waits:
                    assert begun.wait(SECONDS)
                    taken(ahead, plan[4])
                raise error

        for waits in (False, True):
            with pytest.raises(error):
                fail(waits)
            assert not readers()
            assert ended[-1]._memory is None

    def test_readers_that_cannot_begin_are_not_waited_for(self):
        def fail() -> FakeReader:
            raise OSError("too many open files")

        def request() -> None:
            with ReadAhead(in_rows(30), Slabs(3, 60), fail, device=CPU) as ahead:
                taken(ahead, in_rows(30)[7])

        with pytest.raises(OSError, match="too many open files"):
            request()
        assert not readers()

    def test_threads_that_cannot_start_are_no_threads(self, monkeypatch):
        start, started = threading.Thread.start, []

        def start_two(thread: threading.Thread) -> None:
            if thread.name.startswith("dsv4 reader") and len(started) == 2:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_two)
        with (
            pytest.raises(RuntimeError, match="new thread"),
            ReadAhead(in_rows(30), Slabs(6, 60), FakeReader(), device=CPU, threads=4),
        ):
            raise AssertionError("it began")
        assert not readers()


class TestOverlap:
    """Tests that fail if reading is serial: threads wait for what only others can do meanwhile."""

    def test_readers_read_at_the_same_time(self):
        together = threading.Barrier(2)

        def before(run: Sequence[Span]) -> None:
            if run[0] in plan[:2]:
                together.wait(SECONDS)

        plan = in_rows(10)
        with reading(plan, Slabs(4, 60), FakeReader(before), threads=2) as ahead:
            assert all(taken(ahead, span) is not None for span in plan)

    def test_the_caller_works_while_later_bytes_are_read(self):
        later = threading.Event()
        plan = in_rows(10)

        def before(run: Sequence[Span]) -> None:
            if plan[1] in run:
                later.set()

        with reading(plan, Slabs(2, 60), FakeReader(before), threads=1) as ahead:
            assert taken(ahead, plan[0]) is not None
            assert later.wait(SECONDS), "nothing was read while the caller worked"

    def test_a_load_reads_the_next_layers_while_one_is_filled(self, tmp_path, monkeypatch):
        saved(make_model(), tmp_path)
        reads = Reads(monkeypatch)
        fill_slot, ahead = LinearSlot.fill, []

        def slow_fill(slot: LinearSlot, entries: Any, options: Any) -> None:
            fill_slot(slot, entries, options)
            if slot.name.startswith("model.layers.0.") and all(ahead):
                requested = entries[slot.name].shards.bytes_read
                ahead.append(reads.wait_for_more_than(requested))

        monkeypatch.setattr(LinearSlot, "fill", slow_fill)
        loaded_ahead(tmp_path)
        assert ahead
        assert all(ahead)
        assert reads.most_at_once >= 2


class Reads:
    """Counts what is read, by which threads, and how many at the same time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_readers = self.by_caller = self.most_at_once = self.at_once = 0
        self.changed = threading.Condition()
        self.waited = False
        self.read = ShardReader.read
        monkeypatch.setattr(
            ShardReader, "read", lambda reader, run, memory: self.count(reader, run, memory)
        )

    def count(self, reader: ShardReader, run: Sequence[Span], memory: torch.Tensor) -> None:
        is_reader = threading.current_thread() in readers()
        with self.changed:
            self.at_once += is_reader
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.changed.notify_all()
            if is_reader and not self.waited:  # for a second one, once
                self.waited = True
                self.changed.wait_for(lambda: self.most_at_once >= 2, SECONDS)
        self.read(reader, run, memory)
        with self.changed:
            self.at_once -= is_reader
            self.by_readers += memory.nbytes * is_reader
            self.by_caller += memory.nbytes * (not is_reader)
            self.changed.notify_all()

    def wait_for_more_than(self, nbytes: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.by_readers > nbytes, SECONDS)


class TestLoads:
    @pytest.mark.parametrize("layout", [*LAYOUTS, "calibrated"])
    def test_everything_is_read_once_and_ahead(self, layout, tmp_path, monkeypatch):
        """The plan is what is requested: a pass that reads otherwise is slower."""
        if layout == "calibrated":
            calibrated(tmp_path)
        else:
            saved(make_model(), tmp_path, layout=layout)
        model = make_model()
        for work in (
            lambda: loaded_ahead(tmp_path).load_report.bytes_read,
            lambda: loaded_ahead(tmp_path, input_scales="token").load_report.bytes_read,
            lambda: verified(tmp_path),
        ):
            reads = Reads(monkeypatch)
            nbytes = work()
            assert reads.by_readers == nbytes
            # The second look at input scales and at the tables of hash layers.
            assert reads.by_caller < 0.01 * nbytes
            monkeypatch.undo()
        with Checkpoint.open(tmp_path) as checkpoint:
            fill_module(model, checkpoint, AHEAD)
        assert not readers()

    @pytest.mark.parametrize("layout", ["nvidia", "deepseek", "bf16"])
    def test_the_values_are_those_of_a_load_that_does_not(self, layout, tmp_path, monkeypatch):
        saved(make_model(), tmp_path, layout=layout, max_shard_bytes=60_000)
        with torch.inference_mode():
            inferring = state(loaded_ahead(tmp_path))
        assert_same_state(inferring, state(loaded_ahead(tmp_path)))
        reads = Reads(monkeypatch)
        assert_same_state(state(load(tmp_path, progress=False)), inferring)
        assert verify(tmp_path, progress=False) > 0
        assert reads.by_readers == 0

    def test_threads_read_for_a_gpu_and_not_for_a_cpu(self):
        """A load to a CPU took 23 % longer through slabs, and a check of all values 40 %."""
        request = FillRequest()
        assert request.reads_ahead(torch.device("cuda"))
        assert not request.reads_ahead(CPU)

    def test_a_rank_reads_nothing_of_the_others(self, tmp_path, monkeypatch):
        """Of a matrix that is split by columns whole rows, of which its columns are counted."""
        saved(model_of_ranks(WIDE, torch.bfloat16), tmp_path, layout="nvidia")
        reads = Reads(monkeypatch)

        def work(context: Any) -> int:
            return loaded_ahead(tmp_path, context).load_report.bytes_read

        counted = sum(run_ranks(2, work))
        assert reads.by_readers == pytest.approx(counted, rel=0.01)
        assert reads.by_caller <= 0.01 * counted

    def test_a_file_that_breaks_off_while_it_is_read(self, tmp_path, monkeypatch):
        """The error names file and tensor, comes from the caller's thread, and ends the others."""
        saved(make_model(), tmp_path, max_shard_bytes=60_000)
        victim = sorted(tmp_path.glob("*.safetensors"))[-1]
        with Checkpoint.open(tmp_path) as checkpoint:
            sound = victim.read_bytes()
            victim.write_bytes(sound[:-100])
            model = make_model(seed=1)
            before = state(model)
            with pytest.raises(CheckpointError, match=rf"{victim.name}: has changed .* when .*\("):
                fill_module(model, checkpoint, AHEAD)
            assert_same_state(state(model), before)
        assert not readers()

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
    def test_an_interrupt_leaves_nothing_behind(self, tmp_path, monkeypatch):
        saved(make_model(), tmp_path)
        fill_slot = LinearSlot.fill
        opened: list[int] = []

        def interrupted(slot: LinearSlot, entries: Any, options: Any) -> None:
            fill_slot(slot, entries, options)
            if slot.name.startswith("model.layers.1."):
                opened.append(len(open_files(tmp_path)))
                raise KeyboardInterrupt

        monkeypatch.setattr(LinearSlot, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loaded_ahead(tmp_path)
        assert opened[0]
        assert open_files(tmp_path) == []
        assert not readers()


def open_files(folder: Path) -> list[str]:
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith(str(folder))]


class TestShards:
    @given(
        shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
        dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
        seed=strategies.seeds(),
        scratch=st.sampled_from([1, 16, 4 << 20]),
        is_ahead=st.booleans(),
    )
    @settings(max_examples=40)
    def test_parts_are_those_of_the_tensor(
        self, tmp_path_factory, shape, dtype, seed, scratch, is_ahead
    ):
        """Windows on any axis, of a whole tensor and of a matrix of a stack."""
        folder, rng = tmp_path_factory.mktemp("parts"), random.Random(seed)
        whole = torch.randint(0, 120, shape, dtype=torch.uint8).to(dtype)
        other = torch.arange(7, dtype=torch.uint8)
        save_file({"whole": whole, "other": other, "none": other[:0]}, folder / "a.safetensors")
        header = read_header(folder / "a.safetensors")
        axis = rng.randrange(len(shape))
        start = rng.randrange(shape[axis])
        window = Window(axis, start, rng.randint(start + 1, shape[axis]))
        cut = raw(whole).view(*shape, -1)[window.index]
        info = header["whole"].part(window)
        readings = [Reading(info), Reading(header["other"]), Reading(header["none"])]
        readings += [Reading(info, number) for number in range(info.shape[0])]
        source = Shards(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "_SCRATCH_BYTES", scratch)
            with source.reading_ahead(readings if is_ahead else [], Slabs(2, 32), CPU):
                first, second, third = (source.read(reading.tensor) for reading in readings[:3])
                assert torch.equal(raw(first).view(cut.shape), cut)
                assert torch.equal(second, other)
                assert third.numel() == 0
                for number in range(info.shape[0]):
                    matrix = source.read(info, part=number)
                    assert torch.equal(raw(matrix).view(cut[number].shape), cut[number])
        source.close()
        assert source.bytes_read == 2 * first.nbytes + 7

    def test_processes_may_share_a_file_that_is_open(self, tmp_path):
        """Its position is theirs in common after a fork, so that reading must not depend on it."""
        save_file({"x": torch.rand(100)}, tmp_path / "a.safetensors")
        source = Shards(tmp_path)
        source.read(read_header(tmp_path / "a.safetensors")["x"])
        assert source._reader._file is not None
        assert source._reader._file.tell() == 0 or not hasattr(os, "preadv")

    def test_a_file_shorter_than_its_header_says(self, tmp_path):
        path = tmp_path / "a.safetensors"
        save_file({"x": torch.rand(100), "y": torch.rand(100)}, path)
        header = read_header(path)
        path.write_bytes(path.read_bytes()[:-4])
        last = replace(max(header.values(), key=lambda info: info.offset), mark=None)
        with pytest.raises(CheckpointError, match=rf"a\.safetensors: has changed .* {last.name} "):
            Shards(tmp_path).read(last)

    def test_an_error_of_the_disk_names_the_tensor(self, tmp_path):
        path = tmp_path / "a.safetensors"
        save_file({"x": torch.rand(100)}, path)
        info = replace(read_header(path)["x"], mark=None)
        path.unlink()
        path.mkdir()
        message = r"a\.safetensors: x \(F32 \[100\]\) cannot be read: .*directory"
        with pytest.raises(CheckpointError, match=message):
            Shards(tmp_path).read(info)

    @pytest.mark.parametrize("ahead", [False, True])
    def test_a_file_that_is_written_over_is_noticed(self, tmp_path, ahead):
        path = tmp_path / "a.safetensors"
        save_file({"x": torch.rand(1000), "y": torch.rand(1000)}, path)
        header = read_header(path)
        source = Shards(tmp_path)
        source.read(header["x"])
        with path.open("r+b") as file:  # the same file, which is open already
            file.seek(-4, os.SEEK_END)
            file.write(b"1234")
        os.utime(path, ns=(1, 1))
        plan = [Reading(header["y"])] if ahead else []
        with (
            pytest.raises(CheckpointError, match="has changed since it was opened, when y"),
            source.reading_ahead(plan, Slabs(2, 5000), CPU),
        ):
            source.read(header["y"])
        source.close()


@pytest.mark.gpu
class TestOnTheGpu:
    def test_a_slab_is_not_written_before_it_is_copied(self):
        """The device is kept busy, so that copies wait while readers want their slabs."""
        device = torch.device("cuda", torch.cuda.current_device())
        plan = in_rows(60)
        targets = [torch.zeros(span.nbytes, dtype=torch.uint8, device=device) for span in plan]
        with ReadAhead(plan, Slabs(3, 50), FakeReader(), device=device, threads=3) as ahead:
            assert ahead._pinned
            for number, (span, target) in enumerate(zip(plan, targets, strict=True)):
                if number % 7 == 0:
                    torch.cuda._sleep(20_000_000)
                assert ahead.copy_to(span, target)
        assert not readers()
        for span, target in zip(plan, targets, strict=True):
            assert torch.equal(target.cpu(), contents(span))

    def test_a_slab_is_copied_by_several_streams(self):
        """Its first copies wait on a stream that is not the current one when it becomes free."""
        device = torch.device("cuda", torch.cuda.current_device())
        plan = in_rows(60)
        targets = [torch.zeros(span.nbytes, dtype=torch.uint8, device=device) for span in plan]
        busy, idle = torch.cuda.Stream(device), torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        with ReadAhead(plan, Slabs(3, 100), FakeReader(), device=device, threads=3) as ahead:
            for number, (span, target) in enumerate(zip(plan, targets, strict=True)):
                with torch.cuda.stream(idle if number % 2 else busy):
                    if number % 14 == 0:
                        torch.cuda._sleep(20_000_000)
                    assert ahead.copy_to(span, target)
        torch.cuda.synchronize(device)
        for span, target in zip(plan, targets, strict=True):
            assert torch.equal(target.cpu(), contents(span))

    def test_values_for_a_gpu_are_read_ahead(self, tmp_path, monkeypatch):
        """Those of ``load``, and of ``fill`` for a model that is there."""
        saved(make_model(), tmp_path)
        model = make_model().cuda()

        def fill_there() -> None:
            with Checkpoint.open(tmp_path) as checkpoint:
                fill(model, checkpoint, check_values=False, progress=False)

        for work in (
            lambda: load(tmp_path, device="cuda", progress=False, prepare=False, reserve_tokens=0),
            fill_there,
        ):
            reads = Reads(monkeypatch)
            work()
            assert reads.by_readers > 0.9 * (reads.by_readers + reads.by_caller)
            monkeypatch.undo()
        assert not readers()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_values_are_those_on_the_cpu(self, tmp_path, layout):
        saved(make_model(), tmp_path, layout=layout)
        options: Any = {"progress": False, "prepare": False, "pack": False, "mxfp4": "keep"}
        for _ in range(3):
            model = load(tmp_path, device="cuda", reserve_tokens=0, **options)
            assert_same_state(state(model.cpu()), state(load(tmp_path, **options)))
        assert not readers()
