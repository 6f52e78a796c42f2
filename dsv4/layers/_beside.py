"""Work on other CUDA streams, beside what follows on the current one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from dsv4._leaving import leaving

_FEW = 64  # tokens of a step that are launched more slowly than they run
Result = TypeVar("Result", bound="torch.Tensor | None")


def started(
    work: Callable[[torch.Tensor], Result], x: torch.Tensor, lane: int = 1
) -> Callable[[], Result]:
    """``beside`` with a function as result in any case."""
    out = beside(work, x, lane=lane)
    return out if callable(out) else done(out)


def done(out: Result) -> Callable[[], Result]:
    """What ``started`` returns of work whose result is there."""
    return lambda: out


def beside(
    work: Callable[[torch.Tensor], Result], x: torch.Tensor, leave: int = 0, lane: int = 1
) -> Result | Callable[[], Result]:
    """Start ``work(x)`` on a stream beside the current one.

    That stream waits for what the current one has been given so far, so ``x`` is ready. The caller
    keeps ``x`` until it has called the result: no tensor that the other stream reads may be freed
    before. Works of one lane that are started one after another follow one another there.

    Args:
        work: A module, or another function that gives one tensor or None.
        x: Its input.
        leave: SMs that its products of many tokens leave to the current stream.
        lane: Number of the other stream.

    Returns:
        A function that lets the current stream wait for this work and gives the tensor. Where there
        is no other stream, on the CPU, under ``torch.compile`` and for subclasses of ``Tensor``,
        the tensor itself.
    """
    if not possible(x):
        return work(x)
    current, side = _streams(x, lane)
    side.wait_stream(current)
    with torch.cuda.stream(side), leaving(leave):
        out = work(x)
    return functools.partial(_joined, current, side.record_event(), out)


def beside_in_two(
    first: Callable[[torch.Tensor], torch.Tensor],
    second: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    leave: int = 0,
) -> tuple[Callable[[], None] | None, torch.Tensor | Callable[[], torch.Tensor]]:
    """``beside`` of ``second(first(x))``, of which the second part waits to be let go.

    Args:
        first: As ``work``.
        second: What follows it.
        x: As there.
        leave: As there.

    Returns:
        A function that starts ``second``, once, behind what the current stream has been given when
        it is called, None where there is no second stream; and what ``beside`` returns, not to be
        called before.
    """
    if not possible(x):
        return None, second(first(x))
    current, side = _streams(x)
    side.wait_stream(current)
    with torch.cuda.stream(side), leaving(leave):
        inner: list[torch.Tensor] = [first(x)]
    found: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def go_on() -> None:
        side.wait_stream(current)
        with torch.cuda.stream(side), leaving(leave):
            out = second(inner.pop())
        found.append((side.record_event(), out))

    return go_on, lambda: _joined(current, *found.pop())


def _joined(current: torch.cuda.Stream, ended: torch.cuda.Event, out: Result) -> Result:
    """What the other stream gave, after the current one's wait for it."""
    current.wait_event(ended)
    # The memory belongs to the other stream, which may be given it again once it is freed; the
    # current one reads it still. While a graph is captured nobody else uses these streams, the
    # other one waits for the current one before its next work, and marking the memory would
    # keep it from being used again in the whole graph.
    if out is not None and not torch.cuda.is_current_stream_capturing():
        out.record_stream(current)
    return out


def _streams(x: torch.Tensor, lane: int = 1) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The current stream and one beside it."""
    current = torch.cuda.current_stream(x.device)
    return current, _stream(current.device_index, current.cuda_stream, lane)


def is_few(tokens: int) -> bool:
    """Whether a step of so many tokens is launched more slowly than it runs."""
    return tokens <= _FEW


def possible(x: torch.Tensor) -> bool:
    """Whether a second stream is used: not for tensors that stand for others, as fake ones.

    Nor for few tokens unless a graph is being captured: the host then takes longer to launch
    kernels than the GPU to run them, and streams would only take it longer.
    """
    if torch.compiler.is_compiling() or not x.is_cuda or type(x) is not torch.Tensor:
        return False
    few = is_few(x.numel() // max(1, x.shape[-1]))
    return not few or torch.cuda.is_current_stream_capturing()


@functools.cache
def _stream(device: int, current: int, lane: int) -> torch.cuda.Stream:
    """A stream beside another, made on first use.

    One for each, so that work of several streams, or a graph captured on one, does not meet here.
    """
    return torch.cuda.Stream(device)
