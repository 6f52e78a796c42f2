"""Side streams: named work that overlaps with the current CUDA stream.

A forward asks for its streams once (``side_streams``), launches work on them by name and joins it
where the current stream needs the results:

    streams = side_streams(x)
    with streams.on("index"):
        weights = head_weights(x)
    q = project(x)  # on the current stream, at the same time
    streams.join("index", weights)

Where no side stream is used, the same statements run in the order in which they stand. Captured
into a CUDA graph, ``on`` is a fork of the graph and ``join`` is where its branch ends.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

# Tokens up to which the host launches the kernels of a step more slowly than the GPU runs them.
_LAUNCH_BOUND_TOKENS = 64
_DISTANT = 64  # more than the side streams of any layer


class Streams:
    """No side streams: work runs on the current stream, in program order."""

    def on(self, name: str, *, behind: str | None = None) -> AbstractContextManager[None]:
        """Launch the work ``name`` inside the block.

        Args:
            name: Name of the work, for ``join``.
            behind: Name of earlier work, whose stream this work continues; None: its own stream.
        """
        return nullcontext()

    def join(self, name: str, *results: torch.Tensor) -> None:
        """Make the current stream wait for the work ``name``.

        Args:
            name: Name of the work.
            *results: Tensors that this work made and the current stream reads.
        """


class _Work(NamedTuple):
    """Launched work: its stream, and the event that marks its end there."""

    stream: torch.cuda.Stream
    end: torch.cuda.Event


class SideStreams(Streams):
    """Side streams of one forward.

    A side stream waits for what the current stream was given before the block, so everything made
    before is ready inside. No tensor that the block reads may be freed before its ``join``: the
    caller keeps them in local variables.
    """

    def __init__(self, current: torch.cuda.Stream, first: int = 0) -> None:
        """Fork from ``current``; streams are made when work is launched.

        Args:
            current: The stream.
            first: Number of streams that are left to other forks of ``current``.
        """
        self._current = current
        self._works: dict[str, _Work] = {}
        self._count = first

    @contextmanager
    def on(self, name: str, *, behind: str | None = None) -> Iterator[None]:
        """Launch the work ``name`` inside the block; see ``Streams.on``.

        Raises:
            KeyError: if no work ``behind`` was launched.
        """
        side = self._next_stream() if behind is None else self._works[behind].stream
        side.wait_stream(self._current)
        with torch.cuda.stream(side):
            yield
        self._works[name] = _Work(side, side.record_event())

    def _next_stream(self) -> torch.cuda.Stream:
        self._count += 1
        return _side_stream(self._current.device_index, self._current.cuda_stream, self._count)

    def join(self, name: str, *results: torch.Tensor) -> None:
        """Make the current stream wait for the work ``name``; see ``Streams.join``.

        Raises:
            KeyError: if no such work was launched.
        """
        self._current.wait_event(self._works[name].end)
        # The results' memory belongs to the side stream, which may be given it again once it is
        # freed, while the current stream still reads it. During a capture nobody else uses these
        # streams, the side stream waits for the current one before its next work, and marking the
        # memory would keep it from being used again in the whole graph.
        if not torch.cuda.is_current_stream_capturing():
            for tensor in results:
                tensor.record_stream(self._current)


IN_ORDER = Streams()


def side_streams(x: torch.Tensor) -> Streams:
    """Side streams of the current stream on the device of ``x``, or ``IN_ORDER``.

    Args:
        x: Input of the forward, ``[..., D]``.
    """
    if not uses_side_streams(x):
        return IN_ORDER
    return SideStreams(torch.cuda.current_stream(x.device))


def distant_streams(tensor: torch.Tensor) -> Streams | None:
    """Side streams that no layer uses, for work of several layers; None outside of a capture.

    Args:
        tensor: A tensor on the device.
    """
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return None
    if not torch.cuda.is_current_stream_capturing():
        return None
    return SideStreams(torch.cuda.current_stream(tensor.device), _DISTANT)


def uses_side_streams(x: torch.Tensor) -> bool:
    """Return whether a forward of ``x`` uses side streams.

    Not on the CPU, under ``torch.compile`` or for subclasses of ``Tensor``, as fake tensors. Nor
    for few tokens unless a graph is being captured: the host then takes longer to launch kernels
    than the GPU to run them, and side streams would only take it longer.
    """
    if torch.compiler.is_compiling() or not x.is_cuda or type(x) is not torch.Tensor:
        return False
    is_bound = is_launch_bound(x.numel() // max(1, x.shape[-1]))
    return not is_bound or torch.cuda.is_current_stream_capturing()


def is_launch_bound(tokens: int) -> bool:
    """Return whether the host launches a step of ``tokens`` more slowly than the GPU runs it."""
    return tokens <= _LAUNCH_BOUND_TOKENS


@functools.cache
def _side_stream(device: int, current: int, number: int) -> torch.cuda.Stream:
    """Side stream ``number`` of the stream ``current`` (the driver's handle), made on first use.

    Each stream has side streams of its own, so that work of several streams, or a graph captured on
    one of them, does not meet here. Forwards share them by number, and so share their memory.
    """
    return torch.cuda.Stream(device)
