"""When the decode steps of a call began, seen from outside.

``generate`` returns all tokens at once. Its steps are forwards of the decoder stack or replays of
CUDA graphs, and both are noticed here without changing what they do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from dsv4.model import DeepseekV4ForCausalLM

FORWARD = 0


@dataclass(frozen=True)
class Mark:
    """Something that began.

    Attributes:
        what: ``FORWARD``, or the identity of a graph that was replayed.
        tokens: Of the forward; 0 for a replay.
        seconds: Reading of ``time.perf_counter``.
    """

    what: int
    tokens: int
    seconds: float


@contextmanager
def marked(model: DeepseekV4ForCausalLM) -> Iterator[list[Mark]]:
    """Within it, the list gets a mark for every forward and every replay."""
    marks: list[Mark] = []
    replay = torch.cuda.CUDAGraph.replay

    def replayed(graph: torch.cuda.CUDAGraph) -> None:
        marks.append(Mark(id(graph), 0, time.perf_counter()))
        replay(graph)

    def forward(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        marks.append(Mark(FORWARD, inputs[0].numel(), time.perf_counter()))

    handle = model.model.register_forward_pre_hook(forward)
    try:
        with mock.patch.object(torch.cuda.CUDAGraph, "replay", replayed):
            yield marks
    finally:
        handle.remove()


def decode_ms(marks: Sequence[Mark], sequences: int, skip: int, steps: int) -> float | None:
    """Median milliseconds between decode steps of all sequences; None if there are too few.

    Forwards of more tokens than sequences process prompts. What follows the last of them, a forward
    or the replay of one graph, is the step; a second graph that samples follows each replay.

    Args:
        marks: Of a whole call.
        sequences: That decode together.
        skip: Steps left out after the prompts.
        steps: That are timed.
    """
    prompts = [i for i, mark in enumerate(marks) if mark.tokens > sequences]
    after = marks[prompts[-1] + 1 :] if prompts else marks
    times = [mark.seconds for mark in after if mark.what == after[0].what]
    times = times[skip : skip + steps + 1]
    if len(times) < steps + 1:
        return None
    return 1e3 * statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
