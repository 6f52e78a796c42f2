"""Read what a load needs next in threads, into a fixed amount of memory.

The memory is a ring of slabs. A plan lists the bytes in the order in which they will be requested;
it is cut into batches, each of which fits a slab. Reader threads take the next batch as soon as a
slab is free, and read it in the order of the file, adjacent tensors at once. The owner copies from
the slabs, on a GPU without waiting: a slab is free when the copies from it have ended.

- Only the owner's thread calls ``copy_to`` and ``close``; threads share ``_changed`` and what it
  guards. Bytes of a slab belong to a reader from ``_next`` until its batch is ready, then to the
  owner until ``_release``.
- A request for later bytes gives up the batches before: whatever the order of requests, the plan
  goes on, and no request waits for a slab that only a later request would free.
- ``close`` ends and joins the threads, also after an error or an interrupt.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from dsv4.layers import _host_memory

_logger = logging.getLogger("dsv4.checkpoint")
# Of the largest layer, so that memory holds the model and much less than a layer more: 240 MB of
# Flash, whose layers have 3.9 GB. Readers go on for 30 to 50 ms while a layer is packed.
_SHARE_OF_LAYER = 16
_MOST_BYTES = 512 << 20
_MOST_SLAB_BYTES = 16 << 20  # some 5 ms of one reader: Python's share of a batch is small then
_LEAST_SLAB_BYTES = 1 << 10
_THREADS = 8

_Copied = tuple[torch.cuda.Event, ...]  # the last use of a slab has ended after these


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file: rows of one length at equal distances.

    Attributes:
        file: The file's name.
        offset: Position of the first byte.
        row_bytes: Bytes of a row.
        rows: Number of rows; a single one if the rows are adjacent.
        stride: Bytes from row to row.
        tensor: The tensor whose bytes they are, for the reader and its messages.
    """

    file: str
    offset: int
    row_bytes: int
    rows: int = 1
    stride: int = 0
    tensor: Any = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.rows * self.row_bytes

    def pieces(self, most: int) -> Iterator[Span]:
        """Yield spans of at most ``most`` bytes that make up this one, in its order."""
        if self.nbytes <= most:
            yield self
        elif self.rows == 1:
            for start in range(0, self.row_bytes, most):
                size = min(most, self.row_bytes - start)
                yield replace(self, offset=self.offset + start, row_bytes=size)
        else:
            step = max(1, most // self.row_bytes)
            for row in range(0, self.rows, step):
                count = min(step, self.rows - row)
                stride = self.stride if count > 1 else 0
                first = self.offset + row * self.stride
                yield from replace(self, offset=first, rows=count, stride=stride).pieces(most)

    def continues(self, before: Span) -> bool:
        """Return whether these bytes follow those of another span in a file."""
        adjacent = self.offset == before.offset + before.row_bytes
        return adjacent and self.rows == before.rows == 1 and self.file == before.file


class Reader(Protocol):
    """Reads spans, in one thread."""

    def read(self, run: Sequence[Span], memory: torch.Tensor) -> None:
        """Read one span, or several adjacent ones, to ``memory``, uint8 of their size."""


@dataclass(frozen=True)
class Slabs:
    """The memory of a read-ahead.

    Attributes:
        count: Number of slabs.
        slab_bytes: Bytes of a slab.
    """

    count: int
    slab_bytes: int

    @classmethod
    def of_layer(cls, layer_bytes: int) -> Slabs:
        """Return the slabs for a model whose largest layer has this many bytes."""
        budget = min(_MOST_BYTES, layer_bytes // _SHARE_OF_LAYER)
        size = max(_LEAST_SLAB_BYTES, min(_MOST_SLAB_BYTES, budget // (2 * _THREADS)))
        return cls(max(2, budget // size), size)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return self.count * self.slab_bytes


@dataclass(eq=False, slots=True)
class _Batch:
    """Spans that are read to one slab.

    Attributes:
        positions: Position in the slab of each span.
        runs: Adjacent spans, in the order of the file.
        left: Number of requests to come.
        slab: Its slab; None: it has none yet, or no longer.
        ready: Whether a reader is done with it.
        dropped: Whether nobody will request it.
        error: Why it could not be read, or None.
        streams: Streams that copy from its slab.
    """

    positions: dict[Span, int]
    runs: list[list[Span]]
    left: int
    slab: int | None = None
    ready: bool = False
    dropped: bool = False
    error: BaseException | None = None
    streams: set[torch.cuda.Stream] = field(default_factory=set)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> _Batch:
        """Return the batch of spans in the order of requests, some perhaps more than once."""
        positions: dict[Span, int] = {}
        runs: list[list[Span]] = []
        stop = 0
        for span in sorted(set(spans), key=lambda span: (span.file, span.offset)):
            positions[span] = stop
            stop += span.nbytes
            if runs and span.continues(runs[-1][-1]):
                runs[-1].append(span)
            else:
                runs.append([span])
        return cls(positions, runs, len(spans))


class ReadAhead:
    """Bytes that are read before they are requested; a context manager that owns its threads.

    Args:
        plan: The spans in the order of requests, none larger than a slab.
        slabs: The memory.
        open_reader: Makes the reader of a thread; closing it closes its files.
        device: Device of the copies; on a GPU the slabs are page-locked if that is possible.
        threads: Number of readers; None: the number of CPUs, at most 8.
    """

    def __init__(
        self,
        plan: Sequence[Span],
        slabs: Slabs,
        open_reader: Callable[[], AbstractContextManager[Reader]],
        *,
        device: torch.device,
        threads: int | None = None,
    ) -> None:
        self.slabs = slabs
        self._batches = list(_batches(plan, slabs.slab_bytes))
        self._numbers = _numbers_of(plan, self._batches)
        self._open_reader = open_reader
        self._device = device
        self._pinned = False
        self._memory: torch.Tensor | None = None
        self._changed = threading.Condition()
        self._free: deque[tuple[int, _Copied]] = deque()
        self._started = 0  # batches that readers took or passed over
        self._first = 0  # the first batch that may be requested
        self._closed = False
        self._error: BaseException | None = None  # why a thread ended before its work
        count = min(_cpus(), _THREADS) if threads is None else threads
        count = min(count, slabs.count, len(self._batches))
        self._threads = [
            threading.Thread(target=self._work, name=f"dsv4 reader {number}", daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> ReadAhead:
        try:
            self._memory = self._allocated()
            self._free.extend((slab, ()) for slab in range(self.slabs.count))
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def copy_to(self, span: Span, target: torch.Tensor) -> bool:
        """Copy the bytes of a span to ``target``, uint8 of its size, and forget them.

        On the device of the slabs the copy is a part of its current stream.

        Returns:
            False if the span is not among those to come; nothing was copied then.

        Raises:
            BaseException: what the reader of these bytes raised.
        """
        with self._changed:
            batch = self._batch_with(span)
            if batch is None:
                return False
            while not batch.ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            if batch.error is not None:
                raise batch.error
        assert batch.slab is not None
        assert self._memory is not None
        position = batch.positions[span]
        source = self._memory[batch.slab, position : position + span.nbytes]
        is_own = self._pinned and target.device == self._device
        if is_own:
            batch.streams.add(torch.cuda.current_stream(self._device))
        target.copy_(source, non_blocking=is_own)
        batch.left -= 1
        if not batch.left:
            with self._changed:
                self._release(batch)
        return True

    def close(self) -> None:
        """End the threads, and free the memory; bytes that were not requested are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        try:
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()
        finally:
            memory, self._memory = self._memory, None
            if memory is not None and self._pinned:
                _host_memory.release(memory, self._device)

    def _allocated(self) -> torch.Tensor:
        """Return the slabs, uint8 ``[count, bytes]``."""
        nbytes = self.slabs.nbytes
        if self._device.type == "cuda":
            try:
                if self._device.index is None:
                    self._device = torch.device("cuda", torch.cuda.current_device())
                memory = _host_memory.allocate(nbytes, self._device)
                self._pinned = True
            except MemoryError as error:
                _logger.info("loading goes on without page-locked memory: %s", error)
        if not self._pinned:
            with torch.inference_mode(False):  # in which threads are not
                memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return memory.view(self.slabs.count, self.slabs.slab_bytes)

    def _batch_with(self, span: Span) -> _Batch | None:
        """Return the batch of the next request of a span, and give up the batches before it."""
        numbers = self._numbers.get(span, ())
        while numbers and numbers[0] < self._first:
            numbers.popleft()
        if not numbers:
            return None
        number = numbers.popleft()
        while self._first < number:
            self._drop(self._batches[self._first])
            self._first += 1
        return self._batches[number]

    def _drop(self, batch: _Batch) -> None:
        batch.dropped = True
        if batch.ready:  # a reader that is not done with it yet gives its slab back
            self._release(batch)

    def _release(self, batch: _Batch) -> None:
        """Give the slab of a batch to the readers, who wait until the copies from it have ended."""
        self._give_back(batch, tuple(stream.record_event() for stream in batch.streams))

    def _give_back(self, batch: _Batch, copied: _Copied) -> None:
        if batch.slab is not None:
            self._free.append((batch.slab, copied))
            batch.slab = None
            self._changed.notify_all()

    def _work(self) -> None:
        """Read batches until there are no more; the body of a thread."""
        try:
            if self._pinned:  # waiting for an event would make a context on device 0
                torch.cuda.set_device(self._device)
            with self._open_reader() as reader:
                while (task := self._next()) is not None:
                    self._read(*task, reader)
        except BaseException as error:  # the owner raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _read(self, batch: _Batch, copied: _Copied, reader: Reader) -> None:
        try:
            for event in copied:
                event.synchronize()
            self._fill(batch, reader)
        except BaseException as error:  # the owner raises it
            batch.error = error
        with self._changed:
            batch.ready = True
            if batch.dropped:
                self._give_back(batch, ())
            self._changed.notify_all()

    def _next(self) -> tuple[_Batch, _Copied] | None:
        """Wait for a slab, and return the batch to read, and what ends the slab's last use.

        None: there is no more.
        """
        with self._changed:
            while True:
                self._started = max(self._started, self._first)
                if self._closed or self._started == len(self._batches):
                    return None
                if self._free:
                    break
                self._changed.wait()
            batch = self._batches[self._started]
            self._started += 1
            batch.slab, copied = self._free.popleft()
            return batch, copied

    def _fill(self, batch: _Batch, reader: Reader) -> None:
        assert batch.slab is not None
        assert self._memory is not None
        slab = self._memory[batch.slab]
        for run in batch.runs:
            if self._closed or batch.dropped:
                return
            start, last = batch.positions[run[0]], run[-1]
            reader.read(run, slab[start : batch.positions[last] + last.nbytes])


def _batches(plan: Sequence[Span], most: int) -> Iterator[_Batch]:
    """Yield batches of consecutive spans, each of at most ``most`` bytes."""
    spans: list[Span] = []
    size = 0
    for span in plan:
        assert span.nbytes <= most, f"{span} has more than {most} bytes"
        if size + span.nbytes > most:
            yield _Batch.of(spans)
            spans, size = [], 0
        spans.append(span)
        size += span.nbytes
    if spans:
        yield _Batch.of(spans)


def _numbers_of(plan: Sequence[Span], batches: Sequence[_Batch]) -> dict[Span, deque[int]]:
    """Return the numbers of the batches in which each span is requested, ascending."""
    numbers: dict[Span, deque[int]] = {}
    spans = iter(plan)
    for number, batch in enumerate(batches):
        for _ in range(batch.left):
            numbers.setdefault(next(spans), deque()).append(number)
    return numbers


def _cpus() -> int:
    """Return the number of CPUs that this process may use, at least 2."""
    if hasattr(os, "sched_getaffinity"):
        return max(2, len(os.sched_getaffinity(0)))
    return max(2, os.cpu_count() or 2)
